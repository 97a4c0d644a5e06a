//! What a worker says of itself before it is used: whether it is what the command line takes it for.
//!
//! Only what is told is checked: other engines tell less, take long to tell it, or guard the path with a key.

use crate::cluster::kinds::Kind;
use crate::cluster::router::Role;
use crate::limits::MODEL_NAME_MAX;
use serde::Deserialize;
use serde_json::Value;

/// Where workers are asked.
pub const PATH: &str = "/server_info";

/// The fields of [`PATH`]'s answer that matter here.
#[derive(Deserialize)]
struct Told {
    disaggregation_mode: Option<Value>,
    disaggregation_bootstrap_port: Option<Value>,
}

/// What a worker tells of its hand-offs: by that it is paired.
pub fn kind(answer: &[u8]) -> Kind {
    #[derive(Deserialize)]
    struct Told {
        handoff: Option<Value>,
    }
    let told = serde_json::from_slice::<Told>(answer).ok();
    told.and_then(|told| told.handoff).map_or(Kind::default(), |handoff| Kind::told(&handoff))
}

/// Whether a worker tells that it reads prompts where no prefill worker is left.
pub fn reads_alone(answer: &[u8]) -> bool {
    let told = serde_json::from_slice::<Value>(answer).ok();
    told.is_some_and(|told| told["handoff"]["local_prefill"] == true)
}

/// The name that a worker's clients use for its model, if it tells one.
pub fn model(answer: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Told {
        served_model_name: Option<String>,
    }
    let told = serde_json::from_slice::<Told>(answer).ok()?;
    told.served_model_name.filter(|name| name.len() <= MODEL_NAME_MAX)
}

/// The port of its registry, if a worker tells one.
pub fn bootstrap_port(answer: &[u8]) -> Option<u16> {
    let told = serde_json::from_slice::<Told>(answer).ok()?.disaggregation_bootstrap_port?.as_u64()?;
    u16::try_from(told).ok().filter(|&port| port > 0)
}

/// What an introduction comes to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Nothing speaks against the worker.
    Fits,
    /// It may work: where ports are mapped, say.
    Doubtful(String),
    /// It cannot serve in this role.
    Unfit(String),
}

/// Judges an answer of a worker that is to play `role`, its registry at `bootstrap_port` where that was given.
pub fn judge(role: Role, bootstrap_port: Option<u16>, answer: &[u8]) -> Verdict {
    let Ok(told) = serde_json::from_slice::<Told>(answer) else { return Verdict::Fits };
    match (told.disaggregation_mode.as_ref().and_then(Value::as_str), role) {
        // SGLang's word for a worker that does both.
        (Some("null"), _) => {
            return Verdict::Unfit(format!("it serves both phases, and is to be a {role} worker"));
        }
        (Some("decode"), Role::Prefill) | (Some("prefill"), Role::Decode) => {
            return Verdict::Unfit(format!("it serves the other phase, and is to be a {role} worker"));
        }
        _ => {}
    }
    match (told.disaggregation_bootstrap_port.and_then(|port| port.as_u64()), bootstrap_port) {
        (Some(theirs), Some(ours)) if theirs != u64::from(ours) => Verdict::Doubtful(format!(
            "its registry listens on port {theirs}, and is looked for on port {ours}"
        )),
        _ => Verdict::Fits,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_told_counts() {
        let prefill =
            br#"{"disaggregation_mode":"prefill","disaggregation_bootstrap_port":8998,"other":[1]}"#;
        assert_eq!(judge(Role::Prefill, Some(8998), prefill), Verdict::Fits);
        let port = "its registry listens on port 8998, and is looked for on port 9000";
        assert_eq!(judge(Role::Prefill, Some(9000), prefill), Verdict::Doubtful(port.into()));
        let role = "it serves the other phase, and is to be a decode worker";
        assert_eq!(judge(Role::Decode, None, prefill), Verdict::Unfit(role.into()));
        // One field that is nonsense does not hide the other.
        let odd = br#"{"disaggregation_mode":"prefill","disaggregation_bootstrap_port":"8998"}"#;
        assert_eq!(judge(Role::Prefill, Some(9000), odd), Verdict::Fits);
        assert_eq!(judge(Role::Decode, None, odd), Verdict::Unfit(role.into()));
        assert_eq!(judge(Role::Prefill, None, prefill), Verdict::Fits, "it says where");
        assert_eq!([&prefill[..], odd, b"{}"].map(bootstrap_port), [Some(8998), None, None]);
        let both = br#"{"disaggregation_mode":"null"}"#;
        let role = "it serves both phases, and is to be a decode worker";
        assert_eq!(judge(Role::Decode, None, both), Verdict::Unfit(role.into()));
        for silent in [&b""[..], b"{}", b"OK", b"[]", br#"{"disaggregation_mode":null}"#] {
            assert_eq!(judge(Role::Decode, None, silent), Verdict::Fits);
        }
    }
}

//! What a worker says of itself before it is used: whether it is what the command line takes it for.
//!
//! Only what is told is checked: other engines tell less, take long to tell it, or guard the path with a key.

use crate::cluster::kinds::Kind;
use crate::cluster::roles::Room;
use crate::cluster::router::Role;
use crate::limits::MODEL_NAME_MAX;
use serde::Deserialize;
use serde_json::Value;

/// Where workers are asked.
pub const PATH: &str = "/server_info";

/// SGLang's word for a worker that does both.
const BOTH: &str = "null";

/// The fields of [`PATH`]'s answer that matter here.
#[derive(Deserialize)]
struct Told {
    disaggregation_mode: Option<Value>,
    disaggregation_bootstrap_port: Option<Value>,
}

/// What a worker tells of itself, but for whom it fits.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Words {
    /// The name that its clients use for its model.
    pub model: Option<String>,
    /// What it has room for.
    pub room: Option<Room>,
    /// How often its role has changed since its start, where it can.
    pub role_changes: Option<u64>,
    /// Whether it does both, without a hand-off.
    pub is_mixed: bool,
    /// Whether it reads prompts where no prefill worker is left.
    pub reads_alone: bool,
    /// The port of its registry.
    pub bootstrap_port: Option<u16>,
}

impl Words {
    /// From its answer; what is not there or is something else is not told.
    pub fn of(answer: &[u8]) -> Words {
        Words {
            model: model(answer),
            room: room(answer),
            role_changes: role_changes(answer),
            is_mixed: is_mixed(answer),
            reads_alone: reads_alone(answer),
            bootstrap_port: bootstrap_port(answer),
        }
    }
}

/// Whether a worker tells that it does both, without a hand-off.
fn is_mixed(answer: &[u8]) -> bool {
    let told = serde_json::from_slice::<Value>(answer).ok();
    told.is_some_and(|told| told["disaggregation_mode"] == BOTH)
}

/// What a worker tells of its hand-offs: by that it is paired.
pub fn kind(answer: &[u8]) -> Kind {
    if is_mixed(answer) {
        return Kind::alone();
    }
    #[derive(Deserialize)]
    struct Told {
        handoff: Option<Value>,
    }
    let told = serde_json::from_slice::<Told>(answer).ok();
    told.and_then(|told| told.handoff).map_or(Kind::default(), |handoff| Kind::told(&handoff))
}

/// Whether a worker tells that it reads prompts where no prefill worker is left; one that does both always does.
fn reads_alone(answer: &[u8]) -> bool {
    let told = serde_json::from_slice::<Value>(answer).ok();
    told.is_some_and(|told| told["handoff"]["local_prefill"] == true) || is_mixed(answer)
}

/// What a worker tells that it has room for.
fn room(answer: &[u8]) -> Option<Room> {
    #[derive(Deserialize)]
    struct Told {
        max_running_requests: Option<u32>,
        max_total_tokens: Option<u64>,
    }
    let told = serde_json::from_slice::<Told>(answer).ok()?;
    Some(Room { sequences: told.max_running_requests?, tokens: told.max_total_tokens? })
}

/// How often a worker's role has changed since its start, if it tells that it can.
fn role_changes(answer: &[u8]) -> Option<u64> {
    serde_json::from_slice::<Value>(answer).ok()?["role_changes"].as_u64()
}

/// The name that a worker's clients use for its model, if it tells one.
fn model(answer: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Told {
        served_model_name: Option<String>,
    }
    let told = serde_json::from_slice::<Told>(answer).ok()?;
    told.served_model_name.filter(|name| name.len() <= MODEL_NAME_MAX)
}

/// The port of its registry, if a worker tells one.
fn bootstrap_port(answer: &[u8]) -> Option<u16> {
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
    /// It has served in this role, and serves in that one now.
    Turned(Role),
}

/// Judges an answer of a worker that is to play `role`, its registry at `bootstrap_port` where that was given. One that has
/// changed its role, now or (`has_turned`) before, is taken for what it tells; any other that is in the wrong place is a
/// mistake of its operator's.
pub fn judge(role: Role, bootstrap_port: Option<u16>, has_turned: bool, answer: &[u8]) -> Verdict {
    let Ok(told) = serde_json::from_slice::<Told>(answer) else { return Verdict::Fits };
    let is_followed = has_turned || role_changes(answer).is_some_and(|changes| changes > 0);
    match (told.disaggregation_mode.as_ref().and_then(Value::as_str), role) {
        // Whoever does both has the seat of a decode worker that reads prompts itself.
        (Some(BOTH), Role::Decode) if is_followed => {}
        (Some(BOTH | "decode"), Role::Prefill) | (Some("prefill"), Role::Decode) if is_followed => {
            return Verdict::Turned(role.other());
        }
        (Some(BOTH), _) => {
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
        assert_eq!(judge(Role::Prefill, Some(8998), false, prefill), Verdict::Fits);
        let port = "its registry listens on port 8998, and is looked for on port 9000";
        assert_eq!(judge(Role::Prefill, Some(9000), false, prefill), Verdict::Doubtful(port.into()));
        let role = "it serves the other phase, and is to be a decode worker";
        assert_eq!(judge(Role::Decode, None, false, prefill), Verdict::Unfit(role.into()));
        // One field that is nonsense does not hide the other.
        let odd = br#"{"disaggregation_mode":"prefill","disaggregation_bootstrap_port":"8998"}"#;
        assert_eq!(judge(Role::Prefill, Some(9000), false, odd), Verdict::Fits);
        assert_eq!(judge(Role::Decode, None, false, odd), Verdict::Unfit(role.into()));
        assert_eq!(judge(Role::Prefill, None, false, prefill), Verdict::Fits, "it says where");
        assert_eq!([&prefill[..], odd, b"{}"].map(bootstrap_port), [Some(8998), None, None]);
        let both = br#"{"disaggregation_mode":"null"}"#;
        let role = "it serves both phases, and is to be a decode worker";
        assert_eq!(judge(Role::Decode, None, false, both), Verdict::Unfit(role.into()));
        for silent in [&b""[..], b"{}", b"OK", b"[]", br#"{"disaggregation_mode":null}"#] {
            assert_eq!(judge(Role::Decode, None, false, silent), Verdict::Fits);
        }
    }

    #[test]
    fn who_has_changed_its_role_is_followed_and_who_is_in_the_wrong_place_is_not() {
        let told = |changes: &str| format!(r#"{{"disaggregation_mode":"prefill","role_changes":{changes}}}"#);
        let judged =
            |has_turned, changes: &str| judge(Role::Decode, None, has_turned, told(changes).as_bytes());
        assert_eq!(judged(false, "1"), Verdict::Turned(Role::Prefill));
        assert_eq!(
            judged(true, "0"),
            Verdict::Turned(Role::Prefill),
            "it was started anew as what it was named"
        );
        assert!(
            ["0", "-1", "\"x\"", "null"].iter().all(|odd| matches!(judged(false, odd), Verdict::Unfit(_)))
        );
        assert_eq!(judge(Role::Prefill, None, true, told("7").as_bytes()), Verdict::Fits);
        let mixed = told("7").replace("prefill", BOTH);
        assert_eq!(judge(Role::Prefill, None, false, mixed.as_bytes()), Verdict::Turned(Role::Decode));
        assert_eq!(judge(Role::Decode, None, false, mixed.as_bytes()), Verdict::Fits);
        assert!(
            is_mixed(mixed.as_bytes()) && reads_alone(mixed.as_bytes()) && !is_mixed(told("7").as_bytes())
        );
    }
}

//! What a worker says of itself before it is used: whether it is what the command line takes it for.
//!
//! Only what is told is checked: other engines tell less, take long to tell it, or guard the path with a key.

use crate::cluster::kinds::Kind;
use crate::cluster::roles::Room;
use crate::cluster::router::Role;
use crate::limits::MODEL_NAME_MAX;
use crate::wire::message as wire;
use serde::Serialize;
use serde_json::Value;

/// Where workers are asked.
pub const PATH: &str = "/server_info";

/// Header field by which a router asks there for the one that answers, whoever stands behind it: another router, which
/// passes its clients' questions on to a worker, would be taken for that.
pub const ASKED_BY_ROUTER: &str = "x-baton-router";

/// What a router says that it does, where a worker names its role.
const ROUTER: &str = "router";

/// SGLang's word for a worker that does both.
const BOTH: &str = "null";

/// What a router tells of itself.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RouterInfo {
    disaggregation_mode: &'static str,
}

impl Default for RouterInfo {
    fn default() -> RouterInfo {
        RouterInfo { disaggregation_mode: ROUTER }
    }
}

/// What a worker tells of itself. A field that is not there, or is nonsense, is not told, whatever the others are.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Words {
    /// What it does.
    pub role: Option<wire::Role>,
    /// Whether it is no worker, but a router as this one.
    pub is_router: bool,
    /// The name that its clients use for its model.
    pub model: Option<String>,
    /// What it has room for.
    pub room: Option<Room>,
    /// How often its role has changed since its start, where it can.
    pub role_changes: Option<u64>,
    /// Whether it reads prompts where no prefill worker is left.
    pub reads_alone: bool,
    /// The port of its registry.
    pub bootstrap_port: Option<u16>,
    /// Of its hand-offs: by that it is paired.
    pub kind: Kind,
}

impl Words {
    /// From its answer.
    pub fn of(answer: &[u8]) -> Words {
        let told: Value = serde_json::from_slice(answer).unwrap_or_default();
        let role = match told["disaggregation_mode"].as_str() {
            Some("prefill") => Some(wire::Role::Prefill),
            Some("decode") => Some(wire::Role::Decode),
            Some(BOTH) => Some(wire::Role::Mixed),
            _ => None,
        };
        let is_mixed = role == Some(wire::Role::Mixed);
        let handoff = &told["handoff"];
        let model = told["served_model_name"].as_str().filter(|name| name.len() <= MODEL_NAME_MAX);
        let port = told["disaggregation_bootstrap_port"]
            .as_u64()
            .and_then(|port| u16::try_from(port).ok());
        Words {
            role,
            is_router: told["disaggregation_mode"] == ROUTER,
            model: model.map(str::to_owned),
            room: room(&told),
            role_changes: told["role_changes"].as_u64(),
            reads_alone: is_mixed || handoff["local_prefill"] == true,
            bootstrap_port: port.filter(|&port| port > 0),
            kind: match handoff {
                _ if is_mixed => Kind::alone(),
                Value::Null => Kind::default(),
                handoff => Kind::told(handoff),
            },
        }
    }

    /// Whether it does both, without a hand-off.
    pub fn is_mixed(&self) -> bool {
        self.role == Some(wire::Role::Mixed)
    }
}

/// Both bounds, or nothing: one of them alone says little.
fn room(told: &Value) -> Option<Room> {
    let sequences = told["max_running_requests"].as_u64()?.try_into().ok()?;
    Some(Room { sequences, tokens: told["max_total_tokens"].as_u64()? })
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

/// Judges the words of a worker that is to play `role`, its registry at `bootstrap_port` where that was given. One that has
/// changed its role, now or (`has_turned`) before, is taken for what it tells; any other that is in the wrong place is a
/// mistake of its operator's.
pub fn judge(role: Role, bootstrap_port: Option<u16>, has_turned: bool, words: &Words) -> Verdict {
    if words.is_router {
        return Verdict::Unfit(format!("it is a router, and is to be a {role} worker"));
    }
    let is_followed = has_turned || words.role_changes.is_some_and(|changes| changes > 0);
    match (words.role, role) {
        (Some(wire::Role::Mixed | wire::Role::Decode), Role::Prefill)
        | (Some(wire::Role::Prefill), Role::Decode)
            if is_followed =>
        {
            return Verdict::Turned(role.other());
        }
        (Some(wire::Role::Mixed), Role::Prefill) => {
            let why = "it serves both phases without a hand-off: it can be named as a decode worker, which is asked alone";
            return Verdict::Unfit(why.into());
        }
        (Some(wire::Role::Decode), Role::Prefill) | (Some(wire::Role::Prefill), Role::Decode) => {
            return Verdict::Unfit(format!(
                "it serves the other phase, and is to be a {role} worker"
            ));
        }
        _ => {}
    }
    match (words.bootstrap_port, bootstrap_port) {
        (Some(theirs), Some(ours)) if theirs != ours => Verdict::Doubtful(format!(
            "its registry listens on port {theirs}, and is looked for on port {ours}"
        )),
        _ => Verdict::Fits,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(role: Role, bootstrap_port: Option<u16>, has_turned: bool, answer: &[u8]) -> Verdict {
        super::judge(role, bootstrap_port, has_turned, &Words::of(answer))
    }

    #[test]
    fn only_what_is_told_counts() {
        let prefill =
            br#"{"disaggregation_mode":"prefill","disaggregation_bootstrap_port":8998,"other":[1]}"#;
        assert_eq!(judge(Role::Prefill, Some(8998), false, prefill), Verdict::Fits);
        let port = "its registry listens on port 8998, and is looked for on port 9000";
        assert_eq!(
            judge(Role::Prefill, Some(9000), false, prefill),
            Verdict::Doubtful(port.into())
        );
        let role = "it serves the other phase, and is to be a decode worker";
        assert_eq!(judge(Role::Decode, None, false, prefill), Verdict::Unfit(role.into()));
        // One field that is nonsense does not hide the other.
        let odd = br#"{"disaggregation_mode":"prefill","disaggregation_bootstrap_port":"8998"}"#;
        assert_eq!(judge(Role::Prefill, Some(9000), false, odd), Verdict::Fits);
        assert_eq!(judge(Role::Decode, None, false, odd), Verdict::Unfit(role.into()));
        assert_eq!(judge(Role::Prefill, None, false, prefill), Verdict::Fits, "it says where");
        let ports = [&prefill[..], odd, b"{}"].map(|answer| Words::of(answer).bootstrap_port);
        assert_eq!(ports, [Some(8998), None, None]);
        // Whoever does both has the seat of a decode worker that reads prompts itself.
        let both = br#"{"disaggregation_mode":"null"}"#;
        assert_eq!(judge(Role::Decode, None, false, both), Verdict::Fits);
        assert!(matches!(judge(Role::Prefill, None, false, both), Verdict::Unfit(_)));
        let router = serde_json::to_vec(&RouterInfo::default()).unwrap();
        for role in [Role::Prefill, Role::Decode] {
            assert!(matches!(judge(role, None, true, &router), Verdict::Unfit(_)));
        }
        for silent in [&b""[..], b"{}", b"OK", b"[]", br#"{"disaggregation_mode":null}"#] {
            assert_eq!(judge(Role::Decode, None, false, silent), Verdict::Fits);
        }
    }

    #[test]
    fn who_has_changed_its_role_is_followed_and_who_is_in_the_wrong_place_is_not() {
        let told = |changes: &str| {
            format!(r#"{{"disaggregation_mode":"prefill","role_changes":{changes}}}"#)
        };
        let judged = |has_turned, changes: &str| {
            judge(Role::Decode, None, has_turned, told(changes).as_bytes())
        };
        assert_eq!(judged(false, "1"), Verdict::Turned(Role::Prefill));
        assert_eq!(
            judged(true, "0"),
            Verdict::Turned(Role::Prefill),
            "it was started anew as what it was named"
        );
        assert!(
            ["0", "-1", "\"x\"", "null"]
                .iter()
                .all(|odd| matches!(judged(false, odd), Verdict::Unfit(_)))
        );
        assert_eq!(judge(Role::Prefill, None, true, told("7").as_bytes()), Verdict::Fits);
        let mixed = told("7").replace("prefill", BOTH);
        assert_eq!(
            judge(Role::Prefill, None, false, mixed.as_bytes()),
            Verdict::Turned(Role::Decode)
        );
        assert_eq!(judge(Role::Decode, None, false, mixed.as_bytes()), Verdict::Fits);
        let (mixed, other) = (Words::of(mixed.as_bytes()), Words::of(told("7").as_bytes()));
        assert!(mixed.is_mixed() && mixed.reads_alone && !other.is_mixed());
    }

    #[test]
    fn one_field_that_is_nonsense_hides_no_other() {
        let whole = serde_json::json!({
            "disaggregation_mode": "decode", "served_model_name": "m", "role_changes": 3,
            "max_running_requests": 8, "max_total_tokens": 4096, "disaggregation_bootstrap_port": 8998,
            "handoff": {"local_prefill": true, "weights": "aa"},
        });
        let read = |told: &Value| Words::of(told.to_string().as_bytes());
        let words = read(&whole);
        let room = Some(Room { sequences: 8, tokens: 4096 });
        assert_eq!(
            (words.role, words.role_changes, words.room),
            (Some(wire::Role::Decode), Some(3), room)
        );
        assert_eq!((words.model.as_deref(), words.bootstrap_port), (Some("m"), Some(8998)));
        assert!(words.reads_alone && words.kind != Kind::default());
        for field in whole.as_object().unwrap().keys() {
            for nonsense in [serde_json::json!(-1), serde_json::json!([{}]), Value::Null] {
                let mut told = whole.clone();
                told[field] = nonsense;
                let odd = read(&told);
                let mut expected = words.clone();
                match field.as_str() {
                    "disaggregation_mode" => expected.role = None,
                    "served_model_name" => expected.model = None,
                    "role_changes" => expected.role_changes = None,
                    "max_running_requests" | "max_total_tokens" => expected.room = None,
                    "disaggregation_bootstrap_port" => expected.bootstrap_port = None,
                    _ => (expected.reads_alone, expected.kind) = (false, odd.kind.clone()),
                }
                assert_eq!(odd, expected, "{told}");
            }
        }
    }
}

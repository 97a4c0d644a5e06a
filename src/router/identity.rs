//! The identity of a worker: its report about itself, and the comparison with its configuration.
//! The router reads the report before it uses the worker.
//!
//! Only reported fields are checked, because other engines report less, answer slowly, or need a
//! key for the path.

use crate::ids::{Leg, Role};
use crate::limits::MODEL_NAME_MAX;
use crate::routing::compatibility::Compatibility;
use crate::routing::role_balancer::DecodeCapacity;
use serde::Serialize;
use serde_json::Value;

/// Path of the identity query.
pub const PATH: &str = "/server_info";

/// The role that a router reports.
const ROUTER: &str = "router";

/// SGLang's name of a mixed worker.
const BOTH: &str = "null";

/// A router's report about itself.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RouterInfo {
    disaggregation_mode: &'static str,
}

impl Default for RouterInfo {
    fn default() -> RouterInfo {
        RouterInfo { disaggregation_mode: ROUTER }
    }
}

/// A worker's report about itself. A field that is absent or invalid counts as not reported; the
/// other fields are still used.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct WorkerInfo {
    /// Its role.
    pub role: Option<Role>,
    /// Whether it is a router and not a worker.
    pub is_router: bool,
    /// The name of its model for clients.
    pub model: Option<String>,
    /// Its capacity.
    pub capacity: Option<DecodeCapacity>,
    /// Number of its role changes since its start. `None` if its role cannot change.
    pub role_changes: Option<u64>,
    /// Whether it serves requests alone if no prefill worker is left.
    pub local_prefill: bool,
    /// The port of its bootstrap registry.
    pub bootstrap_port: Option<u16>,
    /// Its compatibility for hand-offs, which decides its pairs.
    pub kind: Compatibility,
}

impl WorkerInfo {
    /// Parses its answer.
    pub fn of(answer: &[u8]) -> WorkerInfo {
        let identity: Value = serde_json::from_slice(answer).unwrap_or_default();
        let role = match identity["disaggregation_mode"].as_str() {
            Some("prefill") => Some(Role::Prefill),
            Some("decode") => Some(Role::Decode),
            Some(BOTH) => Some(Role::Mixed),
            _ => None,
        };
        let is_mixed = role == Some(Role::Mixed);
        let handoff = &identity["handoff"];
        let model =
            identity["served_model_name"].as_str().filter(|name| name.len() <= MODEL_NAME_MAX);
        let port = identity["disaggregation_bootstrap_port"]
            .as_u64()
            .and_then(|port| u16::try_from(port).ok());
        WorkerInfo {
            role,
            is_router: identity["disaggregation_mode"] == ROUTER,
            model: model.map(str::to_owned),
            capacity: capacity(&identity),
            role_changes: identity["role_changes"].as_u64(),
            local_prefill: is_mixed || handoff["local_prefill"] == true,
            bootstrap_port: port.filter(|&port| port > 0),
            kind: match handoff {
                _ if is_mixed => Compatibility::alone(),
                Value::Null => Compatibility::default(),
                handoff => Compatibility::from_report(handoff),
            },
        }
    }

    /// Whether it is a mixed worker, which needs no hand-off.
    pub fn is_mixed(&self) -> bool {
        self.role == Some(Role::Mixed)
    }
}

/// The capacity. `None` unless both limits are reported, because one of them alone says little.
fn capacity(identity: &Value) -> Option<DecodeCapacity> {
    let sequences = identity["max_running_requests"].as_u64()?.try_into().ok()?;
    Some(DecodeCapacity { sequences, tokens: identity["max_total_tokens"].as_u64()? })
}

/// The result of an identity query.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Identification {
    /// Nothing contradicts the configuration.
    Fits,
    /// The worker can still fit, for example if ports are mapped.
    Doubtful(String),
    /// The worker cannot serve in this role.
    Unfit(String),
    /// It has changed its role and serves in this role now.
    RoleChanged(Leg),
}

/// Compares a worker's report with its configured role and bootstrap port. A worker that has
/// changed its role, now or before (`has_changed_role`), keeps the role that it reports. Any other
/// worker in the wrong role is a configuration mistake.
pub fn identify_worker(
    role: Leg,
    bootstrap_port: Option<u16>,
    has_changed_role: bool,
    words: &WorkerInfo,
) -> Identification {
    if words.is_router {
        return Identification::Unfit(format!("it is a router, not a {role} worker"));
    }
    let is_followed = has_changed_role || words.role_changes.is_some_and(|changes| changes > 0);
    match (words.role, role) {
        (Some(Role::Mixed | Role::Decode), Leg::Prefill) | (Some(Role::Prefill), Leg::Decode)
            if is_followed =>
        {
            return Identification::RoleChanged(role.other());
        }
        (Some(Role::Mixed), Leg::Prefill) => {
            let why = "it serves both phases without a hand-off: \
                       give it to --decode, and it serves requests alone";
            return Identification::Unfit(why.into());
        }
        (Some(Role::Decode), Leg::Prefill) | (Some(Role::Prefill), Leg::Decode) => {
            return Identification::Unfit(format!(
                "it serves the other phase and cannot be a {role} worker"
            ));
        }
        _ => {}
    }
    match (words.bootstrap_port, bootstrap_port) {
        (Some(theirs), Some(ours)) if theirs != ours => Identification::Doubtful(format!(
            "its bootstrap port is {theirs}, but this router was given port {ours}"
        )),
        _ => Identification::Fits,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(
        role: Leg,
        bootstrap_port: Option<u16>,
        has_changed_role: bool,
        answer: &[u8],
    ) -> Identification {
        super::identify_worker(role, bootstrap_port, has_changed_role, &WorkerInfo::of(answer))
    }

    #[test]
    fn a_worker_is_judged_only_by_the_fields_that_it_reports() {
        let prefill = br#"{"disaggregation_mode":"prefill","disaggregation_bootstrap_port":8998,
                 "other":[1]}"#;
        assert_eq!(judge(Leg::Prefill, Some(8998), false, prefill), Identification::Fits);
        let port = "its bootstrap port is 8998, but this router was given port 9000";
        assert_eq!(
            judge(Leg::Prefill, Some(9000), false, prefill),
            Identification::Doubtful(port.into())
        );
        let role = "it serves the other phase and cannot be a decode worker";
        assert_eq!(judge(Leg::Decode, None, false, prefill), Identification::Unfit(role.into()));
        // An invalid field does not hide the other.
        let odd = br#"{"disaggregation_mode":"prefill","disaggregation_bootstrap_port":"8998"}"#;
        assert_eq!(judge(Leg::Prefill, Some(9000), false, odd), Identification::Fits);
        assert_eq!(judge(Leg::Decode, None, false, odd), Identification::Unfit(role.into()));
        assert_eq!(
            judge(Leg::Prefill, None, false, prefill),
            Identification::Fits,
            "it says where"
        );
        let ports = [&prefill[..], odd, b"{}"].map(|answer| WorkerInfo::of(answer).bootstrap_port);
        assert_eq!(ports, [Some(8998), None, None]);
        // A mixed worker has the address of a decode worker that serves requests alone.
        let both = br#"{"disaggregation_mode":"null"}"#;
        assert_eq!(judge(Leg::Decode, None, false, both), Identification::Fits);
        assert!(matches!(judge(Leg::Prefill, None, false, both), Identification::Unfit(_)));
        let router = serde_json::to_vec(&RouterInfo::default()).unwrap();
        for role in [Leg::Prefill, Leg::Decode] {
            assert!(matches!(judge(role, None, true, &router), Identification::Unfit(_)));
        }
        for silent in [&b""[..], b"{}", b"OK", b"[]", br#"{"disaggregation_mode":null}"#] {
            assert_eq!(judge(Leg::Decode, None, false, silent), Identification::Fits);
        }
    }

    #[test]
    fn a_worker_that_changed_its_role_is_followed_and_a_misplaced_one_is_not() {
        let identity = |changes: &str| {
            format!(r#"{{"disaggregation_mode":"prefill","role_changes":{changes}}}"#)
        };
        let judged = |has_changed_role, changes: &str| {
            judge(Leg::Decode, None, has_changed_role, identity(changes).as_bytes())
        };
        assert_eq!(judged(false, "1"), Identification::RoleChanged(Leg::Prefill));
        assert_eq!(
            judged(true, "0"),
            Identification::RoleChanged(Leg::Prefill),
            "it was started anew as what it was named"
        );
        assert!(
            ["0", "-1", "\"x\"", "null"]
                .iter()
                .all(|odd| matches!(judged(false, odd), Identification::Unfit(_)))
        );
        assert_eq!(judge(Leg::Prefill, None, true, identity("7").as_bytes()), Identification::Fits);
        let mixed = identity("7").replace("prefill", BOTH);
        assert_eq!(
            judge(Leg::Prefill, None, false, mixed.as_bytes()),
            Identification::RoleChanged(Leg::Decode)
        );
        assert_eq!(judge(Leg::Decode, None, false, mixed.as_bytes()), Identification::Fits);
        let (mixed, other) =
            (WorkerInfo::of(mixed.as_bytes()), WorkerInfo::of(identity("7").as_bytes()));
        assert!(mixed.is_mixed() && mixed.local_prefill && !other.is_mixed());
    }

    #[test]
    fn one_field_that_is_nonsense_hides_no_other() {
        let whole = serde_json::json!({
            "disaggregation_mode": "decode", "served_model_name": "m", "role_changes": 3,
            "max_running_requests": 8, "max_total_tokens": 4096,
            "disaggregation_bootstrap_port": 8998,
            "handoff": {"local_prefill": true, "weights": "aa"},
        });
        let read = |identity: &Value| WorkerInfo::of(identity.to_string().as_bytes());
        let words = read(&whole);
        let room = Some(DecodeCapacity { sequences: 8, tokens: 4096 });
        assert_eq!(
            (words.role, words.role_changes, words.capacity),
            (Some(Role::Decode), Some(3), room)
        );
        assert_eq!((words.model.as_deref(), words.bootstrap_port), (Some("m"), Some(8998)));
        assert!(words.local_prefill && words.kind != Compatibility::default());
        for field in whole.as_object().unwrap().keys() {
            for nonsense in [serde_json::json!(-1), serde_json::json!([{}]), Value::Null] {
                let mut identity = whole.clone();
                identity[field] = nonsense;
                let odd = read(&identity);
                let mut expected = words.clone();
                match field.as_str() {
                    "disaggregation_mode" => expected.role = None,
                    "served_model_name" => expected.model = None,
                    "role_changes" => expected.role_changes = None,
                    "max_running_requests" | "max_total_tokens" => expected.capacity = None,
                    "disaggregation_bootstrap_port" => expected.bootstrap_port = None,
                    _ => (expected.local_prefill, expected.kind) = (false, odd.kind.clone()),
                }
                assert_eq!(odd, expected, "{identity}");
            }
        }
    }
}

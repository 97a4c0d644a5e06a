//! The role change of a worker: it accepts nothing new, finishes its work, and is rebuilt in the
//! same process, at the same port.
//!
//! ```text
//!          POST /role           no request, hand-off or registry entry left
//!  serves ───────────▶ empties ─────────────────────────────────▶ is rebuilt ──▶ serves, new role
//!    ▲                    │ timeout, drain, or port taken             │ a resource is missing
//!    └────────────────────┴───────────────────────────────────────────┘ serves, old role
//! ```
//! Thread: `ctl`. No I/O: callers pass the remaining work, and get the next action. Invariant:
//! accepted work is finished, as in a drain. Not here: the refusal of new requests
//! (`worker::routes`), the parts of a role (`process`).

use crate::api::{ApiError, ErrorCode};
use crate::ids::Role;
use crate::limits::{DRAIN_DONE_TIME, ROLE_CHANGE_TIME, ROLE_CHANGE_TIME_MAX};
use crate::server::drain::RemainingWork;
use crate::stdx::failpoint::is_failpoint_active;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::time::{Duration, Instant};

/// Characters of a wrong value that an error repeats.
const SHOWN: usize = 40;

/// A requested role change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RoleChangeRequest {
    /// The new role.
    pub role: Role,
    /// How long running requests can take to finish.
    pub patience: Duration,
}

impl RoleChangeRequest {
    /// Reads `{"role", "timeout_secs"}`.
    ///
    /// # Errors
    /// The body is not such an object, or a value is out of range.
    pub fn parse(body: &[u8]) -> Result<RoleChangeRequest, ApiError> {
        #[derive(Deserialize)]
        #[serde(expecting = r#"an object such as {"role": "decode", "timeout_secs": 600}"#)]
        struct Text {
            role: Option<Value>,
            timeout_secs: Option<Value>,
            #[serde(flatten)]
            others: serde_json::Map<String, Value>,
        }
        let text: Text = serde_json::from_slice(body).map_err(ApiError::invalid_json)?;
        if let Some(field) = text.others.keys().next() {
            return Err(ApiError::unknown(field));
        }
        let named = |name: &str| Role::ALL.into_iter().find(|role| role.to_string() == name);
        let role = text.role.as_ref().and_then(Value::as_str).and_then(named);
        let given = |value: &Option<Value>| match value {
            Some(value) => value.to_string().chars().take(SHOWN).collect(),
            None => "not given".to_owned(),
        };
        let role = role.ok_or_else(|| {
            let given = given(&text.role);
            ApiError::invalid(
                "role",
                format!("must be \"prefill\", \"decode\" or \"mixed\", but is {given}"),
            )
        })?;
        let most = ROLE_CHANGE_TIME_MAX.as_secs();
        let seconds =
            text.timeout_secs.as_ref().map_or(Some(ROLE_CHANGE_TIME.as_secs()), Value::as_u64);
        let seconds = seconds.filter(|seconds| (1..=most).contains(seconds));
        let seconds = seconds.ok_or_else(|| {
            let given = given(&text.timeout_secs);
            ApiError::invalid(
                "timeout_secs",
                format!("must be a whole number from 1 to {most}, but is {given}"),
            )
        })?;
        Ok(RoleChangeRequest { role, patience: Duration::from_secs(seconds) })
    }

    /// The body that [`RoleChangeRequest::parse`] reads.
    pub fn to_json(self) -> Vec<u8> {
        let RoleChangeRequest { role, patience } = self;
        let text =
            serde_json::json!({ "role": role.to_string(), "timeout_secs": patience.as_secs() });
        text.to_string().into_bytes()
    }
}

/// The next action.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RoleChangeAction {
    /// No work is left: rebuild the worker in this role.
    Apply(Role),
    /// It took too long: the worker keeps its role.
    GiveUp,
}

#[derive(Clone, Copy, Debug)]
struct PendingChange {
    to: Role,
    until: Instant,
    /// Time since which no request runs.
    idle: Option<Instant>,
}

/// The role of a worker, and its pending change.
#[derive(Debug)]
pub struct RoleChange {
    role: Role,
    /// Roles that the worker cannot have, with the reasons.
    barred: Vec<(Role, String)>,
    change: Option<PendingChange>,
    changes: u64,
    failed: Option<(Role, String)>,
}

/// The response of `/role`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct RoleStatus {
    role: String,
    /// `serving` or `changing`.
    status: &'static str,
    /// The requested role.
    #[serde(skip_serializing_if = "Option::is_none")]
    wanted: Option<String>,
    /// Requests that must finish first.
    running: usize,
    /// Number of rebuilds since the process started.
    changes: u64,
    /// The last failed change, unless a later one succeeded.
    #[serde(skip_serializing_if = "Option::is_none")]
    failed: Option<Failed>,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
struct Failed {
    role: String,
    reason: String,
}

impl RoleChange {
    /// A worker that starts in `role`. It cannot have the `barred` roles, for these reasons.
    pub fn new(role: Role, barred: Vec<(Role, String)>) -> RoleChange {
        RoleChange { role, barred, change: None, changes: 0, failed: None }
    }

    /// The current role.
    pub fn role(&self) -> Role {
        self.role
    }

    /// Number of rebuilds for changes, including failed changes.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Whether a change is pending.
    pub fn is_changing(&self) -> bool {
        self.change.is_some()
    }

    /// Whether the worker refuses new requests because of a change.
    pub fn takes_nothing(&self) -> bool {
        self.is_changing() && !is_failpoint_active("worker in a role change takes new requests")
    }

    /// The role and the number of changes, in the form of the `TAKEN_FOR` header.
    pub fn name(&self) -> String {
        format!("{}/{}", self.role, self.changes)
    }

    /// Whether `taken_for` still names this worker's role and number of changes. The role can have
    /// changed, or changed twice, with new ports.
    pub fn is_taken_for(&self, taken_for: &str) -> bool {
        let is_role = taken_for == self.role.to_string();
        is_role
            || taken_for == self.name()
            || is_failpoint_active("a worker's role is not compared")
    }

    /// Requests a role change. Returns whether this call started one.
    ///
    /// # Errors
    /// The worker cannot have that role, or is changing to another one.
    pub fn request_change(
        &mut self,
        wanted: RoleChangeRequest,
        now: Instant,
    ) -> Result<bool, ApiError> {
        let RoleChangeRequest { role: to, patience } = wanted;
        match self.change {
            Some(change) if change.to == to => return Ok(false),
            Some(change) => {
                let why = format!("this worker is changing to a {} worker", change.to);
                return Err(ApiError::new(409, ErrorCode::RoleChanges, why));
            }
            None if to == self.role => return Ok(false),
            None => {}
        }
        if let Some((_, why)) = self.barred.iter().find(|(barred, _)| *barred == to) {
            return Err(ApiError::new(
                409,
                ErrorCode::RoleNotPossible,
                format!("this worker cannot be a {to} worker: {why}"),
            ));
        }
        self.change = Some(PendingChange { to, until: now + patience, idle: None });
        self.failed = None;
        Ok(true)
    }

    /// The next action, given the remaining work.
    pub fn poll_action(&mut self, left: RemainingWork, now: Instant) -> Option<RoleChangeAction> {
        let change = self.change.as_mut()?;
        if left.busy && !is_failpoint_active("change of role does not wait for requests") {
            change.idle = None;
            let is_up =
                now >= change.until && !is_failpoint_active("change of role is never given up");
            return is_up.then_some(RoleChangeAction::GiveUp);
        }
        let idle = *change.idle.get_or_insert(now);
        // If the link ended now, data that a destination has not checked would be lost. A silent
        // destination does not delay the change further.
        let is_heard =
            left.unconfirmed == 0 || is_failpoint_active("change of role does not wait for Done");
        (is_heard || now >= idle + DRAIN_DONE_TIME).then_some(RoleChangeAction::Apply(change.to))
    }

    /// The process was paused: the time does not count against its destinations, which could not be
    /// heard.
    pub fn exclude_pause(&mut self, pause: Duration) {
        if let Some(change) = &mut self.change {
            change.idle = change.idle.map(|idle| idle + pause);
        }
    }

    /// Ends a change after the rebuild: in the new role, or in the old one with the reason.
    pub fn finish_change(&mut self, outcome: Result<(), String>) {
        let Some(change) = self.change.take() else { return };
        // In both cases its ports may differ, and its peers must identify it again.
        self.changes += 1;
        match outcome {
            Ok(()) => self.role = change.to,
            Err(why) => self.failed = Some((change.to, why)),
        }
    }

    /// Ends a change with an error before any rebuild. The role stays.
    pub fn fail_change(&mut self, why: String) {
        let change = match is_failpoint_active("role change that was given up goes on") {
            true => self.change,
            false => self.change.take(),
        };
        self.failed = change.map(|change| (change.to, why));
    }

    /// The body of `GET /role`. `drains`: the process will end, whatever its role.
    pub fn status(&self, running: usize, drains: bool) -> RoleStatus {
        RoleStatus {
            role: self.role.to_string(),
            status: match (drains, self.is_changing()) {
                (true, _) => "draining",
                (false, true) => "changing",
                (false, false) => "serving",
            },
            wanted: self.change.map(|change| change.to.to_string()),
            running,
            changes: self.changes,
            failed: self
                .failed
                .as_ref()
                .map(|(role, reason)| Failed { role: role.to_string(), reason: reason.clone() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: RemainingWork =
        RemainingWork { busy: false, queued: 0, clients: 0, unconfirmed: 0 };
    const BUSY: RemainingWork = RemainingWork { busy: true, ..NOTHING };
    const MOMENT: Duration = Duration::from_millis(1);

    fn asked(now: Instant) -> (RoleChange, RoleChangeRequest) {
        let wanted = RoleChangeRequest::parse(br#"{"role": "decode"}"#).unwrap();
        let mut change = RoleChange::new(Role::Prefill, vec![(Role::Mixed, "no reason".into())]);
        assert_eq!(change.poll_action(NOTHING, now), None, "no change was requested");
        assert!(change.request_change(wanted, now).unwrap());
        (change, wanted)
    }

    #[test]
    fn a_role_change_request_is_read_whole_or_refused_by_name() {
        let read = |text: &str| RoleChangeRequest::parse(text.as_bytes());
        let wanted = read(r#"{"role": "mixed", "timeout_secs": 7}"#).unwrap();
        assert_eq!(
            wanted,
            RoleChangeRequest { role: Role::Mixed, patience: Duration::from_secs(7) }
        );
        assert_eq!(RoleChangeRequest::parse(&wanted.to_json()).unwrap(), wanted);
        for (text, named) in [
            ("{}", "role"),
            (r#"{"role": "both"}"#, "role"),
            (r#"{"role": 7}"#, "role"),
            (r#"{"role": "decode", "timeout_secs": 0}"#, "timeout_secs"),
            (r#"{"role": "decode", "timeout_secs": -1}"#, "timeout_secs"),
            (r#"{"role": "decode", "timeout_secs": 1.5}"#, "timeout_secs"),
            (r#"{"role": "decode", "timeout_secs": "60"}"#, "timeout_secs"),
            (r#"{"role": "decode", "timeout_secs": 1000000}"#, "timeout_secs"),
            (r#"{"role": "decode", "other": 1}"#, "other"),
        ] {
            let error = read(text).unwrap_err();
            assert!(
                error.status == 400 && error.param.as_deref() == Some(named),
                "{text}: {error:?}"
            );
        }
        for text in ["7", "[]", "\"decode\""] {
            let error = read(text).unwrap_err();
            assert!(
                error.status == 400 && error.message.contains(r#"such as {"role": "#),
                "{text}: {error:?}"
            );
        }
        assert_eq!(read("decode").unwrap_err().status, 400);
    }

    #[test]
    fn a_role_change_waits_for_running_requests_and_unconfirmed_kv() {
        let now = Instant::now();
        let (mut change, _) = asked(now);
        assert_eq!(change.poll_action(BUSY, now + MOMENT), None);
        let unconfirmed = RemainingWork { unconfirmed: 1, ..NOTHING };
        assert_eq!(change.poll_action(unconfirmed, now + MOMENT), None);
        assert_eq!(
            change.poll_action(NOTHING, now + MOMENT),
            Some(RoleChangeAction::Apply(Role::Decode))
        );
        assert_eq!(
            change.poll_action(unconfirmed, now + MOMENT + DRAIN_DONE_TIME),
            Some(RoleChangeAction::Apply(Role::Decode))
        );
        change.exclude_pause(MOMENT);
        assert_eq!(
            change.poll_action(unconfirmed, now + MOMENT + DRAIN_DONE_TIME),
            None,
            "destinations could not be heard while the process was paused"
        );
        assert_eq!(change.role(), Role::Prefill, "the change is not finished");
        change.finish_change(Ok(()));
        assert_eq!(
            (change.role(), change.changes(), change.is_changing()),
            (Role::Decode, 1, false)
        );
        assert_eq!(change.poll_action(NOTHING, now + MOMENT), None);
        let is_taken_for = |taken_for| change.is_taken_for(taken_for);
        assert!(["decode", "decode/1"].into_iter().all(is_taken_for));
        assert!(
            !["prefill", "prefill/0", "prefill/1", "decode/0", "decode/2", ""]
                .into_iter()
                .any(is_taken_for)
        );
    }

    #[test]
    fn a_role_change_that_takes_too_long_is_abandoned_and_reported() {
        let now = Instant::now();
        let (mut change, wanted) = asked(now);
        let late = now + wanted.patience;
        assert_eq!(change.poll_action(BUSY, late - MOMENT), None);
        assert_eq!(change.poll_action(BUSY, late), Some(RoleChangeAction::GiveUp));
        change.fail_change("too long".into());
        assert_eq!(
            (change.role(), change.changes(), change.is_changing()),
            (Role::Prefill, 0, false)
        );
        let reported = serde_json::to_value(change.status(3, false)).unwrap();
        assert_eq!(reported["failed"], serde_json::json!({"role": "decode", "reason": "too long"}));
        assert_eq!((&reported["status"], &reported["running"]), (&"serving".into(), &3.into()));
        assert!(change.request_change(wanted, late).unwrap(), "a change can be requested again");
        assert!(serde_json::to_value(change.status(0, false)).unwrap().get("failed").is_none());
    }

    #[test]
    fn a_role_change_that_fails_keeps_the_role_and_counts_as_a_change() {
        let now = Instant::now();
        let (mut change, _) = asked(now);
        change.finish_change(Err("no port".into()));
        assert_eq!(
            (change.role(), change.changes(), change.is_changing()),
            (Role::Prefill, 1, false)
        );
        let reported = serde_json::to_value(change.status(0, false)).unwrap();
        assert_eq!(reported["failed"], serde_json::json!({"role": "decode", "reason": "no port"}));
    }

    #[test]
    fn one_change_at_a_time_and_none_that_cannot_be() {
        let now = Instant::now();
        let (mut change, wanted) = asked(now);
        assert!(!change.request_change(wanted, now).unwrap(), "the change is in progress");
        let to = |role| RoleChangeRequest { role, ..wanted };
        assert_eq!(change.request_change(to(Role::Prefill), now).unwrap_err().status, 409);
        change.finish_change(Ok(()));
        assert!(!change.request_change(wanted, now).unwrap(), "it already has the role");
        let why = change.request_change(to(Role::Mixed), now).unwrap_err();
        assert!(why.status == 409 && why.message.contains("no reason"), "{why:?}");
        assert!(!change.is_changing());
    }
}

//! How a worker changes its role: it takes nothing new, finishes what it has, and is put together anew in the same
//! process, under the same port.
//!
//! ```text
//!          POST /role            nothing runs, nothing is unheard, no entry is left
//!  serves ───────────▶ empties ─────────────────────────────────────────────────────▶ turns ──▶ serves, in the new role
//!    ▲                    │ time is up, it is to drain, or a port is another's           │ something cannot be had
//!    └────────────────────┴──────────────────────────────────────────────────────────────┘  in the old one
//! ```
//! Thread: `ctl`. No I/O: it is told what is left, and tells when that is enough. Invariant: what was taken is finished, as
//! in a drain, whose end is the process's. Not here: what refuses new requests (`routes`), what a role is made of (`role`).

use crate::front::drain::Left;
use crate::front::openai::ApiError;
use crate::limits::{DRAIN_DONE_TIME, ROLE_CHANGE_TIME, ROLE_CHANGE_TIME_MAX};
use crate::stdx::planted::is_planted;
use crate::wire::message::Role;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::time::{Duration, Instant};

/// What a router, or a decode worker, takes the worker for that it asks: its role, and behind a slash how often that has
/// changed, if it tells.
/// A worker that is something else by now answers as one that drains, and the router asks who it is.
pub const TAKEN_FOR: &str = "x-baton-role";

/// The code of a worker's answer that it cannot have a role, whenever it is asked.
pub const NOT_POSSIBLE: &str = "role_not_possible";

/// Characters of a wrong value that are told back.
const SHOWN: usize = 40;

/// What a worker is asked to become.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wanted {
    /// Its role.
    pub role: Role,
    /// How long what runs may take to end.
    pub patience: Duration,
}

impl Wanted {
    /// Reads `{"role", "timeout_secs"}`.
    ///
    /// # Errors
    /// It is no such thing, or out of bounds.
    pub fn parse(body: &[u8]) -> Result<Wanted, ApiError> {
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
            return Err(ApiError::unsupported(field));
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
                format!("must be \"prefill\", \"decode\" or \"mixed\", and is {given}"),
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
                format!("must be a whole number from 1 to {most}, and is {given}"),
            )
        })?;
        Ok(Wanted { role, patience: Duration::from_secs(seconds) })
    }

    /// As [`Wanted::parse`] reads it.
    pub fn to_json(self) -> Vec<u8> {
        let Wanted { role, patience } = self;
        let text =
            serde_json::json!({ "role": role.to_string(), "timeout_secs": patience.as_secs() });
        text.to_string().into_bytes()
    }
}

/// What is to be done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// Nothing is left: it may be put together anew.
    Turn(Role),
    /// It took too long: it serves as before.
    GiveUp,
}

#[derive(Clone, Copy, Debug)]
struct Change {
    to: Role,
    until: Instant,
    /// Since when nothing runs.
    idle: Option<Instant>,
}

/// The role of a worker, and the one that it is about to have.
#[derive(Debug)]
pub struct Turning {
    role: Role,
    /// Those that it cannot have, and why.
    barred: Vec<(Role, String)>,
    change: Option<Change>,
    changes: u64,
    failed: Option<(Role, String)>,
}

/// The answer of `/role`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Told {
    role: String,
    /// `serving` or `changing`.
    status: &'static str,
    /// What it becomes.
    #[serde(skip_serializing_if = "Option::is_none")]
    wanted: Option<String>,
    /// Requests that are finished before.
    running: usize,
    /// How often it was put together anew since it was started.
    changes: u64,
    /// Which change did not come about last, since the last that did.
    #[serde(skip_serializing_if = "Option::is_none")]
    failed: Option<Failed>,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
struct Failed {
    role: String,
    reason: String,
}

impl Turning {
    /// A worker that begins in this role, and cannot have others for these reasons.
    pub fn new(role: Role, barred: Vec<(Role, String)>) -> Turning {
        Turning { role, barred, change: None, changes: 0, failed: None }
    }

    /// What it is now.
    pub fn role(&self) -> Role {
        self.role
    }

    /// How often it was put together anew for a change, whether that came about or not.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Whether it is about to become something else.
    pub fn is_changing(&self) -> bool {
        self.change.is_some()
    }

    /// Whether it takes nothing new for that.
    pub fn takes_nothing(&self) -> bool {
        self.is_changing() && !is_planted("who changes its role takes new requests")
    }

    /// What it is, as [`TAKEN_FOR`] says it.
    pub fn name(&self) -> String {
        format!("{}/{}", self.role, self.changes)
    }

    /// Whether it is what a router takes it for: since that has looked its role may have changed, or have changed and
    /// changed back, with other ports.
    pub fn is_taken_for(&self, taken_for: &str) -> bool {
        let is_role = taken_for == self.role.to_string();
        is_role || taken_for == self.name() || is_planted("a worker's role is not compared")
    }

    /// Its role is to be this; whether that begins a change.
    ///
    /// # Errors
    /// It cannot have that role, or is on its way to another.
    pub fn ask(&mut self, wanted: Wanted, now: Instant) -> Result<bool, ApiError> {
        let Wanted { role: to, patience } = wanted;
        match self.change {
            Some(change) if change.to == to => return Ok(false),
            Some(change) => {
                let why = format!("this worker is on its way to be a {} worker", change.to);
                return Err(ApiError::new(409, "role_changes", why));
            }
            None if to == self.role => return Ok(false),
            None => {}
        }
        if let Some((_, why)) = self.barred.iter().find(|(barred, _)| *barred == to) {
            return Err(ApiError::new(
                409,
                NOT_POSSIBLE,
                format!("this worker cannot be a {to} worker: {why}"),
            ));
        }
        self.change = Some(Change { to, until: now + patience, idle: None });
        self.failed = None;
        Ok(true)
    }

    /// What follows from what is left.
    pub fn look(&mut self, left: Left, now: Instant) -> Option<Next> {
        let change = self.change.as_mut()?;
        if left.busy && !is_planted("change of role does not wait for requests") {
            change.idle = None;
            let is_up = now >= change.until && !is_planted("change of role is never given up");
            return is_up.then_some(Next::GiveUp);
        }
        let idle = *change.idle.get_or_insert(now);
        // What was written and not looked at would be given up with the link; who does not look has had its time.
        let is_heard = left.unheard == 0 || is_planted("change of role does not wait for Done");
        (is_heard || now >= idle + DRAIN_DONE_TIME).then_some(Next::Turn(change.to))
    }

    /// It was put together anew: in the new role, or, for this reason, once more in the old one.
    pub fn turned(&mut self, outcome: Result<(), String>) {
        let Some(change) = self.change.take() else { return };
        // Either way its ports may be others, and it is new to its peers.
        self.changes += 1;
        match outcome {
            Ok(()) => self.role = change.to,
            Err(why) => self.failed = Some((change.to, why)),
        }
    }

    /// It stays what it is, for this reason; nothing was taken apart.
    pub fn stayed(&mut self, why: String) {
        self.failed = self.change.take().map(|change| (change.to, why));
    }

    /// For who asks.
    pub fn told(&self, running: usize) -> Told {
        Told {
            role: self.role.to_string(),
            status: if self.is_changing() { "changing" } else { "serving" },
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

    const NOTHING: Left = Left { busy: false, queued: 0, clients: 0, unheard: 0 };
    const BUSY: Left = Left { busy: true, ..NOTHING };
    const MOMENT: Duration = Duration::from_millis(1);

    fn asked(now: Instant) -> (Turning, Wanted) {
        let wanted = Wanted::parse(br#"{"role": "decode"}"#).unwrap();
        let mut turning = Turning::new(Role::Prefill, vec![(Role::Mixed, "no reason".into())]);
        assert_eq!(turning.look(NOTHING, now), None, "nobody has asked for it");
        assert!(turning.ask(wanted, now).unwrap());
        (turning, wanted)
    }

    #[test]
    fn what_is_asked_for_is_read_whole_or_refused_by_name() {
        let read = |text: &str| Wanted::parse(text.as_bytes());
        let wanted = read(r#"{"role": "mixed", "timeout_secs": 7}"#).unwrap();
        assert_eq!(wanted, Wanted { role: Role::Mixed, patience: Duration::from_secs(7) });
        assert_eq!(Wanted::parse(&wanted.to_json()).unwrap(), wanted);
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
    fn what_runs_is_finished_and_what_was_written_is_seen_first() {
        let now = Instant::now();
        let (mut turning, _) = asked(now);
        assert_eq!(turning.look(BUSY, now + MOMENT), None);
        let unheard = Left { unheard: 1, ..NOTHING };
        assert_eq!(turning.look(unheard, now + MOMENT), None);
        assert_eq!(turning.look(NOTHING, now + MOMENT), Some(Next::Turn(Role::Decode)));
        assert_eq!(
            turning.look(unheard, now + MOMENT + DRAIN_DONE_TIME),
            Some(Next::Turn(Role::Decode))
        );
        assert_eq!(turning.role(), Role::Prefill, "it is not there yet");
        turning.turned(Ok(()));
        assert_eq!(
            (turning.role(), turning.changes(), turning.is_changing()),
            (Role::Decode, 1, false)
        );
        assert_eq!(turning.look(NOTHING, now + MOMENT), None);
        let is_taken_for = |taken_for| turning.is_taken_for(taken_for);
        assert!(["decode", "decode/1"].into_iter().all(is_taken_for));
        assert!(
            !["prefill", "prefill/0", "prefill/1", "decode/0", "decode/2", ""]
                .into_iter()
                .any(is_taken_for)
        );
    }

    #[test]
    fn what_takes_too_long_is_given_up_and_told() {
        let now = Instant::now();
        let (mut turning, wanted) = asked(now);
        let late = now + wanted.patience;
        assert_eq!(turning.look(BUSY, late - MOMENT), None);
        assert_eq!(turning.look(BUSY, late), Some(Next::GiveUp));
        turning.stayed("too long".into());
        assert_eq!(
            (turning.role(), turning.changes(), turning.is_changing()),
            (Role::Prefill, 0, false)
        );
        let told = serde_json::to_value(turning.told(3)).unwrap();
        assert_eq!(told["failed"], serde_json::json!({"role": "decode", "reason": "too long"}));
        assert_eq!((&told["status"], &told["running"]), (&"serving".into(), &3.into()));
        assert!(turning.ask(wanted, late).unwrap(), "it may be asked again");
        assert!(serde_json::to_value(turning.told(0)).unwrap().get("failed").is_none());
    }

    #[test]
    fn what_cannot_be_had_leaves_the_role_and_yet_makes_it_new() {
        let now = Instant::now();
        let (mut turning, _) = asked(now);
        turning.turned(Err("no port".into()));
        assert_eq!(
            (turning.role(), turning.changes(), turning.is_changing()),
            (Role::Prefill, 1, false)
        );
        let told = serde_json::to_value(turning.told(0)).unwrap();
        assert_eq!(told["failed"], serde_json::json!({"role": "decode", "reason": "no port"}));
    }

    #[test]
    fn one_change_at_a_time_and_none_that_cannot_be() {
        let now = Instant::now();
        let (mut turning, wanted) = asked(now);
        assert!(!turning.ask(wanted, now).unwrap(), "it is on its way");
        let to = |role| Wanted { role, ..wanted };
        assert_eq!(turning.ask(to(Role::Prefill), now).unwrap_err().status, 409);
        turning.turned(Ok(()));
        assert!(!turning.ask(wanted, now).unwrap(), "it is that already");
        let why = turning.ask(to(Role::Mixed), now).unwrap_err();
        assert!(why.status == 409 && why.message.contains("no reason"), "{why:?}");
        assert!(!turning.is_changing());
    }
}

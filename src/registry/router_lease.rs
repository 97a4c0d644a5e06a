//! A worker's entry at a router with a registry (`/registry`): added, renewed, removed.
//!
//! ```text
//!            due, with a key            nonce                  done
//!  waiting ──────────────────▶ inviting ─────▶ entering ───────────▶ waiting
//!     │ due, without a key                        ▲
//!     └───────────────────────────────────────────┘
//!  withdrawn: withdrawing ──▶ over, once the entry is removed or the removal has failed
//! ```
//! Pure. Invariants: while the registry is reachable, the worker renews the entry twice within its
//! lifetime.

use crate::config::secret::Secret;
use crate::limits::{REGISTRY_RENEWAL, REGISTRY_RETRY};
use crate::registry::call::{RegistryRequest, RegistryTask, Verb};
use crate::registry::entry::Entry;
use crate::registry::proof::{NONCE, PROOF, SignedRequest, prove};
use crate::stdx::failpoint::is_failpoint_active;
use serde::Deserialize;
use std::time::Instant;

const PATH: &str = "/registry";
/// Path at which a registry issues nonces.
const CHALLENGE: &str = "/challenge";

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Waiting,
    Inviting,
    Entering,
    Withdrawing,
    Over,
}

/// One worker's entry at one router.
#[derive(Debug)]
pub struct RouterLease {
    body: Vec<u8>,
    key: Option<Secret>,
    stage: Stage,
    due: Instant,
    nonce: Option<String>,
    withdrawn: bool,
    paused: bool,
    /// Whether the registry has accepted the entry and can still have it.
    entered: bool,
    /// Whether the first acceptance was reported.
    reported: bool,
}

impl RouterLease {
    /// Creates the task; its first request is due at once.
    pub fn new(entry: &Entry, key: Option<Secret>, now: Instant) -> RouterLease {
        RouterLease {
            body: entry.to_json(),
            key,
            stage: Stage::Waiting,
            due: now,
            nonce: None,
            withdrawn: false,
            paused: false,
            entered: false,
            reported: false,
        }
    }

    /// Proves this key from now on.
    pub fn set_key(&mut self, key: Option<Secret>) {
        self.key = key;
    }

    /// Removes the entry and creates no other.
    pub fn withdraw(&mut self, now: Instant) {
        self.withdrawn = true;
        self.due = now;
        if !self.entered && self.stage == Stage::Waiting {
            self.stage = Stage::Over;
        }
    }

    /// Pauses or resumes the renewals, because a worker that hangs must look dead.
    pub fn pause(&mut self, paused: bool) {
        self.paused = paused;
    }

    /// Whether no request follows.
    pub fn is_over(&self) -> bool {
        self.stage == Stage::Over
    }

    fn change(&mut self) -> RegistryRequest {
        let verb = if self.withdrawn { Verb::Delete } else { Verb::Put };
        self.stage = if self.withdrawn { Stage::Withdrawing } else { Stage::Entering };
        let mut request = RegistryRequest::new(verb, PATH, self.body.clone());
        if let (Some(key), Some(nonce)) = (&self.key, self.nonce.take()) {
            let asked = SignedRequest { method: verb.as_str(), path: PATH, body: &request.body };
            request.headers = vec![(PROOF, prove(key, asked, &nonce)), (NONCE, nonce)];
        }
        request
    }
}

impl RegistryTask for RouterLease {
    fn scheme(&self) -> &'static str {
        "http"
    }

    fn poll(&mut self, now: Instant) -> Option<RegistryRequest> {
        if self.stage != Stage::Waiting || now < self.due || (self.paused && !self.withdrawn) {
            return None;
        }
        if self.key.is_some() && self.nonce.is_none() {
            self.stage = Stage::Inviting;
            return Some(RegistryRequest::new(Verb::Post, CHALLENGE, Vec::new()));
        }
        Some(self.change())
    }

    fn handle_answer(&mut self, status: u16, body: &[u8], now: Instant) -> Result<(), String> {
        #[derive(Deserialize)]
        struct Invitation {
            nonce: String,
        }
        let stage = std::mem::replace(&mut self.stage, Stage::Waiting);
        if status != 200 {
            self.stage = stage;
            self.handle_failure(now);
            let text = String::from_utf8_lossy(&body[..body.len().min(300)]);
            return Err(format!("it answers with status {status}: {}", text.trim()));
        }
        match stage {
            Stage::Inviting => match serde_json::from_slice::<Invitation>(body) {
                Ok(invitation) => (self.nonce, self.due) = (Some(invitation.nonce), now),
                Err(error) => {
                    self.handle_failure(now);
                    return Err(format!("its nonce cannot be read: {error}"));
                }
            },
            Stage::Entering => {
                self.entered = true;
                self.due = if self.withdrawn { now } else { now + REGISTRY_RENEWAL };
            }
            Stage::Withdrawing => (self.entered, self.stage) = (false, Stage::Over),
            Stage::Waiting | Stage::Over => {}
        }
        Ok(())
    }

    fn handle_piece(&mut self, _: &[u8], _: Instant) -> Result<(), String> {
        Ok(())
    }

    fn is_first_kept(&mut self) -> bool {
        self.entered && !std::mem::replace(&mut self.reported, self.entered)
    }

    fn handle_failure(&mut self, now: Instant) {
        // If the removal fails, the entry ends by itself.
        self.stage = if self.withdrawn { Stage::Over } else { Stage::Waiting };
        let times =
            if is_failpoint_active("failed renewal is not tried again") { 100_000 } else { 1 };
        (self.nonce, self.due) = (None, now + REGISTRY_RETRY * times);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Leg, Peer};
    use crate::limits::{REGISTRY_ANSWER_TIME, REGISTRY_ENTRY_LIFE};
    use crate::registry::entry::WorkerAddress;
    use crate::registry::proof::{Nonces, ProofError};
    use crate::routing::compatibility::CompatDigest;
    use std::time::Duration;

    fn entry() -> Entry {
        let address =
            WorkerAddress { role: Leg::Decode, url: "http://10.0.0.1:1".parse().unwrap() };
        let peer = Peer { id: [1; 16], incarnation: [2; 16] };
        Entry {
            peer,
            address,
            bootstrap_port: None,
            kind: CompatDigest { by_family: [3; 32], by_class: None },
        }
    }

    #[test]
    fn an_entry_is_renewed_with_a_fresh_proof_each_time_and_taken_back() {
        let (key, mut now) = (Secret::of_bytes(&[7; 32]), Instant::now());
        let mut registry = Nonces::new([1; 32], now);
        let mut ours = RouterLease::new(&entry(), Some(key.clone()), now);
        let mut seen = Vec::new();
        for round in 0..3 {
            let invite = ours.poll(now).unwrap();
            assert_eq!((invite.path, ours.poll(now)), (CHALLENGE, None), "one at a time");
            ours.handle_answer(
                200,
                format!(r#"{{"nonce":"{}"}}"#, registry.draw(now)).as_bytes(),
                now,
            )
            .unwrap();
            let change = ours.poll(now).unwrap();
            let field =
                |name| change.headers.iter().find(|(key, _)| *key == name).map(|(_, v)| v.as_str());
            let asked = SignedRequest {
                method: change.verb.as_str(),
                path: change.path,
                body: &change.body,
            };
            let mut take = || {
                registry.verify_request(
                    std::slice::from_ref(&key),
                    asked,
                    field(NONCE),
                    field(PROOF),
                    now,
                )
            };
            assert_eq!((take(), take()), (Ok(()), Err(ProofError::Used)));
            seen.push(change.verb);
            ours.handle_answer(200, b"{}", now).unwrap();
            assert_eq!(ours.poll(now), None);
            now += REGISTRY_RENEWAL;
            if round == 1 {
                ours.withdraw(now);
            }
        }
        assert_eq!(seen, [Verb::Put, Verb::Put, Verb::Delete]);
        assert!(ours.is_over() && ours.poll(now + REGISTRY_RENEWAL).is_none());
    }

    #[test]
    fn without_a_key_no_nonce_is_requested_and_a_failed_write_is_soon_repeated() {
        let now = Instant::now();
        let mut ours = RouterLease::new(&entry(), None, now);
        assert_eq!(ours.poll(now).unwrap().verb, Verb::Put);
        ours.handle_failure(now);
        assert_eq!(ours.poll(now), None);
        let later = now + REGISTRY_RETRY;
        let put = ours.poll(later).unwrap();
        assert_eq!((Entry::parse(&put.body), put.headers.len()), (Ok(entry()), 0));
        assert!(ours.handle_answer(503, b"oh", later).unwrap_err().contains("503: oh"));
        ours.poll(later + REGISTRY_RETRY).unwrap();
        ours.handle_answer(200, b"{}", later).unwrap();
        ours.pause(true);
        assert_eq!(ours.poll(later + REGISTRY_RENEWAL), None, "a worker that hangs must look dead");
        ours.withdraw(later);
        assert_eq!(ours.poll(later).unwrap().verb, Verb::Delete);
        ours.handle_failure(later);
        assert!(ours.is_over(), "it ends by itself");
    }

    #[test]
    fn an_entry_is_withdrawn_even_if_its_last_renewal_failed() {
        let now = Instant::now();
        let mut ours = RouterLease::new(&entry(), None, now);
        ours.poll(now).unwrap();
        ours.handle_answer(200, b"{}", now).unwrap();
        ours.poll(now + REGISTRY_RENEWAL).unwrap();
        ours.handle_failure(now);
        ours.withdraw(now);
        assert_eq!(ours.poll(now).unwrap().verb, Verb::Delete);
    }

    #[test]
    fn a_stranger_without_an_entry_has_nothing_to_take_back() {
        let now = Instant::now();
        let mut ours = RouterLease::new(&entry(), None, now);
        ours.withdraw(now);
        assert!(ours.is_over() && ours.poll(now).is_none());
        let mut under_way = RouterLease::new(&entry(), None, now);
        under_way.poll(now).unwrap();
        under_way.withdraw(now);
        under_way.handle_answer(200, b"{}", now).unwrap();
        assert_eq!(under_way.poll(now).unwrap().verb, Verb::Delete, "it was entered meanwhile");
    }

    /// Each worker renews its entry by itself, so a registry that forgets all entries has them
    /// again.
    #[test]
    fn a_registry_that_restarts_has_the_entry_again_within_its_lifetime() {
        const STEP: Duration = Duration::from_millis(100);
        let begun = Instant::now();
        let key = Secret::of_bytes(&[7; 32]);
        for (dies, restarts) in (0..40).flat_map(|at| [(at, at + 1), (at, at + 40)]) {
            let [dies, restarts] = [dies, restarts].map(|steps| begun + steps * STEP);
            for key in [None, Some(key.clone())] {
                let mut ours = RouterLease::new(&entry(), key, begun);
                // A request to a dead registry fails after the longest wait for an answer.
                let (mut now, mut lost_at) = (begun, None);
                let entered = loop {
                    if lost_at.is_some_and(|at| at <= now) {
                        lost_at = None;
                        ours.handle_failure(now);
                    }
                    let asked = if lost_at.is_none() { ours.poll(now) } else { None };
                    match asked {
                        Some(_) if now >= dies && now < restarts => {
                            lost_at = Some(now + REGISTRY_ANSWER_TIME);
                        }
                        Some(asked) if asked.verb == Verb::Put && now >= restarts => break now,
                        Some(_) => ours.handle_answer(200, br#"{"nonce":"n"}"#, now).unwrap(),
                        None => {}
                    }
                    now += STEP;
                };
                assert!(entered < restarts + REGISTRY_ENTRY_LIFE, "{:?}", entered - restarts);
            }
        }
    }
}

//! A worker's entry in etcd. The worker puts it under a lease, keeps the lease alive, and revokes
//! it at the end.
//!
//! ```text
//!          no lease           granted          put                  alive       there
//!  waiting ────────▶ granting ───────▶ putting ───▶ waiting ──▶ keeping ──▶ seeking ──▶ waiting
//!     ▲                                   ▲            │ withdrawn: revoking ──▶ over     │
//!     └── keeping: the lease has ended    └──────────────────────────────── not there ────┘
//! ```
//! Pure. After each keep-alive, the worker looks up the key, because an etcd that was restored from
//! a backup can have the lease without the key.

use super::{SCHEME, encode, key_of, refused, write};
use crate::config::secret::Secret;
use crate::limits::{REGISTRY_ENTRY_LIFE, REGISTRY_RENEWAL, REGISTRY_RETRY};
use crate::registry::call::{RegistryRequest, RegistryTask, Verb};
use crate::registry::entry::Entry;
use serde::Deserialize;
use serde_json::json;
use std::time::Instant;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Waiting,
    Granting,
    Putting,
    Keeping,
    Seeking,
    Revoking,
    Over,
}

/// One worker in one etcd.
#[derive(Debug)]
pub struct EtcdLease {
    key: String,
    entry: Entry,
    value: Vec<u8>,
    /// The value in etcd is out of date.
    is_stale: bool,
    stage: Stage,
    /// The next stage, at `due`.
    next: Stage,
    due: Instant,
    /// The lease's ID, as etcd writes it.
    lease: Option<String>,
    /// `None` until etcd has stored the entry. True after that was reported.
    entered: Option<bool>,
    withdrawn: bool,
    paused: bool,
}

impl EtcdLease {
    /// Creates the task; its first request is due at once. The value in etcd proves `cluster_key`.
    pub fn new(entry: &Entry, cluster_key: Option<&Secret>, now: Instant) -> EtcdLease {
        EtcdLease {
            key: key_of(entry),
            entry: entry.clone(),
            is_stale: false,
            value: write(entry, cluster_key),
            stage: Stage::Waiting,
            next: Stage::Granting,
            due: now,
            lease: None,
            entered: None,
            withdrawn: false,
            paused: false,
        }
    }

    /// Proves this key in the value from now on. The value in etcd is replaced at the next renewal.
    pub fn set_key(&mut self, cluster_key: Option<&Secret>) {
        self.value = write(&self.entry, cluster_key);
        self.is_stale = true;
    }

    /// Removes the entry and creates no other.
    pub fn withdraw(&mut self, now: Instant) {
        self.withdrawn = true;
        if self.stage == Stage::Waiting {
            self.go_on(Stage::Keeping, now);
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

    fn go_on(&mut self, next: Stage, due: Instant) {
        (self.stage, self.next, self.due) = (Stage::Waiting, next, due);
        if self.withdrawn {
            match &self.lease {
                Some(_) => self.next = Stage::Revoking,
                None => self.stage = Stage::Over,
            }
        }
    }
}

impl RegistryTask for EtcdLease {
    fn scheme(&self) -> &'static str {
        SCHEME
    }

    fn poll(&mut self, now: Instant) -> Option<RegistryRequest> {
        if self.stage != Stage::Waiting || now < self.due || (self.paused && !self.withdrawn) {
            return None;
        }
        let lease = self.lease.as_deref();
        let (path, body) = match self.next {
            Stage::Putting => {
                let (key, value) = (encode(&self.key), encode(&self.value));
                self.is_stale = false;
                ("/v3/kv/put", json!({ "key": key, "value": value, "lease": lease }))
            }
            Stage::Keeping => ("/v3/lease/keepalive", json!({ "ID": lease })),
            Stage::Seeking => {
                ("/v3/kv/range", json!({ "key": encode(&self.key), "count_only": true }))
            }
            Stage::Revoking => ("/v3/lease/revoke", json!({ "ID": lease })),
            Stage::Granting | Stage::Waiting | Stage::Over => {
                ("/v3/lease/grant", json!({ "TTL": REGISTRY_ENTRY_LIFE.as_secs() }))
            }
        };
        self.stage = self.next;
        Some(RegistryRequest::new(Verb::Post, path, body.to_string().into_bytes()))
    }

    fn handle_answer(&mut self, status: u16, body: &[u8], now: Instant) -> Result<(), String> {
        #[derive(Deserialize)]
        struct Granted {
            #[serde(rename = "ID")]
            id: String,
        }
        #[derive(Deserialize)]
        struct Kept {
            result: Alive,
        }
        #[derive(Deserialize)]
        struct Alive {
            #[serde(rename = "TTL")]
            ttl: Option<String>,
        }
        #[derive(Deserialize)]
        struct Found {
            count: Option<String>,
        }
        let (stage, later) = (self.stage, now + REGISTRY_RENEWAL);
        if status != 200 {
            // etcd may not know the lease any more. After another refusal, a new lease costs
            // little.
            self.lease = None;
            self.handle_failure(now);
            return Err(refused(status, body));
        }
        let odd = |error: serde_json::Error| format!("its answer cannot be read: {error}");
        let read = match stage {
            Stage::Granting => serde_json::from_slice(body).map(|Granted { id }| {
                self.lease = Some(id);
                self.go_on(Stage::Putting, now);
            }),
            Stage::Keeping => serde_json::from_slice(body).map(|Kept { result }| {
                let lives =
                    result.ttl.and_then(|ttl| ttl.parse::<i64>().ok()).is_some_and(|ttl| ttl > 0);
                if !lives {
                    self.lease = None;
                }
                self.go_on(if lives { Stage::Seeking } else { Stage::Granting }, now);
            }),
            Stage::Seeking => {
                serde_json::from_slice(body).map(|Found { count }| match count.as_deref() {
                    None | Some("0") => self.go_on(Stage::Putting, now),
                    Some(_) if self.is_stale => self.go_on(Stage::Putting, now),
                    Some(_) => self.go_on(Stage::Keeping, later),
                })
            }
            Stage::Putting => {
                self.entered.get_or_insert(false);
                self.go_on(Stage::Keeping, later);
                Ok(())
            }
            Stage::Revoking => {
                self.lease = None;
                self.go_on(Stage::Granting, now);
                Ok(())
            }
            Stage::Waiting | Stage::Over => Ok(()),
        };
        read.map_err(|error| {
            self.handle_failure(now);
            odd(error)
        })
    }

    fn handle_piece(&mut self, _: &[u8], _: Instant) -> Result<(), String> {
        Ok(())
    }

    fn is_first_kept(&mut self) -> bool {
        self.entered.as_mut().is_some_and(|kept| !std::mem::replace(kept, true))
    }

    fn handle_failure(&mut self, now: Instant) {
        if self.withdrawn {
            // If the lease cannot be revoked, it expires by itself.
            self.lease = None;
        }
        let next = match (&self.lease, self.stage) {
            (None, _) => Stage::Granting,
            (Some(_), Stage::Putting) => Stage::Putting,
            (Some(_), _) => Stage::Keeping,
        };
        self.go_on(next, now + REGISTRY_RETRY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::etcd::tests::entry;

    /// Polls, answers with this, and returns the last part of the request's path.
    fn step(ours: &mut EtcdLease, now: Instant, answer: &str) -> &'static str {
        let request = ours.poll(now).expect("something is due");
        assert_eq!(ours.poll(now), None, "one at a time");
        ours.handle_answer(200, answer.as_bytes(), now).unwrap();
        request.path.rsplit('/').next().unwrap()
    }

    const GRANTED: &str = r#"{"ID":"77","TTL":"6"}"#;
    const ALIVE: &str = r#"{"result":{"ID":"77","TTL":"6"}}"#;
    const THERE: &str = r#"{"header":{},"count":"1"}"#;

    #[test]
    fn an_entry_is_put_kept_put_again_if_it_is_lost_and_revoked() {
        let mut now = Instant::now();
        let mut ours = EtcdLease::new(&entry(1, 1), None, now);
        assert_eq!([step(&mut ours, now, GRANTED), step(&mut ours, now, "{}")], ["grant", "put"]);
        assert_eq!(ours.poll(now), None);
        now += REGISTRY_RENEWAL;
        assert_eq!(
            [step(&mut ours, now, ALIVE), step(&mut ours, now, THERE)],
            ["keepalive", "range"]
        );
        now += REGISTRY_RENEWAL;
        // The lease is there; the key under it is not.
        assert_eq!(
            [step(&mut ours, now, ALIVE), step(&mut ours, now, "{}")],
            ["keepalive", "range"]
        );
        assert_eq!(step(&mut ours, now, "{}"), "put");
        now += REGISTRY_RENEWAL;
        // Lease and key are missing: etcd was restarted empty.
        assert_eq!(step(&mut ours, now, r#"{"result":{"ID":"77"}}"#), "keepalive");
        assert_eq!([step(&mut ours, now, GRANTED), step(&mut ours, now, "{}")], ["grant", "put"]);
        ours.withdraw(now);
        assert_eq!(step(&mut ours, now, "{}"), "revoke");
        assert!(ours.is_over() && ours.poll(now + REGISTRY_RENEWAL).is_none());
    }

    #[test]
    fn an_etcd_that_is_away_is_asked_again_and_a_lease_it_does_not_know_is_replaced() {
        let mut now = Instant::now();
        let mut ours = EtcdLease::new(&entry(1, 1), None, now);
        step(&mut ours, now, GRANTED);
        ours.poll(now).unwrap();
        ours.handle_failure(now);
        assert_eq!(ours.poll(now), None);
        now += REGISTRY_RETRY;
        assert_eq!(ours.poll(now).unwrap().path, "/v3/kv/put", "the lease may stand");
        assert!(
            ours.handle_answer(404, b"lease not found", now)
                .unwrap_err()
                .contains("lease not found")
        );
        now += REGISTRY_RETRY;
        assert_eq!(ours.poll(now).unwrap().path, "/v3/lease/grant");
        assert!(ours.handle_answer(200, b"?", now).is_err());
        ours.withdraw(now);
        assert!(ours.is_over(), "nothing was entered");
    }
}

//! A worker's entry in etcd: put under a lease, which is kept alive, and revoked at the end.
//!
//! ```text
//!            no lease              granted           put                    alive       there
//!  waiting ───────────▶ granting ─────────▶ putting ─────▶ waiting ──▶ keeping ──▶ seeking ──▶ waiting
//!     ▲                                        ▲              │ withdrawn: revoking ──▶ over     │
//!     └── keeping: the lease has ended         └─────────────────────────────── not there ──────┘
//! ```
//! Pure. The key is looked for after each keep-alive, since an etcd that was set back may have the lease without it.

use super::{SCHEME, encode, key_of, refused, write};
use crate::cluster::entry::Entry;
use crate::cluster::errand::{Errand, Request, Verb};
use crate::config::secret::Secret;
use crate::limits::{REGISTRY_ENTRY_LIFE, REGISTRY_RENEWAL, REGISTRY_RETRY};
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
pub struct EtcdEnrolment {
    key: String,
    entry: Entry,
    value: Vec<u8>,
    /// What etcd has is another value.
    is_stale: bool,
    stage: Stage,
    /// What comes at `due`.
    next: Stage,
    due: Instant,
    /// As etcd writes it.
    lease: Option<String>,
    /// Whether etcd has ever taken the entry, and then whether that was told.
    entered: Option<bool>,
    withdrawn: bool,
    paused: bool,
}

impl EtcdEnrolment {
    /// Due at once; `cluster_key` is proven in the value.
    pub fn new(entry: &Entry, cluster_key: Option<&Secret>, now: Instant) -> EtcdEnrolment {
        EtcdEnrolment {
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

    /// Proves this key in the value from now on; what etcd has is replaced at the next turn.
    pub fn set_key(&mut self, cluster_key: Option<&Secret>) {
        self.value = write(&self.entry, cluster_key);
        self.is_stale = true;
    }

    /// Takes the entry back, and keeps none from now on.
    pub fn withdraw(&mut self, now: Instant) {
        self.withdrawn = true;
        if self.stage == Stage::Waiting {
            self.go_on(Stage::Keeping, now);
        }
    }

    /// Whether renewing rests: a worker that hangs is to look dead.
    pub fn pause(&mut self, paused: bool) {
        self.paused = paused;
    }

    /// Whether nothing more will be asked.
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

impl Errand for EtcdEnrolment {
    fn scheme(&self) -> &'static str {
        SCHEME
    }

    fn poll(&mut self, now: Instant) -> Option<Request> {
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
        Some(Request::new(Verb::Post, path, body.to_string().into_bytes()))
    }

    fn answered(&mut self, status: u16, body: &[u8], now: Instant) -> Result<(), String> {
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
            // A lease that is unknown; any other refusal costs no more than a new one.
            self.lease = None;
            self.failed(now);
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
            self.failed(now);
            odd(error)
        })
    }

    fn piece(&mut self, _: &[u8], _: Instant) -> Result<(), String> {
        Ok(())
    }

    fn is_first_kept(&mut self) -> bool {
        self.entered.as_mut().is_some_and(|told| !std::mem::replace(told, true))
    }

    fn failed(&mut self, now: Instant) {
        if self.withdrawn {
            // What could not be taken back ends by itself.
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
    use crate::cluster::etcd::tests::entry;

    /// What is asked, in short, answered so.
    fn step(ours: &mut EtcdEnrolment, now: Instant, answer: &str) -> &'static str {
        let request = ours.poll(now).expect("something is due");
        assert_eq!(ours.poll(now), None, "one at a time");
        ours.answered(200, answer.as_bytes(), now).unwrap();
        request.path.rsplit('/').next().unwrap()
    }

    const GRANTED: &str = r#"{"ID":"77","TTL":"6"}"#;
    const ALIVE: &str = r#"{"result":{"ID":"77","TTL":"6"}}"#;
    const THERE: &str = r#"{"header":{},"count":"1"}"#;

    #[test]
    fn an_entry_is_put_kept_put_again_where_it_is_lost_and_revoked() {
        let mut now = Instant::now();
        let mut ours = EtcdEnrolment::new(&entry(1, 1), None, now);
        assert_eq!([step(&mut ours, now, GRANTED), step(&mut ours, now, "{}")], ["grant", "put"]);
        assert_eq!(ours.poll(now), None);
        now += REGISTRY_RENEWAL;
        assert_eq!(
            [step(&mut ours, now, ALIVE), step(&mut ours, now, THERE)],
            ["keepalive", "range"]
        );
        now += REGISTRY_RENEWAL;
        // The lease is there, what was under it is not.
        assert_eq!(
            [step(&mut ours, now, ALIVE), step(&mut ours, now, "{}")],
            ["keepalive", "range"]
        );
        assert_eq!(step(&mut ours, now, "{}"), "put");
        now += REGISTRY_RENEWAL;
        // Neither is there: it was restarted empty.
        assert_eq!(step(&mut ours, now, r#"{"result":{"ID":"77"}}"#), "keepalive");
        assert_eq!([step(&mut ours, now, GRANTED), step(&mut ours, now, "{}")], ["grant", "put"]);
        ours.withdraw(now);
        assert_eq!(step(&mut ours, now, "{}"), "revoke");
        assert!(ours.is_over() && ours.poll(now + REGISTRY_RENEWAL).is_none());
    }

    #[test]
    fn an_etcd_that_is_away_is_asked_again_and_a_lease_it_does_not_know_is_replaced() {
        let mut now = Instant::now();
        let mut ours = EtcdEnrolment::new(&entry(1, 1), None, now);
        step(&mut ours, now, GRANTED);
        ours.poll(now).unwrap();
        ours.failed(now);
        assert_eq!(ours.poll(now), None);
        now += REGISTRY_RETRY;
        assert_eq!(ours.poll(now).unwrap().path, "/v3/kv/put", "the lease may stand");
        assert!(
            ours.answered(404, b"lease not found", now).unwrap_err().contains("lease not found")
        );
        now += REGISTRY_RETRY;
        assert_eq!(ours.poll(now).unwrap().path, "/v3/lease/grant");
        assert!(ours.answered(200, b"?", now).is_err());
        ours.withdraw(now);
        assert!(ours.is_over(), "nothing was entered");
    }
}

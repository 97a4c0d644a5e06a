//! The sessions of one decode worker in the load mode. A set-up takes time, and the number of
//! sessions is bounded.
//!
//! Owns: the time at which each session is ready, and its open requests. Production's table chooses
//! the session that gives way. Not here: the bound of a prefill worker, because a fleet has no more
//! decode workers than it; sessions that end by themselves, because no worker dies.

use crate::transfer::manager::destination::{SessionTable, Standing, Vacancy};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The session with one prefill worker.
#[derive(Clone, Copy, Debug)]
struct Session {
    ready: Instant,
    /// The time at which its last request came.
    used: Instant,
    open: u32,
}

/// All sessions of a decode worker, by the number of the prefill worker's host.
#[derive(Debug)]
pub struct Sessions {
    table: SessionTable<usize>,
    by_source: BTreeMap<usize, Session>,
    /// Number of set-ups.
    pub set_up: u64,
    /// Number of sessions that ended for another.
    pub replaced: u64,
}

impl Sessions {
    /// No session, and a bound.
    pub fn new(sessions: usize) -> Sessions {
        let table = SessionTable::new(sessions);
        Sessions { table, by_source: BTreeMap::new(), set_up: 0, replaced: 0 }
    }

    /// Adds a request with a prompt that `source` computes. A new session is ready after `takes`.
    /// Returns the time at which the request has its session. `None`: each session has a request.
    pub fn enter(&mut self, source: usize, now: Instant, takes: Duration) -> Option<Instant> {
        if !self.by_source.contains_key(&source) {
            let Vacancy { session, replaced } = self.table.find_vacancy(|source| {
                let Session { ready, used, open } = self.by_source[source];
                if open > 0 || ready > now { Standing::Busy } else { Standing::Idle(used) }
            })?;
            self.set_up += 1;
            if let Some(replaced) = replaced {
                self.replaced += 1;
                self.by_source.remove(&replaced);
            }
            self.table.assign(session, source);
            self.by_source.insert(source, Session { ready: now + takes, used: now, open: 0 });
        }
        let session = self.by_source.get_mut(&source)?;
        (session.used, session.open) = (now, session.open + 1);
        Some(session.ready.max(now))
    }

    /// Ends a request.
    ///
    /// # Panics
    /// The session has no request.
    pub fn leave(&mut self, source: usize) {
        let session = self.by_source.get_mut(&source).expect("a session with a request stays");
        session.open = session.open.checked_sub(1).expect("the request has entered");
    }

    /// Whether no session has a request.
    pub fn is_idle(&self) -> bool {
        self.by_source.values().all(|session| session.open == 0)
    }
}

//! The word by which a team's threads meet: a numbered phase that is open or closed, and how many helpers are at work
//! in it.
//!
//! The caller opens and closes, helpers join and leave. Invariants: who has joined is counted until it leaves, nobody
//! joins a closed phase, and each joins a phase once. What the caller wrote before it opened is seen by who joins;
//! what helpers did before they left by a caller that has found the phase [`Phase::is_empty`].

use super::sync::{AtomicU64, Ordering};

/// Phases are numbered; the number stands above the closed bit and the count of helpers at work.
const NUMBER: u64 = 1 << 32;
const CLOSED: u64 = 1 << 31;

/// See the module. The first is closed and has no number.
#[derive(Debug)]
pub struct Phase {
    state: AtomicU64,
}

/// The number of a phase that a helper has joined; 0 before its first.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Joined(u64);

impl Phase {
    /// Closed.
    pub fn new() -> Phase {
        Phase { state: AtomicU64::new(CLOSED) }
    }

    /// The next one. The caller has closed the one before and found it empty.
    pub fn open(&self) {
        let number = self.state.load(Ordering::Relaxed) & !(NUMBER - 1);
        self.state.store(number.wrapping_add(NUMBER), Ordering::SeqCst);
    }

    /// Nobody joins any more.
    pub fn close(&self) {
        self.state.fetch_or(CLOSED, Ordering::AcqRel);
    }

    /// Whether all who had joined have left.
    pub fn is_empty(&self) -> bool {
        // SeqCst, as a caller that is about to park has said so before it looks.
        self.state.load(Ordering::SeqCst) & (CLOSED - 1) == 0
    }

    /// Joins the open phase, if it is not the one joined last.
    pub fn join(&self, last: Joined) -> Option<Joined> {
        let mut state = self.state.load(Ordering::Acquire);
        loop {
            let number = state & !(NUMBER - 1);
            if state & CLOSED != 0 || number == last.0 {
                return None;
            }
            let joined = self.state.compare_exchange_weak(
                state,
                state + 1,
                Ordering::AcqRel,
                Ordering::Acquire,
            );
            match joined {
                Ok(_) => return Some(Joined(number)),
                Err(now) => state = now,
            }
        }
    }

    /// Leaves it. True for the last of a closed phase.
    pub fn leave(&self) -> bool {
        let state = self.state.fetch_sub(1, Ordering::SeqCst) - 1;
        state & (NUMBER - 1) == CLOSED
    }
}

impl Default for Phase {
    fn default() -> Phase {
        Phase::new()
    }
}

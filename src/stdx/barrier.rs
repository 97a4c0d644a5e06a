//! The word that synchronises the threads of a team. It holds a numbered phase, open or closed, and
//! the number of helpers at work in it.
//!
//! Thread: the caller opens and closes; helpers join and leave. Invariants: a helper that has
//! joined is counted until it leaves. No helper joins a closed phase, and each helper joins a phase
//! once. A helper that joins sees what the caller wrote before it opened the phase. A caller that
//! finds the phase [`Barrier::is_empty`] sees what helpers did before they left.

use super::sync::{AtomicU64, Ordering};

/// The phase number stands above the closed bit and the count of helpers at work.
const NUMBER: u64 = 1 << 32;
const CLOSED: u64 = 1 << 31;

/// See the module. The first phase is closed and has no number.
#[derive(Debug)]
pub struct Barrier {
    state: AtomicU64,
}

/// The number of a phase that a helper has joined; 0 before its first.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PhaseNumber(u64);

impl Barrier {
    /// A closed barrier.
    pub fn new() -> Barrier {
        Barrier { state: AtomicU64::new(CLOSED) }
    }

    /// Opens the next phase. The caller has closed the previous one and found it empty.
    pub fn open(&self) {
        let number = self.state.load(Ordering::Relaxed) & !(NUMBER - 1);
        self.state.store(number.wrapping_add(NUMBER), Ordering::SeqCst);
    }

    /// No helper joins after this.
    pub fn close(&self) {
        self.state.fetch_or(CLOSED, Ordering::AcqRel);
    }

    /// Whether all helpers that joined have left.
    pub fn is_empty(&self) -> bool {
        // SeqCst: a caller that is about to park has set its flag before it looks.
        self.state.load(Ordering::SeqCst) & (CLOSED - 1) == 0
    }

    /// Joins the open phase, if it is not the one joined last.
    pub fn join(&self, last: PhaseNumber) -> Option<PhaseNumber> {
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
                Ok(_) => return Some(PhaseNumber(number)),
                Err(now) => state = now,
            }
        }
    }

    /// Leaves the phase. Returns true for the last helper of a closed phase.
    pub fn leave(&self) -> bool {
        let state = self.state.fetch_sub(1, Ordering::SeqCst) - 1;
        state & (NUMBER - 1) == CLOSED
    }
}

impl Default for Barrier {
    fn default() -> Barrier {
        Barrier::new()
    }
}

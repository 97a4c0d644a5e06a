//! What moving KV took, summed over all transfers of a worker: written by `move` and `copy-i`, read by anybody. And how many
//! sessions had which transport.

use crate::transfer::manager::choice::Choice;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts since the start.
#[derive(Default, Debug)]
pub struct Tally {
    work_requests: AtomicU64,
    doorbells: AtomicU64,
    /// Written by `ctl`.
    sessions: [AtomicU64; Choice::ALL.len()],
}

/// A tally at some moment.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Counts {
    /// Pieces that bytes moved in: copies of shm, frames of tcp, work requests of rdma.
    pub work_requests: u64,
    /// Times that somebody was told of some: wake-ups of shm, system calls of tcp, doorbells of rdma.
    pub doorbells: u64,
}

impl Tally {
    /// Adds to both.
    pub fn add(&self, work_requests: u64, doorbells: u64) {
        self.work_requests.fetch_add(work_requests, Ordering::Relaxed);
        self.doorbells.fetch_add(doorbells, Ordering::Relaxed);
    }

    /// A session is set up so.
    pub fn count_session(&self, choice: Choice) {
        self.sessions[choice.index()].fetch_add(1, Ordering::Relaxed);
    }

    /// Sessions so far, as in [`Choice::ALL`].
    pub fn sessions(&self) -> [u64; Choice::ALL.len()] {
        std::array::from_fn(|index| self.sessions[index].load(Ordering::Relaxed))
    }

    /// The counts now.
    pub fn counts(&self) -> Counts {
        Counts {
            work_requests: self.work_requests.load(Ordering::Relaxed),
            doorbells: self.doorbells.load(Ordering::Relaxed),
        }
    }
}

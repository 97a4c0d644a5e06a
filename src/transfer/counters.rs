//! Transfer counters of a worker: work requests and doorbells of all transfers, written by `move`,
//! `copy-i` and `post-n`, read by any thread. Also the number of sessions per transport.

use crate::transfer::manager::choice::TransportChoice;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts since the start.
#[derive(Default, Debug)]
pub struct Counters {
    work_requests: AtomicU64,
    doorbells: AtomicU64,
    /// Written by `ctl`.
    sessions: [AtomicU64; TransportChoice::ALL.len()],
}

/// The counters at one moment.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Counts {
    /// Work requests: copies of shm, frames of tcp, work requests of rdma.
    pub work_requests: u64,
    /// Notifications of work requests: wake-ups of shm, system calls of tcp, doorbells of rdma.
    pub doorbells: u64,
}

impl Counters {
    /// Adds to both counters.
    pub fn add(&self, work_requests: u64, doorbells: u64) {
        self.work_requests.fetch_add(work_requests, Ordering::Relaxed);
        self.doorbells.fetch_add(doorbells, Ordering::Relaxed);
    }

    /// Counts a session that was set up with this choice.
    pub fn count_session(&self, choice: TransportChoice) {
        self.sessions[choice.index()].fetch_add(1, Ordering::Relaxed);
    }

    /// Sessions since start, in the order of [`TransportChoice::ALL`].
    pub fn sessions(&self) -> [u64; TransportChoice::ALL.len()] {
        std::array::from_fn(|index| self.sessions[index].load(Ordering::Relaxed))
    }

    /// The current counts.
    pub fn counts(&self) -> Counts {
        Counts {
            work_requests: self.work_requests.load(Ordering::Relaxed),
            doorbells: self.doorbells.load(Ordering::Relaxed),
        }
    }
}

//! The threads that copy together with the mover: the lanes of shm.
//!
//! Threads: `copy-i`. The mover's thread calls them, copies too, and waits for the threads that
//! joined. A thread that joins late or not at all delays no other. The threads own nothing, and no
//! part of a copy outlives the call.

use super::thread_names::COPY;
use crate::stdx::disjoint_parts::Count;
use crate::stdx::team::Team;
use std::sync::{Arc, Mutex};
use std::{fmt, io};

/// The copy threads, shared by all sessions of a process. By default only the caller copies.
#[derive(Clone, Default)]
pub struct CopyPool(Option<Arc<Mutex<Team>>>);

impl CopyPool {
    /// A pool of `lanes` threads, the caller's own included. The others have the CPUs of the thread
    /// that calls this function.
    pub fn new(lanes: usize) -> io::Result<CopyPool> {
        if lanes < 2 {
            return Ok(CopyPool(None));
        }
        Ok(CopyPool(Some(Arc::new(Mutex::new(Team::new(COPY, lanes, |_| ())?)))))
    }

    /// Whether the pool has more than one lane.
    pub fn are_several(&self) -> bool {
        self.0.is_some()
    }

    /// Runs `task` once for each index below `count`, and returns when all have ended.
    pub fn share(&self, count: usize, task: impl Fn(usize) + Sync) {
        match &self.0 {
            // Only the mover's thread calls this. A second caller at the same time would copy alone
            // and not wait.
            Some(team) if count > 1 => match team.try_lock() {
                Ok(mut team) => team.run(Count(count), |index, ()| task(index)),
                Err(_) => (0..count).for_each(task),
            },
            _ => (0..count).for_each(task),
        }
    }
}

impl fmt::Debug for CopyPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.are_several() { "CopyPool(several)" } else { "CopyPool(one)" })
    }
}

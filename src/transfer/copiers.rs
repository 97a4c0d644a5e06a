//! The threads that copy beside the mover: lanes of shm.
//!
//! Threads: `copy-i`, called by the mover's, which takes part and waits for those who joined; one that joins late, or
//! not at all, delays nobody. They own nothing, and nothing of a copy outlives the call.

use crate::stdx::parts::Count;
use crate::stdx::team::Team;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex};

/// Shared by the sessions of a process; by default nobody beside the caller.
#[derive(Clone, Default)]
pub struct Copiers(Option<Arc<Mutex<Team>>>);

impl Copiers {
    /// So many lanes, the caller's own included.
    pub fn new(lanes: usize) -> io::Result<Copiers> {
        if lanes < 2 {
            return Ok(Copiers(None));
        }
        Ok(Copiers(Some(Arc::new(Mutex::new(Team::new("copy", lanes, None)?)))))
    }

    /// Whether there is more than one lane.
    pub fn are_several(&self) -> bool {
        self.0.is_some()
    }

    /// Runs `task` once for each index below `count`, and returns when all have ended.
    pub fn share(&self, count: usize, task: impl Fn(usize) + Sync) {
        match &self.0 {
            // Only the mover's thread calls; another would go alone, and not wait.
            Some(team) if count > 1 => match team.try_lock() {
                Ok(mut team) => team.run(Count(count), |index, ()| task(index)),
                Err(_) => (0..count).for_each(task),
            },
            _ => (0..count).for_each(task),
        }
    }
}

impl fmt::Debug for Copiers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.are_several() { "Copiers(several)" } else { "Copiers(one)" })
    }
}

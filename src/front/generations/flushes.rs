//! Clients that wait for the workers' prefix caches to be emptied.
//!
//! Thread: `ctl`. Invariant: each worker answers in order, so its answer is for the first who waits for it.

use crate::front::openai::ApiError;
use crate::ids::WorkerId;
use crate::limits::FLUSHES_MAX;
use crate::net::ConnId;
use std::collections::VecDeque;

/// Those that wait, in order.
#[derive(Default, Debug)]
pub struct Flushes(VecDeque<Flush>);

#[derive(Debug)]
struct Flush {
    /// None: it has gone.
    conn: Option<ConnId>,
    awaited: Vec<WorkerId>,
    pages: u64,
}

impl Flushes {
    /// A client waits for all of `workers`.
    ///
    /// # Errors
    /// Too many wait.
    pub fn begin(&mut self, conn: ConnId, workers: &[WorkerId]) -> Result<(), ApiError> {
        if self.0.len() >= FLUSHES_MAX {
            return Err(ApiError::overloaded(1));
        }
        self.0.push_back(Flush { conn: Some(conn), awaited: workers.to_vec(), pages: 0 });
        Ok(())
    }

    /// A worker's cache is empty: who has waited for it last of all, and the pages that became free for it.
    pub fn done(&mut self, worker: WorkerId, pages: u32) -> Option<(ConnId, u64)> {
        let first = self.0.iter_mut().find(|flush| flush.awaited.contains(&worker))?;
        first.awaited.retain(|&awaited| awaited != worker);
        first.pages += u64::from(pages);
        let Flush { conn, pages, .. } = self.0.pop_front_if(|flush| flush.awaited.is_empty())?;
        Some((conn?, pages))
    }

    /// A client has gone.
    pub fn gone(&mut self, conn: ConnId) {
        self.0.iter_mut().filter(|flush| flush.conn == Some(conn)).for_each(|flush| flush.conn = None);
    }
}

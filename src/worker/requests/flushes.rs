//! Clients that wait until the workers' prefix caches are empty.
//!
//! Thread: `ctl`. Invariant: each worker answers flushes in order. Its answer belongs to the oldest
//! flush that waits for that worker.

use crate::api::ApiError;
use crate::ids::WorkerId;
use crate::limits::{FLUSH_TIME, FLUSHES_MAX};
use std::collections::VecDeque;
use std::time::Instant;

/// Waiting flushes, oldest first; `C` names a client.
#[derive(Debug)]
pub struct PendingFlushes<C>(VecDeque<Flush<C>>);

#[derive(Debug)]
struct Flush<C> {
    /// `None`: the client has disconnected, or got an error because it waited too long.
    conn: Option<C>,
    awaited: Vec<WorkerId>,
    until: Instant,
    pages: u64,
}

impl<C> Default for PendingFlushes<C> {
    fn default() -> PendingFlushes<C> {
        PendingFlushes(VecDeque::new())
    }
}

impl<C: Copy + PartialEq> PendingFlushes<C> {
    /// Adds a client that waits for all of `workers`.
    ///
    /// # Errors
    /// [`FLUSHES_MAX`] flushes already wait.
    pub fn begin(&mut self, conn: C, workers: &[WorkerId], now: Instant) -> Result<(), ApiError> {
        if self.0.len() >= FLUSHES_MAX {
            let why = format!(
                "{FLUSHES_MAX} requests already wait for a flush, which is the limit; try again \
                 later"
            );
            return Err(ApiError::busy(why));
        }
        debug_assert!(!workers.is_empty(), "a flush waits for a worker");
        self.0.push_back(Flush {
            conn: Some(conn),
            awaited: workers.to_vec(),
            until: now + FLUSH_TIME,
            pages: 0,
        });
        Ok(())
    }

    /// Records that a worker's cache is empty. If that completes the oldest flush, returns its
    /// client and the number of pages that all workers freed.
    pub fn done(&mut self, worker: WorkerId, pages: u32) -> Option<(C, u64)> {
        let first = self.0.iter_mut().find(|flush| flush.awaited.contains(&worker))?;
        first.awaited.retain(|&awaited| awaited != worker);
        first.pages += u64::from(pages);
        debug_assert!(self.0.len() <= FLUSHES_MAX, "flushes are bounded");
        let ended = self.0.pop_front_if(|flush| flush.awaited.is_empty());
        let is_waiting = |flush: &Flush<C>| !flush.awaited.is_empty();
        debug_assert!(self.0.iter().all(is_waiting), "flushes end in order");
        let Flush { conn, pages, .. } = ended?;
        Some((conn?, pages))
    }

    /// Flushes with outstanding answers of workers.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Whether no worker's answer is outstanding.
    pub fn is_idle(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether no client waits. A worker that hangs can still owe an answer.
    pub fn is_answered(&self) -> bool {
        self.0.iter().all(|flush| flush.conn.is_none())
    }

    /// The next client that has waited too long. Its flush keeps its place in the order.
    pub fn overdue(&mut self, now: Instant) -> Option<C> {
        self.0.iter_mut().filter(|flush| flush.until <= now).find_map(|flush| flush.conn.take())
    }

    /// Forgets a client that has disconnected.
    pub fn gone(&mut self, conn: C) {
        self.0
            .iter_mut()
            .filter(|flush| flush.conn == Some(conn))
            .for_each(|flush| flush.conn = None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORKERS: [WorkerId; 2] = [WorkerId(0), WorkerId(1)];

    #[test]
    fn the_oldest_flush_is_answered_when_the_last_worker_has_answered() {
        let (mut flushes, now) = (PendingFlushes::default(), Instant::now());
        flushes.begin(1, &WORKERS, now).unwrap();
        assert_eq!(flushes.done(WORKERS[0], 3), None);
        flushes.begin(2, &WORKERS, now).unwrap();
        assert_eq!(flushes.done(WORKERS[0], 0), None, "the second one's");
        assert_eq!(flushes.done(WORKERS[1], 4), Some((1, 7)));
        assert!(!flushes.is_idle());
        assert_eq!(flushes.done(WORKERS[1], 5), Some((2, 5)));
        assert!(flushes.is_idle());
        assert_eq!(flushes.done(WORKERS[1], 5), None, "no flush waits");
    }

    #[test]
    fn a_client_that_left_or_timed_out_keeps_its_place_and_gets_no_answer() {
        let (mut flushes, now) = (PendingFlushes::default(), Instant::now());
        flushes.begin(1, &WORKERS[..1], now).unwrap();
        flushes.begin(2, &WORKERS[..1], now).unwrap();
        flushes.begin(3, &WORKERS[..1], now + FLUSH_TIME).unwrap();
        flushes.gone(1);
        assert_eq!(flushes.overdue(now + FLUSH_TIME), Some(2));
        assert_eq!(flushes.overdue(now + FLUSH_TIME), None);
        assert_eq!(flushes.done(WORKERS[0], 1), None);
        assert_eq!(flushes.done(WORKERS[0], 1), None);
        assert_eq!(flushes.done(WORKERS[0], 1), Some((3, 1)));
        for number in 0..FLUSHES_MAX {
            flushes.begin(number, &WORKERS, now).unwrap();
        }
        assert!(flushes.begin(99, &WORKERS, now).is_err());
    }
}

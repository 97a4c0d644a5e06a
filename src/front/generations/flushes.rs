//! Clients that wait for the workers' prefix caches to be emptied.
//!
//! Thread: `ctl`. Invariant: each worker answers in order, so its answer is for the first who waits for it.

use crate::front::openai::ApiError;
use crate::ids::WorkerId;
use crate::limits::{FLUSH_TIME, FLUSHES_MAX};
use std::collections::VecDeque;
use std::time::Instant;

/// Those that wait, in order; `C` names a client.
#[derive(Debug)]
pub struct Flushes<C>(VecDeque<Flush<C>>);

#[derive(Debug)]
struct Flush<C> {
    /// None: it has gone.
    conn: Option<C>,
    awaited: Vec<WorkerId>,
    until: Instant,
    pages: u64,
}

impl<C> Default for Flushes<C> {
    fn default() -> Flushes<C> {
        Flushes(VecDeque::new())
    }
}

impl<C: Copy + PartialEq> Flushes<C> {
    /// A client waits for all of `workers`.
    ///
    /// # Errors
    /// Too many wait.
    pub fn begin(&mut self, conn: C, workers: &[WorkerId], now: Instant) -> Result<(), ApiError> {
        if self.0.len() >= FLUSHES_MAX {
            let why =
                format!("{FLUSHES_MAX} requests wait for a flush, as many as may; try again later");
            return Err(ApiError::busy(why));
        }
        self.0.push_back(Flush {
            conn: Some(conn),
            awaited: workers.to_vec(),
            until: now + FLUSH_TIME,
            pages: 0,
        });
        Ok(())
    }

    /// A worker's cache is empty: who has waited for it last of all, and the pages that became free for it.
    pub fn done(&mut self, worker: WorkerId, pages: u32) -> Option<(C, u64)> {
        let first = self.0.iter_mut().find(|flush| flush.awaited.contains(&worker))?;
        first.awaited.retain(|&awaited| awaited != worker);
        first.pages += u64::from(pages);
        let Flush { conn, pages, .. } = self.0.pop_front_if(|flush| flush.awaited.is_empty())?;
        Some((conn?, pages))
    }

    /// Whether a worker's answer is still to come.
    pub fn is_idle(&self) -> bool {
        self.0.is_empty()
    }

    /// A client that has waited long enough; what it waited for is still to come.
    pub fn overdue(&mut self, now: Instant) -> Option<C> {
        self.0.iter_mut().filter(|flush| flush.until <= now).find_map(|flush| flush.conn.take())
    }

    /// A client has gone.
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
    fn who_asked_first_is_told_when_the_last_worker_has_answered() {
        let (mut flushes, now) = (Flushes::default(), Instant::now());
        flushes.begin(1, &WORKERS, now).unwrap();
        assert_eq!(flushes.done(WORKERS[0], 3), None);
        flushes.begin(2, &WORKERS, now).unwrap();
        assert_eq!(flushes.done(WORKERS[0], 0), None, "the second one's");
        assert_eq!(flushes.done(WORKERS[1], 4), Some((1, 7)));
        assert!(!flushes.is_idle());
        assert_eq!(flushes.done(WORKERS[1], 5), Some((2, 5)));
        assert!(flushes.is_idle());
        assert_eq!(flushes.done(WORKERS[1], 5), None, "nobody asked");
    }

    #[test]
    fn who_has_gone_or_waited_too_long_keeps_its_place_and_hears_nothing() {
        let (mut flushes, now) = (Flushes::default(), Instant::now());
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

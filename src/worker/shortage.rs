//! Logs shortages of KV memory: requests that were retracted, and requests that got new pages.
//!
//! Thread: `ctl`. It reads the engine's counters, because an engine's thread is sealed and does not
//! log. Invariant: at most one line of each kind in [`SHORTAGE_TOLD_EVERY`]. A line counts all
//! events since the previous line.

use crate::limits::SHORTAGE_TOLD_EVERY;
use crate::obs::log::event;
use crate::sched::stats::WorkerStats;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// The log's state of one worker.
#[derive(Debug, Default)]
pub struct ShortageLog {
    logged: Counts,
    /// Earliest time of the next line.
    next: Option<Instant>,
}

/// Counts since the start of the worker.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Counts {
    /// Requests that gave up their pages.
    retracted: u64,
    /// Requests that got new pages.
    resumed: u64,
}

impl ShortageLog {
    /// Reads the counters of a worker of this process.
    pub fn log_new(&mut self, worker: usize, stats: &WorkerStats, now: Instant) {
        let counts = Counts {
            retracted: stats.retracted_total.load(Ordering::Relaxed),
            resumed: stats.resumed_total.load(Ordering::Relaxed),
        };
        let Counts { retracted, resumed } = self.news(counts, now);
        let (waiting, running) = (&stats.retracted, &stats.running);
        if retracted > 0 {
            event!(
                Warn,
                "sched",
                "KV memory ran out: running requests gave up their pages and continue later; see \
                 --kv-memory",
                worker = worker,
                count = retracted,
                waiting = waiting.load(Ordering::Relaxed),
                running = running.load(Ordering::Relaxed),
            );
        }
        if resumed > 0 {
            event!(
                Debug,
                "sched",
                "requests that gave up their pages continue",
                worker = worker,
                count = resumed,
                waiting = waiting.load(Ordering::Relaxed),
            );
        }
    }

    /// The counts to log now.
    fn news(&mut self, counts: Counts, now: Instant) -> Counts {
        if counts == self.logged || self.next.is_some_and(|next| now < next) {
            return Counts::default();
        }
        self.next = Some(now + SHORTAGE_TOLD_EVERY);
        let logged = std::mem::replace(&mut self.logged, counts);
        Counts {
            retracted: counts.retracted - logged.retracted,
            resumed: counts.resumed - logged.resumed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequent_retractions_are_logged_from_time_to_time_with_their_count() {
        let counts = |retracted, resumed| Counts { retracted, resumed };
        let (mut shortage, now) = (ShortageLog::default(), Instant::now());
        assert_eq!(shortage.news(counts(0, 0), now), counts(0, 0));
        assert_eq!(shortage.news(counts(3, 0), now), counts(3, 0), "the first at once");
        assert_eq!(shortage.news(counts(9, 2), now + SHORTAGE_TOLD_EVERY / 2), counts(0, 0));
        assert_eq!(shortage.news(counts(10, 4), now + SHORTAGE_TOLD_EVERY), counts(7, 4));
        assert_eq!(shortage.news(counts(10, 4), now + 3 * SHORTAGE_TOLD_EVERY), counts(0, 0));
    }
}

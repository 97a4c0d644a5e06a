//! Says in the log when KV memory runs out: that running requests gave up their pages, and that they have new ones.
//!
//! Thread: `ctl`, which looks at what the engine has counted, since an engine's thread is sealed and logs nothing.
//! Invariant: at most one line of each kind in [`SHORTAGE_TOLD_EVERY`], with all since the one before.

use crate::limits::SHORTAGE_TOLD_EVERY;
use crate::obs::log::event;
use crate::sched::stats::WorkerStats;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// What was said of one worker.
#[derive(Debug, Default)]
pub struct Shortage {
    told: Counts,
    /// When more may be said.
    next: Option<Instant>,
}

/// Times since the start of the worker.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Counts {
    /// That a request gave up its pages,
    retracted: u64,
    /// and that one got new ones.
    resumed: u64,
}

impl Shortage {
    /// Looks at the figures of a worker of this process.
    pub fn look(&mut self, worker: usize, stats: &WorkerStats, now: Instant) {
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
                "KV memory ran out: running requests gave up their pages, and go on later; see --kv-memory",
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
                "requests that gave up their pages go on",
                worker = worker,
                count = resumed,
                waiting = waiting.load(Ordering::Relaxed),
            );
        }
    }

    /// What is to be said now.
    fn news(&mut self, counts: Counts, now: Instant) -> Counts {
        if counts == self.told || self.next.is_some_and(|next| now < next) {
            return Counts::default();
        }
        self.next = Some(now + SHORTAGE_TOLD_EVERY);
        let told = std::mem::replace(&mut self.told, counts);
        Counts {
            retracted: counts.retracted - told.retracted,
            resumed: counts.resumed - told.resumed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_happens_often_is_said_at_times_with_its_count() {
        let counts = |retracted, resumed| Counts { retracted, resumed };
        let (mut shortage, now) = (Shortage::default(), Instant::now());
        assert_eq!(shortage.news(counts(0, 0), now), counts(0, 0));
        assert_eq!(shortage.news(counts(3, 0), now), counts(3, 0), "the first at once");
        assert_eq!(shortage.news(counts(9, 2), now + SHORTAGE_TOLD_EVERY / 2), counts(0, 0));
        assert_eq!(shortage.news(counts(10, 4), now + SHORTAGE_TOLD_EVERY), counts(7, 4));
        assert_eq!(shortage.news(counts(10, 4), now + 3 * SHORTAGE_TOLD_EVERY), counts(0, 0));
    }
}

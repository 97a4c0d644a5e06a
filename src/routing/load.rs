//! The load of workers in a router: its own reservations, and the load that workers report beyond
//! these.
//!
//! The router reserves the work at the choice, so that a burst spreads before a worker could report
//! it. When a worker answers, the prompt tokens of its reservation count as computed.
//! Load beyond the reservations is foreign: it comes from another router, or from this router
//! before a restart. It counts until the next report. No choice waits for a report.

use std::time::{Duration, Instant};

/// A worker behind a router, numbered in the order of joining. Numbers are never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct WorkerNumber(pub usize);

/// The load of one worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct WorkerLoad {
    /// Whether it can be chosen.
    pub usable: bool,
    /// Unfinished sequences that this router gave it.
    pub reserved: u32,
    /// Time until which it is chosen last, because a request failed there.
    pub suspect: Option<Instant>,
    /// Prompt tokens that it still has to compute.
    pub uncomputed: u64,
    /// The predicted time to compute them.
    pub reading: Duration,
    /// Time at which it started to compute the first of them.
    pub since: Option<Instant>,
    /// Prompt tokens of the sequences that it generates or will generate.
    pub context: u64,
    /// Load that other routers gave it.
    pub others: ForeignLoad,
}

/// Load of a worker that does not come from this router.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ForeignLoad {
    /// Sequences.
    pub sequences: u32,
    /// Prompt tokens that are not computed.
    pub uncomputed: u64,
    /// The predicted time to compute them.
    pub reading: Duration,
    /// Prompt tokens of those sequences.
    pub context: u64,
}

/// The load that a worker reports, from all sources.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LoadReport {
    /// Running and waiting sequences.
    pub sequences: u32,
    /// Prompt tokens that are not computed.
    pub uncomputed: u64,
    /// Tokens of KV in use.
    pub used: u64,
}

/// The reservations on a worker at one time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ReservedLoad {
    sequences: u32,
    uncomputed: u64,
}

impl LoadReport {
    /// The foreign part of this report. `before` are the reservations at the time of the request
    /// for it. The worker can have counted those or the present ones, so the larger number counts
    /// as ours. A single router therefore gets no foreign load.
    ///
    /// The used tokens are foreign in the same share as the sequences. `reading` stays zero.
    pub fn beyond(&self, before: ReservedLoad, now: &WorkerLoad) -> ForeignLoad {
        let ReservedLoad { sequences, uncomputed } = now.reserved();
        let sequences = self.sequences.saturating_sub(sequences.max(before.sequences));
        let share = self.used.saturating_mul(sequences.into());
        ForeignLoad {
            sequences,
            uncomputed: if sequences > 0 {
                self.uncomputed.saturating_sub(uncomputed.max(before.uncomputed))
            } else {
                0
            },
            reading: Duration::ZERO,
            context: share.checked_div(self.sequences.into()).unwrap_or(0),
        }
    }
}

impl WorkerLoad {
    /// Sequences that it has, ours and foreign.
    pub fn sequences(&self) -> u32 {
        self.reserved.saturating_add(self.others.sequences)
    }

    /// Prompt tokens that it has not computed, ours and foreign.
    pub fn total_uncomputed(&self) -> u64 {
        self.uncomputed.saturating_add(self.others.uncomputed)
    }

    /// Prompt tokens of its sequences, ours and foreign.
    pub fn total_context(&self) -> u64 {
        self.context.saturating_add(self.others.context)
    }

    /// The present reservations on it.
    pub fn reserved(&self) -> ReservedLoad {
        ReservedLoad { sequences: self.reserved, uncomputed: self.uncomputed }
    }

    /// Replaces its foreign load.
    pub fn set_others(&mut self, others: ForeignLoad, now: Instant) {
        self.others = others;
        self.since = match self.total_uncomputed() {
            0 => None,
            _ => self.since.filter(|_| self.uncomputed > 0).or(Some(now)),
        };
    }

    /// The predicted time for all prompt tokens that it must compute, from `since` on.
    pub fn prefill_time(&self) -> Duration {
        self.reading.saturating_add(self.others.reading)
    }

    /// The rest of that time at `now`.
    pub fn queue(&self, now: Instant) -> Duration {
        let passed =
            self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        self.prefill_time().saturating_sub(passed)
    }

    /// Adds tokens that it has to compute in this time.
    pub fn add_prefill(&mut self, tokens: u32, time: Duration, now: Instant) {
        if self.total_uncomputed() == 0 {
            self.since = Some(now);
        }
        self.uncomputed += u64::from(tokens);
        self.reading = self.reading.saturating_add(time);
    }

    /// Removes tokens that it has computed. Its time for the rest starts now.
    pub fn complete_prefill(&mut self, tokens: u32, time: Duration, now: Instant) {
        self.uncomputed -= u64::from(tokens);
        self.reading = self.reading.saturating_sub(time);
        self.since = (self.total_uncomputed() > 0).then_some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reported_load_beyond_the_booked_load_belongs_to_other_routers() {
        let (now, ms) = (Instant::now(), Duration::from_millis);
        let mut load = WorkerLoad {
            reserved: 3,
            uncomputed: 500,
            reading: ms(5),
            since: Some(now),
            ..WorkerLoad::default()
        };
        let report = |sequences, uncomputed| LoadReport { sequences, uncomputed, used: 800 };
        let before = load.reserved();
        assert_eq!(
            report(2, 900).beyond(before, &load),
            ForeignLoad::default(),
            "it has not got all of ours yet"
        );
        let others = report(4, 900).beyond(before, &load);
        assert_eq!(
            others,
            ForeignLoad { sequences: 1, uncomputed: 400, reading: ms(0), context: 200 }
        );
        load.set_others(ForeignLoad { reading: ms(4), ..others }, now + ms(1));
        assert_eq!(
            (load.sequences(), load.total_uncomputed(), load.total_context()),
            (4, 900, 200)
        );
        assert_eq!(load.queue(now + ms(1)), ms(8), "what had begun goes on");
        (load.reserved, load.uncomputed) = (0, 0);
        assert_eq!(
            report(3, 0).beyond(before, &load),
            ForeignLoad::default(),
            "some of ours has just ended"
        );
        let before = load.reserved();
        assert_eq!(report(3, 0).beyond(before, &load).sequences, 3);
        load.complete_prefill(0, ms(5), now + ms(2));
        assert_eq!(load.queue(now + ms(3)), ms(3));
        load.set_others(ForeignLoad::default(), now + ms(4));
        assert_eq!((load.queue(now + ms(4)), load.since), (ms(0), None));
    }

    #[test]
    fn elapsed_time_and_computed_prompts_shorten_the_queue() {
        let (now, ms) = (Instant::now(), Duration::from_millis);
        let mut load = WorkerLoad::default();
        load.add_prefill(100, ms(10), now);
        load.add_prefill(50, ms(5), now + ms(4));
        assert_eq!(load.queue(now + ms(4)), ms(11));
        load.complete_prefill(100, ms(10), now + ms(12));
        assert_eq!((load.queue(now + ms(13)), load.uncomputed), (ms(4), 50));
        load.complete_prefill(50, ms(5), now + ms(16));
        assert_eq!((load.queue(now + ms(17)), load.uncomputed, load.since), (ms(0), 0, None));
    }
}

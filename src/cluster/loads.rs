//! What a router knows of the load on its workers: what it has sent there itself.
//!
//! Booked at the moment of decision, so that a burst spreads before any worker could have reported it; a worker's answer
//! corrects it: what it has read, it is no longer charged with.

use std::time::{Duration, Instant};

/// Names a worker behind a router, in the order in which they joined. It is no other's, also when its worker
/// has left.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct WorkerNumber(pub usize);

/// One worker's row.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Load {
    /// Whether it may be chosen.
    pub usable: bool,
    /// Sequences it was given and has not finished.
    pub booked: u32,
    /// A request failed there: until then it is asked last.
    pub suspect: Option<Instant>,
    /// Tokens of prompts that it is to compute and has not.
    pub unread: u64,
    /// How long it takes for those, by the forecast,
    pub reading: Duration,
    /// and since when it computes the first of them.
    pub since: Option<Instant>,
    /// Tokens of the prompts of the sequences that it generates, or will.
    pub context: u64,
}

impl Load {
    /// How long it still reads what it was given.
    pub fn queue(&self, now: Instant) -> Duration {
        let passed = self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        self.reading.saturating_sub(passed)
    }

    /// It is to read so many tokens more, in so long.
    pub fn reads(&mut self, tokens: u32, time: Duration, now: Instant) {
        if self.unread == 0 {
            self.since = Some(now);
        }
        self.unread += u64::from(tokens);
        self.reading = self.reading.saturating_add(time);
    }

    /// It has read them: what is left it has begun now.
    pub fn has_read(&mut self, tokens: u32, time: Duration, now: Instant) {
        self.unread -= u64::from(tokens);
        self.reading = self.reading.saturating_sub(time);
        self.since = (self.unread > 0).then_some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_shortens_the_queue_and_time_does_before() {
        let (now, ms) = (Instant::now(), Duration::from_millis);
        let mut load = Load::default();
        load.reads(100, ms(10), now);
        load.reads(50, ms(5), now + ms(4));
        assert_eq!(load.queue(now + ms(4)), ms(11));
        load.has_read(100, ms(10), now + ms(12));
        assert_eq!((load.queue(now + ms(13)), load.unread), (ms(4), 50));
        load.has_read(50, ms(5), now + ms(16));
        assert_eq!((load.queue(now + ms(17)), load.unread, load.since), (ms(0), 0, None));
    }
}

//! What a router knows of the load on its workers: what it has sent there itself, and what they report beyond that.
//!
//! Booked at the moment of decision, so that a burst spreads before any worker could have reported it; a worker's answer
//! corrects it: what it has read, it is no longer charged with. What a worker reports beyond that is others' (another
//! router's, or of this one before it was started again), and stands until the next report or until there is none;
//! nobody waits for one.

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
    /// What it has of others.
    pub others: Others,
}

/// What a worker has that this router did not give it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Others {
    /// Sequences.
    pub sequences: u32,
    /// Tokens of prompts that are not computed,
    pub unread: u64,
    /// and how long that takes.
    pub reading: Duration,
    /// Tokens of what those sequences stand on.
    pub context: u64,
}

/// What a worker says that it has, whoever gave it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// Sequences that run or wait.
    pub sequences: u32,
    /// Tokens of prompts that are not computed.
    pub unread: u64,
    /// Tokens of KV that are in use.
    pub used: u64,
}

/// What was booked on a worker at a time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Booked {
    sequences: u32,
    unread: u64,
}

impl Report {
    /// What of this is not ours. `before` was booked when the worker was asked; it may have counted any of what was booked
    /// then or is now, so that the larger is taken to be ours: a router that is alone corrects nothing. Of what is used
    /// others have as large a share as of the sequences. How long they read is not known here.
    pub fn beyond(&self, before: Booked, now: &Load) -> Others {
        let Booked { sequences, unread } = now.booked();
        let sequences = self.sequences.saturating_sub(sequences.max(before.sequences));
        let share = self.used.saturating_mul(sequences.into());
        Others {
            sequences,
            unread: if sequences > 0 {
                self.unread.saturating_sub(unread.max(before.unread))
            } else {
                0
            },
            reading: Duration::ZERO,
            context: share.checked_div(self.sequences.into()).unwrap_or(0),
        }
    }
}

impl Load {
    /// Sequences that it has, ours and others'.
    pub fn sequences(&self) -> u32 {
        self.booked.saturating_add(self.others.sequences)
    }

    /// Tokens of prompts that it has not read, likewise.
    pub fn to_read(&self) -> u64 {
        self.unread.saturating_add(self.others.unread)
    }

    /// Tokens that its sequences stand on, likewise.
    pub fn stands_on(&self) -> u64 {
        self.context.saturating_add(self.others.context)
    }

    /// What is booked on it now.
    pub fn booked(&self) -> Booked {
        Booked { sequences: self.booked, unread: self.unread }
    }

    /// It has this of others, in place of what was known.
    pub fn set_others(&mut self, others: Others, now: Instant) {
        self.others = others;
        self.since = match self.to_read() {
            0 => None,
            _ => self.since.filter(|_| self.unread > 0).or(Some(now)),
        };
    }

    /// How long it reads what it was given, from `since`.
    pub fn reads_for(&self) -> Duration {
        self.reading.saturating_add(self.others.reading)
    }

    /// How long it still does.
    pub fn queue(&self, now: Instant) -> Duration {
        let passed =
            self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        self.reads_for().saturating_sub(passed)
    }

    /// It is to read so many tokens more, in so long.
    pub fn reads(&mut self, tokens: u32, time: Duration, now: Instant) {
        if self.to_read() == 0 {
            self.since = Some(now);
        }
        self.unread += u64::from(tokens);
        self.reading = self.reading.saturating_add(time);
    }

    /// It has read them: what is left it has begun now.
    pub fn has_read(&mut self, tokens: u32, time: Duration, now: Instant) {
        self.unread -= u64::from(tokens);
        self.reading = self.reading.saturating_sub(time);
        self.since = (self.to_read() > 0).then_some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_reported_beyond_what_is_booked_is_others() {
        let (now, ms) = (Instant::now(), Duration::from_millis);
        let mut load =
            Load { booked: 3, unread: 500, reading: ms(5), since: Some(now), ..Load::default() };
        let report = |sequences, unread| Report { sequences, unread, used: 800 };
        let before = load.booked();
        assert_eq!(
            report(2, 900).beyond(before, &load),
            Others::default(),
            "it has not got all of ours yet"
        );
        let others = report(4, 900).beyond(before, &load);
        assert_eq!(others, Others { sequences: 1, unread: 400, reading: ms(0), context: 200 });
        load.set_others(Others { reading: ms(4), ..others }, now + ms(1));
        assert_eq!((load.sequences(), load.to_read(), load.stands_on()), (4, 900, 200));
        assert_eq!(load.queue(now + ms(1)), ms(8), "what had begun goes on");
        (load.booked, load.unread) = (0, 0);
        assert_eq!(
            report(3, 0).beyond(before, &load),
            Others::default(),
            "some of ours has just ended"
        );
        let before = load.booked();
        assert_eq!(report(3, 0).beyond(before, &load).sequences, 3);
        load.has_read(0, ms(5), now + ms(2));
        assert_eq!(load.queue(now + ms(3)), ms(3));
        load.set_others(Others::default(), now + ms(4));
        assert_eq!((load.queue(now + ms(4)), load.since), (ms(0), None));
    }

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

//! The workers of one role as a choice sees them: a row each, in the order in which they joined, kept up to date by what
//! happens, so that a choice copies nothing that it does not change.
//!
//! Invariants: between choices no row has blocks of a prompt marked; a row of a worker that leaves is not usable and goes
//! with its last booking. Not here: health, and what workers tell of themselves (`router`).

use crate::cluster::loads::{Load, WorkerNumber};
use crate::cluster::policy::Candidate;
use std::time::{Duration, Instant};

/// What a choice may ask of a worker besides its load.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seat {
    pub number: WorkerNumber,
    /// The place of what it tells of itself among all that are told.
    pub class: usize,
    /// Reads prompts, too, where no prefill worker is left.
    pub reads_alone: bool,
}

/// All of one role.
#[derive(Debug, Default)]
pub(super) struct Table {
    seats: Vec<Seat>,
    /// As many,
    loads: Vec<Load>,
    /// and as many, which follow from those.
    rows: Vec<Candidate>,
    /// From when the rows count time.
    base: Option<Instant>,
    /// Rows that are marked.
    marked: Vec<usize>,
    /// Until then at the latest some row is suspect.
    suspect: Option<Instant>,
    /// How many read alone.
    readers: usize,
}

impl Table {
    /// A worker joins, the last so far.
    pub fn join(&mut self, number: WorkerNumber, now: Instant) {
        self.base.get_or_insert(now);
        self.loads.push(Load::default());
        self.seats.push(Seat { number, class: 0, reads_alone: false });
        self.rows.push(Candidate::default());
    }

    /// A worker is gone.
    pub fn remove(&mut self, number: WorkerNumber) {
        if let Some(at) = self.place(number) {
            self.readers -= usize::from(self.seats[at].reads_alone);
            self.seats.remove(at);
            self.loads.remove(at);
            self.rows.remove(at);
        }
    }

    /// Where a worker is.
    pub fn place(&self, number: WorkerNumber) -> Option<usize> {
        self.seats.binary_search_by_key(&number, |seat| seat.number).ok()
    }

    /// Where the last worker up to this number is; before the first comes the last of all.
    pub fn place_up_to(&self, number: Option<WorkerNumber>) -> usize {
        let passed =
            number.map_or(0, |number| self.seats.partition_point(|seat| seat.number <= number));
        passed.checked_sub(1).unwrap_or(self.seats.len().saturating_sub(1))
    }

    /// All loads.
    pub fn loads(&self) -> &[Load] {
        &self.loads
    }

    /// All rows.
    pub fn rows(&self) -> &[Candidate] {
        &self.rows
    }

    /// Who is in them.
    pub fn seats(&self) -> &[Seat] {
        &self.seats
    }

    /// A worker's load.
    pub fn load(&self, number: WorkerNumber) -> Option<&Load> {
        self.place(number).map(|at| &self.loads[at])
    }

    /// Changes a worker's load, and what a choice sees of it. `None` where it has none.
    pub fn change<R>(
        &mut self,
        number: WorkerNumber,
        change: impl FnOnce(&mut Load) -> R,
    ) -> Option<R> {
        let at = self.place(number)?;
        let load = &mut self.loads[at];
        let result = change(load);
        let begun = |since| nanos(since_base(self.base, since));
        let has_read =
            load.since.map_or(0, |since| begun(since).saturating_add(nanos(load.reads_for())));
        let Candidate { cached, held, .. } = self.rows[at];
        self.rows[at] = Candidate {
            usable: load.usable,
            sequences: load.sequences(),
            to_read: u32::try_from(load.to_read()).unwrap_or(u32::MAX),
            has_read,
            stands_on: u32::try_from(load.stands_on()).unwrap_or(u32::MAX),
            cached,
            held,
        };
        Some(result)
    }

    /// A time as rows have it.
    pub fn time(&self, now: Instant) -> u64 {
        nanos(since_base(self.base, now))
    }

    /// A worker has so many blocks in all.
    pub fn set_held(&mut self, number: WorkerNumber, blocks: usize) {
        if let Some(at) = self.place(number) {
            self.rows[at].held = blocks as u32;
        }
    }

    /// What a worker tells is of this class.
    pub fn set_class(&mut self, number: WorkerNumber, class: usize) {
        if let Some(at) = self.place(number) {
            self.seats[at].class = class;
        }
    }

    /// Whether a worker reads prompts alone.
    pub fn set_reads_alone(&mut self, number: WorkerNumber, reads_alone: bool) {
        if let Some(at) = self.place(number) {
            self.readers -= usize::from(self.seats[at].reads_alone);
            self.readers += usize::from(reads_alone);
            self.seats[at].reads_alone = reads_alone;
        }
    }

    /// A request failed at a worker: until then it is asked last.
    pub fn suspect(&mut self, number: WorkerNumber, until: Instant) {
        if self.change(number, |load| load.suspect = Some(until)).is_some() {
            self.suspect = self.suspect.max(Some(until));
        }
    }

    /// Whether nobody is suspect now.
    pub fn is_trusted(&self, now: Instant) -> bool {
        self.suspect.is_none_or(|until| until <= now)
    }

    /// Whether all read alone.
    pub fn all_read_alone(&self) -> bool {
        self.readers == self.seats.len()
    }

    /// Workers that are usable.
    pub fn usable(&self) -> impl Iterator<Item = &Seat> {
        self.seats.iter().zip(&self.rows).filter(|(_, row)| row.usable).map(|(seat, _)| seat)
    }

    /// A worker has so many blocks of the prompt that is asked about, if nothing else was said before. Who is told of in
    /// the order of the rows is found at once.
    pub fn mark(&mut self, number: WorkerNumber, blocks: u32) {
        let next = self.marked.last().map_or(0, |at| at + 1);
        let is_next = self.seats.get(next).is_some_and(|seat| seat.number == number);
        let Some(at) = (if is_next { Some(next) } else { self.place(number) }) else { return };
        if self.rows[at].cached == 0 {
            self.rows[at].cached = blocks;
            self.marked.push(at);
        }
    }

    /// Rows that are marked.
    pub fn marked(&self) -> &[usize] {
        &self.marked
    }

    /// No row is marked.
    pub fn unmark(&mut self) {
        self.marked.drain(..).for_each(|at| self.rows[at].cached = 0);
    }
}

fn since_base(base: Option<Instant>, time: Instant) -> Duration {
    base.map_or(Duration::ZERO, |base| time.saturating_duration_since(base))
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

//! The workers of one role in the form that choices need: one row each, in the order of joining.
//! Each event updates its row, so that a choice copies no unchanged data.
//!
//! Invariants: between choices, no row has marked blocks. A leaving worker is not usable, and its
//! row is removed with its last reservation.
//! Not here: health and compatibility (`balancer`).

use crate::routing::load::{WorkerLoad, WorkerNumber};
use crate::routing::policy::Candidate;
use crate::stdx::failpoint::is_failpoint_active;
use std::time::{Duration, Instant};

/// The properties of a worker, other than its load, that a choice needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct WorkerRow {
    pub number: WorkerNumber,
    /// Index of its compatibility class.
    pub class: usize,
    /// Whether it serves requests alone if no prefill worker is left.
    pub local_prefill: bool,
}

/// All workers of one role.
#[derive(Debug, Default)]
pub(super) struct LoadTable {
    workers: Vec<WorkerRow>,
    /// Parallel to `workers`.
    loads: Vec<WorkerLoad>,
    /// Parallel to `workers`, and derived from `loads`.
    rows: Vec<Candidate>,
    /// The time from which the rows count nanoseconds.
    base: Option<Instant>,
    /// Indexes of the rows with marked blocks.
    marked: Vec<usize>,
    /// No row is suspect after this time.
    suspect: Option<Instant>,
    /// Number of workers that serve requests alone.
    readers: usize,
}

impl LoadTable {
    /// Adds a worker at the end.
    pub fn join(&mut self, number: WorkerNumber, now: Instant) {
        let is_last = self.workers.last().is_none_or(|seat| seat.number < number);
        debug_assert!(is_last, "numbers only grow");
        self.base.get_or_insert(now);
        self.loads.push(WorkerLoad::default());
        self.workers.push(WorkerRow { number, class: 0, local_prefill: false });
        self.rows.push(Candidate::default());
    }

    /// Removes a worker.
    pub fn remove(&mut self, number: WorkerNumber) {
        if let Some(at) = self.place(number) {
            if !is_failpoint_active("absent worker serves alone") {
                self.readers -= usize::from(self.workers[at].local_prefill);
            }
            self.workers.remove(at);
            self.loads.remove(at);
            self.rows.remove(at);
        }
    }

    /// The index of a worker.
    pub fn place(&self, number: WorkerNumber) -> Option<usize> {
        self.workers.binary_search_by_key(&number, |seat| seat.number).ok()
    }

    /// The index of the last worker up to this number. If there is none, the last index of all.
    pub fn place_up_to(&self, number: Option<WorkerNumber>) -> usize {
        let passed =
            number.map_or(0, |number| self.workers.partition_point(|seat| seat.number <= number));
        passed.checked_sub(1).unwrap_or(self.workers.len().saturating_sub(1))
    }

    /// The loads of all workers.
    pub fn loads(&self) -> &[WorkerLoad] {
        &self.loads
    }

    /// All rows.
    pub fn candidates(&self) -> &[Candidate] {
        &self.rows
    }

    /// The workers of the rows.
    pub fn workers(&self) -> &[WorkerRow] {
        &self.workers
    }

    /// A worker's load.
    pub fn load(&self, number: WorkerNumber) -> Option<&WorkerLoad> {
        self.place(number).map(|at| &self.loads[at])
    }

    /// Changes a worker's load and updates its row. `None` if the worker is not in the table.
    pub fn change<R>(
        &mut self,
        number: WorkerNumber,
        change: impl FnOnce(&mut WorkerLoad) -> R,
    ) -> Option<R> {
        let at = self.place(number)?;
        let load = &mut self.loads[at];
        let result = change(load);
        let begun = |since| nanos(since_base(self.base, since));
        let prefill_done_ns =
            load.since.map_or(0, |since| begun(since).saturating_add(nanos(load.prefill_time())));
        let Candidate { cached, held, .. } = self.rows[at];
        self.rows[at] = Candidate {
            usable: load.usable,
            sequences: load.sequences(),
            total_uncomputed: u32::try_from(load.total_uncomputed()).unwrap_or(u32::MAX),
            prefill_done_ns,
            total_context: u32::try_from(load.total_context()).unwrap_or(u32::MAX),
            cached,
            held,
        };
        Some(result)
    }

    /// A time in the unit of the rows: nanoseconds since their base.
    pub fn time(&self, now: Instant) -> u64 {
        nanos(since_base(self.base, now))
    }

    /// Sets the number of blocks that a worker probably holds in total.
    pub fn set_held(&mut self, number: WorkerNumber, blocks: usize) {
        if let Some(at) = self.place(number) {
            self.rows[at].held = blocks as u32;
        }
    }

    /// Sets a worker's compatibility class.
    pub fn set_class(&mut self, number: WorkerNumber, class: usize) {
        if let Some(at) = self.place(number) {
            self.workers[at].class = class;
        }
    }

    /// Sets whether a worker serves requests alone.
    pub fn set_local_prefill(&mut self, number: WorkerNumber, local_prefill: bool) {
        if let Some(at) = self.place(number) {
            self.readers -= usize::from(self.workers[at].local_prefill);
            self.readers += usize::from(local_prefill);
            self.workers[at].local_prefill = local_prefill;
        }
    }

    /// Makes a worker the last choice until this time, because a request failed at it.
    pub fn suspect(&mut self, number: WorkerNumber, until: Instant) {
        if self.change(number, |load| load.suspect = Some(until)).is_some() {
            self.suspect = self.suspect.max(Some(until));
        }
    }

    /// Whether no worker is suspect now.
    pub fn is_trusted(&self, now: Instant) -> bool {
        self.suspect.is_none_or(|until| until <= now)
    }

    /// Whether all workers serve requests alone.
    pub fn all_prefill_locally(&self) -> bool {
        self.readers == self.workers.len()
    }

    /// The usable workers.
    pub fn usable(&self) -> impl Iterator<Item = &WorkerRow> {
        self.workers.iter().zip(&self.rows).filter(|(_, row)| row.usable).map(|(seat, _)| seat)
    }

    /// Marks the number of blocks of the current prompt that a worker has. Only the first mark
    /// counts. Marks in the order of the rows need no search.
    pub fn mark(&mut self, number: WorkerNumber, blocks: u32) {
        debug_assert!(blocks > 0, "a marked row has blocks");
        let next = self.marked.last().map_or(0, |at| at + 1);
        let is_next = self.workers.get(next).is_some_and(|seat| seat.number == number);
        let Some(at) = (if is_next { Some(next) } else { self.place(number) }) else { return };
        if self.rows[at].cached == 0 {
            self.rows[at].cached = blocks;
            self.marked.push(at);
        }
    }

    /// Indexes of the rows with marked blocks.
    pub fn marked(&self) -> &[usize] {
        &self.marked
    }

    /// Clears all marks.
    pub fn unmark(&mut self) {
        self.marked.drain(..).for_each(|at| self.rows[at].cached = 0);
    }
}

impl LoadTable {
    /// Asserts the rules that hold between choices. Returns the number of workers.
    ///
    /// # Panics
    /// The columns differ, or a choice has left marks.
    pub fn invariants(&self) -> usize {
        assert!(
            self.workers.is_sorted_by_key(|seat| seat.number),
            "rows are in the order of joining"
        );
        assert_eq!(self.workers.len(), self.loads.len(), "a worker has one load");
        assert_eq!(self.workers.len(), self.rows.len(), "a worker has one row");
        assert!(self.marked.is_empty(), "marks end with their choice");
        let readers = self.workers.iter().filter(|seat| seat.local_prefill).count();
        assert_eq!(self.readers, readers, "workers that serve alone are counted");
        for (load, row) in self.loads.iter().zip(&self.rows) {
            assert_eq!(load.usable, row.usable, "a row is derived from its load");
        }
        self.workers.len()
    }
}

fn since_base(base: Option<Instant>, time: Instant) -> Duration {
    base.map_or(Duration::ZERO, |base| time.saturating_duration_since(base))
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

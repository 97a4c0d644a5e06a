//! Deadlines in order: an indexed heap, so that a cancelled timer is removed at once.
//!
//! Thread: `ctl`. Invariants: at most `capacity` timers; no allocation after construction. Touched
//! memory grows with the highest number of timers at one time. Equal deadlines expire in the order
//! of scheduling. `heap[entries[i].position] == i` for each live entry. Not here: the clock; `now`
//! is an argument.

use crate::stdx::failpoint::is_failpoint_active;
use std::fmt;
use std::time::Instant;

/// Identifies a scheduled timer. After it expired or was cancelled, the id has no effect.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TimerId {
    index: u32,
    generation: u32,
}

/// All timers are in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TimersFull {
    /// Number of timers.
    pub capacity: usize,
}

impl fmt::Display for TimersFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "all {} timers are in use", self.capacity)
    }
}

impl std::error::Error for TimersFull {}

/// Timers that each carry a key.
#[derive(Debug)]
pub struct Timers<K> {
    entries: Vec<Entry<K>>,
    free: Vec<u32>,
    /// Indices of live entries; each is due no later than its children at `2i + 1` and `2i + 2`.
    heap: Vec<u32>,
    capacity: usize,
    sequence: u64,
}

#[derive(Debug)]
struct Entry<K> {
    generation: u32,
    /// Position in the heap; only valid while the entry is live, like the fields below.
    position: u32,
    due: Option<(Instant, u64)>,
    key: Option<K>,
}

impl<K> Timers<K> {
    /// Creates room for `capacity` timers.
    pub fn new(capacity: u32) -> Timers<K> {
        let capacity = capacity as usize;
        Timers {
            entries: Vec::with_capacity(capacity),
            free: Vec::with_capacity(capacity),
            heap: Vec::with_capacity(capacity),
            capacity,
            sequence: 0,
        }
    }

    /// Schedules `key` to expire at `deadline`. O(log n).
    pub fn schedule(&mut self, deadline: Instant, key: K) -> Result<TimerId, TimersFull> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.entries.len() == self.capacity => {
                return Err(TimersFull { capacity: self.capacity });
            }
            None => {
                self.entries.push(Entry { generation: 0, position: 0, due: None, key: None });
                self.entries.len() as u32 - 1
            }
        };
        let entry = &mut self.entries[index as usize];
        entry.due = Some((deadline, self.sequence));
        entry.key = Some(key);
        let generation = entry.generation;
        self.sequence += 1;
        self.heap.push(index);
        self.rise(self.heap.len() - 1);
        Ok(TimerId { index, generation })
    }

    /// Cancels a timer and returns its key, unless it has already expired. O(log n).
    pub fn cancel(&mut self, id: TimerId) -> Option<K> {
        let entry = self.entries.get(id.index as usize)?;
        if entry.generation != id.generation || entry.key.is_none() {
            return None;
        }
        let place = entry.position as usize;
        debug_assert_eq!(self.heap.get(place), Some(&id.index), "a timer knows its place");
        Some(self.remove(place))
    }

    /// Removes the next key with a passed deadline. O(log n).
    pub fn expire(&mut self, now: Instant) -> Option<K> {
        (self.next_deadline()? <= now).then(|| self.remove(0))
    }

    /// The earliest deadline.
    pub fn next_deadline(&self) -> Option<Instant> {
        let first = *self.heap.first()?;
        self.entries[first as usize].due.map(|(deadline, _)| deadline)
    }

    /// Number of running timers.
    pub fn len(&self) -> usize {
        self.heap.len()
    }

    /// Whether no timer runs.
    pub fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }

    /// Asserts the order of the heap and the places in it. Tests call it after each step.
    ///
    /// # Panics
    /// A timer is due before the one above it, does not know its place, or is free and running.
    pub fn invariants(&self) {
        for (position, &index) in self.heap.iter().enumerate() {
            let entry = &self.entries[index as usize];
            assert!(entry.key.is_some(), "a timer in the heap is running");
            assert_eq!(entry.position as usize, position, "a timer knows its place");
            let above = position.saturating_sub(1) / 2;
            assert!(self.due(above) <= self.due(position), "the earlier timer is above");
        }
        let running = self.entries.iter().filter(|entry| entry.key.is_some()).count();
        assert_eq!(running, self.heap.len(), "a running timer is in the heap");
        assert_eq!(self.entries.len() - running, self.free.len(), "another entry is free");
        assert!(self.entries.len() <= self.capacity, "timers are bounded");
    }

    fn remove(&mut self, position: usize) -> K {
        let index = self.heap.swap_remove(position);
        if position < self.heap.len() {
            self.rise(position);
            if !is_failpoint_active("last timer stays above earlier ones") {
                self.sink(position);
            }
        }
        let entry = &mut self.entries[index as usize];
        entry.generation = entry.generation.wrapping_add(1);
        self.free.push(index);
        entry.key.take().expect("an entry in the heap is live")
    }

    fn rise(&mut self, mut position: usize) {
        while position > 0 && self.due(position) < self.due((position - 1) / 2) {
            self.swap(position, (position - 1) / 2);
            position = (position - 1) / 2;
        }
        self.settle(position);
    }

    fn sink(&mut self, mut position: usize) {
        loop {
            let children = [2 * position + 1, 2 * position + 2];
            let earliest =
                children.into_iter().filter(|&c| c < self.heap.len()).min_by_key(|&c| self.due(c));
            match earliest {
                Some(child) if self.due(child) < self.due(position) => {
                    self.swap(position, child);
                    position = child;
                }
                _ => break,
            }
        }
        self.settle(position);
    }

    fn due(&self, position: usize) -> Option<(Instant, u64)> {
        self.entries[self.heap[position] as usize].due
    }

    fn swap(&mut self, a: usize, b: usize) {
        self.heap.swap(a, b);
        self.settle(a);
        self.settle(b);
    }

    fn settle(&mut self, position: usize) {
        if let Some(&index) = self.heap.get(position) {
            self.entries[index as usize].position = position as u32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stdx::failpoint::panic_of;
    use proptest::prelude::*;
    use std::time::Duration;

    #[test]
    fn timers_expire_in_order_of_deadline_then_of_scheduling() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut timers = Timers::new(4);
        assert_eq!(timers.next_deadline(), None);
        timers.schedule(at(20), 'c').unwrap();
        timers.schedule(at(10), 'a').unwrap();
        timers.schedule(at(10), 'b').unwrap();
        assert_eq!(timers.expire(at(9)), None);
        assert_eq!(timers.next_deadline(), Some(at(10)));
        assert_eq!(timers.expire(at(30)), Some('a'));
        assert_eq!(timers.expire(at(30)), Some('b'));
        assert_eq!(timers.expire(at(30)), Some('c'));
        assert_eq!(timers.expire(at(30)), None);
    }

    #[test]
    fn a_timer_is_cancelled_once_and_its_id_never_hits_another() {
        let now = Instant::now();
        let mut timers = Timers::new(1);
        let first = timers.schedule(now, 1).unwrap();
        assert_eq!(timers.schedule(now, 2), Err(TimersFull { capacity: 1 }));
        assert_eq!(timers.cancel(first), Some(1));
        assert_eq!(timers.cancel(first), None);
        timers.schedule(now, 3).unwrap();
        assert_eq!(timers.cancel(first), None);
        assert_eq!(timers.expire(now), Some(3));
        assert!(timers.is_empty());
    }

    #[test]
    fn invariants_find_a_timer_that_stays_above_an_earlier_one() {
        let start = Instant::now();
        let expire_first = || {
            let mut timers = Timers::new(4);
            for ms in [1, 2, 3, 4] {
                timers.schedule(start + Duration::from_millis(ms), ms).unwrap();
            }
            timers.invariants();
            assert_eq!(timers.expire(start + Duration::from_millis(1)), Some(1));
            timers.invariants();
        };
        expire_first();
        let message = panic_of("last timer stays above earlier ones", expire_first);
        assert!(message.contains("the earlier timer is above"), "{message}");
    }

    #[derive(Clone, Debug)]
    enum Step {
        Schedule(u64),
        Cancel(usize),
        Expire(u64),
    }

    proptest! {
        #[test]
        fn timers_behave_like_a_sorted_list(steps in proptest::collection::vec(prop_oneof![
            (0u64..50).prop_map(Step::Schedule),
            (0usize..40).prop_map(Step::Cancel),
            (0u64..50).prop_map(Step::Expire),
        ], 0..200)) {
            let start = Instant::now();
            let at = |ms| start + Duration::from_millis(ms);
            let mut timers = Timers::new(16);
            // (deadline, key), sorted; ids by key.
            let (mut reference, mut ids) = (Vec::<(u64, usize)>::new(), Vec::new());
            for step in steps {
                match step {
                    Step::Schedule(ms) => match timers.schedule(at(ms), ids.len()) {
                        Ok(id) => {
                            reference.push((ms, ids.len()));
                            reference.sort();
                            ids.push(id);
                        }
                        Err(_) => prop_assert_eq!(reference.len(), 16),
                    },
                    Step::Cancel(key) if key < ids.len() => {
                        let found = reference.iter().position(|&(_, k)| k == key);
                        prop_assert_eq!(
                            timers.cancel(ids[key]),
                            found.map(|at| reference.remove(at).1)
                        );
                    }
                    Step::Cancel(_) => {}
                    Step::Expire(ms) => {
                        let due = reference.first().is_some_and(|&(deadline, _)| deadline <= ms);
                        prop_assert_eq!(timers.expire(at(ms)), due.then(|| reference.remove(0).1));
                    }
                }
                timers.invariants();
                prop_assert_eq!(timers.len(), reference.len());
                prop_assert_eq!(timers.next_deadline(), reference.first().map(|&(ms, _)| at(ms)));
            }
        }
    }
}

//! What is to happen, by time. Of what is due at one moment, chance says what comes first.

use super::dice::Dice;
use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// Nanoseconds since a simulation began.
pub type Nanos = u64;

/// A microsecond.
pub const MICRO: Nanos = 1_000;
/// A millisecond.
pub const MILLI: Nanos = 1_000_000;
/// A second.
pub const SECOND: Nanos = 1_000_000_000;

#[derive(Debug)]
struct Entry<T> {
    at: Nanos,
    order: u64,
    what: T,
}

impl<T> PartialEq for Entry<T> {
    fn eq(&self, other: &Entry<T>) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}

impl<T> Eq for Entry<T> {}

impl<T> PartialOrd for Entry<T> {
    fn partial_cmp(&self, other: &Entry<T>) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Entry<T> {
    fn cmp(&self, other: &Entry<T>) -> Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

/// Everything that is to happen.
#[derive(Debug)]
pub struct Agenda<T> {
    heap: BinaryHeap<Reverse<Entry<T>>>,
    dice: Dice,
    now: Nanos,
}

impl<T> Agenda<T> {
    /// Nothing, at time 0.
    pub fn new(dice: Dice) -> Agenda<T> {
        Agenda { heap: BinaryHeap::new(), dice, now: 0 }
    }

    /// The time of what happens now.
    pub fn now(&self) -> Nanos {
        self.now
    }

    /// Puts something down; what would be past is due now.
    pub fn put(&mut self, at: Nanos, what: T) {
        let at = at.max(self.now);
        self.heap.push(Reverse(Entry { at, order: self.dice.draw(), what }));
    }

    /// What happens next; time goes on to it.
    pub fn take(&mut self) -> Option<T> {
        let Reverse(Entry { at, what, .. }) = self.heap.pop()?;
        self.now = at;
        Some(what)
    }
}

//! Events ordered by time. Events with the same time come in random order.

use crate::stdx::rng::Rng;
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

/// All future events.
#[derive(Debug)]
pub struct EventQueue<T> {
    heap: BinaryHeap<Reverse<Entry<T>>>,
    dice: Rng,
    now: Nanos,
}

impl<T> EventQueue<T> {
    /// An empty queue at time 0.
    pub fn new(dice: Rng) -> EventQueue<T> {
        EventQueue { heap: BinaryHeap::new(), dice, now: 0 }
    }

    /// The time of the current event.
    pub fn now(&self) -> Nanos {
        self.now
    }

    /// Adds an event. If `at` is in the past, the event is due now.
    pub fn schedule(&mut self, at: Nanos, what: T) {
        let at = at.max(self.now);
        self.heap.push(Reverse(Entry { at, order: self.dice.next_u64(), what }));
    }

    /// Returns the next event and moves the time to it.
    pub fn pop(&mut self) -> Option<T> {
        let Reverse(Entry { at, what, .. }) = self.heap.pop()?;
        self.now = at;
        Some(what)
    }
}

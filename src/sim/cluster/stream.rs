//! One direction of a connection: what was sent comes in order, each at its time, and where packets are lost waits to be
//! sent again.

use crate::sim::agenda::Nanos;
use std::collections::VecDeque;

/// What is on its way. For each [`Stream::put`] somebody calls [`Stream::take`] when it comes.
#[derive(Debug)]
pub(super) struct Stream<T> {
    queue: VecDeque<(Nanos, T)>,
    /// When the last of it comes.
    last: Nanos,
    /// How many were lost and will be sent again.
    lost: u32,
}

impl<T> Default for Stream<T> {
    fn default() -> Stream<T> {
        Stream { queue: VecDeque::new(), last: 0, lost: 0 }
    }
}

impl<T> Stream<T> {
    /// Sends something that is there at `at`, or behind what was sent before: then.
    pub(super) fn put(&mut self, at: Nanos, what: T) -> Nanos {
        self.last = at.max(self.last);
        self.queue.push_back((self.last, what));
        self.last
    }

    /// What has come comes once more, before all else.
    pub(super) fn put_first(&mut self, at: Nanos, what: T) {
        self.queue.push_front((at, what));
    }

    /// Whether nothing is on its way.
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// What comes now; nothing where that was cleared meanwhile.
    pub(super) fn take(&mut self, now: Nanos) -> Option<T> {
        self.queue.pop_front_if(|(at, _)| *at <= now).map(|(_, what)| what)
    }

    /// What would come now does not.
    pub(super) fn lose(&mut self) {
        self.lost += 1;
    }

    /// How many are sent again.
    pub(super) fn resend(&mut self) -> u32 {
        std::mem::take(&mut self.lost)
    }

    /// All that is on its way is gone.
    pub(super) fn clear(&mut self) {
        self.queue.clear();
        self.last = 0;
    }
}

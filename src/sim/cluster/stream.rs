//! One direction of a connection. Items arrive in order, each at its time. Lost items are resent.

use crate::stdx::event_queue::Nanos;
use std::collections::VecDeque;

/// Items in flight. For each [`Stream::put`], the cluster calls [`Stream::take`] at the arrival.
#[derive(Debug)]
pub(super) struct Stream<T> {
    queue: VecDeque<(Nanos, T)>,
    /// When the last item arrives.
    last: Nanos,
    /// Number of lost items that will be resent.
    lost: u32,
}

impl<T> Default for Stream<T> {
    fn default() -> Stream<T> {
        Stream { queue: VecDeque::new(), last: 0, lost: 0 }
    }
}

impl<T> Stream<T> {
    /// Sends an item. It arrives at `at`, or together with the previous item if that is later.
    /// Returns the time.
    pub(super) fn put(&mut self, at: Nanos, what: T) -> Nanos {
        self.last = at.max(self.last);
        self.queue.push_back((self.last, what));
        self.last
    }

    /// Puts an arrived item back in front of all others.
    pub(super) fn put_first(&mut self, at: Nanos, what: T) {
        self.queue.push_front((at, what));
    }

    /// Whether nothing is on its way.
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// The item that arrives now; `None` if it was cleared before.
    pub(super) fn take(&mut self, now: Nanos) -> Option<T> {
        self.queue.pop_front_if(|(at, _)| *at <= now).map(|(_, what)| what)
    }

    /// Loses the item that would arrive now.
    pub(super) fn lose(&mut self) {
        self.lost += 1;
    }

    /// Resends the lost items. Returns their number.
    pub(super) fn resend(&mut self) -> u32 {
        std::mem::take(&mut self.lost)
    }

    /// Drops all items.
    pub(super) fn clear(&mut self) {
        self.queue.clear();
        self.last = 0;
    }
}

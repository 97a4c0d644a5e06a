//! One direction of a connection. Items arrive in order, each at its time. If packets are lost,
//! items wait to be resent.

use crate::stdx::event_queue::Nanos;
use std::collections::VecDeque;

/// Items on their way. For each [`Stream::put`] the cluster calls [`Stream::take`] at the arrival.
#[derive(Debug)]
pub(super) struct Stream<T> {
    queue: VecDeque<(Nanos, T)>,
    /// When the last item arrives.
    last: Nanos,
    /// How many items were lost and will be resent.
    lost: u32,
}

impl<T> Default for Stream<T> {
    fn default() -> Stream<T> {
        Stream { queue: VecDeque::new(), last: 0, lost: 0 }
    }
}

impl<T> Stream<T> {
    /// Sends an item. It arrives at `at`, or with the last item before it. Returns when.
    pub(super) fn put(&mut self, at: Nanos, what: T) -> Nanos {
        self.last = at.max(self.last);
        self.queue.push_back((self.last, what));
        self.last
    }

    /// Puts an item that has arrived back in front of all others.
    pub(super) fn put_first(&mut self, at: Nanos, what: T) {
        self.queue.push_front((at, what));
    }

    /// Whether nothing is on its way.
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// The item that arrives now; `None` if it was cleared meanwhile.
    pub(super) fn take(&mut self, now: Nanos) -> Option<T> {
        self.queue.pop_front_if(|(at, _)| *at <= now).map(|(_, what)| what)
    }

    /// The item that would arrive now is lost.
    pub(super) fn lose(&mut self) {
        self.lost += 1;
    }

    /// How many lost items are resent.
    pub(super) fn resend(&mut self) -> u32 {
        std::mem::take(&mut self.lost)
    }

    /// Drops all items.
    pub(super) fn clear(&mut self) {
        self.queue.clear();
        self.last = 0;
    }
}

//! A host's NIC as two queues: one for what leaves, one for what arrives.
//!
//! A message has arrived when its last byte has passed both queues; the receiving queue takes bytes
//! as the sending one releases them. So transfers share a NIC in the order in which they ask, and
//! it never idles while one waits for it alone. Left out: the fabric between NICs, which has
//! capacity for all, and fair turns among transfers.

use crate::stdx::event_queue::Nanos;

/// Until when each queue is busy.
#[derive(Clone, Copy, Debug, Default)]
pub struct NicModel {
    leaves: Nanos,
    comes: Nanos,
}

impl NicModel {
    /// Sends for `takes`. Returns when the first byte leaves.
    pub fn send(&mut self, now: Nanos, takes: Nanos) -> Nanos {
        let first = self.leaves.max(now);
        self.leaves = first + takes;
        first
    }

    /// Receives for `takes`, beginning now. Returns when the last byte has arrived.
    pub fn receive(&mut self, now: Nanos, takes: Nanos) -> Nanos {
        self.comes = self.comes.max(now) + takes;
        self.comes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_way_takes_the_time_of_the_bytes_once() {
        let (mut from, mut to) = (NicModel::default(), NicModel::default());
        let first = from.send(100, 50);
        assert_eq!((first, to.receive(first, 50)), (100, 150));
    }

    #[test]
    fn those_that_share_a_nic_wait_for_each_other() {
        let mut from = NicModel::default();
        assert_eq!([from.send(0, 50), from.send(10, 50), from.send(500, 50)], [0, 50, 500]);
        let mut to = NicModel::default();
        assert_eq!([to.receive(0, 50), to.receive(0, 50), to.receive(300, 50)], [50, 100, 350]);
    }
}

//! A model of a host's NIC: one queue for outgoing bytes and one for incoming bytes.
//!
//! A message has arrived when its last byte has passed both queues. The receiving queue takes bytes
//! when the sending queue releases them. Transfers share a NIC in the order of their requests. A
//! NIC is never idle while a transfer waits only for it. Not modelled: the fabric between NICs, and
//! fair turns among transfers.

use crate::stdx::event_queue::Nanos;

/// The time until which each queue is busy.
#[derive(Clone, Copy, Debug, Default)]
pub struct NicModel {
    leaves: Nanos,
    comes: Nanos,
}

impl NicModel {
    /// Sends for the time `takes`. Returns the time at which the first byte leaves.
    pub fn send(&mut self, now: Nanos, takes: Nanos) -> Nanos {
        let first = self.leaves.max(now);
        self.leaves = first + takes;
        first
    }

    /// Receives for the time `takes`, from now on. Returns the time at which the last byte has
    /// arrived.
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

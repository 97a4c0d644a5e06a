//! A host's NIC as two lines: what leaves goes one after the other, and so does what comes.
//!
//! A message is at its destination when the last byte has passed both lines; the second line takes bytes as the first
//! lets them go. So NICs that several use are shared, in order of asking, and none idles while something waits for it
//! alone. Left out: the fabric between NICs, which has room for all, and turns among several that leave at once.

use super::super::agenda::Nanos;

/// Until when each line is taken.
#[derive(Clone, Copy, Debug, Default)]
pub struct Nic {
    leaves: Nanos,
    comes: Nanos,
}

impl Nic {
    /// Sends what takes so long: when its first byte leaves.
    pub fn send(&mut self, now: Nanos, takes: Nanos) -> Nanos {
        let first = self.leaves.max(now);
        self.leaves = first + takes;
        first
    }

    /// Receives what takes so long and begins to come now: when its last byte is here.
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
        let (mut from, mut to) = (Nic::default(), Nic::default());
        let first = from.send(100, 50);
        assert_eq!((first, to.receive(first, 50)), (100, 150));
    }

    #[test]
    fn those_that_share_a_nic_wait_for_each_other() {
        let mut from = Nic::default();
        assert_eq!([from.send(0, 50), from.send(10, 50), from.send(500, 50)], [0, 50, 500]);
        let mut to = Nic::default();
        assert_eq!([to.receive(0, 50), to.receive(0, 50), to.receive(300, 50)], [50, 100, 350]);
    }
}

//! Whether RDMA is offered to a source: what could be set up need not carry anything (a switch that drops what it
//! should pause for, packets too long for a hop), and that shows at the first bytes only.
//!
//! Thread: `ctl`. A session that breaks with something carried before may have met an accident; one that breaks with
//! nothing carried counts. As many breaks as it takes the source to find out about each of its NICs
//! (`transport::rdma`) leave RDMA out for a while.

use crate::limits::{RDMA_BARRED, RDMA_BREAKS_MAX};
use std::time::Instant;

/// What a worker thinks of the fabric to one source.
#[derive(Clone, Copy, Default, Debug)]
pub struct Trust {
    /// NICs that the session of now was offered.
    nics: u32,
    /// Something has arrived in it.
    carried: bool,
    /// Sessions that broke with nothing carried, one after another.
    broken: u32,
    /// Left out until then.
    barred: Option<Instant>,
}

impl Trust {
    /// A session over so many NICs is about to begin.
    pub fn begin(&mut self, nics: u16) {
        (self.nics, self.carried) = (nics.into(), false);
    }

    /// Bytes have arrived.
    pub fn carry(&mut self) {
        *self = Trust { nics: self.nics, carried: true, ..Trust::default() };
    }

    /// The fabric has failed under it. True when it is left out from now on.
    pub fn fail(&mut self, now: Instant) -> bool {
        if !self.carried {
            self.broken += 1;
        }
        // Of one session one room says so, should another say it, too, it is of the same break.
        self.carried = true;
        let is_barred = self.broken >= RDMA_BREAKS_MAX * self.nics.max(1);
        if is_barred {
            self.barred = Some(now + RDMA_BARRED);
        }
        is_barred
    }

    /// Whether it is left out.
    pub fn is_barred(&self, now: Instant) -> bool {
        self.barred.is_some_and(|until| now < until)
    }

    /// Whether it was left out until now, said once.
    pub fn take_end(&mut self, now: Instant) -> bool {
        let is_over = self.barred.is_some_and(|until| now >= until);
        if is_over {
            *self = Trust::default();
        }
        is_over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_nic_has_its_chances_before_all_are_left_out() {
        let now = Instant::now();
        let mut trust = Trust::default();
        for nics in [1, 3] {
            for broken in 1..=RDMA_BREAKS_MAX * u32::from(nics) {
                trust.begin(nics);
                assert_eq!(trust.fail(now), broken == RDMA_BREAKS_MAX * u32::from(nics));
                assert_eq!(trust.fail(now), trust.is_barred(now), "the same break");
            }
            assert!(!trust.take_end(now) && trust.is_barred(now));
            let later = now + RDMA_BARRED;
            assert!(!trust.is_barred(later) && trust.take_end(later) && !trust.take_end(later));
        }
    }

    #[test]
    fn what_has_carried_is_no_fabric_that_carries_nothing() {
        let now = Instant::now();
        let mut trust = Trust::default();
        for _ in 0..2 * RDMA_BREAKS_MAX {
            trust.begin(1);
            trust.carry();
            assert!(!trust.fail(now), "an accident");
        }
        for _ in 1..RDMA_BREAKS_MAX {
            trust.begin(1);
            assert!(!trust.fail(now));
        }
        trust.begin(1);
        trust.carry();
        trust.begin(1);
        assert!(!trust.fail(now), "counted from the start");
    }
}

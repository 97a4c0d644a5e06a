//! Decides whether a worker offers RDMA to a source. A transport can be set up and still carry no
//! bytes. For example, a switch drops packets instead of pausing, or packets are too long for a
//! hop. Only the first bytes show that it works.
//!
//! Thread: `ctl`.
//! Invariants: a break counts only if its session carried nothing before. After enough breaks in a
//! row, RDMA is left out for a while. The limit allows the source to try each of its NICs
//! (`transport::rdma`).

use crate::limits::{RDMA_BARRED, RDMA_BREAKS_MAX};
use std::time::Instant;

/// The record of a worker's RDMA sessions with one source.
#[derive(Clone, Copy, Default, Debug)]
pub struct Trust {
    /// NICs offered for the current session.
    nics: u32,
    /// Bytes have arrived in the current session.
    carried: bool,
    /// Consecutive sessions that broke without carrying anything.
    broken: u32,
    /// RDMA is left out until this time.
    barred: Option<Instant>,
}

impl Trust {
    /// Notes that a session with `nics` NICs is about to begin.
    pub fn begin(&mut self, nics: u16) {
        (self.nics, self.carried) = (nics.into(), false);
    }

    /// Notes that bytes have arrived.
    pub fn carry(&mut self) {
        *self = Trust { nics: self.nics, carried: true, ..Trust::default() };
    }

    /// Notes that the fabric failed during the session. Returns true if RDMA is left out from now
    /// on.
    pub fn fail(&mut self, now: Instant) -> bool {
        if !self.carried {
            self.broken += 1;
        }
        // Each session counts once: a second failing room reports the same break.
        self.carried = true;
        let is_barred = self.broken >= RDMA_BREAKS_MAX * self.nics.max(1);
        if is_barred {
            self.barred = Some(now + RDMA_BARRED);
        }
        is_barred
    }

    /// Whether RDMA is left out at `now`.
    pub fn is_barred(&self, now: Instant) -> bool {
        self.barred.is_some_and(|until| now < until)
    }

    /// Whether the exclusion of RDMA has just ended; true once.
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
    fn a_fabric_that_has_carried_bytes_does_not_count_as_broken() {
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

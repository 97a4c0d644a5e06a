//! Decides when the router pauses before it polls again. With many streams, each event would wake
//! the router and then its client. After a short pause, one read and one write carry several events
//! of a stream.
//!
//! Pure. Invariants: few streams or few pieces never cause a pause. A pause takes at most
//! [`ROUTER_REST_TIME`].

use crate::limits::{
    ROUTER_DENSE_PIECES, ROUTER_DENSE_STREAMS, ROUTER_DENSE_TIME, ROUTER_REST_TIME,
};
use std::time::{Duration, Instant};

/// The density of pieces.
#[derive(Debug)]
pub struct WriteCoalescer {
    /// Start of the present count.
    since: Instant,
    passed: usize,
    /// The result of the last count.
    is_dense: bool,
}

impl WriteCoalescer {
    /// A count that starts now.
    pub fn new(now: Instant) -> WriteCoalescer {
        WriteCoalescer { since: now, passed: 0, is_dense: false }
    }

    /// The pause after a turn that relayed `passed` pieces while the router serves `requests`
    /// requests.
    pub fn rest(&mut self, passed: usize, requests: usize, now: Instant) -> Option<Duration> {
        self.passed += passed;
        let counted = now.saturating_duration_since(self.since);
        if counted >= ROUTER_DENSE_TIME {
            // Scaled to the length of the counted time.
            let times = counted.as_nanos() / ROUTER_DENSE_TIME.as_nanos();
            self.is_dense = self.passed as u128 >= ROUTER_DENSE_PIECES as u128 * times;
            (self.since, self.passed) = (now, 0);
        }
        (self.is_dense && passed > 0 && requests >= ROUTER_DENSE_STREAMS)
            .then_some(ROUTER_REST_TIME)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs turns with so many pieces, so many microseconds apart. Returns how many had a pause.
    fn rests(
        pace: &mut WriteCoalescer,
        now: &mut Instant,
        [turns, passed, apart]: [usize; 3],
        requests: usize,
    ) -> usize {
        let turn = |_: &usize| {
            *now += Duration::from_micros(apart as u64);
            pace.rest(passed, requests, *now).is_some()
        };
        (0..turns).filter(turn).count()
    }

    #[test]
    fn many_pieces_of_many_streams_are_gathered_and_others_never_wait() {
        let mut now = Instant::now();
        let mut pace = WriteCoalescer::new(now);
        assert_eq!(rests(&mut pace, &mut now, [1000, 1, 20], 4), 0, "few streams");
        let dense = rests(&mut pace, &mut now, [1000, 2, 40], 32);
        assert!(dense > 900, "{dense}");
        assert_eq!(rests(&mut pace, &mut now, [1000, 0, 40], 32), 0, "nothing was passed on");
        assert_eq!(rests(&mut pace, &mut now, [1000, 1, 200], 32), 0, "five in a millisecond");
        assert_eq!(
            rests(&mut pace, &mut now, [10, 40, 20_000], 32),
            0,
            "a step of workers each 20 ms"
        );
    }
}

//! When a router rests before it looks again. Many streams at once come in pieces of an event each; who looks for them as
//! soon as there is one is woken for each, wakes its client for each, and leaves whoever writes them no time to write more.
//! A little later several pieces of each stream make one read and one write.
//!
//! Pure. Invariants: few streams, or few pieces, are never held up; a rest is [`ROUTER_REST_TIME`] at most.

use crate::limits::{
    ROUTER_DENSE_PIECES, ROUTER_DENSE_STREAMS, ROUTER_DENSE_TIME, ROUTER_REST_TIME,
};
use std::time::{Duration, Instant};

/// How densely pieces come.
#[derive(Debug)]
pub struct Pace {
    /// Counted from here.
    since: Instant,
    passed: usize,
    /// As the last count says.
    is_dense: bool,
}

impl Pace {
    /// None has come.
    pub fn new(now: Instant) -> Pace {
        Pace { since: now, passed: 0, is_dense: false }
    }

    /// How long to rest behind a turn in which so many pieces were passed on, while so many requests are served.
    pub fn rest(&mut self, passed: usize, requests: usize, now: Instant) -> Option<Duration> {
        self.passed += passed;
        let counted = now.saturating_duration_since(self.since);
        if counted >= ROUTER_DENSE_TIME {
            // Over as long as that was.
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

    /// Turns of so many pieces, so many microseconds apart; how many had a rest.
    fn rests(
        pace: &mut Pace,
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
        let mut pace = Pace::new(now);
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

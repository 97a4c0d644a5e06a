//! The limits of retries: number and delay for one request, and the total rate.
//!
//! Invariants: after a first burst of [`RETRIES_AT_ONCE`], at most [`RETRIES_PER_SECOND`] retries a
//! second are sent. A request beyond that waits, and fails only if the wait would be too long.

use crate::config::RetryConfig;
use crate::limits::{RETRIES_AT_ONCE, RETRIES_PER_SECOND};
use std::time::{Duration, Instant};

/// The limits of the time of a retry.
#[derive(Clone, Copy, Debug)]
pub struct RetryLimit {
    /// The end of the time for retries. A retry at this time is the last one.
    pub until: Instant,
    /// The client's deadline. An attempt needs some time before it.
    pub deadline: Option<Instant>,
}

impl RetryLimit {
    fn permits(self, at: Instant) -> bool {
        at <= self.until && self.deadline.is_none_or(|deadline| at < deadline)
    }
}

/// The retry limits of all requests of a router.
#[derive(Clone, Debug)]
pub struct RetryBudget {
    terms: RetryConfig,
    /// Time at which all granted retries are used up at the steady rate. This is the generic cell
    /// rate algorithm of ATM.
    spent: Instant,
}

impl RetryBudget {
    /// A budget with these limits. The limit for one request counts from the last time at which its
    /// client received data.
    pub fn new(terms: RetryConfig, now: Instant) -> RetryBudget {
        RetryBudget { terms, spent: now }
    }

    /// The most retries of one request.
    pub fn most(&self) -> u32 {
        self.terms.most
    }

    /// The time at which a request that failed now, after `waits` waits, can be sent again; the
    /// retry is counted. The result is `None` if that is beyond `limit`, or if other retries take
    /// all turns until then. `chance` is random: it spreads the retries of requests that failed
    /// together.
    pub fn grant(
        &mut self,
        waits: u32,
        now: Instant,
        limit: RetryLimit,
        chance: u64,
    ) -> Option<Instant> {
        let every = Duration::from_secs(1) / RETRIES_PER_SECOND;
        let spent = self.spent.max(now);
        let turn = spent.checked_sub(every * RETRIES_AT_ONCE).unwrap_or(now);
        let at = turn.max(self.end_of_wait(waits, now, limit, chance)?);
        limit.permits(at).then(|| {
            self.spent = spent + every;
            at
        })
    }

    /// The end of the wait of a request after `waits` waits; `None` if it is beyond `limit`. A
    /// request with little time left for retries is sent once more, after a shorter wait.
    pub fn end_of_wait(
        &self,
        waits: u32,
        now: Instant,
        limit: RetryLimit,
        chance: u64,
    ) -> Option<Instant> {
        let at = limit.until.min(now + self.delay(waits, chance));
        (now < at && limit.permits(at)).then_some(at)
    }

    /// The delay of a request after `waits` waits: a growing bound minus a random share.
    fn delay(&self, waits: u32, chance: u64) -> Duration {
        let RetryConfig { first, longest, growth, jitter, .. } = self.terms;
        let grown = first.as_secs_f64() * growth.powi(waits.min(64) as i32);
        let bound = Duration::from_secs_f64(grown.min(longest.as_secs_f64()));
        let drawn = bound.mul_f64(jitter).min(bound);
        bound - drawn + Duration::from_nanos(chance % (drawn.as_nanos() as u64 + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::{RETRY_DELAY, RETRY_DELAY_MAX};

    fn by(until: Instant) -> RetryLimit {
        RetryLimit { until, deadline: None }
    }

    #[test]
    fn a_storm_of_retries_is_spread_and_each_turn_in_time_is_granted() {
        let now = Instant::now();
        let mut retries = RetryBudget::new(RetryConfig::of(3), now);
        let until = now + Duration::from_secs(10);
        let all = RETRIES_AT_ONCE + 10 * RETRIES_PER_SECOND + 50;
        let turns: Vec<Instant> =
            (0..all).filter_map(|i| retries.grant(0, now, by(until), u64::from(i))).collect();
        let soon = turns.iter().filter(|&&at| at < now + Duration::from_millis(900)).count() as u32;
        assert!(soon <= RETRIES_AT_ONCE + RETRIES_PER_SECOND, "{soon}");
        assert_eq!(
            turns.len() as u32,
            RETRIES_AT_ONCE + 10 * RETRIES_PER_SECOND + 1,
            "the last would be too late"
        );
        let later = until + Duration::from_secs(60);
        assert!(
            retries
                .grant(0, later, by(later + RETRY_DELAY), 0)
                .is_some_and(|at| at <= later + RETRY_DELAY)
        );
    }

    #[test]
    fn a_request_with_little_time_left_is_sent_once_more() {
        let now = Instant::now();
        let mut retries = RetryBudget::new(RetryConfig::of(3), now);
        let until = now + Duration::from_millis(1);
        assert_eq!(retries.grant(30, now, by(until), 0), Some(until));
        assert_eq!(retries.grant(30, until, by(until), 0), None);
        // An attempt at the client's deadline would have no time.
        let limit = |deadline| RetryLimit { until, deadline: Some(deadline) };
        assert_eq!(retries.grant(30, now, limit(until), 0), None);
        assert_eq!(retries.grant(30, now, limit(until + RETRY_DELAY), 0), Some(until));
    }

    #[test]
    fn waits_grow_and_are_drawn() {
        let now = Instant::now();
        let until = now + Duration::from_secs(10);
        for (waits, longest) in [(0, RETRY_DELAY), (1, RETRY_DELAY * 10), (30, RETRY_DELAY_MAX)] {
            let half = longest / 2;
            let at = |chance| {
                RetryBudget::new(RetryConfig::of(3), now).grant(waits, now, by(until), chance)
            };
            assert_eq!(
                (at(0), at(half.as_nanos() as u64)),
                (Some(now + half), Some(now + longest))
            );
        }
    }

    #[test]
    fn waits_are_as_long_as_was_asked_for() {
        let terms = RetryConfig {
            first: Duration::from_millis(50),
            longest: Duration::from_millis(200),
            growth: 1.5,
            jitter: 0.2,
            ..RetryConfig::default()
        };
        let retries = RetryBudget::new(terms, Instant::now());
        let least = |waits| retries.delay(waits, 0).as_millis();
        assert_eq!([0, 1, 2, 9, u32::MAX].map(least), [40, 60, 90, 160, 160]);
        assert_eq!(
            retries.delay(0, 10_000_000),
            Duration::from_millis(50),
            "the whole of it, where all is drawn"
        );
        let steady = RetryBudget::new(RetryConfig { jitter: 0.0, ..terms }, Instant::now());
        assert_eq!(steady.delay(1, 12345), Duration::from_millis(75));
    }
}

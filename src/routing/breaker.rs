//! The circuit breaker of one worker: after repeated failures the worker is chosen last.
//!
//! ```text
//! closed ──failures in a row, within the window──▶ open ──successes──▶ closed
//!                                                 ▲      │
//!                                                 └──────┘ a failure: the open time starts again
//! ```
//! A worker with an open breaker is chosen last, so it still gets requests if no other worker is
//! left. Each success counts, even if the request began before the breaker opened.
//!
//! Invariants: it stores at most the number of failures that opens it.
//! Not here: the use in a choice (`balancer`).

use crate::config::BreakerConfig;
use std::collections::VecDeque;
use std::time::Instant;

/// The circuit breaker of one worker.
#[derive(Clone, Debug)]
pub struct Breaker {
    terms: BreakerConfig,
    /// Times of the failures while it is closed.
    failures: VecDeque<Instant>,
    /// Successes since it opened. `None` while it is closed.
    answers: Option<u32>,
}

impl Breaker {
    /// A closed breaker.
    pub fn new(terms: BreakerConfig) -> Breaker {
        Breaker { terms, failures: VecDeque::new(), answers: None }
    }

    /// Records a failed request. If the breaker is open, returns the time until which the worker is
    /// chosen last.
    pub fn failed(&mut self, now: Instant) -> Option<Instant> {
        let enough = self.terms.failures?;
        if self.answers.is_none() {
            self.failures.push_back(now);
            while self.failures.front().is_some_and(|&first| first + self.terms.window < now) {
                self.failures.pop_front();
            }
            if self.failures.len() < enough as usize {
                return None;
            }
            self.failures.clear();
        }
        self.answers = Some(0);
        Some(now + self.terms.open)
    }

    /// Records a successful request. Returns whether the breaker is closed now.
    pub fn answered(&mut self) -> bool {
        let Some(answers) = &mut self.answers else {
            self.failures.clear();
            return true;
        };
        *answers += 1;
        let is_enough = *answers >= self.terms.successes;
        if is_enough {
            self.answers = None;
        }
        is_enough
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn so_many_failures_within_the_window_open_and_so_many_answers_close() {
        let terms = BreakerConfig {
            failures: Some(3),
            window: Duration::from_secs(10),
            open: Duration::from_secs(5),
            successes: 2,
        };
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let mut breaker = Breaker::new(terms);
        assert_eq!(
            [0, 1, 12, 13].map(|second| breaker.failed(at(second))),
            [None; 4],
            "two are too old"
        );
        assert!(breaker.answered(), "it begins anew");
        assert_eq!([14, 14].map(|second| breaker.failed(at(second))), [None; 2]);
        assert_eq!(breaker.failed(at(14)), Some(at(19)));
        assert!(!breaker.answered());
        assert_eq!(breaker.failed(at(20)), Some(at(25)), "one is enough now");
        assert_eq!([breaker.answered(), breaker.answered()], [false, true]);
        assert_eq!(breaker.failed(at(21)), None, "closed");
    }

    #[test]
    fn one_that_is_switched_off_remembers_nothing() {
        let mut breaker =
            Breaker::new(BreakerConfig { failures: None, ..BreakerConfig::default() });
        assert!(
            (0..100).all(|_| breaker.failed(Instant::now()).is_none())
                && breaker.failures.is_empty()
        );
    }
}

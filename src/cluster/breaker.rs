//! Whether a worker is asked last, since requests fail there.
//!
//! ```text
//! closed ──so many failures in a row, within the window──▶ open ──so many answers──▶ closed
//!                                                        ▲      │
//!                                                        └──────┘ one failure: its time begins anew
//! ```
//! While its time lasts its worker is asked last. An answer counts whenever it comes, when it begins and when it has ended:
//! what was under way, or came since nobody else was left, says as much of the worker as one that is asked afterwards.
//! Invariant: no more failures are remembered than open a circuit. Not here: what follows from it (`router`), which asks
//! such a worker where nobody else is left.

use crate::config::resolved::BreakerTerms;
use std::collections::VecDeque;
use std::time::Instant;

/// One worker's.
#[derive(Clone, Debug)]
pub struct Breaker {
    terms: BreakerTerms,
    /// When they came, while it is closed.
    failures: VecDeque<Instant>,
    /// Answers since it was opened, once it has been.
    answers: Option<u32>,
}

impl Breaker {
    /// Closed.
    pub fn new(terms: BreakerTerms) -> Breaker {
        Breaker { terms, failures: VecDeque::new(), answers: None }
    }

    /// A request failed; until when its worker is asked last from now on, if it is.
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

    /// An answer went well; whether its worker is from now on asked like any other.
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
        let terms = BreakerTerms {
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
        let mut breaker = Breaker::new(BreakerTerms { failures: None, ..BreakerTerms::default() });
        assert!(
            (0..100).all(|_| breaker.failed(Instant::now()).is_none())
                && breaker.failures.is_empty()
        );
    }
}

//! As [`super::slo`], but that a decode worker reads a prompt itself where little of it is missing there and its sequences
//! can bear it.

use super::slo::{Foretold, foretell};
use super::{Candidate, Leg, Question};
use crate::cluster::work::Work;
use std::time::Duration;

/// Tokens below which a hand-off is not worth its way, and
const TOKENS: u32 = 2048;
/// share of a prompt that may be missing at most. (Dynamo's conditional disaggregation: 2048 and 0.7.)
const SHARE: f64 = 0.7;

/// Whether a worker with so many blocks of a prompt lacks little of it.
pub fn is_short(work: &Work, cached: u32) -> bool {
    let missing = work.missing(cached);
    missing < TOKENS && f64::from(missing) <= SHARE * f64::from(work.tokens)
}

/// Whether this decode worker, which lacks little, serves the request alone rather than a pair that is foretold to come to
/// `pair`: it is no later, and what it reads leaves its sequences within the time that a token may take.
pub fn is_alone(question: &Question<'_>, worker: &Candidate, pair: Foretold) -> bool {
    let Foretold { ttft, tpot } = foretell(&Question { leg: Leg::Whole, ..*question }, worker);
    let limit = question.forecast.tpot.unwrap_or(Duration::MAX);
    ttft <= pair.ttft && tpot <= limit
}

#[cfg(test)]
mod tests {
    use super::super::asked::{ask, load};
    use super::*;
    use crate::cluster::forecast::Forecast;

    #[test]
    fn a_prompt_that_is_cached_stays_where_sequences_can_bear_it() {
        let pair = |ms| Foretold { ttft: Duration::from_millis(ms), tpot: Duration::ZERO };
        let alone = |cached, pair, limit| {
            let worker = Candidate { cached, ..load(true, 1) };
            let forecast =
                Forecast { tpot: Some(Duration::from_millis(limit)), ..Forecast::default() };
            let mut answer = false;
            ask(
                &[],
                0,
                |_| {},
                |question| {
                    let question = Question { leg: Leg::Decode, forecast: &forecast, ..*question };
                    answer = is_short(question.work, cached) && is_alone(&question, &worker, pair);
                },
            );
            answer
        };
        assert!(alone(9, pair(60), 25));
        assert!(!alone(2, pair(60), 25), "most of it is missing");
        assert!(!alone(9, pair(5), 25), "a pair is sooner");
        assert!(!alone(9, pair(60), 5), "its sequences would be late");
    }
}

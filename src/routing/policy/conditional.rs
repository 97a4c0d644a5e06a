//! Like [`super::slo`], with one addition: a decode worker can compute a prompt itself. It does so
//! if it lacks only a small part and its sequences keep their time per token.

use super::slo::{Prediction, predict};
use super::{Candidate, PolicyInput, Purpose};
use crate::routing::demand::Demand;
use std::time::Duration;

/// From this many missing tokens on, a hand-off is worth its cost.
const TOKENS: u32 = 2048;
/// Largest share of a prompt that can be missing. Both values are from Dynamo's conditional
/// disaggregation.
const SHARE: f64 = 0.7;

/// Whether a worker with this many blocks of a prompt lacks only a small part.
pub fn is_short(work: &Demand, cached: u32) -> bool {
    let missing = work.missing(cached);
    missing < TOKENS && f64::from(missing) <= SHARE * f64::from(work.tokens)
}

/// Whether this decode worker serves the request alone, instead of a pair with the prediction
/// `pair`. Its first token must not be later, and its time per token must be within the limit.
pub fn is_alone(question: &PolicyInput<'_>, worker: &Candidate, pair: Prediction) -> bool {
    let Prediction { ttft, tpot } =
        predict(&PolicyInput { leg: Purpose::Whole, ..*question }, worker);
    let limit = question.forecast.tpot.unwrap_or(Duration::MAX);
    ttft <= pair.ttft && tpot <= limit
}

#[cfg(test)]
mod tests {
    use super::super::asked::{ask, load};
    use super::*;
    use crate::routing::forecast::Forecast;

    #[test]
    fn a_cached_prompt_stays_on_decode_if_its_running_sequences_stay_in_time() {
        let pair = |ms| Prediction { ttft: Duration::from_millis(ms), tpot: Duration::ZERO };
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
                    let question =
                        PolicyInput { leg: Purpose::Decode, forecast: &forecast, ..*question };
                    answer =
                        is_short(question.demand, cached) && is_alone(&question, &worker, pair);
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

//! Tokens to read, times sequences: no weight to be set (LMetric, arXiv 2603.15202).
//!
//! Tokens are those of the prompt that the worker lacks, and those that it has been given and has not read, sequences
//! those that it has and this one. Where nothing is read, as on a decode worker, sequences alone count.

use super::{Leg, Question};

/// The usable worker with the least product.
pub fn pick(question: &Question<'_>) -> Option<usize> {
    question.cheapest(|worker| {
        let tokens = match question.leg {
            Leg::Decode => 1,
            Leg::Prefill | Leg::Whole => worker.to_read.saturating_add(question.missing(worker)),
        };
        u64::from(tokens.max(1)) * (u64::from(worker.sequences) + 1)
    })
}

#[cfg(test)]
mod tests {
    use super::super::Candidate;
    use super::super::asked::{ask, load};
    use super::*;

    #[test]
    fn what_is_cached_outweighs_as_much_as_it_saves() {
        let has = |cached, booked| Candidate { cached, ..load(true, booked) };
        let pick = |loads: &[_], leg| ask(loads, 0, |question| question.leg = leg, pick);
        // 1000 * 1, 500 * 3, 100 * 9.
        assert_eq!(pick(&[has(0, 0), has(5, 2), has(9, 8)], Leg::Prefill), Some(2));
        assert_eq!(pick(&[has(0, 0), has(5, 2), has(9, 10)], Leg::Whole), Some(0));
        assert_eq!(pick(&[has(9, 2), has(0, 1)], Leg::Decode), Some(1), "it reads nothing");
        let mut busy = has(9, 0);
        busy.to_read = 950;
        assert_eq!(pick(&[busy, has(0, 0)], Leg::Prefill), Some(1));
        assert_eq!(pick(&[load(false, 0)], Leg::Prefill), None);
    }
}

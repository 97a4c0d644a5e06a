//! Chooses by the product of prompt tokens and sequences, which needs no weights (LMetric, arXiv
//! 2603.15202).
//!
//! Tokens: the missing part of this prompt, plus the tokens of other prompts that are not computed
//! yet. Sequences: the worker's sequences plus this one. A decode leg computes no prompt, so only
//! sequences count.

use super::{PolicyInput, Purpose};

/// Picks the usable worker with the smallest product.
pub fn pick(question: &PolicyInput<'_>) -> Option<usize> {
    question.cheapest(|worker| {
        let tokens = match question.leg {
            Purpose::Decode => 1,
            Purpose::Prefill | Purpose::Whole => {
                worker.total_uncomputed.saturating_add(question.missing(worker))
            }
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
    fn a_cached_prefix_outweighs_load_by_the_tokens_that_it_saves() {
        let has = |cached, reserved| Candidate { cached, ..load(true, reserved) };
        let pick = |loads: &[_], leg| ask(loads, 0, |question| question.leg = leg, pick);
        // 1000 * 1, 500 * 3, 100 * 9.
        assert_eq!(pick(&[has(0, 0), has(5, 2), has(9, 8)], Purpose::Prefill), Some(2));
        assert_eq!(pick(&[has(0, 0), has(5, 2), has(9, 10)], Purpose::Whole), Some(0));
        assert_eq!(pick(&[has(9, 2), has(0, 1)], Purpose::Decode), Some(1), "it reads nothing");
        let mut busy = has(9, 0);
        busy.total_uncomputed = 950;
        assert_eq!(pick(&[busy, has(0, 0)], Purpose::Prefill), Some(1));
        assert_eq!(pick(&[load(false, 0)], Purpose::Prefill), None);
    }
}

//! Chooses the better of two random workers (Mitzenmacher, 2001).

use super::random::nth;
use super::{PolicyInput, Purpose};

/// Of two random usable workers, picks the one with less work: fewer tokens to compute for a
/// prefill leg, otherwise fewer sequences.
pub fn pick(question: &PolicyInput<'_>) -> Option<usize> {
    let usable = question.usable().count() as u64;
    let first = nth(question, question.chance)?;
    // If there are two workers, the second differs from the first, because the step is shorter than
    // a round.
    let step = 1 + (question.chance >> 32).checked_rem(usable - 1).unwrap_or(usable - 1);
    let second = nth(question, question.chance % usable + step)?;
    let load = |place: usize| {
        let worker = &question.workers[place];
        (
            if question.leg == Purpose::Prefill { worker.total_uncomputed } else { 0 },
            worker.sequences,
        )
    };
    Some(if load(second) < load(first) { second } else { first })
}

#[cfg(test)]
mod tests {
    use super::super::asked::{ask, load};
    use super::*;
    use crate::stdx::rng::mix;

    #[test]
    fn the_busiest_is_never_chosen_and_all_others_are() {
        let loads = [load(true, 9), load(true, 1), load(false, 0), load(true, 3)];
        let mut counts = [0; 4];
        for draw in 0..3000 {
            counts[ask(&loads, 0, |question| question.chance = mix(draw), pick).unwrap()] += 1;
        }
        assert_eq!((counts[0], counts[2]), (0, 0), "one of any two is better");
        // Worker 1 is the best in two of three pairs.
        assert!(counts[1] > 1800 && counts[3] > 800, "{counts:?}");
        assert_eq!(ask(&loads[..1], 0, |question| question.chance = 7, pick), Some(0));
        assert_eq!(ask(&loads[2..3], 0, |_| {}, pick), None);
    }
}

//! Chooses the worker with the fewest sequences.

use super::PolicyInput;

/// Picks the usable worker with the fewest sequences. Equal workers take turns.
pub fn pick(question: &PolicyInput<'_>) -> Option<usize> {
    question.cheapest(|worker| worker.sequences)
}

#[cfg(test)]
mod tests {
    use super::super::asked::{ask, load};
    use super::*;

    #[test]
    fn the_least_booked_is_chosen_and_equals_take_turns() {
        let loads = [load(true, 2), load(false, 0), load(true, 1), load(true, 1)];
        let pick = |loads: &[_], last| ask(loads, last, |_| {}, pick);
        assert_eq!(pick(&loads, 0), Some(2));
        assert_eq!(pick(&loads, 2), Some(3));
        assert_eq!(pick(&loads, 3), Some(2));
        assert_eq!(pick(&loads[..2], 1), Some(0));
        assert_eq!(pick(&loads[1..2], 0), None);
        assert_eq!(pick(&[], 0), None);
    }
}

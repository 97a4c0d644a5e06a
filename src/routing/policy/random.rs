//! Chooses a random worker.

use super::PolicyInput;

/// Picks a usable worker; all are equally likely.
pub fn pick(question: &PolicyInput<'_>) -> Option<usize> {
    nth(question, question.chance)
}

/// The usable worker with this number, modulo the number of usable workers.
pub(super) fn nth(question: &PolicyInput<'_>, number: u64) -> Option<usize> {
    let usable = question.usable().count() as u64;
    question.usable().nth(number.checked_rem(usable)? as usize)
}

#[cfg(test)]
mod tests {
    use super::super::asked::{ask, load};
    use super::*;
    use crate::stdx::rng::mix;

    #[test]
    fn all_that_are_usable_are_chosen_about_as_often() {
        let loads = [load(true, 9), load(false, 0), load(true, 0), load(true, 3)];
        let mut counts = [0; 4];
        for draw in 0..3000 {
            counts[ask(&loads, 0, |question| question.chance = mix(draw), pick).unwrap()] += 1;
        }
        assert_eq!(counts[1], 0);
        assert!(
            [0, 2, 3].into_iter().all(|place| (900..1100).contains(&counts[place])),
            "{counts:?}"
        );
        assert_eq!(ask(&loads[1..2], 0, |_| {}, pick), None);
    }
}

//! Chooses the workers one after the other.

use super::PolicyInput;

/// Picks the next usable worker after the last choice.
pub fn pick(question: &PolicyInput<'_>) -> Option<usize> {
    question.usable().next()
}

#[cfg(test)]
mod tests {
    use super::super::asked::{ask, load};
    use super::*;

    #[test]
    fn usable_workers_take_turns_whatever_their_load() {
        let loads = [load(true, 9), load(false, 0), load(true, 0)];
        let pick = |loads: &[_], last| ask(loads, last, |_| {}, pick);
        assert_eq!(pick(&loads, 2), Some(0));
        assert_eq!(pick(&loads, 0), Some(2));
        assert_eq!(pick(&loads[..2], 0), Some(0), "itself, where there is no other");
        assert_eq!(pick(&loads[1..2], 0), None);
        assert_eq!(pick(&[], 0), None);
    }
}

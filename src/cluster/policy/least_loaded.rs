//! The one with the least work that the router knows of.

use super::places_after;
use crate::cluster::loads::Load;

/// The usable worker with the least booked; those with equal loads take turns.
pub fn pick(loads: &[Load], last: usize) -> Option<usize> {
    // `min_by_key` keeps the first of equals.
    places_after(last, loads.len())
        .filter(|&place| loads[place].usable)
        .min_by_key(|&place| loads[place].booked)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_booked_is_chosen_and_equals_take_turns() {
        let load = |usable, booked| Load { usable, booked, ..Load::default() };
        let loads = [load(true, 2), load(false, 0), load(true, 1), load(true, 1)];
        assert_eq!(pick(&loads, 0), Some(2));
        assert_eq!(pick(&loads, 2), Some(3));
        assert_eq!(pick(&loads, 3), Some(2));
        assert_eq!(pick(&loads[..2], 1), Some(0));
        assert_eq!(pick(&loads[1..2], 0), None);
        assert_eq!(pick(&[], 0), None);
    }
}

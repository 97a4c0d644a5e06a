//! One after the other.

use super::places_after;
use crate::cluster::loads::Load;

/// The next usable worker after the last.
pub fn pick(loads: &[Load], last: usize) -> Option<usize> {
    places_after(last, loads.len()).find(|&place| loads[place].usable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usable_workers_take_turns_whatever_their_load() {
        let load = |usable, booked| Load { usable, booked, ..Load::default() };
        let loads = [load(true, 9), load(false, 0), load(true, 0)];
        assert_eq!(pick(&loads, 2), Some(0));
        assert_eq!(pick(&loads, 0), Some(2));
        assert_eq!(pick(&loads[..2], 0), Some(0), "itself, where there is no other");
        assert_eq!(pick(&loads[1..2], 0), None);
        assert_eq!(pick(&[], 0), None);
    }
}

//! A waiting line in which a request that does not fit may be passed, but not for ever.
//!
//! Invariant: nobody in it has been passed more than [`PASSES_MAX`] times.

use crate::ids::SlotId;
use crate::limits::PASSES_MAX;
use std::collections::VecDeque;

/// Requests in order of arrival.
#[derive(Debug)]
pub struct Line {
    waiting: VecDeque<Waiting>,
}

#[derive(Debug)]
struct Waiting {
    slot: SlotId,
    passed: u32,
}

impl Line {
    /// An empty line for at most `slots` requests.
    pub fn new(slots: usize) -> Line {
        Line { waiting: VecDeque::with_capacity(slots) }
    }

    /// Goes to the end.
    pub fn join(&mut self, slot: SlotId) {
        debug_assert!(self.waiting.len() < self.waiting.capacity());
        self.waiting.push_back(Waiting { slot, passed: 0 });
    }

    /// Leaves from wherever it stands, if it does.
    pub fn leave(&mut self, slot: SlotId) {
        self.waiting.retain(|waiting| waiting.slot != slot);
    }

    /// Takes out the first that fits, unless somebody before it has been passed often enough.
    pub fn next(&mut self, fits: impl FnMut(SlotId) -> bool) -> Option<SlotId> {
        self.next_from(&mut 0, fits)
    }

    /// The same where those before this place did not fit when they were asked, and still do not: they are not asked again.
    /// The place is then that behind whom was taken.
    pub fn next_from(
        &mut self,
        from: &mut usize,
        mut fits: impl FnMut(SlotId) -> bool,
    ) -> Option<SlotId> {
        let mut at = None;
        for (index, waiting) in self.waiting.iter().enumerate() {
            if index >= *from && fits(waiting.slot) {
                at = Some(index);
                break;
            }
            if waiting.passed >= PASSES_MAX {
                break;
            }
        }
        let at = at?;
        *from = at;
        self.waiting.iter_mut().take(at).for_each(|waiting| waiting.passed += 1);
        self.waiting.remove(at).map(|waiting| waiting.slot)
    }

    /// Who waits, in order.
    pub fn slots(&self) -> impl Iterator<Item = SlotId> {
        self.waiting.iter().map(|waiting| waiting.slot)
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_does_not_fit_is_passed_a_bounded_number_of_times() {
        let big = SlotId(1000);
        let mut line = Line::new(2000);
        line.join(big);
        (0..500).for_each(|slot| line.join(SlotId(slot)));
        let passed = std::iter::from_fn(|| line.next(|slot| slot != big)).count();
        assert_eq!(passed, PASSES_MAX as usize);
        assert_eq!(line.next(|_| true), Some(big));
        assert_eq!(line.next(|_| true), Some(SlotId(PASSES_MAX)));
    }

    #[test]
    fn who_did_not_fit_is_not_asked_again_and_still_passed() {
        let mut line = Line::new(200);
        (0..100).for_each(|slot| line.join(SlotId(slot)));
        let (mut from, mut asked) = (0, 0);
        let mut odd = |slot: SlotId| {
            asked += 1;
            slot.0 % 2 == 1
        };
        let taken: Vec<u32> =
            std::iter::from_fn(|| line.next_from(&mut from, &mut odd)).map(|slot| slot.0).collect();
        assert_eq!(taken, (0..PASSES_MAX).map(|at| 2 * at + 1).collect::<Vec<u32>>());
        assert_eq!(asked, 2 * PASSES_MAX);
        assert_eq!(line.next(|slot| slot.0 > 0), None, "the first has been passed often enough");
    }

    #[test]
    fn who_leaves_is_not_taken() {
        let mut line = Line::new(3);
        (0..3).for_each(|slot| line.join(SlotId(slot)));
        line.leave(SlotId(0));
        assert_eq!(line.next(|_| true), Some(SlotId(1)));
        assert_eq!(line.len(), 1);
    }
}

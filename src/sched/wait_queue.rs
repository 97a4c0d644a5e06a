//! A wait queue, by priority and then by arrival. Later requests pass a request of a lower
//! priority, or one that does not fit, but only a bounded number of times.
//!
//! Invariant: no request in it has been passed more than [`PASSES_MAX`] times, for either reason.
//! So no request starves. Workers name a request by its slot, and routers by its client.

use crate::ids::SlotId;
use crate::limits::PASSES_MAX;
use std::collections::VecDeque;

/// Requests in their order, by their names.
#[derive(Debug)]
pub struct WaitQueue<T = SlotId> {
    waiting: VecDeque<Waiting<T>>,
}

#[derive(Debug)]
struct Waiting<T> {
    name: T,
    priority: i32,
    passed: u32,
}

impl<T: Copy + Eq> WaitQueue<T> {
    /// An empty queue for at most this many requests.
    pub fn new(length_max: usize) -> WaitQueue<T> {
        WaitQueue { waiting: VecDeque::with_capacity(length_max) }
    }

    /// Adds a request behind those of the same priority; the lowest number is the first. It does
    /// not pass a request that has been passed too often, and none before that one.
    pub fn push(&mut self, name: T, priority: i32) {
        debug_assert!(self.waiting.len() < self.waiting.capacity(), "the queue has a place");
        debug_assert!(self.iter().all(|other| other != name), "a request waits once");
        let may_be_passed =
            |waiting: &&Waiting<T>| waiting.priority > priority && waiting.passed < PASSES_MAX;
        let behind = self.waiting.iter().rev().take_while(may_be_passed).count();
        let at = self.waiting.len() - behind;
        self.waiting.range_mut(at..).for_each(|waiting| waiting.passed += 1);
        self.waiting.insert(at, Waiting { name, priority, passed: 0 });
    }

    /// Removes a request at any position, if it is in the queue.
    pub fn remove(&mut self, name: T) {
        self.waiting.retain(|waiting| waiting.name != name);
    }

    /// Takes the first request that fits, unless one before it has been passed too often.
    pub fn pop_fitting(&mut self, fits: impl FnMut(T) -> bool) -> Option<T> {
        self.pop_fitting_from(&mut 0, fits)
    }

    /// Like [`WaitQueue::pop_fitting`], but skips the first `from` requests, which did not fit
    /// before. Sets `from` to the position behind the taken request.
    pub fn pop_fitting_from(
        &mut self,
        from: &mut usize,
        mut fits: impl FnMut(T) -> bool,
    ) -> Option<T> {
        let mut at = None;
        for (index, waiting) in self.waiting.iter().enumerate() {
            if index >= *from && fits(waiting.name) {
                at = Some(index);
                break;
            }
            if waiting.passed >= PASSES_MAX {
                break;
            }
        }
        let at = at?;
        *from = at;
        let may_be_passed = |waiting: &Waiting<T>| waiting.passed < PASSES_MAX;
        debug_assert!(self.waiting.iter().take(at).all(may_be_passed), "passes are bounded");
        self.waiting.iter_mut().take(at).for_each(|waiting| waiting.passed += 1);
        self.waiting.remove(at).map(|waiting| waiting.name)
    }

    /// The names of the waiting requests, in order.
    pub fn iter(&self) -> impl Iterator<Item = T> {
        self.waiting.iter().map(|waiting| waiting.name)
    }

    /// Number of waiting requests.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether no request waits.
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
        let mut line = WaitQueue::new(2000);
        line.push(big, 0);
        (0..500).for_each(|slot| line.push(SlotId(slot), 0));
        let passed = std::iter::from_fn(|| line.pop_fitting(|slot| slot != big)).count();
        assert_eq!(passed, PASSES_MAX as usize);
        assert_eq!(line.pop_fitting(|_| true), Some(big));
        assert_eq!(line.pop_fitting(|_| true), Some(SlotId(PASSES_MAX)));
    }

    #[test]
    fn a_request_that_did_not_fit_is_not_asked_again_and_counts_as_passed() {
        let mut line = WaitQueue::new(200);
        (0..100).for_each(|slot| line.push(SlotId(slot), 0));
        let (mut from, mut asked) = (0, 0);
        let mut odd = |slot: SlotId| {
            asked += 1;
            slot.0 % 2 == 1
        };
        let taken: Vec<u32> = std::iter::from_fn(|| line.pop_fitting_from(&mut from, &mut odd))
            .map(|slot| slot.0)
            .collect();
        assert_eq!(taken, (0..PASSES_MAX).map(|at| 2 * at + 1).collect::<Vec<u32>>());
        assert_eq!(asked, 2 * PASSES_MAX);
        assert_eq!(
            line.pop_fitting(|slot| slot.0 > 0),
            None,
            "the first has been passed often enough"
        );
    }

    #[test]
    fn a_request_that_leaves_the_queue_is_not_taken() {
        let mut line = WaitQueue::new(3);
        (0..3).for_each(|slot| line.push(SlotId(slot), 0));
        line.remove(SlotId(0));
        assert_eq!(line.pop_fitting(|_| true), Some(SlotId(1)));
        assert_eq!(line.len(), 1);
    }

    #[test]
    fn urgent_requests_pass_others_a_bounded_number_of_times() {
        let mut line = WaitQueue::new(200);
        let [usual, low] = [SlotId(100), SlotId(101)];
        line.push(usual, 0);
        line.push(low, 5);
        (0..PASSES_MAX + 8).for_each(|slot| line.push(SlotId(slot), -1));
        let order: Vec<u32> =
            std::iter::from_fn(|| line.pop_fitting(|_| true)).map(|slot| slot.0).collect();
        let urgent: Vec<u32> = (0..PASSES_MAX).collect();
        let late: Vec<u32> = (PASSES_MAX..PASSES_MAX + 8).collect();
        assert_eq!(order, [&urgent[..], &[usual.0, low.0], &late].concat());
        line.push(low, 1);
        line.push(usual, 0);
        line.push(SlotId(7), 1);
        let order: Vec<SlotId> = std::iter::from_fn(|| line.pop_fitting(|_| true)).collect();
        assert_eq!(order, [usual, low, SlotId(7)]);
    }
}

//! State that the posting and the polling side of a session share: room that returns to lanes, and
//! the work in flight of each slot.
//!
//! Thread: each lane has one posting and one polling thread, which can be the same. A slot can use
//! several lanes.
//! Invariants: each active poster adds more to a slot's count than the chains that it can post;
//! each completed chain subtracts one. The count reaches zero once, after all posters have left and
//! all chains have completed. The thread that brings it to zero sees all earlier work of the
//! others. Posting does not write this state, because a cache line that two threads write in turn
//! costs as much as five work requests.

use crate::ids::SlotId;
use crate::stdx::sync::{AtomicU64, Ordering};

/// The shared state of one session.
#[derive(Debug)]
pub struct InFlight {
    /// By lane: work requests that have completed since the poster's last look.
    returned: Box<[AtomicU64]>,
    /// By slot: chains that have not completed, counted down from [`WHOLE`] for each active poster.
    under_way: Box<[AtomicU64]>,
}

/// More chains than a post can have.
const WHOLE: u64 = 1 << 40;

/// The content of a work request id: all that the polling side needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WorkRequestId {
    /// The slot of the bytes.
    pub slot: SlotId,
    /// The lane of the session.
    pub lane: u8,
    /// Requests that end with this completion: those of its chain, if it is the last.
    pub requests: u16,
}

impl WorkRequestId {
    /// The packed id.
    #[inline]
    pub fn id(self) -> u64 {
        u64::from(self.slot.0) | u64::from(self.lane) << 32 | u64::from(self.requests) << 40
    }

    /// Unpacks an id. An id that was never posted can name a lane or slot that does not exist.
    #[inline]
    pub fn of(id: u64) -> WorkRequestId {
        WorkRequestId {
            slot: SlotId(id as u32),
            lane: (id >> 32) as u8,
            requests: (id >> 40) as u16,
        }
    }
}

impl InFlight {
    /// A state without work in flight.
    pub fn new(lanes: usize, slots: usize) -> InFlight {
        let zeros = |count| (0..count).map(|_| AtomicU64::new(0)).collect();
        InFlight { returned: zeros(lanes), under_way: zeros(slots) }
    }

    /// Gives an idle slot to `posters` posters, at least one. The ring that carries the post orders
    /// this store.
    pub fn begin(&self, slot: SlotId, posters: u64) {
        self.under_way[slot.index()].store(posters * WHOLE, Ordering::Relaxed);
    }

    /// Takes the room that has returned to a lane. From here on the poster can write these entries
    /// of its queue.
    #[inline]
    pub fn take_room(&self, lane: u8) -> u32 {
        self.returned[usize::from(lane)].swap(0, Ordering::Acquire) as u32
    }

    /// Notes that a chain has completed. Returns true if the slot is complete, and `None` if the
    /// chain was never posted.
    #[inline]
    pub fn reap(&self, chain: WorkRequestId) -> Option<bool> {
        let returned = self.returned.get(usize::from(chain.lane))?;
        self.under_way.get(chain.slot.index())?;
        returned.fetch_add(chain.requests.into(), Ordering::Release);
        Some(self.count_down(chain.slot, 1))
    }

    /// Notes that a poster has posted `posted` chains of the slot and posts no more. Returns true
    /// if the slot is complete.
    #[inline]
    pub fn leave(&self, slot: SlotId, posted: u64) -> bool {
        self.count_down(slot, WHOLE - posted)
    }

    #[inline]
    fn count_down(&self, slot: SlotId, by: u64) -> bool {
        // Release: all reads of the slot come before it is given back. Acquire: this includes the
        // reads of other threads.
        self.under_way[slot.index()].fetch_sub(by, Ordering::AcqRel) == by
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_work_request_id_decodes_to_its_parts() {
        for ticket in [
            WorkRequestId { slot: SlotId(0), lane: 0, requests: 0 },
            WorkRequestId { slot: SlotId(4095), lane: 15, requests: 64 },
            WorkRequestId { slot: SlotId(7), lane: 3, requests: 1 },
        ] {
            assert_eq!(WorkRequestId::of(ticket.id()), ticket);
        }
    }

    #[test]
    fn an_id_that_was_never_posted_changes_nothing() {
        let flight = InFlight::new(2, 2);
        for id in [u64::MAX, 2, 2 << 32] {
            assert_eq!(flight.reap(WorkRequestId::of(id)), None);
        }
        assert_eq!([flight.take_room(0), flight.take_room(1)], [0, 0]);
    }

    #[test]
    fn a_slot_is_over_with_the_last_poster_or_the_last_chain() {
        let (slot, chain) = (SlotId(1), WorkRequestId { slot: SlotId(1), lane: 0, requests: 3 });
        let flight = InFlight::new(1, 2);
        flight.begin(slot, 2);
        assert_eq!([flight.reap(chain), flight.reap(chain)], [Some(false); 2]);
        assert_eq!([flight.take_room(0), flight.take_room(0)], [6, 0]);
        assert!(!flight.leave(slot, 0) && flight.leave(slot, 2));
        flight.begin(slot, 2);
        assert!(!flight.leave(slot, 0) && !flight.leave(slot, 1));
        assert_eq!(flight.reap(chain), Some(true));
    }
}

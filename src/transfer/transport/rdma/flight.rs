//! What the posting and the reaping side of a session share: room that comes back to lanes, and what is under way of each
//! slot.
//!
//! Thread: a lane has one that posts and one that reaps, which may be the same; a slot may be on several lanes. The
//! mover begins a slot, and hears once that it is over.
//! Invariants: who may still post of a slot is counted for more than it can post, and a completed chain for one, so
//! that the count reaches zero once, when all posters have left and all that they posted has completed; who brings it
//! there has seen all that the others did before. Posting a chain touches nothing here: a line that two threads write
//! in turn costs a chain as much as five of its work requests.

use crate::ids::SlotId;
use crate::stdx::sync::{AtomicU64, Ordering};

/// A session's.
#[derive(Debug)]
pub struct Flight {
    /// By lane: work requests that have completed since the poster last looked.
    returned: Box<[AtomicU64]>,
    /// By slot: chains that have not completed, counted down from [`WHOLE`] for each poster that has not left.
    under_way: Box<[AtomicU64]>,
}

/// More chains than a post has.
const WHOLE: u64 = 1 << 40;

/// What the id of a work request says, so that who reaps it needs to know nothing else.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ticket {
    /// Whose bytes.
    pub slot: SlotId,
    /// Of the session.
    pub lane: u8,
    /// That end with it: those of its chain, where it is the last.
    pub requests: u16,
}

impl Ticket {
    /// As an id.
    #[inline]
    pub fn id(self) -> u64 {
        u64::from(self.slot.0) | u64::from(self.lane) << 32 | u64::from(self.requests) << 40
    }

    /// As it was given out. An id that never was names a lane or slot that may not be there.
    #[inline]
    pub fn of(id: u64) -> Ticket {
        Ticket { slot: SlotId(id as u32), lane: (id >> 32) as u8, requests: (id >> 40) as u16 }
    }
}

impl Flight {
    /// Nothing is under way.
    pub fn new(lanes: usize, slots: usize) -> Flight {
        let zeros = |count| (0..count).map(|_| AtomicU64::new(0)).collect();
        Flight { returned: zeros(lanes), under_way: zeros(slots) }
    }

    /// A slot of which nothing is under way is given to so many posters, at least one. The ring that tells them
    /// orders this.
    pub fn begin(&self, slot: SlotId, posters: u64) {
        self.under_way[slot.index()].store(posters * WHOLE, Ordering::Relaxed);
    }

    /// Room that has come back to a lane, which is the poster's from here on: the entries of its queue are free to be
    /// written.
    #[inline]
    pub fn take_room(&self, lane: u8) -> u32 {
        self.returned[usize::from(lane)].swap(0, Ordering::Acquire) as u32
    }

    /// A chain was completed. True: the slot is over. None: it was never posted.
    #[inline]
    pub fn reap(&self, chain: Ticket) -> Option<bool> {
        let returned = self.returned.get(usize::from(chain.lane))?;
        self.under_way.get(chain.slot.index())?;
        returned.fetch_add(chain.requests.into(), Ordering::Release);
        Some(self.count_down(chain.slot, 1))
    }

    /// A poster has posted so many chains of the slot, and will post no more. True: the slot is over.
    #[inline]
    pub fn leave(&self, slot: SlotId, posted: u64) -> bool {
        self.count_down(slot, WHOLE - posted)
    }

    #[inline]
    fn count_down(&self, slot: SlotId, by: u64) -> bool {
        // Release: what was read of the slot was read before it is given back; Acquire: also by the others.
        self.under_way[slot.index()].fetch_sub(by, Ordering::AcqRel) == by
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_say_what_they_were_made_of() {
        for ticket in [
            Ticket { slot: SlotId(0), lane: 0, requests: 0 },
            Ticket { slot: SlotId(4095), lane: 15, requests: 64 },
            Ticket { slot: SlotId(7), lane: 3, requests: 1 },
        ] {
            assert_eq!(Ticket::of(ticket.id()), ticket);
        }
    }

    #[test]
    fn what_was_never_posted_changes_nothing() {
        let flight = Flight::new(2, 2);
        for id in [u64::MAX, 2, 2 << 32] {
            assert_eq!(flight.reap(Ticket::of(id)), None);
        }
        assert_eq!([flight.take_room(0), flight.take_room(1)], [0, 0]);
    }

    #[test]
    fn a_slot_is_over_with_the_last_poster_or_the_last_chain() {
        let (slot, chain) = (SlotId(1), Ticket { slot: SlotId(1), lane: 0, requests: 3 });
        let flight = Flight::new(1, 2);
        flight.begin(slot, 2);
        assert_eq!([flight.reap(chain), flight.reap(chain)], [Some(false); 2]);
        assert_eq!([flight.take_room(0), flight.take_room(0)], [6, 0]);
        assert!(!flight.leave(slot, 0) && flight.leave(slot, 2));
        flight.begin(slot, 2);
        assert!(!flight.leave(slot, 0) && !flight.leave(slot, 1));
        assert_eq!(flight.reap(chain), Some(true));
    }
}

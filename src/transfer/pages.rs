//! Page lists by slot, written by the scheduler and read by the mover (and, where a destination pulls,
//! by the peer): plain numbers in atomics, so that a reader who looks late reads stale numbers, never torn
//! ones, and the lease word tells it so.

use crate::ids::{PageId, SlotId};
use std::sync::atomic::{AtomicU32, Ordering};

/// One list of fixed capacity per slot.
#[derive(Debug)]
pub struct PageLists {
    capacity: usize,
    pages: Box<[AtomicU32]>,
}

impl PageLists {
    /// Lists of at most `capacity` pages for `slots` slots.
    pub fn new(slots: usize, capacity: usize) -> PageLists {
        PageLists { capacity, pages: (0..slots * capacity).map(|_| AtomicU32::new(0)).collect() }
    }

    /// Most pages of a list.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Stores a slot's list. The command that tells the mover of it orders the stores.
    pub fn store(&self, slot: SlotId, pages: &[PageId]) {
        for (entry, page) in self.list(slot).iter().zip(pages) {
            entry.store(page.0, Ordering::Relaxed);
        }
    }

    /// The `index`-th page of a slot's list.
    #[inline]
    pub fn page(&self, slot: SlotId, index: usize) -> PageId {
        PageId(self.list(slot)[index].load(Ordering::Relaxed))
    }

    fn list(&self, slot: SlotId) -> &[AtomicU32] {
        &self.pages[slot.index() * self.capacity..][..self.capacity]
    }
}

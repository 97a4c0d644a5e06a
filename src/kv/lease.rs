//! The right of one transfer to read or write pages. A lease is not a copyable number: the pool
//! makes it, the thread that moves bytes ends it, and only what that thread returns gives the pages
//! back. So no caller can forget the fence (design, section 7).

use crate::ids::{Generation, SlotId};

/// Pages of one slot are leased to a transfer. Made by the pool, carried to the mover by the message
/// that lets it begin.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub struct Lease {
    slot: SlotId,
    generation: Generation,
}

/// Nothing can land in, or be read from, the pages any more. Given back to the pool.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub struct Ended {
    slot: SlotId,
    generation: Generation,
}

/// What a mover holds and nobody else does: the right to end leases. `role` makes one per mover.
#[derive(Debug)]
pub struct MoverRight(());

impl MoverRight {
    /// For the thread function of a mover, and tests that play one.
    pub fn for_mover_thread() -> MoverRight {
        MoverRight(())
    }
}

impl Lease {
    /// A lease over the pages of `slot`. Only the pool calls this.
    pub(in crate::kv) fn new(slot: SlotId, generation: Generation) -> Lease {
        Lease { slot, generation }
    }

    /// Ends the lease. The caller answers for the fence of its transport.
    pub fn end(self, _right: &MoverRight) -> Ended {
        Ended { slot: self.slot, generation: self.generation }
    }

    /// The slot whose pages are leased.
    pub fn slot(&self) -> SlotId {
        self.slot
    }
}

impl Ended {
    /// The slot whose pages return.
    pub fn slot(&self) -> SlotId {
        self.slot
    }

    /// The slot's generation at the time of the lease.
    pub fn generation(&self) -> Generation {
        self.generation
    }
}

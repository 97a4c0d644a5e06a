//! The right of one transfer to read or write pages. A lease is a value that cannot be copied: the
//! pool makes it, and the thread that moves bytes ends it. Only the [`EndedLease`] from that thread
//! gives the pages back, so no caller can forget the fence (docs/design/handoff.md).

use crate::ids::{Generation, SlotId};

/// A lease of the pages of one slot to a transfer. The pool makes it. The command that starts the
/// transfer carries it to the mover.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub struct Lease {
    slot: SlotId,
    generation: Generation,
}

/// A lease that has ended: its transfer neither writes nor reads the pages any more. It goes back
/// to the pool.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub struct EndedLease {
    slot: SlotId,
    generation: Generation,
}

/// The right to end leases. Only movers hold one; `process` makes one per mover.
#[derive(Debug)]
pub struct MoverRight(());

impl MoverRight {
    /// For the thread function of a mover, and for tests in place of a mover.
    pub fn for_mover_thread() -> MoverRight {
        MoverRight(())
    }
}

impl Lease {
    /// A lease over the pages of `slot`. Only the pool calls this.
    pub(in crate::kv) fn new(slot: SlotId, generation: Generation) -> Lease {
        Lease { slot, generation }
    }

    /// Ends the lease. The caller guarantees the fence of its transport.
    pub fn end(self, _right: &MoverRight) -> EndedLease {
        EndedLease { slot: self.slot, generation: self.generation }
    }

    /// The slot that uses the leased pages.
    pub fn slot(&self) -> SlotId {
        self.slot
    }
}

impl EndedLease {
    /// The slot that used the leased pages.
    pub fn slot(&self) -> SlotId {
        self.slot
    }

    /// The slot's generation at the time of the lease.
    pub fn generation(&self) -> Generation {
        self.generation
    }
}

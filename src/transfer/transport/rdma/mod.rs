//! Transport between hosts with RDMA NICs: the source writes into the destination's pages. After a
//! room's last bytes, each lane sends an immediate that names the slot.
//!
//! A session has several lanes on one or more NICs of each side. A lane is a pair of connected
//! queue pairs. A chunk's bytes, in template order, are cut into one share per lane. Each share is
//! cut into chains of work requests with one doorbell and one completion. On lane 0 the immediate's
//! request also writes the room's aux record.
//! Invariants: requests of a slot are counted until their completions have come. Any error ends the
//! session; none of its bytes arrive once its queue pairs are reset or destroyed.

mod completions;
mod destination;
mod flight;
mod lane;
mod nic;
mod posts;
mod rails;
mod slabs;
mod source;
mod split;
mod threads;

pub use destination::{PendingQueuePairs, RdmaDestination};
pub use nic::Nic;
pub use rails::{Rails, Settings};
pub use slabs::Slabs;
pub use source::RdmaSource;
pub use split::{Poller, Poster, Split};
pub use threads::DataThreads;

use crate::ids::{Generation, SlotId};
use crate::transfer::aux::AuxRecord;

/// Bits of a slot's index in an immediate; the rest are the low bits of its generation.
const SLOT_BITS: u32 = 12;
/// Number of slots that immediates can name.
pub const SLOTS_MAX: usize = 1 << SLOT_BITS;
/// Bytes per record in the region of records.
const RECORD_STRIDE: usize = 256;

const _: () = assert!(size_of::<AuxRecord>() <= RECORD_STRIDE);

/// The immediate of a lane's last write.
fn immediate(slot: SlotId, generation: Generation) -> u32 {
    generation.0 << SLOT_BITS | slot.0
}

/// The slot that an immediate names.
fn slot_of(immediate: u32) -> SlotId {
    SlotId(immediate & ((1 << SLOT_BITS) - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_immediate_names_slot_and_generation() {
        let (slot, generation) = (SlotId(SLOTS_MAX as u32 - 1), Generation(0xab_cdef));
        let said = immediate(slot, generation);
        assert_eq!(slot_of(said), slot);
        // Only 20 of the 24 bits of the generation fit, so two uses that are 2^20 apart look the
        // same.
        assert_eq!(immediate(slot, Generation(generation.0 & 0xf_ffff)), said);
        assert_ne!(immediate(slot, Generation(generation.0 + 1)), said);
    }
}

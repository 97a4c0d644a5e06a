//! Between hosts with RDMA NICs: the source writes into the destination's pages, and on each lane's last bytes of
//! a room follows an immediate that says which room.
//!
//! A session has some lanes, each a pair of connected queue pairs, on one NIC of each side or on several. A chunk's
//! bytes, in the order of the session's template, are cut into one share per lane, each share into chains of work
//! requests with one doorbell and one completion. Only the last chunk is told of, by lane: its last request carries
//! the immediate, on lane 0 with the room's record into the destination's record of the slot.
//! Invariants: what is outstanding of a slot is counted until its completions have come, so that a slot is quiet or
//! it is not; any fault ends the session, and nothing of one lands once its queue pairs are reset or gone.

mod destination;
mod flight;
mod lane;
mod nic;
mod posting;
mod rails;
mod reaping;
mod slabs;
mod source;
mod split;
mod threads;

pub use destination::{RdmaDestination, RdmaOffer};
pub use nic::{Nic, cores_near};
pub use rails::{Rails, Settings};
pub use slabs::Slabs;
pub use source::RdmaSource;
pub use split::{Poller, Poster, Split};
pub use threads::DataThreads;

use crate::ids::{Generation, SlotId};
use crate::transfer::aux::AuxRecord;

/// Bits of a slot's index in an immediate; the rest are the low ones of its generation.
const SLOT_BITS: u32 = 12;
/// Slots that immediates can name.
pub const SLOTS_MAX: usize = 1 << SLOT_BITS;
/// A record in the region of records.
const RECORD_STRIDE: usize = 256;

const _: () = assert!(size_of::<AuxRecord>() <= RECORD_STRIDE);

/// What the last write of a lane says.
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
        // Of 24 bits of generation 20 are left: the one that comes a million uses later looks the same.
        assert_eq!(immediate(slot, Generation(generation.0 & 0xf_ffff)), said);
        assert_ne!(immediate(slot, Generation(generation.0 + 1)), said);
    }
}

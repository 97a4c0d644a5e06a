//! The aux record: what the destination needs of a request besides KV. It goes with the last chunk.
//!
//! The mover moves its payload and does not read it; only the fourth word counts: if it is 0, the
//! rest of the payload from [`AUX_TAIL`] on is zero and need not move. Written by the source's
//! scheduler, checked at the destination against room and generation before Success. Not here: what
//! the payload means (`sched::first_token`).

use crate::ids::{Generation, Room};
use bytemuck::{Pod, Zeroable};

/// Version of [`AuxRecord`]; peers of different versions refuse each other at Announce.
pub const AUX_VERSION: u32 = 1;

/// Bytes of the payload.
pub const AUX_PAYLOAD_BYTES: usize = 188;

/// Where the payload's tail begins, which is zero if [`AuxRecord::has_tail`] is false.
pub const AUX_TAIL: usize = 24;

/// Where the payload's fourth word lies.
const TAIL_COUNT: usize = 12;

/// The record in shared memory and in frames, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct AuxRecord {
    /// The attempt that it belongs to.
    pub room: u64,
    /// Generation of the *destination's* slot.
    pub generation: u32,
    /// The caller's bytes.
    pub payload: [u8; AUX_PAYLOAD_BYTES],
}

const _: () = assert!(size_of::<AuxRecord>() == 200);

impl AuxRecord {
    /// A record for `room`; the mover fills in the destination's generation.
    pub fn new(room: Room, payload: [u8; AUX_PAYLOAD_BYTES]) -> AuxRecord {
        AuxRecord { room: room.0, generation: 0, payload }
    }

    /// Whether the record belongs to this attempt and this use of the destination's slot.
    pub fn belongs_to(&self, room: Room, generation: Generation) -> bool {
        self.room == room.0 && self.generation == generation.0
    }

    /// Whether the payload says something behind [`AUX_TAIL`].
    pub fn has_tail(&self) -> bool {
        self.payload[TAIL_COUNT..TAIL_COUNT + 4] != [0; 4]
    }
}

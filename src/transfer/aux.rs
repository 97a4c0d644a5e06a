//! The aux record: the data of a request that the destination needs besides KV. The source sends it
//! with the last chunk.
//!
//! The mover moves the payload and reads only its fourth word. If that word is 0, the payload from
//! [`AUX_TAIL`] on is zero and is not moved. The source's scheduler writes the record. The
//! destination compares it with room and generation before Success. Not here: the meaning of the
//! payload (`sched::first_token`).

use crate::ids::{Generation, Room};
use bytemuck::{Pod, Zeroable};

/// Version of [`AuxRecord`]; peers of different versions refuse each other at Announce.
pub const AUX_VERSION: u32 = 1;

/// Bytes of the payload.
pub const AUX_PAYLOAD_BYTES: usize = 188;

/// Offset of the payload's tail. The tail is zero if [`AuxRecord::has_tail`] is false.
pub const AUX_TAIL: usize = 24;

/// Offset of the payload's fourth word.
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

    /// Whether the payload has data behind [`AUX_TAIL`].
    pub fn has_tail(&self) -> bool {
        self.payload[TAIL_COUNT..TAIL_COUNT + 4] != [0; 4]
    }
}

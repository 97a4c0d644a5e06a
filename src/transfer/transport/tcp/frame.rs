//! The frames of a chunk: a header, then up to [`FRAME_MAX`] bytes of the chunk. On lane 0 the
//! room's last frame also carries the aux record, behind the header.

use crate::ids::{Generation, Room, SlotId};
use crate::transfer::aux::AuxRecord;
use crate::transfer::transport::{Notice, SessionLost};
use bytemuck::{Pod, Zeroable};
use std::ops::Range;

/// Most bytes of KV in a frame. It bounds the data in flight of a cancelled room, and the time that
/// another room waits behind a frame.
pub const FRAME_MAX: u64 = 1 << 20;
const MAGIC: u32 = u32::from_le_bytes(*b"BtnF");
/// This lane sends nothing more for the room.
const LAST: u32 = 1;
/// The aux record follows the header.
const AUX: u32 = 2;
const HEADER_BYTES: usize = size_of::<Header>();
/// Bytes of the longest head.
pub(super) const HEAD_MAX: usize = HEADER_BYTES + size_of::<AuxRecord>();

/// Little-endian.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct Header {
    magic: u32,
    flags: u32,
    room: u64,
    /// The destination's slot.
    slot: u32,
    generation: u32,
    first_token: u32,
    end_token: u32,
    /// Offset of the frame's first byte in the chunk.
    offset: u64,
    bytes: u32,
    reserved: u32,
}

const _: () = assert!(HEADER_BYTES == 48);

/// The content of a frame; at the destination, as the peer states it.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Frame {
    pub notice: Notice,
    /// Tokens of the chunk.
    pub tokens: Range<u32>,
    /// Bytes of the chunk's stream.
    pub bytes: Range<u64>,
    pub last: bool,
    pub aux: Option<AuxRecord>,
}

impl Frame {
    /// Writes the head and returns its length.
    pub fn encode(&self, head: &mut [u8; HEAD_MAX]) -> usize {
        let Notice { slot, generation, room } = self.notice;
        let header = Header {
            magic: MAGIC,
            flags: if self.last { LAST } else { 0 } | if self.aux.is_some() { AUX } else { 0 },
            room: room.0,
            slot: slot.0,
            generation: generation.0,
            first_token: self.tokens.start,
            end_token: self.tokens.end,
            offset: self.bytes.start,
            bytes: (self.bytes.end - self.bytes.start) as u32,
            reserved: 0,
        };
        head[..HEADER_BYTES].copy_from_slice(bytemuck::bytes_of(&header));
        let Some(aux) = &self.aux else { return HEADER_BYTES };
        head[HEADER_BYTES..].copy_from_slice(bytemuck::bytes_of(aux));
        HEAD_MAX
    }

    /// Length of the head that begins with `head`, as far as it is known. An error if this is no
    /// valid frame.
    pub fn head_bytes(head: &[u8]) -> Result<usize, SessionLost> {
        let Some(header) = head.get(..HEADER_BYTES) else { return Ok(HEADER_BYTES) };
        let header: Header = bytemuck::pod_read_unaligned(header);
        let known = header.magic == MAGIC && header.flags & !(LAST | AUX) == 0;
        let bounded = u64::from(header.bytes) <= FRAME_MAX && header.offset < 1 << 63;
        if !known || !bounded {
            return Err(SessionLost::NONSENSE);
        }
        Ok(if header.flags & AUX == 0 { HEADER_BYTES } else { HEAD_MAX })
    }

    /// Parses a complete head, with the length from [`Frame::head_bytes`].
    pub fn parse(head: &[u8]) -> Frame {
        let header: Header = bytemuck::pod_read_unaligned(&head[..HEADER_BYTES]);
        Frame {
            notice: Notice {
                slot: SlotId(header.slot),
                generation: Generation(header.generation),
                room: Room(header.room),
            },
            tokens: header.first_token..header.end_token,
            bytes: header.offset..header.offset + u64::from(header.bytes),
            last: header.flags & LAST != 0,
            aux: (header.flags & AUX != 0)
                .then(|| bytemuck::pod_read_unaligned(&head[HEADER_BYTES..])),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Room;
    use crate::transfer::aux::AUX_PAYLOAD_BYTES;

    #[test]
    fn a_head_parses_as_it_was_written() {
        let frame = Frame {
            notice: Notice { slot: SlotId(3), generation: Generation(4), room: Room(5) },
            tokens: 6..7,
            bytes: 8..9,
            last: true,
            aux: Some(AuxRecord::new(Room(0), [10; AUX_PAYLOAD_BYTES])),
        };
        for frame in [frame.clone(), Frame { last: false, aux: None, ..frame }] {
            let mut head = [0; HEAD_MAX];
            let length = frame.encode(&mut head);
            assert_eq!(Frame::head_bytes(&head[..1]), Ok(HEADER_BYTES));
            assert_eq!(Frame::head_bytes(&head[..HEADER_BYTES]), Ok(length));
            assert_eq!(Frame::parse(&head[..length]), frame);
            for (at, value) in [(0, 0), (4, 4), (7, 1), (39, 128), (43, 1)] {
                let mut head = head;
                head[at] = value;
                assert_eq!(
                    Frame::head_bytes(&head[..HEADER_BYTES]),
                    Err(SessionLost::NONSENSE),
                    "byte {at}"
                );
            }
        }
    }
}

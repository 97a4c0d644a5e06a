//! The preamble of a stream: session, lane and the token that permits it. `ctl` reads and checks it
//! before the mover gets the stream.

use crate::ids::SessionGeneration;
use crate::limits::LANES_MAX;
use crate::wire::message::Token;
use bytemuck::{Pod, Zeroable};
use std::fmt;

const MAGIC: u32 = u32::from_le_bytes(*b"BtnT");
const VERSION: u32 = 1;

/// The first bytes of a stream. They are not trusted until they are compared with the session of
/// the token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Preamble {
    /// The token of the destination's Announce.
    pub token: Token,
    /// The generation of the session.
    pub session: SessionGeneration,
    /// The lane, counted from 0.
    pub lane: u16,
    /// Lanes of the session.
    pub lanes: u16,
}

/// The reason why a stream is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PreambleError {
    /// The magic number is wrong: another program dialled the data port.
    Magic,
    /// A version that this build does not know.
    Version(u32),
    /// A lane beyond the count, or a count beyond the limit.
    Lane {
        /// The lane in the preamble.
        lane: u16,
        /// The number of lanes in the preamble.
        lanes: u16,
    },
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Body {
    magic: u32,
    version: u32,
    token: [u8; 16],
    session: u32,
    lane: u16,
    lanes: u16,
    reserved: [u8; 32],
}

const _: () = assert!(size_of::<Body>() == Preamble::BYTES);

impl Preamble {
    /// Its length on the stream.
    pub const BYTES: usize = 64;

    /// The bytes on the stream.
    pub fn encode(&self) -> [u8; Preamble::BYTES] {
        bytemuck::cast(Body {
            magic: MAGIC,
            version: VERSION,
            token: self.token.0,
            session: self.session.0,
            lane: self.lane,
            lanes: self.lanes,
            reserved: [0; 32],
        })
    }

    /// Parses the first bytes of a stream. Reserved bytes are for later versions and are ignored.
    pub fn parse(bytes: &[u8; Preamble::BYTES]) -> Result<Preamble, PreambleError> {
        let body: Body = bytemuck::pod_read_unaligned(bytes);
        if body.magic != MAGIC {
            return Err(PreambleError::Magic);
        }
        if body.version != VERSION {
            return Err(PreambleError::Version(body.version));
        }
        let Body { lane, lanes, .. } = body;
        if lane >= lanes || usize::from(lanes) > LANES_MAX {
            return Err(PreambleError::Lane { lane, lanes });
        }
        let session = SessionGeneration(body.session);
        Ok(Preamble { token: Token(body.token), session, lane, lanes })
    }
}

impl fmt::Display for PreambleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PreambleError::Magic => f.write_str("data stream: not from a prefill worker"),
            PreambleError::Version(version) => {
                write!(f, "data stream: version {version}, this build speaks {VERSION}")
            }
            PreambleError::Lane { lane, lanes } => {
                write!(f, "data stream: lane {lane} of {lanes}, at most {LANES_MAX}")
            }
        }
    }
}

impl std::error::Error for PreambleError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preamble_parses_as_encoded_and_an_invalid_one_is_refused() {
        let preamble =
            Preamble { token: Token([7; 16]), session: SessionGeneration(9), lane: 2, lanes: 3 };
        let bytes = preamble.encode();
        assert_eq!(Preamble::parse(&bytes), Ok(preamble));
        let with = |at: usize, value: u8| {
            let mut bytes = bytes;
            bytes[at] = value;
            Preamble::parse(&bytes)
        };
        assert_eq!(with(0, 0), Err(PreambleError::Magic));
        assert_eq!(with(4, 2), Err(PreambleError::Version(2)));
        assert_eq!(with(28, 3), Err(PreambleError::Lane { lane: 3, lanes: 3 }));
        assert_eq!(with(30, 33), Err(PreambleError::Lane { lane: 2, lanes: 33 }));
        assert_eq!(with(63, 1), Ok(preamble));
    }
}

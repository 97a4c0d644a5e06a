//! Transport between hosts: the source gathers frames from its pages into streams, and the
//! destination's mover scatters them directly into pages.
//!
//! A session has one or more lanes, each a stream that the source dials and opens with a
//! [`Preamble`]. A chunk's bytes, in the order of the session's template, are cut into one share
//! per lane, and each share into frames. A frame names room, slot and generation. The destination
//! compares them with the live lease, and discards frames that do not match. The last frame of a
//! lane is its notice.
//! Invariants: a frame that was begun is finished, under its lease; nothing is allocated after
//! set-up.

mod destination;
mod frame;
mod preamble;
mod source;
mod stream;

pub use destination::TcpDestination;
pub use frame::FRAME_MAX;
pub use preamble::{Preamble, PreambleError};
pub use source::TcpSource;

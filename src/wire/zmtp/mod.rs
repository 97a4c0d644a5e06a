//! ZMTP 3.1 (ZeroMQ's RFC 37), mechanism NULL, sockets DEALER and ROUTER.
//!
//! ```text
//!  Greeting ── 64 bytes each way ──▶ Handshake ── READY each way ──▶ Open ── frames, PING, PONG
//! ```
//! Contract of [`Connection`]: `handle_input` stops after each event. Call `poll_event` until it
//! returns `None`, then `handle_input` again. Write the bytes of `transmit`, then report their
//! number to `transmitted`.
//! Invariants: an error is final; memory is bounded by [`Limits`]; a buffer that grew for one large
//! message shrinks after it. In a steady state neither direction allocates.
//! Not here: sockets, deadlines of handshake and heartbeat, the content of messages.

mod command;
mod connection;
mod error;
mod frame;
mod greeting;

pub use connection::{Connection, Limits, Socket, ZmtpEvent, ZmtpPeer};
pub use error::{ZmtpError, ZmtpSendError};
pub use frame::FrameHeader;

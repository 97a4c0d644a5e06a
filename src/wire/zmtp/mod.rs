//! ZMTP 3.1 (ZeroMQ's RFC 37), mechanism NULL, sockets DEALER and ROUTER.
//!
//! ```text
//!  Greeting ── 64 bytes each way ──▶ Handshake ── READY each way ──▶ Open ── frames, PING, PONG
//! ```
//! Contract of [`Connection`]: give bytes to `handle_input`, which stops after each event; drain
//! `poll_event` before calling again; write what `transmit` shows and report it to `transmitted`.
//! Invariants: an error is final; memory is bounded by [`Limits`]; a buffer that grew for one large
//! message is given back after it. In a steady state neither direction allocates.
//! Not here: sockets, deadlines of handshake and heartbeat, what a message says.

mod command;
mod connection;
mod error;
mod frame;
mod greeting;

pub use connection::{Connection, Event, Limits, Ready, Socket};
pub use error::{SendError, ZmtpError};
pub use frame::FrameHeader;

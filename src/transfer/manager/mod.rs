//! The protocol of the hand-off without I/O: how `ctl` handles requests, messages and reports.
//!
//! Owns: rooms and sessions of each worker of this process ([`source`] for prefill, [`destination`]
//! for decode; they mirror each other).
//! Thread: `ctl`.
//! Invariants: a state is set before the message that depends on it is sent. A slot is marked
//! Failed before its Cancel enters the mover's ring. Answers are compared with room, slot and
//! generation.
//! Not here: sockets, framing and proof (`net`, `wire`), bytes (`mover`).

pub mod choice;
pub mod destination;
pub mod identity;
pub mod rooms;
pub mod source;
pub mod trust;

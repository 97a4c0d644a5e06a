//! The protocol of the hand-off without I/O: what `ctl` does when a request, a message or a report comes.
//!
//! Thread: `ctl`. Owns: rooms and sessions of each worker of this process ([`source`] for prefill,
//! [`destination`] for decode, mirrored). Invariants: a state is set before the message that depends on it
//! leaves; a slot is marked Failed before its Cancel goes down the mover's ring; answers are compared with
//! room, slot and generation. Not here: sockets, framing and proof (`net`, `wire`), bytes (`mover`).

pub mod choice;
pub mod destination;
pub mod identity;
pub mod rooms;
pub mod source;
pub mod trust;

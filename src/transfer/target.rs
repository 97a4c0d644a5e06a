//! The target of a transfer: a slot of a session at the destination.

use crate::ids::{Generation, Room, SlotId};

/// Index of a session in a mover; the manager of the same side assigns it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct SessionId(pub u32);

impl SessionId {
    /// A source's session without a peer: chunks sent there are dropped. It is always open, and no
    /// manager assigns it.
    pub const NOBODY: SessionId = SessionId(u32::MAX);
}

/// The destination's slot, from its Destination message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Target {
    /// The session it belongs to.
    pub session: SessionId,
    /// Slot of the destination's status table.
    pub slot: SlotId,
    /// Its generation there.
    pub generation: Generation,
    /// The attempt.
    pub room: Room,
    /// Tokens at the beginning of the prompt that the destination already holds and does not need.
    pub prefix: u32,
}

//! The end of a session that broke: why, and by whose bytes.

use crate::cause::Cause;
use crate::ids::SlotId;

/// The session's way is gone; its rooms fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lost {
    /// Why.
    pub cause: Cause,
    /// Whose bytes broke it, where that is known: the other rooms only stood beside.
    pub slot: Option<SlotId>,
}

impl Lost {
    /// The peer, or what leads to it, is gone.
    pub const GONE: Lost = Lost::because(Cause::PeerLost);
    /// The peer said what makes no sense.
    pub const NONSENSE: Lost = Lost::because(Cause::Corrupt);

    /// For all rooms alike.
    pub const fn because(cause: Cause) -> Lost {
        Lost { cause, slot: None }
    }

    /// What the room in `slot` ends with.
    pub fn cause_for(self, slot: SlotId) -> Cause {
        match self.slot {
            Some(broken) if broken != slot => Cause::Flushed,
            _ => self.cause,
        }
    }
}

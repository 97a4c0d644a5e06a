//! The end of a broken session: its cause, and the slot that broke it.

use crate::cause::Cause;
use crate::ids::SlotId;

/// The session's transport is lost; its rooms fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SessionLost {
    /// The cause.
    pub cause: Cause,
    /// The slot that broke the session, if known. The other slots did not cause the failure.
    pub slot: Option<SlotId>,
}

impl SessionLost {
    /// The peer, or the path to it, is gone.
    pub const GONE: SessionLost = SessionLost::because(Cause::PeerLost);
    /// The peer sent invalid data.
    pub const NONSENSE: SessionLost = SessionLost::because(Cause::Corrupt);

    /// The same cause for all rooms.
    pub const fn because(cause: Cause) -> SessionLost {
        SessionLost { cause, slot: None }
    }

    /// The cause of failure of the room in `slot`.
    pub fn cause_for(self, slot: SlotId) -> Cause {
        match self.slot {
            Some(broken) if broken != slot => Cause::Flushed,
            _ => self.cause,
        }
    }
}

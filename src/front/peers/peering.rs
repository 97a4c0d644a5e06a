//! One link to a peer, and why it ends.
//!
//! Thread: `ctl`. Not here: what is done with it (`peers`), its bytes (`wire::link`).

use crate::cause::Cause;
use crate::front::handoff::Source;
use crate::ids::{Peer, WorkerId};
use crate::wire::link::{Link, LinkError};
use crate::wire::message::MessageError;
use crate::wire::zmtp::ZmtpError;
use std::net::SocketAddr;
use std::time::Instant;

/// A connection that carries a link.
#[derive(Debug)]
pub(super) struct Peering {
    pub(super) link: Link,
    /// Whom we dialled, and for which decode worker.
    pub(super) dialled: Option<(WorkerId, Source)>,
    pub(super) address: Option<SocketAddr>,
    pub(super) who: Option<(Peer, u64)>,
    /// It has said Bye, and why it goes.
    pub(super) bye: Option<Cause>,
    /// When it connected: from there on it has so long to prove itself, however much it says.
    pub(super) since: Instant,
    pub(super) heard: Instant,
    pub(super) next_ping: Instant,
}

impl Peering {
    /// The peer has closed it: why, as far as it has said.
    pub(super) fn closed(&self) -> End {
        match self.bye {
            Some(cause) => End::closed(format!("closed by the peer: {cause}")),
            None if self.link.awaits_proof() => {
                End::closed("closed by the peer before it proved the cluster key")
            }
            None => End::closed("closed by the peer"),
        }
    }
}

/// Why a link has ended.
#[derive(Debug)]
pub(super) struct End {
    /// What requests that wait for it end with.
    pub(super) cause: Cause,
    /// For the log.
    pub(super) why: String,
    /// The peer has closed it.
    pub(super) closed: bool,
}

impl End {
    pub(super) fn lost(why: impl ToString) -> End {
        End { cause: Cause::PeerLost, why: why.to_string(), closed: false }
    }

    pub(super) fn closed(why: impl ToString) -> End {
        End { closed: true, ..End::lost(why) }
    }

    /// It will be so again.
    pub(super) fn incompatible(why: impl ToString) -> End {
        End { cause: Cause::Incompatible, ..End::lost(why) }
    }
}

impl From<LinkError> for End {
    fn from(error: LinkError) -> End {
        match error {
            LinkError::UnexpectedProof
            | LinkError::NoProof
            | LinkError::WrongProof
            | LinkError::UnknownKey(_)
            | LinkError::UnsharedKey(_)
            | LinkError::Zmtp(ZmtpError::Version { .. })
            | LinkError::Message(MessageError::Version { .. }) => End::incompatible(error),
            _ => End::lost(error),
        }
    }
}

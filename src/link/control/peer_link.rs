//! One link to a peer, and why it ends.
//!
//! Thread: `ctl`. Not here: the use of a link (`control`), its bytes (`wire::link`).

use crate::cause::Cause;
use crate::ids::{Peer, WorkerId};
use crate::link::handoff::Source;
use crate::wire::link::{ControlLink, LinkError};
use crate::wire::message::MessageError;
use crate::wire::zmtp::ZmtpError;
use std::net::SocketAddr;
use std::time::Instant;

/// A connection that carries a link.
#[derive(Debug)]
pub(super) struct PeerLink {
    pub(super) link: ControlLink,
    /// The source that this process dialled, and for which decode worker.
    pub(super) dialled: Option<(WorkerId, Source)>,
    pub(super) address: Option<SocketAddr>,
    pub(super) peer: Option<(Peer, u64)>,
    /// The cause in the peer's Bye, if it has sent one.
    pub(super) bye: Option<Cause>,
    /// Time of the connection. The limit for the proof counts from here.
    pub(super) since: Instant,
    pub(super) heard: Instant,
    pub(super) next_ping: Instant,
}

impl PeerLink {
    /// Why the link ended, after the peer closed it: the cause of the peer's Bye, if it sent one.
    pub(super) fn closed(&self) -> LinkEnd {
        match self.bye {
            Some(cause) => LinkEnd::closed(format!("closed by the peer: {cause}")),
            None if self.link.awaits_proof() => {
                LinkEnd::closed("closed by the peer before it proved the cluster key")
            }
            None => LinkEnd::closed("closed by the peer"),
        }
    }
}

/// Why a link has ended.
#[derive(Debug)]
pub(super) struct LinkEnd {
    /// The cause for requests that wait for the link.
    pub(super) cause: Cause,
    /// For the log.
    pub(super) why: String,
    /// Whether the peer closed the link.
    pub(super) closed: bool,
}

impl LinkEnd {
    pub(super) fn lost(why: impl ToString) -> LinkEnd {
        LinkEnd { cause: Cause::PeerLost, why: why.to_string(), closed: false }
    }

    pub(super) fn closed(why: impl ToString) -> LinkEnd {
        LinkEnd { closed: true, ..LinkEnd::lost(why) }
    }

    /// The end of a link for which a new attempt would fail in the same way.
    pub(super) fn incompatible(why: impl ToString) -> LinkEnd {
        LinkEnd { cause: Cause::Incompatible, ..LinkEnd::lost(why) }
    }
}

impl From<LinkError> for LinkEnd {
    fn from(error: LinkError) -> LinkEnd {
        match error {
            LinkError::UnexpectedProof
            | LinkError::NoProof
            | LinkError::WrongProof
            | LinkError::UnknownKey(_)
            | LinkError::UnsharedKey(_)
            | LinkError::Zmtp(ZmtpError::Version { .. })
            | LinkError::Message(MessageError::Version { .. }) => LinkEnd::incompatible(error),
            _ => LinkEnd::lost(error),
        }
    }
}

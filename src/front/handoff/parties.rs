//! Who takes part in hand-offs: workers of this process, sources elsewhere, and the links between them.
//!
//! Thread: `ctl`. Not here: what goes over the links (`wishes`), sessions (`sessions`).

use crate::front::worker::{DestinationRing, Reports, SourceRing, Worker};
use crate::ids::WorkerId;
use crate::net::ConnId;
use crate::sys::event::EventCounter;
use crate::transfer::manager::destination::DestinationManager;
use crate::transfer::manager::source::SourceManager;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// Where a decode worker reaches a prefill worker.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Source {
    /// A worker of this process.
    Local(WorkerId),
    /// Nobody: the transport is fake, and so is the other side.
    Fake,
    /// A worker of another process, whose registry answers at this address.
    Remote(SocketAddr),
    /// The same, by a name that is resolved first: one worker under two names would be two sessions, each of
    /// which voids the other. No manager hears of it.
    Named {
        /// As in `bootstrap_host`.
        host: String,
        /// As in `bootstrap_port`.
        port: u16,
    },
}

impl Source {
    /// A worker of another process, by a name or an address in any of its spellings.
    pub fn remote(host: &str, port: u16) -> Source {
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let ip = match bare {
            "localhost" => Some(IpAddr::V4(Ipv4Addr::LOCALHOST)),
            literal => literal.parse::<IpAddr>().ok(),
        };
        match ip {
            Some(ip) => Source::Remote(SocketAddr::new(ip.to_canonical(), port)),
            None => Source::Named { host: host.to_ascii_lowercase(), port },
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Local(worker) => write!(f, "worker {}", worker.0),
            Source::Fake => f.write_str("fake"),
            Source::Remote(registry) => registry.fmt(f),
            Source::Named { host, port } => write!(f, "{host}:{port}"),
        }
    }
}

/// A control connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Link {
    /// Between two workers of this process.
    Local {
        /// Prefill.
        source: WorkerId,
        /// Decode.
        destination: WorkerId,
    },
    /// To another process.
    Remote(ConnId),
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Link::Local { source, destination } => {
                write!(f, "of worker {} from worker {}", source.0, destination.0)
            }
            Link::Remote(conn) => write!(f, "{conn}"),
        }
    }
}

/// A worker with its role.
#[derive(Debug)]
pub enum Role {
    /// Reads prompts.
    Prefill {
        /// Rooms and sessions.
        manager: Box<SourceManager<Link>>,
        /// To its mover.
        mover: SourceRing,
    },
    /// Produces tokens.
    Decode {
        /// Slots and sessions.
        manager: Box<DestinationManager<Link, Source>>,
        /// To its mover.
        mover: DestinationRing,
        /// Wakes its mover, also from other processes.
        doorbell: EventCounter,
    },
    /// Both, without a hand-off.
    Mixed,
}

/// A worker, its role, and what its mover says.
#[derive(Debug)]
pub struct Member {
    /// What all roles share.
    pub worker: Worker,
    /// The rest.
    pub role: Role,
    /// From its mover.
    pub reports: Option<Reports>,
}

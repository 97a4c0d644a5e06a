//! The ends of hand-offs: workers of this process, sources elsewhere, and the links between them.
//!
//! Thread: `ctl`. Not here: messages on the links (`actions`), sessions (`sessions`).

use crate::ids::WorkerId;
use crate::link::local_worker::{DestinationRing, LocalWorker, Reports, SourceRing};
use crate::net::ConnId;
use crate::sys::event::EventFd;
use crate::transfer::answer::TransferAnswer;
use crate::transfer::manager::destination::DestinationManager;
use crate::transfer::manager::source::SourceManager;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// The place where a decode worker reaches a prefill worker.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Source {
    /// A worker of this process.
    Local(WorkerId),
    /// The fake source: no other worker, and the transport `fake`.
    Fake,
    /// A worker of another process, by the address of its bootstrap registry.
    Remote(SocketAddr),
    /// A worker of another process, by a name. The name is resolved before a manager sees it,
    /// because one worker under two names would get two sessions that void each other.
    Named {
        /// The `bootstrap_host` of a request.
        host: String,
        /// The `bootstrap_port` of a request.
        port: u16,
    },
}

impl Source {
    /// A worker of another process, by a name or by an address in any notation.
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
pub enum LinkId {
    /// Between two workers of this process.
    Local {
        /// The prefill worker.
        source: WorkerId,
        /// The decode worker.
        destination: WorkerId,
    },
    /// To another process.
    Remote(ConnId),
}

impl fmt::Display for LinkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LinkId::Local { source, destination } => {
                write!(f, "of worker {} from worker {}", source.0, destination.0)
            }
            LinkId::Remote(conn) => write!(f, "{conn}"),
        }
    }
}

/// The role of a worker in hand-offs.
#[derive(Debug)]
pub enum EndpointKind {
    /// Computes prompts.
    Prefill {
        /// Its rooms and sessions.
        manager: Box<SourceManager<LinkId>>,
        /// Commands to its mover.
        mover: SourceRing,
    },
    /// Generates tokens.
    Decode {
        /// Its slots and sessions.
        manager: Box<DestinationManager<LinkId, Source>>,
        /// Commands to its mover.
        mover: DestinationRing,
        /// Wakes its mover, also from other processes.
        doorbell: EventFd,
    },
    /// Does both, without a hand-off.
    Mixed,
}

impl EndpointKind {
    /// Number of prompts that the worker still owes a destination, or waits for.
    pub fn open_rooms(&self) -> usize {
        match self {
            EndpointKind::Prefill { manager, .. } => manager.open_rooms(),
            EndpointKind::Decode { manager, .. } => manager.open_slots(),
            EndpointKind::Mixed => 0,
        }
    }
}

/// A worker, its role, and the reports of its mover.
#[derive(Debug)]
pub struct WorkerEndpoint<E = TransferAnswer> {
    /// The part that all roles share.
    pub worker: LocalWorker<E>,
    /// The part of its role.
    pub kind: EndpointKind,
    /// Reports of its mover.
    pub reports: Option<Reports>,
}

impl<E> WorkerEndpoint<E> {
    /// Panics if slots, rooms or sessions of the worker contradict each other.
    pub fn invariants(&self) {
        self.worker.invariants();
        let has_mover = !matches!(self.kind, EndpointKind::Mixed);
        assert_eq!(self.reports.is_some(), has_mover, "a worker of hand-offs has a mover");
        match &self.kind {
            EndpointKind::Prefill { manager, .. } => manager.invariants(),
            EndpointKind::Decode { manager, .. } => manager.invariants(),
            EndpointKind::Mixed => {}
        }
    }
}

//! The look-up of sources: from the address in a request to the control address of its worker.
//!
//! Owns: the interface, and the look-up of processes that know the control addresses of their
//! sources. Thread: `ctl`. Invariant: only hosts inside the configured networks are dialled. Not
//! here: the look-up over HTTP at bootstrap registries (`peer::directory`), the links (`control`).

use crate::ids::WorkerId;
use crate::link::handoff::Source;
use crate::net::{Event, Reactor};
use crate::stdx::cidr::Cidr;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

/// The outcome of a look-up.
#[derive(Debug)]
pub struct LookupResult {
    /// The decode worker that asked.
    pub worker: WorkerId,
    /// The prefill worker that it wants to reach.
    pub source: Source,
    /// The address to dial, or why there is none.
    pub control: Result<SocketAddr, String>,
    /// Deadline of the dial.
    pub until: Instant,
}

/// Finds the control addresses of sources, and the addresses of names.
pub trait SourceLookup: fmt::Debug + Send {
    /// Looks up a source. `None`: the answer comes from [`SourceLookup::handle`] or
    /// [`SourceLookup::expire`]. A second look-up of the same source shares the answer of the
    /// first.
    fn look_up(
        &mut self,
        worker: WorkerId,
        source: Source,
        until: Instant,
        reactor: &mut Reactor,
    ) -> Option<LookupResult>;

    /// Whether a host can be dialled.
    fn allows(&self, ip: IpAddr) -> bool;

    /// Forgets the address of a source, because a link to it has failed.
    fn forget(&mut self, source: &Source);

    /// The address of a name, or why it cannot be dialled. `None`: [`SourceLookup::resolved`]
    /// returns it later.
    fn resolve(&mut self, name: &str, now: Instant) -> Option<Result<IpAddr, String>>;

    /// The next name that was resolved or took too long, and its address.
    fn resolved(&mut self, now: Instant) -> Option<(String, Result<IpAddr, String>)>;

    /// Whether a resolved name waits for [`SourceLookup::resolved`].
    fn has_events(&self) -> bool;

    /// Whether an event belongs to one of its connections.
    fn owns(&self, event: &Event) -> bool;

    /// Takes an event of one of its connections. Returns a finished look-up.
    fn handle(&mut self, event: Event, reactor: &mut Reactor) -> Option<LookupResult>;

    /// Ends overdue look-ups.
    fn expire(&mut self, reactor: &mut Reactor, now: Instant) -> Vec<LookupResult>;

    /// Ends all look-ups.
    fn close(&mut self, reactor: &mut Reactor);
}

/// The look-up of a process that asks no registry: the address of a source is that of its control
/// port.
#[derive(Debug)]
pub struct DirectLookup {
    allowed: Vec<Cidr>,
}

impl DirectLookup {
    /// A look-up of hosts inside these networks.
    pub fn new(allowed: Vec<Cidr>) -> DirectLookup {
        DirectLookup { allowed }
    }
}

impl SourceLookup for DirectLookup {
    fn look_up(
        &mut self,
        worker: WorkerId,
        source: Source,
        until: Instant,
        _: &mut Reactor,
    ) -> Option<LookupResult> {
        let control = match source {
            Source::Remote(address) if self.allows(address.ip()) => Ok(address),
            Source::Remote(address) => Err(format!("{} lies in no allowed network", address.ip())),
            Source::Local(_) | Source::Fake | Source::Named { .. } => {
                Err("the source has no address of another process".into())
            }
        };
        Some(LookupResult { worker, source, control, until })
    }

    fn allows(&self, ip: IpAddr) -> bool {
        self.allowed.iter().any(|network| network.contains(ip))
    }

    fn resolve(&mut self, _: &str, _: Instant) -> Option<Result<IpAddr, String>> {
        Some(Err("this process resolves no names".into()))
    }

    fn resolved(&mut self, _: Instant) -> Option<(String, Result<IpAddr, String>)> {
        None
    }

    fn has_events(&self) -> bool {
        false
    }

    fn owns(&self, _: &Event) -> bool {
        false
    }

    fn handle(&mut self, _: Event, _: &mut Reactor) -> Option<LookupResult> {
        None
    }

    fn expire(&mut self, _: &mut Reactor, _: Instant) -> Vec<LookupResult> {
        Vec::new()
    }

    // An address is not remembered.
    fn forget(&mut self, _: &Source) {}

    // No look-up takes time.
    fn close(&mut self, _: &mut Reactor) {}
}

//! This worker's entries in its registries: added once it serves, renewed regularly, removed when
//! it drains.
//!
//! Thread: `ctl`.
//! Invariants: a registry that is away costs only its entry. Only the end of a drain waits for a
//! registry, for as long as one request can take.
//! Not here: the requests (`registry::lease`), sockets (`client`).

use crate::config::secret::Secret;
use crate::config::values::WorkerUrl;
use crate::net::resolver::Resolver;
use crate::net::{Authorities, Event, Reactor};
use crate::registry::client::RegistryClient;
use crate::registry::lease::RegistryLease;
use std::net::IpAddr;
use std::time::Instant;

/// The entries of this worker in all its registries.
#[derive(Debug)]
pub struct Registrar {
    errands: Vec<RegistryClient<RegistryLease>>,
    /// Some if a registry has a host name.
    names: Option<Resolver>,
}

/// Whether any of these hosts has a name that must be looked up.
pub fn needs_names(hosts: &[WorkerUrl]) -> bool {
    hosts.iter().any(|url| url.host.parse::<IpAddr>().is_err())
}

impl Registrar {
    /// Entries, each with the hosts of its registry. All are due at once.
    pub fn new(
        entries: Vec<(RegistryLease, Vec<WorkerUrl>)>,
        names: Option<Resolver>,
    ) -> Registrar {
        let errands =
            entries.into_iter().map(|(entry, hosts)| RegistryClient::new(entry, hosts)).collect();
        Registrar { errands, names }
    }

    /// Proves this key in all entries from now on.
    pub fn set_key(&mut self, key: Option<&Secret>) {
        for errands in &mut self.errands {
            errands.task().set_key(key);
        }
    }

    /// Sets the certificate authorities for registries that are reached over TLS.
    pub fn trust(&mut self, authorities: &Authorities) {
        for errands in &mut self.errands {
            errands.trust(authorities.clone());
        }
    }

    /// Whether an event belongs to one of these connections.
    pub fn owns(&self, event: &Event) -> bool {
        self.errands.iter().any(|errands| errands.owns(event))
    }

    /// Handles an event of one of these connections.
    pub fn handle(&mut self, event: Event, reactor: &mut Reactor, now: Instant) {
        if let Some(errands) = self.errands.iter_mut().find(|errands| errands.owns(&event)) {
            errands.handle(event, reactor, now);
        }
    }

    /// Renews the entries that are due. While the worker `hangs` it renews none, so that it looks
    /// dead.
    pub fn turn(&mut self, hangs: bool, reactor: &mut Reactor, now: Instant) {
        if let Some(names) = &mut self.names {
            while names.expire(now).or_else(|| names.poll(now)).is_some() {}
        }
        for errands in &mut self.errands {
            errands.task().pause(hangs);
            errands.turn(&mut self.names, reactor, now);
        }
    }

    /// Removes all entries.
    pub fn withdraw(&mut self, reactor: &mut Reactor, now: Instant) {
        for errands in &mut self.errands {
            errands.task().withdraw(now);
            errands.turn(&mut self.names, reactor, now);
        }
    }

    /// Closes all connections. No request follows.
    pub fn close(self, reactor: &mut Reactor) {
        self.errands.into_iter().for_each(|errands| errands.end(reactor));
    }

    /// Whether no entry is left that this worker can remove.
    pub fn is_over(&mut self) -> bool {
        self.errands.iter_mut().all(|errands| errands.task().is_over())
    }
}

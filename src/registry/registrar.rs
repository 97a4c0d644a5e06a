//! This worker's entries in its registries. The worker adds them when it serves, renews them, and
//! removes them when it drains.
//!
//! Thread: `ctl`.
//! Invariants: an unreachable registry costs only the entry there. Only the end of a drain waits
//! for a registry, and at most for the time of one request.
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
    clients: Vec<RegistryClient<RegistryLease>>,
    /// Some if a registry has a host name.
    names: Option<Resolver>,
}

/// Whether any of these hosts has a name that must be looked up.
pub fn needs_names(hosts: &[WorkerUrl]) -> bool {
    hosts.iter().any(|url| url.host.parse::<IpAddr>().is_err())
}

impl Registrar {
    /// Creates the entries, each with the hosts of its registry. All are due at once.
    pub fn new(
        entries: Vec<(RegistryLease, Vec<WorkerUrl>)>,
        names: Option<Resolver>,
    ) -> Registrar {
        let clients =
            entries.into_iter().map(|(entry, hosts)| RegistryClient::new(entry, hosts)).collect();
        Registrar { clients, names }
    }

    /// Proves this key in all entries from now on.
    pub fn set_key(&mut self, key: Option<&Secret>) {
        for clients in &mut self.clients {
            clients.task().set_key(key);
        }
    }

    /// Sets the certificate authorities for registries that are reached over TLS.
    pub fn trust(&mut self, authorities: &Authorities) {
        for clients in &mut self.clients {
            clients.trust(authorities.clone());
        }
    }

    /// Whether an event belongs to one of these connections.
    pub fn owns(&self, event: &Event) -> bool {
        self.clients.iter().any(|clients| clients.owns(event))
    }

    /// Handles an event of one of these connections.
    pub fn handle(&mut self, event: Event, reactor: &mut Reactor, now: Instant) {
        if let Some(clients) = self.clients.iter_mut().find(|clients| clients.owns(&event)) {
            clients.handle(event, reactor, now);
        }
    }

    /// Renews the entries that are due. While the worker `hangs` it renews none, so that it looks
    /// dead.
    pub fn step(&mut self, hangs: bool, reactor: &mut Reactor, now: Instant) {
        if let Some(names) = &mut self.names {
            while names.expire(now).or_else(|| names.poll(now)).is_some() {}
        }
        for clients in &mut self.clients {
            clients.task().pause(hangs);
            clients.step(&mut self.names, reactor, now);
        }
    }

    /// Removes all entries.
    pub fn withdraw(&mut self, reactor: &mut Reactor, now: Instant) {
        for clients in &mut self.clients {
            clients.task().withdraw(now);
            clients.step(&mut self.names, reactor, now);
        }
    }

    /// Closes all connections. No request follows.
    pub fn close(self, reactor: &mut Reactor) {
        self.clients.into_iter().for_each(|clients| clients.end(reactor));
    }

    /// Whether no entry is left that this worker can remove.
    pub fn is_over(&mut self) -> bool {
        self.clients.iter_mut().all(|clients| clients.task().is_over())
    }
}

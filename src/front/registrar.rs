//! This worker's entries in the registries that it is to be found in: entered once it serves, renewed as a matter of
//! course, taken back when it drains.
//!
//! Thread: `ctl`. Invariant: a registry that is away costs nothing but its entry; nothing waits for it but the end of a
//! drain, for as long as one request may take. Not here: what is asked (`cluster`), sockets (`errands`).

use crate::cluster::keeping::Keeping;
use crate::config::secret::Secret;
use crate::config::values::WorkerUrl;
use crate::front::errands::Errands;
use crate::front::resolver::Resolver;
use crate::net::{Authorities, Event, Reactor};
use std::net::IpAddr;
use std::time::Instant;

/// All registries of this worker.
#[derive(Debug)]
pub struct Registrar {
    errands: Vec<Errands<Keeping>>,
    /// Where a registry has a name.
    names: Option<Resolver>,
}

/// Whether any of these hosts has a name, which somebody must look up.
pub fn needs_names(hosts: &[WorkerUrl]) -> bool {
    hosts.iter().any(|url| url.host.parse::<IpAddr>().is_err())
}

impl Registrar {
    /// Entries, each with the hosts of its registry; all are due at once.
    pub fn new(entries: Vec<(Keeping, Vec<WorkerUrl>)>, names: Option<Resolver>) -> Registrar {
        let errands =
            entries.into_iter().map(|(entry, hosts)| Errands::new(entry, hosts)).collect();
        Registrar { errands, names }
    }

    /// Entries are proven by this key from now on.
    pub fn set_key(&mut self, key: Option<&Secret>) {
        for errands in &mut self.errands {
            errands.errand().set_key(key);
        }
    }

    /// Registries that are reached over TLS must be vouched for by these from now on.
    pub fn trust(&mut self, authorities: &Authorities) {
        for errands in &mut self.errands {
            errands.trust(authorities.clone());
        }
    }

    /// Whether an event is of one of these connections.
    pub fn owns(&self, event: &Event) -> bool {
        self.errands.iter().any(|errands| errands.owns(event))
    }

    /// Takes an event of one of these connections.
    pub fn handle(&mut self, event: Event, reactor: &mut Reactor, now: Instant) {
        if let Some(errands) = self.errands.iter_mut().find(|errands| errands.owns(&event)) {
            errands.handle(event, reactor, now);
        }
    }

    /// Renews what is due. A worker that `hangs` renews nothing, so that it looks dead.
    pub fn turn(&mut self, hangs: bool, reactor: &mut Reactor, now: Instant) {
        if let Some(names) = &mut self.names {
            while names.expire(now).or_else(|| names.poll(now)).is_some() {}
        }
        for errands in &mut self.errands {
            errands.errand().pause(hangs);
            errands.turn(&mut self.names, reactor, now);
        }
    }

    /// Takes all entries back.
    pub fn withdraw(&mut self, reactor: &mut Reactor, now: Instant) {
        for errands in &mut self.errands {
            errands.errand().withdraw(now);
            errands.turn(&mut self.names, reactor, now);
        }
    }

    /// Asks no registry anything more.
    pub fn close(self, reactor: &mut Reactor) {
        self.errands.into_iter().for_each(|errands| errands.end(reactor));
    }

    /// Whether no entry is left, as far as this worker can do something about it.
    pub fn is_over(&mut self) -> bool {
        self.errands.iter_mut().all(|errands| errands.errand().is_over())
    }
}

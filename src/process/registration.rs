//! A worker's entries in registries: their content, and the clients that renew them.

use super::ProcessError;
use crate::config::ClusterWorkerConfig;
use crate::config::registry::RegistryAddress;
use crate::config::secret::Secret;
use crate::config::values::WorkerUrl;
use crate::ids::{Leg, Peer, Role};
use crate::net::resolver::Resolver;
use crate::obs::log::event;
use crate::registry::entry::{Entry, WorkerAddress};
use crate::registry::etcd::lease::EtcdLease;
use crate::registry::lease::RegistryLease;
use crate::registry::registrar::{Registrar, needs_names};
use crate::registry::router_lease::RouterLease;
use crate::routing::compatibility::CompatDigest;
use crate::worker::service::WorkerService;
use std::io;
use std::net::SocketAddr;

/// Starts a resolver if one of these hosts is a name.
///
/// # Errors
/// Its thread cannot be started.
pub fn names(
    hosts: &[WorkerUrl],
    start: impl FnOnce() -> io::Result<Resolver>,
) -> Result<Option<Resolver>, ProcessError> {
    let names = needs_names(hosts).then(start).transpose();
    names.map_err(|error| ProcessError::Io("cannot start a thread", error))
}

/// What a registry entry says of a worker, apart from its role and address.
#[derive(Clone, Copy)]
pub struct Advertisement {
    /// Its ID and incarnation.
    pub peer: Peer,
    /// The port of its bootstrap server, if it has one.
    pub bootstrap_port: Option<u16>,
    /// The workers that fit.
    pub kind: CompatDigest,
}

/// Announces the worker of `service` at the configured registry, in its current role. The client
/// proves `key` to the registry.
///
/// # Errors
/// The resolver's thread cannot be started.
pub fn register_worker(
    config: &ClusterWorkerConfig,
    key: Option<&Secret>,
    service: &mut WorkerService,
    role: Role,
    advertisement: Advertisement,
    start_names: impl FnOnce() -> io::Result<Resolver>,
) -> Result<(), ProcessError> {
    let (Some(registry), Some(address)) = (&config.handoff.registry, service.address()) else {
        return Ok(());
    };
    let address = WorkerAddress {
        role: match role {
            Role::Prefill => Leg::Prefill,
            // For routers, a mixed worker is a decode worker that also does prefill.
            Role::Decode | Role::Mixed => Leg::Decode,
        },
        url: url(config, address),
    };
    event!(
        Info,
        "ctl",
        "announcing to registry",
        registry = registry,
        role = role,
        worker = address.url
    );
    let Advertisement { peer, bootstrap_port, kind } = advertisement;
    let entry = Entry { peer, address, bootstrap_port, kind };
    let now = service.reactor().now();
    let (entries, hosts) = match registry {
        RegistryAddress::Routers(routers) => {
            let entry =
                |_: &WorkerUrl| RegistryLease::Router(RouterLease::new(&entry, key.cloned(), now));
            (routers.iter().map(|router| (entry(router), vec![router.clone()])).collect(), routers)
        }
        RegistryAddress::Etcd(hosts) => {
            let entry = RegistryLease::Etcd(EtcdLease::new(&entry, key, now));
            (vec![(entry, hosts.clone())], hosts)
        }
    };
    let names = names(hosts, start_names)?;
    service.set_registrar(Registrar::new(entries, names));
    Ok(())
}

/// URL at which other hosts reach the worker. The configuration guarantees a host that they can
/// use.
fn url(config: &ClusterWorkerConfig, address: SocketAddr) -> WorkerUrl {
    let host = config.handoff.advertise_host.clone().unwrap_or_else(|| address.ip().to_string());
    WorkerUrl { host, port: address.port(), tls: config.worker.server.tls.is_some() }
}

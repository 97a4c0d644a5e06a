//! Where a worker enters itself: its entry, and the errands that keep it.

use super::RoleError;
use crate::cluster::enrolment::Enrolment;
use crate::cluster::entry::{Entry, Seat};
use crate::cluster::etcd::enrolment::EtcdEnrolment;
use crate::cluster::keeping::Keeping;
use crate::cluster::kinds::KindDigest;
use crate::cluster::router::Role as Seated;
use crate::config::registry::RegistryAddress;
use crate::config::resolved::PartConfig;
use crate::config::secret::Secret;
use crate::config::values::WorkerUrl;
use crate::front::registrar::{Registrar, needs_names};
use crate::front::resolver::Resolver;
use crate::front::service::Service;
use crate::ids::Peer;
use crate::obs::log::event;
use crate::wire::message::Role;
use std::net::SocketAddr;
use std::time::Instant;

/// Looks names up, where any of these hosts has one.
pub fn names(
    hosts: &[WorkerUrl],
    wake: impl Fn() + Send + Sync + 'static,
) -> Result<Option<Resolver>, RoleError> {
    let names = needs_names(hosts).then(|| Resolver::start(wake)).transpose();
    names.map_err(|error| RoleError::Io("cannot start a thread", error))
}

/// Has the worker that `service` serves be found where the configuration says, as what it is; `key` is proven there.
pub fn enrol(
    config: &PartConfig,
    key: Option<&Secret>,
    service: &mut Service,
    peer: Peer,
    role: Role,
    bootstrap_port: Option<u16>,
    kind: KindDigest,
) -> Result<(), RoleError> {
    let (Some(registry), Some(address)) = (&config.handoff.registry, service.address()) else {
        return Ok(());
    };
    let seat = Seat {
        role: match role {
            Role::Prefill => Seated::Prefill,
            // Routers give who does both the seat of a decode worker that reads prompts itself.
            Role::Decode | Role::Mixed => Seated::Decode,
        },
        url: url(config, address),
    };
    event!(Info, "ctl", "enters itself", registry = registry, role = role, worker = seat.url);
    let entry = Entry { peer, seat, bootstrap_port, kind };
    let now = Instant::now();
    let (entries, hosts) = match registry {
        RegistryAddress::Routers(routers) => {
            let entry = |_: &WorkerUrl| Keeping::Router(Enrolment::new(&entry, key.cloned(), now));
            (routers.iter().map(|router| (entry(router), vec![router.clone()])).collect(), routers)
        }
        RegistryAddress::Etcd(hosts) => {
            let entry = Keeping::Etcd(EtcdEnrolment::new(&entry, key, now));
            (vec![(entry, hosts.clone())], hosts)
        }
    };
    let waker = service.reactor().waker();
    let names = names(hosts, move || waker.wake())?;
    service.enrol(Registrar::new(entries, names));
    Ok(())
}

/// Where others reach the worker; the configuration has a host that they can dial.
fn url(config: &PartConfig, address: SocketAddr) -> WorkerUrl {
    let host = config.handoff.advertise_host.clone().unwrap_or_else(|| address.ip().to_string());
    WorkerUrl { host, port: address.port(), tls: config.worker.front.tls.is_some() }
}

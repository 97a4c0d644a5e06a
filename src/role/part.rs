//! A worker of a cluster: what each role is made of, put together at the start, and anew when its role changes.
//!
//! ```text
//!   prepare: memory, rings, ports ──▶ threads ──▶ take on: clients' requests ──▶ join: peers, registries
//!      ▲                                                                            │ the role changes
//!      └── with the model that the threads give back ◀── dismiss, stop: all that was of the old role ─┘
//! ```
//! Thread: the one that starts the process, which becomes `ctl`. What outlives a role: the model, the tokeniser, clients and
//! their port. Invariants: to peers and registries a role is an incarnation of its own; a role that cannot be put together
//! leaves the one before. Not here: when nothing is left of a role (`front::turning`).

use super::doors::{self, Doors};
use super::enrolling;
use super::loaded::{Loaded, kind};
use super::process::{self, Crew, Process};
use super::starting::Starting;
use super::telling::{handoff_info, keyring, peer_identity, registration};
use super::{RoleError, ended, http_port, keep, ports, reactor};
use crate::cluster::kinds::KindDigest;
use crate::cluster::registry::Registry;
use crate::config::resolved::{DataThreads, HandoffConfig, PartConfig, Transfer, WorkerConfig};
use crate::config::secret::Secret;
use crate::front::bootstrap::Bootstrap;
use crate::front::directory::Directory;
use crate::front::drain::End;
use crate::front::generations::Placement;
use crate::front::lanes::Lanes;
use crate::front::peers::{Patience, Peers};
use crate::front::resolver::Resolver;
use crate::front::routes::{About, Mode};
use crate::front::service::{Outcome, Service};
use crate::front::turning::Turning;
use crate::ids::Peer;
use crate::obs::log::event;
use crate::obs::metrics::EngineType;
use crate::stdx::bell::Bell;
use crate::transfer::transport::rdma::Nic;
use crate::wire::auth::Keyring;
use crate::wire::message::{Role, Transport};
use std::io;
use std::sync::Arc;
use std::time::Instant;

/// Runs a worker that begins in this role, until it is told to stop.
///
/// # Errors
/// It cannot be put together.
pub fn run(config: &PartConfig, role: Role) -> Result<End, RoleError> {
    let begun = Instant::now();
    let (credentials, reload) = super::secrets(&config.worker.front, &config.handoff.cluster_keys)?;
    let reload = reload.with_authorities(config.handoff.tls_ca.as_ref());
    let authorities = super::authorities(config.handoff.tls_ca.as_deref())?;
    let starting = Starting::begin(!reload.is_empty())?;
    let nics = nics(&config.handoff, &config.worker)?;
    let transports = transports(config.handoff.transfer, &nics);
    let mut all = vec![http_port(&config.worker)];
    all.extend(doors::ports(config, role));
    ports::check(config.worker.front.host, &all)?;
    super::loaded::tell_excess(&config.worker.kv, 1);
    let (files, forward, mut loaded) =
        Loaded::open(&config.worker, config.chunks, config.retraction, transports)?;
    loaded.nics = nics;
    let (mut reactor, ctl) = reactor()?;
    let secrets = config.handoff.cluster_keys.clone();
    let mut part = Part { config, loaded, ctl: ctl.clone(), secrets, role, entered: None };
    let Prepared { loaded, process, placement, mode, doors, rest } =
        part.prepare(role, &mut reactor)?;
    let (workers, mut crew) = process.start(&loaded, forward, ctl.clone())?;
    let asked = (placement, mode);
    let mut service = process::front(reactor, &config.worker, files, &loaded, workers, asked, ctl)?;
    if let Some(authorities) = authorities {
        service.trust(authorities);
    }
    part.join(&mut service, doors, rest, &crew)?;
    let barred = Role::ALL.into_iter().filter_map(|role| Some((role, config.may_be(role).err()?)));
    service.set_turning(Turning::new(role, barred.collect()));
    keep(&mut service, credentials, reload)?;
    starting.over();
    process::announce_ready(&service, &config.worker, begun);
    loop {
        let outcome = service.run().map_err(|error| RoleError::Io("the reactor failed", error));
        part.renew(&service);
        match outcome {
            Ok(Outcome::Ended(end)) => return ended(service, crew, Ok(end)),
            Ok(Outcome::Turns(to)) => crew = part.turn(&mut service, crew, to)?,
            Ok(Outcome::Stays) => part.enrol(&mut service)?,
            Err(error) => return ended(service, crew, Err(error)),
        }
    }
}

/// What outlives a role, and which it is.
struct Part<'a> {
    config: &'a PartConfig,
    loaded: Loaded,
    ctl: Arc<Bell>,
    /// The cluster's keys, as they are now.
    secrets: Vec<Secret>,
    role: Role,
    /// As what it is found.
    entered: Option<Entered>,
}

/// What a registry is told.
#[derive(Clone, Copy)]
struct Entered {
    peer: Peer,
    bootstrap_port: Option<u16>,
    kind: KindDigest,
}

/// A role that can be had, before its threads run.
struct Prepared {
    loaded: Loaded,
    process: Process,
    placement: Placement,
    mode: Mode,
    doors: Doors,
    rest: Rest,
}

/// For what comes once its threads run.
struct Rest {
    keys: Keyring,
    kind: KindDigest,
    /// Looks prefill workers up, for a decode worker.
    names: Option<Resolver>,
}

impl Part<'_> {
    /// Takes memory and ports of this role.
    fn prepare(
        &self,
        role: Role,
        reactor: &mut crate::net::Reactor,
    ) -> Result<Prepared, RoleError> {
        let config = self.config;
        let mut loaded = self.loaded.clone();
        loaded.split = role == Role::Prefill && config.data_threads == DataThreads::Split;
        loaded.decode_allocation = config.decode_allocation;
        // Nothing comes then, so there is nothing that a second prompt could go on from.
        loaded.sched.prefix_cache &=
            !(role == Role::Decode && config.handoff.transfer == Transfer::Fake);
        let keys = keyring(&self.secrets)?;
        let kind = kind(&loaded.fingerprint, &loaded.layout);
        let mut process = Process::new(&loaded, &config.worker, self.ctl.clone())?;
        let (worker, engine) = match role {
            Role::Prefill => (process.add_prefill(&loaded)?, EngineType::Prefill),
            Role::Decode => (process.add_decode(&loaded)?, EngineType::Decode),
            Role::Mixed => (process.add_mixed(&loaded)?, EngineType::Unified),
        };
        let names = (role == Role::Decode).then(|| {
            let bell = self.ctl.clone();
            Resolver::start(move || bell.ring())
        });
        let names =
            names.transpose().map_err(|error| RoleError::Io("cannot start a thread", error))?;
        let doors = Doors::open(config, role, reactor)?;
        loaded.data = doors.lanes(config);
        let handoff = &config.handoff;
        let bootstrap_port = doors.registry.map(|(_, port)| port);
        let placement = match role {
            Role::Prefill => {
                let host = config.worker.front.host;
                let reached = handoff.advertise_host.clone();
                let reached =
                    reached.or_else(|| (!host.is_unspecified()).then(|| host.to_string()));
                Placement::Prefill {
                    worker,
                    fake_bootstrap: handoff.fake_bootstrap,
                    registry: (reached, bootstrap_port.unwrap_or_default()),
                    bootstrap_timeout: config.bootstrap_timeout,
                }
            }
            Role::Decode => {
                let fake_by_default = loaded.transports == [Transport::Fake];
                Placement::Decode {
                    worker,
                    fake_bootstrap: handoff.fake_bootstrap || fake_by_default,
                    fake_by_default,
                    proven: !self.secrets.is_empty(),
                    reads_alone: config.local_prefill,
                }
            }
            Role::Mixed => Placement::Mixed(vec![worker]),
        };
        let reads_alone = role == Role::Decode && config.local_prefill;
        let info = Some(handoff_info(&loaded, &keys, reads_alone));
        let mode = Mode { bootstrap_port, handoff: info, ..About::mode_of(engine) };
        Ok(Prepared { loaded, process, placement, mode, doors, rest: Rest { keys, kind, names } })
    }

    /// Has peers meet the worker, and registries tell of it.
    fn join(
        &mut self,
        service: &mut Service,
        doors: Doors,
        rest: Rest,
        crew: &Crew,
    ) -> Result<(), RoleError> {
        let (config, Rest { keys, kind, names }) = (self.config, rest);
        let identity = peer_identity(self.role, service.address(), &config.handoff, keys);
        let peer = identity.peer;
        let patience = Patience { silence: config.handoff.peer_timeout, ..Patience::default() };
        let Doors { control, registry, data, passing } = doors;
        let bootstrap_port = registry.map(|(_, port)| port);
        self.entered = Some(Entered { peer, bootstrap_port, kind });
        if self.role == Role::Mixed {
            return self.enrol(service);
        }
        let directory = match names {
            Some(names) => Directory::new(config.bootstrap_allow.clone(), names),
            None => Directory::closed(),
        };
        let lanes = Lanes::new(data.map(|(listener, _)| listener), crew.wait.clone());
        let dialled = control.map(|(listener, _)| listener);
        let peers = Peers::new(identity, dialled, directory, passing, lanes, patience);
        let bootstrap = match (registry, control) {
            (Some((listener, bootstrap_port)), Some((_, control_port))) => {
                // Only now is the port known where 0 was asked for.
                let http_port = service.address().map(|address| address.port());
                let mut table = Registry::default();
                let entered = table.register(registration(
                    config,
                    &self.loaded.layout,
                    http_port,
                    control_port,
                ));
                entered.map_err(|refusal| RoleError::Config("registry", format!("{refusal:?}")))?;
                event!(
                    Info,
                    "ctl",
                    "control links are taken",
                    control_port = control_port,
                    bootstrap_port = bootstrap_port
                );
                Some(Bootstrap::new(listener, table, self.secrets.clone()))
            }
            _ => None,
        };
        service.join(peers, bootstrap);
        if let Some((_, data_port)) = data {
            event!(Info, "ctl", "lanes are taken", data_port = data_port);
        }
        self.enrol(service)
    }

    /// Has it be found where the configuration says, as what it is now.
    fn enrol(&self, service: &mut Service) -> Result<(), RoleError> {
        let Some(Entered { peer, bootstrap_port, kind }) = self.entered else { return Ok(()) };
        let key = self.secrets.first();
        enrolling::enrol(self.config, key, service, peer, self.role, bootstrap_port, kind)
    }

    /// Uses the cluster's keys as they are by now.
    fn renew(&mut self, service: &Service) {
        if let Some(keys) = service.cluster_keys() {
            self.secrets = keys.to_vec();
        }
    }

    /// Whether the ports of a role can be had, beside those that it shares with the role of now.
    ///
    /// # Errors
    /// The first that cannot.
    fn check_doors(&self, to: Role) -> Result<(), RoleError> {
        let held = doors::ports(self.config, self.role);
        let mut wanted = doors::ports(self.config, to);
        // What is held now is given back before.
        wanted
            .retain(|port| port.number == 0 || held.iter().all(|held| held.number != port.number));
        ports::check(self.config.worker.front.host, &wanted)
    }

    /// Has the worker be something else, or, where that cannot be had, what it was.
    ///
    /// # Errors
    /// Neither can be had: the process is at its end.
    fn turn(&mut self, service: &mut Service, crew: Crew, to: Role) -> Result<Crew, RoleError> {
        if let Err(why) = self.check_doors(to) {
            // Nothing was taken apart yet.
            service.stayed(why.to_string());
            self.enrol(service)?;
            return Ok(crew);
        }
        let begun = Instant::now();
        service.dismiss();
        let lost = || RoleError::Io("the engine has ended", io::Error::other("a thread panicked"));
        let forward = crew.stop().ok_or_else(lost)?;
        let (prepared, outcome) = match self.prepare(to, service.reactor()) {
            Ok(prepared) => {
                self.role = to;
                (prepared, Ok(()))
            }
            Err(why) => (self.prepare(self.role, service.reactor())?, Err(why.to_string())),
        };
        let Prepared { loaded, process, placement, mode, doors, rest } = prepared;
        let (workers, crew) = process.start(&loaded, forward, self.ctl.clone())?;
        service.take_on(workers, placement, mode, Instant::now());
        self.join(service, doors, rest, &crew)?;
        service.turned(outcome, begun.elapsed());
        Ok(crew)
    }
}

/// The NICs for RDMA, where it is asked for, or there.
fn nics(config: &HandoffConfig, worker: &WorkerConfig) -> Result<Vec<Nic>, RoleError> {
    let asked = config.transfer;
    if !matches!(asked, Transfer::Auto | Transfer::Rdma) {
        return Ok(Vec::new());
    }
    match Nic::choose(&config.rdma_devices, &worker.cores.cpus) {
        Ok(nics) => {
            event!(Info, "ctl", "RDMA can be used", nics = Nic::list(&nics));
            Ok(nics)
        }
        Err(why) if !config.rdma_devices.is_empty() => {
            Err(RoleError::Absent("--rdma-devices", why))
        }
        Err(why) if asked == Transfer::Rdma => {
            Err(RoleError::Absent("--transfer", format!("rdma: {why}")))
        }
        Err(why) => {
            event!(Info, "ctl", "RDMA is not used", why = why);
            Ok(Vec::new())
        }
    }
}

/// Which transports a worker offers or takes, best first.
fn transports(asked: Transfer, nics: &[Nic]) -> Vec<Transport> {
    let rdma = (!nics.is_empty()).then_some(Transport::Rdma);
    match asked {
        Transfer::Auto => {
            [Some(Transport::Shm), rdma, Some(Transport::Tcp)].into_iter().flatten().collect()
        }
        Transfer::Rdma => rdma.into_iter().collect(),
        Transfer::Shm => vec![Transport::Shm],
        Transfer::Tcp => vec![Transport::Tcp],
        Transfer::Fake => vec![Transport::Fake],
    }
}

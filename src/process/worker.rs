//! A worker of a cluster: sets up a role at the start, and again at each role change.
//!
//! ```text
//!   prepare: memory, rings, ports ──▶ requests ──▶ join_cluster: peers, registries ──▶ threads
//!      ▲                                                              the role changes │
//!      └── the threads return the model ◀── change_role ───────────────────────────────┘
//! ```
//! Thread: the thread that starts the process and becomes `ctl`. The model, the tokeniser and the
//! HTTP port outlive a role. Invariants: each role has its own incarnation for peers and
//! registries; if a role cannot be set up, the worker keeps the former one. Not here: the wait for
//! the end of the old role (`server::role_change`).

use super::announcement::{handoff_info, keyring, peer_identity, rank_registration};
use super::helpers::{HelperThreads, Helpers};
use super::listeners::{self, Listeners};
use super::model::{LoadedModel, compat_digest};
use super::registration::Advertisement;
use super::startup::StartupSignals;
use super::threads::{self, EngineClock, ProcessBuilder, RoleThreads, ThreadParts, Threads};
use super::{
    ProcessError, http_port, install_secrets, ports, reactor, registration, shut_down, thread_cpus,
};
use crate::config::secret::Secret;
use crate::config::{ClusterWorkerConfig, DataThreadMode, HandoffConfig, Transfer, WorkerConfig};
use crate::ids::{Role, WorkerId};
use crate::link::control::{ControlLinks, LinkTimeouts};
use crate::link::lookup::{DirectLookup, SourceLookup};
use crate::link::tcp_handshake::TcpHandshake;
use crate::model::files::ModelFiles;
use crate::model::forward::Forward;
use crate::net::Reactor;
use crate::net::resolver::Resolver;
use crate::obs::log::event;
use crate::peer::bootstrap::BootstrapServer;
use crate::peer::directory::Directory;
use crate::registry::bootstrap::BootstrapRegistry;
use crate::routing::compatibility::CompatDigest;
use crate::server::drain::DrainOutcome;
use crate::server::role_change::RoleChange;
use crate::stdx::event_count::EventCount;
use crate::sys::event::WaitSet;
use crate::sys::file_access::FileAccess;
use crate::transfer::transport::rdma::Nic;
use crate::wire::auth::Keyring;
use crate::wire::message::Transport;
use crate::worker::requests::Placement;
use crate::worker::routes::{DisaggregationMode, ServerDescription};
use crate::worker::service::{RunOutcome, WorkerService};
use std::sync::Arc;
use std::time::Instant;

/// Runs a worker that starts in this role, until a signal or a drain ends it.
///
/// # Errors
/// The worker cannot be set up, or fails.
pub fn run(config: &ClusterWorkerConfig, role: Role) -> Result<DrainOutcome, ProcessError> {
    let begun = Instant::now();
    let (server, keys) = (&config.worker.server, &config.handoff.cluster_keys);
    let (credentials, reload) = super::read_secrets(server, keys, &FileAccess::Host, begun)?;
    let reload = reload.with_authorities(config.handoff.tls_ca.as_ref());
    let authorities = super::authorities(config.handoff.tls_ca.as_deref())?;
    let starting = StartupSignals::install(!reload.is_empty())?;
    let nics = nics(&config.handoff, &config.worker)?;
    let transports = transports(config.handoff.transfer, &nics);
    let mut all = vec![http_port(&config.worker)];
    all.extend(listeners::ports(config, role));
    ports::check(config.worker.server.host, &all, &mut reactor()?.0)?;
    super::model::tell_excess(&config.worker.kv, 1);
    let plan = thread_cpus::begin(&config.worker.cores, &nics);
    let (files, forward, mut loaded) =
        LoadedModel::open(&config.worker, config.chunks, config.retraction, transports, plan)?;
    loaded.nics = nics;
    let (reactor, ctl) = reactor()?;
    let plan = loaded.plan.clone();
    let helpers = Box::new(HelperThreads(plan.clone()));
    let mut part = WorkerProcess::new(Arc::new(config.clone()), role, loaded, ctl, helpers);
    let clock = Box::new(Instant::now);
    let (mut service, cores) = part.build(reactor, files, forward, clock)?;
    if let Some(authorities) = authorities {
        service.trust(authorities);
    }
    let mut threads = Threads::start(cores, &part.loaded)?;
    install_secrets(&mut service, credentials, reload)?;
    starting.finish();
    thread_cpus::become_ctl(&plan);
    threads::announce_ready(&service, &config.worker, begun);
    loop {
        let outcome =
            service.run().map_err(|error| ProcessError::Io("the event loop failed", error));
        match outcome {
            Ok(RunOutcome::Ended(end)) => return shut_down(service, threads, Ok(end)),
            Ok(RunOutcome::ChangeRole(to)) => {
                threads = part.change_role(&mut service, to, threads, Box::new(Instant::now))?;
            }
            Ok(RunOutcome::KeepRole) => part.register(&mut service)?,
            Err(error) => return shut_down(service, threads, Err(error)),
        }
    }
}

/// The state that outlives a role, and the data of the current role.
pub struct WorkerProcess {
    config: Arc<ClusterWorkerConfig>,
    loaded: LoadedModel,
    ctl: Arc<EventCount>,
    helpers: Box<dyn Helpers>,
    /// The cluster's current keys.
    secrets: Vec<Secret>,
    role: Role,
    /// The current entry in registries.
    advertisement: Option<Advertisement>,
}

/// A role that is set up, before its threads run.
struct PreparedRole {
    loaded: LoadedModel,
    process: ProcessBuilder,
    placement: Placement,
    mode: DisaggregationMode,
    listeners: Listeners,
    rest: PeerSetup,
}

/// The parts of a role that [`WorkerProcess::join_cluster`] needs.
struct PeerSetup {
    keys: Keyring,
    kind: CompatDigest,
    /// Resolves prefill workers' names, for a decode worker.
    names: Option<Resolver>,
}

impl WorkerProcess {
    /// A worker that is not set up yet.
    pub fn new(
        config: Arc<ClusterWorkerConfig>,
        role: Role,
        loaded: LoadedModel,
        ctl: Arc<EventCount>,
        helpers: Box<dyn Helpers>,
    ) -> WorkerProcess {
        let secrets = config.handoff.cluster_keys.clone();
        WorkerProcess { config, loaded, ctl, helpers, secrets, role, advertisement: None }
    }

    /// Puts the worker together in its first role, before its threads start. `clock` is the
    /// engine's.
    ///
    /// # Errors
    /// A port cannot be opened, or memory cannot be mapped.
    pub fn build(
        &mut self,
        mut reactor: Reactor,
        files: ModelFiles,
        forward: Box<dyn Forward>,
        clock: EngineClock,
    ) -> Result<(WorkerService, ThreadParts), ProcessError> {
        let config = self.config.clone();
        let PreparedRole { loaded, process, placement, mode, listeners, rest } =
            self.prepare(self.role, &mut reactor)?;
        let entropy = reactor.entropy().fork("handoff");
        let (workers, cores) = process.assemble(&loaded, forward, self.ctl.clone(), entropy, clock);
        let mut service = threads::build_service(
            reactor,
            &config.worker,
            files,
            &loaded,
            workers,
            (placement, mode),
            (self.ctl.clone(), &*self.helpers),
        )?;
        self.join_cluster(&mut service, listeners, rest, cores.wait().clone())?;
        let barred =
            Role::ALL.into_iter().filter_map(|role| Some((role, config.check_role(role).err()?)));
        service.set_role_change(RoleChange::new(self.role, barred.collect()));
        Ok((service, cores))
    }

    /// Allocates the memory and opens the ports of this role.
    fn prepare(&self, role: Role, reactor: &mut Reactor) -> Result<PreparedRole, ProcessError> {
        let config = &self.config;
        let mut loaded = self.loaded.clone();
        loaded.split = role == Role::Prefill && config.data_threads == DataThreadMode::Split;
        loaded.decode_allocation = config.decode_allocation;
        // With `fake` no KV arrives, so a second prompt has no prefix to reuse.
        loaded.sched.prefix_cache &=
            !(role == Role::Decode && config.handoff.transfer == Transfer::Fake);
        let keys = keyring(&self.secrets)?;
        let kind = compat_digest(&loaded);
        let mut process =
            ProcessBuilder::new(&loaded, &config.worker, self.ctl.clone(), reactor.clock())?;
        let (worker, engine) = match role {
            Role::Prefill => (process.add_prefill(&loaded)?, Role::Prefill),
            Role::Decode => (process.add_decode(&loaded)?, Role::Decode),
            Role::Mixed => (process.add_mixed(&loaded)?, Role::Mixed),
        };
        let names = (role == Role::Decode).then(|| self.helpers.start_resolver(self.ctl.clone()));
        let names =
            names.transpose().map_err(|error| ProcessError::Io("cannot start a thread", error))?;
        let listeners = Listeners::open(config, role, reactor)?;
        loaded.data = listeners.data_address(config);
        let bootstrap_port = listeners.registry.map(|(_, port)| port);
        let placement = match role {
            Role::Prefill => self.prefill_placement(worker, bootstrap_port),
            Role::Decode => self.decode_placement(worker, &loaded.transports),
            Role::Mixed => Placement::Mixed(vec![worker]),
        };
        let local_prefill = role == Role::Decode && config.local_prefill;
        let info = Some(handoff_info(&loaded, &keys, local_prefill));
        let mode = DisaggregationMode {
            bootstrap_port,
            handoff: info,
            ..ServerDescription::mode_of(engine)
        };
        Ok(PreparedRole {
            loaded,
            process,
            placement,
            mode,
            listeners,
            rest: PeerSetup { keys, kind, names },
        })
    }

    fn prefill_placement(&self, worker: WorkerId, bootstrap_port: Option<u16>) -> Placement {
        let (host, handoff) = (self.config.worker.server.host, &self.config.handoff);
        let own_host = || (!host.is_unspecified()).then(|| host.to_string());
        let reached = handoff.advertise_host.clone().or_else(own_host);
        Placement::Prefill {
            worker,
            fake_bootstrap: handoff.fake_bootstrap,
            registry: (reached, bootstrap_port.unwrap_or_default()),
            bootstrap_timeout: self.config.bootstrap_timeout,
        }
    }

    fn decode_placement(&self, worker: WorkerId, transports: &[Transport]) -> Placement {
        let fake_by_default = transports == [Transport::Fake];
        Placement::Decode {
            worker,
            fake_bootstrap: self.config.handoff.fake_bootstrap || fake_by_default,
            fake_by_default,
            proven: !self.secrets.is_empty(),
            local_prefill: self.config.local_prefill,
        }
    }

    /// Accepts peers, and announces the worker to registries.
    fn join_cluster(
        &mut self,
        service: &mut WorkerService,
        listeners: Listeners,
        rest: PeerSetup,
        wait: Arc<WaitSet>,
    ) -> Result<(), ProcessError> {
        let (config, PeerSetup { keys, kind, names }) = (self.config.clone(), rest);
        let (address, entropy) = (service.address(), service.reactor().entropy());
        let place = (address, self.loaded.host);
        let identity = peer_identity(self.role, place, &config.handoff, keys, entropy);
        let peer = identity.peer;
        let patience =
            LinkTimeouts { silence: config.handoff.peer_timeout, ..LinkTimeouts::default() };
        let Listeners { control, registry, data, passing } = listeners;
        let bootstrap_port = registry.map(|(_, port)| port);
        self.advertisement = Some(Advertisement { peer, bootstrap_port, kind });
        if self.role == Role::Mixed {
            return self.register(service);
        }
        let lookup: Box<dyn SourceLookup> = match names {
            Some(names) => Box::new(Directory::new(config.bootstrap_allow.clone(), names)),
            None => Box::new(DirectLookup::new(Vec::new())),
        };
        let lanes = TcpHandshake::new(data.map(|(listener, _)| listener), wait);
        let dialled = control.map(|(listener, _)| listener);
        let peers = ControlLinks::new(
            identity,
            dialled,
            lookup,
            passing,
            lanes,
            patience,
            service.reactor().now(),
        );
        let bootstrap = match (registry, control) {
            (Some((listener, bootstrap_port)), Some((_, control_port))) => {
                // If the configured port is 0, the number is known only now.
                let http_port = service.address().map(|address| address.port());
                let mut table = BootstrapRegistry::default();
                let entered = table.register(rank_registration(
                    &config,
                    &self.loaded.layout,
                    http_port,
                    control_port,
                ));
                entered
                    .map_err(|refusal| ProcessError::Config("registry", format!("{refusal:?}")))?;
                event!(
                    Info,
                    "ctl",
                    "accepting control links",
                    control_port = control_port,
                    bootstrap_port = bootstrap_port
                );
                Some(BootstrapServer::new(listener, table, self.secrets.clone(), service.reactor()))
            }
            _ => None,
        };
        service.join(peers, bootstrap);
        if let Some((_, data_port)) = data {
            event!(Info, "ctl", "accepting lanes", data_port = data_port);
        }
        self.register(service)
    }

    /// Announces the worker at the configured registry, in its current role.
    ///
    /// # Errors
    /// The resolver's thread cannot be started.
    pub fn register(&mut self, service: &mut WorkerService) -> Result<(), ProcessError> {
        self.renew(service);
        let Some(advertisement) = self.advertisement else { return Ok(()) };
        registration::register_worker(
            &self.config,
            self.secrets.first(),
            service,
            self.role,
            advertisement,
            || self.helpers.start_resolver(self.ctl.clone()),
        )
    }

    /// The model and the settings that follow from it.
    pub fn loaded(&self) -> &LoadedModel {
        &self.loaded
    }

    /// The cluster's current keys: those of the start, or those that the service has reloaded.
    pub fn cluster_keys<'a>(&'a self, service: &'a WorkerService) -> &'a [Secret] {
        service.cluster_keys().unwrap_or(&self.secrets)
    }

    /// Takes over the cluster's current keys from the service, which reloads them.
    fn renew(&mut self, service: &WorkerService) {
        self.secrets = self.cluster_keys(service).to_vec();
    }

    /// Checks the ports of a role, except those that the current role also uses.
    ///
    /// # Errors
    /// The first port that cannot be opened.
    fn check_ports(&self, to: Role, reactor: &mut Reactor) -> Result<(), ProcessError> {
        let held = listeners::ports(&self.config, self.role);
        let mut wanted = listeners::ports(&self.config, to);
        // The current role closes its ports first.
        wanted
            .retain(|port| port.number == 0 || held.iter().all(|held| held.number != port.number));
        ports::check(self.config.worker.server.host, &wanted, reactor)
    }

    /// Changes the role, or keeps it if a port of the new role is not free or the role cannot be
    /// set up. `clock` is the engine's. Returns the threads of the role.
    ///
    /// # Errors
    /// Neither the new nor the old role can be set up or announced. The process must end.
    pub fn change_role<T: RoleThreads>(
        &mut self,
        service: &mut WorkerService,
        to: Role,
        threads: T,
        clock: EngineClock,
    ) -> Result<T, ProcessError> {
        self.renew(service);
        if let Err(why) = self.check_ports(to, service.reactor()) {
            // The old role is still intact.
            service.fail_role_change(why.to_string());
            self.register(service)?;
            return Ok(threads);
        }
        let begun = service.reactor().now();
        service.remove_workers();
        let (parts, outcome) = self.take_role(service, to, threads.stop()?, clock)?;
        let threads = T::start(parts, &self.loaded)?;
        let stood_still = service.reactor().now() - begun;
        service.finish_role_change(outcome, stood_still);
        Ok(threads)
    }

    /// Takes a role, or the old role again if that fails. `forward` is the model of the threads
    /// that have ended. Returns the parts of the threads, and why the worker has its old role.
    ///
    /// # Errors
    /// Neither the new nor the old role can be set up.
    fn take_role(
        &mut self,
        service: &mut WorkerService,
        to: Role,
        forward: Box<dyn Forward>,
        clock: EngineClock,
    ) -> Result<(ThreadParts, Result<(), String>), ProcessError> {
        let (prepared, outcome) = match self.prepare(to, service.reactor()) {
            Ok(prepared) => {
                self.role = to;
                (prepared, Ok(()))
            }
            Err(why) => (self.prepare(self.role, service.reactor())?, Err(why.to_string())),
        };
        let PreparedRole { loaded, process, placement, mode, listeners, rest } = prepared;
        let entropy = service.reactor().entropy().fork("handoff");
        let (workers, cores) = process.assemble(&loaded, forward, self.ctl.clone(), entropy, clock);
        let now = service.reactor().now();
        service.set_workers(workers, placement, mode, now);
        self.join_cluster(service, listeners, rest, cores.wait().clone())?;
        Ok((cores, outcome))
    }
}

/// The NICs for RDMA, if `--transfer` allows it.
///
/// # Errors
/// RDMA is required, or devices are named, and no NIC can be used.
fn nics(config: &HandoffConfig, worker: &WorkerConfig) -> Result<Vec<Nic>, ProcessError> {
    let asked = config.transfer;
    if !matches!(asked, Transfer::Auto | Transfer::Rdma) {
        return Ok(Vec::new());
    }
    match Nic::choose(&config.rdma_devices, &worker.cores.cpus) {
        Ok(nics) => {
            event!(Info, "ctl", "RDMA is available", nics = Nic::list(&nics));
            Ok(nics)
        }
        Err(why) if !config.rdma_devices.is_empty() => {
            Err(ProcessError::Absent("--rdma-devices", why))
        }
        Err(why) if asked == Transfer::Rdma => {
            Err(ProcessError::Absent("--transfer", format!("rdma: {why}")))
        }
        Err(why) => {
            event!(Info, "ctl", "RDMA is not used", why = why);
            Ok(Vec::new())
        }
    }
}

/// The transports of a worker, best first.
pub fn transports(asked: Transfer, nics: &[Nic]) -> Vec<Transport> {
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

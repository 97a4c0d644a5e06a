//! Which threads and rings exist in this process; start, drain, stop.
//!
//! `serve`: `ctl` (this thread), one `engine` that steps all workers with a team of compute threads, one
//! `move`, one `tok`. No logic here: a role is what exists and who is connected to whom.

pub mod router;

mod enrolling;
mod loaded;
mod ports;
mod process;
mod starting;

use crate::cluster::registry::{Registration, Registry};
use crate::cluster::router as cluster;
use crate::config::resolved::{
    DataThreads, DecodeConfig, FrontConfig, HandoffConfig, PrefillConfig, ServeConfig, Transfer,
    WorkerConfig, WorkerLayout,
};
use crate::config::secret::Secret;
use crate::config::values::parse_host;
use crate::front::bootstrap::Bootstrap;
use crate::front::directory::Directory;
use crate::front::drain::End;
use crate::front::generations::Placement;
use crate::front::handoff::random;
use crate::front::lanes::Lanes;
use crate::front::openai::info::HandoffInfo;
use crate::front::passing::Passing;
use crate::front::peers::{self, Patience, Peers};
use crate::front::reload::{self, Reload};
use crate::front::resolver::Resolver;
use crate::front::routes::{About, Mode};
use crate::front::service::Service;
use crate::ids::Peer;
use crate::kv::layout::KvLayout;
use crate::limits::CONTROL_CONNECTIONS_MAX;
use crate::model::weights::LoadError;
use crate::net::{Identity, ListenerId, Reactor};
use crate::obs::log::event;
use crate::obs::metrics::EngineType;
use crate::stdx::bell::Bell;
use crate::transfer::aux::AUX_VERSION;
use crate::transfer::transport::rdma::Nic;
use crate::wire::auth::{KeyId, Keyring};
use crate::wire::message::{self as wire, Transport};
pub use loaded::host_id;
use loaded::{Loaded, kind};
use ports::Port;
use process::Process;
use sha2::{Digest, Sha256};
use starting::Starting;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;
use std::{fmt, io};

/// Why a process could not start, or ended badly.
#[derive(Debug)]
pub enum RoleError {
    /// The model's files.
    Model(LoadError),
    /// The system refused something; what was being done.
    Io(&'static str, io::Error),
    /// A port that cannot be had.
    Listen {
        /// What sets it.
        flag: &'static str,
        /// Which.
        address: SocketAddr,
        /// Why.
        error: io::Error,
    },
    /// A value that only the model shows to be wrong: flag and reason.
    Config(&'static str, String),
}

impl fmt::Display for RoleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RoleError::Model(error) => error.fmt(f),
            RoleError::Io(doing, error) => write!(f, "{doing}: {error}"),
            RoleError::Listen { flag, address, error } => {
                write!(f, "{flag}: cannot listen on {address}: {error}")
            }
            RoleError::Config(flag, reason) => write!(f, "{flag}: {reason}"),
        }
    }
}

impl std::error::Error for RoleError {}

impl From<LoadError> for RoleError {
    fn from(error: LoadError) -> RoleError {
        RoleError::Model(error)
    }
}

/// Serves a model in this process until it is told to stop.
pub fn serve(config: &ServeConfig) -> Result<End, RoleError> {
    let begun = Instant::now();
    let starting = Starting::begin()?;
    let transports = match config.layout {
        WorkerLayout::Mixed => Vec::new(),
        WorkerLayout::Split { transfer: Transfer::Fake, .. } => vec![Transport::Fake],
        // The configuration takes nothing else here.
        WorkerLayout::Split { .. } => vec![Transport::Shm],
    };
    ports::check(config.worker.front.host, &[http_port(&config.worker)])?;
    let mut loaded = Loaded::open(&config.worker, config.chunks, Some(config.retraction), transports)?;
    if let WorkerLayout::Split { decode_allocation, .. } = config.layout {
        loaded.decode_allocation = decode_allocation;
    }
    let reactor = Reactor::new().map_err(|error| RoleError::Io("cannot make a reactor", error))?;
    let waker = reactor.waker();
    let ctl = Arc::new(Bell::new(move || waker.wake()));
    let mut process = Process::new(&loaded, &config.worker, ctl.clone())?;
    let placement = match config.layout {
        WorkerLayout::Mixed => Placement::Mixed(vec![process.add_mixed(&loaded)?]),
        WorkerLayout::Split { prefill, decode, first_token, .. } => Placement::Split {
            first_token,
            prefill: (0..prefill).map(|_| process.add_prefill(&loaded)).collect::<Result<_, _>>()?,
            decode: (0..decode).map(|_| process.add_decode(&loaded)).collect::<Result<_, _>>()?,
        },
    };
    let mut running = process.start(
        loaded,
        &config.worker,
        placement,
        About::mode_of(EngineType::Unified),
        reactor,
        ctl,
    )?;
    renew(&mut running.service, &config.worker.front, &[])?;
    starting.over();
    running.announce_ready(&config.worker, begun);
    running.run()
}

/// Reads prompts for decode workers of other processes.
pub fn prefill(config: &PrefillConfig) -> Result<End, RoleError> {
    let begun = Instant::now();
    let starting = Starting::begin()?;
    let nics = nics(&config.handoff, &config.worker)?;
    let transports = transports(config.handoff.transfer, &nics);
    let host = config.worker.front.host;
    let control = Port::new("--control-port", config.control_port);
    let registry = Port::new("--bootstrap-port", config.bootstrap_port);
    ports::check(host, &[http_port(&config.worker), control, registry])?;
    let mut loaded = Loaded::open(&config.worker, config.chunks, None, transports)?;
    loaded.nics = nics;
    loaded.split = config.data_threads == DataThreads::Split;
    loaded.decode_allocation = config.decode_allocation;
    let mut reactor = Reactor::new().map_err(|error| RoleError::Io("cannot make a reactor", error))?;
    let waker = reactor.waker();
    let ctl = Arc::new(Bell::new(move || waker.wake()));
    let mut process = Process::new(&loaded, &config.worker, ctl.clone())?;
    let worker = process.add_prefill(&loaded)?;
    let control = control.listen(host, CONTROL_CONNECTIONS_MAX, &mut reactor)?;
    let registry = registry.listen(host, CONTROL_CONNECTIONS_MAX, &mut reactor)?;
    let control_port = reactor.local_address(control).map_or(0, |address| address.port());
    let bootstrap_port = reactor.local_address(registry).map_or(0, |address| address.port());
    let reached = config.handoff.advertise_host.clone();
    let reached = reached.or_else(|| (!host.is_unspecified()).then(|| host.to_string()));
    let placement = Placement::Prefill {
        worker,
        fake_bootstrap: config.handoff.fake_bootstrap,
        registry: (reached, bootstrap_port),
        bootstrap_timeout: config.bootstrap_timeout,
    };
    let mut passing = Passing::default();
    passing.listen(&mut reactor).map_err(|error| RoleError::Io("cannot listen on a unix socket", error))?;
    let layout = loaded.layout;
    let kind = kind(&loaded.fingerprint, &layout);
    let keys = keyring(&config.handoff)?;
    let mode = Mode {
        bootstrap_port: Some(bootstrap_port),
        handoff: Some(handoff_info(&loaded, &keys, false)),
        ..About::mode_of(EngineType::Prefill)
    };
    let mut running = process.start(loaded, &config.worker, placement, mode, reactor, ctl)?;
    // Only now is the port known where 0 was asked for.
    let http_port = running.service.address().map(|address| address.port());
    let mut table = Registry::default();
    let registration = registration(config, &layout, http_port, control_port);
    table.register(registration).map_err(|refusal| RoleError::Config("registry", format!("{refusal:?}")))?;
    let secrets = config.handoff.cluster_keys.clone();
    let identity = peer_identity(wire::Role::Prefill, running.service.address(), &config.handoff, keys);
    let lanes = Lanes::new(None, running.wait.clone());
    let peer = identity.peer;
    let patience = Patience { silence: config.handoff.peer_timeout, ..Patience::default() };
    let peers = Peers::new(identity, Some(control), Directory::closed(), passing, lanes, patience);
    running.service.join(peers, Some(Bootstrap::new(registry, table, secrets)));
    let role = cluster::Role::Prefill;
    enrolling::enrol(&config.handoff, &mut running.service, peer, role, Some(bootstrap_port), kind)?;
    event!(
        Info,
        "ctl",
        "control links are taken",
        control_port = control_port,
        bootstrap_port = bootstrap_port
    );
    renew(&mut running.service, &config.worker.front, &config.handoff.cluster_keys)?;
    starting.over();
    running.announce_ready(&config.worker, begun);
    running.run()
}

/// Takes over from prefill workers of other processes.
pub fn decode(config: &DecodeConfig) -> Result<End, RoleError> {
    let begun = Instant::now();
    let starting = Starting::begin()?;
    let nics = nics(&config.handoff, &config.worker)?;
    let transports = transports(config.handoff.transfer, &nics);
    let fake_by_default = transports == [Transport::Fake];
    let data_port = Port::new("--data-port", config.data_port);
    let data_port = config.handoff.transfer.takes_tcp().then_some(data_port);
    let ports: Vec<Port> = [http_port(&config.worker)].into_iter().chain(data_port).collect();
    ports::check(config.worker.front.host, &ports)?;
    let mut loaded = Loaded::open(&config.worker, config.chunks, Some(config.retraction), transports)?;
    loaded.nics = nics;
    let mut reactor = Reactor::new().map_err(|error| RoleError::Io("cannot make a reactor", error))?;
    let data = data_port.map(|port| listen_for_lanes(config, port, &mut reactor)).transpose()?;
    let (data, told) = data.unzip();
    loaded.data = told;
    let waker = reactor.waker();
    let ctl = Arc::new(Bell::new(move || waker.wake()));
    let mut process = Process::new(&loaded, &config.worker, ctl.clone())?;
    let fake_bootstrap = config.handoff.fake_bootstrap || fake_by_default;
    let proven = !config.handoff.cluster_keys.is_empty();
    let worker = process.add_decode(&loaded)?;
    let reads_alone = config.local_prefill;
    let placement = Placement::Decode { worker, fake_bootstrap, fake_by_default, proven, reads_alone };
    let kind = kind(&loaded.fingerprint, &loaded.layout);
    let keys = keyring(&config.handoff)?;
    let handoff = Some(handoff_info(&loaded, &keys, reads_alone));
    let mode = Mode { handoff, ..About::mode_of(EngineType::Decode) };
    let bell = ctl.clone();
    let mut running = process.start(loaded, &config.worker, placement, mode, reactor, ctl)?;
    let identity = peer_identity(wire::Role::Decode, running.service.address(), &config.handoff, keys);
    let names = Resolver::start(move || bell.ring());
    let names = names.map_err(|error| RoleError::Io("cannot start a thread", error))?;
    let directory = Directory::new(config.bootstrap_allow.clone(), names);
    let lanes = Lanes::new(data, running.wait.clone());
    let peer = identity.peer;
    let patience = Patience { silence: config.handoff.peer_timeout, ..Patience::default() };
    running.service.join(Peers::new(identity, None, directory, Passing::default(), lanes, patience), None);
    enrolling::enrol(&config.handoff, &mut running.service, peer, cluster::Role::Decode, None, kind)?;
    if let Some(told) = told {
        event!(Info, "ctl", "lanes are taken", data_port = told.port());
    }
    renew(&mut running.service, &config.worker.front, &config.handoff.cluster_keys)?;
    starting.over();
    running.announce_ready(&config.worker, begun);
    running.run()
}

/// What the HTTP front shows, where it speaks HTTPS.
fn identity(front: &FrontConfig) -> Result<Option<Identity>, RoleError> {
    let read = |(certificates, key): &(PathBuf, PathBuf)| Identity::read(certificates, key);
    let identity = front.tls.as_ref().map(read).transpose();
    identity.map_err(|why| RoleError::Config("--tls-cert-file, --tls-key-file", why))
}

/// Has the files of keys and certificates read again as they change.
fn renew(service: &mut Service, front: &FrontConfig, cluster_keys: &[Secret]) -> Result<(), RoleError> {
    let watched = service.renew_from(Reload::new(front, cluster_keys, Instant::now()));
    watched.map_err(|error| RoleError::Io("cannot take signals", error))
}

fn http_port(config: &WorkerConfig) -> Port {
    Port::new("--port", config.front.port)
}

/// Opens the data port; also gives what peers are told of it, an address of none being the one that they see.
fn listen_for_lanes(
    config: &DecodeConfig,
    port: Port,
    reactor: &mut Reactor,
) -> Result<(ListenerId, SocketAddr), RoleError> {
    let host = config.worker.front.host;
    let listener = port.listen(host, CONTROL_CONNECTIONS_MAX, reactor)?;
    let port = reactor.local_address(listener).map_or(0, |address| address.port());
    // The configuration takes nothing but addresses here.
    let advertised = config.handoff.advertise_host.as_deref().and_then(|host| parse_host(host).ok());
    Ok((listener, SocketAddr::new(advertised.unwrap_or(host), port)))
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
        Err(why) if !config.rdma_devices.is_empty() => Err(RoleError::Config("--rdma-devices", why)),
        Err(why) if asked == Transfer::Rdma => Err(RoleError::Config("--transfer", format!("rdma: {why}"))),
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
        Transfer::Auto => [Some(Transport::Shm), rdma, Some(Transport::Tcp)].into_iter().flatten().collect(),
        Transfer::Rdma => rdma.into_iter().collect(),
        Transfer::Shm => vec![Transport::Shm],
        Transfer::Tcp => vec![Transport::Tcp],
        Transfer::Fake => vec![Transport::Fake],
    }
}

/// What the registry tells of this worker.
fn registration(
    config: &PrefillConfig,
    layout: &KvLayout,
    http_port: Option<u16>,
    control_port: u16,
) -> Registration {
    let front = &config.worker.front;
    let rank_ip = config.handoff.advertise_host.clone().unwrap_or_else(|| front.host.to_string());
    Registration {
        attn_tp_size: 1,
        attn_tp_rank: 0,
        attn_cp_size: 1,
        attn_cp_rank: 0,
        attn_dp_size: 1,
        attn_dp_rank: 0,
        pp_size: 1,
        pp_rank: 0,
        system_dp_size: 1,
        system_dp_rank: 0,
        rank_ip,
        rank_port: control_port,
        page_size: layout.page_size,
        kv_cache_dtype: layout.dtype.name().into(),
        load_balance_method: "follow_bootstrap_room".into(),
        decode_allocation_policy: config.decode_allocation.registered().into(),
        prefill_http_port: http_port,
        control_host: config.handoff.advertise_host.clone(),
        control_port: Some(control_port),
    }
}

/// Who this process is to its peers: named by its host, address and role, with a fresh incarnation. The host
/// counts since all workers may listen on 0.0.0.0.
fn peer_identity(
    role: wire::Role,
    address: Option<SocketAddr>,
    handoff: &HandoffConfig,
    keys: Keyring,
) -> peers::Identity {
    let name = format!("{role:?} {address:?} {:?} {:?}", handoff.advertise_host, host_id());
    let digest = Sha256::digest(name.as_bytes());
    let mut id = [0; 16];
    id.copy_from_slice(&digest[..16]);
    peers::Identity { peer: Peer { id, incarnation: random() }, role, keys }
}

/// The cluster's keys; their names are in the log, so that a rotation can be followed.
fn keyring(handoff: &HandoffConfig) -> Result<Keyring, RoleError> {
    let keys = reload::keyring(&handoff.cluster_keys);
    let keys = keys.map_err(|error| RoleError::Config("--cluster-key-file", error))?;
    for id in keys.ids().into_iter().filter(|&id| id != KeyId::NONE) {
        event!(Info, "ctl", "a cluster key is accepted", key = id, proven = id == keys.ids()[0]);
    }
    Ok(keys)
}

/// What peers must have in common with this worker, for routers.
fn handoff_info(loaded: &Loaded, keys: &Keyring, local_prefill: bool) -> HandoffInfo {
    let short = |hash: &[u8; 32]| hash[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    let (own, layout) = (&loaded.fingerprint, &loaded.layout);
    let KvLayout { layers, model_kv_heads: heads, head_dim, .. } = layout;
    HandoffInfo {
        wire: format!("{}.{}", wire::VERSION, wire::MINOR),
        config: short(&own.config),
        weights: short(&own.weights),
        kernels: short(&own.kernels),
        tokenizer: short(&own.tokenizer),
        template: short(&own.template),
        kv: format!("{} layers={layers} heads={heads} dim={head_dim} aux={AUX_VERSION}", layout.dtype.name()),
        cluster_keys: keys.names(),
        local_prefill,
    }
}

//! Which threads and rings exist in this process; start, drain, stop.
//!
//! `serve`: `ctl` (this thread), one `engine` that steps all workers with a team of compute threads, one
//! `move`, one `tok`. No logic here: a role is what exists and who is connected to whom.

use crate::cluster::registry::{Registration, Registry};
use crate::config::resolved::{
    self, ChunkConfig, DecodeConfig, HandoffConfig, PrefillConfig, ServeConfig, Transfer, WorkerConfig,
    WorkerLayout,
};
use crate::front::bootstrap::Bootstrap;
use crate::front::directory::Directory;
use crate::front::generations::{Generations, Placement, Terms};
use crate::front::handoff::{Handoff, Member, Offer, Role, random};
use crate::front::lanes::Lanes;
use crate::front::openai::Sampling;
use crate::front::passing::Passing;
use crate::front::peers::{self, Peers};
use crate::front::resolver::Resolver;
use crate::front::routes::{About, Mode, Routes};
use crate::front::service::{End, Service};
use crate::front::telemetry::{Telemetry, Watched};
use crate::front::text::{Text, TextQueue};
use crate::front::worker::{Ring, Worker};
use crate::ids::{Peer, WorkerId};
use crate::kv::layout::{KvDtype, KvLayout};
use crate::kv::lease::MoverRight;
use crate::kv::region::Region;
use crate::limits::{CONTROL_CONNECTIONS_MAX, SESSIONS_MAX, TOKENISE_QUEUE_MAX};
use crate::model::config::{Architecture, ModelConfig};
use crate::model::forward::cpu::{CpuModel, CpuOptions};
use crate::model::open::{LoadFormat, ModelFiles};
use crate::model::tensor::TensorType;
use crate::model::weights::LoadError;
use crate::net::Reactor;
use crate::obs::log::event;
use crate::obs::metrics::{EngineType, WorkerMetrics};
use crate::obs::registry as figures;
use crate::sched::config::SchedConfig;
use crate::sched::decode::DecodeWorker;
use crate::sched::engine::{self, Engine};
use crate::sched::mail::{Mail, events_per_turn};
use crate::sched::mailbox::Command;
use crate::sched::mixed::MixedWorker;
use crate::sched::prefill::PrefillWorker;
use crate::sched::stats::WorkerStats;
use crate::sched::worker::{KvMemory, Worker as SchedWorker};
use crate::stdx::bell::Bell;
use crate::sys::event::WaitSet;
use crate::transfer::handle::{Receiver, Sender};
use crate::transfer::manager::destination::DestinationManager;
use crate::transfer::manager::identity::Identity;
use crate::transfer::manager::source::SourceManager;
use crate::transfer::mover::destination::{DestinationLinks, DestinationMover};
use crate::transfer::mover::source::{SourceLinks, SourceMover};
use crate::transfer::mover::{Mover, Waiter};
use crate::transfer::pages::PageLists;
use crate::transfer::status::StatusTable;
use crate::transfer::transport::Memory;
use crate::wire::auth::ClusterKey;
use crate::wire::message::{self as wire, Fingerprint, HostId, Transport};
use crossbeam_channel as channel;
use sha2::{Digest, Sha256};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Why a process could not start, or ended badly.
#[derive(Debug)]
pub enum RoleError {
    /// The model's files.
    Model(LoadError),
    /// The system refused something; what was being done.
    Io(&'static str, io::Error),
    /// A value that only the model shows to be wrong: flag and reason.
    Config(&'static str, String),
}

impl fmt::Display for RoleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RoleError::Model(error) => error.fmt(f),
            RoleError::Io(doing, error) => write!(f, "{doing}: {error}"),
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
    let transports = match config.layout {
        WorkerLayout::Mixed => Vec::new(),
        WorkerLayout::Split { transfer: Transfer::Auto | Transfer::Shm, .. } => vec![Transport::Shm],
        WorkerLayout::Split { transfer: Transfer::Fake, .. } => vec![Transport::Fake],
        WorkerLayout::Split { transfer: Transfer::Tcp, .. } => {
            let reason =
                "tcp between workers of one process is not supported; use shm, or separate processes";
            return Err(RoleError::Config("--transfer", reason.into()));
        }
    };
    let loaded = Loaded::open(&config.worker, Some(config.chunks), transports)?;
    let reactor = Reactor::new().map_err(|error| RoleError::Io("cannot make a reactor", error))?;
    let waker = reactor.waker();
    let ctl = Arc::new(Bell::new(move || waker.wake()));
    let mut process = Process::new(&loaded, &config.worker, ctl.clone())?;
    let placement = match config.layout {
        WorkerLayout::Mixed => Placement::Mixed(vec![process.add_mixed(&loaded)?]),
        WorkerLayout::Split { prefill, decode, .. } => Placement::Split {
            prefill: (0..prefill).map(|_| process.add_prefill(&loaded)).collect::<Result<_, _>>()?,
            decode: (0..decode).map(|_| process.add_decode(&loaded)).collect::<Result<_, _>>()?,
        },
    };
    let running = process.start(
        loaded,
        &config.worker,
        placement,
        About::mode_of(EngineType::Unified),
        reactor,
        ctl,
    )?;
    running.announce_ready(&config.worker, begun);
    running.run()
}

/// Reads prompts for decode workers of other processes.
pub fn prefill(config: &PrefillConfig) -> Result<End, RoleError> {
    let begun = Instant::now();
    let transports = transports(config.handoff.transfer);
    let loaded = Loaded::open(&config.worker, Some(config.chunks), transports)?;
    let mut reactor = Reactor::new().map_err(|error| RoleError::Io("cannot make a reactor", error))?;
    let waker = reactor.waker();
    let ctl = Arc::new(Bell::new(move || waker.wake()));
    let mut process = Process::new(&loaded, &config.worker, ctl.clone())?;
    let worker = process.add_prefill(&loaded)?;
    let placement = Placement::Prefill { worker, fake_bootstrap: config.handoff.fake_bootstrap };
    let host = config.worker.front.host;
    let listen = |reactor: &mut Reactor, port: u16, what: &'static str| {
        let address = SocketAddr::new(host, port);
        let listener = reactor.listen(&address.into(), CONTROL_CONNECTIONS_MAX);
        listener.map_err(|error| RoleError::Io(what, error))
    };
    let control = listen(&mut reactor, config.control_port, "cannot listen on the control port")?;
    let registry = listen(&mut reactor, config.bootstrap_port, "cannot listen on the bootstrap port")?;
    let control_port = reactor.local_address(control).map_or(0, |address| address.port());
    let bootstrap_port = reactor.local_address(registry).map_or(0, |address| address.port());
    let mut passing = Passing::default();
    passing.listen(&mut reactor).map_err(|error| RoleError::Io("cannot listen on a unix socket", error))?;
    let registration = registration(config, &loaded, control_port);
    let mode = Mode { bootstrap_port: Some(bootstrap_port), ..About::mode_of(EngineType::Prefill) };
    let mut running = process.start(loaded, &config.worker, placement, mode, reactor, ctl)?;
    let mut table = Registry::default();
    table.register(registration).map_err(|refusal| RoleError::Config("registry", format!("{refusal:?}")))?;
    let key = config.handoff.cluster_key.clone();
    let identity = peer_identity(wire::Role::Prefill, running.service.address(), &config.handoff)?;
    let lanes = Lanes::new(None, running.wait.clone());
    let peers = Peers::new(identity, Some(control), Directory::closed(), passing, lanes);
    running.service.join(peers, Some(Bootstrap::new(registry, table, key)));
    event!(
        Info,
        "ctl",
        "control links are taken",
        control_port = control_port,
        bootstrap_port = bootstrap_port
    );
    running.announce_ready(&config.worker, begun);
    running.run()
}

/// Takes over from prefill workers of other processes.
pub fn decode(config: &DecodeConfig) -> Result<End, RoleError> {
    let begun = Instant::now();
    let transports = transports(config.handoff.transfer);
    let fake_by_default = transports == [Transport::Fake];
    let mut loaded = Loaded::open(&config.worker, None, transports)?;
    let mut reactor = Reactor::new().map_err(|error| RoleError::Io("cannot make a reactor", error))?;
    let address = SocketAddr::new(config.worker.front.host, config.data_port);
    let data = reactor.listen(&address.into(), CONTROL_CONNECTIONS_MAX);
    let data = data.map_err(|error| RoleError::Io("cannot listen on the data port", error))?;
    let port = reactor.local_address(data).map_or(0, |address| address.port());
    let advertised = config.handoff.advertise_host.as_deref().and_then(|host| host.parse().ok());
    loaded.data = Some(SocketAddr::new(advertised.unwrap_or(config.worker.front.host), port));
    let waker = reactor.waker();
    let ctl = Arc::new(Bell::new(move || waker.wake()));
    let mut process = Process::new(&loaded, &config.worker, ctl.clone())?;
    let fake_bootstrap = config.handoff.fake_bootstrap || fake_by_default;
    let worker = process.add_decode(&loaded)?;
    let placement = Placement::Decode { worker, fake_bootstrap, fake_by_default };
    let mode = About::mode_of(EngineType::Decode);
    let bell = ctl.clone();
    let mut running = process.start(loaded, &config.worker, placement, mode, reactor, ctl)?;
    let identity = peer_identity(wire::Role::Decode, running.service.address(), &config.handoff)?;
    let names = Resolver::start(move || bell.ring());
    let names = names.map_err(|error| RoleError::Io("cannot start a thread", error))?;
    let directory = Directory::new(config.bootstrap_allow.clone(), names);
    let lanes = Lanes::new(Some(data), running.wait.clone());
    running.service.join(Peers::new(identity, None, directory, Passing::default(), lanes), None);
    event!(Info, "ctl", "lanes are taken", data_port = port);
    running.announce_ready(&config.worker, begun);
    running.run()
}

/// Which transports a worker offers or takes, best first.
fn transports(asked: Transfer) -> Vec<Transport> {
    match asked {
        Transfer::Auto => vec![Transport::Shm, Transport::Tcp],
        Transfer::Shm => vec![Transport::Shm],
        Transfer::Tcp => vec![Transport::Tcp],
        Transfer::Fake => vec![Transport::Fake],
    }
}

/// What the registry tells of this worker.
fn registration(config: &PrefillConfig, loaded: &Loaded, control_port: u16) -> Registration {
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
        page_size: loaded.layout.page_size,
        kv_cache_dtype: loaded.layout.dtype.name().into(),
        load_balance_method: "follow_bootstrap_room".into(),
        decode_allocation_policy: "early".into(),
        prefill_http_port: Some(front.port),
        control_host: config.handoff.advertise_host.clone(),
        control_port: Some(control_port),
    }
}

/// Who this process is to its peers: named by its address and role, with a fresh incarnation.
fn peer_identity(
    role: wire::Role,
    address: Option<SocketAddr>,
    handoff: &HandoffConfig,
) -> Result<peers::Identity, RoleError> {
    let name = format!("{role:?} {address:?} {:?}", handoff.advertise_host);
    let digest = Sha256::digest(name.as_bytes());
    let mut id = [0; 16];
    id.copy_from_slice(&digest[..16]);
    let key = handoff.cluster_key.as_ref().map(|key| ClusterKey::new(key.bytes())).transpose();
    let key = key.map_err(|_| RoleError::Config("--cluster-key-file", "the key is too short".into()))?;
    Ok(peers::Identity { peer: Peer { id, incarnation: random() }, role, key })
}

/// A model in memory and what follows from it.
struct Loaded {
    files: ModelFiles,
    forward: CpuModel,
    sched: SchedConfig,
    layout: KvLayout,
    pages: u32,
    slots: usize,
    fingerprint: Fingerprint,
    transports: Vec<Transport>,
    /// Where lanes of tcp are accepted.
    data: Option<SocketAddr>,
    spin: bool,
}

impl Loaded {
    /// `chunks` is of roles that read prompts.
    fn open(
        worker: &WorkerConfig,
        chunks: Option<ChunkConfig>,
        transports: Vec<Transport>,
    ) -> Result<Loaded, RoleError> {
        let format = match worker.model.load_format {
            resolved::LoadFormat::Auto => LoadFormat::Auto,
            resolved::LoadFormat::Dummy => LoadFormat::Dummy,
        };
        event!(Info, "model", "opening", path = worker.model.path.display());
        let files = ModelFiles::open(&worker.model.path, format)?;
        let model = &files.config;
        let context = context(model, worker.model.max_model_len)?;
        let dtype = kv_dtype(worker.kv.dtype, files.checkpoint);
        let (kv_heads, head_dim) = (model.kv_heads as u32, model.head_dim as u32);
        let layout =
            KvLayout::page_major(worker.kv.page_size, model.layers as u32, kv_heads, head_dim, dtype);
        let pages = u32::try_from(worker.kv.memory.0 / layout.page_bytes()).unwrap_or(u32::MAX);
        if pages == 0 {
            let reason = format!("holds no page: one takes {} bytes", layout.page_bytes());
            return Err(RoleError::Config("--kv-memory", reason));
        }
        let sched = SchedConfig {
            max_running: worker.max_running_requests as usize,
            max_prefill_tokens: chunks.map_or(1, |chunks| chunks.max_prefill_tokens),
            chunked_prefill_size: chunks.map_or(1, |chunks| chunks.chunked_prefill_size),
            chunk_ms: chunks.map_or(0, |chunks| chunks.chunk_ms),
            page_size: worker.kv.page_size,
            context: context as u32,
            vocab: model.vocab as u32,
        };
        let pinned = worker.cores.cpus_are_chosen || worker.cores.cpus.len() >= worker.cores.threads + 2;
        let options = CpuOptions {
            threads: worker.cores.threads,
            limits: sched.batch_limits(),
            kernel: None,
            pin: pinned.then(|| worker.cores.cpus.clone()),
        };
        let mut shown = 0;
        let forward = CpuModel::load(model, files.weights.as_ref(), &options, &mut |done, total| {
            let percent = done * 100 / total.max(1);
            if percent >= shown + 25 {
                shown = percent;
                event!(Info, "model", "loading", percent = percent);
            }
        })?;
        let memory = forward.memory_bytes();
        event!(
            Info,
            "model",
            "loaded",
            kernels = forward.kernel_family().name(),
            weights_mib = memory.weights >> 20,
            scratch_mib = memory.scratch >> 20,
            kv_mib = (u64::from(pages) * layout.page_bytes()) >> 20,
            kv_dtype = dtype.name(),
            context = context,
        );
        let fingerprint = fingerprint(&files, forward.kernel_family().name());
        let slots = (worker.max_running_requests + worker.max_queued_requests) as usize;
        let spin = worker.cores.busy_poll || worker.cores.cpus.len() > worker.cores.threads + 1;
        Ok(Loaded { files, forward, sched, layout, pages, slots, fingerprint, transports, data: None, spin })
    }

    fn identity(&self, memory: &Memory) -> Identity {
        Identity {
            fingerprint: self.fingerprint,
            layout: self.layout,
            pages: self.pages,
            pool_bytes: memory.region.len() as u64,
            slots: self.slots as u32,
            host: host_id(),
        }
    }
}

/// Workers and rings, before the threads run.
struct Process {
    members: Vec<Member>,
    workers: Vec<Box<dyn SchedWorker>>,
    mover: Mover,
    waiter: Waiter,
    engine_commands: (channel::Sender<Command>, channel::Receiver<Command>),
    engine_bell: Arc<Bell>,
    engine_thread: Arc<OnceLock<Thread>>,
    ctl: Arc<Bell>,
    registry: figures::Registry,
    watched: Vec<Watched>,
    model_name: String,
}

impl Process {
    fn new(loaded: &Loaded, config: &WorkerConfig, ctl: Arc<Bell>) -> Result<Process, RoleError> {
        let engine_thread: Arc<OnceLock<Thread>> = Arc::default();
        let unpark = engine_thread.clone();
        let engine_bell = Arc::new(Bell::new(move || {
            if let Some(thread) = unpark.get() {
                thread.unpark();
            }
        }));
        let waiter =
            Waiter::new(loaded.spin).map_err(|error| RoleError::Io("cannot park the mover", error))?;
        Ok(Process {
            members: Vec::new(),
            workers: Vec::new(),
            mover: Mover { sources: Vec::new(), destinations: Vec::new() },
            waiter,
            engine_commands: channel::bounded(loaded.slots * 4 + 64),
            engine_bell,
            engine_thread,
            ctl,
            registry: figures::Registry::default(),
            watched: Vec::new(),
            model_name: config.model.served_names[0].clone(),
        })
    }

    fn memory(&self, loaded: &Loaded) -> Result<Memory, RoleError> {
        let io = |error| RoleError::Io("cannot map KV memory", error);
        let bytes = u64::from(loaded.pages) * loaded.layout.page_stride;
        let pages_of_context = loaded.layout.pages_for(loaded.sched.context) as usize;
        Ok(Memory {
            region: Arc::new(Region::new(c"baton-kv", bytes as usize).map_err(io)?),
            layout: loaded.layout,
            pages: loaded.pages,
            lists: Arc::new(PageLists::new(loaded.slots, pages_of_context).map_err(io)?),
        })
    }

    /// The parts that all roles share.
    fn worker(&mut self, loaded: &Loaded) -> Result<(WorkerId, Memory, Arc<StatusTable>, Worker), RoleError> {
        let id = WorkerId(self.members.len() as u32);
        let memory = self.memory(loaded)?;
        let status = Arc::new(StatusTable::new(loaded.slots));
        let ring = Ring::new(self.engine_commands.0.clone(), self.engine_bell.clone());
        let worker = Worker::new(id, ring, status.clone(), memory.clone());
        Ok((id, memory, status, worker))
    }

    fn watch(&mut self, role: EngineType, id: WorkerId, stats: Arc<WorkerStats>, page_size: u32) {
        let metrics = WorkerMetrics::register(&mut self.registry, &self.model_name, role, id.index());
        self.watched.push(Watched { role, metrics: Arc::new(metrics), stats, page_size });
    }

    fn add_mixed(&mut self, loaded: &Loaded) -> Result<WorkerId, RoleError> {
        let (id, memory, _, worker) = self.worker(loaded)?;
        let mixed = MixedWorker::new(id, loaded.sched, kv_memory(&memory), loaded.slots);
        self.watch(EngineType::Unified, id, mixed.stats().clone(), loaded.layout.page_size);
        self.workers.push(Box::new(mixed));
        self.members.push(Member { worker, role: Role::Mixed, reports: None });
        Ok(id)
    }

    fn add_prefill(&mut self, loaded: &Loaded) -> Result<WorkerId, RoleError> {
        let (id, memory, status, worker) = self.worker(loaded)?;
        let (commands, ring) = channel::bounded(mover_ring(loaded.slots));
        let (ends, ended) = channel::bounded(loaded.slots + 1);
        let (reports, reported) = channel::bounded(loaded.slots * 2 + SESSIONS_MAX);
        let links = SourceLinks {
            commands: ring,
            ends,
            reports,
            engine: self.engine_bell.clone(),
            ctl: self.ctl.clone(),
            status: status.clone(),
        };
        let right = MoverRight::for_mover_thread();
        self.mover.sources.push(SourceMover::new(links, memory.clone(), SESSIONS_MAX, right));
        let sender = Sender {
            status: status.clone(),
            pages: memory.lists.clone(),
            commands: commands.clone(),
            ends: ended,
            bell: self.waiter.bell.clone(),
        };
        let prefill = PrefillWorker::new(id, loaded.sched, kv_memory(&memory), sender);
        self.watch(EngineType::Prefill, id, prefill.stats().clone(), loaded.layout.page_size);
        self.workers.push(Box::new(prefill));
        let identity = loaded.identity(&memory);
        let manager = SourceManager::new(identity, loaded.transports.clone(), status, SESSIONS_MAX);
        let mover = Ring::new(commands, self.waiter.bell.clone());
        let role = Role::Prefill { manager: Box::new(manager), mover };
        self.members.push(Member { worker, role, reports: Some(reported) });
        Ok(id)
    }

    fn add_decode(&mut self, loaded: &Loaded) -> Result<WorkerId, RoleError> {
        let (id, memory, status, worker) = self.worker(loaded)?;
        let (commands, ring) = channel::bounded(mover_ring(loaded.slots));
        let (ends, ended) = channel::bounded(loaded.slots + 1);
        let (reports, reported) = channel::bounded(loaded.slots * 2 + SESSIONS_MAX);
        let links = DestinationLinks {
            commands: ring,
            ends,
            reports,
            engine: self.engine_bell.clone(),
            ctl: self.ctl.clone(),
            status: status.clone(),
        };
        let right = MoverRight::for_mover_thread();
        self.mover.destinations.push(DestinationMover::new(links, memory.clone(), SESSIONS_MAX, right));
        let receiver = Receiver {
            status: status.clone(),
            pages: memory.lists.clone(),
            commands: commands.clone(),
            ends: ended,
            bell: self.waiter.bell.clone(),
        };
        let decode = DecodeWorker::new(id, loaded.sched, kv_memory(&memory), receiver);
        self.watch(EngineType::Decode, id, decode.stats().clone(), loaded.layout.page_size);
        self.workers.push(Box::new(decode));
        let manager = DestinationManager::new(loaded.identity(&memory), status, SESSIONS_MAX);
        let mover = Ring::new(commands, self.waiter.bell.clone());
        let doorbell = self
            .waiter
            .doorbell
            .duplicate()
            .map_err(|error| RoleError::Io("cannot duplicate a doorbell", error))?;
        let role = Role::Decode { manager: Box::new(manager), mover, doorbell };
        self.members.push(Member { worker, role, reports: Some(reported) });
        Ok(id)
    }

    fn start(
        self,
        loaded: Loaded,
        config: &WorkerConfig,
        placement: Placement,
        mode: Mode,
        reactor: Reactor,
        ctl: Arc<Bell>,
    ) -> Result<Running, RoleError> {
        let stop = Arc::new(AtomicBool::new(false));
        let (events, events_in) = channel::bounded(event_ring(loaded.slots * self.members.len()));
        let mail = Mail::new(self.engine_commands.1, events, ctl.clone());
        let io = |error| RoleError::Io("cannot start a thread", error);
        let Loaded { files, forward, sched, layout, pages, transports, data, spin, .. } = loaded;
        let mut threads = Vec::new();
        let progress;
        {
            let (workers, bell, stop, cell) =
                (self.workers, self.engine_bell.clone(), stop.clone(), self.engine_thread);
            let spins = if spin { ENGINE_SPINS } else { 0 };
            let mut engine = Engine::new(&sched, workers, Box::new(forward), mail, Box::new(Instant::now));
            progress = engine.progress().clone();
            threads.push(
                thread::Builder::new()
                    .name("engine".into())
                    .spawn(move || {
                        let _ = cell.set(thread::current());
                        engine::run(&mut engine, &bell, &stop, spins);
                    })
                    .map_err(io)?,
            );
        }
        let mover_bell = self.waiter.bell.clone();
        let wait = self.waiter.set.clone();
        {
            let (mover, waiter, stop) = (self.mover, self.waiter, stop.clone());
            threads.push(
                thread::Builder::new()
                    .name("move-0".into())
                    .spawn(move || mover.run(&waiter, &stop))
                    .map_err(io)?,
            );
        }
        let text = Arc::new(Text { tokenizer: files.tokenizer, chat: files.chat_template.ok() });
        let queue = TextQueue::start(text.clone(), TOKENISE_QUEUE_MAX, ctl.clone()).map_err(io)?;
        let handoff = Handoff::new(self.members, Offer { transports, host: host_id(), data });
        let terms = Terms {
            names: config.model.served_names.clone(),
            context: sched.context as usize,
            eos: files.config.eos.clone(),
            placement,
        };
        let metrics = self.watched.iter().map(|watched| watched.metrics.clone()).collect();
        let generations = Generations::new(terms, text, queue, handoff, metrics);
        let pool_tokens = pages as usize * layout.page_size as usize;
        let about = about(config, &files.config, &files.sampling, &sched, pool_tokens, mode);
        let telemetry = Telemetry::new(self.registry, self.watched);
        let routes = Routes::new(about, config.front.api_keys.clone(), telemetry);
        let address = config.front.address();
        let service = Service::new(
            reactor,
            address,
            generations,
            routes,
            (vec![events_in], progress),
            ctl,
            Instant::now(),
        )
        .map_err(|error| RoleError::Io("cannot listen for HTTP", error))?;
        Ok(Running { service, stop, bells: vec![self.engine_bell, mover_bell], wait, threads })
    }
}

/// Empty turns of an engine before it parks, where it has a core of its own.
const ENGINE_SPINS: u32 = 2000;

/// A process with its threads.
struct Running {
    service: Service,
    stop: Arc<AtomicBool>,
    bells: Vec<Arc<Bell>>,
    /// Where the mover parks.
    wait: Arc<WaitSet>,
    threads: Vec<JoinHandle<()>>,
}

impl Running {
    fn announce_ready(&self, config: &WorkerConfig, begun: Instant) {
        event!(
            Info,
            "ctl",
            "ready",
            address = self.service.address().map_or("?".into(), |address| address.to_string()),
            model = config.model.served_names[0],
            seconds = format!("{:.2}", begun.elapsed().as_secs_f64()),
        );
    }

    fn run(self) -> Result<End, RoleError> {
        let ended = self.service.run().map_err(|error| RoleError::Io("the reactor failed", error));
        self.stop.store(true, Ordering::Release);
        for bell in &self.bells {
            bell.ring();
        }
        for thread in self.threads {
            thread.thread().unpark();
            // A thread that panicked has said so; what it carried ends with the process.
            let _ = thread.join();
        }
        ended
    }
}

/// Begin, Chunk, Done and Expect of every slot, and one Cancel each on top (`transfer::handle`).
fn mover_ring(slots: usize) -> usize {
    slots * 4 + SESSIONS_MAX + 64
}

/// What one turn may tell, twice over, so that `ctl` may be a turn behind.
fn event_ring(slots: usize) -> usize {
    2 * events_per_turn(slots)
}

fn kv_memory(memory: &Memory) -> KvMemory {
    KvMemory { region: memory.region.clone(), layout: memory.layout, pages: memory.pages }
}

fn context(model: &ModelConfig, asked: Option<u32>) -> Result<usize, RoleError> {
    match asked {
        Some(asked) if asked as usize > model.context => {
            let reason = format!("is {asked}; the model's context has {} tokens", model.context);
            Err(RoleError::Config("--max-model-len", reason))
        }
        Some(asked) => Ok(asked as usize),
        None => Ok(model.context),
    }
}

/// `auto`: float32 checkpoints keep float32 KV, all others f16. So do bfloat16 ones: keys and values stay far
/// inside f16's range (and are held there), and bf16 would round eight times more coarsely.
fn kv_dtype(asked: resolved::KvDtype, checkpoint: TensorType) -> KvDtype {
    match (asked, checkpoint) {
        (resolved::KvDtype::F32, _) | (resolved::KvDtype::Auto, TensorType::F32) => KvDtype::F32,
        (resolved::KvDtype::Bf16, _) => KvDtype::Bf16,
        (resolved::KvDtype::F16 | resolved::KvDtype::Auto, _) => KvDtype::F16,
    }
}

fn fingerprint(files: &ModelFiles, kernels: &str) -> Fingerprint {
    let own = &files.fingerprint;
    Fingerprint {
        config: own.config,
        weights: own.weights,
        kernels: Sha256::digest(kernels.as_bytes()).into(),
        tokenizer: own.tokenizer,
        template: own.template,
    }
}

/// The kernel's boot id and the network namespace: the same in all processes that can pass each other
/// descriptors over an abstract unix socket.
fn host_id() -> HostId {
    let mut id = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    id.extend_from_slice(namespace.as_os_str().as_encoded_bytes());
    let digest = Sha256::digest(&id);
    let mut host = [0; 16];
    host.copy_from_slice(&digest[..16]);
    HostId(host)
}

fn about(
    config: &WorkerConfig,
    model: &ModelConfig,
    advised: &crate::model::hf::config::SamplingDefaults,
    sched: &SchedConfig,
    pool_tokens: usize,
    mode: Mode,
) -> About {
    let (model_type, architecture) = match model.architecture {
        Architecture::Llama => ("llama", "LlamaForCausalLM"),
        Architecture::Qwen2 => ("qwen2", "Qwen2ForCausalLM"),
        Architecture::Qwen3 => ("qwen3", "Qwen3ForCausalLM"),
    };
    let usual = Sampling::default();
    About {
        model_path: config.model.path.display().to_string(),
        model_type,
        architectures: vec![architecture.into()],
        mode: mode.name,
        bootstrap_port: mode.bootstrap_port,
        pool_tokens,
        page_size: sched.page_size as usize,
        max_running: sched.max_running,
        sampling: Sampling {
            temperature: advised.temperature.unwrap_or(usual.temperature),
            top_p: advised.top_p.unwrap_or(usual.top_p),
            top_k: advised.top_k.or(usual.top_k),
            min_p: advised.min_p.unwrap_or(usual.min_p),
            repetition_penalty: advised.repetition_penalty.unwrap_or(usual.repetition_penalty),
            ..usual
        },
        started: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
    }
}

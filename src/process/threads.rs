//! Builds, starts and stops the workers, rings and threads of a process.
//!
//! Thread: the thread that starts the process and becomes `ctl`.

use super::ProcessError;
use super::helpers::Helpers;
use super::model::LoadedModel;
use super::thread_cpus::start_on;
use crate::api::Sampling;
use crate::config::{SchedulingPolicy, ServedModelConfig, WorkerConfig};
use crate::ids::{Role, WorkerId};
use crate::kv::lease::MoverRight;
use crate::kv::region::Region;
use crate::kv::tier::Tier;
use crate::limits::{GRAMMAR_STACK, HTTP_BODY_ADDED, SESSIONS_MAX};
use crate::link::handoff::{EndpointKind, Handoff, TransportCapabilities, WorkerEndpoint};
use crate::link::local_worker::{LocalWorker, Ring};
use crate::model::answer::AnswerStyle;
use crate::model::config::Architecture;
use crate::model::files::ModelFiles;
use crate::model::forward::Forward;
use crate::model::grammar::GrammarCompiler;
use crate::net::Entropy;
use crate::net::Reactor;
use crate::obs::log::event;
use crate::obs::registry as figures;
use crate::sched::channel::{EngineChannel, events_per_turn};
use crate::sched::decode::DecodeWorker;
use crate::sched::engine::{self, Engine, EngineLoop};
use crate::sched::masks::{self, MaskMetrics, MaskWorker};
use crate::sched::messages::EngineCommand;
use crate::sched::mixed::MixedWorker;
use crate::sched::prefill::PrefillWorker;
use crate::sched::stats::WorkerStats;
use crate::sched::worker::{KvMemory, Worker as SchedWorker};
use crate::server::authorization::AccessKeys;
use crate::stdx::event_count::EventCount;
use crate::sys::clock::Clock;
use crate::sys::event::WaitSet;
use crate::transfer::copy_pool::CopyPool;
use crate::transfer::event_loop::Waiter;
use crate::transfer::manager::destination::DestinationManager;
use crate::transfer::manager::source::SourceManager;
use crate::transfer::mover::Mover;
use crate::transfer::mover::destination::DestinationMover;
use crate::transfer::mover::source::SourceMover;
use crate::transfer::pages::PageLists;
use crate::transfer::rings::{Bells, Rings};
use crate::transfer::status::StatusTable;
use crate::transfer::thread_names::MOVER;
use crate::transfer::transport::Memory;
use crate::transfer::transport::rdma::{DataThreads, Rails, Split};
use crate::wire::message::Transport;
use crate::worker::metrics::WorkerMetrics;
use crate::worker::requests::{Placement, RequestTable, ServingConfig};
use crate::worker::routes::{DisaggregationMode, ServerDescription, WorkerRoutes};
use crate::worker::service::{WorkerService, Workers};
use crate::worker::telemetry::{Telemetry, WorkerTelemetry};
use crate::worker::text::TextProcessor;
use crossbeam_channel as channel;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle, Thread};
use std::time::Instant;

/// Idle iterations of an engine before it parks, if it has a core of its own.
const ENGINE_SPINS: u32 = 2000;

/// The clock of an engine.
pub type EngineClock = Box<dyn Fn() -> Instant + Send>;

/// Workers and rings, before the threads start.
pub struct ProcessBuilder {
    members: Vec<WorkerEndpoint<EngineCommand>>,
    workers: Vec<Box<dyn SchedWorker>>,
    mover: Mover,
    waiter: Waiter,
    /// The work of posters and pollers, by NIC.
    splits: Vec<Split>,
    engine_commands: (channel::Sender<EngineCommand>, channel::Receiver<EngineCommand>),
    engine_bell: Arc<EventCount>,
    engine_thread: Arc<OnceLock<Thread>>,
    ctl: Arc<EventCount>,
    clock: Clock,
    registry: figures::Registry,
    watched: Vec<WorkerTelemetry>,
    model_name: String,
}

impl ProcessBuilder {
    /// Creates the rings and a mover, without workers.
    pub fn new(
        loaded: &LoadedModel,
        config: &WorkerConfig,
        ctl: Arc<EventCount>,
        clock: Clock,
    ) -> Result<ProcessBuilder, ProcessError> {
        let (engine_bell, engine_thread) = thread_bell();
        let waiter = Waiter::new(loaded.spin)
            .map_err(|error| ProcessError::Io("cannot park the mover", error))?;
        Ok(ProcessBuilder {
            members: Vec::new(),
            workers: Vec::new(),
            mover: Mover { sources: Vec::new(), destinations: Vec::new() },
            waiter,
            splits: Vec::new(),
            engine_commands: channel::bounded(loaded.slots * 4 + 64),
            engine_bell,
            engine_thread,
            ctl,
            clock,
            registry: figures::Registry::default(),
            watched: Vec::new(),
            model_name: config.model.served_names[0].clone(),
        })
    }

    fn memory(&self, loaded: &LoadedModel) -> Result<Memory, ProcessError> {
        let io = |error| ProcessError::Io("cannot map KV memory", error);
        let bytes = u64::from(loaded.pages) * loaded.layout.page_stride;
        let pages_of_context = loaded.pages_of_context();
        Ok(Memory {
            groups: loaded.groups.counts(),
            region: Arc::new(Region::new(c"baton-kv", bytes as usize).map_err(io)?),
            layout: loaded.layout,
            pages: loaded.pages,
            lists: Arc::new(PageLists::new(loaded.slots, pages_of_context).map_err(io)?),
            counters: Arc::default(),
            copy_pool: CopyPool::default(),
        })
    }

    /// Creates the parts that all roles share.
    fn worker(
        &mut self,
        loaded: &LoadedModel,
    ) -> Result<(WorkerId, Memory, Arc<StatusTable>, LocalWorker<EngineCommand>), ProcessError>
    {
        let id = WorkerId(self.members.len() as u32);
        let memory = self.memory(loaded)?;
        let status = Arc::new(StatusTable::new(loaded.slots));
        let ring = Ring::new(self.engine_commands.0.clone(), self.engine_bell.clone());
        let worker = LocalWorker::new(id, ring, status.clone(), memory.clone());
        Ok((id, memory, status, worker))
    }

    /// Registers the memory with the NICs. If that fails, the worker continues with its other
    /// transports, if there are any.
    fn rails(&self, loaded: &LoadedModel, memory: &Memory) -> Result<Option<Rails>, ProcessError> {
        if loaded.nics.is_empty() {
            return Ok(None);
        }
        // A destination with one group can have pages of one token.
        let targets = match loaded.groups.counts().is_single() {
            true => loaded.sched.context as usize,
            false => loaded.pages_of_context(),
        };
        let rails = Rails::new(&loaded.nics, memory, loaded.slots, targets, loaded.rdma);
        match rails.map(|rails| rails.with_clock(&self.clock)) {
            Ok(rails) => {
                for why in &rails.refused {
                    event!(Warn, "ctl", "NIC not used: KV memory cannot be registered", why = why);
                }
                Ok(Some(rails))
            }
            Err(error) if loaded.transports == [Transport::Rdma] => {
                Err(ProcessError::Io("cannot register KV memory with the NIC", error))
            }
            Err(error) => {
                event!(Warn, "ctl", "RDMA not used: KV memory cannot be registered", why = error);
                Ok(None)
            }
        }
    }

    fn rings<C>(&self, status: &Arc<StatusTable>, memory: &Memory) -> Rings<C> {
        let bells = Bells {
            engine: self.engine_bell.clone(),
            ctl: self.ctl.clone(),
            mover: self.waiter.bell.clone(),
        };
        Rings::new(status, &memory.lists, SESSIONS_MAX, &bells)
    }

    fn watch(
        &mut self,
        role: Role,
        id: WorkerId,
        stats: Arc<WorkerStats>,
        (memory, loaded): (&Memory, &LoadedModel),
    ) {
        let (tally, page_size) = (memory.counters.clone(), memory.layout.page_size);
        let metrics =
            WorkerMetrics::register(&mut self.registry, &self.model_name, role, id.index());
        self.watched.push(WorkerTelemetry {
            role,
            metrics: Arc::new(metrics),
            stats,
            tally,
            page_size,
            groups: memory.groups,
            context: loaded.sched.context,
        });
    }

    /// Adds a mixed worker.
    pub fn add_mixed(&mut self, loaded: &LoadedModel) -> Result<WorkerId, ProcessError> {
        let (id, memory, _, worker) = self.worker(loaded)?;
        let mixed = MixedWorker::new(
            id,
            loaded.sched,
            kv_memory(&memory, loaded),
            tier(loaded)?,
            loaded.slots,
        );
        self.watch(Role::Mixed, id, mixed.stats().clone(), (&memory, loaded));
        self.workers.push(Box::new(mixed));
        self.members.push(WorkerEndpoint { worker, kind: EndpointKind::Mixed, reports: None });
        Ok(id)
    }

    /// Adds a prefill worker.
    pub fn add_prefill(&mut self, loaded: &LoadedModel) -> Result<WorkerId, ProcessError> {
        let (id, memory, status, mut worker) = self.worker(loaded)?;
        let mut rails = self.rails(loaded, &memory)?;
        if let Some(rails) = rails.as_mut().filter(|_| loaded.split) {
            let splits = rails.split(&self.waiter.bell, loaded.spin);
            self.splits.extend(
                splits
                    .map_err(|error| ProcessError::Io("cannot park posters and pollers", error))?,
            );
        }
        worker.rails = rails.map(Arc::new);
        let Rings { links, handle, commands, reports } = self.rings(&status, &memory);
        let right = MoverRight::for_mover_thread();
        self.mover.sources.push(SourceMover::new(links, memory.clone(), SESSIONS_MAX, right));
        let prefill = PrefillWorker::new(id, loaded.sched, kv_memory(&memory, loaded), handle);
        self.watch(Role::Prefill, id, prefill.stats().clone(), (&memory, loaded));
        self.workers.push(Box::new(prefill));
        let identity = loaded.identity(&memory);
        let mut transports = loaded.transports.clone();
        transports.retain(|&transport| transport != Transport::Rdma || worker.rails.is_some());
        let manager = SourceManager::new(
            identity,
            transports,
            loaded.decode_allocation,
            status,
            SESSIONS_MAX,
        );
        let mover = Ring::new(commands, self.waiter.bell.clone());
        let role = EndpointKind::Prefill { manager: Box::new(manager), mover };
        self.members.push(WorkerEndpoint { worker, kind: role, reports: Some(reports) });
        Ok(id)
    }

    /// Adds a decode worker.
    pub fn add_decode(&mut self, loaded: &LoadedModel) -> Result<WorkerId, ProcessError> {
        let (id, mut memory, status, mut worker) = self.worker(loaded)?;
        let plan = &loaded.plan;
        memory.copy_pool = start_on(plan, &plan.copiers, || CopyPool::new(loaded.copy_lanes))
            .map_err(|error| ProcessError::Io("cannot start a copy thread", error))?;
        worker.rails = self.rails(loaded, &memory)?.map(Arc::new);
        let Rings { links, handle, commands, reports } = self.rings(&status, &memory);
        let right = MoverRight::for_mover_thread();
        self.mover.destinations.push(DestinationMover::new(
            links,
            memory.clone(),
            SESSIONS_MAX,
            right,
        ));
        let decode =
            DecodeWorker::new(id, loaded.sched, kv_memory(&memory, loaded), tier(loaded)?, handle);
        self.watch(Role::Decode, id, decode.stats().clone(), (&memory, loaded));
        self.workers.push(Box::new(decode));
        let manager = DestinationManager::new(loaded.identity(&memory), status, SESSIONS_MAX);
        let mover = Ring::new(commands, self.waiter.bell.clone());
        let doorbell = self
            .waiter
            .doorbell
            .duplicate()
            .map_err(|error| ProcessError::Io("cannot duplicate a doorbell", error))?;
        let role = EndpointKind::Decode { manager: Box::new(manager), mover, doorbell };
        self.members.push(WorkerEndpoint { worker, kind: role, reports: Some(reports) });
        Ok(id)
    }

    /// Puts the parts together. `clock` gives the engine's time.
    pub fn assemble(
        mut self,
        loaded: &LoadedModel,
        forward: Box<dyn Forward>,
        ctl: Arc<EventCount>,
        entropy: Entropy,
        clock: EngineClock,
    ) -> (Workers, ThreadParts) {
        let (events, events_in) = channel::bounded(event_ring(loaded.slots * self.members.len()));
        let channel = EngineChannel::new(self.engine_commands.1, events, ctl);
        let (mask_bell, mask_thread) = thread_bell();
        let (masks, mask_worker) = masks::masks(
            (self.members.len(), loaded.slots),
            loaded.sched.vocab as usize,
            (self.engine_bell.clone(), mask_bell.clone()),
            (MaskMetrics::register(&mut self.registry), self.clock),
        );
        let engine = Engine::new(&loaded.sched, self.workers, forward, channel, clock);
        let progress = engine.progress().clone();
        let offer = TransportCapabilities {
            transports: loaded.transports.clone(),
            host: loaded.host,
            data: loaded.data,
            lanes: loaded.tcp_lanes,
        };
        let handoff = Handoff::new(self.members, offer, entropy);
        let metrics = self.watched.iter().map(|watched| watched.metrics.clone()).collect();
        let telemetry = Telemetry::new(self.registry, self.watched);
        let events = events_in;
        let workers = Workers { handoff, metrics, telemetry, events, progress, masks };
        let cores = ThreadParts {
            engine,
            mover: self.mover,
            waiter: self.waiter,
            splits: self.splits,
            engine_bell: self.engine_bell,
            engine_thread: self.engine_thread,
            masks: mask_worker,
            mask_bell,
            mask_thread,
        };
        (workers, cores)
    }
}

/// The parts that the threads of a process's workers run.
pub struct ThreadParts {
    pub(super) engine: Engine,
    pub(super) mover: Mover,
    pub(super) waiter: Waiter,
    pub(super) splits: Vec<Split>,
    pub(super) engine_bell: Arc<EventCount>,
    engine_thread: Arc<OnceLock<Thread>>,
    pub(super) masks: MaskWorker,
    mask_bell: Arc<EventCount>,
    mask_thread: Arc<OnceLock<Thread>>,
}

impl ThreadParts {
    /// The set of descriptors on which the mover parks.
    pub fn wait(&self) -> &Arc<WaitSet> {
        &self.waiter.set
    }
}

/// A bell that unparks a thread, and the place for that thread.
fn thread_bell() -> (Arc<EventCount>, Arc<OnceLock<Thread>>) {
    let place: Arc<OnceLock<Thread>> = Arc::default();
    let unparked = place.clone();
    let bell = EventCount::new(move || {
        if let Some(thread) = unparked.get() {
            thread.unpark();
        }
    });
    (Arc::new(bell), place)
}

/// The loop of the engine's thread.
pub(super) fn engine_loop(loaded: &LoadedModel) -> EngineLoop {
    EngineLoop::new(if loaded.spin { ENGINE_SPINS } else { 0 })
}

/// The threads of a role, or what stands for them.
pub trait RoleThreads: Sized {
    /// Starts them.
    ///
    /// # Errors
    /// A thread cannot be started; the model is lost with it.
    fn start(parts: ThreadParts, loaded: &LoadedModel) -> Result<Self, ProcessError>;

    /// Ends them. Returns the model.
    ///
    /// # Errors
    /// The engine's thread has panicked.
    fn stop(self) -> Result<Box<dyn Forward>, ProcessError>;
}

/// The threads of a process's workers.
pub struct Threads {
    stop: Arc<AtomicBool>,
    bells: Vec<Arc<EventCount>>,
    engine: JoinHandle<Box<dyn Forward>>,
    mover: JoinHandle<()>,
    masks: JoinHandle<()>,
    /// Poster and poller threads of NICs. They are the last field, so they end after the mover.
    _data: DataThreads,
}

impl RoleThreads for Threads {
    fn start(parts: ThreadParts, loaded: &LoadedModel) -> Result<Threads, ProcessError> {
        let ThreadParts { mut engine, mut mover, mut masks, .. } = parts;
        let ThreadParts { waiter, splits, engine_bell, engine_thread, .. } = parts;
        let (mask_bell, mask_thread) = (parts.mask_bell, parts.mask_thread);
        let stop = Arc::new(AtomicBool::new(false));
        let io = |error| ProcessError::Io("cannot start a thread", error);
        let round = engine_loop(loaded);
        let (bell, stopped) = (engine_bell.clone(), stop.clone());
        let plan = &loaded.plan;
        let mut data = DataThreads::default();
        for split in splits {
            // On CPUs near the NIC if any are free.
            let cpus = plan.of_nic(&split.nic);
            start_on(plan, &plan.others, || data.start(split, cpus)).map_err(io)?;
        }
        let builder = thread::Builder::new().name("engine".into());
        let run = move || {
            let _ = engine_thread.set(thread::current());
            engine::run(&mut engine, &bell, &stopped, round);
            engine.into_forward()
        };
        let engine = start_on(plan, &plan.engine, || builder.spawn(run)).map_err(io)?;
        let (mover_bell, stopped) = (waiter.bell.clone(), stop.clone());
        let (run, builder) =
            (move || waiter.run(&mut mover, &stopped), thread::Builder::new().name(MOVER.into()));
        let mover = start_on(plan, &plan.mover, || builder.spawn(run)).map_err(io)?;
        let (bell, stopped) = (mask_bell.clone(), stop.clone());
        let run = move || {
            let _ = mask_thread.set(thread::current());
            masks::run(&mut masks, &bell, &stopped);
        };
        let builder = thread::Builder::new().name("masks".into()).stack_size(GRAMMAR_STACK);
        let masks = start_on(plan, &plan.text, || builder.spawn(run)).map_err(io)?;
        let bells = vec![engine_bell, mover_bell, mask_bell];
        Ok(Threads { stop, bells, engine, mover, masks, _data: data })
    }

    fn stop(self) -> Result<Box<dyn Forward>, ProcessError> {
        self.stop.store(true, Ordering::Release);
        for bell in &self.bells {
            bell.notify();
        }
        self.engine.thread().unpark();
        self.masks.thread().unpark();
        let forward = self.engine.join();
        // If the mover has panicked, its sessions are lost, too.
        let _ = self.mover.join();
        let _ = self.masks.join();
        let panicked = |_| io::Error::other("a thread panicked");
        forward.map_err(panicked).map_err(|error| ProcessError::Io("the engine has ended", error))
    }
}

/// The service that answers the clients of a process's workers.
pub fn build_service(
    reactor: Reactor,
    config: &WorkerConfig,
    files: ModelFiles,
    loaded: &LoadedModel,
    workers: Workers,
    (placement, mode): (Placement, DisaggregationMode),
    (ctl, helpers): (Arc<EventCount>, &dyn Helpers),
) -> Result<WorkerService, ProcessError> {
    let io = |error| ProcessError::Io("cannot start a thread", error);
    let added = if mode.handoff.is_some() { HTTP_BODY_ADDED } else { 0 };
    let about = about(config, &files, loaded, mode, reactor.since_epoch().as_secs());
    let (tokenizer, chat, context) =
        (files.tokenizer, files.chat_template.ok(), loaded.sched.context as usize);
    let grammars = GrammarCompiler::new(loaded.sched.vocab as usize, &files.config.eos);
    let clock = reactor.clock();
    let ServedModelConfig { tool_call_parser, reasoning_parser, trusts_templates, .. } =
        config.model;
    let style = AnswerStyle::new(chat.as_ref(), &tokenizer, tool_call_parser, reasoning_parser);
    let text = Arc::new(TextProcessor {
        tokenizer,
        chat,
        context,
        clock,
        grammars,
        style,
        trusts_templates,
    });
    let queue = helpers.start_tokeniser(text.clone(), ctl.clone()).map_err(io)?;
    let sched = &loaded.sched;
    let terms = ServingConfig {
        names: config.model.served_names.clone(),
        choices: sched.max_running + sched.max_queued,
        eos: files.config.eos,
        placement,
        has_priorities: config.scheduling == SchedulingPolicy::Priority,
    };
    let Workers { handoff, metrics, telemetry, events, progress, masks } = workers;
    let requests = RequestTable::new(terms, text, queue, metrics, masks);
    let routes = WorkerRoutes::new(about, AccessKeys::of(&config.server), telemetry);
    let address = config.server.address();
    let now = reactor.now();
    let service = WorkerService::new(
        reactor,
        address,
        (requests, handoff),
        routes,
        (events, progress),
        ctl,
        now,
    );
    let service =
        service.map_err(|error| ProcessError::Listen { flag: "--port", address, error })?;
    Ok(service.within(&config.server, added))
}

/// Logs that the process is ready, and the duration of the start.
pub fn announce_ready(service: &WorkerService, config: &WorkerConfig, begun: Instant) {
    event!(
        Info,
        "ctl",
        "ready",
        address = service.address().map_or("?".into(), |address| address.to_string()),
        model = config.model.served_names[0],
        seconds = format!("{:.2}", begun.elapsed().as_secs_f64()),
    );
}

/// Capacity of the event ring: the events of two steps, so that `ctl` can be one step behind.
fn event_ring(slots: usize) -> usize {
    2 * events_per_turn(slots)
}

fn kv_memory(memory: &Memory, loaded: &LoadedModel) -> KvMemory {
    let (region, groups) = (memory.region.clone(), loaded.groups.clone());
    KvMemory { region, layout: memory.layout, groups, pages: memory.pages }
}

/// The memory for the KV of retracted requests.
fn tier(loaded: &LoadedModel) -> Result<Tier, ProcessError> {
    Tier::new(loaded.tier_pages, &loaded.layout)
        .map_err(|error| ProcessError::Io("cannot map memory for retracted requests", error))
}

fn about(
    config: &WorkerConfig,
    files: &ModelFiles,
    loaded: &LoadedModel,
    mode: DisaggregationMode,
    started: u64,
) -> ServerDescription {
    let (model_type, architecture) = match files.config.architecture {
        Architecture::Llama => ("llama", "LlamaForCausalLM"),
        Architecture::Mixtral => ("mixtral", "MixtralForCausalLM"),
        Architecture::Qwen2 => ("qwen2", "Qwen2ForCausalLM"),
        Architecture::Qwen2Moe => ("qwen2_moe", "Qwen2MoeForCausalLM"),
        Architecture::Qwen3 => ("qwen3", "Qwen3ForCausalLM"),
        Architecture::Qwen3Moe => ("qwen3_moe", "Qwen3MoeForCausalLM"),
        Architecture::Gemma3 => ("gemma3_text", "Gemma3ForCausalLM"),
        Architecture::Mamba2 => ("mamba2", "Mamba2ForCausalLM"),
        Architecture::FalconH1 => ("falcon_h1", "FalconH1ForCausalLM"),
        Architecture::Qwen3Next => ("qwen3_next", "Qwen3NextForCausalLM"),
    };
    let (usual, advised) = (Sampling::default(), &files.sampling);
    ServerDescription {
        model_path: config.model.path.display().to_string(),
        model_type,
        architectures: vec![architecture.into()],
        mode: mode.name,
        bootstrap_port: mode.bootstrap_port,
        handoff: mode.handoff,
        pool_tokens: loaded.pool_tokens(),
        page_size: loaded.sched.page_size as usize,
        max_running: loaded.sched.max_running,
        sampling: Sampling {
            temperature: advised.temperature.unwrap_or(usual.temperature),
            top_p: advised.top_p.unwrap_or(usual.top_p),
            top_k: advised.top_k.or(usual.top_k),
            min_p: advised.min_p.unwrap_or(usual.min_p),
            repetition_penalty: advised.repetition_penalty.unwrap_or(usual.repetition_penalty),
            ..usual
        },
        started,
    }
}

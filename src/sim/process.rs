//! A process of the cluster: production's service, and the work of its other threads. Each is
//! started by a command line.
//!
//! Invariants: one turn steps the service, the tokeniser, the engine and the mover. The seed draws
//! their order. A thread that parks takes no step before its wake-up. The time of an engine's
//! step passes before its next one.

use super::cancels::CancelWatch;
use super::fleet::HostSite;
use super::model::{END, LAYERS, PseudoModel, VOCAB, Watch, Windows};
use super::names::{self, NameServer, SimNames};
use super::operator::PATIENCE;
use super::shadow::PoolShadow;
use super::stages::StageWatch;
use super::workload::{ANSWER_MAX, PROMPT_MAX};
use crate::cli::{self, HostInfo, Invocation};
use crate::config::hub::HubVariables;
use crate::config::secret::Secret;
use crate::config::{ClusterWorkerConfig, RoleConfig, RouterConfig};
use crate::ids::Role;
use crate::kv::pool::PagePool;
use crate::limits::{DRAIN_DONE_TIME, TOKENISE_QUEUE_MAX};
use crate::model::chat::ChatError;
use crate::model::config::{Architecture, ModelConfig, RopeScaling, WindowConfig};
use crate::model::files::ModelFiles;
use crate::model::fingerprint::ModelFingerprint;
use crate::model::hf::config::SamplingDefaults;
use crate::model::tensor::{TensorType, TensorView};
use crate::model::tokenizer::Tokenizer;
use crate::model::weights::{LoadError, WeightSource};
use crate::net::resolver::Resolver;
use crate::net::{MemoryKernel, Reactor, Signal};
use crate::process::cpu_plan::CpuPlan;
use crate::process::helpers::Helpers;
use crate::process::model::LoadedModel;
use crate::process::stepped_threads::SteppedThreads;
use crate::process::threads::{EngineClock, RoleThreads};
use crate::process::worker::{self, WorkerProcess};
use crate::process::{self, ProcessError, router};
use crate::router::RouterService;
use crate::server::drain::DrainOutcome;
use crate::stdx::event_count::EventCount;
use crate::stdx::event_queue::Nanos;
use crate::stdx::rng::{Rng, scramble};
use crate::sys::file_access::FileAccess;
use crate::transfer::transport::rdma::Nic;
use crate::wire::message::HostId;
use crate::worker::service::{RunOutcome, WorkerService};
use crate::worker::text::{TextProcessor, TextQueue, TextWorker};
use std::io;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The longest role change: requests may take the patience of the operator, then destinations
/// confirm. One more second is for the turns.
const ROLE_CHANGE_MAX: Duration =
    Duration::from_secs(PATIENCE.as_secs() + DRAIN_DONE_TIME.as_secs() + 1);

/// A process of the cluster.
pub struct SimProcess {
    kernel: MemoryKernel,
    base: Instant,
    until: Instant,
    names: SimNames,
    service: Service,
}

enum Service {
    Router(Box<RouterService>),
    Worker(Box<Worker>),
}

struct Worker {
    process: WorkerProcess,
    service: WorkerService,
    /// `None` only while the role changes.
    threads: Option<SteppedThreads>,
    text: Vec<TextWorker>,
    watch: Arc<Watch>,
    base: Instant,
    /// Since when the role changes.
    changes_since: Option<Instant>,
    /// What destinations had not confirmed when the worker left its role or drained.
    unconfirmed: Option<String>,
    /// The engine computes until this time.
    busy_until: Nanos,
    cancels: CancelWatch,
    stages: StageWatch,
    shadow: PoolShadow,
    /// Whether the mover, a poster or a poller took a step in the last turn.
    has_moved: bool,
}

/// The parts of a worker that a turn steps.
#[derive(Clone, Copy)]
enum Part {
    Ctl,
    Text,
    Engine,
    Mover,
}

impl SimProcess {
    /// Starts the process with this command line and these files at this site. Simulated time
    /// starts at `base`.
    ///
    /// # Errors
    /// The process refuses to start.
    pub fn start(
        line: &[String],
        kernel: MemoryKernel,
        files: FileAccess,
        site: (HostSite, Vec<Nic>),
        base: Instant,
        server: &NameServer,
    ) -> Result<SimProcess, String> {
        let names = SimNames::new(server.clone(), kernel.clone());
        let reactor = Reactor::in_memory(kernel.clone()).map_err(|error| error.to_string())?;
        let surroundings = HostInfo {
            cpus: vec![0, 1],
            parallelism: 2,
            log_level: None,
            files,
            hub: HubVariables::default(),
        };
        let (config, files) = (parse(line, &surroundings)?, &surroundings.files);
        let service = match config {
            RoleConfig::Router(config) => {
                let service = start_router(&config, reactor, files, &names);
                Service::Router(Box::new(service.map_err(|error| error.to_string())?))
            }
            RoleConfig::Prefill(config) => {
                start_worker(config, Role::Prefill, (reactor, files), site, base, &names)?
            }
            RoleConfig::Decode(config) => {
                start_worker(config, Role::Decode, (reactor, files), site, base, &names)?
            }
            RoleConfig::Serve(_) => return Err("`baton serve` is not played".into()),
        };
        let until = kernel.now();
        Ok(SimProcess { until, kernel, base, names, service })
    }

    /// Sends SIGTERM to the process.
    pub fn terminate(&self) {
        self.kernel.raise(Signal::Terminate);
    }

    /// Takes a turn. `has_ready_lane`: a lane has a reason to wake the mover. Returns the time of
    /// the next turn, unless something comes before; `None` if the process has ended.
    ///
    /// # Errors
    /// The service fails.
    pub fn turn(
        &mut self,
        now: Nanos,
        has_ready_lane: bool,
        dice: &mut Rng,
    ) -> Result<Option<Nanos>, String> {
        self.kernel.set_now(self.base + Duration::from_nanos(now));
        let again = match &mut self.service {
            Service::Router(router) => {
                match router.finish_wait(self.until).map_err(|error| error.to_string())? {
                    None => {}
                    Some(DrainOutcome::Drained) => return Ok(None),
                    Some(other) => return Err(format!("the router has ended: {other:?}")),
                }
                self.until = router.prepare_wait();
                None
            }
            Service::Worker(worker) => {
                worker.has_moved = false;
                let mut again = None;
                for part in Part::in_order_of(dice) {
                    let soon = match part {
                        Part::Ctl if self.kernel.now() < self.until && !self.kernel.is_ready() => {
                            None
                        }
                        Part::Ctl => {
                            if worker.turn_ctl(self.until)?.is_break() {
                                return Ok(None);
                            }
                            self.until = worker.service.prepare_wait();
                            None
                        }
                        Part::Text => worker.text.iter().any(TextWorker::step).then_some(now),
                        Part::Engine => Some(worker.turn_engine(now)),
                        Part::Mover => worker.turn_mover(has_ready_lane, dice)?.then_some(now),
                    };
                    again = soon.into_iter().chain(again).min();
                }
                again
            }
        };
        let until = self.until.saturating_duration_since(self.base).as_nanos() as Nanos;
        let again = if self.names.step() { Some(now) } else { again };
        let again = if self.is_woken() { now } else { again.map_or(until, |at| at.min(until)) };
        Ok(Some(again))
    }

    /// Whether the last turn can have rung the doorbell of another process of its machine.
    pub fn can_have_rung(&self) -> bool {
        matches!(&self.service, Service::Worker(worker) if worker.has_moved)
    }

    /// Whether a thread of the process has been woken.
    pub fn is_woken(&self) -> bool {
        let is_woken = match &self.service {
            Service::Router(_) => false,
            Service::Worker(worker) => {
                let busy_until = self.base + Duration::from_nanos(worker.busy_until);
                let is_computing = self.kernel.now() < busy_until;
                worker.threads.as_ref().is_some_and(|threads| {
                    threads.is_data_woken() || (!is_computing && threads.is_engine_woken())
                })
            }
        };
        is_woken || self.kernel.is_ready()
    }

    /// The cluster keys of a worker.
    pub fn cluster_keys(&self) -> Option<&[Secret]> {
        match &self.service {
            Service::Router(_) => None,
            Service::Worker(worker) => Some(worker.process.cluster_keys(&worker.service)),
        }
    }

    /// Takes the prompts of the transfers to this process that have begun.
    pub fn take_begun_transfers(&mut self) -> Vec<Vec<u32>> {
        match &mut self.service {
            Service::Router(_) => Vec::new(),
            Service::Worker(worker) => worker.shadow.take_begun(),
        }
    }

    /// Lets the engine take no step until this time.
    pub fn hang_engine(&mut self, until: Nanos) {
        if let Service::Worker(worker) = &mut self.service {
            worker.busy_until = worker.busy_until.max(until);
        }
    }

    /// Checks a NIC's write of `bytes` bytes at this address.
    ///
    /// # Errors
    /// It touches a page without a lease.
    pub fn check_write(&self, address: u64, bytes: u64) -> Result<(), String> {
        let Service::Worker(worker) = &self.service else { return Ok(()) };
        let threads = worker.threads.as_ref().expect("a role has threads");
        worker.shadow.check_write(threads, address, bytes)
    }

    /// Whether the process holds nothing of any request.
    ///
    /// # Errors
    /// What it holds.
    pub fn check_idle(&self) -> Result<(), String> {
        match &self.service {
            Service::Router(router) => router.check_idle(),
            Service::Worker(worker) => {
                worker.check_idle().and_then(|()| worker.service.check_calls())?;
                worker.service.check_confirmed()
            }
        }
    }

    /// Takes what destinations had not confirmed when the worker left its role or drained.
    pub fn take_unconfirmed(&mut self) -> Option<String> {
        match &mut self.service {
            Service::Router(_) => None,
            Service::Worker(worker) => worker.unconfirmed.take(),
        }
    }

    /// Checks the tables of the process.
    ///
    /// # Panics
    /// A table is inconsistent.
    pub fn check_invariants(&self) {
        match &self.service {
            Service::Router(router) => router.invariants(),
            Service::Worker(worker) => worker.check_invariants(),
        }
    }
}

impl Part {
    /// All parts, in a random order.
    fn in_order_of(dice: &mut Rng) -> [Part; 4] {
        let mut parts = [Part::Ctl, Part::Text, Part::Engine, Part::Mover];
        for last in (1..parts.len()).rev() {
            parts.swap(last, dice.range_u64(0, last as u64) as usize);
        }
        parts
    }
}

impl Worker {
    /// Steps `ctl`. Breaks if the process has ended.
    fn turn_ctl(&mut self, until: Instant) -> Result<ControlFlow<()>, String> {
        let before = self.service.running_in_role_change();
        let outcome = self.service.finish_wait(until).map_err(|error| error.to_string())?;
        let now = self.service.reactor().now();
        self.check_role_change(before, now.saturating_duration_since(until))?;
        let legs = self.service.legs_without_request();
        let threads = self.threads.as_ref().expect("a role has threads");
        self.cancels.check(legs, threads, now)?;
        self.stages.check(&mut self.service, now)?;
        match outcome {
            None => Ok(ControlFlow::Continue(())),
            Some(RunOutcome::Ended(DrainOutcome::Drained)) => {
                let held = self.check_idle();
                held.map_err(|held| format!("the worker has drained and holds {held}"))?;
                self.unconfirmed = self.service.check_confirmed().err();
                Ok(ControlFlow::Break(()))
            }
            Some(RunOutcome::ChangeRole(to)) => {
                let held = self.service.check_role_idle().and_then(|()| self.check_pages());
                held.map_err(|held| format!("the worker leaves its role and holds {held}"))?;
                self.unconfirmed = self.service.check_confirmed().err();
                self.change_role(to).map_err(|error| error.to_string())?;
                Ok(ControlFlow::Continue(()))
            }
            Some(RunOutcome::KeepRole) => {
                self.process.register(&mut self.service).map_err(|error| error.to_string())?;
                Ok(ControlFlow::Continue(()))
            }
            Some(other) => Err(format!("the worker has ended: {other:?}")),
        }
    }

    /// A worker that changes its role takes no request, and gives the change up in time. The worker
    /// stood still for `pause`, which does not count.
    fn check_role_change(&mut self, before: Option<usize>, pause: Duration) -> Result<(), String> {
        let Some(running) = self.service.running_in_role_change() else {
            self.changes_since = None;
            return Ok(());
        };
        if before.is_some_and(|before| running > before) {
            return Err("the worker changes its role and takes a request".into());
        }
        let now = self.service.reactor().now();
        let since = self.changes_since.map_or(now, |since| since + pause);
        self.changes_since = Some(since);
        match now - since > ROLE_CHANGE_MAX {
            true => Err("the worker does not give its role change up".into()),
            false => Ok(()),
        }
    }

    fn change_role(&mut self, to: Role) -> Result<(), ProcessError> {
        let threads = self.threads.take().expect("a role has threads");
        let clock = engine_clock(self.base, &self.watch);
        let threads = self.process.change_role(&mut self.service, to, threads, clock)?;
        self.threads = Some(threads);
        self.cancels = CancelWatch::default();
        self.stages = StageWatch::new(self.base, &mut self.service, &self.watch);
        Ok(())
    }

    /// Steps the engine, unless it still computes. Returns the time of its next step.
    fn turn_engine(&mut self, now: Nanos) -> Nanos {
        if now < self.busy_until {
            return self.busy_until;
        }
        self.watch.now_ns.store(now, Ordering::Relaxed);
        let threads = self.threads.as_mut().expect("a role has threads");
        if !scramble(now).is_multiple_of(LATE_MASKS) {
            threads.step_masks();
        }
        let before = (self.stages.waiting(), now);
        let parks_until = threads.step_engine(self.base + Duration::from_nanos(now));
        self.stages.note_step(before, &self.service, threads.engine_events());
        self.busy_until = self.watch.now_ns.load(Ordering::Relaxed);
        match parks_until {
            Some(until) => (until - self.base).as_nanos() as Nanos,
            None => self.busy_until,
        }
    }

    /// Steps the mover a few times. Returns whether it goes on.
    ///
    /// # Errors
    /// It has written to a page without a lease.
    fn turn_mover(&mut self, mut has_ready_lane: bool, dice: &mut Rng) -> Result<bool, String> {
        let threads = self.threads.as_mut().expect("a role has threads");
        if !has_ready_lane && threads.does_data_stay_parked() {
            return Ok(false);
        }
        self.has_moved = true;
        loop {
            self.shadow.copy(threads);
            let do_nics_park = threads.step_nics();
            let is_parked = threads.step_mover(has_ready_lane);
            self.shadow.compare(threads)?;
            if is_parked && do_nics_park {
                return Ok(false);
            }
            // A lane that is ready wakes the mover once in a turn of the process.
            has_ready_lane = false;
            if dice.one_in(3) {
                return Ok(true);
            }
        }
    }

    fn check_idle(&self) -> Result<(), String> {
        self.service.check_idle()?;
        self.check_pages()
    }

    fn check_pages(&self) -> Result<(), String> {
        let threads = self.threads.as_ref().expect("a role has threads");
        let held = threads.pools().map(PagePool::counts).find(|counts| counts.held() > 0);
        held.map_or(Ok(()), |counts| Err(format!("pages: {counts:?}")))
    }

    fn check_invariants(&self) {
        self.service.invariants();
        let threads = self.threads.as_ref().expect("a role has threads");
        threads.pools().for_each(PagePool::invariants);
    }
}

fn parse(line: &[String], surroundings: &HostInfo) -> Result<RoleConfig, String> {
    match cli::parse(line, surroundings) {
        Ok(Invocation::Run { command, .. }) => Ok(*command),
        Ok(_) => Err("not a process".into()),
        Err(error) => Err(error.to_string()),
    }
}

fn start_router(
    config: &RouterConfig,
    reactor: Reactor,
    files: &FileAccess,
    names: &SimNames,
) -> Result<RouterService, ProcessError> {
    let waker = reactor.waker();
    let start_names = || {
        let waker = waker.clone();
        Ok(names.start(move || waker.wake()))
    };
    let keys = &config.cluster_keys;
    let (_, reload) = process::read_secrets(&config.server, keys, files, reactor.now())?;
    let targets = router::targets(config, names::find)?;
    router::build_service(config, reactor, start_names, (None, reload), targets)
}

/// In one of so many turns of the engine, no mask is computed before.
const LATE_MASKS: u64 = 3;

/// Helpers that a turn steps.
struct SteppedHelpers {
    text: Arc<Mutex<Vec<TextWorker>>>,
    names: SimNames,
}

impl Helpers for SteppedHelpers {
    fn start_resolver(&self, ctl: Arc<EventCount>) -> io::Result<Resolver> {
        Ok(self.names.start(move || ctl.notify()))
    }

    fn start_tokeniser(
        &self,
        text: Arc<TextProcessor>,
        ctl: Arc<EventCount>,
    ) -> io::Result<TextQueue> {
        let (queue, workers) = TextQueue::stepped(text, TOKENISE_QUEUE_MAX, ctl);
        self.text.lock().expect("no panic while locked").extend(workers);
        Ok(queue)
    }
}

fn start_worker(
    config: ClusterWorkerConfig,
    role: Role,
    (reactor, key_files): (Reactor, &FileAccess),
    (site, nics): (HostSite, Vec<Nic>),
    base: Instant,
    names: &SimNames,
) -> Result<Service, String> {
    let (server, keys) = (&config.worker.server, &config.handoff.cluster_keys);
    let secrets = process::read_secrets(server, keys, key_files, reactor.now());
    let (credentials, reload) = secrets.map_err(|error| error.to_string())?;
    let files = model_files(site.layers.windows).map_err(|error| error.to_string())?;
    let plan = CpuPlan::shared(vec![0], 1, false);
    let transports = worker::transports(config.handoff.transfer, &nics);
    let (chunks, retraction) = (config.chunks, config.retraction);
    let place = (HostId([site.machine; 16]), plan);
    let derived =
        LoadedModel::derive(&files, &config.worker, chunks, retraction, transports, place);
    let mut loaded = derived.map_err(|error| error.to_string())?;
    (loaded.nics, loaded.rdma, loaded.tcp_lanes) = (nics, site.rdma, site.tcp_lanes);
    loaded.groups = site.layers.groups(loaded.sched.page_size);
    loaded.sched.groups = loaded.groups.counts();
    let counts = loaded.groups.counts();
    let groups = counts.pages(1, 1);
    (loaded.pages, loaded.tier_pages) = (groups * site.pages, groups * site.tier_pages);
    loaded.sched.checkpoint_pages = counts.state_pages * site.checkpoints;
    loaded.sched.checkpoint_tokens = loaded.sched.page_size;
    loaded.sched.largest_page = loaded.sched.page_size;
    let watch = Arc::new(Watch { token_ns: AtomicU64::new(site.token), ..Watch::default() });
    let forward = PseudoModel::new(watch.clone(), loaded.sched.batch_limits().logits, site.layers);
    let waker = reactor.waker();
    let ctl = Arc::new(EventCount::new(move || waker.wake()));
    let text = Arc::default();
    let helpers = SteppedHelpers { text: Arc::clone(&text), names: names.clone() };
    let groups = loaded.groups.clone();
    let mut process = WorkerProcess::new(Arc::new(config), role, loaded, ctl, Box::new(helpers));
    let built = process.build(reactor, files, Box::new(forward), engine_clock(base, &watch));
    let (mut service, cores) = built.map_err(|error| error.to_string())?;
    let installed = process::install_secrets(&mut service, credentials, reload);
    installed.map_err(|error| error.to_string())?;
    let text = std::mem::take(&mut *text.lock().expect("no panic while locked"));
    let threads = SteppedThreads::start(cores, process.loaded());
    let threads = Some(threads.map_err(|error| error.to_string())?);
    let stages = StageWatch::new(base, &mut service, &watch);
    Ok(Service::Worker(Box::new(Worker {
        process,
        service,
        threads,
        text,
        watch,
        base,
        changes_since: None,
        unconfirmed: None,
        busy_until: 0,
        cancels: CancelWatch::default(),
        stages,
        shadow: PoolShadow::new(groups),
        has_moved: false,
    })))
}

/// The clock of the engine: the model moves it forward as it computes.
fn engine_clock(base: Instant, watch: &Arc<Watch>) -> EngineClock {
    let watch = watch.clone();
    Box::new(move || base + Duration::from_nanos(watch.now_ns.load(Ordering::Relaxed)))
}

/// The files of the pseudo-model with these windows. It has no weights.
fn model_files(windows: Windows) -> Result<ModelFiles, LoadError> {
    struct NoWeights;
    impl WeightSource for NoWeights {
        fn tensor(&self, _: &str) -> Result<Option<TensorView<'_>>, LoadError> {
            Ok(None)
        }

        fn describe(&self) -> String {
            "the pseudo-model".into()
        }
    }
    let config = ModelConfig {
        architecture: Architecture::Llama,
        hidden: 2,
        layers: LAYERS as usize,
        heads: 1,
        kv_heads: 1,
        head_dim: 2,
        intermediate: 2,
        vocab: VOCAB as usize,
        context: (PROMPT_MAX + ANSWER_MAX) as usize,
        norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::None,
        tied_head: true,
        attention_bias: false,
        output_bias: false,
        mlp_bias: false,
        bos: None,
        eos: vec![END],
        experts: None,
        window: windows.iter().flatten().next().map(|&tokens| WindowConfig {
            tokens,
            full_layers: (0..windows.len()).filter(|&layer| windows[layer].is_none()).collect(),
        }),
        gemma: None,
        mamba: None,
        multipliers: None,
        delta: None,
    };
    let tokenizer = Tokenizer::of_bytes(config.vocab, Path::new("the pseudo-model"))?;
    let fingerprint = ModelFingerprint::new(&config, &NoWeights, &tokenizer, None)?;
    Ok(ModelFiles {
        config,
        weights: Box::new(NoWeights),
        tokenizer,
        chat_template: Err(ChatError::Missing),
        sampling: SamplingDefaults::default(),
        checkpoint: TensorType::F32,
        file_bytes: 0,
        fingerprint,
    })
}

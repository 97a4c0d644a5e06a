//! A process of the cluster: production's service, and the work of its other threads. Each is
//! started by a command line.
//!
//! Invariant: one turn steps the service, the tokeniser, the engine and the mover, in an order that
//! the seed draws. The time of an engine's step passes before its next one.

use crate::cli::{self, HostInfo, Invocation};
use crate::config::{ClusterWorkerConfig, RoleConfig, RouterConfig};
use crate::ids::Role;
use crate::limits::TOKENISE_QUEUE_MAX;
use crate::model::chat::ChatError;
use crate::model::config::{Architecture, ModelConfig, RopeScaling};
use crate::model::fingerprint::ModelFingerprint;
use crate::model::hf::config::SamplingDefaults;
use crate::model::open::ModelFiles;
use crate::model::tensor::{TensorType, TensorView};
use crate::model::tokenizer::Tokenizer;
use crate::model::weights::{LoadError, WeightSource};
use crate::net::resolver::Resolver;
use crate::net::{MemoryKernel, Reactor, Signal};
use crate::process::cpu_plan::CpuPlan;
use crate::process::helpers::Helpers;
use crate::process::model::LoadedModel;
use crate::process::threads::Cores;
use crate::process::worker::WorkerProcess;
use crate::process::{RoleError, router};
use crate::router::RouterService;
use crate::sched::worker::Activity;
use crate::server::drain::DrainOutcome;
use crate::sim::model::{LAYERS, PseudoModel, VOCAB, Watch};
use crate::sim::plan::{ANSWER_MAX, PROMPT_MAX};
use crate::stdx::event_count::EventCount;
use crate::stdx::event_queue::{MICRO, MILLI, Nanos};
use crate::stdx::rng::Rng;
use crate::transfer::event_loop::LoopTask;
use crate::wire::message::Transport;
use crate::worker::service::{RunOutcome, WorkerService};
use crate::worker::text::{TextProcessor, TextQueue, TextWorker};
use std::io;
use std::net::IpAddr;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Time of one token of a batch.
const TOKEN: Nanos = 100 * MICRO;
/// Time until an engine with waiting requests looks again, as in production.
const WAITING: Nanos = MILLI;

/// A process of the cluster.
pub struct ServiceProcess {
    kernel: MemoryKernel,
    base: Instant,
    until: Instant,
    service: Service,
}

enum Service {
    Router(Box<RouterService>),
    Worker(Box<Worker>),
}

struct Worker {
    service: WorkerService,
    cores: Cores,
    text: Vec<TextWorker>,
    watch: Arc<Watch>,
    /// The engine computes until this time.
    busy_until: Nanos,
}

/// The parts of a worker that a turn steps.
#[derive(Clone, Copy)]
enum Part {
    Ctl,
    Text,
    Engine,
    Mover,
}

impl ServiceProcess {
    /// Starts the process with this command line. `base` is the start of simulated time.
    ///
    /// # Errors
    /// The process refuses to start.
    pub fn start(
        line: &[String],
        kernel: MemoryKernel,
        base: Instant,
    ) -> Result<ServiceProcess, String> {
        let reactor = Reactor::in_memory(kernel.clone()).map_err(|error| error.to_string())?;
        let service = match parse(line)? {
            RoleConfig::Router(config) => {
                let service = start_router(&config, reactor).map_err(|error| error.to_string())?;
                Service::Router(Box::new(service))
            }
            RoleConfig::Prefill(config) => start_worker(config, Role::Prefill, reactor, base)?,
            RoleConfig::Decode(config) => start_worker(config, Role::Decode, reactor, base)?,
            RoleConfig::Serve(_) => return Err("`baton serve` is not played".into()),
        };
        let until = kernel.now();
        Ok(ServiceProcess { until, kernel, base, service })
    }

    /// Sends SIGTERM to the process.
    pub fn terminate(&self) {
        self.kernel.raise(Signal::Terminate);
    }

    /// Takes a turn. Returns the time of the next one, unless something comes before; `None` if the
    /// process has ended.
    ///
    /// # Errors
    /// The service fails.
    pub fn turn(&mut self, now: Nanos, dice: &mut Rng) -> Result<Option<Nanos>, String> {
        self.kernel.set_now(self.base + Duration::from_nanos(now));
        let (until, base) = (self.until, self.base);
        let again = match &mut self.service {
            Service::Router(router) => {
                if router.finish_wait(until).map_err(|error| error.to_string())?.is_some() {
                    return Ok(None);
                }
                self.until = router.prepare_wait();
                None
            }
            Service::Worker(worker) => match worker.turn(now, until, dice)? {
                ControlFlow::Continue(again) => {
                    self.until = worker.service.prepare_wait();
                    again
                }
                ControlFlow::Break(()) => return Ok(None),
            },
        };
        if self.kernel.is_ready() {
            return Ok(Some(now));
        }
        let until = self.until.saturating_duration_since(base).as_nanos() as Nanos;
        Ok(Some(again.map_or(until, |again| again.min(until))))
    }

    /// Whether the process holds nothing of any request.
    ///
    /// # Errors
    /// What it holds.
    pub fn is_idle_and_empty(&self) -> Result<(), String> {
        match &self.service {
            Service::Router(router) => router.is_idle_and_empty(),
            Service::Worker(worker) => worker.service.is_idle_and_empty(),
        }
    }

    /// Checks the tables of the process.
    ///
    /// # Panics
    /// A table is inconsistent.
    pub fn check_invariants(&self) {
        match &self.service {
            Service::Router(router) => router.invariants(),
            Service::Worker(worker) => worker.service.invariants(),
        }
    }
}

impl Worker {
    /// Steps all parts in a random order. Returns when there is more to do, if anything is known,
    /// or that the process has ended.
    fn turn(
        &mut self,
        now: Nanos,
        until: Instant,
        dice: &mut Rng,
    ) -> Result<ControlFlow<(), Option<Nanos>>, String> {
        let mut parts = [Part::Ctl, Part::Text, Part::Engine, Part::Mover];
        for last in (1..parts.len()).rev() {
            parts.swap(last, dice.range_u64(0, last as u64) as usize);
        }
        let mut again: Option<Nanos> = None;
        let mut soon = |at: Nanos| again = Some(again.map_or(at, |again| again.min(at)));
        for part in parts {
            match part {
                Part::Ctl => {
                    let ended =
                        self.service.finish_wait(until).map_err(|error| error.to_string())?;
                    match ended {
                        None => {}
                        Some(RunOutcome::Ended(DrainOutcome::Drained)) => {
                            return Ok(ControlFlow::Break(()));
                        }
                        Some(other) => return Err(format!("the worker has ended: {other:?}")),
                    }
                }
                Part::Text => {
                    if self.text.iter().any(TextWorker::step) {
                        soon(now);
                    }
                }
                Part::Engine if now < self.busy_until => soon(self.busy_until),
                Part::Engine => {
                    self.watch.now_ns.store(now, Ordering::Relaxed);
                    match self.cores.engine.step(self.cores.engine.now()) {
                        Activity::Busy => {
                            self.busy_until = self.watch.now_ns.load(Ordering::Relaxed);
                            soon(self.busy_until);
                        }
                        Activity::Waiting => soon(now + WAITING),
                        Activity::Idle => {}
                    }
                }
                Part::Mover => {
                    if self.cores.mover.step() {
                        soon(now);
                    }
                }
            }
        }
        Ok(ControlFlow::Continue(again))
    }
}

fn parse(line: &[String]) -> Result<RoleConfig, String> {
    let surroundings = HostInfo { cpus: vec![0, 1], parallelism: 2, log_level: None };
    match cli::parse(line, &surroundings) {
        Ok(Invocation::Run { command, .. }) => Ok(*command),
        Ok(_) => Err("not a process".into()),
        Err(error) => Err(error.to_string()),
    }
}

fn start_router(config: &RouterConfig, reactor: Reactor) -> Result<RouterService, RoleError> {
    let (names, _) = Resolver::stepped(no_names, || {});
    router::build_service(config, reactor, names, None, router::targets(config)?)
}

/// Hosts are addresses.
fn no_names(_: &str) -> io::Result<Vec<IpAddr>> {
    Ok(Vec::new())
}

/// Helpers that a turn steps.
#[derive(Default)]
struct SteppedHelpers(Arc<Mutex<Vec<TextWorker>>>);

impl Helpers for SteppedHelpers {
    fn start_resolver(&self, ctl: Arc<EventCount>) -> io::Result<Resolver> {
        Ok(Resolver::stepped(no_names, move || ctl.notify()).0)
    }

    fn start_tokeniser(
        &self,
        text: Arc<TextProcessor>,
        ctl: Arc<EventCount>,
    ) -> io::Result<TextQueue> {
        let (queue, workers) = TextQueue::stepped(text, TOKENISE_QUEUE_MAX, ctl);
        self.0.lock().expect("no panic while locked").extend(workers);
        Ok(queue)
    }
}

fn start_worker(
    config: ClusterWorkerConfig,
    role: Role,
    reactor: Reactor,
    base: Instant,
) -> Result<Service, String> {
    let files = model_files().map_err(|error| error.to_string())?;
    let plan = CpuPlan::shared(vec![0], 1, false);
    let transports = vec![Transport::Tcp];
    let (chunks, retraction) = (config.chunks, config.retraction);
    let loaded = LoadedModel::derive(&files, &config.worker, chunks, retraction, transports, plan)
        .map_err(|error| error.to_string())?;
    let watch = Arc::new(Watch { token_ns: AtomicU64::new(TOKEN), ..Watch::default() });
    let forward = PseudoModel::new(watch.clone(), loaded.sched.batch_limits().logits);
    let waker = reactor.waker();
    let ctl = Arc::new(EventCount::new(move || waker.wake()));
    let helpers = SteppedHelpers::default();
    let text = helpers.0.clone();
    let mut process = WorkerProcess::new(&config, role, loaded, ctl, Box::new(helpers));
    let ticks = watch.clone();
    let clock = move || base + Duration::from_nanos(ticks.now_ns.load(Ordering::Relaxed));
    let built = process.build(reactor, files, Box::new(forward), Box::new(clock));
    let (service, cores) = built.map_err(|error| error.to_string())?;
    let text = std::mem::take(&mut *text.lock().expect("no panic while locked"));
    Ok(Service::Worker(Box::new(Worker { service, cores, text, watch, busy_until: 0 })))
}

/// The files of the pseudo-model, which has no weights.
fn model_files() -> Result<ModelFiles, LoadError> {
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
        eos: Vec::new(),
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

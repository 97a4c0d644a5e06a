//! One worker of the load mode with its slots, its mover stub and its NIC.
//!
//! Owns: the worker, its free slots, and the events that were not delivered yet. The cluster
//! decides when it takes a turn. All workers share one memory page as KV region, because it is
//! never touched. They also share the page lists, which are written and never read.

use super::cost::{CostModel, VOCAB};
use super::nic::NicModel;
use super::plan::LoadWorkerSize;
use super::sessions::Sessions;
use super::transfers::{DestinationMoverStub, SlotUse, SourceMoverStub};
use crate::ids::{Leg, SlotId, WorkerId};
use crate::kv::groups::KvGroups;
use crate::kv::layout::{KvDtype, KvLayout};
use crate::kv::region::Region;
use crate::kv::tier::Tier;
use crate::limits::COMMANDS_PER_TURN;
use crate::model::forward::batch::Batch;
use crate::model::sampler::Sampler;
use crate::sched::channel::{EngineChannel, events_per_turn};
use crate::sched::config::SchedConfig;
use crate::sched::decode::DecodeWorker;
use crate::sched::messages::{EngineCommand, EngineEvent};
use crate::sched::prefill::PrefillWorker;
use crate::sched::stats::WorkerStats;
use crate::sched::worker::{Activity, KvMemory, TurnContext, Worker};
use crate::stdx::event_count::EventCount;
use crate::stdx::event_queue::Nanos;
use crate::transfer::pages::PageLists;
use crate::transfer::rings::{Bells, Rings};
use crate::transfer::status::StatusTable;
use crossbeam_channel as channel;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The only worker of a host.
pub const WORKER: WorkerId = WorkerId(0);

/// The parts that an engine lends to its workers, and the clock. All hosts share one bench, because
/// only one host takes its turn at a time.
pub struct Bench {
    model: CostModel,
    batch: Batch,
    sampler: Sampler,
    channel: EngineChannel,
    events: channel::Receiver<EngineEvent>,
    /// Number of events for which the worker wakes `ctl` before the step is over.
    heard: Arc<AtomicUsize>,
    ctl: Arc<EventCount>,
    clock: Arc<AtomicU64>,
    progress: AtomicU64,
    base: Instant,
    kv: KvMemory,
    lists: Arc<PageLists>,
    bells: Bells,
}

impl Bench {
    /// A bench for workers of this size.
    ///
    /// # Errors
    /// The memory is insufficient for one page of KV and the page lists.
    pub fn new(size: &LoadWorkerSize, cost: super::cost::Cost) -> io::Result<Bench> {
        let config = &size.config;
        let clock: Arc<AtomicU64> = Arc::default();
        let (events_out, events) = channel::bounded(events_per_turn(size.slots));
        let heard: Arc<AtomicUsize> = Arc::default();
        let (hears, so_far) = (heard.clone(), events.clone());
        let ctl = Arc::new(EventCount::new(move || hears.store(so_far.len(), Ordering::Relaxed)));
        let channel = EngineChannel::new(channel::never(), events_out, ctl.clone());
        // No thread sleeps on it, because the event queue delivers events of transfers.
        let silent = Arc::new(EventCount::new(|| {}));
        let layout = KvLayout::page_major(config.page_size, 1, 1, 2, KvDtype::F16);
        let whole = layout.pages_for(config.context);
        let pages_of_request = config.groups.pages(whole, whole) as usize;
        Ok(Bench {
            model: CostModel::new(cost, clock.clone(), config.max_running),
            batch: Batch::new(config.batch_limits()),
            sampler: Sampler::new(VOCAB as usize),
            channel,
            events,
            heard,
            ctl: ctl.clone(),
            clock,
            progress: AtomicU64::new(0),
            base: Instant::now(),
            kv: KvMemory {
                region: Arc::new(Region::new(c"baton-kv", 1)?),
                layout,
                groups: KvGroups::single(layout.layers as usize, None),
                pages: size.pages,
            },
            lists: Arc::new(PageLists::new(size.slots, pages_of_request)?),
            bells: Bells { engine: silent.clone(), ctl, mover: silent },
        })
    }

    /// Simulated time as an `Instant`.
    pub fn instant(&self, at: Nanos) -> Instant {
        self.base + Duration::from_nanos(at)
    }
}

/// The replacement of the mover, by role.
pub enum MoverStub {
    /// Mover of a prefill worker.
    Source(SourceMoverStub),
    /// Mover of a decode worker.
    Destination(DestinationMoverStub),
}

/// The result of a turn.
pub struct TurnResult {
    /// When to step again.
    pub activity: Activity,
    /// How long it took.
    pub took: Nanos,
    /// Commands sent to the mover before the forward pass.
    pub commands_before: usize,
    /// Events for which `ctl` was woken before it.
    pub events_before: usize,
}

/// One worker.
pub struct Host {
    /// Its role.
    pub role: Leg,
    /// Its slots.
    pub status: Arc<StatusTable>,
    /// Its statistics.
    pub stats: Arc<WorkerStats>,
    /// The replacement of its mover.
    pub half: MoverStub,
    /// The NIC of its host.
    pub nic: NicModel,
    /// The sessions of a decode worker.
    pub sessions: Sessions,
    /// Commands that its worker has not taken yet.
    pub inbox: VecDeque<EngineCommand>,
    /// Events of the last step that were not delivered yet.
    pub outbox: Vec<EngineEvent>,
    /// Time of its next turn.
    pub due: Nanos,
    /// End of its computation.
    pub computes_until: Nanos,
    /// Its total time of computation.
    pub computed: Nanos,
    worker: Box<dyn Worker>,
    free: Vec<SlotId>,
}

impl Host {
    /// An empty worker of this role.
    pub fn new(role: Leg, size: &LoadWorkerSize, bench: &Bench) -> Host {
        let status = Arc::new(StatusTable::new(size.slots));
        let config: SchedConfig = size.config;
        let kv = bench.kv.clone();
        // The rings to and from `ctl` are not used, because the only session is never set up.
        let (half, worker, stats): (_, Box<dyn Worker>, _) = match role {
            Leg::Prefill => {
                let Rings { links, handle, .. } =
                    Rings::new(&status, &bench.lists, 1, &bench.bells);
                let worker = PrefillWorker::new(WORKER, config, kv, handle);
                let stats = worker.stats().clone();
                (MoverStub::Source(SourceMoverStub::new(links)), Box::new(worker), stats)
            }
            Leg::Decode => {
                let Rings { links, handle, .. } =
                    Rings::new(&status, &bench.lists, 1, &bench.bells);
                // A request reserves pages for all its tokens, so no request is retracted and the
                // tier stays empty.
                let worker = DecodeWorker::new(WORKER, config, kv, Tier::none(), handle);
                let stats = worker.stats().clone();
                (MoverStub::Destination(DestinationMoverStub::new(links)), Box::new(worker), stats)
            }
        };
        Host {
            role,
            status,
            stats,
            half,
            nic: NicModel::default(),
            sessions: Sessions::new(size.sessions),
            inbox: VecDeque::new(),
            outbox: Vec::new(),
            due: Nanos::MAX,
            computes_until: 0,
            computed: 0,
            worker,
            free: (0..size.slots as u32).rev().map(SlotId).collect(),
        }
    }

    /// Whether it can take one more request.
    pub fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Opens a slot. The caller has checked [`Host::has_room`].
    pub fn open(&mut self) -> SlotUse {
        let slot = self.free.pop().expect("the caller has checked has_room");
        SlotUse { slot, generation: self.status.open(slot) }
    }

    /// Frees a slot.
    pub fn close(&mut self, slot: SlotId) {
        self.free.push(slot);
    }

    /// One turn of its engine: commands, then a step. Its events go to the outbox.
    pub fn step(&mut self, bench: &mut Bench, now: Nanos) -> TurnResult {
        let instant = bench.instant(now);
        bench.clock.store(now, Ordering::Relaxed);
        let mut activity = Activity::Idle;
        for command in self.inbox.drain(..self.inbox.len().min(COMMANDS_PER_TURN)) {
            activity = Activity::Busy;
            self.worker.handle_command(command, instant, &mut bench.channel);
        }
        bench.model.role = self.role;
        bench.model.mover_commands = match &self.half {
            MoverStub::Source(half) => Some(half.links().commands.clone()),
            MoverStub::Destination(_) => None,
        };
        bench.model.commands_before = 0;
        bench.model.passes = 0;
        bench.heard.store(0, Ordering::Relaxed);
        bench.ctl.prepare_wait();
        let (base, clock) = (bench.base, &bench.clock);
        let clock = || base + Duration::from_nanos(clock.load(Ordering::Relaxed));
        let mut turn = TurnContext {
            now: instant,
            forward: &mut bench.model,
            batch: &mut bench.batch,
            sampler: &mut bench.sampler,
            channel: &mut bench.channel,
            clock: &clock,
            progress: &bench.progress,
        };
        activity = activity.max(self.worker.step(&mut turn));
        self.outbox.extend(bench.events.try_iter());
        let took = bench.clock.load(Ordering::Relaxed) - now;
        self.computes_until = now + took;
        self.computed += took;
        // The results of a pass over prompts are known only after it. They are reported together
        // with those of the next step.
        let events_before =
            if bench.model.passes > 1 { 0 } else { bench.heard.load(Ordering::Relaxed) };
        TurnResult { activity, took, commands_before: bench.model.commands_before, events_before }
    }

    /// Prompt tokens that it has computed.
    pub fn tokens_computed(&self) -> u64 {
        self.stats.prompt_tokens_total.load(Ordering::Relaxed)
    }

    /// Tokens that it has generated.
    pub fn tokens_generated(&self) -> u64 {
        self.stats.generated_tokens_total.load(Ordering::Relaxed)
    }

    /// Whether it holds nothing of any request.
    pub fn is_idle(&self) -> bool {
        let pages = self.stats.pages();
        let half_is_idle = match &self.half {
            MoverStub::Source(half) => half.is_idle(),
            MoverStub::Destination(half) => half.is_idle(),
        };
        half_is_idle
            && self.sessions.is_idle()
            && self.free.len() == self.status.slots()
            && pages.free + pages.cached == pages.total()
            && self.inbox.is_empty()
            && self.outbox.is_empty()
    }
}

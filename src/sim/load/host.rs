//! One worker of the load mode and what surrounds it: its slots, the mover's half of its rings, its NIC.
//!
//! Owns: the worker, its free slots, what was told and has not been taken in. Takes one turn when the cluster says so.
//! Its KV region is one memory page that all workers share, since nobody touches it; so are the page lists, which are
//! written and never read.

use super::super::agenda::Nanos;
use super::cost::{CostModel, VOCAB};
use super::nic::Nic;
use super::plan::Size;
use super::transfers::{DestinationHalf, SourceHalf, Use};
use crate::cluster::router::Role;
use crate::ids::{SlotId, WorkerId};
use crate::kv::layout::{KvDtype, KvLayout};
use crate::kv::region::Region;
use crate::kv::tier::Tier;
use crate::limits::COMMANDS_PER_TURN;
use crate::model::forward::batch::Batch;
use crate::model::sampler::Sampler;
use crate::sched::config::SchedConfig;
use crate::sched::decode::DecodeWorker;
use crate::sched::mail::{Mail, events_per_turn};
use crate::sched::mailbox::{Command, Event};
use crate::sched::prefill::PrefillWorker;
use crate::sched::stats::WorkerStats;
use crate::sched::worker::{Activity, KvMemory, Turn, Worker};
use crate::stdx::bell::Bell;
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

/// What an engine lends to its workers in turn, and the clock. One for all, since one takes its turn at a time.
pub struct Bench {
    model: CostModel,
    batch: Batch,
    sampler: Sampler,
    mail: Mail,
    events: channel::Receiver<Event>,
    /// Events that `ctl` is woken for before the step is over, by the bell that the worker rings.
    heard: Arc<AtomicUsize>,
    ctl: Arc<Bell>,
    clock: Arc<AtomicU64>,
    progress: AtomicU64,
    base: Instant,
    kv: KvMemory,
    lists: Arc<PageLists>,
    bells: Bells,
}

impl Bench {
    /// For workers of this size.
    ///
    /// # Errors
    /// There is no memory for one page of KV and the page lists.
    pub fn new(size: &Size, cost: super::cost::Cost) -> io::Result<Bench> {
        let config = &size.config;
        let clock: Arc<AtomicU64> = Arc::default();
        let (events_out, events) = channel::bounded(events_per_turn(size.slots));
        let heard: Arc<AtomicUsize> = Arc::default();
        let (hears, so_far) = (heard.clone(), events.clone());
        let ctl = Arc::new(Bell::new(move || hears.store(so_far.len(), Ordering::Relaxed)));
        let mail = Mail::new(channel::never(), events_out, ctl.clone());
        // Nobody sleeps behind it: news of transfers are a matter of the agenda.
        let silent = Arc::new(Bell::new(|| {}));
        let layout = KvLayout::page_major(config.page_size, 1, 1, 2, KvDtype::F16);
        let pages_of_context = layout.pages_for(config.context) as usize;
        Ok(Bench {
            model: CostModel::new(cost, clock.clone(), config.max_running),
            batch: Batch::new(config.batch_limits()),
            sampler: Sampler::new(VOCAB as usize),
            mail,
            events,
            heard,
            ctl: ctl.clone(),
            clock,
            progress: AtomicU64::new(0),
            base: Instant::now(),
            kv: KvMemory {
                region: Arc::new(Region::new(c"baton-kv", 1)?),
                layout,
                pages: size.pages,
            },
            lists: Arc::new(PageLists::new(size.slots, pages_of_context)?),
            bells: Bells { engine: silent.clone(), ctl, mover: silent },
        })
    }

    /// A time of the simulation.
    pub fn instant(&self, at: Nanos) -> Instant {
        self.base + Duration::from_nanos(at)
    }
}

/// The mover's half, by role.
pub enum Half {
    /// Of a prefill worker.
    Source(SourceHalf),
    /// Of a decode worker.
    Destination(DestinationHalf),
}

/// What a turn has come to.
pub struct Turned {
    /// When to step again.
    pub activity: Activity,
    /// How long it took.
    pub took: Nanos,
    /// Commands of the mover that it was told before the forward pass.
    pub commands_before: usize,
    /// Events that `ctl` was woken for before it.
    pub events_before: usize,
}

/// One worker.
pub struct Host {
    /// What it does.
    pub role: Role,
    /// Its slots.
    pub status: Arc<StatusTable>,
    /// Its figures.
    pub stats: Arc<WorkerStats>,
    /// In the place of its mover.
    pub half: Half,
    /// Of its host.
    pub nic: Nic,
    /// Commands that its worker has not taken.
    pub inbox: VecDeque<Command>,
    /// What the last step told.
    pub outbox: Vec<Event>,
    /// When its next turn is.
    pub due: Nanos,
    /// It computes until then.
    pub computes_until: Nanos,
    /// How long it has computed in all.
    pub computed: Nanos,
    worker: Box<dyn Worker>,
    free: Vec<SlotId>,
}

impl Host {
    /// An empty worker of this role.
    pub fn new(role: Role, size: &Size, bench: &Bench) -> Host {
        let status = Arc::new(StatusTable::new(size.slots));
        let config: SchedConfig = size.config;
        let kv = bench.kv.clone();
        // Of the rings to and from `ctl` nothing is used: there is one session, which is never set up.
        let (half, worker, stats): (_, Box<dyn Worker>, _) = match role {
            Role::Prefill => {
                let Rings { links, handle, .. } =
                    Rings::new(&status, &bench.lists, 1, &bench.bells);
                let worker = PrefillWorker::new(WORKER, config, kv, handle);
                let stats = worker.stats().clone();
                (Half::Source(SourceHalf::new(links)), Box::new(worker), stats)
            }
            Role::Decode => {
                let Rings { links, handle, .. } =
                    Rings::new(&status, &bench.lists, 1, &bench.bells);
                // A request reserves all that it generates, so that none is retracted; there is no KV to keep.
                let worker = DecodeWorker::new(WORKER, config, kv, Tier::none(), handle);
                let stats = worker.stats().clone();
                (Half::Destination(DestinationHalf::new(links)), Box::new(worker), stats)
            }
        };
        Host {
            role,
            status,
            stats,
            half,
            nic: Nic::default(),
            inbox: VecDeque::new(),
            outbox: Vec::new(),
            due: Nanos::MAX,
            computes_until: 0,
            computed: 0,
            worker,
            free: (0..size.slots as u32).rev().map(SlotId).collect(),
        }
    }

    /// Whether it takes one request more.
    pub fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Opens a slot, of which there is one.
    pub fn open(&mut self) -> Use {
        let slot = self.free.pop().expect("somebody has looked whether it has room");
        Use { slot, generation: self.status.open(slot) }
    }

    /// A slot is given back.
    pub fn close(&mut self, slot: SlotId) {
        self.free.push(slot);
    }

    /// One turn of its engine: commands, then a step, whose events go to the outbox.
    pub fn step(&mut self, bench: &mut Bench, now: Nanos) -> Turned {
        let instant = bench.instant(now);
        bench.clock.store(now, Ordering::Relaxed);
        let mut activity = Activity::Idle;
        for command in self.inbox.drain(..self.inbox.len().min(COMMANDS_PER_TURN)) {
            activity = Activity::Busy;
            self.worker.take(command, instant, &mut bench.mail);
        }
        bench.model.role = self.role;
        bench.model.told = match &self.half {
            Half::Source(half) => Some(half.links().commands.clone()),
            Half::Destination(_) => None,
        };
        bench.model.told_before = 0;
        bench.model.passes = 0;
        bench.heard.store(0, Ordering::Relaxed);
        bench.ctl.announce();
        let (base, clock) = (bench.base, &bench.clock);
        let clock = || base + Duration::from_nanos(clock.load(Ordering::Relaxed));
        let mut turn = Turn {
            now: instant,
            forward: &mut bench.model,
            batch: &mut bench.batch,
            sampler: &mut bench.sampler,
            mail: &mut bench.mail,
            clock: &clock,
            progress: &bench.progress,
        };
        activity = activity.max(self.worker.step(&mut turn));
        self.outbox.extend(bench.events.try_iter());
        let took = bench.clock.load(Ordering::Relaxed) - now;
        self.computes_until = now + took;
        self.computed += took;
        // What a pass over prompts brought is known only when it is over; then it is told with what the step behind it brings.
        let events_before =
            if bench.model.passes > 1 { 0 } else { bench.heard.load(Ordering::Relaxed) };
        Turned { activity, took, commands_before: bench.model.told_before, events_before }
    }

    /// Prompt tokens that it has computed.
    pub fn tokens_computed(&self) -> u64 {
        self.stats.prompt_tokens_total.load(Ordering::Relaxed)
    }

    /// Tokens that it has generated.
    pub fn tokens_generated(&self) -> u64 {
        self.stats.generated_tokens_total.load(Ordering::Relaxed)
    }

    /// Whether nothing is left of any request.
    pub fn is_idle(&self) -> bool {
        let pages = self.stats.pages();
        let half_is_idle = match &self.half {
            Half::Source(half) => half.is_idle(),
            Half::Destination(half) => half.is_idle(),
        };
        half_is_idle
            && self.free.len() == self.status.slots()
            && pages.free + pages.cached == pages.total()
            && self.inbox.is_empty()
            && self.outbox.is_empty()
    }
}

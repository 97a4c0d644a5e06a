//! One worker process: production code, assembled as in `process`, without threads and sockets.
//!
//! Owns: the engine, the mover, the hand-off and the rings between them. The cluster decides when
//! each of the three threads takes a turn. Not here: the edge of `ctl` (`edge`), the times of turns
//! (`cluster`).

use super::edge::{Edge, Ways, data_port_of};
use super::machines::{Nics, Streams};
use super::model::{LAYERS, PseudoModel, Watch, layout};
use super::plan::Size;
use crate::ids::{Leg, WorkerId};
use crate::kv::lease::MoverRight;
use crate::kv::region::Region;
use crate::kv::tier::Tier;
use crate::net::Entropy;
use crate::peer::handoff::{
    EndpointKind as MemberRole, Handoff, TransportCapabilities, WorkerEndpoint,
};
use crate::peer::local_worker::{LocalWorker, Ring};
use crate::sched::channel::{EngineChannel, events_per_turn};
use crate::sched::decode::DecodeWorker;
use crate::sched::engine::Engine;
use crate::sched::prefill::PrefillWorker;
use crate::sched::stats::WorkerStats;
use crate::sched::worker::{Activity, KvMemory, Worker as SchedWorker};
use crate::stdx::event_count::EventCount;
use crate::stdx::event_queue::Nanos;
use crate::sys::event::{EventFd, WaitSet};
use crate::sys::verbs::provider::Fabric;
use crate::transfer::copy_pool::CopyPool;
use crate::transfer::event_loop::{EventLoop, NextStep};
use crate::transfer::manager::destination::DestinationManager;
use crate::transfer::manager::identity::WorkerIdentity;
use crate::transfer::manager::source::SourceManager;
use crate::transfer::mover::Mover;
use crate::transfer::mover::destination::DestinationMover;
use crate::transfer::mover::source::SourceMover;
use crate::transfer::pages::PageLists;
use crate::transfer::rings::{Bells, Rings};
use crate::transfer::status::StatusTable;
use crate::transfer::transport::Memory;
use crate::transfer::transport::rdma::{Nic, Rails};
use crate::wire::message::{BitClass, Fingerprint, HostId, Transport};
use crossbeam_channel as channel;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The only worker of a process.
pub const WORKER: WorkerId = WorkerId(0);
/// Sessions of a worker: twice the maximum of workers per role at the start, so that restarts do
/// not use them up.
const SESSIONS: usize = 32;

/// The threads of a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Thread {
    /// Protocol and clients.
    Ctl,
    /// Scheduler and model.
    Engine,
    /// Copies of KV.
    Move,
}

impl Thread {
    /// All threads, in order of their numbers.
    pub const ALL: [Thread; 3] = [Thread::Ctl, Thread::Engine, Thread::Move];
}

/// The place where a process runs.
#[derive(Clone, Copy, Debug)]
pub struct Site<'a> {
    /// Its machine.
    pub host: HostId,
    /// Its NIC, if it has one.
    pub nic: Option<(&'a Fabric, Nics)>,
    /// Its TCP streams, if it uses them.
    pub streams: Option<Streams>,
}

/// A worker process.
pub struct Process {
    /// The state of `ctl`, and its turns.
    pub edge: Edge,
    /// The worker's statistics.
    pub stats: Arc<WorkerStats>,
    /// Its KV memory.
    pub memory: Memory,
    engine: Engine,
    mover: Mover,
    round: EventLoop,
    /// The mover's doorbell, for threads of this process and for peers.
    doorbell: EventFd,
    /// The wait set that its NIC signals; `None` without a NIC.
    events: Option<Arc<WaitSet>>,
    sleeps: bool,
    watch: Arc<Watch>,
    bells: [Arc<EventCount>; 3],
    /// One bit for each thread that was woken.
    woken: Arc<AtomicU8>,
    base: Instant,
}

impl Process {
    /// Starts the process with this number. `base` is the start of simulated time.
    pub fn new(
        index: usize,
        role: Leg,
        size: &Size,
        site: Site<'_>,
        base: Instant,
    ) -> io::Result<Process> {
        let woken: Arc<AtomicU8> = Arc::default();
        let doorbell = EventFd::new()?;
        let wake = |thread: Thread| {
            let woken = woken.clone();
            move || {
                woken.fetch_or(1 << thread as u8, Ordering::Relaxed);
            }
        };
        let (of_mover, ring) = (wake(Thread::Move), doorbell.duplicate()?);
        let ring_mover = move || {
            of_mover();
            ring.signal();
        };
        let bells = [
            EventCount::new(wake(Thread::Ctl)),
            EventCount::new(wake(Thread::Engine)),
            EventCount::new(ring_mover),
        ]
        .map(Arc::new);
        [Thread::Ctl, Thread::Engine]
            .into_iter()
            .for_each(|thread| bells[thread as usize].prepare_wait());
        let memory = memory(size)?;
        let status = Arc::new(StatusTable::new(size.slots));
        let (commands, commands_in) = channel::bounded(size.commands);
        let (events_out, events) = channel::bounded(2 * events_per_turn(size.slots));
        let engine_bell = bells[Thread::Engine as usize].clone();
        let mut worker = LocalWorker::new(
            WORKER,
            Ring::new(commands, engine_bell),
            status.clone(),
            memory.clone(),
        );
        worker.rails = rails(index, size, site, &memory)?.map(Arc::new);
        let is_reached = site.nic.is_some() || site.streams.is_some();
        let wait = is_reached.then(WaitSet::new).transpose()?.map(Arc::new);
        // In the order of `--transfer auto`.
        let rdma = site.nic.map(|_| Transport::Rdma);
        let tcp = site.streams.map(|_| Transport::Tcp);
        let transports: Vec<Transport> =
            [Transport::Shm].into_iter().chain(rdma).chain(tcp).collect();
        let identity = identity(size, &memory, site.host);
        let ThreadParts { scheduler, stats, mover, role: part, reports } = match role {
            Leg::Prefill => prefill(size, &memory, (&status, &bells), identity, transports.clone()),
            Leg::Decode => {
                decode(size, &memory, (&status, &bells), identity, doorbell.duplicate()?)?
            }
        };
        let members = vec![WorkerEndpoint { worker, kind: part, reports: Some(reports) }];
        let offer = TransportCapabilities {
            transports,
            host: site.host,
            data: site.streams.map(|_| data_port_of(index)),
            lanes: site.streams.map_or(1, |streams| streams.lanes),
        };
        let lanes = site.streams.zip(wait.clone());
        let watch = Arc::new(Watch { token_ns: AtomicU64::new(size.token), ..Watch::default() });
        let model = PseudoModel::new(watch.clone(), size.config.batch_limits().logits);
        let channel =
            EngineChannel::new(commands_in, events_out, bells[Thread::Ctl as usize].clone());
        let ticks = watch.clone();
        let clock = move || base + Duration::from_nanos(ticks.now_ns.load(Ordering::Relaxed));
        let engine =
            Engine::new(&size.config, vec![scheduler], Box::new(model), channel, Box::new(clock));
        Ok(Process {
            edge: Edge::new(
                index,
                Handoff::new(members, offer, Entropy::System),
                events,
                engine.progress().clone(),
                role,
                Ways { wait: wait.clone(), streams: lanes },
            ),
            stats,
            memory,
            engine,
            mover,
            round: EventLoop::new(size.spins),
            doorbell,
            events: wait.filter(|_| site.nic.is_some()),
            sleeps: false,
            watch,
            bells,
            woken,
            base,
        })
    }

    /// The same process with a worker of this role instead of the old worker. Only the state of
    /// `ctl` stays, as in `process::worker`.
    pub fn turned(
        self,
        index: usize,
        role: Leg,
        size: &Size,
        site: Site<'_>,
    ) -> io::Result<Process> {
        let base = self.base;
        // All other state is freed before the new worker allocates its memory.
        let Process { edge, .. } = self;
        let lasting = edge.dismiss();
        let mut process = Process::new(index, role, size, site, base)?;
        process.edge.take_on(lasting);
        Ok(process)
    }

    /// Simulated time as an `Instant` of this process.
    pub fn instant(&self, at: Nanos) -> Instant {
        self.base + Duration::from_nanos(at)
    }

    /// Takes one turn of the engine. Also returns its duration.
    pub fn step_engine(&mut self, now: Nanos) -> (Activity, Nanos) {
        self.bells[Thread::Engine as usize].cancel_wait();
        self.watch.now_ns.store(now, Ordering::Relaxed);
        let activity = self.engine.step(self.instant(now));
        self.bells[Thread::Engine as usize].prepare_wait();
        (activity, self.watch.now_ns.load(Ordering::Relaxed) - now)
    }

    /// Wakes the mover if it sleeps, takes one step of its loop, and returns the next step. A
    /// parked mover sleeps until an event wakes it. In production, it also wakes once a second by
    /// itself; here, that would hide a lost wake-up.
    pub fn step_mover(&mut self) -> NextStep {
        let bell = &self.bells[Thread::Move as usize];
        if std::mem::take(&mut self.sleeps) {
            self.round.resume(&mut self.mover, bell);
            self.doorbell.clear();
        }
        let next = self.round.step(&mut self.mover, bell);
        match next {
            NextStep::Turn | NextStep::Spin => {}
            NextStep::Resume => {
                self.round.resume(&mut self.mover, bell);
                self.doorbell.clear();
            }
            NextStep::Park => self.sleeps = true,
        }
        next
    }

    /// Whether its mover sleeps.
    pub fn sleeps(&self) -> bool {
        self.sleeps
    }

    /// Whether a doorbell has rung for the sleeping mover. The call clears it, because the mover
    /// then wakes.
    pub fn take_ring(&self) -> bool {
        self.sleeps && self.doorbell.clear()
    }

    /// Whether its NIC has signalled an event for the sleeping mover.
    pub fn take_event(&self) -> bool {
        self.sleeps && self.events.as_ref().is_some_and(|events| events.wait(Duration::ZERO))
    }

    /// Updates the grants with the leases that the mover still holds.
    pub fn note_leases(&mut self) {
        let movers = &self.mover.destinations;
        let holds = |slot| movers.iter().find_map(|mover| mover.holds(slot));
        self.edge.grants_mut().iter_mut().for_each(|(&slot, grant)| grant.note(holds(slot)));
    }

    /// Sets whether `ctl` works or parks.
    pub fn attend(&self, awake: bool) {
        let bell = &self.bells[Thread::Ctl as usize];
        if awake { bell.cancel_wait() } else { bell.prepare_wait() }
    }

    /// Threads woken since the last call.
    pub fn take_woken(&self) -> impl Iterator<Item = Thread> {
        let woken = self.woken.swap(0, Ordering::Relaxed);
        Thread::ALL.into_iter().filter(move |&thread| woken & 1 << thread as u8 != 0)
    }

    /// Makes the model `factor` times slower than at its start.
    pub fn slow_down(&self, size: &Size, factor: u64) {
        self.watch.token_ns.store(size.token * factor, Ordering::Relaxed);
    }
}

/// The parts that differ by role.
struct ThreadParts {
    scheduler: Box<dyn SchedWorker>,
    stats: Arc<WorkerStats>,
    mover: Mover,
    role: MemberRole,
    reports: channel::Receiver<crate::transfer::mover::Report>,
}

/// Registers its memory with its NIC.
fn rails(index: usize, size: &Size, site: Site<'_>, memory: &Memory) -> io::Result<Option<Rails>> {
    let Some((fabric, nics)) = site.nic else { return Ok(None) };
    let device = fabric.device_in(index as u32);
    let (route, chosen) = (fabric.route(), "the only one".into());
    let nic = Nic { device, route, number: 0, node: None, chosen };
    Rails::new(&[nic], memory, size.slots, size.config.context as usize, nics.settings).map(Some)
}

fn prefill(
    size: &Size,
    memory: &Memory,
    (status, bells): (&Arc<StatusTable>, &[Arc<EventCount>; 3]),
    identity: WorkerIdentity,
    allowed: Vec<Transport>,
) -> ThreadParts {
    let Rings { links, handle, commands, reports } =
        Rings::new(status, &memory.lists, SESSIONS, &as_bells(bells));
    let right = MoverRight::for_mover_thread();
    let source = SourceMover::new(links, memory.clone(), SESSIONS, right);
    let scheduler = PrefillWorker::new(WORKER, size.config, kv(memory), handle);
    let allocation = size.decode_allocation;
    let manager = SourceManager::new(identity, allowed, allocation, status.clone(), SESSIONS);
    let mover = Ring::new(commands, bells[Thread::Move as usize].clone());
    ThreadParts {
        stats: scheduler.stats().clone(),
        scheduler: Box::new(scheduler),
        mover: Mover { sources: vec![source], destinations: Vec::new() },
        role: MemberRole::Prefill { manager: Box::new(manager), mover },
        reports,
    }
}

fn decode(
    size: &Size,
    memory: &Memory,
    (status, bells): (&Arc<StatusTable>, &[Arc<EventCount>; 3]),
    identity: WorkerIdentity,
    doorbell: EventFd,
) -> io::Result<ThreadParts> {
    let Rings { links, handle, commands, reports } =
        Rings::new(status, &memory.lists, SESSIONS, &as_bells(bells));
    let right = MoverRight::for_mover_thread();
    let destination = DestinationMover::new(links, memory.clone(), SESSIONS, right);
    let tier = Tier::new(size.tier_pages, &memory.layout)?;
    let scheduler = DecodeWorker::new(WORKER, size.config, kv(memory), tier, handle);
    let manager = DestinationManager::new(identity, status.clone(), SESSIONS);
    let mover = Ring::new(commands, bells[Thread::Move as usize].clone());
    Ok(ThreadParts {
        stats: scheduler.stats().clone(),
        scheduler: Box::new(scheduler),
        mover: Mover { sources: Vec::new(), destinations: vec![destination] },
        role: MemberRole::Decode { manager: Box::new(manager), mover, doorbell },
        reports,
    })
}

fn memory(size: &Size) -> io::Result<Memory> {
    let layout = layout(size.config.page_size);
    let pages_of_context = layout.pages_for(size.config.context) as usize;
    let bytes = u64::from(size.pages) * layout.page_stride;
    Ok(Memory {
        region: Arc::new(Region::new(c"baton-kv", bytes as usize)?),
        layout,
        pages: size.pages,
        lists: Arc::new(PageLists::new(size.slots, pages_of_context)?),
        counters: Arc::default(),
        copy_pool: CopyPool::default(),
    })
}

fn kv(memory: &Memory) -> KvMemory {
    KvMemory { region: memory.region.clone(), layout: memory.layout, pages: memory.pages }
}

fn as_bells(bells: &[Arc<EventCount>; 3]) -> Bells {
    let [ctl, engine, mover] = bells.clone();
    Bells { engine, ctl, mover }
}

fn identity(size: &Size, memory: &Memory, host: HostId) -> WorkerIdentity {
    WorkerIdentity {
        fingerprint: Fingerprint {
            config: [LAYERS as u8; 32],
            weights: [2; 32],
            kernels: [3; 32],
            tokenizer: [4; 32],
            template: [5; 32],
        },
        bit_class: BitClass::named("portable"),
        layout: memory.layout,
        pages: memory.pages,
        pool_bytes: memory.region.len() as u64,
        slots: size.slots as u32,
        host,
    }
}

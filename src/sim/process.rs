//! One worker process: the cores of production, put together as `role` does it, without threads and sockets.
//!
//! Owns: the engine, the mover, the hand-off and the rings between them. Each of the three threads takes a turn
//! when the cluster says so. Not here: what `ctl` does at its edge (`edge`), when turns come (`cluster`).

use super::agenda::Nanos;
use super::edge::{Edge, Ways, data_port_of};
use super::machines::{Nics, Streams};
use super::model::{LAYERS, PseudoModel, Watch, layout};
use super::plan::Size;
use crate::cluster::router::Role;
use crate::front::handoff::{Handoff, Member, Offer, Role as MemberRole};
use crate::front::worker::{Ring, Worker};
use crate::ids::WorkerId;
use crate::kv::lease::MoverRight;
use crate::kv::region::Region;
use crate::kv::tier::Tier;
use crate::sched::decode::DecodeWorker;
use crate::sched::engine::Engine;
use crate::sched::mail::{Mail, events_per_turn};
use crate::sched::prefill::PrefillWorker;
use crate::sched::stats::WorkerStats;
use crate::sched::worker::{Activity, KvMemory, Worker as SchedWorker};
use crate::stdx::bell::Bell;
use crate::sys::event::{EventCounter, WaitSet};
use crate::sys::verbs::provider::Fabric;
use crate::transfer::copiers::Copiers;
use crate::transfer::manager::destination::DestinationManager;
use crate::transfer::manager::identity::Identity;
use crate::transfer::manager::source::SourceManager;
use crate::transfer::mover::Mover;
use crate::transfer::mover::destination::DestinationMover;
use crate::transfer::mover::source::SourceMover;
use crate::transfer::pages::PageLists;
use crate::transfer::rings::{Bells, Rings};
use crate::transfer::status::StatusTable;
use crate::transfer::transport::Memory;
use crate::transfer::transport::rdma::{Nic, Rails};
use crate::transfer::waiter::{Next, Round};
use crate::wire::message::{Fingerprint, HostId, Transport};
use crossbeam_channel as channel;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The only worker of a process.
pub const WORKER: WorkerId = WorkerId(0);
/// Sessions of a worker: twice the most workers of the other role at the start, so that restarts do not use them up.
const SESSIONS: usize = 32;

/// The threads of a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Thread {
    /// Protocol and clients.
    Ctl,
    /// Scheduler and model.
    Engine,
    /// Copies.
    Move,
}

impl Thread {
    /// All, in order of their numbers.
    pub const ALL: [Thread; 3] = [Thread::Ctl, Thread::Engine, Thread::Move];
}

/// Where a process runs.
#[derive(Clone, Copy, Debug)]
pub struct Site<'a> {
    /// On this machine,
    pub host: HostId,
    /// with this way to others,
    pub nic: Option<(&'a Fabric, Nics)>,
    /// or this one.
    pub streams: Option<Streams>,
}

/// A worker process.
pub struct Process {
    /// What `ctl` owns, and what it does in a turn.
    pub edge: Edge,
    /// The worker's figures.
    pub stats: Arc<WorkerStats>,
    /// Its KV.
    pub memory: Memory,
    engine: Engine,
    mover: Mover,
    round: Round,
    /// What rings for the mover, from inside and from peers.
    doorbell: EventCounter,
    /// What its NIC rings; none without one.
    events: Option<Arc<WaitSet>>,
    sleeps: bool,
    watch: Arc<Watch>,
    bells: [Arc<Bell>; 3],
    /// A bit for each thread that was woken.
    woken: Arc<AtomicU8>,
    base: Instant,
}

impl Process {
    /// The process of this number, just started. `base` is the beginning of time.
    pub fn new(
        index: usize,
        role: Role,
        size: &Size,
        site: Site<'_>,
        base: Instant,
    ) -> io::Result<Process> {
        let woken: Arc<AtomicU8> = Arc::default();
        let doorbell = EventCounter::new()?;
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
        let bells =
            [Bell::new(wake(Thread::Ctl)), Bell::new(wake(Thread::Engine)), Bell::new(ring_mover)]
                .map(Arc::new);
        [Thread::Ctl, Thread::Engine]
            .into_iter()
            .for_each(|thread| bells[thread as usize].announce());
        let memory = memory(size)?;
        let status = Arc::new(StatusTable::new(size.slots));
        let (commands, commands_in) = channel::bounded(size.commands);
        let (events_out, events) = channel::bounded(2 * events_per_turn(size.slots));
        let engine_bell = bells[Thread::Engine as usize].clone();
        let mut worker =
            Worker::new(WORKER, Ring::new(commands, engine_bell), status.clone(), memory.clone());
        worker.rails = rails(index, size, site, &memory)?.map(Arc::new);
        let is_reached = site.nic.is_some() || site.streams.is_some();
        let wait = is_reached.then(WaitSet::new).transpose()?.map(Arc::new);
        // As `--transfer auto` has them.
        let rdma = site.nic.map(|_| Transport::Rdma);
        let tcp = site.streams.map(|_| Transport::Tcp);
        let transports: Vec<Transport> =
            [Transport::Shm].into_iter().chain(rdma).chain(tcp).collect();
        let identity = identity(size, &memory, site.host);
        let Cores { scheduler, stats, mover, role: part, reports } = match role {
            Role::Prefill => {
                prefill(size, &memory, (&status, &bells), identity, transports.clone())
            }
            Role::Decode => {
                decode(size, &memory, (&status, &bells), identity, doorbell.duplicate()?)?
            }
        };
        let members = vec![Member { worker, role: part, reports: Some(reports) }];
        let offer = Offer {
            transports,
            host: site.host,
            data: site.streams.map(|_| data_port_of(index)),
            lanes: site.streams.map_or(1, |streams| streams.lanes),
        };
        let lanes = site.streams.zip(wait.clone());
        let watch = Arc::new(Watch { token_ns: AtomicU64::new(size.token), ..Watch::default() });
        let model = PseudoModel::new(watch.clone(), size.config.batch_limits().logits);
        let mail = Mail::new(commands_in, events_out, bells[Thread::Ctl as usize].clone());
        let ticks = watch.clone();
        let clock = move || base + Duration::from_nanos(ticks.now_ns.load(Ordering::Relaxed));
        let engine =
            Engine::new(&size.config, vec![scheduler], Box::new(model), mail, Box::new(clock));
        Ok(Process {
            edge: Edge::new(
                index,
                Handoff::new(members, offer),
                events,
                engine.progress().clone(),
                role,
                Ways { wait: wait.clone(), streams: lanes },
            ),
            stats,
            memory,
            engine,
            mover,
            round: Round::new(size.spins),
            doorbell,
            events: wait.filter(|_| site.nic.is_some()),
            sleeps: false,
            watch,
            bells,
            woken,
            base,
        })
    }

    /// The same process with a worker of this role in the place of the one before, of which nothing is left but what
    /// `ctl` keeps, as `role::part` has it.
    pub fn turned(
        self,
        index: usize,
        role: Role,
        size: &Size,
        site: Site<'_>,
    ) -> io::Result<Process> {
        let base = self.base;
        // All else is given back before the new one takes its memory.
        let Process { edge, .. } = self;
        let lasting = edge.dismiss();
        let mut process = Process::new(index, role, size, site, base)?;
        process.edge.take_on(lasting);
        Ok(process)
    }

    /// A time of this process.
    pub fn instant(&self, at: Nanos) -> Instant {
        self.base + Duration::from_nanos(at)
    }

    /// One turn of the engine; what it took, too.
    pub fn step_engine(&mut self, now: Nanos) -> (Activity, Nanos) {
        self.bells[Thread::Engine as usize].dismiss();
        self.watch.now_ns.store(now, Ordering::Relaxed);
        let activity = self.engine.step(self.instant(now));
        self.bells[Thread::Engine as usize].announce();
        (activity, self.watch.now_ns.load(Ordering::Relaxed) - now)
    }

    /// One step of the mover's loop, after a sleep if it has slept. What comes next; it sleeps for as long as nothing
    /// rings, where production looks after a second by itself: a wake-up that is lost is to be seen.
    pub fn step_mover(&mut self) -> Next {
        let bell = &self.bells[Thread::Move as usize];
        if std::mem::take(&mut self.sleeps) {
            self.round.rise(&mut self.mover, bell);
            self.doorbell.clear();
        }
        let next = self.round.step(&mut self.mover, bell);
        match next {
            Next::Turn | Next::Spin => {}
            Next::Rise => {
                self.round.rise(&mut self.mover, bell);
                self.doorbell.clear();
            }
            Next::Park => self.sleeps = true,
        }
        next
    }

    /// Whether its mover sleeps.
    pub fn sleeps(&self) -> bool {
        self.sleeps
    }

    /// Whether something has rung for the mover while it sleeps; asked once, since then it wakes.
    pub fn take_ring(&self) -> bool {
        self.sleeps && self.doorbell.clear()
    }

    /// Whether its NIC has rung for the mover while it sleeps.
    pub fn take_event(&self) -> bool {
        self.sleeps && self.events.as_ref().is_some_and(|events| events.wait(Duration::ZERO))
    }

    /// Has the grants say which leases the mover holds still.
    pub fn note_leases(&mut self) {
        let movers = &self.mover.destinations;
        let holds = |slot| movers.iter().find_map(|mover| mover.holds(slot));
        self.edge.grants_mut().iter_mut().for_each(|(&slot, grant)| grant.note(holds(slot)));
    }

    /// `ctl` is at work, or parks.
    pub fn attend(&self, awake: bool) {
        let bell = &self.bells[Thread::Ctl as usize];
        if awake { bell.dismiss() } else { bell.announce() }
    }

    /// Threads woken since this was asked last.
    pub fn take_woken(&self) -> impl Iterator<Item = Thread> {
        let woken = self.woken.swap(0, Ordering::Relaxed);
        Thread::ALL.into_iter().filter(move |&thread| woken & 1 << thread as u8 != 0)
    }

    /// How much slower than it began the model is.
    pub fn slow_down(&self, size: &Size, factor: u64) {
        self.watch.token_ns.store(size.token * factor, Ordering::Relaxed);
    }
}

/// What differs by role.
struct Cores {
    scheduler: Box<dyn SchedWorker>,
    stats: Arc<WorkerStats>,
    mover: Mover,
    role: MemberRole,
    reports: channel::Receiver<crate::transfer::mover::Report>,
}

/// Its memory on its NIC.
fn rails(index: usize, size: &Size, site: Site<'_>, memory: &Memory) -> io::Result<Option<Rails>> {
    let Some((fabric, nics)) = site.nic else { return Ok(None) };
    let device = fabric.device_in(index as u32);
    let nic = Nic { device, route: fabric.route(), number: 0, chosen: "the only one".into() };
    Rails::new(&[nic], memory, size.slots, size.config.context as usize, nics.settings).map(Some)
}

fn prefill(
    size: &Size,
    memory: &Memory,
    (status, bells): (&Arc<StatusTable>, &[Arc<Bell>; 3]),
    identity: Identity,
    allowed: Vec<Transport>,
) -> Cores {
    let Rings { links, handle, commands, reports } =
        Rings::new(status, &memory.lists, SESSIONS, &as_bells(bells));
    let right = MoverRight::for_mover_thread();
    let source = SourceMover::new(links, memory.clone(), SESSIONS, right);
    let scheduler = PrefillWorker::new(WORKER, size.config, kv(memory), handle);
    let allocation = size.decode_allocation;
    let manager = SourceManager::new(identity, allowed, allocation, status.clone(), SESSIONS);
    let mover = Ring::new(commands, bells[Thread::Move as usize].clone());
    Cores {
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
    (status, bells): (&Arc<StatusTable>, &[Arc<Bell>; 3]),
    identity: Identity,
    doorbell: EventCounter,
) -> io::Result<Cores> {
    let Rings { links, handle, commands, reports } =
        Rings::new(status, &memory.lists, SESSIONS, &as_bells(bells));
    let right = MoverRight::for_mover_thread();
    let destination = DestinationMover::new(links, memory.clone(), SESSIONS, right);
    let tier = Tier::new(size.tier_pages, &memory.layout)?;
    let scheduler = DecodeWorker::new(WORKER, size.config, kv(memory), tier, handle);
    let manager = DestinationManager::new(identity, status.clone(), SESSIONS);
    let mover = Ring::new(commands, bells[Thread::Move as usize].clone());
    Ok(Cores {
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
        tally: Arc::default(),
        copiers: Copiers::default(),
    })
}

fn kv(memory: &Memory) -> KvMemory {
    KvMemory { region: memory.region.clone(), layout: memory.layout, pages: memory.pages }
}

fn as_bells(bells: &[Arc<Bell>; 3]) -> Bells {
    let [ctl, engine, mover] = bells.clone();
    Bells { engine, ctl, mover }
}

fn identity(size: &Size, memory: &Memory, host: HostId) -> Identity {
    Identity {
        fingerprint: Fingerprint {
            config: [LAYERS as u8; 32],
            weights: [2; 32],
            kernels: [3; 32],
            tokenizer: [4; 32],
            template: [5; 32],
        },
        layout: memory.layout,
        pages: memory.pages,
        pool_bytes: memory.region.len() as u64,
        slots: size.slots as u32,
        host,
    }
}

//! One worker of a bench: the managers, links and mover of production. The bench replaces the
//! scheduler.
//!
//! Thread: the caller's thread is `ctl` and `engine`. `move-0` is a thread that parks, as in a
//! worker. With busy polling, the caller does the work of `move-0`, too. Invariants: dropping the
//! worker ends everything; every wait has a deadline.

use super::case::TransferEnd;
use super::talk::{BenchChannel, BenchMessage, BenchRow};
use crate::cause::Cause;
use crate::config;
use crate::ids::{DecodeAllocation, PageId, Peer, RequestId, Role, Room, WorkerId};
use crate::kv::lease::{Lease, MoverRight};
use crate::kv::pool::PagePool;
use crate::kv::region::Region;
use crate::limits::LANES_MAX;
use crate::model::sampler::SamplingParams;
use crate::net::Entropy;
use crate::net::{Event, ListenerId, Reactor};
use crate::peer::control::{ControlLinks, LinkTimeouts, PeerIdentity};
use crate::peer::directory::Directory;
use crate::peer::handoff::{
    EndpointKind, Handoff, Source, TransportCapabilities, WorkerEndpoint, prompt_of,
};
use crate::peer::local_worker::{LocalWorker, Ring};
use crate::peer::shm_handshake::ShmHandshake;
use crate::peer::tcp_handshake::TcpHandshake;
use crate::sched::messages::EngineCommand;
use crate::sched::request::{EngineRequest, Stamps};
use crate::stdx::event_count::EventCount;
use crate::transfer::command::{Cancel, DestinationCommand, SourceCommand};
use crate::transfer::copy_pool::CopyPool;
use crate::transfer::event_loop::{LoopTask, Waiter};
use crate::transfer::handle::TransferHandle;
use crate::transfer::manager::destination::DestinationManager;
use crate::transfer::manager::identity::{WorkerIdentity, host_id};
use crate::transfer::manager::rooms::Slot;
use crate::transfer::manager::source::SourceManager;
use crate::transfer::mover::Mover;
use crate::transfer::mover::destination::DestinationMover;
use crate::transfer::mover::source::SourceMover;
use crate::transfer::pages::PageLists;
use crate::transfer::rings::{Bells, Rings};
use crate::transfer::status::{SlotStatus, StatusTable};
use crate::transfer::transport::Memory;
use crate::transfer::transport::rdma::{DataThreads, Nic, Rails, Settings};
use crate::wire::auth::Keyring;
use crate::wire::message::{BitClass, Fingerprint, Transport};
use crossbeam_channel as channel;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Maximum time of each step, also on an emulated processor.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Timeouts of control links. They are long, because a peer does not answer while it checks bytes
/// or runs the bare limit.
const STILL: LinkTimeouts = LinkTimeouts { proof: PATIENCE, silence: PATIENCE };
/// There is one room at a time, and the previous one can still be ending.
const SLOTS: usize = 4;
const SESSIONS: usize = 4;
/// Interval of the checks for deadlines.
const TICK: Duration = Duration::from_millis(50);
/// Steps of the mover between two polls of the sockets, if no thread parks.
const TURNS: usize = 1024;
/// The only worker of each process.
const WORKER: WorkerId = WorkerId(0);

/// A worker and its threads.
pub struct BenchWorker<C> {
    /// The KV pool.
    pub memory: Memory,
    /// The scheduler's interface to its transfers.
    pub handle: TransferHandle<C>,
    pool: PagePool,
    commands: channel::Receiver<EngineCommand>,
    talk: BenchChannel,
    /// Whether the other process has closed its connection.
    gone: bool,
    reactor: Reactor,
    peers: ControlLinks,
    handoff: Handoff,
    bell: Arc<EventCount>,
    mover: MoverRunner,
    /// Poster and poller threads of NICs. They end after the mover.
    _data: DataThreads,
    next_tick: Instant,
}

/// Runs the mover.
#[derive(Debug)]
enum MoverRunner {
    Here(Box<Mover>),
    Thread { stop: Arc<AtomicBool>, bell: Arc<EventCount>, thread: Option<JoinHandle<()>> },
}

/// The parts that both roles need.
struct Parts {
    memory: Memory,
    status: Arc<StatusTable>,
    reactor: Reactor,
    talk: BenchChannel,
    bell: Arc<EventCount>,
    waiter: Waiter,
    data: DataThreads,
    transport: Transport,
    engine: (channel::Sender<EngineCommand>, channel::Receiver<EngineCommand>),
}

/// The transport with this name.
///
/// # Errors
/// There is no transport with this name.
pub fn transport_of(name: &str) -> Result<Transport, String> {
    match name {
        "shm" => Ok(Transport::Shm),
        "tcp" => Ok(Transport::Tcp),
        "rdma" => Ok(Transport::Rdma),
        other => Err(format!("there is no transport {other} here")),
    }
}

/// Number of copy threads; only the destination copies.
fn copy_lanes(row: &BenchRow, end: TransferEnd) -> usize {
    if row.transport == "shm" && end == TransferEnd::Destination { row.lanes.into() } else { 1 }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

impl Parts {
    fn new(row: &BenchRow, end: TransferEnd, talk: TcpStream) -> Result<Parts, String> {
        let transport = transport_of(&row.transport)?;
        row.check().map_err(text)?;
        let mut reactor = Reactor::new().map_err(text)?;
        let talk = BenchChannel(reactor.adopt(talk).map_err(text)?);
        let waker = reactor.waker();
        let layout = row.layout(end).ok_or("ranks that do not share the heads")?;
        let region_bytes = u64::from(layout.ranks) * layout.rank_stride;
        let region = Region::new(c"baton-kv", region_bytes as usize).map_err(text)?;
        let memory = Memory {
            region: Arc::new(region),
            layout,
            pages: row.case.pool,
            lists: Arc::new(PageLists::new(SLOTS, row.case.pages as usize).map_err(text)?),
            counters: Arc::default(),
            copy_pool: CopyPool::new(copy_lanes(row, end)).map_err(text)?,
        };
        Ok(Parts {
            memory,
            status: Arc::new(StatusTable::new(SLOTS)),
            reactor,
            talk,
            bell: Arc::new(EventCount::new(move || waker.wake())),
            waiter: Waiter::new(true).map_err(text)?,
            data: DataThreads::default(),
            transport,
            engine: channel::bounded(64),
        })
    }

    fn rings<C>(&self) -> Rings<C> {
        let bells = Bells {
            engine: self.bell.clone(),
            ctl: self.bell.clone(),
            mover: self.waiter.bell.clone(),
        };
        Rings::new(&self.status, &self.memory.lists, SESSIONS, &bells)
    }

    fn identity(&self) -> WorkerIdentity {
        let none = [0; 32];
        WorkerIdentity {
            fingerprint: Fingerprint {
                config: none,
                weights: none,
                kernels: none,
                tokenizer: none,
                template: none,
            },
            bit_class: BitClass::UNKNOWN,
            layout: self.memory.layout,
            pages: self.memory.pages,
            pool_bytes: self.memory.region.len() as u64,
            slots: SLOTS as u32,
            host: host_id(),
        }
    }

    fn worker(&mut self, row: &BenchRow, end: TransferEnd) -> Result<LocalWorker, String> {
        let ring = Ring::new(self.engine.0.clone(), self.bell.clone());
        let mut worker = LocalWorker::new(WORKER, ring, self.status.clone(), self.memory.clone());
        if self.transport == Transport::Rdma {
            let settings =
                Settings { lanes: row.lanes.into(), pieces: row.pieces, ..Settings::default() };
            let context = row.case.tokens() as usize;
            let rails = Rails::new(&Nic::choose(&[], &[])?, &self.memory, SLOTS, context, settings);
            let mut rails = rails.map_err(|error| format!("registering the pool: {error}"))?;
            if (row.data_threads, end) == (config::DataThreadMode::Split, TransferEnd::Source) {
                for split in rails.split(&self.waiter.bell, true).map_err(text)? {
                    self.data.start(split, None).map_err(text)?;
                }
            }
            worker.rails = Some(Arc::new(rails));
        }
        Ok(worker)
    }

    fn listen(&mut self, host: IpAddr) -> Result<(ListenerId, SocketAddr), String> {
        // The link, all lanes of a session, and the lanes of a session that is ending.
        let connections = 2 * LANES_MAX;
        let listener =
            self.reactor.listen(&SocketAddr::new(host, 0).into(), connections).map_err(text)?;
        let address =
            self.reactor.local_address(listener).ok_or("a listener without an address")?;
        Ok((listener, address))
    }

    fn side<C>(
        self,
        row: &BenchRow,
        member: WorkerEndpoint,
        handle: TransferHandle<C>,
        mover: Mover,
        data: Option<SocketAddr>,
        peers: ControlLinks,
    ) -> Result<BenchWorker<C>, String> {
        let Parts { memory, reactor, talk, bell, waiter, data: threads, transport, engine, .. } =
            self;
        let mut pool = PagePool::new(memory.pages);
        // Allocates all pages, because only allocated pages can be leased.
        let mut all = Vec::with_capacity(memory.pages as usize);
        if !pool.allocate(memory.pages, &mut all) {
            return Err("the pool has no pages".into());
        }
        let offer = TransportCapabilities {
            transports: vec![transport],
            host: host_id(),
            data,
            lanes: row.lanes,
        };
        let mover = if row.busy_poll {
            MoverRunner::Here(Box::new(mover))
        } else {
            MoverRunner::start(mover, waiter).map_err(text)?
        };
        let handoff = Handoff::new(vec![member], offer, Entropy::System);
        let (commands, next_tick) = (engine.1, Instant::now());
        Ok(BenchWorker {
            memory,
            handle,
            pool,
            commands,
            talk,
            gone: false,
            reactor,
            peers,
            handoff,
            bell,
            mover,
            _data: threads,
            next_tick,
        })
    }
}

fn identity(role: Role) -> PeerIdentity {
    PeerIdentity {
        peer: Peer { id: Entropy::System.bytes(), incarnation: Entropy::System.bytes() },
        role,
        keys: Keyring::default(),
    }
}

impl BenchWorker<SourceCommand> {
    /// Creates a prefill worker; `talk` is the connection to the destination. Also returns its
    /// control port.
    pub fn source(row: &BenchRow, talk: TcpStream, host: IpAddr) -> Result<(Self, u16), String> {
        let mut parts = Parts::new(row, TransferEnd::Source, talk)?;
        let Rings { links, handle, commands, reports } = parts.rings::<SourceCommand>();
        let (control, address) = parts.listen(host)?;
        let mut passing = ShmHandshake::default();
        passing.listen(&mut parts.reactor).map_err(text)?;
        let (right, memory) = (MoverRight::for_mover_thread(), parts.memory.clone());
        let source = SourceMover::new(links, memory, SESSIONS, right);
        let mover = Mover { sources: vec![source], destinations: Vec::new() };
        // The bench measures a hand-off between pages that both sides have allocated.
        let (early, status) = (DecodeAllocation::Early, parts.status.clone());
        let manager =
            SourceManager::new(parts.identity(), vec![parts.transport], early, status, SESSIONS);
        let ring = Ring::new(commands, parts.waiter.bell.clone());
        let role = EndpointKind::Prefill { manager: Box::new(manager), mover: ring };
        let member = WorkerEndpoint {
            worker: parts.worker(row, TransferEnd::Source)?,
            kind: role,
            reports: Some(reports),
        };
        let lanes = TcpHandshake::new(None, parts.waiter.set.clone());
        let own = identity(Role::Prefill);
        let peers = ControlLinks::new(
            own,
            Some(control),
            Directory::closed(),
            passing,
            lanes,
            STILL,
            Instant::now(),
        );
        Ok((parts.side(row, member, handle, mover, None, peers)?, address.port()))
    }
}

impl BenchWorker<DestinationCommand> {
    /// Creates a decode worker. `talk` is the connection to the source; its control link is at
    /// `control`.
    pub fn destination(
        row: &BenchRow,
        talk: TcpStream,
        host: IpAddr,
        control: SocketAddr,
    ) -> Result<Self, String> {
        let mut parts = Parts::new(row, TransferEnd::Destination, talk)?;
        let Rings { links, handle, commands, reports } = parts.rings::<DestinationCommand>();
        let data = (parts.transport == Transport::Tcp).then(|| parts.listen(host)).transpose()?;
        let (right, memory) = (MoverRight::for_mover_thread(), parts.memory.clone());
        let destination = DestinationMover::new(links, memory, SESSIONS, right);
        let mover = Mover { sources: Vec::new(), destinations: vec![destination] };
        let manager = DestinationManager::new(parts.identity(), parts.status.clone(), SESSIONS);
        let ring = Ring::new(commands, parts.waiter.bell.clone());
        let doorbell = parts.waiter.doorbell.duplicate().map_err(text)?;
        let role = EndpointKind::Decode { manager: Box::new(manager), mover: ring, doorbell };
        let member = WorkerEndpoint {
            worker: parts.worker(row, TransferEnd::Destination)?,
            kind: role,
            reports: Some(reports),
        };
        let (listener, address) = data.unzip();
        let lanes = TcpHandshake::new(listener, parts.waiter.set.clone());
        let directory = Directory::knowing(Source::Remote(control), control);
        let own = identity(Role::Decode);
        let peers = ControlLinks::new(
            own,
            None,
            directory,
            ShmHandshake::default(),
            lanes,
            STILL,
            Instant::now(),
        );
        parts.side(row, member, handle, mover, address, peers)
    }

    /// Marks the slot's pages: their bytes will arrive.
    pub fn expecting(&mut self, slot: Slot, tokens: u32) {
        self.handoff.handle_expecting(WORKER, slot, 0..tokens, Instant::now());
    }
}

impl<C: Cancel> BenchWorker<C> {
    /// Sends a message to the other process.
    pub fn send(&mut self, what: &BenchMessage) -> Result<(), String> {
        self.talk.send(&mut self.reactor, what)
    }

    /// Waits for the other process's next message.
    pub fn receive(&mut self) -> Result<BenchMessage, String> {
        self.until("a message of the other process", |side| {
            match side.talk.receive(&mut side.reactor)? {
                None if side.gone => Err("the other process is gone".into()),
                said => Ok(said),
            }
        })
    }

    /// Waits for the other process's next message, or until the transfer fails here.
    pub fn receive_during(&mut self, slot: Slot) -> Result<BenchMessage, String> {
        self.until("the KV at the destination", |side| {
            match side.talk.receive(&mut side.reactor)? {
                None if side.gone => Err("the other process is gone".into()),
                None => match side.status(slot).cause {
                    Some(cause) => Err(format!("the hand-off failed at the source: {cause}")),
                    None => Ok(None),
                },
                said => Ok(said),
            }
        })
    }

    /// Opens a room for a prompt of this many tokens. At a destination, `source` is the sender.
    pub fn enter(
        &mut self,
        room: u64,
        tokens: u32,
        source: Option<&Source>,
    ) -> Result<Slot, String> {
        let (now, prompt) = (Instant::now(), vec![1; tokens as usize]);
        let deadline = now + 2 * PATIENCE;
        let slot = self.handoff.worker_mut(WORKER).take_slot(prompt_of(&prompt), deadline);
        let slot = slot.ok_or("no slot is free")?;
        let request = EngineRequest {
            id: RequestId(room),
            worker: WORKER,
            room: Room(room),
            slot: slot.id,
            generation: slot.generation,
            prompt,
            alone: false,
            keep: false,
            resumed: 0,
            output: Vec::new(),
            pages: Vec::new(),
            salt: None,
            sampling: SamplingParams::GREEDY,
            grammar: None,
            rules: None,
            top_logprobs: 0,
            prompt_logprobs: None,
            priority: 0,
            max_new: 1,
            stop_tokens: Vec::new(),
            ignore_eos: false,
            deadline,
            stamps: Stamps::new(now),
        };
        self.handoff.submit_request(Box::new(request), source, now);
        Ok(slot)
    }

    /// Waits for the command that `wanted` accepts.
    pub fn command<T>(
        &mut self,
        what: &str,
        wanted: impl Fn(&EngineCommand) -> Option<T>,
    ) -> Result<T, String> {
        self.until(what, |side| {
            if let Some(said) = side.talk.receive(&mut side.reactor)? {
                return Err(format!("the other process sent {said:?}, not {what}"));
            }
            if side.gone {
                return Err("the other process is gone".into());
            }
            for command in side.commands.try_iter() {
                if let EngineCommand::Abort { cause, .. } = command {
                    return Err(format!("{what}: {cause}"));
                }
                if let Some(found) = wanted(&command) {
                    return Ok(Some(found));
                }
            }
            Ok(None)
        })
    }

    /// Leases pages to the transfer of a slot.
    pub fn lease(&mut self, slot: Slot, pages: &[PageId]) -> Lease {
        self.pool.lease(slot.id, slot.generation, pages)
    }

    /// The slot's status.
    pub fn status(&self, slot: Slot) -> SlotStatus {
        self.handle.status(slot.id)
    }

    /// Waits until the slot's transfer has succeeded or failed, and frees the slot.
    pub fn leave(&mut self, slot: Slot, pages: &[PageId]) -> Result<Option<Cause>, String> {
        let end = self.until("the end of a lease", |side| Ok(side.handle.poll_end()))?;
        self.pool.end_lease(end.ended, pages);
        let cause = self.until("the end of a transfer", |side| {
            let status = side.status(slot);
            Ok(status.state.is_terminal().then_some(status.cause))
        })?;
        self.handoff.handle_finished(WORKER, slot, cause, Instant::now());
        self.handoff.release_slot(WORKER, slot);
        Ok(cause)
    }

    /// Runs the worker until `done` returns a value.
    pub fn until<T>(
        &mut self,
        what: &str,
        mut done: impl FnMut(&mut Self) -> Result<Option<T>, String>,
    ) -> Result<T, String> {
        let until = Instant::now() + PATIENCE;
        loop {
            for _ in 0..TURNS {
                if let Some(done) = done(self)? {
                    return Ok(done);
                }
                if !self.step_mover() {
                    break;
                }
            }
            self.bell.prepare_wait();
            // Checks again, because an event can come before the announcement above.
            let found = done(self)?;
            if found.is_none() {
                self.turn()?;
            }
            self.bell.cancel_wait();
            if let Some(found) = found {
                return Ok(found);
            }
            if Instant::now() > until {
                return Err(format!("{what}: not within {} s", PATIENCE.as_secs()));
            }
        }
    }

    /// Runs a step of the mover. Returns false if another thread runs it.
    fn step_mover(&mut self) -> bool {
        match &mut self.mover {
            MoverRunner::Here(mover) => {
                mover.step();
                true
            }
            MoverRunner::Thread { .. } => false,
        }
    }

    /// Runs one iteration of `ctl`. Parks until an event if no busy polling is set.
    fn turn(&mut self) -> Result<(), String> {
        let parks = matches!(self.mover, MoverRunner::Thread { .. }) && !self.handoff.has_events();
        let wait = if parks { TICK } else { Duration::ZERO };
        self.reactor.poll(Some(Instant::now() + wait)).map_err(text)?;
        let now = Instant::now();
        while let Some(event) = self.reactor.next_event() {
            match event {
                // Messages sent before the end are still read.
                Event::Eof(conn) if conn == self.talk.0 => self.gone = true,
                Event::Closed { conn, .. } if conn == self.talk.0 => {
                    return Err("the other process is gone".into());
                }
                event if self.peers.owns(&event) => {
                    self.peers.handle(event, &mut self.reactor, &mut self.handoff, now);
                }
                _ => {}
            }
        }
        self.handoff.step(now);
        self.peers.run_remote_actions(&mut self.reactor, &mut self.handoff, now);
        if now >= self.next_tick {
            self.next_tick = now + TICK;
            self.handoff.expire(now);
            self.peers.expire(&mut self.reactor, &mut self.handoff, now);
        }
        Ok(())
    }
}

impl MoverRunner {
    fn start(mut mover: Mover, waiter: Waiter) -> std::io::Result<MoverRunner> {
        let (stop, bell) = (Arc::new(AtomicBool::new(false)), waiter.bell.clone());
        let stop_of_thread = stop.clone();
        let thread = thread::Builder::new()
            .name("move-0".into())
            .spawn(move || waiter.run(&mut mover, &stop_of_thread))?;
        Ok(MoverRunner::Thread { stop, bell, thread: Some(thread) })
    }
}

impl Drop for MoverRunner {
    fn drop(&mut self) {
        if let MoverRunner::Thread { stop, bell, thread } = self {
            stop.store(true, Ordering::Release);
            bell.notify();
            // A panicked thread has already reported the panic.
            let _ = thread.take().map(JoinHandle::join);
        }
    }
}

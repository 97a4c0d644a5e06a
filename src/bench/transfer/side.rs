//! One worker of a bench: production's managers, links and mover, with the bench in the scheduler's place.
//!
//! Thread: the caller's is `ctl` and `engine`; `move` is a thread that parks, as in a worker, or with busy
//! polling the caller's too. Everything ends when it is dropped. No wait without a deadline.

use super::case::End;
use super::talk::{Row, Say, Talk};
use crate::cause::Cause;
use crate::config::resolved::{self, DecodeAllocation};
use crate::front::directory::Directory;
use crate::front::handoff::{Handoff, Member, Offer, Role, Source, prompt_of, random};
use crate::front::lanes::Lanes;
use crate::front::passing::Passing;
use crate::front::peers::{Identity as PeerIdentity, Patience, Peers};
use crate::front::worker::{Ring, Worker};
use crate::ids::{PageId, Peer, RequestId, Room, WorkerId};
use crate::kv::lease::{Lease, MoverRight};
use crate::kv::pool::PagePool;
use crate::kv::region::Region;
use crate::limits::LANES_MAX;
use crate::model::sampler::SamplingParams;
use crate::net::{Event, ListenerId, Reactor};
use crate::role::host_id;
use crate::sched::mailbox::Command;
use crate::sched::request::{Request, Stamps};
use crate::stdx::bell::Bell;
use crate::transfer::command::{Cancel, DestinationCommand, SourceCommand};
use crate::transfer::copiers::Copiers;
use crate::transfer::handle::Handle;
use crate::transfer::manager::destination::DestinationManager;
use crate::transfer::manager::identity::Identity;
use crate::transfer::manager::rooms::Slot;
use crate::transfer::manager::source::SourceManager;
use crate::transfer::mover::Mover;
use crate::transfer::mover::destination::DestinationMover;
use crate::transfer::mover::source::SourceMover;
use crate::transfer::pages::PageLists;
use crate::transfer::rings::{Bells, Rings};
use crate::transfer::status::{Status, StatusTable};
use crate::transfer::transport::Memory;
use crate::transfer::transport::rdma::{DataThreads, Nic, Rails, Settings};
use crate::transfer::waiter::{Turns, Waiter};
use crate::wire::auth::Keyring;
use crate::wire::message::{self as wire, Fingerprint, Transport};
use crossbeam_channel as channel;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// No step of a repetition takes longer, also where a processor is emulated.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Nobody answers on the links while bytes are compared or moved barely.
const STILL: Patience = Patience { proof: PATIENCE, silence: PATIENCE };
/// One room at a time; another may still be on its way out.
const SLOTS: usize = 4;
const SESSIONS: usize = 4;
/// Deadlines are looked at so often.
const TICK: Duration = Duration::from_millis(50);
/// Turns of the mover between two looks at the sockets, where nobody parks.
const TURNS: usize = 1024;
/// The only worker of each process.
const WORKER: WorkerId = WorkerId(0);

/// A worker and its threads.
pub struct Side<C> {
    /// KV.
    pub memory: Memory,
    /// The scheduler's end of its transfers.
    pub handle: Handle<C>,
    pool: PagePool,
    commands: channel::Receiver<Command>,
    talk: Talk,
    /// The other process has said its last word.
    gone: bool,
    reactor: Reactor,
    peers: Peers,
    handoff: Handoff,
    bell: Arc<Bell>,
    mover: Turning,
    /// Behind the mover, whose sessions they serve.
    _data: DataThreads,
    next_tick: Instant,
}

/// Who turns the mover.
#[derive(Debug)]
enum Turning {
    Here(Box<Mover>),
    Thread { stop: Arc<AtomicBool>, bell: Arc<Bell>, thread: Option<JoinHandle<()>> },
}

/// What both roles are made from.
struct Parts {
    memory: Memory,
    status: Arc<StatusTable>,
    reactor: Reactor,
    talk: Talk,
    bell: Arc<Bell>,
    waiter: Waiter,
    data: DataThreads,
    transport: Transport,
    engine: (channel::Sender<Command>, channel::Receiver<Command>),
}

/// A row's transport by its name.
pub fn transport_of(name: &str) -> Result<Transport, String> {
    match name {
        "shm" => Ok(Transport::Shm),
        "tcp" => Ok(Transport::Tcp),
        "rdma" => Ok(Transport::Rdma),
        other => Err(format!("there is no transport {other} here")),
    }
}

/// Threads that copy: the destination's, where it does.
fn copy_lanes(row: &Row, end: End) -> usize {
    if row.transport == "shm" && end == End::Destination { row.lanes.into() } else { 1 }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

impl Parts {
    fn new(row: &Row, end: End, talk: TcpStream) -> Result<Parts, String> {
        let transport = transport_of(&row.transport)?;
        row.check().map_err(text)?;
        let mut reactor = Reactor::new().map_err(text)?;
        let talk = Talk(reactor.adopt(talk).map_err(text)?);
        let waker = reactor.waker();
        let layout = row.layout(end).ok_or("ranks that do not share the heads")?;
        let region_bytes = u64::from(layout.ranks) * layout.rank_stride;
        let region = Region::new(c"baton-kv", region_bytes as usize).map_err(text)?;
        let memory = Memory {
            region: Arc::new(region),
            layout,
            pages: row.case.pool,
            lists: Arc::new(PageLists::new(SLOTS, row.case.pages as usize).map_err(text)?),
            tally: Arc::default(),
            copiers: Copiers::new(copy_lanes(row, end)).map_err(text)?,
        };
        Ok(Parts {
            memory,
            status: Arc::new(StatusTable::new(SLOTS)),
            reactor,
            talk,
            bell: Arc::new(Bell::new(move || waker.wake())),
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

    fn identity(&self) -> Identity {
        let none = [0; 32];
        Identity {
            fingerprint: Fingerprint {
                config: none,
                weights: none,
                kernels: none,
                tokenizer: none,
                template: none,
            },
            layout: self.memory.layout,
            pages: self.memory.pages,
            pool_bytes: self.memory.region.len() as u64,
            slots: SLOTS as u32,
            host: host_id(),
        }
    }

    fn worker(&mut self, row: &Row, end: End) -> Result<Worker, String> {
        let ring = Ring::new(self.engine.0.clone(), self.bell.clone());
        let mut worker = Worker::new(WORKER, ring, self.status.clone(), self.memory.clone());
        if self.transport == Transport::Rdma {
            let settings =
                Settings { lanes: row.lanes.into(), pieces: row.pieces, ..Settings::default() };
            let context = row.case.tokens() as usize;
            let rails = Rails::new(&Nic::choose(&[], &[])?, &self.memory, SLOTS, context, settings);
            let mut rails = rails.map_err(|error| format!("registering the pool: {error}"))?;
            if (row.data_threads, end) == (resolved::DataThreads::Split, End::Source) {
                for split in rails.split(&self.waiter.bell, true).map_err(text)? {
                    self.data.start(split, None).map_err(text)?;
                }
            }
            worker.rails = Some(Arc::new(rails));
        }
        Ok(worker)
    }

    fn listen(&mut self, host: IpAddr) -> Result<(ListenerId, SocketAddr), String> {
        // The link, every lane of a session, and those of one that is on its way out.
        let connections = 2 * LANES_MAX;
        let listener =
            self.reactor.listen(&SocketAddr::new(host, 0).into(), connections).map_err(text)?;
        let address =
            self.reactor.local_address(listener).ok_or("a listener without an address")?;
        Ok((listener, address))
    }

    fn side<C>(
        self,
        row: &Row,
        member: Member,
        handle: Handle<C>,
        mover: Mover,
        data: Option<SocketAddr>,
        peers: Peers,
    ) -> Result<Side<C>, String> {
        let Parts { memory, reactor, talk, bell, waiter, data: threads, transport, engine, .. } =
            self;
        let mut pool = PagePool::new(memory.pages);
        // All pages are in use, so that any may be leased.
        let mut all = Vec::with_capacity(memory.pages as usize);
        if !pool.allocate(memory.pages, &mut all) {
            return Err("an empty pool has no pages".into());
        }
        let offer = Offer { transports: vec![transport], host: host_id(), data, lanes: row.lanes };
        let mover = if row.busy_poll {
            Turning::Here(Box::new(mover))
        } else {
            Turning::start(mover, waiter).map_err(text)?
        };
        let handoff = Handoff::new(vec![member], offer);
        let (commands, next_tick) = (engine.1, Instant::now());
        Ok(Side {
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

fn identity(role: wire::Role) -> PeerIdentity {
    PeerIdentity {
        peer: Peer { id: random(), incarnation: random() },
        role,
        keys: Keyring::default(),
    }
}

impl Side<SourceCommand> {
    /// A prefill worker; `talk` is the connection to the destination. Also gives its control port.
    pub fn source(row: &Row, talk: TcpStream, host: IpAddr) -> Result<(Self, u16), String> {
        let mut parts = Parts::new(row, End::Source, talk)?;
        let Rings { links, handle, commands, reports } = parts.rings::<SourceCommand>();
        let (control, address) = parts.listen(host)?;
        let mut passing = Passing::default();
        passing.listen(&mut parts.reactor).map_err(text)?;
        let (right, memory) = (MoverRight::for_mover_thread(), parts.memory.clone());
        let source = SourceMover::new(links, memory, SESSIONS, right);
        let mover = Mover { sources: vec![source], destinations: Vec::new() };
        // What is measured is a hand-off of pages that both sides have.
        let (early, status) = (DecodeAllocation::Early, parts.status.clone());
        let manager =
            SourceManager::new(parts.identity(), vec![parts.transport], early, status, SESSIONS);
        let ring = Ring::new(commands, parts.waiter.bell.clone());
        let role = Role::Prefill { manager: Box::new(manager), mover: ring };
        let member =
            Member { worker: parts.worker(row, End::Source)?, role, reports: Some(reports) };
        let lanes = Lanes::new(None, parts.waiter.set.clone());
        let own = identity(wire::Role::Prefill);
        let peers = Peers::new(own, Some(control), Directory::closed(), passing, lanes, STILL);
        Ok((parts.side(row, member, handle, mover, None, peers)?, address.port()))
    }
}

impl Side<DestinationCommand> {
    /// A decode worker; `talk` is the connection to the source, whose control link is at `control`.
    pub fn destination(
        row: &Row,
        talk: TcpStream,
        host: IpAddr,
        control: SocketAddr,
    ) -> Result<Self, String> {
        let mut parts = Parts::new(row, End::Destination, talk)?;
        let Rings { links, handle, commands, reports } = parts.rings::<DestinationCommand>();
        let data = (parts.transport == Transport::Tcp).then(|| parts.listen(host)).transpose()?;
        let (right, memory) = (MoverRight::for_mover_thread(), parts.memory.clone());
        let destination = DestinationMover::new(links, memory, SESSIONS, right);
        let mover = Mover { sources: Vec::new(), destinations: vec![destination] };
        let manager = DestinationManager::new(parts.identity(), parts.status.clone(), SESSIONS);
        let ring = Ring::new(commands, parts.waiter.bell.clone());
        let doorbell = parts.waiter.doorbell.duplicate().map_err(text)?;
        let role = Role::Decode { manager: Box::new(manager), mover: ring, doorbell };
        let member =
            Member { worker: parts.worker(row, End::Destination)?, role, reports: Some(reports) };
        let (listener, address) = data.unzip();
        let lanes = Lanes::new(listener, parts.waiter.set.clone());
        let directory = Directory::knowing(Source::Remote(control), control);
        let own = identity(wire::Role::Decode);
        let peers = Peers::new(own, None, directory, Passing::default(), lanes, STILL);
        parts.side(row, member, handle, mover, address, peers)
    }

    /// The slot's pages expect their bytes.
    pub fn expecting(&mut self, slot: Slot, tokens: u32) {
        self.handoff.expecting(WORKER, slot, 0..tokens, Instant::now());
    }
}

impl<C: Cancel> Side<C> {
    /// Says something to the other process.
    pub fn say(&mut self, what: &Say) -> Result<(), String> {
        self.talk.say(&mut self.reactor, what)
    }

    /// What the other process says next.
    pub fn hear(&mut self) -> Result<Say, String> {
        self.until("a word of the other process", |side| {
            match side.talk.hear(&mut side.reactor)? {
                None if side.gone => Err("the other process is gone".into()),
                said => Ok(said),
            }
        })
    }

    /// What the other process says next, unless the transfer fails here.
    pub fn hear_beside(&mut self, slot: Slot) -> Result<Say, String> {
        self.until("the KV at the destination", |side| match side.talk.hear(&mut side.reactor)? {
            None if side.gone => Err("the other process is gone".into()),
            None => match side.status(slot).cause {
                Some(cause) => Err(format!("the hand-off failed at the source: {cause}")),
                None => Ok(None),
            },
            said => Ok(said),
        })
    }

    /// Enters a room whose prompt has so many tokens; a destination's from `source`.
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
        let request = Request {
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
            top_logprobs: 0,
            max_new: 1,
            stop_tokens: Vec::new(),
            ignore_eos: false,
            deadline,
            stamps: Stamps::new(now),
        };
        self.handoff.submit(Box::new(request), source, now);
        Ok(slot)
    }

    /// Waits for the command that `wanted` takes.
    pub fn command<T>(
        &mut self,
        what: &str,
        wanted: impl Fn(&Command) -> Option<T>,
    ) -> Result<T, String> {
        self.until(what, |side| {
            if let Some(said) = side.talk.hear(&mut side.reactor)? {
                return Err(format!("the other process says {said:?}, not {what}"));
            }
            if side.gone {
                return Err("the other process is gone".into());
            }
            for command in side.commands.try_iter() {
                if let Command::Abort { cause, .. } = command {
                    return Err(format!("{what}: {cause}"));
                }
                if let Some(found) = wanted(&command) {
                    return Ok(Some(found));
                }
            }
            Ok(None)
        })
    }

    /// Leases pages to a slot's transfer.
    pub fn lease(&mut self, slot: Slot, pages: &[PageId]) -> Lease {
        self.pool.lease(slot.id, slot.generation, pages)
    }

    /// The slot's status.
    pub fn status(&self, slot: Slot) -> Status {
        self.handle.status(slot.id)
    }

    /// Waits until the slot has ended, for better or worse, and gives it back.
    pub fn leave(&mut self, slot: Slot, pages: &[PageId]) -> Result<Option<Cause>, String> {
        let end = self.until("the end of a lease", |side| Ok(side.handle.poll_end()))?;
        self.pool.end(end.ended, pages);
        let cause = self.until("the end of a transfer", |side| {
            let status = side.status(slot);
            Ok(status.state.is_terminal().then_some(status.cause))
        })?;
        self.handoff.finished(WORKER, slot, cause, Instant::now());
        self.handoff.released(WORKER, slot);
        Ok(cause)
    }

    /// Turns until `done` finds what it looks for.
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
            self.bell.announce();
            // Looked for once more, as whoever rings may have missed the announcement.
            let found = done(self)?;
            if found.is_none() {
                self.turn()?;
            }
            self.bell.dismiss();
            if let Some(found) = found {
                return Ok(found);
            }
            if Instant::now() > until {
                return Err(format!("{what}: not within {} s", PATIENCE.as_secs()));
            }
        }
    }

    /// False where another thread does it.
    fn step_mover(&mut self) -> bool {
        match &mut self.mover {
            Turning::Here(mover) => {
                mover.step();
                true
            }
            Turning::Thread { .. } => false,
        }
    }

    /// One turn of `ctl`, parked until something happens where it may be.
    fn turn(&mut self) -> Result<(), String> {
        let parks = matches!(self.mover, Turning::Thread { .. }) && !self.handoff.has_news();
        let wait = if parks { TICK } else { Duration::ZERO };
        self.reactor.poll(Some(Instant::now() + wait)).map_err(text)?;
        let now = Instant::now();
        while let Some(event) = self.reactor.next_event() {
            match event {
                // What it said last is heard all the same.
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
        self.handoff.turn(now);
        self.peers.serve(&mut self.reactor, &mut self.handoff, now);
        if now >= self.next_tick {
            self.next_tick = now + TICK;
            self.handoff.expire(now);
            self.peers.expire(&mut self.reactor, &mut self.handoff, now);
        }
        Ok(())
    }
}

impl Turning {
    fn start(mut mover: Mover, waiter: Waiter) -> std::io::Result<Turning> {
        let (stop, bell) = (Arc::new(AtomicBool::new(false)), waiter.bell.clone());
        let told = stop.clone();
        let thread = thread::Builder::new()
            .name("move-0".into())
            .spawn(move || waiter.run(&mut mover, &told))?;
        Ok(Turning::Thread { stop, bell, thread: Some(thread) })
    }
}

impl Drop for Turning {
    fn drop(&mut self) {
        if let Turning::Thread { stop, bell, thread } = self {
            stop.store(true, Ordering::Release);
            bell.ring();
            // One that panicked has said so.
            let _ = thread.take().map(JoinHandle::join);
        }
    }
}

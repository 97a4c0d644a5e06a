//! Joins the hand-off's protocol to the world: managers to rings, links between workers of this process,
//! links to peers, and the set-up of transports.
//!
//! Thread: `ctl`. Owns: the workers of this process and their managers. What a manager wants done beyond
//! its rings is queued and done when its call has returned, so that one manager never runs inside another.

use crate::cause::Cause;
use crate::front::worker::{DestinationRing, Reports, SourceRing, Worker};
use crate::ids::{Room, SessionGeneration, WorkerId};
use crate::kv::layout::KvLayout;
use crate::sched::mailbox::Command;
use crate::sched::request::Request;
use crate::sys::event::EventCounter;
use crate::transfer::command::{DestinationCommand, SessionId, SourceCommand, Target};
use crate::transfer::manager::destination::{self, DestinationEffects, DestinationManager};
use crate::transfer::manager::identity::Mismatch;
use crate::transfer::manager::rooms::{Prompt, Slot};
use crate::transfer::manager::source::{self, SourceEffects, SourceManager};
use crate::transfer::plan::Template;
use crate::transfer::transport::fake::Fake;
use crate::transfer::transport::shm::{PeerShape, ShmCursor, ShmRing};
use crate::wire::Multipart;
use crate::wire::message::{HostId, Message, Rank, RegionLengths, ShmGrant, SocketName, Token, Transport};
use std::collections::{HashMap, VecDeque};
use std::time::Instant;

/// Where a decode worker reaches a prefill worker.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Source {
    /// A worker of this process.
    Local(WorkerId),
}

/// A control connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Link {
    /// Between two workers of this process.
    Local {
        /// Prefill.
        source: WorkerId,
        /// Decode.
        destination: WorkerId,
    },
}

/// A worker with its role.
#[derive(Debug)]
pub enum Role {
    /// Reads prompts.
    Prefill {
        /// Rooms and sessions.
        manager: Box<SourceManager<Link>>,
        /// To its mover.
        mover: SourceRing,
    },
    /// Produces tokens.
    Decode {
        /// Slots and sessions.
        manager: Box<DestinationManager<Link, Source>>,
        /// To its mover.
        mover: DestinationRing,
        /// Wakes its mover, also from other processes.
        doorbell: EventCounter,
    },
    /// Both, without a hand-off.
    Mixed,
}

/// A worker, its role, and what its mover says.
#[derive(Debug)]
pub struct Member {
    /// What all roles share.
    pub worker: Worker,
    /// The rest.
    pub role: Role,
    /// From its mover.
    pub reports: Option<Reports>,
}

/// What a manager wants done.
#[derive(Debug)]
enum Wish {
    Send { from: WorkerId, link: Link, message: Multipart },
    Dial { from: WorkerId, source: Source },
    BindSource { worker: WorkerId, link: Link, session: SessionId, transport: Transport },
    BindDestination { worker: WorkerId, link: Link, session: SessionId, shape: Shape, template: Template },
}

/// What a destination was told of its source.
#[derive(Debug)]
struct Shape {
    transport: Transport,
    layout: KvLayout,
    pages: u32,
    generation: SessionGeneration,
}

/// All workers of this process and the links between them and to others.
#[derive(Debug)]
pub struct Handoff {
    members: Vec<Member>,
    wishes: VecDeque<Wish>,
    /// Rings of sessions whose destination has not shown its cursor yet.
    rings: HashMap<(WorkerId, SessionId), ShmRing>,
    /// Source sessions by the link they were announced on.
    bound: HashMap<Link, (WorkerId, SessionId)>,
    offer: Offer,
}

/// What destinations of this process offer to sources.
#[derive(Clone, Debug)]
pub struct Offer {
    /// Transports, in order of preference.
    pub transports: Vec<Transport>,
    /// This host, for shm.
    pub host: HostId,
}

impl Handoff {
    /// A process with these workers, in order of their ids.
    pub fn new(members: Vec<Member>, offer: Offer) -> Handoff {
        Handoff { members, wishes: VecDeque::new(), rings: HashMap::new(), bound: HashMap::new(), offer }
    }

    /// The workers, in order of their ids.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// A worker.
    pub fn worker(&self, id: WorkerId) -> &Worker {
        &self.members[id.index()].worker
    }

    /// The transport between workers of this process.
    pub fn transport_name(&self) -> &'static str {
        match self.offer.transports.first() {
            Some(Transport::Shm) => "shm",
            Some(Transport::Tcp) => "tcp",
            Some(Transport::Fake) | None => "fake",
        }
    }

    /// A worker, to take slots from.
    pub fn worker_mut(&mut self, id: WorkerId) -> &mut Worker {
        &mut self.members[id.index()].worker
    }

    /// Gives a request to its worker; on a decode worker `source` reads its prompt. What cannot be met ends
    /// through the engine like any other failure.
    pub fn submit(&mut self, request: Box<Request>, source: Option<&Source>, now: Instant) {
        let id = request.worker;
        let (slot, room) = (Slot { id: request.slot, generation: request.generation }, request.room);
        let Member { worker, role, .. } = &mut self.members[id.index()];
        let prompt = worker.tenant(slot).map(|tenant| tenant.prompt);
        worker.engine.send(Command::Submit(request));
        let Some(prompt) = prompt else { return };
        let wishes = &mut self.wishes;
        let entered = match role {
            Role::Prefill { manager, mover } => manager.enter(
                room,
                slot,
                prompt,
                now,
                &mut Effects { worker, mover, wishes, offer: &self.offer },
            ),
            Role::Decode { manager, mover, .. } => match source {
                Some(source) => manager.enter(
                    slot,
                    room,
                    source,
                    now,
                    &mut Effects { worker, mover, wishes, offer: &self.offer },
                ),
                None => Err(Cause::Refused),
            },
            Role::Mixed => Ok(()),
        };
        if let Err(cause) = entered {
            self.members[id.index()].worker.abort(slot, cause);
        }
        self.pump(now);
    }

    /// The scheduler of a decode worker has leased pages: Destination leaves.
    pub fn expecting(&mut self, id: WorkerId, slot: Slot, tokens: u32, now: Instant) {
        let Member { worker, role: Role::Decode { manager, mover, .. }, .. } = &mut self.members[id.index()]
        else {
            return;
        };
        let Some(tenant) = worker.tenant(slot).copied() else { return };
        let pages = worker.layout().pages_for(tokens) as usize;
        let pages: Vec<_> = (0..pages).map(|index| worker.lists().page(slot.id, index)).collect();
        let effects = &mut Effects { worker, mover, wishes: &mut self.wishes, offer: &self.offer };
        manager.expecting(slot, tenant.prompt, &pages, tenant.deadline, now, effects);
        self.pump(now);
    }

    /// The scheduler has ended a request.
    pub fn finished(&mut self, id: WorkerId, slot: Slot, failure: Option<Cause>, now: Instant) {
        let Member { worker, role, .. } = &mut self.members[id.index()];
        let wishes = &mut self.wishes;
        match role {
            Role::Prefill { manager, mover } => {
                manager.leave(slot, failure, now, &mut Effects { worker, mover, wishes, offer: &self.offer });
            }
            Role::Decode { manager, mover, .. } => {
                manager.leave(slot, failure, &mut Effects { worker, mover, wishes, offer: &self.offer });
            }
            Role::Mixed => {}
        }
        self.pump(now);
    }

    /// The scheduler has given a request back.
    pub fn released(&mut self, id: WorkerId, slot: Slot) {
        self.members[id.index()].worker.release(slot);
    }

    /// Whether a mover has something to say.
    pub fn has_news(&self) -> bool {
        self.members.iter().any(|member| member.reports.as_ref().is_some_and(|reports| !reports.is_empty()))
    }

    /// Takes in what movers say, sends what waited, ends what is overdue. True when there was something.
    pub fn turn(&mut self, now: Instant) -> bool {
        let mut busy = false;
        for index in 0..self.members.len() {
            while let Some(report) =
                self.members[index].reports.as_ref().and_then(|ring| ring.try_recv().ok())
            {
                busy = true;
                let Member { worker, role, .. } = &mut self.members[index];
                let wishes = &mut self.wishes;
                match role {
                    Role::Prefill { manager, mover } => {
                        manager.report(report, &mut Effects { worker, mover, wishes, offer: &self.offer });
                    }
                    Role::Decode { manager, mover, .. } => {
                        manager.report(
                            report,
                            now,
                            &mut Effects { worker, mover, wishes, offer: &self.offer },
                        );
                    }
                    Role::Mixed => {}
                }
                self.pump(now);
            }
        }
        busy
    }

    /// Ends what is overdue in the managers, and sends what found a full ring.
    pub fn expire(&mut self, now: Instant) {
        for index in 0..self.members.len() {
            let Member { worker, role, .. } = &mut self.members[index];
            worker.engine.flush();
            let wishes = &mut self.wishes;
            match role {
                Role::Prefill { manager, mover } => {
                    mover.flush();
                    manager.expire(now, &mut Effects { worker, mover, wishes, offer: &self.offer });
                }
                Role::Decode { manager, mover, .. } => {
                    mover.flush();
                    manager.expire(now, &mut Effects { worker, mover, wishes, offer: &self.offer });
                }
                Role::Mixed => {}
            }
        }
        self.pump(now);
    }

    fn pump(&mut self, now: Instant) {
        while let Some(wish) = self.wishes.pop_front() {
            match wish {
                Wish::Send { from, link, message } => self.deliver(from, link, &message, now),
                Wish::Dial { from, source } => self.dial(from, &source, now),
                Wish::BindSource { worker, link, session, transport } => {
                    self.bound.insert(link, (worker, session));
                    self.bind_source(worker, session, transport);
                }
                Wish::BindDestination { worker, link, session, shape, template } => {
                    let outcome = self.bind_destination(worker, link, session, &shape, template);
                    self.bound_destination(worker, session, outcome, now);
                }
            }
        }
    }

    fn deliver(&mut self, from: WorkerId, link: Link, message: &Multipart, now: Instant) {
        let Link::Local { source, destination } = link;
        let to = if from == source { destination } else { source };
        let Ok(Some(message)) = Message::decode(message.parts(), None) else {
            debug_assert!(false, "a message of our own does not decode");
            return;
        };
        let Member { worker, role, .. } = &mut self.members[to.index()];
        let wishes = &mut self.wishes;
        match role {
            Role::Prefill { manager, mover } => {
                manager.receive(
                    link,
                    &message,
                    now,
                    &mut Effects { worker, mover, wishes, offer: &self.offer },
                );
            }
            Role::Decode { manager, mover, .. } => {
                manager.receive(
                    link,
                    &message,
                    now,
                    &mut Effects { worker, mover, wishes, offer: &self.offer },
                );
            }
            Role::Mixed => {}
        }
    }

    /// Workers of one process need no handshake: they were started together.
    fn dial(&mut self, from: WorkerId, source: &Source, now: Instant) {
        let Source::Local(at) = source;
        let link = Link::Local { source: *at, destination: from };
        let Member { worker, role: Role::Decode { manager, mover, .. }, .. } =
            &mut self.members[from.index()]
        else {
            return;
        };
        let effects = &mut Effects { worker, mover, wishes: &mut self.wishes, offer: &self.offer };
        manager.link_up(source, link, now, effects);
    }

    fn bind_source(&mut self, id: WorkerId, session: SessionId, transport: Transport) {
        let ring = match transport {
            Transport::Shm => ShmRing::new().map(Some).map_err(|error| error.to_string()),
            Transport::Fake => Ok(None),
            Transport::Tcp => Err("tcp inside one process".to_string()),
        };
        let Member { worker, role: Role::Prefill { manager, mover }, .. } = &mut self.members[id.index()]
        else {
            return;
        };
        let outcome = ring.map(|ring| {
            match ring {
                Some(ring) => drop(self.rings.insert((id, session), ring)),
                None => mover.send(SourceCommand::Open { session, binding: Box::new(Fake) }),
            }
            rank(worker, &[transport], self.offer.host)
        });
        manager.bound(
            session,
            outcome,
            &mut Effects { worker, mover, wishes: &mut self.wishes, offer: &self.offer },
        );
    }

    fn bind_destination(
        &mut self,
        id: WorkerId,
        link: Link,
        session: SessionId,
        shape: &Shape,
        template: Template,
    ) -> Result<(), String> {
        let generation = shape.generation;
        if shape.transport == Transport::Fake {
            self.open_destination(
                id,
                DestinationCommand::Open { session, generation, binding: Box::new(Fake) },
            );
            return Ok(());
        }
        let key = self.bound.get(&link).copied().ok_or("the source's session is gone")?;
        let ring = self.rings.remove(&key).ok_or("the source's session is gone")?;
        let text = |error: std::io::Error| error.to_string();
        let cursor = ShmCursor::new().map_err(text)?;
        let Role::Decode { doorbell, .. } = &self.members[id.index()].role else {
            return Err("not a decode worker".into());
        };
        let shown = cursor.descriptors(doorbell).map_err(text)?;
        let memory = &self.members[key.0.index()].worker.memory;
        let peer = PeerShape {
            pool_bytes: memory.region.len() as u64,
            pages: shape.pages,
            lists: memory.lists.shape(),
        };
        let descriptors = ring.descriptors(memory).map_err(text)?;
        let half = cursor.connect(descriptors, &peer, shape.layout.page_size, template).map_err(text)?;
        let source_half = ring.connect(shown).map_err(text)?;
        if let Role::Prefill { mover, .. } = &mut self.members[key.0.index()].role {
            mover.send(SourceCommand::Open { session: key.1, binding: Box::new(source_half) });
        }
        self.open_destination(id, DestinationCommand::Open { session, generation, binding: Box::new(half) });
        Ok(())
    }

    fn open_destination(&mut self, id: WorkerId, command: DestinationCommand) {
        if let Role::Decode { mover, .. } = &mut self.members[id.index()].role {
            mover.send(command);
        }
    }

    fn bound_destination(
        &mut self,
        id: WorkerId,
        session: SessionId,
        outcome: Result<(), String>,
        now: Instant,
    ) {
        let Member { worker, role: Role::Decode { manager, mover, .. }, .. } = &mut self.members[id.index()]
        else {
            return;
        };
        manager.bound(
            session,
            outcome,
            now,
            &mut Effects { worker, mover, wishes: &mut self.wishes, offer: &self.offer },
        );
    }
}

/// What one worker shows of itself in a session.
fn rank(worker: &Worker, transports: &[Transport], host: HostId) -> Rank {
    let shm = transports.contains(&Transport::Shm).then(|| ShmGrant {
        host,
        socket: SocketName::new(b"-").expect("one byte fits"),
        token: Token([0; 16]),
    });
    Rank {
        regions: RegionLengths { kv: worker.memory.region.len() as u64, aux: 0, notice: 0 },
        lanes: 1,
        shm,
        tcp: None,
        fake: transports.contains(&Transport::Fake),
    }
}

/// One manager call's way out.
struct Effects<'a, M> {
    worker: &'a mut Worker,
    mover: &'a mut M,
    wishes: &'a mut VecDeque<Wish>,
    offer: &'a Offer,
}

impl<M> Effects<'_, M> {
    fn send_over(&mut self, link: Link, message: &Message<'_>) {
        let mut encoded = Multipart::new();
        message.encode(None, &mut encoded);
        self.wishes.push_back(Wish::Send { from: self.worker.id, link, message: encoded });
    }

    fn engine_failed(&mut self, slot: Slot, cause: Cause) {
        self.worker.abort(slot, cause);
    }
}

impl SourceEffects<Link> for Effects<'_, SourceRing> {
    fn send(&mut self, link: Link, message: &Message<'_>) {
        self.send_over(link, message);
    }

    fn mover(&mut self, command: SourceCommand) {
        self.mover.send(command);
    }

    fn bind(&mut self, link: Link, session: SessionId, how: source::Binding<'_>) {
        let worker = self.worker.id;
        self.wishes.push_back(Wish::BindSource { worker, link, session, transport: how.transport });
    }

    fn granted(&mut self, slot: Slot, target: Target) {
        let Slot { id: slot, generation } = slot;
        self.worker.engine.send(Command::Granted { worker: self.worker.id, slot, generation, target });
    }

    fn failed(&mut self, slot: Slot, cause: Cause) {
        self.engine_failed(slot, cause);
    }

    fn refused(&mut self, link: Link, mismatch: &Mismatch) {
        eprintln!("session refused on {link:?}: {mismatch}");
    }
}

impl DestinationEffects<Link, Source> for Effects<'_, DestinationRing> {
    fn send(&mut self, link: Link, message: &Message<'_>) {
        self.send_over(link, message);
    }

    fn mover(&mut self, command: DestinationCommand) {
        self.mover.send(command);
    }

    fn dial(&mut self, source: &Source) {
        self.wishes.push_back(Wish::Dial { from: self.worker.id, source: source.clone() });
    }

    fn hang_up(&mut self, _link: Link) {}

    fn offer(&mut self, _session: SessionId, _source: &Source) -> Rank {
        rank(self.worker, &self.offer.transports, self.offer.host)
    }

    fn bind(&mut self, link: Link, session: SessionId, how: destination::Binding<'_>) {
        let shape = Shape {
            transport: how.welcome.transport,
            layout: how.layout,
            pages: how.welcome.kv.pages,
            generation: how.welcome.session,
        };
        let worker = self.worker.id;
        self.wishes.push_back(Wish::BindDestination { worker, link, session, shape, template: how.template });
    }

    fn ready(&mut self, slot: Slot, session: SessionId) {
        let Slot { id: slot, generation } = slot;
        self.worker.engine.send(Command::SessionReady { worker: self.worker.id, slot, generation, session });
    }

    fn failed(&mut self, slot: Slot, cause: Cause) {
        self.engine_failed(slot, cause);
    }

    fn refused(&mut self, source: &Source, mismatch: &Mismatch) {
        eprintln!("session with {source:?} refused: {mismatch}");
    }
}

/// A prompt as both legs compare it.
pub fn prompt_of(ids: &[u32]) -> Prompt {
    Prompt { tokens: ids.len() as u32, hash: crate::wire::message::ids_hash(ids) }
}

/// A room for a new attempt: 63 random bits.
pub fn room_of(random: u64) -> Room {
    Room(random >> 1)
}

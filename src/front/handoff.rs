//! Joins the hand-off's protocol to the world: managers to rings, links between workers of this process,
//! links to peers, and the set-up of transports.
//!
//! Thread: `ctl`. Owns: the workers of this process and their managers. What a manager wants done beyond
//! its rings is queued and done when its call has returned, so that one manager never runs inside another.

mod effects;

pub use effects::rank;

use crate::cause::Cause;
use crate::front::asking::{Ask, Word};
use crate::front::worker::{DestinationRing, Reports, SourceRing, Worker};
use crate::ids::{Room, SessionGeneration, WorkerId};
use crate::kv::layout::KvLayout;
use crate::limits::SESSION_SETUP_DEADLINE;
use crate::net::ConnId;
use crate::obs::log::event;
use crate::sched::mailbox::Command;
use crate::sched::request::Request;
use crate::sys::event::{EventCounter, WaitSet};
use crate::transfer::command::{SessionId, SourceCommand, Target};
use crate::transfer::manager::destination::{DestinationManager, Rest};
use crate::transfer::manager::rooms::{Prompt, Slot};
use crate::transfer::manager::source::SourceManager;
use crate::transfer::plan::Template;
use crate::transfer::status::{Move, State};
use crate::transfer::transport::rdma::{RdmaOffer, RdmaSource};
use crate::transfer::transport::shm::{PeerShape, ShmCursor, ShmRing};
use crate::transfer::transport::{DestinationBinding, SourceBinding, fake::Fake};
use crate::wire::Multipart;
use crate::wire::message::{HostId, Message, Rank, Token, Transport, Welcome};
use effects::Effects;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::time::Instant;

/// Where a decode worker reaches a prefill worker.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Source {
    /// A worker of this process.
    Local(WorkerId),
    /// Nobody: the transport is fake, and so is the other side.
    Fake,
    /// A worker of another process, whose registry answers at this address.
    Remote(SocketAddr),
    /// The same, by a name that is resolved first: one worker under two names would be two sessions, each of
    /// which voids the other. No manager hears of it.
    Named {
        /// As in `bootstrap_host`.
        host: String,
        /// As in `bootstrap_port`.
        port: u16,
    },
}

impl Source {
    /// A worker of another process, by a name or an address in any of its spellings.
    pub fn remote(host: &str, port: u16) -> Source {
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let ip = match bare {
            "localhost" => Some(IpAddr::V4(Ipv4Addr::LOCALHOST)),
            literal => literal.parse::<IpAddr>().ok(),
        };
        match ip {
            Some(ip) => Source::Remote(SocketAddr::new(ip.to_canonical(), port)),
            None => Source::Named { host: host.to_ascii_lowercase(), port },
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Local(worker) => write!(f, "worker {}", worker.0),
            Source::Fake => f.write_str("fake"),
            Source::Remote(registry) => registry.fmt(f),
            Source::Named { host, port } => write!(f, "{host}:{port}"),
        }
    }
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
    /// To another process.
    Remote(ConnId),
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Link::Local { source, destination } => {
                write!(f, "of worker {} from worker {}", source.0, destination.0)
            }
            Link::Remote(conn) => write!(f, "{conn}"),
        }
    }
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
    HangUp { link: Link },
    BindSource { link: Link, session: SourceSession },
    BindDestination { link: Link, session: DestinationSession },
    CloseSource { worker: WorkerId, session: SessionId },
    CloseDestination { worker: WorkerId, session: SessionId },
    Grant { worker: WorkerId, session: SessionId, token: Token },
    Offer { worker: WorkerId, session: SessionId, offer: RdmaOffer },
}

/// A source's session whose transport is to be set up.
#[derive(Debug)]
pub struct SourceSession {
    /// The prefill worker.
    pub worker: WorkerId,
    /// The session.
    pub session: SessionId,
    /// As the destination counts it.
    pub generation: SessionGeneration,
    /// How bytes are to move.
    pub transport: Transport,
    /// What the destination offers.
    pub rank: Rank,
    /// Where they go.
    pub template: Template,
}

/// A destination's session whose transport is to be set up.
#[derive(Debug)]
pub struct DestinationSession {
    /// The decode worker.
    pub worker: WorkerId,
    /// The session.
    pub session: SessionId,
    /// As this worker counts it.
    pub generation: SessionGeneration,
    /// How bytes are to move.
    pub transport: Transport,
    /// The source's half.
    pub rank: Rank,
    /// Where KV lies at the source.
    pub layout: KvLayout,
    /// Pages of the source's pool.
    pub pages: u32,
    /// Where the bytes come to.
    pub template: Template,
}

/// What is to be done for links to other processes.
#[derive(Debug)]
pub enum Remote {
    /// Send a message (not sealed yet).
    Send(ConnId, Multipart),
    /// Ask a prefill worker for a request's KV; [`Handoff::hear`] follows.
    Ask(Box<Ask>),
    /// What was asked for this request is of no interest any more.
    Unask(u64),
    /// Resolve the name of a prefill worker's host; [`Handoff::resolved`] follows.
    Resolve(String),
    /// Open a link to the prefill worker at this registry.
    Dial {
        /// The decode worker.
        worker: WorkerId,
        /// Whom.
        source: Source,
        /// When it is given up.
        until: Instant,
    },
    /// Close a link.
    HangUp(ConnId),
    /// Set up a source's half; [`Handoff::bound_source`] follows.
    BindSource(ConnId, SourceSession),
    /// Set up a destination's half; [`Handoff::bound_destination`] follows.
    BindDestination(ConnId, DestinationSession),
}

/// A slot of a decode worker whose source has but a name yet.
#[derive(Debug)]
struct Unresolved {
    worker: WorkerId,
    slot: Slot,
    room: Room,
    host: String,
    port: u16,
}

/// All workers of this process and the links between them and to others.
#[derive(Debug)]
pub struct Handoff {
    members: Vec<Member>,
    wishes: VecDeque<Wish>,
    /// Rings of sessions whose destination has not shown its cursor yet.
    rings: HashMap<(WorkerId, SessionId), ShmRing>,
    /// Source sessions that stand, by the link they were announced on.
    bound: HashMap<Link, (WorkerId, SessionId, SessionGeneration)>,
    /// At most one of each slot.
    unresolved: Vec<Unresolved>,
    /// Which session the holder of a token may open lanes of.
    tokens: HashMap<[u8; 16], (WorkerId, SessionId)>,
    /// Queue pairs that a source was told of and has not answered.
    offers: HashMap<(WorkerId, SessionId), RdmaOffer>,
    remote: VecDeque<Remote>,
    /// What prefill workers have said that were asked.
    words: VecDeque<(u64, Word)>,
    pumping: bool,
    offer: Offer,
}

/// What destinations of this process offer to sources.
#[derive(Clone, Debug)]
pub struct Offer {
    /// Transports, in order of preference.
    pub transports: Vec<Transport>,
    /// This host, for shm.
    pub host: HostId,
    /// Where lanes of tcp are accepted.
    pub data: Option<SocketAddr>,
    /// Lanes of a session: the destination says how many, as its mover has to keep up with them.
    pub lanes: u16,
}

impl Handoff {
    /// A process with these workers, in order of their ids.
    pub fn new(members: Vec<Member>, offer: Offer) -> Handoff {
        Handoff {
            members,
            wishes: VecDeque::new(),
            rings: HashMap::new(),
            bound: HashMap::new(),
            unresolved: Vec::new(),
            tokens: HashMap::new(),
            offers: HashMap::new(),
            remote: VecDeque::new(),
            words: VecDeque::new(),
            pumping: false,
            offer,
        }
    }

    /// The workers, in order of their ids.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// A worker.
    pub fn worker(&self, id: WorkerId) -> &Worker {
        &self.members[id.index()].worker
    }

    /// A worker, to take slots from.
    pub fn worker_mut(&mut self, id: WorkerId) -> &mut Worker {
        &mut self.members[id.index()].worker
    }

    /// Gives a request to its worker; on a decode worker `source` reads its prompt. On a prefill worker
    /// nobody waits for it where that is fake. What cannot be met ends through the engine like any other
    /// failure.
    pub fn submit(&mut self, request: Box<Request>, source: Option<&Source>, now: Instant) {
        let id = request.worker;
        let (slot, room) = (Slot { id: request.slot, generation: request.generation }, request.room);
        let Member { worker, role, .. } = &mut self.members[id.index()];
        let asked = worker.tenant(slot).map(|tenant| tenant.asked(room));
        worker.engine.send(Command::Submit(request));
        let Some(asked) = asked else { return };
        let wishes = &mut self.wishes;
        let entered = match role {
            Role::Prefill { .. } if source == Some(&Source::Fake) => grant_to_nobody(worker, slot, room),
            Role::Prefill { manager, mover } => manager.enter(
                room,
                slot,
                asked.prompt,
                now,
                &mut Effects { worker, mover, wishes, offer: &self.offer },
            ),
            Role::Decode { manager, mover, .. } => match source {
                Some(Source::Named { host, port }) => {
                    let (host, port) = (host.clone(), *port);
                    self.remote.push_back(Remote::Resolve(host.clone()));
                    self.unresolved.push(Unresolved { worker: id, slot, room, host, port });
                    Ok(())
                }
                Some(source) => manager.enter(
                    slot,
                    asked,
                    source,
                    now,
                    &mut Effects { worker, mover, wishes, offer: &self.offer },
                ),
                // It reads the prompt itself.
                None => Ok(()),
            },
            Role::Mixed => Ok(()),
        };
        if let Err(cause) = entered {
            self.members[id.index()].worker.abort(slot, cause);
        }
        self.settle(now);
    }

    /// A name is resolved, or cannot be: its slots enter their session, or fail.
    pub fn resolved(&mut self, name: &str, address: Result<IpAddr, String>, now: Instant) {
        if let Err(why) = &address {
            event!(Warn, "handoff", "prefill worker cannot be found", host = name, why = why);
        }
        let (named, others) =
            std::mem::take(&mut self.unresolved).into_iter().partition(|waiting| waiting.host == name);
        self.unresolved = others;
        let named: Vec<Unresolved> = named;
        for Unresolved { worker: id, slot, room, port, .. } in named {
            let Member { worker, role: Role::Decode { manager, mover, .. }, .. } =
                &mut self.members[id.index()]
            else {
                continue;
            };
            let effects = &mut Effects { worker, mover, wishes: &mut self.wishes, offer: &self.offer };
            let Some(asked) = effects.worker.tenant(slot).map(|tenant| tenant.asked(room)) else { continue };
            let entered = address.as_ref().map_err(|_| Cause::PeerLost).and_then(|&ip| {
                let source = Source::Remote(SocketAddr::new(ip, port));
                manager.enter(slot, asked, &source, now, effects)
            });
            if let Err(cause) = entered {
                self.members[id.index()].worker.abort(slot, cause);
            }
        }
        self.settle(now);
    }

    /// The scheduler of a decode worker has leased pages: Destination leaves.
    pub fn expecting(&mut self, id: WorkerId, slot: Slot, tokens: Range<u32>, now: Instant) {
        let Member { worker, role: Role::Decode { manager, mover, .. }, .. } = &mut self.members[id.index()]
        else {
            return;
        };
        let pages = (tokens.start / worker.layout().page_size)..worker.layout().pages_for(tokens.end);
        let pages: Vec<_> = (pages.start as usize..pages.end as usize)
            .map(|index| worker.lists().page(slot.id, index))
            .collect();
        let effects = &mut Effects { worker, mover, wishes: &mut self.wishes, offer: &self.offer };
        let rest = Rest { prefix: tokens.start, pages: &pages };
        let transport = manager.expecting(slot, rest, now, effects);
        worker.expects(slot, tokens.start, transport);
        self.settle(now);
    }

    /// The scheduler of a prefill worker has computed what nobody has a Destination for yet.
    pub fn computed(&mut self, id: WorkerId, slot: Slot, now: Instant) {
        let Member { worker, role: Role::Prefill { manager, mover }, .. } = &mut self.members[id.index()]
        else {
            return;
        };
        let effects = &mut Effects { worker, mover, wishes: &mut self.wishes, offer: &self.offer };
        manager.computed(slot, effects);
        self.settle(now);
    }

    /// Hand-overs that have ended well here, and of which their destinations have not said so.
    pub fn unheard(&self) -> usize {
        let unheard = |member: &Member| match &member.role {
            Role::Prefill { manager, .. } => manager.unheard_rooms(),
            Role::Decode { .. } | Role::Mixed => 0,
        };
        self.members.iter().map(unheard).sum()
    }

    /// Whether a destination has asked for a prompt that is read here, or nobody will.
    pub fn is_asked_for(&self, id: WorkerId, slot: Slot) -> bool {
        let Member { worker, role, .. } = &self.members[id.index()];
        match role {
            Role::Prefill { manager, .. } => {
                // What is handed over to nobody has been granted, and nobody asks for what has failed.
                manager.is_asked_for(slot) || worker.status.load(slot.id).state != State::Bootstrapping
            }
            Role::Decode { .. } | Role::Mixed => true,
        }
    }

    /// The scheduler has ended a request.
    pub fn finished(&mut self, id: WorkerId, slot: Slot, failure: Option<Cause>, now: Instant) {
        self.unresolved.retain(|waiting| (waiting.worker, waiting.slot) != (id, slot));
        let Member { worker, role, .. } = &mut self.members[id.index()];
        let wishes = &mut self.wishes;
        match role {
            Role::Prefill { manager, mover } => {
                manager.leave(slot, failure, now, &mut Effects { worker, mover, wishes, offer: &self.offer });
            }
            Role::Decode { manager, mover, .. } => {
                manager.leave(slot, failure, now, &mut Effects { worker, mover, wishes, offer: &self.offer });
            }
            Role::Mixed => {}
        }
        self.settle(now);
    }

    /// The scheduler has given a request back.
    pub fn released(&mut self, id: WorkerId, slot: Slot) {
        self.members[id.index()].worker.release(slot);
    }

    /// Asks a prefill worker for a request's KV.
    pub fn ask(&mut self, ask: Ask) {
        self.remote.push_back(Remote::Ask(Box::new(ask)));
    }

    /// Nobody waits any more for what was asked for a request.
    pub fn unask(&mut self, exchange: u64) {
        self.remote.push_back(Remote::Unask(exchange));
    }

    /// A prefill worker that was asked has said this.
    pub fn hear(&mut self, exchange: u64, word: Word) {
        self.words.push_back((exchange, word));
    }

    /// The next word, and of which request it is.
    pub fn poll_word(&mut self) -> Option<(u64, Word)> {
        self.words.pop_front()
    }

    /// Whether a mover, or a prefill worker that was asked, has something to say.
    pub fn has_news(&self) -> bool {
        !self.words.is_empty()
            || self
                .members
                .iter()
                .any(|member| member.reports.as_ref().is_some_and(|reports| !reports.is_empty()))
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
                        manager.report(
                            report,
                            now,
                            &mut Effects { worker, mover, wishes, offer: &self.offer },
                        );
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
                self.settle(now);
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
        self.settle(now);
    }

    /// Turns down what destinations want of rooms that no request of this process is in.
    pub fn refuse_early(&mut self, cause: Cause, now: Instant) {
        for Member { worker, role, .. } in &mut self.members {
            if let Role::Prefill { manager, mover } = role {
                let wishes = &mut self.wishes;
                manager.refuse_early(cause, now, &mut Effects { worker, mover, wishes, offer: &self.offer });
            }
        }
        self.settle(now);
    }

    fn pump(&mut self, now: Instant) {
        while let Some(wish) = self.wishes.pop_front() {
            match wish {
                // A link to oneself leads to the fake source, which takes every session and reads nothing.
                Wish::Send { from, link: Link::Local { source, destination }, message }
                    if source == destination =>
                {
                    self.take_fake(from, &message, now);
                }
                Wish::Send { from, link: Link::Local { source, destination }, message } => {
                    let to = if from == source { destination } else { source };
                    let Ok(Some(message)) = Message::decode(message.parts(), None) else {
                        debug_assert!(false, "a message of our own does not decode");
                        continue;
                    };
                    self.give(to, Link::Local { source, destination }, &message, now);
                }
                Wish::Send { link: Link::Remote(conn), message, .. } => {
                    self.remote.push_back(Remote::Send(conn, message));
                }
                // Workers of one process need no handshake: they were started together.
                Wish::Dial { from, source: Source::Local(at) } => {
                    self.link_up(
                        from,
                        &Source::Local(at),
                        Link::Local { source: at, destination: from },
                        now,
                    );
                }
                Wish::Dial { from, source: Source::Fake } => {
                    self.link_up(from, &Source::Fake, Link::Local { source: from, destination: from }, now);
                }
                Wish::Dial { from: worker, source } => {
                    let until = now + SESSION_SETUP_DEADLINE;
                    self.remote.push_back(Remote::Dial { worker, source, until });
                }
                Wish::HangUp { link: Link::Local { .. } } => {}
                Wish::HangUp { link: Link::Remote(conn) } => self.remote.push_back(Remote::HangUp(conn)),
                Wish::BindSource { link, session } => {
                    self.bound.insert(link, (session.worker, session.session, session.generation));
                    match link {
                        Link::Local { .. } => self.bind_source(&session),
                        Link::Remote(conn) => self.remote.push_back(Remote::BindSource(conn, session)),
                    }
                }
                Wish::CloseDestination { worker, session } => {
                    self.offers.remove(&(worker, session));
                    // What it announced is over, and opens nothing any more.
                    self.tokens.retain(|_, held| *held != (worker, session));
                }
                Wish::BindDestination { link: Link::Remote(conn), session } => {
                    // Another way was taken.
                    if session.transport != Transport::Rdma {
                        self.offers.remove(&(session.worker, session.session));
                    }
                    self.remote.push_back(Remote::BindDestination(conn, session));
                }
                Wish::BindDestination { link, session } => {
                    let (worker, id) = (session.worker, session.session);
                    let half = self.bind_destination(link, &session);
                    self.bound_destination(worker, id, session.generation, half, now);
                }
                Wish::CloseSource { worker, session } => {
                    self.rings.remove(&(worker, session));
                    self.bound.retain(|_, held| (held.0, held.1) != (worker, session));
                }
                Wish::Offer { worker, session, offer } => drop(self.offers.insert((worker, session), offer)),
                Wish::Grant { worker, session, token } => {
                    self.tokens.retain(|_, held| *held != (worker, session));
                    self.tokens.insert(token.0, (worker, session));
                }
            }
        }
    }

    /// What is to be done for links to other processes. What a source's session needs is not, once that has gone: its
    /// place may be another link's already, whose destination would be told of memory or queue pairs that are not its.
    pub fn poll_remote(&mut self) -> Option<Remote> {
        loop {
            match self.remote.pop_front()? {
                Remote::BindSource(conn, session) if !self.stands(conn, &session) => {}
                remote => return Some(remote),
            }
        }
    }

    /// What destinations of this process offer.
    pub fn offer(&self) -> &Offer {
        &self.offer
    }

    /// Wakes a decode worker's mover.
    pub fn doorbell(&self, id: WorkerId) -> Option<&EventCounter> {
        match &self.members[id.index()].role {
            Role::Decode { doorbell, .. } => Some(doorbell),
            Role::Prefill { .. } | Role::Mixed => None,
        }
    }

    /// The session that the holder of a token may open lanes of.
    pub fn session_of(&self, token: &[u8; 16]) -> Option<(WorkerId, SessionId)> {
        self.tokens.get(token).copied()
    }

    /// A link that was dialled is open and proven.
    pub fn link_up(&mut self, id: WorkerId, source: &Source, link: Link, now: Instant) {
        let Member { worker, role: Role::Decode { manager, mover, .. }, .. } = &mut self.members[id.index()]
        else {
            return;
        };
        manager.link_up(
            source,
            link,
            now,
            &mut Effects { worker, mover, wishes: &mut self.wishes, offer: &self.offer },
        );
        self.settle(now);
    }

    /// A prefill worker could not be reached or proven.
    pub fn dial_failed(&mut self, id: WorkerId, source: &Source, cause: Cause, now: Instant) {
        let Member { worker, role: Role::Decode { manager, mover, .. }, .. } = &mut self.members[id.index()]
        else {
            return;
        };
        manager.dial_failed(
            source,
            cause,
            now,
            &mut Effects { worker, mover, wishes: &mut self.wishes, offer: &self.offer },
        );
        self.settle(now);
    }

    /// A link to another process is dead.
    pub fn link_down(&mut self, conn: ConnId, cause: Cause, now: Instant) {
        let link = Link::Remote(conn);
        self.bound.remove(&link);
        for Member { worker, role, .. } in &mut self.members {
            let wishes = &mut self.wishes;
            match role {
                Role::Prefill { manager, mover } => {
                    manager.link_down(link, &mut Effects { worker, mover, wishes, offer: &self.offer });
                }
                Role::Decode { manager, mover, .. } => {
                    manager.link_down(
                        link,
                        cause,
                        now,
                        &mut Effects { worker, mover, wishes, offer: &self.offer },
                    );
                }
                Role::Mixed => {}
            }
        }
        self.settle(now);
    }

    /// A message has come from another process. It is for the one worker that talks to others.
    pub fn receive(&mut self, conn: ConnId, message: &Message<'_>, now: Instant) {
        self.give(WorkerId(0), Link::Remote(conn), message, now);
        self.settle(now);
    }

    /// A source's half of a transport stands, except for what `open` brings later, or cannot be set up.
    pub fn bound_source(
        &mut self,
        id: WorkerId,
        session: SessionId,
        outcome: Result<Rank, String>,
        now: Instant,
    ) {
        let Member { worker, role: Role::Prefill { manager, mover }, .. } = &mut self.members[id.index()]
        else {
            return;
        };
        manager.bound(
            session,
            outcome,
            &mut Effects { worker, mover, wishes: &mut self.wishes, offer: &self.offer },
        );
        self.settle(now);
    }

    /// Whether a source's session that was announced on this link still stands.
    pub fn stands(&self, conn: ConnId, session: &SourceSession) -> bool {
        let SourceSession { worker, session, generation, .. } = *session;
        self.bound.get(&Link::Remote(conn)) == Some(&(worker, session, generation))
    }

    /// Gives a source's mover its half.
    pub fn open_source(&mut self, id: WorkerId, session: SessionId, binding: Box<SourceBinding>) {
        if let Role::Prefill { manager, mover } = &mut self.members[id.index()].role
            && let Some(generation) = manager.usage(session)
        {
            mover.send(SourceCommand::Open { session, generation, binding });
        }
    }

    /// Gives a source's mover the half that moves nothing; what Welcome says of it.
    pub fn open_fake_source(&mut self, id: WorkerId, session: SessionId) -> Rank {
        self.open_source(id, session, Box::new(Fake));
        rank(self.worker(id), &[Transport::Fake], &self.offer, None)
    }

    /// Connects a source's queue pairs to those it was told of, and gives its mover its half; what Welcome says.
    pub fn open_rdma_source(&mut self, session: SourceSession, wait: &WaitSet) -> Result<Rank, String> {
        let worker = self.worker(session.worker);
        let rails = worker.rails.as_ref().ok_or("there is no rdma here")?;
        for nic in rails.left_out() {
            event!(Warn, "handoff", "a NIC is left out", nic = nic);
        }
        let peer = session.rank.rdma.ok_or("the destination names no queue pairs")?;
        let made = RdmaSource::new(rails, &peer, session.template, wait, sequence);
        let (half, told) = made.map_err(|error| format!("queue pairs: {error}"))?;
        let mut rank = rank(worker, &[], &self.offer, None);
        rank.rdma = Some(told);
        self.open_source(session.worker, session.session, Box::new(half));
        Ok(rank)
    }

    /// Connects the queue pairs that a source was told of to its own.
    pub fn rdma_destination(
        &mut self,
        session: &DestinationSession,
        wait: &WaitSet,
    ) -> Result<Box<DestinationBinding>, String> {
        let offer = self.offers.remove(&(session.worker, session.session));
        let offer = offer.ok_or("no queue pairs were offered")?;
        let source = session.rank.rdma.ok_or("the source names no queue pairs")?;
        let half = offer.connect(&source, wait).map_err(|error| format!("queue pairs: {error}"))?;
        Ok(Box::new(half))
    }

    /// Commands for a decode worker's mover that come with its transports.
    pub fn destination_mover(&mut self, id: WorkerId) -> Option<&mut DestinationRing> {
        match &mut self.members[id.index()].role {
            Role::Decode { mover, .. } => Some(mover),
            Role::Prefill { .. } | Role::Mixed => None,
        }
    }

    /// A destination's half of a transport stands, or cannot be set up.
    pub fn bound_destination(
        &mut self,
        id: WorkerId,
        session: SessionId,
        generation: SessionGeneration,
        half: Result<Box<DestinationBinding>, String>,
        now: Instant,
    ) {
        let Member { worker, role: Role::Decode { manager, mover, .. }, .. } = &mut self.members[id.index()]
        else {
            return;
        };
        if let Err(why) = &half {
            event!(Warn, "handoff", "a session could not be set up", worker = id, why = why);
        }
        let effects = &mut Effects { worker, mover, wishes: &mut self.wishes, offer: &self.offer };
        manager.bound(session, generation, half, now, effects);
        self.settle(now);
    }

    /// Does what the last call made necessary, unless that is under way.
    fn settle(&mut self, now: Instant) {
        if !self.pumping {
            self.pumping = true;
            self.pump(now);
            self.pumping = false;
        }
    }

    fn give(&mut self, to: WorkerId, link: Link, message: &Message<'_>, now: Instant) {
        let Member { worker, role, .. } = &mut self.members[to.index()];
        let wishes = &mut self.wishes;
        match role {
            Role::Prefill { manager, mover } => {
                manager.receive(
                    link,
                    message,
                    now,
                    &mut Effects { worker, mover, wishes, offer: &self.offer },
                );
            }
            Role::Decode { manager, mover, .. } => {
                manager.receive(
                    link,
                    message,
                    now,
                    &mut Effects { worker, mover, wishes, offer: &self.offer },
                );
            }
            Role::Mixed => {}
        }
    }

    fn take_fake(&mut self, from: WorkerId, message: &Multipart, now: Instant) {
        let Ok(Some(Message::Announce(announce))) = Message::decode(message.parts(), None) else { return };
        let worker = self.worker(from);
        let welcome = Welcome {
            session: announce.session,
            transport: Transport::Fake,
            late: false,
            kv: announce.kv,
            ranks: vec![rank(worker, &[Transport::Fake], &self.offer, None)],
        };
        let link = Link::Local { source: from, destination: from };
        self.give(from, link, &Message::Welcome(Box::new(welcome)), now);
    }

    fn bind_source(&mut self, session: &SourceSession) {
        let SourceSession { worker: id, session, transport, .. } = *session;
        let ring = match transport {
            Transport::Shm => ShmRing::new().map(Some).map_err(|error| error.to_string()),
            Transport::Fake => Ok(None),
            Transport::Tcp => Err("tcp inside one process".to_string()),
            Transport::Rdma => Err("rdma inside one process".to_string()),
        };
        let Member { worker, role: Role::Prefill { manager, mover }, .. } = &mut self.members[id.index()]
        else {
            return;
        };
        let outcome = ring.map(|ring| {
            match ring {
                Some(ring) => drop(self.rings.insert((id, session), ring)),
                None => {
                    let generation = manager.usage(session).unwrap_or(SessionGeneration(0));
                    mover.send(SourceCommand::Open { session, generation, binding: Box::new(Fake) });
                }
            }
            rank(worker, &[transport], &self.offer, None)
        });
        let effects = &mut Effects { worker, mover, wishes: &mut self.wishes, offer: &self.offer };
        manager.bound(session, outcome, effects);
    }

    fn bind_destination(
        &mut self,
        link: Link,
        asked: &DestinationSession,
    ) -> Result<Box<DestinationBinding>, String> {
        if asked.transport == Transport::Fake {
            return Ok(Box::new(Fake));
        }
        let &(worker, session, _) = self.bound.get(&link).ok_or("the source's session is gone")?;
        let key = (worker, session);
        let ring = self.rings.remove(&key).ok_or("the source's session is gone")?;
        let text = |error: std::io::Error| error.to_string();
        let cursor = ShmCursor::new().map_err(text)?;
        let Role::Decode { doorbell, .. } = &self.members[asked.worker.index()].role else {
            return Err("not a decode worker".into());
        };
        let shown = cursor.descriptors(doorbell).map_err(text)?;
        let memory = &self.members[key.0.index()].worker.memory;
        let peer = PeerShape {
            pool_bytes: memory.region.len() as u64,
            pages: asked.pages,
            lists: memory.lists.shape(),
        };
        let descriptors = ring.descriptors(memory).map_err(text)?;
        let template = asked.template.clone();
        let half = cursor.connect(descriptors, &peer, asked.layout.page_size, template).map_err(text)?;
        let source_half = ring.connect(shown).map_err(text)?;
        self.open_source(key.0, key.1, Box::new(source_half));
        Ok(Box::new(half))
    }
}

/// Has a prefill worker hand over to nobody, without a Destination: no manager knows of the room.
fn grant_to_nobody(worker: &mut Worker, slot: Slot, room: Room) -> Result<(), Cause> {
    let Slot { id: slot, generation } = slot;
    worker.status.advance(slot, generation, Move::Grant).map_err(|_| Cause::OtherLeg)?;
    let target = Target { session: SessionId::NOBODY, slot, generation, room, prefix: 0 };
    worker.engine.send(Command::Granted { worker: worker.id, slot, generation, target });
    Ok(())
}

/// A prompt as both legs compare it.
pub fn prompt_of(ids: &[u32]) -> Prompt {
    Prompt { tokens: ids.len() as u32, hash: crate::wire::message::ids_hash(ids) }
}

/// A room for a new attempt: 63 random bits.
pub fn room_of(random: u64) -> Room {
    Room(random >> 1)
}

/// Where a queue pair's packets begin to count.
fn sequence() -> u32 {
    u32::from_le_bytes(random())
}

/// Bytes nobody can guess.
pub fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    // The kernel's generator does not fail once it is seeded.
    let _ = getrandom::fill(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests;

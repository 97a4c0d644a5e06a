//! `ctl` of one process: what production does with sockets in `front::peers`, `front::passing` and
//! `front::generations`, done with parcels, by the same rules and the same limits.
//!
//! Owns: the hand-off, its links, its requests. A turn takes in what has come, what the engine and the mover
//! tell, and every tick ends what is overdue; what is to leave is in its outbox. Not here: where parcels go and
//! how long they take (`cluster`).

use super::agenda::Nanos;
use super::checkers::shadow::{Grant, Grants};
use super::checkers::{Checked, Checker, Finding, salts::Salts, tokens};
use super::process::WORKER;
use super::router::fleet::CallName;
use super::router::{Answer, LegName};
use super::workload::Order;
use crate::cause::Cause;
use crate::cluster::router::Role;
use crate::front::handoff::{
    DestinationSession, Handoff, Link, Remote, Role as MemberRole, Source, SourceSession, prompt_of, rank,
};
use crate::ids::{RequestId, Room};
use crate::kv::prefix::Salt;
use crate::limits::{PEER_PING_EVERY, PEER_SILENCE_MAX};
use crate::net::ConnId;
use crate::sched::mailbox::{Event, Outcome};
use crate::sched::request::{Request, Stamps};
use crate::transfer::manager::rooms::Slot;
use crate::transfer::transport::DestinationBinding;
use crate::transfer::transport::shm::{
    DestinationDescriptors, PeerShape, ShmCursor, ShmRing, SourceDescriptors,
};
use crate::wire::Multipart;
use crate::wire::message::{Message, Rank, ShmGrant, SocketName, Token, Transport};
use crossbeam_channel::Receiver;
use std::collections::{BTreeMap, VecDeque};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

/// Between two looks at deadlines, as in `front::service`.
const TICK: Duration = Duration::from_millis(100);
const FIRST_PORT: u16 = 10_000;

/// Names a connection in the whole simulation.
pub type ConnNumber = u32;

/// What travels on a control connection, in order.
#[derive(Debug)]
pub enum Parcel {
    /// A message of the hand-off.
    Message(Multipart),
    /// Asks for a sign of life.
    Ping,
    /// Gives it.
    Pong,
    /// The other end has closed it, or its process is gone.
    Close,
}

/// A decode leg's or a prefill leg's request.
#[derive(Debug)]
pub struct Job {
    /// Which.
    pub name: LegName,
    /// Where the legs meet.
    pub room: Room,
    /// Who reads the prompt.
    pub source: usize,
    /// What is asked.
    pub order: Order,
}

/// What a source shows over a unix socket.
#[derive(Debug)]
pub struct Shown {
    /// Of its memory.
    pub descriptors: SourceDescriptors,
    /// As it says.
    pub shape: PeerShape,
}

/// What has come for a process.
#[derive(Debug)]
pub enum Input {
    /// On a connection.
    Parcel(ConnNumber, Parcel),
    /// A decode worker has dialled.
    Accepted {
        /// The connection.
        conn: ConnNumber,
        /// Which worker's process it is,
        from: usize,
        /// and how many there were at its place before.
        life: u32,
    },
    /// A connection that was dialled stands and is proven, or is not to be had.
    Dialled(ConnNumber, bool),
    /// A destination calls for descriptors, with a token.
    Called(ConnNumber, Token, DestinationDescriptors),
    /// What came of a call.
    Shown(ConnNumber, Option<Box<Shown>>),
    /// The router sends a leg.
    Submit(Box<Job>),
    /// The router has closed a leg's connection.
    Cancel(LegName),
    /// The router asks how the worker is.
    Ask(CallName),
}

/// What a process sends.
#[derive(Debug)]
pub enum Output {
    /// On a connection.
    Parcel(ConnNumber, Parcel),
    /// A new connection to the process of a prefill worker.
    Dial {
        /// Its number.
        conn: ConnNumber,
        /// To whom.
        to: usize,
        /// How long it is tried.
        patience: Nanos,
    },
    /// A call for descriptors.
    Call(ConnNumber, Token, DestinationDescriptors),
    /// Its answer.
    Show(ConnNumber, Option<Box<Shown>>),
    /// To the router.
    Answer(CallName, Answer),
}

/// A link as this end knows it.
#[derive(Debug)]
struct Peering {
    /// Whom this process has dialled.
    dialled: Option<Source>,
    /// Which process has dialled this one, in which of its lives.
    from: Option<(usize, u32)>,
    open: bool,
    heard: Instant,
    next_ping: Instant,
}

#[derive(Debug)]
struct Leg {
    name: LegName,
    slot: Slot,
    salt: Salt,
    prompt: Vec<u32>,
    /// What the engine must tell, and has not told.
    expected: VecDeque<u32>,
    /// What prefill answers once its KV is with the destination.
    held: Option<u32>,
    finished: bool,
    /// The router does not listen any more.
    muted: bool,
}

/// Everything that `ctl` owns.
#[derive(Debug)]
pub struct Edge {
    process: usize,
    handoff: Handoff,
    events: Receiver<Event>,
    /// Of them, those that were told before the step that the engine computes.
    told: VecDeque<Event>,
    /// What has come and was not taken in.
    pub inbox: VecDeque<Input>,
    /// What is to be sent.
    pub outbox: Vec<Output>,
    links: BTreeMap<ConnNumber, Peering>,
    /// Sessions of a source whose destination has not called, by token.
    pending: BTreeMap<u64, (ConnNumber, SourceSession, ShmRing)>,
    /// Calls that are not answered.
    calling: BTreeMap<ConnNumber, (DestinationSession, ShmCursor)>,
    legs: BTreeMap<RequestId, Leg>,
    grants: Grants,
    salts: Salts,
    next_request: u64,
    next_token: u64,
    /// When overdue things are looked for.
    pub next_tick: Nanos,
    looked: Instant,
    stood_still: bool,
}

/// Where a prefill worker's registry is.
pub fn address_of(process: usize) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, FIRST_PORT + process as u16))
}

/// One turn's time and the numbers of new connections.
pub struct Turn<'a> {
    /// By the clock of the process.
    pub now: Instant,
    /// The same.
    pub nanos: Nanos,
    /// The engine's step has not taken its time yet: what it tells is to come.
    pub computes: bool,
    /// The last connection's number.
    pub conns: &'a mut ConnNumber,
}

impl Edge {
    /// A process of this number, without links. `events` are its engine's.
    pub fn new(process: usize, handoff: Handoff, events: Receiver<Event>) -> Edge {
        let page_size = handoff.worker(WORKER).layout().page_size;
        Edge {
            process,
            handoff,
            events,
            told: VecDeque::new(),
            inbox: VecDeque::new(),
            outbox: Vec::new(),
            links: BTreeMap::new(),
            pending: BTreeMap::new(),
            calling: BTreeMap::new(),
            legs: BTreeMap::new(),
            grants: Grants::new(),
            salts: Salts::new(page_size),
            next_request: 0,
            next_token: 0,
            next_tick: 0,
            looked: Instant::now(),
            stood_still: false,
        }
    }

    /// The process starts at this time.
    pub fn begin(&mut self, now: Instant) {
        self.looked = now;
    }

    /// The hand-off, to be looked at.
    pub fn handoff(&self) -> &Handoff {
        &self.handoff
    }

    /// Pages that sources were told of, or are about to be.
    pub fn grants(&self) -> &Grants {
        &self.grants
    }

    /// One turn, in the order of `front::service`.
    ///
    /// # Errors
    /// What the engine told and could not rightly tell.
    pub fn turn(&mut self, turn: &mut Turn<'_>) -> Checked {
        while let Some(input) = self.inbox.pop_front() {
            self.take(input, turn.now);
        }
        if !turn.computes {
            self.hear();
        }
        while let Some(event) = self.told.pop_front() {
            self.event(event, turn.now)?;
        }
        self.handoff.turn(turn.now);
        if turn.nanos >= self.next_tick {
            self.next_tick = turn.nanos + TICK.as_nanos() as Nanos;
            self.handoff.expire(turn.now);
            self.expire(turn.now);
        }
        while let Some(remote) = self.handoff.poll_remote() {
            self.serve(remote, turn);
        }
        Ok(())
    }

    /// What the engine has told so far was told in time.
    pub fn hear(&mut self) {
        self.told.extend(self.events.try_iter());
    }

    fn take(&mut self, input: Input, now: Instant) {
        match input {
            Input::Parcel(conn, parcel) => self.receive(conn, parcel, now),
            Input::Accepted { conn, from, life } => self.accept(conn, (from, life), now),
            Input::Dialled(conn, stands) => self.dialled(conn, stands, now),
            Input::Called(conn, token, shown) => {
                let answer = self.called(token, shown);
                self.outbox.push(Output::Show(conn, answer));
            }
            Input::Shown(conn, shown) => self.shown(conn, shown, now),
            Input::Submit(job) => self.submit(*job, now),
            Input::Ask(probe) => self.outbox.push(Output::Answer(probe, Answer::Well)),
            Input::Cancel(name) => {
                if let Some(leg) = self.legs.values_mut().find(|leg| leg.name == name) {
                    leg.muted = true;
                    if !leg.finished {
                        let slot = leg.slot;
                        self.handoff.worker_mut(WORKER).abort(slot, Cause::ClientGone);
                    }
                }
            }
        }
    }

    fn receive(&mut self, conn: ConnNumber, parcel: Parcel, now: Instant) {
        let Some(peering) = self.links.get_mut(&conn) else { return };
        peering.heard = now;
        match parcel {
            Parcel::Message(message) if peering.open => {
                let message = Message::decode(message.parts(), None).expect("a worker's message decodes");
                if let Some(message) = message {
                    self.handoff.receive(ConnId::outside(conn), &message, now);
                }
            }
            Parcel::Ping => self.outbox.push(Output::Parcel(conn, Parcel::Pong)),
            Parcel::Message(_) | Parcel::Pong => {}
            Parcel::Close => self.down(conn, now),
        }
    }

    /// Of several connections of a decode worker the newest counts: of one process the one it dialled last, of two the
    /// one that was accepted last.
    fn accept(&mut self, conn: ConnNumber, from: (usize, u32), now: Instant) {
        let same = |peering: &Peering| peering.from.is_some_and(|(process, _)| process == from.0);
        let older = self.links.iter().filter(|(_, peering)| same(peering));
        let older: Vec<_> = older.map(|(&conn, peering)| (conn, peering.from)).collect();
        for (older, whose) in older {
            if whose == Some(from) && older > conn {
                return self.outbox.push(Output::Parcel(conn, Parcel::Close));
            }
            self.outbox.push(Output::Parcel(older, Parcel::Close));
            self.down(older, now);
        }
        self.add(conn, None, Some(from), true, now);
    }

    fn dialled(&mut self, conn: ConnNumber, stands: bool, now: Instant) {
        let Some(peering) = self.links.get_mut(&conn) else { return };
        let Some(source) = peering.dialled.clone() else { return };
        if stands {
            (peering.open, peering.heard) = (true, now);
            self.handoff.link_up(WORKER, &source, Link::Remote(ConnId::outside(conn)), now);
        } else {
            self.links.remove(&conn);
            self.handoff.dial_failed(WORKER, &source, Cause::PeerLost, now);
        }
    }

    fn add(
        &mut self,
        conn: ConnNumber,
        dialled: Option<Source>,
        from: Option<(usize, u32)>,
        open: bool,
        now: Instant,
    ) {
        let next_ping = now + PEER_PING_EVERY;
        self.links.insert(conn, Peering { dialled, from, open, heard: now, next_ping });
    }

    fn down(&mut self, conn: ConnNumber, now: Instant) {
        let Some(peering) = self.links.remove(&conn) else { return };
        self.forget_calls(conn);
        match peering.dialled {
            Some(source) if !peering.open => {
                self.handoff.dial_failed(WORKER, &source, Cause::PeerLost, now);
            }
            _ => self.handoff.link_down(ConnId::outside(conn), Cause::PeerLost, now),
        }
    }

    fn forget_calls(&mut self, conn: ConnNumber) {
        self.pending.retain(|_, (control, ..)| *control != conn);
        self.calling.remove(&conn);
    }

    /// Silent links end, the others are kept warm.
    fn expire(&mut self, now: Instant) {
        let still = now.saturating_duration_since(self.looked);
        let stood_still = still > PEER_PING_EVERY;
        let excused = if stood_still && !self.stood_still { still } else { Duration::ZERO };
        (self.looked, self.stood_still) = (now, stood_still);
        let mut late = Vec::new();
        for (&conn, peering) in self.links.iter_mut().filter(|(_, peering)| peering.open) {
            peering.heard = (peering.heard + excused).min(now);
            if now.saturating_duration_since(peering.heard) > PEER_SILENCE_MAX {
                late.push(conn);
            } else if now >= peering.next_ping {
                peering.next_ping = now + PEER_PING_EVERY;
                self.outbox.push(Output::Parcel(conn, Parcel::Ping));
            }
        }
        for conn in late {
            self.outbox.push(Output::Parcel(conn, Parcel::Close));
            self.down(conn, now);
        }
        let handoff = &self.handoff;
        self.pending.retain(|_, (conn, session, _)| handoff.stands(ConnId::outside(*conn), session));
    }

    fn serve(&mut self, remote: Remote, turn: &mut Turn<'_>) {
        match remote {
            Remote::Send(conn, message) => self.send(conn, message),
            Remote::Dial { source, .. } if self.is_on_its_way(&source) => {}
            Remote::Dial { source, until, .. } => {
                let Source::Remote(address) = source else { return };
                *turn.conns += 1;
                let (conn, to) = (*turn.conns, usize::from(address.port() - FIRST_PORT));
                let patience = until.saturating_duration_since(turn.now).as_nanos() as Nanos;
                self.add(conn, Some(source), None, false, turn.now);
                self.outbox.push(Output::Dial { conn, to, patience });
            }
            Remote::HangUp(conn) => {
                let conn = number(conn);
                self.links.remove(&conn);
                self.forget_calls(conn);
                self.outbox.push(Output::Parcel(conn, Parcel::Close));
            }
            Remote::BindSource(conn, session) => {
                let (worker, id) = (session.worker, session.session);
                let outcome = self.offer(number(conn), session);
                self.handoff.bound_source(worker, id, outcome, turn.now);
            }
            Remote::BindDestination(conn, session) => {
                let (worker, id, generation) = (session.worker, session.session, session.generation);
                if let Err(why) = self.call(number(conn), session) {
                    self.handoff.bound_destination(worker, id, generation, Err(why), turn.now);
                }
            }
            Remote::Resolve(name) => unreachable!("no worker has a name here, nor has {name}"),
        }
    }

    fn send(&mut self, conn: ConnId, message: Multipart) {
        let conn = number(conn);
        if self.links.contains_key(&conn) {
            self.outbox.push(Output::Parcel(conn, Parcel::Message(message)));
        }
    }

    fn is_on_its_way(&self, source: &Source) -> bool {
        self.links.values().any(|peering| !peering.open && peering.dialled.as_ref() == Some(source))
    }

    /// Prepares a source's half.
    fn offer(&mut self, conn: ConnNumber, session: SourceSession) -> Result<Rank, String> {
        if session.transport != Transport::Shm {
            return Err(format!("{} is not simulated", session.transport));
        }
        let ring = ShmRing::new().map_err(|error| error.to_string())?;
        self.next_token += 1;
        let token = u128::from(self.next_token).to_le_bytes();
        let mut rank = rank(self.handoff.worker(WORKER), &[Transport::Shm], self.handoff.offer(), None);
        let socket = SocketName::new(b"-").expect("one byte fits");
        rank.shm = Some(ShmGrant { host: self.handoff.offer().host, socket, token: Token(token) });
        self.pending.retain(|_, (control, ..)| *control != conn);
        self.pending.insert(self.next_token, (conn, session, ring));
        Ok(rank)
    }

    /// Calls the source of a destination's session.
    fn call(&mut self, conn: ConnNumber, session: DestinationSession) -> Result<(), String> {
        let text = |error: std::io::Error| error.to_string();
        let grant = session.rank.shm.ok_or("the source names no socket")?;
        let cursor = ShmCursor::new().map_err(text)?;
        let doorbell = self.handoff.doorbell(session.worker).ok_or("not a decode worker")?;
        let shown = cursor.descriptors(doorbell).map_err(text)?;
        self.calling.insert(conn, (session, cursor));
        self.outbox.push(Output::Call(conn, grant.token, shown));
        Ok(())
    }

    /// A destination has called: its token decides what it is shown.
    fn called(&mut self, token: Token, shown: DestinationDescriptors) -> Option<Box<Shown>> {
        let number = u64::from_le_bytes(token.0[..8].try_into().expect("eight bytes"));
        let (conn, session, ring) = self.pending.remove(&number)?;
        if !self.handoff.stands(ConnId::outside(conn), &session) {
            return None;
        }
        let memory = self.handoff.worker(WORKER).memory.clone();
        let descriptors = ring.descriptors(&memory).ok()?;
        let half = ring.connect(shown).ok()?;
        self.handoff.open_source(session.worker, session.session, Box::new(half));
        let pool_bytes = memory.region.len() as u64;
        let shape = PeerShape { pool_bytes, pages: memory.pages, lists: memory.lists.shape() };
        Some(Box::new(Shown { descriptors, shape }))
    }

    fn shown(&mut self, conn: ConnNumber, shown: Option<Box<Shown>>, now: Instant) {
        let Some((session, cursor)) = self.calling.remove(&conn) else { return };
        let DestinationSession { worker, session, generation, pages, layout, template, .. } = session;
        let half = match shown {
            None => Err("the source closed its socket".to_string()),
            Some(shown) => {
                let Shown { descriptors, shape } = *shown;
                let shape = PeerShape { pages, ..shape };
                let half = cursor.connect(descriptors, &shape, layout.page_size, template);
                half.map(|half| Box::new(half) as Box<DestinationBinding>).map_err(|error| error.to_string())
            }
        };
        self.handoff.bound_destination(worker, session, generation, half, now);
    }

    /// A leg's request has come, as `front::generations` places it.
    fn submit(&mut self, job: Job, now: Instant) {
        let Job { name, room, source, order } = job;
        let deadline = now + Duration::from_nanos(order.patience);
        let worker = self.handoff.worker_mut(WORKER);
        let Some(slot) = worker.take_slot(prompt_of(&order.prompt), deadline) else {
            let refused = Answer::Ended(Outcome::Failed(Cause::Overloaded));
            self.outbox.push(Output::Answer(CallName::Leg(name), refused));
            return;
        };
        let (max_new, salt) = match name.role {
            Role::Prefill => (1, order.salt),
            // As where no key proves sources.
            Role::Decode => (order.max_new, order.salt.of(&address_of(source).to_string())),
        };
        self.salts.brought(salt, &order.prompt, &order.expected);
        let pages = worker.layout().pages_for(order.prompt.len() as u32 + max_new) as usize;
        self.next_request += 1;
        let request = Request {
            id: RequestId(self.next_request),
            worker: WORKER,
            room,
            slot: slot.id,
            generation: slot.generation,
            prompt: order.prompt.clone(),
            resumed: order.resumed,
            output: Vec::with_capacity(max_new as usize),
            pages: Vec::with_capacity(pages),
            salt: Some(salt),
            sampling: order.sampling,
            top_logprobs: 0,
            max_new,
            stop_tokens: order.stop_tokens,
            ignore_eos: false,
            deadline,
            stamps: Stamps::new(now),
        };
        let expected = order.expected.into_iter().take(max_new as usize).collect();
        let leg = Leg {
            name,
            slot,
            salt,
            prompt: order.prompt,
            expected,
            held: None,
            finished: false,
            muted: false,
        };
        self.legs.insert(request.id, leg);
        let source = (name.role == Role::Decode).then(|| Source::Remote(address_of(source)));
        self.handoff.submit(Box::new(request), source.as_ref(), now);
    }

    /// The engine tells, as to `front::generations`.
    fn event(&mut self, event: Event, now: Instant) -> Checked {
        let wrong = |leg: &Leg, what| Err(Finding::about(Checker::Events, leg.name.flight, what));
        match event {
            Event::Token { request, sampled, .. } => {
                let Some(leg) = self.legs.get_mut(&request) else { return Ok(()) };
                if leg.finished {
                    return wrong(leg, "a token after the end");
                }
                // Also of what nobody listens to any more.
                let right = leg.expected.pop_front();
                tokens::next(leg.name.flight, self.process, sampled.token, right)?;
                match leg.name.role {
                    Role::Prefill => leg.held = Some(sampled.token),
                    Role::Decode if !leg.muted => {
                        let name = CallName::Leg(leg.name);
                        self.outbox.push(Output::Answer(name, Answer::Token(sampled.token)));
                    }
                    Role::Decode => {}
                }
            }
            Event::Expecting { worker, slot, generation, tokens, .. } => {
                let worker_of = self.handoff.worker(worker);
                let layout = worker_of.layout();
                let same = |leg: &&Leg| (leg.slot.id, leg.slot.generation) == (slot, generation);
                let Some(leg) = self.legs.values().find(same) else {
                    return Err(Finding::new(
                        Checker::Events,
                        "pages were leased for a leg that is released",
                    ));
                };
                self.salts.found(leg.name.flight, leg.salt, &leg.prompt, tokens.start)?;
                let first = (tokens.start / layout.page_size) as usize;
                let pages = first..layout.pages_for(tokens.end) as usize;
                let grant = Grant {
                    generation,
                    request: leg.name.flight,
                    prompt: leg.prompt.clone(),
                    tokens: tokens.clone(),
                    first,
                    pages: pages.map(|index| worker_of.lists().page(slot, index)).collect(),
                };
                self.grants.insert(slot, grant);
                self.handoff.expecting(worker, Slot { id: slot, generation }, tokens, now);
            }
            Event::Finished { request, outcome, cached_tokens, .. } => {
                let Some(leg) = self.legs.get_mut(&request) else { return Ok(()) };
                // Decode tells what its source found.
                if leg.name.role == Role::Prefill {
                    self.salts.found(leg.name.flight, leg.salt, &leg.prompt, cached_tokens)?;
                }
                if std::mem::replace(&mut leg.finished, true) {
                    return wrong(leg, "a leg ended twice");
                }
                let (slot, name, muted) = (leg.slot, CallName::Leg(leg.name), leg.muted);
                let failure = match outcome {
                    Outcome::Failed(cause) => Some(cause),
                    _ => None,
                };
                if !muted {
                    if let (Some(token), None) = (leg.held, failure) {
                        self.outbox.push(Output::Answer(name, Answer::Token(token)));
                    }
                    self.outbox.push(Output::Answer(name, Answer::Ended(outcome)));
                }
                self.handoff.finished(WORKER, slot, failure, now);
            }
            Event::Released(request) => {
                let slot = Slot { id: request.slot, generation: request.generation };
                self.grants.remove(&slot.id);
                self.handoff.released(WORKER, slot);
                match self.legs.remove(&request.id) {
                    None => return Err(Finding::new(Checker::Events, "a leg was released twice")),
                    Some(leg) if !leg.finished => return wrong(&leg, "a leg was released before it ended"),
                    Some(leg) if !request.pages.is_empty() => {
                        return wrong(&leg, "a leg was released with pages");
                    }
                    Some(_) => {}
                }
            }
            Event::Flushed { .. } => {}
        }
        Ok(())
    }

    /// Rooms or slots of the protocol that are not over.
    pub fn open_rooms(&self) -> usize {
        match &self.handoff.members()[0].role {
            MemberRole::Prefill { manager, .. } => manager.open_rooms(),
            MemberRole::Decode { manager, .. } => manager.open_slots(),
            MemberRole::Mixed => 0,
        }
    }
}

fn number(conn: ConnId) -> ConnNumber {
    conn.number()
}

//! `ctl` of one process: what production does with sockets, done with parcels, by the same rules
//! and the same limits.
//!
//! Owns: the hand-off, its links (`links`), its lanes (`lanes`), its requests (`legs`), its drain,
//! its role (`roles`). A turn takes in what has come, what the engine and the mover tell, and every
//! tick ends what is overdue; what is to leave is in its outbox. Not here: where parcels go and how
//! long they take (`cluster!`).

mod asking;
mod lanes;
mod legs;
mod links;
mod roles;

use super::checkers::Checked;
use super::checkers::salts::Salts;
use super::checkers::shadow::Grants;
use super::machines::Streams;
use super::process::WORKER;
use super::router::fleet::CallName;
use super::router::{Answer, LegName};
use super::workload::SimRequest;
use crate::cause::Cause;
use crate::ids::{Leg, RequestId, Room};
use crate::kv::prefix::Salt;
use crate::net::ConnId;
use crate::peer::handoff::{
    DestinationSession, EndpointKind as MemberRole, Handoff, Source, SourceSession,
};
use crate::sched::messages::EngineEvent;
use crate::server::drain::{Drain, RemainingWork};
use crate::server::role_change::{RoleChange, RoleChangeRequest};
use crate::stdx::event_queue::Nanos;
use crate::sys::event::WaitSet;
use crate::sys::stream::memory::{MemoryStream, StreamKernel};
use crate::transfer::manager::rooms::Slot;
use crate::transfer::transport::shm::{
    DestinationDescriptors, PeerShape, ShmCursor, ShmRing, SourceDescriptors,
};
use crate::wire::Multipart;
use crate::wire::message::Token;
use crate::worker::progress::EngineWatchdog;
use asking::Asking;
use crossbeam_channel::Receiver;
use lanes::Lanes;
pub use roles::{Became, Lasting, name_of};
use std::collections::{BTreeMap, VecDeque};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

/// Between two looks at deadlines, as in `worker::service`.
const TICK: Duration = Duration::from_millis(100);
const FIRST_PORT: u16 = 10_000;
/// The first worker's data port.
const DATA_PORT: u16 = 20_000;

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
    /// Who reads the prompt; none where the decode worker does.
    pub source: Option<usize>,
    /// It is to keep its KV until decode claims it, and to answer before.
    pub keeps: bool,
    /// It is to say at once where that will be.
    pub streams: bool,
    /// It is to ask its source for that first.
    pub asks: bool,
    /// What the worker is taken for, if that is said.
    pub taken_for: Option<String>,
    /// What is asked.
    pub order: SimRequest,
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
    /// A source has dialled the data port.
    Lane(MemoryStream),
    /// The router sends a leg.
    Submit(Box<Job>),
    /// The router has closed a leg's connection.
    Cancel(LegName),
    /// The router asks how the worker is that it takes for this.
    Ask(CallName, Option<String>),
    /// The router asks who it is.
    Introduce(CallName),
    /// The router says that the KV which is kept in this room will not be claimed.
    GiveUp(CallName, Room),
    /// On the connection by which a prefill worker was asked for a leg's KV.
    Word(LegName, Answer),
    /// Somebody has a request end.
    Abort(usize),
    /// The process is told to drain.
    Drain,
    /// Its worker is to have another role.
    Turn(RoleChangeRequest),
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
    /// A stream that is dialled to a destination's data port.
    Lane {
        /// To whom.
        to: usize,
        /// What is to be brought there.
        kernel: StreamKernel,
    },
    /// To the router, or the worker that asks.
    Answer(CallName, Answer),
    /// A new connection to a prefill worker, to ask it for KV in this room.
    Ask {
        /// What it is called.
        name: LegName,
        /// Whom.
        to: usize,
        /// It draws it, but as the story of its request is one room's.
        room: Room,
    },
    /// What is asked there.
    Put(LegName, Box<Job>),
    /// That connection is closed.
    Unask(LegName),
    /// A prefill worker is told that the KV which it keeps in this room will not be claimed, if it
    /// can be reached.
    GiveUp {
        /// Whom.
        to: usize,
        /// Where.
        room: Room,
    },
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
struct EdgeLeg {
    name: LegName,
    /// It reads its prompt itself.
    alone: bool,
    slot: Slot,
    salt: Salt,
    prompt: Vec<u32>,
    /// What the engine must tell, and has not told.
    expected: VecDeque<u32>,
    /// What prefill answers once its KV is with the destination, or is kept.
    held: Option<u32>,
    /// Where its KV is kept until decode claims it.
    kept: Option<Room>,
    /// Who asked knows where, and hears the end when it is computed.
    streams: bool,
    finished: bool,
    /// The router does not listen any more.
    muted: bool,
}

/// Everything that `ctl` owns.
#[derive(Debug)]
pub struct Edge {
    process: usize,
    handoff: Handoff,
    events: Receiver<EngineEvent>,
    /// Of them, those that were told before the step that the engine computes.
    told: VecDeque<EngineEvent>,
    /// What has come and was not taken in.
    pub inbox: VecDeque<Input>,
    /// What is to be sent.
    pub outbox: Vec<Output>,
    /// Legs that were taken.
    pub taken: Vec<LegName>,
    links: BTreeMap<ConnNumber, Peering>,
    /// Sessions of a source whose destination has not called, by token.
    pending: BTreeMap<u64, (ConnNumber, SourceSession, ShmRing)>,
    /// Calls that are not answered.
    calling: BTreeMap<ConnNumber, (DestinationSession, ShmCursor)>,
    legs: BTreeMap<RequestId, EdgeLeg>,
    /// What prefill workers were asked, by the leg that it is for.
    asking: BTreeMap<LegName, Asking>,
    /// Legs that have failed, until when prefill's word on that is waited for.
    unheard: VecDeque<(Instant, LegName)>,
    /// Legs that have lost the prefill worker that was asked, until when they may begin.
    hurried: VecDeque<(Instant, LegName)>,
    grants: Grants,
    salts: Salts,
    next_request: u64,
    next_token: u64,
    /// When overdue things are looked for.
    pub next_tick: Nanos,
    looked: Instant,
    stood_still: bool,
    progress: EngineWatchdog,
    /// Where completions of its NIC, and its lanes, wake the mover; none without either.
    wait: Option<Arc<WaitSet>>,
    /// None without streams.
    lanes: Option<Lanes>,
    /// Its engine makes no progress.
    hangs: bool,
    drain: Drain,
    ended: bool,
    turning: RoleChange,
    became: Option<Became>,
}

/// Where a prefill worker's registry is.
pub fn address_of(process: usize) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, FIRST_PORT + process as u16))
}

/// Where a decode worker takes lanes.
pub fn data_port_of(process: usize) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, DATA_PORT + process as u16))
}

/// Ways from a process to others.
#[derive(Debug)]
pub struct Ways {
    /// Where its mover is woken, if by more than bells.
    pub wait: Option<Arc<WaitSet>>,
    /// Its streams, which wake it there, too.
    pub streams: Option<(Streams, Arc<WaitSet>)>,
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
    /// Connections of the router that stand.
    pub clients: usize,
}

impl Edge {
    /// A process of this number, without links. `events` are its engine's, which counts its
    /// `progress`.
    pub fn new(
        process: usize,
        handoff: Handoff,
        events: Receiver<EngineEvent>,
        progress: Arc<AtomicU64>,
        role: Leg,
        ways: Ways,
    ) -> Edge {
        let page_size = handoff.worker(WORKER).layout().page_size;
        Edge {
            process,
            handoff,
            events,
            told: VecDeque::new(),
            inbox: VecDeque::new(),
            outbox: Vec::new(),
            taken: Vec::new(),
            links: BTreeMap::new(),
            pending: BTreeMap::new(),
            calling: BTreeMap::new(),
            legs: BTreeMap::new(),
            asking: BTreeMap::new(),
            unheard: VecDeque::new(),
            hurried: VecDeque::new(),
            grants: Grants::new(),
            salts: Salts::new(page_size),
            next_request: 0,
            next_token: 0,
            next_tick: 0,
            looked: Instant::now(),
            stood_still: false,
            progress: EngineWatchdog::new(progress, Instant::now()),
            wait: ways.wait,
            lanes: ways.streams.map(|(streams, wait)| Lanes::new(streams, wait)),
            hangs: false,
            drain: Drain::default(),
            ended: false,
            turning: roles::begin(role),
            became: None,
        }
    }

    /// The process starts at this time.
    pub fn begin(&mut self, now: Instant) {
        self.looked = now;
        self.progress.begin(now);
    }

    /// Whether it has drained, and is over.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Whether its engine looks as if it hung.
    pub fn hangs(&self) -> bool {
        self.hangs
    }

    /// The hand-off, to be looked at.
    pub fn handoff(&self) -> &Handoff {
        &self.handoff
    }

    /// Pages that sources were told of, or are about to be.
    pub fn grants(&self) -> &Grants {
        &self.grants
    }

    /// The same, to be told of leases.
    pub fn grants_mut(&mut self) -> &mut Grants {
        &mut self.grants
    }

    /// One turn, in the order of `worker::service`.
    ///
    /// # Errors
    /// What the engine told and could not rightly tell.
    pub fn turn(&mut self, turn: &mut Turn<'_>) -> Checked {
        while let Some(input) = self.inbox.pop_front() {
            self.take(input, turn.now)?;
        }
        if let Some(lanes) = &mut self.lanes {
            lanes.read(&mut self.handoff, turn.now);
        }
        if !turn.computes {
            self.hear();
        }
        while let Some(event) = self.told.pop_front() {
            self.event(event, turn.now)?;
        }
        self.handoff.step(turn.now);
        self.end_unheard(turn.now);
        if turn.nanos >= self.next_tick {
            self.next_tick = turn.nanos + TICK.as_nanos() as Nanos;
            self.hangs = self.progress.check_hang(turn.now);
            self.handoff.expire(turn.now);
            self.expire(turn.now);
            self.expire_asked(turn.now);
        }
        while let Some(remote) = self.handoff.poll_remote() {
            self.serve(remote, turn);
        }
        if self.turning.is_changing() {
            self.change(turn.now);
        } else if self.drain.is_begun() {
            // Rooms that are not known by now never will be.
            self.handoff.refuse_early(Cause::Draining, turn.now);
            self.ended = self.drain.poll_outcome(self.left(turn.clients), turn.now).is_some();
        }
        Ok(())
    }

    /// What is left of what it has.
    fn left(&self, clients: usize) -> RemainingWork {
        let busy = !self.legs.is_empty() || self.asking.values().any(Asking::is_waiting);
        RemainingWork { busy, queued: 0, clients, unconfirmed: self.handoff.unconfirmed() }
    }

    /// What the engine has told so far was told in time.
    pub fn hear(&mut self) {
        self.told.extend(self.events.try_iter());
    }

    fn take(&mut self, input: Input, now: Instant) -> Checked {
        match input {
            Input::Parcel(conn, parcel) => self.receive(conn, parcel, now),
            Input::Accepted { conn, from, life } => self.accept(conn, (from, life), now),
            Input::Dialled(conn, stands) => self.dialled(conn, stands, now),
            Input::Called(conn, token, shown) => {
                let answer = self.called(token, shown);
                self.outbox.push(Output::Show(conn, answer));
            }
            Input::Shown(conn, shown) => self.shown(conn, shown, now),
            Input::Lane(stream) => {
                if let Some(lanes) = &mut self.lanes {
                    lanes.accept(stream, now);
                }
            }
            Input::Submit(job) => self.submit(*job, now)?,
            Input::Ask(probe, taken_for) => {
                let answer = self.refusal(taken_for.as_deref()).unwrap_or(Answer::Well);
                self.outbox.push(Output::Answer(probe, answer));
            }
            Input::Introduce(name) => self.introduce(name),
            Input::GiveUp(name, room) => {
                self.give_up_kept(room);
                self.outbox.push(Output::Answer(name, Answer::Well));
            }
            Input::Word(name, answer) => self.word(name, answer, now),
            Input::Cancel(name) => self.cancel(name),
            Input::Abort(flight) => self.abort(flight),
            Input::Drain => self.begin_drain(now),
            Input::Turn(wanted) => self.begin_change(wanted, now),
        }
        Ok(())
    }

    /// Rooms or slots of the protocol that are not over.
    pub fn open_rooms(&self) -> usize {
        match &self.handoff.members()[0].kind {
            MemberRole::Prefill { manager, .. } => manager.open_rooms(),
            MemberRole::Decode { manager, .. } => manager.open_slots(),
            MemberRole::Mixed => 0,
        }
    }
}

fn number(conn: ConnId) -> ConnNumber {
    conn.number()
}

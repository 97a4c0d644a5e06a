//! Connections of the router to workers, and of decode workers to the prefill workers that they
//! ask. A connection takes time to establish, can fail because a host is gone or unreachable, and
//! keeps the order of its data.

use super::stream::Stream;
use super::{Cluster, RESENT, SimEvent};
use crate::ids::Room;
use crate::limits::NET_HOST_SILENCE_MAX;
use crate::sim::checkers::{Checked, tokens};
use crate::sim::edge::Input;
use crate::sim::faults::ROUTER;
use crate::sim::router::Answer;
use crate::sim::router::fleet::CallName;
use crate::stdx::event_queue::{Nanos, SECOND};

/// Time between two tries of a dial with lost packets, as in kernels.
const KNOCK_AGAIN: Nanos = SECOND;

/// A call's connection.
#[derive(Debug)]
pub(super) struct Call {
    /// The calling host,
    pub(super) from: usize,
    /// and its life, if it is a worker.
    from_life: u32,
    pub(super) host: usize,
    /// The life of the called host's process; `None` until the connection is established.
    pub(super) life: Option<u32>,
    /// Whether it has broken and an end does not know yet. Data that is written to it is lost.
    is_cut: bool,
    /// The room of the request that it serves.
    room: Option<Room>,
    pub(super) to_worker: Stream<Input>,
    /// To the router, or to the calling worker.
    pub(super) to_router: Stream<Answer>,
    /// Deadline of the dial.
    until: Nanos,
}

impl Call {
    /// An established connection.
    pub(super) fn standing([from, host]: [usize; 2], life: u32, room: Option<Room>) -> Call {
        let (to_worker, to_router) = Default::default();
        let life = Some(life);
        Call {
            from,
            from_life: 0,
            host,
            life,
            is_cut: false,
            room,
            to_worker,
            to_router,
            until: Nanos::MAX,
        }
    }

    /// Whether a worker's process of this life is the caller.
    pub(super) fn comes_from(&self, host: usize, life: u32) -> bool {
        (self.from, self.from_life) == (host, life)
    }

    /// Whether it is established to this process of a host.
    pub(super) fn leads_to(&self, host: usize, life: u32) -> bool {
        (self.host, self.life) == (host, Some(life))
    }
}

impl Cluster<'_> {
    /// Opens a call over a kept connection to the worker's process of this life, or dials.
    pub(super) fn open_call(&mut self, name: CallName, host: usize, kept: Option<u32>) {
        let room = match name {
            CallName::Leg(leg) => Some(self.flights.room(leg.flight)),
            CallName::Notice(_, room) => Some(room),
            CallName::IdentityQuery(_) | CallName::Probe(_) => None,
        };
        self.calls.insert(name, Call { life: kept, ..Call::standing([ROUTER, host], 0, room) });
        if kept.is_none() {
            let at = self.agenda.now() + self.delay();
            self.agenda.schedule(at, SimEvent::Knock(name));
        }
    }

    /// Dials another worker for a worker, with a deadline after `patience`.
    pub(super) fn question(
        &mut self,
        name: CallName,
        [from, to]: [usize; 2],
        room: Room,
        patience: Nanos,
    ) {
        let now = self.agenda.now();
        let (from_life, until) = (self.hosts[from].life, now.saturating_add(patience));
        self.calls.insert(
            name,
            Call { from_life, life: None, until, ..Call::standing([from, to], 0, Some(room)) },
        );
        let at = now + self.delay();
        self.agenda.schedule(at, SimEvent::Knock(name));
    }

    /// Dials a worker's host. Its kernel accepts a connection, even if its process hangs.
    pub(super) fn knock(&mut self, name: CallName) {
        let now = self.agenda.now();
        let Some(call) = self.calls.get(&name) else { return };
        let (from, index, room) = (call.from, call.host, call.room);
        if call.until <= now {
            self.calls.remove(&name);
            return;
        }
        let host = &self.hosts[index];
        if host.dark_until > now || self.is_parted(from, index) {
            return self.agenda.schedule(now + KNOCK_AGAIN, SimEvent::Knock(name));
        }
        let life = host.process.is_some().then_some(host.life);
        if let Some(call) = self.calls.get_mut(&name) {
            call.life = life;
        }
        let what = if life.is_some() { "is reached" } else { "takes no connection" };
        self.trace.record(now, "process", index, what, room, 0);
        self.answer(name, life.map_or(Answer::Lost, Answer::Stands));
    }

    /// Sends an answer of a worker to the router.
    pub(super) fn answer(&mut self, name: CallName, answer: Answer) {
        let at = self.agenda.now() + self.delay();
        let Some(call) = self.calls.get_mut(&name) else { return };
        if let (CallName::Leg(leg), Answer::Drains | Answer::Hangs) = (name, answer) {
            self.ends.turned_away(leg.flight);
        }
        let at = call.to_router.put(at, answer);
        self.agenda.schedule(at, SimEvent::ToRouter(name));
    }

    /// Sends data of the router to a worker.
    pub(super) fn post(&mut self, name: CallName, input: Input) {
        let at = self.agenda.now() + self.delay();
        let Some(call) = self.calls.get_mut(&name).filter(|call| !call.is_cut) else { return };
        let at = call.to_worker.put(at, input);
        self.agenda.schedule(at, SimEvent::ToWorker(name));
    }

    /// Closes a call's connection for the router.
    pub(super) fn close(&mut self, name: CallName) {
        let Some(call) = self.calls.get(&name) else { return };
        match (call.life, name) {
            (Some(_), CallName::Leg(leg)) => self.post(name, Input::Cancel(leg)),
            _ => {
                self.calls.remove(&name);
            }
        }
    }

    /// Reports a broken connection of a call to the router. If the host is gone, the router notices
    /// only after a while.
    pub(super) fn lose(&mut self, name: CallName) {
        let now = self.agenda.now();
        let delay = self.delay();
        let Some(call) = self.calls.get_mut(&name) else { return };
        let dark_until = self.hosts[call.host].dark_until.max(now);
        let at_router = dark_until.min(now + NET_HOST_SILENCE_MAX.as_nanos() as Nanos);
        let at = call.to_router.put(at_router + delay, Answer::Lost);
        self.agenda.schedule(at, SimEvent::ToRouter(name));
    }

    /// Calls of legs with established connections.
    pub(super) fn open_calls(&self) -> impl Iterator<Item = CallName> {
        let open = self.calls.iter().filter(|(_, call)| call.life.is_some());
        open.map(|(&name, _)| name).filter(|name| matches!(name, CallName::Leg(_)))
    }

    /// Breaks a call's connection. Data in flight is lost. Both ends notice it, each at its time.
    pub(super) fn cut_call(&mut self, name: CallName) {
        let now = self.agenda.now();
        let rare =
            [(); 2].map(|()| if self.dice.one_in(2) { self.dice.range_u64(0, RESENT) } else { 0 });
        let at = [now + self.delay() + rare[0], now + self.delay() + rare[1]];
        let Some(call) = self.calls.get_mut(&name) else { return };
        let (CallName::Leg(leg), Some(life)) = (name, call.life) else { return };
        let host = call.host;
        self.trace.record(now, "call", host, "is cut", call.room, leg.role as u64);
        call.is_cut = true;
        call.to_worker.clear();
        call.to_router.clear();
        let at_router = call.to_router.put(at[0], Answer::Lost);
        self.agenda.schedule(at_router, SimEvent::ToRouter(name));
        self.agenda.schedule(at[1], SimEvent::Pass { host, life, input: Input::Cancel(leg) });
    }

    pub(super) fn reach_worker(&mut self, name: CallName) {
        let now = self.agenda.now();
        let Some(call) = self.calls.get_mut(&name) else { return };
        let host = call.host;
        if self.parted.contains_key(&(call.from, host)) {
            return call.to_worker.lose();
        }
        let Some(input) = call.to_worker.take(now) else { return };
        let (life, room) = (call.life, call.room);
        let is_last = matches!(input, Input::Cancel(_));
        if let CallName::Leg(leg) = name {
            let what = if is_last { "is cancelled" } else { "comes" };
            self.trace.record(now, "process", host, what, room, leg.role as u64);
        }
        match life
            .filter(|&life| self.hosts[host].life == life && self.hosts[host].process.is_some())
        {
            Some(life) => self.deliver(host, life, input),
            None => self.lose(name),
        }
        if is_last {
            self.calls.remove(&name);
        }
    }

    pub(super) fn reach_router(&mut self, name: CallName) -> Checked {
        let now = self.agenda.now();
        let Some(call) = self.calls.get_mut(&name) else { return Ok(()) };
        if self.parted.contains_key(&(call.host, call.from)) {
            call.to_router.lose();
            return Ok(());
        }
        let Some(answer) = call.to_router.take(now) else { return Ok(()) };
        let (from, life, host, room) = (call.from, call.from_life, call.host, call.room);
        if let CallName::Leg(leg) = name {
            let (what, detail) = match answer {
                Answer::Stands(_) => ("is connected", leg.role as u64),
                Answer::Token(token) => ("answers", token.into()),
                Answer::Drains | Answer::Hangs => ("turns away", leg.role as u64),
                Answer::Kept(_) => ("keeps its KV", leg.role as u64),
                Answer::Ended(_) | Answer::SourceFailed(_) | Answer::Well | Answer::Is { .. } => {
                    ("has answered", leg.role as u64)
                }
                Answer::Lost => ("is lost", leg.role as u64),
            };
            self.trace.record(now, "process", host, what, room, detail);
        }
        // A prefill worker that a decode worker asks sends the place of the KV at once.
        let goes_on = matches!(answer, Answer::Stands(_) | Answer::Token(_))
            || from != ROUTER && matches!(answer, Answer::Kept(_));
        if !goes_on {
            self.calls.remove(&name);
        }
        if from != ROUTER {
            match (name, answer) {
                (CallName::Leg(leg), _) => self.deliver(from, life, Input::Word(leg, answer)),
                (CallName::Notice(_, room), Answer::Stands(_)) => {
                    self.post(name, Input::GiveUp(name, room))
                }
                (CallName::Notice(..) | CallName::IdentityQuery(_) | CallName::Probe(_), _) => {}
            }
            return Ok(());
        }
        self.flights.take(name, answer, now);
        if let (Answer::Token(_), CallName::Leg(leg)) = (answer, name) {
            let expected = &self.flights.order(leg.flight).expected;
            tokens::begins(leg.flight, self.flights.answer(leg.flight), expected)?;
        }
        self.carry_out()
    }
}

//! The router and its clients: requests to pairs, decode's answer back, another pair where one
//! fails, by `routing::attempts` around the decisions of `routing::balancer`, as
//! `router::requests` has it.
//!
//! Owns: all requests that are being served. Not here: their connections to workers (`fleet`), what
//! an answer must be (`checkers`), how long a connection takes to stand and to carry something
//! (`cluster!`).

pub mod fleet;
mod reading;

use super::plan::Plan;
use super::workload::SimRequest;
use crate::cause::Cause;
use crate::config::{Flow, RetryConfig};
use crate::ids::{Leg, Room};
use crate::limits::ROUTER_GRACE;
use crate::routing::attempts::{
    AttemptAction, AttemptContext, AttemptEvent, Attempts as Core, AvoidList,
};
use crate::routing::balancer::Reservation;
use crate::routing::demand::Demand;
use crate::routing::retries::RetryBudget;
use crate::sched::messages::FinishReason;
use crate::stdx::event_queue::Nanos;
use crate::stdx::rng::Rng;
use crate::upstream::answer::CallError;
use fleet::{CallName, Fleet, What};
use std::time::{Duration, Instant};

/// A leg of a request, which has a connection of its own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct LegName {
    /// Which request.
    pub flight: usize,
    /// With which of the pairs that were chosen for it.
    pub attempt: u32,
    /// Which leg.
    pub role: Leg,
    /// 1: sent a second time by mistake; nobody listens to its answer.
    pub copy: u8,
}

/// What comes on a connection to a worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// It stands, and leads to the worker's process of this life.
    Stands(u32),
    /// A token.
    Token(u32),
    /// Prefill, which is asked first, has read the prompt, and keeps its KV in this room.
    Kept(Room),
    /// The end.
    Ended(FinishReason),
    /// It failed, by the prefill worker that decode has asked.
    SourceFailed(Cause),
    /// It is well.
    Well,
    /// It has this role, which has changed so often since its start.
    Is {
        /// What it does.
        role: Leg,
        /// How often that has changed.
        changes: u64,
    },
    /// It drains, and takes nothing new.
    Drains,
    /// Its engine hangs.
    Hangs,
    /// The connection broke, or was refused.
    Lost,
}

/// What the router wants done.
#[derive(Debug)]
pub enum Wish {
    /// The request is to be served by these from now on, under this room.
    Choose {
        /// Which request.
        flight: usize,
        /// Which of its tries.
        attempt: u32,
        /// Where its legs meet.
        room: Room,
        /// The hosts of its prefill and its decode worker, who are one where it is served alone.
        pair: [usize; 2],
    },
    /// A call takes a connection.
    Open {
        /// Which call.
        call: CallName,
        /// To the worker of which host.
        host: usize,
        /// A kept one, to its process of this life; else one that is dialled.
        life: Option<u32>,
    },
    /// The legs of a try whose turn it is leave, on their connections.
    Send {
        /// Which request.
        flight: usize,
        /// Which of its tries.
        attempt: u32,
        /// Whether another try of it was sent before.
        again: bool,
        /// By role: whose turn it is.
        legs: [bool; 2],
        /// Prefill is to keep the KV.
        keeps: bool,
        /// Decode is to ask it for that.
        asks: bool,
        /// By role: what the workers are taken for.
        taken_for: [Option<String>; 2],
        /// What is still asked.
        order: Box<SimRequest>,
    },
    /// A worker is asked who or how it is, or told what it need not keep; what it is taken for.
    Ask(CallName, Option<String>),
    /// A call's connection is closed.
    Close(CallName),
    /// It is kept for another one.
    Keep(CallName),
    /// [`Flights::remind`] is to be called then.
    Remind(usize, Nanos),
    /// The client has its answer.
    Over(usize, Result<FinishReason, Cause>),
}

#[derive(Debug)]
struct Flight {
    order: SimRequest,
    core: Core,
    begun: Nanos,
    /// Pairs so far.
    attempt: u32,
    /// Of the current try.
    room: Room,
    /// The hosts of the workers of the current try.
    pair: [usize; 2],
    sent: bool,
    /// By role: whether its call can still say something.
    legs: [bool; 2],
    answer: Vec<u32>,
    /// Charged to the worker of this try that has no call: prefill, which decode asks, or decode
    /// until prefill has answered.
    held: Option<Reservation>,
    /// Where its KV is kept for decode, by this try's prefill worker.
    kept: Option<Room>,
    /// It is tried again then.
    due: Option<Nanos>,
    /// The current try was sent.
    placed: bool,
    /// Somebody wants it to end.
    aborted: bool,
    over: bool,
}

/// All requests.
#[derive(Debug)]
pub struct Flights {
    fleet: Fleet,
    flow: Flow,
    retries: RetryBudget,
    base: Instant,
    dice: Rng,
    flights: Vec<Flight>,
}

impl Flights {
    /// No requests; all workers are up, and what they are is known.
    pub fn new(plan: &Plan, base: Instant, dice: Rng) -> Flights {
        let retries = RetryBudget::new(RetryConfig::of(plan.retries), base);
        let fleet = Fleet::new(plan, base);
        Flights { fleet, flow: plan.flow, retries, base, dice, flights: Vec::new() }
    }

    /// A client asks; `pair` is on which hosts it must be served, if that is not the router's to
    /// choose.
    pub fn begin(&mut self, order: SimRequest, pair: Option<[usize; 2]>, now: Nanos) -> usize {
        let id = self.flights.len();
        let unwilling = pair.map_or(Vec::new(), |pair| self.fleet.others(pair));
        self.flights.push(Flight {
            order,
            core: Core::without(AvoidList { failed: Vec::new(), unwilling }),
            begun: now,
            attempt: 0,
            room: Room(0),
            pair: [0; 2],
            sent: false,
            legs: [false; 2],
            answer: Vec::new(),
            held: None,
            kept: None,
            due: None,
            placed: false,
            aborted: false,
            over: false,
        });
        self.attempt(id, now);
        id
    }

    /// What was asked.
    pub fn order(&self, flight: usize) -> &SimRequest {
        &self.flights[flight].order
    }

    /// What was answered so far.
    pub fn answer(&self, flight: usize) -> &[u32] {
        &self.flights[flight].answer
    }

    /// Where the legs of its last try met.
    pub fn room(&self, flight: usize) -> Room {
        self.flights[flight].room
    }

    /// The hosts of the workers of its last try.
    pub fn pair(&self, flight: usize) -> [usize; 2] {
        self.flights[flight].pair
    }

    /// Requests that are not over.
    pub fn open(&self) -> impl Iterator<Item = usize> {
        self.flights.iter().enumerate().filter(|(_, flight)| !flight.over).map(|(id, _)| id)
    }

    /// Sequences that are charged to workers.
    pub fn reserved(&self) -> u32 {
        self.fleet.reserved()
    }

    /// What is to be done.
    pub fn take_wishes(&mut self) -> Vec<Wish> {
        std::mem::take(&mut self.fleet.wishes)
    }

    /// Gives up what is overdue and sends probes: to be called every so often.
    pub fn tick(&mut self, now: Nanos) {
        self.fleet.tick(now);
        self.settle(now);
    }

    /// Something has come on the connection of a call.
    pub fn take(&mut self, call: CallName, what: Answer, now: Nanos) {
        self.fleet.take(call, what, now);
        self.settle(now);
    }

    /// The host's process of this life has closed what it had open.
    pub fn drop_kept(&mut self, host: usize, life: u32) {
        self.fleet.drop_kept(host, life);
    }

    /// A time has come that was asked for.
    pub fn remind(&mut self, id: usize, now: Nanos) {
        let flight = &mut self.flights[id];
        if !flight.over && flight.due.take_if(|at| *at <= now).is_some() {
            self.attempt(id, now);
            self.settle(now);
        }
    }

    /// Somebody has a request end, and all workers are told: it is sent nowhere again, and ends
    /// here where nothing of it is with any worker.
    pub fn abort(&mut self, id: usize, now: Nanos) {
        let flight = &mut self.flights[id];
        flight.aborted = true;
        if !flight.placed {
            self.end(id, Err(Cause::Aborted), now);
            self.settle(now);
        }
    }

    /// Whether a call that began until then still waits for a host's worker.
    pub fn waits_for(&self, host: usize, since: Nanos) -> bool {
        self.fleet.waits_for(host, since)
    }

    /// Connections to a host's process that are kept without a call.
    pub fn kept(&self, host: usize, life: u32) -> usize {
        self.fleet.kept(host, life)
    }

    /// A client has gone.
    pub fn gone(&mut self, id: usize, now: Nanos) {
        self.end(id, Err(Cause::ClientGone), now);
        self.settle(now);
    }

    /// Deals with all that has become of legs.
    fn settle(&mut self, now: Nanos) {
        while let Some((leg, what)) = self.fleet.poll() {
            self.hear(leg, what, now);
        }
    }

    fn hear(&mut self, leg: LegName, what: What, now: Nanos) {
        let (id, role) = (leg.flight, leg.role);
        let flight = &mut self.flights[id];
        if leg.attempt != flight.attempt || !flight.legs[role as usize] {
            return;
        }
        flight.legs[role as usize] &= matches!(what, What::Ready | What::Token(_));
        if self.flow == Flow::PrefillFirst && role == Leg::Prefill {
            return self.read(id, what, now);
        }
        // What prefill comes to counts until decode has begun to answer.
        let counts = role == Leg::Decode || flight.core.is_waiting();
        let news = match (what, role) {
            (What::Ready, _) => AttemptEvent::Connected,
            (What::Refused, _) => AttemptEvent::Refused(role),
            (What::Token(token), Leg::Decode) => {
                flight.answer.push(token);
                // Whom decode has asked has done its part.
                self.release(id, now);
                AttemptEvent::Passes { resumable: true }
            }
            (What::TurnedAway, _) if counts => AttemptEvent::Failed(role, Cause::Draining),
            // What a leg that was taken says of a drain is the other one's.
            (What::Ended(FinishReason::Failed(Cause::Draining)), _) if counts => {
                AttemptEvent::Failed(role.other(), Cause::Draining)
            }
            (What::Ended(FinishReason::Failed(cause)), _) if counts => {
                AttemptEvent::Failed(role, cause)
            }
            (What::SourceFailed(cause), _) => AttemptEvent::Failed(role.other(), cause),
            (What::Ended(outcome), Leg::Decode) => return self.land(id, outcome, now),
            // Decode's leg is given up at the same time.
            (What::Lost(CallError::Deadline), Leg::Prefill) => return,
            (What::Lost(CallError::Deadline), Leg::Decode) => {
                AttemptEvent::Lost(role, Cause::Deadline)
            }
            (What::Lost(_), _) if counts => AttemptEvent::Lost(role, Cause::PeerLost),
            (
                What::Token(_) | What::Kept(_) | What::Ended(_) | What::TurnedAway | What::Lost(_),
                _,
            ) => return,
        };
        self.follow(id, news, now);
    }

    /// Takes a pair, and connections to it.
    fn attempt(&mut self, id: usize, now: Nanos) {
        let instant = self.instant(now);
        let deadline = Some(self.deadline(id));
        let flight = &mut self.flights[id];
        let (prefill, decode) = match self.fleet.router().choose_serving(
            &Demand::of(1),
            flight.core.avoid(),
            instant,
        ) {
            Ok(chosen) => chosen,
            Err(none) => {
                let chance = self.dice.next_u64();
                let terms =
                    AttemptContext { now: instant, chance, deadline, retries: &mut self.retries };
                let next = flight.core.handle_no_worker(none.may_come(), &terms);
                return self.carry_out(id, next, now);
            }
        };
        let first = prefill.as_ref().map(Reservation::worker);
        flight.core.set_workers(first, Some(decode.worker()));
        flight.pair = [first.unwrap_or(decode.worker()), decode.worker()]
            .map(|worker| self.fleet.host(worker));
        flight.attempt += 1;
        flight.room = Room(self.dice.next_u64() >> 1);
        let mut legs = [prefill, Some(decode)];
        match self.flow {
            Flow::PrefillFirst if first.is_some() => {
                flight.core.in_turn();
                flight.held = legs[Leg::Decode as usize].take();
            }
            Flow::DecodeFirst => flight.held = legs[Leg::Prefill as usize].take(),
            Flow::PrefillFirst | Flow::Dual => {}
        }
        flight.legs = legs.each_ref().map(Option::is_some);
        let (attempt, room, pair_of) = (flight.attempt, flight.room, flight.pair);
        self.fleet.wishes.push(Wish::Choose { flight: id, attempt, room, pair: pair_of });
        let until = self.until(id);
        let mut awaited = 0;
        let legs = [Leg::Prefill, Leg::Decode].into_iter().zip(legs);
        for (role, booking) in legs.filter_map(|(role, booking)| Some((role, booking?))) {
            let leg = CallName::Leg(LegName { flight: id, attempt, role, copy: 0 });
            awaited += u32::from(!self.fleet.open(leg, booking, until, now));
        }
        self.follow(id, AttemptEvent::Opened(awaited), now);
    }

    /// What follows from what has happened to a flight.
    fn follow(&mut self, id: usize, news: AttemptEvent, now: Nanos) {
        let chance = self.dice.next_u64();
        let deadline = Some(self.deadline(id));
        let instant = self.instant(now);
        let terms =
            &mut AttemptContext { now: instant, chance, deadline, retries: &mut self.retries };
        let core = &mut self.flights[id].core;
        let next = core.apply_event(news, terms);
        let router = self.fleet.router();
        match (next, news) {
            (
                AttemptAction::Retry(_) | AttemptAction::Fail(_) | AttemptAction::ReplaceDecode,
                _,
            ) => {
                core.accused().for_each(|worker| router.record_failure(worker, instant));
            }
            (_, AttemptEvent::Passes { .. }) => {
                let workers =
                    [Leg::Prefill, Leg::Decode].into_iter().filter_map(|role| core.worker(role));
                workers.for_each(|worker| router.record_success(worker));
            }
            _ => {}
        }
        self.carry_out(id, next, now);
    }

    fn carry_out(&mut self, id: usize, next: AttemptAction, now: Nanos) {
        match next {
            AttemptAction::Wait | AttemptAction::Finish => {}
            AttemptAction::StartDecode if self.flights[id].aborted => {
                self.end(id, Err(Cause::Aborted), now)
            }
            AttemptAction::StartDecode => self.join(id, now),
            AttemptAction::ReplaceDecode if self.flights[id].aborted => {
                self.end(id, Err(Cause::Aborted), now)
            }
            AttemptAction::ReplaceDecode => self.rejoin(id, now),
            AttemptAction::RestoreDeadline => {
                self.fleet.set_deadline(self.call(id, Leg::Decode), self.until(id))
            }
            AttemptAction::Send => self.send(id, now),
            AttemptAction::ShortenDeadline(until) => {
                let until = self.nanos(until).min(self.until(id));
                self.fleet.set_deadline(self.call(id, Leg::Decode), until);
            }
            AttemptAction::Retry(_) if self.flights[id].aborted => {
                self.end(id, Err(Cause::Aborted), now)
            }
            AttemptAction::Retry(at) => {
                self.cancel(id, now);
                let at = self.nanos(at);
                if at <= now {
                    return self.attempt(id, now);
                }
                self.flights[id].due = Some(at);
                self.fleet.wishes.push(Wish::Remind(id, at));
            }
            AttemptAction::Fail(cause) => self.end(id, Err(cause), now),
        }
    }

    fn send(&mut self, id: usize, now: Nanos) {
        let flight = &mut self.flights[id];
        let Some(order) = flight.order.after(&flight.answer, now - flight.begun) else {
            return self.end(id, Err(Cause::Deadline), now);
        };
        flight.placed = true;
        let (attempt, legs, order) = (flight.attempt, flight.legs, Box::new(order));
        let again = std::mem::replace(&mut flight.sent, true) && flight.kept.is_none();
        let keeps = flight.held.is_some() && self.flow == Flow::PrefillFirst;
        let asks = flight.held.is_some() && self.flow == Flow::DecodeFirst;
        let calls = [Leg::Prefill, Leg::Decode].map(|role| self.call(id, role));
        calls.into_iter().for_each(|call| self.fleet.begin(call));
        let taken_for = calls.map(|call| self.fleet.taken_for(call));
        self.fleet.wishes.push(Wish::Send {
            flight: id,
            attempt,
            again,
            legs,
            keeps,
            asks,
            taken_for,
            order,
        });
    }

    /// A whole answer: what prefill still does is left alone.
    fn land(&mut self, id: usize, outcome: FinishReason, now: Nanos) {
        let chance = self.dice.next_u64();
        let deadline = Some(self.deadline(id));
        let terms = &mut AttemptContext {
            now: self.instant(now),
            chance,
            deadline,
            retries: &mut self.retries,
        };
        let next = self.flights[id].core.apply_event(AttemptEvent::Finished, terms);
        assert_eq!(next, AttemptAction::Finish, "decode answers what was sent");
        self.fleet.leave(self.call(id, Leg::Prefill));
        self.release(id, now);
        self.flights[id].legs = [false; 2];
        self.flights[id].over = true;
        self.fleet.wishes.push(Wish::Over(id, Ok(outcome)));
    }

    fn end(&mut self, id: usize, result: Result<FinishReason, Cause>, now: Nanos) {
        if std::mem::replace(&mut self.flights[id].over, true) {
            return;
        }
        self.cancel(id, now);
        self.fleet.wishes.push(Wish::Over(id, result));
    }

    fn cancel(&mut self, id: usize, now: Nanos) {
        (self.flights[id].legs, self.flights[id].placed) = ([false; 2], false);
        for role in [Leg::Decode, Leg::Prefill] {
            self.fleet.cancel(self.call(id, role), now);
        }
        self.release(id, now);
        self.give_up_kept(id, now);
    }

    /// Nobody waits any more for the worker that it is charged to without a call.
    fn release(&mut self, id: usize, now: Nanos) {
        if let Some(held) = self.flights[id].held.take() {
            self.fleet.release(held, now);
        }
    }

    fn call(&self, id: usize, role: Leg) -> CallName {
        CallName::Leg(LegName { flight: id, attempt: self.flights[id].attempt, role, copy: 0 })
    }

    fn deadline(&self, id: usize) -> Instant {
        self.instant(self.flights[id].begun + self.flights[id].order.patience)
    }

    /// When its legs are given up: a worker keeps the client's time itself, unless it stands still.
    fn until(&self, id: usize) -> Nanos {
        self.nanos(self.deadline(id) + ROUTER_GRACE)
    }

    fn instant(&self, now: Nanos) -> Instant {
        self.base + Duration::from_nanos(now)
    }

    fn nanos(&self, at: Instant) -> Nanos {
        at.saturating_duration_since(self.base).as_nanos() as Nanos
    }
}

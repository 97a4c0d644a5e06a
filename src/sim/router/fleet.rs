//! The router's connections to workers: dialled, used for one call at a time, kept for the next
//! one; and the probes that tell who stands still. By the rules of `router::pool`, over
//! what the network of the cluster does to them.
//!
//! Invariant: a call's booking is released when it ends, however it ends. Not here: what calls are
//! for (`router`), who the workers are (`joining`).

mod joining;

use super::{Answer, LegName, Wish};
use crate::cause::Cause;
use crate::ids::{Leg, Room};
use crate::limits::{ROUTER_ABORT_TIME, ROUTER_CONNECT_TIME, ROUTER_IDLE_TIME, ROUTER_PROBE_TIME};
use crate::registry::membership::Membership;
use crate::routing::balancer::{LoadBalancer, Reservation};
use crate::routing::load::WorkerNumber;
use crate::sched::messages::FinishReason;
use crate::stdx::event_queue::Nanos;
use crate::upstream::answer::CallError;
use joining::Target;
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// A request on a connection to a worker.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum CallName {
    /// Of a client's.
    Leg(LegName),
    /// The question of this number, who a worker is.
    IdentityQuery(u64),
    /// The probe of this number.
    Probe(u64),
    /// The notice of this number: the KV that is kept in this room will not be claimed.
    Notice(u64, Room),
}

/// What becomes of a leg.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum What {
    /// Its connection stands.
    Ready,
    /// There is none, and nothing was sent.
    Refused,
    /// A token of the answer.
    Token(u32),
    /// The prompt is read, and its KV kept in this room.
    Kept(Room),
    /// The answer is whole.
    Ended(FinishReason),
    /// The worker that decode has asked has failed.
    SourceFailed(Cause),
    /// The worker takes nothing new.
    TurnedAway,
    /// No further answer will come.
    Lost(CallError),
}

/// A connection.
#[derive(Clone, Copy, Debug)]
enum Line {
    /// It must stand by then.
    Dialled(Nanos),
    /// It leads to the process that is the worker's so-manieth.
    Stands(u32),
}

#[derive(Debug)]
struct Call {
    booking: Reservation,
    since: Nanos,
    /// When it is given up.
    until: Nanos,
    line: Line,
    /// Something was sent.
    begun: bool,
    /// What comes of it is of interest.
    heard: bool,
}

/// A connection without a call.
#[derive(Clone, Copy, Debug)]
struct Kept {
    life: u32,
    since: Nanos,
}

/// The workers, and what runs on them.
#[derive(Debug)]
pub struct Fleet {
    router: LoadBalancer,
    base: Instant,
    calls: BTreeMap<CallName, Call>,
    members: Membership,
    /// Those that `router` knows, or knew.
    targets: BTreeMap<WorkerNumber, Target>,
    /// Those that have told that their role is another one now.
    turned: VecDeque<(WorkerNumber, Leg)>,
    /// Workers are asked who they are, since they may be something else by now.
    introduces: bool,
    /// By host: its worker reads alone, where it is a decode worker.
    read_alone: Vec<bool>,
    /// Introductions, probes and notices so far.
    asked: u64,
    news: VecDeque<(LegName, What)>,
    /// What is to be done.
    pub wishes: Vec<Wish>,
}

impl Fleet {
    /// The decisions.
    pub fn router(&mut self) -> &mut LoadBalancer {
        &mut self.router
    }

    /// Sequences that are charged to workers.
    pub fn reserved(&self) -> u32 {
        self.router.workers().map(|(_, _, load)| load.reserved).sum()
    }

    /// What has happened to legs.
    pub fn poll(&mut self) -> Option<(LegName, What)> {
        self.news.pop_front()
    }

    /// Whether a call that began until then still waits for a host's worker.
    pub fn waits_for(&self, host: usize, since: Nanos) -> bool {
        self.calls.iter().any(|(name, call)| {
            let is_leg = matches!(name, CallName::Leg(_));
            is_leg && call.heard && self.host(call.booking.worker()) == host && call.since <= since
        })
    }

    /// Connections to a host's process of this life that are kept without a call.
    pub fn kept(&self, host: usize, life: u32) -> usize {
        let there = self.targets.values().filter(|target| target.host == host);
        there.flat_map(|target| &target.kept).filter(|kept| kept.life == life).count()
    }

    /// Takes a connection to the reserved worker; whether it stands already.
    pub fn open(&mut self, name: CallName, booking: Reservation, until: Nanos, now: Nanos) -> bool {
        let target = self.target(booking.worker());
        let (host, kept) = (target.host, target.kept.pop().map(|kept| kept.life));
        let line = kept.map_or(Line::Dialled(now + nanos(ROUTER_CONNECT_TIME)), Line::Stands);
        self.calls
            .insert(name, Call { booking, since: now, until, line, begun: false, heard: true });
        self.wishes.push(Wish::Open { call: name, host, life: kept });
        kept.is_some()
    }

    /// The request of a call leaves.
    pub fn begin(&mut self, name: CallName) {
        if let Some(call) = self.calls.get_mut(&name) {
            call.begun = true;
        }
    }

    /// Gives a call up at another time.
    pub fn set_deadline(&mut self, name: CallName, until: Nanos) {
        if let Some(call) = self.calls.get_mut(&name) {
            call.until = until;
        }
    }

    /// Lets a call end by itself.
    pub fn leave(&mut self, name: CallName) {
        if let Some(call) = self.calls.get_mut(&name) {
            call.heard = false;
        }
    }

    /// Ends a call, which tells the worker if something was sent.
    pub fn cancel(&mut self, name: CallName, now: Nanos) {
        if let Some(call) = self.calls.remove(&name) {
            let is_reusable = !call.begun;
            self.settle(name, call, is_reusable, now);
        }
    }

    /// Something has come on the connection of a call.
    pub fn take(&mut self, name: CallName, answer: Answer, now: Nanos) {
        let Some(call) = self.calls.get_mut(&name) else { return };
        match answer {
            Answer::Stands(life) => {
                call.line = Line::Stands(life);
                let begun = call.begun;
                match name {
                    CallName::Leg(leg) if !begun => self.news.push_back((leg, What::Ready)),
                    CallName::Leg(_) => {}
                    CallName::IdentityQuery(_) | CallName::Probe(_) | CallName::Notice(..) => {
                        let taken_for = self.taken_for(name);
                        self.wishes.push(Wish::Ask(name, taken_for));
                    }
                }
            }
            Answer::Token(token) => self.tell(name, What::Token(token)),
            Answer::Kept(room) => {
                self.end(name, now);
                self.tell(name, What::Kept(room));
            }
            Answer::Ended(outcome) => {
                self.end(name, now);
                self.tell(name, What::Ended(outcome));
            }
            Answer::SourceFailed(cause) => {
                self.end(name, now);
                self.tell(name, What::SourceFailed(cause));
            }
            Answer::Well => {
                if let (Some(worker), CallName::Probe(_)) = (self.end(name, now), name) {
                    self.probed(worker, true, now);
                }
            }
            Answer::Is { role, changes } => {
                if let Some(worker) = self.end(name, now) {
                    self.introduced(worker, Some((role, changes)), now);
                }
            }
            Answer::Drains => {
                let Some(worker) = self.end(name, now) else { return };
                // Its end meets no request that is on its way to it.
                self.router.refused(worker);
                // Who answers there next may be somebody else, or something else.
                let target = self.target(worker);
                (target.drains, target.introduced) = (true, false);
                target.kept.clear();
                match name {
                    CallName::Leg(leg) => self.news.push_back((leg, What::TurnedAway)),
                    CallName::Probe(_) => {
                        self.router.declined(worker, self.instant(now));
                    }
                    CallName::IdentityQuery(_) | CallName::Notice(..) => {}
                }
            }
            Answer::Hangs => {
                let Some(worker) = self.end(name, now) else { return };
                match name {
                    CallName::Leg(leg) => self.news.push_back((leg, What::TurnedAway)),
                    CallName::Probe(_) => self.unwell(worker, now),
                    CallName::IdentityQuery(_) | CallName::Notice(..) => {}
                }
            }
            Answer::Lost => self.closed(name, now),
        }
    }

    /// The host's process of this life has closed what it had open.
    pub fn drop_kept(&mut self, host: usize, life: u32) {
        for target in self.targets.values_mut().filter(|target| target.host == host) {
            let before = target.kept.len();
            target.kept.retain(|kept| kept.life != life);
            // It may have ended, and another have begun.
            target.introduced &= target.kept.len() == before;
        }
    }

    /// Gives up what took too long, and connections that nobody used; asks the workers whose turn
    /// it is how they are.
    pub fn tick(&mut self, now: Nanos) {
        let unconnected = |call: &Call| matches!(call.line, Line::Dialled(until) if until <= now);
        let late = self.calls.iter().filter(|(_, call)| unconnected(call) || call.until <= now);
        for (name, connects) in
            late.map(|(&name, call)| (name, unconnected(call))).collect::<Vec<_>>()
        {
            match connects {
                true => self.closed(name, now),
                false => self.lose(name, CallError::Deadline, now),
            }
        }
        for target in self.targets.values_mut() {
            target.kept.retain(|kept| kept.since + nanos(ROUTER_IDLE_TIME) > now);
        }
        self.follow_roles(now);
        while let Some(worker) = self.router.begin_probe(self.instant(now)) {
            match self.is_known(worker) {
                true => self.probe(worker, now),
                false => self.ask(CallName::IdentityQuery, worker, ROUTER_PROBE_TIME, now),
            }
        }
    }

    /// Asks a worker how it is.
    fn probe(&mut self, worker: WorkerNumber, now: Nanos) {
        self.ask(CallName::Probe, worker, ROUTER_PROBE_TIME, now);
    }

    /// Tells a worker that the KV which it keeps in this room will not be claimed, if it can be
    /// reached within a moment.
    pub fn give_up_kept(&mut self, worker: WorkerNumber, room: Room, now: Nanos) {
        self.ask(|number| CallName::Notice(number, room), worker, ROUTER_ABORT_TIME, now);
    }

    fn ask(
        &mut self,
        name: impl Fn(u64) -> CallName,
        worker: WorkerNumber,
        patience: Duration,
        now: Nanos,
    ) {
        self.asked += 1;
        let (name, booking) = (name(self.asked), self.router.reserve_visit(worker));
        let stands = self.open(name, booking, now + nanos(patience), now);
        self.begin(name);
        if stands {
            let taken_for = self.taken_for(name);
            self.wishes.push(Wish::Ask(name, taken_for));
        }
    }

    /// Nothing will be asked of a worker that was reserved.
    pub fn release(&mut self, booking: Reservation, now: Nanos) {
        self.router.release(booking, self.instant(now));
    }

    fn tell(&mut self, name: CallName, what: What) {
        if let CallName::Leg(leg) = name {
            self.news.push_back((leg, what));
        }
    }

    /// A connection has broken, or was not to be had.
    fn closed(&mut self, name: CallName, now: Nanos) {
        let Some(call) = self.calls.get(&name) else { return };
        let (worker, begun) = (call.booking.worker(), call.begun);
        if matches!(call.line, Line::Dialled(_)) {
            self.router.refused(worker);
            self.target(worker).drains = false;
        }
        match begun {
            true => self.lose(name, CallError::Closed, now),
            false => self.refuse(name, now),
        }
    }

    fn lose(&mut self, name: CallName, lost: CallError, now: Nanos) {
        let Some(call) = self.calls.remove(&name) else { return };
        let (worker, begun) = (call.booking.worker(), call.begun);
        let stands = matches!(call.line, Line::Stands(_));
        self.settle(name, call, false, now);
        match name {
            CallName::Leg(leg) => {
                self.news.push_back((leg, if begun { What::Lost(lost) } else { What::Refused }));
            }
            CallName::IdentityQuery(_) if stands => {
                self.router.unanswered(worker);
                self.introduced(worker, None, now);
            }
            CallName::IdentityQuery(_) | CallName::Probe(_) => self.unwell(worker, now),
            CallName::Notice(..) => {}
        }
    }

    /// A probe has failed.
    fn unwell(&mut self, worker: WorkerNumber, now: Nanos) {
        self.probed(worker, false, now);
        if self.router.is_silent(worker) {
            self.target(worker).drains = false;
            self.give_up(worker, now);
        }
    }

    /// What waits for a worker that stands still waits for nothing.
    fn give_up(&mut self, worker: WorkerNumber, now: Nanos) {
        let waits = |(name, call): &(&CallName, &Call)| {
            call.booking.worker() == worker && call.heard && matches!(name, CallName::Leg(_))
        };
        let waiting: Vec<CallName> =
            self.calls.iter().filter(waits).map(|(&name, _)| name).collect();
        waiting.into_iter().for_each(|name| self.lose(name, CallError::Silent, now));
    }

    fn refuse(&mut self, name: CallName, now: Nanos) {
        let Some(call) = self.calls.remove(&name) else { return };
        self.settle(name, call, false, now);
        self.tell(name, What::Refused);
    }

    /// The answer of a call is whole; whose it was.
    fn end(&mut self, name: CallName, now: Nanos) -> Option<WorkerNumber> {
        let call = self.calls.remove(&name)?;
        let worker = call.booking.worker();
        self.settle(name, call, true, now);
        Some(worker)
    }

    fn settle(&mut self, name: CallName, call: Call, is_reusable: bool, now: Nanos) {
        let worker = call.booking.worker();
        let instant = self.instant(now);
        self.router.release(call.booking, instant);
        match call.line {
            Line::Stands(life) if is_reusable && self.router.has(worker) => {
                self.target(worker).kept.push(Kept { life, since: now });
                self.wishes.push(Wish::Keep(name));
            }
            _ => self.wishes.push(Wish::Close(name)),
        }
    }

    fn instant(&self, now: Nanos) -> Instant {
        self.base + Duration::from_nanos(now)
    }
}

fn nanos(time: Duration) -> Nanos {
    time.as_nanos() as Nanos
}

//! The router and its clients: requests to pairs, decode's answer back, another pair where one fails, by
//! `cluster::flight` around the decisions of `cluster::router`, as `front::router::flights` has it.
//!
//! Owns: all requests that are being served. Not here: what an answer must be (`checkers`), how long a leg's
//! connection takes to carry something (`cluster`).

use super::agenda::Nanos;
use super::dice::Dice;
use super::plan::Plan;
use super::workload::Order;
use crate::cause::Cause;
use crate::cluster::flight::{Avoid, Flight as Core, News, Next, Terms};
use crate::cluster::loads::WorkerNumber;
use crate::cluster::retries::Retries;
use crate::cluster::router::{Booking, Role, Router};
use crate::ids::Room;
use crate::sched::mailbox::Outcome;
use std::time::{Duration, Instant};

/// A leg of a request, which has a connection of its own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct LegName {
    /// Which request.
    pub flight: usize,
    /// Of which of its tries.
    pub attempt: u32,
    /// Which leg.
    pub role: Role,
    /// 1: sent a second time by mistake; nobody listens to its answer.
    pub copy: u8,
}

/// What a worker answers on a leg.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// A token.
    Token(u32),
    /// The end.
    Ended(Outcome),
    /// The connection broke.
    Lost,
}

/// What the router wants done.
#[derive(Debug)]
pub enum Wish {
    /// Both legs of a try leave.
    Send {
        /// Which request.
        flight: usize,
        /// Which of its tries.
        attempt: u32,
        /// Where its legs meet.
        room: Room,
        /// Its prefill worker.
        prefill: usize,
        /// Its decode worker.
        decode: usize,
        /// What is still asked of them.
        order: Box<Order>,
    },
    /// A leg's connection is closed.
    Cancel(LegName),
    /// [`Flights::remind`] is to be called then.
    Remind(usize, Nanos),
    /// The client has its answer.
    Over(usize, Result<Outcome, Cause>),
}

#[derive(Debug)]
struct Flight {
    order: Order,
    core: Core,
    begun: Nanos,
    attempt: u32,
    /// Of the current try.
    room: Room,
    /// By role.
    booked: [Option<Booking>; 2],
    answer: Vec<u32>,
    /// Its prefill leg broke: decode has until then.
    decides_until: Option<Nanos>,
    /// It is tried again then.
    due: Option<Nanos>,
    over: bool,
}

/// All requests.
#[derive(Debug)]
pub struct Flights {
    router: Router,
    workers: usize,
    retries: Retries,
    base: Instant,
    dice: Dice,
    flights: Vec<Flight>,
    /// What is to be done.
    pub wishes: Vec<Wish>,
}

impl Flights {
    /// No requests; all workers are up.
    pub fn new(plan: &Plan, base: Instant, dice: Dice) -> Flights {
        let (prefill, decode) = (plan.scale.prefill as usize, plan.scale.decode as usize);
        let mut router = Router::new(plan.policy);
        // Numbered as the cluster numbers its processes.
        let roles =
            std::iter::repeat_n(Role::Prefill, prefill).chain(std::iter::repeat_n(Role::Decode, decode));
        for role in roles {
            let worker = router.join(role, base);
            router.probed(worker, true, base);
        }
        let retries = Retries::new(plan.retries, base);
        Flights {
            router,
            workers: prefill + decode,
            retries,
            base,
            dice,
            flights: Vec::new(),
            wishes: Vec::new(),
        }
    }

    /// A client asks. `takes` says whether a worker takes connections now; `pair` is whom it must be served by, if
    /// that is not the router's to choose.
    pub fn begin(
        &mut self,
        order: Order,
        pair: Option<[usize; 2]>,
        takes: impl Fn(usize) -> bool,
        now: Nanos,
    ) -> usize {
        let id = self.flights.len();
        let others = |pair: [usize; 2]| (0..self.workers).filter(move |worker| !pair.contains(worker));
        let unwilling = pair.into_iter().flat_map(others).map(WorkerNumber).collect();
        self.flights.push(Flight {
            order,
            core: Core::without(Avoid { failed: Vec::new(), unwilling }),
            begun: now,
            attempt: 0,
            room: Room(0),
            booked: [None, None],
            answer: Vec::new(),
            decides_until: None,
            due: None,
            over: false,
        });
        self.attempt(id, takes, now);
        id
    }

    /// What was asked.
    pub fn order(&self, flight: usize) -> &Order {
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

    /// Whether its client has its answer.
    pub fn is_over(&self, flight: usize) -> bool {
        self.flights[flight].over
    }

    /// Requests that are not over.
    pub fn open(&self) -> impl Iterator<Item = usize> {
        self.flights.iter().enumerate().filter(|(_, flight)| !flight.over).map(|(id, _)| id)
    }

    /// Sequences that are charged to workers.
    pub fn booked(&self) -> u32 {
        self.router.workers().map(|(_, _, load)| load.booked).sum()
    }

    /// Asks the workers whose turn it is how they are.
    pub fn probe(&mut self, is_well: impl Fn(usize) -> bool, now: Nanos) {
        let now = self.instant(now);
        while let Some(worker) = self.router.begin_probe(now) {
            self.router.probed(worker, is_well(worker.0), now);
        }
    }

    /// Something has come on a leg.
    pub fn take(&mut self, leg: LegName, what: Answer, takes: impl Fn(usize) -> bool, now: Nanos) {
        let id = leg.flight;
        let flight = &mut self.flights[id];
        if leg.copy > 0 || leg.attempt != flight.attempt || flight.over || flight.due.is_some() {
            return;
        }
        let news = match (leg.role, what) {
            (Role::Decode, Answer::Token(token)) => {
                flight.answer.push(token);
                News::Passes { resumable: true }
            }
            (Role::Prefill, Answer::Token(_)) => return,
            (role, what) => {
                self.close(id, role, false);
                match (role, what) {
                    // Decode has begun to answer.
                    (Role::Prefill, _) if !self.flights[id].core.is_waiting() => return,
                    (_, Answer::Ended(Outcome::Failed(cause))) => News::Failed(role, cause),
                    (Role::Decode, Answer::Ended(outcome)) => return self.land(id, outcome, now),
                    (Role::Prefill, Answer::Ended(_)) => return,
                    (role, _) => News::Lost(role, Cause::PeerLost),
                }
            }
        };
        self.happen(id, news, takes, now);
    }

    /// A time has come that was asked for.
    pub fn remind(&mut self, id: usize, takes: impl Fn(usize) -> bool, now: Nanos) {
        let flight = &mut self.flights[id];
        let is_due = |at: Option<Nanos>| at.is_some_and(|at| at <= now);
        if is_due(flight.due) && !flight.over {
            flight.due = None;
            self.attempt(id, takes, now);
        } else if is_due(flight.decides_until) && !flight.over {
            self.happen(id, News::Lost(Role::Decode, Cause::Deadline), takes, now);
        }
    }

    /// A client has gone.
    pub fn gone(&mut self, id: usize) {
        self.end(id, Err(Cause::ClientGone));
    }

    /// Takes a pair.
    fn attempt(&mut self, id: usize, takes: impl Fn(usize) -> bool, now: Nanos) {
        let instant = self.instant(now);
        let flight = &mut self.flights[id];
        let pair = match self.router.choose(1, flight.core.avoid(), instant) {
            Ok(pair) => pair,
            Err(none) => {
                let chance = self.dice.draw();
                let deadline = self.base + Duration::from_nanos(flight.begun + flight.order.patience);
                let terms =
                    Terms { now: instant, chance, deadline: Some(deadline), retries: &mut self.retries };
                let next = flight.core.nobody(none.may_come(), &terms);
                return self.carry_out(id, next, takes, now);
            }
        };
        let workers = [pair.prefill.worker(), pair.decode.worker()];
        flight.core.choose(Some(workers[0]), Some(workers[1]));
        flight.booked = [Some(pair.prefill), Some(pair.decode)];
        let refusing =
            [Role::Prefill, Role::Decode].into_iter().find(|&role| !takes(workers[role as usize].0));
        let news = match refusing {
            Some(role) => {
                self.router.refused(workers[role as usize]);
                News::Refused(role)
            }
            None => News::Opened(0),
        };
        self.happen(id, news, takes, now);
    }

    fn happen(&mut self, id: usize, news: News, takes: impl Fn(usize) -> bool, now: Nanos) {
        let chance = self.dice.draw();
        let deadline = Some(self.deadline(id));
        let terms = &mut Terms { now: self.instant(now), chance, deadline, retries: &mut self.retries };
        let core = &mut self.flights[id].core;
        let next = core.take(news, terms);
        let instant = self.base + Duration::from_nanos(now);
        match (next, news) {
            (Next::Again(_) | Next::Fail(_), _) => {
                core.accused().for_each(|worker| self.router.accuse(worker, instant));
            }
            (_, News::Passes { .. }) => {
                let workers = [Role::Prefill, Role::Decode].into_iter().filter_map(|role| core.worker(role));
                workers.for_each(|worker| self.router.acquit(worker));
            }
            _ => {}
        }
        self.carry_out(id, next, takes, now);
    }

    fn carry_out(&mut self, id: usize, next: Next, takes: impl Fn(usize) -> bool, now: Nanos) {
        let base = self.base;
        let nanos = |at: Instant| at.saturating_duration_since(base).as_nanos() as Nanos;
        let flight = &mut self.flights[id];
        match next {
            Next::On | Next::Land => {}
            Next::Calm => flight.decides_until = None,
            Next::Send => self.send(id, now),
            Next::Hurry(until) => {
                flight.decides_until = Some(nanos(until));
                self.wishes.push(Wish::Remind(id, nanos(until)));
            }
            Next::Again(at) => {
                flight.decides_until = None;
                self.cancel(id);
                if nanos(at) <= now {
                    return self.attempt(id, takes, now);
                }
                self.flights[id].due = Some(nanos(at));
                self.wishes.push(Wish::Remind(id, nanos(at)));
            }
            Next::Fail(cause) => self.end(id, Err(cause)),
        }
    }

    fn send(&mut self, id: usize, now: Nanos) {
        let room = Room(self.dice.draw() >> 1);
        let flight = &mut self.flights[id];
        flight.attempt += 1;
        flight.room = room;
        let Some(order) = flight.order.after(&flight.answer, now - flight.begun) else {
            return self.end(id, Err(Cause::Deadline));
        };
        let worker = |role: Role| flight.core.worker(role).expect("a pair was chosen").0;
        self.wishes.push(Wish::Send {
            flight: id,
            attempt: flight.attempt,
            room,
            prefill: worker(Role::Prefill),
            decode: worker(Role::Decode),
            order: Box::new(order),
        });
    }

    /// A whole answer: what prefill still does is left alone.
    fn land(&mut self, id: usize, outcome: Outcome, now: Nanos) {
        let chance = self.dice.draw();
        let deadline = Some(self.deadline(id));
        let terms = &mut Terms { now: self.instant(now), chance, deadline, retries: &mut self.retries };
        let next = self.flights[id].core.take(News::Landed, terms);
        assert_eq!(next, Next::Land, "decode answers what was sent");
        self.close(id, Role::Prefill, false);
        self.flights[id].over = true;
        self.wishes.push(Wish::Over(id, Ok(outcome)));
    }

    fn end(&mut self, id: usize, result: Result<Outcome, Cause>) {
        if std::mem::replace(&mut self.flights[id].over, true) {
            return;
        }
        self.cancel(id);
        self.wishes.push(Wish::Over(id, result));
    }

    fn cancel(&mut self, id: usize) {
        self.close(id, Role::Decode, true);
        self.close(id, Role::Prefill, true);
    }

    fn close(&mut self, id: usize, role: Role, cancel: bool) {
        let flight = &mut self.flights[id];
        if let Some(booking) = flight.booked[role as usize].take() {
            self.router.release(booking);
        }
        if cancel {
            self.wishes.push(Wish::Cancel(LegName { flight: id, attempt: flight.attempt, role, copy: 0 }));
        }
    }

    fn deadline(&self, id: usize) -> Instant {
        self.instant(self.flights[id].begun + self.flights[id].order.patience)
    }

    fn instant(&self, now: Nanos) -> Instant {
        self.base + Duration::from_nanos(now)
    }
}

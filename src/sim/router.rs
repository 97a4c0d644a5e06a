//! The router and its clients: requests to pairs, decode's answer back, and which leg's end ends the other,
//! by the rules of `front::router::flights` around the decisions of `cluster::router`.
//!
//! Owns: all requests that are being served. Not here: what an answer must be (`checkers`), how long a leg's
//! connection takes to carry something (`cluster`).

use super::agenda::Nanos;
use super::workload::Order;
use crate::cause::Cause;
use crate::cluster::loads::WorkerNumber;
use crate::cluster::router::{Booking, Role, Router};
use crate::config::resolved::Policy;
use crate::ids::Room;
use crate::limits::{ROUTER_LOST_PREFILL_TIME, ROUTER_PAIRS_MAX};
use crate::sched::mailbox::Outcome;
use std::collections::BTreeSet;
use std::time::Instant;

/// A leg of a request, which has a connection of its own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct LegName {
    /// Which request.
    pub flight: usize,
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
    /// Both legs of a request leave.
    Send {
        /// Which request.
        flight: usize,
        /// Where its legs meet.
        room: Room,
        /// Its prefill worker.
        prefill: usize,
        /// Its decode worker.
        decode: usize,
    },
    /// A leg's connection is closed.
    Cancel(LegName),
    /// [`Flights::overdue`] is to be asked then.
    Remind(usize, Nanos),
    /// The client has its answer.
    Over(usize, Result<Outcome, Cause>),
}

#[derive(Debug)]
struct Flight {
    order: Order,
    room: Room,
    prefill: Option<Booking>,
    decode: Option<Booking>,
    answer: Vec<u32>,
    /// Its prefill leg broke: decode has until then.
    decides_until: Option<Nanos>,
    over: bool,
}

/// All requests.
#[derive(Debug)]
pub struct Flights {
    router: Router,
    flights: Vec<Flight>,
    /// What is to be done.
    pub wishes: Vec<Wish>,
}

impl Flights {
    /// No requests; all workers are up.
    pub fn new(policy: Policy, prefill: usize, decode: usize, now: Instant) -> Flights {
        let mut router = Router::new(policy);
        // Numbered as the cluster numbers its processes.
        let roles =
            std::iter::repeat_n(Role::Prefill, prefill).chain(std::iter::repeat_n(Role::Decode, decode));
        for role in roles {
            let worker = router.join(role, now);
            router.probed(worker, true, now);
        }
        Flights { router, flights: Vec::new(), wishes: Vec::new() }
    }

    /// A client asks. `takes` says whether a worker takes connections now; `pair` is whom it must be served by, if
    /// that is not the router's to choose.
    pub fn begin(
        &mut self,
        order: Order,
        room: Room,
        pair: Option<(usize, usize)>,
        takes: impl Fn(usize) -> bool,
    ) -> usize {
        let id = self.flights.len();
        let flight = Flight {
            order,
            room,
            prefill: None,
            decode: None,
            answer: Vec::new(),
            decides_until: None,
            over: false,
        };
        self.flights.push(flight);
        if let Some((prefill, decode)) = pair {
            self.wishes.push(Wish::Send { flight: id, room, prefill, decode });
            return id;
        }
        for _ in 0..ROUTER_PAIRS_MAX {
            let Ok(pair) = self.router.choose(1) else { break };
            let (prefill, decode) = (pair.prefill.worker().0, pair.decode.worker().0);
            let refusing: BTreeSet<usize> = [prefill, decode].into_iter().filter(|&w| !takes(w)).collect();
            if refusing.is_empty() {
                let flight = &mut self.flights[id];
                (flight.prefill, flight.decode) = (Some(pair.prefill), Some(pair.decode));
                self.wishes.push(Wish::Send { flight: id, room, prefill, decode });
                return id;
            }
            self.router.release(pair.prefill);
            self.router.release(pair.decode);
            for worker in refusing {
                self.router.refused(WorkerNumber(worker));
            }
        }
        self.end(id, Err(Cause::PeerLost));
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

    /// Where its legs meet.
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

    /// Asks the workers whose turn it is how they are.
    pub fn probe(&mut self, is_well: impl Fn(usize) -> bool, now: Instant) {
        while let Some(worker) = self.router.begin_probe(now) {
            self.router.probed(worker, is_well(worker.0), now);
        }
    }

    /// Something has come on a leg.
    pub fn take(&mut self, leg: LegName, what: Answer, now: Nanos) {
        match (leg.role, what) {
            _ if leg.copy > 0 => {}
            (Role::Decode, what) => self.lead(leg.flight, what),
            (Role::Prefill, what) => self.prefill(leg.flight, what, now),
        }
    }

    fn lead(&mut self, id: usize, what: Answer) {
        let flight = &mut self.flights[id];
        match what {
            _ if flight.over => {}
            Answer::Token(token) => {
                flight.answer.push(token);
                flight.decides_until = None;
            }
            Answer::Ended(Outcome::Failed(cause)) => {
                self.close(id, Role::Decode, false);
                self.end(id, Err(cause));
            }
            Answer::Ended(outcome) => {
                self.close(id, Role::Decode, false);
                self.land(id, outcome);
            }
            Answer::Lost => {
                self.close(id, Role::Decode, false);
                self.end(id, Err(Cause::PeerLost));
            }
        }
    }

    fn prefill(&mut self, id: usize, what: Answer, now: Nanos) {
        if let Answer::Token(_) = what {
            return;
        }
        self.close(id, Role::Prefill, false);
        let flight = &mut self.flights[id];
        if flight.over || !flight.answer.is_empty() {
            return;
        }
        match what {
            Answer::Ended(Outcome::Failed(cause)) => self.end(id, Err(cause)),
            Answer::Lost => {
                let until = now + ROUTER_LOST_PREFILL_TIME.as_nanos() as Nanos;
                flight.decides_until = Some(until);
                self.wishes.push(Wish::Remind(id, until));
            }
            Answer::Ended(_) | Answer::Token(_) => {}
        }
    }

    /// Decode's time to decide is up, unless it has.
    pub fn overdue(&mut self, id: usize, now: Nanos) {
        if self.flights[id].decides_until.is_some_and(|until| until <= now) {
            self.end(id, Err(Cause::PeerLost));
        }
    }

    /// A client has gone.
    pub fn gone(&mut self, id: usize) {
        self.end(id, Err(Cause::ClientGone));
    }

    /// A whole answer: what prefill still does is left alone.
    fn land(&mut self, id: usize, outcome: Outcome) {
        self.flights[id].over = true;
        self.wishes.push(Wish::Over(id, Ok(outcome)));
    }

    fn end(&mut self, id: usize, result: Result<Outcome, Cause>) {
        if std::mem::replace(&mut self.flights[id].over, true) {
            return;
        }
        self.close(id, Role::Decode, true);
        self.close(id, Role::Prefill, true);
        self.wishes.push(Wish::Over(id, result));
    }

    fn close(&mut self, id: usize, role: Role, cancel: bool) {
        let flight = &mut self.flights[id];
        let booking = if role == Role::Prefill { flight.prefill.take() } else { flight.decode.take() };
        if let Some(booking) = booking {
            self.router.release(booking);
        }
        if cancel {
            self.wishes.push(Wish::Cancel(LegName { flight: id, role, copy: 0 }));
        }
    }
}

//! Requests on their way: to a pair, decode's answer back as it comes, and to another pair where one fails. In which
//! order the two workers are asked is the flow: both at once (`starting`), prefill first (`reading`), or decode alone,
//! which asks prefill itself (`front::asking`, in the worker).
//!
//! Thread: `ctl`. Owns: what a flight has on connections; what its client has of the answer (`relay`). Carries out what
//! `cluster::flight` says of it. Invariant: when a flight ends, or waits for its next try, so do its calls, but for a
//! prefill leg that decode's answer has overtaken. Not here: who is chosen, and when a request is tried again (`cluster`).

mod answering;
mod ending;
mod flight;
mod reading;
mod request;
mod starting;

pub use request::{Load, Request};

use crate::cause::Cause;
use crate::cluster::flight::{Flight as Core, News, Next, Terms};
use crate::cluster::retries::Retries;
use crate::config::resolved::{FirstToken, Flow, RequestTerms};
use crate::front::connections::Connections;
use crate::front::openai::ApiError;
use crate::front::router::call::WorkerAnswer;
use crate::front::router::failure;
use crate::front::router::fleet::Fleet;
use crate::front::router::line::Line;
use crate::front::router::relay::Relay;
use crate::limits::ROUTER_PROBE_INTERVAL;
use crate::net::{ConnId, Reactor};
use crate::obs::log::event;
use crate::obs::metrics::RouterMetrics;
use flight::Flight;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::time::Instant;

/// What a step works with.
#[derive(Debug)]
pub struct Way<'a> {
    /// Sockets.
    pub reactor: &'a mut Reactor,
    /// Clients.
    pub connections: &'a mut Connections,
    /// Workers.
    pub fleet: &'a mut Fleet,
    /// The turn's time.
    pub now: Instant,
}

impl Way<'_> {
    /// Answers a client with an error.
    pub fn refuse(&mut self, client: ConnId, error: &ApiError) {
        self.connections.refuse(self.reactor, client, error, self.now);
    }

    fn cancel(&mut self, call: Option<ConnId>) {
        if let Some(conn) = call {
            self.fleet.cancel(self.reactor, conn, self.now);
        }
    }
}

/// All requests that are being served.
#[derive(Debug)]
pub struct Flights {
    /// By client; each has one request at a time.
    open: HashMap<ConnId, Flight>,
    /// Those that wait for their turn, where there may only be so many at once.
    line: Line<Flight>,
    /// In which order workers are asked.
    flow: Flow,
    /// Whose token a stream begins with.
    first_token: FirstToken,
    /// Those that are tried again, by time; some may have ended.
    due: BinaryHeap<Reverse<(Instant, ConnId)>>,
    retries: Retries,
    metrics: RouterMetrics,
    /// Pieces of answers that were passed on since that was last asked.
    passed: usize,
}

impl Flights {
    /// None yet.
    pub fn new(retries: Retries, metrics: RouterMetrics) -> Flights {
        Flights {
            open: HashMap::new(),
            line: Line::default(),
            flow: Flow::default(),
            first_token: FirstToken::default(),
            due: BinaryHeap::new(),
            retries,
            metrics,
            passed: 0,
        }
    }

    /// Of which no more run at once, and no more wait, than these terms say, and which begin as they say.
    pub fn within(self, terms: &RequestTerms) -> Flights {
        Flights { line: Line::new(terms), flow: terms.flow, first_token: terms.first_token, ..self }
    }

    /// How many pieces of answers were passed on since this was last asked.
    pub fn take_passed(&mut self) -> usize {
        std::mem::take(&mut self.passed)
    }

    /// Whether nothing is being served.
    pub fn is_idle(&self) -> bool {
        self.open.is_empty() && self.line.is_empty()
    }

    /// How many requests are with workers, or between two tries.
    pub fn served(&self) -> usize {
        self.open.len()
    }

    /// How many requests there are.
    pub fn count(&self) -> usize {
        self.open.len() + self.line.len()
    }

    /// How many of them wait for others to end.
    pub fn waiting(&self) -> usize {
        self.line.len()
    }

    /// The counters.
    pub fn metrics(&self) -> &RouterMetrics {
        &self.metrics
    }

    /// Serves a request of a client.
    pub fn begin(&mut self, client: ConnId, request: Request, way: &mut Way<'_>) {
        let flight = Flight {
            request,
            begun: way.now,
            core: Core::default(),
            relay: Relay::default(),
            lead: None,
            prefill: None,
            held: None,
            kept: None,
            due: None,
            body: None,
            last: None,
        };
        if flight.is_counted() {
            self.metrics.requests.inc();
            if self.line.is_needed(self.running()) {
                return self.queue(client, flight, way);
            }
        }
        self.attempt(client, flight, way);
    }

    /// Requests for text that are not in line.
    fn running(&self) -> usize {
        match self.line.is_open() {
            // Nobody counts them.
            true => 0,
            false => self.open.values().filter(|flight| flight.is_counted()).count(),
        }
    }

    fn queue(&mut self, client: ConnId, flight: Flight, way: &mut Way<'_>) {
        let deadline = flight.deadline();
        if let Err(mut flight) = self.line.join(client, flight, deadline, way.now) {
            let most = self.line.length_max();
            let why = format!(
                "{most} requests wait at this router, as many as may (--queue-size); try again later"
            );
            flight.last = Some(WorkerAnswer::error(&ApiError::busy(why)));
            self.fail(client, flight, Cause::Overloaded, way);
        }
    }

    /// Takes those from the line whose turn has come, and gives those up who have waited too long.
    pub fn admit(&mut self, way: &mut Way<'_>) {
        while let Some((client, mut flight)) = self.line.overdue(way.now) {
            let why = "the request waited too long for others to end".to_owned();
            flight.last = Some(WorkerAnswer::error(&failure::error(Cause::Deadline, why)));
            self.fail(client, flight, Cause::Deadline, way);
        }
        while !self.line.is_empty() {
            let Some((client, flight)) = self.line.next(self.running()) else { return };
            self.attempt(client, flight, way);
        }
    }

    /// A client has gone away.
    pub fn gone(&mut self, client: ConnId, way: &mut Way<'_>) {
        if let Some(mut flight) = self.open.remove(&client).or_else(|| self.line.leave(client)) {
            self.failed(&flight, Cause::ClientGone);
            event!(Debug, "router", "client gone", request = flight.request.id);
            flight.cancel(way);
        }
    }

    /// Ends requests for text that their clients named so at the beginning, or all, wherever they are: at workers, or
    /// between two tries.
    /// How many those were.
    pub fn abort(&mut self, rid: Option<&str>, way: &mut Way<'_>) -> usize {
        let named = |request: &Request| match &request.load {
            Load::Routed(body) => rid.is_none_or(|rid| request.id == rid || body.is_named(rid)),
            Load::Decode(_) | Load::Any => false,
        };
        let all =
            self.open.iter().map(|(&client, flight)| (client, flight)).chain(self.line.iter());
        let hit: Vec<ConnId> =
            all.filter(|(_, flight)| named(&flight.request)).map(|(client, _)| client).collect();
        for &client in &hit {
            if let Some(mut flight) = self.open.remove(&client).or_else(|| self.line.leave(client))
            {
                // Its workers are asked to end it, too. Until they have, their connections stay: one that breaks says
                // that the client has gone.
                for leg in [flight.lead.take(), flight.prefill.take()].into_iter().flatten() {
                    way.fleet.let_end(way.reactor, leg, way.now);
                }
                let aborted = failure::error(Cause::Aborted, "the request was aborted".into());
                flight.last = Some(WorkerAnswer::error(&aborted));
                self.fail(client, flight, Cause::Aborted, way);
            }
        }
        hit.len()
    }

    /// What was sent to a client has left.
    pub fn drained(&mut self, client: ConnId, way: &mut Way<'_>) {
        if let Some(lead) = self.open.get(&client).and_then(|flight| flight.lead) {
            way.fleet.resume(way.reactor, lead, way.now);
        }
    }

    /// When the next request is tried again.
    pub fn next_due(&self) -> Option<Instant> {
        self.due.peek().map(|Reverse((at, _))| *at)
    }

    /// Tries those again whose time has come.
    pub fn try_again(&mut self, way: &mut Way<'_>) {
        while self.next_due().is_some_and(|at| at <= way.now) {
            let Some(Reverse((at, client))) = self.due.pop() else { return };
            if self.open.get(&client).is_some_and(|flight| flight.due == Some(at))
                && let Some(flight) = self.open.remove(&client)
            {
                self.attempt(client, flight, way);
            }
        }
    }

    fn keep(&mut self, client: ConnId, flight: Flight) {
        self.open.insert(client, flight);
    }

    fn follow(&mut self, client: ConnId, flight: Flight, news: Option<News>, way: &mut Way<'_>) {
        match news {
            Some(news) => self.take(client, flight, news, way),
            None => self.keep(client, flight),
        }
    }

    /// Something has happened to a flight.
    fn take(&mut self, client: ConnId, mut flight: Flight, news: News, way: &mut Way<'_>) {
        let deadline = flight.deadline();
        let next = flight.core.take(news, &mut terms(&mut self.retries, deadline, way));
        if matches!(next, Next::Again(_) | Next::Fail(_) | Next::Rejoin) {
            flight.core.accused().for_each(|worker| way.fleet.router().accuse(worker, way.now));
        }
        if let (Next::Again(_), News::Failed(role, cause) | News::Lost(role, cause)) = (next, news)
        {
            if flight.is_counted() {
                self.metrics.retried(cause);
            }
            flight.tell("tried again", role, cause, way);
        }
        self.carry_out(client, flight, next, way);
    }

    fn carry_out(&mut self, client: ConnId, mut flight: Flight, next: Next, way: &mut Way<'_>) {
        match next {
            Next::On | Next::Calm => {}
            Next::Send => return self.send(client, flight, way),
            Next::Join => return self.join(client, flight, way),
            Next::Rejoin => return self.rejoin(client, flight, way),
            Next::Hurry(until) => {
                if let Some(lead) = flight.lead {
                    way.fleet.set_deadline(lead, until.min(flight.until()));
                }
            }
            Next::Again(at) => {
                flight.cancel(way);
                if at <= way.now {
                    return self.attempt(client, flight, way);
                }
                flight.due = Some(at);
                self.due.push(Reverse((at, client)));
            }
            Next::Land => return self.land(client, flight, way),
            Next::Fail(cause) => return self.fail(client, flight, cause, way),
        }
        self.keep(client, flight);
    }
}

fn terms<'a>(retries: &'a mut Retries, deadline: Option<Instant>, way: &Way<'_>) -> Terms<'a> {
    Terms { now: way.now, chance: random(), deadline, retries }
}

/// 503, to be tried again once workers have been probed.
pub fn unavailable(why: String) -> ApiError {
    let error = ApiError::new(503, "no_worker", why);
    ApiError { retry_after: Some(ROUTER_PROBE_INTERVAL.as_secs() as u32), ..error }
}

/// 64 bits for rooms and delays.
fn random() -> u64 {
    let mut bytes = [0; 8];
    // The kernel's generator does not fail once it is seeded.
    let _ = getrandom::fill(&mut bytes);
    u64::from_le_bytes(bytes)
}

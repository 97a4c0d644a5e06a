//! Requests on their way: to a pair at once, and decode's answer back as it comes.
//!
//! ```text
//!            both connections stand             first byte of decode's body
//! Connecting ─────────────────────▶ Waiting ─────────────────────────────▶ Passing ──▶ over
//!     │ one is refused: another pair   │ prefill's error, decode lost: an error   │ decode lost: the
//!     └────────────────────────────────┴ with its status                         └ stream says so
//! ```
//! Thread: `ctl`. Invariants: nothing is sent before all connections of an attempt stand, so a worker that
//! takes none costs no room anywhere; a request that was sent is never sent again; when a flight ends, so do
//! its calls, but for a prefill leg that decode's answer has overtaken. Not here: who is chosen (`cluster`).

use crate::cause::Cause;
use crate::cluster::loads::WorkerNumber;
use crate::cluster::router::{Booking, Pair, Role};
use crate::config::resolved::LogLevel;
use crate::front::connections::Connections;
use crate::front::http::sse;
use crate::front::openai::ApiError;
use crate::front::openai::routed::Routed;
use crate::front::router::call::{Lost, Order, Owner, WorkerAnswer};
use crate::front::router::fleet::{Fleet, What};
use crate::ids::Room;
use crate::limits::{
    ERROR_CODE_MAX, REQUEST_TIME_MAX, ROUTER_ANSWER_MAX, ROUTER_LOST_PREFILL_TIME, ROUTER_PAIRS_MAX,
    ROUTER_PROBE_INTERVAL,
};
use crate::net::{CloseReason, ConnId, Reactor};
use crate::obs::log::{self, event};
use crate::obs::metrics::RouterMetrics;
use serde::Deserialize;
use serde_json::Value;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
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

/// What a request carries, and by that who serves it.
#[derive(Clone, Debug)]
pub enum Load {
    /// For a pair.
    Routed(Routed),
    /// For a decode worker alone.
    Decode(Vec<u8>),
    /// For any worker, without a body.
    Any,
}

/// A request to be served.
#[derive(Clone, Debug)]
pub struct Request {
    /// What is asked.
    pub order: Order,
    /// With which body.
    pub load: Load,
    /// Its name in the log.
    pub id: String,
}

#[derive(Debug)]
struct Flight {
    order: Order,
    /// Until it is sent.
    load: Option<Load>,
    id: String,
    begun: Instant,
    /// Whether it is one of those that metrics are about: requests for text.
    counted: bool,
    /// The call whose answer is the client's.
    lead: Option<ConnId>,
    /// The prefill leg, while it can still fail the request.
    prefill: Option<ConnId>,
    /// Whose answer is the client's.
    server: Option<WorkerNumber>,
    /// Where the legs meet; `None` for what a single worker serves.
    source: Option<WorkerNumber>,
    /// Connections that do not stand yet.
    awaited: u32,
    /// Pairs tried.
    attempts: u32,
    /// Whether the prefill leg broke, so that decode has little time left.
    prefill_lost: bool,
    stage: Stage,
}

/// Life of a flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// Waits for connections, with nothing sent;
    Connecting,
    /// was sent, and the client has heard nothing yet;
    Waiting,
    /// or gets its answer piece by piece.
    Passing {
        /// Whether the pieces are events.
        is_stream: bool,
    },
}

/// All requests that are being served.
#[derive(Debug)]
pub struct Flights {
    /// By client; each has one request at a time.
    open: HashMap<ConnId, Flight>,
    metrics: RouterMetrics,
}

impl Flights {
    /// None yet.
    pub fn new(metrics: RouterMetrics) -> Flights {
        Flights { open: HashMap::new(), metrics }
    }

    /// Whether nothing is being served.
    pub fn is_idle(&self) -> bool {
        self.open.is_empty()
    }

    /// How many requests are being served.
    pub fn count(&self) -> usize {
        self.open.len()
    }

    /// The counters.
    pub fn metrics(&self) -> &RouterMetrics {
        &self.metrics
    }

    /// Serves a request of a client.
    pub fn begin(&mut self, client: ConnId, request: Request, way: &mut Way<'_>) {
        let Request { order, load, id } = request;
        let counted = matches!(load, Load::Routed(_));
        if counted {
            self.metrics.requests.inc();
        }
        let flight = Flight {
            order,
            load: Some(load),
            id,
            begun: way.now,
            counted,
            lead: None,
            prefill: None,
            server: None,
            source: None,
            awaited: 0,
            attempts: 0,
            prefill_lost: false,
            stage: Stage::Connecting,
        };
        self.attempt(client, flight, way);
    }

    /// A client has gone away.
    pub fn gone(&mut self, client: ConnId, way: &mut Way<'_>) {
        if let Some(flight) = self.open.remove(&client) {
            self.failed(&flight, Cause::ClientGone);
            event!(Debug, "router", "client gone", request = flight.id);
            flight.cancel(way);
        }
    }

    /// What was sent to a client has left.
    pub fn drained(&mut self, client: ConnId, way: &mut Way<'_>) {
        if let Some(lead) = self.open.get(&client).and_then(|flight| flight.lead) {
            way.fleet.resume(way.reactor, lead, way.now);
        }
    }

    /// News of the call whose answer is the client's.
    pub fn lead(&mut self, client: ConnId, conn: ConnId, what: What, way: &mut Way<'_>) {
        let Some(mut flight) = self.open.remove(&client) else { return };
        if flight.lead != Some(conn) {
            self.open.insert(client, flight);
            return;
        }
        match what {
            What::Ready => self.ready(client, flight, way),
            What::Refused => {
                flight.lead = None;
                self.refused(client, flight, way);
            }
            What::Arrived => {
                self.arrived(client, conn, &mut flight, way);
                self.open.insert(client, flight);
            }
            What::Ended(mut answer) => {
                flight.lead = None;
                self.pass(client, &mut flight, &mut answer, way.reactor, way.connections, way.now);
                self.land(client, flight, &answer, way);
            }
            What::Lost(lost) => {
                flight.lead = None;
                let error = flight.lost_lead(lost);
                self.fail(client, flight, &error, way);
            }
        }
    }

    /// News of a prefill leg.
    pub fn prefill(&mut self, client: ConnId, conn: ConnId, what: What, way: &mut Way<'_>) {
        let Some(mut flight) = self.open.remove(&client) else { return };
        if flight.prefill != Some(conn) {
            self.open.insert(client, flight);
            return;
        }
        match what {
            What::Ready => return self.ready(client, flight, way),
            What::Refused => {
                flight.prefill = None;
                return self.refused(client, flight, way);
            }
            What::Arrived => {}
            What::Ended(answer) => {
                flight.prefill = None;
                if !answer.is_success() && !flight.has_begun(way) {
                    return self.prefill_failed(client, flight, &answer, way);
                }
            }
            What::Lost(lost) => {
                flight.prefill = None;
                if !flight.has_begun(way) {
                    event!(Warn, "router", "prefill leg lost", request = flight.id, why = lost);
                    flight.prefill_lost = true;
                    if let Some(lead) = flight.lead {
                        way.fleet.set_deadline(lead, way.now + ROUTER_LOST_PREFILL_TIME);
                    }
                }
            }
        }
        self.open.insert(client, flight);
    }

    /// Takes a pair and connections to it.
    fn attempt(&mut self, client: ConnId, mut flight: Flight, way: &mut Way<'_>) {
        flight.attempts += 1;
        let router = way.fleet.router();
        let booked = match &flight.load {
            Some(Load::Routed(body)) => {
                router.choose(body.choices()).map(|Pair { prefill, decode }| (decode, Some(prefill)))
            }
            Some(Load::Decode(_)) => router.choose_one(Role::Decode, 0).map(|decode| (decode, None)),
            Some(Load::Any) | None => router.first().map(|worker| (router.visit(worker), None)),
        };
        let (lead, prefill) = match booked {
            Ok(booked) => booked,
            Err(none) => return self.fail(client, flight, &unavailable(none.to_string()), way),
        };
        flight.server = Some(lead.worker());
        flight.source = prefill.as_ref().map(Booking::worker);
        match flight.open(client, lead, prefill, way) {
            Ok(()) if flight.awaited == 0 => self.send(client, flight, way),
            Ok(()) => drop(self.open.insert(client, flight)),
            Err(reason) => self.fail(client, flight, &unavailable(reason.to_string()), way),
        }
    }

    fn ready(&mut self, client: ConnId, mut flight: Flight, way: &mut Way<'_>) {
        flight.awaited -= 1;
        if flight.awaited == 0 {
            self.send(client, flight, way);
        } else {
            self.open.insert(client, flight);
        }
    }

    /// A worker took no connection. Nothing was sent to anybody, so another pair is as good.
    fn refused(&mut self, client: ConnId, mut flight: Flight, way: &mut Way<'_>) {
        way.cancel(flight.lead.take());
        way.cancel(flight.prefill.take());
        flight.awaited = 0;
        if flight.attempts < ROUTER_PAIRS_MAX {
            return self.attempt(client, flight, way);
        }
        let message = format!("none of {ROUTER_PAIRS_MAX} workers took a connection");
        self.fail(client, flight, &ApiError::new(502, Cause::PeerLost.name(), message), way);
    }

    /// Sends the request on all connections at once, under a fresh room.
    fn send(&mut self, client: ConnId, mut flight: Flight, way: &mut Way<'_>) {
        let room = Room(random() >> 1);
        let source = flight.source.and_then(|worker| way.fleet.target(worker));
        let body = match (flight.load.take(), source) {
            (Some(Load::Routed(body)), Some(source)) => {
                body.address(&source.url.host, source.bootstrap_port.unwrap_or_default(), room)
            }
            (Some(Load::Decode(body)), _) => body,
            _ => Vec::new(),
        };
        let body = Arc::new(body);
        flight.stage = Stage::Waiting;
        event!(Debug, "router", "sent", request = flight.id, room = room, target = flight.order.target);
        for conn in [flight.prefill, flight.lead].into_iter().flatten() {
            way.fleet.begin(way.reactor, conn, &flight.order, &body, way.now);
        }
        self.open.insert(client, flight);
    }

    /// More of the answer has come.
    fn arrived(&mut self, client: ConnId, lead: ConnId, flight: &mut Flight, way: &mut Way<'_>) {
        let Some(answer) = way.fleet.answer(lead) else { return };
        self.pass(client, flight, answer, way.reactor, way.connections, way.now);
        if !answer.is_success() {
            way.cancel(flight.prefill.take());
        }
        if flight.prefill_lost && flight.stage != Stage::Waiting {
            // Decode has decided, and goes on without prefill.
            way.fleet.set_deadline(lead, flight.begun + REQUEST_TIME_MAX);
        }
    }

    /// Passes on what can be passed on of an answer that has not ended.
    fn pass(
        &mut self,
        client: ConnId,
        flight: &mut Flight,
        answer: &mut WorkerAnswer,
        reactor: &mut Reactor,
        connections: &mut Connections,
        now: Instant,
    ) {
        let is_stream = answer.is_stream();
        if flight.stage == Stage::Waiting {
            if answer.body.is_empty() || !(is_stream || answer.body.len() > ROUTER_ANSWER_MAX) {
                return;
            }
            flight.stage = Stage::Passing { is_stream };
            // Only a stream's first byte is its first token.
            if is_stream && flight.counted {
                self.metrics.first_byte(now.duration_since(flight.begun));
            }
            connections.open_body(reactor, client, answer.status, &answer.media);
        }
        connections.stream(reactor, client, &std::mem::take(&mut answer.body));
    }

    /// The answer has ended.
    fn land(&mut self, client: ConnId, flight: Flight, answer: &WorkerAnswer, way: &mut Way<'_>) {
        if flight.stage == Stage::Waiting {
            way.connections.answer(way.reactor, client, &answer.whole(), way.now);
        } else {
            way.connections.end_stream(way.reactor, client, way.now);
        }
        if !answer.is_success() {
            let failure = Failure::of(answer);
            flight.tell(failure.cause, flight.server, &failure, way);
            self.failed(&flight, failure.cause);
        } else if flight.counted {
            self.metrics.ended(way.now.duration_since(flight.begun));
        }
        match flight.prefill {
            Some(prefill) if answer.is_success() => way.fleet.leave(prefill),
            prefill => way.cancel(prefill),
        }
    }

    fn prefill_failed(
        &mut self,
        client: ConnId,
        mut flight: Flight,
        answer: &WorkerAnswer,
        way: &mut Way<'_>,
    ) {
        let failure = Failure::of(answer);
        flight.tell(failure.cause, flight.source, &failure, way);
        self.failed(&flight, failure.cause);
        way.cancel(flight.lead.take());
        way.connections.answer(way.reactor, client, &answer.whole(), way.now);
    }

    /// Ends a flight that got no whole answer.
    fn fail(&mut self, client: ConnId, flight: Flight, error: &ApiError, way: &mut Way<'_>) {
        let cause = match error.code {
            NO_WORKER => Cause::PeerLost,
            code => Cause::named(code).unwrap_or_else(|| cause_of(error.status)),
        };
        flight.tell(cause, flight.server, error, way);
        self.failed(&flight, cause);
        match flight.stage {
            Stage::Connecting | Stage::Waiting => way.refuse(client, error),
            Stage::Passing { is_stream: true } => {
                // An event may have been cut off; empty lines end it, and do nothing else.
                let mut last = b"\n\n".to_vec();
                sse::write_event(&mut last, &error.to_json());
                way.connections.stream(way.reactor, client, &last);
                way.connections.end_stream(way.reactor, client, way.now);
            }
            Stage::Passing { is_stream: false } => way.connections.cut(way.reactor, client),
        }
        flight.cancel(way);
    }

    fn failed(&self, flight: &Flight, cause: Cause) {
        if flight.counted {
            self.metrics.failed(cause);
        }
    }
}

impl Flight {
    fn open(
        &mut self,
        client: ConnId,
        lead: Booking,
        prefill: Option<Booking>,
        way: &mut Way<'_>,
    ) -> Result<(), CloseReason> {
        let until = self.begun + REQUEST_TIME_MAX;
        let prefill = prefill.map(|booking| (Owner::Prefill(client), booking));
        let mut result = Ok(());
        for (owner, booking) in prefill.into_iter().chain([(Owner::Lead(client), lead)]) {
            if result.is_err() {
                way.fleet.router().release(booking);
                continue;
            }
            match way.fleet.open(way.reactor, owner, booking, until, way.now) {
                Ok((conn, stands)) => {
                    self.awaited += u32::from(!stands);
                    let leg = if owner == Owner::Lead(client) { &mut self.lead } else { &mut self.prefill };
                    *leg = Some(conn);
                }
                Err(reason) => result = Err(reason),
            }
        }
        result
    }

    /// Whether decode has begun to answer, well or not, so that prefill's outcome no longer counts.
    fn has_begun(&self, way: &mut Way<'_>) -> bool {
        let answer = self.lead.and_then(|lead| way.fleet.answer(lead));
        self.stage != Stage::Waiting || answer.is_some_and(|a| !a.body.is_empty() || !a.is_success())
    }

    /// Logs how a request failed, and at which worker where it was one; what is the client's making is no news.
    fn tell(&self, cause: Cause, worker: Option<WorkerNumber>, why: &dyn fmt::Display, way: &Way<'_>) {
        let level = match cause {
            Cause::Refused | Cause::ClientGone => LogLevel::Debug,
            _ => LogLevel::Warn,
        };
        if log::is_logged(level) {
            let worker = worker.map_or("none".into(), |worker| way.fleet.url(worker));
            let fields: [log::Field; 4] =
                [("request", &self.id), ("worker", &worker), ("cause", &cause), ("why", &why)];
            log::write(level, "router", "request failed", &fields);
        }
    }

    fn lost_lead(&self, lost: Lost) -> ApiError {
        let error = |cause: Cause, message: String| ApiError::new(cause.http_status(), cause.name(), message);
        match lost {
            Lost::Deadline if self.prefill_lost => {
                error(Cause::PeerLost, "the prefill worker was lost before there was an answer".into())
            }
            Lost::Deadline => error(Cause::Deadline, "the request took too long".into()),
            Lost::Full => error(Cause::Overloaded, format!("the request was not passed on: {lost}")),
            lost => error(Cause::PeerLost, format!("the worker's answer did not come: {lost}")),
        }
    }

    fn cancel(self, way: &mut Way<'_>) {
        way.cancel(self.lead);
        way.cancel(self.prefill);
    }
}

/// The code of an error for want of workers.
const NO_WORKER: &str = "no_worker";

/// 503, to be tried again once workers have been probed.
pub fn unavailable(why: String) -> ApiError {
    let error = ApiError::new(503, NO_WORKER, why);
    ApiError { retry_after: Some(ROUTER_PROBE_INTERVAL.as_secs() as u32), ..error }
}

/// What a worker's answer says of a failure: its status, and the code in its body. The rest of the body stays
/// out of the log, since engines quote what they were sent.
struct Failure {
    status: u16,
    code: Option<String>,
    cause: Cause,
}

impl Failure {
    fn of(answer: &WorkerAnswer) -> Failure {
        #[derive(Deserialize)]
        struct Body {
            error: Inner,
        }
        #[derive(Deserialize)]
        struct Inner {
            code: Option<Value>,
        }
        let body: Option<Body> = serde_json::from_slice(&answer.body).ok();
        let code = body.and_then(|body| Some(body.error.code?.as_str()?.to_owned()));
        let is_word = |code: &String| {
            code.len() <= ERROR_CODE_MAX
                && code.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
        };
        let code = code.filter(is_word);
        let cause = code.as_deref().and_then(Cause::named).unwrap_or_else(|| cause_of(answer.status));
        Failure { status: answer.status, code, cause }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "status {}, code {}", self.status, self.code.as_deref().unwrap_or("none"))
    }
}

/// The cause that a worker's status stands for.
fn cause_of(status: u16) -> Cause {
    let is_same = |cause: &&Cause| cause.http_status() == status;
    let known = Cause::ALL.iter().find(is_same).copied();
    known.unwrap_or(if status < 500 { Cause::Refused } else { Cause::Internal })
}

/// 64 bits for rooms.
fn random() -> u64 {
    let mut bytes = [0; 8];
    // The kernel's generator does not fail once it is seeded.
    let _ = getrandom::fill(&mut bytes);
    u64::from_le_bytes(bytes)
}

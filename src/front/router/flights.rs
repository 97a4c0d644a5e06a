//! Requests on their way: to a pair at once, decode's answer back as it comes, and to another pair where one fails.
//!
//! Thread: `ctl`. Owns: what a flight has on connections; what its client has of the answer (`relay`). Carries out what
//! `cluster::flight` says of it. Invariant: when a flight ends, or waits for its next try, so do its calls, but for a
//! prefill leg that decode's answer has overtaken. Not here: who is chosen, and when a request is tried again (`cluster`).

use crate::cause::Cause;
use crate::cluster::flight::{Flight as Core, News, Next, Terms};
use crate::cluster::retries::Retries;
use crate::cluster::router::{Booking, NoWorker, Role};
use crate::config::resolved::{FirstToken, LogLevel, RequestTerms};
use crate::front::connections::Connections;
use crate::front::http::sse;
use crate::front::openai::ApiError;
use crate::front::openai::routed::{Meeting, Routed};
use crate::front::router::call::{Lost, Order, Owner, WorkerAnswer};
use crate::front::router::failure::{self, Failure};
use crate::front::router::fleet::{Fleet, What};
use crate::front::router::line::Line;
use crate::front::router::relay::{Passed, Relay};
use crate::ids::Room;
use crate::limits::{REQUEST_TIME_MAX, ROUTER_ANSWER_MAX, ROUTER_GRACE, ROUTER_PROBE_INTERVAL};
use crate::net::{CloseReason, ConnId, Reactor};
use crate::obs::log::{self, event};
use crate::obs::metrics::RouterMetrics;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::fmt;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

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

impl Load {
    /// How many answers there will be, side by side.
    fn choices(&self) -> usize {
        if let Load::Routed(body) = self { body.choices() as usize } else { 1 }
    }
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
    request: Request,
    begun: Instant,
    core: Core,
    relay: Relay,
    /// The call whose answer is the client's.
    lead: Option<ConnId>,
    /// The prefill leg, while it can still fail the request.
    prefill: Option<ConnId>,
    /// When it is tried again.
    due: Option<Instant>,
    /// How its client gets the answer, once it does.
    body: Option<Body>,
    /// What it is told if no other try comes to more.
    last: Option<WorkerAnswer>,
}

/// How an answer that has begun is passed on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Body {
    Stream,
    Long,
}

/// All requests that are being served.
#[derive(Debug)]
pub struct Flights {
    /// By client; each has one request at a time.
    open: HashMap<ConnId, Flight>,
    /// Those that wait for their turn, where there may only be so many at once.
    line: Line<Flight>,
    /// Whose token a stream begins with.
    first_token: FirstToken,
    /// Those that are tried again, by time; some may have ended.
    due: BinaryHeap<Reverse<(Instant, ConnId)>>,
    retries: Retries,
    metrics: RouterMetrics,
}

impl Flights {
    /// None yet.
    pub fn new(retries: Retries, metrics: RouterMetrics) -> Flights {
        Flights {
            open: HashMap::new(),
            line: Line::default(),
            first_token: FirstToken::default(),
            due: BinaryHeap::new(),
            retries,
            metrics,
        }
    }

    /// Of which no more run at once, and no more wait, than these terms say, and which begin as they say.
    pub fn within(self, terms: &RequestTerms) -> Flights {
        Flights { line: Line::new(terms), first_token: terms.first_token, ..self }
    }

    /// Whether nothing is being served.
    pub fn is_idle(&self) -> bool {
        self.open.is_empty() && self.line.is_empty()
    }

    /// How many requests are being served.
    pub fn count(&self) -> usize {
        self.open.len() + self.line.len()
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
            flight.last = Some(WorkerAnswer::error(&ApiError::overloaded(1)));
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
        let all = self.open.iter().map(|(&client, flight)| (client, flight)).chain(self.line.iter());
        let hit: Vec<ConnId> =
            all.filter(|(_, flight)| named(&flight.request)).map(|(client, _)| client).collect();
        for &client in &hit {
            if let Some(mut flight) = self.open.remove(&client).or_else(|| self.line.leave(client)) {
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

    /// News of the call whose answer is the client's.
    pub fn lead(&mut self, client: ConnId, conn: ConnId, what: What, way: &mut Way<'_>) {
        let Some(mut flight) = self.open.remove(&client) else { return };
        if flight.lead != Some(conn) {
            self.open.insert(client, flight);
            return;
        }
        match what {
            What::Ready => self.take(client, flight, News::Connected, way),
            What::Refused => {
                flight.lead = None;
                self.refused(client, flight, Role::Decode, way);
            }
            What::Arrived => {
                let Some(answer) = way.fleet.answer(conn) else { return self.keep(client, flight) };
                if !answer.is_success() {
                    // Its end says why.
                    way.cancel(flight.prefill.take());
                    return self.keep(client, flight);
                }
                let (media, is_stream) = (answer.media.clone(), answer.is_stream());
                let mut body = std::mem::take(&mut answer.body);
                let news = self.pass(client, &mut flight, &media, is_stream, &mut body, way);
                if let Some(answer) = way.fleet.answer(conn) {
                    answer.body = body;
                }
                self.follow(client, flight, news, way);
            }
            What::Ended(answer) => {
                flight.lead = None;
                self.ended(client, flight, answer, way);
            }
            What::Lost(_) if flight.relay.is_done() => {
                flight.lead = None;
                self.take(client, flight, News::Landed, way);
            }
            // Nobody is to blame but its client, and nobody else would do better.
            What::Lost(Lost::Behind) => {
                flight.lead = None;
                let (cause, why) = failure::of_loss(Lost::Behind);
                flight.last = Some(WorkerAnswer::error(&failure::error(cause, why)));
                self.fail(client, flight, cause, way);
            }
            What::Lost(lost) => {
                flight.lead = None;
                let (cause, why) = failure::of_loss(lost);
                // Where it had little time left, because prefill was lost, that is what the client is told.
                if !(flight.core.has_lost_prefill() && cause == Cause::Deadline) {
                    flight.last = Some(WorkerAnswer::error(&failure::error(cause, why)));
                }
                self.take(client, flight, News::Lost(Role::Decode, cause), way);
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
            What::Ready => return self.take(client, flight, News::Connected, way),
            What::Refused => {
                flight.prefill = None;
                return self.refused(client, flight, Role::Prefill, way);
            }
            What::Arrived => {
                let answer = way.fleet.answer(conn).filter(|answer| answer.is_success());
                // What says why it failed is read when it is whole.
                let Some(answer) = answer else { return self.keep(client, flight) };
                let mut body = std::mem::take(&mut answer.body);
                let news = self.pass_ahead(client, &mut flight, &mut body, way);
                if let Some(answer) = way.fleet.answer(conn) {
                    answer.body = body;
                }
                return self.follow(client, flight, news, way);
            }
            What::Ended(mut answer) if answer.is_success() => {
                flight.prefill = None;
                let news = self.pass_ahead(client, &mut flight, &mut answer.body, way);
                return self.follow(client, flight, news, way);
            }
            What::Ended(answer) => {
                flight.prefill = None;
                if !flight.has_begun(way) {
                    let news = Failure::of(&answer).news(Role::Prefill);
                    flight.last = Some(answer);
                    return self.take(client, flight, news, way);
                }
            }
            // The client's time is up, which ends decode's leg, too: that is what the client is told.
            What::Lost(Lost::Deadline) => flight.prefill = None,
            What::Lost(lost) => {
                flight.prefill = None;
                if !flight.has_begun(way) {
                    event!(Warn, "router", "prefill leg lost", request = flight.request.id, why = lost);
                    let why = "the prefill worker was lost before there was an answer";
                    flight.last = Some(WorkerAnswer::error(&failure::error(Cause::PeerLost, why.into())));
                    return self.take(client, flight, News::Lost(Role::Prefill, Cause::PeerLost), way);
                }
            }
        }
        self.keep(client, flight);
    }

    /// Takes a pair and connections to it.
    fn attempt(&mut self, client: ConnId, mut flight: Flight, way: &mut Way<'_>) {
        flight.due = None;
        let (router, avoid) = (way.fleet.router(), flight.core.avoid());
        let booked = match &flight.request.load {
            Load::Routed(body) => {
                router.choose_serving(body.work(), avoid, way.now).map(|(prefill, decode)| (decode, prefill))
            }
            Load::Decode(_) => {
                router.choose_one(Role::Decode, 0, avoid, way.now).map(|decode| (decode, None))
            }
            Load::Any => router.first(avoid).map(|worker| (router.visit(worker), None)),
        };
        let (lead, prefill) = match booked {
            Ok(booked) => booked,
            Err(NoWorker::Late) => {
                let late = ApiError { message: NoWorker::Late.to_string(), ..ApiError::overloaded(1) };
                flight.last = Some(WorkerAnswer::error(&late));
                let next = flight.core.late();
                return self.carry_out(client, flight, next, way);
            }
            Err(none) => {
                flight.last.get_or_insert_with(|| WorkerAnswer::error(&unavailable(none.to_string())));
                let deadline = flight.deadline();
                let next = flight.core.nobody(none.may_come(), &terms(&mut self.retries, deadline, way));
                return self.carry_out(client, flight, next, way);
            }
        };
        flight.core.choose(prefill.as_ref().map(Booking::worker), Some(lead.worker()));
        match flight.open(client, lead, prefill, way) {
            Ok(awaited) => self.take(client, flight, News::Opened(awaited), way),
            Err(reason) => {
                flight.last = Some(WorkerAnswer::error(&unavailable(reason.to_string())));
                self.fail(client, flight, Cause::Overloaded, way);
            }
        }
    }

    fn refused(&mut self, client: ConnId, mut flight: Flight, role: Role, way: &mut Way<'_>) {
        let why = "no worker that was asked took a connection";
        flight.last.get_or_insert_with(|| WorkerAnswer::error(&failure::error(Cause::PeerLost, why.into())));
        self.take(client, flight, News::Refused(role), way);
    }

    fn keep(&mut self, client: ConnId, flight: Flight) {
        self.open.insert(client, flight);
    }

    /// Passes on what can be passed on, and says what that means for the flight.
    fn pass(
        &mut self,
        client: ConnId,
        flight: &mut Flight,
        media: &str,
        is_stream: bool,
        body: &mut Vec<u8>,
        way: &mut Way<'_>,
    ) -> Option<News> {
        if flight.body.is_none() && !is_stream && body.len() <= ROUTER_ANSWER_MAX {
            return None;
        }
        let passed = match (flight.body, is_stream) {
            (Some(Body::Stream), false) => Passed::Broken,
            (_, true) => flight.relay.take(body),
            (_, false) => Passed::Bytes(std::mem::take(body)),
        };
        let (bytes, news) = match passed {
            Passed::Bytes(bytes) => (bytes, None),
            Passed::Failed { bytes, cause, error } => (bytes, Some(flight.told(Role::Decode, cause, error))),
            Passed::Broken => {
                let why = "the worker's answer is no stream of events".to_owned();
                flight.last = Some(WorkerAnswer::error(&failure::error(Cause::Internal, why)));
                (Vec::new(), Some(News::Lost(Role::Decode, Cause::Internal)))
            }
        };
        if bytes.is_empty() {
            return news;
        }
        if flight.body.is_none() || flight.core.is_retry() {
            // Who reads alone generates now.
            flight.lead.into_iter().for_each(|lead| way.fleet.has_read(lead, way.now));
        }
        if flight.body.is_none() {
            self.open_body(client, flight, media, is_stream, way);
            flight.acquit(way);
        } else if flight.core.is_retry() {
            self.metrics.resumed.inc();
            flight.acquit(way);
        }
        way.connections.stream(way.reactor, client, &bytes);
        let passes = News::Passes { resumable: is_stream && flight.relay.is_resumable() };
        // Nothing is drawn or looked up for what goes well, piece by piece.
        let terms = &mut Terms { now: way.now, chance: 0, deadline: None, retries: &mut self.retries };
        let next = flight.core.take(passes, terms);
        if let (Next::Calm, Some(lead)) = (next, flight.lead) {
            way.fleet.set_deadline(lead, flight.until());
        }
        news
    }

    /// Passes on what prefill tells before decode does, where it is asked for that, and says what that means for the
    /// flight. Whatever else it answers is of no use, but for a failure.
    fn pass_ahead(
        &mut self,
        client: ConnId,
        flight: &mut Flight,
        body: &mut Vec<u8>,
        way: &mut Way<'_>,
    ) -> Option<News> {
        if !self.is_ahead(flight) || !(flight.body.is_none() || flight.body == Some(Body::Stream)) {
            body.clear();
            return None;
        }
        let (bytes, failed) = match flight.relay.take_ahead(body) {
            Passed::Bytes(bytes) => (bytes, None),
            Passed::Failed { bytes, cause, error } => (bytes, Some((cause, error))),
            Passed::Broken => (Vec::new(), None),
        };
        if !bytes.is_empty() {
            if flight.body.is_none() {
                self.open_body(client, flight, sse::CONTENT_TYPE, true, way);
            }
            way.connections.stream(way.reactor, client, &bytes);
            let terms = &mut Terms { now: way.now, chance: 0, deadline: None, retries: &mut self.retries };
            let _ = flight.core.take(News::Told, terms);
        }
        let (cause, error) = failed.filter(|_| !flight.has_begun(way))?;
        Some(flight.told(Role::Prefill, cause, error))
    }

    /// Whether prefill is asked to tell what it samples at once.
    fn is_ahead(&self, flight: &Flight) -> bool {
        let is_stream = matches!(&flight.request.load, Load::Routed(body) if body.is_stream());
        self.first_token == FirstToken::Prefill && is_stream
    }

    fn open_body(
        &self,
        client: ConnId,
        flight: &mut Flight,
        media: &str,
        is_stream: bool,
        way: &mut Way<'_>,
    ) {
        flight.body = Some(if is_stream { Body::Stream } else { Body::Long });
        // Only a stream's first byte is its first token.
        if is_stream && flight.is_counted() {
            self.metrics.first_byte(way.now.duration_since(flight.begun));
        }
        way.connections.open_body(way.reactor, client, 200, media);
    }

    /// Decode's answer has ended.
    fn ended(&mut self, client: ConnId, mut flight: Flight, mut answer: WorkerAnswer, way: &mut Way<'_>) {
        if !answer.is_success() {
            let news = Failure::of(&answer).news(Role::Decode);
            flight.last = Some(answer);
            return self.take(client, flight, news, way);
        }
        let (media, is_stream) = (answer.media.clone(), answer.is_stream());
        let mut body = std::mem::take(&mut answer.body);
        let news = self.pass(client, &mut flight, &media, is_stream, &mut body, way);
        let news = news.unwrap_or_else(|| match flight.body {
            // It knew how to end it, and did not.
            Some(Body::Stream) if flight.relay.is_resumable() && !flight.relay.is_done() => {
                let (cause, why) = failure::of_loss(Lost::Closed);
                flight.last = Some(WorkerAnswer::error(&failure::error(cause, why)));
                News::Lost(Role::Decode, cause)
            }
            _ => News::Landed,
        });
        if news == News::Landed && flight.body.is_none() {
            flight.last = Some(WorkerAnswer { body, ..answer });
        }
        self.take(client, flight, news, way);
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
        if matches!(next, Next::Again(_) | Next::Fail(_)) {
            flight.core.accused().for_each(|worker| way.fleet.router().accuse(worker, way.now));
        }
        if let (Next::Again(_), News::Failed(role, cause) | News::Lost(role, cause)) = (next, news) {
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
            Next::Hurry(until) => {
                if let Some(lead) = flight.lead {
                    way.fleet.set_deadline(lead, until);
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

    /// Sends the request on all connections at once, under a fresh room.
    fn send(&mut self, client: ConnId, mut flight: Flight, way: &mut Way<'_>) {
        let room = Room(random() >> 1);
        flight.relay.turn(flight.request.load.choices());
        let Some(order) = flight.request.order.after(way.now.duration_since(flight.begun)) else {
            let why = "the client's time was up before there was an answer".to_owned();
            flight.last = Some(WorkerAnswer::error(&failure::error(Cause::Deadline, why)));
            return self.fail(client, flight, Cause::Deadline, way);
        };
        let source = flight.core.worker(Role::Prefill).and_then(|worker| way.fleet.target(worker));
        let body = match (&flight.request.load, source) {
            (Load::Routed(body), source) => {
                let is_ahead = source.is_some() && self.is_ahead(&flight);
                let is_marked = is_ahead || (self.retries.most() > 0 && body.is_stream());
                let mut resume = is_marked.then(|| flight.relay.resume().clone());
                if let Some(resume) = resume.as_mut().filter(|_| is_ahead) {
                    // Two workers tell of one answer, which began once.
                    resume.created.get_or_insert_with(unix);
                }
                let meeting = source.map(|source| Meeting {
                    host: &source.url.host,
                    port: source.registry_port(),
                    room,
                });
                body.address(meeting, resume.as_ref(), is_ahead)
            }
            (Load::Decode(body), _) => body.clone(),
            (Load::Any, _) => Vec::new(),
        };
        let body = Arc::new(body);
        event!(Debug, "router", "sent", request = flight.request.id, room = room, target = order.target);
        for conn in [flight.prefill, flight.lead].into_iter().flatten() {
            way.fleet.begin(way.reactor, conn, &order, &body, way.now);
        }
        self.keep(client, flight);
    }

    /// The answer is whole.
    fn land(&mut self, client: ConnId, flight: Flight, way: &mut Way<'_>) {
        match (flight.body, &flight.last) {
            (None, Some(answer)) => {
                way.connections.answer(way.reactor, client, &answer.whole(), way.now);
            }
            _ => way.connections.end_stream(way.reactor, client, way.now),
        }
        flight.acquit(way);
        if flight.is_counted() {
            self.metrics.ended(way.now.duration_since(flight.begun));
        }
        if let Some(prefill) = flight.prefill {
            way.fleet.leave(prefill);
        }
        way.cancel(flight.lead);
    }

    /// Ends a flight that got no whole answer.
    fn fail(&mut self, client: ConnId, mut flight: Flight, cause: Cause, way: &mut Way<'_>) {
        flight.tell("request failed", Role::Decode, cause, way);
        self.failed(&flight, cause);
        // That it has gone, as a worker may think, is not for a client that is here.
        let is_true =
            |told: &WorkerAnswer| told.own.is_some() || Failure::of(told).cause != Cause::ClientGone;
        let told = flight.last.take().filter(is_true);
        let told = told.unwrap_or_else(|| {
            WorkerAnswer::error(&failure::error(cause, "the request could not be served".into()))
        });
        match flight.body {
            None => way.connections.answer(way.reactor, client, &told.whole(), way.now),
            Some(Body::Stream) => {
                let mut last = Vec::new();
                if !flight.relay.is_resumable() {
                    // An event may have been cut off; empty lines end it, and do nothing else.
                    last.extend_from_slice(b"\n\n");
                }
                sse::write_event(&mut last, &told.body);
                way.connections.stream(way.reactor, client, &last);
                way.connections.end_stream(way.reactor, client, way.now);
            }
            Some(Body::Long) => way.connections.cut(way.reactor, client),
        }
        flight.cancel(way);
    }

    fn failed(&self, flight: &Flight, cause: Cause) {
        if flight.is_counted() {
            self.metrics.failed(cause);
        }
    }
}

impl Flight {
    /// A leg has told a failure in its stream.
    fn told(&mut self, role: Role, cause: Cause, error: Vec<u8>) -> News {
        let media = crate::front::connections::JSON.to_owned();
        let status = cause.http_status();
        let told = WorkerAnswer { status, media, retry_after: None, body: error, own: None };
        let news = match Failure::of(&told).news(role) {
            News::Failed(role, _) => News::Failed(role, cause),
            news => news,
        };
        self.last = Some(told);
        news
    }

    /// When its legs are given up: a worker keeps the client's time itself, unless it stands still.
    fn until(&self) -> Instant {
        self.deadline().map_or(self.begun + REQUEST_TIME_MAX, |deadline| deadline + ROUTER_GRACE)
    }

    /// When its client waits no longer, if it has said.
    fn deadline(&self) -> Option<Instant> {
        Some(self.begun + self.request.order.patience()?)
    }

    /// Whether it is one of those that metrics are about: requests for text.
    fn is_counted(&self) -> bool {
        matches!(self.request.load, Load::Routed(_))
    }

    /// Asks for connections; says how many do not stand yet.
    fn open(
        &mut self,
        client: ConnId,
        lead: Booking,
        prefill: Option<Booking>,
        way: &mut Way<'_>,
    ) -> Result<u32, CloseReason> {
        let until = self.until();
        let prefill = prefill.map(|booking| (Owner::Prefill(client), booking));
        let mut result = Ok(0);
        for (owner, booking) in prefill.into_iter().chain([(Owner::Lead(client), lead)]) {
            let Ok(awaited) = &mut result else {
                way.fleet.router().release(booking, way.now);
                continue;
            };
            match way.fleet.open(way.reactor, owner, booking, until, way.now) {
                Ok((conn, stands)) => {
                    *awaited += u32::from(!stands);
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
        !self.core.is_waiting() || answer.is_some_and(|a| !a.body.is_empty() || !a.is_success())
    }

    /// Logs how a request fared, and at which worker where it was one; what is the client's making is no news.
    fn tell(&self, what: &str, role: Role, cause: Cause, way: &Way<'_>) {
        let level = match cause {
            Cause::Refused | Cause::Aborted => LogLevel::Debug,
            _ => LogLevel::Warn,
        };
        if log::is_logged(level) {
            let accused: Vec<_> = self.core.accused().map(|worker| way.fleet.url(worker)).collect();
            let chosen = || self.core.worker(role).map_or("none".into(), |worker| way.fleet.url(worker));
            let worker = if accused.is_empty() { chosen() } else { accused.join(", ") };
            let why = self.last.as_ref().map(Failure::of);
            let why: &dyn fmt::Display = match &why {
                Some(failure) => failure,
                None => &"unknown",
            };
            let fields: [log::Field; 4] =
                [("request", &self.request.id), ("worker", &worker), ("cause", &cause), ("why", why)];
            log::write(level, "router", what, &fields);
        }
    }

    /// Both workers have done their part.
    fn acquit(&self, way: &mut Way<'_>) {
        let workers = [Role::Prefill, Role::Decode].into_iter().filter_map(|role| self.core.worker(role));
        workers.for_each(|worker| way.fleet.router().acquit(worker));
    }

    fn cancel(&mut self, way: &mut Way<'_>) {
        way.cancel(self.lead.take());
        way.cancel(self.prefill.take());
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

/// Seconds of Unix time.
fn unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// 64 bits for rooms and delays.
fn random() -> u64 {
    let mut bytes = [0; 8];
    // The kernel's generator does not fail once it is seeded.
    let _ = getrandom::fill(&mut bytes);
    u64::from_le_bytes(bytes)
}

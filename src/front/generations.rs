//! Requests for text: from a parsed body over ids and legs to the last byte of the answer.
//!
//! Thread: `ctl`. Owns: live exchanges, and the *legs* that work for them (one request of one worker each; a
//! choice has a prefill and a decode leg where both roles are in this process). The first terminal failure of
//! either leg cancels the other; after decode's first token prefill's outcome is ignored.
//! Not here: HTTP framing (`connections`), the hand-off's protocol (`handoff`).

mod asked;
mod figures;
mod flushes;
mod kept;
mod legs;
mod live;
mod opening;
mod placing;

pub use placing::Placement;

use crate::cause::Cause;
use crate::front::asking::Ask;
use crate::front::connections::{Answer, Connections};
use crate::front::handoff::Handoff;
use crate::front::openai::bootstrap::SOURCE_PARAM;
use crate::front::openai::{ApiError, GenerateRequest, Prompts, kv_transfer};
use crate::front::text::{Job, Task, Text, TextQueue, Ticket};
use crate::ids::RequestId;
use crate::net::{ConnId, Reactor};
use crate::obs::metrics::WorkerMetrics;
use crate::sched::mailbox::Command;
use asked::Asked;
use flushes::Flushes;
use legs::{Leg, Part};
use live::{Given, Live};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

/// What is true of the model and the process for every request.
#[derive(Clone, Debug)]
pub struct Terms {
    /// Names the model answers to; the first is told.
    pub names: Vec<String>,
    /// Requests that a worker runs and lets wait at most: choices of one request.
    pub choices: usize,
    /// Ends of sequence.
    pub eos: Vec<u32>,
    /// How choices are placed.
    pub placement: Placement,
}

/// All requests for text of this process.
#[derive(Debug)]
pub struct Generations {
    terms: Terms,
    text: Arc<Text>,
    queue: TextQueue,
    handoff: Handoff,
    live: HashMap<u64, Live>,
    /// Who waits for the tokeniser's answer itself.
    converting: HashMap<u64, (ConnId, Ticket)>,
    /// Of both.
    by_conn: HashMap<ConnId, u64>,
    legs: HashMap<RequestId, Leg>,
    /// Requests that have failed, until when prefill's word on that is waited for.
    unheard: VecDeque<(Instant, u64)>,
    /// Requests that have lost the prefill worker that was asked, until when they may begin.
    hurried: VecDeque<(Instant, u64)>,
    flushes: Flushes<ConnId>,
    metrics: Vec<Arc<WorkerMetrics>>,
    next_exchange: u64,
    next_request: u64,
    turn: usize,
}

/// Where answers go.
#[derive(Debug)]
pub struct Way<'a> {
    /// Sockets.
    pub reactor: &'a mut Reactor,
    /// HTTP.
    pub connections: &'a mut Connections,
    /// The clock of this turn.
    pub now: Instant,
}

impl Generations {
    /// No requests yet. `metrics` are the workers', in order of their ids.
    pub fn new(
        terms: Terms,
        text: Arc<Text>,
        queue: TextQueue,
        handoff: Handoff,
        metrics: Vec<Arc<WorkerMetrics>>,
    ) -> Generations {
        Generations {
            terms,
            text,
            queue,
            handoff,
            live: HashMap::new(),
            converting: HashMap::new(),
            by_conn: HashMap::new(),
            legs: HashMap::new(),
            unheard: VecDeque::new(),
            hurried: VecDeque::new(),
            flushes: Flushes::default(),
            metrics,
            next_exchange: 0,
            next_request: 0,
            turn: 0,
        }
    }

    /// Requests that are not answered or still hold a slot.
    pub fn is_idle(&self) -> bool {
        self.live.is_empty() && self.legs.is_empty() && self.converting.is_empty()
    }

    /// Whether the workers are done with all that they were told, so that others may take their place.
    pub fn is_free(&self) -> bool {
        self.live.is_empty() && self.legs.is_empty() && self.flushes.is_idle()
    }

    /// The workers are gone, and their memory with the last that holds it. Nothing may be asked before
    /// [`Generations::take_on`].
    pub fn dismiss(&mut self) {
        debug_assert!(self.is_free(), "a worker goes while it works");
        self.handoff = Handoff::new(Vec::new(), self.handoff.offer().clone());
        self.metrics.clear();
    }

    /// Others have come in their place.
    pub fn take_on(
        &mut self,
        placement: Placement,
        handoff: Handoff,
        metrics: Vec<Arc<WorkerMetrics>>,
    ) {
        self.terms.placement = placement;
        (self.handoff, self.metrics) = (handoff, metrics);
    }

    /// Whether a client waits for an answer.
    pub fn is_asked(&self) -> bool {
        !self.live.is_empty() || !self.converting.is_empty()
    }

    /// Requests for text that are not answered.
    pub fn running(&self) -> usize {
        self.live.len()
    }

    /// Whether all of them are with their workers.
    pub fn is_placed(&self) -> bool {
        self.live.values().all(|live| live.exchange.is_some())
    }

    /// The workers and their protocol, to be told of other processes.
    pub fn handoff_mut(&mut self) -> &mut Handoff {
        &mut self.handoff
    }

    /// The workers and their protocol.
    pub fn handoff(&self) -> &Handoff {
        &self.handoff
    }

    /// What is true for every request.
    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    /// Tokens of one sequence at most.
    pub fn context(&self) -> usize {
        self.text.context
    }

    /// A client asks for text.
    pub fn begin(&mut self, conn: ConnId, request: GenerateRequest, id: String, way: &mut Way<'_>) {
        self.take(conn, request, None, id, false, way);
    }

    /// A client asks for text whose KV this worker is to ask prefill for.
    pub fn begin_asking(
        &mut self,
        conn: ConnId,
        request: GenerateRequest,
        ask: Ask,
        id: String,
        way: &mut Way<'_>,
    ) {
        match self.terms.placement {
            Placement::Decode { .. } => self.take(conn, request, Some(ask), id, false, way),
            _ => {
                let why = "names a prefill worker to be asked for the KV; this is no decode worker";
                way.refuse(conn, &ApiError::invalid(kv_transfer::PREFILL, why));
            }
        }
    }

    /// A client asks whether tokens come. A worker whose other leg is elsewhere shows its own part: prefill
    /// hands over to nobody, decode goes on from nothing.
    pub fn begin_trial(
        &mut self,
        conn: ConnId,
        request: GenerateRequest,
        id: String,
        way: &mut Way<'_>,
    ) {
        self.take(conn, request, None, id, true, way);
    }

    fn take(
        &mut self,
        conn: ConnId,
        request: GenerateRequest,
        ask: Option<Ask>,
        id: String,
        trial: bool,
        way: &mut Way<'_>,
    ) {
        if let Err(error) = self.check(&request) {
            return way.refuse(conn, &error);
        }
        let exchange = self.next_exchange;
        self.next_exchange += 1;
        let kept = match self.keeps(&request) {
            Ok(kept) => kept,
            Err(error) => return way.refuse(conn, &error),
        };
        let mut request = Box::new(request);
        let prompts = std::mem::replace(&mut request.prompts, Prompts::Ids(Vec::new()));
        let task = Task::Prompts(prompts, request.endpoint);
        let ticket = match self.queue.submit(Job { id: exchange, task }) {
            Ok(ticket) => ticket,
            Err(error) => return way.refuse(conn, &error),
        };
        let live = Live {
            conn,
            request,
            id,
            _ticket: ticket,
            arrived: way.now,
            exchange: None,
            begun: false,
            trial,
            kept,
            asked: ask.map(|ask| Box::new(Asked::new(ask))),
            legs: Vec::new(),
            timings: Vec::new(),
            first: Vec::new(),
        };
        self.live.insert(exchange, live);
        self.by_conn.insert(conn, exchange);
    }

    /// A client asks for ids of a text, or for the text of ids.
    ///
    /// # Errors
    /// Too many wait for the tokeniser.
    pub fn convert(&mut self, conn: ConnId, task: Task) -> Result<(), ApiError> {
        let id = self.next_exchange;
        self.next_exchange += 1;
        let ticket = self.queue.submit(Job { id, task })?;
        self.converting.insert(id, (conn, ticket));
        self.by_conn.insert(conn, id);
        Ok(())
    }

    /// A client wants the workers' prefix caches emptied; it is told when they are.
    ///
    /// # Errors
    /// Too many wait for that.
    pub fn flush(&mut self, conn: ConnId, now: Instant) -> Result<(), ApiError> {
        let workers =
            self.handoff.members().iter().map(|member| member.worker.id).collect::<Vec<_>>();
        self.flushes.begin(conn, &workers, now)?;
        for worker in workers {
            self.handoff.worker_mut(worker).engine.send(Command::Flush { worker });
        }
        Ok(())
    }

    /// The client of a connection has gone: everything done for it ends.
    pub fn gone(&mut self, conn: ConnId, now: Instant) {
        self.flushes.gone(conn);
        if let Some(exchange) = self.by_conn.get(&conn).copied()
            && self.converted(exchange).is_none()
        {
            self.drop_exchange(exchange, Cause::ClientGone, now);
        }
    }

    /// Ends the requests whose name begins with `rid`, or all; their clients are told.
    pub fn abort(&mut self, rid: Option<&str>, way: &mut Way<'_>) -> usize {
        let named = |live: &Live| {
            rid.is_none_or(|rid| {
                live.id == rid || live.request.rids.iter().any(|own| own.starts_with(rid))
            })
        };
        let hit: Vec<u64> =
            self.live.iter().filter(|(_, live)| named(live)).map(|(&id, _)| id).collect();
        for &exchange in &hit {
            self.fail(exchange, &error_of(Cause::Aborted), Cause::Aborted, way);
        }
        hit.len() + if rid.is_none() { self.drop_kept() } else { 0 }
    }

    /// Whether the tokeniser or a mover has something.
    pub fn has_news(&self) -> bool {
        self.queue.has_news() || self.handoff.has_news()
    }

    /// Takes in what the tokeniser has done and what movers say. True when there was something.
    pub fn turn(&mut self, way: &mut Way<'_>) -> bool {
        let mut busy = self.handoff.turn(way.now);
        while let Some(conn) = self.flushes.overdue(way.now) {
            way.refuse(
                conn,
                &ApiError::new(503, "unavailable", "a worker does not empty its cache"),
            );
        }
        while let Some(answer) = self.queue.poll() {
            self.answered(answer, way);
            busy = true;
        }
        while let Some((exchange, word)) = self.handoff.poll_word() {
            self.hear(exchange, word, way);
            busy = true;
        }
        self.end_unheard(way);
        busy
    }

    /// Ends what is overdue.
    pub fn expire(&mut self, now: Instant) {
        self.handoff.expire(now);
        if let Placement::Prefill { bootstrap_timeout, .. } = self.terms.placement {
            self.give_up(bootstrap_timeout, now);
        }
    }

    fn close_if_over(&mut self, id: u64, way: &mut Way<'_>) {
        let Some(live) = self.live.get(&id) else { return };
        let Some(exchange) = live.exchange.as_ref().filter(|exchange| exchange.is_over()) else {
            return;
        };
        let conn = live.conn;
        let mut out = Vec::new();
        if exchange.is_stream() {
            exchange.close(None, &mut out);
            if let Some(live) = self.live.get_mut(&id) {
                live.stream(&out, way);
            }
            way.connections.end_stream(way.reactor, conn, way.now);
        } else {
            let timings = live.request.return_timings.then(|| self.first_timings(live));
            exchange.close(timings.as_ref(), &mut out);
            way.answer(conn, &Answer::json(&out));
        }
        self.forget(id);
    }

    /// Ends an exchange with an error: as a status, or as an event where a stream has begun.
    fn fail(&mut self, id: u64, error: &ApiError, cause: Cause, way: &mut Way<'_>) {
        let Some(live) = self.live.get_mut(&id) else { return };
        let conn = live.conn;
        match live.exchange.as_mut().filter(|exchange| exchange.is_stream() && live.begun) {
            Some(exchange) => {
                let mut out = Vec::new();
                exchange.abort(error, &mut out);
                way.connections.stream(way.reactor, conn, &out);
                way.connections.end_stream(way.reactor, conn, way.now);
            }
            None => way.refuse(conn, error),
        }
        self.drop_exchange(id, cause, way.now);
    }

    /// Forgets an exchange and ends its legs.
    fn drop_exchange(&mut self, id: u64, cause: Cause, now: Instant) {
        let Some(mut live) = self.forget(id) else { return };
        self.drop_asked(id, &mut live, now);
        for request in live.legs {
            if let Some(leg) = self.legs.get(&request).copied().filter(|leg| !leg.finished) {
                self.handoff.worker_mut(leg.worker).abort(leg.slot, cause);
            }
        }
    }

    fn forget(&mut self, id: u64) -> Option<Live> {
        let live = self.live.remove(&id)?;
        self.by_conn.remove(&live.conn);
        Some(live)
    }
}

impl Way<'_> {
    /// Answers with an error.
    pub fn refuse(&mut self, conn: ConnId, error: &ApiError) {
        self.connections.refuse(self.reactor, conn, error, self.now);
    }

    /// Answers whole.
    pub fn answer(&mut self, conn: ConnId, answer: &Answer<'_>) {
        self.connections.answer(self.reactor, conn, answer, self.now);
    }
}

/// What a client is told of a failure.
fn error_of(cause: Cause) -> ApiError {
    let message = match cause {
        Cause::ClientGone => "the connection of the request's other leg was closed",
        Cause::Aborted => "the request was aborted",
        Cause::Refused => {
            "the request does not fit this server's KV memory, or its room is another's"
        }
        Cause::Overloaded => return ApiError::overloaded(1),
        Cause::PeerLost => "the worker at the other end of the hand-off was lost",
        Cause::Deadline => "the request took too long",
        Cause::Mismatch => "prefill and decode disagree about the request",
        Cause::Corrupt => "handed-over data failed their check",
        Cause::OtherLeg => "the other leg of the request failed",
        // Requests that came before this worker's own drain are finished.
        Cause::Draining => {
            let error = ApiError::draining("the prefill worker of this request is draining");
            return ApiError { param: Some(SOURCE_PARAM.into()), ..error };
        }
        Cause::Internal => "internal error",
        Cause::Denied => "the decode worker's NIC refused what it was to be handed",
        Cause::Unreachable => "the fabric between the two workers carries nothing",
        Cause::Flushed => "the hand-off was cut short when another one broke",
        Cause::Incompatible => {
            "the prefill and the decode worker do not fit each other; their logs name what differs"
        }
    };
    ApiError::new(cause.http_status(), cause.name(), message)
}

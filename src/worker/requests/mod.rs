//! The table of requests for text: from a parsed body to the last byte of the answer.
//!
//! Owns: active requests and their *legs*. A leg is one request to one worker. A choice has a
//! prefill leg and a decode leg if both roles are in this process. Thread: `ctl`. Invariants: the
//! first terminal failure of one leg cancels the other; after decode's first token, prefill's
//! outcome is ignored. Not here: the hand-off (`peer::handoff`) and the client that asks prefill
//! (`prefill_client`). Both come in through [`Context`] and do not know this table. HTTP framing is
//! in `server::connections`.

mod active;
mod flushes;
mod kept;
mod legs;
mod placement;
mod preparation;
mod remote_prefill;
mod timings;

pub use placement::Placement;

use crate::api::bootstrap::SOURCE_PARAM;
use crate::api::{ApiError, GenerateRequest, Prompts, kv_transfer};
use crate::cause::Cause;
use crate::http::response::Response;
use crate::ids::RequestId;
use crate::net::{ConnId, Reactor};
use crate::peer::handoff::Handoff;
use crate::sched::messages::EngineCommand;
use crate::server::connections::Connections;
use crate::stdx::failpoint::is_failpoint_active;
use crate::worker::metrics::WorkerMetrics;
use crate::worker::prefill_client::{PrefillClient, PrefillRequest};
use crate::worker::text::{JobGuard, TextJob, TextProcessor, TextQueue, TextTask};
use active::{ActiveRequest, ChoiceInput};
use flushes::PendingFlushes;
use legs::{ActiveLeg, LegKind};
use remote_prefill::PendingPrefill;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

/// Settings of the model and the process that hold for every request.
#[derive(Clone, Debug)]
pub struct ServingConfig {
    /// Names of the model; answers carry the first one.
    pub names: Vec<String>,
    /// Maximum number of choices of one request: the requests that a worker can run and queue.
    pub choices: usize,
    /// End-of-sequence tokens.
    pub eos: Vec<u32>,
    /// How choices are placed.
    pub placement: Placement,
}

/// All requests for text of this process.
#[derive(Debug)]
pub struct RequestTable {
    config: ServingConfig,
    text: Arc<TextProcessor>,
    queue: TextQueue,
    active: HashMap<u64, ActiveRequest>,
    /// Requests for token ids or text alone, from `/tokenize` and `/detokenize`.
    converting: HashMap<u64, (ConnId, JobGuard)>,
    /// Connections of `active` and `converting`.
    by_conn: HashMap<ConnId, u64>,
    legs: HashMap<RequestId, ActiveLeg>,
    /// Failed requests, and how long each waits for prefill's own reply.
    awaiting_reply: VecDeque<(Instant, u64)>,
    /// Requests that lost the connection to prefill, and the time by which each must begin.
    start_deadlines: VecDeque<(Instant, u64)>,
    flushes: PendingFlushes<ConnId>,
    metrics: Vec<Arc<WorkerMetrics>>,
    next_exchange: u64,
    next_request: u64,
    turn: usize,
}

/// What one step works with.
#[derive(Debug)]
pub struct Context<'a> {
    /// Sockets.
    pub reactor: &'a mut Reactor,
    /// HTTP connections.
    pub connections: &'a mut Connections,
    /// The workers of this process, and their links to others.
    pub handoff: &'a mut Handoff,
    /// Requests of this worker to prefill workers.
    pub prefill_client: &'a mut PrefillClient,
    /// The time of this turn.
    pub now: Instant,
}

impl RequestTable {
    /// An empty table. `metrics` are those of the workers, in the order of their ids.
    pub fn new(
        config: ServingConfig,
        text: Arc<TextProcessor>,
        queue: TextQueue,
        metrics: Vec<Arc<WorkerMetrics>>,
    ) -> RequestTable {
        RequestTable {
            config,
            text,
            queue,
            active: HashMap::new(),
            converting: HashMap::new(),
            by_conn: HashMap::new(),
            legs: HashMap::new(),
            awaiting_reply: VecDeque::new(),
            start_deadlines: VecDeque::new(),
            flushes: PendingFlushes::default(),
            metrics,
            next_exchange: 0,
            next_request: 0,
            turn: 0,
        }
    }

    /// Whether no request is unanswered and no leg holds a slot.
    pub fn is_idle(&self) -> bool {
        self.active.is_empty() && self.legs.is_empty() && self.converting.is_empty()
    }

    /// Whether the workers have no work left, so that others can take their place.
    pub fn is_free(&self) -> bool {
        self.active.is_empty() && self.legs.is_empty() && self.flushes.is_idle()
    }

    /// The workers are gone. Do not start a request before [`RequestTable::set_workers`].
    pub fn remove_workers(&mut self) {
        debug_assert!(self.is_free(), "workers are removed while they work");
        self.metrics.clear();
    }

    /// New workers are in place.
    pub fn set_workers(&mut self, placement: Placement, metrics: Vec<Arc<WorkerMetrics>>) {
        self.config.placement = placement;
        self.metrics = metrics;
    }

    /// Whether a client waits for an answer.
    pub fn is_asked(&self) -> bool {
        !self.active.is_empty() || !self.converting.is_empty()
    }

    /// Number of generation requests without a complete answer.
    pub fn running(&self) -> usize {
        self.active.len()
    }

    /// Whether all of them are tokenised, so that their choices are placed or wait for prefill.
    pub fn is_placed(&self) -> bool {
        self.active.values().all(|live| live.response.is_some())
    }

    /// Settings that hold for every request.
    pub fn config(&self) -> &ServingConfig {
        &self.config
    }

    /// Maximum number of tokens of one sequence.
    pub fn context(&self) -> usize {
        self.text.context
    }

    /// A client asks for text.
    pub fn start_request(
        &mut self,
        conn: ConnId,
        request: GenerateRequest,
        id: String,
        cx: &mut Context<'_>,
    ) {
        self.admit_request(conn, request, None, id, false, cx);
    }

    /// A client asks for text, and this worker must ask prefill for the KV.
    pub fn start_with_remote_prefill(
        &mut self,
        conn: ConnId,
        request: GenerateRequest,
        ask: PrefillRequest,
        id: String,
        cx: &mut Context<'_>,
    ) {
        match self.config.placement {
            Placement::Decode { .. } => self.admit_request(conn, request, Some(ask), id, false, cx),
            _ => {
                let why = "names a prefill worker to ask for the KV, but this is no decode worker";
                cx.send_error(conn, &ApiError::invalid(kv_transfer::PREFILL, why));
            }
        }
    }

    /// Runs a self-test generation. If the other leg would be in another process, this worker tests
    /// its own part. Prefill sends KV to the fake destination; decode continues from the fake
    /// source.
    pub fn start_self_test(
        &mut self,
        conn: ConnId,
        request: GenerateRequest,
        id: String,
        cx: &mut Context<'_>,
    ) {
        self.admit_request(conn, request, None, id, true, cx);
    }

    fn admit_request(
        &mut self,
        conn: ConnId,
        request: GenerateRequest,
        ask: Option<PrefillRequest>,
        id: String,
        trial: bool,
        cx: &mut Context<'_>,
    ) {
        if let Err(error) = self.check_request(&request) {
            return cx.send_error(conn, &error);
        }
        let exchange = self.next_exchange;
        self.next_exchange += 1;
        let kept = match self.keeps(&request) {
            Ok(kept) => kept,
            Err(error) => return cx.send_error(conn, &error),
        };
        let mut request = Box::new(request);
        let prompts = std::mem::replace(&mut request.prompts, Prompts::Ids(Vec::new()));
        let task = TextTask::Prompts(prompts, request.endpoint);
        let ticket = match self.queue.submit(TextJob { id: exchange, task }) {
            Ok(ticket) => ticket,
            Err(error) => return cx.send_error(conn, &error),
        };
        let live = ActiveRequest {
            conn,
            request,
            id,
            _ticket: ticket,
            arrived: cx.now,
            response: None,
            begun: false,
            is_self_test: trial,
            kept,
            pending_prefill: ask.map(|ask| Box::new(PendingPrefill::new(ask))),
            legs: Vec::new(),
            timings: Vec::new(),
            first_tokens: Vec::new(),
        };
        self.active.insert(exchange, live);
        let before = self.by_conn.insert(conn, exchange);
        debug_assert!(before.is_none(), "a connection has one request at a time");
    }

    /// A client asks for the ids of a text, or for the text of ids.
    ///
    /// # Errors
    /// The tokeniser's queue is full.
    pub fn convert(&mut self, conn: ConnId, task: TextTask) -> Result<(), ApiError> {
        let id = self.next_exchange;
        self.next_exchange += 1;
        let ticket = self.queue.submit(TextJob { id, task })?;
        self.converting.insert(id, (conn, ticket));
        let before = self.by_conn.insert(conn, id);
        debug_assert!(before.is_none(), "a connection has one request at a time");
        Ok(())
    }

    /// Empties the workers' prefix caches. The client gets its answer when they are empty.
    ///
    /// # Errors
    /// Too many clients wait for a flush.
    pub fn flush(&mut self, conn: ConnId, cx: &mut Context<'_>) -> Result<(), ApiError> {
        let workers =
            cx.handoff.members().iter().map(|member| member.worker.id).collect::<Vec<_>>();
        self.flushes.begin(conn, &workers, cx.now)?;
        for worker in workers {
            cx.handoff.worker_mut(worker).engine.send(EngineCommand::Flush { worker });
        }
        Ok(())
    }

    /// The client of a connection has gone. All its work ends.
    pub fn handle_disconnect(&mut self, conn: ConnId, cx: &mut Context<'_>) {
        self.flushes.gone(conn);
        if let Some(exchange) = self.by_conn.get(&conn).copied()
            && self.converted(exchange).is_none()
        {
            self.drop_request(exchange, Cause::ClientGone, cx);
        }
    }

    /// Aborts all requests, or those with a name that starts with `rid`. Their clients get an
    /// error.
    pub fn abort_requests(&mut self, rid: Option<&str>, cx: &mut Context<'_>) -> usize {
        let named = |live: &ActiveRequest| {
            rid.is_none_or(|rid| {
                live.id == rid || live.request.rids.iter().any(|own| own.starts_with(rid))
            })
        };
        let hit: Vec<u64> =
            self.active.iter().filter(|(_, live)| named(live)).map(|(&id, _)| id).collect();
        for &exchange in &hit {
            self.fail_request(exchange, &error_of(Cause::Aborted), Cause::Aborted, cx);
        }
        hit.len() + if rid.is_none() { self.drop_kept(cx) } else { 0 }
    }

    /// Whether the tokeniser has a result.
    pub fn has_news(&self) -> bool {
        self.queue.has_news()
    }

    /// Takes results of the tokeniser and replies of prefill workers. True if there were any.
    pub fn step(&mut self, cx: &mut Context<'_>) -> bool {
        let mut busy = false;
        while let Some(conn) = self.flushes.overdue(cx.now) {
            cx.send_error(
                conn,
                &ApiError::new(503, "unavailable", "a worker did not empty its cache in time"),
            );
        }
        while let Some(answer) = self.queue.poll() {
            self.handle_text_result(answer, cx);
            busy = true;
        }
        while let Some((exchange, word)) = cx.prefill_client.poll_reply() {
            self.handle_prefill_reply(exchange, word, cx);
            busy = true;
        }
        self.end_unheard(cx);
        busy
    }

    /// Asserts what holds between turns; debug builds call it at each tick.
    ///
    /// # Panics
    /// A connection leads to a request that is not there, a request's client has another
    /// connection, or two legs of a choice do not name each other.
    pub fn invariants(&self) {
        for (conn, key) in &self.by_conn {
            let of_active = self.active.get(key).map(|active| active.conn);
            let of_job = self.converting.get(key).map(|(conn, _)| *conn);
            assert_eq!(of_active.xor(of_job), Some(*conn), "a connection leads to one request");
        }
        let clients = self.active.len() + self.converting.len();
        assert_eq!(self.by_conn.len(), clients, "each request has one connection");
        for (id, leg) in &self.legs {
            let partner = leg.partner.and_then(|partner| self.legs.get(&partner));
            if let Some(partner) = partner {
                assert_eq!(partner.partner, Some(*id), "partners name each other");
                assert_eq!((partner.key, partner.choice), (leg.key, leg.choice), "of one choice");
            }
            if let Some(active) = self.active.get(&leg.key) {
                assert!(active.legs.contains(id), "a request knows its legs");
            }
        }
    }

    /// Ends what is overdue.
    pub fn expire(&mut self, cx: &mut Context<'_>) {
        if let Placement::Prefill { bootstrap_timeout, .. } = self.config.placement {
            self.abort_unclaimed_legs(bootstrap_timeout, cx);
        }
        if cfg!(debug_assertions) {
            self.invariants();
        }
    }

    fn close_if_over(&mut self, id: u64, cx: &mut Context<'_>) {
        let Some(live) = self.active.get(&id) else { return };
        let Some(exchange) = live.response.as_ref().filter(|exchange| exchange.is_over()) else {
            return;
        };
        let conn = live.conn;
        let mut out = Vec::new();
        if exchange.is_stream() {
            exchange.close(None, &mut out);
            if let Some(live) = self.active.get_mut(&id) {
                live.stream(&out, cx);
            }
            cx.connections.end_stream(cx.reactor, conn, cx.now);
        } else {
            let timings = live.request.return_timings.then(|| self.first_timings(live, cx.handoff));
            exchange.close(timings.as_ref(), &mut out);
            cx.send_response(conn, &Response::json(&out));
        }
        self.remove_request(id);
    }

    /// Ends a request with an error: as a status, or as an event if its stream has begun.
    fn fail_request(&mut self, id: u64, error: &ApiError, cause: Cause, cx: &mut Context<'_>) {
        let Some(live) = self.active.get_mut(&id) else { return };
        let conn = live.conn;
        match live.response.as_mut().filter(|exchange| exchange.is_stream() && live.begun) {
            Some(exchange) => {
                let mut out = Vec::new();
                exchange.abort(error, &mut out);
                cx.connections.send_chunk(cx.reactor, conn, &out);
                cx.connections.end_stream(cx.reactor, conn, cx.now);
            }
            None => cx.send_error(conn, error),
        }
        self.drop_request(id, cause, cx);
    }

    /// Forgets a request and ends its legs.
    fn drop_request(&mut self, id: u64, cause: Cause, cx: &mut Context<'_>) {
        let Some(mut live) = self.remove_request(id) else { return };
        self.drop_asked(id, &mut live, cx);
        for request in live.legs {
            if let Some(leg) = self.legs.get(&request).copied().filter(|leg| !leg.finished) {
                cx.handoff.worker_mut(leg.worker).abort(leg.slot, cause);
            }
        }
    }

    fn remove_request(&mut self, id: u64) -> Option<ActiveRequest> {
        let live = self.active.remove(&id)?;
        self.forget_connection(live.conn);
        Some(live)
    }

    fn forget_connection(&mut self, conn: ConnId) {
        if !is_failpoint_active("connection outlives its request") {
            let known = self.by_conn.remove(&conn);
            debug_assert!(known.is_some(), "a request has a connection until it ends");
        }
    }
}

impl Context<'_> {
    /// Sends an error as the answer.
    pub fn send_error(&mut self, conn: ConnId, error: &ApiError) {
        self.connections.send_error(self.reactor, conn, error, self.now);
    }

    /// Sends a complete answer.
    pub fn send_response(&mut self, conn: ConnId, answer: &Response<'_>) {
        self.connections.send_response(self.reactor, conn, answer, self.now);
    }
}

/// The error that a client gets for a failure.
fn error_of(cause: Cause) -> ApiError {
    let message = match cause {
        Cause::ClientGone => "the connection of the request's other leg was closed",
        Cause::Aborted => "the request was aborted",
        Cause::Refused => {
            "the request does not fit this server's KV memory, or its room is already in use"
        }
        Cause::Overloaded => return ApiError::overloaded(1),
        Cause::PeerLost => "the worker at the other end of the hand-off was lost",
        Cause::Deadline => "the request took too long",
        Cause::Mismatch => "prefill and decode disagree about the request",
        Cause::Corrupt => "transferred data failed its check",
        Cause::OtherLeg => "the other leg of the request failed",
        // This is prefill's drain: during its own drain this worker finishes its requests.
        Cause::Draining => {
            let error = ApiError::draining("the prefill worker of this request is draining");
            return ApiError { param: Some(SOURCE_PARAM.into()), ..error };
        }
        Cause::Internal => "internal error",
        Cause::Denied => "the decode worker's NIC refused the KV transfer",
        Cause::Unreachable => "the fabric between the two workers carries no data",
        Cause::Flushed => "the hand-off shared a session with another one that broke",
        Cause::Incompatible => {
            "the prefill and the decode worker are incompatible; their logs name the difference"
        }
    };
    ApiError::new(cause.http_status(), cause.name(), message)
}

#[cfg(test)]
mod tests;

//! The table of requests for text: from a parsed body to the last byte of the answer.
//!
//! Owns: active requests and their *legs*. A leg is one request to one worker. A choice has a
//! prefill leg and a decode leg if both roles are in this process. Thread: `ctl`. Invariants: the
//! first terminal failure of one leg cancels the other; after decode's first token, prefill's
//! outcome is ignored. Not here: the hand-off (`link::handoff`) and the client that asks prefill
//! (`prefill_client`). The table calls both through [`Context`]; neither imports the table. HTTP
//! framing is in `server::connections`.

mod active_request;
mod flushes;
mod kept_kv;
mod legs;
mod placement;
mod preparation;
mod prompt_logprobs;
mod remote_prefill;
mod timings;

pub use placement::Placement;

use crate::api::bootstrap::SOURCE_PARAM;
use crate::api::{ApiError, ErrorCode, GenerateRequest, kv_transfer};
use crate::cause::Cause;
use crate::http::response::Response;
use crate::ids::{RequestId, RequestKey};
use crate::limits::PROMPT_LOGPROBS_MEMORY;
use crate::link::handoff::Handoff;
use crate::net::{ConnId, Reactor};
use crate::sched::masks::MaskClient;
use crate::sched::messages::EngineCommand;
use crate::server::connections::Connections;
use crate::stdx::budget::Budget;
use crate::stdx::failpoint::is_failpoint_active;
use crate::stdx::hash_map::HashMap;
use crate::transfer::manager::rooms::Slot;
use crate::worker::metrics::{Stages, WorkerMetrics};
use crate::worker::prefill_client::{PrefillClient, PrefillRequest};
use crate::worker::text::{JobGuard, TextJob, TextProcessor, TextQueue, TextTask};
use active_request::{ActiveRequest, ChoiceInput};
use flushes::PendingFlushes;
use kept_kv::KeptRequest;
use legs::{ActiveLeg, LegKind, NewLeg};
use placement::ChoicePlace;
use preparation::take_prompt_task;
use remote_prefill::PendingPrefill;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// Settings of the model and the process that apply to every request.
#[derive(Clone, Debug)]
pub struct ServingConfig {
    /// Names of the model; answers carry the first one.
    pub names: Vec<String>,
    /// Maximum number of choices of one request: the requests that a worker can run and queue.
    pub choices: usize,
    /// End-of-sequence tokens.
    pub eos: Vec<u32>,
    /// Rule that places choices on workers.
    pub placement: Placement,
    /// Whether requests can have a priority.
    pub has_priorities: bool,
}

/// All requests for text of this process.
#[derive(Debug)]
pub struct RequestTable {
    config: ServingConfig,
    text: Arc<TextProcessor>,
    queue: TextQueue,
    active: HashMap<RequestKey, ActiveRequest>,
    /// Requests of `/tokenize` and `/detokenize`, which need only token ids or text.
    converting: HashMap<RequestKey, (ConnId, JobGuard)>,
    /// Connections of `active` and `converting`.
    by_conn: HashMap<ConnId, RequestKey>,
    legs: HashMap<RequestId, ActiveLeg>,
    /// Requests that have their answers while their KV is kept for decode.
    kept: HashMap<RequestKey, KeptRequest>,
    /// Failed requests, and how long each waits for prefill's own reply.
    awaiting_reply: VecDeque<(Instant, RequestKey)>,
    /// Requests that lost the connection to prefill, and the time by which each must begin.
    start_deadlines: VecDeque<(Instant, RequestKey)>,
    /// Memory for the logprobs of prompts.
    prompt_logprobs: Budget,
    /// Choices with KV that wait for the logprobs of their prompts, and the end of each wait.
    prompt_logprobs_due: Vec<(Instant, RequestKey, usize)>,
    flushes: PendingFlushes<ConnId>,
    metrics: Vec<Arc<WorkerMetrics>>,
    masks: MaskClient,
    next_key: u64,
    next_request: u64,
    turn: usize,
    /// The stages of the choices that are recorded, for a check that takes them in each turn.
    /// `None` in production.
    stages: Option<Vec<(RequestKey, usize, Stages)>>,
}

/// The reactor, the connections and the time that one step works with.
#[derive(Debug)]
pub struct Context<'a> {
    /// Sockets.
    pub reactor: &'a mut Reactor,
    /// HTTP connections.
    pub connections: &'a mut Connections,
    /// The workers of this process, and their links to others.
    pub handoff: &'a mut Handoff<EngineCommand>,
    /// Requests of this worker to prefill workers.
    pub prefill_client: &'a mut PrefillClient,
    /// The time of this turn.
    pub now: Instant,
}

impl RequestTable {
    /// An empty table. `metrics` has the metrics of the workers, in the order of their ids; `masks`
    /// leads to the thread that computes masks for them.
    pub fn new(
        config: ServingConfig,
        text: Arc<TextProcessor>,
        queue: TextQueue,
        metrics: Vec<Arc<WorkerMetrics>>,
        masks: MaskClient,
    ) -> RequestTable {
        RequestTable {
            config,
            text,
            queue,
            active: HashMap::default(),
            converting: HashMap::default(),
            by_conn: HashMap::default(),
            legs: HashMap::default(),
            kept: HashMap::default(),
            awaiting_reply: VecDeque::new(),
            start_deadlines: VecDeque::new(),
            prompt_logprobs: Budget::new(PROMPT_LOGPROBS_MEMORY),
            prompt_logprobs_due: Vec::new(),
            flushes: PendingFlushes::default(),
            metrics,
            masks,
            next_key: 0,
            next_request: 0,
            turn: 0,
            stages: None,
        }
    }

    /// Whether no request and no flush is unanswered, and no leg holds a slot.
    pub fn is_idle(&self) -> bool {
        let is_settled = self.converting.is_empty() && self.flushes.is_answered();
        self.active.is_empty() && self.legs.is_empty() && is_settled
    }

    /// Whether the workers have no work left, so that other workers can replace them.
    pub fn is_free(&self) -> bool {
        self.active.is_empty() && self.legs.is_empty() && self.flushes.is_idle()
    }

    /// What keeps the workers from being free, for operators. The engine can still have sequences
    /// of requests that have ended.
    pub fn describe_work(&self) -> String {
        let (requests, sequences) = (self.active.len(), self.legs.len());
        format!("requests={requests} sequences={sequences} flushes={}", self.flushes.count())
    }

    /// Removes the workers. The caller must not start a request before
    /// [`RequestTable::set_workers`].
    pub fn remove_workers(&mut self) {
        debug_assert!(self.is_free(), "workers are removed while they work");
        self.metrics.clear();
    }

    /// Sets new workers.
    pub fn set_workers(
        &mut self,
        placement: Placement,
        metrics: Vec<Arc<WorkerMetrics>>,
        masks: MaskClient,
    ) {
        self.config.placement = placement;
        (self.metrics, self.masks) = (metrics, masks);
    }

    /// Whether a client waits for an answer.
    pub fn has_waiting_client(&self) -> bool {
        !self.active.is_empty() || !self.converting.is_empty() || !self.flushes.is_answered()
    }

    /// Number of generation requests without a complete answer.
    pub fn running(&self) -> usize {
        self.active.len()
    }

    /// Whether all of them are tokenised. Their choices are then placed or wait for prefill.
    pub fn is_placed(&self) -> bool {
        self.active.values().all(|active| active.response.is_some())
    }

    /// Settings that hold for every request.
    pub fn config(&self) -> &ServingConfig {
        &self.config
    }

    /// Maximum number of tokens of one sequence.
    pub fn context(&self) -> usize {
        self.text.context
    }

    /// Starts a client's request for text.
    pub fn start_request(
        &mut self,
        conn: ConnId,
        request: GenerateRequest,
        id: String,
        cx: &mut Context<'_>,
    ) {
        self.admit_request(conn, request, None, id, false, cx);
    }

    /// Starts a client's request for text for which this worker must ask prefill for the KV.
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
    /// only its own part. Prefill sends KV to the fake destination; decode continues from the fake
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
        let key = self.make_key();
        let kept = match self.make_kept_kv(&request, cx.reactor.entropy()) {
            Ok(kept) => kept,
            Err(error) => return cx.send_error(conn, &error),
        };
        let mut request = Box::new(request);
        let task = take_prompt_task(&mut request);
        let ticket = match self.queue.submit(TextJob { key, task }) {
            Ok(ticket) => ticket,
            Err(error) => return cx.send_error(conn, &error),
        };
        let active = ActiveRequest {
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
            grammars: Vec::new(),
            rules: None,
            legs: Vec::new(),
            timings: Vec::new(),
            first_tokens: Vec::new(),
            prompt_logprobs: Vec::new(),
            memory: Vec::new(),
        };
        self.active.insert(key, active);
        let before = self.by_conn.insert(conn, key);
        debug_assert!(before.is_none(), "a connection has one request at a time");
    }

    fn make_key(&mut self) -> RequestKey {
        let key = RequestKey(self.next_key);
        self.next_key += 1;
        key
    }

    /// Converts a text to ids, or ids to a text, for a client.
    ///
    /// # Errors
    /// The tokeniser's queue is full.
    pub fn convert(&mut self, conn: ConnId, task: TextTask) -> Result<(), ApiError> {
        let key = self.make_key();
        let ticket = self.queue.submit(TextJob { key, task })?;
        self.converting.insert(key, (conn, ticket));
        let before = self.by_conn.insert(conn, key);
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

    /// Ends all work of a client that has disconnected.
    pub fn handle_disconnect(&mut self, conn: ConnId, cx: &mut Context<'_>) {
        self.flushes.gone(conn);
        if let Some(key) = self.by_conn.get(&conn).copied()
            && self.converted(key).is_none()
        {
            self.drop_request(key, Cause::ClientGone, cx);
        }
    }

    /// Aborts all requests, or the requests with a name that starts with `rid`. Their clients get
    /// an error.
    pub fn abort_requests(&mut self, rid: Option<&str>, cx: &mut Context<'_>) -> usize {
        let named = |active: &ActiveRequest| {
            rid.is_none_or(|rid| kept_kv::is_named(rid, &active.id, &active.request.rids))
        };
        let hit: Vec<RequestKey> =
            self.active.iter().filter(|(_, active)| named(active)).map(|(&key, _)| key).collect();
        for &key in &hit {
            self.fail_request(key, &error_of(Cause::Aborted), Cause::Aborted, cx);
        }
        let kept = match rid {
            Some(rid) => self.drop_named(rid, cx),
            None => self.drop_kept(cx),
        };
        hit.len() + kept
    }

    /// Whether the tokeniser has a result.
    pub fn has_events(&self) -> bool {
        self.queue.has_events()
    }

    /// Takes results of the tokeniser and replies of prefill workers, and ends overdue flushes and
    /// requests. True if there was a result or a reply.
    pub fn step(&mut self, cx: &mut Context<'_>) -> bool {
        let mut busy = false;
        while let Some(conn) = self.flushes.overdue(cx.now) {
            cx.send_error(
                conn,
                &ApiError::new(
                    503,
                    ErrorCode::Unavailable,
                    "a worker did not empty its cache in time",
                ),
            );
        }
        while let Some(answer) = self.queue.poll() {
            self.handle_text_result(answer, cx);
            busy = true;
        }
        while let Some((key, reply)) = cx.prefill_client.poll_reply() {
            self.handle_prefill_reply(key, reply, cx);
            busy = true;
        }
        self.end_unheard(cx);
        self.take_prompt_records(cx);
        busy
    }

    /// The legs that have no request any more, without those that keep KV for decode.
    pub fn legs_without_request(&self) -> impl Iterator<Item = (RequestId, Slot)> {
        let is_left = |leg: &ActiveLeg| {
            !self.active.contains_key(&leg.key) && !self.kept.contains_key(&leg.key)
        };
        self.legs.iter().filter(move |(_, leg)| is_left(leg)).map(|(&id, leg)| (id, leg.slot))
    }

    /// The requests that have no complete answer.
    pub fn unanswered(&self) -> impl Iterator<Item = RequestKey> {
        self.active.keys().copied()
    }

    /// The choice that a leg generates.
    pub fn choice_of(&self, leg: RequestId) -> Option<(RequestKey, usize)> {
        self.legs.get(&leg).map(|leg| (leg.key, leg.choice))
    }

    /// Takes the stages of the choices that were recorded since the last call. The first call
    /// begins to collect them.
    pub fn take_stages(&mut self) -> Vec<(RequestKey, usize, Stages)> {
        self.stages.replace(Vec::new()).unwrap_or_default()
    }

    /// The clients of all requests.
    pub fn clients(&self) -> impl Iterator<Item = ConnId> {
        self.by_conn.keys().copied()
    }

    /// Asserts the rules that hold between turns. Debug builds call it at each tick.
    ///
    /// # Panics
    /// A connection has a request that does not exist, or the client of a request has another
    /// connection. Two legs of a choice do not name each other. A leg has no worker or no choice.
    /// Times are out of order.
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
                assert!(leg.choice < active.timings.len(), "a leg computes a choice");
            }
            assert!(leg.worker.index() < self.metrics.len(), "a leg runs on a worker of the table");
        }
        for kept in self.kept.values() {
            let is_known = kept.legs.iter().all(|id| self.legs.contains_key(id));
            assert!(is_known && !kept.legs.is_empty(), "a request is kept for its legs");
        }
        for active in self.active.values() {
            let choices = active.timings.len();
            assert_eq!(active.response.is_some(), choices > 0, "choices follow from the prompts");
            assert_eq!(active.first_tokens.len(), choices, "each choice has a first token");
        }
        for due in [&self.awaiting_reply, &self.start_deadlines] {
            assert!(due.iter().is_sorted_by_key(|(until, _)| until), "times are in order");
        }
    }

    /// On a prefill worker, aborts legs that no decode worker has claimed in time.
    pub fn expire(&mut self, cx: &mut Context<'_>) {
        if let Placement::Prefill { bootstrap_timeout, .. } = self.config.placement {
            self.abort_unclaimed_legs(bootstrap_timeout, cx);
        }
        if cfg!(debug_assertions) {
            self.invariants();
        }
    }

    fn close_if_over(&mut self, key: RequestKey, cx: &mut Context<'_>) {
        let Some(active) = self.active.get(&key) else { return };
        let Some(response) = active.response.as_ref().filter(|response| response.is_over()) else {
            return;
        };
        let conn = active.conn;
        let mut out = Vec::new();
        if response.is_stream() {
            response.close(None, &mut out);
            if let Some(active) = self.active.get_mut(&key) {
                active.stream(&out, cx);
            }
            cx.connections.end_stream(cx.reactor, conn, cx.now);
        } else {
            let timings =
                active.request.return_timings.then(|| self.first_timings(active, cx.handoff));
            response.close(timings.as_ref(), &mut out);
            cx.send_response(conn, &Response::json(&out));
        }
        if let Some(active) = self.remove_request(key) {
            self.note_kept(key, active);
        }
    }

    /// Ends a request with an error: as a status, or as an event if its stream has begun.
    fn fail_request(
        &mut self,
        key: RequestKey,
        error: &ApiError,
        cause: Cause,
        cx: &mut Context<'_>,
    ) {
        let Some(active) = self.active.get_mut(&key) else { return };
        let conn = active.conn;
        match active.response.as_mut().filter(|response| response.is_stream() && active.begun) {
            Some(response) => {
                let mut out = Vec::new();
                response.abort(error, &mut out);
                cx.connections.send_chunk(cx.reactor, conn, &out);
                cx.connections.end_stream(cx.reactor, conn, cx.now);
            }
            None => cx.send_error(conn, error),
        }
        self.drop_request(key, cause, cx);
    }

    /// Forgets a request and ends its legs.
    fn drop_request(&mut self, key: RequestKey, cause: Cause, cx: &mut Context<'_>) {
        let Some(mut active) = self.remove_request(key) else { return };
        self.drop_asked(key, &mut active, cx);
        self.release_events(std::mem::take(&mut active.prompt_logprobs), cx);
        for request in active.legs {
            if let Some(leg) = self.legs.get(&request).copied().filter(|leg| !leg.finished) {
                cx.handoff.worker_mut(leg.worker).abort(leg.slot, cause);
            }
        }
    }

    fn remove_request(&mut self, key: RequestKey) -> Option<ActiveRequest> {
        let active = self.active.remove(&key)?;
        self.forget_connection(active.conn);
        Some(active)
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
        Cause::Grammar => {
            "the grammar allows no further token, or needs more work or memory for it than \
             allowed; simplify the grammar"
        }
        Cause::Refused => {
            "the request does not fit this server's KV memory, or its room is already in use"
        }
        Cause::Overloaded => {
            "a limit of this worker or its partner is reached: queued requests \
             (--max-queued-requests), sessions, or the predicted wait; try again later"
        }
        Cause::PeerLost => "the worker at the other end of the hand-off was lost",
        Cause::Deadline => "the request took too long",
        Cause::Mismatch => "prefill and decode disagree about the request",
        Cause::Corrupt => "transferred data failed its check",
        Cause::OtherLeg => "the other leg of the request failed",
        // Prefill drains, not this worker, because a draining worker finishes its requests.
        Cause::Draining => {
            let error = ApiError::draining("the prefill worker of this request is draining");
            return ApiError { param: Some(SOURCE_PARAM.into()), ..error };
        }
        Cause::Internal => "internal error",
        Cause::Denied => "the decode worker's NIC refused the KV transfer",
        Cause::Unreachable => "the fabric between the two workers carries no data",
        Cause::Flushed => "the hand-off's session broke because of another hand-off",
        Cause::Incompatible => {
            "the prefill and the decode worker are incompatible; their logs name the difference"
        }
    };
    ApiError::from_cause(cause, message)
}

#[cfg(test)]
mod tests;

//! Requests in the router: they go to a pair, the answer goes back to the client, and a failed
//! request goes to another pair. The flow is the order of the pair's workers. Both at once:
//! `dispatch`. Prefill first: `prefill_first`. Decode first: decode asks prefill itself
//! (`worker::prefill_client`).
//!
//! Thread: `ctl`. Owns: the calls of each request, and the client's part of the answer (`relay`).
//! Runs the actions of `routing::attempts`.
//! Invariants: the calls of a request end when it ends or waits for its next attempt. Exception: a
//! prefill leg that still runs when decode's answer is complete has some time to end.
//! Not here: the choice of workers, the time of retries (`routing`).

mod answers;
mod dispatch;
mod endings;
mod prefill_first;
mod proxied_request;
mod request;

pub use request::{ClientRequest, Payload};

use crate::api::{ApiError, ErrorCode, IGNORED_FIELDS};
use crate::cause::Cause;
use crate::config::{FirstToken, Flow, RequestConfig};
use crate::http::response::{JSON, Response};
use crate::limits::{ROUTER_ABORT_TIME, ROUTER_PROBE_INTERVAL};
use crate::net::{ConnId, Reactor};
use crate::obs::log::event;
use crate::router::admission_queue::AdmissionQueue;
use crate::router::metrics::RouterMetrics;
use crate::router::pool::WorkerPool;
use crate::router::relay::Relay;
use crate::routing::attempts::{AttemptAction, AttemptContext, AttemptEvent, Attempts as Core};
use crate::routing::retries::RetryBudget;
use crate::server::connections::Connections;
use crate::stdx::failpoint::is_failpoint_active;
use crate::stdx::hash_map::{HashMap, HashSet};
use crate::upstream::answer::UpstreamReply;
use crate::upstream::failure;
use proxied_request::ProxiedRequest;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Instant;

/// The reactor, the connections and the time that one step works with.
#[derive(Debug)]
pub struct RouterContext<'a> {
    /// Sockets.
    pub reactor: &'a mut Reactor,
    /// Clients.
    pub connections: &'a mut Connections,
    /// Workers.
    pub pool: &'a mut WorkerPool,
    /// The time of the turn.
    pub now: Instant,
}

impl RouterContext<'_> {
    /// Answers a client with an error.
    pub fn refuse(&mut self, client: ConnId, error: &ApiError) {
        self.connections.send_error(self.reactor, client, error, self.now);
    }

    /// Answers a client with a JSON body.
    pub fn send_json(&mut self, client: ConnId, status: u16, body: &[u8]) {
        let answer = Response { status, media: JSON, body, retry_after: None };
        self.connections.send_response(self.reactor, client, &answer, self.now);
    }

    /// Tells the client which fields of its request the worker of this call has ignored.
    fn pass_ignored_fields(&mut self, client: ConnId, call: ConnId) {
        let names = self.pool.answer(call).and_then(|answer| answer.ignored_fields.take());
        self.name_ignored_fields(client, names);
    }

    fn name_ignored_fields(&mut self, client: ConnId, names: Option<String>) {
        if let Some(names) = names {
            self.connections.add_header(client, IGNORED_FIELDS, names);
        }
    }

    fn cancel(&mut self, call: Option<ConnId>) {
        if let Some(conn) = call
            && !is_failpoint_active("call outlives its request")
        {
            self.pool.cancel_call(self.reactor, conn, self.now);
        }
    }
}

/// All requests of the router.
#[derive(Debug)]
pub struct ProxiedRequests {
    /// By client; each has one request at a time.
    open: HashMap<ConnId, ProxiedRequest>,
    /// Requests that wait while the limit of running requests is reached.
    line: AdmissionQueue<ProxiedRequest>,
    /// The order in which the workers of a pair get a request.
    flow: Flow,
    /// The leg that sends the first token of a stream.
    first_token: FirstToken,
    /// Requests that wait for a retry, by time. Some can have ended already.
    due: BinaryHeap<Reverse<(Instant, ConnId)>>,
    retries: RetryBudget,
    metrics: RouterMetrics,
    /// Number of relayed pieces of answers since the last [`ProxiedRequests::take_passed`].
    passed: usize,
}

impl ProxiedRequests {
    /// Creates the state without requests.
    pub fn new(retries: RetryBudget, metrics: RouterMetrics) -> ProxiedRequests {
        ProxiedRequests {
            open: HashMap::default(),
            line: AdmissionQueue::default(),
            flow: Flow::default(),
            first_token: FirstToken::default(),
            due: BinaryHeap::new(),
            retries,
            metrics,
            passed: 0,
        }
    }

    /// Sets the limits of running and waiting requests, the flow, and the source of the first
    /// token.
    pub fn within(self, terms: &RequestConfig) -> ProxiedRequests {
        ProxiedRequests {
            line: AdmissionQueue::new(terms),
            flow: terms.flow,
            first_token: terms.first_token,
            ..self
        }
    }

    /// Number of relayed pieces of answers since the last call.
    pub fn take_passed(&mut self) -> usize {
        std::mem::take(&mut self.passed)
    }

    /// Whether there is no request.
    pub fn is_idle(&self) -> bool {
        self.open.is_empty() && self.line.is_empty()
    }

    /// Number of requests at workers or between two attempts.
    pub fn served(&self) -> usize {
        self.open.len()
    }

    /// Number of all requests.
    pub fn count(&self) -> usize {
        self.open.len() + self.line.len()
    }

    /// Number of requests that wait for the end of others.
    pub fn waiting(&self) -> usize {
        self.line.len()
    }

    /// The metrics.
    pub fn metrics(&self) -> &RouterMetrics {
        &self.metrics
    }

    /// Starts to serve a request of a client.
    pub fn start_request(
        &mut self,
        client: ConnId,
        request: ClientRequest,
        cx: &mut RouterContext<'_>,
    ) {
        debug_assert!(!self.open.contains_key(&client), "a client has one request at a time");
        let proxied = ProxiedRequest {
            request,
            begun: cx.now,
            attempts: Core::default(),
            relay: Relay::default(),
            lead: None,
            prefill: None,
            held: None,
            asked: None,
            kept: None,
            due: None,
            body: None,
            last: None,
        };
        if proxied.is_counted() {
            self.metrics.requests.inc();
            if self.line.is_needed(self.running()) {
                return self.queue(client, proxied, cx);
            }
        }
        self.attempt(client, proxied, cx);
    }

    /// Running generation requests, for the limit.
    fn running(&self) -> usize {
        match self.line.is_open() {
            // The number is needed only for the limit.
            true => 0,
            false => self.open.values().filter(|proxied| proxied.is_counted()).count(),
        }
    }

    fn queue(&mut self, client: ConnId, proxied: ProxiedRequest, cx: &mut RouterContext<'_>) {
        let (priority, deadline) = (proxied.priority(), proxied.deadline());
        if let Err(mut proxied) = self.line.join(client, proxied, priority, deadline, cx.now) {
            let most = self.line.length_max();
            let why = format!(
                "{most} requests already wait at this router, which is the limit \
                (--queue-size); try again later"
            );
            proxied.last = Some(UpstreamReply::error(&ApiError::busy(why)));
            self.fail(client, proxied, Cause::Overloaded, cx);
        }
    }

    /// Starts waiting requests while the limit allows it. Fails requests that have waited too long.
    pub fn admit(&mut self, cx: &mut RouterContext<'_>) {
        while let Some((client, mut proxied)) = self.line.overdue(cx.now) {
            let why = "the request waited too long for others to end".to_owned();
            proxied.last = Some(UpstreamReply::error(&failure::error(Cause::Deadline, why)));
            self.fail(client, proxied, Cause::Deadline, cx);
        }
        while !self.line.is_empty() {
            let Some((client, proxied)) = self.line.next(self.running()) else { return };
            self.attempt(client, proxied, cx);
        }
    }

    /// Ends the request of a client that has disconnected.
    pub fn handle_disconnect(&mut self, client: ConnId, cx: &mut RouterContext<'_>) {
        let queued = |line: &mut AdmissionQueue<_>| {
            let stays = is_failpoint_active("queued request of a client that left stays");
            if stays { None } else { line.leave(client) }
        };
        if let Some(mut proxied) = self.open.remove(&client).or_else(|| queued(&mut self.line)) {
            self.failed(&proxied, Cause::ClientGone);
            event!(Debug, "router", "client gone", request = proxied.request.id);
            proxied.cancel(cx);
        }
    }

    /// Ends the generation requests with the ID `rid`, or with a client's ID that begins with it.
    /// `None` ends all. Returns the number of ended requests.
    pub fn abort(&mut self, rid: Option<&str>, cx: &mut RouterContext<'_>) -> usize {
        let named = |request: &ClientRequest| match &request.payload {
            Payload::Routed(body) => rid.is_none_or(|rid| request.id == rid || body.is_named(rid)),
            Payload::Decode(_) | Payload::Any => false,
        };
        let all =
            self.open.iter().map(|(&client, proxied)| (client, proxied)).chain(self.line.iter());
        let hit: Vec<ConnId> =
            all.filter(|(_, proxied)| named(&proxied.request)).map(|(client, _)| client).collect();
        for &client in &hit {
            if let Some(mut proxied) = self.open.remove(&client).or_else(|| self.line.leave(client))
            {
                // The workers also get the abort. Their connections stay open until then, because a
                // closed connection would mean that the client is gone.
                for leg in [proxied.lead.take(), proxied.prefill.take()].into_iter().flatten() {
                    if !is_failpoint_active("call of an aborted request stays") {
                        cx.pool.let_end(cx.reactor, leg, (cx.now, ROUTER_ABORT_TIME));
                    }
                }
                let aborted = failure::error(Cause::Aborted, "the request was aborted".into());
                proxied.last = Some(UpstreamReply::error(&aborted));
                self.fail(client, proxied, Cause::Aborted, cx);
            }
        }
        hit.len()
    }

    /// Continues to read answers for a client after its queue was sent.
    pub fn drained(&mut self, client: ConnId, cx: &mut RouterContext<'_>) {
        if let Some(lead) = self.open.get(&client).and_then(|proxied| proxied.lead) {
            cx.pool.resume(cx.reactor, lead, cx.now);
        }
    }

    /// The time of the next retry.
    pub fn next_due(&self) -> Option<Instant> {
        self.due.peek().map(|Reverse((at, _))| *at)
    }

    /// Retries the requests that are due.
    pub fn try_again(&mut self, cx: &mut RouterContext<'_>) {
        while self.next_due().is_some_and(|at| at <= cx.now) {
            let Some(Reverse((at, client))) = self.due.pop() else { return };
            if self.open.get(&client).is_some_and(|proxied| proxied.due == Some(at))
                && let Some(proxied) = self.open.remove(&client)
            {
                self.attempt(client, proxied, cx);
            }
        }
    }

    /// Asserts the rules that hold between turns. Debug builds call it at each tick.
    ///
    /// # Panics
    /// A request has a call that is not its own, or a call of a leg has no request. A request that
    /// waits for a retry has a call or is not listed. A queued request has begun.
    pub fn invariants(&self, pool: &WorkerPool) {
        let due: HashSet<_> = self.due.iter().map(|Reverse(entry)| *entry).collect();
        for (&client, proxied) in &self.open {
            proxied.invariants(client, pool);
            if let Some(at) = proxied.due {
                assert!(due.contains(&(at, client)), "a request that waits for a retry is listed");
            }
        }
        let calls: usize = self.open.values().map(ProxiedRequest::calls).sum();
        assert_eq!(calls, pool.legs(), "each call of a leg has its request");
        self.line.invariants();
        for (client, proxied) in self.line.iter() {
            assert!(!self.open.contains_key(&client), "a request is served or queued, not both");
            assert!(proxied.is_at_rest(), "a queued request has not begun");
            assert!(proxied.is_counted(), "only generation requests are queued");
        }
    }

    /// The clients of all requests.
    pub fn clients(&self) -> impl Iterator<Item = ConnId> {
        self.open.keys().copied().chain(self.line.iter().map(|(client, _)| client))
    }

    fn keep(&mut self, client: ConnId, proxied: ProxiedRequest) {
        let before = self.open.insert(client, proxied);
        debug_assert!(before.is_none(), "a client has one request at a time");
    }

    fn follow(
        &mut self,
        client: ConnId,
        proxied: ProxiedRequest,
        news: Option<AttemptEvent>,
        cx: &mut RouterContext<'_>,
    ) {
        match news {
            Some(news) => self.apply_event(client, proxied, news, cx),
            None => self.keep(client, proxied),
        }
    }

    /// Applies an event of a request.
    fn apply_event(
        &mut self,
        client: ConnId,
        mut proxied: ProxiedRequest,
        news: AttemptEvent,
        cx: &mut RouterContext<'_>,
    ) {
        let deadline = proxied.deadline();
        let next = proxied.attempts.apply_event(news, &mut terms(&mut self.retries, deadline, cx));
        if matches!(
            next,
            AttemptAction::Retry(_) | AttemptAction::Fail(_) | AttemptAction::ReplaceDecode
        ) {
            proxied
                .attempts
                .accused()
                .for_each(|worker| cx.pool.balancer().record_failure(worker, cx.now));
        }
        if let (
            AttemptAction::Retry(_),
            AttemptEvent::Failed(role, cause) | AttemptEvent::Lost(role, cause),
        ) = (next, news)
        {
            if proxied.is_counted() {
                self.metrics.retried(cause);
            }
            proxied.log_outcome("tried again", role, cause, cx);
        }
        self.perform_action(client, proxied, next, cx);
    }

    fn perform_action(
        &mut self,
        client: ConnId,
        mut proxied: ProxiedRequest,
        next: AttemptAction,
        cx: &mut RouterContext<'_>,
    ) {
        match next {
            AttemptAction::Wait | AttemptAction::RestoreDeadline => {}
            AttemptAction::Send => return self.send(client, proxied, cx),
            AttemptAction::StartDecode => return self.join(client, proxied, cx),
            AttemptAction::ReplaceDecode => return self.rejoin(client, proxied, cx),
            AttemptAction::ShortenDeadline(until) => {
                debug_assert!(proxied.lead.is_some(), "a request that was sent has a lead call");
                if let Some(lead) = proxied.lead {
                    cx.pool.set_deadline(lead, until.min(proxied.until()));
                }
            }
            AttemptAction::Retry(at) => {
                proxied.cancel(cx);
                if at <= cx.now {
                    return self.attempt(client, proxied, cx);
                }
                proxied.due = Some(at);
                if !is_failpoint_active("retry is not listed") {
                    self.due.push(Reverse((at, client)));
                }
            }
            AttemptAction::Finish => return self.land(client, proxied, cx),
            AttemptAction::Fail(cause) => return self.fail(client, proxied, cause, cx),
        }
        self.keep(client, proxied);
    }
}

fn terms<'a>(
    retries: &'a mut RetryBudget,
    deadline: Option<Instant>,
    cx: &mut RouterContext<'_>,
) -> AttemptContext<'a> {
    AttemptContext { now: cx.now, chance: cx.reactor.entropy().next_u64(), deadline, retries }
}

/// An error with status 503. The client can retry after the next probes.
pub fn unavailable(why: String) -> ApiError {
    let error = ApiError::new(503, ErrorCode::NoWorker, why);
    ApiError { retry_after: Some(ROUTER_PROBE_INTERVAL.as_secs() as u32), ..error }
}

#[cfg(test)]
mod tests;

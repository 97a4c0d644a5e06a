//! Requests on their way: to a pair, back to the client, and to another pair if one fails. The flow
//! is the order in which the pair is asked. Both at once: `dispatch`. Prefill first:
//! `prefill_first`. Decode first: decode asks prefill itself (`worker::prefill_client`).
//!
//! Thread: `ctl`. Owns: the calls of each request, and what its client has of the answer (`relay`).
//! Performs the actions of `routing::attempts`.
//! Invariants: when a request ends or waits for its next attempt, its calls end. Exception: a
//! prefill leg that is still running when decode's answer is complete.
//! Not here: the choice of workers, the time of retries (`routing`).

mod answers;
mod dispatch;
mod endings;
mod prefill_first;
mod proxied;
mod request;

pub use request::{ClientRequest, Payload};

use crate::api::ApiError;
use crate::cause::Cause;
use crate::config::{FirstToken, Flow, RequestConfig};
use crate::limits::ROUTER_PROBE_INTERVAL;
use crate::net::{ConnId, Reactor};
use crate::obs::log::event;
use crate::router::admission_queue::AdmissionQueue;
use crate::router::metrics::RouterMetrics;
use crate::router::pool::WorkerPool;
use crate::router::relay::Relay;
use crate::routing::attempts::{AttemptAction, AttemptContext, AttemptEvent, Attempts as Core};
use crate::routing::retries::RetryBudget;
use crate::server::connections::Connections;
use crate::upstream::answer::UpstreamReply;
use crate::upstream::failure;
use proxied::ProxiedRequest;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::time::Instant;

/// What a step works with.
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

    fn cancel(&mut self, call: Option<ConnId>) {
        if let Some(conn) = call {
            self.pool.cancel_call(self.reactor, conn, self.now);
        }
    }
}

/// All requests that are being served.
#[derive(Debug)]
pub struct ProxiedRequests {
    /// By client; each has one request at a time.
    open: HashMap<ConnId, ProxiedRequest>,
    /// Requests that wait while the limit of running requests is reached.
    line: AdmissionQueue<ProxiedRequest>,
    /// The order in which the workers of a pair are asked.
    flow: Flow,
    /// The leg that sends the first token of a stream.
    first_token: FirstToken,
    /// Requests that are retried, by time. Some can have ended.
    due: BinaryHeap<Reverse<(Instant, ConnId)>>,
    retries: RetryBudget,
    metrics: RouterMetrics,
    /// Pieces of answers that were passed on since the last [`ProxiedRequests::take_passed`].
    passed: usize,
}

impl ProxiedRequests {
    /// No requests yet.
    pub fn new(retries: RetryBudget, metrics: RouterMetrics) -> ProxiedRequests {
        ProxiedRequests {
            open: HashMap::new(),
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

    /// How many pieces of answers were passed on since the last call.
    pub fn take_passed(&mut self) -> usize {
        std::mem::take(&mut self.passed)
    }

    /// Whether no request is being served.
    pub fn is_idle(&self) -> bool {
        self.open.is_empty() && self.line.is_empty()
    }

    /// How many requests are at workers, or between two attempts.
    pub fn served(&self) -> usize {
        self.open.len()
    }

    /// How many requests there are.
    pub fn count(&self) -> usize {
        self.open.len() + self.line.len()
    }

    /// How many requests wait for others to end.
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
        let flight = ProxiedRequest {
            request,
            begun: cx.now,
            attempts: Core::default(),
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
                return self.queue(client, flight, cx);
            }
        }
        self.attempt(client, flight, cx);
    }

    /// Running generation requests, for the limit.
    fn running(&self) -> usize {
        match self.line.is_open() {
            // Without a limit the number is not needed.
            true => 0,
            false => self.open.values().filter(|flight| flight.is_counted()).count(),
        }
    }

    fn queue(&mut self, client: ConnId, flight: ProxiedRequest, cx: &mut RouterContext<'_>) {
        let deadline = flight.deadline();
        if let Err(mut flight) = self.line.join(client, flight, deadline, cx.now) {
            let most = self.line.length_max();
            let why = format!(
                "{most} requests wait at this router, which is the limit (--queue-size); \
                try again later"
            );
            flight.last = Some(UpstreamReply::error(&ApiError::busy(why)));
            self.fail(client, flight, Cause::Overloaded, cx);
        }
    }

    /// Starts waiting requests while the limit allows it, and fails those that have waited too
    /// long.
    pub fn admit(&mut self, cx: &mut RouterContext<'_>) {
        while let Some((client, mut flight)) = self.line.overdue(cx.now) {
            let why = "the request waited too long for others to end".to_owned();
            flight.last = Some(UpstreamReply::error(&failure::error(Cause::Deadline, why)));
            self.fail(client, flight, Cause::Deadline, cx);
        }
        while !self.line.is_empty() {
            let Some((client, flight)) = self.line.next(self.running()) else { return };
            self.attempt(client, flight, cx);
        }
    }

    /// A client has disconnected.
    pub fn gone(&mut self, client: ConnId, cx: &mut RouterContext<'_>) {
        if let Some(mut flight) = self.open.remove(&client).or_else(|| self.line.leave(client)) {
            self.failed(&flight, Cause::ClientGone);
            event!(Debug, "router", "client gone", request = flight.request.id);
            flight.cancel(cx);
        }
    }

    /// Ends the generation requests with the ID `rid`, or with a client-given ID that begins with
    /// it. `None` ends all. Returns how many there were.
    pub fn abort(&mut self, rid: Option<&str>, cx: &mut RouterContext<'_>) -> usize {
        let named = |request: &ClientRequest| match &request.payload {
            Payload::Routed(body) => rid.is_none_or(|rid| request.id == rid || body.is_named(rid)),
            Payload::Decode(_) | Payload::Any => false,
        };
        let all =
            self.open.iter().map(|(&client, flight)| (client, flight)).chain(self.line.iter());
        let hit: Vec<ConnId> =
            all.filter(|(_, flight)| named(&flight.request)).map(|(client, _)| client).collect();
        for &client in &hit {
            if let Some(mut flight) = self.open.remove(&client).or_else(|| self.line.leave(client))
            {
                // The workers are asked to abort it too. Their connections stay open until then,
                // because a closed connection would mean that the client is gone.
                for leg in [flight.lead.take(), flight.prefill.take()].into_iter().flatten() {
                    cx.pool.let_end(cx.reactor, leg, cx.now);
                }
                let aborted = failure::error(Cause::Aborted, "the request was aborted".into());
                flight.last = Some(UpstreamReply::error(&aborted));
                self.fail(client, flight, Cause::Aborted, cx);
            }
        }
        hit.len()
    }

    /// The data queued for a client was sent.
    pub fn drained(&mut self, client: ConnId, cx: &mut RouterContext<'_>) {
        if let Some(lead) = self.open.get(&client).and_then(|flight| flight.lead) {
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
            if self.open.get(&client).is_some_and(|flight| flight.due == Some(at))
                && let Some(flight) = self.open.remove(&client)
            {
                self.attempt(client, flight, cx);
            }
        }
    }

    fn keep(&mut self, client: ConnId, flight: ProxiedRequest) {
        self.open.insert(client, flight);
    }

    fn follow(
        &mut self,
        client: ConnId,
        flight: ProxiedRequest,
        news: Option<AttemptEvent>,
        cx: &mut RouterContext<'_>,
    ) {
        match news {
            Some(news) => self.apply_event(client, flight, news, cx),
            None => self.keep(client, flight),
        }
    }

    /// Applies an event of a request.
    fn apply_event(
        &mut self,
        client: ConnId,
        mut flight: ProxiedRequest,
        news: AttemptEvent,
        cx: &mut RouterContext<'_>,
    ) {
        let deadline = flight.deadline();
        let next = flight.attempts.apply_event(news, &mut terms(&mut self.retries, deadline, cx));
        if matches!(
            next,
            AttemptAction::Retry(_) | AttemptAction::Fail(_) | AttemptAction::ReplaceDecode
        ) {
            flight
                .attempts
                .accused()
                .for_each(|worker| cx.pool.balancer().record_failure(worker, cx.now));
        }
        if let (
            AttemptAction::Retry(_),
            AttemptEvent::Failed(role, cause) | AttemptEvent::Lost(role, cause),
        ) = (next, news)
        {
            if flight.is_counted() {
                self.metrics.retried(cause);
            }
            flight.tell("tried again", role, cause, cx);
        }
        self.perform_action(client, flight, next, cx);
    }

    fn perform_action(
        &mut self,
        client: ConnId,
        mut flight: ProxiedRequest,
        next: AttemptAction,
        cx: &mut RouterContext<'_>,
    ) {
        match next {
            AttemptAction::Wait | AttemptAction::RestoreDeadline => {}
            AttemptAction::Send => return self.send(client, flight, cx),
            AttemptAction::StartDecode => return self.join(client, flight, cx),
            AttemptAction::ReplaceDecode => return self.rejoin(client, flight, cx),
            AttemptAction::ShortenDeadline(until) => {
                if let Some(lead) = flight.lead {
                    cx.pool.set_deadline(lead, until.min(flight.until()));
                }
            }
            AttemptAction::Retry(at) => {
                flight.cancel(cx);
                if at <= cx.now {
                    return self.attempt(client, flight, cx);
                }
                flight.due = Some(at);
                self.due.push(Reverse((at, client)));
            }
            AttemptAction::Finish => return self.land(client, flight, cx),
            AttemptAction::Fail(cause) => return self.fail(client, flight, cause, cx),
        }
        self.keep(client, flight);
    }
}

fn terms<'a>(
    retries: &'a mut RetryBudget,
    deadline: Option<Instant>,
    cx: &RouterContext<'_>,
) -> AttemptContext<'a> {
    AttemptContext { now: cx.now, chance: random(), deadline, retries }
}

/// An error 503. The client can retry after the next probes.
pub fn unavailable(why: String) -> ApiError {
    let error = ApiError::new(503, "no_worker", why);
    ApiError { retry_after: Some(ROUTER_PROBE_INTERVAL.as_secs() as u32), ..error }
}

/// 64 random bits for rooms and delays.
fn random() -> u64 {
    let mut bytes = [0; 8];
    // The kernel's generator cannot fail once it is seeded.
    let _ = getrandom::fill(&mut bytes);
    u64::from_le_bytes(bytes)
}

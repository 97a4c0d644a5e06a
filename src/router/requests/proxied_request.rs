//! One request in the router: its calls, and the part of the answer that its client has.
//!
//! Invariants: it has at most one call for each leg.
//! Not here: the reaction to events (`routing::attempts`).

use super::{ClientRequest, Payload, RouterContext};
use crate::api::KvTransferParams;
use crate::api::usage::tokens_of_answer;
use crate::cause::Cause;
use crate::ids::{Leg, Room};
use crate::limits::{REQUEST_TIME_MAX, ROUTER_GRACE};
use crate::net::{CloseReason, ConnId};
use crate::obs::log;
use crate::obs::log::LogLevel;
use crate::router::call::Owner;
use crate::router::pool::WorkerPool;
use crate::router::relay::Relay;
use crate::routing::attempts::{AttemptEvent, Attempts as Core};
use crate::routing::balancer::Reservation;
use crate::stdx::failpoint::is_failpoint_active;
use crate::upstream::answer::UpstreamReply;
use crate::upstream::failure::UpstreamFailure;
use std::fmt;
use std::time::Instant;

#[derive(Debug)]
pub(super) struct ProxiedRequest {
    pub(super) request: ClientRequest,
    pub(super) begun: Instant,
    pub(super) attempts: Core,
    pub(super) relay: Relay,
    /// The call that brings the client's answer.
    pub(super) lead: Option<ConnId>,
    /// The prefill leg, while it can still fail the request.
    pub(super) prefill: Option<ConnId>,
    /// The reservation of a worker without a call: prefill while decode asks it, or decode before
    /// prefill has answered.
    pub(super) held: Option<Reservation>,
    /// The room in which this attempt's prefill worker keeps KV, until its answer names the room.
    pub(super) asked: Option<Room>,
    /// The KV that this attempt's prefill worker keeps for decode.
    pub(super) kept: Option<KvTransferParams>,
    /// Time of the retry.
    pub(super) due: Option<Instant>,
    /// The form in which the answer is sent, after it has begun.
    pub(super) body: Option<BodyMode>,
    /// The answer for the client if no later attempt replaces it.
    pub(super) last: Option<UpstreamReply>,
}

/// The form of an answer that has begun.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum BodyMode {
    Stream,
    Long,
}

impl ProxiedRequest {
    /// Handles a failure that a leg reports in its stream.
    pub(super) fn record_stream_failure(
        &mut self,
        role: Leg,
        cause: Cause,
        error: Vec<u8>,
    ) -> AttemptEvent {
        let media = crate::http::response::JSON.to_owned();
        let status = cause.http_status();
        let reply = UpstreamReply {
            status,
            media,
            retry_after: None,
            body: error,
            ignored_fields: None,
            own: None,
        };
        let news = match UpstreamFailure::from_reply(&reply).attempt_event(role) {
            AttemptEvent::Failed(role, _) => AttemptEvent::Failed(role, cause),
            news => news,
        };
        self.last = Some(reply);
        news
    }

    /// The deadline of its calls. It is later than the client's deadline, which a worker observes
    /// itself unless it hangs.
    pub(super) fn until(&self) -> Instant {
        self.deadline().map_or(self.begun + REQUEST_TIME_MAX, |deadline| deadline + ROUTER_GRACE)
    }

    /// The client's deadline, if it has set one.
    pub(super) fn deadline(&self) -> Option<Instant> {
        Some(self.begun + self.request.head.patience()?)
    }

    /// Its order in the queue: the lowest number is the first.
    pub(super) fn priority(&self) -> i32 {
        let path = self.request.head.target.split('?').next().unwrap_or_default();
        if let Payload::Routed(body) = &self.request.payload { body.priority(path) } else { 0 }
    }

    /// Whether the metrics count it. They count only generation requests.
    pub(super) fn is_counted(&self) -> bool {
        matches!(self.request.payload, Payload::Routed(_))
    }

    /// Counts the tokens so far for the limits of the client's API key.
    pub(super) fn count_tokens(&self, client: ConnId, cx: &mut RouterContext<'_>) {
        let limits = &mut cx.connections.key_limits;
        if let Payload::Routed(body) = &self.request.payload
            && limits.is_charged(client)
        {
            limits.set_used(client, self.relay.tokens(body.work().tokens), cx.now);
        }
    }

    /// Counts the tokens that a whole answer reports, or else the whole charge.
    pub(super) fn count_answer(&self, client: ConnId, body: &[u8], cx: &mut RouterContext<'_>) {
        let limits = &mut cx.connections.key_limits;
        if let Payload::Routed(routed) = &self.request.payload
            && limits.is_charged(client)
        {
            match tokens_of_answer(body, routed.work().samples as usize) {
                Some(tokens) => limits.set_used(client, tokens, cx.now),
                None => limits.use_whole_charge(client),
            }
        }
    }

    /// Opens the connections. Returns the number of connections that are not established yet.
    pub(super) fn open(
        &mut self,
        calls: impl IntoIterator<Item = (Owner, Reservation)>,
        cx: &mut RouterContext<'_>,
    ) -> Result<u32, CloseReason> {
        let until = self.until();
        let mut result = Ok(0);
        for (owner, reservation) in calls {
            let Ok(awaited) = &mut result else {
                cx.pool.release(reservation, cx.now);
                continue;
            };
            match cx.pool.open_call(cx.reactor, owner, reservation, until, cx.now) {
                Ok((conn, stands)) => {
                    *awaited += u32::from(!stands);
                    let leg = if matches!(owner, Owner::Lead(_)) {
                        &mut self.lead
                    } else {
                        &mut self.prefill
                    };
                    let before = leg.replace(conn);
                    debug_assert!(before.is_none(), "a request has one call for each leg");
                }
                Err(reason) => result = Err(reason),
            }
        }
        result
    }

    /// Whether decode has begun to answer, with success or with an error. Prefill's outcome is then
    /// ignored.
    pub(super) fn has_begun(&self, cx: &mut RouterContext<'_>) -> bool {
        let answer = self.lead.and_then(|lead| cx.pool.answer(lead));
        !self.attempts.is_waiting() || answer.is_some_and(|a| !a.body.is_empty() || !a.is_success())
    }

    /// Logs the outcome of a request and its worker. Failures that the client caused have level
    /// debug.
    pub(super) fn log_outcome(&self, what: &str, role: Leg, cause: Cause, cx: &RouterContext<'_>) {
        let level = match cause {
            Cause::Refused | Cause::Aborted => LogLevel::Debug,
            _ => LogLevel::Warn,
        };
        if log::is_logged(level) {
            let accused: Vec<_> =
                self.attempts.accused().map(|worker| cx.pool.url(worker)).collect();
            let chosen =
                || self.attempts.worker(role).map_or("none".into(), |worker| cx.pool.url(worker));
            let worker = if accused.is_empty() { chosen() } else { accused.join(", ") };
            let why = self.last.as_ref().map(UpstreamFailure::from_reply);
            let why: &dyn fmt::Display = match &why {
                Some(failure) => failure,
                None => &"unknown",
            };
            let fields: [log::Field; 4] = [
                ("request", &self.request.id),
                ("worker", &worker),
                ("cause", &cause),
                ("why", why),
            ];
            log::write(level, "router", what, &fields);
        }
    }

    /// Records the success of both workers.
    pub(super) fn acquit(&self, cx: &mut RouterContext<'_>) {
        let workers =
            [Leg::Prefill, Leg::Decode].into_iter().filter_map(|role| self.attempts.worker(role));
        workers.for_each(|worker| cx.pool.balancer().record_success(worker));
    }

    pub(super) fn cancel(&mut self, cx: &mut RouterContext<'_>) {
        cx.cancel(self.lead.take());
        cx.cancel(self.prefill.take());
        self.release(cx);
        self.give_up_kept(cx);
    }

    /// Keeps the reservation of the worker without a call.
    pub(super) fn hold(&mut self, reservation: Reservation) {
        let before = self.held.replace(reservation);
        debug_assert!(before.is_none(), "a reservation is released before the next one is held");
    }

    /// Releases the reservation of the worker without a call.
    pub(super) fn release(&mut self, cx: &mut RouterContext<'_>) {
        if let Some(held) = self.held.take()
            && !is_failpoint_active("held reservation is not released")
        {
            cx.pool.release(held, cx.now);
        }
    }

    /// Whether it has no call, no reservation and no kept KV, as before each attempt.
    pub(super) fn is_at_rest(&self) -> bool {
        let keeps = self.asked.is_some() || self.kept.is_some();
        self.calls() == 0 && self.held.is_none() && !keeps
    }

    /// The number of its calls.
    pub(super) fn calls(&self) -> usize {
        usize::from(self.lead.is_some()) + usize::from(self.prefill.is_some())
    }

    /// Panics if the calls and reservations of a request that is served do not belong to it.
    pub(super) fn invariants(&self, client: ConnId, pool: &WorkerPool) {
        let waits = self.due.is_some();
        assert_ne!(waits, self.calls() > 0, "a request has a call or waits for a retry");
        assert!(!waits || self.is_at_rest(), "a request that waits for a retry holds nothing");
        if let Some(lead) = self.lead {
            assert_eq!(pool.owner(lead), Some(Owner::Lead(client)), "the lead call is its own");
        }
        if let Some(prefill) = self.prefill {
            let owner = pool.owner(prefill).and_then(Owner::prefill_client);
            assert_eq!(owner, Some(client), "the prefill call is its own");
        }
        if let Some(held) = &self.held {
            let leg = if self.lead.is_some() { Leg::Prefill } else { Leg::Decode };
            let chosen = self.attempts.worker(leg);
            assert_eq!(chosen, Some(held.worker()), "it reserves the worker without a call");
        }
    }
}

//! Events of calls to workers. Answers are passed on to the client, and events to
//! `routing::attempts`.

use super::proxied::{BodyMode, ProxiedRequest};
use super::{Payload, ProxiedRequests, RouterContext};
use crate::cause::Cause;
use crate::config::FirstToken;
use crate::http::sse;
use crate::ids::Leg;
use crate::limits::ROUTER_ANSWER_MAX;
use crate::net::ConnId;
use crate::obs::log::event;
use crate::router::pool::CallEvent;
use crate::router::relay::Relayed;
use crate::routing::attempts::{AttemptAction, AttemptContext, AttemptEvent};
use crate::upstream::answer::{CallError, UpstreamReply};
use crate::upstream::failure::{self, UpstreamFailure};

impl ProxiedRequests {
    /// Handles an event of the call that brings the client's answer.
    pub fn handle_lead_event(
        &mut self,
        client: ConnId,
        conn: ConnId,
        what: CallEvent,
        cx: &mut RouterContext<'_>,
    ) {
        let Some(mut flight) = self.open.remove(&client) else { return };
        if flight.lead != Some(conn) {
            self.open.insert(client, flight);
            return;
        }
        match what {
            CallEvent::Ready => self.apply_event(client, flight, AttemptEvent::Connected, cx),
            CallEvent::Refused => {
                flight.lead = None;
                self.refused(client, flight, Leg::Decode, cx);
            }
            CallEvent::Processing => {
                cx.pool.mark_read(conn, cx.now);
                flight.release(cx);
                self.keep(client, flight);
            }
            CallEvent::Arrived => {
                let Some(answer) = cx.pool.answer(conn) else { return self.keep(client, flight) };
                if !answer.is_success() {
                    // The complete body will say why.
                    cx.cancel(flight.prefill.take());
                    return self.keep(client, flight);
                }
                let (media, is_stream) = (answer.media.clone(), answer.is_stream());
                let mut body = std::mem::take(&mut answer.body);
                let news = self.pass(client, &mut flight, &media, is_stream, &mut body, cx);
                if let Some(answer) = cx.pool.answer(conn) {
                    answer.body = body;
                }
                self.follow(client, flight, news, cx);
            }
            CallEvent::Ended(answer) => {
                flight.lead = None;
                self.ended(client, flight, answer, cx);
            }
            CallEvent::Lost(_) if flight.relay.is_done() => {
                flight.lead = None;
                self.apply_event(client, flight, AttemptEvent::Finished, cx);
            }
            // Only the client is to blame, and another worker would not help.
            CallEvent::Lost(CallError::SlowClient) => {
                flight.lead = None;
                let (cause, why) = failure::explain_call_error(CallError::SlowClient);
                flight.last = Some(UpstreamReply::error(&failure::error(cause, why)));
                self.fail(client, flight, cause, cx);
            }
            CallEvent::Lost(lost) => {
                flight.lead = None;
                let (cause, why) = failure::explain_call_error(lost);
                // If prefill was lost and decode had little time left, the client gets that earlier
                // error.
                if !(flight.attempts.has_lost_prefill() && cause == Cause::Deadline) {
                    flight.last = Some(UpstreamReply::error(&failure::error(cause, why)));
                }
                self.apply_event(client, flight, AttemptEvent::Lost(Leg::Decode, cause), cx);
            }
        }
    }

    /// Handles an event of a prefill leg.
    pub fn handle_prefill_event(
        &mut self,
        client: ConnId,
        conn: ConnId,
        what: CallEvent,
        cx: &mut RouterContext<'_>,
    ) {
        let Some(mut flight) = self.open.remove(&client) else { return };
        if flight.prefill != Some(conn) {
            self.open.insert(client, flight);
            return;
        }
        match what {
            CallEvent::Ready => {
                return self.apply_event(client, flight, AttemptEvent::Connected, cx);
            }
            CallEvent::Refused => {
                flight.prefill = None;
                return self.refused(client, flight, Leg::Prefill, cx);
            }
            CallEvent::Processing => {}
            CallEvent::Arrived => {
                let answer = cx.pool.answer(conn).filter(|answer| answer.is_success());
                // An error body is read when it is complete.
                let Some(answer) = answer else { return self.keep(client, flight) };
                let mut body = std::mem::take(&mut answer.body);
                let news = self.pass_ahead(client, &mut flight, &mut body, cx);
                if let Some(answer) = cx.pool.answer(conn) {
                    answer.body = body;
                }
                return self.follow(client, flight, news, cx);
            }
            CallEvent::Ended(mut answer) if answer.is_success() => {
                flight.prefill = None;
                let news = self.pass_ahead(client, &mut flight, &mut answer.body, cx);
                return self.follow(client, flight, news, cx);
            }
            CallEvent::Ended(answer) => {
                flight.prefill = None;
                if !flight.has_begun(cx) {
                    let news = UpstreamFailure::from_reply(&answer).attempt_event(Leg::Prefill);
                    flight.last = Some(answer);
                    return self.apply_event(client, flight, news, cx);
                }
            }
            // The client's deadline has passed. It ends decode's leg too, and the client gets that
            // leg's error.
            CallEvent::Lost(CallError::Deadline) => flight.prefill = None,
            CallEvent::Lost(lost) => {
                flight.prefill = None;
                if !flight.has_begun(cx) {
                    // The outcome is logged when it is known.
                    event!(
                        Debug,
                        "router",
                        "prefill leg lost",
                        request = flight.request.id,
                        why = lost
                    );
                    let why = "the prefill worker was lost before there was an answer";
                    flight.last =
                        Some(UpstreamReply::error(&failure::error(Cause::PeerLost, why.into())));
                    return self.apply_event(
                        client,
                        flight,
                        AttemptEvent::Lost(Leg::Prefill, Cause::PeerLost),
                        cx,
                    );
                }
            }
        }
        self.keep(client, flight);
    }

    /// Passes on what is ready, and returns the event that follows for the attempt.
    pub(super) fn pass(
        &mut self,
        client: ConnId,
        flight: &mut ProxiedRequest,
        media: &str,
        is_stream: bool,
        body: &mut Vec<u8>,
        cx: &mut RouterContext<'_>,
    ) -> Option<AttemptEvent> {
        if flight.body.is_none() && !is_stream && body.len() <= ROUTER_ANSWER_MAX {
            return None;
        }
        let passed = match (flight.body, is_stream) {
            (Some(BodyMode::Stream), false) => Relayed::Broken,
            (_, true) => flight.relay.take(body),
            (_, false) => Relayed::Bytes(std::mem::take(body)),
        };
        let (bytes, news) = match passed {
            Relayed::Bytes(bytes) => (bytes, None),
            Relayed::Failed { bytes, cause, error } => {
                (bytes, Some(flight.told(Leg::Decode, cause, error)))
            }
            Relayed::Broken => {
                let why = "the worker's answer is no stream of events".to_owned();
                flight.last = Some(UpstreamReply::error(&failure::error(Cause::Internal, why)));
                (Vec::new(), Some(AttemptEvent::Lost(Leg::Decode, Cause::Internal)))
            }
        };
        if bytes.is_empty() {
            return news;
        }
        if flight.body.is_none() || flight.attempts.is_retry() {
            // A worker that serves the request alone has computed the prompt.
            flight.lead.into_iter().for_each(|lead| cx.pool.mark_read(lead, cx.now));
            // The prefill worker that decode has asked has finished its part.
            flight.release(cx);
        }
        if flight.body.is_none() {
            self.open_body(client, flight, media, is_stream, cx);
            flight.acquit(cx);
        } else if flight.attempts.is_retry() {
            self.metrics.resumed.inc();
            flight.acquit(cx);
        }
        self.passed += 1;
        cx.connections.send_chunk(cx.reactor, client, &bytes);
        let passes = AttemptEvent::Passes { resumable: is_stream && flight.relay.is_resumable() };
        // Successful pieces need no random number and no deadline.
        let terms = &mut AttemptContext {
            now: cx.now,
            chance: 0,
            deadline: None,
            retries: &mut self.retries,
        };
        let next = flight.attempts.apply_event(passes, terms);
        if let (AttemptAction::RestoreDeadline, Some(lead)) = (next, flight.lead) {
            cx.pool.set_deadline(lead, flight.until());
        }
        news
    }

    /// Passes on the tokens that prefill sends ahead of decode, if the router uses them. Returns
    /// the event that follows for the attempt. Everything else in the answer is dropped, except a
    /// failure.
    pub(super) fn pass_ahead(
        &mut self,
        client: ConnId,
        flight: &mut ProxiedRequest,
        body: &mut Vec<u8>,
        cx: &mut RouterContext<'_>,
    ) -> Option<AttemptEvent> {
        if !self.is_ahead(flight)
            || !(flight.body.is_none() || flight.body == Some(BodyMode::Stream))
        {
            body.clear();
            return None;
        }
        let (bytes, failed) = match flight.relay.take_ahead(body) {
            Relayed::Bytes(bytes) => (bytes, None),
            Relayed::Failed { bytes, cause, error } => (bytes, Some((cause, error))),
            Relayed::Broken => (Vec::new(), None),
        };
        if !bytes.is_empty() {
            if flight.body.is_none() {
                self.open_body(client, flight, sse::CONTENT_TYPE, true, cx);
            }
            cx.connections.send_chunk(cx.reactor, client, &bytes);
            let terms = &mut AttemptContext {
                now: cx.now,
                chance: 0,
                deadline: None,
                retries: &mut self.retries,
            };
            let _ = flight.attempts.apply_event(AttemptEvent::FirstTokenPassed, terms);
        }
        let (cause, error) = failed.filter(|_| !flight.has_begun(cx))?;
        Some(flight.told(Leg::Prefill, cause, error))
    }

    /// Whether prefill is asked to send its first token to the client at once.
    pub(super) fn is_ahead(&self, flight: &ProxiedRequest) -> bool {
        let is_stream =
            matches!(&flight.request.payload, Payload::Routed(body) if body.is_stream());
        self.first_token == FirstToken::Prefill && is_stream
    }

    pub(super) fn open_body(
        &self,
        client: ConnId,
        flight: &mut ProxiedRequest,
        media: &str,
        is_stream: bool,
        cx: &mut RouterContext<'_>,
    ) {
        flight.body = Some(if is_stream { BodyMode::Stream } else { BodyMode::Long });
        // Only in a stream the first byte is the first token.
        if is_stream && flight.is_counted() {
            self.metrics.first_byte(cx.now.duration_since(flight.begun));
        }
        cx.connections.open_body(cx.reactor, client, 200, media);
    }

    /// Decode's answer has ended.
    pub(super) fn ended(
        &mut self,
        client: ConnId,
        mut flight: ProxiedRequest,
        mut answer: UpstreamReply,
        cx: &mut RouterContext<'_>,
    ) {
        if !answer.is_success() {
            let news = UpstreamFailure::from_reply(&answer).attempt_event(Leg::Decode);
            flight.last = Some(answer);
            return self.apply_event(client, flight, news, cx);
        }
        let (media, is_stream) = (answer.media.clone(), answer.is_stream());
        let mut body = std::mem::take(&mut answer.body);
        let news = self.pass(client, &mut flight, &media, is_stream, &mut body, cx);
        let news = news.unwrap_or_else(|| match flight.body {
            // The worker knows how to end the stream, and did not.
            Some(BodyMode::Stream) if flight.relay.is_resumable() && !flight.relay.is_done() => {
                let (cause, why) = failure::explain_call_error(CallError::Closed);
                flight.last = Some(UpstreamReply::error(&failure::error(cause, why)));
                AttemptEvent::Lost(Leg::Decode, cause)
            }
            _ => AttemptEvent::Finished,
        });
        if news == AttemptEvent::Finished && flight.body.is_none() {
            flight.last = Some(UpstreamReply { body, ..answer });
        }
        self.apply_event(client, flight, news, cx);
    }
}

//! Events of calls to workers. Answers go to the client, and events go to `routing::attempts`.

use super::proxied_request::{BodyMode, ProxiedRequest};
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
        let Some(mut proxied) = self.open.remove(&client) else { return };
        if proxied.lead != Some(conn) {
            return self.keep(client, proxied);
        }
        match what {
            CallEvent::Ready => self.apply_event(client, proxied, AttemptEvent::Connected, cx),
            CallEvent::Refused => {
                proxied.lead = None;
                self.refused(client, proxied, Leg::Decode, cx);
            }
            CallEvent::Processing => {
                cx.pool.mark_read(conn, cx.now);
                proxied.release(cx);
                self.keep(client, proxied);
            }
            CallEvent::Arrived => {
                cx.pass_ignored_fields(client, conn);
                let Some(answer) = cx.pool.answer(conn) else { return self.keep(client, proxied) };
                if !answer.is_success() {
                    // The complete body will have the reason.
                    cx.cancel(proxied.prefill.take());
                    return self.keep(client, proxied);
                }
                let (media, is_stream) = (answer.media.clone(), answer.is_stream());
                let mut body = std::mem::take(&mut answer.body);
                let news = self.pass(client, &mut proxied, &media, is_stream, &mut body, cx);
                if let Some(answer) = cx.pool.answer(conn) {
                    answer.body = body;
                }
                self.follow(client, proxied, news, cx);
            }
            CallEvent::Ended(answer) => {
                proxied.lead = None;
                self.ended(client, proxied, answer, cx);
            }
            CallEvent::Lost(_) if proxied.relay.is_done() => {
                proxied.lead = None;
                self.apply_event(client, proxied, AttemptEvent::Finished, cx);
            }
            // Only the client is at fault, so another worker would not help.
            CallEvent::Lost(CallError::SlowClient) => {
                proxied.lead = None;
                let (cause, why) = failure::explain_call_error(CallError::SlowClient);
                proxied.last = Some(UpstreamReply::error(&failure::error(cause, why)));
                self.fail(client, proxied, cause, cx);
            }
            CallEvent::Lost(lost) => {
                proxied.lead = None;
                let (cause, why) = failure::explain_call_error(lost);
                // If prefill was lost and decode exceeded its shortened deadline, the client gets
                // the error of prefill.
                if !(proxied.attempts.has_lost_prefill() && cause == Cause::Deadline) {
                    proxied.last = Some(UpstreamReply::error(&failure::error(cause, why)));
                }
                self.apply_event(client, proxied, AttemptEvent::Lost(Leg::Decode, cause), cx);
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
        let Some(mut proxied) = self.open.remove(&client) else { return };
        if proxied.prefill != Some(conn) {
            return self.keep(client, proxied);
        }
        match what {
            CallEvent::Ready => {
                return self.apply_event(client, proxied, AttemptEvent::Connected, cx);
            }
            CallEvent::Refused => {
                proxied.prefill = None;
                return self.refused(client, proxied, Leg::Prefill, cx);
            }
            CallEvent::Processing => {}
            CallEvent::Arrived => {
                cx.pass_ignored_fields(client, conn);
                let answer = cx.pool.answer(conn).filter(|answer| answer.is_success());
                // An error body is read when it is complete.
                let Some(answer) = answer else { return self.keep(client, proxied) };
                let mut body = std::mem::take(&mut answer.body);
                let news = self.pass_ahead(client, &mut proxied, &mut body, cx);
                if let Some(answer) = cx.pool.answer(conn) {
                    answer.body = body;
                }
                return self.follow(client, proxied, news, cx);
            }
            CallEvent::Ended(mut answer) if answer.is_success() => {
                proxied.prefill = None;
                let news = self.pass_ahead(client, &mut proxied, &mut answer.body, cx);
                return self.follow(client, proxied, news, cx);
            }
            CallEvent::Ended(answer) => {
                proxied.prefill = None;
                if !proxied.has_begun(cx) {
                    let news = UpstreamFailure::from_reply(&answer).attempt_event(Leg::Prefill);
                    proxied.last = Some(answer);
                    return self.apply_event(client, proxied, news, cx);
                }
            }
            // The client's deadline has passed. It also ends decode's leg, and the client gets that
            // leg's error.
            CallEvent::Lost(CallError::Deadline) => proxied.prefill = None,
            CallEvent::Lost(lost) => {
                proxied.prefill = None;
                if !proxied.has_begun(cx) {
                    return self.lose_prefill(client, proxied, lost, cx);
                }
            }
        }
        self.keep(client, proxied);
    }

    /// Handles the loss of the prefill worker before the client has an answer.
    fn lose_prefill(
        &mut self,
        client: ConnId,
        mut proxied: ProxiedRequest,
        lost: CallError,
        cx: &mut RouterContext<'_>,
    ) {
        // The outcome is logged when it is known.
        event!(Debug, "router", "prefill leg lost", request = proxied.request.id, why = lost);
        let why = "the prefill worker was lost before the answer began";
        proxied.last = Some(UpstreamReply::error(&failure::error(Cause::PeerLost, why.into())));
        let event = AttemptEvent::Lost(Leg::Prefill, Cause::PeerLost);
        self.apply_event(client, proxied, event, cx);
    }

    /// Passes ready bytes to the client. Returns the event for the attempt.
    pub(super) fn pass(
        &mut self,
        client: ConnId,
        proxied: &mut ProxiedRequest,
        media: &str,
        is_stream: bool,
        body: &mut Vec<u8>,
        cx: &mut RouterContext<'_>,
    ) -> Option<AttemptEvent> {
        if proxied.body.is_none() && !is_stream && body.len() <= ROUTER_ANSWER_MAX {
            return None;
        }
        let passed = match (proxied.body, is_stream) {
            (Some(BodyMode::Stream), false) => Relayed::Broken,
            (_, true) => proxied.relay.take(body),
            (_, false) => Relayed::Bytes(std::mem::take(body)),
        };
        let (bytes, news) = match passed {
            Relayed::Bytes(bytes) => (bytes, None),
            Relayed::Failed { bytes, cause, error } => {
                (bytes, Some(proxied.record_stream_failure(Leg::Decode, cause, error)))
            }
            Relayed::Broken => {
                let why = "the worker's answer is not a stream of events".to_owned();
                proxied.last = Some(UpstreamReply::error(&failure::error(Cause::Internal, why)));
                (Vec::new(), Some(AttemptEvent::Lost(Leg::Decode, Cause::Internal)))
            }
        };
        if bytes.is_empty() {
            return news;
        }
        debug_assert!(
            proxied.body != Some(BodyMode::Long) || !is_stream,
            "no worker continues an answer that is no stream"
        );
        if proxied.body.is_none() || proxied.attempts.is_retry() {
            // A worker that serves the request alone has computed the prompt.
            proxied.lead.into_iter().for_each(|lead| cx.pool.mark_read(lead, cx.now));
            // The prefill worker that decode has asked has finished its part.
            proxied.release(cx);
        }
        if proxied.body.is_none() {
            self.open_body(client, proxied, media, is_stream, cx);
            proxied.acquit(cx);
        } else if proxied.attempts.is_retry() {
            self.metrics.resumed.inc();
            proxied.acquit(cx);
        }
        self.passed += 1;
        match is_stream {
            true => proxied.count_tokens(client, cx),
            false => cx.connections.key_limits.use_whole_charge(client),
        }
        cx.connections.send_chunk(cx.reactor, client, &bytes);
        let passes = AttemptEvent::Passes { resumable: is_stream && proxied.relay.is_resumable() };
        // Successful pieces need no random number and no deadline.
        let terms = &mut AttemptContext {
            now: cx.now,
            chance: 0,
            deadline: None,
            retries: &mut self.retries,
        };
        let next = proxied.attempts.apply_event(passes, terms);
        if let (AttemptAction::RestoreDeadline, Some(lead)) = (next, proxied.lead) {
            cx.pool.set_deadline(lead, proxied.until());
        }
        news
    }

    /// Passes on the tokens that prefill sends before decode, if the router uses them. Returns the
    /// event for the attempt. Of the rest of the answer, only a failure is used.
    pub(super) fn pass_ahead(
        &mut self,
        client: ConnId,
        proxied: &mut ProxiedRequest,
        body: &mut Vec<u8>,
        cx: &mut RouterContext<'_>,
    ) -> Option<AttemptEvent> {
        if !self.is_ahead(proxied)
            || !(proxied.body.is_none() || proxied.body == Some(BodyMode::Stream))
        {
            body.clear();
            return None;
        }
        let (bytes, failed) = match proxied.relay.take_ahead(body) {
            Relayed::Bytes(bytes) => (bytes, None),
            Relayed::Failed { bytes, cause, error } => (bytes, Some((cause, error))),
            Relayed::Broken => (Vec::new(), None),
        };
        if !bytes.is_empty() {
            if proxied.body.is_none() {
                self.open_body(client, proxied, sse::CONTENT_TYPE, true, cx);
            }
            proxied.count_tokens(client, cx);
            cx.connections.send_chunk(cx.reactor, client, &bytes);
            let terms = &mut AttemptContext {
                now: cx.now,
                chance: 0,
                deadline: None,
                retries: &mut self.retries,
            };
            let _ = proxied.attempts.apply_event(AttemptEvent::FirstTokenPassed, terms);
        }
        let (cause, error) = failed.filter(|_| !proxied.has_begun(cx))?;
        Some(proxied.record_stream_failure(Leg::Prefill, cause, error))
    }

    /// Whether prefill is asked to send its first token to the client at once.
    pub(super) fn is_ahead(&self, proxied: &ProxiedRequest) -> bool {
        let is_stream =
            matches!(&proxied.request.payload, Payload::Routed(body) if body.is_stream());
        self.first_token == FirstToken::Prefill && is_stream
    }

    pub(super) fn open_body(
        &self,
        client: ConnId,
        proxied: &mut ProxiedRequest,
        media: &str,
        is_stream: bool,
        cx: &mut RouterContext<'_>,
    ) {
        let mode = if is_stream { BodyMode::Stream } else { BodyMode::Long };
        let before = proxied.body.replace(mode);
        debug_assert!(before.is_none(), "an answer begins once");
        // Only in a stream, the first byte is the first token.
        if is_stream && proxied.is_counted() {
            self.metrics.first_byte(cx.now.duration_since(proxied.begun));
        }
        cx.connections.open_body(cx.reactor, client, 200, media);
    }

    /// Handles the end of decode's answer.
    pub(super) fn ended(
        &mut self,
        client: ConnId,
        mut proxied: ProxiedRequest,
        mut answer: UpstreamReply,
        cx: &mut RouterContext<'_>,
    ) {
        if !answer.is_success() {
            let news = UpstreamFailure::from_reply(&answer).attempt_event(Leg::Decode);
            proxied.last = Some(answer);
            return self.apply_event(client, proxied, news, cx);
        }
        cx.name_ignored_fields(client, answer.ignored_fields.take());
        let (media, is_stream) = (answer.media.clone(), answer.is_stream());
        let mut body = std::mem::take(&mut answer.body);
        let news = self.pass(client, &mut proxied, &media, is_stream, &mut body, cx);
        let news = news.unwrap_or_else(|| match proxied.body {
            // A complete stream has an end mark, and this one has none.
            Some(BodyMode::Stream) if proxied.relay.is_resumable() && !proxied.relay.is_done() => {
                let (cause, why) = failure::explain_call_error(CallError::Closed);
                proxied.last = Some(UpstreamReply::error(&failure::error(cause, why)));
                AttemptEvent::Lost(Leg::Decode, cause)
            }
            _ => AttemptEvent::Finished,
        });
        if news == AttemptEvent::Finished && proxied.body.is_none() {
            proxied.last = Some(UpstreamReply { body, ..answer });
        }
        self.apply_event(client, proxied, news, cx);
    }
}

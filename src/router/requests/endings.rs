//! The end of requests, and the answers that their clients receive then.

use super::proxied_request::{BodyMode, ProxiedRequest};
use super::{ProxiedRequests, RouterContext};
use crate::cause::Cause;
use crate::http::sse;
use crate::ids::Leg;
use crate::limits::ROUTER_PREFILL_END_TIME;
use crate::net::ConnId;
use crate::upstream::answer::UpstreamReply;
use crate::upstream::failure::{self, UpstreamFailure};

impl ProxiedRequests {
    /// The answer is complete.
    pub(super) fn land(
        &mut self,
        client: ConnId,
        mut proxied: ProxiedRequest,
        cx: &mut RouterContext<'_>,
    ) {
        debug_assert!(!self.open.contains_key(&client), "a request that ends is not served");
        let has_answer = proxied.body.is_some() || proxied.last.is_some();
        debug_assert!(has_answer, "a request that ends well has an answer");
        match (proxied.body, &proxied.last) {
            (None, Some(answer)) => {
                proxied.count_answer(client, &answer.body, cx);
                cx.connections.send_response(cx.reactor, client, &answer.whole(), cx.now);
            }
            _ => cx.connections.end_stream(cx.reactor, client, cx.now),
        }
        proxied.acquit(cx);
        proxied.release(cx);
        if proxied.is_counted() {
            self.metrics.ended(cx.now.duration_since(proxied.begun));
        }
        if let Some(prefill) = proxied.prefill {
            cx.pool.let_end(cx.reactor, prefill, (cx.now, ROUTER_PREFILL_END_TIME));
        }
        cx.cancel(proxied.lead);
    }

    /// Ends a request without a complete answer.
    pub(super) fn fail(
        &mut self,
        client: ConnId,
        mut proxied: ProxiedRequest,
        cause: Cause,
        cx: &mut RouterContext<'_>,
    ) {
        debug_assert!(!self.open.contains_key(&client), "a request that ends is not served");
        proxied.log_outcome("request failed", Leg::Decode, cause, cx);
        self.failed(&proxied, cause);
        // A worker can report that the client is gone. That is wrong if the client is still
        // connected.
        let is_true = |reply: &UpstreamReply| {
            reply.own.is_some() || UpstreamFailure::from_reply(reply).cause != Cause::ClientGone
        };
        let reply = proxied.last.take().filter(is_true);
        let reply = reply.unwrap_or_else(|| {
            UpstreamReply::error(&failure::error(cause, "the request could not be served".into()))
        });
        match proxied.body {
            None => cx.connections.send_response(cx.reactor, client, &reply.whole(), cx.now),
            Some(BodyMode::Stream) => {
                let mut last = Vec::new();
                if !proxied.relay.is_resumable() {
                    // The last event can be incomplete. Empty lines end it and have no other
                    // effect.
                    last.extend_from_slice(b"\n\n");
                }
                sse::write_event(&mut last, &reply.body);
                cx.connections.send_chunk(cx.reactor, client, &last);
                cx.connections.end_stream(cx.reactor, client, cx.now);
            }
            Some(BodyMode::Long) => cx.connections.cut_response(cx.reactor, client),
        }
        proxied.cancel(cx);
    }

    pub(super) fn failed(&self, proxied: &ProxiedRequest, cause: Cause) {
        if proxied.is_counted() {
            self.metrics.failed(cause);
        }
    }
}

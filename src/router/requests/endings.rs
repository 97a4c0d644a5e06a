//! How requests end, and what their clients receive then.

use super::proxied::{BodyMode, ProxiedRequest};
use super::{ProxiedRequests, RouterContext};
use crate::cause::Cause;
use crate::http::sse;
use crate::ids::Leg;
use crate::net::ConnId;
use crate::upstream::answer::UpstreamReply;
use crate::upstream::failure::{self, UpstreamFailure};

impl ProxiedRequests {
    /// The answer is complete.
    pub(super) fn land(
        &mut self,
        client: ConnId,
        mut flight: ProxiedRequest,
        cx: &mut RouterContext<'_>,
    ) {
        match (flight.body, &flight.last) {
            (None, Some(answer)) => {
                cx.connections.send_response(cx.reactor, client, &answer.whole(), cx.now);
            }
            _ => cx.connections.end_stream(cx.reactor, client, cx.now),
        }
        flight.acquit(cx);
        flight.release(cx);
        if flight.is_counted() {
            self.metrics.ended(cx.now.duration_since(flight.begun));
        }
        if let Some(prefill) = flight.prefill {
            cx.pool.detach_call(prefill);
        }
        cx.cancel(flight.lead);
    }

    /// Ends a request without a complete answer.
    pub(super) fn fail(
        &mut self,
        client: ConnId,
        mut flight: ProxiedRequest,
        cause: Cause,
        cx: &mut RouterContext<'_>,
    ) {
        flight.tell("request failed", Leg::Decode, cause, cx);
        self.failed(&flight, cause);
        // A worker can report that the client is gone. That is wrong for a client that is still
        // here.
        let is_true = |told: &UpstreamReply| {
            told.own.is_some() || UpstreamFailure::from_reply(told).cause != Cause::ClientGone
        };
        let told = flight.last.take().filter(is_true);
        let told = told.unwrap_or_else(|| {
            UpstreamReply::error(&failure::error(cause, "the request could not be served".into()))
        });
        match flight.body {
            None => cx.connections.send_response(cx.reactor, client, &told.whole(), cx.now),
            Some(BodyMode::Stream) => {
                let mut last = Vec::new();
                if !flight.relay.is_resumable() {
                    // The last event is possibly cut off. Empty lines end it, and have no other
                    // effect.
                    last.extend_from_slice(b"\n\n");
                }
                sse::write_event(&mut last, &told.body);
                cx.connections.send_chunk(cx.reactor, client, &last);
                cx.connections.end_stream(cx.reactor, client, cx.now);
            }
            Some(BodyMode::Long) => cx.connections.cut_response(cx.reactor, client),
        }
        flight.cancel(cx);
    }

    pub(super) fn failed(&self, flight: &ProxiedRequest, cause: Cause) {
        if flight.is_counted() {
            self.metrics.failed(cause);
        }
    }
}

//! The prefill-first flow: prefill computes the prompt and keeps the KV, then decode continues.
//!
//! Invariants: decode claims the kept KV, or the router releases it at the end of the attempt. If
//! the router dies, prefill drops it after `limits::KEPT_KV_LIFE`.
//! The router reserves decode together with prefill, because the work will reach decode later.

use super::proxied_request::ProxiedRequest;
use super::{Payload, ProxiedRequests, RouterContext, unavailable};
use crate::api::KvTransferParams;
use crate::api::info::AbortRequest;
use crate::cause::Cause;
use crate::http::Method;
use crate::http::response::JSON;
use crate::ids::Leg;
use crate::net::ConnId;
use crate::obs::log::event;
use crate::router::call::Owner;
use crate::router::pool::CallEvent;
use crate::routing::attempts::AttemptEvent;
use crate::routing::balancer::Reservation;
use crate::stdx::failpoint::is_failpoint_active;
use crate::upstream::answer::UpstreamReply;
use crate::upstream::failure::{self, UpstreamFailure};
use crate::upstream::request::UpstreamHead;

impl ProxiedRequests {
    /// Handles an event of a prefill leg that is sent first.
    pub fn handle_prefill_first_event(
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
        let news = match what {
            CallEvent::Ready => {
                return self.apply_event(client, proxied, AttemptEvent::Connected, cx);
            }
            CallEvent::Processing | CallEvent::Arrived => return self.keep(client, proxied),
            CallEvent::Refused => {
                proxied.prefill = None;
                return self.refused(client, proxied, Leg::Prefill, cx);
            }
            CallEvent::Ended(answer) if answer.is_success() => {
                match KvTransferParams::of(&answer.body) {
                    Some(params) => {
                        if params.room.is_some() {
                            proxied.asked = None;
                        }
                        let before = proxied.kept.replace(params);
                        debug_assert!(before.is_none(), "an attempt has one place of kept KV");
                        AttemptEvent::PrefillDone
                    }
                    None => {
                        let why =
                            "the prefill worker did not report where it keeps the KV".to_owned();
                        proxied.last =
                            Some(UpstreamReply::error(&failure::error(Cause::Incompatible, why)));
                        AttemptEvent::Failed(Leg::Prefill, Cause::Incompatible)
                    }
                }
            }
            CallEvent::Ended(answer) => {
                proxied.asked = None;
                let cause = UpstreamFailure::from_reply(&answer).cause;
                proxied.last = Some(answer);
                AttemptEvent::Failed(Leg::Prefill, cause)
            }
            CallEvent::Lost(lost) => {
                let (cause, why) = failure::explain_call_error(lost);
                proxied.last = Some(UpstreamReply::error(&failure::error(cause, why)));
                AttemptEvent::Lost(Leg::Prefill, cause)
            }
        };
        proxied.prefill = None;
        self.apply_event(client, proxied, news, cx);
    }

    /// Opens the connection to decode after prefill has answered.
    pub(super) fn join(
        &mut self,
        client: ConnId,
        mut proxied: ProxiedRequest,
        cx: &mut RouterContext<'_>,
    ) {
        debug_assert_eq!(proxied.calls(), 0, "decode is called after prefill has answered");
        let chosen = proxied.held.as_ref().map(Reservation::worker);
        let load = chosen.and_then(|worker| cx.pool.balancer().load(worker));
        if !load.is_some_and(|load| load.usable) {
            // The worker has begun to drain, has left, or is down.
            let is_going = chosen.is_none_or(|worker| {
                let drains = cx.pool.target(worker).is_none_or(|target| target.drains);
                drains || !cx.pool.balancer().has(worker)
            });
            if !is_failpoint_active("worker that goes keeps its reservation") {
                proxied.release(cx);
            }
            return match is_going {
                true => self.apply_event(
                    client,
                    proxied,
                    AttemptEvent::Failed(Leg::Decode, Cause::Draining),
                    cx,
                ),
                false => self.refused(client, proxied, Leg::Decode, cx),
            };
        }
        let lead = proxied.held.take().map(|lead| (Owner::Lead(client), lead));
        match proxied.open(lead, cx) {
            Ok(awaited) => self.apply_event(client, proxied, AttemptEvent::Opened(awaited), cx),
            Err(reason) => {
                proxied.last = Some(UpstreamReply::error(&unavailable(reason.to_string())));
                self.fail(client, proxied, Cause::Overloaded, cx);
            }
        }
    }
}

impl ProxiedRequests {
    /// Chooses another decode worker if the first one refuses connections. The kept KV is not
    /// claimed, so another worker can claim it.
    pub(super) fn rejoin(
        &mut self,
        client: ConnId,
        mut proxied: ProxiedRequest,
        cx: &mut RouterContext<'_>,
    ) {
        let chosen = match (&proxied.request.payload, proxied.attempts.worker(Leg::Prefill)) {
            (Payload::Routed(body), Some(prefill)) => {
                let router = cx.pool.balancer();
                router.choose_behind(prefill, body.work(), proxied.attempts.avoid(), cx.now).ok()
            }
            _ => None,
        };
        match chosen {
            Some(decode) => {
                event!(
                    Debug,
                    "router",
                    "another decode worker claims the kept KV",
                    request = proxied.request.id,
                    worker = cx.pool.url(decode.worker())
                );
                proxied.attempts.rejoin(decode.worker());
                proxied.hold(decode);
                self.join(client, proxied, cx);
            }
            None => self.apply_event(
                client,
                proxied,
                AttemptEvent::Lost(Leg::Decode, Cause::PeerLost),
                cx,
            ),
        }
    }
}

impl ProxiedRequest {
    /// Lets prefill drop the kept KV, because decode will not claim it. The answer of prefill can
    /// be on its way.
    pub(super) fn give_up_kept(&mut self, cx: &mut RouterContext<'_>) {
        let asked = self.asked.take();
        let room = self.kept.take().and_then(|kept| kept.room).or(asked);
        if let (Some(room), Some(worker)) = (room, self.attempts.worker(Leg::Prefill)) {
            let asked = self.request.head.headers.iter();
            let is_same =
                |(name, _): &&(&str, String)| *name == "authorization" || *name == "x-request-id";
            let mut headers: Vec<(&'static str, String)> = asked.filter(is_same).cloned().collect();
            headers.push(("content-type", JSON.to_owned()));
            let order =
                UpstreamHead { method: Method::Post, target: "/abort_request".into(), headers };
            cx.pool.notify(cx.reactor, worker, &order, AbortRequest::body_of(room), cx.now);
        }
    }
}

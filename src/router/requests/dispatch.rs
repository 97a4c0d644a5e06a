//! An attempt of a request: it chooses workers, connects to them, and sends the legs when the
//! connections are established.

use super::proxied_request::ProxiedRequest;
use super::{Payload, ProxiedRequests, RouterContext, terms, unavailable};
use crate::api::resume::Resume;
use crate::api::routed_body::{KvLocation, Meeting, RoutedBody};
use crate::api::{ApiError, Keep, PrefillAddress};
use crate::cause::Cause;
use crate::config::Flow;
use crate::ids::{Leg, Room};
use crate::net::ConnId;
use crate::obs::log::event;
use crate::router::call::Owner;
use crate::router::target::WorkerTarget;
use crate::routing::attempts::AttemptEvent;
use crate::routing::balancer::{NoWorker, Reservation};
use crate::upstream::answer::UpstreamReply;
use crate::upstream::failure;
use std::sync::Arc;

impl ProxiedRequests {
    /// Chooses the workers and opens the connections.
    pub(super) fn attempt(
        &mut self,
        client: ConnId,
        mut proxied: ProxiedRequest,
        cx: &mut RouterContext<'_>,
    ) {
        debug_assert!(proxied.is_at_rest(), "an attempt begins without calls and reservations");
        proxied.due = None;
        let (router, avoid) = (cx.pool.balancer(), proxied.attempts.avoid());
        let reserved = match &proxied.request.payload {
            Payload::Routed(body) => router
                .choose_serving(body.work(), avoid, cx.now)
                .map(|(prefill, decode)| (decode, prefill)),
            Payload::Decode(_) => {
                router.choose_one(Leg::Decode, 0, avoid, cx.now).map(|decode| (decode, None))
            }
            Payload::Any => router.first(avoid).map(|worker| (router.reserve_visit(worker), None)),
        };
        let (lead, prefill) = match reserved {
            Ok(reserved) => reserved,
            Err(late @ NoWorker::Late { .. }) => {
                let late = ApiError::busy(late.to_string());
                proxied.last = Some(UpstreamReply::error(&late));
                let next = proxied.attempts.late();
                return self.perform_action(client, proxied, next, cx);
            }
            Err(none) => {
                proxied
                    .last
                    .get_or_insert_with(|| UpstreamReply::error(&unavailable(none.to_string())));
                let deadline = proxied.deadline();
                let next = proxied
                    .attempts
                    .handle_no_worker(none.may_come(), &terms(&mut self.retries, deadline, cx));
                return self.perform_action(client, proxied, next, cx);
            }
        };
        proxied
            .attempts
            .set_workers(prefill.as_ref().map(Reservation::worker), Some(lead.worker()));
        let result = match (self.flow, prefill) {
            (Flow::PrefillFirst, Some(prefill)) => {
                proxied.attempts.in_turn();
                proxied.hold(lead);
                proxied.open([(Owner::PrefillFirst(client), prefill)], cx)
            }
            (Flow::DecodeFirst, Some(prefill)) => {
                proxied.hold(prefill);
                proxied.open([(Owner::Lead(client), lead)], cx)
            }
            (_, prefill) => {
                let prefill = prefill.map(|prefill| (Owner::Prefill(client), prefill));
                proxied.open(prefill.into_iter().chain([(Owner::Lead(client), lead)]), cx)
            }
        };
        match result {
            Ok(awaited) => self.apply_event(client, proxied, AttemptEvent::Opened(awaited), cx),
            Err(reason) => {
                proxied.last = Some(UpstreamReply::error(&unavailable(reason.to_string())));
                self.fail(client, proxied, Cause::Overloaded, cx);
            }
        }
    }

    pub(super) fn refused(
        &mut self,
        client: ConnId,
        mut proxied: ProxiedRequest,
        role: Leg,
        cx: &mut RouterContext<'_>,
    ) {
        debug_assert!(!proxied.attempts.is_waiting(), "a leg that was sent is lost, not refused");
        let why = "no chosen worker accepted a connection";
        proxied.last.get_or_insert_with(|| {
            UpstreamReply::error(&failure::error(Cause::PeerLost, why.into()))
        });
        self.apply_event(client, proxied, AttemptEvent::Refused(role), cx);
    }

    /// Sends the request on all open connections at once. Each attempt gets a new room.
    pub(super) fn send(
        &mut self,
        client: ConnId,
        mut proxied: ProxiedRequest,
        cx: &mut RouterContext<'_>,
    ) {
        debug_assert!(proxied.calls() > 0, "a request is sent over its calls");
        let room = Room(cx.reactor.entropy().next_u64() >> 1);
        proxied.relay.start_attempt(proxied.request.payload.choices());
        let Some(order) = proxied.request.head.after_wait(cx.now.duration_since(proxied.begun))
        else {
            let why = "the client's deadline passed before the answer began".to_owned();
            proxied.last = Some(UpstreamReply::error(&failure::error(Cause::Deadline, why)));
            return self.fail(client, proxied, Cause::Deadline, cx);
        };
        let body = match &proxied.request.payload {
            Payload::Routed(body) => self.addressed(&proxied, body, room, cx),
            Payload::Decode(body) => body.clone(),
            Payload::Any => Vec::new(),
        };
        let body = Arc::new(body);
        if self.flow == Flow::PrefillFirst && proxied.prefill.is_some() {
            let before = proxied.asked.replace(room);
            debug_assert!(before.is_none(), "an attempt has one place of kept KV");
        }
        event!(
            Debug,
            "router",
            "legs sent",
            request = proxied.request.id,
            room = room,
            prefill = Self::name_of(&proxied, Leg::Prefill, cx),
            decode = Self::name_of(&proxied, Leg::Decode, cx),
            target = order.target
        );
        proxied.count_tokens(client, cx);
        for conn in [proxied.prefill, proxied.lead].into_iter().flatten() {
            cx.pool.send_request(cx.reactor, conn, &order, &body, cx.now);
        }
        self.keep(client, proxied);
    }

    /// The URL of the worker of this attempt's leg, for the log.
    fn name_of(proxied: &ProxiedRequest, leg: Leg, cx: &RouterContext<'_>) -> String {
        let worker = proxied.attempts.worker(leg).and_then(|worker| cx.pool.target(worker));
        worker.map_or("none".into(), |target| target.url.to_string())
    }

    /// The body for the legs that are sent now.
    fn addressed(
        &self,
        proxied: &ProxiedRequest,
        body: &RoutedBody,
        room: Room,
        cx: &RouterContext<'_>,
    ) -> Vec<u8> {
        let source =
            proxied.attempts.worker(Leg::Prefill).and_then(|worker| cx.pool.target(worker));
        let is_ahead = source.is_some() && self.is_ahead(proxied);
        let is_marked = is_ahead || (self.retries.most() > 0 && body.is_stream());
        let mut resume = is_marked.then(|| proxied.relay.resume().clone());
        if let Some(resume) = resume.as_mut().filter(|_| is_ahead) {
            // Two workers send parts of one answer, so they need the same creation time.
            resume.created.get_or_insert_with(|| cx.reactor.since_epoch().as_secs());
        }
        let address = |source: &WorkerTarget| PrefillAddress {
            host: source.url.host.clone(),
            port: source.url.port,
            tls: source.url.tls,
            bootstrap_port: source.registry_port(),
        };
        let place = match (self.flow, source, &proxied.kept) {
            // The prefill worker can have left since then. It keeps the KV all the same.
            (_, _, Some(kept)) => Some(KvLocation::Kept(&kept.params)),
            (_, None, None) => {
                debug_assert_eq!(proxied.attempts.worker(Leg::Prefill), None, "a leg has a worker");
                None
            }
            (Flow::PrefillFirst, Some(source), None) => {
                let keep = Keep { room: Some(room), ..address(source).keep() };
                return body.keep(&keep, resume.filter(Resume::has_begun).as_ref(), false);
            }
            (Flow::DecodeFirst, Some(source), None) => {
                return body.address(
                    Some(KvLocation::Asked(&address(source))),
                    resume.as_ref(),
                    is_ahead,
                );
            }
            (Flow::Dual, Some(source), None) => {
                let (host, port) = (&source.url.host, source.registry_port());
                Some(KvLocation::Met(Meeting { host, port, room }))
            }
        };
        body.address(place, resume.as_ref(), is_ahead)
    }
}

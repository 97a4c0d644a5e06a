//! A try of a request: its workers are chosen, connections to them asked for, and its legs sent once those stand.

use super::flight::Flight;
use super::{Flights, Load, Way, random, terms, unavailable};
use crate::cause::Cause;
use crate::cluster::flight::News;
use crate::cluster::router::{Booking, NoWorker, Role};
use crate::config::resolved::Flow;
use crate::front::openai::ApiError;
use crate::front::openai::PrefillAddress;
use crate::front::openai::resume::Resume;
use crate::front::openai::routed::{Meeting, Place, Routed};
use crate::front::router::call::{Owner, WorkerAnswer};
use crate::front::router::failure;
use crate::front::router::target::Target;
use crate::ids::Room;
use crate::net::ConnId;
use crate::obs::log::event;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

impl Flights {
    /// Takes a pair and connections to it.
    pub(super) fn attempt(&mut self, client: ConnId, mut flight: Flight, way: &mut Way<'_>) {
        flight.due = None;
        let (router, avoid) = (way.fleet.router(), flight.core.avoid());
        let booked = match &flight.request.load {
            Load::Routed(body) => router
                .choose_serving(body.work(), avoid, way.now)
                .map(|(prefill, decode)| (decode, prefill)),
            Load::Decode(_) => {
                router.choose_one(Role::Decode, 0, avoid, way.now).map(|decode| (decode, None))
            }
            Load::Any => router.first(avoid).map(|worker| (router.visit(worker), None)),
        };
        let (lead, prefill) = match booked {
            Ok(booked) => booked,
            Err(late @ NoWorker::Late { .. }) => {
                let late = ApiError { message: late.to_string(), ..ApiError::overloaded(1) };
                flight.last = Some(WorkerAnswer::error(&late));
                let next = flight.core.late();
                return self.carry_out(client, flight, next, way);
            }
            Err(none) => {
                flight
                    .last
                    .get_or_insert_with(|| WorkerAnswer::error(&unavailable(none.to_string())));
                let deadline = flight.deadline();
                let next =
                    flight.core.nobody(none.may_come(), &terms(&mut self.retries, deadline, way));
                return self.carry_out(client, flight, next, way);
            }
        };
        flight.core.choose(prefill.as_ref().map(Booking::worker), Some(lead.worker()));
        let result = match (self.flow, prefill) {
            (Flow::PrefillFirst, Some(prefill)) => {
                flight.core.in_turn();
                flight.held = Some(lead);
                flight.open([(Owner::Reader(client), prefill)], way)
            }
            (Flow::DecodeFirst, Some(prefill)) => {
                flight.held = Some(prefill);
                flight.open([(Owner::Lead(client), lead)], way)
            }
            (_, prefill) => {
                let prefill = prefill.map(|prefill| (Owner::Prefill(client), prefill));
                flight.open(prefill.into_iter().chain([(Owner::Lead(client), lead)]), way)
            }
        };
        match result {
            Ok(awaited) => self.take(client, flight, News::Opened(awaited), way),
            Err(reason) => {
                flight.last = Some(WorkerAnswer::error(&unavailable(reason.to_string())));
                self.fail(client, flight, Cause::Overloaded, way);
            }
        }
    }

    pub(super) fn refused(
        &mut self,
        client: ConnId,
        mut flight: Flight,
        role: Role,
        way: &mut Way<'_>,
    ) {
        let why = "no worker that was asked took a connection";
        flight.last.get_or_insert_with(|| {
            WorkerAnswer::error(&failure::error(Cause::PeerLost, why.into()))
        });
        self.take(client, flight, News::Refused(role), way);
    }

    /// Sends the request on all connections at once: of a pair that meets, under a fresh room.
    pub(super) fn send(&mut self, client: ConnId, mut flight: Flight, way: &mut Way<'_>) {
        let room = Room(random() >> 1);
        flight.relay.turn(flight.request.load.choices());
        let Some(order) = flight.request.order.after(way.now.duration_since(flight.begun)) else {
            let why = "the client's time was up before there was an answer".to_owned();
            flight.last = Some(WorkerAnswer::error(&failure::error(Cause::Deadline, why)));
            return self.fail(client, flight, Cause::Deadline, way);
        };
        let body = match &flight.request.load {
            Load::Routed(body) => self.addressed(&flight, body, room, way),
            Load::Decode(body) => body.clone(),
            Load::Any => Vec::new(),
        };
        let body = Arc::new(body);
        event!(
            Debug,
            "router",
            "sent",
            request = flight.request.id,
            room = room,
            target = order.target
        );
        for conn in [flight.prefill, flight.lead].into_iter().flatten() {
            way.fleet.begin(way.reactor, conn, &order, &body, way.now);
        }
        self.keep(client, flight);
    }

    /// The body for the legs whose turn it is.
    fn addressed(&self, flight: &Flight, body: &Routed, room: Room, way: &Way<'_>) -> Vec<u8> {
        let source = flight.core.worker(Role::Prefill).and_then(|worker| way.fleet.target(worker));
        let is_ahead = source.is_some() && self.is_ahead(flight);
        let is_marked = is_ahead || (self.retries.most() > 0 && body.is_stream());
        let mut resume = is_marked.then(|| flight.relay.resume().clone());
        if let Some(resume) = resume.as_mut().filter(|_| is_ahead) {
            // Two workers tell of one answer, which began once.
            resume.created.get_or_insert_with(unix);
        }
        let address = |source: &Target| PrefillAddress {
            host: source.url.host.clone(),
            port: source.url.port,
            tls: source.url.tls,
            bootstrap_port: source.registry_port(),
        };
        let place = match (self.flow, source, &flight.kept) {
            (_, None, _) => None,
            (_, Some(_), Some(kept)) => Some(Place::Kept(&kept.params)),
            (Flow::PrefillFirst, Some(source), None) => {
                let keep = address(source).keep();
                return body.keep(&keep, resume.filter(Resume::has_begun).as_ref(), false);
            }
            (Flow::DecodeFirst, Some(source), None) => {
                return body.address(
                    Some(Place::Asked(&address(source))),
                    resume.as_ref(),
                    is_ahead,
                );
            }
            (Flow::Dual, Some(source), None) => {
                let (host, port) = (&source.url.host, source.registry_port());
                Some(Place::Met(Meeting { host, port, room }))
            }
        };
        body.address(place, resume.as_ref(), is_ahead)
    }
}

/// Seconds of Unix time.
fn unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

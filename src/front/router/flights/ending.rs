//! How requests end, and what their clients are told then.

use super::flight::{Body, Flight};
use super::{Flights, Way};
use crate::cause::Cause;
use crate::cluster::router::Role;
use crate::front::http::sse;
use crate::front::router::call::WorkerAnswer;
use crate::front::router::failure::{self, Failure};
use crate::net::ConnId;

impl Flights {
    /// The answer is whole.
    pub(super) fn land(&mut self, client: ConnId, mut flight: Flight, way: &mut Way<'_>) {
        match (flight.body, &flight.last) {
            (None, Some(answer)) => {
                way.connections.answer(way.reactor, client, &answer.whole(), way.now);
            }
            _ => way.connections.end_stream(way.reactor, client, way.now),
        }
        flight.acquit(way);
        flight.release(way);
        if flight.is_counted() {
            self.metrics.ended(way.now.duration_since(flight.begun));
        }
        if let Some(prefill) = flight.prefill {
            way.fleet.leave(prefill);
        }
        way.cancel(flight.lead);
    }

    /// Ends a flight that got no whole answer.
    pub(super) fn fail(
        &mut self,
        client: ConnId,
        mut flight: Flight,
        cause: Cause,
        way: &mut Way<'_>,
    ) {
        flight.tell("request failed", Role::Decode, cause, way);
        self.failed(&flight, cause);
        // That it has gone, as a worker may think, is not for a client that is here.
        let is_true = |told: &WorkerAnswer| {
            told.own.is_some() || Failure::of(told).cause != Cause::ClientGone
        };
        let told = flight.last.take().filter(is_true);
        let told = told.unwrap_or_else(|| {
            WorkerAnswer::error(&failure::error(cause, "the request could not be served".into()))
        });
        match flight.body {
            None => way.connections.answer(way.reactor, client, &told.whole(), way.now),
            Some(Body::Stream) => {
                let mut last = Vec::new();
                if !flight.relay.is_resumable() {
                    // An event may have been cut off; empty lines end it, and do nothing else.
                    last.extend_from_slice(b"\n\n");
                }
                sse::write_event(&mut last, &told.body);
                way.connections.stream(way.reactor, client, &last);
                way.connections.end_stream(way.reactor, client, way.now);
            }
            Some(Body::Long) => way.connections.cut(way.reactor, client),
        }
        flight.cancel(way);
    }

    pub(super) fn failed(&self, flight: &Flight, cause: Cause) {
        if flight.is_counted() {
            self.metrics.failed(cause);
        }
    }
}

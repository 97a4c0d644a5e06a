//! Prefill first: it is asked to keep the KV, decode to go on from there.
//!
//! Invariant: what is kept is claimed by decode, or given up as soon as this try is; where the router dies, prefill gives
//! it up itself (`limits::KEPT_KV_LIFE`). Decode is booked with prefill: what comes to it later is charged to it from the
//! choice on.

use super::flight::Flight;
use super::{Flights, Load, Way, unavailable};
use crate::cause::Cause;
use crate::cluster::flight::News;
use crate::cluster::router::{Booking, Role};
use crate::front::connections::JSON;
use crate::front::http::Method;
use crate::front::openai::ToldKv;
use crate::front::openai::info::Abort;
use crate::front::router::call::{Order, Owner, WorkerAnswer};
use crate::front::router::failure::{self, Failure};
use crate::front::router::fleet::What;
use crate::net::ConnId;
use crate::obs::log::event;

impl Flights {
    /// News of a prefill leg that is asked first.
    pub fn reader(&mut self, client: ConnId, conn: ConnId, what: What, way: &mut Way<'_>) {
        let Some(mut flight) = self.open.remove(&client) else { return };
        if flight.prefill != Some(conn) {
            self.open.insert(client, flight);
            return;
        }
        let news = match what {
            What::Ready => return self.take(client, flight, News::Connected, way),
            What::Processing | What::Arrived => return self.keep(client, flight),
            What::Refused => {
                flight.prefill = None;
                return self.refused(client, flight, Role::Prefill, way);
            }
            What::Ended(answer) if answer.is_success() => match ToldKv::of(&answer.body) {
                Some(told) => {
                    flight.kept = Some(told);
                    News::Read
                }
                None => {
                    let why = "the prefill worker does not say where it keeps the KV".to_owned();
                    flight.last =
                        Some(WorkerAnswer::error(&failure::error(Cause::Incompatible, why)));
                    News::Failed(Role::Prefill, Cause::Incompatible)
                }
            },
            What::Ended(answer) => {
                let cause = Failure::of(&answer).cause;
                flight.last = Some(answer);
                News::Failed(Role::Prefill, cause)
            }
            What::Lost(lost) => {
                let (cause, why) = failure::of_loss(lost);
                flight.last = Some(WorkerAnswer::error(&failure::error(cause, why)));
                News::Lost(Role::Prefill, cause)
            }
        };
        flight.prefill = None;
        self.take(client, flight, news, way);
    }

    /// Prefill has answered: it is decode's turn.
    pub(super) fn join(&mut self, client: ConnId, mut flight: Flight, way: &mut Way<'_>) {
        let chosen = flight.held.as_ref().map(Booking::worker);
        let load = chosen.and_then(|worker| way.fleet.router().load(worker));
        if !load.is_some_and(|load| load.usable) {
            // It drains, has left, or is down, since it was chosen.
            let is_going = chosen.is_none_or(|worker| {
                let drains = way.fleet.target(worker).is_none_or(|target| target.drains);
                drains || !way.fleet.router().has(worker)
            });
            flight.release(way);
            return match is_going {
                true => self.take(client, flight, News::Failed(Role::Decode, Cause::Draining), way),
                false => self.refused(client, flight, Role::Decode, way),
            };
        }
        let lead = flight.held.take().map(|lead| (Owner::Lead(client), lead));
        match flight.open(lead, way) {
            Ok(awaited) => self.take(client, flight, News::Opened(awaited), way),
            Err(reason) => {
                flight.last = Some(WorkerAnswer::error(&unavailable(reason.to_string())));
                self.fail(client, flight, Cause::Overloaded, way);
            }
        }
    }
}

impl Flights {
    /// Decode takes no connection, and what prefill keeps is nobody's yet: another one may claim it.
    pub(super) fn rejoin(&mut self, client: ConnId, mut flight: Flight, way: &mut Way<'_>) {
        let chosen = match (&flight.request.load, flight.core.worker(Role::Prefill)) {
            (Load::Routed(body), Some(prefill)) => {
                let router = way.fleet.router();
                router.choose_behind(prefill, body.work(), flight.core.avoid(), way.now).ok()
            }
            _ => None,
        };
        match chosen {
            Some(decode) => {
                event!(
                    Debug,
                    "router",
                    "another decode worker claims what is kept",
                    request = flight.request.id,
                    worker = way.fleet.url(decode.worker())
                );
                flight.core.rejoin(decode.worker());
                flight.held = Some(decode);
                self.join(client, flight, way);
            }
            None => self.take(client, flight, News::Lost(Role::Decode, Cause::PeerLost), way),
        }
    }
}

impl Flight {
    /// Decode will not claim what prefill keeps.
    pub(super) fn give_up_kept(&mut self, way: &mut Way<'_>) {
        let room = self.kept.take().and_then(|kept| kept.room);
        if let (Some(room), Some(worker)) = (room, self.core.worker(Role::Prefill)) {
            let asked = self.request.order.headers.iter();
            let is_same =
                |(name, _): &&(&str, String)| *name == "authorization" || *name == "x-request-id";
            let mut headers: Vec<(&'static str, String)> = asked.filter(is_same).cloned().collect();
            headers.push(("content-type", JSON.to_owned()));
            let order = Order { method: Method::Post, target: "/abort_request".into(), headers };
            way.fleet.notify(way.reactor, worker, &order, Abort::body_of(room), way.now);
        }
    }
}

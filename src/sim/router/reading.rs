//! Prefill first: it is asked to keep the KV, decode to go on from there, by the rules of
//! `router::requests::prefill_first`.
//!
//! Invariant: what is kept is claimed by decode, or given up as soon as this try is, where the
//! worker can be told so.

use super::fleet::What;
use super::{CallName, Flights, LegName, Wish};
use crate::cause::Cause;
use crate::ids::Leg;
use crate::routing::attempts::AttemptEvent;
use crate::routing::demand::Demand;
use crate::sched::messages::FinishReason;
use crate::stdx::event_queue::Nanos;
use crate::upstream::failure;

impl Flights {
    /// News of a prefill leg that is asked first.
    pub(super) fn read(&mut self, id: usize, what: What, now: Nanos) {
        let flight = &mut self.flights[id];
        let news = match what {
            What::Ready => AttemptEvent::Connected,
            What::Refused => AttemptEvent::Refused(Leg::Prefill),
            What::Kept(room) => {
                (flight.room, flight.kept) = (room, Some(room));
                // It is with nobody until decode is asked.
                flight.placed = false;
                AttemptEvent::PrefillDone
            }
            What::TurnedAway => AttemptEvent::Failed(Leg::Prefill, Cause::Draining),
            What::Ended(FinishReason::Failed(cause)) => AttemptEvent::Failed(Leg::Prefill, cause),
            What::Ended(_) | What::Token(_) | What::SourceFailed(_) => {
                unreachable!("whoever keeps KV says where, or that it failed")
            }
            What::Lost(lost) => {
                AttemptEvent::Lost(Leg::Prefill, failure::explain_call_error(lost).0)
            }
        };
        self.follow(id, news, now);
    }

    /// Prefill has answered: it is decode's turn.
    pub(super) fn join(&mut self, id: usize, now: Nanos) {
        let until = self.until(id);
        let flight = &mut self.flights[id];
        let Some(decode) = flight.held.take() else { return };
        if !self.fleet.router().load(decode.worker()).is_some_and(|load| load.usable) {
            // It drains, has left, or is down, since it was chosen.
            let news = match self.fleet.is_going(decode.worker()) {
                true => AttemptEvent::Failed(Leg::Decode, Cause::Draining),
                false => AttemptEvent::Refused(Leg::Decode),
            };
            self.fleet.release(decode, now);
            return self.follow(id, news, now);
        }
        flight.legs = [false, true];
        let (attempt, room, pair) = (flight.attempt, flight.room, flight.pair);
        // Whether decode is there is now of interest.
        self.fleet.wishes.push(Wish::Choose { flight: id, attempt, room, pair });
        let leg = CallName::Leg(LegName { flight: id, attempt, role: Leg::Decode, copy: 0 });
        let awaited = u32::from(!self.fleet.open(leg, decode, until, now));
        self.follow(id, AttemptEvent::Opened(awaited), now);
    }

    /// Decode takes no connection: another one may claim what is kept.
    pub(super) fn rejoin(&mut self, id: usize, now: Nanos) {
        let instant = self.instant(now);
        let flight = &mut self.flights[id];
        let (work, avoid) = (Demand::of(1), flight.core.avoid());
        let chosen = flight.core.worker(Leg::Prefill).and_then(|prefill| {
            self.fleet.router().choose_behind(prefill, &work, avoid, instant).ok()
        });
        let Some(decode) = chosen else {
            return self.follow(id, AttemptEvent::Lost(Leg::Decode, Cause::PeerLost), now);
        };
        flight.core.rejoin(decode.worker());
        flight.pair[Leg::Decode as usize] = self.fleet.host(decode.worker());
        flight.held = Some(decode);
        self.join(id, now);
    }

    /// Decode will not claim what prefill keeps.
    pub(super) fn give_up_kept(&mut self, id: usize, now: Nanos) {
        let flight = &mut self.flights[id];
        if let (Some(room), Some(worker)) = (flight.kept.take(), flight.core.worker(Leg::Prefill)) {
            self.fleet.give_up_kept(worker, room, now);
        }
    }
}

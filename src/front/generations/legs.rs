//! Legs: requests of one worker each, and what their tokens and ends mean for the answer that they work for.
//!
//! Thread: `ctl`. Invariants: the first terminal failure of either leg of a choice cancels the other; behind decode's first token
//! prefill's outcome is ignored. Not here: which workers they go to (`placing`), what is counted of them (`figures`).

use super::live::First;
use super::{Generations, Way, error_of};
use crate::cause::Cause;
use crate::config::resolved::FirstToken;
use crate::front::connections::{Answer, JSON};
use crate::front::exchange::{Exchange, Step};
use crate::front::generations::placing::Placement;
use crate::front::handoff::Source;
use crate::ids::{RequestId, Room, WorkerId};
use crate::model::logprobs::Sampled;
use crate::sched::mailbox::{Event, Outcome};
use crate::sched::request::{Request, Stamps};
use crate::transfer::manager::rooms::Slot;
use std::time::{Duration, Instant};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Part {
    /// Its tokens are not shown.
    Prefill,
    /// Its tokens are the answer.
    Visible,
    /// Its token is the answer once its KV is with the destination.
    Held,
    /// Its token is the answer at once, which ends when its KV is with the destination.
    Ahead,
    /// Its token is the answer once it is computed, and its KV outlives that.
    Kept,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Leg {
    pub(super) exchange: u64,
    pub(super) choice: usize,
    pub(super) part: Part,
    pub(super) worker: WorkerId,
    pub(super) slot: Slot,
    pub(super) room: Room,
    pub(super) partner: Option<RequestId>,
    pub(super) finished: bool,
    /// It has been told to end, since nobody asks for it.
    pub(super) given_up: bool,
    /// When its last token came.
    pub(super) last_token: Option<Instant>,
    /// The token of a `Held` or `Kept` leg until it is shown.
    pub(super) held: Option<Sampled>,
}

impl Generations {
    /// Takes an engine's event.
    pub fn event(&mut self, event: Event, way: &mut Way<'_>) {
        match event {
            Event::Token { request, sampled, first } => {
                let Some(leg) = self.legs.get_mut(&request) else { return };
                if let Some(last) = leg.last_token.replace(way.now) {
                    self.metrics[leg.worker.index()]
                        .next_token(way.now.saturating_duration_since(last));
                }
                if matches!(leg.part, Part::Held | Part::Kept) {
                    leg.held = Some(sampled);
                }
                let leg = *leg;
                match leg.part {
                    Part::Visible | Part::Ahead => {
                        // A stop string may end it before its leg does.
                        if let Some(live) =
                            self.live.get_mut(&leg.exchange).filter(|_| first.is_some())
                        {
                            live.timings[leg.choice].decode = first;
                        }
                        match leg.part {
                            Part::Ahead => self.token(&leg, &sampled, way),
                            _ => self.visible(&leg, &sampled, way),
                        }
                    }
                    Part::Prefill => {
                        if let Some(live) = self.live.get_mut(&leg.exchange) {
                            live.timings[leg.choice].prefill = first;
                        }
                        self.ahead(&leg, &sampled, way);
                    }
                    Part::Held => {}
                    Part::Kept => {
                        if let Some(live) = self.live.get_mut(&leg.exchange) {
                            live.timings[leg.choice].decode = first;
                        }
                    }
                }
            }
            Event::Expecting { worker, slot, generation, tokens, .. } => {
                self.handoff.expecting(worker, Slot { id: slot, generation }, tokens, way.now);
            }
            Event::Computed { worker, slot, generation, request, cached_tokens } => {
                self.handoff.computed(worker, Slot { id: slot, generation }, way.now);
                self.kept(request, cached_tokens, way);
            }
            Event::Finished { request, outcome, stamps, cached_tokens } => {
                self.finished(request, outcome, &stamps, cached_tokens, way);
            }
            Event::Flushed { worker, pages } => {
                if let Some((conn, pages)) = self.flushes.done(worker, pages) {
                    let body =
                        serde_json::json!({ "success": true, "flushed_pages": pages }).to_string();
                    let body = body.as_bytes();
                    way.answer(conn, &Answer { status: 200, media: JSON, body, retry_after: None });
                }
            }
            Event::Released(request) => {
                let slot = Slot { id: request.slot, generation: request.generation };
                self.handoff.released(request.worker, slot);
                self.legs.remove(&request.id);
            }
        }
    }

    /// Ends legs that no decode worker has asked for in so long: it is dead, or never got its own leg.
    pub(super) fn give_up(&mut self, patience: Duration, now: Instant) {
        let late = self.live.values().filter(|live| live.arrived + patience <= now);
        for request in late.flat_map(|live| &live.legs) {
            let Some(leg) = self.legs.get_mut(request) else { continue };
            let is_held =
                matches!(leg.part, Part::Held | Part::Ahead) && !leg.finished && !leg.given_up;
            if is_held && !self.handoff.is_asked_for(leg.worker, leg.slot) {
                leg.given_up = true;
                self.handoff.worker_mut(leg.worker).abort(leg.slot, Cause::PeerLost);
            }
        }
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn start(
        &mut self,
        exchange: u64,
        choice: usize,
        part: Part,
        request: Box<Request>,
        source: Option<&Source>,
        partner: Option<RequestId>,
        now: Instant,
    ) {
        let slot = Slot { id: request.slot, generation: request.generation };
        let (id, worker, room) = (request.id, request.worker, request.room);
        self.legs.insert(
            id,
            Leg {
                exchange,
                choice,
                part,
                worker,
                slot,
                room,
                partner,
                finished: false,
                given_up: false,
                last_token: None,
                held: None,
            },
        );
        if let Some(live) = self.live.get_mut(&exchange) {
            live.legs.push(id);
        }
        self.handoff.submit(request, source, now);
    }

    /// A prefill leg whose decode leg is here, too, has sampled.
    fn ahead(&mut self, leg: &Leg, sampled: &Sampled, way: &mut Way<'_>) {
        let Placement::Split { first_token: FirstToken::Prefill, .. } = self.terms.placement else {
            return;
        };
        let Some(live) = self.live.get_mut(&leg.exchange) else { return };
        let is_stream = live.exchange.as_ref().is_some_and(Exchange::is_stream);
        if is_stream && live.first[leg.choice] == First::Due {
            live.first[leg.choice] = First::Ahead(sampled.token);
            self.token(leg, sampled, way);
        }
    }

    /// A leg whose tokens are the answer has sampled; the first of them may have been told.
    fn visible(&mut self, leg: &Leg, sampled: &Sampled, way: &mut Way<'_>) {
        let Some(live) = self.live.get_mut(&leg.exchange) else { return };
        match std::mem::replace(&mut live.first[leg.choice], First::Told) {
            First::Due | First::Told => self.token(leg, sampled, way),
            First::Ahead(token) if token == sampled.token => {}
            First::Ahead(_) => {
                let cause = Cause::Mismatch;
                self.fail(leg.exchange, &error_of(cause), cause, way);
            }
        }
    }

    pub(super) fn token(&mut self, leg: &Leg, sampled: &Sampled, way: &mut Way<'_>) {
        let Some(live) = self.live.get_mut(&leg.exchange) else { return };
        let Some(exchange) = live.exchange.as_mut() else { return };
        let mut out = Vec::new();
        let Step::Stop(finish) = exchange.push(leg.choice, sampled, &self.text.tokenizer, &mut out)
        else {
            return live.stream(&out, way);
        };
        live.timings[leg.choice].ended = Some(way.now);
        let cached = live.timings[leg.choice].cached();
        let wants_timings = live.request.return_timings;
        let timings = wants_timings.then(|| self.timings(leg));
        let Some(live) = self.live.get_mut(&leg.exchange) else { return };
        let Some(exchange) = live.exchange.as_mut() else { return };
        exchange.stop(leg.choice, finish, cached, timings.as_ref(), &mut out);
        live.stream(&out, way);
        match leg.part {
            // Decode's KV: it ends by the same token, and this leg when it has that KV.
            Part::Ahead => return,
            Part::Kept => {}
            Part::Visible | Part::Prefill | Part::Held => {
                self.handoff.worker_mut(leg.worker).abort(leg.slot, Cause::ClientGone);
                self.end_partner(leg, Cause::ClientGone);
            }
        }
        self.close_if_over(leg.exchange, way);
    }

    pub(super) fn finished(
        &mut self,
        request: RequestId,
        outcome: Outcome,
        stamps: &Stamps,
        cached: u32,
        way: &mut Way<'_>,
    ) {
        let Some(leg) = self.legs.get_mut(&request) else { return };
        leg.finished = true;
        let leg = *leg;
        let failure = match outcome {
            Outcome::Failed(cause) => Some(cause),
            _ => None,
        };
        self.count(&leg, outcome);
        self.handoff.finished(leg.worker, leg.slot, failure, way.now);
        let Some(live) = self.live.get_mut(&leg.exchange) else { return };
        let times = &mut live.timings[leg.choice];
        match leg.part {
            Part::Prefill => times.prefill = Some(*stamps),
            Part::Visible | Part::Held | Part::Ahead | Part::Kept => times.decode = Some(*stamps),
        }
        if let (Some(sampled), None) = (leg.held, failure) {
            self.token(&leg, &sampled, way);
        }
        let Some(live) = self.live.get_mut(&leg.exchange) else { return };
        match (leg.part, failure) {
            (Part::Prefill, None) => {}
            // Before its last post, prefill's failure is decode's as well; later it is decode's to find out.
            (Part::Prefill, Some(cause)) => {
                if !live.begun || matches!(live.first[leg.choice], First::Ahead(_)) {
                    self.end_partner(&leg, cause);
                }
            }
            (Part::Visible | Part::Held | Part::Ahead | Part::Kept, None) => {
                self.end_choice(&leg, outcome, cached, way);
            }
            (Part::Visible | Part::Held | Part::Ahead | Part::Kept, Some(cause)) => {
                self.end_partner(&leg, cause);
                let ended = self
                    .live
                    .get(&leg.exchange)
                    .is_some_and(|live| live.timings[leg.choice].ended.is_some());
                // A choice that a stop string ended was told to stop; that is no failure.
                if !ended && !self.awaits_word(leg.exchange, cause, way.now) {
                    self.fail(leg.exchange, &error_of(cause), cause, way);
                }
            }
        }
    }

    pub(super) fn end_choice(
        &mut self,
        leg: &Leg,
        outcome: Outcome,
        cached: u32,
        way: &mut Way<'_>,
    ) {
        let Some(live) = self.live.get_mut(&leg.exchange) else { return };
        live.timings[leg.choice].ended.get_or_insert(way.now);
        self.record(leg, way.now);
        let Some(live) = self.live.get(&leg.exchange) else { return };
        let timings = live.request.return_timings.then(|| self.timings(leg));
        let Some(live) = self.live.get_mut(&leg.exchange) else { return };
        let Some(exchange) = live.exchange.as_mut() else { return };
        let mut out = Vec::new();
        exchange.finish(leg.choice, outcome, cached, timings.as_ref(), &mut out);
        live.stream(&out, way);
        self.close_if_over(leg.exchange, way);
    }

    fn end_partner(&mut self, leg: &Leg, cause: Cause) {
        let partner = leg.partner.and_then(|partner| self.legs.get(&partner)).copied();
        if let Some(partner) = partner.filter(|partner| !partner.finished) {
            self.handoff.worker_mut(partner.worker).abort(partner.slot, cause);
        }
    }
}

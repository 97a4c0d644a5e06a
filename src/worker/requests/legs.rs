//! Legs: a leg is one request to one worker. This module applies the tokens and the end of each leg
//! to the answer.
//!
//! Thread: `ctl`. Invariants: the first terminal failure of one leg of a choice cancels the other;
//! after decode's first token, prefill's outcome is ignored. Not here: the choice of workers
//! (`placement`), metrics of legs (`timings`).

use super::active_request::FirstTokenState;
use super::{Context, RequestTable, error_of};
use crate::cause::Cause;
use crate::config::FirstToken;
use crate::http::response::{JSON, Response};
use crate::ids::{RequestId, RequestKey, Room, WorkerId};
use crate::link::handoff::Source;
use crate::model::logprobs::Sampled;
use crate::sched::messages::{EngineCommand, FinishReason, RequestEvent};
use crate::sched::request::{EngineRequest, Stamps};
use crate::stdx::failpoint::is_failpoint_active;
use crate::transfer::manager::rooms::Slot;
use crate::worker::requests::placement::Placement;
use crate::worker::response::{PushOutcome, ResponseBuilder};
use std::time::{Duration, Instant};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LegKind {
    /// The client gets none of its tokens.
    Prefill,
    /// Its tokens are the answer.
    Visible,
    /// Its token is the answer. It is sent after its KV has arrived at the destination.
    TokenAfterHandover,
    /// Its token is sent at once. The answer ends when its KV has arrived at the destination.
    TokenBeforeHandover,
    /// Its token is the answer and is sent at once. Its KV stays longer.
    KvKept,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct ActiveLeg {
    pub(super) key: RequestKey,
    pub(super) choice: usize,
    pub(super) kind: LegKind,
    pub(super) worker: WorkerId,
    pub(super) slot: Slot,
    pub(super) room: Room,
    pub(super) partner: Option<RequestId>,
    pub(super) finished: bool,
    /// Whether it takes part in a hand-off.
    pub(super) hands_over: bool,
    /// Whether a stop string has ended its choice. Its abort is then no failure.
    pub(super) stopped: bool,
    /// Whether it was aborted because no decode worker asked for it.
    pub(super) given_up: bool,
    /// Time of its last token.
    pub(super) last_token: Option<Instant>,
    /// The token of a `TokenAfterHandover` or `KvKept` leg until it is sent.
    pub(super) held: Option<Sampled>,
}

/// A leg to start.
#[derive(Clone, Copy, Debug)]
pub(super) struct NewLeg<'a> {
    pub(super) key: RequestKey,
    pub(super) choice: usize,
    pub(super) kind: LegKind,
    /// The prefill worker that hands over its KV, if there is a hand-off.
    pub(super) source: Option<&'a Source>,
    /// The other leg of the choice, in this process.
    pub(super) partner: Option<RequestId>,
}

impl RequestTable {
    /// Handles an engine's event about a request.
    pub(super) fn apply_event(&mut self, event: RequestEvent, cx: &mut Context<'_>) {
        match event {
            RequestEvent::Token { request, sampled, first, prompt } => {
                if let (Some(prompt), Some(leg)) = (prompt, self.legs.get(&request).copied()) {
                    self.handle_prompt_logprobs(&leg, &prompt, cx);
                }
                let Some(leg) = self.legs.get_mut(&request) else { return };
                debug_assert!(!leg.finished, "a leg has no token after its end");
                if let Some(last) = leg.last_token.replace(cx.now) {
                    self.metrics[leg.worker.index()]
                        .next_token(cx.now.saturating_duration_since(last));
                }
                if matches!(leg.kind, LegKind::TokenAfterHandover | LegKind::KvKept) {
                    leg.held = Some(sampled);
                }
                let leg = *leg;
                match leg.kind {
                    LegKind::Visible | LegKind::TokenBeforeHandover => {
                        // Recorded now, because a stop string can end the choice before the leg
                        // ends.
                        if let Some(active) =
                            self.active.get_mut(&leg.key).filter(|_| first.is_some())
                        {
                            active.timings[leg.choice].decode = first;
                        }
                        match leg.kind {
                            LegKind::TokenBeforeHandover => self.push_token(&leg, &sampled, cx),
                            _ => self.push_visible_token(&leg, &sampled, cx),
                        }
                    }
                    LegKind::Prefill => {
                        if let Some(active) = self.active.get_mut(&leg.key) {
                            active.timings[leg.choice].prefill = first;
                        }
                        self.ahead(&leg, &sampled, cx);
                    }
                    LegKind::TokenAfterHandover => {}
                    LegKind::KvKept => {
                        if let Some(active) = self.active.get_mut(&leg.key) {
                            active.timings[leg.choice].decode = first;
                        }
                    }
                }
            }
            RequestEvent::Finished { request, outcome, stamps, cached_tokens } => {
                self.handle_finished(request, outcome, &stamps, cached_tokens, cx);
            }
            RequestEvent::Flushed { worker, pages } => {
                if let Some((conn, pages)) = self.flushes.done(worker, pages) {
                    let body = serde_json::json!({ "success": true, "flushed_pages": pages });
                    let body = body.to_string();
                    let body = body.as_bytes();
                    cx.send_response(
                        conn,
                        &Response { status: 200, media: JSON, body, retry_after: None },
                    );
                }
            }
            RequestEvent::Released(request) => self.forget_leg(&request, cx),
        }
    }

    /// Forgets the leg of a request that its engine has released.
    fn forget_leg(&mut self, request: &EngineRequest, cx: &mut Context<'_>) {
        let slot = Slot { id: request.slot, generation: request.generation };
        cx.handoff.release_slot(request.worker, slot);
        let is_left =
            self.legs.get(&request.id).is_some_and(|leg| !self.active.contains_key(&leg.key));
        if is_left && is_failpoint_active("leg of a request that is over stays") {
            return;
        }
        let leg = self.legs.remove(&request.id);
        if let Some(leg) = leg {
            self.forget_kept(leg.key, request.id);
        }
        debug_assert!(leg.is_some_and(|leg| leg.finished), "a leg ends before its slot");
    }

    /// Ends legs that no decode worker has asked for within `patience`: the decode worker is dead,
    /// or its own leg never arrived.
    pub(super) fn abort_unclaimed_legs(&mut self, patience: Duration, cx: &mut Context<'_>) {
        let late = self.active.values().filter(|active| active.arrived + patience <= cx.now);
        for request in late.flat_map(|active| &active.legs) {
            let Some(leg) = self.legs.get_mut(request) else { continue };
            let is_held =
                matches!(leg.kind, LegKind::TokenAfterHandover | LegKind::TokenBeforeHandover)
                    && !leg.finished
                    && !leg.given_up;
            if is_held && !cx.handoff.has_destination_request(leg.worker, leg.slot) {
                leg.given_up = true;
                cx.handoff.worker_mut(leg.worker).abort(leg.slot, Cause::PeerLost);
            }
        }
    }

    /// Gives a request to its worker.
    pub(super) fn start_leg(
        &mut self,
        leg: NewLeg<'_>,
        request: Box<EngineRequest>,
        cx: &mut Context<'_>,
    ) {
        let NewLeg { key, choice, kind, source, partner } = leg;
        let slot = Slot { id: request.slot, generation: request.generation };
        let (id, worker, room) = (request.id, request.worker, request.room);
        let has_slot = cx.handoff.worker(worker).slot_request(slot).is_some();
        debug_assert!(has_slot, "a leg starts in a slot that was taken for it");
        let before = self.legs.insert(
            id,
            ActiveLeg {
                key,
                choice,
                kind,
                worker,
                slot,
                room,
                partner,
                finished: false,
                hands_over: source.is_some() || kind != LegKind::Visible,
                stopped: false,
                given_up: false,
                last_token: None,
                held: None,
            },
        );
        debug_assert!(before.is_none(), "an id names one leg");
        debug_assert!(self.active.contains_key(&key), "a leg starts for an active request");
        if let Some(active) = self.active.get_mut(&key) {
            active.legs.push(id);
        }
        let (worker, room) = (request.worker, request.room);
        let slot = Slot { id: request.slot, generation: request.generation };
        cx.handoff.worker_mut(worker).engine.send(EngineCommand::Submit(request));
        cx.handoff.enter(worker, slot, room, source, cx.now);
    }

    /// Handles the token of a prefill leg that has its decode leg in this process.
    fn ahead(&mut self, leg: &ActiveLeg, sampled: &Sampled, cx: &mut Context<'_>) {
        let Placement::Split { first_token: FirstToken::Prefill, .. } = self.config.placement
        else {
            return;
        };
        let Some(active) = self.active.get_mut(&leg.key) else { return };
        let is_stream = active.response.as_ref().is_some_and(ResponseBuilder::is_stream);
        if is_stream && active.first_tokens[leg.choice] == FirstTokenState::Pending {
            active.first_tokens[leg.choice] = FirstTokenState::SentByPrefill(sampled.token);
            self.push_token(leg, sampled, cx);
        }
    }

    /// Handles a token of a visible leg. Prefill can have sent the first token already.
    fn push_visible_token(&mut self, leg: &ActiveLeg, sampled: &Sampled, cx: &mut Context<'_>) {
        let Some(active) = self.active.get_mut(&leg.key) else { return };
        match std::mem::replace(&mut active.first_tokens[leg.choice], FirstTokenState::SentByDecode)
        {
            FirstTokenState::Pending | FirstTokenState::SentByDecode => {
                self.push_token(leg, sampled, cx)
            }
            FirstTokenState::SentByPrefill(token) if token == sampled.token => {}
            FirstTokenState::SentByPrefill(_) => {
                let cause = Cause::Mismatch;
                self.fail_request(leg.key, &error_of(cause), cause, cx);
            }
        }
    }

    pub(super) fn push_token(&mut self, leg: &ActiveLeg, sampled: &Sampled, cx: &mut Context<'_>) {
        let Some(active) = self.active.get_mut(&leg.key) else { return };
        let Some(response) = active.response.as_mut() else { return };
        let mut out = Vec::new();
        let outcome = response.push_token(leg.choice, sampled, &self.text.tokenizer, &mut out);
        active.count_tokens(cx);
        let PushOutcome::Stop(finish) = outcome else { return active.stream(&out, cx) };
        for id in &active.legs {
            if let Some(of_choice) = self.legs.get_mut(id).filter(|one| one.choice == leg.choice) {
                of_choice.stopped = true;
            }
        }
        self.end_timing(leg, cx);
        let Some(active) = self.active.get_mut(&leg.key) else { return };
        let cached = active.timings[leg.choice].cached();
        let wants_timings = active.request.return_timings;
        let timings = wants_timings.then(|| self.timings(leg, cx.handoff));
        let Some(active) = self.active.get_mut(&leg.key) else { return };
        let Some(response) = active.response.as_mut() else { return };
        response.stop_choice(leg.choice, finish, cached, timings.as_ref(), &mut out);
        active.stream(&out, cx);
        match leg.kind {
            // Decode takes the KV. Its leg ends at the same token, and this leg ends when the KV
            // arrives.
            LegKind::TokenBeforeHandover => return,
            LegKind::KvKept => {}
            LegKind::Visible | LegKind::Prefill | LegKind::TokenAfterHandover => {
                cx.handoff.worker_mut(leg.worker).abort(leg.slot, Cause::ClientGone);
                self.end_partner(leg, Cause::ClientGone, cx);
            }
        }
        self.close_if_over(leg.key, cx);
    }

    pub(super) fn handle_finished(
        &mut self,
        request: RequestId,
        outcome: FinishReason,
        stamps: &Stamps,
        cached: u32,
        cx: &mut Context<'_>,
    ) {
        let Some(leg) = self.legs.get_mut(&request) else { return };
        let was_finished = std::mem::replace(&mut leg.finished, true);
        debug_assert!(!was_finished, "a leg ends once");
        let leg = *leg;
        let failure = match outcome {
            FinishReason::Failed(cause) => Some(cause),
            _ => None,
        };
        self.count(&leg, outcome, stamps);
        cx.handoff.handle_finished(leg.worker, leg.slot, failure, cx.now);
        let Some(active) = self.active.get_mut(&leg.key) else { return };
        let times = &mut active.timings[leg.choice];
        match leg.kind {
            LegKind::Prefill => times.prefill = Some(*stamps),
            LegKind::Visible
            | LegKind::TokenAfterHandover
            | LegKind::TokenBeforeHandover
            | LegKind::KvKept => times.decode = Some(*stamps),
        }
        if let (Some(sampled), None) = (leg.held, failure) {
            self.push_token(&leg, &sampled, cx);
        }
        let Some(active) = self.active.get_mut(&leg.key) else { return };
        match (leg.kind, failure) {
            (LegKind::Prefill, None) => {}
            // Before the answer begins, a failure of prefill also ends decode. After that, decode
            // detects the failure itself.
            (LegKind::Prefill, Some(cause)) => {
                if !active.begun
                    || matches!(active.first_tokens[leg.choice], FirstTokenState::SentByPrefill(_))
                {
                    self.end_partner(&leg, cause, cx);
                }
            }
            (
                LegKind::Visible
                | LegKind::TokenAfterHandover
                | LegKind::TokenBeforeHandover
                | LegKind::KvKept,
                None,
            ) => {
                self.end_choice(&leg, outcome, cached, cx);
            }
            (
                LegKind::Visible
                | LegKind::TokenAfterHandover
                | LegKind::TokenBeforeHandover
                | LegKind::KvKept,
                Some(cause),
            ) => {
                self.end_partner(&leg, cause, cx);
                let ended = self
                    .active
                    .get(&leg.key)
                    .is_some_and(|active| active.timings[leg.choice].ended.is_some());
                // This worker aborts a choice that ended at a stop string. That is no failure.
                if !ended && !self.awaits_prefill_reply(leg.key, cause, cx.now) {
                    self.fail_request(leg.key, &error_of(cause), cause, cx);
                }
            }
        }
    }

    pub(super) fn end_choice(
        &mut self,
        leg: &ActiveLeg,
        outcome: FinishReason,
        cached: u32,
        cx: &mut Context<'_>,
    ) {
        self.end_timing(leg, cx);
        let Some(active) = self.active.get(&leg.key) else { return };
        let timings = active.request.return_timings.then(|| self.timings(leg, cx.handoff));
        let Some(active) = self.active.get_mut(&leg.key) else { return };
        let Some(response) = active.response.as_mut() else { return };
        let mut out = Vec::new();
        response.finish_choice(leg.choice, outcome, cached, timings.as_ref(), &mut out);
        active.stream(&out, cx);
        self.close_if_over(leg.key, cx);
    }

    fn end_partner(&mut self, leg: &ActiveLeg, cause: Cause, cx: &mut Context<'_>) {
        let partner = leg.partner.and_then(|partner| self.legs.get(&partner)).copied();
        if let Some(partner) = partner.filter(|partner| !partner.finished) {
            cx.handoff.worker_mut(partner.worker).abort(partner.slot, cause);
        }
    }
}

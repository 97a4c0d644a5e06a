//! Logprobs of prompts: memory for them, and the way from the worker that computes a prompt to the
//! answer.
//!
//! The engine sends them with the first token. If another worker generates, they go to it over the
//! control link, and the events of its leg wait for them. Thread: `ctl`. Invariant: an event of a
//! choice that waits is neither lost nor handled out of order. Not here: the computation
//! (`sched::chunks`), the form in the answer (`api::render`).

use super::active_request::PromptLogprobsState;
use super::legs::{ActiveLeg, LegKind};
use super::placement::ChoicePlace;
use super::{Context, RequestTable, error_of};
use crate::api::ApiError;
use crate::cause::Cause;
use crate::ids::{RequestKey, WorkerId};
use crate::limits::{PROMPT_LOGPROBS_BYTES_MAX, PROMPT_LOGPROBS_WAIT};
use crate::model::logprobs::PromptLogprobs;
use crate::sched::messages::{FinishReason, RequestEvent};
use crate::stdx::failpoint::is_failpoint_active;
use crate::transfer::manager::rooms::Slot;
use crate::transfer::manager::source::HeldRecord;
use std::time::Instant;

impl RequestTable {
    /// Lets the events of the leg that generates wait for the logprobs of the prompt, if they are
    /// `wanted`: another leg computes them.
    pub(super) fn await_prompt_logprobs(&mut self, place: ChoicePlace<'_>, wanted: bool) {
        if let Some(active) = self.active.get_mut(&place.key).filter(|_| wanted) {
            active.prompt_logprobs[place.choice] = PromptLogprobsState::Awaited(Vec::new());
        }
    }

    /// Takes the memory for the logprobs of a prompt, if they are wanted.
    ///
    /// # Errors
    /// Other requests have the memory.
    pub(super) fn reserve_prompt_logprobs(
        &mut self,
        place: ChoicePlace<'_>,
    ) -> Result<Option<Box<PromptLogprobs>>, ApiError> {
        let Some(active) = self.active.get_mut(&place.key) else { return Ok(None) };
        let Some(wanted) = active.request.prompt_logprobs else { return Ok(None) };
        let mut resumed = place.input.resumed;
        if is_failpoint_active("resumed tokens are scored") {
            resumed = 0;
        }
        let positions = wanted.positions(place.input.ids.len() as u32 - resumed);
        let bytes = PromptLogprobs::bytes_for(positions.len(), wanted.top);
        debug_assert!(bytes <= PROMPT_LOGPROBS_BYTES_MAX, "a request was checked before");
        let busy = || ApiError::busy("too many logprobs of prompts are computed; try again later");
        active.memory.push(self.prompt_logprobs.take(bytes).ok_or_else(busy)?);
        Ok(Some(Box::new(PromptLogprobs::new(positions, wanted.top))))
    }

    /// Takes an engine's event about a request.
    pub fn handle_event(&mut self, event: RequestEvent, cx: &mut Context<'_>) {
        if let Some(event) = self.hold_back(event, cx) {
            self.apply_event(event, cx);
        }
    }

    /// Keeps an event back if the answer must have the logprobs of the prompt before it. Returns an
    /// event that can be handled now.
    fn hold_back(&mut self, event: RequestEvent, cx: &mut Context<'_>) -> Option<RequestEvent> {
        let request = match &event {
            RequestEvent::Token { request, .. } | RequestEvent::Finished { request, .. } => request,
            RequestEvent::Released(request) => &request.id,
            RequestEvent::Flushed { .. } => return Some(event),
        };
        let leg = self.legs.get(request).filter(|leg| leg.kind == LegKind::Visible);
        let Some(leg) = leg else { return Some(event) };
        let Some(active) = self.active.get_mut(&leg.key) else { return Some(event) };
        let until = (cx.now + PROMPT_LOGPROBS_WAIT).min(active.arrived + active.request.patience);
        let state = &mut active.prompt_logprobs[leg.choice];
        let PromptLogprobsState::Awaited(held) = state else { return Some(event) };
        if is_failpoint_active("events do not wait for logprobs") {
            return Some(event);
        }
        if matches!(event, RequestEvent::Finished { outcome: FinishReason::Failed(_), .. }) {
            // Its tokens are of no use without the logprobs.
            *state = PromptLogprobsState::Settled;
            return Some(event);
        }
        if held.is_empty() {
            self.prompt_logprobs_due.push((until, leg.key, leg.choice));
        }
        held.push(event);
        None
    }

    /// Takes the logprobs that an engine of this process has computed for a leg.
    pub(super) fn handle_prompt_logprobs(
        &mut self,
        leg: &ActiveLeg,
        logprobs: &PromptLogprobs,
        cx: &mut Context<'_>,
    ) {
        // The first chunk of a stream has them, also if the prefill worker sends it.
        if matches!(leg.kind, LegKind::Visible | LegKind::Prefill | LegKind::TokenBeforeHandover) {
            self.settle(leg.key, leg.choice, logprobs, cx);
        }
        if !matches!(leg.kind, LegKind::Visible | LegKind::Prefill) {
            let bytes = logprobs.to_bytes();
            // Kept KV stays longer than its request, and so can the record.
            let active = self.active.get_mut(&leg.key).filter(|_| leg.kind == LegKind::KvKept);
            let memory = active.and_then(|active| active.memory.pop());
            let record = HeldRecord { bytes, memory };
            cx.handoff.send_record(leg.worker, leg.slot, record, cx.now);
        }
    }

    /// Takes the logprobs that prefill workers have sent, and ends requests that wait too long for
    /// them.
    pub(super) fn take_prompt_records(&mut self, cx: &mut Context<'_>) {
        while let Some((worker, slot, bytes)) = cx.handoff.poll_record() {
            self.handle_prompt_record(worker, slot, &bytes, cx);
        }
        let is_due = |(until, ..): &mut (Instant, RequestKey, usize)| *until <= cx.now;
        let due: Vec<_> = self.prompt_logprobs_due.extract_if(.., is_due).collect();
        for (_, key, choice) in due {
            let Some(active) = self.active.get(&key) else { continue };
            if active.prompt_logprobs[choice].holds_events() {
                let is_late = active.arrived + active.request.patience <= cx.now;
                let cause = if is_late { Cause::Deadline } else { Cause::PeerLost };
                self.fail_request(key, &error_of(cause), cause, cx);
            }
        }
    }

    fn handle_prompt_record(
        &mut self,
        worker: WorkerId,
        slot: Slot,
        bytes: &[u8],
        cx: &mut Context<'_>,
    ) {
        let mut legs = self.legs.values();
        let leg = legs.find(|leg| leg.worker == worker && leg.slot == slot).copied();
        let Some(ActiveLeg { key, choice, .. }) = leg else { return };
        let Some(active) = self.active.get(&key) else { return };
        let waits = matches!(active.prompt_logprobs[choice], PromptLogprobsState::Awaited(_));
        let (Some(wanted), true) = (active.request.prompt_logprobs, waits) else { return };
        let Some(response) = &active.response else { return };
        let positions = wanted.positions(response.prompt(choice).len() as u32);
        match PromptLogprobs::from_bytes(positions, wanted.top, bytes) {
            Some(logprobs) => self.settle(key, choice, &logprobs, cx),
            None => self.fail_request(key, &error_of(Cause::Mismatch), Cause::Mismatch, cx),
        }
    }

    /// Puts the logprobs of a prompt into the answer. Then handles the events that waited for them.
    fn settle(
        &mut self,
        key: RequestKey,
        choice: usize,
        logprobs: &PromptLogprobs,
        cx: &mut Context<'_>,
    ) {
        let Some(active) = self.active.get_mut(&key) else { return };
        if let (Some(response), Some(wanted)) =
            (active.response.as_mut(), active.request.prompt_logprobs)
        {
            response.set_prompt_logprobs(choice, wanted.start, logprobs, &self.text.tokenizer);
        }
        let state = std::mem::take(&mut active.prompt_logprobs[choice]);
        self.release_events([state], cx);
    }

    /// Handles the events that waited. In a request that is over, they end its legs.
    pub(super) fn release_events(
        &mut self,
        states: impl IntoIterator<Item = PromptLogprobsState>,
        cx: &mut Context<'_>,
    ) {
        for state in states {
            if let PromptLogprobsState::Awaited(held) = state {
                held.into_iter().for_each(|event| self.apply_event(event, cx));
            }
        }
    }
}

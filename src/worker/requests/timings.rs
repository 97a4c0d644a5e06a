//! Metrics and timings of choices: their times and their ends, for `/metrics` and for `timings` in
//! answers.
//!
//! Thread: `ctl`. Not here: the arithmetic on time stamps (`worker::stages`).

use super::{ActiveLeg, ActiveRequest, Context, LegKind, RequestTable};
use crate::api::render::Timings;
use crate::cause::Cause;
use crate::link::handoff::Handoff;
use crate::sched::messages::EngineCommand;
use crate::sched::messages::FinishReason;
use crate::sched::request::Stamps;
use crate::wire::message::Transport;
use crate::worker::metrics::WorkerMetrics;

impl RequestTable {
    /// Counts the end of a leg for `/metrics`.
    pub(super) fn count(&self, leg: &ActiveLeg, outcome: FinishReason, stamps: &Stamps) {
        let metrics = &self.metrics[leg.worker.index()];
        match outcome {
            FinishReason::Stop => metrics.finished_stop.inc(),
            // The stop string aborted the leg, or the leg generated all its tokens before the abort
            // arrived.
            FinishReason::Length | FinishReason::Failed(_) if leg.stopped => {
                metrics.finished_stop.inc();
            }
            FinishReason::Length | FinishReason::HandedOver => metrics.finished_length.inc(),
            FinishReason::Failed(cause) => {
                metrics.failed(cause);
                let is_of_client = matches!(cause, Cause::ClientGone | Cause::Aborted);
                if leg.hands_over && !is_of_client {
                    count_handoff_failure(leg, stamps, metrics);
                }
            }
        }
    }

    /// Records the times of a choice when its answer is complete, once.
    pub(super) fn end_timing(&mut self, leg: &ActiveLeg, cx: &Context<'_>) {
        let Some(active) = self.active.get_mut(&leg.key) else { return };
        let ended = &mut active.timings[leg.choice].ended;
        if ended.is_none() {
            *ended = Some(cx.now);
            self.record(leg, cx);
        }
    }

    fn record(&mut self, leg: &ActiveLeg, cx: &Context<'_>) {
        let Some(active) = self.active.get(&leg.key) else { return };
        let metrics = &self.metrics[leg.worker.index()];
        metrics.ended(cx.now.saturating_duration_since(active.arrived));
        let times = &active.timings[leg.choice];
        if let Some(stages) = times.stages() {
            metrics.first_token(&stages);
            if let Some(recorded) = &mut self.stages {
                recorded.push((leg.key, leg.choice, stages));
            }
            match carried(leg, cx.handoff) {
                Some((bytes, transport))
                    if times.were_handed_over() && transport != Transport::Fake =>
                {
                    metrics.transferred(bytes, stages.handover);
                }
                _ => {}
            }
        }
    }

    pub(super) fn first_timings(
        &self,
        active: &ActiveRequest,
        handoff: &Handoff<EngineCommand>,
    ) -> Timings {
        let first = active
            .legs
            .iter()
            .filter_map(|leg| self.legs.get(leg))
            .find(|leg| leg.kind != LegKind::Prefill);
        first.map(|leg| self.timings(leg, handoff)).unwrap_or_default()
    }

    /// The timings of a choice, from the time stamps of its legs.
    pub(super) fn timings(&self, leg: &ActiveLeg, handoff: &Handoff<EngineCommand>) -> Timings {
        let Some(active) = self.active.get(&leg.key) else { return Timings::default() };
        let prompt = prompt_tokens(leg, handoff);
        let generated =
            active.response.as_ref().map_or(0, |response| response.generated(leg.choice));
        active.timings[leg.choice].timings((prompt, generated), carried(leg, handoff))
    }
}

/// Counts a failed hand-off. SGLang has one counter for failures before the KV could move, and one
/// for failures after that. On prefill, the KV can move when the destination is known; on decode,
/// when its pages are allocated. A decode leg that has its KV did not fail in the hand-off.
fn count_handoff_failure(leg: &ActiveLeg, stamps: &Stamps, metrics: &WorkerMetrics) {
    let begun = match leg.kind {
        LegKind::Visible if stamps.filled.is_some() => return,
        LegKind::Visible => stamps.admitted,
        LegKind::Prefill
        | LegKind::TokenAfterHandover
        | LegKind::TokenBeforeHandover
        | LegKind::KvKept => stamps.bootstrapped,
    };
    match begun {
        Some(_) => metrics.transfer_failures.inc(),
        None => metrics.bootstrap_failures.inc(),
    }
}

/// Bytes of KV that a decode leg received, and the transport.
fn carried(leg: &ActiveLeg, handoff: &Handoff<EngineCommand>) -> Option<(u64, Transport)> {
    let worker = handoff.worker(leg.worker);
    let slot_request = worker.slot_request(leg.slot)?;
    let (layout, tokens) = (worker.layout(), slot_request.prompt.tokens);
    let pages = worker.groups().crossing_pages(tokens, slot_request.prefix, layout.page_size);
    Some((pages * layout.page_bytes(), slot_request.transport?))
}

fn prompt_tokens(leg: &ActiveLeg, handoff: &Handoff<EngineCommand>) -> u32 {
    handoff
        .worker(leg.worker)
        .slot_request(leg.slot)
        .map_or(0, |slot_request| slot_request.prompt.tokens)
}

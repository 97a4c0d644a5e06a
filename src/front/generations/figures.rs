//! Where the time of choices went, and how they ended: for `/metrics` and for `timings` in answers.

use super::{Generations, Leg, Live, Part};
use crate::front::openai::render::Timings;
use crate::sched::mailbox::Outcome;
use crate::wire::message::Transport;
use std::time::Instant;

impl Generations {
    /// What `/metrics` says of a leg's end.
    pub(super) fn count(&self, leg: &Leg, outcome: Outcome) {
        let metrics = &self.metrics[leg.worker.index()];
        match outcome {
            Outcome::Stop => metrics.finished_stop.inc(),
            Outcome::Length | Outcome::HandedOver => metrics.finished_length.inc(),
            Outcome::Failed(cause) => {
                let ended = self.live.get(&leg.exchange);
                // A choice that a stop string ended was told to stop; that is no failure.
                match ended.is_some_and(|live| live.timings[leg.choice].ended.is_some()) {
                    true => metrics.finished_stop.inc(),
                    false => metrics.failed(cause),
                }
            }
        }
    }

    /// Records where the time of a choice went.
    pub(super) fn record(&self, leg: &Leg, now: Instant) {
        let Some(live) = self.live.get(&leg.exchange) else { return };
        let metrics = &self.metrics[leg.worker.index()];
        metrics.ended(now.saturating_duration_since(live.arrived));
        let times = &live.timings[leg.choice];
        if let Some(stages) = times.stages() {
            metrics.first_token(&stages);
            match self.carried(leg) {
                Some((bytes, transport))
                    if times.were_handed_over() && transport != Transport::Fake =>
                {
                    metrics.transferred(bytes, stages.handover);
                }
                _ => {}
            }
        }
    }

    /// Bytes of KV that came for a decode leg, and how.
    fn carried(&self, leg: &Leg) -> Option<(u64, Transport)> {
        let worker = self.handoff.worker(leg.worker);
        let tenant = worker.tenant(leg.slot)?;
        let layout = worker.layout();
        let pages = layout.pages_for(tenant.prompt.tokens) - tenant.prefix / layout.page_size;
        Some((u64::from(pages) * layout.page_bytes(), tenant.transport?))
    }

    pub(super) fn prompt_tokens(&self, leg: &Leg) -> u32 {
        self.handoff.worker(leg.worker).tenant(leg.slot).map_or(0, |tenant| tenant.prompt.tokens)
    }

    pub(super) fn first_timings(&self, live: &Live) -> Timings {
        let first = live
            .legs
            .iter()
            .filter_map(|leg| self.legs.get(leg))
            .find(|leg| leg.part != Part::Prefill);
        first.map(|leg| self.timings(leg)).unwrap_or_default()
    }

    /// Where the time of a choice went, from the stamps of its legs.
    pub(super) fn timings(&self, leg: &Leg) -> Timings {
        let Some(live) = self.live.get(&leg.exchange) else { return Timings::default() };
        let prompt = self.prompt_tokens(leg);
        let generated = live.exchange.as_ref().map_or(0, |exchange| exchange.generated(leg.choice));
        live.timings[leg.choice].timings((prompt, generated), self.carried(leg))
    }
}

//! KV that a prefill worker keeps for decode: when its choice ends, and how it is given up.
//!
//! Thread: `ctl`. Not here: how long it is kept (`sched::prefill`), who may ask for it (`placing`).

use super::{Generations, Leg, Part, Way, error_of};
use crate::cause::Cause;
use crate::ids::{RequestId, Room};
use crate::sched::mailbox::Outcome;

impl Generations {
    /// The prompt of a leg is computed. Where its KV is kept the choice ends by that, and the leg works for nobody until
    /// decode claims it.
    pub(super) fn kept(&mut self, request: RequestId, cached: u32, way: &mut Way<'_>) {
        let Some(leg) = self.legs.get_mut(&request).filter(|leg| leg.part == Part::Kept) else {
            return;
        };
        // Whoever asks for it late is told that it is computed once more.
        let Some(sampled) = leg.held.take() else { return };
        let leg = *leg;
        self.token(&leg, &sampled, way);
        self.end_choice(&leg, Outcome::Length, cached, way);
    }

    /// Gives up what is kept from this room on for one request; how many requests those were.
    pub fn abort_kept(&mut self, room: Room, way: &mut Way<'_>) -> usize {
        let is_kept = |leg: &&Leg| leg.part == Part::Kept && !leg.finished;
        let Some(exchange) =
            self.legs.values().filter(is_kept).find(|leg| leg.room == room).map(|leg| leg.exchange)
        else {
            return 0;
        };
        if self.live.contains_key(&exchange) {
            self.fail(exchange, &error_of(Cause::Aborted), Cause::Aborted, way);
            return 1;
        }
        for leg in self.legs.values().filter(is_kept).filter(|leg| leg.exchange == exchange) {
            self.handoff.worker_mut(leg.worker).abort(leg.slot, Cause::Aborted);
        }
        1
    }

    /// Gives up all KV that is kept for decode and whose clients have their answers; of how many prompts.
    pub(super) fn drop_kept(&mut self) -> usize {
        let is_kept = |leg: &&Leg| {
            leg.part == Part::Kept && !leg.finished && !self.live.contains_key(&leg.exchange)
        };
        let kept: Vec<Leg> = self.legs.values().filter(is_kept).copied().collect();
        for leg in &kept {
            self.handoff.worker_mut(leg.worker).abort(leg.slot, Cause::Aborted);
        }
        kept.len()
    }
}

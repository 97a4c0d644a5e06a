//! KV that a prefill worker keeps for decode: the end of its choice, and the release of the KV.
//!
//! Thread: `ctl`. Not here: the time for which KV is kept (`sched::prefill`), the requests that
//! keep it (`placement`).

use super::active_request::ActiveRequest;
use super::{ActiveLeg, Context, LegKind, RequestKey, RequestTable, error_of};
use crate::cause::Cause;
use crate::ids::{RequestId, Room};
use crate::sched::messages::FinishReason;

/// A request that has its answer while its KV is kept for decode.
#[derive(Debug)]
pub(super) struct KeptRequest {
    id: String,
    rids: Vec<String>,
    /// Its legs that keep KV.
    pub(super) legs: Vec<RequestId>,
}

/// Whether `rid` names a request with this ID, or one of its names begins with it.
pub(super) fn is_named(rid: &str, id: &str, rids: &[String]) -> bool {
    id == rid || rids.iter().any(|own| own.starts_with(rid))
}

impl RequestTable {
    /// Keeps the names of a request that has its answer while its legs keep KV.
    pub(super) fn note_kept(&mut self, key: RequestKey, active: ActiveRequest) {
        let keeps = |id: &RequestId| {
            self.legs.get(id).is_some_and(|leg| leg.kind == LegKind::KvKept && !leg.finished)
        };
        let legs: Vec<RequestId> = active.legs.iter().copied().filter(keeps).collect();
        if !legs.is_empty() {
            let ActiveRequest { id, request, .. } = active;
            let before = self.kept.insert(key, KeptRequest { id, rids: request.rids, legs });
            debug_assert!(before.is_none(), "a request has its answer once");
        }
    }

    /// Forgets a leg that keeps no KV any more.
    pub(super) fn forget_kept(&mut self, key: RequestKey, leg: RequestId) {
        if let Some(kept) = self.kept.get_mut(&key) {
            kept.legs.retain(|&other| other != leg);
            if kept.legs.is_empty() {
                self.kept.remove(&key);
            }
        }
    }

    /// Releases the KV of the requests that `rid` names. They have their answers. Returns their
    /// number.
    pub(super) fn drop_named(&self, rid: &str, cx: &mut Context<'_>) -> usize {
        let keeps = |id: &RequestId| self.legs.get(id).filter(|leg| !leg.finished);
        let mut count = 0;
        for kept in self.kept.values().filter(|kept| is_named(rid, &kept.id, &kept.rids)) {
            let legs = || kept.legs.iter().filter_map(keeps);
            for leg in legs() {
                cx.handoff.worker_mut(leg.worker).abort(leg.slot, Cause::Aborted);
            }
            count += usize::from(legs().next().is_some());
        }
        count
    }

    /// The prompt of a leg is computed. If its KV is kept, ends the choice. The leg continues until
    /// decode claims the KV.
    pub fn end_kept_choice(&mut self, request: RequestId, cached: u32, cx: &mut Context<'_>) {
        let Some(leg) = self.legs.get_mut(&request).filter(|leg| leg.kind == LegKind::KvKept)
        else {
            return;
        };
        // After a late claim, the engine reports the prompt again. The token is already taken then.
        let Some(sampled) = leg.held.take() else { return };
        let leg = *leg;
        self.push_token(&leg, &sampled, cx);
        self.end_choice(&leg, FinishReason::Length, cached, cx);
    }

    /// Releases the kept KV of the request with this room. Returns the number of requests, 0 or 1.
    /// The request has another connection, so it can come later. It is refused then.
    pub fn abort_kept(&mut self, room: Room, cx: &mut Context<'_>) -> usize {
        let is_kept = |leg: &&ActiveLeg| leg.kind == LegKind::KvKept && !leg.finished;
        let Some(key) =
            self.legs.values().filter(is_kept).find(|leg| leg.room == room).map(|leg| leg.key)
        else {
            cx.handoff.refuse_room(room, cx.now);
            return 0;
        };
        if self.active.contains_key(&key) {
            self.fail_request(key, &error_of(Cause::Aborted), Cause::Aborted, cx);
            return 1;
        }
        for leg in self.legs.values().filter(is_kept).filter(|leg| leg.key == key) {
            cx.handoff.worker_mut(leg.worker).abort(leg.slot, Cause::Aborted);
        }
        1
    }

    /// Releases all kept KV of requests that are already answered. Returns the number of prompts.
    pub(super) fn drop_kept(&mut self, cx: &mut Context<'_>) -> usize {
        let is_kept = |leg: &&ActiveLeg| {
            leg.kind == LegKind::KvKept && !leg.finished && !self.active.contains_key(&leg.key)
        };
        let kept: Vec<ActiveLeg> = self.legs.values().filter(is_kept).copied().collect();
        for leg in &kept {
            cx.handoff.worker_mut(leg.worker).abort(leg.slot, Cause::Aborted);
        }
        kept.len()
    }
}

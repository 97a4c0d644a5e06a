//! Requests that give up their pages when the pool runs dry, and get new ones before any newcomer.
//!
//! Owns: the line of those that wait for pages again, the host tier where their KV is meanwhile. Thread: `engine`.
//! A request's KV goes to the tier, or is dropped and computed again, whichever foretells the shorter time; what of it
//! the prefix cache still has when its turn comes is taken from there in both cases.
//! Invariants: who has generated least goes first, and of those the one with the longest prompt, so that the least is done
//! twice; who was retracted first comes back first, if it fits; what it generated is the same as without.
//! Not here: when it fits (`admission`), computing what was dropped (`chunks`).

use crate::ids::SlotId;
use crate::kv::pool::PagePool;
use crate::kv::tier::{Stored, Tier};
use crate::limits::{PACE_COPIED_BYTES, PREFIX_LOOKUPS_PER_TURN};
use crate::sched::admission::Room;
use crate::sched::config::SchedConfig;
use crate::sched::line::Line;
use crate::sched::pace::Pace;
use crate::sched::request::Request;
use crate::sched::running::Running;
use crate::sched::slots::{Held, Slots};
use crate::sched::worker::KvMemory;
use crate::stdx::planted::is_planted;
use std::cmp::Reverse;
use std::time::{Duration, Instant};

/// Those that were retracted.
#[derive(Debug)]
pub struct Retraction {
    line: Line,
    tier: Tier,
    /// Bytes per second into the tier.
    copying: Pace,
}

/// Where a retracted request's KV is.
#[derive(Debug)]
pub enum Kept {
    /// In the tier.
    Stored(Stored),
    /// Nowhere, but for what the prefix cache has of it.
    Dropped,
}

impl Retraction {
    /// Nobody is. For a worker of `slots` slots.
    pub fn new(slots: usize, tier: Tier) -> Retraction {
        Retraction { line: Line::new(slots), tier, copying: Pace::new(PACE_COPIED_BYTES) }
    }

    /// Takes a request out of the batch, with its pages, if the next step would not find the pages that it needs: again,
    /// until it does. `recompute` says how long it would take to compute so many tokens, where that is known.
    pub fn make_room<S>(
        &mut self,
        running: &mut Running,
        slots: &mut Slots<S>,
        pool: &mut PagePool,
        kv: &KvMemory,
        recompute: impl Fn(u64) -> Option<Duration>,
        clock: &dyn Fn() -> Instant,
    ) -> Option<SlotId> {
        let counts = pool.counts();
        let missing = running.missing(slots, kv.layout.page_size);
        if missing <= counts.free + counts.cached || is_planted("no room is made") {
            return None;
        }
        let slot = victim(running.slots(), slots)?;
        running.leave(slot);
        self.retract(slot, &mut slots[slot], pool, kv, recompute, clock);
        Some(slot)
    }

    fn retract<S>(
        &mut self,
        slot: SlotId,
        held: &mut Held<S>,
        pool: &mut PagePool,
        kv: &KvMemory,
        recompute: impl Fn(u64) -> Option<Duration>,
        clock: &dyn Fn() -> Instant,
    ) {
        held.keep(pool);
        let tokens = held.in_place();
        let pages = kv.layout.pages_for(tokens) as usize;
        let bytes = (pages * self.tier.page_bytes()) as f64;
        let begin = clock();
        let stored = if pays_to_copy(self.copying.estimate(bytes), recompute(tokens.into())) {
            self.tier.store(&kv.region, &held.request.pages[..pages])
        } else {
            None
        };
        if stored.is_some() {
            self.copying.measure(bytes, clock().saturating_duration_since(begin));
        }
        held.give_up_pages(stored.map_or(Kept::Dropped, Kept::Stored), pool);
        self.line.join(slot);
    }

    /// Gives the first that fits its pages again. Its KV is in place, or what the prefix cache has of it, and the rest is
    /// to be computed.
    pub fn resume<S>(
        &mut self,
        slots: &mut Slots<S>,
        room: &Room,
        config: &SchedConfig,
        pool: &mut PagePool,
        kv: &KvMemory,
    ) -> Option<SlotId> {
        let mut lookups = PREFIX_LOOKUPS_PER_TURN;
        let slot = self.line.next(|slot| slots[slot].fits(config, room, pool, &mut lookups))?;
        let held = &mut slots[slot];
        let (cached, _) = held.take_pages(config, pool);
        held.computed = cached;
        if let Some(Kept::Stored(stored)) = held.retracted.take() {
            let skipped = (cached / config.page_size) as usize;
            let skipped =
                skipped + usize::from(is_planted("the first page of retracted KV is lost"));
            self.tier.restore(stored, &kv.region, &held.request.pages, skipped);
            held.computed = held.fill;
        }
        Some(slot)
    }

    /// A request is over, retracted or not.
    pub fn leave<S>(&mut self, slot: SlotId, held: &mut Held<S>) {
        if let Some(kept) = held.retracted.take() {
            self.line.leave(slot);
            if let Kept::Stored(stored) = kept {
                self.tier.forget(stored);
            }
        }
    }

    /// Whether nobody waits for pages again.
    pub fn is_empty(&self) -> bool {
        self.line.is_empty()
    }

    /// Pages of the tier that hold KV.
    pub fn stored(&self) -> u32 {
        self.tier.stored()
    }
}

/// Of those that run, whom it costs least to retract.
fn victim<S>(running: &[SlotId], slots: &Slots<S>) -> Option<SlotId> {
    let cost = |request: &Request| (request.output.len(), Reverse(request.prompt.len()));
    running.iter().copied().min_by_key(|&slot| cost(&slots[slot].request))
}

/// Out and in again, or once more through the model. What is not known yet is found out by copying.
fn pays_to_copy(copy: Option<Duration>, recompute: Option<Duration>) -> bool {
    match (copy, recompute) {
        (Some(copy), Some(recompute)) => 2 * copy <= recompute,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_less_is_done() {
        let ms = |ms| Some(Duration::from_millis(ms));
        assert!(pays_to_copy(ms(5), ms(10)) && !pays_to_copy(ms(6), ms(10)));
        assert!(pays_to_copy(None, ms(1)) && pays_to_copy(ms(1), None));
    }
}

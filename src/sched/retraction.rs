//! Retraction: requests give up their pages if the pool runs empty. They get new pages before any
//! new request.
//!
//! Owns: the queue of retracted requests, the host tier with their KV.
//! Thread: `engine`.
//! Invariants: KV goes to the tier, or is dropped and recomputed; the faster of the two by estimate
//! is chosen. Pages that are still in the prefix cache are reused in both cases. The request with
//! the lowest priority is retracted first; among equals the one with the fewest generated tokens,
//! and then the one with the longest prompt.
//! Retracted requests resume in order, if they fit. Retraction does not change the output.
//! Not here: whether a request fits (`admission`), recomputing dropped KV (`chunks`).

use crate::ids::SlotId;
use crate::kv::pool::PagePool;
use crate::kv::tier::Tier;
use crate::limits::{PACE_COPIED_BYTES, PREFIX_LOOKUPS_PER_TURN};
use crate::sched::admission::PageBudget;
use crate::sched::config::SchedConfig;
use crate::sched::request::EngineRequest;
use crate::sched::running_batch::Running;
use crate::sched::slots::{RetractedKv, SlotEntry, Slots};
use crate::sched::throughput::Throughput;
use crate::sched::wait_queue::WaitQueue;
use crate::sched::worker::KvMemory;
use crate::stdx::failpoint::is_failpoint_active;
use std::cmp::Reverse;
use std::time::{Duration, Instant};

/// The retracted requests.
#[derive(Debug)]
pub struct Retraction {
    line: WaitQueue,
    tier: Tier,
    /// Bytes per second into the tier.
    copying: Throughput,
}

impl Retraction {
    /// An empty queue for a worker with `slots` slots.
    pub fn new(slots: usize, tier: Tier) -> Retraction {
        Retraction {
            line: WaitQueue::new(slots),
            tier,
            copying: Throughput::new(PACE_COPIED_BYTES),
        }
    }

    /// Retracts one request from the batch if the pool lacks pages for the next step. Call it until
    /// it returns `None`. `recompute` estimates the time to compute a number of tokens, if known.
    pub fn retract_one<S>(
        &mut self,
        running: &mut Running,
        slots: &mut Slots<S>,
        pool: &mut PagePool,
        kv: &KvMemory,
        recompute: impl Fn(u64) -> Option<Duration>,
        clock: &dyn Fn() -> Instant,
    ) -> Option<SlotId> {
        let counts = pool.counts();
        let missing = running.missing(slots);
        if missing <= counts.free + counts.cached || is_failpoint_active("no room is made") {
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
        held: &mut SlotEntry<S>,
        pool: &mut PagePool,
        kv: &KvMemory,
        recompute: impl Fn(u64) -> Option<Duration>,
        clock: &dyn Fn() -> Instant,
    ) {
        held.keep(pool);
        let tokens = held.in_place();
        let pages = || {
            let written = held.request.pages.written(kv.layout.pages_for(tokens) as usize);
            written.map(|(_, page)| page)
        };
        let bytes = (pages().count() * self.tier.page_bytes()) as f64;
        let begin = clock();
        let stored = match pays_to_copy(self.copying.estimate(bytes), recompute(tokens.into())) {
            true => self.tier.store(&kv.region, pages()),
            false => None,
        };
        if stored.is_some() {
            self.copying.measure(bytes, clock().saturating_duration_since(begin));
        }
        held.give_up_pages(stored.map_or(RetractedKv::Dropped, RetractedKv::Stored), pool);
        self.line.push(slot, held.request.priority);
    }

    /// Gives pages to the first retracted request that fits. Afterwards all its KV is in place, or
    /// only the cached part, and the rest must be computed.
    pub fn resume<S>(
        &mut self,
        slots: &mut Slots<S>,
        room: &PageBudget,
        config: &SchedConfig,
        pool: &mut PagePool,
        kv: &KvMemory,
    ) -> Option<SlotId> {
        let mut lookups = PREFIX_LOOKUPS_PER_TURN;
        let slot =
            self.line.pop_fitting(|slot| slots[slot].fits(config, room, pool, &mut lookups))?;
        let held = &mut slots[slot];
        let (cached, _) = held.take_pages(config, room, pool);
        held.computed = cached;
        if let Some(RetractedKv::Stored(stored)) = held.retracted.take() {
            let cached = (cached / config.page_size) as usize;
            let written = held.request.pages.written(config.window().pages(held.fill) as usize);
            let pages = written.map(|(place, page)| (page, place < cached));
            self.tier.restore(stored, &kv.region, pages);
            held.computed = held.fill;
        }
        Some(slot)
    }

    /// Removes an ended request, whether it is retracted or not.
    pub fn leave<S>(&mut self, slot: SlotId, held: &mut SlotEntry<S>) {
        if let Some(kept) = held.retracted.take() {
            self.line.remove(slot);
            if let RetractedKv::Stored(stored) = kept {
                self.tier.forget(stored);
            }
        }
    }

    /// Whether no request waits for pages.
    pub fn is_empty(&self) -> bool {
        self.line.is_empty()
    }

    /// Pages of the tier that hold KV.
    pub fn stored(&self) -> u32 {
        self.tier.stored()
    }
}

/// The running request with the lowest cost of retraction.
fn victim<S>(running: &[SlotId], slots: &Slots<S>) -> Option<SlotId> {
    let cost = |request: &EngineRequest| {
        (Reverse(request.priority), request.output.len(), Reverse(request.prompt.len()))
    };
    running.iter().copied().min_by_key(|&slot| cost(&slots[slot].request))
}

/// Whether copying KV out and in is faster than recomputing it. If one of the times is unknown,
/// returns true: the copy then measures its own time.
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
    fn the_faster_of_copy_and_recomputation_is_chosen() {
        let ms = |ms| Some(Duration::from_millis(ms));
        assert!(pays_to_copy(ms(5), ms(10)) && !pays_to_copy(ms(6), ms(10)));
        assert!(pays_to_copy(None, ms(1)) && pays_to_copy(ms(1), None));
    }
}

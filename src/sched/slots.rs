//! The requests of a worker, by slot of its status table.
//!
//! Owns: the request boxes until they return to `ctl`. `S` is the worker's additional state of
//! each.

use crate::cause::Cause;
use crate::ids::{Generation, SlotId};
use crate::kv::pool::{PagePool, Reusable};
use crate::sched::admission::{self, Claim, PageBudget};
use crate::sched::channel::EngineChannel;
use crate::sched::config::SchedConfig;
use crate::sched::messages::{FinishReason, RequestEvent};
use crate::sched::request::EngineRequest;
use crate::sched::retraction::RetractedKv;
use crate::sched::worker::Activity;
use std::mem;
use std::ops::{Index, IndexMut, Range};

/// A request and its progress.
#[derive(Debug)]
pub struct SlotEntry<S> {
    /// The request.
    pub request: Box<EngineRequest>,
    /// Tokens with KV that a decode step needs: the prompt, or all but the last token at the time
    /// of retraction.
    pub fill: u32,
    /// Of `fill`, the tokens with KV in place on this worker.
    pub computed: u32,
    /// Prompt tokens that were not computed for it, here or at its prefill worker.
    pub cached: u32,
    /// Prompt tokens in the prefix cache when it began to wait.
    foreseen: u32,
    /// Number of its first pages that went through the prefix cache.
    kept: u32,
    /// Set while it has no pages because other requests needed them.
    pub retracted: Option<RetractedKv>,
    /// The worker's own state.
    pub state: S,
}

impl<S> SlotEntry<S> {
    /// Number of prompt tokens.
    pub fn prompt_tokens(&self) -> u32 {
        self.request.prompt.len() as u32
    }

    /// Whether it fits into `room`. If that depends on its cached prefix, the check takes one of
    /// `lookups`.
    pub fn fits(
        &self,
        config: &SchedConfig,
        room: &PageBudget,
        pool: &PagePool,
        lookups: &mut u32,
    ) -> bool {
        let need = Claim::of(config, &self.request).soon;
        if need <= room.pages {
            return true;
        }
        if *lookups == 0 || need - pool.most_reusable(self.reusable_tokens()) > room.pages {
            return false;
        }
        *lookups -= 1;
        admission::charge(need, self.reusable(pool)) <= room.pages
    }

    /// Most tokens that a cache can replace. The last token of a prompt is always computed, for its
    /// logits.
    fn reusable_tokens(&self) -> u32 {
        if self.request.output.is_empty() { self.fill.saturating_sub(1) } else { self.fill }
    }

    /// The part of `fill` that the prefix cache has.
    fn reusable(&self, pool: &PagePool) -> Reusable {
        let sequence = self.request.sequence();
        sequence.map_or(Reusable::default(), |it| pool.reusable(&it, self.reusable_tokens()))
    }

    /// Pages that it needs to begin, minus those in the prefix cache when it began to wait.
    fn unforeseen(&self, config: &SchedConfig) -> u32 {
        Claim::of(config, &self.request).soon - self.foreseen / config.page_size
    }

    /// Whether all KV for a decode step is in place.
    pub fn is_filled(&self) -> bool {
        self.computed == self.fill
    }

    /// Estimated tokens to compute before it can continue.
    pub fn uncomputed(&self) -> u32 {
        self.fill - self.computed.max(self.foreseen)
    }

    /// Tokens with KV in place. A token's KV is computed when the next token is chosen.
    pub fn in_place(&self) -> u32 {
        let tokens = (self.request.prompt.len() + self.request.output.len()) as u32;
        let read = !self.request.output.is_empty() && self.is_filled();
        if read { tokens - 1 } else { self.computed }
    }

    /// Looks up its cached prefix once, when it begins to wait.
    pub fn foresee(&mut self, pool: &PagePool, page_size: u32) {
        self.foreseen = self.reusable(pool).pages * page_size;
    }

    /// Tokens of whole pages that both prompts share and that this request computes now at these
    /// positions. One pass later `other` can take them from the prefix cache.
    pub fn shares(&self, computed: &Range<u32>, other: &SlotEntry<S>, page_size: u32) -> u32 {
        let (Some(ours), Some(theirs)) = (self.request.sequence(), other.request.sequence()) else {
            return 0;
        };
        let start = computed.start as usize;
        let end =
            (computed.end as usize).min(ours.prompt.len()).min(other.reusable_tokens() as usize);
        if ours.salt != theirs.salt || start >= end.min(theirs.prompt.len()) {
            return 0;
        }
        let pairs = ours.prompt[start..end].iter().zip(&theirs.prompt[start..]);
        let alike = start + pairs.take_while(|(one, another)| one == another).count();
        let shared = alike - alike % page_size as usize;
        // Most prompts already differ here.
        match shared > start && ours.prompt[..start] == theirs.prompt[..start] {
            true => (shared - start) as u32,
            false => 0,
        }
    }

    /// Takes the pages for `fill`: the cached ones, then new ones. There must be room. Returns the
    /// cached tokens and the pages taken from the budget.
    pub fn take_pages(&mut self, config: &SchedConfig, pool: &mut PagePool) -> (u32, u32) {
        let before = pool.counts();
        let reusable = self.reusable_tokens();
        let mut pages = mem::take(&mut self.request.pages);
        if let Some(sequence) = self.request.sequence() {
            pool.reuse(&sequence, reusable, &mut pages);
            if self.request.output.is_empty() {
                pool.count_lookup(reusable, pages.len() as u32 * config.page_size);
            }
        }
        self.kept = pages.len() as u32;
        let missing = self.fill.div_ceil(config.page_size) - self.kept;
        assert!(
            pool.allocate(missing, &mut pages),
            "admitted {missing} pages that are neither free nor cached"
        );
        let after = pool.counts();
        let taken = (before.free + before.cached) - (after.free + after.cached);
        self.request.pages = pages;
        self.foreseen = 0;
        (self.kept * config.page_size, taken + Claim::of(config, &self.request).owed())
    }

    /// Gives up its pages. Afterwards `fill` is the KV that was in place.
    pub fn give_up_pages(&mut self, kept: RetractedKv, pool: &mut PagePool) {
        self.fill = self.in_place();
        (self.computed, self.kept) = (0, 0);
        self.retracted = Some(kept);
        pool.release(&self.request.pages);
        self.request.pages.clear();
    }

    /// Puts full pages into the prefix cache.
    pub fn keep(&mut self, pool: &mut PagePool) {
        let in_place = self.in_place();
        let mut pages = mem::take(&mut self.request.pages);
        if let Some(sequence) = self.request.sequence() {
            self.kept = pool.keep(&sequence, in_place, &mut pages, self.kept);
        }
        self.request.pages = pages;
    }

    /// Ends it for its client: sends Finished and releases its pages. A lease over them continues.
    pub fn finish(&mut self, outcome: FinishReason, pool: &mut PagePool, mail: &mut EngineChannel) {
        self.keep(pool);
        pool.release(&self.request.pages);
        mail.send_event(RequestEvent::Finished {
            request: self.request.id,
            outcome,
            stamps: self.request.stamps,
            cached_tokens: self.cached,
        });
    }
}

/// The mover's right to a request's pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LeaseState {
    /// Not granted yet.
    None,
    /// With the mover: the slot cannot be reused.
    Out,
    /// Ended.
    Back,
}

/// One entry per slot.
#[derive(Debug)]
pub struct Slots<S> {
    entries: Box<[Option<SlotEntry<S>>]>,
    /// Number of taken slots.
    taken: usize,
}

impl<S> Slots<S> {
    /// Makes empty slots.
    pub fn new(slots: usize) -> Slots<S> {
        Slots { entries: (0..slots).map(|_| None).collect(), taken: 0 }
    }

    /// Number of slots, empty or not.
    pub fn capacity(&self) -> usize {
        self.entries.len()
    }

    /// Puts a new request into its slot. Returns it if there is no such slot or the slot is taken.
    pub fn insert(
        &mut self,
        request: Box<EngineRequest>,
        state: S,
    ) -> Result<(), Box<EngineRequest>> {
        match self.entries.get_mut(request.slot.index()) {
            Some(entry @ None) => {
                let fill = request.prompt.len() as u32;
                let (computed, cached, foreseen, kept, retracted) = (0, 0, 0, 0, None);
                *entry = Some(SlotEntry {
                    request,
                    fill,
                    computed,
                    cached,
                    foreseen,
                    kept,
                    retracted,
                    state,
                });
                self.taken += 1;
                Ok(())
            }
            _ => Err(request),
        }
    }

    /// The request of exactly this use of the slot.
    pub fn named(&mut self, slot: SlotId, generation: Generation) -> Option<&mut SlotEntry<S>> {
        let held = self.entries.get_mut(slot.index())?.as_mut()?;
        (held.request.generation == generation).then_some(held)
    }

    /// Frees the slot of a finished request after its pages and lease are back. `ctl` can reuse it.
    pub fn let_go(&mut self, slot: SlotId, mail: &mut EngineChannel) {
        if let Some(mut held) = self.entries[slot.index()].take() {
            self.taken -= 1;
            held.request.pages.clear();
            mail.send_event(RequestEvent::Released(held.request));
        }
    }

    /// Whether too many of the waiting requests could not begin at once. A request can begin if its
    /// pages are in `room` and `takes_place` grants it a place.
    pub fn overflow(
        &self,
        config: &SchedConfig,
        mut room: PageBudget,
        waits: impl Fn(&SlotEntry<S>) -> bool,
        mut takes_place: impl FnMut(&SlotEntry<S>) -> bool,
    ) -> bool {
        // The common case needs no count.
        if self.taken <= config.max_queued {
            return false;
        }
        let waiting = || self.iter().filter(|held| waits(held));
        let surplus = waiting().count().saturating_sub(config.max_queued);
        let begins = |held: &&SlotEntry<S>| {
            let need = held.unforeseen(config);
            let begins = need <= room.pages && takes_place(held);
            room.take_pages(if begins { need } else { 0 });
            begins
        };
        waiting().filter(begins).take(surplus).count() < surplus
    }

    /// When to step again. `busy` says whether something was computed.
    pub fn activity(&self, busy: bool) -> Activity {
        match self.next_from(0) {
            _ if busy => Activity::Busy,
            Some(_) => Activity::Waiting,
            None => Activity::Idle,
        }
    }

    /// The first taken slot from `from` on. It lets a loop change entries.
    pub fn next_from(&self, from: u32) -> Option<SlotId> {
        (from as usize..self.entries.len())
            .find(|&index| self.entries[index].is_some())
            .map(|index| SlotId(index as u32))
    }

    /// All requests.
    pub fn iter(&self) -> impl Iterator<Item = &SlotEntry<S>> {
        self.entries.iter().flatten()
    }
}

impl<S> Index<SlotId> for Slots<S> {
    type Output = SlotEntry<S>;

    /// The slot must be taken.
    fn index(&self, slot: SlotId) -> &SlotEntry<S> {
        self.entries[slot.index()].as_ref().expect("the slot holds a request")
    }
}

impl<S> IndexMut<SlotId> for Slots<S> {
    fn index_mut(&mut self, slot: SlotId) -> &mut SlotEntry<S> {
        self.entries[slot.index()].as_mut().expect("the slot holds a request")
    }
}

/// Returns a request without a free slot at once; `ctl` has miscounted.
pub fn refuse(request: Box<EngineRequest>, mail: &mut EngineChannel) {
    debug_assert!(false, "request {} names slot {}, which is not free", request.id, request.slot);
    let outcome = FinishReason::Failed(Cause::Internal);
    mail.send_event(RequestEvent::Finished {
        request: request.id,
        outcome,
        stamps: request.stamps,
        cached_tokens: 0,
    });
    mail.send_event(RequestEvent::Released(request));
}

//! The requests a worker holds, by slot of its status table.
//!
//! Owns: the boxes until they go back to `ctl`. `S` is what the worker keeps of each besides.

use crate::cause::Cause;
use crate::ids::{Generation, SlotId};
use crate::kv::pool::{PagePool, Reusable};
use crate::sched::admission::{self, Claim, Room};
use crate::sched::config::SchedConfig;
use crate::sched::mail::Mail;
use crate::sched::mailbox::{Event, Outcome};
use crate::sched::request::Request;
use crate::sched::retraction::Kept;
use crate::sched::worker::Activity;
use std::mem;
use std::ops::{Index, IndexMut, Range};

/// A request and how far it is.
#[derive(Debug)]
pub struct Held<S> {
    /// The request.
    pub request: Box<Request>,
    /// Tokens whose KV must be in place before the next one can be chosen by a decode step: the prompt, or all but the
    /// last of what it had when it was retracted.
    pub fill: u32,
    /// Of them, those whose KV is in place on this worker.
    pub computed: u32,
    /// Prompt tokens that nobody computed for it, here or at its prefill worker.
    pub cached: u32,
    /// Prompt tokens that the prefix cache had when it began to wait.
    foreseen: u32,
    /// Of its pages, from the first on, those that went through the prefix cache.
    kept: u32,
    /// It has no pages, since others needed them.
    pub retracted: Option<Kept>,
    /// The worker's own.
    pub state: S,
}

impl<S> Held<S> {
    /// Prompt tokens.
    pub fn prompt_tokens(&self) -> u32 {
        self.request.prompt.len() as u32
    }

    /// Whether it fits into `room`. Takes one of `lookups` where it hangs on what the prefix cache has of it.
    pub fn fits(
        &self,
        config: &SchedConfig,
        room: &Room,
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

    /// Most tokens that a cache can stand for: a prompt's last one is computed, for its logits.
    fn reusable_tokens(&self) -> u32 {
        if self.request.output.is_empty() { self.fill.saturating_sub(1) } else { self.fill }
    }

    /// What the prefix cache has of what is to be in place.
    fn reusable(&self, pool: &PagePool) -> Reusable {
        let sequence = self.request.sequence();
        sequence.map_or(Reusable::default(), |it| pool.reusable(&it, self.reusable_tokens()))
    }

    /// Pages that it needs to begin, less those that the prefix cache had for it when it began to wait.
    fn unforeseen(&self, config: &SchedConfig) -> u32 {
        Claim::of(config, &self.request).soon - self.foreseen / config.page_size
    }

    /// Whether nothing is missing for a decode step.
    pub fn is_filled(&self) -> bool {
        self.computed == self.fill
    }

    /// Tokens that are to be computed before it can go on, as far as that is known.
    pub fn uncomputed(&self) -> u32 {
        self.fill - self.computed.max(self.foreseen)
    }

    /// Tokens whose KV is in place. A token's KV is computed when the next one is chosen.
    pub fn in_place(&self) -> u32 {
        let tokens = (self.request.prompt.len() + self.request.output.len()) as u32;
        let read = !self.request.output.is_empty() && self.is_filled();
        if read { tokens - 1 } else { self.computed }
    }

    /// It waits for its turn: looks once how much of its prompt need not be computed.
    pub fn foresee(&mut self, pool: &PagePool, page_size: u32) {
        self.foreseen = self.reusable(pool).pages * page_size;
    }

    /// Tokens of whole pages that both begin with and that are computed for this one now, at these positions: what the other
    /// would have from the prefix cache a pass later.
    pub fn shares(&self, computed: &Range<u32>, other: &Held<S>, page_size: u32) -> u32 {
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
        // As a rule they part here already.
        match shared > start && ours.prompt[..start] == theirs.prompt[..start] {
            true => (shared - start) as u32,
            false => 0,
        }
    }

    /// Takes the pages of what is to be in place, since there is room: those that the prefix cache has, and new ones
    /// behind them. How many tokens it has, and what it took of the room.
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

    /// Stops using its pages and is to have what was in place again.
    pub fn give_up_pages(&mut self, kept: Kept, pool: &mut PagePool) {
        self.fill = self.in_place();
        (self.computed, self.kept) = (0, 0);
        self.retracted = Some(kept);
        pool.release(&self.request.pages);
        self.request.pages.clear();
    }

    /// Pages that are full of KV go into the prefix cache.
    pub fn keep(&mut self, pool: &mut PagePool) {
        let in_place = self.in_place();
        let mut pages = mem::take(&mut self.request.pages);
        if let Some(sequence) = self.request.sequence() {
            self.kept = pool.keep(&sequence, in_place, &mut pages, self.kept);
        }
        self.request.pages = pages;
    }

    /// It is over for its client: tells so and stops using its pages. A lease over them goes on.
    pub fn finish(&mut self, outcome: Outcome, pool: &mut PagePool, mail: &mut Mail) {
        self.keep(pool);
        pool.release(&self.request.pages);
        mail.tell(Event::Finished {
            request: self.request.id,
            outcome,
            stamps: self.request.stamps,
            cached_tokens: self.cached,
        });
    }
}

/// The right of the mover over a request's pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LeaseState {
    /// Not given yet.
    None,
    /// With the mover: the slot cannot be given out anew.
    Out,
    /// Ended.
    Back,
}

/// One entry per slot.
#[derive(Debug)]
pub struct Slots<S> {
    entries: Box<[Option<Held<S>>]>,
    /// Those that are taken.
    taken: usize,
}

impl<S> Slots<S> {
    /// All empty.
    pub fn new(slots: usize) -> Slots<S> {
        Slots { entries: (0..slots).map(|_| None).collect(), taken: 0 }
    }

    /// Number of slots, empty or not.
    pub fn capacity(&self) -> usize {
        self.entries.len()
    }

    /// Puts a fresh request into its slot. Given back when there is no such slot or it is taken.
    pub fn insert(&mut self, request: Box<Request>, state: S) -> Result<(), Box<Request>> {
        match self.entries.get_mut(request.slot.index()) {
            Some(entry @ None) => {
                let fill = request.prompt.len() as u32;
                let (computed, cached, foreseen, kept, retracted) = (0, 0, 0, 0, None);
                *entry = Some(Held {
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
    pub fn named(&mut self, slot: SlotId, generation: Generation) -> Option<&mut Held<S>> {
        let held = self.entries.get_mut(slot.index())?.as_mut()?;
        (held.request.generation == generation).then_some(held)
    }

    /// Pages and lease of a finished request are back: `ctl` may give the slot out anew.
    pub fn let_go(&mut self, slot: SlotId, mail: &mut Mail) {
        if let Some(mut held) = self.entries[slot.index()].take() {
            self.taken -= 1;
            held.request.pages.clear();
            mail.tell(Event::Released(held.request));
        }
    }

    /// Whether more of those who wait than may do so could not begin at once: each that begins finds its pages in `room`,
    /// and a place by `takes_place`.
    pub fn overflow(
        &self,
        config: &SchedConfig,
        mut room: Room,
        waits: impl Fn(&Held<S>) -> bool,
        mut takes_place: impl FnMut(&Held<S>) -> bool,
    ) -> bool {
        // As a rule nobody is counted.
        if self.taken <= config.max_queued {
            return false;
        }
        let waiting = || self.iter().filter(|held| waits(held));
        let surplus = waiting().count().saturating_sub(config.max_queued);
        let begins = |held: &&Held<S>| {
            let need = held.unforeseen(config);
            let begins = need <= room.pages && takes_place(held);
            room.take(if begins { need } else { 0 });
            begins
        };
        waiting().filter(begins).take(surplus).count() < surplus
    }

    /// When to step again, where `busy` says whether something was computed.
    pub fn activity(&self, busy: bool) -> Activity {
        match self.next_from(0) {
            _ if busy => Activity::Busy,
            Some(_) => Activity::Waiting,
            None => Activity::Idle,
        }
    }

    /// The taken slot with the least number from `from` on; lets a loop change entries as it goes.
    pub fn next_from(&self, from: u32) -> Option<SlotId> {
        (from as usize..self.entries.len())
            .find(|&index| self.entries[index].is_some())
            .map(|index| SlotId(index as u32))
    }

    /// All requests.
    pub fn iter(&self) -> impl Iterator<Item = &Held<S>> {
        self.entries.iter().flatten()
    }
}

impl<S> Index<SlotId> for Slots<S> {
    type Output = Held<S>;

    /// Of a slot that the worker knows to be taken.
    fn index(&self, slot: SlotId) -> &Held<S> {
        self.entries[slot.index()].as_ref().expect("the slot holds a request")
    }
}

impl<S> IndexMut<SlotId> for Slots<S> {
    fn index_mut(&mut self, slot: SlotId) -> &mut Held<S> {
        self.entries[slot.index()].as_mut().expect("the slot holds a request")
    }
}

/// A request that names no free slot goes back at once; `ctl` has miscounted.
pub fn refuse(request: Box<Request>, mail: &mut Mail) {
    debug_assert!(false, "request {} names slot {}, which is not free", request.id, request.slot);
    let outcome = Outcome::Failed(Cause::Internal);
    mail.tell(Event::Finished {
        request: request.id,
        outcome,
        stamps: request.stamps,
        cached_tokens: 0,
    });
    mail.tell(Event::Released(request));
}

//! The requests of a worker, by slot of its status table.
//!
//! Owns: the request boxes until they return to `ctl`. `S` is the additional state that the worker
//! keeps for each request.

use crate::cause::Cause;
use crate::ids::{Generation, SlotId};
use crate::kv::page_key::PageKey;
use crate::kv::pool::{PagePool, Reusable};
use crate::kv::tier::Stored;
use crate::kv::window::{KvWindow, Reach};
use crate::sched::admission::{self, Claim, PageBudget};
use crate::sched::channel::EngineChannel;
use crate::sched::config::SchedConfig;
use crate::sched::messages::{FinishReason, RequestEvent};
use crate::sched::request::EngineRequest;
use crate::sched::worker::Activity;
use crate::stdx::failpoint::is_failpoint_active;
use std::mem;
use std::ops::{Index, IndexMut, Range};

/// The place of a retracted request's KV.
#[derive(Debug)]
pub enum RetractedKv {
    /// In the tier.
    Stored(Stored),
    /// Dropped, except for pages in the prefix cache.
    Dropped,
}

/// A request and its progress.
#[derive(Debug)]
pub struct SlotEntry<S> {
    /// The request.
    pub request: Box<EngineRequest>,
    /// Tokens that must have KV in place before a decode step: the prompt, or after a retraction
    /// all tokens except the last one.
    pub fill: u32,
    /// Tokens of `fill` with KV in place on this worker.
    pub computed: u32,
    /// Prompt tokens that were not computed for it, here or at its prefill worker.
    pub cached: u32,
    /// The KV of its prompt comes from a prefill worker.
    pub is_transferred: bool,
    /// Its pages of window groups from this one on stay until it ends.
    pub stay_from: u32,
    /// Prompt tokens in the prefix cache when it began to wait.
    foreseen: u32,
    /// Pages that it needed to begin, without those in the prefix cache, when it began to wait.
    foreseen_charge: Option<u32>,
    /// Number of its first pages that were taken from the prefix cache, were offered to it, or are
    /// never read.
    kept: u32,
    /// Numbers of pages behind which its chunks leave checkpoints of the state; 0: none.
    checkpoints: [u32; 2],
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

    /// Whether it fits into `room`. If that depends on its cached prefix, the check uses one of
    /// `lookups`.
    pub fn fits(
        &self,
        config: &SchedConfig,
        room: &PageBudget,
        pool: &PagePool,
        lookups: &mut u32,
    ) -> bool {
        let need = self.need(config);
        if need <= room.pages {
            return true;
        }
        let most = (config.groups.total() * self.reusable_keys(config, pool).len()) as u32;
        if *lookups == 0 || need.saturating_sub(most) > room.pages {
            return false;
        }
        *lookups -= 1;
        self.reusable_in(config, room, pool).is_some()
    }

    /// The part of `fill` that it takes from the prefix cache if it begins in `room`; `None`: it
    /// does not fit. It begins without a checkpoint that does not fit beside its own pages.
    fn reusable_in(
        &self,
        config: &SchedConfig,
        room: &PageBudget,
        pool: &PagePool,
    ) -> Option<Reusable> {
        let found = self.reusable(config, pool);
        let fits = |found: &Reusable| self.charge(config, found) <= room.pages;
        if fits(&found) {
            return Some(found);
        }
        Some(Reusable::default()).filter(|none| found.idle_state > 0 && fits(none))
    }

    /// Pages that it needs to begin or to continue, without those that it holds. The prefix cache
    /// can have a part of them.
    pub fn need(&self, config: &SchedConfig) -> u32 {
        let window_from = match self.reach(config) {
            Reach::From(first) => first,
            Reach::Back(_) => 0,
        };
        self.need_from(config, window_from)
    }

    /// The same if it reads no page of window groups before this one.
    fn need_from(&self, config: &SchedConfig, window_from: u32) -> u32 {
        let whole = config.window().pages(self.fill);
        let pages = config.groups.pages(whole, whole - window_from);
        pages.max(admission::pages_soon(config, &self.request))
    }

    /// Pages that it takes from a budget if the cache has these.
    fn charge(&self, config: &SchedConfig, reusable: &Reusable) -> u32 {
        let from = reusable.window_from;
        let gone = admission::pages_gone_soon(config, &self.request, from);
        admission::charge(self.need_from(config, from), reusable, gone)
    }

    /// The pages that a cache must have to be of use. If KV is copied here, the last window of
    /// `fill` is enough. If it is computed, the tokens behind the cached part see a window of it.
    fn reach(&self, config: &SchedConfig) -> Reach {
        let is_copied = match &self.retracted {
            Some(RetractedKv::Stored(_)) => true,
            Some(RetractedKv::Dropped) => false,
            None => self.is_transferred,
        };
        match is_copied {
            true => {
                let late = is_failpoint_active("window is copied from a page too late");
                Reach::From(config.window().pages_behind(self.fill) + u32::from(late))
            }
            false => Reach::Back(self.window(config)),
        }
    }

    /// Most tokens that a cache can replace. The last token of a prompt is always computed, for its
    /// logits. So is the last one of `fill` with recurrent state, which a chunk writes to the
    /// request's own pages.
    fn reusable_tokens(&self, config: &SchedConfig) -> u32 {
        match self.request.output.is_empty() || config.groups.state_pages > 0 {
            true => self.fill.saturating_sub(1),
            false => self.fill,
        }
    }

    /// The part of `fill` that the prefix cache has.
    fn reusable(&self, config: &SchedConfig, pool: &PagePool) -> Reusable {
        pool.reusable(self.reusable_keys(config, pool), config.groups, self.reach(config))
    }

    /// The keys of the pages that a cache can replace.
    fn reusable_keys(&self, config: &SchedConfig, pool: &PagePool) -> &[PageKey] {
        let keys = &self.request.keys;
        &keys[..pool.cacheable_pages(self.reusable_tokens(config)).min(keys.len())]
    }

    /// Computes the keys of its prompt's pages, before its first lookup. The keys of a long prompt
    /// take milliseconds, so a request that never fits is refused before.
    pub fn extend_prompt_keys(&mut self, pool: &PagePool) {
        self.extend_keys(pool, self.fill);
    }

    /// Computes the missing keys of the full pages of its first `tokens` tokens.
    fn extend_keys(&mut self, pool: &PagePool, tokens: u32) {
        // The ids are borrowed from the same request.
        let mut keys = mem::take(&mut self.request.keys);
        if let Some(sequence) = self.request.sequence() {
            pool.extend_keys(&sequence, tokens, &mut keys);
        }
        self.request.keys = keys;
    }

    /// Pages that it needs to begin, minus those in the prefix cache when it began to wait.
    fn unforeseen(&self, config: &SchedConfig) -> u32 {
        self.foreseen_charge.unwrap_or_else(|| self.need(config))
    }

    fn window(&self, config: &SchedConfig) -> KvWindow {
        config.window().staying_from(self.stay_from)
    }

    /// Whether all KV for a decode step is in place.
    pub fn is_filled(&self) -> bool {
        self.computed == self.fill
    }

    /// Estimated tokens to compute before it can continue.
    pub fn uncomputed(&self) -> u32 {
        self.fill - self.computed.max(self.foreseen)
    }

    /// Tokens with KV in place. The step that chooses a token computes the KV of the token before
    /// it.
    pub fn in_place(&self) -> u32 {
        let tokens = (self.request.prompt.len() + self.request.output.len()) as u32;
        let read = !self.request.output.is_empty() && self.is_filled();
        if read { tokens - 1 } else { self.computed }
    }

    /// Looks up its cached prefix once, when it begins to wait.
    pub fn foresee(&mut self, config: &SchedConfig, pool: &PagePool) {
        self.extend_prompt_keys(pool);
        let reusable = self.reusable(config, pool);
        self.foreseen = reusable.end * config.cache_page_size();
        let all_held = Reusable { idle: 0, idle_state: 0, ..reusable };
        self.foreseen_charge = Some(self.charge(config, &all_held));
    }

    /// Tokens of whole pages that both prompts share and that this request computes in the current
    /// pass (`computed`). After the pass, `other` can take them from the prefix cache. With
    /// recurrent state, these are the tokens that `other` spares if it waits for a checkpoint that
    /// this request will leave, perhaps in a later pass. Also returns how many tokens were
    /// compared.
    pub fn shares(
        &self,
        computed: &Range<u32>,
        other: &SlotEntry<S>,
        config: &SchedConfig,
    ) -> (u32, u32) {
        let (Some(ours), Some(theirs)) = (self.request.sequence(), other.request.sequence()) else {
            return (0, 0);
        };
        let has_state = config.groups.state_pages > 0;
        let places = self.checkpoints.map(|pages| (pages * config.cache_page_size()) as usize);
        let last = if has_state { places[0].max(places[1]) } else { computed.end as usize };
        let start = computed.start as usize;
        let end = last.min(ours.prompt.len()).min(other.reusable_tokens(config) as usize);
        if ours.salt != theirs.salt || start >= end.min(theirs.prompt.len()) {
            return (0, 0);
        }
        let pairs = ours.prompt[start..end].iter().zip(&theirs.prompt[start..]);
        let alike = start + pairs.take_while(|(one, another)| one == another).count();
        let compared = (alike - start) as u32;
        let (from, shared) = match has_state {
            true => {
                let place = places.into_iter().filter(|&place| place <= alike).max().unwrap_or(0);
                (other.foreseen as usize, place)
            }
            false => (start, alike - alike % config.cache_page_size() as usize),
        };
        // Most prompts already differ here.
        match shared > start.max(from) && ours.prompt[..start] == theirs.prompt[..start] {
            true => ((shared - from) as u32, compared),
            false => (0, compared),
        }
    }

    /// Takes the pages for `fill`: the cached ones, then new ones. It fits `room`. Returns the
    /// tokens at the beginning that it already has or never reads, and the pages taken from the
    /// budget.
    pub fn take_pages(
        &mut self,
        config: &SchedConfig,
        room: &PageBudget,
        pool: &mut PagePool,
    ) -> (u32, u32) {
        let before = pool.counts();
        let found = self.reusable_in(config, room, pool).expect("an admitted request fits");
        if self.request.salt.is_some() && self.request.output.is_empty() {
            self.count_lookup(config, pool, &found);
        }
        let is_stored = matches!(self.retracted, Some(RetractedKv::Stored(_)));
        let EngineRequest { pages, keys, .. } = &mut *self.request;
        if !is_stored {
            pages.begin(pool);
            pages.set_state_tokens(0);
        }
        pages.reuse(pool, keys, &found);
        self.kept = found.end;
        self.plan_checkpoints(config, pool);
        let whole = config.window().pages(self.fill);
        debug_assert!(self.kept <= whole, "a cache has no more than it can");
        assert!(
            self.request.pages.extend_to(pool, whole as usize),
            "admitted {} pages that are neither free nor cached",
            whole - self.kept
        );
        let after = pool.counts();
        let taken = (before.free + before.cached) - (after.free + after.cached);
        let most = config.groups.pages(whole, whole - found.window_from) + config.origin_pages();
        debug_assert!(taken <= most, "pages are taken once");
        (self.foreseen, self.foreseen_charge) = (0, None);
        (
            self.kept * config.cache_page_size(),
            taken + Claim::of(config, &self.request, pool).owed(),
        )
    }

    /// Begins with the checkpoint behind its cached pages. Chooses the pages behind which its
    /// chunks leave checkpoints: where its prompt parts from earlier ones, and at its end.
    fn plan_checkpoints(&mut self, config: &SchedConfig, pool: &mut PagePool) {
        self.checkpoints = [0; 2];
        if config.origin_pages() == 0 || matches!(self.reach(config), Reach::From(_)) {
            return;
        }
        let cached = self.kept;
        let EngineRequest { pages, keys, .. } = &mut *self.request;
        if cached > 0 {
            pages.reuse_checkpoint(
                pool,
                keys[cached as usize - 1],
                cached * config.cache_page_size(),
            );
        }
        if self.retracted.is_some() {
            return;
        }
        let keys = self.reusable_keys(config, pool);
        let (seen, end) = (pool.note_prompt(keys) as u32, keys.len() as u32);
        let pays = |place: u32, before| {
            place.saturating_sub(before) * config.cache_page_size() >= config.checkpoint_tokens
        };
        let part = if pays(seen, cached) { seen } else { 0 };
        self.checkpoints = [part, if pays(end, cached.max(part)) { end } else { 0 }];
    }

    /// Tokens up to the next place of a checkpoint, from the computed ones on.
    pub fn checkpoint_ahead(&self, config: &SchedConfig) -> Option<u32> {
        let places = self.checkpoints.iter().map(|pages| pages * config.cache_page_size());
        places.filter_map(|place| place.checked_sub(self.computed)).find(|&ahead| ahead > 0)
    }

    /// Records a chunk that has been computed: full pages and a checkpoint go into the prefix
    /// cache, pages that no later token sees go back.
    pub fn end_chunk(&mut self, config: &SchedConfig, pool: &mut PagePool) {
        self.keep(pool);
        let EngineRequest { pages, keys, .. } = &mut *self.request;
        let late = usize::from(is_failpoint_active("checkpoint is one page late"));
        let last = (self.computed / config.cache_page_size()) as usize + late;
        pages.end_chunk(pool, last.checked_sub(1).and_then(|last| keys.get(last)).copied());
        self.give_back_pages(config, pool);
    }

    /// Counts its lookup. Tokens behind the window of its first step are neither asked for nor
    /// found. Nor are tokens of a model without keys and values: its state arrives as a whole.
    fn count_lookup(&self, config: &SchedConfig, pool: &mut PagePool, found: &Reusable) {
        if config.groups.total() == 0 && matches!(self.reach(config), Reach::From(_)) {
            return;
        }
        let behind = match self.reach(config) {
            Reach::From(first) if config.groups.full == 0 => first * config.page_size,
            _ => 0,
        };
        let asked = self.reusable_tokens(config).saturating_sub(behind);
        pool.count_lookup(asked, found.end * config.cache_page_size() - behind);
    }

    /// Gives the pages back that no later token sees. Full ones go into the prefix cache.
    pub fn give_back_pages(&mut self, config: &SchedConfig, pool: &mut PagePool) {
        let early = is_failpoint_active("window page goes back early");
        let next = self.in_place() + if early { config.page_size } else { 0 };
        let behind = self.window(config).pages_behind(next) as usize;
        if behind > self.request.pages.behind() {
            self.keep(pool);
            self.request.pages.give_back_before(pool, behind);
        }
    }

    /// Gives up its pages. Sets `fill` to the tokens that had KV in place.
    pub fn give_up_pages(&mut self, kept: RetractedKv, pool: &mut PagePool) {
        debug_assert!(self.computed <= self.fill, "only what is missing is computed");
        self.fill = self.in_place();
        (self.computed, self.kept) = (0, 0);
        let before = self.retracted.replace(kept);
        debug_assert!(before.is_none(), "a request without pages gives up none");
        self.request.pages.release(pool);
        self.request.pages.clear();
    }

    /// Puts full pages into the prefix cache.
    pub fn keep(&mut self, pool: &mut PagePool) {
        let tokens =
            self.in_place() + u32::from(is_failpoint_active("page is kept before it is full"));
        self.extend_keys(pool, tokens);
        let EngineRequest { keys, pages, .. } = &mut *self.request;
        let full = pool.cacheable_pages(tokens).min(keys.len());
        let kept = self.kept as usize;
        if full > kept {
            pages.keep(pool, keys, kept..full);
            self.kept = full as u32;
        }
    }

    /// Ends it for its client: sends Finished and releases its pages. A lease over them continues.
    pub fn finish(
        &mut self,
        outcome: FinishReason,
        pool: &mut PagePool,
        channel: &mut EngineChannel,
    ) {
        self.keep(pool);
        self.request.pages.release(pool);
        channel.send_event(RequestEvent::Finished {
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
    /// The mover has it, so the slot cannot be reused.
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
                debug_assert!(request.keys.is_empty(), "a request begins without keys");
                *entry = Some(SlotEntry {
                    request,
                    fill,
                    computed: 0,
                    cached: 0,
                    is_transferred: false,
                    stay_from: u32::MAX,
                    foreseen: 0,
                    foreseen_charge: None,
                    kept: 0,
                    checkpoints: [0; 2],
                    retracted: None,
                    state,
                });
                self.taken += 1;
                debug_assert_eq!(self.taken, self.iter().count(), "taken slots are counted");
                Ok(())
            }
            _ => Err(request),
        }
    }

    /// The request of exactly this use of the slot.
    pub fn find(&self, slot: SlotId, generation: Generation) -> Option<&SlotEntry<S>> {
        let held = self.entries.get(slot.index())?.as_ref()?;
        (held.request.generation == generation).then_some(held)
    }

    /// The request of exactly this use of the slot, to change it.
    pub fn find_mut(&mut self, slot: SlotId, generation: Generation) -> Option<&mut SlotEntry<S>> {
        let held = self.entries.get_mut(slot.index())?.as_mut()?;
        (held.request.generation == generation).then_some(held)
    }

    /// Frees the slot of a finished request after its pages and lease are back. `ctl` can reuse it.
    pub fn let_go(&mut self, slot: SlotId, channel: &mut EngineChannel) {
        let held = self.entries[slot.index()].take();
        debug_assert!(held.is_some(), "a slot is let go once");
        if let Some(mut held) = held {
            self.taken -= 1;
            debug_assert_eq!(self.taken, self.iter().count(), "taken slots are counted");
            held.request.pages.clear();
            channel.send_event(RequestEvent::Released(held.request));
        }
    }

    /// Whether more requests wait than allowed. Requests that can begin at once do not count: their
    /// pages are in `room`, and `takes_place` grants them a place.
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

    /// The first taken slot from `from` on. A loop over it can change entries.
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

/// Returns a request at once, because its slot is not free. This only happens if `ctl` has
/// miscounted.
pub fn refuse(request: Box<EngineRequest>, channel: &mut EngineChannel) {
    debug_assert!(false, "request {} names slot {}, which is not free", request.id, request.slot);
    let outcome = FinishReason::Failed(Cause::Internal);
    channel.send_event(RequestEvent::Finished {
        request: request.id,
        outcome,
        stamps: request.stamps,
        cached_tokens: 0,
    });
    channel.send_event(RequestEvent::Released(request));
}

//! The pages of one worker and their holders.
//!
//! Owns: for each page its users (requests) and its leases (transfers), the map of free pages, the
//! prefix cache.
//! Thread: `engine`.
//! Invariants: `free + cached + in use + leased = total`. A page is free only when it has neither
//! user nor lease. A lease ends when its [`EndedLease`] is back. A cached page is never written;
//! eviction takes only idle pages, the least recently used first. Allocation prefers long runs of
//! adjacent pages, which become single copies and writes.
//! Not here: the memory (`region`), the content of each page (`page_key`, `page_cache`).

use crate::ids::{Generation, PageId, SlotId};
use crate::kv::bits::Bits;
use crate::kv::groups::GroupCounts;
use crate::kv::lease::{EndedLease, Lease};
use crate::kv::page_cache::PageCache;
use crate::kv::page_key::{PageKey, Sequence};
use crate::kv::window::{KvWindow, Reach};
use crate::stdx::failpoint::is_failpoint_active;
use std::ops::Range;

/// Pages by state. Every page is in exactly one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PageCounts {
    /// No holder and no cached content.
    pub free: u32,
    /// No holder, but cached content. They are evicted if no free page is left.
    pub cached: u32,
    /// Used by at least one request; they can be leased too.
    pub in_use: u32,
    /// No user, but a transfer can still read or write them.
    pub leased: u32,
}

impl PageCounts {
    /// All pages of the pool.
    pub fn total(&self) -> u32 {
        self.free + self.cached + self.held()
    }

    /// Pages that a request uses or a transfer has leased.
    pub fn held(&self) -> u32 {
        self.in_use + self.leased
    }
}

/// The cached pages of a sequence that serve a request.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Reusable {
    /// Number of pages up to the end of the cached part. Full groups have all of them.
    pub end: u32,
    /// The first page that window groups have or need. It can be behind the end.
    pub window_from: u32,
    /// Cached pages, of all groups.
    pub pages: u32,
    /// Those of them without a holder. After a reuse, they can no longer be evicted.
    pub idle: u32,
    /// Cached pages of window groups that have a holder.
    pub held_windowed: u32,
    /// Pages of the checkpoint at the end that have no holder. A request reads them beside its own
    /// state pages.
    pub idle_state: u32,
}

impl Reusable {
    /// The places of a group's cached pages.
    pub fn range(&self, counts: GroupCounts, group: usize) -> Range<usize> {
        let first = if group < counts.full as usize { 0 } else { self.window_from as usize };
        first..first.max(self.end as usize)
    }
}

/// Cache lookups of requests since start, in tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Lookups {
    /// Tokens that the cache could have held.
    pub asked: u64,
    /// Tokens that the cache held.
    pub found: u64,
}

/// Holders of one page.
#[derive(Clone, Copy, Default)]
struct Page {
    users: u32,
    leases: u32,
}

impl Page {
    fn is_held(&self) -> bool {
        self.users > 0 || self.leases > 0
    }
}

/// The pages of one worker.
pub struct PagePool {
    pages: Box<[Page]>,
    free: Bits,
    counts: PageCounts,
    cache: Option<PageCache>,
    lookups: Lookups,
    flushes: u32,
}

impl PagePool {
    /// A pool of `pages` free pages, numbered from 0, without a prefix cache.
    pub fn new(pages: u32) -> PagePool {
        PagePool {
            pages: vec![Page::default(); pages as usize].into(),
            free: Bits::ones(pages as usize),
            counts: PageCounts { free: pages, ..PageCounts::default() },
            cache: None,
            lookups: Lookups::default(),
            flushes: 0,
        }
    }

    /// The same with a prefix cache over pages of `page_size` tokens.
    pub fn with_cache(pages: u32, page_size: u32) -> PagePool {
        PagePool { cache: Some(PageCache::new(pages, page_size)), ..PagePool::new(pages) }
    }

    /// The same. Checkpoints of recurrent state take at most `most` pages of its cache.
    pub fn with_checkpoints(mut self, most: u32) -> PagePool {
        let pages = self.pages.len() as u32;
        self.cache = self.cache.map(|cache| cache.with_checkpoints(pages, most));
        self
    }

    /// Pages by state.
    pub fn counts(&self) -> PageCounts {
        self.counts
    }

    /// Use of the cache since start.
    pub fn lookups(&self) -> Lookups {
        self.lookups
    }

    /// Gives `n` pages their first user and appends them to `pages`; the caller provides its
    /// capacity. False, and nothing changes, if fewer than `n` are free or cached. Continues the
    /// run at the end of `pages` if possible, else takes the smallest run that holds all, else the
    /// longest runs.
    #[must_use]
    pub fn allocate(&mut self, n: u32, pages: &mut Vec<PageId>) -> bool {
        if n > self.counts.free + self.counts.cached {
            return false;
        }
        self.evict(n.saturating_sub(self.counts.free));
        let left = n as usize - self.extend_last_run(n as usize, pages);
        if left > 0 {
            self.allocate_runs(left, pages);
        }
        true
    }

    /// Pages that the cache can hold of the first `tokens` tokens of a sequence.
    pub fn cacheable_pages(&self, tokens: u32) -> usize {
        self.cache.as_ref().map_or(0, |cache| cache.chain.full_pages(tokens))
    }

    /// Appends the missing keys of the full pages of the first `tokens` tokens. `keys` has those of
    /// the first pages, and the capacity for all. Without a cache it stays empty.
    pub fn extend_keys(&self, sequence: &Sequence<'_>, tokens: u32, keys: &mut Vec<PageKey>) {
        if let Some(cache) = &self.cache {
            cache.chain.extend(sequence, tokens, keys);
        }
    }

    /// The longest cached part, without a gap, of a sequence with these keys from its first page
    /// on. `reach` says where the part begins in window groups, and whether a checkpoint of the
    /// state must be at its end. If there is none, it ends where the request begins to read.
    pub fn reusable(&self, keys: &[PageKey], counts: GroupCounts, reach: Reach) -> Reusable {
        let full = (0..counts.full as usize).map(|group| self.run_of(keys, group)).min();
        let windowed = counts.full as usize..counts.total();
        let mut end = full.unwrap_or(keys.len());
        let window_from = match reach {
            Reach::From(first) => {
                let first = first as usize;
                let behind = keys.get(first..).unwrap_or_default();
                let runs = windowed.map(|group| first + self.run_of(behind, group));
                // A window group without cached pages ends the part at its first page.
                end = runs.chain(full).min().unwrap_or(0);
                first
            }
            Reach::Back(window) => {
                let mut before = usize::MAX;
                while before != end {
                    before = end;
                    for group in windowed.clone() {
                        end = self.last_window(&keys[..end], group, window);
                    }
                    end = self.last_checkpoint(&keys[..end], counts.state_pages);
                }
                self.pages_behind(window, end)
            }
        };
        let (end, window_from) = (end as u32, window_from as u32);
        let mut found = Reusable { end, window_from, ..Reusable::default() };
        for group in 0..counts.total() {
            let keys = keys.get(found.range(counts, group)).unwrap_or_default();
            for page in self.cached_pages(keys, group) {
                let is_held = self.is_held(page);
                found.pages += 1;
                found.idle += u32::from(!is_held);
                found.held_windowed += u32::from(is_held && group >= counts.full as usize);
            }
        }
        if matches!(reach, Reach::Back(_)) && end > 0 {
            let checkpoint = self.checkpoint(keys[end as usize - 1], counts.state_pages);
            found.idle_state = checkpoint.filter(|&page| !self.is_held(page)).count() as u32;
        }
        found
    }

    /// The pages of the checkpoint with this key, up to the first missing one.
    fn checkpoint(&self, key: PageKey, pages: u32) -> impl Iterator<Item = PageId> {
        let cache = self.cache.as_ref();
        (0..pages as usize).map_while(move |part| cache?.find_state(key, part))
    }

    /// The end of the longest part with a checkpoint of `pages` pages behind it. Without state,
    /// that is all of it.
    fn last_checkpoint(&self, keys: &[PageKey], pages: u32) -> usize {
        if pages == 0 || is_failpoint_active("checkpoint of the prefix is not looked up") {
            return keys.len();
        }
        let is_whole = |&key: &PageKey| self.checkpoint(key, pages).count() == pages as usize;
        keys.iter().rposition(is_whole).map_or(0, |last| last + 1)
    }

    /// How many of the first keys an earlier prompt had, if checkpoints are kept. From now on, a
    /// prompt had them all.
    pub fn note_prompt(&mut self, keys: &[PageKey]) -> usize {
        self.cache.as_mut().map_or(0, |cache| cache.note_prompt(keys))
    }

    /// Adds a user to the `count` pages of the checkpoint with this key, which is in the cache.
    /// Appends them to `pages`.
    pub fn reuse_checkpoint(&mut self, key: PageKey, count: u32, pages: &mut Vec<PageId>) {
        debug_assert!(pages.is_empty());
        pages.extend(self.checkpoint(key, count));
        debug_assert_eq!(pages.len(), count as usize, "what was found is there");
        pages.iter().for_each(|&page| self.add_user(page));
    }

    /// Puts the pages of a checkpoint into the cache. The caller uses them. A page replaces the
    /// caller's if the cache already has its content. The oldest checkpoints make room; if all
    /// others are in use, it is not kept.
    pub fn keep_checkpoint(&mut self, key: PageKey, pages: &mut [PageId]) {
        for (part, page) in pages.iter_mut().enumerate() {
            let Some(cache) = &mut self.cache else { return };
            if let Some(twin) = cache.find_state(key, part) {
                self.add_user(twin);
                self.remove_user(*page);
                *page = twin;
                continue;
            }
            if cache.is_full_of_checkpoints() {
                let Some(evicted) = cache.evict_state() else { return };
                self.counts.cached -= 1;
                self.free_up(evicted);
            }
            if let Some(cache) = &mut self.cache {
                cache.insert_state(*page, key, part);
            }
        }
    }

    /// How many pages of a group are cached from the first key on.
    fn run_of(&self, keys: &[PageKey], group: usize) -> usize {
        self.cached_pages(keys, group).count()
    }

    fn pages_behind(&self, window: KvWindow, end: usize) -> usize {
        let page_size = self.cache.as_ref().map_or(0, |cache| cache.chain.page_size());
        window.pages_behind((end * page_size) as u32) as usize
    }

    /// The end of the longest cached part such that the pages of a group that the token behind it
    /// sees are there.
    fn last_window(&self, keys: &[PageKey], group: usize, window: KvWindow) -> usize {
        let Some(cache) = &self.cache else { return 0 };
        let is_missing = |place: usize| cache.find(keys[place], group).is_none();
        let mut end = keys.len();
        if is_failpoint_active("window of the prefix is not looked up") {
            return end;
        }
        let mut place = end;
        while end > 0 {
            let first = self.pages_behind(window, end);
            if place <= first {
                return end;
            }
            // Each shorter part that reaches beyond this page needs it, so a miss is found early.
            if place == end && is_missing(first) {
                (end, place) = (first, first);
                continue;
            }
            place -= 1;
            if is_missing(place) {
                end = place;
            }
        }
        0
    }

    /// Adds a user to each cached page of a group with these keys, up to the first gap. Appends
    /// them to `pages`, which is empty and has the capacity for them.
    pub fn reuse(&mut self, keys: &[PageKey], group: usize, pages: &mut Vec<PageId>) {
        debug_assert!(pages.is_empty());
        pages.extend(self.cached_pages(keys, group));
        pages.iter().for_each(|&page| self.add_user(page));
    }

    /// Counts a lookup of a new request: of `asked` tokens, `found` were in the cache.
    pub fn count_lookup(&mut self, asked: u32, found: u32) {
        if self.cache.is_some() {
            self.lookups.asked += u64::from(asked);
            self.lookups.found += u64::from(found);
        }
    }

    /// Puts pages of a group that are full of KV into the cache, under their `keys`. The caller
    /// uses them, and has not put them there before. If the cache already holds a page's content,
    /// that page replaces the caller's, unless the caller's is leased: a mover uses its number.
    pub fn keep(&mut self, keys: &[PageKey], group: usize, pages: &mut [PageId]) {
        debug_assert_eq!(keys.len(), pages.len());
        for (&key, page) in keys.iter().zip(pages) {
            let Some(cache) = &mut self.cache else { return };
            match cache.find(key, group) {
                None => cache.insert(*page, key, group),
                Some(_) if self.pages[page.index()].leases > 0 => {}
                Some(twin) => {
                    self.add_user(twin);
                    self.remove_user(*page);
                    *page = twin;
                }
            }
        }
    }

    /// Number of [`PagePool::flush`] so far. KV from before a flush does not enter the cache.
    pub fn flushes(&self) -> u32 {
        self.flushes
    }

    /// How many of these pages have more than one user.
    pub fn count_shared(&self, pages: &[PageId]) -> u32 {
        pages.iter().filter(|page| self.pages[page.index()].users > 1).count() as u32
    }

    /// Empties the cache and returns how many pages became free. Pages with a holder become free
    /// when their holders leave.
    pub fn flush(&mut self) -> u32 {
        self.flushes += 1;
        let cached = self.counts.cached;
        self.evict(cached);
        if let Some(cache) = &mut self.cache {
            cache.clear(self.pages.len());
        }
        cached
    }

    /// Removes a user of each of these pages.
    pub fn release(&mut self, pages: &[PageId]) {
        // In reverse order, so that a page is evicted after the pages behind it.
        pages.iter().rev().for_each(|&page| self.remove_user(page));
    }

    /// Leases pages in use to a transfer that writes them. None of them is in the cache, because
    /// other requests read cached pages.
    pub fn lease_to_write<'a>(
        &mut self,
        slot: SlotId,
        generation: Generation,
        pages: impl IntoIterator<Item = &'a PageId> + Clone,
    ) -> Lease {
        let is_cached = pages.clone().into_iter().any(|&page| self.is_cached(page));
        assert!(!is_cached, "a cached page is never written");
        self.lease(slot, generation, pages)
    }

    /// Leases pages in use to a transfer that reads them.
    pub fn lease<'a>(
        &mut self,
        slot: SlotId,
        generation: Generation,
        pages: impl IntoIterator<Item = &'a PageId>,
    ) -> Lease {
        self.extend_lease(pages);
        Lease::new(slot, generation)
    }

    /// Adds pages in use to a lease that has not ended. [`PagePool::end_lease`] then gets them,
    /// too.
    pub fn extend_lease<'a>(&mut self, pages: impl IntoIterator<Item = &'a PageId>) {
        for &id in pages {
            let page = &mut self.pages[id.index()];
            assert!(page.users > 0, "page {id} is leased without a user");
            page.leases += 1;
        }
    }

    /// The lease over these pages has ended.
    pub fn end_lease<'a>(
        &mut self,
        _ended: EndedLease,
        pages: impl IntoIterator<Item = &'a PageId, IntoIter: DoubleEndedIterator>,
    ) {
        for &id in pages.into_iter().rev() {
            let page = &mut self.pages[id.index()];
            assert!(page.leases > 0, "page {id} has no lease to end");
            page.leases -= 1;
            if page.leases == 0 && page.users == 0 {
                self.counts.leased -= 1;
                self.let_go(id);
            }
        }
    }

    /// Panics unless the counts, the map of free pages and the cache agree with each page's
    /// holders.
    pub fn invariants(&self) {
        let mut seen = PageCounts::default();
        for (index, page) in self.pages.iter().enumerate() {
            let cached = self.is_cached(PageId(index as u32));
            let free = !page.is_held() && !cached;
            assert_eq!(
                free,
                self.free.get(index),
                "page {index} and the map of free pages disagree"
            );
            match (page.users, page.leases) {
                (0, 0) if cached => seen.cached += 1,
                (0, 0) => seen.free += 1,
                (0, _) => seen.leased += 1,
                _ => seen.in_use += 1,
            }
        }
        assert_eq!(seen, self.counts);
        assert_eq!(seen.total() as usize, self.pages.len());
        if let Some(cache) = &self.cache {
            cache.invariants(|page| !self.is_held(page));
        }
    }

    fn is_held(&self, id: PageId) -> bool {
        self.pages[id.index()].is_held()
    }

    fn is_cached(&self, id: PageId) -> bool {
        self.cache.as_ref().is_some_and(|cache| cache.contains(id))
    }

    /// The cached pages of a group with these keys, up to the first gap.
    fn cached_pages(&self, keys: &[PageKey], group: usize) -> impl Iterator<Item = PageId> {
        let cache = self.cache.as_ref();
        keys.iter().map_while(move |&key| cache?.find(key, group))
    }

    /// Adds a user to a page that is in use, leased or cached.
    fn add_user(&mut self, id: PageId) {
        let page = &mut self.pages[id.index()];
        page.users += 1;
        if page.users > 1 {
            return;
        }
        self.counts.in_use += 1;
        if page.leases > 0 {
            self.counts.leased -= 1;
        } else if let Some(cache) = &mut self.cache {
            cache.wake(id);
            self.counts.cached -= 1;
        }
    }

    fn remove_user(&mut self, id: PageId) {
        let page = &mut self.pages[id.index()];
        assert!(page.users > 0, "page {id} has no user to release it");
        page.users -= 1;
        if page.users > 0 {
            return;
        }
        self.counts.in_use -= 1;
        if page.leases > 0 && !is_failpoint_active("page is free while leased") {
            self.counts.leased += 1;
        } else {
            self.let_go(id);
        }
    }

    /// Handles a page that has lost its last holder.
    fn let_go(&mut self, id: PageId) {
        match &mut self.cache {
            Some(cache) if cache.contains(id) => {
                cache.leave(id);
                self.counts.cached += 1;
            }
            _ => self.free_up(id),
        }
    }

    /// Evicts `n` pages of the cache, which has at least `n` pages without a holder.
    fn evict(&mut self, n: u32) {
        for _ in 0..n {
            let cache = self.cache.as_mut();
            let page = cache.and_then(PageCache::evict).expect("a cached page is idle");
            self.counts.cached -= 1;
            self.free_up(page);
        }
    }

    fn free_up(&mut self, id: PageId) {
        self.free.set(id.index(), true);
        self.counts.free += 1;
    }

    fn take(&mut self, index: usize, pages: &mut Vec<PageId>) {
        self.free.set(index, false);
        self.pages[index].users = 1;
        self.counts.free -= 1;
        self.counts.in_use += 1;
        pages.push(PageId(index as u32));
    }

    fn extend_last_run(&mut self, n: usize, pages: &mut Vec<PageId>) -> usize {
        let Some(last) = pages.last() else { return 0 };
        let first = last.index() + 1;
        let mut taken = 0;
        while taken < n && first + taken < self.pages.len() && self.free.get(first + taken) {
            self.take(first + taken, pages);
            taken += 1;
        }
        taken
    }

    /// Takes `n` pages; that many are free.
    fn allocate_runs(&mut self, n: usize, pages: &mut Vec<PageId>) {
        let (mut fitting, mut longest) = (None, 0);
        let mut from = 0;
        while let Some((start, len)) = self.free.run(from) {
            longest = longest.max(len);
            if len >= n && fitting.is_none_or(|(_, best)| len < best) {
                fitting = Some((start, len));
            }
            from = start + len;
        }
        if let Some((start, _)) = fitting {
            (start..start + n).for_each(|index| self.take(index, pages));
            return;
        }
        // No run holds all. Take long runs first and halve the length, so that the passes are few.
        let mut least = longest.next_power_of_two() / 2;
        let mut left = n;
        while left > 0 {
            left = self.take_runs_of(least.max(1), left, pages);
            least /= 2;
        }
    }

    /// Takes pages from runs of at least `least` pages until `left` are found. Returns how many are
    /// still missing.
    fn take_runs_of(&mut self, least: usize, mut left: usize, pages: &mut Vec<PageId>) -> usize {
        let mut from = 0;
        while left > 0
            && let Some((start, len)) = self.free.run(from)
        {
            if len >= least {
                let taken = len.min(left);
                (start..start + taken).for_each(|index| self.take(index, pages));
                left -= taken;
            }
            from = start + len;
        }
        left
    }
}

#[cfg(test)]
#[path = "pool_tests.rs"]
mod tests;

//! The pages of one request: a list for each group of layers, in order of position, and those of
//! its recurrent state. The first pages of groups with a window can have gone back to the pool,
//! because no later token sees them.
//!
//! Thread: `engine`.
//! Invariants: nothing is allocated. Positions do not move when pages go back. Between steps, all
//! lists end at one position. State pages come with the first pages and stay until the last ones
//! go. A chunk that makes a checkpoint of the state writes pages of its own for it, and the next
//! chunk begins there; so state pages do not change while a transfer has a lease over them.

use crate::ids::PageId;
use crate::kv::groups::GroupCounts;
use crate::kv::page_key::PageKey;
use crate::kv::page_span::{PageSpan, SequenceState};
use crate::kv::pool::{PagePool, Reusable};
use crate::stdx::failpoint::is_failpoint_active;
use std::mem;
use std::ops::Range;

/// The pages that a request uses.
#[derive(Debug)]
pub struct RequestPages {
    counts: GroupCounts,
    /// By group; the full groups come first.
    lists: Box<[GroupPages]>,
    /// The pages of its state.
    state: Vec<PageId>,
    /// The checkpoint that its next chunk reads instead of its state pages.
    origin: Vec<PageId>,
    /// The checkpoint that the current chunk writes instead of its state pages.
    checkpoint: Vec<PageId>,
    /// Tokens that its state has seen.
    state_tokens: u32,
    /// The flushes of the pool before its KV was computed.
    flushes: u32,
}

/// The pages of one group.
#[derive(Debug)]
struct GroupPages {
    /// Pages before the first one here.
    behind: usize,
    /// Pages of the sequence before this one came from the prefix cache.
    cached: usize,
    pages: Vec<PageId>,
}

impl GroupPages {
    fn end(&self) -> usize {
        self.behind + self.pages.len()
    }

    fn span(&self, range: Range<usize>) -> PageSpan<'_> {
        assert!(range.start >= self.behind, "page {} has gone back", range.start);
        let pages = &self.pages[range.start - self.behind..range.end - self.behind];
        PageSpan { first: range.start, pages }
    }
}

impl RequestPages {
    /// Empty lists with the capacity for `pages` pages each.
    pub fn with_capacity(pages: usize, counts: GroupCounts) -> RequestPages {
        let list = |_| GroupPages { behind: 0, cached: 0, pages: Vec::with_capacity(pages) };
        let of_state = || Vec::with_capacity(counts.state_pages as usize);
        RequestPages {
            counts,
            lists: (0..counts.total()).map(list).collect(),
            state: of_state(),
            origin: of_state(),
            checkpoint: of_state(),
            state_tokens: 0,
            flushes: 0,
        }
    }

    /// Whether the request uses no page.
    pub fn is_empty(&self) -> bool {
        self.state.is_empty() && self.lists.iter().all(|list| list.pages.is_empty())
    }

    /// Pages before the first ones of the groups with a window.
    pub fn behind(&self) -> usize {
        let behind = self.windowed().first().map_or(0, |list| list.behind);
        debug_assert!(self.windowed().iter().all(|list| list.behind == behind), "one window");
        behind
    }

    /// Number of pages that the request uses, without those of checkpoints. It gives these back
    /// after a chunk.
    pub fn count(&self) -> u32 {
        self.lists.iter().map(|list| list.pages.len() as u32).sum::<u32>() + self.state.len() as u32
    }

    /// Pages that it lacks for `end` pages of the sequence.
    pub fn count_missing(&self, end: usize) -> u32 {
        let missing = self.lists.iter().map(|list| end.saturating_sub(list.end()) as u32);
        missing.sum::<u32>() + self.counts.state_pages - self.state.len() as u32
    }

    /// How many pages of groups with a window other requests use, too. At its beginning, these came
    /// from the prefix cache.
    pub fn count_shared(&self, pool: &PagePool) -> u32 {
        let cached = |list: &GroupPages| list.cached.saturating_sub(list.behind);
        self.windowed().iter().map(|list| pool.count_shared(&list.pages[..cached(list)])).sum()
    }

    /// By group: its pages before the `end`-th one of the sequence.
    pub fn up_to(
        &self,
        end: usize,
    ) -> impl ExactSizeIterator<Item = PageSpan<'_>> + DoubleEndedIterator + Clone {
        self.lists.iter().map(move |list| list.span(list.behind..end))
    }

    /// All pages that hold what the first `end` pages of the sequence left: those of the groups
    /// before the `end`-th one, then those of the state. A page comes with its place in its list;
    /// that of a state page is behind all others.
    pub fn written(
        &self,
        end: usize,
    ) -> impl DoubleEndedIterator<Item = (usize, PageId)> + Clone + '_ {
        let groups = self.up_to(end).flat_map(|span| {
            span.pages.iter().enumerate().map(move |(index, &page)| (span.first + index, page))
        });
        groups.chain(self.state.iter().map(|&page| (usize::MAX, page)))
    }

    /// The pages of the state for the next step, before which it has seen `seen` tokens.
    pub fn state(&self, seen: u32) -> SequenceState<'_> {
        let or_own = |pages| if <[PageId]>::is_empty(pages) { &self.state } else { pages };
        let (mut origin, mut pages) = (or_own(&self.origin), or_own(&self.checkpoint));
        if is_failpoint_active("checkpoint is written again") && self.checkpoint.is_empty() {
            pages = origin;
        }
        if is_failpoint_active("checkpoint is not read") {
            origin = &self.state;
        }
        SequenceState { pages, origin, seen }
    }

    /// Whether its state is on pages of a checkpoint, or a chunk writes it there.
    pub fn has_checkpoint(&self) -> bool {
        !(self.origin.is_empty() && self.checkpoint.is_empty())
    }

    /// From now on, the state has seen `tokens` tokens. Returns how many it has seen before.
    pub fn set_state_tokens(&mut self, tokens: u32) -> u32 {
        mem::replace(&mut self.state_tokens, tokens)
    }

    /// By group: its pages from the `first`-th one of the sequence on, and of groups with a window
    /// from the `windowed`-th one on, if that is later. Then those of the state.
    pub fn from(
        &self,
        first: usize,
        windowed: usize,
    ) -> impl DoubleEndedIterator<Item = PageSpan<'_>> + Clone {
        let full = self.counts.full as usize;
        let groups = self.lists.iter().enumerate().map(move |(group, list)| {
            let first = if group < full { first } else { first.max(windowed) };
            list.span(first..list.end())
        });
        let has_state = self.counts.state_pages > 0;
        groups.chain(has_state.then(|| PageSpan::whole(&self.state)))
    }

    /// The same, with places in the list of a transfer: behind the pages of the first group come
    /// those of the others that cross, group by group, and those of the state.
    pub fn listed(&self, first: usize, windowed: usize) -> impl Iterator<Item = PageSpan<'_>> {
        let mut next = None;
        self.from(first, windowed).map(move |span| {
            let listed = PageSpan { first: next.unwrap_or(span.first), ..span };
            next = Some(listed.end());
            listed
        })
    }

    /// Where the list of a transfer ends, in tokens, if the sequence has `tokens` tokens.
    pub fn listed_tokens(&self, first: usize, windowed: usize, tokens: u32, page_size: u32) -> u32 {
        let end = self.listed(first, windowed).last().map_or(0, |span| span.end()) as u32;
        if self.counts.state_pages > 0 {
            return end * page_size;
        }
        // The last page of each group is as full as that of the first one.
        end * page_size - (tokens.next_multiple_of(page_size) - tokens)
    }

    /// All KV that its pages get from now on is computed after the flushes so far.
    pub fn begin(&mut self, pool: &PagePool) {
        self.flushes = pool.flushes();
    }

    /// Takes the cached pages `found` of a sequence with these keys, and no pages before them. The
    /// lists are empty.
    pub fn reuse(&mut self, pool: &mut PagePool, keys: &[PageKey], found: &Reusable) {
        assert!(self.is_empty(), "a request begins without pages");
        for (group, list) in self.lists.iter_mut().enumerate() {
            let range = found.range(self.counts, group);
            (list.behind, list.cached) = (range.start, range.end);
            if !range.is_empty() {
                pool.reuse(&keys[range.clone()], group, &mut list.pages);
            }
            debug_assert_eq!(list.pages.len(), range.len(), "what was found is there");
        }
    }

    /// The next chunk begins with the checkpoint behind the `tokens` tokens up to the page with
    /// this key. It is in the cache.
    pub fn reuse_checkpoint(&mut self, pool: &mut PagePool, key: PageKey, tokens: u32) {
        pool.reuse_checkpoint(key, self.counts.state_pages, &mut self.origin);
        self.state_tokens = tokens;
    }

    /// The next chunk leaves a checkpoint. The pool has the pages for it.
    pub fn begin_checkpoint(&mut self, pool: &mut PagePool) {
        assert!(self.checkpoint.is_empty(), "a chunk leaves one checkpoint");
        let is_taken = pool.allocate(self.counts.state_pages, &mut self.checkpoint);
        assert!(is_taken, "the pool has the pages of a checkpoint");
    }

    /// A chunk is complete. What it read is no longer needed. If it left a checkpoint, this has the
    /// key of the last page, and the next chunk begins with it.
    pub fn end_chunk(&mut self, pool: &mut PagePool, key: Option<PageKey>) {
        pool.release(&self.origin);
        self.origin.clear();
        mem::swap(&mut self.origin, &mut self.checkpoint);
        if self.origin.is_empty() || self.flushes != pool.flushes() {
            return;
        }
        let key = key.expect("a checkpoint is behind a page with a key");
        pool.keep_checkpoint(key, &mut self.origin);
    }

    /// Extends the lists to `end` pages. False, and nothing changes, if the pool has too few.
    #[must_use]
    pub fn extend_to(&mut self, pool: &mut PagePool, end: usize) -> bool {
        if self.count_missing(end) > pool.counts().free + pool.counts().cached {
            return false;
        }
        for list in &mut self.lists {
            let missing = end.saturating_sub(list.end()) as u32;
            let is_taken = pool.allocate(missing, &mut list.pages);
            debug_assert!(is_taken, "the pool has the pages of all groups");
        }
        let missing = self.counts.state_pages - self.state.len() as u32;
        if missing == 0 && is_failpoint_active("state page goes back early") {
            pool.release(&self.state[..self.state.len().min(1)]);
        }
        let is_taken = pool.allocate(missing, &mut self.state);
        debug_assert!(is_taken, "the pool has the pages of the state");
        true
    }

    /// Puts the pages `range` of the sequence into the prefix cache, under the keys with the same
    /// indices. Nothing enters if the cache was flushed in the meantime.
    pub fn keep(&mut self, pool: &mut PagePool, keys: &[PageKey], range: Range<usize>) {
        if self.flushes != pool.flushes() {
            return;
        }
        for (group, list) in self.lists.iter_mut().enumerate() {
            let from = range.start.max(list.behind);
            if from < range.end {
                let pages = &mut list.pages[from - list.behind..range.end - list.behind];
                pool.keep(&keys[from..range.end], group, pages);
            }
        }
    }

    /// Gives the pages of groups with a window before the `first`-th one of the sequence back.
    pub fn give_back_before(&mut self, pool: &mut PagePool, first: usize) {
        for list in &mut self.lists[self.counts.full as usize..] {
            let gone = first.saturating_sub(list.behind);
            assert!(gone < list.pages.len() || gone == 0, "a request keeps a page");
            pool.release(&list.pages[..gone]);
            list.pages.drain(..gone);
            list.behind += gone;
        }
    }

    /// Gives all pages back. They stay listed until [`RequestPages::clear`], for a lease over them;
    /// those of checkpoints do not.
    pub fn release(&mut self, pool: &mut PagePool) {
        self.lists.iter().for_each(|list| pool.release(&list.pages));
        pool.release(&self.state);
        for pages in [&mut self.origin, &mut self.checkpoint] {
            pool.release(pages);
            pages.clear();
        }
    }

    /// Forgets the pages.
    pub fn clear(&mut self) {
        for list in &mut self.lists {
            (list.behind, list.cached) = (0, 0);
            list.pages.clear();
        }
        debug_assert!(!self.has_checkpoint(), "released with its pages");
        self.state.clear();
    }

    fn windowed(&self) -> &[GroupPages] {
        &self.lists[self.counts.full as usize..]
    }
}

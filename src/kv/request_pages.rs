//! The pages of one request: a list for each group of layers, in order of position. The first pages
//! of groups with a window can have gone back to the pool, because no later token sees them.
//!
//! Thread: `engine`.
//! Invariants: nothing is allocated. Positions do not move when pages go back. Between steps, all
//! lists end at one position.

use crate::ids::PageId;
use crate::kv::groups::GroupCounts;
use crate::kv::page_key::PageKey;
use crate::kv::page_span::PageSpan;
use crate::kv::pool::{PagePool, Reusable};
use std::ops::Range;

/// The pages that a request uses.
#[derive(Debug)]
pub struct RequestPages {
    counts: GroupCounts,
    /// By group; the full groups come first.
    lists: Box<[GroupPages]>,
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
        RequestPages { counts, lists: (0..counts.total()).map(list).collect(), flushes: 0 }
    }

    /// Whether the request uses no page.
    pub fn is_empty(&self) -> bool {
        self.lists.iter().all(|list| list.pages.is_empty())
    }

    /// Pages before the first ones of the groups with a window.
    pub fn behind(&self) -> usize {
        let behind = self.windowed().first().map_or(0, |list| list.behind);
        debug_assert!(self.windowed().iter().all(|list| list.behind == behind), "one window");
        behind
    }

    /// Number of pages that the request uses.
    pub fn count(&self) -> u32 {
        self.lists.iter().map(|list| list.pages.len() as u32).sum()
    }

    /// Pages that it lacks for `end` pages of the sequence.
    pub fn count_missing(&self, end: usize) -> u32 {
        self.lists.iter().map(|list| end.saturating_sub(list.end()) as u32).sum()
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

    /// By group: its pages from the `first`-th one of the sequence on, and of groups with a window
    /// from the `windowed`-th one on, if that is later.
    pub fn from(
        &self,
        first: usize,
        windowed: usize,
    ) -> impl DoubleEndedIterator<Item = PageSpan<'_>> + Clone {
        let full = self.counts.full as usize;
        self.lists.iter().enumerate().map(move |(group, list)| {
            let first = if group < full { first } else { first.max(windowed) };
            list.span(first..list.end())
        })
    }

    /// The same, with places in the list of a transfer: behind the pages of the first group come
    /// those of the others that cross, group by group.
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

    /// Gives all pages back. They stay listed until [`RequestPages::clear`], for a lease over them.
    pub fn release(&self, pool: &mut PagePool) {
        self.lists.iter().for_each(|list| pool.release(&list.pages));
    }

    /// Forgets the pages.
    pub fn clear(&mut self) {
        for list in &mut self.lists {
            (list.behind, list.cached) = (0, 0);
            list.pages.clear();
        }
    }

    fn windowed(&self) -> &[GroupPages] {
        &self.lists[self.counts.full as usize..]
    }
}

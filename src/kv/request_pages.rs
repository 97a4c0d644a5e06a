//! The pages of one request, in order of position. The first ones can have gone back to the pool,
//! because no later token sees them.
//!
//! Thread: `engine`.
//! Invariants: nothing is allocated. Positions do not move when pages go back.

use crate::ids::PageId;
use crate::kv::page_key::PageKey;
use crate::kv::page_span::PageSpan;
use crate::kv::pool::{PagePool, Reusable};

/// The pages that a request uses.
#[derive(Debug, Default)]
pub struct RequestPages {
    /// Pages before the first one here.
    behind: usize,
    /// Pages of the sequence before this one came from the prefix cache.
    cached: usize,
    /// The flushes of the pool before its KV was computed.
    flushes: u32,
    pages: Vec<PageId>,
}

impl RequestPages {
    /// An empty list with the capacity for `pages` pages.
    pub fn with_capacity(pages: usize) -> RequestPages {
        RequestPages { pages: Vec::with_capacity(pages), ..RequestPages::default() }
    }

    /// Whether the request uses no page.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// Number of pages up to the end of the list, with those before the first one.
    pub fn end(&self) -> usize {
        self.behind + self.pages.len()
    }

    /// Number of pages before the first one.
    pub fn behind(&self) -> usize {
        self.behind
    }

    /// The pages that the request uses.
    pub fn held(&self) -> &[PageId] {
        &self.pages
    }

    /// The pages from the `first`-th one of the sequence on. The list has them.
    pub fn from(&self, first: usize) -> PageSpan<'_> {
        assert!(first >= self.behind, "page {first} has gone back");
        PageSpan { first, pages: &self.pages[first - self.behind..] }
    }

    /// The pages of the first `end` ones of the sequence that the list still has.
    pub fn up_to(&self, end: usize) -> PageSpan<'_> {
        PageSpan { first: self.behind, pages: &self.pages[..end - self.behind] }
    }

    /// How many of its pages other requests use, too. At its beginning, these came from the prefix
    /// cache.
    pub fn count_shared(&self, pool: &PagePool) -> u32 {
        pool.count_shared(&self.pages[..self.cached.saturating_sub(self.behind)])
    }

    /// All KV that its pages get from now on is computed after the flushes so far.
    pub fn begin(&mut self, pool: &PagePool) {
        self.flushes = pool.flushes();
    }

    /// Takes the cached pages `found` of a sequence with these keys, and no pages before them. The
    /// list is empty.
    pub fn reuse(&mut self, pool: &mut PagePool, keys: &[PageKey], found: &Reusable) {
        assert!(self.is_empty(), "a request begins without pages");
        (self.behind, self.cached) = (found.pages.start as usize, found.pages.end as usize);
        if !found.pages.is_empty() {
            let places = found.pages.start as usize..found.pages.end as usize;
            pool.reuse(&keys[places], &mut self.pages);
        }
        debug_assert_eq!(self.pages.len(), found.pages.len(), "what was found is there");
    }

    /// Extends the list to `end` pages. False, and nothing changes, if the pool has too few.
    #[must_use]
    pub fn extend_to(&mut self, pool: &mut PagePool, end: usize) -> bool {
        pool.allocate(end.saturating_sub(self.end()) as u32, &mut self.pages)
    }

    /// Puts the pages `from..to` of the sequence into the prefix cache, under the keys with the
    /// same indices. Nothing enters if the cache was flushed in the meantime.
    pub fn keep(&mut self, pool: &mut PagePool, keys: &[PageKey], from: usize, to: usize) {
        if self.flushes != pool.flushes() {
            return;
        }
        pool.keep(&keys[from..to], &mut self.pages[from - self.behind..to - self.behind]);
    }

    /// Gives the pages before the `first`-th one of the sequence back.
    pub fn give_back_before(&mut self, pool: &mut PagePool, first: usize) {
        let gone = first.saturating_sub(self.behind);
        assert!(gone < self.pages.len() || gone == 0, "a request keeps a page");
        pool.release(&self.pages[..gone]);
        self.pages.drain(..gone);
        self.behind += gone;
    }

    /// Gives all pages back. They stay listed until [`RequestPages::clear`], for a lease over them.
    pub fn release(&self, pool: &mut PagePool) {
        pool.release(&self.pages);
    }

    /// Forgets the pages.
    pub fn clear(&mut self) {
        (self.behind, self.cached) = (0, 0);
        self.pages.clear();
    }
}

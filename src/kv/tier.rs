//! The host tier: memory beside the page pool for the KV of retracted requests.
//!
//! Owns: a mapping of its own (memory is allocated on first use), and the chain of pages of
//! each stored request.
//! Thread: `engine`.
//! Invariant: a page is free or in exactly one chain; a chain ends when its [`Stored`] comes back.
//! Not here: which request is retracted and when it gets new pages (`sched::retraction`).

use crate::ids::PageId;
use crate::kv::layout::KvLayout;
use crate::kv::region::Region;
use crate::stdx::failpoint::is_failpoint_active;
use std::io;

/// End of a chain.
const NONE: u32 = u32::MAX;

/// Memory for some pages of KV.
#[derive(Debug)]
pub struct Tier {
    /// None if the tier has no pages.
    region: Option<Region>,
    page_bytes: usize,
    /// For each page the next one in its chain or in the list of free pages.
    next: Box<[u32]>,
    free: u32,
    left: u32,
}

/// KV of one request in the tier. It goes back to the tier that made it.
#[derive(Debug)]
#[must_use]
pub struct Stored {
    first: u32,
    pages: u32,
}

impl Tier {
    /// A tier without pages.
    pub fn none() -> Tier {
        Tier { region: None, page_bytes: 0, next: [].into(), free: NONE, left: 0 }
    }

    /// A tier of `pages` pages of `layout`; each page is one contiguous block.
    pub fn new(pages: u32, layout: &KvLayout) -> io::Result<Tier> {
        assert!(
            layout.ranks == 1 && layout.page_stride == layout.page_bytes(),
            "a page is one block"
        );
        if pages == 0 {
            return Ok(Tier::none());
        }
        let page_bytes = layout.page_bytes() as usize;
        let region = Region::new(c"baton-tier", pages as usize * page_bytes)?;
        let next = (1..=pages).map(|page| if page == pages { NONE } else { page }).collect();
        Ok(Tier { region: Some(region), page_bytes, next, free: 0, left: pages })
    }

    /// Pages that hold KV.
    pub fn stored(&self) -> u32 {
        self.next.len() as u32 - self.left
    }

    /// Bytes of one page.
    pub fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// Copies `pages` of `pool`, used by only one request, into the tier. None, and nothing
    /// changes, if fewer pages are left in the tier.
    pub fn store(
        &mut self,
        pool: &Region,
        pages: impl DoubleEndedIterator<Item = PageId> + Clone,
    ) -> Option<Stored> {
        let region = self.region.as_ref()?;
        let count = pages.clone().count() as u32;
        if count > self.left {
            return None;
        }
        let (mut first, mut taken) = (NONE, self.free);
        // From the last page to the first, so that the chain begins with the first.
        for page in pages.rev() {
            let from = page.index() * self.page_bytes;
            region.copy_from(taken as usize * self.page_bytes, pool, from, self.page_bytes);
            let free = std::mem::replace(&mut self.next[taken as usize], first);
            (first, taken) = (taken, free);
        }
        self.free = taken;
        self.left -= count;
        Some(Stored { first, pages: count })
    }

    /// Copies the stored KV back into as many `pages` of `pool`, and frees its pages in the tier.
    /// Pages with `true` have their KV.
    pub fn restore(
        &mut self,
        stored: Stored,
        pool: &Region,
        pages: impl Iterator<Item = (PageId, bool)>,
    ) {
        let region = self.region.as_ref().expect("KV is stored only in a tier with pages");
        let mut at = stored.first;
        let mut count = 0;
        for (page, has_kv) in pages {
            count += 1;
            let is_last = count == stored.pages;
            let is_lost = is_last && is_failpoint_active("the last page of retracted KV is lost");
            assert!(count <= stored.pages, "the pool offers as many pages as were stored");
            if !has_kv && !is_lost {
                let from = at as usize * self.page_bytes;
                pool.copy_from(page.index() * self.page_bytes, region, from, self.page_bytes);
            }
            at = self.next[at as usize];
        }
        assert_eq!(count, stored.pages, "the pool offers as many pages as were stored");
        if !is_failpoint_active("KV taken back stays in the tier") {
            self.forget(stored);
        }
    }

    /// Frees the stored pages.
    pub fn forget(&mut self, stored: Stored) {
        let mut at = stored.first;
        while at != NONE {
            let next = std::mem::replace(&mut self.next[at as usize], self.free);
            (self.free, at) = (at, next);
        }
        self.left += stored.pages;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::layout::KvDtype;

    const WORDS: usize = 8;

    fn layout() -> KvLayout {
        KvLayout::page_major(2, 2, 1, 4, KvDtype::F16)
    }

    fn pool(pages: usize) -> Region {
        let pool = Region::new(c"pool", pages * 8 * WORDS).unwrap();
        (0..pages * WORDS).for_each(|word| fill(&pool, word / WORDS, word % WORDS, word as u64));
        pool
    }

    fn fill(pool: &Region, page: usize, word: usize, value: u64) {
        pool.word(8 * (page * WORDS + word)).store(value, std::sync::atomic::Ordering::Relaxed);
    }

    fn words(pool: &Region, page: PageId) -> Vec<u64> {
        let word = |word| pool.word(8 * (page.index() * WORDS + word));
        (0..WORDS).map(|index| word(index).load(std::sync::atomic::Ordering::Relaxed)).collect()
    }

    #[test]
    fn stored_pages_are_restored_into_other_pages() {
        let (pool, mut tier) = (pool(8), Tier::new(5, &layout()).unwrap());
        let content: Vec<_> = (0..8).map(|page| words(&pool, PageId(page))).collect();
        let first = tier.store(&pool, [PageId(3), PageId(1)].into_iter()).unwrap();
        let second = tier.store(&pool, [PageId(7), PageId(0), PageId(2)].into_iter()).unwrap();
        assert_eq!(tier.stored(), 5);
        assert!(tier.store(&pool, [PageId(0)].into_iter()).is_none(), "all of it is taken");
        tier.restore(first, &pool, [(PageId(4), false), (PageId(5), false)].into_iter());
        assert_eq!(
            [words(&pool, PageId(4)), words(&pool, PageId(5))],
            [content[3].clone(), content[1].clone()]
        );
        // The first page is shared with other requests and must not be written.
        let third = tier.store(&pool, [PageId(6)].into_iter()).unwrap();
        let places = [(PageId(6), true), (PageId(1), false), (PageId(3), false)];
        tier.restore(second, &pool, places.into_iter());
        let now: Vec<_> = [6, 1, 3].map(|page| words(&pool, PageId(page))).into();
        assert_eq!(now, [content[6].clone(), content[0].clone(), content[2].clone()]);
        tier.forget(third);
        assert_eq!(tier.stored(), 0);
        let all = tier.store(&pool, [0, 1, 2, 3, 4].map(PageId).into_iter()).unwrap();
        tier.forget(all);
    }

    #[test]
    fn a_tier_of_nothing_takes_nothing() {
        let mut tier = Tier::new(0, &layout()).unwrap();
        assert!(tier.store(&pool(1), [PageId(0)].into_iter()).is_none());
    }
}

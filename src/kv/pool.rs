//! The pages of one worker and who holds them.
//!
//! Owns: for each page its users (requests) and its leases (transfers), and the map of free pages.
//! Thread: `engine`. Invariants: `free + cached + in use + leased = total`; a page is free only when it
//! has neither user nor lease, so one whose user left stays until the lease's [`Ended`] is back.
//! Allocation prefers long runs of neighbours, which become single copies and writes.
//! Not here: the memory (`region`), the prefix tree that will fill `cached`.

use crate::ids::{Generation, PageId, SlotId};
use crate::kv::lease::{Ended, Lease};

/// Pages by state. Every page is in exactly one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PageCounts {
    /// Nobody holds them.
    pub free: u32,
    /// No user, kept for their content; given up when pages are short. None before the prefix cache.
    pub cached: u32,
    /// Some request uses them, leased besides or not.
    pub in_use: u32,
    /// The user is gone, a transfer may still touch them.
    pub leased: u32,
}

impl PageCounts {
    /// All pages of the pool.
    pub fn total(&self) -> u32 {
        self.free + self.cached + self.in_use + self.leased
    }
}

/// Holders of one page.
#[derive(Clone, Copy, Default)]
struct Page {
    users: u32,
    leases: u32,
}

/// The pages of one worker.
pub struct PagePool {
    pages: Box<[Page]>,
    free: Bits,
    counts: PageCounts,
}

impl PagePool {
    /// A pool of `pages` free pages, numbered from 0.
    pub fn new(pages: u32) -> PagePool {
        PagePool {
            pages: vec![Page::default(); pages as usize].into(),
            free: Bits::ones(pages as usize),
            counts: PageCounts { free: pages, ..PageCounts::default() },
        }
    }

    /// Pages by state.
    pub fn counts(&self) -> PageCounts {
        self.counts
    }

    /// Gives `n` pages their first user and appends them to `pages`, whose capacity is the caller's care.
    /// False, and nothing is done, when fewer are free. Continues the run that `pages` ends with, else takes
    /// the smallest run that holds all, else the longest runs there are.
    #[must_use]
    pub fn allocate(&mut self, n: u32, pages: &mut Vec<PageId>) -> bool {
        if n > self.counts.free {
            return false;
        }
        let left = n as usize - self.extend_last_run(n as usize, pages);
        if left > 0 {
            self.allocate_runs(left, pages);
        }
        true
    }

    /// The user of these pages is gone.
    pub fn release(&mut self, pages: &[PageId]) {
        for &id in pages {
            let page = &mut self.pages[id.index()];
            assert!(page.users > 0, "page {id} has no user to release it");
            page.users -= 1;
            if page.users > 0 {
                continue;
            }
            self.counts.in_use -= 1;
            if page.leases > 0 {
                self.counts.leased += 1;
            } else {
                self.free_up(id);
            }
        }
    }

    /// Leases pages in use to a transfer.
    pub fn lease(&mut self, slot: SlotId, generation: Generation, pages: &[PageId]) -> Lease {
        for &id in pages {
            let page = &mut self.pages[id.index()];
            assert!(page.users > 0, "page {id} is leased without a user");
            page.leases += 1;
        }
        Lease::new(slot, generation)
    }

    /// The lease over these pages has ended.
    pub fn end(&mut self, _ended: Ended, pages: &[PageId]) {
        for &id in pages {
            let page = &mut self.pages[id.index()];
            assert!(page.leases > 0, "page {id} has no lease to end");
            page.leases -= 1;
            if page.leases == 0 && page.users == 0 {
                self.counts.leased -= 1;
                self.free_up(id);
            }
        }
    }

    /// Panics unless the counts and the map of free pages agree with each page's holders.
    pub fn invariants(&self) {
        let mut seen = PageCounts::default();
        for (index, page) in self.pages.iter().enumerate() {
            let free = page.users == 0 && page.leases == 0;
            assert_eq!(free, self.free.get(index), "page {index} and the map of free pages disagree");
            match (page.users, page.leases) {
                (0, 0) => seen.free += 1,
                (0, _) => seen.leased += 1,
                _ => seen.in_use += 1,
            }
        }
        assert_eq!(seen, self.counts);
        assert_eq!(seen.total() as usize, self.pages.len());
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

    /// `n` free pages exist.
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
        // No run holds all: the long ones first, down by halves, so that the passes stay few.
        let mut least = longest.next_power_of_two() / 2;
        let mut left = n;
        while left > 0 {
            left = self.take_runs_of(least.max(1), left, pages);
            least /= 2;
        }
    }

    /// Takes pages from runs of at least `least` pages until `left` are found; how many are still missing.
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

/// A set of small numbers.
struct Bits {
    words: Box<[u64]>,
    len: usize,
}

impl Bits {
    fn ones(len: usize) -> Bits {
        let mut bits = Bits { words: vec![0; len.div_ceil(64)].into(), len };
        (0..len).for_each(|index| bits.set(index, true));
        bits
    }

    fn get(&self, index: usize) -> bool {
        self.words[index / 64] >> (index % 64) & 1 == 1
    }

    fn set(&mut self, index: usize, value: bool) {
        let bit = 1 << (index % 64);
        if value {
            self.words[index / 64] |= bit;
        } else {
            self.words[index / 64] &= !bit;
        }
    }

    /// The first run of members at or after `from`: (start, length).
    fn run(&self, from: usize) -> Option<(usize, usize)> {
        let start = self.find(from, 0)?;
        let end = self.find(start, u64::MAX).unwrap_or(self.len);
        Some((start, end - start))
    }

    /// The first index at or after `from` whose bit, flipped by `flip`, is set.
    fn find(&self, from: usize, flip: u64) -> Option<usize> {
        let mut index = from;
        while index < self.len {
            let word = (self.words[index / 64] ^ flip) >> (index % 64);
            if word != 0 {
                let found = index + word.trailing_zeros() as usize;
                return (found < self.len).then_some(found);
            }
            index = (index / 64 + 1) * 64;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::lease::MoverRight;
    use proptest::prelude::*;

    fn allocate(pool: &mut PagePool, n: u32) -> Vec<PageId> {
        let mut pages = Vec::new();
        assert!(pool.allocate(n, &mut pages));
        pages
    }

    fn ids(range: std::ops::Range<u32>) -> Vec<PageId> {
        range.map(PageId).collect()
    }

    #[test]
    fn the_smallest_run_that_fits_is_taken() {
        let mut pool = PagePool::new(200);
        let all = allocate(&mut pool, 200);
        pool.release(&all[10..40]);
        pool.release(&all[60..70]);
        pool.release(&all[100..180]);
        assert_eq!(allocate(&mut pool, 8), ids(60..68));
        assert_eq!(allocate(&mut pool, 20), ids(10..30));
        assert_eq!(allocate(&mut pool, 70), ids(100..170));
        pool.invariants();
    }

    #[test]
    fn without_a_run_that_fits_the_longest_are_taken() {
        let mut pool = PagePool::new(100);
        let all = allocate(&mut pool, 100);
        (0..20).for_each(|i| pool.release(&all[i * 2..i * 2 + 1]));
        pool.release(&all[50..66]);
        pool.release(&all[70..86]);
        let pages = allocate(&mut pool, 33);
        assert_eq!(pages[..32], [ids(50..66), ids(70..86)].concat());
        pool.invariants();
    }

    #[test]
    fn a_list_that_grows_continues_its_run() {
        let mut pool = PagePool::new(64);
        let mut pages = allocate(&mut pool, 3);
        for _ in 0..5 {
            assert!(pool.allocate(1, &mut pages));
        }
        assert_eq!(pages, ids(0..8));
    }

    #[test]
    fn too_many_pages_are_refused_whole() {
        let mut pool = PagePool::new(4);
        let held = allocate(&mut pool, 2);
        let mut pages = Vec::new();
        assert!(!pool.allocate(3, &mut pages));
        assert_eq!((pages.len(), held.len(), pool.counts().free), (0, 2, 2));
    }

    #[test]
    fn a_leased_page_outlives_its_user() {
        let mut pool = PagePool::new(2);
        let pages = allocate(&mut pool, 2);
        let lease = pool.lease(SlotId(0), Generation(1), &pages);
        pool.release(&pages);
        assert_eq!(pool.counts(), PageCounts { leased: 2, ..PageCounts::default() });
        assert!(!pool.allocate(1, &mut Vec::new()));
        pool.end(lease.end(&MoverRight::for_mover_thread()), &pages);
        assert_eq!(pool.counts().free, 2);
    }

    #[derive(Clone, Debug)]
    enum Act {
        Allocate(u32),
        Release(usize),
        Lease(usize),
        End(usize),
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            (1u32..30).prop_map(Act::Allocate),
            any::<usize>().prop_map(Act::Release),
            any::<usize>().prop_map(Act::Lease),
            any::<usize>().prop_map(Act::End),
        ]
    }

    proptest! {
        /// Against a pool that is two lists: of held page lists and of leased page lists.
        #[test]
        fn behaves_like_two_lists(total in 1u32..150, acts in prop::collection::vec(act(), 1..120)) {
            let right = MoverRight::for_mover_thread();
            let mut pool = PagePool::new(total);
            let mut held: Vec<Vec<PageId>> = Vec::new();
            let mut leased: Vec<(Lease, Vec<PageId>)> = Vec::new();
            for act in acts {
                match act {
                    Act::Allocate(n) => {
                        let free = pool.counts().free;
                        let mut pages = Vec::new();
                        prop_assert_eq!(pool.allocate(n, &mut pages), n <= free);
                        for page in &pages {
                            prop_assert!(held.iter().all(|other| !other.contains(page)));
                            prop_assert!(leased.iter().all(|(_, other)| !other.contains(page)));
                        }
                        held.push(pages);
                    }
                    Act::Release(at) if !held.is_empty() => {
                        pool.release(&held.swap_remove(at % held.len()));
                    }
                    Act::Lease(at) if !held.is_empty() => {
                        let pages = held[at % held.len()].clone();
                        leased.push((pool.lease(SlotId(0), Generation(1), &pages), pages));
                    }
                    Act::End(at) if !leased.is_empty() => {
                        let (lease, pages) = leased.swap_remove(at % leased.len());
                        pool.end(lease.end(&right), &pages);
                    }
                    _ => {}
                }
                pool.invariants();
                let in_use: usize = held.iter().map(Vec::len).sum();
                let mut only_leased: Vec<_> = leased.iter().flat_map(|(_, pages)| pages).collect();
                only_leased.retain(|page| held.iter().all(|other| !other.contains(page)));
                only_leased.sort();
                only_leased.dedup();
                let counts = pool.counts();
                prop_assert_eq!(counts.in_use as usize, in_use);
                prop_assert_eq!(counts.leased as usize, only_leased.len());
                prop_assert_eq!(counts.total(), total);
            }
        }
    }
}

//! What a pool keeps beyond its users: pages with the KV of prefixes, and checkpoints of recurrent
//! state.
//!
//! A checkpoint is the state behind a full page of a sequence. It has the key of this page, and its
//! own pages. They are never written again: a request that begins there reads them, and writes its
//! state to pages of its own.
//! Thread: `engine`.
//! Invariants: a page is in one of the indices, of prefixes or of checkpoints, at most. Checkpoints
//! take no more pages than they may. Idle pages of both are evicted in one order. Nothing is
//! allocated after start.
//! Not here: holders of pages ([`super::pool`]), where checkpoints are made (`sched::slots`).

use crate::ids::PageId;
use crate::kv::page_key::{KeyChain, PageKey};
use crate::kv::prefix::PrefixIndex;
use crate::limits::SEEN_KEYS;

/// The cache of one pool.
pub(in crate::kv) struct PageCache {
    /// Makes the keys.
    pub chain: KeyChain,
    /// Pages of groups of layers.
    prefixes: PrefixIndex,
    checkpoints: Option<Checkpoints>,
    /// How many times a page became idle.
    clock: u64,
}

/// Checkpoints of recurrent state.
struct Checkpoints {
    index: PrefixIndex,
    /// Most pages of all checkpoints.
    most: usize,
    /// Keys of the last prompts. The page ids here are only their numbers.
    seen: PrefixIndex,
    /// The number that the next key takes.
    next: u32,
}

impl PageCache {
    /// An empty cache over `pages` pages of `page_size` tokens, without checkpoints.
    pub fn new(pages: u32, page_size: u32) -> PageCache {
        PageCache {
            chain: KeyChain::new(page_size),
            prefixes: PrefixIndex::new(pages),
            checkpoints: None,
            clock: 0,
        }
    }

    /// The same over `pages` pages, of which checkpoints take `most` at most.
    pub fn with_checkpoints(mut self, pages: u32, most: u32) -> PageCache {
        self.checkpoints = (most > 0).then(|| Checkpoints {
            index: PrefixIndex::new(pages),
            most: most as usize,
            seen: PrefixIndex::new(SEEN_KEYS),
            next: 0,
        });
        self
    }

    /// Whether the page is in the cache.
    pub fn contains(&self, page: PageId) -> bool {
        self.prefixes.contains(page) || self.is_of_checkpoint(page)
    }

    /// The page of a group of layers with this key.
    pub fn find(&self, key: PageKey, group: usize) -> Option<PageId> {
        self.prefixes.find(key.in_group(group))
    }

    /// Inserts a page of a group of layers, as [`PrefixIndex::insert`].
    pub fn insert(&mut self, page: PageId, key: PageKey, group: usize) {
        self.prefixes.insert(page, key.in_group(group));
    }

    /// The `part`-th page of the checkpoint with this key.
    pub fn find_state(&self, key: PageKey, part: usize) -> Option<PageId> {
        self.checkpoints.as_ref()?.index.find(key.in_group(part))
    }

    /// Inserts the `part`-th page of a checkpoint. No other page has its key, and there is room.
    pub fn insert_state(&mut self, page: PageId, key: PageKey, part: usize) {
        let checkpoints = self.checkpoints.as_mut().expect("a checkpoint was begun");
        assert!(checkpoints.index.len() < checkpoints.most, "checkpoints have a limit");
        checkpoints.index.insert(page, key.in_group(part));
    }

    /// Whether a page of a checkpoint must leave before another one has room.
    pub fn is_full_of_checkpoints(&self) -> bool {
        self.checkpoints.as_ref().is_some_and(|all| all.index.len() == all.most)
    }

    /// How many of the first keys an earlier prompt had. From now on, a prompt had them all.
    pub fn note_prompt(&mut self, keys: &[PageKey]) -> usize {
        let Some(Checkpoints { seen, next, .. }) = &mut self.checkpoints else { return 0 };
        let had = keys.iter().take_while(|&&key| seen.find(key).is_some()).count();
        for &key in &keys[had..] {
            if seen.find(key).is_none() {
                seen.remove(PageId(*next));
                seen.insert(PageId(*next), key);
                *next = (*next + 1) % SEEN_KEYS;
            }
        }
        had
    }

    /// A page of the cache becomes idle.
    pub fn leave(&mut self, page: PageId) {
        self.clock += 1;
        let now = self.clock;
        self.index_of(page).leave(page, now);
    }

    /// An idle page is held again.
    pub fn wake(&mut self, page: PageId) {
        self.index_of(page).wake(page);
    }

    /// Removes the page that is idle for the longest time.
    pub fn evict(&mut self) -> Option<PageId> {
        let of_prefix = self.prefixes.oldest_time().unwrap_or(u64::MAX);
        match &mut self.checkpoints {
            Some(Checkpoints { index, .. })
                if index.oldest_time().is_some_and(|time| time < of_prefix) =>
            {
                index.evict()
            }
            _ => self.prefixes.evict(),
        }
    }

    /// Removes the page of a checkpoint that is idle for the longest time.
    pub fn evict_state(&mut self) -> Option<PageId> {
        self.checkpoints.as_mut()?.index.evict()
    }

    /// Removes all pages. No page is idle.
    pub fn clear(&mut self, pages: usize) {
        let indices = self.checkpoints.as_mut().map(|all| &mut all.index);
        for index in [&mut self.prefixes].into_iter().chain(indices) {
            if index.len() > 0 {
                (0..pages).for_each(|page| index.remove(PageId(page as u32)));
            }
        }
    }

    /// Panics unless both indices agree with themselves, as [`PrefixIndex::invariants`].
    pub fn invariants(&self, idle: impl Fn(PageId) -> bool) {
        self.prefixes.invariants(&idle);
        if let Some(all) = &self.checkpoints {
            all.index.invariants(&idle);
            assert!(all.index.len() <= all.most, "checkpoints have a limit");
        }
    }

    fn is_of_checkpoint(&self, page: PageId) -> bool {
        self.checkpoints.as_ref().is_some_and(|all| all.index.contains(page))
    }

    fn index_of(&mut self, page: PageId) -> &mut PrefixIndex {
        match &mut self.checkpoints {
            Some(all) if all.index.contains(page) => &mut all.index,
            _ => &mut self.prefixes,
        }
    }
}

//! The prefix cache: an index from page keys to the pages with their KV.
//!
//! Owns: the key of each cached page, and the order in which pages became idle.
//! Thread: `engine`.
//! Invariants: two pages have different keys. A key stands for all tokens up to the end of its
//! page. A page can be here while one of the pages before it is not. Nothing is allocated after
//! start.
//! Not here: the keys ([`super::page_key`]), the users of a page, which decide whether it is idle
//! ([`super::pool`]).

use crate::ids::PageId;
use crate::kv::page_key::PageKey;
use crate::stdx::failpoint::is_failpoint_active;

/// A page's place. Without a key it is not in the cache.
#[derive(Clone, Copy, Default)]
struct Node {
    key: Option<PageKey>,
    /// The next page of its bucket.
    next: Option<PageId>,
    /// Idle pages before and after it, by the time they became idle; only valid while idle.
    older: Option<PageId>,
    newer: Option<PageId>,
    /// When it became idle.
    left: u64,
}

/// The index over one worker's pages.
pub(in crate::kv) struct PrefixIndex {
    nodes: Box<[Node]>,
    /// First page of each bucket; the number of buckets is a power of two.
    buckets: Box<[Option<PageId>]>,
    /// Pages in the cache.
    len: usize,
    /// Idle for the longest time, and for the shortest.
    oldest: Option<PageId>,
    newest: Option<PageId>,
}

impl PrefixIndex {
    /// An empty index over `pages` pages.
    pub fn new(pages: u32) -> PrefixIndex {
        PrefixIndex {
            nodes: vec![Node::default(); pages as usize].into(),
            buckets: vec![None; (pages as usize).next_power_of_two()].into(),
            len: 0,
            oldest: None,
            newest: None,
        }
    }

    /// Number of pages in the cache.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the page is in the cache.
    pub fn contains(&self, page: PageId) -> bool {
        self.nodes[page.index()].key.is_some()
    }

    /// The page of this key.
    pub fn find(&self, key: PageKey) -> Option<PageId> {
        let mut at = self.buckets[self.bucket(key)];
        while let Some(page) = at {
            let node = &self.nodes[page.index()];
            if node.key == Some(key) {
                return Some(page);
            }
            at = node.next;
        }
        None
    }

    /// Inserts a page. It is not in the cache, no other page has its key, and it is not idle.
    pub fn insert(&mut self, page: PageId, key: PageKey) {
        assert!(!self.contains(page), "page {page} has two keys");
        debug_assert!(self.find(key).is_none(), "two pages have one key");
        let bucket = self.bucket(key);
        let next = self.buckets[bucket].replace(page);
        self.nodes[page.index()] = Node { key: Some(key), next, ..Node::default() };
        self.len += 1;
    }

    /// Removes a page that is not idle from the cache.
    pub fn remove(&mut self, page: PageId) {
        let Node { key, next, .. } = self.nodes[page.index()];
        let Some(key) = key else { return };
        let bucket = self.bucket(key);
        match self.buckets[bucket] {
            Some(first) if first == page => self.buckets[bucket] = next,
            first => {
                let mut before = first;
                while let Some(other) = before {
                    let node = &mut self.nodes[other.index()];
                    if node.next == Some(page) {
                        node.next = next;
                        break;
                    }
                    before = node.next;
                }
            }
        }
        self.nodes[page.index()] = Node::default();
        self.len -= 1;
    }

    /// A page of the cache becomes idle, at a time after that of all idle pages.
    pub fn leave(&mut self, page: PageId, now: u64) {
        let older = self.newest.replace(page);
        let node = &mut self.nodes[page.index()];
        (node.older, node.newer, node.left) = (older, None, now);
        match older {
            Some(older) => self.nodes[older.index()].newer = Some(page),
            None => self.oldest = Some(page),
        }
    }

    /// An idle page is held again.
    pub fn wake(&mut self, page: PageId) {
        if is_failpoint_active("held page stays in the order of idle pages") {
            return;
        }
        let node = &mut self.nodes[page.index()];
        let (older, newer) = (node.older.take(), node.newer.take());
        match older {
            Some(older) => self.nodes[older.index()].newer = newer,
            None => self.oldest = newer,
        }
        match newer {
            Some(newer) => self.nodes[newer.index()].older = older,
            None => self.newest = older,
        }
    }

    /// When the page that is idle for the longest time became idle.
    pub fn oldest_time(&self) -> Option<u64> {
        self.oldest.map(|page| self.nodes[page.index()].left)
    }

    /// Removes the page that is idle for the longest time from the cache.
    pub fn evict(&mut self) -> Option<PageId> {
        let page = self.oldest?;
        self.wake(page);
        self.remove(page);
        Some(page)
    }

    /// Panics unless buckets, keys and the order of idle pages agree. `idle` returns whether a page
    /// has no holder.
    pub fn invariants(&self, idle: impl Fn(PageId) -> bool) {
        let mut indexed = 0;
        for (bucket, &first) in self.buckets.iter().enumerate() {
            let mut at = first;
            while let Some(page) = at {
                let node = &self.nodes[page.index()];
                let key = node.key.expect("a page of the index is in the cache");
                assert_eq!(self.bucket(key), bucket, "page {page} is in a foreign bucket");
                assert_eq!(self.find(key), Some(page), "another page has the key of page {page}");
                indexed += 1;
                at = node.next;
            }
        }
        assert_eq!(indexed, self.nodes.iter().filter(|node| node.key.is_some()).count());
        assert_eq!(indexed, self.len);
        let (mut at, mut older, mut left, mut ordered) = (self.oldest, None, 0, 0);
        while let Some(page) = at {
            let node = &self.nodes[page.index()];
            assert!(self.contains(page) && idle(page), "page {page} is in the order of idle pages");
            assert!(node.older == older && node.left > left, "page {page} is out of order");
            (older, left, ordered, at) = (Some(page), node.left, ordered + 1, node.newer);
        }
        assert_eq!(self.newest, older);
        let pages = (0..self.nodes.len()).map(|index| PageId(index as u32));
        assert_eq!(ordered, pages.filter(|&page| self.contains(page) && idle(page)).count());
    }

    fn bucket(&self, key: PageKey) -> usize {
        key.low_bits() & (self.buckets.len() - 1)
    }
}

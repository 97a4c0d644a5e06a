//! The prefix cache: a radix tree from token ids to the pages with their KV. An edge is one page.
//!
//! A node is a page; its parent is the page of the tokens before it. So a page has one place, and
//! the tree is an array by page with an index over (parent, ids). Owns: the places, and the order
//! in which pages became idle.
//! Thread: `engine`.
//! Invariants: a lookup compares the ids of a page and of all pages before it, never only their
//! hash. A parent stays in the tree as long as its child. Descendants of an idle page are idle and
//! became so earlier, so the oldest idle page is a leaf. Nothing is allocated after start.
//! Not here: the users of a page, which decide whether it is idle ([`super::pool`]).

use crate::ids::PageId;
use crate::stdx::failpoint::is_failpoint_active;
use sha2::{Digest, Sha256};
use std::hash::{BuildHasher, Hasher, RandomState};

/// A digest of a tenant's name. It separates tenants: a tenant can neither use nor detect pages
/// that another tenant has cached.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Salt(pub u128);

impl Salt {
    /// The salt of `name` within this salt.
    pub fn of(self, name: &str) -> Salt {
        let digest: [u8; 32] =
            Sha256::new().chain_update(self.0.to_le_bytes()).chain_update(name).finalize().into();
        let half = digest.first_chunk().expect("sixteen of its bytes");
        Salt(u128::from_le_bytes(*half))
    }
}

/// The ids of a sequence, for a lookup: prompt, then output.
#[derive(Clone, Copy, Debug)]
pub struct Sequence<'a> {
    /// Its tenant.
    pub salt: Salt,
    /// The first part.
    pub prompt: &'a [u32],
    /// The second part.
    pub output: &'a [u32],
}

impl Sequence<'_> {
    /// The ids of its `index`-th page.
    fn page(&self, index: usize, page_size: usize) -> impl Iterator<Item = u32> {
        let (begin, end) = (index * page_size, (index + 1) * page_size);
        let part = |ids: &'_ [u32], before: usize| {
            let clamp = |at: usize| at.saturating_sub(before).min(ids.len());
            clamp(begin)..clamp(end)
        };
        let prompt = &self.prompt[part(self.prompt, 0)];
        let output = &self.output[part(self.output, self.prompt.len())];
        prompt.iter().chain(output).copied()
    }
}

/// The place before a page.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(in crate::kv) enum Parent {
    /// The page is the first one of a sequence of this tenant.
    Root(Salt),
    /// This page.
    Page(PageId),
}

/// A page's place. Without a parent it is not in the tree.
#[derive(Clone, Copy, Default)]
struct Node {
    parent: Option<Parent>,
    /// The next page of its bucket.
    next: Option<PageId>,
    /// Idle pages before and after it, by the time they became idle; only valid while idle.
    older: Option<PageId>,
    newer: Option<PageId>,
    /// When it became idle; for [`PrefixTree::invariants`], which must not allocate.
    left: u64,
}

/// The tree over one worker's pages.
pub(in crate::kv) struct PrefixTree {
    page_size: usize,
    nodes: Box<[Node]>,
    /// Ids by page.
    ids: Box<[u32]>,
    /// First page of each bucket; the number of buckets is a power of two.
    buckets: Box<[Option<PageId>]>,
    /// Random at start, so that no client can fill one bucket.
    keys: RandomState,
    /// Pages in the tree.
    len: usize,
    /// Idle for the longest time, and for the shortest.
    oldest: Option<PageId>,
    newest: Option<PageId>,
    /// How many times a page became idle.
    clock: u64,
}

impl PrefixTree {
    /// An empty tree over `pages` pages of `page_size` tokens.
    pub fn new(pages: u32, page_size: u32) -> PrefixTree {
        PrefixTree {
            page_size: page_size as usize,
            nodes: vec![Node::default(); pages as usize].into(),
            ids: vec![0; pages as usize * page_size as usize].into(),
            buckets: vec![None; (pages as usize).next_power_of_two()].into(),
            keys: RandomState::new(),
            len: 0,
            oldest: None,
            newest: None,
            clock: 0,
        }
    }

    /// Tokens of a page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Whether no page is in the tree.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the page is in the tree.
    pub fn contains(&self, page: PageId) -> bool {
        self.nodes[page.index()].parent.is_some()
    }

    /// The cached page with the ids of the `index`-th page of `sequence`, behind `parent`.
    pub fn find(&self, parent: Parent, sequence: &Sequence<'_>, index: usize) -> Option<PageId> {
        let mut at = self.buckets[self.bucket(parent, sequence.page(index, self.page_size))];
        while let Some(page) = at {
            let node = &self.nodes[page.index()];
            if node.parent == Some(parent)
                && sequence.page(index, self.page_size).eq(self.ids_of(page))
            {
                return Some(page);
            }
            at = node.next;
        }
        None
    }

    /// Inserts `page`, which holds the KV of the `index`-th page of `sequence`, behind `parent`. It
    /// is not in the tree, no other page has this place, and it is not idle.
    pub fn insert(&mut self, page: PageId, parent: Parent, sequence: &Sequence<'_>, index: usize) {
        debug_assert!(!self.contains(page) && self.find(parent, sequence, index).is_none());
        let ids = &mut self.ids[page.index() * self.page_size..][..self.page_size];
        ids.iter_mut().zip(sequence.page(index, self.page_size)).for_each(|(kept, id)| *kept = id);
        let bucket = self.bucket(parent, self.ids_of(page));
        let next = self.buckets[bucket].replace(page);
        self.nodes[page.index()] = Node { parent: Some(parent), next, ..Node::default() };
        self.len += 1;
    }

    /// Removes a page that is not idle from the tree.
    pub fn remove(&mut self, page: PageId) {
        let Node { parent, next, .. } = self.nodes[page.index()];
        let Some(parent) = parent else { return };
        let bucket = self.bucket(parent, self.ids_of(page));
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

    /// A page of the tree becomes idle. Its descendants are idle already.
    pub fn leave(&mut self, page: PageId) {
        let older = self.newest.replace(page);
        self.clock += 1;
        let node = &mut self.nodes[page.index()];
        (node.older, node.newer, node.left) = (older, None, self.clock);
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

    /// Removes the page that is idle for the longest time from the tree.
    pub fn evict(&mut self) -> Option<PageId> {
        let page = self.oldest?;
        self.wake(page);
        self.remove(page);
        Some(page)
    }

    /// Panics unless index, places and order of idle pages agree. `idle` returns whether a page has
    /// no holder.
    pub fn invariants(&self, idle: impl Fn(PageId) -> bool) {
        let mut indexed = 0;
        for (bucket, &first) in self.buckets.iter().enumerate() {
            let mut at = first;
            while let Some(page) = at {
                let node = &self.nodes[page.index()];
                let parent = node.parent.expect("a page of the index is in the tree");
                assert_eq!(
                    self.bucket(parent, self.ids_of(page)),
                    bucket,
                    "page {page} is in a foreign bucket"
                );
                if let Parent::Page(parent) = parent {
                    assert!(self.contains(parent), "page {page} has lost its parent {parent}");
                    assert!(
                        idle(page) || !idle(parent),
                        "page {parent} is idle, its child {page} is not"
                    );
                }
                indexed += 1;
                at = node.next;
            }
        }
        assert_eq!(indexed, self.nodes.iter().filter(|node| node.parent.is_some()).count());
        assert_eq!(indexed, self.len);
        let (mut at, mut older, mut left, mut ordered) = (self.oldest, None, 0, 0);
        while let Some(page) = at {
            let node = &self.nodes[page.index()];
            assert!(self.contains(page) && idle(page), "page {page} is in the order of idle pages");
            assert!(node.older == older && node.left > left, "page {page} is out of order");
            if let Some(Parent::Page(parent)) = node.parent {
                let parent_left = self.nodes[parent.index()].left;
                assert!(
                    !idle(parent) || parent_left > node.left,
                    "page {parent} was left before its child {page}"
                );
            }
            (older, left, ordered, at) = (Some(page), node.left, ordered + 1, node.newer);
        }
        assert_eq!(self.newest, older);
        let pages = (0..self.nodes.len()).map(|index| PageId(index as u32));
        assert_eq!(ordered, pages.filter(|&page| self.contains(page) && idle(page)).count());
    }

    fn ids_of(&self, page: PageId) -> impl Iterator<Item = u32> {
        self.ids[page.index() * self.page_size..][..self.page_size].iter().copied()
    }

    fn bucket(&self, parent: Parent, ids: impl Iterator<Item = u32>) -> usize {
        let mut hasher = self.keys.build_hasher();
        match parent {
            Parent::Root(salt) => hasher.write_u128(salt.0),
            Parent::Page(page) => hasher.write_u32(page.0),
        }
        ids.for_each(|id| hasher.write_u32(id));
        hasher.finish() as usize & (self.buckets.len() - 1)
    }
}

//! Which pages hold the KV of which tokens: the prefix cache's radix tree, whose edges are whole pages of ids.
//!
//! A node is a page, and its parent the page of the tokens before; so a page has one place, and the tree is an array
//! by page with an index over (parent, ids). Owns: the places, and the order in which idle pages were left.
//! Thread: `engine`. Invariants: a page is found by its ids and all that lie before it, which are compared, never
//! their hash alone; a parent is in the tree as long as its child; an idle page's descendants are idle and were left
//! before it, so the page left longest ago is a leaf. Nothing is allocated after start.
//! Not here: who uses a page, and so which are idle ([`super::pool`]).

use crate::ids::PageId;
use sha2::{Digest, Sha256};
use std::hash::{BuildHasher, Hasher, RandomState};

/// Separates tenants: what one has cached, another neither gets nor learns of. A digest of what names the tenant.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Salt(pub u128);

impl Salt {
    /// What is so called inside this one.
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
    /// Whose.
    pub salt: Salt,
    /// The first part.
    pub prompt: &'a [u32],
    /// What follows it.
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

/// What comes before a page.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(in crate::kv) enum Parent {
    /// Nothing: it is the first of its tenant's.
    Root(Salt),
    /// This page.
    Page(PageId),
}

/// A page's place. Without a parent it is not in the tree.
#[derive(Clone, Copy, Default)]
struct Node {
    parent: Option<Parent>,
    /// Of its bucket.
    next: Option<PageId>,
    /// Left before it, and after it; meaningful while idle.
    older: Option<PageId>,
    newer: Option<PageId>,
    /// When it was left; for [`PrefixTree::invariants`], which must not allocate.
    left: u64,
}

/// The tree over one worker's pages.
pub(in crate::kv) struct PrefixTree {
    page_size: usize,
    nodes: Box<[Node]>,
    /// Ids by page.
    ids: Box<[u32]>,
    /// First page of each bucket; as many as a power of two.
    buckets: Box<[Option<PageId>]>,
    /// Drawn at start, so that nobody outside can fill one bucket.
    keys: RandomState,
    /// Pages in the tree.
    len: usize,
    /// Left longest ago, and last.
    oldest: Option<PageId>,
    newest: Option<PageId>,
    /// Pages left so far.
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

    /// The page of the `index`-th page of `sequence` behind `parent`.
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

    /// `page` holds the KV of the `index`-th page of `sequence`, behind `parent`. It is in the tree nowhere else, and
    /// no other page has its place; it is not idle.
    pub fn insert(&mut self, page: PageId, parent: Parent, sequence: &Sequence<'_>, index: usize) {
        debug_assert!(!self.contains(page) && self.find(parent, sequence, index).is_none());
        let ids = &mut self.ids[page.index() * self.page_size..][..self.page_size];
        ids.iter_mut().zip(sequence.page(index, self.page_size)).for_each(|(kept, id)| *kept = id);
        let bucket = self.bucket(parent, self.ids_of(page));
        let next = self.buckets[bucket].replace(page);
        self.nodes[page.index()] = Node { parent: Some(parent), next, ..Node::default() };
        self.len += 1;
    }

    /// Takes a page that is not idle out of the tree.
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

    /// A page of the tree is held by nobody from now on. Its descendants were left before.
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

    /// Takes the idle page that was left longest ago out of the tree.
    pub fn evict(&mut self) -> Option<PageId> {
        let page = self.oldest?;
        self.wake(page);
        self.remove(page);
        Some(page)
    }

    /// Panics unless index, places and order of idle pages agree; `idle` tells whether a page is held by nobody.
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

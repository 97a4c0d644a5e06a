//! Which worker is thought to have the KV of which beginnings of prompts.
//!
//! Owns: for each block the workers that were sent it, for each worker its blocks in the order in which they were last
//! asked for. Invariants: no worker has more than its share, and what it was asked for longest ago goes first; who has a
//! block has those before it, since those are asked for with it and are given up after it. What a worker has really is its
//! own to say; this is what the router sent there.

use super::loads::WorkerNumber;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

/// Names of blocks are spread already.
#[derive(Default, Debug)]
struct AsIs(u64);

impl Hasher for AsIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.0 = self.0.rotate_left(8) ^ u64::from(byte));
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = super::work::mix(word);
    }
}

/// Who has a block, and when it was last asked for there.
#[derive(Clone, Copy, Debug)]
struct Holder {
    worker: WorkerNumber,
    asked: u64,
}

#[derive(Default, Debug)]
struct Shelf {
    /// Blocks by when they were asked for; those that were asked for again since are further behind, too.
    order: VecDeque<(u64, u64)>,
    /// How many it has.
    held: usize,
}

/// All blocks.
#[derive(Debug)]
pub struct Prefixes {
    /// Of all workers together, at most.
    most: usize,
    /// Of one worker, at most.
    most_each: usize,
    holders: HashMap<u64, Vec<Holder>, BuildHasherDefault<AsIs>>,
    shelves: HashMap<WorkerNumber, Shelf>,
    asked: u64,
}

impl Prefixes {
    /// At most so many blocks, over all workers and of each; at least one of each.
    pub fn new(most: usize, most_each: usize) -> Prefixes {
        Prefixes { most, most_each, holders: HashMap::default(), shelves: HashMap::new(), asked: 0 }
    }

    /// A worker joins; all share what there may be.
    pub fn join(&mut self, worker: WorkerNumber) {
        self.shelves.entry(worker).or_default();
    }

    /// A worker has forgotten all.
    pub fn empty(&mut self, worker: WorkerNumber) {
        if self.shelves.contains_key(&worker) {
            self.forget(worker);
            self.join(worker);
        }
    }

    /// A worker has gone.
    pub fn forget(&mut self, worker: WorkerNumber) {
        let Some(shelf) = self.shelves.remove(&worker) else { return };
        for (block, asked) in shelf.order {
            self.drop_block(worker, block, asked);
        }
    }

    /// How many blocks a worker has.
    pub fn held(&self, worker: WorkerNumber) -> usize {
        self.shelves.get(&worker).map_or(0, |shelf| shelf.held)
    }

    /// Tells `each` of the workers that have the first of these blocks, and how many of them.
    pub fn matches(&self, blocks: &[u64], mut each: impl FnMut(WorkerNumber, u32)) {
        let holders = |block: &u64| self.holders.get(block).map_or(&[][..], Vec::as_slice);
        // From the longest beginning that anybody has: who has more of it is told of before who has less, and most
        // beginnings have as many holders as the one before.
        let deepest = blocks.partition_point(|block| !holders(block).is_empty());
        let mut told = 0;
        for (depth, block) in blocks[..deepest].iter().enumerate().rev() {
            let here = holders(block);
            if here.len() == told {
                continue;
            }
            told = here.len();
            here.iter().for_each(|holder| each(holder.worker, depth as u32 + 1));
        }
    }

    /// A worker is sent a prompt that begins with these blocks.
    pub fn send(&mut self, worker: WorkerNumber, blocks: &[u64]) {
        let share = (self.most / self.shelves.len().max(1)).clamp(1, self.most_each.max(1));
        self.asked += 1;
        // The last first, so that it goes before those that it needs.
        for &block in blocks.iter().take(share).rev() {
            let holders = self.holders.entry(block).or_default();
            let shelf = self.shelves.entry(worker).or_default();
            match holders.binary_search_by_key(&worker, |holder| holder.worker) {
                Ok(place) => holders[place].asked = self.asked,
                Err(place) => {
                    holders.insert(place, Holder { worker, asked: self.asked });
                    shelf.held += 1;
                }
            }
            shelf.order.push_back((block, self.asked));
        }
        self.shrink(worker, share);
    }

    /// What is too much goes, and so do notes of what was asked for again.
    fn shrink(&mut self, worker: WorkerNumber, share: usize) {
        let Some(mut shelf) = self.shelves.remove(&worker) else { return };
        while shelf.held > share
            && let Some((block, asked)) = shelf.order.pop_front()
        {
            shelf.held -= usize::from(self.drop_block(worker, block, asked));
        }
        if shelf.order.len() > 2 * shelf.held.max(share) {
            let holders = &self.holders;
            shelf.order.retain(|(block, asked)| {
                let is_latest = |holder: &Holder| holder.worker == worker && holder.asked == *asked;
                holders.get(block).is_some_and(|holders| holders.iter().any(is_latest))
            });
        }
        self.shelves.insert(worker, shelf);
    }

    /// Whether a worker had a block since then and no later.
    fn drop_block(&mut self, worker: WorkerNumber, block: u64, asked: u64) -> bool {
        let Some(holders) = self.holders.get_mut(&block) else { return false };
        let found = holders.binary_search_by_key(&worker, |holder| holder.worker);
        let Some(place) = found.ok().filter(|&place| holders[place].asked == asked) else { return false };
        holders.remove(place);
        if holders.is_empty() {
            self.holders.remove(&block);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: WorkerNumber = WorkerNumber(3);
    const B: WorkerNumber = WorkerNumber(7);

    fn matched(prefixes: &Prefixes, blocks: &[u64]) -> Vec<(usize, u32)> {
        let mut best: HashMap<usize, u32> = HashMap::new();
        prefixes.matches(blocks, |WorkerNumber(worker), depth| {
            let depth = best.get(&worker).copied().unwrap_or(0).max(depth);
            best.insert(worker, depth);
        });
        let mut all: Vec<_> = best.into_iter().collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn each_has_as_much_as_it_was_sent() {
        let mut prefixes = Prefixes::new(100, 100);
        prefixes.send(A, &[1, 2, 3]);
        prefixes.send(B, &[1, 5]);
        assert_eq!(matched(&prefixes, &[1, 2, 3, 4]), [(3, 3), (7, 1)]);
        assert_eq!(matched(&prefixes, &[1, 5, 9]), [(3, 1), (7, 2)]);
        assert_eq!(matched(&prefixes, &[2, 3]), [(3, 2)], "a name stands for what is before it");
        assert_eq!(matched(&prefixes, &[9]), []);
        prefixes.forget(A);
        assert_eq!(matched(&prefixes, &[1, 2]), [(7, 1)]);
        assert_eq!((prefixes.held(A), prefixes.held(B), prefixes.holders.len()), (0, 2, 2));
    }

    #[test]
    fn what_was_asked_for_longest_ago_goes_from_its_end() {
        let mut prefixes = Prefixes::new(8, 4);
        prefixes.join(B);
        prefixes.send(A, &[1, 2]);
        prefixes.send(A, &[1, 3]);
        prefixes.send(A, &[1, 2, 4]);
        assert_eq!(matched(&prefixes, &[1, 3]), [(3, 2)]);
        prefixes.send(A, &[5]);
        assert_eq!(matched(&prefixes, &[1, 3]), [(3, 1)]);
        assert_eq!(matched(&prefixes, &[1, 2, 4]), [(3, 3)]);
        // The share of one of two workers, over all that it is ever sent.
        for turn in 0..1000 {
            prefixes.send(A, &[turn % 7, 100 + turn % 5]);
        }
        assert_eq!(prefixes.held(A), 4);
        assert!(prefixes.shelves[&A].order.len() <= 8 + 2);
        assert_eq!(prefixes.holders.len(), 4);
    }

    #[test]
    fn a_prompt_longer_than_a_share_leaves_its_beginning() {
        let mut prefixes = Prefixes::new(3, 100);
        prefixes.send(A, &[1, 2, 3, 4, 5]);
        assert_eq!(matched(&prefixes, &[1, 2, 3, 4, 5]), [(3, 3)]);
    }
}

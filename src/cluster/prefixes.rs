//! Which worker is thought to have the KV of which beginnings of prompts.
//!
//! Owns: for each block the workers that were sent it, for each worker its blocks in the order in which they were last
//! asked for. Invariants: no worker has more than its share, and what it was asked for longest ago goes first; who has a
//! block has those before it, since those are asked for with it and are given up after it. To ask again for a block costs
//! the same however often that was done before. What a worker has really is its own to say; this is what the router sent there.

use super::loads::WorkerNumber;
use std::collections::{HashMap, hash_map};
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

/// Who has a block, and its note of that.
#[derive(Clone, Copy, Debug)]
struct Holder {
    worker: WorkerNumber,
    note: u32,
}

/// That a worker has a block, between those that it was asked for before and after.
#[derive(Clone, Copy, Debug)]
struct Note {
    block: u64,
    older: Option<u32>,
    newer: Option<u32>,
}

/// A worker's blocks.
#[derive(Clone, Copy, Default, Debug)]
struct Shelf {
    oldest: Option<u32>,
    newest: Option<u32>,
    /// How many it has.
    held: usize,
}

/// Notes of all workers, those that mean nothing any more to be used again.
#[derive(Default, Debug)]
struct Notes {
    list: Vec<Note>,
    free: Vec<u32>,
}

impl Notes {
    fn add(&mut self, block: u64) -> u32 {
        let note = Note { block, older: None, newer: None };
        match self.free.pop() {
            Some(place) => {
                self.list[place as usize] = note;
                place
            }
            None => {
                self.list.push(note);
                self.list.len() as u32 - 1
            }
        }
    }

    fn append(&mut self, shelf: &mut Shelf, place: u32) {
        let older = shelf.newest.replace(place);
        self.list[place as usize].older = older;
        self.list[place as usize].newer = None;
        match older {
            Some(older) => self.list[older as usize].newer = Some(place),
            None => shelf.oldest = Some(place),
        }
    }

    fn take_out(&mut self, shelf: &mut Shelf, place: u32) {
        let Note { older, newer, .. } = self.list[place as usize];
        match older {
            Some(older) => self.list[older as usize].newer = newer,
            None => shelf.oldest = newer,
        }
        match newer {
            Some(newer) => self.list[newer as usize].older = older,
            None => shelf.newest = older,
        }
    }
}

/// All blocks.
#[derive(Debug)]
pub struct Prefixes {
    /// Of all workers together, at most.
    most: usize,
    /// Of one worker, at most.
    most_each: usize,
    /// By worker.
    holders: HashMap<u64, Vec<Holder>, BuildHasherDefault<AsIs>>,
    /// Lists of holders that are empty, so that a block that is new need not ask for memory.
    spare: Vec<Vec<Holder>>,
    shelves: HashMap<WorkerNumber, Shelf>,
    notes: Notes,
}

impl Prefixes {
    /// At most so many blocks, over all workers and of each; at least one of each.
    pub fn new(most: usize, most_each: usize) -> Prefixes {
        Prefixes {
            most,
            most_each,
            holders: HashMap::default(),
            spare: Vec::new(),
            shelves: HashMap::new(),
            notes: Notes::default(),
        }
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
        let Some(mut shelf) = self.shelves.remove(&worker) else { return };
        while shelf.held > 0 {
            self.drop_oldest(worker, &mut shelf);
        }
    }

    /// How many blocks a worker has.
    pub fn held(&self, worker: WorkerNumber) -> usize {
        self.shelves.get(&worker).map_or(0, |shelf| shelf.held)
    }

    /// How many of these blocks a worker has, from the first.
    pub fn depth(&self, worker: WorkerNumber, blocks: &[u64]) -> u32 {
        let has = |block: &u64| {
            let holders = self.holders(*block);
            holders.binary_search_by_key(&worker, |holder| holder.worker).is_ok()
        };
        blocks.partition_point(has) as u32
    }

    /// Tells `each` of the workers that have the first of these blocks, and how many of them; the most comes first.
    pub fn matches(&self, blocks: &[u64], mut each: impl FnMut(WorkerNumber, u32)) {
        // From the longest beginning that anybody has: who has more of it is told of before who has less. A block has the
        // holders of the one behind it, and perhaps more; where there are as many, they are the same.
        let mut told = 0;
        loop {
            let depth = blocks.partition_point(|&block| self.holders(block).len() > told);
            let Some(&block) = depth.checked_sub(1).and_then(|last| blocks.get(last)) else { return };
            let here = self.holders(block);
            if here.len() <= told {
                return;
            }
            told = here.len();
            here.iter().for_each(|holder| each(holder.worker, depth as u32));
        }
    }

    /// A worker is sent a prompt that begins with these blocks; how many it has then.
    pub fn send(&mut self, worker: WorkerNumber, blocks: &[u64]) -> usize {
        let mut shelf = self.shelves.get(&worker).copied().unwrap_or_default();
        self.shelves.insert(worker, shelf);
        let share = (self.most / self.shelves.len()).clamp(1, self.most_each.max(1));
        // The last first, so that it goes before those that it needs.
        for &block in blocks.iter().take(share).rev() {
            let holders = match self.holders.entry(block) {
                hash_map::Entry::Occupied(known) => known.into_mut(),
                hash_map::Entry::Vacant(new) => new.insert(self.spare.pop().unwrap_or_default()),
            };
            let note = match holders.binary_search_by_key(&worker, |holder| holder.worker) {
                Ok(place) => {
                    self.notes.take_out(&mut shelf, holders[place].note);
                    holders[place].note
                }
                Err(place) => {
                    let note = self.notes.add(block);
                    holders.insert(place, Holder { worker, note });
                    shelf.held += 1;
                    note
                }
            };
            self.notes.append(&mut shelf, note);
        }
        while shelf.held > share {
            self.drop_oldest(worker, &mut shelf);
        }
        self.shelves.insert(worker, shelf);
        shelf.held
    }

    fn holders(&self, block: u64) -> &[Holder] {
        self.holders.get(&block).map_or(&[][..], Vec::as_slice)
    }

    /// What a worker was asked for longest ago goes.
    fn drop_oldest(&mut self, worker: WorkerNumber, shelf: &mut Shelf) {
        let Some(note) = shelf.oldest else { return };
        let block = self.notes.list[note as usize].block;
        self.notes.take_out(shelf, note);
        self.notes.free.push(note);
        shelf.held -= 1;
        if let hash_map::Entry::Occupied(mut holders) = self.holders.entry(block) {
            let found = holders.get().binary_search_by_key(&worker, |holder| holder.worker);
            if let Ok(place) = found {
                holders.get_mut().remove(place);
            }
            if holders.get().is_empty() {
                self.spare.push(holders.remove());
            }
        }
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
        assert_eq!(
            (prefixes.holders.len(), prefixes.notes.list.len()),
            (4, 4 + 2),
            "what is out is used again"
        );
    }

    #[test]
    fn one_worker_is_found_as_all_are() {
        let mut prefixes = Prefixes::new(40, 9);
        for turn in 0..500_u64 {
            let blocks: Vec<u64> = (0..1 + turn % 6).map(|depth| turn % 5 * 10 + depth).collect();
            prefixes.send([A, B][(turn / 3 % 2) as usize], &blocks);
            let all = matched(&prefixes, &blocks);
            for worker in [A, B] {
                let depth = all.iter().find(|(number, _)| *number == worker.0).map_or(0, |(_, depth)| *depth);
                assert_eq!(prefixes.depth(worker, &blocks), depth, "turn {turn}");
            }
        }
        prefixes.forget(A);
        assert_eq!(prefixes.depth(A, &[0]), 0);
    }

    #[test]
    fn a_prompt_longer_than_a_share_leaves_its_beginning() {
        let mut prefixes = Prefixes::new(3, 100);
        prefixes.send(A, &[1, 2, 3, 4, 5]);
        assert_eq!(matched(&prefixes, &[1, 2, 3, 4, 5]), [(3, 3)]);
    }
}

//! The beginnings of prompts of which each worker probably has KV, because the router sent them
//! there. They form a tree of runs. A run is a series of blocks that always occurred together.
//!
//! Owns: the holders of each run, and each worker's runs in the order of their last use.
//! Invariants: no worker has more than its share. The least recently used blocks are removed first,
//! and the end of a prompt before its beginning. A holder of a run has all blocks before it. A run
//! without holders is removed.
//! The cost of a lookup depends on the runs of a prompt, which are few, not on its blocks.

mod lru;

use crate::routing::load::WorkerNumber;
use crate::stdx::failpoint::is_failpoint_active;
use lru::{LruList, LruNodes, NotePlace};
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

/// A cheap hasher: names of blocks are already hashes, and worker numbers count up.
#[derive(Default, Debug)]
struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.0 = self.0.rotate_left(8) ^ u64::from(byte));
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = crate::stdx::rng::mix(word);
    }

    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }
}

type SpreadMap<K, V> = HashMap<K, V, BuildHasherDefault<Spread>>;

/// A worker that has the beginning of a run, and its LRU node.
#[derive(Clone, Copy, Debug)]
struct Holder {
    worker: WorkerNumber,
    note: NotePlace,
    /// Number of blocks of the run that it has, from the first. At least one.
    has: u32,
}

/// A series of blocks.
#[derive(Default, Debug)]
struct Run {
    /// At least one.
    blocks: Vec<u64>,
    /// The run before it.
    before: Option<u32>,
    /// Number of runs that follow it.
    behind: u32,
    /// Sorted by worker.
    holders: Vec<Holder>,
}

impl Run {
    fn place_of(&self, worker: WorkerNumber) -> Result<usize, usize> {
        self.holders.binary_search_by_key(&worker, |holder| holder.worker)
    }

    /// Number of these blocks with which it begins.
    fn common(&self, blocks: &[u64]) -> usize {
        self.blocks.iter().zip(blocks).take_while(|(one, other)| one == other).count()
    }

    /// Whether this worker is the only holder, has the complete run, and no run follows.
    fn ends_at(&self, worker: WorkerNumber) -> bool {
        let [only] = &self.holders[..] else { return false };
        self.behind == 0 && only.worker == worker && only.has as usize == self.blocks.len()
    }
}

/// The part of a prompt that is known.
#[derive(Clone, Copy, Debug)]
struct Known {
    /// The last run that matches.
    run: u32,
    /// Blocks before that run.
    before: usize,
    /// Matching blocks of that run.
    of_it: usize,
}

/// The known blocks of all workers.
#[derive(Debug)]
pub struct Prefixes {
    /// Limit for all workers together.
    most: usize,
    /// Limit for each worker.
    most_each: usize,
    runs: Vec<Run>,
    /// Indexes of runs that can be reused.
    free: Vec<u32>,
    /// Runs by the name of their first block.
    begins: SpreadMap<u64, u32>,
    shelves: SpreadMap<WorkerNumber, LruList>,
    notes: LruNodes,
}

impl Prefixes {
    /// Sets the limits in blocks, for all workers together and for each worker. Each worker's limit
    /// is at least one block.
    pub fn new(most: usize, most_each: usize) -> Prefixes {
        Prefixes {
            most,
            most_each,
            runs: Vec::new(),
            free: Vec::new(),
            begins: HashMap::default(),
            shelves: HashMap::default(),
            notes: LruNodes::default(),
        }
    }

    /// Adds a worker. All workers share the total limit equally.
    pub fn join(&mut self, worker: WorkerNumber) {
        self.shelves.entry(worker).or_default();
    }

    /// Clears the blocks of a worker.
    pub fn empty(&mut self, worker: WorkerNumber) {
        if self.shelves.contains_key(&worker) {
            self.forget(worker);
            self.join(worker);
        }
    }

    /// Removes a worker.
    pub fn forget(&mut self, worker: WorkerNumber) {
        if let Some(mut lru) = self.shelves.remove(&worker) {
            self.shorten(worker, &mut lru, 0);
        }
    }

    /// Number of blocks that a worker has.
    pub fn held(&self, worker: WorkerNumber) -> usize {
        self.shelves.get(&worker).map_or(0, |lru| lru.held)
    }

    /// Number of these blocks that a worker has, from the first.
    pub fn depth(&self, worker: WorkerNumber, blocks: &[u64]) -> u32 {
        let mut found = 0;
        self.climb(blocks, |run, before, of_it| {
            let has = run.place_of(worker).map(|place| run.holders[place].has.min(of_it));
            found = has.map_or(0, |has| before + has);
            has.is_err()
        });
        found
    }

    /// Number of these blocks that all workers have, from the first. Calls `each` for every worker
    /// that has more blocks, with their number, the largest first.
    pub fn matches(&self, blocks: &[u64], mut each: impl FnMut(WorkerNumber, u32)) -> u32 {
        // The holders of a run include the holders of the next run, so equal counts mean equal
        // holders.
        let (mut holders, mut common) = (0, 0);
        self.climb(blocks, |run, before, of_it| {
            let have =
                || run.holders.iter().map(|holder| (holder.worker, before + holder.has.min(of_it)));
            let is_common = run.holders.len() == self.shelves.len();
            if is_common {
                // All workers have the first block of the run.
                common = if of_it == 1 {
                    before + 1
                } else {
                    have().map(|(_, has)| has).min().unwrap_or(0)
                };
            }
            if run.holders.len() > holders && before + of_it > common {
                have().filter(|&(_, has)| has > common).for_each(|(worker, has)| each(worker, has));
            }
            holders = run.holders.len();
            !is_common
        });
        common
    }

    /// Records that the router sends a prompt with these blocks to a worker. Returns the worker's
    /// number of blocks after that.
    pub fn send(&mut self, worker: WorkerNumber, blocks: &[u64]) -> usize {
        self.shelves.entry(worker).or_default();
        let share = (self.most / self.shelves.len()).clamp(1, self.most_each.max(1));
        let blocks = &blocks[..blocks.len().min(share)];
        let known = self.known(blocks);
        let mut next = known.map(|known| self.end(known.run, known.of_it));
        let (_, rest) = blocks.split_at(known.map_or(0, |known| known.before + known.of_it));
        // The name exists in another place, so two names are equal by chance. The rest of the
        // prompt is not recorded.
        if rest.first().is_some_and(|first| !self.begins.contains_key(first)) {
            next = Some(self.go_on(worker, next, rest));
        }
        let mut lru = self.shelves[&worker];
        // The last run comes first, so that it is removed before the runs on which it depends.
        while let Some(run) = next {
            self.touch(worker, &mut lru, run);
            next = self.runs[run as usize].before;
        }
        self.shorten(worker, &mut lru, share);
        self.shelves.insert(worker, lru);
        lru.held
    }

    /// Asserts the rules that hold between calls, in a pass over all runs.
    ///
    /// # Panics
    /// A run is in use without a holder, a count is wrong, a holder lacks blocks before its run, or
    /// a worker's runs are not in its order of use.
    pub fn invariants(&self) {
        let free: HashSet<u32> = self.free.iter().copied().collect();
        assert_eq!(free.len(), self.free.len(), "a place is free once");
        let mut behind = vec![0; self.runs.len()];
        let mut held: HashMap<WorkerNumber, (usize, usize)> = HashMap::new();
        for (place, run) in self.runs.iter().enumerate() {
            let is_free = free.contains(&(place as u32));
            assert_eq!(run.holders.is_empty(), is_free, "a run in use has a holder");
            assert_eq!(run.blocks.is_empty(), is_free, "a run in use has blocks");
            let is_sorted = run.holders.is_sorted_by(|one, other| one.worker < other.worker);
            assert!(is_sorted, "holders are sorted, and each is listed once");
            if let Some(before) = run.before {
                behind[before as usize] += 1;
            }
            for holder in &run.holders {
                let has = holder.has as usize;
                assert!((1..=run.blocks.len()).contains(&has), "a holder has a part of the run");
                if let Some(before) = run.before {
                    let before = &self.runs[before as usize];
                    let at = before.place_of(holder.worker).map(|at| before.holders[at].has);
                    assert_eq!(at, Ok(before.blocks.len() as u32), "a holder has all before");
                }
                let (runs, blocks) = held.entry(holder.worker).or_default();
                (*runs, *blocks) = (*runs + 1, *blocks + has);
            }
        }
        let counted = self.runs.iter().map(|run| run.behind);
        assert!(counted.eq(behind), "a run counts the runs behind it");
        let nodes: usize = held.values().map(|(runs, _)| runs).sum();
        assert_eq!(self.notes.len(), nodes, "each holder has a node");
        for (worker, lru) in &self.shelves {
            let (runs, blocks) = held.remove(worker).unwrap_or_default();
            assert_eq!(lru.held, blocks, "the blocks of a worker are counted");
            assert_eq!(self.notes.count(lru), runs, "the runs of a worker are in order of use");
            assert!(lru.held <= self.most_each.max(1), "a worker has at most its share");
        }
        assert!(held.is_empty(), "a holder is a worker that is present");
    }

    /// The part of a prompt that is known.
    fn known(&self, blocks: &[u64]) -> Option<Known> {
        let mut known: Option<Known> = None;
        let mut before = 0;
        while let Some(first) = blocks.get(before) {
            let Some(&run) = self.begins.get(first) else { break };
            let this = &self.runs[run as usize];
            if this.before != known.map(|known| known.run) {
                break;
            }
            let of_it = this.common(&blocks[before..]);
            known = Some(Known { run, before, of_it });
            if of_it < this.blocks.len() {
                break;
            }
            before += of_it;
        }
        known
    }

    /// Calls `each` for the matching runs, the last first, while it returns true. Arguments: the
    /// run, the blocks before it, the matching blocks of it.
    fn climb(&self, blocks: &[u64], mut each: impl FnMut(&Run, u32, u32) -> bool) {
        let Some(Known { run, mut before, mut of_it }) = self.known(blocks) else { return };
        let mut run = &self.runs[run as usize];
        while each(run, before as u32, of_it as u32) {
            let Some(next) = run.before else { return };
            run = &self.runs[next as usize];
            of_it = run.blocks.len();
            before -= of_it;
        }
    }

    /// A run that ends after the first `behind` blocks of this one.
    fn end(&mut self, run: u32, behind: usize) -> u32 {
        let place = run as usize;
        let length = self.runs[place].blocks.len();
        debug_assert!((1..=length).contains(&behind), "a known prompt ends in its last run");
        if behind == length {
            return run;
        }
        if self.runs[place].holders.iter().all(|holder| holder.has as usize <= behind) {
            self.runs[place].blocks.truncate(behind);
            self.runs[place].blocks.shrink_to_fit();
            return run;
        }
        self.split(run, behind)
    }

    /// Splits off the first blocks of a run as a separate run. All holders keep their blocks.
    fn split(&mut self, run: u32, behind: usize) -> u32 {
        let first = self.place_for_run();
        let mut rest = std::mem::take(&mut self.runs[run as usize]);
        let mut begin = std::mem::take(&mut self.runs[first as usize]);
        begin.blocks.extend_from_slice(&rest.blocks[..behind]);
        // An exact copy without spare capacity, because the limit counts blocks.
        rest.blocks = rest.blocks[behind..].to_vec();
        (begin.before, begin.behind) = (rest.before.replace(first), 1);
        let behind = behind as u32;
        rest.holders.retain_mut(|holder| {
            let worker = holder.worker;
            let lru = self.shelves.entry(worker).or_default();
            let note = self.notes.add(first);
            self.notes.put_behind(lru, note, holder.note);
            begin.holders.push(Holder { worker, note, has: holder.has.min(behind) });
            holder.has = holder.has.saturating_sub(behind);
            if holder.has == 0 {
                self.notes.take_out(lru, holder.note);
                self.notes.discard(holder.note);
            }
            holder.has > 0
        });
        self.begins.insert(begin.blocks[0], first);
        self.begins.insert(rest.blocks[0], run);
        self.runs[first as usize] = begin;
        self.runs[run as usize] = rest;
        first
    }

    /// Adds a run of these blocks after another run.
    fn go_on(&mut self, worker: WorkerNumber, before: Option<u32>, blocks: &[u64]) -> u32 {
        if let Some(run) = before
            && self.runs[run as usize].ends_at(worker)
        {
            self.runs[run as usize].blocks.extend_from_slice(blocks);
            return run;
        }
        let place = self.place_for_run();
        let run = &mut self.runs[place as usize];
        run.blocks.extend_from_slice(blocks);
        run.before = before;
        self.begins.insert(blocks[0], place);
        if let Some(before) = before {
            self.runs[before as usize].behind += 1;
        }
        place
    }

    fn place_for_run(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.runs.push(Run::default());
            self.runs.len() as u32 - 1
        })
    }

    /// Records that a worker has a complete run and used it last.
    fn touch(&mut self, worker: WorkerNumber, lru: &mut LruList, place: u32) {
        let run = &mut self.runs[place as usize];
        let all = run.blocks.len() as u32;
        let note = match run.place_of(worker) {
            Ok(at) => {
                let holder = &mut run.holders[at];
                lru.held += (all - std::mem::replace(&mut holder.has, all)) as usize;
                self.notes.take_out(lru, holder.note);
                holder.note
            }
            Err(at) => {
                let note = self.notes.add(place);
                run.holders.insert(at, Holder { worker, note, has: all });
                lru.held += all as usize;
                note
            }
        };
        self.notes.append(lru, note);
    }

    /// Removes a worker's least recently used blocks until it has at most `most`.
    fn shorten(&mut self, worker: WorkerNumber, lru: &mut LruList, most: usize) {
        while let Some(excess) = lru.held.checked_sub(most + 1).map(|excess| excess + 1)
            && let Some((note, place)) = self.notes.oldest(lru)
        {
            let run = &mut self.runs[place as usize];
            let at = run.place_of(worker).expect("a worker with a node of a run holds some of it");
            let has = run.holders[at].has as usize;
            if has > excess {
                run.holders[at].has -= excess as u32;
                lru.held = most;
                return;
            }
            lru.held -= has;
            run.holders.remove(at);
            self.notes.take_out(lru, note);
            self.notes.discard(note);
            if run.holders.is_empty() {
                self.remove(place);
            }
        }
    }

    /// Removes a run without holders.
    fn remove(&mut self, place: u32) {
        let run = std::mem::take(&mut self.runs[place as usize]);
        debug_assert_eq!(run.behind, 0, "a run is removed after all runs behind it");
        let first = run.blocks[0];
        // Another run can have the same name by chance.
        if self.begins.get(&first) == Some(&place) {
            self.begins.remove(&first);
        }
        if let Some(before) = run.before
            && !is_failpoint_active("removed run is still counted")
        {
            self.runs[before as usize].behind -= 1;
        }
        self.free.push(place);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stdx::failpoint::panic_of;

    const A: WorkerNumber = WorkerNumber(3);
    const B: WorkerNumber = WorkerNumber(7);

    fn matched(prefixes: &Prefixes, blocks: &[u64]) -> Vec<(usize, u32)> {
        let mut all: Vec<(usize, u32)> = Vec::new();
        let common = prefixes.matches(blocks, |WorkerNumber(worker), depth| {
            match all.iter().find(|(known, _)| *known == worker) {
                Some((_, most)) => assert!(*most >= depth, "the most comes first"),
                None => all.push((worker, depth)),
            }
        });
        assert!(all.iter().all(|&(_, depth)| depth > common));
        if common > 0 {
            let others = prefixes
                .shelves
                .keys()
                .filter(|known| all.iter().all(|(worker, _)| *worker != known.0));
            all.extend(others.map(|worker| (worker.0, common)).collect::<Vec<_>>());
        }
        all.sort_unstable();
        all
    }

    /// Real names: each covers all blocks before it.
    fn named(prompt: &[u64]) -> Vec<u64> {
        let chain = |name: &mut u64, block: &u64| {
            *name = crate::stdx::rng::mix(*name ^ block);
            Some(*name)
        };
        prompt.iter().scan(0, chain).collect()
    }

    /// The invariants, and what holds unless two names are equal by chance.
    fn check(prefixes: &Prefixes) {
        prefixes.invariants();
        let used = prefixes.runs.len() - prefixes.free.len();
        assert_eq!(prefixes.begins.len(), used, "each run has a name");
    }

    #[test]
    fn each_has_as_much_as_it_was_sent() {
        let mut prefixes = Prefixes::new(100, 100);
        prefixes.send(A, &[1, 2, 3]);
        prefixes.send(B, &[1, 5]);
        assert_eq!(matched(&prefixes, &[1, 2, 3, 4]), [(3, 3), (7, 1)]);
        assert_eq!(matched(&prefixes, &[1, 5, 9]), [(3, 1), (7, 2)]);
        assert_eq!(matched(&prefixes, &[9]), []);
        prefixes.forget(A);
        assert_eq!(matched(&prefixes, &[1, 2]), [(7, 1)]);
        assert_eq!((prefixes.held(A), prefixes.held(B), prefixes.begins.len()), (0, 2, 2));
        check(&prefixes);
    }

    #[test]
    fn the_least_recently_requested_prefix_is_evicted_from_its_end() {
        let mut prefixes = Prefixes::new(8, 4);
        prefixes.join(B);
        prefixes.send(A, &[1, 2]);
        prefixes.send(A, &[1, 3]);
        prefixes.send(A, &[1, 2, 4]);
        assert_eq!(matched(&prefixes, &[1, 3]), [(3, 2)]);
        prefixes.send(A, &[5]);
        assert_eq!(matched(&prefixes, &[1, 3]), [(3, 1)]);
        assert_eq!(matched(&prefixes, &[1, 2, 4]), [(3, 3)]);
        // The share of one of two workers, over all prompts that it is sent.
        for turn in 0..1000 {
            prefixes.send(A, &named(&[turn % 7, turn % 5]));
            check(&prefixes);
        }
        assert_eq!(prefixes.held(A), 4);
        assert!(prefixes.runs.len() <= 6, "what is out is used again");
    }

    /// A plain model: the blocks of each worker, the least recently used first.
    #[derive(Default)]
    struct Plain(HashMap<WorkerNumber, Vec<u64>>);

    impl Plain {
        fn send(&mut self, worker: WorkerNumber, blocks: &[u64], share: usize) {
            let list = self.0.entry(worker).or_default();
            for block in blocks.iter().take(share).rev() {
                list.retain(|known| known != block);
                list.push(*block);
            }
            list.drain(..list.len().saturating_sub(share));
        }

        fn depth(&self, worker: WorkerNumber, blocks: &[u64]) -> u32 {
            let list = self.0.get(&worker).map_or(&[][..], Vec::as_slice);
            blocks.iter().take_while(|block| list.contains(block)).count() as u32
        }
    }

    #[test]
    fn runs_give_the_same_depths_as_single_blocks() {
        let workers = [0, 1, 2, 3].map(WorkerNumber);
        let mut prefixes = Prefixes::new(4 * 17, 100);
        workers.iter().for_each(|&worker| prefixes.join(worker));
        let mut plain = Plain::default();
        let mut chance = 0;
        let mut draw = |below: u64| {
            chance += 1;
            crate::stdx::rng::mix(chance) % below
        };
        for turn in 0..4000 {
            // Some prompts grow like chats, others branch anywhere.
            let length = draw(if turn % 9 == 0 { 24 } else { 9 });
            let prompt: Vec<u64> = (0..length).map(|_| u64::from(draw(5) == 0)).collect();
            let blocks = named(&prompt);
            let worker = workers[draw(4) as usize];
            if draw(200) == 0 {
                prefixes.empty(worker);
                plain.0.remove(&worker);
            }
            let held = prefixes.send(worker, &blocks);
            plain.send(worker, &blocks, 17);
            check(&prefixes);
            assert_eq!(held, plain.0[&worker].len(), "turn {turn}");
            // From time to time a prefix that all workers have.
            if turn % 50 == 0 {
                let shared = named(&[0, 0, 0][..1 + draw(3) as usize]);
                for &worker in &workers {
                    prefixes.send(worker, &shared);
                    plain.send(worker, &shared, 17);
                }
            }
            let asked = named(&(0..12).map(|_| u64::from(draw(4) == 0)).collect::<Vec<_>>());
            let all = matched(&prefixes, &asked);
            for &worker in &workers {
                let depth = plain.depth(worker, &asked);
                assert_eq!(prefixes.depth(worker, &asked), depth, "turn {turn}");
                let found = all
                    .iter()
                    .find(|(number, _)| *number == worker.0)
                    .map_or(0, |(_, depth)| *depth);
                assert_eq!(found, depth, "turn {turn}");
            }
        }
    }

    #[test]
    fn block_names_that_collide_by_chance_break_no_invariant() {
        let mut prefixes = Prefixes::new(60, 20);
        let mut chance = 0;
        for _ in 0..4000 {
            chance += 1;
            let drawn = crate::stdx::rng::mix(chance);
            let blocks: Vec<u64> = (0..drawn % 7).map(|at| (drawn >> (8 + 4 * at)) % 6).collect();
            prefixes.send([A, B, WorkerNumber(9)][(drawn >> 40) as usize % 3], &blocks);
            prefixes.invariants();
            matched(&prefixes, &blocks);
        }
        [A, B, WorkerNumber(9)].into_iter().for_each(|worker| prefixes.forget(worker));
        assert!(prefixes.runs.iter().all(|run| run.holders.is_empty() && run.blocks.is_empty()));
        assert_eq!(
            (prefixes.free.len(), prefixes.begins.len(), prefixes.notes.len()),
            (prefixes.runs.len(), 0, 0)
        );
    }

    #[test]
    fn a_prompt_longer_than_a_share_leaves_its_beginning() {
        let mut prefixes = Prefixes::new(3, 100);
        prefixes.send(A, &[1, 2, 3, 4, 5]);
        assert_eq!(matched(&prefixes, &[1, 2, 3, 4, 5]), [(3, 3)]);
    }

    #[test]
    fn invariants_find_a_removed_run_that_is_still_counted() {
        let branch_and_empty = || {
            let mut prefixes = Prefixes::new(100, 100);
            prefixes.send(A, &[1, 2]);
            prefixes.send(A, &[1, 3]);
            prefixes.send(B, &[1]);
            prefixes.invariants();
            prefixes.empty(A);
            prefixes.invariants();
        };
        branch_and_empty();
        let message = panic_of("removed run is still counted", branch_and_empty);
        assert!(message.contains("a run counts the runs behind it"), "{message}");
    }
}

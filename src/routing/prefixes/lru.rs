//! The runs of a worker in the order of their last use. The nodes of all workers lie in one vector,
//! so moving a run to the end has a constant cost.
//!
//! Invariants: a node is in one list, or free.
//! Not here: runs, and the part of a run that a worker has (`prefixes`).

/// The index of a node.
pub type NotePlace = u32;

/// A worker's share of a run, between the runs that were used before and after it.
#[derive(Clone, Copy, Debug)]
struct LruNode {
    run: u32,
    older: Option<NotePlace>,
    newer: Option<NotePlace>,
}

/// The runs of one worker.
#[derive(Clone, Copy, Default, Debug)]
pub struct LruList {
    oldest: Option<NotePlace>,
    newest: Option<NotePlace>,
    /// Blocks of all its runs.
    pub held: usize,
}

/// The nodes of all workers. Free ones are reused.
#[derive(Default, Debug)]
pub struct LruNodes {
    list: Vec<LruNode>,
    free: Vec<NotePlace>,
}

impl LruNodes {
    /// A new node for this run, in no list yet.
    pub fn add(&mut self, run: u32) -> NotePlace {
        let note = LruNode { run, older: None, newer: None };
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

    /// The least recently used run of a worker.
    pub fn oldest(&self, lru: &LruList) -> Option<(NotePlace, u32)> {
        lru.oldest.map(|place| (place, self.list[place as usize].run))
    }

    /// Appends a node as the newest of this list. The node is in no list before.
    pub fn append(&mut self, lru: &mut LruList, place: NotePlace) {
        self.put(lru, place, lru.newest, None);
    }

    /// Inserts a node directly after another node of this list. The node is in no list before.
    pub fn put_behind(&mut self, lru: &mut LruList, place: NotePlace, older: NotePlace) {
        self.put(lru, place, Some(older), self.list[older as usize].newer);
    }

    fn put(
        &mut self,
        lru: &mut LruList,
        place: NotePlace,
        older: Option<NotePlace>,
        newer: Option<NotePlace>,
    ) {
        debug_assert_eq!(self.newer_of(lru, older), newer, "neighbours name each other");
        debug_assert_eq!(self.older_of(lru, newer), older, "neighbours name each other");
        let note = &mut self.list[place as usize];
        (note.older, note.newer) = (older, newer);
        self.link(lru, older, newer, [Some(place); 2]);
    }

    /// Removes a node from its list.
    pub fn take_out(&mut self, lru: &mut LruList, place: NotePlace) {
        let LruNode { older, newer, .. } = self.list[place as usize];
        debug_assert_eq!(self.newer_of(lru, older), Some(place), "a node is in its list");
        debug_assert_eq!(self.older_of(lru, newer), Some(place), "a node is in its list");
        self.link(lru, older, newer, [newer, older]);
    }

    /// Sets the links between `older` and `newer`.
    fn link(
        &mut self,
        lru: &mut LruList,
        older: Option<NotePlace>,
        newer: Option<NotePlace>,
        [behind, before]: [Option<NotePlace>; 2],
    ) {
        match older {
            Some(older) => self.list[older as usize].newer = behind,
            None => lru.oldest = behind,
        }
        match newer {
            Some(newer) => self.list[newer as usize].older = before,
            None => lru.newest = before,
        }
    }

    /// Frees a node that is in no list.
    pub fn discard(&mut self, place: NotePlace) {
        self.free.push(place);
    }

    /// How many nodes are in use.
    pub fn len(&self) -> usize {
        self.list.len() - self.free.len()
    }

    /// The number of nodes in a list.
    ///
    /// # Panics
    /// Two neighbours of the list do not name each other.
    pub fn count(&self, lru: &LruList) -> usize {
        let (mut count, mut older, mut next) = (0, None, lru.oldest);
        while let Some(place) = next {
            let node = &self.list[place as usize];
            assert_eq!(node.older, older, "neighbours name each other");
            assert!(count < self.len(), "a list has an end");
            (count, older, next) = (count + 1, Some(place), node.newer);
        }
        assert_eq!(lru.newest, older, "a list ends with its newest node");
        count
    }

    /// The node after `place`, or the oldest of the list.
    fn newer_of(&self, lru: &LruList, place: Option<NotePlace>) -> Option<NotePlace> {
        place.map_or(lru.oldest, |place| self.list[place as usize].newer)
    }

    /// The node before `place`, or the newest of the list.
    fn older_of(&self, lru: &LruList, place: Option<NotePlace>) -> Option<NotePlace> {
        place.map_or(lru.newest, |place| self.list[place as usize].older)
    }
}

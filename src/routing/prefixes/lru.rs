//! The runs of a worker in the order of their last use. The nodes of all workers lie in one vector,
//! so moving a run to the end has a constant cost.
//!
//! Invariants: a node is in one list, or free.
//! Not here: what a run is, and how much of it a worker has.

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
    pub fn oldest(&self, shelf: &LruList) -> Option<(NotePlace, u32)> {
        shelf.oldest.map(|place| (place, self.list[place as usize].run))
    }

    /// Appends a node, which is in no list, as the newest of this list.
    pub fn append(&mut self, shelf: &mut LruList, place: NotePlace) {
        self.put(shelf, place, shelf.newest, None);
    }

    /// Inserts a node, which is in no list, directly after another of this list.
    pub fn put_behind(&mut self, shelf: &mut LruList, place: NotePlace, older: NotePlace) {
        self.put(shelf, place, Some(older), self.list[older as usize].newer);
    }

    fn put(
        &mut self,
        shelf: &mut LruList,
        place: NotePlace,
        older: Option<NotePlace>,
        newer: Option<NotePlace>,
    ) {
        let note = &mut self.list[place as usize];
        (note.older, note.newer) = (older, newer);
        self.link(shelf, older, newer, [Some(place); 2]);
    }

    /// Removes a node from its list.
    pub fn take_out(&mut self, shelf: &mut LruList, place: NotePlace) {
        let LruNode { older, newer, .. } = self.list[place as usize];
        self.link(shelf, older, newer, [newer, older]);
    }

    /// Sets the links between `older` and `newer`.
    fn link(
        &mut self,
        shelf: &mut LruList,
        older: Option<NotePlace>,
        newer: Option<NotePlace>,
        [behind, before]: [Option<NotePlace>; 2],
    ) {
        match older {
            Some(older) => self.list[older as usize].newer = behind,
            None => shelf.oldest = behind,
        }
        match newer {
            Some(newer) => self.list[newer as usize].older = before,
            None => shelf.newest = before,
        }
    }

    /// Frees a node that is in no list.
    pub fn discard(&mut self, place: NotePlace) {
        self.free.push(place);
    }

    /// How many nodes are in use.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.list.len() - self.free.len()
    }
}

//! A worker's runs in the order in which they were last asked for: a list through notes that all workers share, so that
//! one is moved to its end for the same price however many there are.
//!
//! Invariants: a note is on one shelf, or free to mean something else. Not here: what a run is, and how much of it a
//! worker has.

/// The place of a note among all.
pub type NotePlace = u32;

/// That a worker has something of a run, between those that it was asked for before and after.
#[derive(Clone, Copy, Debug)]
struct Note {
    run: u32,
    older: Option<NotePlace>,
    newer: Option<NotePlace>,
}

/// A worker's runs.
#[derive(Clone, Copy, Default, Debug)]
pub struct Shelf {
    oldest: Option<NotePlace>,
    newest: Option<NotePlace>,
    /// Blocks that it has, of all of them.
    pub held: usize,
}

/// Notes of all workers, those that mean nothing any more to be used again.
#[derive(Default, Debug)]
pub struct Notes {
    list: Vec<Note>,
    free: Vec<NotePlace>,
}

impl Notes {
    /// One of this run, on no shelf yet.
    pub fn add(&mut self, run: u32) -> NotePlace {
        let note = Note { run, older: None, newer: None };
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

    /// What a worker was asked for longest ago.
    pub fn oldest(&self, shelf: &Shelf) -> Option<(NotePlace, u32)> {
        shelf.oldest.map(|place| (place, self.list[place as usize].run))
    }

    /// A note that is on no shelf is the newest of this one.
    pub fn append(&mut self, shelf: &mut Shelf, place: NotePlace) {
        self.put(shelf, place, shelf.newest, None);
    }

    /// A note that is on no shelf stands behind another of this one, as the next that is newer.
    pub fn put_behind(&mut self, shelf: &mut Shelf, place: NotePlace, older: NotePlace) {
        self.put(shelf, place, Some(older), self.list[older as usize].newer);
    }

    fn put(
        &mut self,
        shelf: &mut Shelf,
        place: NotePlace,
        older: Option<NotePlace>,
        newer: Option<NotePlace>,
    ) {
        let note = &mut self.list[place as usize];
        (note.older, note.newer) = (older, newer);
        self.link(shelf, older, newer, [Some(place); 2]);
    }

    /// A note is on no shelf.
    pub fn take_out(&mut self, shelf: &mut Shelf, place: NotePlace) {
        let Note { older, newer, .. } = self.list[place as usize];
        self.link(shelf, older, newer, [newer, older]);
    }

    /// What is behind `older`, and before `newer`.
    fn link(
        &mut self,
        shelf: &mut Shelf,
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

    /// A note on no shelf means nothing any more.
    pub fn discard(&mut self, place: NotePlace) {
        self.free.push(place);
    }

    /// How many mean something.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.list.len() - self.free.len()
    }
}

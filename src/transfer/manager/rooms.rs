//! The rooms of a prefill worker: requests and Destinations come in any order, and each is answered truly.
//!
//! | entry | request here | Destination here | next |
//! |---|---|---|---|
//! | `Early` | no | yes, or its Interest, kept by room, bounded in number and time | `Open`, or `Over` by Abort, dead link, time, drain |
//! | `Waiting` | yes | no | `Open`, or `Over` when the request ends |
//! | `Open` | yes | yes, or its Interest, checked | `Over` when the request ends; `Draining` where its writes may be under way then |
//! | `Draining` | over | yes | `Over` when its writes have ended; whoever asks is answered then |
//! | `Over` | tombstone with the answer to whoever asks again | | forgotten after a time |
//!
//! An Interest is a Destination without pages; the Destination that follows it takes its place.
//! A dead link takes its Destinations along: what was `Open` is `Waiting` again, and its request fails.
//! A room that is open is refused to the newcomer, never overwritten.

use crate::cause::Cause;
use crate::ids::{Generation, PageId, Room, SlotId};
use crate::limits::{
    EARLY_DESTINATION_LIFE, EARLY_DESTINATIONS_MAX, TOMBSTONE_LIFE, TOMBSTONES_MAX,
};
use crate::stdx::planted::is_planted;
use crate::transfer::command::Target;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A slot of this worker in one use.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Slot {
    /// Its index.
    pub id: SlotId,
    /// Which use.
    pub generation: Generation,
}

/// What both legs must agree on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Prompt {
    /// Prompt tokens.
    pub tokens: u32,
    /// Hash of the ids.
    pub hash: [u8; 16],
}

/// A Destination or an Interest, checked against its own session, not yet against a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Wanted<L> {
    /// The link it came over.
    pub link: L,
    /// Where the KV is to go; of an Interest its prefix says nothing.
    pub target: Target,
    /// What the decode leg means to read.
    pub prompt: Prompt,
    /// What it has ready for it. An Interest has nothing.
    pub place: Option<Place>,
    /// How long its request waits for it, from when it came.
    pub left: Duration,
}

/// Where a destination takes KV in.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Place {
    /// The pages behind its prefix, where the source writes into them.
    pub pages: Arc<[PageId]>,
    /// Which of the prompt's pages is the first of them.
    pub first: usize,
}

impl<L: PartialEq> Wanted<L> {
    /// The destination's slot.
    fn theirs(&self) -> Slot {
        Slot { id: self.target.slot, generation: self.target.generation }
    }

    /// Whether it is the Destination to this Interest.
    fn follows(&self, interest: &Wanted<L>) -> bool {
        let names = |wanted: &Wanted<L>| {
            (wanted.target.session, wanted.target.slot, wanted.target.generation, wanted.prompt)
        };
        interest.place.is_none()
            && self.place.is_some()
            && self.link == interest.link
            && names(self) == names(interest)
    }

    /// What it is told when its request has not come: that time is up only where it was, since nobody tries that again. A
    /// prefill worker that died behind its answer, in which it said that it keeps the KV, knows nothing of the room.
    pub fn unclaimed(&self) -> Cause {
        if self.left <= EARLY_DESTINATION_LIFE { Cause::Deadline } else { Cause::OtherLeg }
    }

    /// Whether the source writes into its pages.
    fn is_written(&self) -> bool {
        self.place.as_ref().is_some_and(|place| !place.pages.is_empty())
    }
}

#[derive(Debug)]
enum Entry<L> {
    Early { wanted: Wanted<L>, until: Instant },
    Waiting { slot: Slot, prompt: Prompt },
    Open { slot: Slot, wanted: Wanted<L>, ack_wanted: bool, withdrawn: bool, done: bool },
    Draining { slot: Slot, wanted: Wanted<L>, ack_wanted: bool },
    Over,
}

impl<L> Entry<L> {
    /// Both are here, and nothing has been said since.
    fn open(slot: Slot, wanted: Wanted<L>) -> Entry<L> {
        Entry::Open { slot, wanted, ack_wanted: false, withdrawn: false, done: false }
    }
}

/// The two legs of a room have met.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Met<L> {
    /// This worker's slot.
    pub slot: Slot,
    /// The other side's.
    pub wanted: Wanted<L>,
}

/// What came of a new request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Entered<L> {
    /// No Destination yet.
    Waits,
    /// Its Destination was here already.
    Meets(Met<L>),
    /// Its Destination was here and means another prompt: fails on both sides.
    Differs(Wanted<L>),
    /// The room is taken by another request, or was aborted before this one came.
    Refused(Cause),
}

/// What came of a Destination.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Arrived<L> {
    /// Kept for the request to come.
    Kept,
    /// Its request was here already.
    Meets(Met<L>),
    /// Its request is here and means another prompt: fails on both sides.
    Differs(Slot),
    /// The room is taken, over, or too many wait: the destination is told so, unasked.
    Refused(Cause),
}

/// What came of an Abort.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Aborted {
    /// Nothing is, or ever will be, posted for it: the answer is `quiet`.
    Answer,
    /// The same of an Interest; the slot, which computes for it, must be failed.
    Stop(Slot),
    /// The slot must be failed; the answer follows its withdrawal.
    Fail(Slot),
    /// It has failed already; the answer follows its withdrawal.
    Waits,
    /// It is of another attempt; not answered.
    Stale,
}

/// All rooms of one prefill worker. `L` names a link.
#[derive(Debug)]
pub struct Rooms<L> {
    entries: HashMap<Room, Entry<L>>,
    /// Also of what drains: its slot may be given out anew before the mover has said its last word on it.
    by_slot: HashMap<Slot, Room>,
    early: usize,
    tombstones: VecDeque<(Instant, Room)>,
    /// Rooms that are over since all was written, and of which their destinations, whose slots these are, have not said so.
    unheard: HashMap<Room, (L, Slot)>,
}

impl<L: Copy + PartialEq> Default for Rooms<L> {
    fn default() -> Rooms<L> {
        Rooms {
            entries: HashMap::new(),
            by_slot: HashMap::new(),
            early: 0,
            tombstones: VecDeque::new(),
            unheard: HashMap::new(),
        }
    }
}

impl<L: Copy + PartialEq> Rooms<L> {
    /// A request has come for `room`, in `slot`.
    pub fn enter(&mut self, room: Room, slot: Slot, prompt: Prompt, now: Instant) -> Entered<L> {
        match self.entries.get(&room) {
            None => {
                self.entries.insert(room, Entry::Waiting { slot, prompt });
                self.by_slot.insert(slot, room);
                Entered::Waits
            }
            Some(Entry::Early { wanted, .. }) => {
                let wanted = wanted.clone();
                self.early -= 1;
                if wanted.prompt != prompt {
                    self.bury(room, now);
                    return Entered::Differs(wanted);
                }
                self.entries.insert(room, Entry::open(slot, wanted.clone()));
                self.by_slot.insert(slot, room);
                Entered::Meets(Met { slot, wanted })
            }
            Some(Entry::Waiting { .. } | Entry::Open { .. }) => Entered::Refused(Cause::Refused),
            Some(Entry::Draining { .. } | Entry::Over) => Entered::Refused(Cause::OtherLeg),
        }
    }

    /// A Destination, or an Interest, has come for `room`.
    pub fn arrive(&mut self, room: Room, wanted: Wanted<L>, now: Instant) -> Arrived<L> {
        match self.entries.get(&room) {
            None if is_planted("early destination is lost") => Arrived::Kept,
            None if self.early >= EARLY_DESTINATIONS_MAX => Arrived::Refused(Cause::Overloaded),
            None => {
                self.early += 1;
                let until = now + wanted.left.min(EARLY_DESTINATION_LIFE);
                self.entries.insert(room, Entry::Early { wanted, until });
                Arrived::Kept
            }
            Some(&Entry::Waiting { slot, prompt }) if prompt == wanted.prompt => {
                self.entries.insert(room, Entry::open(slot, wanted.clone()));
                Arrived::Meets(Met { slot, wanted })
            }
            Some(&Entry::Waiting { slot, .. }) => Arrived::Differs(slot),
            Some(Entry::Early { .. } | Entry::Open { .. }) => self.follow(room, wanted),
            Some(Entry::Draining { .. } | Entry::Over) => Arrived::Refused(Cause::OtherLeg),
        }
    }

    /// A Destination has come for a room that is taken: by its Interest, it may be.
    fn follow(&mut self, room: Room, wanted: Wanted<L>) -> Arrived<L> {
        match self.entries.get_mut(&room) {
            Some(Entry::Early { wanted: interest, .. }) if wanted.follows(interest) => {
                *interest = wanted;
                Arrived::Kept
            }
            Some(Entry::Open { slot, wanted: interest, .. }) if wanted.follows(interest) => {
                *interest = wanted.clone();
                Arrived::Meets(Met { slot: *slot, wanted })
            }
            _ => Arrived::Refused(Cause::Refused),
        }
    }

    /// The destination wants `room` stopped; it names its own slot in `target`.
    pub fn abort(&mut self, room: Room, link: L, target: Slot, now: Instant) -> Aborted {
        let same = |wanted: &Wanted<L>| wanted.link == link && wanted.theirs() == target;
        match self.entries.get_mut(&room) {
            Some(Entry::Early { wanted, .. }) if same(wanted) => {
                self.early -= 1;
                self.bury(room, now);
                Aborted::Answer
            }
            Some(Entry::Open { wanted, withdrawn: true, .. }) if same(wanted) => Aborted::Answer,
            Some(Entry::Open { slot, wanted, .. }) if same(wanted) && wanted.place.is_none() => {
                Aborted::Stop(*slot)
            }
            Some(Entry::Open { slot, wanted, ack_wanted, .. }) if same(wanted) => {
                *ack_wanted = true;
                Aborted::Fail(*slot)
            }
            Some(Entry::Draining { wanted, ack_wanted, .. }) if same(wanted) => {
                *ack_wanted = true;
                Aborted::Waits
            }
            Some(Entry::Over) => {
                self.unheard.remove(&room);
                Aborted::Answer
            }
            // A Destination that was refused, or a room this process never heard of: its request, should it
            // still come, finds the tombstone.
            None => {
                self.bury(room, now);
                Aborted::Answer
            }
            Some(_) => Aborted::Stale,
        }
    }

    /// The destination has everything of `room`: the slot, if it still is the one it names.
    pub fn done(&mut self, room: Room, link: L, target: Slot) -> Option<Slot> {
        match self.entries.get_mut(&room) {
            Some(Entry::Open { slot, wanted, done, .. })
                if wanted.link == link && wanted.theirs() == target =>
            {
                *done = true;
                Some(*slot)
            }
            _ => {
                if self.unheard.get(&room) == Some(&(link, target)) {
                    self.unheard.remove(&room);
                }
                None
            }
        }
    }

    /// The slot that computes for the Interest to which this would be the Destination.
    pub fn interested(&self, wanted: &Wanted<L>) -> Option<Slot> {
        match self.entries.get(&wanted.target.room) {
            Some(Entry::Open { slot, wanted: interest, .. }) if wanted.follows(interest) => {
                Some(*slot)
            }
            _ => None,
        }
    }

    /// The other end of an open slot, to be told of its failure.
    pub fn partner(&self, slot: Slot) -> Option<(Room, Wanted<L>)> {
        let room = *self.by_slot.get(&slot)?;
        match self.entries.get(&room) {
            Some(Entry::Open { slot: open, wanted, .. }) if *open == slot => {
                Some((room, wanted.clone()))
            }
            _ => None,
        }
    }

    /// The other ends of all open slots of a link.
    pub fn partners(&self, link: L) -> impl Iterator<Item = (Slot, Room, &Wanted<L>)> {
        self.entries.iter().filter_map(move |(&room, entry)| match entry {
            Entry::Open { slot, wanted, .. } if wanted.link == link => Some((*slot, room, wanted)),
            _ => None,
        })
    }

    /// The mover has withdrawn the slot, or everything posted of it has ended well: the other end, when it waits for
    /// the answer. Asked for once.
    pub fn withdrawn(&mut self, slot: Slot, now: Instant) -> Option<(Room, Wanted<L>)> {
        let room = *self.by_slot.get(&slot)?;
        match self.entries.get_mut(&room) {
            Some(Entry::Open { slot: open, wanted, ack_wanted, withdrawn, .. })
                if *open == slot =>
            {
                *withdrawn = true;
                std::mem::take(ack_wanted).then(|| (room, wanted.clone()))
            }
            Some(Entry::Draining { slot: held, wanted, ack_wanted }) if *held == slot => {
                let answer = ack_wanted.then(|| (room, wanted.clone()));
                self.by_slot.remove(&slot);
                self.bury(room, now);
                answer
            }
            _ => None,
        }
    }

    /// The request in `slot` is over; `complete`: everything posted of it has ended well.
    pub fn leave(&mut self, slot: Slot, complete: bool, now: Instant) {
        let Some(room) = self.by_slot.get(&slot).copied() else { return };
        let (ours, drains) = match self.entries.get(&room) {
            Some(Entry::Waiting { slot: held, .. }) => (*held == slot, None),
            // Pages are known where the source writes by itself.
            Some(Entry::Open { slot: held, wanted, ack_wanted, withdrawn, done }) => {
                if *held == slot && complete && !*done {
                    self.unheard.insert(room, (wanted.link, wanted.theirs()));
                }
                let is_over = complete || *withdrawn || is_planted("quiet is said before it is");
                let is_quiet = is_over || !wanted.is_written();
                (*held == slot, (!is_quiet).then(|| (wanted.clone(), *ack_wanted)))
            }
            _ => (false, None),
        };
        match drains {
            _ if !ours => {}
            Some((wanted, ack_wanted)) => {
                self.entries.insert(room, Entry::Draining { slot, wanted, ack_wanted });
            }
            None => {
                self.by_slot.remove(&slot);
                self.bury(room, now);
            }
        }
    }

    /// The link is dead, or its session void: early Destinations of it are forgotten, and what was draining, of
    /// which nobody may ask any more; open slots bound to it are given to `parted`, with whether their destination has told
    /// that all of theirs is there, and have no other end from then on: a mover that has lost the session says nothing more
    /// of them.
    pub fn unlink(&mut self, link: L, mut parted: impl FnMut(Slot, bool)) {
        self.unheard.retain(|_, (bound, _)| *bound != link);
        let by_slot = &mut self.by_slot;
        self.entries.retain(|_, entry| match entry {
            Entry::Early { wanted, .. } => wanted.link != link,
            Entry::Draining { slot, wanted, .. } if wanted.link == link => {
                by_slot.remove(slot);
                false
            }
            Entry::Open { slot, wanted, done, .. } if wanted.link == link => {
                parted(*slot, *done);
                *entry = Entry::Waiting { slot: *slot, prompt: wanted.prompt };
                true
            }
            Entry::Waiting { .. } | Entry::Open { .. } | Entry::Draining { .. } | Entry::Over => {
                true
            }
        });
        self.early =
            self.entries.values().filter(|entry| matches!(entry, Entry::Early { .. })).count();
    }

    /// The Destinations whose requests have not come, in the order of their rooms, which are over by that.
    pub fn take_early(&mut self, now: Instant) -> Vec<Wanted<L>> {
        if self.early == 0 {
            return Vec::new();
        }
        let is_early = |(&room, entry): (&Room, &Entry<L>)| match entry {
            Entry::Early { wanted, .. } => Some((room, wanted.clone())),
            _ => None,
        };
        let mut early: Vec<_> = self.entries.iter().filter_map(is_early).collect();
        early.sort_unstable_by_key(|&(room, _)| room);
        self.early = 0;
        early.iter().for_each(|&(room, _)| self.bury(room, now));
        early.into_iter().map(|(_, wanted)| wanted).collect()
    }

    /// Forgets what is too old. Early Destinations whose request never came are given to `unclaimed`.
    pub fn expire(&mut self, now: Instant, mut unclaimed: impl FnMut(Room, Wanted<L>)) {
        let mut late: Vec<(Room, Wanted<L>)> = Vec::new();
        for (&room, entry) in &self.entries {
            if let Entry::Early { wanted, until } = entry
                && *until <= now
            {
                late.push((room, wanted.clone()));
            }
        }
        late.sort_unstable_by_key(|&(room, _)| room);
        for (room, wanted) in late {
            self.early -= 1;
            self.bury(room, now);
            unclaimed(room, wanted);
        }
        while let Some(&(until, room)) = self.tombstones.front() {
            if until > now && self.tombstones.len() <= TOMBSTONES_MAX {
                break;
            }
            self.tombstones.pop_front();
            self.exhume(room);
        }
    }

    /// Rooms that are over here, and whose destinations may not have seen all of what was written to them.
    pub fn unheard(&self) -> usize {
        self.unheard.len()
    }

    /// Rooms that are not over.
    pub fn open(&self) -> usize {
        self.entries.values().filter(|entry| !matches!(entry, Entry::Over)).count()
    }

    fn bury(&mut self, room: Room, now: Instant) {
        self.entries.insert(room, Entry::Over);
        self.tombstones.push_back((now + TOMBSTONE_LIFE, room));
    }

    fn exhume(&mut self, room: Room) {
        if matches!(self.entries.get(&room), Some(Entry::Over)) {
            self.unheard.remove(&room);
            self.entries.remove(&room);
        }
    }
}

#[cfg(test)]
#[path = "rooms_tests.rs"]
mod tests;

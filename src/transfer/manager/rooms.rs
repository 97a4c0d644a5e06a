//! The rooms of a prefill worker: requests and Destinations come in any order, and each is answered truly.
//!
//! | entry | request here | Destination here | next |
//! |---|---|---|---|
//! | `Early` | no | yes, kept by room, bounded in number and time | `Open`, or `Over` by Abort, dead link, time |
//! | `Waiting` | yes | no | `Open`, or `Over` when the request ends |
//! | `Open` | yes | yes, checked | `Over` when the request ends; `Draining` where its writes may be under way then |
//! | `Draining` | over | yes | `Over` when its writes have ended; whoever asks is answered then |
//! | `Over` | tombstone with the answer to whoever asks again | | forgotten after a time |
//!
//! A dead link takes its Destinations along: what was `Open` is `Waiting` again, and its request fails.
//! A room that is open is refused to the newcomer, never overwritten.

use crate::cause::Cause;
use crate::ids::{Generation, PageId, Room, SlotId};
use crate::limits::{EARLY_DESTINATION_LIFE, EARLY_DESTINATIONS_MAX, TOMBSTONE_LIFE, TOMBSTONES_MAX};
use crate::transfer::command::Target;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

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

/// A Destination, checked against its own session, not yet against a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Wanted<L> {
    /// The link it came over.
    pub link: L,
    /// Where the KV is to go.
    pub target: Target,
    /// What the decode leg means to read.
    pub prompt: Prompt,
    /// Its pages, where the source writes into them.
    pub pages: Arc<[PageId]>,
}

#[derive(Debug)]
enum Entry<L> {
    Early { wanted: Wanted<L>, until: Instant },
    Waiting { slot: Slot, prompt: Prompt },
    Open { slot: Slot, wanted: Wanted<L>, ack_wanted: bool, withdrawn: bool },
    Draining { slot: Slot, wanted: Wanted<L>, ack_wanted: bool },
    Over,
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
}

impl<L: Copy + PartialEq> Default for Rooms<L> {
    fn default() -> Rooms<L> {
        Rooms { entries: HashMap::new(), by_slot: HashMap::new(), early: 0, tombstones: VecDeque::new() }
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
                self.entries.insert(
                    room,
                    Entry::Open { slot, wanted: wanted.clone(), ack_wanted: false, withdrawn: false },
                );
                self.by_slot.insert(slot, room);
                Entered::Meets(Met { slot, wanted })
            }
            Some(Entry::Waiting { .. } | Entry::Open { .. }) => Entered::Refused(Cause::Refused),
            Some(Entry::Draining { .. } | Entry::Over) => Entered::Refused(Cause::OtherLeg),
        }
    }

    /// A Destination has come for `room`.
    pub fn arrive(&mut self, room: Room, wanted: Wanted<L>, now: Instant) -> Arrived<L> {
        match self.entries.get(&room) {
            None if self.early >= EARLY_DESTINATIONS_MAX => Arrived::Refused(Cause::Overloaded),
            None => {
                self.early += 1;
                self.entries.insert(room, Entry::Early { wanted, until: now + EARLY_DESTINATION_LIFE });
                Arrived::Kept
            }
            Some(&Entry::Waiting { slot, prompt }) if prompt == wanted.prompt => {
                self.entries.insert(
                    room,
                    Entry::Open { slot, wanted: wanted.clone(), ack_wanted: false, withdrawn: false },
                );
                Arrived::Meets(Met { slot, wanted })
            }
            Some(&Entry::Waiting { slot, .. }) => Arrived::Differs(slot),
            Some(Entry::Early { .. } | Entry::Open { .. }) => Arrived::Refused(Cause::Refused),
            Some(Entry::Draining { .. } | Entry::Over) => Arrived::Refused(Cause::OtherLeg),
        }
    }

    /// The destination wants `room` stopped; it names its own slot in `target`.
    pub fn abort(&mut self, room: Room, link: L, target: Slot, now: Instant) -> Aborted {
        let same = |wanted: &Wanted<L>| {
            wanted.link == link
                && wanted.target.slot == target.id
                && wanted.target.generation == target.generation
        };
        match self.entries.get_mut(&room) {
            Some(Entry::Early { wanted, .. }) if same(wanted) => {
                self.early -= 1;
                self.bury(room, now);
                Aborted::Answer
            }
            Some(Entry::Open { wanted, withdrawn: true, .. }) if same(wanted) => Aborted::Answer,
            Some(Entry::Open { slot, wanted, ack_wanted, .. }) if same(wanted) => {
                *ack_wanted = true;
                Aborted::Fail(*slot)
            }
            Some(Entry::Draining { wanted, ack_wanted, .. }) if same(wanted) => {
                *ack_wanted = true;
                Aborted::Waits
            }
            Some(Entry::Over) => Aborted::Answer,
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
    pub fn done(&self, room: Room, link: L, target: Slot) -> Option<Slot> {
        match self.entries.get(&room) {
            Some(Entry::Open { slot, wanted, .. })
                if wanted.link == link
                    && wanted.target.slot == target.id
                    && wanted.target.generation == target.generation =>
            {
                Some(*slot)
            }
            _ => None,
        }
    }

    /// The other end of an open slot, to be told of its failure.
    pub fn partner(&self, slot: Slot) -> Option<(Room, Wanted<L>)> {
        let room = *self.by_slot.get(&slot)?;
        match self.entries.get(&room) {
            Some(Entry::Open { slot: open, wanted, .. }) if *open == slot => Some((room, wanted.clone())),
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
            Some(Entry::Open { slot: open, wanted, ack_wanted, withdrawn }) if *open == slot => {
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
            Some(Entry::Open { slot: held, wanted, ack_wanted, withdrawn }) => {
                let is_quiet = complete || *withdrawn || wanted.pages.is_empty();
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
    /// which nobody may ask any more; open slots bound to it are given to `failed`, and have no other end from then
    /// on: a mover that has lost the session says nothing more of them.
    pub fn unlink(&mut self, link: L, mut failed: impl FnMut(Slot)) {
        let by_slot = &mut self.by_slot;
        self.entries.retain(|_, entry| match entry {
            Entry::Early { wanted, .. } => wanted.link != link,
            Entry::Draining { slot, wanted, .. } if wanted.link == link => {
                by_slot.remove(slot);
                false
            }
            Entry::Open { slot, wanted, .. } if wanted.link == link => {
                failed(*slot);
                *entry = Entry::Waiting { slot: *slot, prompt: wanted.prompt };
                true
            }
            Entry::Waiting { .. } | Entry::Open { .. } | Entry::Draining { .. } | Entry::Over => true,
        });
        self.early = self.entries.values().filter(|entry| matches!(entry, Entry::Early { .. })).count();
    }

    /// Forgets what is too old. Early Destinations whose request never came are given to `unclaimed`.
    pub fn expire(&mut self, now: Instant, mut unclaimed: impl FnMut(Room, Wanted<L>)) {
        let mut late = Vec::new();
        for (&room, entry) in &self.entries {
            if let Entry::Early { wanted, until } = entry
                && *until <= now
            {
                late.push((room, wanted.clone()));
            }
        }
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
            self.entries.remove(&room);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transfer::command::SessionId;

    const ROOM: Room = Room(0);
    const OURS: Slot = Slot { id: SlotId(3), generation: Generation(7) };
    const PROMPT: Prompt = Prompt { tokens: 40, hash: [1; 16] };

    fn wanted(slot: u32) -> Wanted<u8> {
        let target =
            Target { session: SessionId(0), slot: SlotId(slot), generation: Generation(1), room: ROOM };
        Wanted { link: 9, target, prompt: PROMPT, pages: Arc::default() }
    }

    fn theirs(slot: u32) -> Slot {
        Slot { id: SlotId(slot), generation: Generation(1) }
    }

    #[test]
    fn the_two_legs_meet_in_either_order() {
        let now = Instant::now();
        let met = Met { slot: OURS, wanted: wanted(5) };
        let mut rooms = Rooms::default();
        assert_eq!(rooms.enter(ROOM, OURS, PROMPT, now), Entered::Waits);
        assert_eq!(rooms.arrive(ROOM, wanted(5), now), Arrived::Meets(met.clone()));
        let mut rooms = Rooms::default();
        assert_eq!(rooms.arrive(ROOM, wanted(5), now), Arrived::Kept);
        assert_eq!(rooms.enter(ROOM, OURS, PROMPT, now), Entered::Meets(met));
        assert_eq!(rooms.done(ROOM, 9, theirs(5)), Some(OURS));
        assert_eq!(rooms.done(ROOM, 8, theirs(5)), None);
        assert_eq!(rooms.done(ROOM, 9, theirs(6)), None);
    }

    #[test]
    fn another_prompt_fails_on_both_sides() {
        let now = Instant::now();
        let other = Prompt { tokens: 41, ..PROMPT };
        let mut rooms = Rooms::default();
        assert_eq!(rooms.enter(ROOM, OURS, other, now), Entered::Waits);
        assert_eq!(rooms.arrive(ROOM, wanted(5), now), Arrived::Differs(OURS));
        let mut rooms = Rooms::default();
        assert_eq!(rooms.arrive(ROOM, wanted(5), now), Arrived::Kept);
        assert_eq!(rooms.enter(ROOM, OURS, other, now), Entered::Differs(wanted(5)));
    }

    #[test]
    fn an_open_room_is_never_overwritten() {
        let now = Instant::now();
        let mut rooms = Rooms::default();
        let _ = rooms.enter(ROOM, OURS, PROMPT, now);
        let _ = rooms.arrive(ROOM, wanted(5), now);
        let second = Slot { id: SlotId(4), generation: Generation(1) };
        assert_eq!(rooms.enter(ROOM, second, PROMPT, now), Entered::Refused(Cause::Refused));
        assert_eq!(rooms.arrive(ROOM, wanted(6), now), Arrived::Refused(Cause::Refused));
        assert_eq!(rooms.partner(OURS), Some((ROOM, wanted(5))));
    }

    #[test]
    fn an_abort_is_answered_after_the_withdrawal_and_once() {
        let now = Instant::now();
        let mut rooms = Rooms::default();
        let _ = rooms.enter(ROOM, OURS, PROMPT, now);
        let _ = rooms.arrive(ROOM, wanted(5), now);
        assert_eq!(rooms.abort(ROOM, 9, theirs(6), now), Aborted::Stale);
        assert_eq!(rooms.abort(ROOM, 9, theirs(5), now), Aborted::Fail(OURS));
        assert_eq!(rooms.withdrawn(OURS, now), Some((ROOM, wanted(5))));
        assert_eq!(rooms.withdrawn(OURS, now), None);
        rooms.leave(OURS, true, now);
        assert_eq!(rooms.abort(ROOM, 9, theirs(5), now), Aborted::Answer);
        assert_eq!(rooms.open(), 0);
    }

    #[test]
    fn an_abort_before_the_request_leaves_a_tombstone_that_ends() {
        let now = Instant::now();
        let mut rooms = Rooms::default();
        let _ = rooms.arrive(ROOM, wanted(5), now);
        assert_eq!(rooms.abort(ROOM, 9, theirs(5), now), Aborted::Answer);
        assert_eq!(rooms.enter(ROOM, OURS, PROMPT, now), Entered::Refused(Cause::OtherLeg));
        assert_eq!(rooms.arrive(ROOM, wanted(5), now), Arrived::Refused(Cause::OtherLeg));
        rooms.expire(now + TOMBSTONE_LIFE, |_, _| ());
        let later = now + TOMBSTONE_LIFE;
        assert_eq!(rooms.enter(ROOM, OURS, PROMPT, later), Entered::Waits);
    }

    #[test]
    fn unclaimed_destinations_are_bounded_in_number_and_time() {
        let now = Instant::now();
        let mut rooms = Rooms::default();
        for room in 0..EARLY_DESTINATIONS_MAX as u64 {
            assert_eq!(rooms.arrive(Room(room), wanted(5), now), Arrived::Kept);
        }
        let more = Room(EARLY_DESTINATIONS_MAX as u64);
        assert_eq!(rooms.arrive(more, wanted(5), now), Arrived::Refused(Cause::Overloaded));
        let mut unclaimed = 0;
        rooms.expire(now + EARLY_DESTINATION_LIFE, |_, _| unclaimed += 1);
        assert_eq!(unclaimed, EARLY_DESTINATIONS_MAX);
        assert_eq!(rooms.arrive(more, wanted(5), now), Arrived::Kept);
    }

    #[test]
    fn a_dead_link_takes_its_rooms_along() {
        let now = Instant::now();
        let mut rooms = Rooms::default();
        let _ = rooms.arrive(Room(1), wanted(5), now);
        let _ = rooms.enter(ROOM, OURS, PROMPT, now);
        let _ = rooms.arrive(ROOM, wanted(5), now);
        let mut failed = Vec::new();
        rooms.unlink(8, |slot| failed.push(slot));
        assert!(failed.is_empty());
        rooms.unlink(9, |slot| failed.push(slot));
        assert_eq!(failed, [OURS]);
        assert_eq!(rooms.enter(Room(1), Slot { id: SlotId(9), ..OURS }, PROMPT, now), Entered::Waits);
    }

    /// Of a source that writes by itself; another's pages come back without its word.
    fn written(slot: u32) -> Wanted<u8> {
        Wanted { pages: [PageId(3)].into(), ..wanted(slot) }
    }

    #[test]
    fn who_asks_while_writes_are_under_way_is_answered_when_they_have_ended() {
        let now = Instant::now();
        let theirs = Slot { id: SlotId(5), generation: written(5).target.generation };
        // The request is over first, then comes the Abort; or the other way round.
        for abort_first in [true, false] {
            let mut rooms = Rooms::default();
            let _ = rooms.enter(ROOM, OURS, PROMPT, now);
            let _ = rooms.arrive(ROOM, written(5), now);
            if abort_first {
                assert_eq!(rooms.abort(ROOM, 9, theirs, now), Aborted::Fail(OURS));
            }
            rooms.leave(OURS, false, now);
            if !abort_first {
                assert_eq!(rooms.abort(ROOM, 9, theirs, now), Aborted::Waits);
            }
            assert_eq!(rooms.enter(ROOM, OURS, PROMPT, now), Entered::Refused(Cause::OtherLeg));
            assert_eq!(rooms.withdrawn(OURS, now), Some((ROOM, written(5))));
            assert_eq!(rooms.abort(ROOM, 9, theirs, now), Aborted::Answer);
            assert_eq!(rooms.withdrawn(OURS, now), None);
            assert_eq!(rooms.open(), 0);
        }
    }

    #[test]
    fn what_has_ended_before_the_request_is_quiet_at_once() {
        let now = Instant::now();
        let theirs = Slot { id: SlotId(5), generation: written(5).target.generation };
        for withdrawn in [true, false] {
            let mut rooms = Rooms::default();
            let _ = rooms.enter(ROOM, OURS, PROMPT, now);
            let _ = rooms.arrive(ROOM, written(5), now);
            if withdrawn {
                assert_eq!(rooms.withdrawn(OURS, now), None, "nobody has asked");
                assert_eq!(rooms.abort(ROOM, 9, theirs, now), Aborted::Answer);
            }
            rooms.leave(OURS, !withdrawn, now);
            assert_eq!(rooms.abort(ROOM, 9, theirs, now), Aborted::Answer);
        }
    }

    #[test]
    fn nobody_can_ask_for_what_was_draining_on_a_dead_link() {
        let now = Instant::now();
        let mut rooms = Rooms::default();
        let _ = rooms.enter(ROOM, OURS, PROMPT, now);
        let _ = rooms.arrive(ROOM, written(5), now);
        rooms.leave(OURS, false, now);
        rooms.unlink(9, |slot| panic!("{slot:?} is over"));
        assert_eq!(rooms.open(), 0);
        assert_eq!(rooms.withdrawn(OURS, now), None);
    }

    #[test]
    fn the_movers_word_is_for_one_use_of_a_slot() {
        let now = Instant::now();
        let mut rooms = Rooms::default();
        let _ = rooms.enter(ROOM, OURS, PROMPT, now);
        let _ = rooms.arrive(ROOM, written(5), now);
        rooms.leave(OURS, false, now);
        // Without a lease the slot is free before the mover has taken its Cancel.
        let next = Slot { generation: Generation(OURS.generation.0 + 1), ..OURS };
        assert_eq!(rooms.enter(Room(1), next, PROMPT, now), Entered::Waits);
        assert_eq!(rooms.abort(ROOM, 9, theirs(5), now), Aborted::Waits);
        assert_eq!(rooms.withdrawn(OURS, now), Some((ROOM, written(5))));
        rooms.leave(next, false, now);
        assert_eq!(rooms.open(), 0);
    }

    #[test]
    fn no_room_waits_for_a_mover_that_has_lost_its_session() {
        let now = Instant::now();
        let mut rooms = Rooms::default();
        let _ = rooms.enter(ROOM, OURS, PROMPT, now);
        let _ = rooms.arrive(ROOM, written(5), now);
        rooms.unlink(9, |_| ());
        assert_eq!(rooms.partner(OURS), None);
        assert_eq!(rooms.withdrawn(OURS, now), None);
        rooms.leave(OURS, false, now);
        assert_eq!(rooms.open(), 0);
    }
}

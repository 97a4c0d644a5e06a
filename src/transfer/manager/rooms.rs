//! The rooms of a prefill worker. Requests and Destinations come in any order; each gets an answer.
//!
//! | entry | request here | Destination here | next |
//! |---|---|---|---|
//! | `Early` | not yet | yes, or its Interest; bounded in number and time | `Open` or `Over` |
//! | `Waiting` | yes | not yet | `Open`, or `Over` when the request ends |
//! | `Open` | yes | yes, or its Interest; checked | `Over` or `Draining` when the request ends |
//! | `Draining` | ended | yes; its writes may be in flight | `Over` when its writes have ended |
//! | `Over` | tombstone | tombstone: later messages still get an answer | forgotten after a time |
//!
//! An Interest is a Destination without pages; the Destination that follows replaces it. If a link
//! dies, its Destinations are removed: an `Open` room becomes `Waiting` again, and its request
//! fails. A second request for an open room is refused. An Abort of a `Waiting` room comes from a
//! destination that needs nothing, and fails the request.

use crate::cause::Cause;
use crate::ids::{Generation, PageId, Room, SlotId};
use crate::limits::{
    EARLY_DESTINATION_LIFE, EARLY_DESTINATIONS_MAX, TOMBSTONE_LIFE, TOMBSTONES_MAX,
};
use crate::stdx::failpoint::is_failpoint_active;
use crate::stdx::hash_map::HashMap;
use crate::transfer::target::Target;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One use of a slot of this worker.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Slot {
    /// Its index.
    pub id: SlotId,
    /// The use of the slot.
    pub generation: Generation,
}

/// The values that both legs must agree on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Prompt {
    /// Prompt tokens.
    pub tokens: u32,
    /// Hash of the ids.
    pub hash: [u8; 16],
}

/// A Destination or an Interest, checked against its session, but not yet against a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DestinationRequest<L> {
    /// The link it came over.
    pub link: L,
    /// The target of the KV; an Interest has no valid prefix.
    pub target: Target,
    /// The prompt of the decode leg.
    pub prompt: Prompt,
    /// The destination's pages. An Interest has none.
    pub place: Option<DestinationPages>,
    /// The time that its request can still wait, counted from arrival.
    pub left: Duration,
}

/// The pages of a destination that receive KV.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct DestinationPages {
    /// The pages behind its prefix, if the source writes into them.
    pub pages: Arc<[PageId]>,
    /// Index of the first of them among the prompt's pages.
    pub first: usize,
}

impl<L: PartialEq> DestinationRequest<L> {
    /// The destination's slot.
    fn theirs(&self) -> Slot {
        Slot { id: self.target.slot, generation: self.target.generation }
    }

    /// Whether this is the Destination that follows `interest`.
    fn follows(&self, interest: &DestinationRequest<L>) -> bool {
        let names = |wanted: &DestinationRequest<L>| {
            (wanted.target.session, wanted.target.slot, wanted.target.generation, wanted.prompt)
        };
        interest.place.is_none()
            && self.place.is_some()
            && self.link == interest.link
            && names(self) == names(interest)
    }

    /// The cause that the destination gets if the request never came. It is `Deadline` only if the
    /// destination's own deadline has passed, because a deadline is not retried. In other cases a
    /// retry can help: the prefill worker can have restarted after its answer and not know the
    /// room.
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
    Early {
        wanted: DestinationRequest<L>,
        until: Instant,
    },
    Waiting {
        slot: Slot,
        prompt: Prompt,
    },
    Open {
        slot: Slot,
        wanted: DestinationRequest<L>,
        ack_wanted: bool,
        withdrawn: bool,
        done: bool,
    },
    Draining {
        slot: Slot,
        wanted: DestinationRequest<L>,
        ack_wanted: bool,
    },
    Over,
}

impl<L> Entry<L> {
    /// The entry of a room in which both legs have just met.
    fn open(slot: Slot, wanted: DestinationRequest<L>) -> Entry<L> {
        Entry::Open { slot, wanted, ack_wanted: false, withdrawn: false, done: false }
    }
}

/// The two legs of a room have met.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MatchedLegs<L> {
    /// This worker's slot.
    pub slot: Slot,
    /// The destination's side.
    pub wanted: DestinationRequest<L>,
}

/// The result of [`Rooms::enter`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum EnterOutcome<L> {
    /// No Destination yet.
    Waits,
    /// Its Destination was here already.
    Meets(MatchedLegs<L>),
    /// Its Destination was here and names another prompt: both sides fail.
    Differs(DestinationRequest<L>),
    /// The room is taken by another request, or was aborted before this request came.
    Refused(Cause),
}

/// The result of [`Rooms::arrive`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ArriveOutcome<L> {
    /// Kept until its request comes.
    Kept,
    /// Its request was here already.
    Meets(MatchedLegs<L>),
    /// Its request is here and has another prompt: both sides fail.
    Differs(Slot),
    /// The room is taken or over, or too many Destinations wait. The destination gets an AbortAck
    /// without an Abort.
    Refused(Cause),
}

/// The result of [`Rooms::abort`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AbortOutcome {
    /// No write for it is posted now or later: the answer is `quiet`.
    Answer,
    /// The same for an Interest, or for a room that its destination does not need; the caller must
    /// fail the slot that computes for it.
    Stop(Slot),
    /// The caller must fail the slot. The answer follows when the slot is withdrawn.
    Fail(Slot),
    /// The slot has failed already. The answer follows when the slot is withdrawn.
    Waits,
    /// It belongs to another attempt, and gets no answer.
    Stale,
}

/// All rooms of one prefill worker. `L` names a link.
#[derive(Debug)]
pub struct Rooms<L> {
    entries: HashMap<Room, Entry<L>>,
    /// Includes draining rooms: their slots can be reused before the mover's last report on them.
    by_slot: HashMap<Slot, Room>,
    early: usize,
    tombstones: VecDeque<(Instant, Room)>,
    /// Rooms that ended with everything written, but without a Done from the destination: its link
    /// and slot.
    unconfirmed: HashMap<Room, (L, Slot)>,
}

impl<L: Copy + PartialEq> Default for Rooms<L> {
    fn default() -> Rooms<L> {
        Rooms {
            entries: HashMap::default(),
            by_slot: HashMap::default(),
            early: 0,
            tombstones: VecDeque::new(),
            unconfirmed: HashMap::default(),
        }
    }
}

impl<L: Copy + PartialEq> Rooms<L> {
    /// Adds a request for `room`, in `slot`.
    pub fn enter(
        &mut self,
        room: Room,
        slot: Slot,
        prompt: Prompt,
        now: Instant,
    ) -> EnterOutcome<L> {
        match self.entries.get(&room) {
            None => {
                self.entries.insert(room, Entry::Waiting { slot, prompt });
                self.take_slot(slot, room);
                EnterOutcome::Waits
            }
            Some(Entry::Early { wanted, .. }) => {
                let wanted = wanted.clone();
                self.early -= 1;
                if wanted.prompt != prompt {
                    self.bury(room, now);
                    return EnterOutcome::Differs(wanted);
                }
                self.entries.insert(room, Entry::open(slot, wanted.clone()));
                self.take_slot(slot, room);
                EnterOutcome::Meets(MatchedLegs { slot, wanted })
            }
            Some(Entry::Waiting { .. } | Entry::Open { .. }) => {
                EnterOutcome::Refused(Cause::Refused)
            }
            Some(Entry::Draining { .. } | Entry::Over) => EnterOutcome::Refused(Cause::OtherLeg),
        }
    }

    /// Refuses a request for `room` that can still come. A room that is known is not affected.
    pub fn refuse(&mut self, room: Room, now: Instant) {
        if !self.entries.contains_key(&room) {
            self.bury(room, now);
        }
    }

    /// Whether a request for `room` would be refused, because the room is over.
    pub fn is_over(&self, room: Room) -> bool {
        matches!(self.entries.get(&room), Some(Entry::Draining { .. } | Entry::Over))
    }

    /// Adds a Destination, or an Interest, for `room`.
    pub fn arrive(
        &mut self,
        room: Room,
        wanted: DestinationRequest<L>,
        now: Instant,
    ) -> ArriveOutcome<L> {
        match self.entries.get(&room) {
            None if is_failpoint_active("early destination is lost") => ArriveOutcome::Kept,
            None if self.early >= EARLY_DESTINATIONS_MAX => {
                ArriveOutcome::Refused(Cause::Overloaded)
            }
            None => {
                self.early += 1;
                let until = now + wanted.left.min(EARLY_DESTINATION_LIFE);
                self.entries.insert(room, Entry::Early { wanted, until });
                ArriveOutcome::Kept
            }
            Some(&Entry::Waiting { slot, prompt }) if prompt == wanted.prompt => {
                self.entries.insert(room, Entry::open(slot, wanted.clone()));
                ArriveOutcome::Meets(MatchedLegs { slot, wanted })
            }
            Some(&Entry::Waiting { slot, .. }) => ArriveOutcome::Differs(slot),
            Some(Entry::Early { .. } | Entry::Open { .. }) => self.follow(room, wanted),
            Some(Entry::Draining { .. } | Entry::Over) => ArriveOutcome::Refused(Cause::OtherLeg),
        }
    }

    /// Handles a Destination for a room that exists. It can follow its own Interest.
    fn follow(&mut self, room: Room, wanted: DestinationRequest<L>) -> ArriveOutcome<L> {
        match self.entries.get_mut(&room) {
            Some(Entry::Early { wanted: interest, .. }) if wanted.follows(interest) => {
                *interest = wanted;
                ArriveOutcome::Kept
            }
            Some(Entry::Open { slot, wanted: interest, .. }) if wanted.follows(interest) => {
                *interest = wanted.clone();
                ArriveOutcome::Meets(MatchedLegs { slot: *slot, wanted })
            }
            _ => ArriveOutcome::Refused(Cause::Refused),
        }
    }

    /// Handles the destination's Abort of `room`; `target` is its own slot.
    pub fn abort(&mut self, room: Room, link: L, target: Slot, now: Instant) -> AbortOutcome {
        let same =
            |wanted: &DestinationRequest<L>| wanted.link == link && wanted.theirs() == target;
        match self.entries.get_mut(&room) {
            Some(Entry::Early { wanted, .. }) if same(wanted) => {
                self.early -= 1;
                self.bury(room, now);
                AbortOutcome::Answer
            }
            Some(Entry::Open { wanted, withdrawn: true, .. }) if same(wanted) => {
                AbortOutcome::Answer
            }
            Some(Entry::Open { slot, wanted, .. }) if same(wanted) && wanted.place.is_none() => {
                AbortOutcome::Stop(*slot)
            }
            // The destination declines: it has sent neither Interest nor Destination.
            Some(Entry::Waiting { slot, .. }) => AbortOutcome::Stop(*slot),
            Some(Entry::Open { slot, wanted, ack_wanted, .. }) if same(wanted) => {
                *ack_wanted = true;
                AbortOutcome::Fail(*slot)
            }
            Some(Entry::Draining { wanted, ack_wanted, .. }) if same(wanted) => {
                *ack_wanted = true;
                AbortOutcome::Waits
            }
            Some(Entry::Over) => {
                self.unconfirmed.remove(&room);
                AbortOutcome::Answer
            }
            // A refused Destination, or an unknown room. If its request still comes, it finds the
            // tombstone.
            None => {
                self.bury(room, now);
                AbortOutcome::Answer
            }
            Some(_) => AbortOutcome::Stale,
        }
    }

    /// Handles the destination's Done for `room`. Returns this side's slot if `link` and `target`
    /// match.
    pub fn done(&mut self, room: Room, link: L, target: Slot) -> Option<Slot> {
        match self.entries.get_mut(&room) {
            Some(Entry::Open { slot, wanted, done, .. })
                if wanted.link == link && wanted.theirs() == target =>
            {
                *done = true;
                Some(*slot)
            }
            _ => {
                if self.unconfirmed.get(&room) == Some(&(link, target)) {
                    self.unconfirmed.remove(&room);
                }
                None
            }
        }
    }

    /// The slot that computes for an Interest, if `wanted` is the Destination that follows it.
    pub fn interested(&self, wanted: &DestinationRequest<L>) -> Option<Slot> {
        match self.entries.get(&wanted.target.room) {
            Some(Entry::Open { slot, wanted: interest, .. }) if wanted.follows(interest) => {
                Some(*slot)
            }
            _ => None,
        }
    }

    /// The other end of an open slot, which must learn of its failure.
    pub fn partner(&self, slot: Slot) -> Option<(Room, DestinationRequest<L>)> {
        let room = *self.by_slot.get(&slot)?;
        match self.entries.get(&room) {
            Some(Entry::Open { slot: open, wanted, .. }) if *open == slot => {
                Some((room, wanted.clone()))
            }
            _ => None,
        }
    }

    /// The other ends of all open slots of a link.
    pub fn partners(&self, link: L) -> impl Iterator<Item = (Slot, Room, &DestinationRequest<L>)> {
        self.entries.iter().filter_map(move |(&room, entry)| match entry {
            Entry::Open { slot, wanted, .. } if wanted.link == link => Some((*slot, room, wanted)),
            _ => None,
        })
    }

    /// The other ends of all rooms that are not over.
    pub fn destinations(&self) -> impl Iterator<Item = &DestinationRequest<L>> {
        self.entries.values().filter_map(|entry| match entry {
            Entry::Early { wanted, .. }
            | Entry::Open { wanted, .. }
            | Entry::Draining { wanted, .. } => Some(wanted),
            Entry::Waiting { .. } | Entry::Over => None,
        })
    }

    /// Notes that the mover has withdrawn the slot, or that all its posts have completed. Returns
    /// the other end, once, if it waits for the answer.
    pub fn withdrawn(&mut self, slot: Slot, now: Instant) -> Option<(Room, DestinationRequest<L>)> {
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

    /// Removes the request in `slot`, which has ended. `complete` means that all its posts
    /// completed successfully.
    pub fn leave(&mut self, slot: Slot, complete: bool, now: Instant) {
        let Some(room) = self.by_slot.get(&slot).copied() else { return };
        let (ours, drains) = match self.entries.get(&room) {
            Some(Entry::Waiting { slot: held, .. }) => (*held == slot, None),
            // The pages are known only if the source writes into them.
            Some(Entry::Open { slot: held, wanted, ack_wanted, withdrawn, done }) => {
                // A destination that has aborted confirms nothing.
                if *held == slot && complete && !*done && !*withdrawn {
                    let before = self.unconfirmed.insert(room, (wanted.link, wanted.theirs()));
                    debug_assert!(before.is_none(), "a room ends once");
                }
                let is_over =
                    complete || *withdrawn || is_failpoint_active("quiet is said before it is");
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

    /// Removes a link that is dead, or that has lost its session. Forgets its early Destinations
    /// and its draining rooms, because no peer can ask about them any more. Calls `parted` for each
    /// of its open slots; the flag says whether the destination sent Done. These slots then have no
    /// other end, because a mover that lost the session sends no more reports about them.
    pub fn unlink(&mut self, link: L, mut parted: impl FnMut(Slot, bool)) {
        self.unconfirmed.retain(|_, (bound, _)| *bound != link);
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

    /// Removes and returns the Destinations without a request, in the order of their rooms. Their
    /// rooms are then over.
    pub fn take_early(&mut self, now: Instant) -> Vec<DestinationRequest<L>> {
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

    /// Forgets expired entries. Calls `unclaimed` for early Destinations without a request.
    pub fn expire(&mut self, now: Instant, mut unclaimed: impl FnMut(Room, DestinationRequest<L>)) {
        let mut late: Vec<(Room, DestinationRequest<L>)> = Vec::new();
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
        if cfg!(debug_assertions) {
            self.invariants();
        }
    }

    /// Rooms without a request here, while the destination has not confirmed that it has
    /// everything, or while writes to it are under way.
    pub fn unconfirmed(&self) -> usize {
        let is_draining = |entry: &&Entry<L>| matches!(entry, Entry::Draining { .. });
        self.unconfirmed.len() + self.entries.values().filter(is_draining).count()
    }

    /// Rooms that are not over.
    pub fn open(&self) -> usize {
        self.entries.values().filter(|entry| !matches!(entry, Entry::Over)).count()
    }

    /// Asserts the rules that hold between calls. Debug builds call it at each tick.
    ///
    /// # Panics
    /// A slot and its room do not name each other, early Destinations are miscounted, a room that
    /// is not over counts as unconfirmed, or a room that is over is never forgotten.
    pub fn invariants(&self) {
        let (mut early, mut with_slot, mut over) = (0, 0, 0);
        for (room, entry) in &self.entries {
            match entry {
                Entry::Early { .. } => early += 1,
                Entry::Waiting { slot, .. }
                | Entry::Open { slot, .. }
                | Entry::Draining { slot, .. } => {
                    with_slot += 1;
                    assert_eq!(self.by_slot.get(slot), Some(room), "a slot leads to its room");
                }
                Entry::Over => over += 1,
            }
        }
        assert_eq!(self.early, early, "early Destinations are counted");
        assert!(early <= EARLY_DESTINATIONS_MAX, "early Destinations are bounded");
        assert_eq!(self.by_slot.len(), with_slot, "a slot leads to a room that is not over");
        for room in self.unconfirmed.keys() {
            let is_over = matches!(self.entries.get(room), Some(Entry::Over));
            assert!(is_over, "only a room that is over can be unconfirmed");
        }
        assert_eq!(self.tombstones.len(), over, "a room that is over is forgotten after a time");
        let is_sorted = self.tombstones.iter().is_sorted_by_key(|(until, _)| until);
        assert!(is_sorted, "rooms are forgotten in the order of their ends");
    }

    fn take_slot(&mut self, slot: Slot, room: Room) {
        let before = self.by_slot.insert(slot, room);
        debug_assert!(before.is_none(), "a use of a slot has one room");
    }

    fn bury(&mut self, room: Room, now: Instant) {
        let before = match is_failpoint_active("ended room is forgotten") {
            true => self.entries.remove(&room),
            false => self.entries.insert(room, Entry::Over),
        };
        debug_assert!(!matches!(before, Some(Entry::Over)), "a room ends once");
        self.tombstones.push_back((now + TOMBSTONE_LIFE, room));
    }

    fn exhume(&mut self, room: Room) {
        if matches!(self.entries.get(&room), Some(Entry::Over)) {
            self.unconfirmed.remove(&room);
            self.entries.remove(&room);
        }
    }
}

#[cfg(test)]
#[path = "rooms_tests.rs"]
mod tests;

//! Who is a worker of this cluster, by whose word: named by its operator, or by an entry that it renews itself.
//!
//! A seat is a role at a URL. It is taken while it is named or there is an entry for it. An entry has a time to
//! live and is dropped when it was not renewed by then; one that a registry elsewhere keeps (etcd) has none until
//! that registry is found without it.
//! ```text
//!            name, or a first entry                    neither named nor an entry
//!   empty ───────────────────────────▶ taken ──────────────────────────────────────▶ empty
//!                                       │  ▲  an entry of another incarnation:
//!                                       └──┘  left and joined, so that it gets a number of its own
//! ```
//! Thread: `ctl` of a router. Invariants: a seat is taken once, whoever says so; entries are bounded in
//! number, by role and in all. Pure. Not here: who may say so (`proof`), what becomes of requests (`front::router`).

use super::entry::{Entry, Seat};
use super::kinds::KindDigest;
use super::router::Role;
use crate::limits::{REGISTRY_ENTRIES_MAX, ROUTER_WORKERS_MAX};
use crate::stdx::planted::is_planted;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::time::Instant;

/// What is to be done with a seat.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// A worker joins.
    Join {
        /// What it does, and where.
        seat: Seat,
        /// Of a prefill worker's registry.
        bootstrap_port: Option<u16>,
        /// What it fits, if it has said so.
        kind: Option<KindDigest>,
        /// Whether it has been named for another role, and has told that it has this one.
        has_turned: bool,
    },
    /// It leaves.
    Leave {
        /// What it does, and where.
        seat: Seat,
        /// For the log.
        why: Why,
    },
}

/// Why a worker leaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Why {
    /// It was taken off.
    Removed,
    /// It has taken its entry back.
    Withdrawn,
    /// It has not renewed its entry.
    Expired,
    /// The registry elsewhere that kept its entry has dropped it.
    Dropped,
    /// Another process has taken its place.
    Replaced,
    /// It has another role.
    Turned,
    /// It is elsewhere by now, and cannot be spoken to there.
    Unspoken,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Why::Removed => "it was removed",
            Why::Withdrawn => "it has taken its entry back",
            Why::Expired => "its entry was not renewed",
            Why::Dropped => "etcd has dropped its entry",
            Why::Replaced => "another incarnation has taken its place",
            Why::Turned => "it has another role",
            Why::Unspoken => "it is to be spoken to otherwise, which this router cannot",
        })
    }
}

/// There are as many workers of this role, or as many entries, as there may be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Full(pub Role);

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "there are {ROUTER_WORKERS_MAX} {} workers, as many as there may be", self.0)
    }
}

#[derive(Debug)]
struct Held {
    entry: Entry,
    /// `None` while a registry elsewhere keeps it.
    until: Option<Instant>,
    /// Its operator has removed it: this incarnation does not come back by renewing. Another one does, since nothing here
    /// tells a change of role from a start.
    barred: bool,
}

#[derive(Debug, Default)]
struct Place {
    /// With the port of a prefill worker's registry.
    named: Option<Option<u16>>,
    /// That name came from the seat of the other role.
    has_turned: bool,
    held: Option<Held>,
}

impl Place {
    fn is_taken(&self) -> bool {
        self.named.is_some() || self.held.as_ref().is_some_and(|held| !held.barred)
    }
}

/// All seats that are taken, and what is to be done about them.
#[derive(Debug, Default)]
pub struct Membership {
    places: HashMap<Seat, Place>,
    actions: VecDeque<Action>,
}

impl Membership {
    /// What is to be done.
    pub fn poll(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// An operator names a worker. It stays until it is removed.
    ///
    /// # Errors
    /// There is no room for one more.
    pub fn name(&mut self, seat: Seat, bootstrap_port: Option<u16>) -> Result<(), Full> {
        let was_taken = self.is_taken(&seat);
        if !was_taken && self.is_full(seat.role) {
            return Err(Full(seat.role));
        }
        self.places.entry(seat.clone()).or_default().named = Some(bootstrap_port);
        if !was_taken {
            self.join(seat);
        }
        Ok(())
    }

    /// A worker has told that it has this role by now: a name of it goes with it. False: it is not named, and enters itself
    /// where it is to be found.
    ///
    /// # Errors
    /// There is no room for one more of that role.
    pub fn turn(&mut self, seat: &Seat, role: Role) -> Result<bool, Full> {
        let there = Seat { role, url: seat.url.clone() };
        let (was_taken, is_full) = (self.is_taken(&there), self.is_full(role));
        let named =
            self.places.get_mut(seat).filter(|place| place.named.is_some() && there != *seat);
        let Some(place) = named.filter(|_| !is_planted("who has turned keeps its number")) else {
            return Ok(false);
        };
        if !was_taken && is_full {
            return Err(Full(role));
        }
        place.named = None;
        if !place.is_taken() {
            self.left(seat, Why::Turned);
        }
        let place = self.places.entry(there.clone()).or_default();
        place.named.get_or_insert_default();
        place.has_turned = !is_planted("who has turned is not followed back");
        if !was_taken {
            self.join(there);
        }
        Ok(true)
    }

    /// An operator removes a worker, whoever said that it is one. False: it is none.
    pub fn remove(&mut self, seat: &Seat) -> bool {
        let Some(place) = self.places.get_mut(seat).filter(|place| place.is_taken()) else {
            return false;
        };
        place.named = None;
        if let Some(held) = &mut place.held {
            held.barred = true;
        }
        self.left(seat, Why::Removed);
        true
    }

    /// A worker enters itself, or renews its entry. `until` is when it is dropped unless it is renewed again.
    ///
    /// # Errors
    /// There is no room for one more.
    pub fn renew(&mut self, entry: Entry, until: Option<Instant>) -> Result<(), Full> {
        let seat = entry.seat.clone();
        let known = self.places.get_mut(&seat).and_then(|place| place.held.as_mut());
        if let Some(held) = known.filter(|held| held.entry == entry) {
            held.until = until;
            return Ok(());
        }
        // A process has one seat: one that is entered elsewhere is that of its past, whose room it gives back.
        let past = self.elsewhere(&entry);
        let was_taken = self.is_taken(&seat);
        let is_new = self.places.get(&seat).is_none_or(|place| place.held.is_none());
        let gives_back =
            past.iter().any(|past| past.role == seat.role && self.is_taken_by_entry(past));
        let is_full = !gives_back && self.is_full(seat.role);
        let entries = self.entries() - past.len();
        if (!was_taken && is_full) || (is_new && entries >= REGISTRY_ENTRIES_MAX) {
            return Err(Full(seat.role));
        }
        past.iter().for_each(|past| self.drop_entry(past, Why::Replaced));
        let place = self.places.entry(seat.clone()).or_default();
        place.held = Some(Held { entry, until, barred: false });
        if was_taken {
            self.actions.push_back(Action::Leave { seat: seat.clone(), why: Why::Replaced });
        }
        self.join(seat);
        Ok(())
    }

    /// A worker has entered itself where it cannot be spoken to: it is no longer where it was.
    pub fn refuse(&mut self, entry: &Entry) {
        self.elsewhere(entry).iter().for_each(|past| self.drop_entry(past, Why::Unspoken));
    }

    /// A worker takes its entry back, or a registry elsewhere has dropped it. Only this very incarnation's is
    /// meant, so that what comes late harms no successor.
    pub fn withdraw(&mut self, seat: &Seat, incarnation: [u8; 16], why: Why) {
        let held = self.places.get(seat).and_then(|place| place.held.as_ref());
        if held.is_some_and(|held| held.entry.peer.incarnation == incarnation) {
            self.drop_entry(seat, why);
        }
    }

    /// Drops what was not renewed.
    pub fn expire(&mut self, now: Instant) {
        let is_late = |held: &Held| held.until.is_some_and(|until| until <= now);
        let late = |(seat, place): (&Seat, &Place)| {
            place.held.as_ref().filter(|h| is_late(h)).map(|_| seat.clone())
        };
        for seat in self.places.iter().filter_map(late).collect::<Vec<_>>() {
            self.drop_entry(&seat, Why::Expired);
        }
    }

    /// A registry elsewhere was read anew: of the entries that it kept, those that `is_there` does not know are
    /// dropped at `until` unless they come back. It may have lost what its workers are about to enter again.
    pub fn reconcile(&mut self, is_there: impl Fn(&Seat) -> bool, until: Instant) {
        for (seat, place) in &mut self.places {
            if let Some(held) =
                place.held.as_mut().filter(|held| held.until.is_none() && !is_there(seat))
            {
                held.until = Some(until);
            }
        }
    }

    /// The entry of a seat.
    pub fn entry(&self, seat: &Seat) -> Option<&Entry> {
        self.places.get(seat).and_then(|place| place.held.as_ref()).map(|held| &held.entry)
    }

    /// How many entries there are.
    pub fn entries(&self) -> usize {
        self.places.values().filter(|place| place.held.is_some()).count()
    }

    fn is_taken(&self, seat: &Seat) -> bool {
        self.places.get(seat).is_some_and(Place::is_taken)
    }

    fn is_full(&self, role: Role) -> bool {
        let taken =
            self.places.iter().filter(|(seat, place)| seat.role == role && place.is_taken());
        taken.count() >= ROUTER_WORKERS_MAX
    }

    /// Where else the process of an entry has one.
    fn elsewhere(&self, entry: &Entry) -> Vec<Seat> {
        let is_same =
            |held: &Held| held.entry.peer.id == entry.peer.id && held.entry.seat != entry.seat;
        let same = self.places.iter().filter(|(_, place)| place.held.as_ref().is_some_and(is_same));
        same.map(|(seat, _)| seat.clone()).collect()
    }

    /// By nothing else.
    fn is_taken_by_entry(&self, seat: &Seat) -> bool {
        self.places.get(seat).is_some_and(|place| place.named.is_none() && place.is_taken())
    }

    fn drop_entry(&mut self, seat: &Seat, why: Why) {
        let Some(place) = self.places.get_mut(seat) else { return };
        let was_taken = place.is_taken();
        place.held = None;
        if was_taken && !place.is_taken() {
            self.left(seat, why);
        } else {
            self.forget(seat);
        }
    }

    fn left(&mut self, seat: &Seat, why: Why) {
        self.actions.push_back(Action::Leave { seat: seat.clone(), why });
        self.forget(seat);
    }

    fn forget(&mut self, seat: &Seat) {
        if self.places.get(seat).is_some_and(|place| place.named.is_none() && place.held.is_none())
        {
            self.places.remove(seat);
        }
    }

    fn join(&mut self, seat: Seat) {
        let place = &self.places[&seat];
        let entry = place.held.as_ref().filter(|held| !held.barred).map(|held| &held.entry);
        let bootstrap_port = entry.and_then(|entry| entry.bootstrap_port).or(place.named.flatten());
        let (kind, has_turned) = (entry.map(|entry| entry.kind), place.has_turned);
        self.actions.push_back(Action::Join { seat, bootstrap_port, kind, has_turned });
    }
}

#[cfg(test)]
#[path = "membership_tests.rs"]
mod tests;

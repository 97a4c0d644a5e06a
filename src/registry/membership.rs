//! The workers of this cluster. An operator names a worker, or the worker renews an entry itself.
//!
//! A worker address is a role at a URL. It is taken while it is named or has an entry. An entry
//! ends if it is not renewed in time. An entry in etcd has no time limit until etcd is read without
//! it.
//! ```text
//!            name, or a first entry                    neither named nor an entry
//!   empty ───────────────────────────▶ taken ──────────────────────────────────────▶ empty
//!                                       │  ▲  an entry of another incarnation:
//!                                       └──┘  leave and join, with a new ID
//! ```
//! Thread: `ctl` of a router. Pure.
//! Invariants: an address is taken once, by name, by entry or by both. Entries are bounded in
//! number, for each role and in total.
//! Not here: permission to change the membership (`proof`), and what happens to requests
//! (`balancer`).

use crate::ids::Leg;
use crate::limits::{REGISTRY_ENTRIES_MAX, ROUTER_WORKERS_MAX};
use crate::registry::entry::{Entry, WorkerAddress};
use crate::routing::compatibility::CompatDigest;
use crate::stdx::failpoint::is_failpoint_active;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::time::Instant;

/// A change of the workers that the caller carries out.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MembershipAction {
    /// A worker joins.
    Join {
        /// The worker's role and URL.
        seat: WorkerAddress,
        /// Port of a prefill worker's bootstrap registry.
        bootstrap_port: Option<u16>,
        /// Its compatibility digest, if it has an entry.
        kind: Option<CompatDigest>,
        /// Whether it was named with another role and has reported this one.
        has_turned: bool,
    },
    /// A worker leaves.
    Leave {
        /// The worker's role and URL.
        seat: WorkerAddress,
        /// The reason, for the log.
        why: LeaveReason,
    },
}

/// Why a worker leaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LeaveReason {
    /// An operator removed it.
    Removed,
    /// It removed its entry.
    Withdrawn,
    /// It did not renew its entry.
    Expired,
    /// etcd no longer has its entry.
    Dropped,
    /// Another incarnation has its address.
    Replaced,
    /// It has another role.
    Turned,
    /// It moved to a URL that this router cannot reach, because the router has no TLS.
    Unspoken,
}

impl fmt::Display for LeaveReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LeaveReason::Removed => "it was removed",
            LeaveReason::Withdrawn => "it has taken its entry back",
            LeaveReason::Expired => "its entry was not renewed",
            LeaveReason::Dropped => "etcd has dropped its entry",
            LeaveReason::Replaced => "another incarnation has taken its place",
            LeaveReason::Turned => "it has another role",
            LeaveReason::Unspoken => "it moved to https://, and this router has no TLS",
        })
    }
}

/// The number of workers of this role, or of entries, is at its limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MembershipFull(pub Leg);

impl fmt::Display for MembershipFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "there are {ROUTER_WORKERS_MAX} {} workers, which is the limit", self.0)
    }
}

#[derive(Debug)]
struct HeldEntry {
    entry: Entry,
    /// When it ends unless it is renewed. `None` while etcd keeps it.
    until: Option<Instant>,
    /// Its operator has removed it: this incarnation does not return by renewing. Another
    /// incarnation does, because a role change and a restart look the same here.
    barred: bool,
}

#[derive(Debug, Default)]
struct MemberState {
    /// Some if an operator named it, with the port of a prefill worker's bootstrap registry.
    named: Option<Option<u16>>,
    /// The worker was named with the other role.
    has_turned: bool,
    held: Option<HeldEntry>,
}

impl MemberState {
    fn is_taken(&self) -> bool {
        self.named.is_some() || self.held.as_ref().is_some_and(|held| !held.barred)
    }
}

/// All addresses that are taken, and the actions that the caller has to carry out.
#[derive(Debug, Default)]
pub struct Membership {
    places: HashMap<WorkerAddress, MemberState>,
    actions: VecDeque<MembershipAction>,
}

impl Membership {
    /// The next action.
    pub fn poll(&mut self) -> Option<MembershipAction> {
        self.actions.pop_front()
    }

    /// Adds a worker that an operator names. It stays until it is removed.
    ///
    /// # Errors
    /// There are too many workers of this role.
    pub fn name(
        &mut self,
        seat: WorkerAddress,
        bootstrap_port: Option<u16>,
    ) -> Result<(), MembershipFull> {
        let was_taken = self.is_taken(&seat);
        if !was_taken && self.is_full(seat.role) {
            return Err(MembershipFull(seat.role));
        }
        self.places.entry(seat.clone()).or_default().named = Some(bootstrap_port);
        if !was_taken {
            self.join(seat);
        }
        Ok(())
    }

    /// A worker has reported that it has this role now. If an operator named it, the name moves to
    /// the new role. Returns false if it is not named: it then enters itself.
    ///
    /// # Errors
    /// There are too many workers of that role.
    pub fn turn(&mut self, seat: &WorkerAddress, role: Leg) -> Result<bool, MembershipFull> {
        let there = WorkerAddress { role, url: seat.url.clone() };
        let (was_taken, is_full) = (self.is_taken(&there), self.is_full(role));
        let named =
            self.places.get_mut(seat).filter(|place| place.named.is_some() && there != *seat);
        let Some(place) = named.filter(|_| !is_failpoint_active("who has turned keeps its number"))
        else {
            return Ok(false);
        };
        if !was_taken && is_full {
            return Err(MembershipFull(role));
        }
        place.named = None;
        if !place.is_taken() {
            self.left(seat, LeaveReason::Turned);
        }
        let place = self.places.entry(there.clone()).or_default();
        place.named.get_or_insert_default();
        place.has_turned = !is_failpoint_active("who has turned is not followed back");
        if !was_taken {
            self.join(there);
        }
        Ok(true)
    }

    /// An operator removes a worker, named or entered. Returns false if there is none.
    pub fn remove(&mut self, seat: &WorkerAddress) -> bool {
        let Some(place) = self.places.get_mut(seat).filter(|place| place.is_taken()) else {
            return false;
        };
        place.named = None;
        if let Some(held) = &mut place.held {
            held.barred = true;
        }
        self.left(seat, LeaveReason::Removed);
        true
    }

    /// Adds or renews the entry of a worker. The entry ends at `until` unless it is renewed again.
    ///
    /// # Errors
    /// There are too many workers of this role, or too many entries.
    pub fn renew(&mut self, entry: Entry, until: Option<Instant>) -> Result<(), MembershipFull> {
        let seat = entry.seat.clone();
        let known = self.places.get_mut(&seat).and_then(|place| place.held.as_mut());
        if let Some(held) = known.filter(|held| held.entry == entry) {
            held.until = until;
            return Ok(());
        }
        // A process has one address. An entry of it elsewhere is outdated and makes room.
        let past = self.elsewhere(&entry);
        let was_taken = self.is_taken(&seat);
        let is_new = self.places.get(&seat).is_none_or(|place| place.held.is_none());
        let gives_back =
            past.iter().any(|past| past.role == seat.role && self.is_taken_by_entry(past));
        let is_full = !gives_back && self.is_full(seat.role);
        let entries = self.entries() - past.len();
        if (!was_taken && is_full) || (is_new && entries >= REGISTRY_ENTRIES_MAX) {
            return Err(MembershipFull(seat.role));
        }
        past.iter().for_each(|past| self.drop_entry(past, LeaveReason::Replaced));
        let place = self.places.entry(seat.clone()).or_default();
        place.held = Some(HeldEntry { entry, until, barred: false });
        if was_taken {
            self.actions.push_back(MembershipAction::Leave {
                seat: seat.clone(),
                why: LeaveReason::Replaced,
            });
        }
        self.join(seat);
        Ok(())
    }

    /// A worker has an entry at a URL that this router cannot reach. Its earlier entry ends.
    pub fn refuse(&mut self, entry: &Entry) {
        self.elsewhere(entry).iter().for_each(|past| self.drop_entry(past, LeaveReason::Unspoken));
    }

    /// A worker removes its entry, or etcd has dropped it. The incarnation must match, so that a
    /// late message does not remove a successor.
    pub fn withdraw(&mut self, seat: &WorkerAddress, incarnation: [u8; 16], why: LeaveReason) {
        let held = self.places.get(seat).and_then(|place| place.held.as_ref());
        if held.is_some_and(|held| held.entry.peer.incarnation == incarnation) {
            self.drop_entry(seat, why);
        }
    }

    /// Drops entries that were not renewed in time.
    pub fn expire(&mut self, now: Instant) {
        let is_late = |held: &HeldEntry| held.until.is_some_and(|until| until <= now);
        let late = |(seat, place): (&WorkerAddress, &MemberState)| {
            place.held.as_ref().filter(|h| is_late(h)).map(|_| seat.clone())
        };
        for seat in self.places.iter().filter_map(late).collect::<Vec<_>>() {
            self.drop_entry(&seat, LeaveReason::Expired);
        }
    }

    /// etcd was read again. Entries that it kept and `is_there` does not find end at `until`,
    /// unless they return. An etcd that lost its data gets them back from the workers.
    pub fn reconcile(&mut self, is_there: impl Fn(&WorkerAddress) -> bool, until: Instant) {
        for (seat, place) in &mut self.places {
            if let Some(held) =
                place.held.as_mut().filter(|held| held.until.is_none() && !is_there(seat))
            {
                held.until = Some(until);
            }
        }
    }

    /// The entry at an address.
    pub fn entry(&self, seat: &WorkerAddress) -> Option<&Entry> {
        self.places.get(seat).and_then(|place| place.held.as_ref()).map(|held| &held.entry)
    }

    /// The number of entries.
    pub fn entries(&self) -> usize {
        self.places.values().filter(|place| place.held.is_some()).count()
    }

    fn is_taken(&self, seat: &WorkerAddress) -> bool {
        self.places.get(seat).is_some_and(MemberState::is_taken)
    }

    fn is_full(&self, role: Leg) -> bool {
        let taken =
            self.places.iter().filter(|(seat, place)| seat.role == role && place.is_taken());
        taken.count() >= ROUTER_WORKERS_MAX
    }

    /// The other addresses at which the process of this entry has an entry.
    fn elsewhere(&self, entry: &Entry) -> Vec<WorkerAddress> {
        let is_same =
            |held: &HeldEntry| held.entry.peer.id == entry.peer.id && held.entry.seat != entry.seat;
        let same = self.places.iter().filter(|(_, place)| place.held.as_ref().is_some_and(is_same));
        same.map(|(seat, _)| seat.clone()).collect()
    }

    /// Whether an entry, and no name, takes this address.
    fn is_taken_by_entry(&self, seat: &WorkerAddress) -> bool {
        self.places.get(seat).is_some_and(|place| place.named.is_none() && place.is_taken())
    }

    fn drop_entry(&mut self, seat: &WorkerAddress, why: LeaveReason) {
        let Some(place) = self.places.get_mut(seat) else { return };
        let was_taken = place.is_taken();
        place.held = None;
        if was_taken && !place.is_taken() {
            self.left(seat, why);
        } else {
            self.forget(seat);
        }
    }

    fn left(&mut self, seat: &WorkerAddress, why: LeaveReason) {
        self.actions.push_back(MembershipAction::Leave { seat: seat.clone(), why });
        self.forget(seat);
    }

    fn forget(&mut self, seat: &WorkerAddress) {
        if self.places.get(seat).is_some_and(|place| place.named.is_none() && place.held.is_none())
        {
            self.places.remove(seat);
        }
    }

    fn join(&mut self, seat: WorkerAddress) {
        let place = &self.places[&seat];
        let entry = place.held.as_ref().filter(|held| !held.barred).map(|held| &held.entry);
        let bootstrap_port = entry.and_then(|entry| entry.bootstrap_port).or(place.named.flatten());
        let (kind, has_turned) = (entry.map(|entry| entry.kind), place.has_turned);
        self.actions.push_back(MembershipAction::Join { seat, bootstrap_port, kind, has_turned });
    }
}

#[cfg(test)]
#[path = "membership_tests.rs"]
mod tests;

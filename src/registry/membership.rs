//! The workers of this cluster. An operator names a worker, or a worker renews its own entry.
//!
//! A worker address is a role at a URL. It is taken while it is named or has an entry. An entry
//! ends if it is not renewed in time. An entry from etcd gets a time limit only when a read of etcd
//! does not find it.
//! ```text
//!            name, or a first entry                    neither named nor an entry
//!   empty ───────────────────────────▶ taken ──────────────────────────────────────▶ empty
//!                                       │  ▲  an entry of another incarnation:
//!                                       └──┘  leave and join, with a new ID
//! ```
//! Thread: `ctl` of a router. Pure.
//! Invariants: an address is taken at most once, by name, by entry or by both. The number of
//! entries is bounded, for each role and in total.
//! Not here: permission to change the membership (`proof`), the effect on requests (`balancer`).

use crate::ids::Leg;
use crate::limits::{REGISTRY_ENTRIES_MAX, ROUTER_WORKERS_MAX};
use crate::registry::entry::{Entry, WorkerAddress};
use crate::routing::compatibility::CompatDigest;
use crate::stdx::failpoint::is_failpoint_active;
use crate::stdx::hash_map::{HashMap, HashSet};
use std::collections::VecDeque;
use std::fmt;
use std::time::Instant;

/// A change of the workers. The caller applies it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MembershipAction {
    /// A worker joins.
    Join {
        /// The worker's role and URL.
        address: WorkerAddress,
        /// Port of a prefill worker's bootstrap registry.
        bootstrap_port: Option<u16>,
        /// Its compatibility digest, if it has an entry.
        kind: Option<CompatDigest>,
        /// Whether it was named with another role and has then reported this role.
        has_changed_role: bool,
    },
    /// A worker leaves.
    Leave {
        /// The worker's role and URL.
        address: WorkerAddress,
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
    RoleChanged,
    /// It moved to a URL that this router cannot reach, because the router has no TLS.
    Unspoken,
}

impl fmt::Display for LeaveReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LeaveReason::Removed => "it was removed",
            LeaveReason::Withdrawn => "it withdrew its entry",
            LeaveReason::Expired => "its entry was not renewed",
            LeaveReason::Dropped => "etcd has dropped its entry",
            LeaveReason::Replaced => "another incarnation has its address",
            LeaveReason::RoleChanged => "it has another role",
            LeaveReason::Unspoken => "it moved to https://, and this router has no TLS",
        })
    }
}

/// A number is at its limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MembershipFull {
    /// The workers of this role.
    Workers(Leg),
    /// The entries of registries.
    Entries,
}

impl fmt::Display for MembershipFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MembershipFull::Workers(role) => {
                write!(
                    f,
                    "there are already {ROUTER_WORKERS_MAX} {role} workers; this is the limit"
                )
            }
            MembershipFull::Entries => write!(
                f,
                "there are already {REGISTRY_ENTRIES_MAX} registry entries; this is the limit"
            ),
        }
    }
}

#[derive(Debug)]
struct HeldEntry {
    entry: Entry,
    /// End of the entry, unless it is renewed. `None` while etcd has it.
    until: Option<Instant>,
    /// An operator has removed the worker, so a renewal does not bring this incarnation back.
    /// Another incarnation can come, because a role change and a restart look the same here.
    barred: bool,
}

#[derive(Debug, Default)]
struct MemberState {
    /// `Some` if an operator named it; inside, the port of a prefill worker's bootstrap registry.
    named: Option<Option<u16>>,
    /// The worker was named with the other role.
    has_changed_role: bool,
    held: Option<HeldEntry>,
}

impl MemberState {
    fn is_taken(&self) -> bool {
        self.named.is_some() || self.held.as_ref().is_some_and(|held| !held.barred)
    }
}

/// All addresses that are taken, and the actions for the caller.
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
        address: WorkerAddress,
        bootstrap_port: Option<u16>,
    ) -> Result<(), MembershipFull> {
        let was_taken = self.is_taken(&address);
        if !was_taken && self.is_full(address.role) {
            return Err(MembershipFull::Workers(address.role));
        }
        self.places.entry(address.clone()).or_default().named = Some(bootstrap_port);
        if !was_taken {
            self.join(address);
        }
        Ok(())
    }

    /// Applies a worker's report that it now has this role. If an operator named the worker, its
    /// name moves to the new role. Returns false if it is not named; such a worker adds its own
    /// entry.
    ///
    /// # Errors
    /// There are too many workers of that role.
    pub fn change_role(
        &mut self,
        address: &WorkerAddress,
        role: Leg,
    ) -> Result<bool, MembershipFull> {
        let there = WorkerAddress { role, url: address.url.clone() };
        let (was_taken, is_full) = (self.is_taken(&there), self.is_full(role));
        let named =
            self.places.get_mut(address).filter(|place| place.named.is_some() && there != *address);
        let Some(place) = named.filter(|_| !is_failpoint_active("turned worker keeps its number"))
        else {
            return Ok(false);
        };
        if !was_taken && is_full {
            return Err(MembershipFull::Workers(role));
        }
        place.named = None;
        if !place.is_taken() && !is_failpoint_active("worker stays in its former role") {
            self.left(address, LeaveReason::RoleChanged);
        }
        let place = self.places.entry(there.clone()).or_default();
        place.named.get_or_insert_default();
        place.has_changed_role = !is_failpoint_active("turned worker is not followed back");
        if !was_taken {
            self.join(there);
        }
        Ok(true)
    }

    /// Removes a worker for an operator. Returns false if the worker has neither a name nor an
    /// entry.
    pub fn remove(&mut self, address: &WorkerAddress) -> bool {
        let Some(place) = self.places.get_mut(address).filter(|place| place.is_taken()) else {
            return false;
        };
        place.named = None;
        if let Some(held) = &mut place.held {
            held.barred = true;
        }
        self.left(address, LeaveReason::Removed);
        true
    }

    /// Adds or renews the entry of a worker. The entry ends at `until` unless it is renewed again.
    ///
    /// # Errors
    /// There are too many workers of this role, or too many entries.
    pub fn renew(&mut self, entry: Entry, until: Option<Instant>) -> Result<(), MembershipFull> {
        let address = entry.address.clone();
        let known = self.places.get_mut(&address).and_then(|place| place.held.as_mut());
        if let Some(held) = known.filter(|held| held.entry == entry) {
            if !is_failpoint_active("renewal does not prolong its entry") {
                held.until = until;
            }
            return Ok(());
        }
        // A process has one address, so its entry at another address is outdated. It is removed
        // first to make room.
        let past = self.elsewhere(&entry);
        let was_taken = self.is_taken(&address);
        let is_new = self.places.get(&address).is_none_or(|place| place.held.is_none());
        let gives_back =
            past.iter().any(|past| past.role == address.role && self.is_taken_by_entry(past));
        let is_full = !gives_back && self.is_full(address.role);
        let entries = self.entries() - past.len();
        if !was_taken && is_full {
            return Err(MembershipFull::Workers(address.role));
        }
        if is_new && entries >= REGISTRY_ENTRIES_MAX {
            return Err(MembershipFull::Entries);
        }
        past.iter().for_each(|past| self.drop_entry(past, LeaveReason::Replaced));
        let place = self.places.entry(address.clone()).or_default();
        place.held = Some(HeldEntry { entry, until, barred: false });
        if was_taken {
            self.actions.push_back(MembershipAction::Leave {
                address: address.clone(),
                why: LeaveReason::Replaced,
            });
        }
        self.join(address);
        Ok(())
    }

    /// Ends the earlier entry of a worker if its new entry has a URL that this router cannot reach.
    pub fn refuse(&mut self, entry: &Entry) {
        self.elsewhere(entry).iter().for_each(|past| self.drop_entry(past, LeaveReason::Unspoken));
    }

    /// Removes an entry that its worker withdrew or etcd dropped. The incarnation must match, so
    /// that a late message does not remove the entry of a successor.
    pub fn withdraw(&mut self, address: &WorkerAddress, incarnation: [u8; 16], why: LeaveReason) {
        let held = self.places.get(address).and_then(|place| place.held.as_ref());
        if held.is_some_and(|held| held.entry.peer.incarnation == incarnation) {
            self.drop_entry(address, why);
        }
    }

    /// Drops entries that were not renewed in time.
    pub fn expire(&mut self, now: Instant) {
        let is_late = |held: &HeldEntry| held.until.is_some_and(|until| until <= now);
        let late = |(address, place): (&WorkerAddress, &MemberState)| {
            place.held.as_ref().filter(|h| is_late(h)).map(|_| address.clone())
        };
        for address in self.places.iter().filter_map(late).collect::<Vec<_>>() {
            self.drop_entry(&address, LeaveReason::Expired);
        }
        if cfg!(debug_assertions) {
            self.invariants();
        }
    }

    /// Asserts the rules that hold between calls. Debug builds call it at each tick.
    ///
    /// # Panics
    /// An address that is neither named nor in an entry is known, an entry is at another address,
    /// a process has two entries, or there are too many entries or workers.
    pub fn invariants(&self) {
        let mut processes = HashSet::default();
        for (address, place) in &self.places {
            let is_used = place.named.is_some() || place.held.is_some();
            assert!(is_used, "an address is known by a name or an entry");
            if let Some(held) = &place.held {
                assert_eq!(held.entry.address, *address, "an entry is at its own address");
                assert!(processes.insert(held.entry.peer.id), "a process has one entry");
            }
        }
        assert!(processes.len() <= REGISTRY_ENTRIES_MAX, "entries are bounded");
        for role in [Leg::Prefill, Leg::Decode] {
            assert!(self.taken(role) <= ROUTER_WORKERS_MAX, "workers of a role are bounded");
        }
    }

    /// Applies a new read of etcd. Entries of etcd that `is_there` does not find end at `until`,
    /// unless they return. If etcd lost its data, the workers write them again.
    pub fn reconcile(&mut self, is_there: impl Fn(&WorkerAddress) -> bool, until: Instant) {
        for (address, place) in &mut self.places {
            if let Some(held) =
                place.held.as_mut().filter(|held| held.until.is_none() && !is_there(address))
            {
                held.until = Some(until);
            }
        }
    }

    /// The entry at an address.
    pub fn entry(&self, address: &WorkerAddress) -> Option<&Entry> {
        self.places.get(address).and_then(|place| place.held.as_ref()).map(|held| &held.entry)
    }

    /// The number of entries.
    pub fn entries(&self) -> usize {
        self.places.values().filter(|place| place.held.is_some()).count()
    }

    fn is_taken(&self, address: &WorkerAddress) -> bool {
        self.places.get(address).is_some_and(MemberState::is_taken)
    }

    fn is_full(&self, role: Leg) -> bool {
        self.taken(role) >= ROUTER_WORKERS_MAX
    }

    /// The number of taken addresses of a role.
    fn taken(&self, role: Leg) -> usize {
        let taken =
            self.places.iter().filter(|(address, place)| address.role == role && place.is_taken());
        taken.count()
    }

    /// Other addresses at which the process of this entry also has an entry.
    fn elsewhere(&self, entry: &Entry) -> Vec<WorkerAddress> {
        let is_same = |held: &HeldEntry| {
            held.entry.peer.id == entry.peer.id
                && held.entry.address != entry.address
                && !is_failpoint_active("entry of a former role stays")
        };
        let same = self.places.iter().filter(|(_, place)| place.held.as_ref().is_some_and(is_same));
        same.map(|(address, _)| address.clone()).collect()
    }

    /// Whether this address is taken by an entry only, not by a name.
    fn is_taken_by_entry(&self, address: &WorkerAddress) -> bool {
        self.places.get(address).is_some_and(|place| place.named.is_none() && place.is_taken())
    }

    fn drop_entry(&mut self, address: &WorkerAddress, why: LeaveReason) {
        let Some(place) = self.places.get_mut(address) else { return };
        let was_taken = place.is_taken();
        place.held = None;
        if was_taken && !place.is_taken() {
            if why == LeaveReason::Expired && is_failpoint_active("expired entry leaves its worker")
            {
                return self.forget(address);
            }
            self.left(address, why);
        } else {
            self.forget(address);
        }
    }

    fn left(&mut self, address: &WorkerAddress, why: LeaveReason) {
        debug_assert!(!self.is_taken(address), "a worker leaves an address that is not taken");
        self.actions.push_back(MembershipAction::Leave { address: address.clone(), why });
        self.forget(address);
    }

    fn forget(&mut self, address: &WorkerAddress) {
        if self
            .places
            .get(address)
            .is_some_and(|place| place.named.is_none() && place.held.is_none())
            && !is_failpoint_active("empty address stays known")
        {
            self.places.remove(address);
        }
    }

    fn join(&mut self, address: WorkerAddress) {
        let place = &self.places[&address];
        debug_assert!(place.is_taken(), "a worker joins an address that is taken");
        let entry = place.held.as_ref().filter(|held| !held.barred).map(|held| &held.entry);
        let bootstrap_port = entry.and_then(|entry| entry.bootstrap_port).or(place.named.flatten());
        let (kind, has_changed_role) = (entry.map(|entry| entry.kind), place.has_changed_role);
        self.actions.push_back(MembershipAction::Join {
            address,
            bootstrap_port,
            kind,
            has_changed_role,
        });
    }
}

#[cfg(test)]
#[path = "membership_tests.rs"]
mod tests;

//! Membership under names, entries, renewals, removals and role changes.

use super::*;
use crate::ids::{Leg, Peer};
use crate::stdx::failpoint::panic_of;
use std::time::Duration;

const LIFE: Duration = Duration::from_secs(6);

fn address(port: u16) -> WorkerAddress {
    WorkerAddress { role: Leg::Prefill, url: format!("http://10.0.0.1:{port}").parse().unwrap() }
}

fn entry(id: u8, incarnation: u8, port: u16) -> Entry {
    Entry {
        peer: Peer { id: [id; 16], incarnation: [incarnation; 16] },
        address: address(port),
        bootstrap_port: Some(8998),
        kind: CompatDigest { by_family: [5; 32], by_class: None },
    }
}

/// `+PORT` for a worker that joins, `-PORT WHY` for one that leaves.
fn done(members: &mut Membership) -> Vec<String> {
    let told = |action| match action {
        MembershipAction::Join { address, .. } => format!("+{}", address.url.port),
        MembershipAction::Leave { address, why } => format!("-{} {why:?}", address.url.port),
    };
    std::iter::from_fn(|| members.poll()).map(told).collect()
}

#[test]
fn an_entry_that_is_renewed_stays_and_one_that_is_not_is_dropped() {
    let (mut members, now) = (Membership::default(), Instant::now());
    members.renew(entry(1, 1, 7), Some(now + LIFE)).unwrap();
    members.renew(entry(2, 1, 8), Some(now + LIFE)).unwrap();
    assert_eq!(done(&mut members), ["+7", "+8"]);
    members.renew(entry(1, 1, 7), Some(now + 2 * LIFE)).unwrap();
    members.expire(now + LIFE);
    assert_eq!(done(&mut members), ["-8 Expired"]);
    members.expire(now + 2 * LIFE);
    assert_eq!(done(&mut members), ["-7 Expired"]);
    assert_eq!((members.entries(), members.places.len()), (0, 0));
}

#[test]
fn a_worker_with_a_refused_new_address_leaves_its_old_address() {
    let (mut members, until) = (Membership::default(), Some(Instant::now() + LIFE));
    members.renew(entry(1, 1, 7), until).unwrap();
    members.renew(entry(2, 1, 8), None).unwrap();
    let secured = |id, port| {
        let address = WorkerAddress {
            role: Leg::Prefill,
            url: format!("https://10.0.0.1:{port}").parse().unwrap(),
        };
        Entry { address, ..entry(id, 2, port) }
    };
    assert_eq!(done(&mut members), ["+7", "+8"]);
    members.refuse(&secured(1, 7));
    members.refuse(&secured(3, 8));
    assert_eq!(done(&mut members), ["-7 Unspoken"], "no other worker is known");
    assert_eq!(members.entries(), 1);
}

#[test]
fn another_incarnation_is_another_worker() {
    let (mut members, until) = (Membership::default(), Some(Instant::now() + LIFE));
    members.renew(entry(1, 1, 7), until).unwrap();
    members.renew(entry(1, 2, 7), until).unwrap();
    assert_eq!(done(&mut members), ["+7", "-7 Replaced", "+7"]);
    members.withdraw(&address(7), [1; 16], LeaveReason::Withdrawn);
    assert_eq!(done(&mut members), [""; 0], "what its predecessor says late does not count");
    members.renew(entry(1, 2, 9), until).unwrap();
    assert_eq!(done(&mut members), ["-7 Replaced", "+9"], "it has moved");
    members.renew(entry(3, 1, 9), until).unwrap();
    assert_eq!(done(&mut members), ["-9 Replaced", "+9"], "its address has gone to another");
    members.withdraw(&address(9), [1; 16], LeaveReason::Withdrawn);
    assert_eq!(done(&mut members), ["-9 Withdrawn"]);
}

#[test]
fn a_named_worker_stays_even_if_its_entry_expires() {
    let (mut members, now) = (Membership::default(), Instant::now());
    members.name(address(7), Some(1)).unwrap();
    members.name(address(7), Some(1)).unwrap();
    assert_eq!(
        members.poll(),
        Some(MembershipAction::Join {
            address: address(7),
            bootstrap_port: Some(1),
            kind: None,
            has_changed_role: false
        })
    );
    members.renew(entry(1, 1, 7), Some(now)).unwrap();
    let kind = Some(CompatDigest { by_family: [5; 32], by_class: None });
    assert_eq!(
        members.poll(),
        Some(MembershipAction::Leave { address: address(7), why: LeaveReason::Replaced })
    );
    assert_eq!(
        members.poll(),
        Some(MembershipAction::Join {
            address: address(7),
            bootstrap_port: Some(8998),
            kind,
            has_changed_role: false
        })
    );
    members.expire(now);
    assert_eq!(done(&mut members), [""; 0]);
    assert!(members.remove(&address(7)) && !members.remove(&address(7)));
    assert_eq!(done(&mut members), ["-7 Removed"]);
}

#[test]
fn a_removed_worker_does_not_come_back_by_renewal_but_its_successor_does() {
    let (mut members, now) = (Membership::default(), Instant::now());
    members.renew(entry(1, 1, 7), Some(now + LIFE)).unwrap();
    assert!(members.remove(&address(7)));
    members.renew(entry(1, 1, 7), Some(now + LIFE)).unwrap();
    assert_eq!(done(&mut members), ["+7", "-7 Removed"]);
    members.renew(entry(1, 2, 7), Some(now + LIFE)).unwrap();
    assert_eq!(done(&mut members), ["+7"]);
    assert!(members.remove(&address(7)));
    members.expire(now + LIFE);
    assert_eq!(done(&mut members), ["-7 Removed"]);
    members.renew(entry(1, 2, 7), Some(now + 2 * LIFE)).unwrap();
    assert_eq!(done(&mut members), ["+7"], "what is forgotten is not held against it");
    assert!(members.remove(&address(7)));
    let turned =
        Entry { address: WorkerAddress { role: Leg::Decode, ..address(7) }, ..entry(1, 3, 7) };
    members.renew(Entry { bootstrap_port: None, ..turned }, Some(now + 2 * LIFE)).unwrap();
    assert_eq!(done(&mut members), ["-7 Removed", "+7"], "a change of role is a start, too");
    assert_eq!(members.entries(), 1, "the entry of its past is gone");
}

#[test]
fn an_entry_that_another_registry_has_lost_has_one_lifetime_to_come_back() {
    let (mut members, now) = (Membership::default(), Instant::now());
    members.renew(entry(1, 1, 7), None).unwrap();
    members.renew(entry(2, 1, 8), None).unwrap();
    members.expire(now + 100 * LIFE);
    assert_eq!(done(&mut members), ["+7", "+8"], "it is not asked while it is away");
    members.reconcile(|_| false, now + LIFE);
    members.reconcile(|_| false, now + 2 * LIFE);
    members.renew(entry(2, 1, 8), None).unwrap();
    members.expire(now + LIFE);
    assert_eq!(done(&mut members), ["-7 Expired"]);
    members.reconcile(|address| address.url.port == 8, now);
    members.expire(now + 100 * LIFE);
    assert_eq!(done(&mut members), [""; 0]);
}

#[test]
fn workers_are_bounded_and_the_full_registry_still_renews() {
    let (mut members, until) = (Membership::default(), Some(Instant::now() + LIFE));
    let nth = |n: usize| {
        let mut entry = entry(1, 1, 1 + n as u16);
        entry.peer.id = (n as u128).to_le_bytes();
        entry
    };
    for n in 0..ROUTER_WORKERS_MAX {
        members.renew(nth(n), until).unwrap();
    }
    let more = nth(ROUTER_WORKERS_MAX);
    assert_eq!(members.renew(more.clone(), until), Err(MembershipFull::Workers(Leg::Prefill)));
    assert_eq!(
        members.name(more.address.clone(), Some(1)),
        Err(MembershipFull::Workers(Leg::Prefill))
    );
    assert_eq!(members.renew(nth(0), until), Ok(()));
    let moved = Entry { address: more.address.clone(), ..nth(0) };
    assert_eq!(members.renew(moved, until), Ok(()), "a worker that moves leaves room for itself");
    assert_eq!(
        members.renew(Entry { address: nth(0).address, ..nth(0) }, until),
        Ok(()),
        "and back"
    );
    let other_role = Entry {
        address: WorkerAddress { role: Leg::Decode, ..more.address.clone() },
        bootstrap_port: None,
        ..nth(ROUTER_WORKERS_MAX)
    };
    members.renew(other_role.clone(), until).unwrap();
    done(&mut members);
    assert_eq!(members.renew(more.clone(), until), Err(MembershipFull::Workers(Leg::Prefill)));
    assert_eq!(
        members.entry(&other_role.address),
        Some(&other_role),
        "a worker that finds no room keeps its address"
    );
    assert_eq!(done(&mut members), [""; 0]);
    members.withdraw(&other_role.address, other_role.peer.incarnation, LeaveReason::Withdrawn);
    let mut next = nth(1);
    next.peer.incarnation = [9; 16];
    assert_eq!(members.renew(next, until), Ok(()), "a successor needs no room");
    // Removed workers take room until their entries end.
    for round in 1..=2 {
        for n in 0..ROUTER_WORKERS_MAX {
            members.remove(&nth((round - 1) * ROUTER_WORKERS_MAX + n).address);
            let renewed = members.renew(nth(round * ROUTER_WORKERS_MAX + n), until);
            assert_eq!(renewed.is_ok(), round == 1, "{round} {n}");
        }
    }
    assert_eq!(members.entries(), REGISTRY_ENTRIES_MAX);
}

#[test]
fn entries_are_bounded_also_for_removed_workers() {
    let (mut members, until) = (Membership::default(), Some(Instant::now() + LIFE));
    let nth = |n: usize| {
        let mut entry = entry(1, 1, 1 + n as u16);
        entry.peer.id = (n as u128).to_le_bytes();
        entry
    };
    for n in 0..REGISTRY_ENTRIES_MAX {
        members.renew(nth(n), until).unwrap();
        members.remove(&nth(n).address);
    }
    let refused = members.renew(nth(REGISTRY_ENTRIES_MAX), until).unwrap_err();
    assert_eq!(refused.to_string(), "there are already 2048 registry entries; this is the limit");
}

/// A named worker keeps its name when its role changes. A worker with an entry adds a new entry
/// itself.
#[test]
fn a_name_goes_with_the_role_and_an_entry_by_itself() {
    let (mut members, until) = (Membership::default(), Some(Instant::now() + LIFE));
    members.name(address(7), Some(9000)).unwrap();
    assert_eq!(done(&mut members), ["+7"]);
    let other = WorkerAddress { role: Leg::Decode, ..address(7) };
    assert_eq!(members.change_role(&address(7), Leg::Prefill), Ok(false), "it is that");
    assert_eq!(members.change_role(&address(7), Leg::Decode), Ok(true));
    assert_eq!(
        members.poll(),
        Some(MembershipAction::Leave { address: address(7), why: LeaveReason::RoleChanged })
    );
    let joins = |address: &WorkerAddress| MembershipAction::Join {
        address: address.clone(),
        bootstrap_port: None,
        kind: None,
        has_changed_role: true,
    };
    assert_eq!(members.poll(), Some(joins(&other)));
    assert_eq!(members.change_role(&address(7), Leg::Decode), Ok(false), "that was before");
    assert_eq!(members.change_role(&other, Leg::Prefill), Ok(true));
    members.poll();
    assert_eq!(members.poll(), Some(joins(&address(7))), "it tells itself where its registry is");
    assert!(members.remove(&address(7)));
    assert_eq!(
        members.change_role(&address(7), Leg::Decode),
        Ok(false),
        "a removed worker does not come back this way"
    );
    done(&mut members);
    members.renew(entry(1, 1, 8), until).unwrap();
    assert_eq!(members.change_role(&address(8), Leg::Decode), Ok(false));
    let anew = Entry {
        address: WorkerAddress { role: Leg::Decode, ..address(8) },
        bootstrap_port: None,
        ..entry(1, 2, 8)
    };
    members.renew(anew, until).unwrap();
    assert_eq!(done(&mut members), ["+8", "-8 Replaced", "+8"]);
    // Named, and entered in its new role before anything has queried it.
    members.name(address(9), None).unwrap();
    members
        .renew(
            Entry {
                address: WorkerAddress { role: Leg::Decode, ..address(9) },
                bootstrap_port: None,
                ..entry(2, 1, 9)
            },
            until,
        )
        .unwrap();
    assert_eq!(done(&mut members), ["+9", "+9"]);
    assert_eq!(members.change_role(&address(9), Leg::Decode), Ok(true));
    assert_eq!(done(&mut members), ["-9 RoleChanged"]);
    for port in 0..ROUTER_WORKERS_MAX as u16 {
        members
            .name(WorkerAddress { role: Leg::Decode, ..address(1000 + port) }, None)
            .unwrap_or(());
    }
    members.name(address(10), None).unwrap();
    assert_eq!(
        members.change_role(&address(10), Leg::Decode),
        Err(MembershipFull::Workers(Leg::Decode))
    );
}

#[test]
fn invariants_find_an_address_that_is_known_without_a_worker() {
    let now = Instant::now();
    let join_and_leave = || {
        let mut members = Membership::default();
        members.renew(entry(1, 1, 7), Some(now + LIFE)).unwrap();
        members.invariants();
        members.expire(now + LIFE);
        members.invariants();
    };
    join_and_leave();
    let message = panic_of("empty address stays known", join_and_leave);
    assert!(message.contains("an address is known by a name or an entry"), "{message}");
}

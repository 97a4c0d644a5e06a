//! Tests of the invariants, and of the actions that a hand-off needs from other processes.

use super::*;
use crate::ids::DecodeAllocation;
use crate::kv::groups::GroupCounts;
use crate::kv::layout::{KvDtype, KvLayout};
use crate::kv::region::Region;
use crate::link::local_worker::Ring;
use crate::net::Entropy;
use crate::stdx::event_count::EventCount;
use crate::stdx::failpoint::panic_of;
use crate::transfer::copy_pool::CopyPool;
use crate::transfer::manager::identity::WorkerIdentity;
use crate::transfer::manager::source::SourceManager;
use crate::transfer::pages::PageLists;
use crate::transfer::rings::{Bells, Rings};
use crate::transfer::status::StatusTable;
use crate::transfer::transport::Memory;
use crate::wire::message::{Announce, BitClass, Fingerprint, HostId, ShmGrant, SocketName, Token};
use std::sync::Arc;

const HOST: HostId = HostId([7; 16]);
const SESSIONS: usize = 4;

/// A prefill worker, and the Announce of a decode worker with the same memory.
fn source() -> (Handoff, Announce) {
    let layout = KvLayout::page_major(16, 1, 1, 8, KvDtype::F16);
    let memory = Memory {
        groups: GroupCounts::FULL,
        region: Arc::new(Region::new(c"kv", layout.page_stride as usize).unwrap()),
        layout,
        pages: 1,
        lists: Arc::new(PageLists::new(2, 1).unwrap()),
        counters: Arc::default(),
        copy_pool: CopyPool::default(),
    };
    let [config, weights, tokenizer, template, kernels] = [[1; 32]; 5];
    let identity = WorkerIdentity {
        groups: GroupCounts::FULL,
        fingerprint: Fingerprint { config, weights, tokenizer, template, kernels },
        bit_class: BitClass::UNKNOWN,
        layout,
        pages: 1,
        pool_bytes: layout.page_stride,
        slots: 2,
        host: HOST,
    };
    let (kv, aux, fingerprint) = (identity.kv_claim(), identity.aux_claim(), identity.fingerprint);
    let status = Arc::new(StatusTable::new(2));
    let bell = Arc::new(EventCount::new(|| {}));
    let bells = Bells { engine: bell.clone(), ctl: bell.clone(), mover: bell.clone() };
    let rings = Rings::new(&status, &memory.lists, SESSIONS, &bells);
    let early = DecodeAllocation::Early;
    let manager =
        SourceManager::new(identity, vec![Transport::Shm], early, status.clone(), SESSIONS);
    let engine = Ring::new(crossbeam_channel::bounded(8).0, bell.clone());
    let worker = LocalWorker::new(WorkerId(0), engine, status, memory);
    let offer = TransportCapabilities {
        transports: vec![Transport::Shm],
        host: HOST,
        data: None,
        lanes: 1,
    };
    let mut rank = rank(&worker, &[Transport::Shm], &offer, None);
    rank.shm = Some(ShmGrant {
        host: HOST,
        socket: SocketName::new(b"-").unwrap(),
        token: Token([0; 16]),
    });
    let role = EndpointKind::Prefill {
        manager: Box::new(manager),
        mover: Ring::new(rings.commands, bell),
    };
    let handoff = Handoff::new(
        vec![WorkerEndpoint { worker, kind: role, reports: Some(rings.reports) }],
        offer,
        Entropy::System,
    );
    (
        handoff,
        Announce {
            session: SessionGeneration(1),
            fingerprint,
            bit_class: BitClass::UNKNOWN,
            kv,
            aux,
            ranks: vec![rank],
        },
    )
}

#[test]
fn a_session_that_went_before_it_was_bound_is_not_bound_in_the_name_of_the_next() {
    let (mut handoff, announce) = source();
    let now = Instant::now();
    let [gone, stands] = [ConnId::outside(1), ConnId::outside(2)];
    // Both come in one turn of `ctl`, before it runs the actions for other processes.
    handoff.receive_message(gone, &Message::Announce(Box::new(announce.clone())), now);
    handoff.link_down(gone, Cause::PeerLost, now);
    handoff.receive_message(stands, &Message::Announce(Box::new(announce)), now);
    let mut bound = Vec::new();
    while let Some(remote) = handoff.poll_remote() {
        if let RemoteAction::BindSource(conn, session) = remote {
            assert_eq!(session.session, SessionId(0), "both had the same place");
            bound.push(conn);
        }
    }
    assert_eq!(bound, [stands]);
}

#[test]
fn invariants_find_a_link_that_keeps_its_ended_session() {
    let (mut handoff, announce) = source();
    let (now, conn) = (Instant::now(), ConnId::outside(1));
    let mut begin_and_end = || {
        handoff.receive_message(conn, &Message::Announce(Box::new(announce.clone())), now);
        handoff.invariants();
        handoff.link_down(conn, Cause::PeerLost, now);
        handoff.invariants();
    };
    begin_and_end();
    let message = panic_of("link keeps its ended session", begin_and_end);
    assert!(message.contains("a link leads to a session that is open"), "{message}");
}

#[test]
fn invariants_find_a_free_slot_that_keeps_its_request() {
    let (mut handoff, _) = source();
    let now = Instant::now();
    let worker = handoff.worker_mut(WorkerId(0));
    let mut take_and_release = || {
        let slot = worker.take_slot(prompt_of(&[1]), now).unwrap();
        worker.invariants();
        worker.release(slot);
        worker.invariants();
    };
    take_and_release();
    let message = panic_of("free slot keeps its request", take_and_release);
    assert!(message.contains("a slot is free or has a request"), "{message}");
}

//! One suite over all transports: exact bytes, no write outside leased pages, aborts and deaths at
//! every point, stale notices, invalid input.

mod hangs;
mod rig;
mod way;

use baton::cause::Cause;
use baton::ids::{Generation, PageId, SlotId};
use baton::kv::layout::{KvDtype, KvLayout};
use baton::kv::page_span::PageSpan;
use baton::limits::RDMA_BREAKS_MAX;
use baton::stdx::seal::{SealingAllocator, seal_thread, violations};
use baton::sys::verbs::CompletionError;
use baton::transfer::command::{DestinationCommand, SourceCommand};
use baton::transfer::mover::Report;
use baton::transfer::status::State;
use baton::transfer::target::SessionId;
use baton::transfer::transport::{Arrival, Post};
use rig::{At, Rig, layer_major, layer_major_of, on_ranks, page_major};
use std::io::Write;
use way::{Kind, Way, pair};

#[global_allocator]
static ALLOCATOR: SealingAllocator = SealingAllocator;

const SESSION: SessionId = SessionId(0);
const OTHER: SessionId = SessionId(1);
/// Every transport that moves bytes; streams also in small parts.
const KINDS: [Kind; 15] = [
    Kind::Shm,
    Kind::ShmLanes(2),
    Kind::Tcp(1),
    Kind::Tcp(3),
    Kind::Wide(2),
    Kind::Relayed(1, 170),
    Kind::Relayed(3, 170),
    Kind::Rdma(1),
    Kind::Rdma(3),
    Kind::Rails(3),
    Kind::Split(1),
    Kind::Split(3),
    Kind::Threads(2),
    Kind::Slabs(5000, 2100),
    Kind::Slabs(2048, 1 << 40),
];
/// Transports with intermediate states, in which a step can end.
const STEPPED: [Kind; 3] = [Kind::Shm, Kind::Relayed(1, 170), Kind::Relayed(3, 170)];

/// Transports with a source that writes itself; the mover or other threads post.
const WRITTEN: [Kind; 6] = [
    Kind::Rdma(1),
    Kind::Rdma(3),
    Kind::Rails(2),
    Kind::Split(1),
    Kind::Split(2),
    Kind::Threads(2),
];

#[test]
fn bytes_arrive_whole_for_every_pair_of_layouts() {
    for kind in KINDS {
        for (from, to) in [(16, 16), (16, 4), (4, 16), (8, 1), (1, 8), (16, 6), (6, 16)] {
            for (from, to) in [
                (page_major(from), page_major(to)),
                (page_major(from), layer_major(to)),
                (layer_major(from), page_major(to)),
                (layer_major(from), layer_major(to)),
            ] {
                let mut rig = Rig::with_layouts(kind, from, to);
                for (room, tokens) in [1, 15, 16, 17, 40, 64].into_iter().enumerate() {
                    let handoff = rig.begin(SESSION, room as u64, tokens);
                    rig.chunks(&handoff, 16);
                    rig.until_success(&handoff);
                }
                rig.assert_idle();
            }
        }
    }
}

#[test]
fn tokens_that_the_destination_already_holds_are_neither_sent_nor_written() {
    for kind in KINDS {
        for (from, to) in [(16, 16), (16, 4), (4, 16), (8, 1), (16, 6), (6, 16)] {
            for (from, to) in
                [(page_major(from), page_major(to)), (layer_major(from), layer_major(to))]
            {
                let mut rig = Rig::with_layouts(kind, from, to);
                for (room, (pages, tokens)) in
                    [(1, 17), (2, 40), (0, 20), (3, 64)].into_iter().enumerate()
                {
                    let prefix =
                        (pages * to.page_size).min((tokens - 1) / to.page_size * to.page_size);
                    let handoff = rig.begin_behind(SESSION, room as u64, prefix..tokens);
                    rig.chunks(&handoff, from.page_size * 2);
                    rig.until_success(&handoff);
                }
                rig.assert_idle();
            }
        }
    }
}

/// Not for a source that writes itself: it has no addresses of pages that were not requested.
#[test]
fn tokens_that_the_destination_already_holds_cannot_be_sent() {
    for kind in KINDS.into_iter().filter(|kind| !kind.is_rdma()) {
        let wrong: [fn(&mut Post); 3] = [
            |post| post.tokens.start = 0,
            |post| post.tokens.start = 8,
            |post| post.tokens.start = 24,
        ];
        for spoil in wrong {
            let mut rig = Rig::new(kind);
            let wrong = rig.begin_behind(SESSION, 1, 16..40);
            rig.scripts[0].set(|faults| faults.spoil = Some(spoil));
            rig.chunk(&wrong, 16..40);
            rig.until("the destination fails", |rig| rig.states(&wrong)[1] == State::Failed);
            rig.fail(&wrong, At::Source, Cause::OtherLeg);
            rig.until("leases end", |rig| rig.holds_no_lease(&wrong));
            rig.release(&wrong);
            rig.assert_idle();
        }
    }
}

#[test]
fn heads_reach_the_ranks_that_hold_them() {
    for kind in KINDS {
        // The model has two heads: one rank per head, one rank for both, and two ranks per head.
        for ranks in [(1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (4, 1), (1, 4)] {
            for (from, to) in [
                (page_major(16), page_major(16)),
                (page_major(16), layer_major(4)),
                (layer_major(4), page_major(16)),
                (layer_major(8), layer_major(8)),
            ] {
                let mut rig =
                    Rig::with_layouts(kind, on_ranks(from, ranks.0), on_ranks(to, ranks.1));
                for (room, tokens) in [1, 17, 40].into_iter().enumerate() {
                    let handoff = rig.begin(SESSION, room as u64, tokens);
                    rig.chunks(&handoff, 16);
                    rig.until_success(&handoff);
                }
                rig.assert_idle();
            }
        }
    }
}

#[test]
fn rooms_interleave_and_chunks_come_in_any_sizes() {
    for kind in KINDS {
        for reorder in [false, true] {
            let mut rig = Rig::new(kind);
            rig.scripts[0]
                .set(|faults| (faults.reorder, faults.delay) = (reorder, u64::from(reorder) * 3));
            let tokens = [64, 3, 17, 33, 48, 64];
            let handoffs: Vec<_> =
                (0..).zip(tokens).map(|(room, tokens)| rig.begin(SESSION, room, tokens)).collect();
            for start in (0..64).step_by(16) {
                for handoff in handoffs.iter().filter(|handoff| start < handoff.tokens) {
                    rig.chunk(handoff, start..(start + 16).min(handoff.tokens));
                    if start % 32 == 0 {
                        rig.point();
                    }
                }
            }
            for handoff in &handoffs {
                rig.until_success(handoff);
            }
            rig.assert_idle();
        }
    }
}

#[test]
fn lanes_copy_a_large_chunk_whole() {
    let layout = KvLayout::page_major(16, 8, 8, 64, KvDtype::F16);
    for (kind, to) in [(2, layout), (3, layer_major_of(layout)), (8, on_ranks(layout, 4))]
        .map(|(lanes, to)| (Kind::ShmLanes(lanes), to))
    {
        let mut rig = Rig::with_layouts(kind, layout, to);
        for (room, tokens) in [512, 399].into_iter().enumerate() {
            let handoff = rig.begin(SESSION, room as u64, tokens);
            rig.chunk(&handoff, 0..128);
            rig.chunk(&handoff, 128..tokens);
            rig.until_success(&handoff);
        }
        rig.assert_idle();
    }
}

#[test]
fn frames_and_streams_fill_up_with_large_chunks() {
    let layout = KvLayout::page_major(16, 8, 8, 64, KvDtype::F16);
    for lanes in [1, 3] {
        let mut rig = Rig::with_layouts(Kind::Tcp(lanes), layout, layout);
        rig.watches = false;
        // The destination holds 8 MiB back: the streams fill up, and the source waits for space.
        let handoff = rig.begin(SESSION, 1, 512);
        rig.chunk(&handoff, 0..512);
        rig.scripts[1].set(|faults| faults.hold = true);
        while rig.turn() {}
        assert_eq!(rig.states(&handoff)[0], State::Transferring);
        rig.scripts[1].set(|faults| faults.hold = false);
        rig.until_success(&handoff);
        rig.watches = true;
        rig.assert_idle();
    }
}

#[test]
fn a_frame_begun_is_finished_under_its_lease() {
    let layout = KvLayout::page_major(16, 8, 8, 64, KvDtype::F16);
    for lanes in [1, 3] {
        let mut rig = Rig::with_layouts(Kind::Tcp(lanes), layout, layout);
        rig.watches = false;
        let handoff = rig.begin(SESSION, 1, 512);
        rig.chunk(&handoff, 0..512);
        rig.scripts[1].set(|faults| faults.hold = true);
        while rig.turn() {}
        assert!(rig.fail(&handoff, At::Source, Cause::Deadline));
        rig.turn();
        assert!(rig.source.leased.contains_key(&handoff.from.0), "its frames are partly sent");
        assert!(rig.fail(&handoff, At::Destination, Cause::Deadline));
        rig.scripts[1].set(|faults| faults.hold = false);
        rig.until_failed(&handoff);
        rig.watches = true;
        next_room_works(&mut rig, SESSION);
    }
}

#[test]
fn the_fake_transport_moves_nothing() {
    let mut rig = Rig::new(Kind::Fake);
    for room in 0..3 {
        let handoff = rig.begin(SESSION, room, 40);
        rig.chunks(&handoff, 16);
        rig.until("success", |rig| {
            rig.states(&handoff) == [State::Success; 2] && rig.holds_no_lease(&handoff)
        });
        rig.release(&handoff);
    }
    rig.assert_idle();
}

/// After a failure the next rooms work, in the same session or a new one, with the same slots and
/// pages.
fn next_room_works(rig: &mut Rig, session: SessionId) {
    for (room, tokens) in [(900, 40), (901, 3)] {
        let handoff = rig.begin(session, room, tokens);
        rig.chunks(&handoff, 16);
        rig.until_success(&handoff);
    }
    rig.assert_idle();
}

/// Runs a hand-off for `points` points. Returns whether it completed.
fn run(rig: &mut Rig, points: usize) -> (rig::Handoff, bool) {
    let handoff = rig.begin(SESSION, 7, 40);
    rig.chunks(&handoff, 16);
    for _ in 0..points {
        rig.point();
    }
    let over = rig.states(&handoff) == [State::Success; 2] && rig.holds_no_lease(&handoff);
    (handoff, over)
}

/// Runs a hand-off up to each point and then `trouble`. The next room must work in the session that
/// `trouble` returns.
fn at_every_point(kind: Kind, mut trouble: impl FnMut(&mut Rig, &rig::Handoff) -> SessionId) {
    for points in 0..2000 {
        let mut rig = Rig::new(kind);
        let (handoff, over) = run(&mut rig, points);
        if over {
            assert!(points > 3, "there was no intermediate point");
            return;
        }
        let session = trouble(&mut rig, &handoff);
        next_room_works(&mut rig, session);
    }
    panic!("the hand-off never ended");
}

#[test]
fn a_destination_may_cancel_at_every_point_and_no_byte_lands_later() {
    for kind in STEPPED {
        at_every_point(kind, |rig, handoff| {
            let failed = rig.fail(handoff, At::Destination, Cause::ClientGone);
            // No peer is needed: one step of its own mover ends the lease.
            rig.step_destination();
            assert!(!rig.destination.leased.contains_key(&handoff.to.0));
            rig.reuse(handoff);
            // The source continues until it gets the message.
            for _ in 0..7 {
                rig.turn();
            }
            rig.fail(handoff, At::Source, Cause::ClientGone);
            rig.until("the source's lease ends", |rig| rig.holds_no_lease(handoff));
            let (_, after) = (failed, rig.states(handoff)[1]);
            assert_eq!(after, if failed { State::Failed } else { State::Success });
            rig.release(handoff);
            SESSION
        });
    }
}

#[test]
fn a_source_may_cancel_at_every_point_and_its_pages_are_read_no_longer() {
    for kind in STEPPED {
        at_every_point(kind, |rig, handoff| {
            let failed = rig.fail(handoff, At::Source, Cause::Deadline);
            rig.until("the source's lease ends", |rig| {
                !rig.source.leased.contains_key(&handoff.from.0)
            });
            assert_eq!(
                rig.has_withdrawn(),
                failed,
                "the source reports Withdrawn if it was failed"
            );
            rig.reuse_source(handoff);
            for _ in 0..7 {
                rig.turn();
            }
            // Either all bytes had left the source, or the destination gets the failure by
            // `Status`.
            rig.fail(handoff, At::Destination, Cause::Deadline);
            rig.until("the destination's lease ends", |rig| rig.holds_no_lease(handoff));
            rig.reuse(handoff);
            rig.release(handoff);
            SESSION
        });
    }
}

#[test]
fn streams_may_be_cut_at_every_point() {
    for (kind, lane) in [(STEPPED[1], 0), (STEPPED[2], 0), (STEPPED[2], 2)] {
        at_every_point(kind, |rig, handoff| {
            rig.ways[0].relays[lane].cut();
            rig.until("both sides see it", |rig| rig.lost(At::Source) && rig.lost(At::Destination));
            assert!(rig.holds_no_lease(handoff), "a lost stream ends what it carried at once");
            rig.reuse(handoff);
            rig.release(handoff);
            rig.open_at(0, kind)
        });
    }
}

#[test]
fn a_session_may_be_closed_at_every_point_from_either_side() {
    for kind in STEPPED {
        for at in [At::Source, At::Destination] {
            at_every_point(kind, |rig, handoff| {
                rig.close(SESSION, at);
                rig.turn();
                let ended = match at {
                    At::Source => !rig.source.leased.contains_key(&handoff.from.0),
                    At::Destination => !rig.destination.leased.contains_key(&handoff.to.0),
                };
                assert!(ended, "a closed session holds nothing");
                let other = if at == At::Source { At::Destination } else { At::Source };
                let has_streams = !matches!(kind, Kind::Shm | Kind::ShmLanes(_));
                if !has_streams {
                    // A side without a stream learns it from the control plane.
                    rig.close(SESSION, other);
                }
                rig.until("all leases end", |rig| rig.holds_no_lease(handoff));
                if has_streams {
                    rig.until("the other side sees it", |rig| rig.lost(other));
                }
                rig.reuse(handoff);
                rig.release(handoff);
                rig.open_at(0, kind)
            });
        }
    }
}

#[test]
fn a_half_that_fails_or_dies_ends_its_own_session_only() {
    for kind in [Kind::Tcp(1), Kind::Relayed(3, 170)] {
        for at in [At::Source, At::Destination] {
            let script = at as usize;
            at_every_point(kind, |rig, handoff| {
                rig.scripts[script].set(|faults| faults.fail_after = Some(0));
                rig.until("the half is lost", |rig| rig.lost(at));
                rig.scripts[script].set(|faults| faults.fail_after = None);
                rig.until("both ends let go", |rig| rig.holds_no_lease(handoff));
                rig.release(handoff);
                rig.until("the other side sees it", |rig| {
                    rig.lost(At::Source) && rig.lost(At::Destination)
                });
                rig.open_at(0, kind)
            });
            at_every_point(kind, |rig, handoff| {
                let other = if at == At::Source { At::Destination } else { At::Source };
                rig.scripts[script].set(|faults| faults.dead = true);
                rig.until("the other side sees it", |rig| rig.lost(other));
                rig.scripts[script].set(|faults| faults.dead = false);
                rig.close(SESSION, at);
                rig.until("both ends let go", |rig| rig.holds_no_lease(handoff));
                rig.release(handoff);
                rig.open_at(0, kind)
            });
        }
    }
}

#[test]
fn held_back_data_lands_nowhere_once_the_lease_has_ended() {
    for kind in [Kind::Shm, Kind::Tcp(1), Kind::Tcp(3), Kind::Relayed(3, 170)] {
        for destination_holds in [false, true] {
            let mut rig = Rig::new(kind);
            let script = rig.scripts[usize::from(destination_holds)].clone();
            let handoff = rig.begin(SESSION, 1, 40);
            script.set(|faults| faults.hold = true);
            rig.chunks(&handoff, 16);
            for _ in 0..20 {
                rig.turn();
            }
            assert!(rig.fail(&handoff, At::Destination, Cause::Deadline));
            rig.step_destination();
            rig.reuse(&handoff);
            // The same slot and pages, for another room.
            let (_, _, pages) = &handoff.to;
            rig.destination.pool.release(pages);
            script.set(|faults| faults.hold = false);
            let next = rig.begin(SESSION, 2, 40);
            assert_eq!((next.to.0, &next.to.2), (handoff.to.0, pages), "the same slot and pages");
            rig.chunks(&next, 16);
            rig.until("the next room has arrived", |rig| rig.states(&next)[1] == State::Success);
            rig.fail(&handoff, At::Source, Cause::Deadline);
            rig.until_success(&next);
            rig.until("the source has let go", |rig| rig.holds_no_lease(&handoff));
            rig.source.pool.release(&handoff.from.2);
            rig.assert_idle();
        }
    }
}

#[test]
fn frames_of_an_earlier_generation_change_nothing() {
    for lanes in [1, 3] {
        let mut rig = Rig::new(Kind::Relayed(lanes, 170));
        let old = rig.begin(SESSION, 1, 40);
        rig.chunks(&old, 16);
        rig.until_success(&old);
        let recorded: Vec<_> =
            rig.ways[0].relays.iter().map(|relay| relay.passed.clone()).collect();
        let new = rig.begin(SESSION, 2, 40);
        assert_eq!((new.to.0, &new.to.2), (old.to.0, &old.to.2), "the same slot and pages");
        rig.step_destination();
        for (relay, bytes) in rig.ways[0].relays.iter_mut().zip(&recorded) {
            relay.inject(bytes);
        }
        for _ in 0..50 {
            rig.turn();
        }
        assert_eq!(rig.states(&new)[1], State::WaitingForInput, "a stale frame was accepted");
        rig.chunks(&new, 16);
        rig.until_success(&new);
        // And once more, when no request holds the slot.
        for (relay, bytes) in rig.ways[0].relays.iter_mut().zip(&recorded) {
            relay.inject(bytes);
        }
        next_room_works(&mut rig, SESSION);
    }
}

#[test]
fn a_notice_that_comes_twice_changes_nothing() {
    // Of several lanes, one could repeat itself before another has ended. That is out of order,
    // like any invalid input.
    for kind in [Kind::Shm, Kind::Tcp(1), Kind::Relayed(1, 170)] {
        let mut rig = Rig::new(kind);
        for room in 0..4 {
            let handoff = rig.begin(SESSION, room, 40);
            rig.scripts[0].set(|faults| faults.duplicate = 1);
            rig.chunk(&handoff, 0..40);
            rig.until_success(&handoff);
        }
        next_room_works(&mut rig, SESSION);
    }
}

#[test]
fn a_post_that_vanished_leaves_nothing_behind_but_its_own_room() {
    for kind in KINDS {
        let mut rig = Rig::new(kind);
        let lost = rig.begin(SESSION, 1, 40);
        rig.scripts[0].set(|faults| faults.drop = 1);
        rig.chunk(&lost, 0..40);
        rig.turn();
        let fine = rig.begin(SESSION, 2, 40);
        rig.chunks(&fine, 16);
        rig.until_success(&fine);
        assert!(
            rig.fail(&lost, At::Source, Cause::Deadline)
                && rig.fail(&lost, At::Destination, Cause::Deadline)
        );
        rig.until_failed(&lost);
        next_room_works(&mut rig, SESSION);
    }
}

/// The kind of wrong post, and whether its room fails at once.
#[allow(clippy::type_complexity)] // A table that is read in one place.
const SPOILT: [(&str, fn(&mut Post), bool); 10] = [
    ("another generation", |post| post.target.generation.0 += 1, false),
    ("another room", |post| post.target.room.0 ^= 1, false),
    ("another slot", |post| post.target.slot = SlotId(5), false),
    ("a slot that is not there", |post| post.target.slot = SlotId(u32::MAX), false),
    ("tokens beyond the prompt", |post| post.tokens.end = 48, true),
    ("tokens that were skipped", |post| post.tokens.start = 16, true),
    ("too few tokens with the last", |post| post.tokens.end = 39, true),
    ("no tokens", |post| post.tokens.end = post.tokens.start, true),
    ("no record with the last", |post| post.last = None, true),
    ("a record of another room", |post| post.last.as_mut().unwrap().room ^= 1, true),
];

/// Not for a source that writes itself: within its grant only the room's name can be checked.
#[test]
fn a_wrong_post_harms_its_own_session_at_most() {
    for kind in KINDS.into_iter().filter(|kind| !kind.is_rdma()) {
        for (what, spoil, heard) in SPOILT {
            let mut rig = Rig::new(kind);
            rig.open(kind);
            let wrong = rig.begin(SESSION, 1, 40);
            let fine = rig.begin(OTHER, 2, 40);
            rig.scripts[0].set(|faults| faults.spoil = Some(spoil));
            rig.chunk(&wrong, 0..40);
            rig.step_source();
            rig.scripts[0].set(|faults| faults.spoil = None);
            rig.chunks(&fine, 16);
            rig.until_success(&fine);
            assert_ne!(rig.states(&wrong)[1], State::Success, "{kind:?}: {what}");
            if heard {
                rig.until(what, |rig| rig.states(&wrong)[1] == State::Failed);
            }
            rig.fail(&wrong, At::Destination, Cause::Deadline);
            rig.fail(&wrong, At::Source, Cause::Deadline);
            rig.until(what, |rig| rig.holds_no_lease(&wrong));
            rig.release(&wrong);
            next_room_works(&mut rig, OTHER);
        }
    }
}

#[test]
fn page_numbers_beyond_the_pool_are_not_followed() {
    let mut rig = Rig::new(Kind::Shm);
    let wrong = rig.begin(SESSION, 1, 40);
    let pages = [PageId(u32::MAX), PageId(32), PageId(0)];
    rig.source.memory.lists.store(wrong.from.0, PageSpan::whole(&pages));
    rig.chunk(&wrong, 0..40);
    rig.until("the destination fails", |rig| rig.states(&wrong)[1] == State::Failed);
    assert!(rig.fail(&wrong, At::Source, Cause::OtherLeg));
    rig.until_failed(&wrong);
    next_room_works(&mut rig, SESSION);
}

/// Changes each byte of the heads that a source sends. The effect stays in the session.
#[test]
fn no_byte_of_a_head_is_trusted() {
    // One page in frames of 300, 300, 300 and 124 bytes; the last one has the aux record.
    let (frame, last, end) = (48 + 300, 3 * (48 + 300), 4 * 48 + 200 + 1024);
    for at in (0..48).chain(frame..frame + 48).chain(last..last + 248) {
        for change in [0x01, 0x80, 0xff] {
            let mut rig = Rig::new(Kind::Relayed(1, 2000));
            rig.open(Kind::Shm);
            rig.ways[0].hold(true);
            let wrong = rig.begin(SESSION, 1, 3);
            rig.chunks(&wrong, 16);
            while rig.step_source() {}
            let relay = &mut rig.ways[0].relays[0];
            let mut bytes = relay.take(end);
            bytes[at] ^= change;
            relay.inject(&bytes);
            rig.ways[0].hold(false);
            let fine = rig.begin(OTHER, 2, 40);
            rig.chunks(&fine, 16);
            rig.until_success(&fine);
            rig.close(SESSION, At::Source);
            rig.close(SESSION, At::Destination);
            rig.until("the leases end", |rig| rig.holds_no_lease(&wrong));
            rig.release(&wrong);
            next_room_works(&mut rig, OTHER);
        }
    }
}

#[test]
fn garbage_costs_its_sender_the_session_and_harms_no_other_session() {
    let mut state = 1u64;
    let mut random = move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    for _ in 0..50 {
        let mut rig = Rig::new(Kind::Relayed(1, 170));
        rig.open(Kind::Tcp(1));
        let (wrong, fine) = (rig.begin(SESSION, 1, 40), rig.begin(OTHER, 2, 40));
        let garbage: Vec<u8> = (0..500).map(|_| random()).collect();
        rig.ways[0].relays[0].inject(&garbage);
        rig.chunks(&fine, 16);
        rig.until_success(&fine);
        rig.until("the session is lost", |rig| rig.lost(At::Destination) && rig.lost(At::Source));
        assert_eq!(rig.states(&wrong), [State::Failed; 2]);
        rig.until_failed(&wrong);
        next_room_works(&mut rig, OTHER);
    }
}

#[test]
fn a_destination_that_speaks_loses_the_session() {
    let mut rig = Rig::new(Kind::Tcp(1));
    let (near, far) = pair();
    way::open_tcp_source(&mut rig, OTHER, vec![near]);
    (&far).write_all(b"hello").unwrap();
    rig.until("the session is lost", |rig| rig.lost(At::Source));
    next_room_works(&mut rig, SESSION);
}

/// The grant is in the mover's ring before the frame arrives. But the mover can read the stream
/// after it has last read the ring.
#[test]
fn a_frame_that_overtakes_its_grant_is_not_lost() {
    for kind in
        [Kind::Shm, Kind::Tcp(1), Kind::Tcp(3), Kind::Rdma(1), Kind::Rdma(3), Kind::Split(1)]
    {
        let mut rig = Rig::new(kind);
        let handoff = rig.begin_overtaken(SESSION, 1, 40);
        rig.until_success(&handoff);
        rig.assert_idle();
    }
}

/// `Done` is only the peer's claim. Pages that are still being sent stay leased.
#[test]
fn done_before_the_last_byte_has_left_ends_no_lease() {
    let mut rig = Rig::new(Kind::Relayed(1, 170));
    let handoff = rig.begin(SESSION, 1, 40);
    rig.chunk(&handoff, 0..40);
    rig.step_source();
    let (slot, generation, _) = handoff.from;
    rig.source.commands.send(SourceCommand::Done { slot, generation }).unwrap();
    rig.step_source();
    assert!(rig.source.leased.contains_key(&slot), "the source sends from pages without a lease");
    rig.until_success(&handoff);
    rig.assert_idle();
}

#[test]
fn a_lane_may_come_late_with_bytes_that_were_read_already() {
    let mut rig = Rig::new(Kind::Shm);
    for early in [0, 1, 47, 48, 100, 247, 248, 300, 900] {
        let far = way::open_tcp_without_lane(&mut rig, OTHER);
        let handoff = rig.begin(OTHER, 1 + early as u64, 40);
        rig.chunks(&handoff, 16);
        for _ in 0..20 {
            rig.turn();
        }
        let arrival = way::prove(far, (0, 1), early);
        rig.destination
            .commands
            .send(DestinationCommand::Join { session: OTHER, arrival })
            .unwrap();
        rig.until_success(&handoff);
        rig.close(OTHER, At::Source);
        rig.close(OTHER, At::Destination);
        rig.turn();
    }
    rig.assert_idle();
}

#[test]
fn a_stream_for_a_lane_that_is_taken_or_not_there_loses_the_session() {
    for lane in [0, 1] {
        let mut rig = Rig::new(Kind::Tcp(1));
        let handoff = rig.begin(SESSION, 1, 40);
        let arrival = Arrival { lane, stream: pair().0.into(), early: Vec::new() };
        rig.destination
            .commands
            .send(DestinationCommand::Join { session: SESSION, arrival })
            .unwrap();
        rig.until("both sides see it", |rig| rig.lost(At::Source) && rig.lost(At::Destination));
        rig.until_failed(&handoff);
        let session = rig.open_at(0, Kind::Tcp(1));
        next_room_works(&mut rig, session);
    }
}

#[test]
fn lanes_end_one_by_one_in_the_status_word() {
    let mut rig = Rig::new(Kind::Relayed(3, 5000));
    let handoff = rig.begin(SESSION, 1, 40);
    rig.ways[0].hold(true);
    rig.chunk(&handoff, 0..40);
    let mut mask = 0;
    for lane in [2, 0, 1] {
        rig.ways[0].relays[lane].hold = false;
        mask |= 1 << lane;
        rig.until("the lane ends", |rig| rig.destination.status.load(handoff.to.0).lanes == mask);
        let state = rig.destination.status.load(handoff.to.0).state;
        assert_eq!(state, if mask == 0b111 { State::Success } else { State::Transferring });
    }
    rig.until_success(&handoff);
    rig.assert_idle();
}

/// The only test that seals threads, because the count of violations is per process.
#[test]
fn movers_neither_allocate_nor_free_while_bytes_move() {
    let rdma = [Kind::Rdma(2), Kind::Rails(2), Kind::Split(2), Kind::Threads(2)];
    for kind in [Kind::Shm, Kind::Tcp(1), Kind::Tcp(3)].into_iter().chain(rdma) {
        let mut rig = Rig::new(kind);
        for room in 0..20 {
            if kind.is_rdma() && room % 5 == 4 {
                // The posters' own threads are sealed from start to end. They return sessions, too.
                rig.close(SESSION, At::Source);
                rig.close(SESSION, At::Destination);
                rig.turn();
                reopen(&mut rig);
            }
            let handoff = rig.begin(SESSION, room, 40);
            rig.chunks(&handoff, 16);
            for _ in 0..30 {
                let seal = seal_thread();
                rig.source_mover.step();
                rig.ways[0].step_posters();
                rig.ways[0].step_pollers();
                rig.destination_mover.step();
                drop(seal);
                rig.step_ways();
            }
            if room % 3 == 0 {
                rig.fail(&handoff, At::Source, Cause::Deadline);
                rig.fail(&handoff, At::Destination, Cause::Deadline);
            }
            rig.until("it ends", |rig| rig.holds_no_lease(&handoff));
            rig.release(&handoff);
        }
        rig.assert_idle();
    }
    assert_eq!(violations(), 0);
    let seal = seal_thread();
    let allocated = vec![1u8];
    drop(seal);
    assert_eq!(violations(), 1, "the allocator does not count violations");
    drop(allocated);
}

/// A mover parks on its streams: space in a full stream wakes it, and an idle stream does not.
#[test]
fn streams_wake_a_parked_mover_and_let_an_idle_one_sleep() {
    use std::time::{Duration, Instant};
    let layout = KvLayout::page_major(16, 8, 8, 64, KvDtype::F16);
    let mut rig = Rig::with_layouts(Kind::Tcp(1), layout, layout);
    rig.watches = false;
    let idle = |rig: &Rig, nap| {
        let begun = Instant::now();
        rig.waits[0].wait(nap);
        begun.elapsed() >= nap
    };
    while rig.turn() {}
    assert!(idle(&rig, Duration::from_millis(20)), "an idle stream keeps its mover awake");
    let handoff = rig.begin(SESSION, 1, 512);
    rig.chunk(&handoff, 0..512);
    while rig.step_source() {}
    while rig.step_destination() {}
    assert!(!idle(&rig, Duration::from_secs(60)), "space in a stream does not wake the mover");
    rig.until_success(&handoff);
    while rig.turn() {}
    assert!(idle(&rig, Duration::from_millis(20)), "a drained stream keeps its mover awake");
}

/// For a destination with a source that writes itself.
#[test]
fn a_lease_that_is_written_to_lasts_until_its_source_is_quiet_at_every_point() {
    for kind in WRITTEN {
        at_every_point(kind, |rig, handoff| {
            let failed = rig.fail(handoff, At::Destination, Cause::ClientGone);
            rig.step_destination();
            let under_way = failed && rig.states(handoff)[0] != State::Success;
            assert_eq!(
                rig.destination.leased.contains_key(&handoff.to.0),
                under_way,
                "quiet or not"
            );
            for _ in 0..7 {
                rig.turn();
            }
            rig.fail(handoff, At::Source, Cause::ClientGone);
            rig.until("both leases end", |rig| rig.holds_no_lease(handoff));
            rig.reuse(handoff);
            rig.reuse_source(handoff);
            for _ in 0..7 {
                rig.turn();
            }
            rig.release(handoff);
            SESSION
        });
    }
}

/// A mover that was stalled has more reports than the ring holds, and the end of a session.
#[test]
fn no_word_is_lost_however_much_there_is_to_tell() {
    const CANCELLED: usize = 10 * rig::SLOTS;
    let mut rig = Rig::new(Kind::Tcp(1));
    let cancel = || SourceCommand::Cancel { slot: SlotId(0), generation: Generation(1) };
    (0..CANCELLED).for_each(|_| rig.source.commands.send(cancel()).unwrap());
    rig.close(SESSION, At::Destination);
    rig.step_destination();
    let told = |rig: &Rig| {
        let of_source = |(at, report): &&(At, Report)| {
            *at == At::Source && matches!(report, Report::Withdrawn { .. })
        };
        rig.reports.iter().filter(of_source).count()
    };
    rig.until("all reports arrive", |rig| told(rig) == CANCELLED && rig.lost(At::Source));
}

/// A decode worker can exit or change its role as soon as it has all bytes.
#[test]
fn kv_that_is_reported_complete_is_handed_over_even_if_the_session_ends() {
    for kind in WRITTEN.into_iter().chain([Kind::Shm, Kind::Tcp(1), Kind::Tcp(3)]) {
        at_every_point(kind, |rig, handoff| {
            let is_told = rig.states(handoff)[1] == State::Success;
            rig.close(SESSION, At::Source);
            rig.step_source();
            let [from, _] = rig.states(handoff);
            assert!(
                from.is_terminal() && (!is_told || from == State::Success),
                "{kind:?}: {from:?}"
            );
            rig.close(SESSION, At::Destination);
            rig.until("all leases end", |rig| rig.holds_no_lease(handoff));
            rig.release(handoff);
            rig.open_at(0, kind)
        });
    }
}

/// After the leases end, no queue pair is left that could read or write their pages.
#[test]
fn queue_pairs_are_gone_when_their_sources_leases_have_ended_at_every_point() {
    for kind in WRITTEN {
        at_every_point(kind, |rig, handoff| {
            rig.close(SESSION, At::Source);
            rig.step_source();
            assert!(
                rig.holds_no_lease(handoff) || !rig.source.leased.contains_key(&handoff.from.0)
            );
            let rails = rig.ways[0].rails.as_ref().unwrap();
            for &pair in &rails.pairs {
                let counts = rails.fabric.counts(pair);
                assert_eq!((counts.doorbells, counts.requests), (0, 0), "a queue pair is left");
            }
            rig.close(SESSION, At::Destination);
            rig.until("all leases end", |rig| rig.holds_no_lease(handoff));
            rig.reuse(handoff);
            rig.reuse_source(handoff);
            for _ in 0..7 {
                rig.turn();
            }
            rig.release(handoff);
            rig.open_at(0, kind)
        });
    }
}

#[test]
fn a_source_that_writes_may_cancel_at_every_point() {
    for kind in WRITTEN {
        at_every_point(kind, |rig, handoff| {
            let failed = rig.fail(handoff, At::Source, Cause::Deadline);
            rig.until("the source's lease ends", |rig| {
                !rig.source.leased.contains_key(&handoff.from.0)
            });
            assert_eq!(
                rig.has_withdrawn(),
                failed,
                "the source reports Withdrawn if it was failed"
            );
            rig.reuse_source(handoff);
            rig.fail(handoff, At::Destination, Cause::Deadline);
            rig.until("the destination's lease ends", |rig| rig.holds_no_lease(handoff));
            rig.reuse(handoff);
            for _ in 0..7 {
                rig.turn();
            }
            rig.release(handoff);
            SESSION
        });
    }
}

/// A chunk with more work requests than the lanes have room for: some are posted, some wait.
#[test]
fn a_half_posted_chunk_may_be_withdrawn() {
    for kind in WRITTEN {
        for points in 0..60 {
            let mut rig = Rig::with_layouts(kind, layer_major(1), page_major(16));
            let handoff = rig.begin(SESSION, 1, 64);
            rig.chunk(&handoff, 0..64);
            run_on(&mut rig, points);
            assert_ne!(
                rig.states(&handoff)[1],
                State::Success,
                "{kind:?}: the lanes had room for the whole chunk"
            );
            assert!(rig.fail(&handoff, At::Source, Cause::Deadline));
            rig.until("the source's lease ends", |rig| {
                !rig.source.leased.contains_key(&handoff.from.0)
            });
            rig.reuse_source(&handoff);
            rig.fail(&handoff, At::Destination, Cause::Deadline);
            rig.until("the destination's lease ends", |rig| rig.holds_no_lease(&handoff));
            rig.reuse(&handoff);
            for _ in 0..7 {
                rig.turn();
            }
            rig.release(&handoff);
            next_room_works(&mut rig, SESSION);
        }
    }
}

fn run_on(rig: &mut Rig, points: usize) {
    for _ in 0..points {
        rig.point();
    }
}

/// Packets are on the wire, and no answer comes. Only a reset ensures that they cannot land.
#[test]
fn writes_that_were_held_back_land_nowhere_once_the_session_is_reset() {
    for kind in WRITTEN {
        for points in 0..12 {
            let mut rig = Rig::new(kind);
            let handoff = rig.begin(SESSION, 1, 40);
            let held = rig.ways[0].rails.as_ref().unwrap().pairs.clone();
            let hold = |rig: &Rig| {
                let rails = rig.ways[0].rails.as_ref().unwrap();
                held.iter().for_each(|&pair| rails.fabric.hold(pair));
            };
            rig.chunks(&handoff, 16);
            run_on(&mut rig, points);
            hold(&rig);
            run_on(&mut rig, 60);
            let begun = rig.states(&handoff)[1] != State::Success;
            assert!(rig.fail(&handoff, At::Destination, Cause::Deadline) || !begun);
            rig.fail(&handoff, At::Source, Cause::Deadline);
            run_on(&mut rig, 30);
            rig.step_destination();
            if begun {
                // Threads may have got the chunk too late to post any of it.
                let dropped = matches!(kind, Kind::Threads(_)) && rig.has_withdrawn();
                assert_ne!(
                    rig.destination.leased.contains_key(&handoff.to.0),
                    dropped,
                    "packets are on the wire"
                );
            }
            // The answer is overdue: `ctl` closes the session on its side, and the source learns it
            // later.
            rig.close(SESSION, At::Destination);
            rig.step_destination();
            assert!(
                !rig.destination.leased.contains_key(&handoff.to.0),
                "a closed session holds no lease"
            );
            rig.reuse(&handoff);
            let fabric = rig.ways[0].rails.take().unwrap().fabric;
            held.iter().for_each(|&pair| fabric.release(pair));
            while fabric.step() > 0 {
                rig.assert_image();
            }
            rig.assert_image();
            rig.close(SESSION, At::Source);
            rig.until("the source lets go", |rig| rig.holds_no_lease(&handoff));
            rig.release(&handoff);
            let session = rig.open_at(0, kind);
            next_room_works(&mut rig, session);
        }
    }
}

#[test]
fn a_fault_ends_its_session_and_a_new_one_works() {
    let faults = [
        (CompletionError::RemoteAccess, Cause::Denied),
        (CompletionError::LocalOperation, Cause::Unreachable),
        (CompletionError::NoAnswer, Cause::Unreachable),
        (CompletionError::LocalProtection, Cause::Internal),
    ];
    let kinds = [Kind::Rdma(2), Kind::Split(1), Kind::Threads(1)];
    for ((fault, cause), kind) in
        faults.into_iter().flat_map(|fault| kinds.map(|kind| (fault, kind)))
    {
        let mut rig = Rig::new(kind);
        let handoff = rig.begin(SESSION, 1, 40);
        let beside = rig.begin(SESSION, 2, 40);
        let rails = rig.ways[0].rails.as_ref().unwrap();
        rails.fabric.fail_next(rails.pairs[1], fault);
        rig.chunks(&handoff, 16);
        rig.until("the session is lost", |rig| rig.lost(At::Source));
        assert!(!rig.source.leased.contains_key(&handoff.from.0));
        assert!(
            rig.destination.leased.contains_key(&handoff.to.0),
            "the destination has no message yet"
        );
        assert_eq!(rig.cause(&handoff), Some(cause));
        assert_eq!(rig.cause(&beside), Some(Cause::Flushed), "the other room was only flushed");
        // The control link closes.
        rig.close(SESSION, At::Destination);
        rig.until_failed(&handoff);
        rig.until_failed(&beside);
        let session = rig.open_at(0, kind);
        next_room_works(&mut rig, session);
    }
}

/// Sessions continue over the working NICs. A NIC that fails repeatedly is left out, unless it is
/// the only one.
#[test]
fn a_nic_that_breaks_is_left_out() {
    const NICS: usize = 2;
    for kind in [Kind::Rails(NICS), Kind::Split(NICS), Kind::Threads(NICS)] {
        leave_a_nic_out::<NICS>(kind);
    }
}

fn leave_a_nic_out<const NICS: usize>(kind: Kind) {
    let mut rig = Rig::new(kind);
    let lanes = |rig: &Rig| rig.ways[0].rails.as_ref().unwrap().pairs.len();
    let mut broken = 0;
    while lanes(&rig) == 2 * NICS {
        broken += 1;
        let handoff = rig.begin(SESSION, broken, 40);
        let rails = rig.ways[0].rails.as_ref().unwrap();
        // A lane of the second NIC.
        rails.fabric.fail_next(rails.pairs[3], CompletionError::NoAnswer);
        rig.chunks(&handoff, 16);
        rig.until("the session is lost", |rig| rig.lost(At::Source));
        rig.close(SESSION, At::Destination);
        rig.until_failed(&handoff);
        reopen(&mut rig);
    }
    assert_eq!(broken, u64::from(RDMA_BREAKS_MAX), "a single failure is tolerated");
    assert_eq!(lanes(&rig), 2, "only the lanes of the first NIC");
    next_room_works(&mut rig, SESSION);
    for room in 10..10 + u64::from(RDMA_BREAKS_MAX) {
        let handoff = rig.begin(SESSION, room, 40);
        let rails = rig.ways[0].rails.as_ref().unwrap();
        rails.fabric.fail_next(rails.pairs[0], CompletionError::NoAnswer);
        rig.chunks(&handoff, 16);
        rig.until("the session is lost", |rig| rig.states(&handoff)[0] == State::Failed);
        rig.close(SESSION, At::Destination);
        rig.until_failed(&handoff);
        reopen(&mut rig);
    }
    assert_eq!(lanes(&rig), 2 * NICS, "if all NICs have failed, all are used");
    next_room_works(&mut rig, SESSION);
}

/// A NIC with regions too small for the pool is left out. It is an error only if all NICs are like
/// that.
#[test]
fn a_nic_that_takes_the_pool_in_too_small_regions_only_is_left_out() {
    let rig = Rig::new(Kind::Fake);
    let pool = rig.source.memory.region.len() as u64;
    let nics = way::nics_over(&rig.source.memory, &[1 << 40, pool / 64 - 1]).unwrap();
    assert_eq!(nics.refused.len(), 1);
    let refused = &nics.refused[0];
    assert!(
        refused.contains(&format!("{} bytes", pool / 64 - 1)) && refused.contains("64"),
        "{refused}"
    );
    let alone = way::nics_over(&rig.source.memory, &[pool / 64 - 1]).unwrap_err();
    assert!(refused.ends_with(&alone.to_string()), "{alone}");
}

/// Opens another session over the same NICs.
fn reopen(rig: &mut Rig) {
    rig.reports.clear();
    let Some(way::Rails { nics, fabric, posters, .. }) = rig.ways[0].rails.take() else { return };
    rig.ways[0] = Way::rdma(rig, SESSION, way::template(rig), &nics, fabric);
    rig.ways[0].rails.as_mut().unwrap().posters = posters;
}

/// Both sides know the cause: the source from its completion, the destination from the state of its
/// queue pairs.
#[test]
fn a_write_that_is_refused_is_so_on_both_sides() {
    let kind = Kind::Astray;
    let mut rig = Rig::new(kind);
    let handoff = rig.begin(SESSION, 1, 40);
    rig.chunks(&handoff, 16);
    rig.until("both lose it", |rig| rig.lost(At::Source) && rig.lost(At::Destination));
    rig.until_failed(&handoff);
    assert_eq!(rig.cause(&handoff), Some(Cause::Denied));
    assert_eq!(rig.destination.handle.status(handoff.to.0).cause, Some(Cause::Denied));
}

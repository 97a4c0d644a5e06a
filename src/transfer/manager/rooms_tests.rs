//! Rooms with their two legs in every order.

use super::*;
use crate::stdx::failpoint::panic_of;
use crate::transfer::target::SessionId;

const ROOM: Room = Room(0);
const OURS: Slot = Slot { id: SlotId(3), generation: Generation(7) };
const LEFT: Duration = Duration::from_secs(1800);
const PROMPT: Prompt = Prompt { tokens: 40, hash: [1; 16] };

fn wanted(slot: u32) -> DestinationRequest<u8> {
    let target = Target {
        session: SessionId(0),
        slot: SlotId(slot),
        generation: Generation(1),
        room: ROOM,
        prefix: 0,
    };
    DestinationRequest {
        link: 9,
        target,
        prompt: PROMPT,
        place: Some(DestinationPages::default()),
        left: LEFT,
    }
}

fn theirs(slot: u32) -> Slot {
    Slot { id: SlotId(slot), generation: Generation(1) }
}

#[test]
fn the_two_legs_meet_in_either_order() {
    let now = Instant::now();
    let met = MatchedLegs { slot: OURS, wanted: wanted(5) };
    let mut rooms = Rooms::default();
    assert_eq!(rooms.enter(ROOM, OURS, PROMPT, now), EnterOutcome::Waits);
    assert_eq!(rooms.arrive(ROOM, wanted(5), now), ArriveOutcome::Meets(met.clone()));
    let mut rooms = Rooms::default();
    assert_eq!(rooms.arrive(ROOM, wanted(5), now), ArriveOutcome::Kept);
    assert_eq!(rooms.enter(ROOM, OURS, PROMPT, now), EnterOutcome::Meets(met));
    assert_eq!(rooms.done(ROOM, 9, theirs(5)), Some(OURS));
    assert_eq!(rooms.done(ROOM, 8, theirs(5)), None);
    assert_eq!(rooms.done(ROOM, 9, theirs(6)), None);
}

#[test]
fn another_prompt_fails_on_both_sides() {
    let now = Instant::now();
    let other = Prompt { tokens: 41, ..PROMPT };
    let mut rooms = Rooms::default();
    assert_eq!(rooms.enter(ROOM, OURS, other, now), EnterOutcome::Waits);
    assert_eq!(rooms.arrive(ROOM, wanted(5), now), ArriveOutcome::Differs(OURS));
    let mut rooms = Rooms::default();
    assert_eq!(rooms.arrive(ROOM, wanted(5), now), ArriveOutcome::Kept);
    assert_eq!(rooms.enter(ROOM, OURS, other, now), EnterOutcome::Differs(wanted(5)));
}

#[test]
fn an_open_room_is_never_overwritten() {
    let now = Instant::now();
    let mut rooms = Rooms::default();
    let _ = rooms.enter(ROOM, OURS, PROMPT, now);
    let _ = rooms.arrive(ROOM, wanted(5), now);
    let second = Slot { id: SlotId(4), generation: Generation(1) };
    assert_eq!(rooms.enter(ROOM, second, PROMPT, now), EnterOutcome::Refused(Cause::Refused));
    assert_eq!(rooms.arrive(ROOM, wanted(6), now), ArriveOutcome::Refused(Cause::Refused));
    assert_eq!(rooms.partner(OURS), Some((ROOM, wanted(5))));
}

#[test]
fn an_abort_is_answered_after_the_withdrawal_and_once() {
    let now = Instant::now();
    let mut rooms = Rooms::default();
    let _ = rooms.enter(ROOM, OURS, PROMPT, now);
    let _ = rooms.arrive(ROOM, wanted(5), now);
    assert_eq!(rooms.abort(ROOM, 9, theirs(6), now), AbortOutcome::Stale);
    assert_eq!(rooms.abort(ROOM, 9, theirs(5), now), AbortOutcome::Fail(OURS));
    assert_eq!(rooms.withdrawn(OURS, now), Some((ROOM, wanted(5))));
    assert_eq!(rooms.withdrawn(OURS, now), None);
    rooms.leave(OURS, true, now);
    assert_eq!(rooms.abort(ROOM, 9, theirs(5), now), AbortOutcome::Answer);
    assert_eq!(rooms.open(), 0);
}

#[test]
fn an_abort_without_a_destination_stops_the_request() {
    let now = Instant::now();
    let mut rooms = Rooms::default();
    let _ = rooms.enter(ROOM, OURS, PROMPT, now);
    assert_eq!(rooms.abort(ROOM, 9, theirs(5), now), AbortOutcome::Stop(OURS));
    rooms.leave(OURS, false, now);
    assert_eq!(rooms.arrive(ROOM, wanted(5), now), ArriveOutcome::Refused(Cause::OtherLeg));
}

#[test]
fn a_refused_room_takes_no_request_and_a_room_with_a_request_is_not_refused() {
    let now = Instant::now();
    let mut rooms = Rooms::<u8>::default();
    rooms.refuse(ROOM, now);
    assert_eq!(rooms.enter(ROOM, OURS, PROMPT, now), EnterOutcome::Refused(Cause::OtherLeg));
    let mut rooms = Rooms::default();
    assert_eq!(rooms.enter(ROOM, OURS, PROMPT, now), EnterOutcome::Waits);
    rooms.refuse(ROOM, now);
    assert!(matches!(rooms.arrive(ROOM, wanted(5), now), ArriveOutcome::Meets(_)));
}

#[test]
fn an_abort_before_the_request_leaves_a_tombstone_that_ends() {
    let now = Instant::now();
    let mut rooms = Rooms::default();
    let _ = rooms.arrive(ROOM, wanted(5), now);
    assert_eq!(rooms.abort(ROOM, 9, theirs(5), now), AbortOutcome::Answer);
    assert_eq!(rooms.enter(ROOM, OURS, PROMPT, now), EnterOutcome::Refused(Cause::OtherLeg));
    assert_eq!(rooms.arrive(ROOM, wanted(5), now), ArriveOutcome::Refused(Cause::OtherLeg));
    rooms.expire(now + TOMBSTONE_LIFE, |_, _| ());
    let later = now + TOMBSTONE_LIFE;
    assert_eq!(rooms.enter(ROOM, OURS, PROMPT, later), EnterOutcome::Waits);
}

#[test]
fn unclaimed_destinations_are_bounded_in_number_and_time() {
    let now = Instant::now();
    let mut rooms = Rooms::default();
    for room in 0..EARLY_DESTINATIONS_MAX as u64 {
        assert_eq!(rooms.arrive(Room(room), wanted(5), now), ArriveOutcome::Kept);
    }
    let more = Room(EARLY_DESTINATIONS_MAX as u64);
    assert_eq!(rooms.arrive(more, wanted(5), now), ArriveOutcome::Refused(Cause::Overloaded));
    let mut unclaimed = 0;
    rooms.expire(now + EARLY_DESTINATION_LIFE, |_, _| unclaimed += 1);
    assert_eq!(unclaimed, EARLY_DESTINATIONS_MAX);
    assert_eq!(rooms.arrive(more, wanted(5), now), ArriveOutcome::Kept);
}

#[test]
fn a_destination_is_kept_for_no_longer_than_its_request_waits() {
    let (now, left) = (Instant::now(), Duration::from_secs(5));
    let mut rooms = Rooms::default();
    assert_eq!(
        rooms.arrive(ROOM, DestinationRequest { left, ..wanted(5) }, now),
        ArriveOutcome::Kept
    );
    assert_eq!(rooms.arrive(Room(1), wanted(5), now), ArriveOutcome::Kept);
    let mut unclaimed = Vec::new();
    rooms.expire(now + left - Duration::from_millis(1), |room, _| unclaimed.push(room));
    assert_eq!(unclaimed, []);
    rooms.expire(now + left, |room, _| unclaimed.push(room));
    assert_eq!(unclaimed, [ROOM]);
}

#[test]
fn an_unclaimed_destination_with_time_left_ends_with_the_cause_other_leg() {
    let now = Instant::now();
    let mut rooms = Rooms::default();
    let hasty = DestinationRequest { left: EARLY_DESTINATION_LIFE, ..wanted(5) };
    assert_eq!(rooms.arrive(ROOM, hasty, now), ArriveOutcome::Kept);
    assert_eq!(rooms.arrive(Room(1), wanted(5), now), ArriveOutcome::Kept);
    let mut told = Vec::new();
    rooms
        .expire(now + EARLY_DESTINATION_LIFE, |room, wanted| told.push((room, wanted.unclaimed())));
    assert_eq!(told, [(ROOM, Cause::Deadline), (Room(1), Cause::OtherLeg)]);
}

#[test]
fn a_dead_link_takes_its_rooms_along() {
    let now = Instant::now();
    let mut rooms = Rooms::default();
    let _ = rooms.arrive(Room(1), wanted(5), now);
    let _ = rooms.enter(ROOM, OURS, PROMPT, now);
    let _ = rooms.arrive(ROOM, wanted(5), now);
    let mut failed = Vec::new();
    rooms.unlink(8, |slot, _| failed.push(slot));
    assert!(failed.is_empty());
    rooms.unlink(9, |slot, _| failed.push(slot));
    assert_eq!(failed, [OURS]);
    assert_eq!(
        rooms.enter(Room(1), Slot { id: SlotId(9), ..OURS }, PROMPT, now),
        EnterOutcome::Waits
    );
}

/// If a decode worker has all KV, it can end or change its role before this side has read its Done.
#[test]
fn a_dead_link_reports_that_the_kv_has_arrived() {
    let now = Instant::now();
    let mut rooms = Rooms::default();
    let _ = rooms.enter(ROOM, OURS, PROMPT, now);
    let _ = rooms.arrive(ROOM, wanted(5), now);
    assert_eq!(rooms.done(ROOM, 9, theirs(5)), Some(OURS));
    let mut parted = Vec::new();
    rooms.unlink(9, |slot, is_told| parted.push((slot, is_told)));
    assert_eq!(parted, [(OURS, true)]);
    assert_eq!(rooms.partner(OURS), None, "no other end to inform");
    rooms.leave(OURS, true, now);
    assert_eq!((rooms.open(), rooms.unconfirmed()), (0, 0));
}

/// For a source that writes into the destination's pages. With other transports, pages are freed
/// without its report.
fn written(slot: u32) -> DestinationRequest<u8> {
    DestinationRequest {
        place: Some(DestinationPages { pages: [PageId(3)].into(), first: 0 }),
        ..wanted(slot)
    }
}

#[test]
fn an_abort_during_writes_is_answered_when_the_writes_have_ended() {
    let now = Instant::now();
    let theirs = Slot { id: SlotId(5), generation: written(5).target.generation };
    // The request ends before the Abort, or after it.
    for abort_first in [true, false] {
        let mut rooms = Rooms::default();
        let _ = rooms.enter(ROOM, OURS, PROMPT, now);
        let _ = rooms.arrive(ROOM, written(5), now);
        if abort_first {
            assert_eq!(rooms.abort(ROOM, 9, theirs, now), AbortOutcome::Fail(OURS));
        }
        rooms.leave(OURS, false, now);
        if !abort_first {
            assert_eq!(rooms.abort(ROOM, 9, theirs, now), AbortOutcome::Waits);
        }
        assert_eq!(rooms.enter(ROOM, OURS, PROMPT, now), EnterOutcome::Refused(Cause::OtherLeg));
        assert_eq!(rooms.withdrawn(OURS, now), Some((ROOM, written(5))));
        assert_eq!(rooms.abort(ROOM, 9, theirs, now), AbortOutcome::Answer);
        assert_eq!(rooms.withdrawn(OURS, now), None);
        assert_eq!(rooms.open(), 0);
    }
}

#[test]
fn an_abort_after_the_end_of_the_writes_is_answered_at_once() {
    let now = Instant::now();
    let theirs = Slot { id: SlotId(5), generation: written(5).target.generation };
    for withdrawn in [true, false] {
        let mut rooms = Rooms::default();
        let _ = rooms.enter(ROOM, OURS, PROMPT, now);
        let _ = rooms.arrive(ROOM, written(5), now);
        if withdrawn {
            assert_eq!(rooms.withdrawn(OURS, now), None, "no answer is due");
            assert_eq!(rooms.abort(ROOM, 9, theirs, now), AbortOutcome::Answer);
        }
        rooms.leave(OURS, !withdrawn, now);
        assert_eq!(rooms.abort(ROOM, 9, theirs, now), AbortOutcome::Answer);
    }
}

#[test]
fn writes_that_drained_on_a_dead_link_need_no_answer() {
    let now = Instant::now();
    let mut rooms = Rooms::default();
    let _ = rooms.enter(ROOM, OURS, PROMPT, now);
    let _ = rooms.arrive(ROOM, written(5), now);
    rooms.leave(OURS, false, now);
    rooms.unlink(9, |slot, _| panic!("{slot:?} is over"));
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
    // Without a lease the slot is free before the mover has handled its Cancel.
    let next = Slot { generation: Generation(OURS.generation.0 + 1), ..OURS };
    assert_eq!(rooms.enter(Room(1), next, PROMPT, now), EnterOutcome::Waits);
    assert_eq!(rooms.abort(ROOM, 9, theirs(5), now), AbortOutcome::Waits);
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
    rooms.unlink(9, |_, _| ());
    assert_eq!(rooms.partner(OURS), None);
    assert_eq!(rooms.withdrawn(OURS, now), None);
    rooms.leave(OURS, false, now);
    assert_eq!(rooms.open(), 0);
}

fn interest(slot: u32) -> DestinationRequest<u8> {
    DestinationRequest { place: None, ..wanted(slot) }
}

#[test]
fn an_interest_meets_its_request_and_its_destination_takes_its_place() {
    let now = Instant::now();
    for early in [false, true] {
        let mut rooms = Rooms::default();
        if early {
            assert_eq!(rooms.arrive(ROOM, interest(5), now), ArriveOutcome::Kept);
            let met = MatchedLegs { slot: OURS, wanted: interest(5) };
            assert_eq!(rooms.enter(ROOM, OURS, PROMPT, now), EnterOutcome::Meets(met));
        } else {
            assert_eq!(rooms.enter(ROOM, OURS, PROMPT, now), EnterOutcome::Waits);
            let met = MatchedLegs { slot: OURS, wanted: interest(5) };
            assert_eq!(rooms.arrive(ROOM, interest(5), now), ArriveOutcome::Meets(met));
        }
        assert_eq!(
            rooms.arrive(ROOM, interest(5), now),
            ArriveOutcome::Refused(Cause::Refused),
            "again"
        );
        assert_eq!(
            rooms.arrive(ROOM, wanted(6), now),
            ArriveOutcome::Refused(Cause::Refused),
            "another slot"
        );
        let other = DestinationRequest { link: 8, ..wanted(5) };
        assert_eq!(
            rooms.arrive(ROOM, other, now),
            ArriveOutcome::Refused(Cause::Refused),
            "another link"
        );
        let met = MatchedLegs { slot: OURS, wanted: written(5) };
        assert_eq!(rooms.arrive(ROOM, written(5), now), ArriveOutcome::Meets(met.clone()));
        assert_eq!(rooms.partner(OURS), Some((ROOM, met.wanted)));
        assert_eq!(
            rooms.arrive(ROOM, written(5), now),
            ArriveOutcome::Refused(Cause::Refused),
            "again"
        );
    }
}

#[test]
fn a_destination_may_overtake_the_request_of_its_interest() {
    let now = Instant::now();
    let mut rooms = Rooms::default();
    assert_eq!(rooms.arrive(ROOM, interest(5), now), ArriveOutcome::Kept);
    assert_eq!(rooms.arrive(ROOM, written(5), now), ArriveOutcome::Kept);
    let met = MatchedLegs { slot: OURS, wanted: written(5) };
    assert_eq!(rooms.enter(ROOM, OURS, PROMPT, now), EnterOutcome::Meets(met));
}

#[test]
fn an_interest_ends_like_a_destination() {
    let now = Instant::now();
    let theirs = Slot { id: SlotId(5), generation: wanted(5).target.generation };
    let mut rooms = Rooms::default();
    let _ = rooms.arrive(ROOM, interest(5), now);
    assert_eq!(rooms.abort(ROOM, 9, theirs, now), AbortOutcome::Answer, "not computed yet");
    assert_eq!(rooms.enter(ROOM, OURS, PROMPT, now), EnterOutcome::Refused(Cause::OtherLeg));

    let mut rooms = Rooms::default();
    let _ = rooms.arrive(ROOM, interest(5), now);
    let _ = rooms.enter(ROOM, OURS, PROMPT, now);
    assert_eq!(
        rooms.abort(ROOM, 9, theirs, now),
        AbortOutcome::Stop(OURS),
        "answered in either order"
    );
    rooms.leave(OURS, false, now);
    assert_eq!(rooms.abort(ROOM, 9, theirs, now), AbortOutcome::Answer, "asked again");
    assert_eq!(rooms.open(), 0, "nothing was ever written: nothing drains");
    assert_eq!(rooms.arrive(ROOM, written(5), now), ArriveOutcome::Refused(Cause::OtherLeg));

    let mut rooms = Rooms::default();
    let _ = rooms.arrive(ROOM, interest(5), now);
    let _ = rooms.enter(ROOM, OURS, PROMPT, now);
    let mut failed = Vec::new();
    rooms.unlink(9, |slot, _| failed.push(slot));
    assert_eq!(failed, [OURS]);
}

/// The destination confirms the written KV before or after the request is over here.
#[test]
fn written_kv_is_unconfirmed_until_its_destination_confirms_it() {
    let now = Instant::now();
    let over = |before: bool| {
        let mut rooms = Rooms::default();
        let _ = rooms.enter(ROOM, OURS, PROMPT, now);
        let _ = rooms.arrive(ROOM, written(5), now);
        if before {
            assert_eq!(rooms.done(ROOM, 9, theirs(5)), Some(OURS));
        }
        rooms.leave(OURS, true, now);
        rooms
    };
    assert_eq!(over(true).unconfirmed(), 0);
    let mut rooms = over(false);
    assert_eq!(rooms.unconfirmed(), 1);
    assert_eq!((rooms.done(ROOM, 8, theirs(5)), rooms.done(ROOM, 9, theirs(6))), (None, None));
    assert_eq!(rooms.unconfirmed(), 1, "another link and another slot");
    assert_eq!((rooms.done(ROOM, 9, theirs(5)), rooms.unconfirmed()), (None, 0));
    let mut rooms = over(false);
    rooms.unlink(9, |_, _| ());
    assert_eq!(rooms.unconfirmed(), 0, "the link is gone");
    let mut rooms = over(false);
    assert_eq!(
        (rooms.abort(ROOM, 9, theirs(5), now), rooms.unconfirmed()),
        (AbortOutcome::Answer, 0)
    );
}

#[test]
fn a_room_with_writes_under_way_is_unconfirmed_until_they_have_ended() {
    let now = Instant::now();
    let mut rooms = Rooms::default();
    let _ = rooms.enter(ROOM, OURS, PROMPT, now);
    let _ = rooms.arrive(ROOM, written(5), now);
    rooms.leave(OURS, false, now);
    assert_eq!(rooms.unconfirmed(), 1);
    assert!(rooms.withdrawn(OURS, now).is_none(), "no Abort is answered");
    assert_eq!(rooms.unconfirmed(), 0);
}

/// The destination aborts between the last post and the end of the request here.
#[test]
fn a_destination_that_has_aborted_confirms_nothing() {
    let now = Instant::now();
    let mut rooms = Rooms::default();
    rooms.enter(ROOM, OURS, PROMPT, now);
    rooms.arrive(ROOM, written(5), now);
    assert_eq!(rooms.abort(ROOM, 9, theirs(5), now), AbortOutcome::Fail(OURS));
    assert!(rooms.withdrawn(OURS, now).is_some(), "all is posted, and the Abort is answered");
    rooms.leave(OURS, true, now);
    assert_eq!((rooms.open(), rooms.unconfirmed()), (0, 0));
}

#[test]
fn invariants_find_an_ended_room_that_is_forgotten() {
    let now = Instant::now();
    let mut rooms = Rooms::default();
    rooms.enter(ROOM, OURS, PROMPT, now);
    rooms.arrive(ROOM, wanted(5), now);
    rooms.invariants();
    let message = panic_of("ended room is forgotten", || {
        rooms.leave(OURS, true, now);
        assert_eq!(rooms.unconfirmed(), 1);
        rooms.invariants();
    });
    assert!(message.contains("only a room that is over can be unconfirmed"), "{message}");
}

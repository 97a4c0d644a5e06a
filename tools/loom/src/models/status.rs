//! The status table: competing moves, stale moves, and the data that a reader of a state can use.

use crate::cause::Cause;
use crate::ids::{Generation, SlotId};
use crate::stdx::sync::{AtomicU64, Ordering};
use crate::transfer::status::{Move, State, StatusTable, Unmoved};
use loom::sync::Arc;
use loom::thread;

const SLOT: SlotId = SlotId(0);

/// A slot in WaitingForInput.
fn granted() -> (Arc<StatusTable>, Generation) {
    let table = Arc::new(StatusTable::new(1));
    let generation = table.open(SLOT);
    table.advance(SLOT, generation, Move::Grant).unwrap();
    (table, generation)
}

/// The mover ends the last lane while `ctl` and `engine` mark the slot Failed. One of them makes
/// the last move. Each knows whether it was the one, and the word does not change afterwards.
pub fn one_end_wins() {
    let (table, generation) = granted();
    let end = |step: Move| {
        let table = table.clone();
        thread::spawn(move || {
            table.advance(SLOT, generation, step).is_ok_and(|after| after.state.is_terminal())
        })
    };
    let threads = [end(Move::Fail(Cause::Deadline)), end(Move::Fail(Cause::PeerLost))];
    let finished = table.advance(SLOT, generation, Move::EndLane { lane: 0, all: 1 }).is_ok();
    let [deadline, lost] = threads.map(|thread| thread.join().unwrap());
    let status = table.load(SLOT);
    let expected = match (finished, deadline, lost) {
        (true, false, false) => (State::Success, None),
        (false, true, false) => (State::Failed, Some(Cause::Deadline)),
        (false, false, true) => (State::Failed, Some(Cause::PeerLost)),
        ends => panic!("not exactly one end: {ends:?}"),
    };
    assert_eq!((status.state, status.cause), expected);
}

/// A part of the KV lands, then its lane ends. Returns whether the move completed the mask.
fn land(table: &StatusTable, generation: Generation, parts: &Parts, lane: u8) -> bool {
    parts[usize::from(lane)].store(1, Ordering::Relaxed);
    let after = table.advance(SLOT, generation, Move::EndLane { lane, all: 0b11 }).unwrap();
    after.state == State::Success
}

type Parts = [AtomicU64; 2];

fn all_there(parts: &Parts) -> bool {
    parts.iter().all(|part| part.load(Ordering::Relaxed) == 1)
}

/// A reader of Success finds every part, also that of a lane that did not end last.
pub fn a_reader_of_success_finds_every_part() {
    let (table, generation) = granted();
    let parts: Arc<Parts> = Arc::default();
    land(&table, generation, &parts, 0);
    let reader = thread::spawn({
        let (table, parts) = (table.clone(), parts.clone());
        move || {
            if table.load(SLOT).state == State::Success {
                assert!(all_there(&parts), "Success shows before all parts have landed");
            }
        }
    });
    assert!(land(&table, generation, &parts, 1));
    reader.join().unwrap();
}

/// Two movers with one lane each. Exactly one completes the mask, and that mover finds the parts of
/// both.
pub fn the_mover_that_completes_finds_every_part() {
    let (table, generation) = granted();
    let parts: Arc<Parts> = Arc::default();
    let mover = |lane| {
        let (table, parts) = (table.clone(), parts.clone());
        thread::spawn(move || {
            let completed = land(&table, generation, &parts, lane);
            assert!(!completed || all_there(&parts), "completed without a part");
            completed
        })
    };
    let completed = [mover(0), mover(1)].map(|mover| mover.join().unwrap());
    assert!(completed[0] != completed[1], "{completed:?}");
    assert_eq!(table.load(SLOT).state, State::Success);
}

/// A deadline of the previous use comes late, while `ctl` opens the slot again.
pub fn a_stale_move_leaves_the_next_use_alone() {
    let (table, old) = granted();
    table.advance(SLOT, old, Move::Finish).unwrap();
    let late = thread::spawn({
        let table = table.clone();
        move || table.advance(SLOT, old, Move::Fail(Cause::Deadline))
    });
    let new = table.open(SLOT);
    let status = table.advance(SLOT, new, Move::Grant).unwrap();
    assert_eq!((status.state, status.cause), (State::WaitingForInput, None));
    let late = late.join().unwrap();
    assert!(matches!(late, Err(Unmoved::Stale | Unmoved::Forbidden(State::Success))), "{late:?}");
    assert!(table.is_open(SLOT, new));
}

//! The status table: one atomic word per slot with the state of its hand-off.
//!
//! Word: generation 24 | state 3 | cause 5 | lanes 32.
//! Thread: any; each move names the thread that can make it ([`Move`]).
//! Invariants: every move is one compare-exchange; readers only load; a terminal state never
//! changes. A move of a stale generation fails and changes nothing. A state is set before the
//! message or post that depends on it is sent.
//! Not here: rooms (the manager compares them), deadlines, leases.

use crate::cause::Cause;
use crate::ids::{Generation, SlotId};
use crate::stdx::sync::{AtomicU64, Ordering};

/// State of a hand-off, with SGLang's numbers. The lowest state of all ranks is the state of the
/// hand-off.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
#[repr(u8)]
pub enum State {
    /// Ended without complete KV; the word carries the cause.
    Failed = 0,
    /// The sender or receiver exists, but nothing has come from the other side.
    Bootstrapping = 1,
    /// Source: a checked Destination has arrived. Destination: pages are leased.
    WaitingForInput = 2,
    /// Bytes are offered, posted or arriving.
    Transferring = 3,
    /// If the source writes: all lanes are complete, or Done came and the session ended. If the
    /// destination copies: the copy is proven, or Done came.
    Success = 4,
}

impl State {
    /// All states in order of their numbers.
    pub const ALL: [State; 5] = [
        State::Failed,
        State::Bootstrapping,
        State::WaitingForInput,
        State::Transferring,
        State::Success,
    ];

    /// Whether the state is final.
    pub const fn is_terminal(self) -> bool {
        matches!(self, State::Failed | State::Success)
    }
}

/// A step of a hand-off, with the thread that can make it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Move {
    /// Source: `ctl`, after Destination arrived and was checked. Destination: `engine`, after pages
    /// were leased and before Destination is sent.
    Grant,
    /// Source: `move`/`post`, before the first post or offer. Destination: `move`/`poll`, at the
    /// first notice.
    Start,
    /// `move`/`poll`: lane `0..32` has ended; the lane that completes `all` makes it Success.
    EndLane {
        /// The lane.
        lane: u8,
        /// Mask of all lanes of the session.
        all: u32,
    },
    /// `move`/`poll`. Destination: the copy is proven. Source: Done came; if the source writes,
    /// also the session has ended.
    Finish,
    /// Any thread that notices the failure.
    Fail(Cause),
}

/// An unpacked status word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotStatus {
    /// The use of the slot.
    pub generation: Generation,
    /// The state of the hand-off.
    pub state: State,
    /// The cause, if `Failed`.
    pub cause: Option<Cause>,
    /// Lanes that have ended.
    pub lanes: u32,
}

/// Why a move was refused; nothing changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unmoved {
    /// The slot is in use for another hand-off.
    Stale,
    /// The transition table has no such move from this state.
    Forbidden(State),
}

/// The transition table: the state after `step` in `state`, or `None` if the move is not allowed.
/// Only this function decides transitions.
pub const fn transition(state: State, step: Move, lanes: u32) -> Option<State> {
    use State::{Bootstrapping, Failed, Success, Transferring, WaitingForInput};
    match (state, step) {
        (Failed | Success, _) => None,
        (_, Move::Fail(_)) => Some(Failed),
        (Bootstrapping, Move::Grant) => Some(WaitingForInput),
        (WaitingForInput, Move::Start) => Some(Transferring),
        // The first notice can be the last, so the destination can skip Transferring.
        (WaitingForInput | Transferring, Move::EndLane { lane, all }) => {
            if (lanes | 1 << lane) & all == all { Some(Success) } else { Some(Transferring) }
        }
        (WaitingForInput | Transferring, Move::Finish) => Some(Success),
        _ => None,
    }
}

/// Generations have 24 bits and start at 1; 0 means that the slot was never used.
const GENERATION_BITS: u32 = 24;

/// The status words of one worker, by slot.
#[derive(Debug)]
pub struct StatusTable {
    words: Box<[AtomicU64]>,
}

impl StatusTable {
    /// A table of `slots` unused slots (terminal, generation 0).
    pub fn new(slots: usize) -> StatusTable {
        StatusTable { words: (0..slots).map(|_| AtomicU64::new(0)).collect() }
    }

    /// The words by slot, for readers.
    pub fn words(&self) -> &[AtomicU64] {
        &self.words
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.words.len()
    }

    /// Starts a new use of the slot, in `Bootstrapping` with the next generation. Thread: `ctl`,
    /// which owns the free slots. The last use of the slot has ended and its lease is back.
    pub fn open(&self, slot: SlotId) -> Generation {
        let word = &self.words[slot.index()];
        let last = SlotStatus::unpack(word.load(Ordering::Acquire));
        let next = (last.generation.0 + 1) & ((1 << GENERATION_BITS) - 1);
        let generation = Generation(next.max(1));
        let fresh = SlotStatus { generation, state: State::Bootstrapping, cause: None, lanes: 0 };
        word.store(fresh.pack(), Ordering::Release);
        generation
    }

    /// The slot's current status.
    #[inline]
    pub fn load(&self, slot: SlotId) -> SlotStatus {
        SlotStatus::unpack(self.words[slot.index()].load(Ordering::Acquire))
    }

    /// Whether this use of the slot is still open.
    pub fn is_open(&self, slot: SlotId, generation: Generation) -> bool {
        let status = self.load(slot);
        status.generation == generation && !status.state.is_terminal()
    }

    /// Makes one move. Returns the status after it, or why nothing changed.
    pub fn advance(
        &self,
        slot: SlotId,
        generation: Generation,
        step: Move,
    ) -> Result<SlotStatus, Unmoved> {
        let word = &self.words[slot.index()];
        let mut seen = word.load(Ordering::Acquire);
        loop {
            let before = SlotStatus::unpack(seen);
            if before.generation != generation {
                return Err(Unmoved::Stale);
            }
            let Some(state) = transition(before.state, step, before.lanes) else {
                return Err(Unmoved::Forbidden(before.state));
            };
            let after = before.after(state, step);
            match word.compare_exchange_weak(
                seen,
                after.pack(),
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => return Ok(after),
                Err(now) => seen = now,
            }
        }
    }
}

impl SlotStatus {
    fn after(self, state: State, step: Move) -> SlotStatus {
        match step {
            Move::EndLane { lane, .. } => {
                SlotStatus { state, lanes: self.lanes | 1 << lane, ..self }
            }
            Move::Fail(cause) => SlotStatus { state, cause: Some(cause), ..self },
            Move::Grant | Move::Start | Move::Finish => SlotStatus { state, ..self },
        }
    }

    const fn pack(self) -> u64 {
        let cause = match self.cause {
            Some(cause) => cause as u64,
            None => 0,
        };
        (self.generation.0 as u64) << 40
            | (self.state as u64) << 37
            | cause << 32
            | self.lanes as u64
    }

    fn unpack(word: u64) -> SlotStatus {
        let state = State::ALL[(word >> 37 & 7).min(4) as usize];
        let cause = (word >> 32 & 31) as u8;
        SlotStatus {
            generation: Generation((word >> 40) as u32),
            state,
            cause: (cause != 0).then(|| Cause::from_number(cause)),
            lanes: word as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOT: SlotId = SlotId(0);

    fn steps() -> [(&'static str, Move); 6] {
        [
            ("grant", Move::Grant),
            ("start", Move::Start),
            ("end a lane", Move::EndLane { lane: 0, all: 0b11 }),
            ("end the last lane", Move::EndLane { lane: 0, all: 0b01 }),
            ("finish", Move::Finish),
            ("fail", Move::Fail(Cause::PeerLost)),
        ]
    }

    /// The full matrix. A change here changes the protocol: check it against the model.
    #[test]
    fn every_move_in_every_state() {
        let mut table = String::new();
        for state in State::ALL {
            for (name, step) in steps() {
                let next =
                    transition(state, step, 0).map_or("-".into(), |next| format!("{next:?}"));
                table += &format!("{state:?} + {name} = {next}\n");
            }
        }
        let expected = "\
Failed + grant = -
Failed + start = -
Failed + end a lane = -
Failed + end the last lane = -
Failed + finish = -
Failed + fail = -
Bootstrapping + grant = WaitingForInput
Bootstrapping + start = -
Bootstrapping + end a lane = -
Bootstrapping + end the last lane = -
Bootstrapping + finish = -
Bootstrapping + fail = Failed
WaitingForInput + grant = -
WaitingForInput + start = Transferring
WaitingForInput + end a lane = Transferring
WaitingForInput + end the last lane = Success
WaitingForInput + finish = Success
WaitingForInput + fail = Failed
Transferring + grant = -
Transferring + start = -
Transferring + end a lane = Transferring
Transferring + end the last lane = Success
Transferring + finish = Success
Transferring + fail = Failed
Success + grant = -
Success + start = -
Success + end a lane = -
Success + end the last lane = -
Success + finish = -
Success + fail = -
";
        assert_eq!(table, expected);
    }

    #[test]
    fn words_keep_every_field() {
        for state in State::ALL {
            for cause in [None, Some(Cause::ClientGone), Some(Cause::Internal)] {
                let status = SlotStatus {
                    generation: Generation(0xabcdef),
                    state,
                    cause,
                    lanes: 0x8000_0001,
                };
                assert_eq!(SlotStatus::unpack(status.pack()), status);
            }
        }
    }

    #[test]
    fn a_stale_generation_changes_nothing() {
        let table = StatusTable::new(1);
        let old = table.open(SLOT);
        table.advance(SLOT, old, Move::Fail(Cause::Deadline)).unwrap();
        let new = table.open(SLOT);
        assert_ne!(old, new);
        assert_eq!(table.advance(SLOT, old, Move::Grant), Err(Unmoved::Stale));
        assert_eq!(table.load(SLOT).state, State::Bootstrapping);
    }

    #[test]
    fn a_terminal_state_stays_and_keeps_its_first_cause() {
        let table = StatusTable::new(1);
        let generation = table.open(SLOT);
        table.advance(SLOT, generation, Move::Fail(Cause::Deadline)).unwrap();
        let again = table.advance(SLOT, generation, Move::Fail(Cause::PeerLost));
        assert_eq!(again, Err(Unmoved::Forbidden(State::Failed)));
        assert_eq!(table.load(SLOT).cause, Some(Cause::Deadline));
    }

    #[test]
    fn lanes_add_up_in_any_order() {
        let table = StatusTable::new(1);
        let generation = table.open(SLOT);
        table.advance(SLOT, generation, Move::Grant).unwrap();
        for lane in [2, 0, 2] {
            let status =
                table.advance(SLOT, generation, Move::EndLane { lane, all: 0b111 }).unwrap();
            assert_eq!(status.state, State::Transferring);
        }
        let status =
            table.advance(SLOT, generation, Move::EndLane { lane: 1, all: 0b111 }).unwrap();
        assert_eq!((status.state, status.lanes), (State::Success, 0b111));
    }

    #[test]
    fn generations_wrap_past_zero() {
        let table = StatusTable::new(1);
        let last = SlotStatus {
            generation: Generation((1 << 24) - 1),
            state: State::Success,
            cause: None,
            lanes: 0,
        };
        table.words[0].store(last.pack(), Ordering::Relaxed);
        assert_eq!(table.open(SLOT), Generation(1));
    }
}

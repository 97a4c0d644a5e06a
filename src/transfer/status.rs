//! The status table: one atomic word per slot that tells how far a hand-off is.
//!
//! Word: generation 24 | state 3 | cause 5 | lanes 32. Thread: any; each move names the thread that
//! may make it ([`Move`]). Invariants: every move is one compare-exchange; readers only load; a
//! terminal state never changes; a move of a stale generation fails harmlessly. A state is set before
//! the message or post that depends on it leaves.
//! Not here: rooms (the manager compares them), deadlines, leases.

use crate::cause::Cause;
use crate::ids::{Generation, SlotId};
use crate::stdx::sync::{AtomicU64, Ordering};

/// How far a hand-off is, in SGLang's numbers: the least over ranks is the state of the whole.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
#[repr(u8)]
pub enum State {
    /// Ended without its bytes; the word carries the cause.
    Failed = 0,
    /// Sender or receiver made, the other side not heard of.
    Bootstrapping = 1,
    /// Source: a checked Destination is here. Destination: pages are leased.
    WaitingForInput = 2,
    /// Bytes are offered, posted or arriving.
    Transferring = 3,
    /// Pushed: all lanes complete, or Done seen and the session over. Pulled: copied and proven, or Done seen.
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

    /// Whether nothing follows.
    pub const fn is_terminal(self) -> bool {
        matches!(self, State::Failed | State::Success)
    }
}

/// A step of a hand-off, with the thread that may make it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Move {
    /// Source: `ctl`, Destination arrived and checked. Destination: `engine`, pages leased, before
    /// Destination leaves.
    Grant,
    /// Source: `move`/`post`, before the first post or offer. Destination: `move`/`poll`, first notice.
    Start,
    /// `move`/`poll`: lane `0..32` has ended; the one that completes `all` succeeds.
    EndLane {
        /// The lane.
        lane: u8,
        /// Mask of all lanes of the session.
        all: u32,
    },
    /// `move`/`poll`, pulled: the copy is proven (destination), Done was seen (source; pushed, too, where its session ends).
    Finish,
    /// Whoever learns of it.
    Fail(Cause),
}

/// A status word taken apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Status {
    /// Which use of the slot.
    pub generation: Generation,
    /// How far.
    pub state: State,
    /// Why, when `Failed`.
    pub cause: Option<Cause>,
    /// Lanes that have ended.
    pub lanes: u32,
}

/// Why a move was not made; harmless.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unmoved {
    /// The slot was given out anew.
    Stale,
    /// The table has no such move from the state found.
    Forbidden(State),
}

/// The transition table: the state after `step` in `state`, or none. The only place that decides.
pub const fn transition(state: State, step: Move, lanes: u32) -> Option<State> {
    use State::{Bootstrapping, Failed, Success, Transferring, WaitingForInput};
    match (state, step) {
        (Failed | Success, _) => None,
        (_, Move::Fail(_)) => Some(Failed),
        (Bootstrapping, Move::Grant) => Some(WaitingForInput),
        (WaitingForInput, Move::Start) => Some(Transferring),
        // The first notice may be the last: Transferring may be skipped at the destination.
        (WaitingForInput | Transferring, Move::EndLane { lane, all }) => {
            if (lanes | 1 << lane) & all == all { Some(Success) } else { Some(Transferring) }
        }
        (WaitingForInput | Transferring, Move::Finish) => Some(Success),
        _ => None,
    }
}

/// Generations have 24 bits and start at 1; 0 is a slot never used.
const GENERATION_BITS: u32 = 24;

/// The words of one worker, by slot.
#[derive(Debug)]
pub struct StatusTable {
    words: Box<[AtomicU64]>,
}

impl StatusTable {
    /// A table of `slots` unused slots (terminal, generation 0).
    pub fn new(slots: usize) -> StatusTable {
        StatusTable { words: (0..slots).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.words.len()
    }

    /// Gives the slot out anew, in `Bootstrapping` under the next generation. Thread: `ctl`, which
    /// owns the free slots; the slot's last use has ended and its lease is back.
    pub fn open(&self, slot: SlotId) -> Generation {
        let word = &self.words[slot.index()];
        let last = Status::unpack(word.load(Ordering::Acquire));
        let next = (last.generation.0 + 1) & ((1 << GENERATION_BITS) - 1);
        let generation = Generation(next.max(1));
        let fresh = Status { generation, state: State::Bootstrapping, cause: None, lanes: 0 };
        word.store(fresh.pack(), Ordering::Release);
        generation
    }

    /// The slot's status now.
    #[inline]
    pub fn load(&self, slot: SlotId) -> Status {
        Status::unpack(self.words[slot.index()].load(Ordering::Acquire))
    }

    /// Whether this use of the slot has not ended.
    pub fn is_open(&self, slot: SlotId, generation: Generation) -> bool {
        let status = self.load(slot);
        status.generation == generation && !status.state.is_terminal()
    }

    /// Makes one move. Gives the status after it, or why nothing changed.
    pub fn advance(
        &self,
        slot: SlotId,
        generation: Generation,
        step: Move,
    ) -> Result<Status, Unmoved> {
        let word = &self.words[slot.index()];
        let mut seen = word.load(Ordering::Acquire);
        loop {
            let before = Status::unpack(seen);
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

impl Status {
    fn after(self, state: State, step: Move) -> Status {
        match step {
            Move::EndLane { lane, .. } => Status { state, lanes: self.lanes | 1 << lane, ..self },
            Move::Fail(cause) => Status { state, cause: Some(cause), ..self },
            Move::Grant | Move::Start | Move::Finish => Status { state, ..self },
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

    fn unpack(word: u64) -> Status {
        let state = State::ALL[(word >> 37 & 7).min(4) as usize];
        let cause = (word >> 32 & 31) as u8;
        Status {
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

    /// The full matrix. A change here is a change of the protocol: see the checked model.
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
                let status =
                    Status { generation: Generation(0xabcdef), state, cause, lanes: 0x8000_0001 };
                assert_eq!(Status::unpack(status.pack()), status);
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
        let last = Status {
            generation: Generation((1 << 24) - 1),
            state: State::Success,
            cause: None,
            lanes: 0,
        };
        table.words[0].store(last.pack(), Ordering::Relaxed);
        assert_eq!(table.open(SLOT), Generation(1));
    }
}

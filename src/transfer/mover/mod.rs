//! The thread that moves bytes or posts them: both halves in one thread, one [`Mover`] over all
//! workers of the process. How it parks: [`crate::transfer::waiter`].
//!
//! Thread: `move`. Owns: live leases of transfers, and alone may end them. Never allocates after a session
//! is set up, never logs per block.

pub mod destination;
pub mod source;

use crate::cause::Cause;
use crate::ids::{Generation, Room, SessionGeneration, SlotId};
use crate::stdx::bell::Bell;
use crate::transfer::command::{LeaseEnd, SessionId};
use crate::transfer::status::StatusTable;
use crate::transfer::waiter::Turns;
use crossbeam_channel as channel;
use destination::DestinationMover;
use source::SourceMover;
use std::sync::Arc;

/// From a mover to `ctl`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Report {
    /// Source: Cancel was taken and everything posted has completed; nothing will be posted.
    Withdrawn {
        /// The slot.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
    },
    /// Destination: everything is here and proven; the source may be told Done.
    Arrived {
        /// The slot.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
        /// The attempt.
        room: Room,
        /// From where.
        session: SessionId,
    },
    /// Destination: the room failed here (void copy, nonsense from the peer).
    Failed {
        /// The slot.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
        /// Why.
        cause: Cause,
    },
    /// The session's way is gone.
    Lost {
        /// Which.
        session: SessionId,
        /// As it was opened: the index may be another session's by now.
        generation: SessionGeneration,
        /// Why.
        cause: Cause,
    },
}

/// A mover's ends of one worker's rings; `C` is what it is told.
#[derive(Debug)]
pub struct Links<C> {
    /// From `ctl` and `engine`.
    pub commands: channel::Receiver<C>,
    /// Leases back to `engine`.
    pub ends: channel::Sender<LeaseEnd>,
    /// To `ctl`.
    pub reports: channel::Sender<Report>,
    /// The engine's.
    pub engine: Arc<Bell>,
    /// `ctl`'s.
    pub ctl: Arc<Bell>,
    /// The worker's slots.
    pub status: Arc<StatusTable>,
}

/// All transfers of this process.
#[derive(Debug)]
pub struct Mover {
    /// Prefill workers.
    pub sources: Vec<SourceMover>,
    /// Decode workers.
    pub destinations: Vec<DestinationMover>,
}

impl Turns for Mover {
    fn step(&mut self) -> bool {
        let mut moved = false;
        for source in &mut self.sources {
            moved |= source.step();
        }
        for destination in &mut self.destinations {
            moved |= destination.step();
        }
        moved
    }

    fn park(&mut self, parked: bool) {
        for source in &mut self.sources {
            source.park(parked);
        }
        for destination in &mut self.destinations {
            destination.park(parked);
        }
    }
}

//! The thread that moves bytes or posts them. One [`Mover`] serves all workers of the process, both
//! as source and as destination. [`crate::transfer::event_loop`] describes how it parks.
//!
//! Owns: the live leases of transfers; only a mover can end them.
//! Thread: `move`.
//! Invariants: it does not allocate after a session is set up, and it does not log per page.

pub mod destination;
pub mod source;

use crate::cause::Cause;
use crate::ids::{Generation, Room, SessionGeneration, SlotId};
use crate::stdx::event_count::EventCount;
use crate::transfer::command::LeaseEnd;
use crate::transfer::event_loop::LoopTask;
use crate::transfer::status::StatusTable;
use crate::transfer::target::SessionId;
use crossbeam_channel as channel;
use destination::DestinationMover;
use source::SourceMover;
use std::sync::Arc;

/// A report from a mover to `ctl`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Report {
    /// Source: Cancel was handled and everything posted has completed; nothing more will be posted.
    Withdrawn {
        /// The slot.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
    },
    /// Destination: everything has arrived and is proven; Done can be sent to the source.
    Arrived {
        /// The slot.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
        /// The attempt.
        room: Room,
        /// The session that brought the KV.
        session: SessionId,
    },
    /// Destination: the room failed here, because a copy is void or the peer sent invalid data.
    Failed {
        /// The slot.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
        /// The cause.
        cause: Cause,
    },
    /// The session's transport is lost.
    Lost {
        /// The session.
        session: SessionId,
        /// Its generation at Open, because the index can belong to another session by now.
        generation: SessionGeneration,
        /// The cause.
        cause: Cause,
    },
}

/// A mover's ends of one worker's rings; `C` is its command type.
#[derive(Debug)]
pub struct Links<C> {
    /// From `ctl` and `engine`.
    pub commands: channel::Receiver<C>,
    /// Leases back to `engine`.
    pub ends: channel::Sender<LeaseEnd>,
    /// To `ctl`.
    pub reports: channel::Sender<Report>,
    /// Wakes the engine.
    pub engine: Arc<EventCount>,
    /// Wakes `ctl`.
    pub ctl: Arc<EventCount>,
    /// The worker's status table.
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

impl LoopTask for Mover {
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

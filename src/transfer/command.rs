//! What movers are told and what they answer: the bounded rings between `ctl`, `engine` and `move`.
//!
//! Invariant: per slot at most one Begin (or Expect), one Cancel, one Done and one Quiet are in a ring at a time,
//! and a scheduler leaves room for a Cancel and a Quiet of each slot when it hands over chunks, so these always fit.

use crate::ids::{Generation, Room, SessionGeneration, SlotId};
use crate::kv::lease::{Ended, Lease};
use crate::transfer::aux::AuxRecord;
use crate::transfer::transport::{Arrival, DestinationBinding, SourceBinding};
use std::ops::Range;

/// Index of a session in a mover, given out by the manager of the same side.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct SessionId(pub u32);

impl SessionId {
    /// A source's session with nobody: what is handed over there goes nowhere. It is always open, and no
    /// manager gives it out.
    pub const NOBODY: SessionId = SessionId(u32::MAX);
}

/// The destination's slot as it named it in Destination.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Target {
    /// The session it belongs to.
    pub session: SessionId,
    /// Slot of the destination's status table.
    pub slot: SlotId,
    /// Its generation there.
    pub generation: Generation,
    /// The attempt.
    pub room: Room,
    /// Tokens of the prompt's beginning that the destination holds already, and wants none of.
    pub prefix: u32,
}

/// To the mover of a prefill worker.
#[derive(Debug)]
pub enum SourceCommand {
    /// `ctl`: a session is set up.
    Open {
        /// Its index.
        session: SessionId,
        /// Which use of the index.
        generation: SessionGeneration,
        /// The transport's half.
        binding: Box<SourceBinding>,
    },
    /// `ctl`: the session is void; everything bound to it fails.
    Close {
        /// Its index.
        session: SessionId,
    },
    /// `engine`: pages of `slot` are allocated and leased; chunks will follow.
    Begin {
        /// Our slot.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
        /// Where it goes.
        target: Target,
        /// Over all pages of the prompt.
        lease: Lease,
    },
    /// `engine`: KV of these tokens is in place. Chunks of a slot come in order; the last carries aux.
    Chunk {
        /// Our slot.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
        /// Prompt tokens.
        tokens: Range<u32>,
        /// With the last chunk.
        last: Option<AuxRecord>,
    },
    /// Whoever marked the slot Failed: post nothing more, then say how quiet it is.
    Cancel {
        /// Our slot.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
    },
    /// `ctl`: the destination has pulled everything.
    Done {
        /// Our slot.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
    },
}

/// To the mover of a decode worker.
#[derive(Debug)]
pub enum DestinationCommand {
    /// `ctl`: a session is set up.
    Open {
        /// Its index.
        session: SessionId,
        /// Its generation.
        generation: SessionGeneration,
        /// The transport's half.
        binding: Box<DestinationBinding>,
    },
    /// `ctl`: the session is void; everything bound to it fails.
    Close {
        /// Its index.
        session: SessionId,
    },
    /// `ctl`: a stream of a session has come, before or after its rooms.
    Join {
        /// The session that its preamble names; no older one of this index.
        session: SessionId,
        /// The stream.
        arrival: Arrival,
    },
    /// `engine`: pages of `slot` are leased and wait for the KV of `tokens`.
    Expect {
        /// Our slot.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
        /// From where.
        session: SessionId,
        /// The attempt.
        room: Room,
        /// Prompt tokens: to the last, from the first that is not held already.
        tokens: Range<u32>,
        /// Over the pages of these tokens.
        lease: Lease,
    },
    /// Whoever marked the slot Failed: nothing may land any more, then the lease ends.
    Cancel {
        /// Our slot.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
    },
    /// `ctl`: the source of a slot that was marked Failed has nothing under way and posts nothing more.
    Quiet {
        /// Our slot.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
    },
}

/// From a mover to the scheduler of its worker.
#[derive(Debug)]
pub struct LeaseEnd {
    /// Gives the pages back to the pool.
    pub ended: Ended,
    /// At a destination, with Success: the record that came.
    pub aux: Option<AuxRecord>,
}

/// What every mover is told in its own words.
pub trait Cancel {
    /// Whoever calls has marked the slot Failed.
    fn cancel(slot: SlotId, generation: Generation) -> Self;
}

impl Cancel for SourceCommand {
    fn cancel(slot: SlotId, generation: Generation) -> SourceCommand {
        SourceCommand::Cancel { slot, generation }
    }
}

impl Cancel for DestinationCommand {
    fn cancel(slot: SlotId, generation: Generation) -> DestinationCommand {
        DestinationCommand::Cancel { slot, generation }
    }
}

//! Commands to movers and their answers: the content of the bounded rings between `ctl`, `engine`
//! and `move`.
//!
//! Invariants: per slot a ring holds at most one Begin (or Expect), one Cancel, one Done and one
//! Quiet at a time. A scheduler sends a chunk only if room for a Cancel and a Quiet of each slot
//! remains, so these always fit.

use crate::ids::{Generation, Room, SessionGeneration, SlotId};
use crate::kv::lease::{EndedLease, Lease};
use crate::transfer::aux::AuxRecord;
use crate::transfer::target::{SessionId, Target};
use crate::transfer::transport::{Arrival, DestinationBinding, SourceBinding};
use std::ops::Range;

/// Commands for the mover of a prefill worker.
#[derive(Debug)]
pub enum SourceCommand {
    /// From `ctl`: a session is set up.
    Open {
        /// The session's index.
        session: SessionId,
        /// The session's generation.
        generation: SessionGeneration,
        /// This side's half of the transport.
        binding: Box<SourceBinding>,
    },
    /// From `ctl`: the session has ended; everything bound to it fails.
    Close {
        /// The session's index.
        session: SessionId,
    },
    /// From `engine`: pages of `slot` are allocated and leased; chunks will follow.
    Begin {
        /// The slot of this worker.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
        /// The destination.
        target: Target,
        /// The lease over all pages of the prompt.
        lease: Lease,
    },
    /// From `engine`: KV of these tokens is in place. Chunks of a slot come in order; the last one
    /// carries the aux record.
    Chunk {
        /// The slot of this worker.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
        /// Tokens, as places in the slot's page list.
        tokens: Range<u32>,
        /// The aux record, with the last chunk.
        last: Option<AuxRecord>,
    },
    /// From the thread that marked the slot Failed: post nothing more, and report when everything
    /// posted has completed.
    Cancel {
        /// The slot of this worker.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
    },
    /// From `ctl`: the destination has received everything.
    Done {
        /// The slot of this worker.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
    },
}

/// Commands for the mover of a decode worker.
#[derive(Debug)]
pub enum DestinationCommand {
    /// From `ctl`: a session is set up.
    Open {
        /// The session's index.
        session: SessionId,
        /// Its generation.
        generation: SessionGeneration,
        /// This side's half of the transport.
        binding: Box<DestinationBinding>,
    },
    /// From `ctl`: the session has ended; everything bound to it fails.
    Close {
        /// The session's index.
        session: SessionId,
    },
    /// From `ctl`: a stream of a session has connected, before or after the session's rooms.
    Join {
        /// The session that its preamble names. An older session of the same index is already
        /// closed.
        session: SessionId,
        /// The stream.
        arrival: Arrival,
    },
    /// From `engine`: pages of `slot` are leased and wait for the KV of `tokens`.
    Expect {
        /// The slot of this worker.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
        /// The session over which the KV arrives.
        session: SessionId,
        /// The attempt.
        room: Room,
        /// Tokens that this worker does not hold, as places in the slot's page list.
        tokens: Range<u32>,
        /// The lease over the pages of these tokens.
        lease: Lease,
    },
    /// From the thread that marked the slot Failed: accept no more bytes for it, then end the
    /// lease.
    Cancel {
        /// The slot of this worker.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
    },
    /// From `ctl`: the source of a slot that was marked Failed has nothing in flight and posts
    /// nothing more.
    Quiet {
        /// The slot of this worker.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
    },
}

/// A message from a mover to the scheduler of its worker.
#[derive(Debug)]
pub struct LeaseEnd {
    /// The ended lease, which gives the pages back to the pool.
    pub ended: EndedLease,
    /// At a destination, with Success: the received aux record.
    pub aux: Option<AuxRecord>,
}

/// The Cancel command, which both kinds of movers have.
pub trait Cancel {
    /// A Cancel for this use of the slot. The caller has marked the slot Failed.
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

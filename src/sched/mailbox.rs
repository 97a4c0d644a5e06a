//! The two bounded rings between `ctl` and an engine: commands in, events out.
//!
//! Commands are few and bounded by slots. Events: the engine looks for room before it runs a step and
//! lets the step wait when `ctl` is behind, so nothing is lost and nothing grows.

use crate::cause::Cause;
use crate::ids::{Generation, RequestId, Room, SlotId, WorkerId};
use crate::model::logprobs::Sampled;
use crate::sched::request::{Request, Stamps};
use crate::transfer::command::{SessionId, Target};
use std::ops::Range;

/// From `ctl` to an engine.
#[derive(Debug)]
pub enum Command {
    /// A new request for one of its workers.
    Submit(Box<Request>),
    /// Prefill: a checked Destination is here (the slot is in WaitingForInput).
    Granted {
        /// The worker.
        worker: WorkerId,
        /// Our slot.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
        /// Where its KV goes.
        target: Target,
    },
    /// Prefill: a Destination will come, and the prompt may be computed until then. Who has computed it says so again.
    Awaited {
        /// The worker.
        worker: WorkerId,
        /// Our slot.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
    },
    /// Decode: the session to the request's prefill worker stands, and where that computes first, it has; pages may be
    /// leased.
    SessionReady {
        /// The worker.
        worker: WorkerId,
        /// Our slot.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
        /// The session.
        session: SessionId,
    },
    /// Empties the prefix cache.
    Flush {
        /// The worker.
        worker: WorkerId,
    },
    /// Ends the request wherever it is; nothing more is told of it but Finished and Released.
    Abort {
        /// The worker.
        worker: WorkerId,
        /// Our slot.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
        /// Why.
        cause: Cause,
    },
}

impl Command {
    /// The worker it is addressed to.
    pub fn worker(&self) -> WorkerId {
        match self {
            Command::Submit(request) => request.worker,
            Command::Granted { worker, .. }
            | Command::Awaited { worker, .. }
            | Command::SessionReady { worker, .. }
            | Command::Flush { worker }
            | Command::Abort { worker, .. } => *worker,
        }
    }
}

/// How a request ended on this worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// A stop token was generated (it is the last token told).
    Stop,
    /// `max_new` tokens were generated.
    Length,
    /// Prefill: the KV is with the destination.
    HandedOver,
    /// It failed.
    Failed(Cause),
}

/// From an engine to `ctl`.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // By value on purpose: a box would be allocated on the hot path.
pub enum Event {
    /// The next token of a request, in order. On prefill the first and only one.
    Token {
        /// The request.
        request: RequestId,
        /// The id, its logprob, alternatives.
        sampled: Sampled,
        /// With the first: when what was. On prefill the end comes only after the hand-over's, which may be
        /// after decode's.
        first: Option<Stamps>,
    },
    /// Decode: pages are leased, Destination may leave; the page list stands in the slot's
    /// [`crate::transfer::pages::PageLists`] entry.
    Expecting {
        /// The worker.
        worker: WorkerId,
        /// Our slot.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
        /// The session.
        session: SessionId,
        /// The attempt.
        room: Room,
        /// Prompt tokens that are wanted: those that the prefix cache does not have.
        tokens: Range<u32>,
    },
    /// Prefill: the prompt is computed, and nobody has said yet where its KV goes.
    Computed {
        /// The worker.
        worker: WorkerId,
        /// Our slot.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
        /// The request.
        request: RequestId,
        /// Prompt tokens that the prefix cache had.
        cached_tokens: u32,
    },
    /// The prefix cache is empty.
    Flushed {
        /// The worker.
        worker: WorkerId,
        /// Pages that became free.
        pages: u32,
    },
    /// The request is over for its client. Once per request.
    Finished {
        /// The request.
        request: RequestId,
        /// How.
        outcome: Outcome,
        /// When what happened.
        stamps: Stamps,
        /// Prompt tokens not computed.
        cached_tokens: u32,
    },
    /// Pages and lease are back; the slot may be given out anew. Once per request, after Finished.
    Released(Box<Request>),
}

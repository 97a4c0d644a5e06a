//! The two bounded rings between `ctl` and an engine: commands in, events out.
//!
//! The number of slots bounds the commands. The engine checks the room for events before a step,
//! and delays the step if `ctl` is behind. So no message is lost, and no ring grows.

use crate::cause::Cause;
use crate::ids::{Generation, RequestId, Room, SlotId, WorkerId};
use crate::model::logprobs::{PromptLogprobs, Sampled};
use crate::sched::request::{EngineRequest, Stamps};
use crate::transfer::answer::TransferAnswer;
use crate::transfer::target::SessionId;
use std::ops::Range;

/// From `ctl` to an engine.
#[derive(Debug)]
pub enum EngineCommand {
    /// A new request for one of its workers.
    Submit(Box<EngineRequest>),
    /// An answer of the hand-off. After [`TransferAnswer::Abort`], only Finished and Released are
    /// sent for the request.
    Answer(TransferAnswer),
    /// Empties the prefix cache.
    Flush {
        /// The worker.
        worker: WorkerId,
    },
}

impl EngineCommand {
    /// The worker that must handle it.
    pub fn worker(&self) -> WorkerId {
        match self {
            EngineCommand::Submit(request) => request.worker,
            EngineCommand::Flush { worker } => *worker,
            EngineCommand::Answer(answer) => answer.worker(),
        }
    }
}

impl From<TransferAnswer> for EngineCommand {
    fn from(answer: TransferAnswer) -> EngineCommand {
        EngineCommand::Answer(answer)
    }
}

/// How a request ended on this worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FinishReason {
    /// A stop token was generated (it is the last token sent).
    Stop,
    /// `max_new` tokens were generated.
    Length,
    /// Prefill: the KV was transferred to the destination.
    HandedOver,
    /// It failed.
    Failed(Cause),
}

/// From an engine to `ctl`: an event of a request or of a transfer.
#[derive(Debug)]
// By value on purpose: a box would be allocated on the hot path.
#[allow(clippy::large_enum_variant)]
pub enum EngineEvent {
    /// For the table of requests.
    Request(RequestEvent),
    /// For the hand-off.
    Transfer(TransferEvent),
}

/// An event of a request.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // As above.
pub enum RequestEvent {
    /// The next token of a request, in order. On prefill it is the first and only one.
    Token {
        /// The request.
        request: RequestId,
        /// The id, its logprob, alternatives.
        sampled: Sampled,
        /// With the first token: the times so far. They are sent here because on prefill Finished
        /// comes only after the transfer, which can end after decode's answer.
        first: Option<Stamps>,
        /// With the first token: the logprobs of the prompt, if they are wanted.
        prompt: Option<Box<PromptLogprobs>>,
    },
    /// The prefix cache is empty.
    Flushed {
        /// The worker.
        worker: WorkerId,
        /// Pages that became free.
        pages: u32,
    },
    /// The request has ended for its client. Sent once per request.
    Finished {
        /// The request.
        request: RequestId,
        /// The reason.
        outcome: FinishReason,
        /// The times of its stages.
        stamps: Stamps,
        /// Prompt tokens that were not computed.
        cached_tokens: u32,
    },
    /// The request has returned its pages and its lease, so `ctl` can reuse the slot. Sent once per
    /// request, after Finished.
    Released(Box<EngineRequest>),
}

/// An event of a transfer.
#[derive(Debug)]
pub enum TransferEvent {
    /// Decode: pages are leased, and `ctl` can send Destination. The page list is in the slot's
    /// entry of [`crate::transfer::pages::PageLists`].
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
        /// Tokens to transfer, as places in the slot's page list: those of the prompt that the
        /// prefix cache does not have, and behind them those of further groups of layers.
        tokens: Range<u32>,
    },
    /// Prefill: the prompt is computed, and no destination is known for its KV yet.
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
}

impl From<RequestEvent> for EngineEvent {
    fn from(event: RequestEvent) -> EngineEvent {
        EngineEvent::Request(event)
    }
}

impl From<TransferEvent> for EngineEvent {
    fn from(event: TransferEvent) -> EngineEvent {
        EngineEvent::Transfer(event)
    }
}

//! What a manager tells the engine about the request of a slot. The ring that carries the answers
//! keeps their order.
//!
//! Not here: what an engine does with them (`sched`).

use crate::cause::Cause;
use crate::ids::{Generation, SlotId, WorkerId};
use crate::transfer::target::{SessionId, Target};

/// An answer of the hand-off to the engine of a worker.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum TransferAnswer {
    /// Prefill: a Destination has arrived and is checked. The slot is in WaitingForInput.
    Granted {
        /// The worker.
        worker: WorkerId,
        /// The local slot.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
        /// The destination of its KV.
        target: Target,
    },
    /// Prefill: a Destination will come, and the prompt can be computed before it comes. If the
    /// prompt is already computed, the engine reports that again.
    Awaited {
        /// The worker.
        worker: WorkerId,
        /// The local slot.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
    },
    /// Decode: the session to the request's prefill worker is open, and pages can be leased. With
    /// late allocation ([`DecodeAllocation`](crate::ids::DecodeAllocation)), the prompt is also
    /// already computed.
    SessionReady {
        /// The worker.
        worker: WorkerId,
        /// The local slot.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
        /// The session.
        session: SessionId,
    },
    /// Ends the request at any stage. No other answer to the request follows.
    Abort {
        /// The worker.
        worker: WorkerId,
        /// The local slot.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
        /// The reason.
        cause: Cause,
    },
}

impl TransferAnswer {
    /// The worker of the engine that must handle it.
    pub fn worker(&self) -> WorkerId {
        match self {
            TransferAnswer::Granted { worker, .. }
            | TransferAnswer::Awaited { worker, .. }
            | TransferAnswer::SessionReady { worker, .. }
            | TransferAnswer::Abort { worker, .. } => *worker,
        }
    }
}

//! Logprobs of prompts, from the prefill worker that computes a prompt to the decode worker.
//!
//! Thread: `ctl`. Not here: their bytes (`model::logprobs`), the requests that wait for them
//! (`worker::requests`).

use super::Handoff;
use super::effects::Effects;
use super::endpoints::{EndpointKind, WorkerEndpoint};
use crate::ids::WorkerId;
use crate::stdx::failpoint::is_failpoint_active;
use crate::transfer::answer::TransferAnswer;
use crate::transfer::manager::rooms::Slot;
use crate::transfer::manager::source::HeldRecord;
use std::time::Instant;

impl<E: From<TransferAnswer>> Handoff<E> {
    /// Sends the logprobs of a prompt in `slot` of a prefill worker to its destination, as soon as
    /// that is known.
    pub fn send_record(&mut self, id: WorkerId, slot: Slot, record: HeldRecord, now: Instant) {
        let WorkerEndpoint { worker, kind: EndpointKind::Prefill { manager, mover }, .. } =
            &mut self.endpoints[id.index()]
        else {
            return;
        };
        if is_failpoint_active("logprobs of the prompt are not sent") {
            return;
        }
        let effects = &mut Effects { worker, mover, outbox: &mut self.outbox };
        manager.send_record(slot, record, effects);
        self.run_actions(now);
    }

    /// The next logprobs of a prompt that a prefill worker has sent: the decode worker, the slot of
    /// the request, the payload.
    pub fn poll_record(&mut self) -> Option<(WorkerId, Slot, Vec<u8>)> {
        self.outbox.records.pop_front()
    }
}

//! The polling side of a session on one NIC: completions free room on lanes and complete slots.
//!
//! Thread: `move`, or `poll` if posting and polling are split.
//! Invariants: any error ends the session, with the cause and the slot of the first error. The NIC
//! flushes all later requests of the queue pair.

use super::flight::{InFlight, WorkRequestId};
use super::rails::Rails;
use crate::cause::Cause;
use crate::ids::SlotId;
use crate::sys::verbs::{CompletionError, CompletionQueue, Completions};
use crate::transfer::transport::SessionLost;
use std::sync::Arc;

/// Most completions taken at once.
const TAKEN_MAX: usize = 32;

/// The completion queue of a session's lanes on one NIC.
#[derive(Debug)]
pub(super) struct Reaping {
    queue: CompletionQueue,
    taken: Completions,
    rails: Arc<Rails>,
    /// Index of the NIC among this worker's.
    place: usize,
    flight: Arc<InFlight>,
}

impl Reaping {
    pub(super) fn new(
        queue: CompletionQueue,
        (rails, place): (Arc<Rails>, usize),
        flight: Arc<InFlight>,
    ) -> Reaping {
        Reaping { queue, taken: Completions::new(TAKEN_MAX), rails, place, flight }
    }

    /// Handles completions. Calls `completed` for slots that are complete.
    pub(super) fn step(&mut self, completed: &mut dyn FnMut(SlotId)) -> Result<bool, SessionLost> {
        let moved = self.queue.poll(&mut self.taken).map_err(|_| BEYOND_US)? > 0;
        let rail = self.rails.rail(self.place);
        for completion in self.taken.iter() {
            let chain = WorkRequestId::of(completion.id);
            if let Err(fault) = completion.outcome {
                // Other causes are not faults of the path.
                if cause_of(fault) == Cause::Unreachable {
                    rail.breaks();
                }
                return Err(SessionLost { cause: cause_of(fault), slot: Some(chain.slot) });
            }
            rail.carries();
            if self.flight.reap(chain).ok_or(BEYOND_US)? {
                completed(chain.slot);
            }
        }
        Ok(moved)
    }

    /// Arms or disarms the event of the next completion. The event wakes the thread that waits on
    /// the queue.
    pub(super) fn park(&mut self, parked: bool) {
        if parked {
            // Fails only if the queue is broken; the next poll reports that.
            let _ = self.queue.request_event();
        } else {
            self.queue.clear_events();
        }
    }
}

/// The device does not work, or it reports a request that was never posted.
const BEYOND_US: SessionLost = SessionLost::because(Cause::Internal);

fn cause_of(fault: CompletionError) -> Cause {
    match fault {
        CompletionError::Flushed => Cause::Flushed,
        CompletionError::RemoteAccess | CompletionError::RemoteOperation => Cause::Denied,
        CompletionError::LocalOperation
        | CompletionError::NoAnswer
        | CompletionError::NoReceive => Cause::Unreachable,
        CompletionError::LocalProtection | CompletionError::Other(_) => Cause::Internal,
    }
}

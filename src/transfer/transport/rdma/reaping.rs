//! The reaping side of a session on one NIC: completions become room on lanes and slots that are over.
//!
//! Thread: `move`, or `poll` where posting and reaping are split. Any fault ends the session, with the cause and the
//! slot of the first: all behind it on its queue pair is flushed.

use super::flight::{Flight, Ticket};
use super::rails::Rails;
use crate::cause::Cause;
use crate::ids::SlotId;
use crate::sys::verbs::{CompletionQueue, Completions, Fault};
use crate::transfer::transport::Lost;
use std::sync::Arc;

/// Completions taken at once.
const TAKEN_MAX: usize = 32;

/// The queue that a session's lanes on one NIC complete into.
#[derive(Debug)]
pub(super) struct Reaping {
    queue: CompletionQueue,
    taken: Completions,
    rails: Arc<Rails>,
    /// Our NIC, by its place.
    place: usize,
    flight: Arc<Flight>,
}

impl Reaping {
    pub(super) fn new(
        queue: CompletionQueue,
        (rails, place): (Arc<Rails>, usize),
        flight: Arc<Flight>,
    ) -> Reaping {
        Reaping { queue, taken: Completions::new(TAKEN_MAX), rails, place, flight }
    }

    /// Takes what has completed. Tells of slots that are over.
    pub(super) fn step(&mut self, completed: &mut dyn FnMut(SlotId)) -> Result<bool, Lost> {
        let moved = self.queue.poll(&mut self.taken).map_err(|_| BEYOND_US)? > 0;
        let rail = self.rails.rail(self.place);
        for completion in self.taken.iter() {
            let chain = Ticket::of(completion.id);
            if let Err(fault) = completion.outcome {
                // Another cause is not the way's.
                if cause_of(fault) == Cause::Unreachable {
                    rail.breaks();
                }
                return Err(Lost { cause: cause_of(fault), slot: Some(chain.slot) });
            }
            rail.carries();
            if self.flight.reap(chain).ok_or(BEYOND_US)? {
                completed(chain.slot);
            }
        }
        Ok(moved)
    }

    /// Has the next completion wake who waits on the queue, or no longer.
    pub(super) fn park(&mut self, parked: bool) {
        if parked {
            // Fails only with a queue that is broken; the next poll says so.
            let _ = self.queue.request_event();
        } else {
            self.queue.clear_events();
        }
    }
}

/// A device that does not work, or tells of what was never posted.
const BEYOND_US: Lost = Lost::because(Cause::Internal);

fn cause_of(fault: Fault) -> Cause {
    match fault {
        Fault::Flushed => Cause::Flushed,
        Fault::RemoteAccess | Fault::RemoteOperation => Cause::Denied,
        Fault::LocalOperation | Fault::NoAnswer | Fault::NoReceive => Cause::Unreachable,
        Fault::LocalProtection | Fault::Other(_) => Cause::Internal,
    }
}

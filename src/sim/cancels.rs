//! Cancelled requests: after so many steps of its engine, a leg without a request has no page, no
//! lease and no slot.
//!
//! The numbers follow from the order of a step (commands, ends of leases, release of slots that are
//! over) and from the states of a slot in `docs/design/handoff.md`:
//!
//! - Without a lease at the mover, one step: it takes the abort and releases the slot.
//! - With a lease, [`LEASE_TIME`] until the lease is back, in two steps or more. The first step
//!   cancels at the mover; the step that takes the lease back releases the slot. A mover ends what
//!   it has begun, a NIC must confirm its writes, or the peer must confirm that nothing is under
//!   way.
//!
//! A step takes a bounded number of commands. If the engine stood still, the commands before the
//! abort can take steps more.
//!
//! Invariants: `ctl` has handled all events of the steps that are counted. Time only counts
//! while the engine takes steps, because an engine that hangs takes none.

use crate::ids::RequestId;
use crate::limits::{ABORT_ANSWER_MAX, COMMANDS_PER_TURN};
use crate::process::stepped_threads::SteppedThreads;
use crate::transfer::manager::rooms::Slot;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Steps that release a slot without a lease.
const STEPS: u64 = 1;
/// Steps that release a slot with a lease.
const STEPS_OF_LEASE: u64 = 2;
/// A destination waits for the answer to its abort, then resets its session. A source waits for its
/// socket or its NIC, which gives up after less than this time. One second is for the turns.
const LEASE_TIME: Duration = Duration::from_secs(ABORT_ANSWER_MAX.as_secs() + 1);

/// The longest time between two turns of `ctl`. A process that stands still takes longer, and the
/// rest does not count.
const TURN: Duration = Duration::from_millis(200);

/// The legs of a worker that have no request.
#[derive(Debug, Default)]
pub struct CancelWatch {
    legs: BTreeMap<RequestId, Cancelled>,
    /// Time of the last check that came after a step, and the steps before it.
    checked: Option<(Instant, u64)>,
}

#[derive(Debug)]
struct Cancelled {
    /// Steps of the engine before it, or before it was without a lease.
    before: u64,
    /// Steps that take only the commands before its abort.
    early: u64,
    has_lease: bool,
    /// Time in which the engine has taken steps.
    waited: Duration,
}

impl CancelWatch {
    /// Checks the legs without a request, after a turn of `ctl`.
    ///
    /// # Errors
    /// A leg is there for too long.
    pub fn check(
        &mut self,
        legs: impl Iterator<Item = (RequestId, Slot)>,
        threads: &SteppedThreads,
        now: Instant,
    ) -> Result<(), String> {
        let (mut known, steps) = (std::mem::take(&mut self.legs), threads.engine_steps());
        let (last, counted) = *self.checked.get_or_insert((now, steps));
        let mut passed = Duration::ZERO;
        if steps > counted {
            passed = (now - last).min(TURN);
            self.checked = Some((now, steps));
        }
        for (id, slot) in legs {
            let mut leg = known.remove(&id).unwrap_or_else(|| Cancelled {
                before: steps,
                early: (threads.waiting_commands() / COMMANDS_PER_TURN) as u64,
                has_lease: threads.has_lease(slot.id, slot.generation),
                waited: Duration::ZERO,
            });
            if leg.has_lease && !threads.has_lease(slot.id, slot.generation) {
                // The step that took the lease back has released the slot, or the next one does.
                (leg.has_lease, leg.before, leg.early) = (false, steps, 0);
            }
            let taken = steps - leg.before;
            if taken > 0 {
                leg.waited += passed;
            }
            let (most, longest) = match leg.has_lease {
                true => (STEPS_OF_LEASE, LEASE_TIME),
                false => (STEPS, Duration::ZERO),
            };
            if taken >= most + leg.early && leg.waited >= longest {
                return Err(format!(
                    "a cancelled leg is not released after {taken} steps: {leg:?}"
                ));
            }
            self.legs.insert(id, leg);
        }
        Ok(())
    }
}

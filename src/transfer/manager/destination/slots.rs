//! The effects of a source's messages on a slot.
//!
//! Invariants: a message affects a slot only if room, generation and source match; a slot is marked
//! Failed before any message about it.

use super::{DestinationEffects, DestinationManager, Source};
use crate::cause::Cause;
use crate::limits::RDMA_BARRED;
use crate::transfer::command::DestinationCommand;
use crate::transfer::manager::rooms::Slot;
use crate::transfer::status::{Move, State};
use crate::wire::message::{AbortAck, Status, TransferId, Transport};
use std::fmt::Debug;
use std::hash::Hash;
use std::time::Instant;

impl<L, A> DestinationManager<L, A>
where
    L: Copy + Eq + Hash,
    A: Clone + Eq + Hash + Debug,
{
    /// An AbortAck, requested or not: the source posts nothing more for this use of the slot. If
    /// quiet, it also has nothing in flight; otherwise only a reset ensures that. The mover ends
    /// the lease.
    pub(super) fn abort_ack(
        &mut self,
        source: &A,
        ack: &AbortAck,
        now: Instant,
        effects: &mut impl DestinationEffects<L, A>,
    ) {
        let slot = Slot::from(ack.id);
        let asked = self.aborting.get(&slot.id).is_some_and(|asked| {
            asked.generation == slot.generation
                && asked.room == ack.id.room
                && asked.source == *source
        });
        if asked {
            self.aborting.remove(&slot.id);
        } else if self.holds(source, &ack.id) {
            self.fail(slot, ack.cause, effects);
            // The source no longer knows this attempt, and would not answer an Abort.
            if let Some(waiting) = self.slots.get_mut(&slot.id).filter(|_| ack.quiet) {
                waiting.sent = false;
            }
        } else {
            return;
        }
        let writes = self
            .sources
            .get(source)
            .and_then(Source::transport)
            .is_some_and(Transport::writes_remotely);
        match (writes, ack.quiet) {
            (false, _) => {}
            (true, true) => {
                effects.mover(DestinationCommand::Quiet {
                    slot: slot.id,
                    generation: slot.generation,
                });
            }
            (true, false) => self.down(source, now, Cause::PeerLost, effects),
        }
    }

    pub(super) fn status(
        &mut self,
        source: &A,
        status: &Status,
        now: Instant,
        effects: &mut impl DestinationEffects<L, A>,
    ) {
        if !self.holds(source, &status.id) || status.state != State::Failed as u8 {
            return;
        }
        let cause = status.cause.unwrap_or(Cause::OtherLeg);
        self.fail(Slot::from(status.id), cause, effects);
        let Some(entry) = self.sources.get_mut(source) else { return };
        let by_rdma = entry.transport() == Some(Transport::Rdma);
        if by_rdma && cause == Cause::Unreachable && entry.rdma.fail(now) {
            effects.left_out(source, Transport::Rdma, RDMA_BARRED);
        }
    }

    /// The source has computed the requested prompt: pages can be leased.
    pub(super) fn computed(
        &mut self,
        source: &A,
        id: &TransferId,
        effects: &mut impl DestinationEffects<L, A>,
    ) {
        if !self.holds(source, id) {
            return;
        }
        let session = self.sources.get(source).map(|source| source.session);
        let waiting = self.slots.get_mut(&id.slot);
        // Only once: the scheduler must not get a second Ready.
        let is_due = waiting.is_some_and(|waiting| std::mem::take(&mut waiting.ready_due));
        if let Some(session) = session.filter(|_| is_due) {
            effects.ready(Slot::from(*id), session);
        }
    }

    pub(super) fn holds(&self, source: &A, id: &TransferId) -> bool {
        self.slots.get(&id.slot).is_some_and(|held| {
            held.generation == id.generation && held.asked.room == id.room && held.source == *source
        })
    }

    /// Marks the slot Failed, sends Cancel to the mover, then informs the scheduler. A slot in
    /// Success does not change.
    pub(super) fn fail(
        &self,
        slot: Slot,
        cause: Cause,
        effects: &mut impl DestinationEffects<L, A>,
    ) {
        debug_assert_eq!(
            self.slots.get(&slot.id).map(|waiting| waiting.generation),
            Some(slot.generation),
            "a slot fails before it is left"
        );
        if self.status.advance(slot.id, slot.generation, Move::Fail(cause)).is_ok() {
            effects
                .mover(DestinationCommand::Cancel { slot: slot.id, generation: slot.generation });
            effects.failed(slot, cause);
        }
    }

    /// A source with an overdue answer to an Abort.
    pub(super) fn unanswered(&self, now: Instant) -> Option<A> {
        let late = self.aborting.iter().filter(|(_, asked)| asked.until <= now);
        late.min_by_key(|(slot, _)| **slot).map(|(_, asked)| asked.source.clone())
    }

    /// Slots that wait for the source, by index, so that their effects come in a fixed order.
    pub(super) fn waiting_for(&self, source: &A) -> Vec<Slot> {
        let waiting = self.slots.iter().filter(|(_, waiting)| waiting.source == *source);
        let mut slots: Vec<Slot> =
            waiting.map(|(&id, waiting)| Slot { id, generation: waiting.generation }).collect();
        slots.sort_unstable_by_key(|slot| slot.id);
        slots
    }
}

//! The receiving half. The peer's NIC can write into its memory from the grant until quiet or a
//! reset. Immediates report that rooms are complete.
//!
//! A receive belongs to its lane, not to a room: each completed one is posted again at once.

use super::rails::{Opened, Rails};
use super::{immediate, slot_of};
use crate::cause::Cause;
use crate::ids::SlotId;
use crate::stdx::failpoint::is_failpoint_active;
use crate::sys::event::{WaitInterest, WaitSet};
use crate::sys::verbs::{CompletionKind, CompletionQueue, Completions, QueuePair};
use crate::transfer::aux::AuxRecord;
use crate::transfer::transport::{DestinationHalf, Landing, Landings, Memory, Notice, SessionLost};
use crate::wire::message::RdmaGrant;
use bytemuck::Zeroable;
use std::io;
use std::sync::Arc;

/// Most completions taken at once.
const TAKEN_MAX: usize = 64;

/// Queue pairs offered to a source.
#[derive(Debug)]
pub struct PendingQueuePairs {
    rails: Arc<Rails>,
    /// Each entry is taken when the source's answer names it.
    opened: Vec<Option<Opened>>,
}

/// The destination's half of a session.
#[derive(Debug)]
pub struct RdmaDestination {
    // By lane. They are dropped first: after that no bytes arrive, and no request completes into
    // the queues.
    pairs: Box<[QueuePair]>,
    /// By NIC, with the completions of the last step, which the next step judges.
    completions: Box<[(CompletionQueue, Completions)]>,
    rails: Arc<Rails>,
    /// By slot; the records that came on lane 0.
    records: Box<[AuxRecord]>,
}

impl PendingQueuePairs {
    /// Queue pairs for a future session. `sequences` returns numbers that cannot be guessed.
    pub fn new(
        rails: &Arc<Rails>,
        mut sequences: impl FnMut() -> u32,
    ) -> io::Result<PendingQueuePairs> {
        let mut opened = Vec::new();
        for place in rails.usable() {
            opened.push(Some(rails.open(place, rails.settings().lanes, true, &mut sequences)?));
        }
        Ok(PendingQueuePairs { rails: rails.clone(), opened })
    }

    /// The grant for the source.
    pub fn grant(&self) -> RdmaGrant {
        let opened = self.opened.iter().flatten();
        self.rails.grant(opened.map(|opened| (self.rails.rail(opened.rail).number, opened)))
    }

    /// Makes the half from the source's grant. The mover parks in `wait`.
    pub fn connect(mut self, source: &RdmaGrant, wait: &WaitSet) -> io::Result<RdmaDestination> {
        let (mut pairs, mut completions) = (Vec::new(), Vec::new());
        for (nic, names) in source.rails() {
            let meant = |opened: &Opened| self.rails.rail(opened.rail).number == nic.number;
            let place = self.opened.iter().position(|opened| opened.as_ref().is_some_and(meant));
            let opened = place.and_then(|place| self.opened[place].take());
            let mut opened =
                opened.ok_or_else(|| io::Error::other("a NIC that was not offered"))?;
            opened.connect(nic, names)?;
            for mut pair in opened.pairs {
                for _ in 0..pair.capacity().receives.min(self.rails.receives()) {
                    pair.post_receive(pairs.len() as u64)
                        .map_err(|refused| io::Error::from_raw_os_error(refused.error))?;
                }
                pairs.push(pair);
            }
            if let Some(events) = opened.completions.events() {
                wait.add(events, WaitInterest::Readable)?;
            }
            completions.push((opened.completions, Completions::new(TAKEN_MAX)));
        }
        let records = vec![AuxRecord::zeroed(); self.rails.slots()].into();
        Ok(RdmaDestination {
            pairs: pairs.into(),
            completions: completions.into(),
            rails: self.rails,
            records,
        })
    }
}

impl DestinationHalf for RdmaDestination {
    fn landing(&self) -> Landing {
        Landing::Written
    }

    fn step(&mut self, _memory: &Memory, landings: &mut dyn Landings) -> Result<bool, SessionLost> {
        let mut moved = false;
        for (queue, taken) in &mut self.completions {
            for completion in taken.iter() {
                let immediate = match completion.outcome {
                    Ok(CompletionKind::Notified { immediate }) => immediate,
                    Ok(_) => return Err(BEYOND_US),
                    // Only the NIC ends these queue pairs, after a write that it must refuse.
                    Err(_) => return Err(SessionLost::because(Cause::Denied)),
                };
                let (lane, lanes) = (completion.id as usize, self.pairs.len());
                let pair = self.pairs.get_mut(lane).ok_or(BEYOND_US)?;
                pair.post_receive(completion.id).map_err(|_| BEYOND_US)?;
                notice(&self.rails, &mut self.records, (lane, lanes), immediate, landings);
                moved = true;
            }
            moved |= queue.poll(taken).map_err(|_| BEYOND_US)? > 0;
        }
        Ok(moved)
    }

    /// Posted writes can still arrive until the source is quiet or the session ends.
    fn revoke(&mut self, _slot: SlotId) {}

    fn expect(&mut self, _notice: &Notice, _first: u32, _landings: &mut dyn Landings) {}

    fn park(&mut self, parked: bool) {
        if parked && !is_failpoint_active("completions wake no mover") {
            // Fails only if the queue is broken; the next poll reports that.
            for (queue, _) in &mut self.completions {
                let _ = queue.request_event();
            }
        } else {
            self.completions.iter_mut().for_each(|(queue, _)| queue.clear_events());
        }
    }
}

/// The device does not work, or it reports a request that was never posted.
const BEYOND_US: SessionLost = SessionLost::because(Cause::Internal);

/// Handles the immediate of a lane: its whole share of a room has arrived.
fn notice(
    rails: &Rails,
    records: &mut [AuxRecord],
    (lane, lanes): (usize, usize),
    said: u32,
    landings: &mut dyn Landings,
) {
    let slot = slot_of(said);
    // An immediate for an earlier use of the slot is ignored. It can come from a source that became
    // quiet late.
    let Some(notice) =
        landings.current(slot).filter(|notice| immediate(slot, notice.generation) == said)
    else {
        return;
    };
    if landings.expected(&notice).is_none() {
        return;
    }
    let record = &mut records[slot.index()];
    if lane == 0 {
        *record = rails.record(slot);
        if !record.belongs_to(notice.room, notice.generation) {
            return landings.fail(slot, Cause::Corrupt);
        }
    }
    let lanes = if is_failpoint_active("one lane speaks for all") { lane + 1 } else { lanes };
    landings.lane_ended(slot, lane as u8, u32::MAX >> (32 - lanes), record);
}

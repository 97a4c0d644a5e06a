//! The receiving half: its memory is written by a NIC at any time between grant and quiet, or reset; it learns of
//! rooms by immediates.
//!
//! A receive belongs to its lane, not to a room: each that has completed is posted anew at once.

use super::rail::{Opened, Rail};
use super::{immediate, slot_of};
use crate::cause::Cause;
use crate::ids::SlotId;
use crate::sys::event::{Interest, WaitSet};
use crate::sys::verbs::{Completions, Ended};
use crate::transfer::aux::AuxRecord;
use crate::transfer::transport::{DestinationHalf, Landing, Landings, Lost, Memory, Notice};
use crate::wire::message::RdmaGrant;
use bytemuck::Zeroable;
use std::io;
use std::sync::Arc;

/// Completions taken at once.
const TAKEN_MAX: usize = 64;

/// Queue pairs that a source was, or is to be, told of.
#[derive(Debug)]
pub struct RdmaOffer {
    rail: Arc<Rail>,
    opened: Opened,
}

/// The destination's half of a session.
#[derive(Debug)]
pub struct RdmaDestination {
    // Dropped first: from then on nothing lands.
    opened: Opened,
    rail: Arc<Rail>,
    /// Taken by the last step, to be judged by the next.
    taken: Completions,
    /// By slot, from lane 0.
    records: Box<[AuxRecord]>,
}

impl RdmaOffer {
    /// Queue pairs for a session to come. `sequences` gives numbers that nobody guesses.
    pub fn new(rail: &Arc<Rail>, sequences: impl Fn() -> u32) -> io::Result<RdmaOffer> {
        Ok(RdmaOffer { rail: rail.clone(), opened: rail.open(rail.lanes(), true, sequences)? })
    }

    /// What the source is told.
    pub fn grant(&self) -> RdmaGrant {
        self.rail.grant(&self.opened)
    }

    /// The half, once the source has told its own. `wait` is where the mover parks.
    pub fn connect(mut self, source: &RdmaGrant, wait: &WaitSet) -> io::Result<RdmaDestination> {
        self.opened.connect(source)?;
        let slots = self.rail.slots();
        for (lane, pair) in self.opened.pairs.iter_mut().enumerate() {
            for _ in 0..pair.capacity().receives.min(slots as u32 + super::rail::SPARE_RECEIVES) {
                pair.post_receive(lane as u64)
                    .map_err(|refused| io::Error::from_raw_os_error(refused.error))?;
            }
        }
        if let Some(events) = self.opened.completions.events() {
            wait.add(events, Interest::Readable)?;
        }
        Ok(RdmaDestination {
            opened: self.opened,
            taken: Completions::new(TAKEN_MAX),
            records: vec![AuxRecord::zeroed(); slots].into(),
            rail: self.rail,
        })
    }
}

impl DestinationHalf for RdmaDestination {
    fn landing(&self) -> Landing {
        Landing::Written
    }

    fn step(&mut self, _memory: &Memory, landings: &mut dyn Landings) -> Result<bool, Lost> {
        let mut judged = false;
        for completion in self.taken.iter() {
            let Ok(Ended::Notified { immediate }) = completion.outcome else { return Err(Lost::GONE) };
            let lane = completion.id as usize;
            let pair = self.opened.pairs.get_mut(lane).ok_or(Lost::because(Cause::Internal))?;
            pair.post_receive(completion.id).map_err(|_| Lost::because(Cause::Internal))?;
            notice(&self.rail, &mut self.records, (lane, self.rail.lanes()), immediate, landings);
            judged = true;
        }
        let taken =
            self.opened.completions.poll(&mut self.taken).map_err(|_| Lost::because(Cause::Internal))?;
        Ok(judged || taken > 0)
    }

    /// What was posted for it may still land: that is over when the source is quiet, or the session.
    fn revoke(&mut self, _slot: SlotId) {}

    fn expect(&mut self, _notice: &Notice, _landings: &mut dyn Landings) {}

    fn park(&mut self, parked: bool) {
        if parked {
            // Fails only with a queue that is broken; the next poll says so.
            let _ = self.opened.completions.request_event();
        } else {
            self.opened.completions.clear_events();
        }
    }
}

/// A lane has brought all of a room.
fn notice(
    rail: &Rail,
    records: &mut [AuxRecord],
    (lane, lanes): (usize, usize),
    said: u32,
    landings: &mut dyn Landings,
) {
    let slot = slot_of(said);
    // Of an earlier use of the slot: its source was quiet late, and nothing is to be done.
    let Some(notice) = landings.current(slot).filter(|notice| immediate(slot, notice.generation) == said)
    else {
        return;
    };
    if landings.expected(&notice).is_none() {
        return;
    }
    let record = &mut records[slot.index()];
    if lane == 0 {
        *record = rail.record(slot);
        if !record.belongs_to(notice.room, notice.generation) {
            return landings.fail(slot, Cause::Corrupt);
        }
    }
    landings.lane_ended(slot, lane as u8, u32::MAX >> (32 - lanes), record);
}

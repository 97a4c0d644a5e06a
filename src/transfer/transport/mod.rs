//! Ways for the bytes: one pair of traits, a posting half at the source and a landing half at the
//! destination, one file per transport. Thread: `move`.
//!
//! A transport knows bytes, addresses and order. It decides nothing about requests: which notice is still
//! wanted is the mover's answer ([`Landings`]), and leases are the mover's to end.
//! Invariants: nothing here allocates after a session is set up, and nothing a peer wrote is trusted.

pub mod fake;
pub mod faulty;
mod lost;
pub mod rdma;
pub mod shm;
pub mod tcp;
mod vectored;

pub use lost::Lost;

use crate::cause::Cause;
use crate::ids::{Generation, PageId, Room, SlotId};
use crate::kv::layout::KvLayout;
use crate::kv::region::Region;
use crate::transfer::aux::AuxRecord;
use crate::transfer::command::Target;
use crate::transfer::copiers::Copiers;
use crate::transfer::pages::PageLists;
use crate::transfer::tally::Tally;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

/// What a source's mover is given of a session.
pub type SourceBinding = dyn SourceHalf;

/// What a destination's mover is given of a session.
pub type DestinationBinding = dyn DestinationHalf;

/// A worker's KV and what it shows of its slots.
#[derive(Clone, Debug)]
pub struct Memory {
    /// The KV pool.
    pub region: Arc<Region>,
    /// Where things lie in it.
    pub layout: KvLayout,
    /// Pages of the pool.
    pub pages: u32,
    /// Page lists and lease words.
    pub lists: Arc<PageLists>,
    /// What moving it took.
    pub tally: Arc<Tally>,
    /// Who copies it.
    pub copiers: Copiers,
}

/// KV of some tokens of a slot, ready to go.
#[derive(Clone, Debug)]
pub struct Post {
    /// The source's slot.
    pub slot: SlotId,
    /// Where it goes.
    pub target: Target,
    /// Prompt tokens.
    pub tokens: Range<u32>,
    /// With the last tokens.
    pub last: Option<AuxRecord>,
}

/// The transport takes no more now; nothing was posted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Full;

/// How a source learns that its pages are no longer read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Completion {
    /// The last byte has left; nothing of the slot is outstanding.
    Pushed,
    /// The destination says Done.
    Pulled,
    /// Posting it was all.
    Immediate,
}

/// Who writes into a destination's pages, and so what ends a lease whose transfer has failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Landing {
    /// The mover itself: nothing lands once it has been told.
    Moved,
    /// The peer: nothing lands once its source is known to be quiet, or the session is gone.
    Written,
}

/// The posting half.
pub trait SourceHalf: Send + Debug {
    /// How this transport completes.
    fn completion(&self) -> Completion;

    /// Lets KV go. Posts of a slot come in order.
    fn post(&mut self, memory: &Memory, post: &Post) -> Result<(), Full>;

    /// Moves bytes along. Tells of slots whose posts have completed.
    fn step(&mut self, memory: &Memory, completed: &mut dyn FnMut(SlotId)) -> Result<bool, Lost>;

    /// Drops what of `slot` has not begun. True when nothing of it is outstanding.
    fn withdraw(&mut self, slot: SlotId) -> bool;

    /// As [`DestinationHalf::park`].
    fn park(&mut self, _parked: bool) {}
}

/// A notice or frame header as a peer sent it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Notice {
    /// Our slot, as the peer says.
    pub slot: SlotId,
    /// Its generation, as the peer says.
    pub generation: Generation,
    /// The attempt, as the peer says.
    pub room: Room,
}

/// Which slots of a destination still want bytes, and what happens when they have them.
pub trait Landings {
    /// The use of a slot that this session's bytes are for, if any.
    fn current(&self, slot: SlotId) -> Option<Notice>;

    /// Tokens still to come (received up to the start), when this room, generation and session hold the
    /// lease right now; sets Transferring. None: stale, the bytes go nowhere.
    fn expected(&mut self, notice: &Notice) -> Option<Range<u32>>;

    /// KV up to token `end` lies in the slot's pages.
    fn landed(&mut self, slot: SlotId, end: u32);

    /// Everything has landed and is proven: ends the lease, then Success.
    fn complete(&mut self, slot: SlotId, aux: AuxRecord);

    /// Pushed: a lane has brought its last byte. The one that completes the mask `all` completes the slot,
    /// with the record that came on lane 0.
    fn lane_ended(&mut self, slot: SlotId, lane: u8, all: u32, aux: &AuxRecord);

    /// The copy is void or the peer said nonsense: fails the room, ends the lease where nothing can land.
    fn fail(&mut self, slot: SlotId, cause: Cause);
}

/// A stream that a source dialled, its preamble read and proven by `ctl`.
#[derive(Debug)]
pub struct Arrival {
    /// Of the session.
    pub lane: u16,
    /// Read up to `early`.
    pub stream: tcp::Stream,
    /// What `ctl` has read behind the preamble.
    pub early: Vec<u8>,
}

/// The landing half.
pub trait DestinationHalf: Send + Debug {
    /// Who writes.
    fn landing(&self) -> Landing {
        Landing::Moved
    }

    /// Takes a lane of the session in. A transport without streams closes it.
    fn join(&mut self, _arrival: Arrival) {}

    /// Takes in what has come; true when there was something. What comes is not judged in the step that first
    /// sees it: the mover takes its commands before a step, so that of what was sent behind a grant the step may
    /// see one and not the other. By the next the grant has been taken.
    fn step(&mut self, memory: &Memory, landings: &mut dyn Landings) -> Result<bool, Lost>;

    /// The mover moves nothing more into the pages of `slot` once this returns.
    fn revoke(&mut self, slot: SlotId);

    /// The mover is about to park, or is awake again. It orders this before its last look by a SeqCst fence.
    fn park(&mut self, _parked: bool) {}

    /// The slot now expects bytes, of token `first` and those behind it; what has no source of its own may tell at once.
    fn expect(&mut self, notice: &Notice, first: u32, landings: &mut dyn Landings);
}

/// Shares of a chunk begin at multiples of a cache line.
const SHARE_ALIGN: u64 = 64;

/// The part of a chunk of `bytes` bytes that a lane carries; may be empty.
fn share(bytes: u64, lane: usize, lanes: usize) -> Range<u64> {
    let share = bytes.div_ceil(lanes as u64).next_multiple_of(SHARE_ALIGN);
    let edge = |lane: usize| share.saturating_mul(lane as u64).min(bytes);
    edge(lane)..edge(lane + 1)
}

/// Page numbers that a peer named, checked against its pool.
fn page_within(page: PageId, pages: u32) -> Option<PageId> {
    (page.0 < pages).then_some(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_a_chunk_once() {
        for bytes in [0, 1, 63, 64, 65, 1000, 12_345_678] {
            for lanes in 1..=32 {
                let mut end = 0;
                for lane in 0..lanes {
                    let share = share(bytes, lane, lanes);
                    assert_eq!(share.start, end);
                    end = share.end;
                }
                assert_eq!(end, bytes);
            }
        }
    }
}

//! Transports: two traits, for the posting half at the source and the landing half at the
//! destination. Each transport has its own file or folder.
//!
//! Thread: `move`.
//! Invariants: a transport handles bytes, addresses and order, and decides nothing about requests.
//! The mover decides which notices are still wanted ([`Landings`]), and ends leases. Nothing here
//! allocates after a session is set up. No data of a peer is trusted.

pub mod fake;
pub mod fault_injection;
pub mod rdma;
mod session_loss;
pub mod shm;
pub mod tcp;
mod vectored_io;

pub use session_loss::SessionLost;

use crate::cause::Cause;
use crate::ids::{Generation, PageId, Room, SlotId};
use crate::kv::groups::GroupCounts;
use crate::kv::layout::KvLayout;
use crate::kv::region::Region;
use crate::sys::stream::ByteStream;
use crate::transfer::aux::AuxRecord;
use crate::transfer::copy_pool::CopyPool;
use crate::transfer::counters::Counters;
use crate::transfer::pages::PageLists;
use crate::transfer::target::Target;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

/// The part of a session that the source's mover holds.
pub type SourceBinding = dyn SourceHalf;

/// The part of a session that the destination's mover holds.
pub type DestinationBinding = dyn DestinationHalf;

/// A worker's KV memory and the shared data of its slots.
#[derive(Clone, Debug)]
pub struct Memory {
    /// The KV pool.
    pub region: Arc<Region>,
    /// The layout of the pool.
    pub layout: KvLayout,
    /// Pages of the pool.
    pub pages: u32,
    /// The groups of layers, each with pages of its own.
    pub groups: GroupCounts,
    /// Page lists and lease words.
    pub lists: Arc<PageLists>,
    /// Transfer counters.
    pub counters: Arc<Counters>,
    /// The threads that copy.
    pub copy_pool: CopyPool,
}

/// KV of some tokens of a slot, ready to be sent.
#[derive(Clone, Debug)]
pub struct Post {
    /// The source's slot.
    pub slot: SlotId,
    /// The destination.
    pub target: Target,
    /// Tokens, as places in the slot's page list.
    pub tokens: Range<u32>,
    /// The aux record, with the last tokens.
    pub last: Option<AuxRecord>,
}

/// The transport accepts no more now; nothing was posted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Full;

/// How a source learns that its pages are no longer read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CompletionMode {
    /// The last byte has been sent; nothing of the slot is outstanding.
    Pushed,
    /// The destination sends Done.
    Pulled,
    /// Complete as soon as it is posted.
    Immediate,
}

/// The writer of a destination's pages. It determines how the lease of a failed transfer ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Landing {
    /// The mover: it writes nothing after its Cancel.
    Moved,
    /// The peer: it can write until the source has reported that it is quiet, or the session has
    /// ended.
    Written,
}

/// The posting half.
pub trait SourceHalf: Send + Debug {
    /// How this transport completes.
    fn completion(&self) -> CompletionMode;

    /// Posts KV. Posts of a slot come in order.
    fn post(&mut self, memory: &Memory, post: &Post) -> Result<(), Full>;

    /// Moves bytes. Calls `completed` for each slot after all its posts have completed.
    fn step(
        &mut self,
        memory: &Memory,
        completed: &mut dyn FnMut(SlotId),
    ) -> Result<bool, SessionLost>;

    /// Drops the posts of `slot` that have not begun. True if nothing of the slot is outstanding.
    fn withdraw(&mut self, slot: SlotId) -> bool;

    /// Like [`DestinationHalf::park`].
    fn park(&mut self, _parked: bool) {}
}

/// A notice or frame header as a peer sent it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Notice {
    /// This worker's slot, as the peer states it.
    pub slot: SlotId,
    /// Its generation, as the peer states it.
    pub generation: Generation,
    /// The attempt, as the peer states it.
    pub room: Room,
}

/// The slots of a destination that still expect bytes, and the effects of arrivals.
pub trait Landings {
    /// The use of a slot that expects bytes from this session, if any.
    fn current(&self, slot: SlotId) -> Option<Notice>;

    /// The tokens still missing, if this room, generation and session hold the lease now; sets
    /// Transferring. None if the notice is stale: its bytes are dropped.
    fn expected(&mut self, notice: &Notice) -> Option<Range<u32>>;

    /// KV up to token `end` is in the slot's pages.
    fn landed(&mut self, slot: SlotId, end: u32);

    /// Everything has arrived and is proven: ends the lease, then sets Success.
    fn complete(&mut self, slot: SlotId, aux: AuxRecord);

    /// For a source that writes: the last byte of a lane has arrived. The lane that completes the
    /// mask `all` completes the slot, with the record that came on lane 0.
    fn lane_ended(&mut self, slot: SlotId, lane: u8, all: u32, aux: &AuxRecord);

    /// The copy is void, or the peer sent invalid data: fails the room. Also ends the lease if
    /// nothing more can be written.
    fn fail(&mut self, slot: SlotId, cause: Cause);
}

/// A stream that a source dialled; `ctl` has read and proven its preamble.
#[derive(Debug)]
pub struct Arrival {
    /// The lane of the session.
    pub lane: u16,
    /// The stream, read up to the end of `early`.
    pub stream: ByteStream,
    /// Bytes that `ctl` has read behind the preamble.
    pub early: Vec<u8>,
}

/// The landing half.
pub trait DestinationHalf: Send + Debug {
    /// The writer of the pages.
    fn landing(&self) -> Landing {
        Landing::Moved
    }

    /// Adds a stream to the session as a lane. A transport without streams closes it.
    fn join(&mut self, _arrival: Arrival) {}

    /// Handles what has arrived; true if there was anything. An arrival is judged one step after it
    /// was first seen. The mover takes its commands before a step, so a step can see bytes without
    /// the Expect that preceded them. By the next step the mover has taken that Expect.
    fn step(&mut self, memory: &Memory, landings: &mut dyn Landings) -> Result<bool, SessionLost>;

    /// After this call the mover moves nothing more into the pages of `slot`.
    fn revoke(&mut self, slot: SlotId);

    /// The mover is about to park, or is awake again. A SeqCst fence orders this before its last
    /// look.
    fn park(&mut self, _parked: bool) {}

    /// From now on the slot expects the bytes of token `first` and of later tokens. A transport
    /// without a source can complete at once.
    fn expect(&mut self, notice: &Notice, first: u32, landings: &mut dyn Landings);
}

/// Shares of a chunk begin at multiples of a cache line.
const SHARE_ALIGN: u64 = 64;

/// The part of a chunk of `bytes` bytes that a lane carries; can be empty.
fn share(bytes: u64, lane: usize, lanes: usize) -> Range<u64> {
    let share = bytes.div_ceil(lanes as u64).next_multiple_of(SHARE_ALIGN);
    let edge = |lane: usize| share.saturating_mul(lane as u64).min(bytes);
    edge(lane)..edge(lane + 1)
}

/// A page number from a peer, checked against its pool.
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

//! Transport within a host. The destination copies from the source's pool, mapped read-only. After
//! the copy, the lease word proves that the pages still belonged to the room. No process writes
//! memory of another.
//!
//! The source writes offers into its own ring; the destination writes a cursor into its own page
//! (`ring`). Each maps the other's memory read-only. If the destination's page says that its
//! mover is parked, the source rings a doorbell (eventfd) after an offer. The destination takes an
//! offer one step after it saw it; [`DestinationHalf::step`] gives the reason.

mod ring;

use crate::cause::Cause;
use crate::ids::{Generation, Room, SlotId};
use crate::kv::region::{PeerRegion, Region};
use crate::stdx::failpoint::is_failpoint_active;
use crate::sys::event::EventFd;
use crate::transfer::aux::{AUX_TAIL, AuxRecord};
use crate::transfer::copy::{Pull, store_fence};
use crate::transfer::pages::PeerPageLists;
use crate::transfer::plan::Template;
use crate::transfer::transport::{
    CompletionMode, DestinationHalf, Full, Landings, Memory, Notice, Post, SessionLost, SourceHalf,
    page_within, share,
};
use bytemuck::{Pod, Zeroable};
use ring::{CURSOR_BYTES, Reader, Writer, ring_bytes};
use std::io;
use std::mem::offset_of;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Offers in flight per session. A slot has at most one waiting offer: the mover merges further
/// chunks.
const OFFERS: u64 = 1024;

/// Bytes that one lane copies at a time. They are enough to make the cost of a task small, and few
/// enough that a late core delays the copy only a little.
const TASK_BYTES: u64 = 1 << 20;

/// An offer: the KV of these tokens is in these pages as long as the lease word has this value.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct Offer {
    room: u64,
    /// The source slot's lease word when the pages were leased.
    word: u64,
    source_slot: u32,
    slot: u32,
    generation: u32,
    first_token: u32,
    end_token: u32,
    /// 1: `aux` is valid, and this is the last offer.
    last: u32,
    aux: AuxRecord,
}

/// Bytes of an offer without the aux record. An entry of the ring has only the used part of an
/// offer, because the reader fetches each cache line from another core's cache.
const WITHOUT_AUX: usize = offset_of!(Offer, aux);
const WITHOUT_TAIL: usize =
    (WITHOUT_AUX + offset_of!(AuxRecord, payload) + AUX_TAIL).next_multiple_of(8);

const _: () = assert!(size_of::<Offer>() == 240 && size_of::<Offer>() <= ring::RECORD_BYTES);

impl Offer {
    /// Bytes of the used part.
    fn length(&self) -> usize {
        match (self.last, self.aux.has_tail()) {
            (0, _) => WITHOUT_AUX,
            (_, false) => WITHOUT_TAIL,
            _ => size_of::<Offer>(),
        }
    }

    /// Loads an offer from a peer's ring; nothing in it is trusted.
    fn load(ring: &PeerRegion, at: usize) -> Offer {
        let head: Offer = ring.load(at, WITHOUT_AUX);
        if head.last == 0 {
            return head;
        }
        let offer: Offer = ring.load(at, WITHOUT_TAIL);
        ring.load(at, offer.length())
    }
}

/// The source's descriptors for one destination, sent over a unix socket (or duplicated
/// in-process).
#[derive(Debug)]
pub struct SourceDescriptors {
    /// KV pool.
    pub pool: OwnedFd,
    /// Page lists and lease words.
    pub lists: OwnedFd,
    /// Offers of this session.
    pub ring: OwnedFd,
}

/// A destination's descriptors for one source.
#[derive(Debug)]
pub struct DestinationDescriptors {
    /// The number of offers that it has read.
    pub cursor: OwnedFd,
    /// Wakes its mover.
    pub doorbell: OwnedFd,
}

/// The source's half.
#[derive(Debug)]
pub struct ShmSource {
    offers: Writer<OFFERS>,
    doorbell: EventFd,
}

/// The ring of a session before the destination has sent its descriptors.
#[derive(Debug)]
pub struct ShmRing(Region);

impl ShmRing {
    /// An empty ring.
    pub fn new() -> io::Result<ShmRing> {
        Region::new(c"baton-offers", ring_bytes(OFFERS)).map(ShmRing)
    }

    /// Descriptors for the destination.
    pub fn descriptors(&self, memory: &Memory) -> io::Result<SourceDescriptors> {
        let own = |fd: BorrowedFd<'_>| fd.try_clone_to_owned();
        Ok(SourceDescriptors {
            pool: own(memory.region.descriptor())?,
            lists: own(memory.lists.descriptor())?,
            ring: own(self.0.descriptor())?,
        })
    }

    /// Makes the source's half from the destination's descriptors.
    pub fn connect(self, from: DestinationDescriptors) -> io::Result<ShmSource> {
        let cursor = PeerRegion::map(from.cursor.as_fd(), CURSOR_BYTES)?;
        let doorbell = EventFd::from_descriptor(from.doorbell)?;
        Ok(ShmSource { offers: Writer::new(self.0, cursor), doorbell })
    }
}

impl SourceHalf for ShmSource {
    fn completion(&self) -> CompletionMode {
        CompletionMode::Pulled
    }

    fn post(&mut self, memory: &Memory, post: &Post) -> Result<(), Full> {
        let mut aux = post.last.unwrap_or_else(AuxRecord::zeroed);
        aux.generation = post.target.generation.0;
        let offer = Offer {
            room: post.target.room.0,
            word: memory.lists.lease_word(post.slot),
            source_slot: post.slot.0,
            slot: post.target.slot.0,
            generation: post.target.generation.0,
            first_token: post.tokens.start,
            end_token: post.tokens.end,
            last: post.last.is_some().into(),
            aux,
        };
        memory.region.publish();
        if self.offers.write(&offer, offer.length())? {
            self.doorbell.signal();
            memory.counters.add(0, 1);
        }
        Ok(())
    }

    fn step(
        &mut self,
        _memory: &Memory,
        _completed: &mut dyn FnMut(SlotId),
    ) -> Result<bool, SessionLost> {
        Ok(false)
    }

    /// An offer stays in the ring: the changed lease word makes it void.
    fn withdraw(&mut self, _slot: SlotId) -> bool {
        true
    }
}

/// The destination's knowledge of the source, from Welcome.
#[derive(Clone, Debug)]
pub struct PeerShape {
    /// Bytes of its KV pool.
    pub pool_bytes: u64,
    /// Pages of its pool.
    pub pages: u32,
    /// Its page lists.
    pub lists: crate::transfer::pages::Shape,
}

/// The destination's half.
#[derive(Debug)]
pub struct ShmDestination {
    pool: PeerRegion,
    pages: u32,
    page_size: u32,
    lists: PeerPageLists,
    offers: Reader<OFFERS>,
    template: Template,
}

/// The cursor of a session before the source has sent its descriptors.
#[derive(Debug)]
pub struct ShmCursor(Region);

impl ShmCursor {
    /// A cursor at zero.
    pub fn new() -> io::Result<ShmCursor> {
        Region::new(c"baton-cursor", CURSOR_BYTES).map(ShmCursor)
    }

    /// Descriptors for the source; `doorbell` wakes this worker's mover.
    pub fn descriptors(&self, doorbell: &EventFd) -> io::Result<DestinationDescriptors> {
        Ok(DestinationDescriptors {
            cursor: self.0.descriptor().try_clone_to_owned()?,
            doorbell: doorbell.as_fd().try_clone_to_owned()?,
        })
    }

    /// Makes the destination's half from the source's descriptors. `template` was made from the
    /// source's layout, which has `source_page_size`.
    pub fn connect(
        self,
        from: SourceDescriptors,
        shape: &PeerShape,
        source_page_size: u32,
        template: Template,
    ) -> io::Result<ShmDestination> {
        Ok(ShmDestination {
            pool: PeerRegion::map_adopted(from.pool.as_fd(), shape.pool_bytes as usize)?,
            pages: shape.pages,
            page_size: source_page_size,
            lists: PeerPageLists::map(from.lists.as_fd(), shape.lists)?,
            offers: Reader::new(PeerRegion::map(from.ring.as_fd(), ring_bytes(OFFERS))?, self.0),
            template,
        })
    }
}

impl DestinationHalf for ShmDestination {
    fn step(&mut self, memory: &Memory, landings: &mut dyn Landings) -> Result<bool, SessionLost> {
        let due = self.offers.due();
        for _ in 0..due {
            let offer = self.offers.read(Offer::load);
            self.take(&offer, memory, landings);
        }
        Ok(due > 0 || self.offers.look()?)
    }

    /// Nothing to do: only this thread and its helpers write, and the helpers have left at the end
    /// of a step.
    fn revoke(&mut self, _slot: SlotId) {}

    fn expect(&mut self, _notice: &Notice, _first: u32, _landings: &mut dyn Landings) {}

    fn park(&mut self, parked: bool) {
        self.offers.park(parked);
    }
}

impl ShmDestination {
    fn take(&self, offer: &Offer, memory: &Memory, landings: &mut dyn Landings) {
        let notice = Notice {
            slot: SlotId(offer.slot),
            generation: Generation(offer.generation),
            room: Room(offer.room),
        };
        let Some(expected) = landings.expected(&notice) else {
            return;
        };
        let slot = notice.slot;
        let tokens = offer.first_token..offer.end_token;
        let last = offer.last != 0;
        let in_order = tokens.start == expected.start && tokens.start < tokens.end;
        let whole = if last { tokens.end == expected.end } else { tokens.end < expected.end };
        if !in_order || !whole {
            return landings.fail(slot, Cause::Corrupt);
        }
        if let Err(cause) = self.copy(offer, &tokens, memory, slot) {
            return landings.fail(slot, cause);
        }
        landings.landed(slot, tokens.end);
        if !last {
            return;
        }
        if !offer.aux.belongs_to(notice.room, notice.generation) {
            return landings.fail(slot, Cause::Corrupt);
        }
        landings.complete(slot, offer.aux);
    }

    /// Copies, then proves: the lease word must still equal the offer's.
    fn copy(
        &self,
        offer: &Offer,
        tokens: &Range<u32>,
        memory: &Memory,
        slot: SlotId,
    ) -> Result<(), Cause> {
        let source_slot = SlotId(offer.source_slot);
        let pages = tokens.end.div_ceil(self.page_size) as usize;
        if !self.lists.holds(source_slot, pages) {
            return Err(Cause::Corrupt);
        }
        let first = (tokens.start / self.page_size) as usize;
        let page = |index| page_within(self.lists.page(source_slot, index), self.pages);
        if (first..pages).any(|index| page(index).is_none()) {
            return Err(self.stale_or_corrupt(offer, source_slot));
        }
        let bytes = self.template.bytes(tokens.clone());
        let tasks =
            if memory.copy_pool.are_several() { (bytes / TASK_BYTES).max(1) as usize } else { 1 };
        // Shares of one stream: no two tasks write the same bytes.
        memory.copy_pool.share(tasks, |task| {
            let (mut pull, mut copies) = (Pull::new(&self.pool, &memory.region), 0);
            let runs = self.template.runs(
                tokens.clone(),
                share(bytes, task, tasks),
                // The page is loaded and checked a second time, because the peer can have written
                // in between.
                |index| page(index).unwrap_or_default(),
                |index| {
                    memory
                        .lists
                        .page(slot, index ^ usize::from(is_failpoint_active("pages change places")))
                },
            );
            for run in runs {
                copies += 1;
                pull.add(&run);
            }
            pull.finish();
            memory.counters.add(copies, 0);
            // Orders this lane's stores; the stores of other lanes are ordered when they leave the
            // task.
            store_fence();
        });
        if self.lists.still_leased(source_slot, offer.word) { Ok(()) } else { Err(Cause::OtherLeg) }
    }

    fn stale_or_corrupt(&self, offer: &Offer, source_slot: SlotId) -> Cause {
        if self.lists.still_leased(source_slot, offer.word) {
            Cause::Corrupt
        } else {
            Cause::OtherLeg
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::PageId;
    use crate::kv::groups::GroupCounts;
    use crate::kv::layout::{KvDtype, KvLayout};
    use crate::kv::page_span::PageSpan;
    use crate::transfer::aux::AUX_PAYLOAD_BYTES;
    use crate::transfer::copy_pool::CopyPool;
    use crate::transfer::pages::PageLists;
    use crate::transfer::target::{SessionId, Target};
    use std::sync::Arc;

    const ROOM: Room = Room(7);
    const TOKENS: u32 = 4;

    /// A mover that has, or has not yet, taken the slot's Expect.
    #[derive(Default)]
    struct Slot {
        granted: bool,
        asked: u32,
        complete: Option<AuxRecord>,
    }

    impl Landings for Slot {
        fn current(&self, _: SlotId) -> Option<Notice> {
            None
        }

        fn expected(&mut self, _: &Notice) -> Option<Range<u32>> {
            self.asked += 1;
            self.granted.then_some(0..TOKENS)
        }

        fn landed(&mut self, _: SlotId, _: u32) {}

        fn complete(&mut self, _: SlotId, aux: AuxRecord) {
            self.complete = Some(aux);
        }

        fn lane_ended(&mut self, _: SlotId, _: u8, _: u32, _: &AuxRecord) {}

        fn fail(&mut self, _: SlotId, cause: Cause) {
            panic!("{cause}");
        }
    }

    fn memory() -> Memory {
        let layout = KvLayout::page_major(TOKENS, 1, 1, 8, KvDtype::F16);
        let lists = Arc::new(PageLists::new(2, 4).unwrap());
        lists.store(SlotId(0), PageSpan::whole(&[PageId(0)]));
        let region = Arc::new(Region::new(c"kv", layout.page_stride as usize).unwrap());
        Memory {
            groups: GroupCounts::FULL,
            region,
            layout,
            pages: 1,
            lists,
            counters: Arc::default(),
            copy_pool: CopyPool::default(),
        }
    }

    fn pair(source: &Memory, destination: &Memory) -> (ShmSource, ShmDestination) {
        let (ring, cursor) = (ShmRing::new().unwrap(), ShmCursor::new().unwrap());
        let shown = cursor.descriptors(&EventFd::new().unwrap()).unwrap();
        let shape = PeerShape {
            pool_bytes: source.region.len() as u64,
            pages: source.pages,
            lists: source.lists.shape(),
        };
        let template = Template::new(&source.layout, &destination.layout).unwrap();
        let from = ring.descriptors(source).unwrap();
        let destination = cursor.connect(from, &shape, TOKENS, template).unwrap();
        (ring.connect(shown).unwrap(), destination)
    }

    /// The last chunk of a request; its record ends with this tail.
    fn post(tail: &[u8]) -> Post {
        let mut payload = [0; AUX_PAYLOAD_BYTES];
        payload[..4].fill(42);
        payload[12] = tail.len() as u8;
        payload[AUX_TAIL..AUX_TAIL + tail.len()].copy_from_slice(tail);
        let slot = SlotId(0);
        let target = Target {
            session: SessionId(0),
            slot,
            generation: Generation(1),
            room: ROOM,
            prefix: 0,
        };
        Post { slot, target, tokens: 0..TOKENS, last: Some(AuxRecord::new(ROOM, payload)) }
    }

    #[test]
    fn an_offer_seen_before_its_grant_was_taken_is_not_lost() {
        let (from, to) = (memory(), memory());
        let (mut source, mut destination) = pair(&from, &to);
        let mut slot = Slot::default();
        source.post(&from, &post(&[])).unwrap();
        // The mover took its commands and stalled; then the grant was sent and the offer came.
        assert_eq!(destination.step(&to, &mut slot), Ok(true));
        assert_eq!(slot.asked, 0, "an offer is not judged in the step that sees it");
        slot.granted = true;
        assert_eq!(destination.step(&to, &mut slot), Ok(true));
        assert_eq!(destination.step(&to, &mut slot), Ok(false));
        assert!(slot.complete.is_some());
    }

    #[test]
    fn records_come_whole_with_and_without_a_tail() {
        let (from, to) = (memory(), memory());
        let (mut source, mut destination) = pair(&from, &to);
        // More than one round of the ring, so that entries hold data of earlier rounds.
        for round in 0..3 * OFFERS {
            let tail: &[_] = if round % 3 == 0 { &[5, 6] } else { &[] };
            let post = post(tail);
            source.post(&from, &post).unwrap();
            let mut slot = Slot { granted: true, ..Slot::default() };
            while destination.step(&to, &mut slot).unwrap() {}
            let sent = AuxRecord { generation: 1, ..post.last.unwrap() };
            assert_eq!(slot.complete, Some(sent));
        }
    }

    #[test]
    fn a_full_ring_takes_no_more() {
        let (from, to) = (memory(), memory());
        let (mut source, mut destination) = pair(&from, &to);
        for _ in 0..OFFERS {
            source.post(&from, &post(&[])).unwrap();
        }
        assert_eq!(source.post(&from, &post(&[])), Err(Full));
        let mut slot = Slot { granted: true, ..Slot::default() };
        while destination.step(&to, &mut slot).unwrap() {}
        assert_eq!(u64::from(slot.asked), OFFERS);
        source.post(&from, &post(&[])).unwrap();
    }
}

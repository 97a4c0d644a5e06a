//! Same host: the destination copies out of the source's pool, mapped read-only, and proves afterwards by
//! the lease word that the pages were still the room's. No peer ever writes another's memory.
//!
//! The source writes offers into a ring of its own, the destination its cursor into a page of its own; each
//! maps the other's read-only. A doorbell (eventfd of the destination's mover) follows each offer.

use crate::cause::Cause;
use crate::ids::{Generation, Room, SlotId};
use crate::kv::region::{PeerRegion, Region};
use crate::sys::event::EventCounter;
use crate::transfer::aux::AuxRecord;
use crate::transfer::copy;
use crate::transfer::pages::PeerPageLists;
use crate::transfer::plan::Template;
use crate::transfer::transport::{
    Completion, DestinationHalf, Full, Landings, Lost, Memory, Notice, Post, SourceHalf, page_within,
};
use bytemuck::{Pod, Zeroable};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};

/// Offers in flight per session; a slot has one at a time waiting at most, the mover merges the rest.
const OFFERS: u64 = 1024;
const OFFER_STRIDE: usize = 256;
/// The count of offers written has a memory page of its own.
const OFFERS_START: usize = 4096;
const RING_BYTES: usize = OFFERS_START + OFFERS as usize * OFFER_STRIDE;
const CURSOR_BYTES: usize = 4096;

/// "KV of these tokens lies in these pages, as long as the lease word is this."
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
    /// 1: `aux` is valid and nothing follows.
    last: u32,
    aux: AuxRecord,
}

const _: () = assert!(size_of::<Offer>() == 240 && size_of::<Offer>() <= OFFER_STRIDE);

/// What the source shows to one destination, to be sent over a unix socket (or duplicated in-process).
#[derive(Debug)]
pub struct SourceDescriptors {
    /// KV pool.
    pub pool: OwnedFd,
    /// Page lists and lease words.
    pub lists: OwnedFd,
    /// Offers of this session.
    pub ring: OwnedFd,
}

/// What a destination shows to one source.
#[derive(Debug)]
pub struct DestinationDescriptors {
    /// How many offers it has read.
    pub cursor: OwnedFd,
    /// Wakes its mover.
    pub doorbell: OwnedFd,
}

/// The source's half.
#[derive(Debug)]
pub struct ShmSource {
    ring: Region,
    written: u64,
    cursor: PeerRegion,
    doorbell: EventCounter,
}

/// The ring of a session before the destination has answered with its descriptors.
#[derive(Debug)]
pub struct ShmRing(Region);

impl ShmRing {
    /// An empty ring.
    pub fn new() -> io::Result<ShmRing> {
        Region::new(c"baton-offers", RING_BYTES).map(ShmRing)
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

    /// The half, once the destination has shown its own.
    pub fn connect(self, from: DestinationDescriptors) -> io::Result<ShmSource> {
        let cursor = PeerRegion::map(from.cursor.as_fd(), CURSOR_BYTES)?;
        let doorbell = EventCounter::from_descriptor(from.doorbell);
        Ok(ShmSource { ring: self.0, written: 0, cursor, doorbell })
    }
}

impl SourceHalf for ShmSource {
    fn completion(&self) -> Completion {
        Completion::Pulled
    }

    fn post(&mut self, memory: &Memory, post: &Post) -> Result<(), Full> {
        let read = self.cursor.load_word(0, Ordering::Acquire);
        // A cursor that makes no sense only hurts the destination that wrote it.
        if self.written.wrapping_sub(read) >= OFFERS {
            return Err(Full);
        }
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
        self.ring.store(OFFERS_START + (self.written % OFFERS) as usize * OFFER_STRIDE, &offer);
        self.written += 1;
        self.ring.word(0).store(self.written, Ordering::Release);
        self.doorbell.signal();
        Ok(())
    }

    fn step(&mut self, _memory: &Memory, _completed: &mut dyn FnMut(SlotId)) -> Result<bool, Lost> {
        Ok(false)
    }

    /// An offer in the ring needs no recall: the bumped lease word voids it.
    fn withdraw(&mut self, _slot: SlotId) -> bool {
        true
    }
}

/// What the destination knows of the source from Welcome.
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
    ring: PeerRegion,
    cursor: Region,
    read: u64,
    template: Template,
}

/// The cursor of a session before the source has shown its memory.
#[derive(Debug)]
pub struct ShmCursor(Region);

impl ShmCursor {
    /// A cursor at zero.
    pub fn new() -> io::Result<ShmCursor> {
        Region::new(c"baton-cursor", CURSOR_BYTES).map(ShmCursor)
    }

    /// Descriptors for the source; `doorbell` wakes this worker's mover.
    pub fn descriptors(&self, doorbell: &EventCounter) -> io::Result<DestinationDescriptors> {
        Ok(DestinationDescriptors {
            cursor: self.0.descriptor().try_clone_to_owned()?,
            doorbell: doorbell.as_fd().try_clone_to_owned()?,
        })
    }

    /// The half, once the source has shown its memory. `source_page_size` is that of the source's layout,
    /// from which `template` was made.
    pub fn connect(
        self,
        from: SourceDescriptors,
        shape: &PeerShape,
        source_page_size: u32,
        template: Template,
    ) -> io::Result<ShmDestination> {
        Ok(ShmDestination {
            pool: PeerRegion::map(from.pool.as_fd(), shape.pool_bytes as usize)?,
            pages: shape.pages,
            page_size: source_page_size,
            lists: PeerPageLists::map(from.lists.as_fd(), shape.lists)?,
            ring: PeerRegion::map(from.ring.as_fd(), RING_BYTES)?,
            cursor: self.0,
            read: 0,
            template,
        })
    }
}

impl DestinationHalf for ShmDestination {
    fn step(&mut self, memory: &Memory, landings: &mut dyn Landings) -> Result<bool, Lost> {
        let written = self.ring.load_word(0, Ordering::Acquire);
        let waiting = written.wrapping_sub(self.read);
        if waiting > OFFERS {
            return Err(Lost);
        }
        for _ in 0..waiting {
            let at = OFFERS_START + (self.read % OFFERS) as usize * OFFER_STRIDE;
            let offer: Offer = self.ring.load(at);
            self.read += 1;
            self.cursor.word(0).store(self.read, Ordering::Release);
            self.take(&offer, memory, landings);
        }
        Ok(waiting > 0)
    }

    /// This thread is the one that writes: between two steps nothing lands.
    fn revoke(&mut self, _slot: SlotId) {}

    fn expect(&mut self, _notice: &Notice, _landings: &mut dyn Landings) {}
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

    /// Copies and proves: after the copy the lease word must still be the offer's.
    fn copy(&self, offer: &Offer, tokens: &Range<u32>, memory: &Memory, slot: SlotId) -> Result<(), Cause> {
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
        self.template.for_each_run(
            tokens.clone(),
            // Looked at a second time, so checked a second time: the peer may have written in between.
            |index| page(index).unwrap_or_default(),
            |index| memory.lists.page(slot, index),
            |run| copy::pull(&self.pool, &memory.region, &run),
        );
        fence(Ordering::Acquire);
        if self.lists.lease_word(source_slot) == offer.word {
            copy::store_fence();
            Ok(())
        } else {
            Err(Cause::OtherLeg)
        }
    }

    fn stale_or_corrupt(&self, offer: &Offer, source_slot: SlotId) -> Cause {
        if self.lists.lease_word(source_slot) == offer.word { Cause::Corrupt } else { Cause::OtherLeg }
    }
}

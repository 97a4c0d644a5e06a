//! Data of the slots of a worker that peers can read: page lists, and at a source one lease word
//! per slot.
//!
//! They are in a separate memory file, which a destination with `shm` maps read-only. It reads page
//! numbers and lease words as atomics. A late reader gets whole but old numbers, and the lease word
//! shows that they are old.
//! Thread: the scheduler writes lists, before the command that refers to them; the mover writes
//! lease words.

use crate::ids::{PageId, SlotId};
use crate::kv::page_span::PageSpan;
use crate::kv::region::{Descriptor, PeerRegion, Region};
use crate::stdx::sync::{Ordering, fence};
use std::io;

/// One list of fixed capacity, and one lease word, per slot.
#[derive(Debug)]
pub struct PageLists {
    shape: Shape,
    region: Region,
}

/// A peer's lists, read-only and untrusted.
#[derive(Debug)]
pub struct PeerPageLists {
    shape: Shape,
    region: PeerRegion,
}

/// Number and capacity of the lists; announced to peers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Slots.
    pub slots: u32,
    /// Most pages of a list.
    pub capacity: u32,
}

impl Shape {
    fn bytes(self) -> usize {
        (self.slots as usize * (8 + 4 * self.capacity as usize)).next_multiple_of(4096).max(4096)
    }

    fn word(slot: SlotId) -> usize {
        slot.index() * 8
    }

    fn entry(self, slot: SlotId, index: usize) -> usize {
        self.slots as usize * 8 + (slot.index() * self.capacity as usize + index) * 4
    }
}

impl PageLists {
    /// Lists of at most `capacity` pages for `slots` slots.
    pub fn new(slots: usize, capacity: usize) -> io::Result<PageLists> {
        let shape = Shape { slots: slots as u32, capacity: capacity as u32 };
        Ok(PageLists { shape, region: Region::new(c"baton-slots", shape.bytes())? })
    }

    /// The shape, for Welcome.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The descriptor for a destination.
    pub fn descriptor(&self) -> Descriptor<'_> {
        self.region.descriptor()
    }

    /// Stores a part of a slot's list; entries before it stay unchanged. The command that the
    /// scheduler then sends to the mover orders the stores.
    pub fn store(&self, slot: SlotId, span: PageSpan<'_>) {
        assert!(span.end() <= self.shape.capacity as usize && slot.0 < self.shape.slots);
        for (index, page) in span.pages.iter().enumerate() {
            self.region
                .half_word(self.shape.entry(slot, span.first + index))
                .store(page.0, Ordering::Relaxed);
        }
    }

    /// The `index`-th page of a slot's list.
    #[inline]
    pub fn page(&self, slot: SlotId, index: usize) -> PageId {
        PageId(self.region.half_word(self.shape.entry(slot, index)).load(Ordering::Relaxed))
    }

    /// The current lease word of the slot. A copy is valid only if the word of its offer equals it.
    pub fn lease_word(&self, slot: SlotId) -> u64 {
        self.region.word(Shape::word(slot)).load(Ordering::Relaxed)
    }

    /// Changes the slot's lease word, so that every copy that has not checked the word again is
    /// void. The fence orders the change before any reuse of the pages. It pairs with the fence in
    /// [`PeerPageLists::still_leased`].
    pub fn bump(&self, slot: SlotId) {
        self.region.word(Shape::word(slot)).fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }
}

impl PeerPageLists {
    /// Maps a peer's lists of the announced shape.
    pub fn map(file: Descriptor<'_>, shape: Shape) -> io::Result<PeerPageLists> {
        Ok(PeerPageLists { shape, region: PeerRegion::map(file, shape.bytes())? })
    }

    /// Whether `slot` exists and its list can have `pages` pages.
    pub fn holds(&self, slot: SlotId, pages: usize) -> bool {
        slot.0 < self.shape.slots && pages <= self.shape.capacity as usize
    }

    /// The `index`-th page of a slot's list, as the peer wrote it. The caller has checked
    /// [`PeerPageLists::holds`].
    #[inline]
    pub fn page(&self, slot: SlotId, index: usize) -> PageId {
        PageId(self.region.load_half_word(self.shape.entry(slot, index)))
    }

    /// Whether the slot is still leased under the offer's `word`. If so, the list and pages read
    /// before belong to that offer's room. The fence orders those reads before the load of the
    /// word. It is SeqCst, like the fence of [`PageLists::bump`]. Acquire would not suffice: it
    /// needs a Release fence in the thread that next writes the pages, and another thread calls
    /// `bump`. The fence also covers reads by other threads that happened before this call.
    #[inline]
    pub fn still_leased(&self, slot: SlotId, word: u64) -> bool {
        fence(Ordering::SeqCst);
        self.region.load_word(Shape::word(slot)) == word
    }
}

//! A destination's slot that receives bytes from an untrusted peer.

use baton::cause::Cause;
use baton::ids::{Generation, PageId, Room, SlotId};
use baton::kv::groups::GroupCounts;
use baton::kv::layout::{KvDtype, KvLayout};
use baton::kv::page_span::PageSpan;
use baton::kv::region::Region;
use baton::transfer::aux::AuxRecord;
use baton::transfer::copy_pool::CopyPool;
use baton::transfer::pages::PageLists;
use baton::transfer::transport::{Landings, Memory, Notice};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

pub const TOKENS: u32 = 7;
pub const SLOTS: usize = 2;
const PAGES: u32 = 4;
const LEASED: [PageId; 2] = [PageId(2), PageId(0)];
const NOTICE: Notice = Notice { slot: SlotId(0), generation: Generation(1), room: Room(1) };

/// Pages of four tokens.
pub fn layout() -> KvLayout {
    KvLayout::page_major(4, 1, 1, 8, KvDtype::F16)
}

/// A pool filled with `word`, and a page list with the slot's pages.
pub fn memory(word: u64) -> Memory {
    let lists = Arc::new(PageLists::new(SLOTS, 8).expect("memory"));
    // The rest of the list is from an earlier use of the slot, and must not be used.
    let pages = [&LEASED[..], &[PageId(1); 6]].concat();
    lists.store(NOTICE.slot, PageSpan::whole(&pages));
    let layout = layout();
    let bytes = (u64::from(PAGES) * layout.page_stride) as usize;
    let region = Arc::new(Region::new(c"fuzz", bytes).expect("memory"));
    (0..bytes).step_by(8).for_each(|at| region.word(at).store(word, Ordering::Relaxed));
    Memory {
        groups: GroupCounts::FULL,
        region,
        layout,
        pages: PAGES,
        lists,
        counters: Arc::default(),
        copy_pool: CopyPool::default(),
    }
}

/// The slot that expects bytes.
#[derive(Default)]
pub struct Slot {
    received: u32,
    is_over: bool,
    lanes: u32,
}

impl Slot {
    /// Checks that nothing has landed outside the slot's pages.
    pub fn check(&self, memory: &Memory) {
        for page in (0..PAGES).map(PageId).filter(|page| !LEASED.contains(page)) {
            let at = u64::from(page.0) * memory.layout.page_stride;
            for word in (at..at + memory.layout.page_stride).step_by(8) {
                assert_eq!(
                    memory.region.word(word as usize).load(Ordering::Relaxed),
                    0,
                    "byte {word}"
                );
            }
        }
    }
}

impl Landings for Slot {
    fn current(&self, slot: SlotId) -> Option<Notice> {
        (slot == NOTICE.slot && !self.is_over).then_some(NOTICE)
    }

    fn expected(&mut self, notice: &Notice) -> Option<Range<u32>> {
        (*notice == NOTICE && !self.is_over).then_some(self.received..TOKENS)
    }

    fn landed(&mut self, slot: SlotId, end: u32) {
        assert!(slot == NOTICE.slot && !self.is_over);
        assert!((self.received..=TOKENS).contains(&end), "{} to {end}", self.received);
        self.received = end;
    }

    fn complete(&mut self, slot: SlotId, aux: AuxRecord) {
        assert!(slot == NOTICE.slot && !self.is_over && self.received == TOKENS);
        assert!(aux.belongs_to(NOTICE.room, NOTICE.generation));
        self.is_over = true;
    }

    fn lane_ended(&mut self, slot: SlotId, lane: u8, all: u32, aux: &AuxRecord) {
        assert!(slot == NOTICE.slot && !self.is_over && all & 1 << lane != 0);
        self.lanes |= 1 << lane;
        if self.lanes == all {
            assert!(aux.belongs_to(NOTICE.room, NOTICE.generation));
            self.is_over = true;
        }
    }

    fn fail(&mut self, slot: SlotId, _cause: Cause) {
        assert!(slot == NOTICE.slot && !self.is_over);
        self.is_over = true;
    }
}

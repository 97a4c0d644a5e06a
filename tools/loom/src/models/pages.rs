//! Page lists and lease words.

use crate::channel;
use crate::ids::{PageId, SlotId};
use crate::kv::page_span::PageSpan;
use crate::kv::region::Region;
use crate::stdx::sync::Ordering;
use crate::transfer::pages::{PageLists, PeerPageLists};
use loom::thread::{self, JoinHandle};
use std::sync::Arc;

pub const SLOT: SlotId = SlotId(0);

/// A slot with 7 in its page 0. Meanwhile the source's mover takes the pages back. After its
/// message the scheduler writes the pages, and the slot's list, for another room.
pub struct Taken {
    /// The lists as the destination maps them.
    pub shown: PeerPageLists,
    pub pool: Region,
    /// The lease word of the offer.
    pub word: u64,
    pub threads: [JoinHandle<()>; 2],
}

impl Taken {
    pub fn begin() -> Taken {
        let lists = Arc::new(PageLists::new(1, 1).unwrap());
        let pool = Region::new(c"pool", 16).unwrap();
        lists.store(SLOT, PageSpan::whole(&[PageId(0)]));
        pool.word(0).store(7, Ordering::Relaxed);
        let shown = PeerPageLists::map(lists.descriptor(), lists.shape()).unwrap();
        let word = lists.lease_word(SLOT);
        let (ends, ended) = channel::bounded(1);
        let mover = thread::spawn({
            let lists = lists.clone();
            move || {
                lists.bump(SLOT);
                ends.try_send(()).unwrap();
            }
        });
        let scheduler = thread::spawn({
            let pool = pool.clone();
            move || {
                if ended.try_recv().is_ok() {
                    lists.store(SLOT, PageSpan::whole(&[PageId(1)]));
                    pool.word(0).store(8, Ordering::Relaxed);
                }
            }
        });
        Taken { shown, pool, word, threads: [mover, scheduler] }
    }
}

/// Bytes and list can be of different rooms. Then the lease word has changed.
pub fn a_copy_that_counts_is_of_the_rooms_pages() {
    let Taken { shown, pool, word, threads } = Taken::begin();
    let page = shown.page(SLOT, 0);
    let copied = pool.word(page.index() * 8).load(Ordering::Relaxed);
    if shown.still_leased(SLOT, word) {
        assert_eq!((page, copied), (PageId(0), 7), "a copy of another room's pages was accepted");
    }
    for thread in threads {
        thread.join().unwrap();
    }
}

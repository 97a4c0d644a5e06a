//! Page lists and lease words.

use crate::ids::{PageId, SlotId};
use crate::kv::region::Region;
use crate::stdx::sync::{AtomicU64, Ordering};
use crate::transfer::pages::{PageLists, PeerPageLists};
use loom::sync::Arc;
use loom::thread;

const SLOT: SlotId = SlotId(0);

/// A destination copies while the source takes the pages back and fills them, and the slot's list, for another
/// room. Bytes and list may come mixed; then the word says so.
pub fn a_copy_that_counts_is_of_the_rooms_pages() {
    let lists = PageLists::new(1, 1).unwrap();
    let pool = Region::new(c"pool", 16).unwrap();
    lists.store(SLOT, &[PageId(0)]);
    pool.word(0).store(7, Ordering::Relaxed);
    let shown = PeerPageLists::map(lists.descriptor(), lists.shape()).unwrap();
    let word = lists.lease_word(SLOT);
    let source = thread::spawn({
        let pool = pool.clone();
        move || {
            lists.bump(SLOT);
            lists.store(SLOT, &[PageId(1)]);
            pool.word(0).store(8, Ordering::Relaxed);
            lists
        }
    });
    let page = shown.page(SLOT, 0);
    let copied = pool.word(page.index() * 8).load(Ordering::Relaxed);
    if shown.still_leased(SLOT, word) {
        assert_eq!((page, copied), (PageId(0), 7), "a copy of another room's pages counts");
    }
    source.join().unwrap();
}

/// `Handle::begin`: the list, then the command. The ring to the mover gives what any does, Release and Acquire.
pub fn a_list_is_there_when_the_mover_is_told() {
    let lists = Arc::new(PageLists::new(1, 1).unwrap());
    let begun = Arc::new(AtomicU64::new(0));
    let scheduler = thread::spawn({
        let (lists, begun) = (lists.clone(), begun.clone());
        move || {
            lists.store(SLOT, &[PageId(5)]);
            begun.store(1, Ordering::Release);
        }
    });
    if begun.load(Ordering::Acquire) == 1 {
        assert_eq!(lists.page(SLOT, 0), PageId(5));
    }
    scheduler.join().unwrap();
}

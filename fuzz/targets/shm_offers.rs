//! The ring that a source writes in a session over shm. For any offers, bytes are written to the
//! slot's pages or nowhere, and pages outside the source's pool are never read.

use super::landing::{Slot, layout, memory};
use baton::kv::region::Region;
use baton::sys::event::EventFd;
use baton::transfer::plan::Template;
use baton::transfer::transport::DestinationHalf;
use baton::transfer::transport::shm::{PeerShape, ShmCursor, SourceDescriptors};
use std::sync::atomic::Ordering;

/// The layout of entries in `transfer::transport::shm`.
const STRIDE: usize = 256;
const ENTRIES: usize = 1024;

/// The input has entries one after the other. If the first byte of an entry is even, its first word
/// is replaced by the correct one.
pub fn run(data: &[u8]) {
    let (ours, theirs) = (memory(0), memory(u64::MAX));
    let ring = Region::new(c"fuzz", ENTRIES * STRIDE).expect("memory");
    for (index, entry) in data.chunks(STRIDE).take(ENTRIES).enumerate() {
        let at = index * STRIDE;
        for (place, word) in entry.chunks(8).enumerate() {
            let mut bytes = [0; 8];
            bytes[..word.len()].copy_from_slice(word);
            let value = match place {
                0 if bytes[0] % 2 == 0 => index as u64 + 1,
                _ => u64::from_le_bytes(bytes),
            };
            ring.word(at + 8 * place).store(value, Ordering::Relaxed);
        }
    }
    let cursor = ShmCursor::new().expect("memory");
    let doorbell = EventFd::new().expect("an eventfd");
    drop(cursor.descriptors(&doorbell).expect("descriptors"));
    let own = |fd: std::os::fd::BorrowedFd<'_>| fd.try_clone_to_owned().expect("a descriptor");
    let from = SourceDescriptors {
        pool: own(theirs.region.descriptor()),
        lists: own(theirs.lists.descriptor()),
        ring: own(ring.descriptor()),
    };
    let shape = PeerShape {
        pool_bytes: theirs.region.len() as u64,
        pages: theirs.pages,
        lists: theirs.lists.shape(),
    };
    let template = Template::new(&layout(), &layout()).expect("the same");
    let mut half = cursor.connect(from, &shape, layout().page_size, template).expect("it maps");
    let mut slot = Slot::default();
    while half.step(&ours, &mut slot).unwrap_or(false) {
        slot.check(&ours);
    }
    slot.check(&ours);
}

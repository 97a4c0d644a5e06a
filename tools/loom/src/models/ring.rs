//! The ring of offers between two processes.

use crate::kv::region::{PeerRegion, Region};
use crate::models::sleep::Sleep;
use crate::stdx::event_count::EventCount;
use crate::transfer::ring::{CURSOR_BYTES, Reader, Writer, ring_bytes};
use crate::transfer::transport::Full;
use loom::thread;

/// Entries of the ring: the third offer reuses the place of the first.
const OFFERS: u64 = 2;

fn ends() -> (Writer<OFFERS>, Reader<OFFERS>) {
    let ring = Region::new(c"ring", ring_bytes(OFFERS)).unwrap();
    let cursor = Region::new(c"cursor", CURSOR_BYTES).unwrap();
    let shown = PeerRegion::map(ring.descriptor(), ring_bytes(OFFERS)).unwrap();
    let read = PeerRegion::map(cursor.descriptor(), CURSOR_BYTES).unwrap();
    (Writer::new(ring, read), Reader::new(shown, cursor))
}

fn offer(number: u64) -> [u64; 2] {
    [number + 100, number + 200]
}

/// Takes the offers that a look finds, as a mover's step does. Returns whether there were new ones.
fn take(reader: &mut Reader<OFFERS>, taken: &mut u64) -> bool {
    let new = reader.look().unwrap();
    for _ in 0..reader.due() {
        assert_eq!(reader.read(|ring, at| ring.load::<[u64; 2]>(at, 16)), offer(*taken));
        *taken += 1;
    }
    new
}

/// Entries arrive complete and in order, also in a reused place: an entry is not written while it
/// is read.
pub fn entries_come_whole_and_in_order() {
    let (mut writer, mut reader) = ends();
    let source = thread::spawn(move || {
        let mut written = 0;
        for _ in 0..3 {
            match writer.write(&offer(written), 16) {
                Ok(_) => written += 1,
                Err(Full) => thread::yield_now(),
            }
        }
        (writer, written)
    });
    let mut taken = 0;
    for _ in 0..2 {
        take(&mut reader, &mut taken);
    }
    let (_writer, written) = source.join().unwrap();
    while take(&mut reader, &mut taken) {}
    assert_eq!(taken, written);
}

/// The destination's mover parks as `Waiter::run` does: it sets the word in its page, prepares the
/// event count, and looks once more.
pub fn a_parked_reader_is_woken() {
    let (mut writer, mut reader) = ends();
    let sleep = Sleep::new();
    let doorbell = sleep.clone();
    let source = thread::spawn(move || {
        for number in 0..2 {
            if writer.write(&offer(number), 16).unwrap() {
                doorbell.wake();
            }
        }
    });
    let bell = EventCount::new(|| ());
    let mut taken = 0;
    while taken < 2 {
        reader.park(true);
        bell.prepare_wait();
        if !take(&mut reader, &mut taken) {
            sleep.sleep();
        }
        bell.cancel_wait();
        reader.park(false);
    }
    source.join().unwrap();
}

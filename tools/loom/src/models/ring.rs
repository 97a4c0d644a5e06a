//! The ring of offers between two processes.

use crate::kv::region::{PeerRegion, Region};
use crate::models::sleep::Sleep;
use crate::stdx::bell::Bell;
use crate::transfer::ring::{CURSOR_BYTES, Reader, Writer, ring_bytes};
use crate::transfer::transport::Full;
use loom::thread;

/// So small that the third offer takes the place of the first.
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

/// Takes what a look shows, as a mover's step does; how many.
fn take(reader: &mut Reader<OFFERS>, taken: &mut u64) -> bool {
    let new = reader.look().unwrap();
    for _ in 0..reader.due() {
        assert_eq!(reader.read(|ring, at| ring.load::<[u64; 2]>(at, 16)), offer(*taken));
        *taken += 1;
    }
    new
}

/// Also the one that takes another's place: nobody writes an entry that is being read.
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

/// The destination's mover parks as `Mover::run` does: its word in its page, its bell, one more look.
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
    let bell = Bell::new(|| ());
    let mut taken = 0;
    while taken < 2 {
        reader.park(true);
        bell.announce();
        if !take(&mut reader, &mut taken) {
            sleep.sleep();
        }
        bell.dismiss();
        reader.park(false);
    }
    source.join().unwrap();
}

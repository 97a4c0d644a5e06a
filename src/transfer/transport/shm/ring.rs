//! The ring of offers: numbered entries that one process writes and another reads, each in memory that only
//! it can write.
//!
//! Thread: `move` of the source's process and of the destination's. Invariants: an entry is stored before its
//! number and read behind it, so that who sees the number sees the whole entry; it is read before the cursor
//! that gives its place back; of a writer that has stored and a reader that is about to park, one sees the
//! other. Not here: what an entry says, and whether it is true.

use crate::kv::region::{PeerRegion, Region};
use crate::stdx::planted::is_planted;
use crate::stdx::sync::{Ordering, fence};
use crate::transfer::transport::{Full, Lost};
use bytemuck::Pod;

/// From one entry to the next. An entry is a number, the count of entries up to this one, then the record.
pub const STRIDE: usize = 256;
const NUMBER_BYTES: usize = 8;
/// Most bytes of a record.
pub const RECORD_BYTES: usize = STRIDE - NUMBER_BYTES;
/// Of the reader's page.
pub const CURSOR_BYTES: usize = 4096;
/// Where it says how many entries it has read, and whether it is about to park.
const READ: usize = 0;
const PARKED: usize = 64;

/// Bytes of a ring of so many entries.
pub const fn ring_bytes(entries: u64) -> usize {
    entries as usize * STRIDE
}

/// Where the `number`-th entry lies, counted from 0.
fn entry<const ENTRIES: u64>(number: u64) -> usize {
    (number % ENTRIES) as usize * STRIDE
}

/// The source's end.
#[derive(Debug)]
pub struct Writer<const ENTRIES: u64> {
    ring: Region,
    written: u64,
    cursor: PeerRegion,
}

impl<const ENTRIES: u64> Writer<ENTRIES> {
    /// Over an empty ring, and the page of its reader.
    pub fn new(ring: Region, cursor: PeerRegion) -> Writer<ENTRIES> {
        Writer { ring, written: 0, cursor }
    }

    /// Writes the first `bytes` of a record. True when the reader may be parked and must be woken.
    pub fn write<T: Pod>(&mut self, record: &T, bytes: usize) -> Result<bool, Full> {
        let read = self.cursor.load_word(READ, Ordering::Acquire);
        // A cursor that makes no sense only hurts the reader that wrote it.
        if self.written.wrapping_sub(read) >= ENTRIES {
            return Err(Full);
        }
        let at = entry::<ENTRIES>(self.written);
        self.ring.store(at + NUMBER_BYTES, record, bytes);
        self.written += 1;
        self.ring.word(at).store(self.written, Ordering::Release);
        // Between the entry and the look, as the reader's is between its word and its last look at the ring:
        // one of the two sees the other.
        fence(Ordering::SeqCst);
        Ok(self.cursor.load_word(PARKED, Ordering::Relaxed) != 0
            && !is_planted("parked reader is not woken"))
    }
}

/// The destination's end.
#[derive(Debug)]
pub struct Reader<const ENTRIES: u64> {
    ring: PeerRegion,
    cursor: Region,
    /// Entries that were there at a look, and those read.
    seen: u64,
    read: u64,
}

impl<const ENTRIES: u64> Reader<ENTRIES> {
    /// Over the ring of a writer, and a page of our own.
    pub fn new(ring: PeerRegion, cursor: Region) -> Reader<ENTRIES> {
        Reader { ring, cursor, seen: 0, read: 0 }
    }

    /// Whether there are entries that were not at the last look.
    pub fn look(&mut self) -> Result<bool, Lost> {
        let before = self.seen;
        while self.seen - self.read < ENTRIES {
            let number = self.ring.load_word(entry::<ENTRIES>(self.seen), Ordering::Acquire);
            // Not written yet, or an earlier round's.
            if number <= self.seen {
                break;
            }
            if number != self.seen + 1 {
                return Err(Lost::NONSENSE);
            }
            self.seen += 1;
        }
        Ok(self.seen > before)
    }

    /// Entries seen and not yet read.
    pub fn due(&self) -> u64 {
        self.seen - self.read
    }

    /// Reads the next of those due and gives its place back. `load` is told where its record lies.
    pub fn read<T>(&mut self, load: impl FnOnce(&PeerRegion, usize) -> T) -> T {
        debug_assert!(self.due() > 0, "read what was not seen");
        let record = load(&self.ring, entry::<ENTRIES>(self.read) + NUMBER_BYTES);
        self.read += 1;
        self.cursor.word(READ).store(self.read, Ordering::Release);
        record
    }

    /// Says that the writer must wake us, or no longer. A SeqCst fence follows before the last look.
    pub fn park(&self, parked: bool) {
        self.cursor.word(PARKED).store(parked.into(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_number_ends_the_session() {
        let ring = Region::new(c"ring", ring_bytes(2)).unwrap();
        let cursor = Region::new(c"cursor", CURSOR_BYTES).unwrap();
        let shown = PeerRegion::map(cursor.descriptor(), cursor.len()).unwrap();
        let seen = PeerRegion::map(ring.descriptor(), ring.len()).unwrap();
        let mut reader: Reader<2> = Reader::new(seen, cursor);
        let mut writer: Writer<2> = Writer::new(ring, shown);
        assert_eq!(reader.look(), Ok(false));
        assert_eq!(writer.write(&1u64, 8), Ok(false));
        assert_eq!(reader.look(), Ok(true));
        assert_eq!(writer.write(&2u64, 8), Ok(false));
        writer.ring.word(STRIDE).store(3, Ordering::Release);
        assert_eq!(reader.look(), Err(Lost::NONSENSE));
    }
}

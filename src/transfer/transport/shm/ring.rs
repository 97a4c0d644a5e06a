//! The ring of offers: numbered entries that one process writes and another reads. Each process
//! writes only its own memory.
//!
//! Thread: `move` of the source's process and of the destination's.
//! Invariants: the writer stores an entry before its number, and the reader loads it after the
//! number, so it sees the whole entry. It reads the entry before it moves the cursor that frees the
//! place. If a writer stores while a reader is about to park, at least one of them sees the other.
//! Not here: the content of an entry and its checks.

use crate::kv::region::{PeerRegion, Region};
use crate::stdx::failpoint::is_failpoint_active;
use crate::stdx::sync::{Ordering, fence};
use crate::transfer::transport::{Full, SessionLost};
use bytemuck::Pod;

/// Bytes from one entry to the next. An entry is a number (the count of entries up to this one),
/// then the record.
pub const STRIDE: usize = 256;
const NUMBER_BYTES: usize = 8;
/// Most bytes of a record.
pub const RECORD_BYTES: usize = STRIDE - NUMBER_BYTES;
/// Bytes of the reader's page.
pub const CURSOR_BYTES: usize = 4096;
/// Offsets of the number of entries read, and of the flag for a reader that is about to park.
const READ: usize = 0;
const PARKED: usize = 64;

/// Bytes of a ring of `entries` entries.
pub const fn ring_bytes(entries: u64) -> usize {
    entries as usize * STRIDE
}

/// Offset of the `number`-th entry, counted from 0.
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
    /// A writer over an empty ring and the page of its reader.
    pub fn new(ring: Region, cursor: PeerRegion) -> Writer<ENTRIES> {
        Writer { ring, written: 0, cursor }
    }

    /// Writes the first `bytes` of a record. True if the reader may be parked and must be woken.
    pub fn write<T: Pod>(&mut self, record: &T, bytes: usize) -> Result<bool, Full> {
        let read = self.cursor.acquire_word(READ);
        // An invalid cursor harms only the reader that wrote it.
        if self.written.wrapping_sub(read) >= ENTRIES {
            return Err(Full);
        }
        let at = entry::<ENTRIES>(self.written);
        self.ring.store(at + NUMBER_BYTES, record, bytes);
        self.written += 1;
        self.ring.word(at).store(self.written, Ordering::Release);
        // The fence orders the entry before the load. The reader has one between its parked word
        // and its last look at the ring, so one of the two sees the other.
        fence(Ordering::SeqCst);
        Ok(self.cursor.load_word(PARKED) != 0 && !is_failpoint_active("parked reader is not woken"))
    }
}

/// The destination's end.
#[derive(Debug)]
pub struct Reader<const ENTRIES: u64> {
    ring: PeerRegion,
    cursor: Region,
    /// Number of entries seen, and number of entries read.
    seen: u64,
    read: u64,
}

impl<const ENTRIES: u64> Reader<ENTRIES> {
    /// A reader over the ring of a writer, and a page of its own.
    pub fn new(ring: PeerRegion, cursor: Region) -> Reader<ENTRIES> {
        Reader { ring, cursor, seen: 0, read: 0 }
    }

    /// Looks for new entries. Returns whether there are any.
    pub fn look(&mut self) -> Result<bool, SessionLost> {
        let before = self.seen;
        while self.seen - self.read < ENTRIES {
            let number = self.ring.acquire_word(entry::<ENTRIES>(self.seen));
            // Not written yet, or left from an earlier round.
            if number <= self.seen {
                break;
            }
            if number != self.seen + 1 {
                return Err(SessionLost::NONSENSE);
            }
            self.seen += 1;
        }
        Ok(self.seen > before)
    }

    /// Entries seen and not yet read.
    pub fn due(&self) -> u64 {
        self.seen - self.read
    }

    /// Reads the next due entry and frees its place. `load` gets the offset of the record.
    pub fn read<T>(&mut self, load: impl FnOnce(&PeerRegion, usize) -> T) -> T {
        debug_assert!(self.due() > 0, "read what was not seen");
        let record = load(&self.ring, entry::<ENTRIES>(self.read) + NUMBER_BYTES);
        self.read += 1;
        self.cursor.word(READ).store(self.read, Ordering::Release);
        record
    }

    /// Stores whether the writer must wake this reader. A SeqCst fence follows before the last
    /// look.
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
        assert_eq!(reader.look(), Err(SessionLost::NONSENSE));
    }
}

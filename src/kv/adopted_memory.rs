//! Memory that another engine allocated, moved in place onto a memory file so that peers can map
//! it.
//!
//! ```text
//!  pages     |   page    |   page    |   page    |
//!  memory      other [==== adopted bytes ====] other
//!                  head: a copy; middle: mapped; tail: a copy
//! ```
//! Owns: the mappings of whole pages, and the copies of the parts of pages at both ends. Those
//! pages stay as they are, because the bytes beside the adopted ones belong to other objects. Owns
//! also the list of all bytes that regions of this process have adopted.
//! Thread: the owner adopts and returns the memory while nothing else uses it. Any thread
//! publishes, one at a time. Invariants: bytes outside the adopted range are neither shown to peers
//! nor changed. No byte is adopted twice. The file begins with the memory page of the first byte,
//! and ends with the last byte. So its size less the adopted bytes is the place of the first one.
#![allow(unsafe_code)]

use super::memory_file::{PAGE, make_file, seal};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::slice;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The addresses that regions of this process have adopted.
static CLAIMED: Mutex<Vec<Range<usize>>> = Mutex::new(Vec::new());

/// The right to the bytes of one region. Its drop gives them back.
#[derive(Debug)]
pub(super) struct Claim(Range<usize>);

impl Claim {
    /// Claims bytes that no other region has adopted.
    ///
    /// # Errors
    /// Another region has some of them.
    pub(super) fn new(base: NonNull<u8>, bytes: usize) -> io::Result<Claim> {
        let start = base.as_ptr().addr();
        let end = start.checked_add(bytes).ok_or_else(|| refused("the bytes have no end"))?;
        let mut claimed = locked(&CLAIMED);
        if claimed.iter().any(|other| start < other.end && other.start < end) {
            return Err(refused("another region has some of these bytes"));
        }
        claimed.push(start..end);
        Ok(Claim(start..end))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        locked(&CLAIMED).retain(|claimed| *claimed != self.0);
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn refused(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}

/// What was done to adopted memory, and what undoes it.
#[derive(Debug)]
pub(super) struct Adopted {
    /// First address and length of the whole pages; they are mapped from the file.
    whole: (usize, usize),
    edges: Vec<Edge>,
    file: File,
    /// First address of the adopted bytes.
    base: usize,
    /// Held while the edges are copied: a late copy must not replace a newer one.
    publication: Mutex<()>,
}

/// The adopted bytes in a page that other objects share, and their copy in the file.
#[derive(Debug)]
struct Edge {
    memory: usize,
    bytes: usize,
    /// The mapped page of the copy.
    page: NonNull<u8>,
    /// Where the copy begins in its page.
    at: usize,
}

// SAFETY: the pointers name mappings that live as long as the value. Access is by atomics, or while
// the owner says that nothing else uses the memory.
unsafe impl Send for Adopted {}
// SAFETY: as above.
unsafe impl Sync for Adopted {}

impl Adopted {
    /// Moves the whole pages of `bytes` bytes at `base` onto a memory file.
    ///
    /// # Errors
    /// The memory is not private and anonymous, or the system has no more memory. Nothing has
    /// changed then.
    ///
    /// # Safety
    /// The bytes are whole words, at least one, and claimed. They are readable and writable until
    /// the value is dropped. No thread writes them during the call. No device has their physical
    /// pages.
    pub(super) unsafe fn new(base: NonNull<u8>, bytes: usize) -> io::Result<Adopted> {
        let start = base.as_ptr().addr();
        let end = start + bytes;
        debug_assert!(start.is_multiple_of(8) && end.is_multiple_of(8) && bytes > 0, "whole words");
        if !is_private_memory(start, end)? {
            return Err(refused("remapped memory must be private, anonymous and writable"));
        }
        let (skew, first) = (start % PAGE, start.next_multiple_of(PAGE));
        let last = end / PAGE * PAGE;
        let file = make_file(c"baton-adopted", skew + bytes)?;
        let place = |address: usize| (address - start + skew) as u64;
        // SAFETY: the caller's promise.
        copy_to_file(unsafe { slice::from_raw_parts(base.as_ptr(), bytes) }, &file, skew as u64)?;
        let mut adopted = Adopted {
            whole: (first, 0),
            edges: Vec::new(),
            file,
            base: start,
            publication: Mutex::new(()),
        };
        if first < start || last < first {
            // All bytes are in one page.
            adopted.add_edge(start, bytes, place(start))?;
        } else {
            for (from, to) in [(start, first.min(end)), (last.max(start), end)] {
                if from < to {
                    adopted.add_edge(from, to - from, place(from))?;
                }
            }
        }
        // Writable mappings must exist before the seal. The last step is the only one that changes
        // the memory.
        if last > first {
            let shared = libc::MAP_SHARED | libc::MAP_FIXED;
            map(first, last - first, shared, adopted.file.as_raw_fd(), place(first))?;
            adopted.whole.1 = last - first;
        }
        seal(&adopted.file)?;
        Ok(adopted)
    }

    fn add_edge(&mut self, memory: usize, bytes: usize, place: u64) -> io::Result<()> {
        let at = place as usize % PAGE;
        let descriptor = self.file.as_raw_fd();
        let page = map(0, PAGE, libc::MAP_SHARED, descriptor, place - at as u64)?;
        self.edges.push(Edge { memory, bytes, page, at });
        Ok(())
    }

    /// The file that peers map.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Copies the adopted bytes of shared pages to the file, so that peers see them. Bytes that
    /// another thread writes meanwhile are those of no leased page.
    pub(super) fn publish(&self) {
        let _alone = locked(&self.publication);
        for edge in &self.edges {
            for at in (0..edge.bytes).step_by(8) {
                // SAFETY: both words lie in memory that lives as long as this value; both begin at
                // a multiple of 8, and an atomic may be shared with any thread and process.
                let (from, to) = unsafe {
                    let from = std::ptr::with_exposed_provenance_mut::<u64>(edge.memory + at);
                    let to = edge.page.as_ptr().add(edge.at + at).cast::<u64>();
                    (AtomicU64::from_ptr(from), AtomicU64::from_ptr(to))
                };
                to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
            }
        }
    }

    /// Makes the whole pages private memory again, with the same content. It needs as much memory
    /// as they have, because the seals keep the file whole until no process maps it.
    ///
    /// # Errors
    /// The system has no more memory. Nothing has changed then.
    pub(super) fn give_back(&mut self) -> io::Result<()> {
        let (first, bytes) = self.whole;
        if bytes == 0 {
            return Ok(());
        }
        let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let copy = map(0, bytes, private, -1, 0)?;
        let place = (first - self.base + self.base % PAGE) as u64;
        // SAFETY: the mapping was just made, and nothing else knows it.
        let into = unsafe { slice::from_raw_parts_mut(copy.as_ptr(), bytes) };
        let copied = copy_from_file(&self.file, place, into);
        let moved = copied.and_then(|()| {
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            let target = std::ptr::with_exposed_provenance_mut::<libc::c_void>(first);
            // SAFETY: moves the copy over the whole pages, which this value mapped. Their users see
            // the same bytes.
            let moved = unsafe { libc::mremap(copy.as_ptr().cast(), bytes, bytes, flags, target) };
            if moved == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
        });
        match moved {
            Ok(()) => self.whole.1 = 0,
            // SAFETY: the copy is still where it was made.
            Err(_) => _ = unsafe { libc::munmap(copy.as_ptr().cast(), bytes) },
        }
        moved
    }
}

impl Drop for Adopted {
    fn drop(&mut self) {
        if let Err(why) = self.give_back() {
            // The memory works as before: its file lives as long as the mapping.
            crate::event!(
                Warn,
                "kv",
                "adopted memory stays shared with peers",
                bytes = self.whole.1,
                why = why
            );
        }
        for edge in &self.edges {
            // SAFETY: this value mapped the page, and no pointer to it outlives the value.
            unsafe { libc::munmap(edge.page.as_ptr().cast(), PAGE) };
        }
    }
}

/// Whether all bytes from `start` to `end` are private, anonymous and writable memory. A move of
/// other memory would cut it off from its file, or from the processes that share it.
fn is_private_memory(start: usize, end: usize) -> io::Result<bool> {
    let maps = std::fs::read("/proc/self/maps")?;
    let mut covered = start;
    for line in String::from_utf8_lossy(&maps).lines() {
        // Addresses, rights, offset, device, inode, name.
        let fields: Vec<&str> = line.split_whitespace().take(5).collect();
        let [addresses, rights, _, _, inode] = fields[..] else { continue };
        let number = |text| usize::from_str_radix(text, 16).ok();
        let Some((first, last)) = addresses.split_once('-') else { continue };
        let (Some(first), Some(last)) = (number(first), number(last)) else { continue };
        if last <= covered {
            continue;
        }
        let is_private = rights.starts_with("rw") && rights.ends_with('p') && inode == "0";
        if first > covered || !is_private {
            return Ok(false);
        }
        covered = last;
        if covered >= end {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Maps memory; at `address` if the flags say so.
fn map(address: usize, bytes: usize, flags: i32, file: i32, place: u64) -> io::Result<NonNull<u8>> {
    let (hint, protection) =
        (std::ptr::with_exposed_provenance_mut(address), libc::PROT_READ | libc::PROT_WRITE);
    // SAFETY: without MAP_FIXED, the kernel chooses an address. With it, the caller owns the pages.
    let base = unsafe { libc::mmap(hint, bytes, protection, flags, file, place as libc::off_t) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at address zero"))
}

/// Copies memory to a file, but no pages of zeros: they need no memory in the file.
fn copy_to_file(memory: &[u8], file: &File, place: u64) -> io::Result<()> {
    for (number, page) in (0u64..).zip(memory.chunks(PAGE)) {
        if page.iter().any(|&byte| byte != 0) {
            file.write_all_at(page, place + number * PAGE as u64)?;
        }
    }
    Ok(())
}

/// Copies a file to zeroed memory, but no pages of zeros.
fn copy_from_file(file: &File, place: u64, memory: &mut [u8]) -> io::Result<()> {
    let mut page = [0; PAGE];
    for (number, target) in (0u64..).zip(memory.chunks_mut(PAGE)) {
        let page = &mut page[..target.len()];
        file.read_exact_at(page, place + number * PAGE as u64)?;
        if page.iter().any(|&byte| byte != 0) {
            target.copy_from_slice(page);
        }
    }
    Ok(())
}

//! A mark by which a process knows that it is a fork of another one, without a system call.
//!
//! Thread: any. Invariant: the kernel wipes the mark in each forked child, however it was forked.
#![allow(unsafe_code)]

use std::io;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU8, Ordering};

const BYTES: usize = 4096;

/// A page of memory that a forked child gets empty.
#[derive(Debug)]
pub struct ForkMark(NonNull<u8>);

// SAFETY: the page is mapped until the process ends, and all access is atomic.
unsafe impl Send for ForkMark {}
// SAFETY: as above.
unsafe impl Sync for ForkMark {}

impl ForkMark {
    /// Marks this process. The page is never freed.
    ///
    /// # Errors
    /// The kernel has no memory, or cannot wipe it in children.
    pub fn new() -> io::Result<ForkMark> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a fresh mapping at an address that the kernel chooses.
        let page = unsafe { libc::mmap(ptr::null_mut(), BYTES, protection, flags, -1, 0) };
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the mapping was just made, and nothing is in it.
        if unsafe { libc::madvise(page, BYTES, libc::MADV_WIPEONFORK) } != 0 {
            let why = io::Error::last_os_error();
            // SAFETY: as above.
            unsafe { libc::munmap(page, BYTES) };
            return Err(why);
        }
        let mark = ForkMark(NonNull::new(page.cast()).ok_or(io::ErrorKind::OutOfMemory)?);
        mark.byte().store(1, Ordering::Relaxed);
        Ok(mark)
    }

    /// Whether this process is a fork of the one that made the mark.
    pub fn is_forked(&self) -> bool {
        self.byte().load(Ordering::Relaxed) == 0
    }

    fn byte(&self) -> &AtomicU8 {
        // SAFETY: the page is mapped for ever, and only this type uses it.
        unsafe { AtomicU8::from_ptr(self.0.as_ptr()) }
    }
}

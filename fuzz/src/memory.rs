//! An allocator that counts the peak memory of a piece of code.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Memory that any input may use, in bytes: reserved buffers, formatted errors.
pub const BASE: usize = 256 << 10;
/// Memory that each byte of input may use, in bytes. A JSON value of two bytes takes about 100, and
/// twice that while its list grows.
pub const PER_BYTE: usize = 256;

#[global_allocator]
static COUNTED: Counted = Counted;

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static ALLOWANCE: AtomicUsize = AtomicUsize::new(0);

/// Lets the present run use so many bytes more: a target needs them for another crate, which has
/// limits of its own.
pub fn allow(bytes: usize) {
    ALLOWANCE.store(bytes, Relaxed);
}

/// What the last run was allowed beyond the usual memory, in bytes.
pub fn take_allowance() -> usize {
    ALLOWANCE.swap(0, Relaxed)
}

/// The peak of memory that `f` holds in addition to the memory held before, in bytes.
pub fn peak_of(f: impl FnOnce()) -> usize {
    let before = HELD.load(Relaxed);
    PEAK.store(before, Relaxed);
    f();
    PEAK.load(Relaxed).saturating_sub(before)
}

struct Counted;

// SAFETY: every call goes to the system allocator with the same arguments.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(held, Relaxed);
        // SAFETY: the caller keeps the contract of `GlobalAlloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller keeps the contract of `GlobalAlloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

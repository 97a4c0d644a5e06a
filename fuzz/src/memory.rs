//! How much memory a piece of code holds at most: an allocator that counts.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Memory that an input may cost whatever its size: reserved buffers, formatted errors.
pub const BASE: usize = 256 << 10;
/// Memory that a byte of input may cost: a JSON value of two bytes takes about 100, twice while its
/// list grows.
pub const PER_BYTE: usize = 256;

#[global_allocator]
static COUNTED: Counted = Counted;

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// The most memory that was held at a time inside of `f`, beyond what was held before.
pub fn peak_of(f: impl FnOnce()) -> usize {
    let before = HELD.load(Relaxed);
    PEAK.store(before, Relaxed);
    f();
    PEAK.load(Relaxed).saturating_sub(before)
}

struct Counted;

// SAFETY: every call is the system allocator's, with the same arguments.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(held, Relaxed);
        // SAFETY: as asked of us.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as asked of us.
        unsafe { System.dealloc(pointer, layout) }
    }
}

//! An allocator that counts allocations, and allocations and frees of sealed threads. Tests show
//! that sealed threads have none.
//!
//! Thread: the seal is a flag of the thread; the counts are global. Without the allocator
//! installed, a seal only sets the flag. A debugger's breakpoint on `violated` shows the caller.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

thread_local! {
    static SEALED: Cell<bool> = const { Cell::new(false) };
}

static VIOLATIONS: AtomicUsize = AtomicUsize::new(0);
static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator with a check for sealed threads. Tests and the program's debug builds
/// install it with `#[global_allocator]`.
#[derive(Debug)]
pub struct SealingAllocator;

/// The calling thread is sealed until this is dropped.
#[derive(Debug)]
#[must_use]
pub struct ThreadSeal {
    before: bool,
    /// The flag belongs to the thread, so this is not `Send`.
    here: std::marker::PhantomData<*const ()>,
}

/// Seals the calling thread: it should neither allocate nor free.
pub fn seal_thread() -> ThreadSeal {
    ThreadSeal { before: SEALED.replace(true), here: std::marker::PhantomData }
}

/// Allocations and frees by sealed threads of this process so far.
pub fn violations() -> usize {
    VIOLATIONS.load(Ordering::Relaxed)
}

/// Allocations of this process so far; `None` if the allocator is not installed.
pub fn allocations() -> Option<u64> {
    // Each process allocates before its first statement.
    Some(ALLOCATIONS.load(Ordering::Relaxed) as u64).filter(|&count| count > 0)
}

impl Drop for ThreadSeal {
    fn drop(&mut self) {
        SEALED.set(self.before);
    }
}

#[inline]
fn watch() {
    // A thread without locals is ending, and no longer sealed.
    if SEALED.try_with(Cell::get).unwrap_or(false) {
        violated();
    }
}

#[inline]
fn count_allocation() {
    ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    watch();
}

#[cold]
#[inline(never)]
fn violated() {
    VIOLATIONS.fetch_add(1, Ordering::Relaxed);
}

// SAFETY: every call goes to `System` unchanged.
unsafe impl GlobalAlloc for SealingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count_allocation();
        // SAFETY: the caller's contract is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count_allocation();
        // SAFETY: the caller's contract is the same.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        watch();
        // SAFETY: the caller's contract is the same.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count_allocation();
        // SAFETY: the caller's contract is the same.
        unsafe { System.realloc(memory, layout, size) }
    }
}

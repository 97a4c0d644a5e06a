//! An allocator that counts what sealed threads allocate or free, to prove that they do not.
//!
//! Thread: the seal is a flag of the thread; counting is global. Costs nothing where the allocator is not
//! installed: then sealing only sets the flag. A debugger's breakpoint on [`violated`] names the culprit.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

thread_local! {
    static SEALED: Cell<bool> = const { Cell::new(false) };
}

static VIOLATIONS: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator, watching sealed threads. Installed with `#[global_allocator]` by tests.
#[derive(Debug)]
pub struct SealingAllocator;

/// The calling thread is sealed until this is dropped.
#[derive(Debug)]
#[must_use]
pub struct Seal {
    before: bool,
    /// The flag is the thread's.
    here: std::marker::PhantomData<*const ()>,
}

/// From here on the calling thread should neither allocate nor free.
pub fn seal_thread() -> Seal {
    Seal { before: SEALED.replace(true), here: std::marker::PhantomData }
}

/// Allocations and frees by sealed threads of this process so far.
pub fn violations() -> usize {
    VIOLATIONS.load(Ordering::Relaxed)
}

impl Drop for Seal {
    fn drop(&mut self) {
        SEALED.set(self.before);
    }
}

#[inline]
fn watch() {
    // A thread whose locals are gone is ending, and no longer sealed.
    if SEALED.try_with(Cell::get).unwrap_or(false) {
        violated();
    }
}

#[cold]
#[inline(never)]
fn violated() {
    VIOLATIONS.fetch_add(1, Ordering::Relaxed);
}

// SAFETY: every call is passed on to `System` unchanged.
unsafe impl GlobalAlloc for SealingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        watch();
        // SAFETY: the caller's contract is ours.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        watch();
        // SAFETY: the caller's contract is ours.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        watch();
        // SAFETY: the caller's contract is ours.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        watch();
        // SAFETY: the caller's contract is ours.
        unsafe { System.realloc(memory, layout, size) }
    }
}

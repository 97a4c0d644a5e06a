//! How the heap of this process asks the kernel for memory.
#![allow(unsafe_code)]

/// From so many bytes on a block is mapped by itself: glibc's own number, until it has freed a larger one.
#[cfg(target_env = "gnu")]
const MAPPED_FROM: libc::c_int = 128 << 10;

/// Large blocks go on to be mapped one by one: zeroes take no memory before something is written there, and what is freed is
/// given back. glibc would have those that come after one that was freed on its heap, and write the zeroes.
pub fn map_large_blocks() {
    #[cfg(target_env = "gnu")]
    // SAFETY: sets a number of the allocator, under its own lock.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_FROM);
    }
}

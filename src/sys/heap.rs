//! How the heap of this process asks the kernel for memory.
#![allow(unsafe_code)]

/// Blocks of at least this many bytes are mapped separately. It is glibc's own threshold until a
/// larger block is freed.
#[cfg(target_env = "gnu")]
const MAPPED_FROM: libc::c_int = 128 << 10;

/// Keeps large blocks separately mapped. Then zeroed memory takes no space before the first write,
/// and freed memory returns to the kernel. By default, after the first free glibc places large
/// blocks on its heap and writes the zeroes.
pub fn map_large_blocks() {
    #[cfg(target_env = "gnu")]
    // SAFETY: sets a number of the allocator, under its own lock.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_FROM);
    }
}

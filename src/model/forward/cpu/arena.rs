//! Memory for repacked weights: a few large anonymous mappings, in huge pages if the system grants
//! them. Every decode step reads this memory in order, except experts that no token uses.
#![allow(unsafe_code)]

use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

/// Bytes of a mapping; a larger slab gets its own mapping. Memory that is never written takes no
/// space.
const CHUNK: usize = 64 << 20;
/// Alignment of a mapping: that of huge pages.
const HUGE: usize = 2 << 20;
/// Alignment of a slab: a cache line.
const LINE: usize = 64;

/// Allocates slabs. A mapping is freed when its last slab is dropped.
#[derive(Default)]
pub struct Arena {
    chunk: Option<Arc<Chunk>>,
    used: usize,
}

struct Chunk {
    map: NonNull<u8>,
    mapped: usize,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory; slabs inside do not overlap.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

/// A slice in an arena.
pub struct Slab<T> {
    _chunk: Arc<Chunk>,
    base: NonNull<T>,
    len: usize,
}

// SAFETY: a slab owns its elements.
unsafe impl<T: Send> Send for Slab<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Slab<T> {}

impl Arena {
    /// Allocates `len` elements of zero bytes.
    pub fn slab<T: Zeroed>(&mut self, len: usize) -> io::Result<Slab<T>> {
        const { assert!(align_of::<T>() <= LINE) };
        let bytes = len.checked_mul(size_of::<T>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let fits = |chunk: &&Arc<Chunk>| bytes <= chunk.len - self.used;
        let chunk = match self.chunk.as_ref().filter(fits) {
            Some(chunk) => chunk.clone(),
            None => {
                let chunk = Arc::new(Chunk::new(bytes.max(CHUNK))?);
                self.chunk = Some(chunk.clone());
                self.used = 0;
                chunk
            }
        };
        // SAFETY: `used + bytes` is inside the chunk.
        let base = unsafe { chunk.base.add(self.used) }.cast();
        self.used = (self.used + bytes).next_multiple_of(LINE).min(chunk.len);
        Ok(Slab { _chunk: chunk, base, len })
    }
}

/// Plain old data with all-zero bytes as a valid value.
///
/// # Safety
/// All-zero bytes are a valid value, and the type needs no drop.
pub unsafe trait Zeroed: Copy {}

impl Chunk {
    fn new(len: usize) -> io::Result<Chunk> {
        let len = len.next_multiple_of(HUGE);
        let mapped = len + HUGE;
        // SAFETY: a fresh anonymous mapping at an address chosen by the kernel.
        let map = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if map == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let map: NonNull<u8> = NonNull::new(map.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: less than HUGE past the start, and the mapping has HUGE extra bytes.
        let base = unsafe { map.add(map.as_ptr().align_offset(HUGE)) };
        // SAFETY: inside the mapping. A refusal of huge pages only costs speed.
        unsafe { libc::madvise(base.as_ptr().cast(), len, libc::MADV_HUGEPAGE) };
        Ok(Chunk { map, mapped, base, len })
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`; no slab is left.
        unsafe { libc::munmap(self.map.as_ptr().cast(), self.mapped) };
    }
}

impl<T> Deref for Slab<T> {
    type Target = [T];
    #[inline(always)]
    fn deref(&self) -> &[T] {
        // SAFETY: zeroed or written elements, owned by this slab.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for Slab<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and exclusive through `&mut self`.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

// SAFETY: floats.
unsafe impl Zeroed for super::simd::Lanes {}
// SAFETY: integers.
unsafe impl Zeroed for super::block::Halves {}
// SAFETY: integers.
unsafe impl Zeroed for super::block::Bfloats {}
// SAFETY: integers and floats in plain structs.
unsafe impl<L: Copy, D: Copy, M: Copy> Zeroed for super::block::Block<L, D, M> {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::forward::cpu::simd::Lanes;

    #[test]
    fn slabs_are_apart_aligned_and_outlive_the_arena() {
        let mut arena = Arena::default();
        let mut a = arena.slab::<Lanes>(3).unwrap();
        let mut b = arena.slab::<Lanes>(5).unwrap();
        let large = arena.slab::<Lanes>(CHUNK / 64 + 1).unwrap();
        drop(arena);
        a.iter_mut().for_each(|x| *x = [1.0; 16]);
        b.iter_mut().for_each(|x| *x = [2.0; 16]);
        assert!(a.iter().all(|x| x[15] == 1.0) && b.iter().all(|x| x[0] == 2.0));
        assert_eq!(large[CHUNK / 64], [0.0; 16]);
        assert_eq!(b.as_ptr() as usize % LINE, 0);
    }
}

//! Copies between KV regions with streaming stores, which leave the caches to those who will read the
//! destination later and spare the read of lines that are overwritten whole (glibc's memcpy is up to
//! twice slower at these sizes).
//!
//! Streaming stores are not ordered by Release: [`store_fence`] before the exchange that publishes them.
#![allow(unsafe_code)]

use crate::kv::region::{PeerRegion, Region};
use crate::transfer::plan::Run;

/// Copies one run from a peer's region, mapped read-only, into pages leased to this transfer.
///
/// Page numbers were checked against the announced pools and layouts against the regions, so the
/// assertion never fires; it costs nothing beside the copy and keeps a fault of ours local.
pub fn pull(from: &PeerRegion, to: &Region, run: &Run) {
    let (source, destination, bytes) = (run.source as usize, run.destination as usize, run.bytes as usize);
    assert!(source + bytes <= from.len() && destination + bytes <= to.len(), "run outside its region");
    // SAFETY: both ranges are inside their mappings; the mappings are different ones; the pages written
    // are leased to this transfer, whose thread is this one.
    unsafe { copy(from.base().as_ptr().add(source), to.base().as_ptr().add(destination), bytes) }
}

/// Copies `bytes` bytes.
///
/// # Safety
/// `source` is readable and `destination` writable for `bytes` bytes, and the two do not overlap. The
/// source may be written by others meanwhile: the copy is then of no value, which the lease word tells.
pub unsafe fn copy(source: *const u8, destination: *mut u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: passed on; SSE2 is part of x86-64.
    unsafe {
        x86::copy(source, destination, bytes);
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: passed on.
    unsafe {
        source.copy_to_nonoverlapping(destination, bytes);
    }
}

/// Orders the streaming stores before whatever follows.
pub fn store_fence() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: SSE is part of x86-64.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    // Miri knows no streaming stores; these want the same alignment and write the same bytes.
    #[cfg(miri)]
    use std::arch::x86_64::_mm_store_si128 as _mm_stream_si128;
    #[cfg(not(miri))]
    use std::arch::x86_64::_mm_stream_si128;
    use std::arch::x86_64::{__m128i, _mm_loadu_si128};

    const LINE: usize = 64;

    /// # Safety
    /// As `super::copy`.
    pub unsafe fn copy(mut source: *const u8, mut destination: *mut u8, mut bytes: usize) {
        let head = destination.align_offset(LINE).min(bytes);
        // SAFETY: within the caller's ranges, by the counts kept below.
        unsafe {
            source.copy_to_nonoverlapping(destination, head);
            source = source.add(head);
            destination = destination.add(head);
            bytes -= head;
            while bytes >= LINE {
                let from = source.cast::<__m128i>();
                let to = destination.cast::<__m128i>();
                let line = [
                    _mm_loadu_si128(from),
                    _mm_loadu_si128(from.add(1)),
                    _mm_loadu_si128(from.add(2)),
                    _mm_loadu_si128(from.add(3)),
                ];
                for (i, part) in line.into_iter().enumerate() {
                    _mm_stream_si128(to.add(i), part);
                }
                source = source.add(LINE);
                destination = destination.add(LINE);
                bytes -= LINE;
            }
            source.copy_to_nonoverlapping(destination, bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_and_alignment() {
        let source: Vec<u8> = (0..600u32).map(|i| (i * 7) as u8).collect();
        for length in [0, 1, 15, 63, 64, 65, 127, 128, 200, 321] {
            for (a, b) in [(0, 0), (1, 0), (0, 1), (3, 17), (63, 63)] {
                let mut destination = vec![0u8; 600];
                // SAFETY: both vectors are longer than offset plus length.
                unsafe { copy(source.as_ptr().add(a), destination.as_mut_ptr().add(b), length) };
                store_fence();
                assert_eq!(destination[b..b + length], source[a..a + length]);
                assert!(destination[..b].iter().chain(&destination[b + length..]).all(|&byte| byte == 0));
            }
        }
    }
}

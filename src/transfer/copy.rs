//! Copies between KV regions with streaming stores. These stores do not put the destination into
//! the caches, and do not read lines that they overwrite completely. At these sizes glibc's memcpy
//! takes up to twice as long.
//!
//! Runs are short and scattered, so each starts slowly: its first lines come from memory and its
//! pages are in no TLB. Therefore the copy of a run also prefetches the next run, line by line.
//! That halves the time of runs of 6 KiB, and saves more for shorter ones.
//!
//! A Release store does not order streaming stores: call [`store_fence`] before the store that
//! publishes them.
#![allow(unsafe_code)]

use crate::kv::region::{PeerRegion, Region};
use crate::transfer::plan::Run;

/// Most bytes to prefetch: they fit the nearest caches together with the data being copied.
const AHEAD_MAX: u64 = 16 << 10;

/// Copies runs from a peer's region, mapped read-only, into pages leased to this transfer. The last
/// added run is held back until [`Pull::finish`]. Only the crate can make one, because the lease is
/// the rule that makes it sound.
#[derive(Debug)]
#[must_use = "the last run is copied by finish"]
pub struct Pull<'a> {
    from: &'a PeerRegion,
    to: &'a Region,
    held: Option<Run>,
}

impl<'a> Pull<'a> {
    /// A copy without runs.
    pub(crate) fn new(from: &'a PeerRegion, to: &'a Region) -> Pull<'a> {
        Pull { from, to, held: None }
    }

    /// Adds one run.
    ///
    /// Page numbers were checked against the announced pools, and layouts against the regions, so
    /// the assertion never fails. It costs little beside the copy, and it stops a bug before it
    /// writes.
    pub fn add(&mut self, run: &Run) {
        let within = |start: u64, len: usize| {
            start.checked_add(run.bytes).is_some_and(|end| end <= len as u64)
        };
        assert!(
            within(run.source, self.from.len()) && within(run.destination, self.to.len()),
            "run outside its region"
        );
        for start in (0..run.bytes).step_by(AHEAD_MAX as usize) {
            let (source, destination) = (run.source + start, run.destination + start);
            let next = Run { source, destination, bytes: (run.bytes - start).min(AHEAD_MAX) };
            if let Some(held) = self.held.replace(next) {
                self.copy(held, next);
            }
        }
    }

    /// Copies the run that was held back.
    pub fn finish(mut self) {
        if let Some(held) = self.held.take() {
            self.copy(held, Run { bytes: 0, ..held });
        }
    }

    fn copy(&self, run: Run, next: Run) {
        let (from, to) = (self.from.base().as_ptr(), self.to.base().as_ptr());
        // SAFETY: `add` found both runs inside their mappings, which are different. The pages
        // written are leased to this transfer. Its runs do not overlap at the destination, in one
        // thread or in several: they are parts of one walk over distinct pages and heads.
        unsafe {
            let next = Next {
                source: from.add(next.source as usize),
                destination: to.add(next.destination as usize),
                bytes: next.bytes as usize,
            };
            copy(
                from.add(run.source as usize),
                to.add(run.destination as usize),
                run.bytes as usize,
                &next,
            );
        }
    }
}

/// The run that is copied next; it is only prefetched.
struct Next {
    source: *const u8,
    destination: *const u8,
    bytes: usize,
}

/// Copies `bytes` bytes.
///
/// # Safety
/// `source` is readable and `destination` writable for `bytes` bytes, and the two do not overlap.
/// Another process may write the source during the copy. The copy is then void, and the lease word
/// shows it.
unsafe fn copy(source: *const u8, destination: *mut u8, bytes: usize, next: &Next) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's guarantees; SSE2 is part of x86-64, AVX was detected.
    unsafe {
        if std::arch::is_x86_feature_detected!("avx") {
            x86::copy_avx(source, destination, bytes, next);
        } else {
            x86::copy_sse2(source, destination, bytes, next);
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: the caller's guarantees.
    unsafe {
        let _ = (next.source, next.destination, next.bytes);
        source.copy_to_nonoverlapping(destination, bytes);
    }
}

/// Orders the streaming stores before all later stores.
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
    use super::Next;
    // Miri has no streaming stores. These replacements need the same alignment and write the same
    // bytes.
    use std::arch::x86_64::{
        __m128i, __m256i, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm256_loadu_si256,
    };
    #[cfg(miri)]
    use std::arch::x86_64::{
        _mm_store_si128 as _mm_stream_si128, _mm256_store_si256 as _mm256_stream_si256,
    };
    #[cfg(not(miri))]
    use std::arch::x86_64::{_mm_stream_si128, _mm256_stream_si256};

    const LINE: usize = 64;
    /// Bytes of a memory page. One access per page is enough to load its address translation.
    const PAGE: usize = 4096;

    /// A copy with an inner step that moves a line in vectors of one width.
    macro_rules! streaming_copy {
        ($name:ident, $feature:literal, $vector:ty, $load:ident, $store:ident) => {
            /// # Safety
            /// As `super::copy`; the processor has the feature.
            #[target_feature(enable = $feature)]
            pub unsafe fn $name(
                mut source: *const u8,
                mut destination: *mut u8,
                mut bytes: usize,
                next: &Next,
            ) {
                const VECTORS: usize = LINE / size_of::<$vector>();
                let head = destination.align_offset(LINE).min(bytes);
                // SAFETY: within the caller's ranges, by the counts kept below. Prefetched
                // addresses need not be mapped.
                unsafe {
                    source.copy_to_nonoverlapping(destination, head);
                    source = source.add(head);
                    destination = destination.add(head);
                    bytes -= head;
                    let mut done = 0;
                    while bytes >= LINE {
                        if done < next.bytes {
                            _mm_prefetch::<_MM_HINT_T0>(next.source.wrapping_add(done).cast());
                            if done % PAGE == 0 {
                                _mm_prefetch::<_MM_HINT_T0>(
                                    next.destination.wrapping_add(done).cast(),
                                );
                            }
                        }
                        let (from, to) = (source.cast::<$vector>(), destination.cast::<$vector>());
                        let line: [$vector; VECTORS] = std::array::from_fn(|i| $load(from.add(i)));
                        for (i, part) in line.into_iter().enumerate() {
                            $store(to.add(i), part);
                        }
                        source = source.add(LINE);
                        destination = destination.add(LINE);
                        bytes -= LINE;
                        done += LINE;
                    }
                    source.copy_to_nonoverlapping(destination, bytes);
                }
            }
        };
    }

    streaming_copy!(copy_sse2, "sse2", __m128i, _mm_loadu_si128, _mm_stream_si128);
    // Wider vectors need fewer stores, so more prefetches are in flight: runs of 2 KiB take a fifth
    // less time. Vectors wider than these gained nothing more.
    streaming_copy!(copy_avx, "avx", __m256i, _mm256_loadu_si256, _mm256_stream_si256);
}

#[cfg(test)]
mod tests {
    use super::*;

    type Copy = unsafe fn(*const u8, *mut u8, usize, &Next);

    fn ways() -> Vec<Copy> {
        let mut ways: Vec<Copy> = vec![copy];
        #[cfg(target_arch = "x86_64")]
        {
            ways.push(x86::copy_sse2);
            if std::arch::is_x86_feature_detected!("avx") {
                ways.push(x86::copy_avx);
            }
        }
        ways
    }

    #[test]
    fn every_length_and_alignment() {
        let source: Vec<u8> = (0..600u32).map(|i| (i * 7) as u8).collect();
        for way in ways() {
            for length in [0, 1, 15, 63, 64, 65, 127, 128, 200, 321] {
                for (a, b) in [(0, 0), (1, 0), (0, 1), (3, 17), (63, 63)] {
                    let mut destination = vec![0u8; 600];
                    let next = Next {
                        source: source.as_ptr(),
                        destination: source.as_ptr(),
                        bytes: length / 2,
                    };
                    // SAFETY: both vectors are longer than offset plus length; `ways` returns only
                    // copies that the processor supports.
                    unsafe {
                        way(source.as_ptr().add(a), destination.as_mut_ptr().add(b), length, &next)
                    };
                    store_fence();
                    assert_eq!(destination[b..b + length], source[a..a + length]);
                    assert!(
                        destination[..b]
                            .iter()
                            .chain(&destination[b + length..])
                            .all(|&byte| byte == 0)
                    );
                }
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "regions are memory files")]
    fn runs_of_all_lengths_arrive_whole_and_nowhere_else() {
        const LEN: usize = 256 << 10;
        let (source, to) = (Region::new(c"a", LEN).unwrap(), Region::new(c"b", LEN).unwrap());
        let (a, b) = (|at: usize| (at / 8 * 7) as u64, std::sync::atomic::Ordering::Relaxed);
        (0..LEN).step_by(8).for_each(|at| source.word(at).store(a(at), b));
        let from = PeerRegion::map(source.descriptor(), LEN).unwrap();
        let mut pull = Pull::new(&from, &to);
        let lengths = [8, 24, AHEAD_MAX, AHEAD_MAX + 8, 64, 3 * AHEAD_MAX - 16, 2048];
        let mut runs = Vec::new();
        let (mut source, mut destination) = (0, 8);
        for bytes in lengths {
            runs.push(Run { source, destination, bytes });
            (source, destination) = (source + bytes + 40, destination + bytes + 8);
        }
        runs.iter().for_each(|run| pull.add(run));
        pull.finish();
        store_fence();
        for at in (0..LEN as u64).step_by(8) {
            let run = runs
                .iter()
                .find(|run| (run.destination..run.destination + run.bytes).contains(&at));
            let wanted = run.map_or(0, |run| a((run.source + at - run.destination) as usize));
            assert_eq!(to.word(at as usize).load(b), wanted, "at {at}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "regions are memory files")]
    #[should_panic(expected = "run outside its region")]
    fn no_run_leaves_its_region() {
        let region = || Region::new(c"a", 4096).unwrap();
        let (source, to) = (region(), region());
        let from = PeerRegion::map(source.descriptor(), 4096).unwrap();
        Pull::new(&from, &to).add(&Run { source: u64::MAX, destination: 0, bytes: 8 });
    }
}

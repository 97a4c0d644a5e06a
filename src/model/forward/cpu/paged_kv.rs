//! Reads and writes heads in paged KV, and pieces of recurrent state. In the forward pass, only
//! this module touches the region's memory.
//!
//! Invariants: every access is inside the region. No reference into it is formed, because peers may
//! read it. The order of a step's phases ensures that no thread reads what another one writes.
#![allow(unsafe_code)]

use super::simd::{LANES, Simd};
use crate::ids::PageId;
use crate::kv::layout::{KeyValue, KvDtype, KvLayout};
use crate::kv::state_layout::StateLayout;
use crate::model::forward::KvPool;
use std::marker::PhantomData;

/// A pool during a step.
#[derive(Clone, Copy)]
pub struct Paged<'a> {
    base: *mut u8,
    len: u64,
    layout: &'a KvLayout,
    state: Option<&'a StateLayout>,
}

// SAFETY: a raw pointer; the module's header says how accesses are ordered.
unsafe impl Sync for Paged<'_> {}
// SAFETY: as above.
unsafe impl Send for Paged<'_> {}

/// The keys or values of one head of one sequence in one layer.
#[derive(Clone, Copy)]
pub struct Strip<'a> {
    paged: Paged<'a>,
    /// Offset of a page's first token, for page 0.
    start: u64,
    pages: &'a [PageId],
}

/// A piece of the state of one sequence in one layer.
#[derive(Clone, Copy)]
pub struct StatePiece<'a> {
    at: *mut f32,
    elements: usize,
    paged: PhantomData<Paged<'a>>,
}

impl<'a> Paged<'a> {
    /// A view of the pool's memory.
    pub fn new(pool: KvPool<'a>) -> Paged<'a> {
        if let Some(state) = pool.groups.state() {
            let stride = pool.layout.page_stride;
            assert!(state.page_bytes() <= stride, "pieces of state stay on their page");
            assert!(stride.is_multiple_of(4), "pieces of state are aligned");
        }
        Paged {
            base: pool.region.base().as_ptr(),
            len: pool.region.len() as u64,
            layout: pool.layout,
            state: pool.groups.state(),
        }
    }

    /// A piece of the state of a sequence with these state pages; `layer` counts the layers with
    /// state.
    pub fn piece(&self, layer: u32, piece: u32, pages: &[PageId]) -> StatePiece<'a> {
        let state = self.state.expect("the model has state");
        let (place, bytes) = (state.place(layer, piece), state.shape().piece_bytes());
        let offset = pages[place.page].index() as u64 * self.layout.page_stride + place.offset;
        assert!(
            offset.checked_add(bytes).is_some_and(|end| end <= self.len),
            "page outside the region"
        );
        // SAFETY: inside the mapping.
        let at = unsafe { self.base.add(offset as usize) }.cast();
        StatePiece { at, elements: state.shape().piece_elements as usize, paged: PhantomData }
    }

    /// One head of a sequence with `pages`.
    pub fn strip(&self, layer: u32, which: KeyValue, head: u32, pages: &'a [PageId]) -> Strip<'a> {
        let start = self.layout.offset(PageId(0), layer, which, head, 0);
        Strip { paged: *self, start, pages }
    }

    /// A pointer to the heads of `tokens` neighbours on a page. The range is checked to be inside
    /// the region.
    #[inline(always)]
    fn at(&self, offset: u64, tokens: u64) -> *mut u8 {
        let layout = self.layout;
        let last =
            (tokens - 1) * layout.token_stride + layout.head_dim as u64 * layout.dtype.bytes();
        assert!(
            offset.checked_add(last).is_some_and(|end| end <= self.len),
            "page outside the region"
        );
        // SAFETY: inside the mapping.
        unsafe { self.base.add(offset as usize) }
    }
}

impl StatePiece<'_> {
    /// Reads the first elements.
    #[inline(always)]
    pub fn read(&self, to: &mut [f32]) {
        assert!(to.len() <= self.elements);
        // SAFETY: `Paged::piece` checked the range. Pages and pieces are aligned to four bytes.
        unsafe { self.at.copy_to_nonoverlapping(to.as_mut_ptr(), to.len()) };
    }

    /// Writes the first elements.
    #[inline(always)]
    pub fn write(&self, from: &[f32]) {
        assert!(from.len() <= self.elements);
        // SAFETY: as above.
        unsafe { self.at.copy_from_nonoverlapping(from.as_ptr(), from.len()) };
    }
}

impl Strip<'_> {
    /// The token at `position` and the number of its neighbours on the page from there on, at most
    /// `wanted`.
    #[inline(always)]
    fn run(&self, position: u32, wanted: usize) -> (*mut u8, usize) {
        let layout = self.paged.layout;
        let (page, token) = (position / layout.page_size, position % layout.page_size);
        let tokens = wanted.min((layout.page_size - token) as usize);
        let page = self.pages[page as usize].index() as u64;
        let offset = self.start + page * layout.page_stride + token as u64 * layout.token_stride;
        (self.paged.at(offset, tokens as u64), tokens)
    }

    /// Reads `count` tokens from `position` on as floats, into rows of `to` with length `stride`.
    #[inline(always)]
    pub fn read<S: Simd>(&self, s: S, position: u32, count: usize, to: &mut [f32], stride: usize) {
        let layout = self.paged.layout;
        let dim = layout.head_dim as usize;
        let mut done = 0;
        while done < count {
            let position = position + done as u32;
            let (from, tokens) = self.run(position, count - done);
            let rows = to[done * stride..].chunks_exact_mut(stride).take(tokens);
            for (token, to) in rows.enumerate() {
                // SAFETY: `run` checked this many neighbours.
                let from = unsafe { from.add(token * layout.token_stride as usize) };
                let to = &mut to[..dim];
                match layout.dtype {
                    KvDtype::F32 => read_as::<S, f32>(from, to, |lanes| s.load(lanes), s),
                    KvDtype::F16 => read_as::<S, u16>(from, to, |lanes| s.half(lanes), s),
                    KvDtype::Bf16 => read_as::<S, u16>(from, to, |lanes| s.bf16(lanes), s),
                }
            }
            done += tokens;
        }
    }

    /// Prefetches `count` tokens that are read soon. The hardware cannot predict the addresses,
    /// because pages are not adjacent.
    #[inline(always)]
    pub fn prefetch(&self, position: u32, count: usize) {
        let layout = self.paged.layout;
        let bytes = (layout.head_dim as u64 * layout.dtype.bytes()) as usize;
        let mut done = 0;
        while done < count {
            let (at, tokens) = self.run(position + done as u32, count - done);
            for token in 0..tokens {
                for line in (0..bytes).step_by(64) {
                    // SAFETY: `run` checked this many neighbours.
                    let at = unsafe { at.add(token * layout.token_stride as usize + line) };
                    prefetch_line(at);
                }
            }
            done += tokens;
        }
    }

    /// Writes the head at `position`, rounded to the pool's type.
    #[inline(always)]
    pub fn write<S: Simd>(&self, s: S, position: u32, from: &[f32]) {
        let (to, _) = self.run(position, 1);
        let from = &from[..self.paged.layout.head_dim as usize];
        match self.paged.layout.dtype {
            KvDtype::F32 => write_as::<S, f32>(from, to, |lanes| as_lanes(s, lanes), s),
            KvDtype::F16 => write_as::<S, u16>(from, to, |lanes| to_half_in_range(s, lanes), s),
            KvDtype::Bf16 => write_as::<S, u16>(from, to, |lanes| s.to_bf16(lanes), s),
        }
    }
}

/// Clamps large values to the largest f16. An infinity would make every later token a NaN.
#[inline(always)]
fn to_half_in_range<S: Simd>(s: S, value: S::F) -> [u16; LANES] {
    const LARGEST: f32 = 65504.0;
    s.to_half(s.max(s.min(value, s.splat(LARGEST)), s.splat(-LARGEST)))
}

#[inline(always)]
fn prefetch_line(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch has no effect on any address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

#[inline(always)]
fn as_lanes<S: Simd>(s: S, value: S::F) -> [f32; LANES] {
    let mut lanes = [0.0; LANES];
    s.store(value, &mut lanes);
    lanes
}

/// `from` holds as many elements `E` as `to`.
#[inline(always)]
fn read_as<S: Simd, E: Copy + Default>(
    from: *const u8,
    to: &mut [f32],
    convert: impl Fn(&[E; LANES]) -> S::F,
    s: S,
) {
    let from: *const E = from.cast();
    let mut at = 0;
    let mut chunks = to.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        // SAFETY: `at + LANES` elements are inside.
        let lanes: [E; LANES] = unsafe { from.add(at).cast::<[E; LANES]>().read_unaligned() };
        s.store(convert(&lanes), chunk.first_chunk_mut().expect("exact"));
        at += LANES;
    }
    let tail = chunks.into_remainder();
    if !tail.is_empty() {
        let mut lanes = [E::default(); LANES];
        for (i, lane) in lanes[..tail.len()].iter_mut().enumerate() {
            // SAFETY: below the length of `to`.
            *lane = unsafe { from.add(at + i).read_unaligned() };
        }
        let values = as_lanes(s, convert(&lanes));
        tail.copy_from_slice(&values[..tail.len()]);
    }
}

/// `to` has room for as many elements `E` as `from`.
#[inline(always)]
fn write_as<S: Simd, E: Copy>(
    from: &[f32],
    to: *mut u8,
    convert: impl Fn(S::F) -> [E; LANES],
    s: S,
) {
    let to: *mut E = to.cast();
    let mut at = 0;
    let mut chunks = from.chunks_exact(LANES);
    for chunk in &mut chunks {
        let lanes = convert(s.load(chunk.first_chunk().expect("exact")));
        // SAFETY: `at + LANES` elements are inside.
        unsafe { to.add(at).cast::<[E; LANES]>().write_unaligned(lanes) };
        at += LANES;
    }
    let tail = chunks.remainder();
    if !tail.is_empty() {
        let mut lanes = [0.0; LANES];
        lanes[..tail.len()].copy_from_slice(tail);
        let lanes = convert(s.load(&lanes));
        for (i, lane) in lanes[..tail.len()].iter().enumerate() {
            // SAFETY: below the length of `from`.
            unsafe { to.add(at + i).write_unaligned(*lane) };
        }
    }
}

//! Sixteen lanes as pairs of 256-bit registers: AVX2, FMA, F16C.
//!
//! Invariants: an [`Avx2`] exists only inside functions compiled for these features, on a CPU that
//! has them. Every unsafe block below relies on that.
#![allow(unsafe_code)]

use super::{Kernel, LANES, Lanes, Simd};
use std::arch::x86_64::*;

macro_rules! op {
    ($($body:tt)*) => {{
        // SAFETY: `self` proves that the CPU has the instructions; references give memory of exact
        // size.
        unsafe { $($body)* }
    }};
}

/// Proof that the CPU has AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub struct Avx2(());

impl Avx2 {
    /// # Safety
    /// The CPU has AVX2, FMA and F16C.
    #[inline(always)]
    pub unsafe fn assume() -> Avx2 {
        Avx2(())
    }

    #[inline(always)]
    fn words(self, from: &[u8; 64]) -> [__m256i; 2] {
        let p: *const __m256i = from.as_ptr().cast();
        op!([_mm256_loadu_si256(p), _mm256_loadu_si256(p.add(1))])
    }
}

/// Applies a two-operand intrinsic to both halves.
macro_rules! pair {
    ($f:ident, $a:expr, $b:expr) => {{
        let (a, b) = ($a, $b);
        op!([$f(a[0], b[0]), $f(a[1], b[1])])
    }};
}

/// Runs a kernel with these instructions.
#[target_feature(enable = "avx2,fma,f16c")]
pub fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: these are the features of this function.
    kernel.run(unsafe { Avx2::assume() })
}

impl Simd for Avx2 {
    type F = [__m256; 2];
    type I = [__m256i; 2];
    type W = [__m256i; 2];

    const TILE: usize = 4;

    #[inline(always)]
    fn splat(self, value: f32) -> Self::F {
        op!([_mm256_set1_ps(value); 2])
    }
    #[inline(always)]
    fn load(self, from: &Lanes) -> Self::F {
        let p = from.as_ptr();
        op!([_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))])
    }
    #[inline(always)]
    fn store(self, value: Self::F, to: &mut Lanes) {
        let p = to.as_mut_ptr();
        op!({
            _mm256_storeu_ps(p, value[0]);
            _mm256_storeu_ps(p.add(8), value[1]);
        })
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        pair!(_mm256_add_ps, a, b)
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        pair!(_mm256_mul_ps, a, b)
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        pair!(_mm256_div_ps, a, b)
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        pair!(_mm256_max_ps, a, b)
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        pair!(_mm256_min_ps, a, b)
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        op!([_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])])
    }
    #[inline(always)]
    fn round(self, value: Self::F) -> Self::I {
        op!(value.map(|v| _mm256_cvtps_epi32(v)))
    }
    #[inline(always)]
    fn power(self, n: Self::I) -> Self::F {
        op!(n.map(|n| {
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(
                n,
                _mm256_set1_epi32(127),
            )))
        }))
    }
    #[inline(always)]
    fn where_above(self, x: Self::F, limit: Self::F, value: Self::F) -> Self::F {
        op!({
            let low = _mm256_cmp_ps::<_CMP_GT_OQ>(x[0], limit[0]);
            let high = _mm256_cmp_ps::<_CMP_GT_OQ>(x[1], limit[1]);
            [_mm256_and_ps(low, value[0]), _mm256_and_ps(high, value[1])]
        })
    }

    #[inline(always)]
    fn half(self, from: &[u16; LANES]) -> Self::F {
        let p: *const __m128i = from.as_ptr().cast();
        op!([_mm256_cvtph_ps(_mm_loadu_si128(p)), _mm256_cvtph_ps(_mm_loadu_si128(p.add(1)))])
    }
    #[inline(always)]
    fn bf16(self, from: &[u16; LANES]) -> Self::F {
        let p: *const __m128i = from.as_ptr().cast();
        op!([_mm_loadu_si128(p), _mm_loadu_si128(p.add(1))]
            .map(|h| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(h)))))
    }
    #[inline(always)]
    fn to_half(self, value: Self::F) -> [u16; LANES] {
        op!(std::mem::transmute(value.map(|v| _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v))))
    }
    #[inline(always)]
    fn to_bf16(self, value: Self::F) -> [u16; LANES] {
        let mut lanes = [0.0; LANES];
        self.store(value, &mut lanes);
        lanes.map(|v| half::bf16::from_f32(v).to_bits())
    }

    #[inline(always)]
    fn splat_int(self, value: i32) -> Self::I {
        op!([_mm256_set1_epi32(value); 2])
    }
    #[inline(always)]
    fn float(self, value: Self::I) -> Self::F {
        op!(value.map(|v| _mm256_cvtepi32_ps(v)))
    }
    #[inline(always)]
    fn shorts(self, value: Self::I) -> [i16; LANES] {
        // SAFETY: two registers are 16 words of any bits.
        let lanes: [i32; LANES] = unsafe { std::mem::transmute(value) };
        lanes.map(|v| v as i16)
    }

    #[inline(always)]
    fn bytes(self, from: &[u8; 64]) -> [Self::W; 2] {
        let [a, b] = self.words(from);
        op!({
            let low = _mm256_set1_epi16(0xff);
            [
                [_mm256_and_si256(a, low), _mm256_and_si256(b, low)],
                [_mm256_srli_epi16::<8>(a), _mm256_srli_epi16::<8>(b)],
            ]
        })
    }
    #[inline(always)]
    fn signed_bytes(self, from: &[u8; 64]) -> [Self::W; 2] {
        let [a, b] = self.words(from);
        op!([
            [
                _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(a)),
                _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(b)),
            ],
            [_mm256_srai_epi16::<8>(a), _mm256_srai_epi16::<8>(b)],
        ])
    }
    #[inline(always)]
    fn nibbles(self, from: &[u8; 64]) -> [Self::W; 4] {
        let [a, b] = self.words(from);
        op!({
            let low = _mm256_set1_epi16(15);
            [
                [_mm256_and_si256(a, low), _mm256_and_si256(b, low)],
                [
                    _mm256_and_si256(_mm256_srli_epi16::<8>(a), low),
                    _mm256_and_si256(_mm256_srli_epi16::<8>(b), low),
                ],
                [
                    _mm256_and_si256(_mm256_srli_epi16::<4>(a), low),
                    _mm256_and_si256(_mm256_srli_epi16::<4>(b), low),
                ],
                [_mm256_srli_epi16::<12>(a), _mm256_srli_epi16::<12>(b)],
            ]
        })
    }
    #[inline(always)]
    fn dot(self, sum: Self::I, weights: Self::W, x: i32) -> Self::I {
        op!({
            let x = _mm256_set1_epi32(x);
            [
                _mm256_add_epi32(sum[0], _mm256_madd_epi16(weights[0], x)),
                _mm256_add_epi32(sum[1], _mm256_madd_epi16(weights[1], x)),
            ]
        })
    }

    #[inline(always)]
    fn transpose(self, from: &[Lanes; LANES], to: &mut [Lanes; LANES]) {
        for (row, column) in [(0, 0), (0, 8), (8, 0), (8, 8)] {
            op!({
                let r: [__m256; 8] =
                    std::array::from_fn(|i| _mm256_loadu_ps(from[row + i].as_ptr().add(column)));
                let pairs: [__m256; 8] = std::array::from_fn(|i| {
                    let (a, b) = (r[i & !1], r[i | 1]);
                    if i & 1 == 0 { _mm256_unpacklo_ps(a, b) } else { _mm256_unpackhi_ps(a, b) }
                });
                // Here [4g + h] holds columns (2h', 2h'+1) of rows 4g..; see below.
                let quads: [__m256; 8] = std::array::from_fn(|i| {
                    let (a, b) =
                        (pairs[(i & 4) + ((i >> 1) & 1)], pairs[(i & 4) + 2 + ((i >> 1) & 1)]);
                    if i & 1 == 0 {
                        _mm256_shuffle_ps::<0x44>(a, b)
                    } else {
                        _mm256_shuffle_ps::<0xEE>(a, b)
                    }
                });
                for i in 0..4 {
                    let (a, b) = (quads[i], quads[4 + i]);
                    let low = _mm256_permute2f128_ps::<0x20>(a, b);
                    let high = _mm256_permute2f128_ps::<0x31>(a, b);
                    _mm256_storeu_ps(to[column + i].as_mut_ptr().add(row), low);
                    _mm256_storeu_ps(to[column + 4 + i].as_mut_ptr().add(row), high);
                }
            })
        }
    }
}

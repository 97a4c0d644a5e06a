//! Sixteen lanes as one 512-bit register: AVX-512 F, BW, VL, DQ, with or without VNNI.
//!
//! Invariants: an [`Avx512`] exists only inside functions compiled for these features, on a CPU
//! that has them. Every unsafe block below relies on that.
#![allow(unsafe_code)]

use super::{Kernel, LANES, Lanes, Simd};
use std::arch::x86_64::*;

/// Proof that the CPU has AVX-512 F, BW, VL and DQ, and VNNI if the parameter says so. Both forms
/// give equal bits.
#[derive(Clone, Copy)]
pub struct Avx512<const VNNI: bool>(());

impl<const VNNI: bool> Avx512<VNNI> {
    /// # Safety
    /// The CPU has the features of the type.
    #[inline(always)]
    pub unsafe fn assume() -> Self {
        Avx512(())
    }
}

macro_rules! op {
    ($($body:tt)*) => {{
        // SAFETY: `self` proves that the CPU has the instructions; references give memory of exact
        // size.
        unsafe { $($body)* }
    }};
}

/// Runs a kernel with these instructions, without VNNI.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
pub fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: these are the features of this function.
    kernel.run(unsafe { Avx512::<false>::assume() })
}

impl<const VNNI: bool> Simd for Avx512<VNNI> {
    type F = __m512;
    type I = __m512i;
    type W = __m512i;

    const TILE: usize = 8;

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        op!(_mm512_set1_ps(value))
    }
    #[inline(always)]
    fn load(self, from: &Lanes) -> __m512 {
        op!(_mm512_loadu_ps(from.as_ptr()))
    }
    #[inline(always)]
    fn store(self, value: __m512, to: &mut Lanes) {
        op!(_mm512_storeu_ps(to.as_mut_ptr(), value))
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        op!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn round(self, value: __m512) -> __m512i {
        op!(_mm512_cvtps_epi32(value))
    }
    #[inline(always)]
    fn power(self, n: __m512i) -> __m512 {
        op!(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_add_epi32(
            n,
            _mm512_set1_epi32(127)
        ))))
    }
    #[inline(always)]
    fn where_above(self, x: __m512, limit: __m512, value: __m512) -> __m512 {
        op!(_mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(x, limit), value))
    }

    #[inline(always)]
    fn half(self, from: &[u16; LANES]) -> __m512 {
        op!(_mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())))
    }
    #[inline(always)]
    fn bf16(self, from: &[u16; LANES]) -> __m512 {
        op!({
            let halves = _mm256_loadu_si256(from.as_ptr().cast());
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
        })
    }
    #[inline(always)]
    fn to_half(self, value: __m512) -> [u16; LANES] {
        op!(std::mem::transmute(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(value)))
    }
    #[inline(always)]
    fn to_bf16(self, value: __m512) -> [u16; LANES] {
        let mut lanes = [0.0; LANES];
        self.store(value, &mut lanes);
        lanes.map(|v| half::bf16::from_f32(v).to_bits())
    }

    #[inline(always)]
    fn exp2(self, x: __m512) -> __m512 {
        let n = op!(_mm512_roundscale_ps::<_MM_FROUND_TO_NEAREST_INT>(x));
        let rest = op!(_mm512_sub_ps(x, n));
        let near = self.exp2_near_zero(rest);
        op!({
            let is_above = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(x, _mm512_set1_ps(-126.0));
            _mm512_maskz_scalef_ps(is_above, near, n)
        })
    }

    #[inline(always)]
    fn splat_int(self, value: i32) -> __m512i {
        op!(_mm512_set1_epi32(value))
    }
    #[inline(always)]
    fn float(self, value: __m512i) -> __m512 {
        op!(_mm512_cvtepi32_ps(value))
    }
    #[inline(always)]
    fn shorts(self, value: __m512i) -> [i16; LANES] {
        op!(std::mem::transmute(_mm512_cvtepi32_epi16(value)))
    }

    #[inline(always)]
    fn bytes(self, from: &[u8; 64]) -> [__m512i; 2] {
        op!({
            let bytes = _mm512_loadu_si512(from.as_ptr().cast());
            [_mm512_and_si512(bytes, _mm512_set1_epi16(0xff)), _mm512_srli_epi16::<8>(bytes)]
        })
    }
    #[inline(always)]
    fn signed_bytes(self, from: &[u8; 64]) -> [__m512i; 2] {
        op!({
            let bytes = _mm512_loadu_si512(from.as_ptr().cast());
            [_mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(bytes)), _mm512_srai_epi16::<8>(bytes)]
        })
    }
    #[inline(always)]
    fn nibbles(self, from: &[u8; 64]) -> [__m512i; 4] {
        op!({
            let bytes = _mm512_loadu_si512(from.as_ptr().cast());
            let low = _mm512_set1_epi16(15);
            [
                _mm512_and_si512(bytes, low),
                _mm512_and_si512(_mm512_srli_epi16::<8>(bytes), low),
                _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), low),
                _mm512_srli_epi16::<12>(bytes),
            ]
        })
    }
    #[inline(always)]
    fn dot(self, sum: __m512i, weights: __m512i, x: i32) -> __m512i {
        op!({
            let x = _mm512_set1_epi32(x);
            if VNNI {
                _mm512_dpwssd_epi32(sum, weights, x)
            } else {
                _mm512_add_epi32(sum, _mm512_madd_epi16(weights, x))
            }
        })
    }

    #[inline(always)]
    fn transpose(self, from: &[Lanes; LANES], to: &mut [Lanes; LANES]) {
        op!({
            let r: [__m512; 16] = std::array::from_fn(|i| _mm512_loadu_ps(from[i].as_ptr()));
            // Inside each 128-bit part: pairs, then quads of rows 4q.. for column 4·part + i & 3.
            let pairs: [__m512; 16] = std::array::from_fn(|i| {
                let (a, b) = (r[i & !1], r[i | 1]);
                if i & 1 == 0 { _mm512_unpacklo_ps(a, b) } else { _mm512_unpackhi_ps(a, b) }
            });
            let quads: [__m512; 16] = std::array::from_fn(|i| {
                let first = (i & 12) + ((i >> 1) & 1);
                let (a, b) = (pairs[first], pairs[first + 2]);
                if i & 1 == 0 {
                    _mm512_shuffle_ps::<0x44>(a, b)
                } else {
                    _mm512_shuffle_ps::<0xEE>(a, b)
                }
            });
            // Then a 4 × 4 transposition of the parts.
            for i in 0..4 {
                let (a, b, c, d) = (quads[i], quads[4 + i], quads[8 + i], quads[12 + i]);
                let even_low = _mm512_shuffle_f32x4::<0x88>(a, b);
                let odd_low = _mm512_shuffle_f32x4::<0xDD>(a, b);
                let even_high = _mm512_shuffle_f32x4::<0x88>(c, d);
                let odd_high = _mm512_shuffle_f32x4::<0xDD>(c, d);
                let columns = [
                    _mm512_shuffle_f32x4::<0x88>(even_low, even_high),
                    _mm512_shuffle_f32x4::<0x88>(odd_low, odd_high),
                    _mm512_shuffle_f32x4::<0xDD>(even_low, even_high),
                    _mm512_shuffle_f32x4::<0xDD>(odd_low, odd_high),
                ];
                for (part, column) in columns.into_iter().enumerate() {
                    _mm512_storeu_ps(to[4 * part + i].as_mut_ptr(), column);
                }
            }
        })
    }
}

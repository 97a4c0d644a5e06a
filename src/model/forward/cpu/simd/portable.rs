//! Sixteen lanes as plain arrays, for any CPU. Multiplication and addition are rounded separately,
//! because a fused operation without an instruction is a slow library call.

use super::{LANES, Lanes, Simd};
use half::{bf16, f16};
use std::array::from_fn;

/// Runs on any CPU.
#[derive(Clone, Copy)]
pub struct Portable;

impl Simd for Portable {
    type F = Lanes;
    type I = [i32; LANES];
    type W = [i16; 2 * LANES];

    const TILE: usize = 2;

    #[inline(always)]
    fn splat(self, value: f32) -> Lanes {
        [value; LANES]
    }
    #[inline(always)]
    fn load(self, from: &Lanes) -> Lanes {
        *from
    }
    #[inline(always)]
    fn store(self, value: Lanes, to: &mut Lanes) {
        *to = value;
    }
    #[inline(always)]
    fn add(self, a: Lanes, b: Lanes) -> Lanes {
        from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn mul(self, a: Lanes, b: Lanes) -> Lanes {
        from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn div(self, a: Lanes, b: Lanes) -> Lanes {
        from_fn(|i| a[i] / b[i])
    }
    #[inline(always)]
    fn max(self, a: Lanes, b: Lanes) -> Lanes {
        from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn min(self, a: Lanes, b: Lanes) -> Lanes {
        from_fn(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn fma(self, a: Lanes, b: Lanes, c: Lanes) -> Lanes {
        from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    fn round(self, value: Lanes) -> [i32; LANES] {
        from_fn(|i| value[i].round_ties_even() as i32)
    }
    #[inline(always)]
    fn power(self, n: [i32; LANES]) -> Lanes {
        from_fn(|i| f32::from_bits(((n[i] + 127) as u32) << 23))
    }
    #[inline(always)]
    fn where_above(self, x: Lanes, limit: Lanes, value: Lanes) -> Lanes {
        from_fn(|i| if x[i] > limit[i] { value[i] } else { 0.0 })
    }

    #[inline(always)]
    fn half(self, from: &[u16; LANES]) -> Lanes {
        from_fn(|i| f16::from_bits(from[i]).to_f32())
    }
    #[inline(always)]
    fn bf16(self, from: &[u16; LANES]) -> Lanes {
        from_fn(|i| f32::from_bits((from[i] as u32) << 16))
    }
    #[inline(always)]
    fn to_half(self, value: Lanes) -> [u16; LANES] {
        from_fn(|i| f16::from_f32(value[i]).to_bits())
    }
    #[inline(always)]
    fn to_bf16(self, value: Lanes) -> [u16; LANES] {
        from_fn(|i| bf16::from_f32(value[i]).to_bits())
    }

    #[inline(always)]
    fn splat_int(self, value: i32) -> [i32; LANES] {
        [value; LANES]
    }
    #[inline(always)]
    fn float(self, value: [i32; LANES]) -> Lanes {
        from_fn(|i| value[i] as f32)
    }
    #[inline(always)]
    fn shorts(self, value: [i32; LANES]) -> [i16; LANES] {
        from_fn(|i| value[i] as i16)
    }

    #[inline(always)]
    fn bytes(self, from: &[u8; 64]) -> [[i16; 2 * LANES]; 2] {
        [from_fn(|i| from[2 * i] as i16), from_fn(|i| from[2 * i + 1] as i16)]
    }
    #[inline(always)]
    fn signed_bytes(self, from: &[u8; 64]) -> [[i16; 2 * LANES]; 2] {
        [from_fn(|i| from[2 * i] as i8 as i16), from_fn(|i| from[2 * i + 1] as i8 as i16)]
    }
    #[inline(always)]
    fn nibbles(self, from: &[u8; 64]) -> [[i16; 2 * LANES]; 4] {
        [
            from_fn(|i| (from[2 * i] & 15) as i16),
            from_fn(|i| (from[2 * i + 1] & 15) as i16),
            from_fn(|i| (from[2 * i] >> 4) as i16),
            from_fn(|i| (from[2 * i + 1] >> 4) as i16),
        ]
    }
    #[inline(always)]
    fn dot(self, sum: [i32; LANES], weights: [i16; 2 * LANES], x: i32) -> [i32; LANES] {
        let (low, high) = (x as i16 as i32, x >> 16);
        from_fn(|i| sum[i] + weights[2 * i] as i32 * low + weights[2 * i + 1] as i32 * high)
    }

    #[inline(always)]
    fn transpose(self, from: &[Lanes; LANES], to: &mut [Lanes; LANES]) {
        for (i, row) in to.iter_mut().enumerate() {
            *row = from_fn(|j| from[j][i]);
        }
    }
}

//! Sixteen lanes of arithmetic, once per kernel family, and the choice of the family at run time.
//!
//! Owns: [`Simd`], the vocabulary in which all kernels are written, and [`Dispatch`], the proof that
//! a family runs on this CPU. Invariant: each lane's result depends on that lane's inputs alone, and
//! integer results are equal in all families. AMX would be one more family with tiles of its own.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_vnni;
mod dispatch;
mod portable;

pub use dispatch::{Dispatch, KernelFamily, available_kernels};

/// Lanes of a vector.
pub const LANES: usize = 16;
/// Sixteen values in memory.
pub type Lanes = [f32; LANES];

/// Sixteen lanes. A value of an implementing type exists only where its instructions do.
pub trait Simd: Copy + Send + Sync + 'static {
    /// 16 × f32.
    type F: Copy;
    /// 16 × i32.
    type I: Copy;
    /// 16 rows × 2 weights as i16.
    type W: Copy;

    /// Rows of activations that share one pass over a group of weights: what registers hold.
    const TILE: usize;

    /// The value in all lanes.
    fn splat(self, value: f32) -> Self::F;
    /// From memory.
    fn load(self, from: &Lanes) -> Self::F;
    /// To memory.
    fn store(self, value: Self::F, to: &mut Lanes);
    /// a + b
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// a · b
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// a / b
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// The larger.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// The smaller.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// a · b + c, rounded once where the family can.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The nearest integer, ties to even; magnitudes below 2³¹.
    fn round(self, value: Self::F) -> Self::I;
    /// 2ⁿ for n in −126..=127.
    fn power(self, n: Self::I) -> Self::F;
    /// `value` where `x > limit`, zero elsewhere.
    fn where_above(self, x: Self::F, limit: Self::F, value: Self::F) -> Self::F;

    /// From halves.
    fn half(self, from: &[u16; LANES]) -> Self::F;
    /// From bfloat16.
    fn bf16(self, from: &[u16; LANES]) -> Self::F;
    /// To halves, ties to even.
    fn to_half(self, value: Self::F) -> [u16; LANES];
    /// To bfloat16, ties to even.
    fn to_bf16(self, value: Self::F) -> [u16; LANES];

    /// The value in all lanes.
    fn splat_int(self, value: i32) -> Self::I;
    /// Exact below 2²⁴, else the nearest.
    fn float(self, value: Self::I) -> Self::F;
    /// The low 16 bits of each lane.
    fn shorts(self, value: Self::I) -> [i16; LANES];

    /// Unsigned bytes, four to a lane: its first and third, then its second and fourth.
    fn bytes(self, from: &[u8; 64]) -> [Self::W; 2];
    /// The same of signed bytes.
    fn signed_bytes(self, from: &[u8; 64]) -> [Self::W; 2];
    /// The same of the low nibbles, then of the high nibbles.
    fn nibbles(self, from: &[u8; 64]) -> [Self::W; 4];
    /// Adds, per lane, the dot product of its two weights and the two i16 of `x`.
    fn dot(self, sum: Self::I, weights: Self::W, x: i32) -> Self::I;

    /// `to[i][j] = from[j][i]`
    fn transpose(self, from: &[Lanes; LANES], to: &mut [Lanes; LANES]);

    /// The sum of all lanes, in one fixed order.
    #[inline(always)]
    fn sum(self, value: Self::F) -> f32 {
        self.reduce(value, |a, b| a + b)
    }

    /// The largest lane.
    #[inline(always)]
    fn largest(self, value: Self::F) -> f32 {
        self.reduce(value, |a, b| if a > b { a } else { b })
    }

    /// Joins halves until one is left.
    #[inline(always)]
    fn reduce(self, value: Self::F, join: impl Fn(f32, f32) -> f32) -> f32 {
        let mut all = [0.0; LANES];
        self.store(value, &mut all);
        let half: [f32; 8] = std::array::from_fn(|i| join(all[i], all[i + 8]));
        let quarter: [f32; 4] = std::array::from_fn(|i| join(half[i], half[i + 4]));
        join(join(quarter[0], quarter[2]), join(quarter[1], quarter[3]))
    }

    /// 2ˣ to about 2 ulp for x ≤ 127; below −126 it may be zero, far below it is.
    #[inline(always)]
    fn exp2(self, x: Self::F) -> Self::F {
        let low = self.splat(-126.0);
        let n = self.round(self.max(x, low));
        let rest = self.fma(self.float(n), self.splat(-1.0), self.max(x, low));
        self.where_above(x, low, self.mul(self.exp2_near_zero(rest), self.power(n)))
    }

    /// 2ˣ for |x| ≤ ½: the polynomial of Cephes `exp2f`.
    #[inline(always)]
    fn exp2_near_zero(self, x: Self::F) -> Self::F {
        const COEFFICIENTS: [f32; 6] =
            [1.339_887_4e-3, 9.618_437e-3, 5.550_332_5e-2, 2.402_264_7e-1, 6.931_472e-1, 1.0];
        let mut p = self.splat(1.535_336_2e-4);
        for c in COEFFICIENTS {
            p = self.fma(p, x, self.splat(c));
        }
        p
    }
}

/// A computation written over [`Simd`]; `run` must be `#[inline(always)]`, and so must all that it
/// calls, since only the instance inside [`Dispatch::run`] may use the family's instructions.
pub trait Kernel {
    /// What it returns.
    type Output;
    /// The body.
    fn run<S: Simd>(self, s: S) -> Self::Output;
}

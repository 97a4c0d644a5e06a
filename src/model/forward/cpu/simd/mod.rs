//! Sixteen lanes of arithmetic, once per kernel family, and the choice of the family at run time.
//!
//! Owns: [`Simd`], the vocabulary in which all kernels are written, and [`Dispatch`], the proof that
//! a family runs on this CPU. Invariant: each lane's result depends on that lane's inputs alone, and
//! integer results are equal in all families. AMX would be one more family with tiles of its own.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
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
    /// 16 rows × 4 bytes of weights.
    type W: Copy;

    /// Rows of activations that share one pass over a group of weights: what registers hold.
    const TILE: usize;
    /// What [`Simd::dot_signed`] adds for each unit of the activations' sum.
    const SIGNED_BIAS: i32;

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
    fn exp2(self, n: Self::I) -> Self::F;
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
    /// Exact below 2²⁴.
    fn float(self, value: Self::I) -> Self::F;
    /// The low byte of each lane.
    fn bytes(self, value: Self::I) -> [i8; LANES];
    /// Sixteen signed bytes as floats.
    fn from_bytes(self, bytes: &[i8; LANES]) -> Self::F;

    /// Low and high nibbles, each as unsigned bytes.
    fn nibbles(self, from: &[u8; 64]) -> [Self::W; 2];
    /// Unsigned bytes below 128.
    fn unsigned(self, from: &[u8; 64]) -> Self::W;
    /// Signed bytes, stored as they are.
    fn signed(self, from: &[u8; 64]) -> Self::W;
    /// Adds, per lane, the dot product of its four weight bytes (below 128) and the four signed
    /// bytes of `x` (never −128).
    fn dot(self, sum: Self::I, weights: Self::W, x: i32) -> Self::I;
    /// The same for weights of [`Simd::signed`], plus [`Simd::SIGNED_BIAS`] times the sum of `x`.
    fn dot_signed(self, sum: Self::I, weights: Self::W, x: i32) -> Self::I;

    /// `to[i][j] = from[j][i]`
    fn transpose(self, from: &[Lanes; LANES], to: &mut [Lanes; LANES]);

    /// The sum of all lanes, in one fixed order.
    #[inline(always)]
    fn sum(self, value: Self::F) -> f32 {
        let mut lanes = [0.0; LANES];
        self.store(value, &mut lanes);
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                lanes[i] += lanes[i + half];
            }
        }
        lanes[0]
    }

    /// The largest lane.
    #[inline(always)]
    fn largest(self, value: Self::F) -> f32 {
        let mut lanes = [0.0; LANES];
        self.store(value, &mut lanes);
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                lanes[i] = if lanes[i] > lanes[i + half] { lanes[i] } else { lanes[i + half] };
            }
        }
        lanes[0]
    }

    /// eˣ to about 2 ulp; zero below −87, e⁸⁸ above 88.
    #[inline(always)]
    fn exp(self, x: Self::F) -> Self::F {
        // Cody and Waite's reduction, then the minimax polynomial of Cephes `expf`.
        const COEFFICIENTS: [f32; 6] =
            [1.987_569_1e-4, 1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
        let low = self.splat(-87.0);
        let clamped = self.min(self.max(x, low), self.splat(88.0));
        let n = self.round(self.mul(clamped, self.splat(std::f32::consts::LOG2_E)));
        let whole = self.float(n);
        let r = self.fma(whole, self.splat(-0.693_359_4), clamped);
        let r = self.fma(whole, self.splat(2.121_944_4e-4), r);
        let mut p = self.splat(COEFFICIENTS[0]);
        for c in &COEFFICIENTS[1..] {
            p = self.fma(p, r, self.splat(*c));
        }
        let p = self.add(self.fma(p, self.mul(r, r), r), self.splat(1.0));
        self.where_above(x, low, self.mul(p, self.exp2(n)))
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

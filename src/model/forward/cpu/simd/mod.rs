//! Sixteen lanes of arithmetic, once per kernel family, and the choice of the family at run time.
//!
//! Owns: [`Simd`], the operations of all kernels, and [`Dispatch`], the proof that a family runs on
//! this CPU.
//! Invariants: each lane's result depends only on that lane's inputs. Integer results are equal in
//! all families, and float results in all families of a bit class.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_vnni;
mod dispatch;
mod portable;

pub use dispatch::{Dispatch, available_kernels, fastest_kernels};

/// Number of lanes of a vector.
pub const LANES: usize = 16;
/// Sixteen values in memory.
pub type Lanes = [f32; LANES];

/// Sixteen lanes. A value of an implementing type exists only where its instructions are available.
pub trait Simd: Copy + Send + Sync + 'static {
    /// 16 × f32.
    type F: Copy;
    /// 16 × i32.
    type I: Copy;
    /// 16 rows × 2 weights as i16.
    type W: Copy;

    /// Rows of activations that share one pass over a group of weights, limited by the registers.
    const TILE: usize;

    /// Sets all lanes to the value.
    fn splat(self, value: f32) -> Self::F;
    /// Loads from memory.
    fn load(self, from: &Lanes) -> Self::F;
    /// Stores to memory.
    fn store(self, value: Self::F, to: &mut Lanes);
    /// a + b
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// a · b
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// a / b
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// The larger value.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// The smaller value.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// a · b + c, rounded once if the family supports it.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The nearest integer, ties to even; magnitudes below 2³¹.
    fn round(self, value: Self::F) -> Self::I;
    /// 2ⁿ for n in −126..=127.
    fn power(self, n: Self::I) -> Self::F;
    /// `value` in lanes with `x > limit`, zero elsewhere.
    fn where_above(self, x: Self::F, limit: Self::F, value: Self::F) -> Self::F;

    /// Converts from f16.
    fn half(self, from: &[u16; LANES]) -> Self::F;
    /// Converts from bfloat16.
    fn bf16(self, from: &[u16; LANES]) -> Self::F;
    /// Converts to f16, ties to even.
    fn to_half(self, value: Self::F) -> [u16; LANES];
    /// Converts to bfloat16, ties to even.
    fn to_bf16(self, value: Self::F) -> [u16; LANES];

    /// Sets all lanes to the value.
    fn splat_int(self, value: i32) -> Self::I;
    /// Converts to floats; exact below 2²⁴, else the nearest.
    fn float(self, value: Self::I) -> Self::F;
    /// The low 16 bits of each lane.
    fn shorts(self, value: Self::I) -> [i16; LANES];

    /// Unsigned bytes, four per lane: the first and third, then the second and fourth.
    fn bytes(self, from: &[u8; 64]) -> [Self::W; 2];
    /// Like [`Simd::bytes`], for signed bytes.
    fn signed_bytes(self, from: &[u8; 64]) -> [Self::W; 2];
    /// Like [`Simd::bytes`], for the low nibbles, then for the high nibbles.
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

    /// Combines the two halves repeatedly until one value is left.
    #[inline(always)]
    fn reduce(self, value: Self::F, join: impl Fn(f32, f32) -> f32) -> f32 {
        let mut all = [0.0; LANES];
        self.store(value, &mut all);
        let half: [f32; 8] = std::array::from_fn(|i| join(all[i], all[i + 8]));
        let quarter: [f32; 4] = std::array::from_fn(|i| join(half[i], half[i + 4]));
        join(join(quarter[0], quarter[2]), join(quarter[1], quarter[3]))
    }

    /// 2ˣ to about 2 ulp for x ≤ 127. At −126 and below, and for NaN, it is zero.
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

/// A computation over [`Simd`]. `run` and everything that it calls must be `#[inline(always)]`:
/// only the instance inside [`Dispatch::run`] can use the family's instructions.
pub trait Kernel {
    /// The type of the result.
    type Output;
    /// The body.
    fn run<S: Simd>(self, s: S) -> Self::Output;
}

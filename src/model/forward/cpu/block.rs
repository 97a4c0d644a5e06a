//! The memory layout of weights for the kernels: sixteen output rows side by side. Rows are lanes,
//! and no sum crosses lanes.
//!
//! Plain types are stored as `[group][column]` of [`Numbers`]. Quantised types are stored as
//! `[group][32 columns]` of [`Block`]: levels, one scale per row (two for Q6_K), and a minimum if
//! the type has one.

use super::simd::{LANES, Lanes, Simd};
use half::f16;

/// Columns of a block.
pub const BLOCK: usize = 32;
/// Levels of a block: 32 columns of one row, in the order of the file.
pub type RowLevels = [u8; BLOCK];

/// Sixteen stored numbers, one per output row.
pub trait Numbers: Copy + Send + Sync + 'static {
    /// Rounds to the stored type. The result is exact if the numbers were of that type before.
    fn pack(lanes: &Lanes) -> Self;
    /// Converts to floats.
    fn lanes<S: Simd>(&self, s: S) -> S::F;
    /// One of the numbers.
    fn get(&self, lane: usize) -> f32;
}

impl Numbers for Lanes {
    fn pack(lanes: &Lanes) -> Self {
        *lanes
    }
    #[inline(always)]
    fn lanes<S: Simd>(&self, s: S) -> S::F {
        s.load(self)
    }
    fn get(&self, lane: usize) -> f32 {
        self[lane]
    }
}

/// Sixteen f16.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Halves(pub [u16; LANES]);

impl Numbers for Halves {
    fn pack(lanes: &Lanes) -> Self {
        Halves(lanes.map(|x| f16::from_f32(x).to_bits()))
    }
    #[inline(always)]
    fn lanes<S: Simd>(&self, s: S) -> S::F {
        s.half(&self.0)
    }
    fn get(&self, lane: usize) -> f32 {
        f16::from_bits(self.0[lane]).to_f32()
    }
}

/// Sixteen bfloat16.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Bfloats(pub [u16; LANES]);

impl Numbers for Bfloats {
    fn pack(lanes: &Lanes) -> Self {
        Bfloats(lanes.map(|x| half::bf16::from_f32(x).to_bits()))
    }
    #[inline(always)]
    fn lanes<S: Simd>(&self, s: S) -> S::F {
        s.bf16(&self.0)
    }
    fn get(&self, lane: usize) -> f32 {
        f32::from_bits((self.0[lane] as u32) << 16)
    }
}

/// Integer weights of 16 rows × 32 columns.
pub trait Levels: Copy + Send + Sync + 'static {
    /// Difference between a stored level and the weight's integer.
    const OFFSET: i32;
    /// Packs rows of levels.
    fn pack(rows: &[RowLevels; LANES]) -> Self;
    /// Stored levels of columns `4q..4q + 4`, then of `16 + 4q..16 + 4q + 4`, two columns per
    /// register.
    fn quads<S: Simd>(&self, s: S, q: usize) -> [S::W; 4];
    /// The value of one weight, in units of its scale.
    fn get(&self, lane: usize, column: usize) -> i32;
}

/// The position of a column among its lane's four bytes. One register takes the first and third
/// byte, the other the rest.
const fn place(column: usize) -> usize {
    [0, 2, 1, 3][column % 4]
}

/// Four bits; `OFFSET` stands for zero. Low nibbles are the first half of the columns.
#[derive(Clone, Copy)]
#[repr(C, align(32))]
pub struct Nibbles<const OFFSET: i32>([[u8; 64]; 4]);

impl<const OFFSET: i32> Levels for Nibbles<OFFSET> {
    const OFFSET: i32 = OFFSET;

    fn pack(rows: &[RowLevels; LANES]) -> Self {
        let mut packed = [[0; 64]; 4];
        for (lane, row) in rows.iter().enumerate() {
            for column in 0..16 {
                packed[column / 4][lane * 4 + place(column)] = row[column] | row[column + 16] << 4;
            }
        }
        Nibbles(packed)
    }
    #[inline(always)]
    fn quads<S: Simd>(&self, s: S, q: usize) -> [S::W; 4] {
        s.nibbles(&self.0[q])
    }
    fn get(&self, lane: usize, column: usize) -> i32 {
        let byte = self.0[column % 16 / 4][lane * 4 + place(column)];
        (byte >> (column / 16 * 4) & 15) as i32 - OFFSET
    }
}

fn interleave(rows: &[RowLevels; LANES]) -> [[u8; 64]; 8] {
    let mut packed = [[0; 64]; 8];
    for (lane, row) in rows.iter().enumerate() {
        for column in 0..BLOCK {
            packed[column / 4][lane * 4 + place(column)] = row[column];
        }
    }
    packed
}

/// Bytes; `OFFSET` stands for zero.
#[derive(Clone, Copy)]
#[repr(C, align(32))]
pub struct Bytes<const OFFSET: i32>([[u8; 64]; 8]);

impl<const OFFSET: i32> Levels for Bytes<OFFSET> {
    const OFFSET: i32 = OFFSET;

    fn pack(rows: &[RowLevels; LANES]) -> Self {
        Bytes(interleave(rows))
    }
    #[inline(always)]
    fn quads<S: Simd>(&self, s: S, q: usize) -> [S::W; 4] {
        let [a, b] = s.bytes(&self.0[q]);
        let [c, d] = s.bytes(&self.0[4 + q]);
        [a, b, c, d]
    }
    fn get(&self, lane: usize, column: usize) -> i32 {
        self.0[column / 4][lane * 4 + place(column)] as i32 - OFFSET
    }
}

/// Signed bytes.
#[derive(Clone, Copy)]
#[repr(C, align(32))]
pub struct SignedBytes([[u8; 64]; 8]);

impl Levels for SignedBytes {
    const OFFSET: i32 = 0;

    fn pack(rows: &[RowLevels; LANES]) -> Self {
        SignedBytes(interleave(rows))
    }
    #[inline(always)]
    fn quads<S: Simd>(&self, s: S, q: usize) -> [S::W; 4] {
        let [a, b] = s.signed_bytes(&self.0[q]);
        let [c, d] = s.signed_bytes(&self.0[4 + q]);
        [a, b, c, d]
    }
    fn get(&self, lane: usize, column: usize) -> i32 {
        self.0[column / 4][lane * 4 + place(column)] as i8 as i32
    }
}

/// Scales of a block: one for all 32 columns, or one for each half.
pub trait Scales: Copy + Send + Sync + 'static {
    /// Whether the two halves have different scales.
    const HALVES: bool;
    /// Packs one pair per row; equal values unless `HALVES`.
    fn pack(rows: &[[f32; 2]; LANES]) -> Self;
    /// The scales of one half.
    fn lanes<S: Simd>(&self, s: S, half: usize) -> S::F;
    /// The scale of one half of one row.
    fn get(&self, lane: usize, half: usize) -> f32;
}

impl<N: Numbers> Scales for N {
    const HALVES: bool = false;
    fn pack(rows: &[[f32; 2]; LANES]) -> Self {
        N::pack(&rows.map(|pair| pair[0]))
    }
    #[inline(always)]
    fn lanes<S: Simd>(&self, s: S, _half: usize) -> S::F {
        Numbers::lanes(self, s)
    }
    fn get(&self, lane: usize, _half: usize) -> f32 {
        Numbers::get(self, lane)
    }
}

impl Scales for [Lanes; 2] {
    const HALVES: bool = true;
    fn pack(rows: &[[f32; 2]; LANES]) -> Self {
        [rows.map(|pair| pair[0]), rows.map(|pair| pair[1])]
    }
    #[inline(always)]
    fn lanes<S: Simd>(&self, s: S, half: usize) -> S::F {
        s.load(&self[half])
    }
    fn get(&self, lane: usize, half: usize) -> f32 {
        self[half][lane]
    }
}

/// The value added to every weight of a row's block, if any.
pub trait Minimum: Copy + Send + Sync + 'static {
    /// Packs one value per row.
    fn pack(rows: &Lanes) -> Self;
    /// Converts to floats.
    fn lanes<S: Simd>(&self, s: S) -> Option<S::F>;
    /// The value of one row.
    fn get(&self, lane: usize) -> f32;
}

impl Minimum for () {
    fn pack(_rows: &Lanes) -> Self {}
    #[inline(always)]
    fn lanes<S: Simd>(&self, _s: S) -> Option<S::F> {
        None
    }
    fn get(&self, _lane: usize) -> f32 {
        0.0
    }
}

impl<N: Numbers> Minimum for N {
    fn pack(rows: &Lanes) -> Self {
        N::pack(rows)
    }
    #[inline(always)]
    fn lanes<S: Simd>(&self, s: S) -> Option<S::F> {
        Some(Numbers::lanes(self, s))
    }
    fn get(&self, lane: usize) -> f32 {
        Numbers::get(self, lane)
    }
}

/// 16 rows × 32 columns of a quantised matrix: weight = scale · level + minimum.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Block<L, D, M> {
    /// The weights as integers.
    pub levels: L,
    /// The factor of the integers.
    pub scales: D,
    /// Added to each weight.
    pub minimum: M,
}

impl<L: Levels, D: Scales, M: Minimum> Block<L, D, M> {
    /// One weight.
    pub fn get(&self, lane: usize, column: usize) -> f32 {
        let level = self.levels.get(lane, column) as f32;
        level * self.scales.get(lane, column / 16) + self.minimum.get(lane)
    }
}

/// The block layouts of GGUF's types. For types with 6-bit scales, they store the product of both
/// scales.
pub type Q4_0 = Block<Nibbles<8>, Halves, ()>;
/// See [`Q4_0`].
pub type Q4_1 = Block<Nibbles<0>, Halves, Halves>;
/// See [`Q4_0`].
pub type Q4K = Block<Nibbles<0>, Lanes, Lanes>;
/// See [`Q4_0`].
pub type Q5_0 = Block<Bytes<16>, Halves, ()>;
/// See [`Q4_0`].
pub type Q5_1 = Block<Bytes<0>, Halves, Halves>;
/// See [`Q4_0`].
pub type Q5K = Block<Bytes<0>, Lanes, Lanes>;
/// See [`Q4_0`].
pub type Q6K = Block<Bytes<32>, [Lanes; 2], ()>;
/// See [`Q4_0`].
pub type Q8_0 = Block<SignedBytes, Halves, ()>;

//! Unpacks GGUF's block types, row by row: 32 levels with their scale and minimum.
//!
//! The tensor's view has checked the length of the bytes against type and shape.

use super::block::{BLOCK, RowLevels};
use crate::model::tensor::TensorType;
use half::f16;

/// 32 columns of one row; weight = scale · (level − zero of the type) + minimum.
pub struct RowBlock {
    /// Levels as stored in the file (Q8_0: the bits of an `i8`).
    pub levels: RowLevels,
    /// Scales of columns 0..16 and 16..32.
    pub scales: [f32; 2],
    /// Zero if the type has no minimum.
    pub minimum: f32,
}

fn number(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// The `index`-th 32 columns of a row of a quantised type.
pub fn row_block(dtype: TensorType, row: &[u8], index: usize) -> RowBlock {
    let (columns, size) = dtype.block();
    let per_block = columns / BLOCK;
    let bytes = &row[index / per_block * size..][..size];
    let part = index % per_block;
    match dtype {
        TensorType::Q4_0 => small(bytes, nibbles(&bytes[2..]), false),
        TensorType::Q4_1 => small(bytes, nibbles(&bytes[4..]), true),
        TensorType::Q5_0 => small(bytes, fives(&bytes[2..]), false),
        TensorType::Q5_1 => small(bytes, fives(&bytes[4..]), true),
        TensorType::Q8_0 => small(bytes, std::array::from_fn(|i| bytes[2 + i]), false),
        TensorType::Q4_K => with_six_bit_scales(bytes, part, four_k(bytes, 16, part)),
        TensorType::Q5_K => {
            let four = four_k(bytes, 48, part);
            let levels = std::array::from_fn(|i| four[i] | (bytes[16 + i] >> part & 1) << 4);
            with_six_bit_scales(bytes, part, levels)
        }
        TensorType::Q6_K => six_k(bytes, part),
        TensorType::F32 | TensorType::F16 | TensorType::Bf16 => {
            unreachable!("plain types have no blocks")
        }
    }
}

/// Types with blocks of 32 columns: scale, and minimum if any.
fn small(bytes: &[u8], levels: RowLevels, minimum: bool) -> RowBlock {
    let minimum = if minimum { number(bytes, 2) } else { 0.0 };
    RowBlock { levels, scales: [number(bytes, 0); 2], minimum }
}

/// 16 bytes; the low nibbles are the first half.
fn nibbles(bytes: &[u8]) -> RowLevels {
    std::array::from_fn(|i| bytes[i % 16] >> (i / 16 * 4) & 15)
}

/// Four bytes of fifth bits, then nibbles.
fn fives(bytes: &[u8]) -> RowLevels {
    let four = nibbles(&bytes[4..]);
    std::array::from_fn(|i| four[i] | (bytes[i / 8] >> (i % 8) & 1) << 4)
}

/// Sub-blocks 2i and 2i + 1 share 32 bytes: low and high nibbles.
fn four_k(bytes: &[u8], levels_at: usize, part: usize) -> RowLevels {
    std::array::from_fn(|i| bytes[levels_at + part / 2 * 32 + i] >> (part % 2 * 4) & 15)
}

/// Q4_K and Q5_K: two f16, then eight pairs of 6-bit scale and minimum in 12 bytes.
fn with_six_bit_scales(bytes: &[u8], part: usize, levels: RowLevels) -> RowBlock {
    let packed = &bytes[4..16];
    let (scale, minimum) = if part < 4 {
        (packed[part] & 63, packed[part + 4] & 63)
    } else {
        let both = packed[part + 4];
        (both & 15 | packed[part - 4] >> 6 << 4, both >> 4 | packed[part] >> 6 << 4)
    };
    RowBlock {
        levels,
        scales: [number(bytes, 0) * scale as f32; 2],
        minimum: -(number(bytes, 2) * minimum as f32),
    }
}

/// 128 bytes of low nibbles, 64 of high bit pairs, 16 signed scales, one f16.
fn six_k(bytes: &[u8], part: usize) -> RowBlock {
    let (half, quarter) = (part / 4, part % 4);
    let low = &bytes[64 * half + 32 * (quarter % 2)..];
    let high = &bytes[128 + 32 * half..];
    let levels = std::array::from_fn(|i| {
        low[i] >> (quarter / 2 * 4) & 15 | (high[i] >> (2 * quarter) & 3) << 4
    });
    let d = number(bytes, 208);
    let scales = std::array::from_fn(|i| d * bytes[192 + 8 * half + 2 * quarter + i] as i8 as f32);
    RowBlock { levels, scales, minimum: 0.0 }
}

//! Simple dequantisation of every block type: the reference for kernels and their tests.
//!
//! Not here: speed; no hot path calls this.

use super::tensor::{TensorType, TensorView};
use half::{bf16, f16};

/// Converts the model's row `row` of `tensor` to floats. `out` holds `cols` elements.
pub fn dequantise_row(tensor: &TensorView<'_>, row: usize, out: &mut [f32]) {
    assert_eq!(out.len(), tensor.cols);
    dequantise(tensor.dtype, tensor.row(row), out);
}

/// Converts `bytes` (whole blocks of `dtype`) to floats. `out` holds as many elements as the
/// blocks.
pub fn dequantise(dtype: TensorType, bytes: &[u8], out: &mut [f32]) {
    let (elements, size) = dtype.block();
    assert_eq!(bytes.len() / size * elements, out.len());
    for (block, out) in bytes.chunks_exact(size).zip(out.chunks_exact_mut(elements)) {
        match dtype {
            TensorType::F32 => {
                out[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]])
            }
            TensorType::F16 => out[0] = half_at(block, 0),
            TensorType::Bf16 => out[0] = bf16::from_le_bytes([block[0], block[1]]).to_f32(),
            TensorType::Q8_0 => q8_0(block, out),
            TensorType::Q4_0 => {
                let d = half_at(block, 0);
                nibbles(&block[2..], out, |q, _| d * (f32::from(q) - 8.0));
            }
            TensorType::Q4_1 => {
                let (d, m) = (half_at(block, 0), half_at(block, 2));
                nibbles(&block[4..], out, |q, _| d * f32::from(q) + m);
            }
            TensorType::Q5_0 => {
                let (d, high) = (half_at(block, 0), word_at(block, 2));
                nibbles(&block[6..], out, |q, i| d * (f32::from(q | fifth(high, i)) - 16.0));
            }
            TensorType::Q5_1 => {
                let (d, m, high) = (half_at(block, 0), half_at(block, 2), word_at(block, 4));
                nibbles(&block[8..], out, |q, i| d * f32::from(q | fifth(high, i)) + m);
            }
            TensorType::Q4_K => q4_k(block, out),
            TensorType::Q5_K => q5_k(block, out),
            TensorType::Q6_K => q6_k(block, out),
        }
    }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

fn word_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// Bit `index` of `high`, moved to the position of a fifth bit.
fn fifth(high: u32, index: usize) -> u8 {
    ((high >> index & 1) << 4) as u8
}

/// 32 elements: the low nibbles of 16 bytes, then the high ones.
fn nibbles(bytes: &[u8], out: &mut [f32], value: impl Fn(u8, usize) -> f32) {
    for (i, &byte) in bytes.iter().enumerate() {
        out[i] = value(byte & 15, i);
        out[i + 16] = value(byte >> 4, i + 16);
    }
}

fn q8_0(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (out, &q) in out.iter_mut().zip(&block[2..]) {
        *out = d * f32::from(q as i8);
    }
}

/// Scale and minimum of sub-block `index`, 6 bits each. The upper four sub-blocks take two of their
/// bits from the entries of the lower four.
fn scale_and_minimum(packed: &[u8], index: usize) -> (f32, f32) {
    let (scale, minimum) = if index < 4 {
        (packed[index] & 63, packed[index + 4] & 63)
    } else {
        let low = packed[index + 4];
        (low & 15 | packed[index - 4] >> 6 << 4, low >> 4 | packed[index] >> 6 << 4)
    };
    (scale.into(), minimum.into())
}

fn q4_k(block: &[u8], out: &mut [f32]) {
    let (d, minimum) = (half_at(block, 0), half_at(block, 2));
    let (scales, quants) = (&block[4..16], &block[16..]);
    for (sub, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, offset) = scale_and_minimum(scales, sub);
        for (out, byte) in out.iter_mut().zip(&quants[sub / 2 * 32..]) {
            let q = byte >> (sub % 2 * 4) & 15;
            *out = d * scale * f32::from(q) - minimum * offset;
        }
    }
}

fn q5_k(block: &[u8], out: &mut [f32]) {
    let (d, minimum) = (half_at(block, 0), half_at(block, 2));
    let (scales, high, quants) = (&block[4..16], &block[16..48], &block[48..]);
    for (sub, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, offset) = scale_and_minimum(scales, sub);
        for (i, out) in out.iter_mut().enumerate() {
            let q = quants[sub / 2 * 32 + i] >> (sub % 2 * 4) & 15 | (high[i] >> sub & 1) << 4;
            *out = d * scale * f32::from(q) - minimum * offset;
        }
    }
}

fn q6_k(block: &[u8], out: &mut [f32]) {
    let (low, high, scales, d) =
        (&block[..128], &block[128..192], &block[192..208], half_at(block, 208));
    for (i, out) in out.iter_mut().enumerate() {
        let (part, within) = (i / 128, i % 128);
        let (quarter, lane) = (within / 32, within % 32);
        let four = low[part * 64 + quarter % 2 * 32 + lane] >> (quarter / 2 * 4) & 15;
        let two = high[part * 32 + lane] >> (quarter * 2) & 3;
        let scale = f32::from(scales[i / 16] as i8);
        *out = d * scale * (f32::from(four | two << 4) - 32.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    fn values(dtype: TensorType, bytes: &[u8]) -> Vec<f32> {
        let (elements, size) = dtype.block();
        let mut out = vec![f32::NAN; bytes.len() / size * elements];
        dequantise(dtype, bytes, &mut out);
        out
    }

    #[test]
    fn small_blocks_by_hand() {
        let half = |x: f32| f16::from_f32(x).to_le_bytes();
        let mut q8 = half(0.5).to_vec();
        q8.extend((0..32u8).map(|i| i.wrapping_sub(16)));
        assert_eq!(values(TensorType::Q8_0, &q8)[..3], [-8.0, -7.5, -7.0]);
        let mut q4 = half(2.0).to_vec();
        q4.extend([0x1f; 16]);
        assert_eq!(values(TensorType::Q4_0, &q4)[15..17], [14.0, -14.0]);
        let mut q4 = [half(2.0), half(-3.0)].concat();
        q4.extend([0x1f; 16]);
        assert_eq!(values(TensorType::Q4_1, &q4)[15..17], [27.0, -1.0]);
        let mut q5 = half(1.0).to_vec();
        q5.extend((1u32 << 1 | 1 << 16).to_le_bytes());
        q5.extend([0x21; 16]);
        let out = values(TensorType::Q5_0, &q5);
        assert_eq!((out[0], out[1], out[16], out[17]), (-15.0, 1.0, 2.0, -14.0));
    }

    #[derive(Deserialize)]
    struct Golden {
        r#type: String,
        bytes: String,
        values: Vec<f32>,
    }

    #[test]
    fn random_blocks_of_every_type_agree_with_ggml() {
        let text = include_str!("../../tests/goldens/quants.json");
        let goldens: Vec<Golden> = serde_json::from_str(text).unwrap();
        let types = [
            TensorType::Q8_0,
            TensorType::Q4_0,
            TensorType::Q4_1,
            TensorType::Q5_0,
            TensorType::Q5_1,
            TensorType::Q4_K,
            TensorType::Q5_K,
            TensorType::Q6_K,
        ];
        assert_eq!(goldens.len(), types.len());
        for (golden, dtype) in goldens.iter().zip(types) {
            assert_eq!(golden.r#type, format!("{dtype:?}"));
            let bytes: Vec<u8> = (0..golden.bytes.len() / 2)
                .map(|i| u8::from_str_radix(&golden.bytes[2 * i..2 * i + 2], 16).unwrap())
                .collect();
            assert_eq!(values(dtype, &bytes), golden.values, "{dtype:?}");
        }
    }
}

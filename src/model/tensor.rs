//! A named matrix or vector as stored in a model file: bytes, element or block type, shape.
//!
//! Not here: reading files (`gguf`, `hf`), repacking for kernels (`forward`).

use std::ops::Range;

/// Element or block type of a stored tensor. Block types are GGUF's; a block lies along a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[allow(non_camel_case_types)]
pub enum TensorType {
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// 32 × i8 with one f16 scale.
    Q8_0,
    /// 32 × 4 bits with one f16 scale, offset −8.
    Q4_0,
    /// 32 × 4 bits with an f16 scale and an f16 minimum.
    Q4_1,
    /// 32 × 5 bits with one f16 scale, offset −16.
    Q5_0,
    /// 32 × 5 bits with an f16 scale and an f16 minimum.
    Q5_1,
    /// 256 × 4 bits, 8 sub-blocks with 6-bit scales and minima.
    Q4_K,
    /// 256 × 5 bits, 8 sub-blocks with 6-bit scales and minima.
    Q5_K,
    /// 256 × 6 bits, 16 sub-blocks with 8-bit scales.
    Q6_K,
}

impl TensorType {
    /// Pair of (elements, bytes) of one block. A plain element is a block of one.
    pub const fn block(self) -> (usize, usize) {
        match self {
            TensorType::F32 => (1, 4),
            TensorType::F16 | TensorType::Bf16 => (1, 2),
            TensorType::Q8_0 => (32, 34),
            TensorType::Q4_0 => (32, 18),
            TensorType::Q4_1 => (32, 20),
            TensorType::Q5_0 => (32, 22),
            TensorType::Q5_1 => (32, 24),
            TensorType::Q4_K => (256, 144),
            TensorType::Q5_K => (256, 176),
            TensorType::Q6_K => (256, 210),
        }
    }
}

/// The order of the rows of a stored matrix.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RowOrder {
    /// The order of the architecture.
    Natural,
    /// q and k of a `llama` GGUF: inside each head the two halves are interleaved. Row `h·d + 2·i +
    /// j` of the file is row `h·d + j·d/2 + i` of the model, with `d` the given head dimension.
    RopeInterleaved {
        /// Rows of one head.
        head_dim: usize,
    },
    /// A part of the rows: row `n · block + i` is row `n · stride + first + i` of the file.
    Blocks {
        /// Rows that lie together.
        block: usize,
        /// Rows from a block to the next.
        stride: usize,
        /// Rows before the first block.
        first: usize,
    },
}

/// The place and type of a tensor's data in a model file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorPlace {
    /// Element or block type. A safetensors file has only F32, F16 and BF16.
    pub dtype: TensorType,
    /// Output features; 1 for a vector.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// Byte range in the file.
    pub data: Range<usize>,
}

impl TensorPlace {
    /// The place of these rows, as a matrix of their own.
    pub fn of_rows(&self, rows: Range<usize>) -> TensorPlace {
        let (elements, bytes) = self.dtype.block();
        let row = self.cols / elements * bytes;
        let data = self.data.start + rows.start * row..self.data.start + rows.end * row;
        TensorPlace { dtype: self.dtype, rows: rows.len(), cols: self.cols, data }
    }
}

/// A checked tensor in a mapped file: `bytes` has exactly the length of type and shape.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// Element or block type.
    pub dtype: TensorType,
    /// Output features (1 for a vector).
    pub rows: usize,
    /// Input features, contiguous.
    pub cols: usize,
    /// Order of the stored rows.
    pub order: RowOrder,
    /// `rows` rows of `cols` elements, row-major.
    pub bytes: &'a [u8],
}

impl<'a> TensorView<'a> {
    /// As a matrix of its own, the part of the rows that blocks of `block` rows are, with `stride`
    /// rows from each to the next, and `first` rows before. The order of the rows is natural.
    pub fn of_blocks(&self, block: usize, stride: usize, first: usize) -> TensorView<'a> {
        assert_eq!(self.order, RowOrder::Natural, "rows that are stored in another order");
        assert!(self.rows.is_multiple_of(stride) && first + block <= stride);
        let order = RowOrder::Blocks { block, stride, first };
        TensorView { rows: self.rows / stride * block, order, ..*self }
    }

    /// These rows, as a matrix of their own. The order of the rows is natural.
    pub fn of_rows(&self, rows: Range<usize>) -> TensorView<'a> {
        assert_eq!(self.order, RowOrder::Natural, "rows that are stored in another order");
        let bytes = self.row_bytes();
        let stored = &self.bytes[rows.start * bytes..rows.end * bytes];
        TensorView { rows: rows.len(), bytes: stored, ..*self }
    }

    /// Bytes of one row.
    pub const fn row_bytes(&self) -> usize {
        let (elements, bytes) = self.dtype.block();
        self.cols / elements * bytes
    }

    /// The stored bytes of the model's row `row`, whatever the order in the file.
    pub fn row(&self, row: usize) -> &'a [u8] {
        let stored = match self.order {
            RowOrder::Natural => row,
            RowOrder::RopeInterleaved { head_dim } => {
                let (head, within) = (row / head_dim, row % head_dim);
                let (half, index) = (within / (head_dim / 2), within % (head_dim / 2));
                head * head_dim + 2 * index + half
            }
            RowOrder::Blocks { block, stride, first } => row / block * stride + first + row % block,
        };
        let bytes = self.row_bytes();
        &self.bytes[stored * bytes..(stored + 1) * bytes]
    }
}

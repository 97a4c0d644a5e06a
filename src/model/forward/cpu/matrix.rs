//! A weight matrix, repacked for the kernels. The process keeps no other copy.

use super::arena::{Arena, Slab};
use super::block::*;
use super::panel::PanelForms;
use super::quantized_block::row_block;
use super::simd::{LANES, Lanes};
use crate::model::tensor::{TensorType, TensorView};
use crate::stdx::disjoint_parts::Chunks;
use crate::stdx::team::Team;
use half::{bf16, f16};
use std::io;

/// Weights in the layout of their type, `[group of 16 rows][column or block]`.
pub enum Weights {
    /// Plain.
    F32(Slab<Lanes>),
    /// Plain.
    F16(Slab<Halves>),
    /// Plain.
    Bf16(Slab<Bfloats>),
    /// Quantised.
    Q4_0(Slab<Q4_0>),
    /// Quantised.
    Q4_1(Slab<Q4_1>),
    /// Quantised.
    Q4K(Slab<Q4K>),
    /// Quantised.
    Q5_0(Slab<Q5_0>),
    /// Quantised.
    Q5_1(Slab<Q5_1>),
    /// Quantised.
    Q5K(Slab<Q5K>),
    /// Quantised.
    Q6K(Slab<Q6K>),
    /// Quantised.
    Q8_0(Slab<Q8_0>),
}

/// Runs an expression for weights of any type, one for quantised and one for plain types.
macro_rules! for_weights {
    ($weights:expr, plain $p:ident => $plain:expr, quantised $q:ident => $quantised:expr) => {
        match $weights {
            Weights::F32($p) => $plain,
            Weights::F16($p) => $plain,
            Weights::Bf16($p) => $plain,
            Weights::Q4_0($q) => $quantised,
            Weights::Q4_1($q) => $quantised,
            Weights::Q4K($q) => $quantised,
            Weights::Q5_0($q) => $quantised,
            Weights::Q5_1($q) => $quantised,
            Weights::Q5K($q) => $quantised,
            Weights::Q6K($q) => $quantised,
            Weights::Q8_0($q) => $quantised,
        }
    };
}
pub(super) use for_weights;

/// `rows` outputs by `columns` inputs.
pub struct Matrix {
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub columns: usize,
    /// The weights. Rows after the last one are zero.
    pub weights: Weights,
}

impl Matrix {
    /// Repacks a stored matrix. Columns of quantised types must be a multiple of 32.
    pub fn pack(view: &TensorView<'_>, arena: &mut Arena, team: &mut Team) -> io::Result<Matrix> {
        let (rows, columns) = (view.rows, view.cols);
        let weights = match view.dtype {
            TensorType::F32 => Weights::F32(plain(view, arena, team)?),
            TensorType::F16 => Weights::F16(plain(view, arena, team)?),
            TensorType::Bf16 => Weights::Bf16(plain(view, arena, team)?),
            TensorType::Q4_0 => Weights::Q4_0(quantised(view, arena, team)?),
            TensorType::Q4_1 => Weights::Q4_1(quantised(view, arena, team)?),
            TensorType::Q4_K => Weights::Q4K(quantised(view, arena, team)?),
            TensorType::Q5_0 => Weights::Q5_0(quantised(view, arena, team)?),
            TensorType::Q5_1 => Weights::Q5_1(quantised(view, arena, team)?),
            TensorType::Q5_K => Weights::Q5K(quantised(view, arena, team)?),
            TensorType::Q6_K => Weights::Q6K(quantised(view, arena, team)?),
            TensorType::Q8_0 => Weights::Q8_0(quantised(view, arena, team)?),
        };
        Ok(Matrix { rows, columns, weights })
    }

    /// Groups of sixteen rows.
    pub fn groups(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    /// The form of activations that its kernels need.
    pub fn wants(&self) -> PanelForms {
        for_weights!(&self.weights,
            plain _w => PanelForms { floats: true, integers: false },
            quantised _w => PanelForms { floats: false, integers: true })
    }

    /// Bytes held.
    pub fn memory(&self) -> usize {
        for_weights!(&self.weights, plain w => size_of_val(&**w), quantised w => size_of_val(&**w))
    }

    /// One row as floats, such as the embedding of a token.
    pub fn row(&self, row: usize, to: &mut [f32]) {
        assert!(row < self.rows);
        let (group, lane) = (row / LANES, row % LANES);
        let to = &mut to[..self.columns];
        for_weights!(&self.weights,
        plain w => {
            let columns = &w[group * self.columns..][..self.columns];
            to.iter_mut().zip(columns).for_each(|(to, numbers)| *to = Numbers::get(numbers, lane));
        },
        quantised w => {
            let blocks = &w[group * (self.columns / BLOCK)..];
            for (to, block) in to.chunks_exact_mut(BLOCK).zip(blocks) {
                to.iter_mut().enumerate().for_each(|(column, to)| *to = block.get(lane, column));
            }
        })
    }
}

/// The number at `index` of a row of a plain type.
pub fn plain_number(dtype: TensorType, row: &[u8], index: usize) -> f32 {
    match dtype {
        TensorType::F32 => f32::from_le_bytes(std::array::from_fn(|i| row[4 * index + i])),
        TensorType::F16 => f16::from_le_bytes([row[2 * index], row[2 * index + 1]]).to_f32(),
        TensorType::Bf16 => bf16::from_le_bytes([row[2 * index], row[2 * index + 1]]).to_f32(),
        _ => unreachable!("not a plain type"),
    }
}

fn plain<N: Numbers + super::arena::Zeroed>(
    view: &TensorView<'_>,
    arena: &mut Arena,
    team: &mut Team,
) -> io::Result<Slab<N>> {
    let mut slab = arena.slab::<N>(view.rows.div_ceil(LANES) * view.cols)?;
    team.run(Chunks::new(&mut slab, view.cols), |group, packed| {
        let rows = group_rows(view, group);
        for (column, numbers) in packed.iter_mut().enumerate() {
            let lanes =
                rows.map(|row| row.map_or(0.0, |row| plain_number(view.dtype, row, column)));
            *numbers = N::pack(&lanes);
        }
    });
    Ok(slab)
}

fn quantised<L: Levels, D: Scales, M: Minimum>(
    view: &TensorView<'_>,
    arena: &mut Arena,
    team: &mut Team,
) -> io::Result<Slab<Block<L, D, M>>> {
    let blocks = view.cols / BLOCK;
    let mut slab = arena.slab::<Block<L, D, M>>(view.rows.div_ceil(LANES) * blocks)?;
    team.run(Chunks::new(&mut slab, blocks), |group, packed| {
        let rows = group_rows(view, group);
        for (index, block) in packed.iter_mut().enumerate() {
            let mut levels = [[0; BLOCK]; LANES];
            let (mut scales, mut minimum) = ([[0.0; 2]; LANES], [0.0; LANES]);
            for (lane, row) in rows.iter().enumerate() {
                if let Some(row) = row {
                    let from = row_block(view.dtype, row, index);
                    (levels[lane], scales[lane], minimum[lane]) =
                        (from.levels, from.scales, from.minimum);
                }
            }
            *block = Block {
                levels: L::pack(&levels),
                scales: D::pack(&scales),
                minimum: M::pack(&minimum),
            };
        }
    });
    Ok(slab)
}

fn group_rows<'a>(view: &TensorView<'a>, group: usize) -> [Option<&'a [u8]>; LANES] {
    std::array::from_fn(|lane| {
        let row = group * LANES + lane;
        (row < view.rows).then(|| view.row(row))
    })
}

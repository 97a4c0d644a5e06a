//! Matrix products: panels of activations by groups of sixteen output rows.
//!
//! Invariants: an output is one chain of operations over its columns, in order. The chain does not
//! depend on the other rows that are computed with it.
// The loops index registers on purpose.
#![allow(clippy::needless_range_loop)]

use super::block::{Block, Levels, Minimum, Numbers, Scales};
use super::matrix::{Matrix, Weights, for_weights};
use super::panel::{Input, PANEL, PanelForms};
use super::simd::{Kernel, LANES, Lanes, Simd};
use crate::stdx::disjoint_parts::Window;
use std::ops::Range;

/// Matrices that read the same activations. Their outputs are side by side, each padded to a
/// multiple of sixteen columns.
pub struct Linear {
    matrices: Vec<Matrix>,
    /// Padded like the outputs; empty without biases.
    bias: Vec<f32>,
    /// Factors of the products, padded like the outputs; empty if all are 1.
    scales: Vec<f32>,
}

impl Linear {
    /// Joins matrices with equal columns, and their biases in order.
    pub fn new(matrices: Vec<Matrix>, biases: Vec<Option<Vec<f32>>>) -> Linear {
        let mut bias = Vec::new();
        if biases.iter().any(Option::is_some) {
            for (matrix, one) in matrices.iter().zip(&biases) {
                let end = bias.len() + matrix.groups() * LANES;
                bias.extend_from_slice(one.as_deref().unwrap_or(&[]));
                bias.resize(end, 0.0);
            }
        }
        Linear { matrices, bias, scales: Vec::new() }
    }

    /// The same with a factor for the products of each matrix's rows: ranges of rows in order,
    /// which cover them, and their factors. Biases are added as they are.
    pub fn scaled(mut self, parts: &[&[(usize, f32)]]) -> Linear {
        assert_eq!(parts.len(), self.matrices.len());
        if parts.iter().all(|parts| parts.iter().all(|&(_, scale)| scale == 1.0)) {
            return self;
        }
        for (matrix, parts) in self.matrices.iter().zip(parts) {
            let end = self.scales.len() + matrix.groups() * LANES;
            for &(rows, scale) in *parts {
                self.scales.extend(std::iter::repeat_n(scale, rows));
            }
            assert!(self.scales.len() <= end, "factors of more rows than there are");
            self.scales.resize(end, 1.0);
        }
        self
    }

    /// Number of groups of sixteen outputs.
    pub fn groups(&self) -> usize {
        self.matrices.iter().map(Matrix::groups).sum()
    }

    /// Number of padded outputs.
    pub fn outputs(&self) -> usize {
        self.groups() * LANES
    }

    /// Number of inputs.
    pub fn columns(&self) -> usize {
        self.matrices[0].columns
    }

    /// The forms of activations that it reads.
    pub fn wants(&self) -> PanelForms {
        self.matrices.iter().fold(PanelForms::default(), |wanted, matrix| wanted.or(matrix.wants()))
    }

    /// Bytes held.
    pub fn memory(&self) -> usize {
        let vectors = size_of_val(&*self.bias) + size_of_val(&*self.scales);
        self.matrices.iter().map(Matrix::memory).sum::<usize>() + vectors
    }

    /// The first matrix: the embedding, if it is also the head.
    pub fn first(&self) -> &Matrix {
        &self.matrices[0]
    }

    /// The matrix that holds a group, and the index of the group in it.
    fn find(&self, mut group: usize) -> (&Matrix, usize) {
        for matrix in &self.matrices {
            if group < matrix.groups() {
                return (matrix, group);
            }
            group -= matrix.groups();
        }
        unreachable!("group past the end")
    }
}

/// One task: the outputs of some groups for some rows.
pub struct Multiply<'a> {
    /// Weights.
    pub linear: &'a Linear,
    /// Packed activations.
    pub input: Input<'a>,
    /// Rows of the input; starts at a panel's first row.
    pub rows: Range<usize>,
    /// First group.
    pub group: usize,
    /// Outputs: `rows` × 16 columns of each group.
    pub to: Window<'a>,
    /// Whether to add to the existing outputs.
    pub add: bool,
}

impl Kernel for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        debug_assert!(self.rows.start.is_multiple_of(PANEL) && self.to.rows() == self.rows.len());
        for index in 0..self.to.columns() / LANES {
            let group = self.group + index;
            let (matrix, inside) = self.linear.find(group);
            let columns = matrix.columns;
            let mut out = Out {
                bias: self.linear.bias.get(group * LANES..(group + 1) * LANES),
                scales: self.linear.scales.get(group * LANES..(group + 1) * LANES),
                to: &mut self.to,
                column: index * LANES,
                add: self.add,
            };
            for_weights!(&matrix.weights,
            plain w => {
                let weights = &w[inside * columns..][..columns];
                let input = self.input;
                each_tile(s, &self.rows, &mut out, PlainTile { weights, input });
            },
            quantised w => {
                let blocks = columns / super::block::BLOCK;
                let weights = &w[inside * blocks..][..blocks];
                let input = self.input;
                each_tile(s, &self.rows, &mut out, BlockTile { weights, input });
            })
        }
    }
}

/// The destination of a group's outputs.
struct Out<'a, 'w> {
    bias: Option<&'a [f32]>,
    scales: Option<&'a [f32]>,
    to: &'a mut Window<'w>,
    column: usize,
    add: bool,
}

impl Out<'_, '_> {
    #[inline(always)]
    fn put<S: Simd>(&mut self, s: S, row: usize, mut value: S::F) {
        if let Some(scales) = self.scales.and_then(|scales| scales.first_chunk()) {
            value = s.mul(value, s.load(scales));
        }
        if let Some(bias) = self.bias.and_then(|bias| bias.first_chunk()) {
            value = s.add(value, s.load(bias));
        }
        let to = &mut self.to.row(row)[self.column..self.column + LANES];
        let to: &mut Lanes = to.first_chunk_mut().expect("sixteen columns");
        if self.add {
            value = s.add(s.load(to), value);
        }
        s.store(value, to);
    }
}

/// Repeats the body for `$r` in `0..$count`, with `$r` as a constant in each copy. Otherwise the
/// compiler does not unroll long bodies and keeps the sums in memory.
macro_rules! unroll {
    ($count:expr, $r:ident, $body:block) => {
        unroll!(@ $count, $r, $body, 0 1 2 3 4 5 6 7)
    };
    (@ $count:expr, $r:ident, $body:block, $($n:literal)*) => {
        $(if $n < $count {
            const $r: usize = $n;
            $body
        })*
    };
}

/// A product of one group with rows `first..first + R` of a panel.
trait Tile: Copy {
    fn run<S: Simd, const R: usize>(self, s: S, panel: usize, first: usize) -> [S::F; R];
}

/// Covers the rows with the largest tiles that registers hold, never across a panel's end.
#[inline(always)]
fn each_tile<S: Simd>(s: S, rows: &Range<usize>, out: &mut Out<'_, '_>, tile: impl Tile) {
    let mut row = rows.start;
    while row < rows.end {
        let left = (rows.end - row).min(PANEL - row % PANEL);
        let at = row - rows.start;
        row += match left {
            8.. if S::TILE >= 8 => put_tile::<S, 8>(s, row, at, out, tile),
            4.. if S::TILE >= 4 => put_tile::<S, 4>(s, row, at, out, tile),
            2.. => put_tile::<S, 2>(s, row, at, out, tile),
            _ => put_tile::<S, 1>(s, row, at, out, tile),
        };
    }
}

#[inline(always)]
fn put_tile<S: Simd, const R: usize>(
    s: S,
    row: usize,
    at: usize,
    out: &mut Out<'_, '_>,
    tile: impl Tile,
) -> usize {
    let values = tile.run::<S, R>(s, row / PANEL, row % PANEL);
    for (i, value) in values.into_iter().enumerate() {
        out.put(s, at + i, value);
    }
    R
}

#[derive(Clone, Copy)]
struct PlainTile<'a, N> {
    weights: &'a [N],
    input: Input<'a>,
}

impl<N: Numbers> Tile for PlainTile<'_, N> {
    #[inline(always)]
    fn run<S: Simd, const R: usize>(self, s: S, panel: usize, first: usize) -> [S::F; R] {
        assert!(first + R <= PANEL);
        let mut sums = [s.splat(0.0); R];
        for (weights, x) in self.weights.iter().zip(self.input.floats(panel)) {
            let weights = Numbers::lanes(weights, s);
            for r in 0..R {
                sums[r] = s.fma(weights, s.splat(x[first + r]), sums[r]);
            }
        }
        sums
    }
}

#[derive(Clone, Copy)]
struct BlockTile<'a, B> {
    weights: &'a [B],
    input: Input<'a>,
}

impl<L: Levels, D: Scales, M: Minimum> Tile for BlockTile<'_, Block<L, D, M>> {
    #[inline(always)]
    fn run<S: Simd, const R: usize>(self, s: S, panel: usize, first: usize) -> [S::F; R] {
        assert!(first + R <= PANEL && R <= 8);
        let mut sums = [s.splat(0.0); R];
        for (block, x) in self.weights.iter().zip(self.input.integers(panel)) {
            // The halves share their integers if they share their scale.
            let second = usize::from(D::HALVES);
            let mut dots = [[s.splat_int(0); R]; 2];
            unroll!(R, ROW, {
                let row = first + ROW;
                dots[second][ROW] = s.splat_int(-L::OFFSET * x.sums[1][row]);
                let other = if D::HALVES { 0 } else { x.sums[1][row] };
                dots[0][ROW] = s.splat_int(-L::OFFSET * (x.sums[0][row] + other));
            });
            for q in 0..4 {
                let [a, b, c, d] = block.levels.quads(s, q);
                unroll!(R, ROW, {
                    let words = &x.words[first + ROW];
                    dots[0][ROW] = s.dot(dots[0][ROW], a, words[2 * q]);
                    dots[0][ROW] = s.dot(dots[0][ROW], b, words[2 * q + 1]);
                    dots[second][ROW] = s.dot(dots[second][ROW], c, words[8 + 2 * q]);
                    dots[second][ROW] = s.dot(dots[second][ROW], d, words[8 + 2 * q + 1]);
                });
            }
            let scales = [block.scales.lanes(s, 0), block.scales.lanes(s, 1)];
            let minimum = block.minimum.lanes(s);
            unroll!(R, ROW, {
                let (row, sum) = (first + ROW, &mut sums[ROW]);
                let unit = s.splat(x.scale[row]);
                *sum = s.fma(s.float(dots[0][ROW]), s.mul(scales[0], unit), *sum);
                if D::HALVES {
                    *sum = s.fma(s.float(dots[1][ROW]), s.mul(scales[1], unit), *sum);
                }
                if let Some(minimum) = minimum {
                    *sum = s.fma(minimum, s.splat(x.total[row]), *sum);
                }
            });
        }
        sums
    }
}

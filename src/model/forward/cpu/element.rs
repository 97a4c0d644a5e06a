//! Operations on activations between matrix products: RMS norm, gates, rotation, packing.

use super::panel::{Quantised, RowSource, pack_row};
use super::rope::rotate;
use super::simd::{Kernel, LANES, Lanes, Simd};
use crate::model::config::Activation;
use std::f32::consts::LOG2_E;

/// Rows to pack, numbered from zero.
pub trait Rows: Copy + Sync {
    /// One row.
    type Row: RowSource;
    /// The row `row`.
    fn row<S: Simd>(&self, s: S, row: usize) -> Self::Row;
}

#[inline(always)]
fn lanes(row: &[f32], chunk: usize) -> &Lanes {
    row[chunk * LANES..].first_chunk().expect("rows are padded to sixteen")
}

/// Unchanged rows.
#[derive(Clone, Copy)]
pub struct Raw<'a> {
    /// Row-major.
    pub rows: &'a [f32],
    /// Elements from row to row; a multiple of sixteen.
    pub stride: usize,
}

impl<'a> Rows for Raw<'a> {
    type Row = &'a [f32];
    #[inline(always)]
    fn row<S: Simd>(&self, _s: S, row: usize) -> &'a [f32] {
        &self.rows[row * self.stride..][..self.stride]
    }
}

impl RowSource for &[f32] {
    #[inline(always)]
    fn chunk<S: Simd>(&self, s: S, chunk: usize) -> S::F {
        s.load(lanes(self, chunk))
    }
}

/// Rows with an RMS norm.
#[derive(Clone, Copy)]
pub struct Normed<'a> {
    /// The rows before the norm; padding is zero.
    pub raw: Raw<'a>,
    /// Selected rows, in order; all rows if empty.
    pub picked: &'a [u32],
    /// Elements of a row without padding.
    pub columns: usize,
    /// The norm's weight, padded like the rows.
    pub weight: &'a [f32],
    /// Added to the mean square.
    pub epsilon: f32,
}

/// One row of [`Normed`].
pub struct NormedRow<'a> {
    row: &'a [f32],
    weight: &'a [f32],
    factor: f32,
}

impl<'a> Rows for Normed<'a> {
    type Row = NormedRow<'a>;
    #[inline(always)]
    fn row<S: Simd>(&self, s: S, row: usize) -> NormedRow<'a> {
        let row = self.picked.get(row).map_or(row, |picked| *picked as usize);
        let row = self.raw.row(s, row);
        NormedRow {
            row,
            weight: self.weight,
            factor: norm_factor(s, row, self.columns, self.epsilon),
        }
    }
}

impl RowSource for NormedRow<'_> {
    #[inline(always)]
    fn chunk<S: Simd>(&self, s: S, chunk: usize) -> S::F {
        let scaled = s.mul(s.load(lanes(self.row, chunk)), s.splat(self.factor));
        s.mul(scaled, s.load(lanes(self.weight, chunk)))
    }
}

/// 1 / √(mean square + ε). `row` may be padded with zeros.
#[inline(always)]
fn norm_factor<S: Simd>(s: S, row: &[f32], columns: usize, epsilon: f32) -> f32 {
    let mut sum = s.splat(0.0);
    let mut chunks = row.chunks_exact(LANES);
    for chunk in &mut chunks {
        let x = s.load(chunk.first_chunk().expect("exact"));
        sum = s.fma(x, x, sum);
    }
    let mut tail = [0.0; LANES];
    tail[..chunks.remainder().len()].copy_from_slice(chunks.remainder());
    let x = s.load(&tail);
    sum = s.fma(x, x, sum);
    1.0 / (s.sum(sum) / columns as f32 + epsilon).sqrt()
}

/// activation(gate) · up, with both parts side by side in a row.
#[derive(Clone, Copy)]
pub struct Gated<'a> {
    /// Gates, then ups.
    pub raw: Raw<'a>,
    /// First element of a row's ups.
    pub up_at: usize,
    /// The function of the gates.
    pub activation: Activation,
}

/// One row of [`Gated`].
pub struct GatedRow<'a> {
    gate: &'a [f32],
    up: &'a [f32],
    activation: Activation,
}

impl<'a> Rows for Gated<'a> {
    type Row = GatedRow<'a>;
    #[inline(always)]
    fn row<S: Simd>(&self, s: S, row: usize) -> GatedRow<'a> {
        let (gate, up) = self.raw.row(s, row).split_at(self.up_at);
        GatedRow { gate, up, activation: self.activation }
    }
}

impl RowSource for GatedRow<'_> {
    #[inline(always)]
    fn chunk<S: Simd>(&self, s: S, chunk: usize) -> S::F {
        let gate = s.load(lanes(self.gate, chunk));
        let input = match self.activation {
            Activation::Silu => gate,
            Activation::GeluTanh => gelu_input(s, gate),
        };
        s.mul(times_sigmoid(s, gate, input), s.load(lanes(self.up, chunk)))
    }
}

/// x / (1 + e⁻ʸ)
#[inline(always)]
pub fn times_sigmoid<S: Simd>(s: S, x: S::F, y: S::F) -> S::F {
    let power = s.min(s.mul(y, s.splat(-LOG2_E)), s.splat(126.0));
    s.div(x, s.add(s.splat(1.0), s.exp2(power)))
}

/// The y for which x · sigmoid(y) is GELU's approximation by tanh, as (1 + tanh(y)) / 2 is
/// sigmoid(2y).
#[inline(always)]
fn gelu_input<S: Simd>(s: S, x: S::F) -> S::F {
    const FACTOR: f32 = std::f32::consts::FRAC_2_SQRT_PI * std::f32::consts::SQRT_2;
    let cubic = s.fma(s.mul(s.mul(x, x), s.splat(0.044_715)), x, x);
    s.mul(cubic, s.splat(FACTOR))
}

/// One task: adds a row to a row of the residual stream.
pub struct AddRow<'a, R> {
    /// The source of the row.
    pub rows: R,
    /// Its number.
    pub row: usize,
    /// Elements of a row without padding.
    pub columns: usize,
    /// The row of the stream, padded.
    pub to: &'a mut [f32],
}

impl<R: Rows> Kernel for AddRow<'_, R> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let row = self.rows.row(s, self.row);
        let chunks = self.to.chunks_exact_mut(LANES).take(self.columns.div_ceil(LANES));
        for (chunk, to) in chunks.enumerate() {
            let to: &mut Lanes = to.first_chunk_mut().expect("exact");
            s.store(s.add(s.load(to), row.chunk(s, chunk)), to);
        }
    }
}

/// One task: turns logits into `cap · tanh(logit / cap)`.
pub struct CapLogits<'a> {
    /// Padded to sixteen.
    pub logits: &'a mut [f32],
    /// See above.
    pub cap: f32,
}

impl Kernel for CapLogits<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for logits in self.logits.chunks_exact_mut(LANES) {
            let logits: &mut Lanes = logits.first_chunk_mut().expect("exact");
            // tanh(y) is 2 · sigmoid(2y) − 1.
            let twice = s.mul(s.load(logits), s.splat(2.0 / self.cap));
            let capped = times_sigmoid(s, s.splat(2.0 * self.cap), twice);
            let capped = s.add(capped, s.splat(-self.cap));
            s.store(capped, logits);
        }
    }
}

/// One task: packs consecutive rows as the rows of one panel.
pub struct Pack<'a, R> {
    /// The source of the rows.
    pub rows: R,
    /// The panel's first row.
    pub first: usize,
    /// Rows in the panel.
    pub count: usize,
    /// Elements of a row.
    pub columns: usize,
    /// The panel as integers; empty if no consumer needs them.
    pub integers: &'a mut [Quantised],
    /// The panel as floats; empty if no consumer needs them.
    pub floats: &'a mut [Lanes],
}

impl<R: Rows> Kernel for Pack<'_, R> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for lane in 0..self.count {
            let row = self.rows.row(s, self.first + lane);
            pack_row(s, &row, lane, self.columns, self.integers, self.floats);
        }
    }
}

/// One task: multiplies a row by the sigmoid of its gate.
pub struct Sigmoid<'a> {
    /// As long as the row.
    pub gate: &'a [f32],
    /// The row.
    pub to: &'a mut [f32],
}

impl Kernel for Sigmoid<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for at in (0..self.to.len()).step_by(LANES) {
            let gate = load_padded(s, &self.gate[at..]);
            let gated = times_sigmoid(s, load_padded(s, &self.to[at..]), gate);
            store_padded(s, gated, &mut self.to[at..]);
        }
    }
}

/// Normalises (Qwen3, Gemma) and rotates the heads of one token in place, each of `dim` elements.
/// If there are angles for a part of a head, only this part is rotated.
#[inline(always)]
pub fn turn_heads<S: Simd>(
    s: S,
    (heads, dim): (&mut [f32], usize),
    norm: Option<(&[f32], f32)>,
    angles: &[f32],
    scale: f32,
) {
    for head in heads.chunks_exact_mut(dim) {
        if let Some((weight, epsilon)) = norm {
            let factor = norm_factor(s, head, head.len(), epsilon);
            head.iter_mut().zip(weight).for_each(|(x, w)| *x = *x * factor * w);
        }
        let (rotated, rest) = head.split_at_mut(angles.len());
        rotate(rotated, angles, scale);
        rest.iter_mut().for_each(|x| *x *= scale);
    }
}

/// The first sixteen elements, or all, padded with zeros.
#[inline(always)]
pub fn load_padded<S: Simd>(s: S, from: &[f32]) -> S::F {
    match from.first_chunk() {
        Some(lanes) => s.load(lanes),
        None => {
            let mut lanes = [0.0; LANES];
            lanes[..from.len()].copy_from_slice(from);
            s.load(&lanes)
        }
    }
}

/// Stores as many of the sixteen elements as there is room for.
#[inline(always)]
pub fn store_padded<S: Simd>(s: S, value: S::F, to: &mut [f32]) {
    match to.first_chunk_mut() {
        Some(lanes) => s.store(value, lanes),
        None => {
            let mut lanes = [0.0; LANES];
            s.store(value, &mut lanes);
            to.copy_from_slice(&lanes[..to.len()]);
        }
    }
}

//! The tokens of a recurrent layer: convolution, scan, gate and norm.
//!
//! Thread: the engine's, with helper threads. A task owns one piece of the state of one sequence.
//! Invariants: a token is computed after the one before it, with the same operations in a prompt
//! and in a step of one token. So chunks and blocks do not change a bit of output or state. If a
//! row computes the last token again, the state stays as it is and gives the same output.
//! Not here: the projections before and after (`step`), the scans of the kinds of layers (`mamba`,
//! `delta`), places of the state (`kv::state_layout`).

use super::delta::DeltaScan;
use super::element::{load_padded, store_padded, times_sigmoid};
use super::head_run::{Before, HeadRun, StateStep};
use super::layer_weights::{RecurrentWeights, ScanWeights};
use super::mamba::MambaScan;
use super::paged_kv::Paged;
use super::plan::{BLOCK_TOKENS, TokenPosition};
use super::simd::{Kernel, LANES, Lanes, Simd};
use super::step_team::{StepTeam, stride};
use crate::model::forward::batch::Batch;
use crate::model::recurrent_config::{MambaNorm, RecurrentSizes};
use crate::stdx::disjoint_parts::{Chunks, Grid, Window};
use std::ops::Range;

/// Memory for one block of tokens.
pub struct RecurrentScratch {
    /// `[token][gate; channels; scalars]`
    projected: Vec<f32>,
    /// `[token][channels]`
    convolved: Vec<f32>,
    /// `[token][head][column]`: the outputs, first of the scan, then of gate and norm.
    scanned: Vec<f32>,
    /// By thread: one piece of state.
    pieces: Vec<Vec<f32>>,
    widths: RecurrentWidths,
}

/// Strides of the rows, and offsets of their parts.
#[derive(Clone, Copy)]
struct RecurrentWidths {
    projected: usize,
    conv_at: usize,
    scalars_at: usize,
    convolved: usize,
    channels: usize,
    scanned: usize,
}

/// The sequences of one block in one layer.
pub struct RecurrentBlock<'a> {
    /// All sequences of the step.
    pub batch: &'a Batch,
    /// Their state.
    pub paged: &'a Paged<'a>,
    /// Index among the layers with state.
    pub layer: u32,
    /// The places of the block's tokens.
    pub places: &'a [TokenPosition],
    /// Ranges of the block's tokens, each of one sequence.
    pub runs: &'a [Range<usize>],
}

impl RecurrentScratch {
    /// Memory for blocks of at most `tokens` tokens.
    pub fn new(sizes: &RecurrentSizes, tokens: usize, threads: usize) -> RecurrentScratch {
        let block = BLOCK_TOKENS.min(tokens);
        let pad = |n: usize| n.next_multiple_of(LANES);
        let (inner, channels) = (pad(sizes.inner()), pad(sizes.channels));
        let widths = RecurrentWidths {
            projected: stride(inner + channels + pad(sizes.scalars)),
            conv_at: inner,
            scalars_at: inner + channels,
            convolved: stride(channels),
            channels,
            scanned: stride(inner),
        };
        let piece = sizes.state_shape(1).piece_elements as usize;
        RecurrentScratch {
            projected: vec![0.0; block * widths.projected],
            convolved: vec![0.0; block * widths.convolved],
            scanned: vec![0.0; block * widths.scanned],
            pieces: vec![vec![0.0; piece]; threads],
            widths,
        }
    }

    /// Bytes held.
    pub fn memory(&self) -> usize {
        let rows = [&self.projected, &self.convolved, &self.scanned];
        rows.into_iter().chain(&self.pieces).map(|v| size_of_val(&**v)).sum()
    }

    /// The rows that the projection fills, and their stride.
    pub fn projected(&mut self) -> (&mut [f32], usize) {
        (&mut self.projected, self.widths.projected)
    }

    /// The outputs, and the stride of their rows.
    pub fn scanned(&self) -> (&[f32], usize) {
        (&self.scanned, self.widths.scanned)
    }

    /// Turns the projected tokens of a block into outputs, and advances the states.
    pub fn run(
        &mut self,
        crew: &mut StepTeam<'_>,
        sizes: &RecurrentSizes,
        weights: &RecurrentWeights,
        (block, epsilon): (&RecurrentBlock<'_>, f32),
    ) {
        let RecurrentScratch { projected, convolved, scanned, pieces, widths } = self;
        let (dispatch, count) = (crew.dispatch, block.places.len());
        let columns = sizes.channels_per_piece();
        let grid = Grid::new(convolved, widths.convolved, block.runs, widths.channels, columns);
        let across = grid.across();
        let heads = sizes.heads as u32;
        crew.team.run_with(pieces, grid, |own, index, to| {
            let (run, part) = (&block.runs[index / across], index % across);
            let state = block.state(run, heads + part as u32);
            let own = &mut own[..sizes.conv_width * columns];
            let from = &projected[run.start * widths.projected..];
            let from = (&from[widths.conv_at + part * columns..], widths.projected);
            let first = part * columns;
            dispatch.run(Convolve { weights, first, columns, state, own, from, to });
        });

        let grid = Grid::new(scanned, widths.scanned, block.runs, sizes.inner(), sizes.columns);
        crew.team.run_with(pieces, grid, |own, index, to| {
            let (run, head) = (&block.runs[index / sizes.heads], index % sizes.heads);
            let state = block.state(run, head as u32);
            let own = &mut own[..sizes.rows * sizes.state_stride()];
            let scalars = &projected[run.start * widths.projected..];
            let scalars = (&scalars[widths.scalars_at..], widths.projected);
            let from = (&convolved[run.start * widths.convolved..], widths.convolved);
            let run = HeadRun { sizes, head, state, own, from, scalars, to };
            match &weights.scan {
                ScanWeights::Mamba { heads, groups } => {
                    dispatch.run(MambaScan { weights: heads[head], groups: *groups, run });
                }
                ScanWeights::Delta { heads, key_heads, channels_at } => {
                    let (key_heads, channels_at) = (*key_heads, *channels_at);
                    dispatch.run(DeltaScan { weights: heads[head], key_heads, channels_at, run });
                }
            }
        });

        let outputs = Chunks::new(&mut scanned[..count * widths.scanned], widths.scanned);
        crew.team.run(outputs, |token, to| {
            let gate = &projected[token * widths.projected..][..sizes.inner()];
            let (kind, size) = weights.norm_kind;
            let to = &mut to[..sizes.inner()];
            dispatch.run(GateAndNorm { kind, gate, norm: &weights.norm, size, epsilon, to });
        });
    }
}

impl RecurrentBlock<'_> {
    /// A piece of the state of a run's sequence.
    fn state(&self, run: &Range<usize>, piece: u32) -> StateStep<'_> {
        let TokenPosition { row, position } = self.places[run.start];
        let row = &self.batch.rows()[row as usize];
        let is_first = position == row.start;
        let before = match if is_first { row.seen } else { position } {
            0 => Before::Nothing,
            seen if seen == position => Before::Others,
            seen => {
                assert!(seen == position + 1 && run.len() == 1, "the state has seen {seen} tokens");
                Before::Itself
            }
        };
        let of = |pages| self.paged.piece(self.layer, piece, pages);
        let to = of(self.batch.state_pages(row));
        let from = if is_first { of(self.batch.origin_pages(row)) } else { to };
        StateStep { from, to, before }
    }
}

/// One task: the convolution of some channels of a run, and its state `[conv_width][columns]`.
struct Convolve<'a> {
    weights: &'a RecurrentWeights,
    /// The first channel.
    first: usize,
    /// Channels of a piece. The last piece can have fewer.
    columns: usize,
    state: StateStep<'a>,
    /// Working memory for the state.
    own: &'a mut [f32],
    /// Inputs from the first channel of the first token on, and the stride of their rows.
    from: (&'a [f32], usize),
    to: Window<'a>,
}

impl Kernel for Convolve<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let Convolve { weights, first, columns, state, own, from: (from, stride), to } = &mut self;
        let (columns, stride, channels) = (*columns, *stride, weights.conv_bias.len());
        let width = weights.conv.len() / channels;
        state.read(own);
        // The newest input in the state is that of the token before, or of the token itself.
        let ahead = if state.before == Before::Itself { 0 } else { 1 };
        let count = to.rows();
        for token in 0..count {
            let row = to.row(token);
            for at in (0..row.len()).step_by(LANES) {
                let mut sum = s.load(lanes(&weights.conv_bias, *first + at));
                for tap in 0..width {
                    let column = token + tap + ahead;
                    let x = match column < width {
                        true => lanes(own, column * columns + at),
                        false => lanes(from, (column - width) * stride + at),
                    };
                    let weight = s.load(lanes(&weights.conv, tap * channels + *first + at));
                    sum = s.fma(weight, s.load(x), sum);
                }
                let to = row[at..].first_chunk_mut().expect("channels are padded");
                s.store(times_sigmoid(s, sum, sum), to);
            }
        }
        if state.before == Before::Itself {
            return;
        }
        for tap in 0..width {
            let (column, used) = (count + tap, to.columns());
            match column < width {
                true => own.copy_within(column * columns..column * columns + used, tap * columns),
                false => {
                    let input = &from[(column - width) * stride..][..used];
                    own[tap * columns..][..used].copy_from_slice(input);
                }
            }
        }
        state.write(own);
    }
}

/// One task: multiplies the output of a token by silu(gate), and normalises groups of elements.
struct GateAndNorm<'a> {
    kind: MambaNorm,
    gate: &'a [f32],
    /// The norm's weight; empty without a norm.
    norm: &'a [f32],
    /// Elements of a group.
    size: usize,
    /// Added to the mean square.
    epsilon: f32,
    to: &'a mut [f32],
}

impl Kernel for GateAndNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let GateAndNorm { kind, gate, norm, size, epsilon, to } = self;
        if kind == MambaNorm::AfterGate || kind == MambaNorm::None {
            multiply_by_silu(s, to, gate);
        }
        for (to, norm) in to.chunks_exact_mut(size).zip(norm.chunks(size)) {
            let mut sum = s.splat(0.0);
            for at in (0..size).step_by(LANES) {
                let x = load_padded(s, &to[at..]);
                sum = s.fma(x, x, sum);
            }
            let factor = s.splat(1.0 / (s.sum(sum) / size as f32 + epsilon).sqrt());
            for at in (0..size).step_by(LANES) {
                let scaled = s.mul(load_padded(s, &to[at..]), factor);
                store_padded(s, s.mul(scaled, load_padded(s, &norm[at..])), &mut to[at..]);
            }
        }
        if kind == MambaNorm::BeforeGate {
            multiply_by_silu(s, to, gate);
        }
    }
}

#[inline(always)]
fn multiply_by_silu<S: Simd>(s: S, to: &mut [f32], gate: &[f32]) {
    for at in (0..to.len()).step_by(LANES) {
        let gate = load_padded(s, &gate[at..]);
        let gated = s.mul(load_padded(s, &to[at..]), times_sigmoid(s, gate, gate));
        store_padded(s, gated, &mut to[at..]);
    }
}

#[inline(always)]
fn lanes(row: &[f32], at: usize) -> &Lanes {
    row[at..].first_chunk().expect("rows are padded to sixteen")
}

//! The tokens of a Mamba-2 layer: convolution, scan, gate and norm.
//!
//! Thread: the engine's, with helper threads. A task owns one piece of the state of one sequence.
//! Invariants: a token is computed after the one before it, with the same operations in a prompt
//! and in a step of one token. So chunks and blocks do not change a bit of output or state. If a
//! row computes the last token again, the state stays as it is and gives the same output.
//! Not here: the projections before and after (`step`), places of the state (`kv::state_layout`).

use super::element::times_sigmoid;
use super::load::{MambaHead, MambaWeights};
use super::paged_kv::{Paged, StatePiece};
use super::plan::{BLOCK_TOKENS, TokenPosition};
use super::simd::{Kernel, LANES, Lanes, Simd};
use super::step_team::{StepTeam, stride};
use crate::model::config::{MambaConfig, MambaNorm};
use crate::model::forward::batch::Batch;
use crate::stdx::disjoint_parts::{Chunks, Grid, Window};
use std::ops::Range;

/// Softplus is the identity above this, as in PyTorch.
const SOFTPLUS_THRESHOLD: f32 = 20.0;

/// Memory for one block of tokens.
pub struct MambaScratch {
    /// `[token][gate; x, B, C; time steps]`
    projected: Vec<f32>,
    /// `[token][x, B, C]`
    convolved: Vec<f32>,
    /// `[token][x]`: the outputs, first of the scan, then of gate and norm.
    scanned: Vec<f32>,
    /// By thread: one piece of state.
    pieces: Vec<Vec<f32>>,
    widths: MambaWidths,
}

/// Strides of the rows, and offsets of their parts.
#[derive(Clone, Copy)]
struct MambaWidths {
    projected: usize,
    conv_at: usize,
    steps_at: usize,
    convolved: usize,
    channels: usize,
    scanned: usize,
}

/// The sequences of one block in one layer.
pub struct MambaBlock<'a> {
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

/// What a state has seen before some tokens of its sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Before {
    /// Nothing: the tokens are the first ones.
    Nothing,
    /// All tokens before them.
    Others,
    /// The token itself, too: it is computed again.
    Itself,
}

impl MambaScratch {
    /// Memory for blocks of at most `tokens` tokens.
    pub fn new(config: &MambaConfig, tokens: usize, threads: usize) -> MambaScratch {
        let block = BLOCK_TOKENS.min(tokens);
        let pad = |n: usize| n.next_multiple_of(LANES);
        let (inner, channels) = (pad(config.inner()), pad(config.channels()));
        let widths = MambaWidths {
            projected: stride(inner + channels + pad(config.heads)),
            conv_at: inner,
            steps_at: inner + channels,
            convolved: stride(channels),
            channels,
            scanned: stride(inner),
        };
        let piece = config.state_shape(1).piece_elements as usize;
        MambaScratch {
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
        config: &MambaConfig,
        weights: &MambaWeights,
        (block, epsilon): (&MambaBlock<'_>, f32),
    ) {
        let MambaScratch { projected, convolved, scanned, pieces, widths } = self;
        let (dispatch, count) = (crew.dispatch, block.places.len());
        let columns = config.channels_per_piece();
        let grid = Grid::new(convolved, widths.convolved, block.runs, widths.channels, columns);
        let across = grid.across();
        let heads = config.heads as u32;
        crew.team.run_with(pieces, grid, |own, index, to| {
            let (run, part) = (&block.runs[index / across], index % across);
            let (piece, before) = block.piece(run, heads + part as u32);
            let own = &mut own[..config.conv_width * columns];
            let from = &projected[run.start * widths.projected..];
            let from = (&from[widths.conv_at + part * columns..], widths.projected);
            let first = part * columns;
            dispatch.run(Convolve { weights, first, columns, piece, before, own, from, to });
        });

        let grid = Grid::new(scanned, widths.scanned, block.runs, config.inner(), config.head_dim);
        crew.team.run_with(pieces, grid, |own, index, to| {
            let (run, head) = (&block.runs[index / config.heads], index % config.heads);
            let (piece, before) = block.piece(run, head as u32);
            let own = &mut own[..config.state * config.state_stride()];
            let steps = &projected[run.start * widths.projected..];
            let steps = (&steps[widths.steps_at + head..], widths.projected);
            let from = (&convolved[run.start * widths.convolved..], widths.convolved);
            let scalars = weights.heads[head];
            dispatch.run(Scan { config, head, scalars, piece, before, own, from, steps, to });
        });

        let outputs = Chunks::new(&mut scanned[..count * widths.scanned], widths.scanned);
        crew.team.run(outputs, |token, to| {
            let gate = &projected[token * widths.projected..][..config.inner()];
            let (size, to) = (config.inner() / config.groups, &mut to[..config.inner()]);
            let kind = config.norm;
            dispatch.run(GateAndNorm { kind, gate, norm: &weights.norm, size, epsilon, to });
        });
    }
}

impl MambaBlock<'_> {
    /// A piece of the state of a run's sequence, and what it has seen.
    fn piece(&self, run: &Range<usize>, piece: u32) -> (StatePiece<'_>, Before) {
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
        (self.paged.piece(self.layer, piece, self.batch.state_pages(row)), before)
    }
}

/// One task: the convolution of some channels of a run, and its state `[conv_width][columns]`.
struct Convolve<'a> {
    weights: &'a MambaWeights,
    /// The first channel.
    first: usize,
    /// Channels of a piece. The last piece can have fewer.
    columns: usize,
    piece: StatePiece<'a>,
    before: Before,
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
        let Convolve { weights, first, columns, piece, before, own, from: (from, stride), to } =
            &mut self;
        let (columns, stride, channels) = (*columns, *stride, weights.conv_bias.len());
        let width = weights.conv.len() / channels;
        match before {
            Before::Nothing => own.fill(0.0),
            Before::Others | Before::Itself => piece.read(own),
        }
        // The newest input in the state is that of the token before, or of the token itself.
        let ahead = if *before == Before::Itself { 0 } else { 1 };
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
        if *before == Before::Itself {
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
        piece.write(own);
    }
}

/// One task: the scan of one head over a run, and its state `[state][state_stride]`.
struct Scan<'a> {
    config: &'a MambaConfig,
    head: usize,
    scalars: MambaHead,
    piece: StatePiece<'a>,
    before: Before,
    /// Working memory for the state.
    own: &'a mut [f32],
    /// x, B and C from the first token on, and the stride of their rows.
    from: (&'a [f32], usize),
    /// Time steps of the head, in the same way.
    steps: (&'a [f32], usize),
    to: Window<'a>,
}

impl Kernel for Scan<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let Scan { config, head, scalars, piece, before, own, from, steps, to } = &mut self;
        match before {
            Before::Nothing => own.fill(0.0),
            Before::Others | Before::Itself => piece.read(own),
        }
        let (inner, dim, state) = (config.inner(), config.head_dim, config.state);
        let shared = *head / (config.heads / config.groups) * state;
        for token in 0..to.rows() {
            let row = &from.0[token * from.1..];
            let x = &row[*head * dim..][..dim];
            let b = &row[inner + shared..][..state];
            let c = &row[inner + config.groups * state + shared..][..state];
            let step = softplus(steps.0[token * steps.1] + scalars.step_bias);
            let decay = f64::from(step * scalars.decay).exp() as f32;
            let to = to.row(token);
            for at in (0..dim).step_by(LANES) {
                let x = load_padded(s, &x[at..]);
                let added = s.mul(x, s.splat(step));
                let column = Column { own, at, stride: config.state_stride() };
                let sum = match before {
                    Before::Itself => column.read(s, c),
                    _ => column.advance(s, (decay, added), (b, c)),
                };
                store_padded(s, s.fma(x, s.splat(scalars.skip), sum), &mut to[at..]);
            }
        }
        if *before != Before::Itself {
            piece.write(own);
        }
    }
}

/// Sixteen elements of each row of a head's state.
struct Column<'a> {
    own: &'a mut [f32],
    at: usize,
    stride: usize,
}

impl Column<'_> {
    #[inline(always)]
    fn row(&mut self, row: usize) -> &mut Lanes {
        self.own[row * self.stride + self.at..].first_chunk_mut().expect("rows are padded")
    }

    /// state ← decay · state + B · added; returns C · state. Rows with even and with odd numbers
    /// have a sum each, because one chain of sums would wait for each result.
    #[inline(always)]
    fn advance<S: Simd>(
        mut self,
        s: S,
        (decay, added): (f32, S::F),
        (b, c): (&[f32], &[f32]),
    ) -> S::F {
        let decay = s.splat(decay);
        let mut sums = [s.splat(0.0); 2];
        for (row, (b, c)) in b.iter().zip(c).enumerate() {
            let to = self.row(row);
            let state = s.fma(s.load(to), decay, s.mul(added, s.splat(*b)));
            s.store(state, to);
            sums[row % 2] = s.fma(state, s.splat(*c), sums[row % 2]);
        }
        s.add(sums[0], sums[1])
    }

    /// C · state, with the sums of [`Column::advance`].
    #[inline(always)]
    fn read<S: Simd>(mut self, s: S, c: &[f32]) -> S::F {
        let mut sums = [s.splat(0.0); 2];
        for (row, c) in c.iter().enumerate() {
            sums[row % 2] = s.fma(s.load(self.row(row)), s.splat(*c), sums[row % 2]);
        }
        s.add(sums[0], sums[1])
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

/// ln(1 + eˣ). The static binary brings its own libm, so hosts do not differ.
fn softplus(x: f32) -> f32 {
    if x > SOFTPLUS_THRESHOLD { x } else { f64::from(x).exp().ln_1p() as f32 }
}

#[inline(always)]
fn lanes(row: &[f32], at: usize) -> &Lanes {
    row[at..].first_chunk().expect("rows are padded to sixteen")
}

/// The first sixteen elements, or all, padded with zeros.
#[inline(always)]
fn load_padded<S: Simd>(s: S, from: &[f32]) -> S::F {
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
fn store_padded<S: Simd>(s: S, value: S::F, to: &mut [f32]) {
    match to.first_chunk_mut() {
        Some(lanes) => s.store(value, lanes),
        None => {
            let mut lanes = [0.0; LANES];
            s.store(value, &mut lanes);
            to.copy_from_slice(&lanes[..to.len()]);
        }
    }
}

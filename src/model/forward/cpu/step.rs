//! One step: embed, then layer by layer and block by block, then the wanted logits.

use super::CpuModel;
use super::attention::{self, Attend, span_tokens};
use super::element::{Gated, Normed, Pack, Raw, Rows, turn_heads};
use super::load::{Layer, ModelWeights};
use super::matrix_product::{Linear, Multiply};
use super::paged_kv::Paged;
use super::panel::{PANEL, PanelForms, Panels, blocks_per_panel};
use super::plan::{BLOCK_TOKENS, TokenPosition};
use super::simd::{Dispatch, Kernel, LANES, Simd};
use crate::kv::layout::KeyValue;
use crate::model::config::ModelConfig;
use crate::model::forward::batch::{Batch, BatchLimits};
use crate::model::forward::{KvPool, StepEnd};
use crate::stdx::disjoint_parts::{Chunks, Grid};
use crate::stdx::team::Team;
use std::ops::{ControlFlow, Range};

/// Tokens of one task that rotates and stores keys and values.
const STORE_TOKENS: usize = 8;

/// All memory that a step writes, except KV.
pub struct StepScratch {
    /// The residual stream, `[token][hidden]`; all rows are padded with zeros.
    stream: Vec<f32>,
    /// cos and sin, `[token][head_dim]`.
    angles: Vec<f32>,
    /// For one block: `[token][q, k, v]`.
    qkv: Vec<f32>,
    /// For one block: `[token][heads]`.
    attended: Vec<f32>,
    /// For one block: `[token][gate, up]`.
    gate_up: Vec<f32>,
    /// The inputs of the next product.
    panels: Panels,
    /// `[wanted][vocabulary]`
    logits: Vec<f32>,
    /// Working memory per thread.
    attention: Vec<attention::AttentionScratch>,
    widths: Widths,
}

/// The stride of each buffer's rows, and the offsets of their parts.
#[derive(Clone, Copy)]
struct Widths {
    hidden: usize,
    qkv: usize,
    keys_at: usize,
    values_at: usize,
    heads: usize,
    gate_up: usize,
    up_at: usize,
    vocab: usize,
}

/// The stride of rows: an odd number of cache lines. With an even number, rows would use few sets
/// of the cache.
fn stride(columns: usize) -> usize {
    (columns.div_ceil(LANES) | 1) * LANES
}

impl StepScratch {
    /// Allocates for the largest batch.
    pub fn new(
        config: &ModelConfig,
        weights: &ModelWeights,
        limits: &BatchLimits,
        threads: usize,
    ) -> StepScratch {
        let pad = |n: usize| n.next_multiple_of(LANES);
        let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let widths = Widths {
            hidden: stride(config.hidden),
            qkv: stride(pad(q) + 2 * pad(kv)),
            keys_at: pad(q),
            values_at: pad(q) + pad(kv),
            heads: stride(q),
            gate_up: stride(2 * pad(config.intermediate)),
            up_at: pad(config.intermediate),
            vocab: stride(config.vocab),
        };
        let block = BLOCK_TOKENS.min(limits.tokens);
        let wanted = weights
            .layers
            .iter()
            .flat_map(|l| [&l.qkv, &l.output, &l.gate_up, &l.down])
            .fold(weights.head.wants(), |wanted, linear| wanted.or(linear.wants()));
        let columns = config.hidden.max(q).max(config.intermediate);
        let group = config.heads / config.kv_heads;
        StepScratch {
            stream: vec![0.0; limits.tokens * widths.hidden],
            angles: vec![0.0; limits.tokens * config.head_dim],
            qkv: vec![0.0; block * widths.qkv],
            attended: vec![0.0; block * widths.heads],
            gate_up: vec![0.0; block * widths.gate_up],
            panels: Panels::new(block, columns, wanted),
            logits: vec![0.0; limits.logits * widths.vocab],
            attention: (0..threads)
                .map(|_| attention::AttentionScratch::new(config.head_dim, group))
                .collect(),
            widths,
        }
    }

    /// Bytes held.
    pub fn memory(&self) -> usize {
        let floats =
            [&self.stream, &self.angles, &self.qkv, &self.attended, &self.gate_up, &self.logits];
        floats.iter().map(|v| size_of_val(&***v)).sum::<usize>()
            + self.panels.memory()
            + self.attention.iter().map(attention::AttentionScratch::memory).sum::<usize>()
    }

    /// See [`crate::model::forward::Forward::logits`].
    pub fn logits(&self, index: usize, vocab: usize) -> &[f32] {
        &self.logits[index * self.widths.vocab..][..vocab]
    }
}

/// Resources that the phases of a step share.
struct StepTeam<'a> {
    team: &'a mut Team,
    dispatch: Dispatch,
}

impl StepTeam<'_> {
    /// Packs `count` rows for the next products.
    fn pack<R: Rows>(
        &mut self,
        panels: &mut Panels,
        rows: R,
        count: usize,
        columns: usize,
        wanted: PanelForms,
    ) {
        let (integers, floats) = panels.parts(count, columns, wanted);
        let integers = wanted.integers.then(|| Chunks::new(integers, blocks_per_panel(columns)));
        let floats = wanted.floats.then(|| Chunks::new(floats, columns));
        let dispatch = self.dispatch;
        self.team.run((integers, floats), |panel, (integers, floats)| {
            let first = panel * PANEL;
            let (integers, floats) = (integers.unwrap_or_default(), floats.unwrap_or_default());
            let count = PANEL.min(count - first);
            dispatch.run(Pack { rows, first, count, columns, integers, floats });
        });
    }

    /// Multiplies the last packed rows.
    fn multiply(
        &mut self,
        linear: &Linear,
        panels: &Panels,
        count: usize,
        (to, stride): (&mut [f32], usize),
        add: bool,
    ) {
        let groups = linear.groups();
        // Rows are distributed only if there are too few groups for all threads.
        let bands: [Range<usize>; BLOCK_TOKENS / 64] =
            std::array::from_fn(|i| (i * 64).min(count)..(i * 64 + 64).min(count));
        let whole = 0..count;
        let bands = match groups < 8 * self.team.threads() && count > 64 {
            true => &bands[..count.div_ceil(64)],
            false => std::slice::from_ref(&whole),
        };
        // Few rows are memory-bound and need long tasks. Many rows are compute-bound; with more
        // tasks, all threads end at about the same time.
        let tasks = self.team.threads() * if count <= 4 { 8 } else { 32 };
        let per_task = (groups / tasks).max(1);
        let grid = Grid::new(to, stride, bands, linear.outputs(), per_task * LANES);
        let (across, dispatch) = (grid.across(), self.dispatch);
        let input = panels.input(linear.columns());
        self.team.run(grid, |index, to| {
            let rows = bands[index / across].clone();
            let group = index % across * per_task;
            dispatch.run(Multiply { linear, input, rows, group, to, add });
        });
    }
}

impl CpuModel {
    /// See [`crate::model::forward::Forward::step`].
    pub(super) fn run_step(
        &mut self,
        batch: &Batch,
        kv: KvPool<'_>,
        on_layer: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> StepEnd {
        let config = &self.config;
        let layout = kv.layout;
        assert_eq!(
            (layout.layers as usize, layout.kv_heads as usize, layout.head_dim as usize),
            (config.layers, config.kv_heads, config.head_dim),
            "KV layout of another model"
        );
        self.plan.cut(batch, span_tokens(config.heads / config.kv_heads));
        self.embed(batch);
        let paged = Paged::new(kv);
        for layer in 0..self.weights.layers.len() {
            for block in 0..self.plan.blocks.len() {
                self.attention_block(batch, &paged, layer, block);
                self.mlp_block(layer, block);
            }
            if on_layer(layer as u32).is_break() {
                return StepEnd::Stopped;
            }
        }
        self.head();
        StepEnd::Complete
    }

    /// Writes embeddings into the stream, and computes the angles of every token.
    fn embed(&mut self, batch: &Batch) {
        let (tokens, places) = (batch.tokens(), &self.plan.places);
        let (embedding, rope) = (self.weights.embedding(), &self.rope);
        let (hidden, head_dim) = (self.scratch.widths.hidden, self.config.head_dim);
        let stream = Chunks::new(&mut self.scratch.stream[..tokens.len() * hidden], hidden);
        let angles = Chunks::new(&mut self.scratch.angles[..tokens.len() * head_dim], head_dim);
        self.team.run((stream, angles), |token, (stream, angles)| {
            embedding.row(tokens[token] as usize, stream);
            rope.fill(places[token].position, angles);
        });
    }

    fn attention_block(&mut self, batch: &Batch, paged: &Paged<'_>, layer: usize, block: usize) {
        let CpuModel { config, weights, dispatch, team, plan, scratch, .. } = self;
        let mut crew = StepTeam { team, dispatch: *dispatch };
        let Layer { input_norm, qkv, head_norms, output, .. } = &weights.layers[layer];
        let (tokens, spans) = plan.blocks[block].clone();
        let (count, widths) = (tokens.len(), scratch.widths);
        let stream = &mut scratch.stream[tokens.start * widths.hidden..tokens.end * widths.hidden];
        let normed = Normed {
            raw: Raw { rows: stream, stride: widths.hidden },
            picked: &[],
            columns: config.hidden,
            weight: input_norm,
            epsilon: config.norm_eps,
        };
        crew.pack(&mut scratch.panels, normed, count, config.hidden, qkv.wants());
        crew.multiply(qkv, &scratch.panels, count, (&mut scratch.qkv, widths.qkv), false);

        let angles = &scratch.angles[tokens.start * config.head_dim..tokens.end * config.head_dim];
        let places = &plan.places[tokens];
        let store =
            Store { config, batch, paged, layer: layer as u32, head_norms, places, angles, widths };
        let rows = Chunks::new(&mut scratch.qkv[..count * widths.qkv], STORE_TOKENS * widths.qkv);
        crew.team.run(rows, |task, rows| {
            let first = task * STORE_TOKENS;
            crew.dispatch.run(StoreTask { store: &store, first, rows });
        });

        let spans = &plan.spans[spans];
        let group = config.heads / config.kv_heads;
        let width = group * config.head_dim;
        let queries = &scratch.qkv[..count * widths.qkv];
        let grid =
            Grid::new(&mut scratch.attended, widths.heads, spans, config.kv_heads * width, width);
        crew.team.run_with(&mut scratch.attention, grid, |own, index, to| {
            let (span, head) = (&spans[index / config.kv_heads], index % config.kv_heads);
            let TokenPosition { row, position } = places[span.start];
            let pages = batch.pages(&batch.rows()[row as usize]);
            crew.dispatch.run(Attend {
                scratch: own,
                keys: paged.strip(layer as u32, KeyValue::Key, head as u32, pages),
                values: paged.strip(layer as u32, KeyValue::Value, head as u32, pages),
                queries: &queries[span.start * widths.qkv + head * width..span.end * widths.qkv],
                stride: widths.qkv,
                head_dim: config.head_dim,
                group,
                start: position,
                to,
            });
        });

        let attended = Raw { rows: &scratch.attended, stride: widths.heads };
        crew.pack(&mut scratch.panels, attended, count, output.columns(), output.wants());
        crew.multiply(output, &scratch.panels, count, (stream, widths.hidden), true);
    }

    fn mlp_block(&mut self, layer: usize, block: usize) {
        let CpuModel { config, weights, dispatch, team, plan, scratch, .. } = self;
        let mut crew = StepTeam { team, dispatch: *dispatch };
        let Layer { mlp_norm, gate_up, down, .. } = &weights.layers[layer];
        let (tokens, _) = plan.blocks[block].clone();
        let (count, widths) = (tokens.len(), scratch.widths);
        let stream = &mut scratch.stream[tokens.start * widths.hidden..tokens.end * widths.hidden];
        let normed = Normed {
            raw: Raw { rows: stream, stride: widths.hidden },
            picked: &[],
            columns: config.hidden,
            weight: mlp_norm,
            epsilon: config.norm_eps,
        };
        crew.pack(&mut scratch.panels, normed, count, config.hidden, gate_up.wants());
        crew.multiply(
            gate_up,
            &scratch.panels,
            count,
            (&mut scratch.gate_up, widths.gate_up),
            false,
        );
        let raw = Raw { rows: &scratch.gate_up, stride: widths.gate_up };
        let gated = Gated { raw, up_at: widths.up_at };
        crew.pack(&mut scratch.panels, gated, count, down.columns(), down.wants());
        crew.multiply(down, &scratch.panels, count, (stream, widths.hidden), true);
    }

    /// Final norm and head of the picked tokens, one block at a time.
    fn head(&mut self) {
        let CpuModel { config, weights, dispatch, team, plan, scratch, .. } = self;
        let mut crew = StepTeam { team, dispatch: *dispatch };
        let widths = scratch.widths;
        let head = &weights.head;
        for (picked, logits) in plan
            .picked
            .chunks(BLOCK_TOKENS)
            .zip(scratch.logits.chunks_mut(BLOCK_TOKENS * widths.vocab))
        {
            let normed = Normed {
                raw: Raw { rows: &scratch.stream, stride: widths.hidden },
                picked,
                columns: config.hidden,
                weight: &weights.norm,
                epsilon: config.norm_eps,
            };
            crew.pack(&mut scratch.panels, normed, picked.len(), config.hidden, head.wants());
            crew.multiply(head, &scratch.panels, picked.len(), (logits, widths.vocab), false);
        }
    }
}

/// Data that all tasks of the storing phase share.
struct Store<'a> {
    config: &'a ModelConfig,
    batch: &'a Batch,
    paged: &'a Paged<'a>,
    layer: u32,
    head_norms: &'a Option<[Vec<f32>; 2]>,
    places: &'a [TokenPosition],
    angles: &'a [f32],
    widths: Widths,
}

/// One task: rotates q and k of some tokens, and stores k and v.
struct StoreTask<'a> {
    store: &'a Store<'a>,
    first: usize,
    rows: &'a mut [f32],
}

impl Kernel for StoreTask<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Store { config, batch, paged, layer, head_norms, places, angles, widths } = self.store;
        let dim = config.head_dim;
        let (q_len, kv_len) = (config.heads * dim, config.kv_heads * dim);
        let norms =
            head_norms.as_ref().map(|norms| norms.each_ref().map(|n| (&n[..], config.norm_eps)));
        // Attention uses powers of two as exponentials.
        let scale = std::f32::consts::LOG2_E / (dim as f32).sqrt();
        for (index, row) in self.rows.chunks_exact_mut(widths.qkv).enumerate() {
            let token = self.first + index;
            let angles = &angles[token * dim..][..dim];
            let (q, kv) = row.split_at_mut(widths.keys_at);
            let (k, v) = kv.split_at_mut(widths.values_at - widths.keys_at);
            turn_heads(s, &mut q[..q_len], norms.map(|n| n[0]), angles, scale);
            turn_heads(s, &mut k[..kv_len], norms.map(|n| n[1]), angles, 1.0);
            let TokenPosition { row, position } = places[token];
            let pages = batch.pages(&batch.rows()[row as usize]);
            for head in 0..config.kv_heads {
                let here = head * dim..(head + 1) * dim;
                let keys = paged.strip(*layer, KeyValue::Key, head as u32, pages);
                keys.write(s, position, &k[here.clone()]);
                let values = paged.strip(*layer, KeyValue::Value, head as u32, pages);
                values.write(s, position, &v[here]);
            }
        }
    }
}

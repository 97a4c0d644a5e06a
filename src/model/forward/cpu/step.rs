//! One step: embed, then layer by layer and block by block, then the wanted logits.

use super::CpuModel;
use super::attention::{self, Attend, span_tokens};
use super::element::{CapLogits, Normed, Raw, Sigmoid, turn_heads};
use super::experts::ExpertScratch;
use super::layer_weights::{AttentionWeights, Layer, LayerMlp, ModelWeights, RecurrentWeights};
use super::paged_kv::Paged;
use super::panel::{PanelForms, Panels};
use super::plan::{BLOCK_TOKENS, TokenPosition};
use super::recurrent::{RecurrentBlock, RecurrentScratch};
use super::simd::{Kernel, LANES, Simd};
use super::step_team::{StepTeam, stride};
use crate::kv::groups::LayerPlace;
use crate::kv::layout::KeyValue;
use crate::model::config::ModelConfig;
use crate::model::forward::batch::{Batch, BatchLimits};
use crate::model::forward::{KvPool, StepEnd};
use crate::stdx::disjoint_parts::{Chunks, Grid};
use std::ops::ControlFlow;

/// Tokens of one task that rotates and stores keys and values.
const STORE_TOKENS: usize = 8;

/// All memory that a step writes, except KV.
pub struct StepScratch {
    /// The residual stream, `[token][hidden]`; all rows are padded with zeros.
    stream: Vec<f32>,
    /// cos and sin, `[token][rotary_dim]`.
    angles: Vec<f32>,
    /// The same for window layers, if they have frequencies of their own.
    window_angles: Vec<f32>,
    /// For one block: `[token][q, k, v]`, and gates behind them if there are any.
    qkv: Vec<f32>,
    /// For one block: `[token][heads]`.
    attended: Vec<f32>,
    /// For one block: `[token][gate, up]`.
    gate_up: Vec<f32>,
    /// The inputs of the next product.
    panels: Panels,
    /// For one block: `[token][hidden]`, outputs that have a norm (Gemma).
    outputs: Vec<f32>,
    /// For layers with experts.
    experts: Option<ExpertScratch>,
    /// For recurrent layers.
    recurrent: Option<RecurrentScratch>,
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
    gates_at: usize,
    heads: usize,
    gate_up: usize,
    vocab: usize,
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
        let mlps = weights.layers.iter().filter_map(Layer::common_mlp);
        let inside = mlps.map(|mlp| mlp.down.columns()).max().unwrap_or(0);
        let widths = Widths {
            hidden: stride(config.hidden),
            qkv: stride(pad(q) + 2 * pad(kv) + if config.delta.is_some() { pad(q) } else { 0 }),
            keys_at: pad(q),
            values_at: pad(q) + pad(kv),
            gates_at: pad(q) + 2 * pad(kv),
            heads: stride(q),
            gate_up: stride(2 * pad(inside)),
            vocab: stride(config.vocab),
        };
        let block = BLOCK_TOKENS.min(limits.tokens);
        let wanted = weights
            .layers
            .iter()
            .flat_map(Layer::common_linears)
            .fold(weights.head.wants(), |wanted, linear| wanted.or(linear.wants()));
        let sizes = config.recurrent_sizes();
        let recurrent = sizes.map_or(0, |sizes| sizes.inner());
        let columns = config.hidden.max(q).max(inside).max(recurrent);
        let (group, gemma) = (config.queries_per_head(), config.gemma.is_some());
        StepScratch {
            stream: vec![0.0; limits.tokens * widths.hidden],
            angles: vec![0.0; limits.tokens * config.rotary_dim()],
            window_angles: vec![0.0; if gemma { limits.tokens * config.head_dim } else { 0 }],
            qkv: vec![0.0; block * widths.qkv],
            attended: vec![0.0; block * widths.heads],
            gate_up: vec![0.0; block * widths.gate_up],
            panels: Panels::new(block, columns, wanted),
            outputs: vec![0.0; if gemma { block * widths.hidden } else { 0 }],
            experts: config
                .experts
                .as_ref()
                .map(|experts| ExpertScratch::new(config.hidden, experts, &weights.layers, block)),
            recurrent: sizes.map(|sizes| RecurrentScratch::new(&sizes, limits.tokens, threads)),
            logits: vec![0.0; limits.logits * widths.vocab],
            attention: (0..threads)
                .map(|_| attention::AttentionScratch::new(config.head_dim, group))
                .collect(),
            widths,
        }
    }

    /// Bytes held.
    pub fn memory(&self) -> usize {
        let floats = [
            &self.stream,
            &self.angles,
            &self.window_angles,
            &self.qkv,
            &self.attended,
            &self.gate_up,
            &self.outputs,
            &self.logits,
        ];
        floats.iter().map(|v| size_of_val(&***v)).sum::<usize>()
            + self.panels.memory()
            + self.experts.as_ref().map_or(0, ExpertScratch::memory)
            + self.recurrent.as_ref().map_or(0, RecurrentScratch::memory)
            + self.attention.iter().map(attention::AttentionScratch::memory).sum::<usize>()
    }

    /// See [`crate::model::forward::Forward::logits`].
    pub fn logits(&self, index: usize, vocab: usize) -> &[f32] {
        &self.logits[index * self.widths.vocab..][..vocab]
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
        let KvPool { layout, groups, .. } = kv;
        assert_eq!(groups.model_layers(), config.layers, "KV layout of another model");
        assert!(is_layout_of(config, &kv), "KV layout of another model");
        assert_eq!(layout.layers, groups.layers(), "a page has the layers of a group");
        self.plan.cut(batch, span_tokens(config.queries_per_head()));
        self.embed(batch);
        let paged = Paged::new(kv);
        for layer in 0..self.weights.layers.len() {
            for block in 0..self.plan.blocks.len() {
                self.project_block(layer, block);
                if let Some(place) = groups.place(layer) {
                    self.attention_block(batch, (&paged, place), layer, block);
                }
                if self.weights.layers[layer].recurrent.is_some() {
                    self.recurrent_block(batch, &paged, layer, block);
                }
                if self.weights.layers[layer].mlp.is_some() {
                    self.mlp_block(layer, block);
                }
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
        let (embedding, scale) = (self.weights.embedding(), self.config.embedding_scale());
        let (hidden, rotary) = (self.scratch.widths.hidden, self.config.rotary_dim());
        let StepScratch { stream, angles, window_angles, .. } = &mut self.scratch;
        let (rope, window_rope) = (&self.rope, self.window_rope.as_ref());
        let stream = Chunks::new(&mut stream[..tokens.len() * hidden], hidden);
        let angles =
            (rotary > 0).then(|| Chunks::new(&mut angles[..tokens.len() * rotary], rotary));
        let window =
            window_rope.map(|_| Chunks::new(&mut window_angles[..tokens.len() * rotary], rotary));
        self.team.run(((stream, angles), window), |token, ((stream, angles), window)| {
            embedding.row(tokens[token] as usize, stream);
            if scale != 1.0 {
                stream.iter_mut().for_each(|element| *element *= scale);
            }
            if let Some(angles) = angles {
                rope.fill(places[token].position, angles);
            }
            if let (Some(rope), Some(angles)) = (window_rope, window) {
                rope.fill(places[token].position, angles);
            }
        });
    }

    /// Multiplies the normed inputs of a layer with the matrices of attention and of the recurrent
    /// part.
    fn project_block(&mut self, layer: usize, block: usize) {
        let CpuModel { config, weights, dispatch, team, plan, scratch, .. } = self;
        let mut crew = StepTeam { team, dispatch: *dispatch };
        let Layer { input_norm, attention, recurrent, .. } = &weights.layers[layer];
        let (tokens, _) = plan.blocks[block].clone();
        let (count, widths) = (tokens.len(), scratch.widths);
        let stream = &scratch.stream[tokens.start * widths.hidden..tokens.end * widths.hidden];
        let normed = with_norm(config, widths, stream, input_norm);
        let (qkv, input) =
            (attention.as_ref().map(|it| &it.qkv), recurrent.as_ref().map(|it| &it.input));
        let wanted = qkv.into_iter().chain(input).map(|linear| linear.wants());
        let wanted = wanted.fold(PanelForms::default(), PanelForms::or);
        crew.pack(&mut scratch.panels, normed, count, config.hidden, wanted);
        if let Some(qkv) = qkv {
            crew.multiply(qkv, &scratch.panels, count, (&mut scratch.qkv, widths.qkv), false);
        }
        if let (Some(input), Some(own)) = (input, &mut scratch.recurrent) {
            crew.multiply(input, &scratch.panels, count, own.projected(), false);
        }
    }

    fn attention_block(
        &mut self,
        batch: &Batch,
        (paged, place): (&Paged<'_>, LayerPlace),
        layer: usize,
        block: usize,
    ) {
        let CpuModel { config, weights, dispatch, team, plan, scratch, window_rope, .. } = self;
        let mut crew = StepTeam { team, dispatch: *dispatch };
        let Layer { attention, output_norms, .. } = &weights.layers[layer];
        let attention = attention.as_ref().expect("a layer with keys and values has attention");
        let AttentionWeights { head_norms, output, .. } = attention;
        let (tokens, spans) = plan.blocks[block].clone();
        let (count, widths) = (tokens.len(), scratch.widths);

        let window = config.layer_window(layer);
        let angles = match window {
            Some(_) if window_rope.is_some() => &scratch.window_angles,
            _ => &scratch.angles,
        };
        let rotary = config.rotary_dim();
        let angles = &angles[tokens.start * rotary..tokens.end * rotary];
        let places = &plan.places[tokens.clone()];
        let store = Store { config, batch, paged, place, head_norms, places, angles, widths };
        let rows = Chunks::new(&mut scratch.qkv[..count * widths.qkv], STORE_TOKENS * widths.qkv);
        crew.team.run(rows, |task, rows| {
            let first = task * STORE_TOKENS;
            crew.dispatch.run(StoreTask { store: &store, first, rows });
        });

        let spans = &plan.spans[spans];
        let group = config.queries_per_head();
        let width = group * config.head_dim;
        let queries = &scratch.qkv[..count * widths.qkv];
        let grid =
            Grid::new(&mut scratch.attended, widths.heads, spans, config.kv_heads * width, width);
        crew.team.run_with(&mut scratch.attention, grid, |own, index, to| {
            let (span, head) = (&spans[index / config.kv_heads], index % config.kv_heads);
            let TokenPosition { row, position } = places[span.start];
            let pages = batch.pages(&batch.rows()[row as usize], place.group);
            crew.dispatch.run(Attend {
                scratch: own,
                keys: paged.strip(place.layer, KeyValue::Key, head as u32, pages),
                values: paged.strip(place.layer, KeyValue::Value, head as u32, pages),
                queries: &queries[span.start * widths.qkv + head * width..span.end * widths.qkv],
                stride: widths.qkv,
                head_dim: config.head_dim,
                group,
                start: position,
                window: window.unwrap_or(u32::MAX),
                to,
            });
        });

        if config.delta.is_some() {
            apply_gates(&mut crew, scratch, (count, config.heads * config.head_dim));
        }
        let stream = &mut scratch.stream[tokens.start * widths.hidden..tokens.end * widths.hidden];
        let attended = Raw { rows: &scratch.attended, stride: widths.heads };
        crew.pack(&mut scratch.panels, attended, count, output.columns(), output.wants());
        let Some([weight, _]) = output_norms else {
            crew.multiply(output, &scratch.panels, count, (stream, widths.hidden), true);
            return;
        };
        let outputs = (&mut scratch.outputs[..], widths.hidden);
        crew.multiply(output, &scratch.panels, count, outputs, false);
        crew.add_rows(with_norm(config, widths, &scratch.outputs, weight), stream);
    }

    fn recurrent_block(&mut self, batch: &Batch, paged: &Paged<'_>, layer: usize, block: usize) {
        let CpuModel { config, weights, dispatch, team, plan, scratch, .. } = self;
        let mut crew = StepTeam { team, dispatch: *dispatch };
        let recurrent = weights.layers[layer].recurrent.as_ref().expect("the layer is recurrent");
        let sizes = config.recurrent_sizes().expect("the model has recurrent layers");
        let RecurrentWeights { output, layer, .. } = recurrent;
        let (tokens, _) = plan.blocks[block].clone();
        let (count, widths) = (tokens.len(), scratch.widths);
        let stream = &mut scratch.stream[tokens.start * widths.hidden..tokens.end * widths.hidden];
        let own = scratch.recurrent.as_mut().expect("the model has recurrent layers");
        let runs = &plan.runs[plan.block_runs[block].clone()];
        let places = &plan.places[tokens];
        let sequences = RecurrentBlock { batch, paged, layer: *layer, places, runs };
        own.run(&mut crew, &sizes, recurrent, (&sequences, config.norm_eps));
        let (rows, stride) = own.scanned();
        crew.pack(&mut scratch.panels, Raw { rows, stride }, count, sizes.inner(), output.wants());
        crew.multiply(output, &scratch.panels, count, (stream, widths.hidden), true);
    }

    fn mlp_block(&mut self, layer: usize, block: usize) {
        let CpuModel { config, weights, dispatch, team, plan, scratch, .. } = self;
        let mut crew = StepTeam { team, dispatch: *dispatch };
        let Layer { mlp, output_norms, .. } = &weights.layers[layer];
        let (mlp_norm, mlp) = mlp.as_ref().expect("the layer has an MLP");
        let (tokens, _) = plan.blocks[block].clone();
        let (count, widths) = (tokens.len(), scratch.widths);
        let stream = &mut scratch.stream[tokens.start * widths.hidden..tokens.end * widths.hidden];
        let normed = with_norm(config, widths, stream, mlp_norm);
        let (panels, hidden) = (&mut scratch.panels, config.hidden);
        let inside = (&mut scratch.gate_up[..], widths.gate_up);
        match mlp {
            LayerMlp::Dense(mlp) => {
                crew.pack(panels, normed, count, hidden, mlp.gate_up.wants());
                let Some([_, weight]) = output_norms else {
                    crew.multiply_mlp(mlp, panels, inside, count, (stream, widths.hidden), true);
                    return;
                };
                let outputs = (&mut scratch.outputs[..], widths.hidden);
                crew.multiply_mlp(mlp, panels, inside, count, outputs, false);
                crew.add_rows(with_norm(config, widths, &scratch.outputs, weight), stream);
            }
            LayerMlp::Sparse(sparse) => {
                let experts = scratch.experts.as_mut().expect("the model has experts");
                let wanted = sparse.shared.iter().map(|shared| shared.gate_up.wants());
                let wanted = wanted.fold(sparse.router.wants(), PanelForms::or);
                crew.pack(panels, normed, count, hidden, wanted);
                crew.multiply(&sparse.router, panels, count, experts.scores(), false);
                if let Some(shared) = &sparse.shared {
                    crew.multiply_mlp(shared, panels, inside, count, experts.shared(), false);
                }
                experts.run(&mut crew, &sparse.experts, normed, count);
                experts.add_to(&mut crew, stream);
            }
        }
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
            let normed = with_norm(config, widths, &scratch.stream, &weights.norm);
            let normed = Normed { picked, ..normed };
            crew.pack(&mut scratch.panels, normed, picked.len(), config.hidden, head.wants());
            let count = picked.len();
            crew.multiply(head, &scratch.panels, count, (&mut *logits, widths.vocab), false);
            if let Some(cap) = config.gemma.as_ref().and_then(|gemma| gemma.logit_cap) {
                let (rows, dispatch) = (&mut logits[..count * widths.vocab], crew.dispatch);
                let rows = Chunks::new(rows, widths.vocab);
                crew.team.run(rows, |_, logits| dispatch.run(CapLogits { logits, cap }));
            }
        }
    }
}

/// Multiplies the outputs of attention of `count` tokens, `size` elements each, by their gates.
fn apply_gates(crew: &mut StepTeam<'_>, scratch: &mut StepScratch, (count, size): (usize, usize)) {
    let (widths, dispatch) = (scratch.widths, crew.dispatch);
    let attended = Chunks::new(&mut scratch.attended[..count * widths.heads], widths.heads);
    crew.team.run(attended, |token, to| {
        let gate = &scratch.qkv[token * widths.qkv + widths.gates_at..][..size];
        dispatch.run(Sigmoid { gate, to: &mut to[..size] });
    });
}

/// Whether the pool has the KV heads or the state of this model.
fn is_layout_of(config: &ModelConfig, kv: &KvPool<'_>) -> bool {
    let heads = [kv.layout.kv_heads, kv.layout.head_dim].map(|size| size as usize);
    let has_heads = config.heads == 0 || heads == [config.kv_heads, config.head_dim];
    let state = kv.groups.state().map(|state| *state.shape());
    has_heads && state == config.state_shape()
}

/// Rows of the width of the residual stream, with a norm.
fn with_norm<'a>(
    config: &ModelConfig,
    widths: Widths,
    rows: &'a [f32],
    weight: &'a [f32],
) -> Normed<'a> {
    let (columns, epsilon) = (config.hidden, config.norm_eps);
    Normed { raw: Raw { rows, stride: widths.hidden }, picked: &[], columns, weight, epsilon }
}

/// Data that all tasks of the storing phase share.
struct Store<'a> {
    config: &'a ModelConfig,
    batch: &'a Batch,
    paged: &'a Paged<'a>,
    place: LayerPlace,
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
        let Store { config, batch, paged, place, head_norms, places, angles, widths } = self.store;
        let dim = config.head_dim;
        let (q_len, kv_len) = (config.heads * dim, config.kv_heads * dim);
        let norms =
            head_norms.as_ref().map(|norms| norms.each_ref().map(|n| (&n[..], config.norm_eps)));
        // Attention uses powers of two as exponentials.
        let scale = std::f32::consts::LOG2_E / config.score_divisor();
        for (index, row) in self.rows.chunks_exact_mut(widths.qkv).enumerate() {
            let token = self.first + index;
            let rotary = config.rotary_dim();
            let angles = &angles[token * rotary..][..rotary];
            let (q, kv) = row.split_at_mut(widths.keys_at);
            let (k, v) = kv.split_at_mut(widths.values_at - widths.keys_at);
            turn_heads(s, (&mut q[..q_len], dim), norms.map(|n| n[0]), angles, scale);
            turn_heads(s, (&mut k[..kv_len], dim), norms.map(|n| n[1]), angles, 1.0);
            let TokenPosition { row, position } = places[token];
            let pages = batch.pages(&batch.rows()[row as usize], place.group);
            for head in 0..config.kv_heads {
                let here = head * dim..(head + 1) * dim;
                let keys = paged.strip(place.layer, KeyValue::Key, head as u32, pages);
                keys.write(s, position, &k[here.clone()]);
                let values = paged.strip(place.layer, KeyValue::Value, head as u32, pages);
                values.write(s, position, &v[here]);
            }
        }
    }
}

//! Steps of an expert model beside a dense one of the same active size, and of window layers beside
//! full ones. The shapes are those of SmolLM2-135M, the weights are random. Then steps of Mamba-2
//! with the shapes of the 130M model, beside the same model with an eighth of the state: the
//! difference is the time of the scan. Then layers of Qwen3-Next, of which three of four have a
//! gated delta net, beside layers with attention and the same experts.
//!
//! `cargo bench --bench architecture -- [CASE]`. The models of a pair run in turn. Each line has
//! the median steps, and their ratio. The middle half of the ratios of single turns stands behind
//! it.

#[path = "../tests/forward/model.rs"]
#[allow(dead_code)]
mod model;

use baton::ids::PageId;
use baton::kv::groups::KvGroups;
use baton::kv::layout::{KvDtype, KvLayout};
use baton::kv::page_span::{PageSpan, SequenceState};
use baton::kv::region::Region;
use baton::model::config::{Architecture, ExpertConfig, ModelConfig, WindowConfig};
use baton::model::forward::batch::{Batch, BatchLimits, Logits};
use baton::model::forward::cpu::{CpuModel, CpuOptions, fastest_kernels};
use baton::model::forward::{Forward, KvPool};
use baton::model::recurrent_config::{DeltaConfig, MambaConfig, MambaNorm};
use baton::model::tensor::TensorType;
use model::{Model, Random, small};
use std::ops::ControlFlow;
use std::time::Instant;

const ROWS: usize = 8;
const CONTEXT: usize = 8192;
const PAGE: u32 = 16;
const ROW_PAGES: usize = CONTEXT / PAGE as usize;
const LIMITS: BatchLimits = BatchLimits {
    tokens: 2048,
    rows: ROWS,
    logits: ROWS,
    context: CONTEXT,
    // The state of a row takes fewer pages than its KV.
    pages: ROWS * 2 * ROW_PAGES,
};
/// Turns of a case.
const TURNS: usize = 15;

fn main() {
    let dense = ModelConfig {
        hidden: 576,
        layers: 12,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        intermediate: 1536,
        vocab: 4096,
        context: CONTEXT,
        rope_theta: 1e5,
        ..small()
    };
    let experts = ExpertConfig {
        count: 16,
        used: 4,
        intermediate: 384,
        shared_intermediate: None,
        normalised: true,
        dense_layers: vec![],
    };
    let sparse = ModelConfig {
        architecture: Architecture::Mixtral,
        experts: Some(experts),
        ..dense.clone()
    };
    // Gemma's pattern: every sixth layer is a full one.
    let window = WindowConfig { tokens: 512, full_layers: vec![5, 11] };
    let windowed = ModelConfig { window: Some(window), ..dense.clone() };
    let pool = Pool::new(&dense);
    println!("kernel {}, two threads, {TURNS} turns", fastest_kernels());
    let wanted = std::env::args().skip(1).find(|word| !word.starts_with('-'));
    let is_wanted = |name: &str| wanted.as_ref().is_none_or(|wanted| name.contains(wanted));
    for (name, other) in [("4 of 16 experts", &sparse), ("windows of 512", &windowed)] {
        if !is_wanted(name) {
            continue;
        }
        let mut models = [load(&dense), load(other)];
        for (rows, tokens, start) in [
            (1, 1, 512),
            (8, 1, 512),
            (1, 512, 0),
            (1, 2048, 0),
            (1, 1, CONTEXT - 1),
            (8, 1, CONTEXT - 1),
            (1, 512, CONTEXT - 512),
        ] {
            compare(name, &mut models, [&pool; 2], (rows, tokens, start));
        }
    }
    if is_wanted("state of 128") {
        compare_states();
    }
    if is_wanted("delta nets") {
        compare_delta_nets(&sparse);
    }
}

fn compare_states() {
    let [small, whole] = [recurrent(16), recurrent(128)];
    let pools = [Pool::new(&small), Pool::new(&whole)];
    let mut models = [load(&small), load(&whole)];
    for (rows, tokens) in [(1, 1), (8, 1), (1, 64), (1, 512), (1, 2048)] {
        compare("state of 128", &mut models, pools.each_ref(), (rows, tokens, 512));
    }
}

fn compare_delta_nets(sparse: &ModelConfig) {
    let [attention, delta] = delta_nets(sparse);
    let pools = [Pool::new(&attention), Pool::new(&delta)];
    let mut models = [load(&attention), load(&delta)];
    for (rows, tokens, start) in [
        (1, 1, 512),
        (8, 1, 512),
        (1, 64, 512),
        (1, 512, 512),
        (1, 1, CONTEXT - 1),
        (8, 1, CONTEXT - 1),
    ] {
        compare("delta nets", &mut models, pools.each_ref(), (rows, tokens, start));
    }
}

/// The same layers with attention, and with a gated delta net in three of four.
fn delta_nets(sparse: &ModelConfig) -> [ModelConfig; 2] {
    let experts = ExpertConfig {
        shared_intermediate: Some(384),
        ..sparse.experts.clone().expect("a model with experts")
    };
    let experts = Some(experts);
    let attention = ModelConfig { architecture: Architecture::Qwen2Moe, experts, ..sparse.clone() };
    // Half as many heads of keys as of values, as in the published model.
    let delta = DeltaConfig {
        key_heads: 8,
        value_heads: 16,
        key_dim: 64,
        value_dim: 64,
        conv_width: 4,
        full_layers: vec![3, 7, 11],
        rotary_dim: 16,
        by_key_head: true,
        log_decay: true,
        norm_offset: 1.0,
    };
    let architecture = Architecture::Qwen3Next;
    let delta = ModelConfig { architecture, delta: Some(delta), ..attention.clone() };
    [attention, delta]
}

/// Twelve layers of Mamba-2 130M, with `state` elements of B and C.
fn recurrent(state: usize) -> ModelConfig {
    let mamba = MambaConfig {
        heads: 24,
        head_dim: 64,
        state,
        groups: 1,
        conv_width: 4,
        conv_bias: true,
        input_bias: false,
        output_bias: false,
        norm: MambaNorm::AfterGate,
        log_decay: true,
    };
    ModelConfig {
        hidden: 768,
        layers: 12,
        vocab: 4096,
        context: CONTEXT,
        norm_eps: 1e-5,
        tied_head: true,
        ..ModelConfig::of_mamba(mamba)
    }
}

fn load(config: &ModelConfig) -> CpuModel {
    let source = Model::random(config.clone(), 1, |name| match name.contains("embed") {
        true => TensorType::Q8_0,
        false => TensorType::Q4_1,
    });
    let options = CpuOptions { threads: 2, limits: LIMITS, kernel: fastest_kernels(), pin: None };
    CpuModel::load(config, &source, &options, &mut |_, _| {}).expect("loads")
}

/// Memory of models, which is zero at the beginning.
struct Pool {
    region: Region,
    layout: KvLayout,
    groups: KvGroups,
    row_pages: usize,
}

impl Pool {
    fn new(config: &ModelConfig) -> Pool {
        let (layers, heads) = (config.layers as u32, config.kv_heads as u32);
        let dim = config.head_dim as u32;
        let (groups, layout) = match config.state_shape() {
            Some(_) => config.kv_memory(PAGE, KvDtype::F16).expect("fits"),
            None => {
                let layout = KvLayout::page_major(PAGE, layers, heads, dim, KvDtype::F16);
                (KvGroups::single(config.layers, None), layout)
            }
        };
        let counts = groups.counts();
        let row_pages = counts.total() * ROW_PAGES + counts.state_pages as usize;
        let bytes = layout.page_stride as usize * ROWS * row_pages;
        Pool { region: Region::new(c"bench", bytes).expect("memory"), layout, groups, row_pages }
    }

    fn kv(&self) -> KvPool<'_> {
        KvPool { region: &self.region, layout: &self.layout, groups: &self.groups }
    }

    /// Rows with `tokens` new tokens after `start` old ones.
    fn batch(&self, rows: usize, tokens: usize, start: usize) -> Batch {
        let mut random = Random(1);
        let mut batch = Batch::new(LIMITS);
        for row in 0..rows {
            let first = row * self.row_pages;
            let pages: Vec<PageId> =
                (first..first + self.row_pages).map(|page| PageId(page as u32)).collect();
            let counts = self.groups.counts();
            let (state, pages) = pages.split_at(counts.state_pages as usize);
            let used = self.layout.pages_for((start + tokens) as u32) as usize;
            let groups = pages.chunks(ROW_PAGES).map(|group| PageSpan::whole(&group[..used]));
            let state = SequenceState::in_place(state, start as u32);
            let ids: Vec<u32> = (0..tokens).map(|_| random.below(4096) as u32).collect();
            let pages = (groups, state);
            batch.push_joined([&ids, &[]], start as u32, pages, Logits::Last).expect("fits");
        }
        batch
    }
}

/// Compares steps of two models, each with a pool.
fn compare(
    name: &str,
    models: &mut [CpuModel; 2],
    pools: [&Pool; 2],
    (rows, tokens, start): (usize, usize, usize),
) {
    let batches = pools.map(|pool| pool.batch(rows, tokens, start));
    let mut turn = || {
        [0, 1].map(|index| {
            let begun = Instant::now();
            let go_on = &mut |_| ControlFlow::Continue(());
            let _ = models[index].step(&batches[index], pools[index].kv(), go_on);
            begun.elapsed().as_secs_f64()
        })
    };
    // The first turn touches the memory.
    turn();
    let turns: Vec<[f64; 2]> = (0..TURNS).map(|_| turn()).collect();
    let sorted = |of: fn(&[f64; 2]) -> f64| {
        let mut values: Vec<f64> = turns.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values
    };
    let ratios = sorted(|[dense, other]| other / dense);
    let [dense, other] = [sorted(|turn| turn[0]), sorted(|turn| turn[1])].map(|v| v[TURNS / 2]);
    println!(
        "{name:<16} {rows} x {tokens:<4} after {start:<4}: {:>9.3} ms, beside \
         {:>9.3} ms: {:.2} ({:.2} to {:.2})",
        other * 1e3,
        dense * 1e3,
        other / dense,
        ratios[TURNS / 4],
        ratios[TURNS * 3 / 4],
    );
}

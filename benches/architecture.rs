//! Steps of an expert model beside a dense one of the same active size, and of window layers beside
//! full ones. The shapes are those of SmolLM2-135M, the weights are random.
//!
//! `cargo bench --bench architecture`. The models of a pair run in turn. Each line has the median
//! steps, and their ratio. The middle half of the ratios of single turns stands behind it.

#[path = "../tests/forward/model.rs"]
#[allow(dead_code)]
mod model;

use baton::ids::PageId;
use baton::kv::groups::KvGroups;
use baton::kv::layout::{KvDtype, KvLayout};
use baton::kv::region::Region;
use baton::model::config::{Architecture, ExpertConfig, ModelConfig, WindowConfig};
use baton::model::forward::batch::{Batch, BatchLimits, Logits};
use baton::model::forward::cpu::{CpuModel, CpuOptions, fastest_kernels};
use baton::model::forward::{Forward, KvPool};
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
    pages: ROWS * ROW_PAGES,
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
    let mut pool = Pool::new(&dense);
    println!("kernel {}, two threads, {TURNS} turns", fastest_kernels());
    for (name, other) in [("4 of 16 experts", &sparse), ("windows of 512", &windowed)] {
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
            pool.compare(name, &mut models, rows, tokens, start);
        }
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

/// KV memory of all models. It is zero at the beginning.
struct Pool {
    region: Region,
    layout: KvLayout,
}

impl Pool {
    fn new(config: &ModelConfig) -> Pool {
        let (layers, heads) = (config.layers as u32, config.kv_heads as u32);
        let dim = config.head_dim as u32;
        let layout = KvLayout::page_major(PAGE, layers, heads, dim, KvDtype::F16);
        let bytes = layout.page_stride as usize * ROWS * ROW_PAGES;
        Pool { region: Region::new(c"bench", bytes).expect("memory"), layout }
    }

    /// Steps of `rows` sequences, each with `tokens` new tokens after `start` old ones.
    fn compare(
        &mut self,
        name: &str,
        models: &mut [CpuModel; 2],
        rows: usize,
        tokens: usize,
        start: usize,
    ) {
        let mut random = Random(1);
        let mut batch = Batch::new(LIMITS);
        for row in 0..rows {
            let pages = (0..self.layout.pages_for((start + tokens) as u32) as usize)
                .map(|page| PageId((row * ROW_PAGES + page) as u32))
                .collect::<Vec<_>>();
            let ids: Vec<u32> = (0..tokens).map(|_| random.below(4096) as u32).collect();
            batch.push(&ids, start as u32, &pages, Logits::Last).expect("fits");
        }
        let groups = KvGroups::single(self.layout.layers as usize, None);
        let kv = KvPool { region: &self.region, layout: &self.layout, groups: &groups };
        let mut turn = || {
            models.each_mut().map(|model| {
                let begun = Instant::now();
                let _ = model.step(&batch, kv, &mut |_| ControlFlow::Continue(()));
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
            "{name:<16} {rows} x {tokens:<4} after {start:<4}: {:>9.3} ms, dense or full \
             {:>9.3} ms: {:.2} ({:.2} to {:.2})",
            other * 1e3,
            dense * 1e3,
            other / dense,
            ratios[TURNS / 4],
            ratios[TURNS * 3 / 4],
        );
    }
}

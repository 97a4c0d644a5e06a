//! Decode and prefill steps of a model with SmolLM2-135M's shapes and types, and random weights.
//!
//! `cargo bench --bench forward [-- FILTER]`; the variables `THREADS` and `KERNEL` select threads
//! and kernel family. One line per case: the median step, tokens per second, and tokens per second
//! of CPU time. On a shared machine, the last one is more reliable.

#[path = "../tests/forward/model.rs"]
#[allow(dead_code)]
mod model;

use baton::ids::PageId;
use baton::kv::groups::KvGroups;
use baton::kv::layout::{KvDtype, KvLayout};
use baton::kv::region::Region;
use baton::model::config::ModelConfig;
use baton::model::forward::batch::{Batch, BatchLimits, Logits};
use baton::model::forward::cpu::{CpuModel, CpuOptions, available_kernels, fastest_kernels};
use baton::model::forward::{Forward, KvPool};
use baton::model::tensor::TensorType;
use model::{Model, Random, small};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

const LIMITS: BatchLimits =
    BatchLimits { tokens: 2048, rows: 32, logits: 32, context: 8192, pages: 32 * 512 };
const PAGE: u32 = 16;

fn main() {
    let filter = std::env::args().nth(1).filter(|arg| !arg.starts_with("--")).unwrap_or_default();
    let threads = std::env::var("THREADS").map_or(2, |n| n.parse().expect("a number"));
    let kernel = std::env::var("KERNEL").map_or_else(
        |_| fastest_kernels(),
        |name| {
            let named = available_kernels().iter().find(|family| family.name() == name);
            *named.expect("a family of this CPU")
        },
    );
    let config = ModelConfig {
        hidden: 576,
        layers: 30,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        intermediate: 1536,
        vocab: 49152,
        context: 8192,
        rope_theta: 1e5,
        ..small()
    };
    let source = Model::random(config.clone(), 1, |name| match name.contains("embed") {
        true => TensorType::Q8_0,
        false => TensorType::Q4_1,
    });
    let options = CpuOptions { threads, limits: LIMITS, kernel, pin: None };
    let start = Instant::now();
    let model = CpuModel::load(&config, &source, &options, &mut |_, _| {}).expect("loads");
    let memory = model.memory_bytes();
    println!(
        "kernel {} threads {threads} load {:.2} s weights {:.1} MiB scratch {:.1} MiB",
        model.kernel_family(),
        start.elapsed().as_secs_f64(),
        memory.weights as f64 / (1 << 20) as f64,
        memory.scratch as f64 / (1 << 20) as f64,
    );
    let layout = KvLayout::page_major(PAGE, 30, 3, 64, KvDtype::F16);
    let pages = 32 * 160;
    let region = Region::new(c"bench", (layout.page_stride * pages) as usize).expect("memory");
    let mut bench = Bench { model, region, layout, filter };
    for rows in [1, 8, 32] {
        for context in [128, 512, 2048] {
            bench.case(&format!("decode batch {rows} context {context}"), rows, 1, context);
        }
    }
    for tokens in [128, 512, 2048] {
        bench.case(&format!("prefill {tokens}"), 1, tokens, 0);
    }
}

struct Bench {
    model: CpuModel,
    region: Region,
    layout: KvLayout,
    filter: String,
}

impl Bench {
    /// `rows` sequences, each with `tokens` new tokens after `start` old ones. The old KV is zero.
    fn case(&mut self, name: &str, rows: usize, tokens: usize, start: usize) {
        if !name.contains(&self.filter) {
            return;
        }
        let mut random = Random(1);
        let mut batch = Batch::new(LIMITS);
        for row in 0..rows as u32 {
            let pages: Vec<PageId> = (0..self.layout.pages_for((start + tokens) as u32))
                .map(|page| PageId(row * 160 + page))
                .collect();
            let ids: Vec<u32> = (0..tokens).map(|_| random.below(49152) as u32).collect();
            batch.push(&ids, start as u32, &pages, Logits::Last).expect("fits");
        }
        let groups = KvGroups::single(self.layout.layers as usize, None);
        let kv = KvPool { region: &self.region, layout: &self.layout, groups: &groups };
        // The first run touches the pages.
        let _ = self.model.step(&batch, kv, &mut |_| ControlFlow::Continue(()));
        let mut times: Vec<Duration> = vec![];
        let (begun, cpu) = (Instant::now(), cpu_seconds());
        while times.len() < 3 || (begun.elapsed() < Duration::from_secs(2) && times.len() < 1000) {
            let start = Instant::now();
            let _ = self.model.step(&batch, kv, &mut |_| ControlFlow::Continue(()));
            times.push(start.elapsed());
        }
        let cpu = (cpu_seconds() - cpu) / times.len() as f64;
        times.sort();
        let median = times[times.len() / 2].as_secs_f64();
        println!(
            "{name:<30} {:>9.3} ms {:>8.1} tok/s {:>8.1} per CPU-s  ({} runs, best {:.3} ms)",
            median * 1e3,
            (rows * tokens) as f64 / median,
            (rows * tokens) as f64 / cpu,
            times.len(),
            times[0].as_secs_f64() * 1e3,
        );
    }
}

/// CPU time of all threads of this process, in seconds.
fn cpu_seconds() -> f64 {
    let tasks = std::fs::read_dir("/proc/self/task").expect("procfs");
    let nanoseconds = tasks.filter_map(|task| {
        let text = std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<f64>().ok()
    });
    nanoseconds.sum::<f64>() / 1e9
}

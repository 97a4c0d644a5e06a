//! Logprobs of real forward passes against an independent float32 implementation (`tools/goldens`),
//! on each kernel family. The test feeds the reference's ids, so that one near tie does not change
//! the rest.

use baton::ids::PageId;
use baton::kv::groups::KvGroups;
use baton::kv::layout::{KvDtype, KvLayout};
use baton::kv::page_span::{PageSpan, SequenceState};
use baton::kv::region::Region;
use baton::model::config::ModelConfig;
use baton::model::files::{ModelFiles, WeightFormat};
use baton::model::forward::batch::{Batch, BatchLimits, Logits};
use baton::model::forward::cpu::{CpuModel, CpuOptions, KernelFamily, available_kernels};
use baton::model::forward::{Forward, KvPool, StepEnd};
use baton::model::tensor::TensorType;
use baton::model::weights::WeightSource;
use serde::Deserialize;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

#[path = "goldens/changes.rs"]
mod changes;

const PAGE_SIZE: u32 = 16;

/// One prompt, the reference's greedy ids, and its logprobs along them.
#[derive(Deserialize)]
struct Case {
    name: String,
    prompt: Vec<u32>,
    ids: Vec<u32>,
    logprobs: Vec<f64>,
    top: Vec<Vec<(u32, f64)>>,
}

impl Case {
    /// What is fed: each position from the prompt's last on predicts one of `ids`.
    fn fed(&self) -> Vec<u32> {
        [&self.prompt[..], &self.ids[..self.ids.len() - 1]].concat()
    }
}

/// What the checkpoint's type allows.
fn tolerance(checkpoint: TensorType) -> f64 {
    match checkpoint {
        TensorType::F32 => 0.005,
        TensorType::F16 | TensorType::Bf16 => 0.1,
        _ => 0.25,
    }
}

/// As `--kv-dtype auto` chooses.
fn kv_dtype(checkpoint: TensorType) -> KvDtype {
    match checkpoint {
        TensorType::F32 => KvDtype::F32,
        _ => KvDtype::F16,
    }
}

/// Natural logarithms of the softmax, in double precision.
fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - max).exp()).sum();
    logits.iter().map(|&logit| f64::from(logit - max) - sum.ln()).collect()
}

/// Logprobs over the vocabulary at each position that predicts one of a case's ids.
fn logprobs(
    model: (&ModelConfig, &dyn WeightSource),
    kernel: KernelFamily,
    kv: KvDtype,
    cases: &[&Case],
) -> Vec<Vec<Vec<f64>>> {
    logprobs_of(model, (kernel, kv), cases, false)
}

/// The same. If the state is lost, a model with state continues behind the prompt with another one:
/// zeros in the first case, and what the case before left in the others.
fn logprobs_of(
    (config, weights): (&ModelConfig, &dyn WeightSource),
    (kernel, kv): (KernelFamily, KvDtype),
    cases: &[&Case],
    is_lost: bool,
) -> Vec<Vec<Vec<f64>>> {
    let longest = cases.iter().map(|case| case.fed().len()).max().unwrap();
    let pages = longest.div_ceil(PAGE_SIZE as usize);
    let logits = cases.iter().map(|case| case.ids.len()).max().unwrap();
    // A page of state holds more than a token.
    let room = 2 * pages + longest;
    let limits = BatchLimits { tokens: longest, rows: 1, logits, context: longest, pages: room };
    let options = CpuOptions { threads: 2, limits, kernel, pin: None };
    let mut model = CpuModel::load(config, weights, &options, &mut |_, _| {}).unwrap();
    let (groups, layout) = match config.state_shape() {
        Some(_) => config.kv_memory(PAGE_SIZE, kv).unwrap(),
        None => {
            let (layers, heads) = (config.layers as u32, config.kv_heads as u32);
            let layout = KvLayout::page_major(PAGE_SIZE, layers, heads, config.head_dim as u32, kv);
            (KvGroups::single(config.layers, None), layout)
        }
    };
    let states = groups.counts().state_pages as usize;
    let all = pages + 2 * states;
    let region = Region::new(c"goldens", layout.page_stride as usize * all).unwrap();
    let all: Vec<PageId> = (0..all as u32).rev().map(PageId).collect();
    let (pages, state_pages) = all.split_at(pages);
    let mut batch = Batch::new(limits);
    let run = |case: &Case| {
        let (fed, last) = (case.fed(), case.prompt.len() - 1);
        let pages = &pages[..fed.len().div_ceil(PAGE_SIZE as usize)];
        for (tokens, wanted) in [(0..last, Logits::None), (last..fed.len(), Logits::All)] {
            if tokens.is_empty() {
                continue;
            }
            batch.clear();
            let start = tokens.start as u32;
            let spans = [PageSpan::whole(pages)].into_iter().take(groups.counts().total());
            let first = if is_lost && start > 0 { states } else { 0 };
            let state = SequenceState::in_place(&state_pages[first..first + states], start);
            let pages = (spans, state);
            batch.push_joined([&fed[tokens], &[]], start, pages, wanted).unwrap();
            let kv = KvPool { region: &region, layout: &layout, groups: &groups };
            let end = model.step(&batch, kv, &mut |_| ControlFlow::Continue(()));
            assert_eq!(end, StepEnd::Complete);
        }
        (0..case.ids.len()).map(|index| log_softmax(model.logits(index))).collect()
    };
    cases.iter().copied().map(run).collect()
}

/// The error that rounding KV to f16 can add to alternatives; the reference does not round. The
/// unit is the distance between the best and the worst token of the position. The value is several
/// half units in the last place.
const F16_KV: f64 = 8.0 / 2048.0;

/// The largest difference, or what is wrong. The ids fed back are held to `tolerance`, and so are
/// the alternatives unless rounded KV allows them a part of the `spread` more.
fn compare(case: &Case, found: &[Vec<f64>], tolerance: f64, of_spread: f64) -> Result<f64, String> {
    assert_eq!(found.len(), case.ids.len());
    let mut worst: f64 = 0.0;
    for (position, row) in found.iter().enumerate() {
        let (least, most) = row
            .iter()
            .fold((0.0f64, f64::NEG_INFINITY), |(least, most), x| (least.min(*x), most.max(*x)));
        let chosen = (case.ids[position], case.logprobs[position]);
        let top = &case.top[position];
        for (index, &(id, expected)) in [chosen].iter().chain(top).enumerate() {
            let difference = (row[id as usize] - expected).abs();
            let allowed = tolerance + if index == 0 { 0.0 } else { of_spread * (most - least) };
            if difference.is_nan() || difference > allowed {
                let found = row[id as usize];
                return Err(format!(
                    "position {position}, id {id}: {found:.6}, expected {expected:.6}"
                ));
            }
            worst = worst.max(difference);
        }
        let best = (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap() as u32;
        if top[0].1 - top[1].1 > tolerance && best != top[0].0 {
            return Err(format!("position {position}: the best is {best}, expected {}", top[0].0));
        }
    }
    Ok(worst)
}

/// All cases of one golden file on every kernel family, with KV of the type that `auto` chooses
/// and, unless `briefly`, unrounded too. Briefly, the slowest family is asked only the shortest
/// case.
fn check(model: &Path, golden: &Path, briefly: bool) {
    let files = ModelFiles::open(model, WeightFormat::Auto).unwrap();
    let mut cases: Vec<Case> =
        serde_json::from_str(&std::fs::read_to_string(golden).unwrap()).unwrap();
    cases.sort_by_key(|case| case.fed().len());
    let tolerance = tolerance(files.checkpoint);
    let mut kinds = vec![kv_dtype(files.checkpoint)];
    if !briefly && !kinds.contains(&KvDtype::F32) {
        kinds.push(KvDtype::F32);
    }
    for &kernel in available_kernels() {
        let count = if briefly && kernel == KernelFamily::Portable { 1 } else { cases.len() };
        let cases: Vec<&Case> = cases.iter().take(count).collect();
        assert!(!cases.is_empty());
        for &kv in &kinds {
            let found = logprobs((&files.config, files.weights.as_ref()), kernel, kv, &cases);
            let mut worst: f64 = 0.0;
            for (case, found) in cases.iter().zip(&found) {
                match compare(case, found, tolerance, if kv == KvDtype::F16 { F16_KV } else { 0.0 })
                {
                    Ok(difference) => worst = worst.max(difference),
                    Err(wrong) => {
                        panic!("{} on {kernel}, KV {kv:?}, {}: {wrong}", model.display(), case.name)
                    }
                }
            }
            let name = model.file_name().unwrap().display();
            eprintln!("{name}: {kernel}, KV {kv:?}: {worst:.5} of {tolerance}");
        }
    }
}

fn tests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests")
}

#[test]
fn each_fixture_agrees_with_the_reference() {
    let mut count = 0;
    for entry in std::fs::read_dir(tests().join("fixtures")).unwrap() {
        let model = entry.unwrap().path();
        let name = model.file_name().unwrap().to_str().unwrap();
        check(&model, &tests().join(format!("goldens/tiny/{name}.json")), false);
        count += 1;
    }
    let goldens = std::fs::read_dir(tests().join("goldens/tiny")).unwrap().count();
    assert_eq!((count, goldens), (49, 49), "a fixture without a golden, or the other way round");
}

/// Checks a published model, unless it is missing and `required` does not name a set variable.
fn check_published(file: &str, golden: &str, fetcher: &str, required: &str) {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache =
        cache.unwrap_or_else(|| PathBuf::from(std::env::var_os("HOME").unwrap()).join(".cache"));
    let model = cache.join("baton").join(file);
    if !model.exists() {
        let required = std::env::var(required).is_ok_and(|value| value == "1");
        assert!(!required, "{} is missing", model.display());
        eprintln!("SKIPPED: {} is missing; {fetcher} fetches it", model.display());
        return;
    }
    check(&model, &tests().join("goldens").join(golden), true);
}

#[test]
fn smollm2_agrees_with_the_reference() {
    let file = "SmolLM2-135M-Instruct.Q4_1.gguf";
    check_published(file, "smollm2-q4_1.json", "tools/quickstart", "BATON_REQUIRE_MODEL");
}

/// Its prompts are longer than its window.
#[test]
fn gemma3_agrees_with_the_reference() {
    let file = "gemma-3-270m.Q4_K_M.gguf";
    check_published(file, "gemma-3-270m.json", "tools/gemma3", "BATON_REQUIRE_GEMMA");
}

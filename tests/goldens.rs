//! Logprobs of real forward passes against an independent float32 implementation (`tools/goldens`),
//! on each kernel family. The test feeds the reference's ids, so that one near tie does not change
//! the rest.

use baton::ids::PageId;
use baton::kv::groups::KvGroups;
use baton::kv::layout::{KvDtype, KvLayout};
use baton::kv::page_span::{PageSpan, SequenceState};
use baton::kv::region::Region;
use baton::model::config::{ExpertConfig, GemmaConfig, ModelConfig, MultiplierConfig};
use baton::model::files::{ModelFiles, WeightFormat};
use baton::model::forward::batch::{Batch, BatchLimits, Logits};
use baton::model::forward::cpu::{
    CpuModel, CpuOptions, KernelFamily, available_kernels, fastest_kernels,
};
use baton::model::forward::{Forward, KvPool, StepEnd};
use baton::model::recurrent_config::MambaNorm;
use baton::model::tensor::{RowOrder, TensorType, TensorView};
use baton::model::weights::{LoadError, WeightSource};
use serde::Deserialize;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

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
    assert_eq!((count, goldens), (48, 48), "a fixture without a golden, or the other way round");
}

/// Weights of which one tensor is zero.
struct Without<'a> {
    weights: &'a dyn WeightSource,
    name: String,
    zeros: Vec<u8>,
}

impl WeightSource for Without<'_> {
    fn tensor(&self, name: &str) -> Result<Option<TensorView<'_>>, LoadError> {
        let found = self.weights.tensor(name)?;
        if name != self.name {
            return Ok(found);
        }
        let TensorView { dtype, rows, cols, .. } = found.expect("the model has the tensor");
        let bytes = &self.zeros[..rows * cols / dtype.block().0 * dtype.block().1];
        Ok(Some(TensorView { dtype, rows, cols, order: RowOrder::Natural, bytes }))
    }

    fn describe(&self) -> String {
        self.weights.describe()
    }
}

/// A small model and its golden.
struct Fixture {
    files: ModelFiles,
    cases: Vec<Case>,
}

impl Fixture {
    fn open(name: &str) -> Fixture {
        let files =
            ModelFiles::open(&tests().join("fixtures").join(name), WeightFormat::Auto).unwrap();
        let golden = tests().join(format!("goldens/tiny/{name}.json"));
        let cases = serde_json::from_str(&std::fs::read_to_string(golden).unwrap()).unwrap();
        Fixture { files, cases }
    }

    /// Whether this configuration and these weights have the results of the golden.
    fn agrees(&self, config: &ModelConfig, weights: &dyn WeightSource) -> bool {
        let cases: Vec<&Case> = self.cases.iter().collect();
        let found = logprobs((config, weights), fastest_kernels(), KvDtype::F32, &cases);
        let tolerance = tolerance(self.files.checkpoint);
        cases.iter().zip(&found).all(|(case, row)| compare(case, row, tolerance, 0.0).is_ok())
    }

    /// Whether the files agree after this change of their configuration.
    fn agrees_with(&self, change: impl FnOnce(&mut ModelConfig)) -> bool {
        let mut config = self.files.config.clone();
        change(&mut config);
        self.agrees(&config, self.files.weights.as_ref())
    }
}

/// Without an expert, the shared expert, or its gate, or with other weights of experts, a fixture
/// does not agree with the reference.
#[test]
fn each_part_of_experts_counts() {
    for name in ["mixtral-f32", "qwen2-moe-f32", "qwen3-moe-f32"] {
        let fixture = Fixture::open(name);
        let (config, weights) = (&fixture.files.config, fixture.files.weights.as_ref());
        assert!(fixture.agrees(config, weights), "{name}");

        let experts = config.experts.as_ref().unwrap();
        let mut parts: Vec<String> =
            (0..experts.count).map(|expert| format!("experts.{expert}.down_proj")).collect();
        parts.push("gate".into());
        if experts.shared_intermediate.is_some() {
            parts.extend(["shared_expert.down_proj".into(), "shared_expert_gate".into()]);
        }
        for layer in (0..config.layers).filter(|&layer| config.layer_experts(layer).is_some()) {
            for part in &parts {
                let name = format!("model.layers.{layer}.mlp.{part}.weight");
                let without = Without { weights, name, zeros: vec![0; 1 << 16] };
                assert!(!fixture.agrees(config, &without), "{}", without.name);
            }
        }
        let other = |change: &dyn Fn(&mut ExpertConfig)| {
            let agrees = fixture.agrees_with(|config| change(config.experts.as_mut().unwrap()));
            assert!(!agrees, "{name}");
        };
        other(&|experts| experts.normalised ^= true);
        other(&|experts| experts.used += 1);
        other(&|experts| experts.used -= 1);
    }
}

/// With another window, or with the window in other layers, a fixture does not agree.
#[test]
fn each_window_counts() {
    for name in ["mistral-f32", "qwen3-window-f32", "gemma3-f32"] {
        let fixture = Fixture::open(name);
        assert!(fixture.agrees_with(|_| {}), "{name}");
        let changes: [fn(&mut ModelConfig); 4] = [
            |config| config.window = None,
            |config| config.window.as_mut().unwrap().tokens += 1,
            |config| config.window.as_mut().unwrap().tokens -= 1,
            |config| {
                let layers = 0..config.layers;
                let full = &mut config.window.as_mut().unwrap().full_layers;
                let other = layers.filter(|layer| !full.contains(layer)).skip(1).collect();
                *full = other;
            },
        ];
        for (index, change) in changes.into_iter().enumerate() {
            assert!(!fixture.agrees_with(change), "{name}, change {index}");
        }
    }
}

/// Without its state, or one of its tensors, a recurrent fixture does not agree.
#[test]
fn each_part_of_recurrent_layers_counts() {
    for name in ["mamba2-f32", "mamba2-odd-f32", "mamba2.F32.gguf", "falcon-h1-norm-f32"] {
        let fixture = Fixture::open(name);
        let (config, weights) = (&fixture.files.config, fixture.files.weights.as_ref());
        assert!(fixture.agrees(config, weights), "{name}");
        let cases: Vec<&Case> = fixture.cases.iter().filter(|case| case.prompt.len() > 1).collect();
        let how = (fastest_kernels(), KvDtype::F32);
        let lost = logprobs_of((config, weights), how, &cases, true);
        for (case, found) in cases.iter().zip(&lost) {
            assert!(compare(case, found, 0.005, 0.0).is_err(), "{name}: the state is lost");
        }
        let mamba = config.mamba.as_ref().unwrap();
        let has_bias = [
            ("in_proj.bias", mamba.input_bias),
            ("out_proj.bias", mamba.output_bias),
            ("conv1d.bias", mamba.conv_bias),
        ];
        let biases = has_bias.into_iter().filter(|(_, is_there)| *is_there).map(|(part, _)| part);
        let others = ["in_proj.weight", "out_proj.weight", "conv1d.weight", "dt_bias", "A_log"];
        let parts = biases.chain(others).chain(["D", "norm.weight"]);
        for (layer, part) in parts.flat_map(|part| (0..config.layers).map(move |at| (at, part))) {
            let name = format!("model.layers.{layer}.mamba.{part}");
            let without = Without { weights, name, zeros: vec![0; 1 << 17] };
            assert!(!fixture.agrees(config, &without), "{}", without.name);
        }
        if !mamba.log_decay {
            let log = |config: &mut ModelConfig| config.mamba.as_mut().unwrap().log_decay = true;
            assert!(!fixture.agrees_with(log), "{name}");
        }
    }
}

/// Without its state or one of its tensors, or with another rotation, a gated delta net does not
/// agree.
#[test]
fn each_part_of_delta_nets_counts() {
    let fixture = Fixture::open("qwen3-next-f32");
    let (config, weights) = (&fixture.files.config, fixture.files.weights.as_ref());
    assert!(fixture.agrees(config, weights));
    let cases: Vec<&Case> = fixture.cases.iter().filter(|case| case.prompt.len() > 1).collect();
    let how = (fastest_kernels(), KvDtype::F32);
    let lost = logprobs_of((config, weights), how, &cases, true);
    for (case, found) in cases.iter().zip(&lost) {
        assert!(compare(case, found, 0.005, 0.0).is_err(), "the state is lost");
    }
    let parts = [
        "in_proj_qkvz.weight",
        "in_proj_ba.weight",
        "conv1d.weight",
        "dt_bias",
        "A_log",
        "norm.weight",
        "out_proj.weight",
    ];
    let without = |name: String| Without { weights, name, zeros: vec![0; 1 << 17] };
    for layer in (0..config.layers).filter(|&layer| config.has_state(layer)) {
        for part in parts {
            let without = without(format!("model.layers.{layer}.linear_attn.{part}"));
            assert!(!fixture.agrees(config, &without), "{}", without.name);
        }
    }
    for part in ["q_proj", "k_proj", "v_proj", "o_proj"] {
        let without = without(format!("model.layers.3.self_attn.{part}.weight"));
        assert!(!fixture.agrees(config, &without), "{}", without.name);
    }
    let whole = |config: &mut ModelConfig| config.delta.as_mut().unwrap().rotary_dim = 32;
    assert!(!fixture.agrees_with(whole), "all of each head is rotated");
}

/// With another multiplier, a fixture of Falcon-H1 does not agree. So do other places of its norm.
#[test]
fn each_multiplier_of_falcon_counts() {
    let fixture = Fixture::open("falcon-h1-f32");
    assert!(fixture.agrees_with(|_| {}));
    let changes: [fn(&mut MultiplierConfig); 14] = [
        |all| all.embedding = 1.0,
        |all| all.head = 1.0,
        |all| all.attention_in = 1.0,
        |all| all.attention_out = 1.0,
        |all| all.key = 1.0,
        |all| all.ssm_in = 1.0,
        |all| all.ssm_out = 1.0,
        |all| all.gate = 1.0,
        |all| all.down = 1.0,
        |all| all.ssm[0] = 1.0,
        |all| all.ssm[1] = 1.0,
        |all| all.ssm[2] = 1.0,
        |all| all.ssm[3] = 1.0,
        |all| all.ssm[4] = 1.0,
    ];
    for (index, change) in changes.into_iter().enumerate() {
        let agrees = fixture.agrees_with(|config| change(config.multipliers.as_mut().unwrap()));
        assert!(!agrees, "multiplier {index}");
    }
    let fixture = Fixture::open("falcon-h1-norm-f32");
    for norm in [MambaNorm::None, MambaNorm::AfterGate] {
        let agrees = fixture.agrees_with(|config| config.mamba.as_mut().unwrap().norm = norm);
        assert!(!agrees, "{norm:?}");
    }
}

/// Without one of Gemma's formulas, or one of its norms, a fixture does not agree.
#[test]
fn each_formula_of_gemma_counts() {
    let fixture = Fixture::open("gemma3-f32");
    let changes: [fn(&mut GemmaConfig); 4] = [
        |gemma| gemma.query_scalar = 16.0,
        |gemma| gemma.window_rope_theta = 1e6,
        |gemma| gemma.norm_offset = 0.0,
        |gemma| gemma.logit_cap = None,
    ];
    for (index, change) in changes.into_iter().enumerate() {
        let agrees = fixture.agrees_with(|config| change(config.gemma.as_mut().unwrap()));
        assert!(!agrees, "change {index}");
    }
    assert!(!fixture.agrees_with(|config| config.rope_theta = 1e4));
    let (config, weights) = (&fixture.files.config, fixture.files.weights.as_ref());
    for layer in 0..config.layers {
        for part in ["post_attention", "pre_feedforward", "post_feedforward"] {
            let name = format!("model.layers.{layer}.{part}_layernorm.weight");
            let without = Without { weights, name, zeros: vec![0; 1 << 10] };
            assert!(!fixture.agrees(config, &without), "{}", without.name);
        }
    }
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

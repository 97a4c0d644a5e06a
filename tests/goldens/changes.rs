//! How much each part of a model changes its log-probabilities. A part that can be left out without
//! a difference is not tested by the golden files. `docs/internals/goldens.md` has the table;
//! `BATON_WRITE_DOCS=1` writes it again.

use crate::{Case, logprobs_of, tests, tolerance};
use baton::kv::layout::KvDtype;
use baton::model::config::{ExpertConfig, GemmaConfig, ModelConfig, MultiplierConfig};
use baton::model::files::{ModelFiles, WeightFormat};
use baton::model::forward::cpu::fastest_kernels;
use baton::model::recurrent_config::MambaNorm;
use baton::model::tensor::TensorView;
use baton::model::weights::{LoadError, WeightSource};
use std::fmt::Write;
use std::path::Path;

const PAGE: &str = "docs/internals/goldens.md";

/// Weights of which some rows of one tensor are zero.
struct Without<'a> {
    weights: &'a dyn WeightSource,
    name: String,
    bytes: Vec<u8>,
}

impl<'a> Without<'a> {
    /// `rows` says which rows become zeros.
    fn new(
        weights: &'a dyn WeightSource,
        name: String,
        rows: impl Fn(usize) -> bool,
    ) -> Without<'a> {
        let view = weights.tensor(&name).unwrap().unwrap_or_else(|| panic!("no {name}"));
        let mut bytes = view.bytes.to_vec();
        let per_row = bytes.len() / view.rows;
        for row in (0..view.rows).filter(|row| rows(*row)) {
            bytes[row * per_row..(row + 1) * per_row].fill(0);
        }
        Without { weights, name, bytes }
    }
}

impl WeightSource for Without<'_> {
    fn tensor(&self, name: &str) -> Result<Option<TensorView<'_>>, LoadError> {
        let found = self.weights.tensor(name)?;
        if name != self.name {
            return Ok(found);
        }
        Ok(found.map(|view| TensorView { bytes: &self.bytes, ..view }))
    }

    fn describe(&self) -> String {
        self.weights.describe()
    }
}

/// A change of a model, and the largest difference that it makes.
struct Change {
    model: &'static str,
    part: String,
    difference: f64,
    /// What the golden of the model allows.
    tolerance: f64,
}

/// The name of a change, and the change of a part of the configuration.
type Named<Part> = (&'static str, fn(&mut Part));

/// A small model and its golden.
struct Fixture {
    name: &'static str,
    files: ModelFiles,
    cases: Vec<Case>,
    changes: Vec<Change>,
}

impl Fixture {
    fn open(name: &'static str) -> Fixture {
        let files =
            ModelFiles::open(&tests().join("fixtures").join(name), WeightFormat::Auto).unwrap();
        let golden = tests().join(format!("goldens/tiny/{name}.json"));
        let cases = serde_json::from_str(&std::fs::read_to_string(golden).unwrap()).unwrap();
        let fixture = Fixture { name, files, cases, changes: Vec::new() };
        let agreement = fixture.difference(&fixture.files.config, fixture.weights());
        assert!(agreement <= tolerance(fixture.files.checkpoint), "{name}");
        fixture
    }

    fn weights(&self) -> &dyn WeightSource {
        self.files.weights.as_ref()
    }

    /// The largest difference from a log-probability of the golden.
    fn difference(&self, config: &ModelConfig, weights: &dyn WeightSource) -> f64 {
        let cases: Vec<&Case> = self.cases.iter().collect();
        let how = (fastest_kernels(), KvDtype::F32);
        let found = logprobs_of((config, weights), how, &cases, false);
        cases.iter().zip(&found).map(|(case, rows)| farthest(case, rows)).fold(0.0, f64::max)
    }

    /// Adds a change of the configuration.
    fn change(&mut self, part: &str, change: impl FnOnce(&mut ModelConfig)) {
        let mut config = self.files.config.clone();
        change(&mut config);
        let difference = self.difference(&config, self.weights());
        self.add(part, difference);
    }

    /// Adds a part without which the model is tried: a tensor of these layers, each in its turn.
    fn without(&mut self, part: &str, layers: impl IntoIterator<Item = usize>) {
        self.without_rows((&format!("`{part}`"), part), layers, |_| true);
    }

    /// The same of some rows of a tensor. `what` is the name in the table.
    fn without_rows(
        &mut self,
        (what, part): (&str, &str),
        layers: impl IntoIterator<Item = usize>,
        rows: impl Fn(usize) -> bool,
    ) {
        for layer in layers {
            let name = format!("model.layers.{layer}.{part}");
            let without = Without::new(self.weights(), name, &rows);
            let difference = self.difference(&self.files.config, &without);
            self.add(&format!("{what} zero"), difference);
        }
    }

    /// The state behind the prompt is another one.
    fn without_state(&mut self) {
        let cases: Vec<&Case> = self.cases.iter().filter(|case| case.prompt.len() > 1).collect();
        let how = (fastest_kernels(), KvDtype::F32);
        let found = logprobs_of((&self.files.config, self.weights()), how, &cases, true);
        let differences = cases.iter().zip(&found).map(|(case, rows)| farthest(case, rows));
        let least = differences.fold(f64::INFINITY, f64::min);
        self.add("the state is lost", least);
    }

    fn add(&mut self, part: &str, difference: f64) {
        let tolerance = tolerance(self.files.checkpoint);
        self.changes.push(Change { model: self.name, part: part.into(), difference, tolerance });
    }
}

fn farthest(case: &Case, found: &[Vec<f64>]) -> f64 {
    let mut farthest: f64 = 0.0;
    for (position, row) in found.iter().enumerate() {
        let chosen = (case.ids[position], case.logprobs[position]);
        for &(id, expected) in [chosen].iter().chain(&case.top[position]) {
            let difference = (row[id as usize] - expected).abs();
            farthest = if difference.is_nan() { f64::INFINITY } else { farthest.max(difference) };
        }
    }
    farthest
}

fn experts() -> Vec<Change> {
    let of = |name| {
        let mut fixture = Fixture::open(name);
        let config = fixture.files.config.clone();
        let experts = config.experts.as_ref().unwrap();
        let layers = (0..config.layers).filter(|&layer| config.layer_experts(layer).is_some());
        for expert in 0..experts.count {
            let part = format!("mlp.experts.{expert}.down_proj.weight");
            let what = ("`mlp.experts.N.down_proj.weight`", &*part);
            fixture.without_rows(what, layers.clone(), |_| true);
        }
        fixture.without("mlp.gate.weight", layers.clone());
        if experts.shared_intermediate.is_some() {
            fixture.without("mlp.shared_expert.down_proj.weight", layers.clone());
            fixture.without("mlp.shared_expert_gate.weight", layers);
        }
        let mut other = |part: &str, change: &dyn Fn(&mut ExpertConfig)| {
            fixture.change(part, |config| change(config.experts.as_mut().unwrap()));
        };
        other("weights of experts: normalised or not", &|experts| experts.normalised ^= true);
        other("one more expert for each token", &|experts| experts.used += 1);
        other("one expert less for each token", &|experts| experts.used -= 1);
        fixture.changes
    };
    ["mixtral-f32", "qwen2-moe-f32", "qwen3-moe-f32", "qwen3-next-f32"]
        .into_iter()
        .flat_map(of)
        .collect()
}

fn windows() -> Vec<Change> {
    let of = |name| {
        let mut fixture = Fixture::open(name);
        fixture.change("no window", |config| config.window = None);
        fixture.change("a window of one token more", |config| {
            config.window.as_mut().unwrap().tokens += 1;
        });
        fixture.change("a window of one token less", |config| {
            config.window.as_mut().unwrap().tokens -= 1;
        });
        fixture.change("the window in other layers", |config| {
            let layers = 0..config.layers;
            let full = &mut config.window.as_mut().unwrap().full_layers;
            let other = layers.filter(|layer| !full.contains(layer)).skip(1).collect();
            *full = other;
        });
        fixture.changes
    };
    ["mistral-f32", "qwen3-window-f32", "gemma3-f32"].into_iter().flat_map(of).collect()
}

fn mamba() -> Vec<Change> {
    let of = |name| {
        let mut fixture = Fixture::open(name);
        fixture.without_state();
        let config = fixture.files.config.clone();
        let mamba = config.mamba.as_ref().unwrap();
        let has_norm = mamba.norm != MambaNorm::None;
        let optional = [
            ("mamba.in_proj.bias", mamba.input_bias),
            ("mamba.out_proj.bias", mamba.output_bias),
            ("mamba.conv1d.bias", mamba.conv_bias),
            ("mamba.norm.weight", has_norm),
        ];
        let others =
            ["in_proj.weight", "out_proj.weight", "conv1d.weight", "dt_bias", "A_log", "D"];
        for part in others {
            fixture.without(&format!("mamba.{part}"), 0..config.layers);
        }
        for (part, _) in optional.into_iter().filter(|(_, is_there)| *is_there) {
            fixture.without(part, 0..config.layers);
        }
        if !mamba.log_decay {
            let change = |config: &mut ModelConfig| config.mamba.as_mut().unwrap().log_decay = true;
            fixture.change("`A` is taken for `ln(-A)`", change);
        }
        fixture.changes
    };
    [
        "mamba2-f32",
        "mamba2-odd-f32",
        "mamba2.F32.gguf",
        "falcon-h1-f32",
        "falcon-h1-norm-f32",
        "falcon-h1.F32.gguf",
        "falcon-h1-after.Q8_0.gguf",
    ]
    .into_iter()
    .flat_map(of)
    .collect()
}

fn delta_nets() -> Vec<Change> {
    let of = |(name, projections): (_, &[&str])| {
        let mut fixture = Fixture::open(name);
        fixture.without_state();
        let config = fixture.files.config.clone();
        let layers = (0..config.layers).filter(|&layer| config.has_state(layer));
        let others = ["in_proj_ba.weight", "conv1d.weight", "dt_bias", "A_log", "norm.weight"];
        for part in projections.iter().chain(&others).chain(&["out_proj.weight"]) {
            fixture.without(&format!("linear_attn.{part}"), layers.clone());
        }
        // Heads have 32 rows of q, then as many of the gate.
        let query = "self_attn.q_proj.weight";
        fixture.without_rows(("queries in `self_attn.q_proj.weight`", query), [3], is_query);
        let gate = ("gate in `self_attn.q_proj.weight`", query);
        fixture.without_rows(gate, [3], |row| !is_query(row));
        for part in ["k_proj", "v_proj", "o_proj"] {
            fixture.without(&format!("self_attn.{part}.weight"), [3]);
        }
        if !config.delta.as_ref().unwrap().log_decay {
            let change = |config: &mut ModelConfig| config.delta.as_mut().unwrap().log_decay = true;
            fixture.change("`A` is taken for `ln(-A)`", change);
        }
        fixture.change("norms have 1 more or less", |config| {
            let delta = config.delta.as_mut().unwrap();
            delta.norm_offset = 1.0 - delta.norm_offset;
        });
        fixture.change("all of each head is rotated", |config| {
            config.delta.as_mut().unwrap().rotary_dim = 32;
        });
        fixture.changes
    };
    let of_file: &[&str] = &["in_proj_qkv.weight", "in_proj_z.weight"];
    let whole = &["in_proj_qkvz.weight"][..];
    [("qwen3-next-f32", whole), ("qwen3-next.F32.gguf", of_file), ("qwen3-next.Q8_0.gguf", whole)]
        .into_iter()
        .flat_map(of)
        .collect()
}

fn is_query(row: usize) -> bool {
    (row / 32).is_multiple_of(2)
}

fn falcon() -> Vec<Change> {
    let mut fixture = Fixture::open("falcon-h1-f32");
    let changes: [Named<MultiplierConfig>; 14] = [
        ("embedding", |all| all.embedding = 1.0),
        ("head", |all| all.head = 1.0),
        ("attention_in", |all| all.attention_in = 1.0),
        ("attention_out", |all| all.attention_out = 1.0),
        ("key", |all| all.key = 1.0),
        ("ssm_in", |all| all.ssm_in = 1.0),
        ("ssm_out", |all| all.ssm_out = 1.0),
        ("gate", |all| all.gate = 1.0),
        ("down", |all| all.down = 1.0),
        ("ssm of the gate", |all| all.ssm[0] = 1.0),
        ("ssm of x", |all| all.ssm[1] = 1.0),
        ("ssm of B", |all| all.ssm[2] = 1.0),
        ("ssm of C", |all| all.ssm[3] = 1.0),
        ("ssm of the time step", |all| all.ssm[4] = 1.0),
    ];
    for (part, change) in changes {
        fixture.change(&format!("multiplier 1: {part}"), |config| {
            change(config.multipliers.as_mut().unwrap());
        });
    }
    let mut normed = Fixture::open("falcon-h1-norm-f32");
    for norm in [MambaNorm::None, MambaNorm::AfterGate] {
        normed.change(&format!("norm: {norm:?}"), |config| {
            config.mamba.as_mut().unwrap().norm = norm;
        });
    }
    fixture.changes.into_iter().chain(normed.changes).collect()
}

fn gemma() -> Vec<Change> {
    let mut fixture = Fixture::open("gemma3-f32");
    let changes: [Named<GemmaConfig>; 4] = [
        ("scale of queries: 16", |gemma| gemma.query_scalar = 16.0),
        ("base of rotation in layers with a window: 1e6", |gemma| gemma.window_rope_theta = 1e6),
        ("norms lack nothing", |gemma| gemma.norm_offset = 0.0),
        ("no cap of logits", |gemma| gemma.logit_cap = None),
    ];
    for (part, change) in changes {
        fixture.change(part, |config| change(config.gemma.as_mut().unwrap()));
    }
    fixture.change("base of rotation in full layers: 1e4", |config| config.rope_theta = 1e4);
    for part in ["post_attention", "pre_feedforward", "post_feedforward"] {
        let layers = 0..fixture.files.config.layers;
        fixture.without(&format!("{part}_layernorm.weight"), layers);
    }
    fixture.changes
}

/// The least change of each part of each model. A part has a change for each layer or expert.
fn least(changes: Vec<Change>) -> Vec<Change> {
    let mut least: Vec<Change> = Vec::new();
    for change in changes {
        let same = |known: &&mut Change| known.model == change.model && known.part == change.part;
        match least.iter_mut().find(same) {
            Some(known) => known.difference = known.difference.min(change.difference),
            None => least.push(change),
        }
    }
    least
}

const HEAD: &str = "\
# How much each part of a model counts

Each row changes one part of a small random model of `tests/fixtures`. The figure is the largest
difference from a log-probability of its golden file. A part can be in several layers, or in several
experts. Then one of them is changed at a time, and the row has the least figure. The row of a lost
state has the least figure of the prompts. Without a change, the difference is at most 0.005 (F32)
or 0.25 (Q8_0).

`goldens::changes::each_part_of_a_model_counts` checks the table.

| Model | Change | Difference |
|---|---|---|
";

/// The figure of a row of the page.
fn told(page: &str, row: &str) -> Option<f64> {
    page.lines().find_map(|line| line.strip_prefix(row)?.strip_suffix(" |")?.trim().parse().ok())
}

#[test]
fn each_part_of_a_model_counts() {
    let parts = [experts(), windows(), mamba(), delta_nets(), falcon(), gemma()];
    let changes = least(parts.into_iter().flatten().collect());
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(PAGE);
    let mut page = HEAD.to_owned();
    let known = std::fs::read_to_string(&path).unwrap_or_default();
    for Change { model, part, difference, tolerance } in &changes {
        assert!(*difference > 10.0 * tolerance, "{model}, {part}: {difference}");
        let row = format!("| {model} | {part} |");
        // Kernels differ in the last digits.
        let figure = told(&known, &row).filter(|told| (told / difference - 1.0).abs() < 0.1);
        writeln!(page, "{row} {:.2} |", figure.unwrap_or(*difference)).unwrap();
    }
    if std::env::var_os("BATON_WRITE_DOCS").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    let known = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(known, page, "BATON_WRITE_DOCS=1 writes {PAGE} again");
}

//! The CPU forward pass against a plain one in double precision, and against itself with every
//! division of the same work.
#![allow(unsafe_code)]

mod model;
mod recurrent;
mod reference;
#[allow(dead_code)]
mod run;

use baton::kv::layout::KvDtype;
use baton::model::config::{Architecture, ExpertConfig, ModelConfig, RopeScaling, WindowConfig};
use baton::model::forward::StepEnd;
use baton::model::forward::batch::Logits;
use baton::model::forward::cpu::{
    CpuModel, CpuOptions, KernelFamily, available_kernels, fastest_kernels,
};
use baton::model::tensor::{RowOrder, TensorType};
use model::{Model, Random, delta, gemma, hybrid, recurrent, small, sparse};
use run::{How, LIMITS, Runner, bits};
use std::iter;

fn how(kernel: KernelFamily) -> How {
    How { kernel, threads: 2, page_size: 16, kv: KvDtype::F32, is_grouped: false, order: 1 }
}

fn some_tokens(count: usize, vocab: usize) -> Vec<u32> {
    let mut random = Random(7);
    (0..count).map(|_| random.below(vocab) as u32).collect()
}

/// The largest difference to the reference over all positions, on every family.
fn worst(model: &Model, count: usize, kv: KvDtype) -> f64 {
    let tokens = some_tokens(count, model.config.vocab);
    let expected = reference::logits(model, &tokens, kv);
    let spread = expected.iter().flatten().fold(0.0f64, |a, b| a.max(b.abs()));
    assert!(spread > 0.5, "logits too small to tell anything: {spread}");
    let mut worst: f64 = 0.0;
    for kernel in available_kernels() {
        let mut runner = Runner::new(model, &How { kv, ..how(*kernel) });
        let found = runner.logits(&tokens, 64);
        for (expected, found) in expected.iter().zip(&found) {
            for (a, b) in expected.iter().zip(found) {
                assert!(b.is_finite());
                worst = worst.max((a - *b as f64).abs());
            }
        }
    }
    worst
}

fn f32_model(config: ModelConfig) -> Model {
    Model::random(config, 3, |_| TensorType::F32)
}

#[test]
fn each_architecture_agrees_with_the_reference() {
    for architecture in [Architecture::Llama, Architecture::Qwen2, Architecture::Qwen3] {
        for biases in 0..8 {
            let config = ModelConfig {
                architecture,
                attention_bias: biases & 1 != 0,
                output_bias: biases & 2 != 0,
                mlp_bias: biases & 4 != 0,
                tied_head: biases % 2 == 0,
                ..small()
            };
            let worst = worst(&f32_model(config), 20, KvDtype::F32);
            assert!(worst < 1e-3, "{architecture:?} biases {biases}: {worst}");
        }
    }
}

fn with_experts(change: impl FnOnce(&mut ExpertConfig)) -> ModelConfig {
    let mut config = sparse();
    change(config.experts.as_mut().unwrap());
    config
}

#[test]
fn each_kind_of_experts_agrees_with_the_reference() {
    for config in [
        ModelConfig { architecture: Architecture::Mixtral, ..sparse() },
        with_experts(|experts| experts.normalised = false),
        ModelConfig { layers: 4, ..with_experts(|experts| experts.dense_layers = vec![0, 2]) },
        ModelConfig {
            architecture: Architecture::Qwen2Moe,
            attention_bias: true,
            ..with_experts(|experts| {
                (experts.shared_intermediate, experts.normalised) = (Some(80), false);
            })
        },
        // All experts, one expert, and more than a vector of them.
        with_experts(|experts| experts.used = 7),
        with_experts(|experts| experts.used = 1),
        with_experts(|experts| (experts.count, experts.used) = (37, 8)),
        ModelConfig { hidden: 60, ..with_experts(|experts| experts.intermediate = 50) },
        with_experts(|experts| experts.dense_layers = vec![0, 1]),
    ] {
        let worst = worst(&f32_model(config.clone()), 33, KvDtype::F32);
        assert!(worst < 1e-3, "{config:?}: {worst}");
    }
}

/// All experts run here, because a rounded router can choose others than the reference.
#[test]
fn experts_of_each_weight_type_agree_with_the_reference() {
    use TensorType::*;
    for (dtype, tolerance) in [(F16, 1e-3), (Bf16, 1e-3), (Q8_0, 0.1), (Q4_1, 0.1), (Q6_K, 0.25)] {
        let experts = with_experts(|experts| {
            (experts.used, experts.intermediate) = (7, 256);
            experts.shared_intermediate = Some(256);
        });
        let config = ModelConfig { hidden: 256, heads: 4, head_dim: 64, ..experts };
        let model = Model::random(config, 5, |name| match name.contains("mlp.gate.") {
            true => F32,
            false => dtype,
        });
        let worst = worst(&model, 12, KvDtype::F32);
        assert!(worst < tolerance, "{dtype:?}: {worst}");
    }
}

/// Of equal logits, the router takes the first ones. The other experts are not read.
#[test]
fn only_chosen_experts_count() {
    let mut model = f32_model(sparse());
    model.scale("mlp.gate.weight", 0.0);
    let logits = |model: &Model| {
        let mut runner = Runner::new(model, &how(fastest_kernels()));
        bits(&runner.logits(&some_tokens(40, 100), 16))
    };
    let expected = logits(&model);
    for unused in 3..7 {
        model.scale(&format!("mlp.experts.{unused}."), f32::NAN);
    }
    assert!(logits(&model) == expected);
    model.scale("mlp.experts.2.down_proj", 0.5);
    assert!(logits(&model) != expected);
}

#[test]
fn each_shape_of_heads_agrees_with_the_reference() {
    for (heads, kv_heads, head_dim) in [
        (4, 4, 16),
        (4, 1, 16),
        (6, 2, 8),
        (3, 1, 24),
        (2, 1, 64),
        (9, 3, 64),
        (5, 5, 80),
        (2, 2, 128),
        (71, 1, 2),
    ] {
        let config =
            ModelConfig { heads, kv_heads, head_dim, hidden: 60, intermediate: 50, ..small() };
        let worst = worst(&f32_model(config), 33, KvDtype::F32);
        assert!(worst < 1e-3, "{heads} / {kv_heads} heads of {head_dim}: {worst}");
    }
}

#[test]
fn each_rope_scaling_agrees_with_the_reference() {
    for rope_scaling in [
        RopeScaling::Linear { factor: 4.0 },
        RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 64,
        },
        RopeScaling::Yarn {
            factor: 4.0,
            original_context: 64,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: None,
        },
        RopeScaling::Yarn {
            factor: 2.0,
            original_context: 128,
            beta_fast: 16.0,
            beta_slow: 1.0,
            attention_factor: Some(1.3),
        },
    ] {
        let config = ModelConfig { rope_scaling, head_dim: 32, ..small() };
        let worst = worst(&f32_model(config), 60, KvDtype::F32);
        assert!(worst < 1e-3, "{rope_scaling:?}: {worst}");
    }
}

#[test]
fn each_weight_type_agrees_with_the_reference() {
    use TensorType::*;
    for (dtype, tolerance) in [
        (F32, 1e-3),
        (F16, 1e-3),
        (Bf16, 1e-3),
        (Q8_0, 0.1),
        (Q4_0, 0.1),
        (Q4_1, 0.1),
        (Q5_0, 0.1),
        (Q5_1, 0.1),
        // Scales and minima are drawn apart: weights far from centred, and larger errors.
        (Q4_K, 0.25),
        (Q5_K, 0.25),
        (Q6_K, 0.25),
    ] {
        let config =
            ModelConfig { hidden: 256, heads: 4, head_dim: 64, intermediate: 256, ..small() };
        let worst = worst(&Model::random(config, 5, |_| dtype), 12, KvDtype::F32);
        assert!(worst < tolerance, "{dtype:?}: {worst}");
    }
}

#[test]
fn mixed_types_and_permuted_rows_agree_with_the_reference() {
    let config = ModelConfig { hidden: 256, heads: 8, head_dim: 32, tied_head: false, ..small() };
    let mut model = Model::random(config, 6, |name| match name {
        n if n.contains("embed") => TensorType::Q5_0,
        n if n.contains("lm_head") => TensorType::Q8_0,
        n if n.contains("v_proj") => TensorType::F16,
        n if n.contains("k_proj") => TensorType::Q6_K,
        n if n.contains("up_proj") => TensorType::F32,
        _ => TensorType::Q4_1,
    });
    for (name, tensor) in &mut model.tensors {
        if name.contains("q_proj") || name.contains("k_proj") {
            tensor.order = RowOrder::RopeInterleaved { head_dim: 32 };
        }
    }
    let worst = worst(&model, 20, KvDtype::F32);
    assert!(worst < 0.1, "{worst}");
}

#[test]
fn each_kv_type_agrees_with_the_reference() {
    for (kv, tolerance) in [(KvDtype::F32, 1e-3), (KvDtype::F16, 5e-3), (KvDtype::Bf16, 4e-2)] {
        let worst = worst(&f32_model(small()), 40, kv);
        assert!(worst < tolerance, "{kv:?}: {worst}");
    }
}

#[test]
fn a_long_context_agrees_with_the_reference() {
    // Several segments of attention, the last one cut.
    let worst = worst(&f32_model(small()), 600, KvDtype::F32);
    assert!(worst < 1e-3, "{worst}");
}

fn windowed(tokens: u32, full_layers: &[usize]) -> ModelConfig {
    let window = WindowConfig { tokens, full_layers: full_layers.to_vec() };
    ModelConfig { window: Some(window), ..small() }
}

#[test]
fn windows_agree_with_the_reference() {
    // Windows that end inside a vector, a tile and a segment of attention, and at their borders.
    for (tokens, full_layers) in [
        (1, &[][..]),
        (5, &[1]),
        (16, &[]),
        (63, &[0]),
        (64, &[]),
        (256, &[]),
        (299, &[]),
        (300, &[]),
    ] {
        let worst = worst(&f32_model(windowed(tokens, full_layers)), 300, KvDtype::F32);
        assert!(worst < 1e-3, "a window of {tokens}: {worst}");
    }
}

#[test]
fn gemma_agrees_with_the_reference() {
    let model = f32_model(gemma());
    let worst_of = worst(&model, 150, KvDtype::F32);
    assert!(worst_of < 1e-3, "{worst_of}");
    // A head that is wider than the model, as in the smallest Gemma 3.
    let one_head = ModelConfig { heads: 4, kv_heads: 1, head_dim: 96, window: None, ..gemma() };
    let worst_of = worst(&f32_model(one_head), 70, KvDtype::F32);
    assert!(worst_of < 1e-3, "{worst_of}");
}

/// Pages behind the window belong to other requests.
#[test]
fn tokens_behind_the_window_can_have_any_bytes() {
    const WINDOW: u32 = 70;
    let model = f32_model(windowed(WINDOW, &[]));
    let tokens = some_tokens(420, model.config.vocab);
    for kernel in available_kernels() {
        for kv in [KvDtype::F32, KvDtype::F16, KvDtype::Bf16] {
            let run = |is_overwritten: bool| {
                let mut runner = Runner::new(&model, &How { kv, ..how(*kernel) });
                let mut sequence = runner.sequence(&tokens);
                let mut found = vec![];
                for count in [300, 1, 40, 1, 78] {
                    let next = sequence.done as u32;
                    if is_overwritten {
                        runner.overwrite(&sequence, 0..(next + 1).saturating_sub(WINDOW));
                    }
                    runner.push(&mut sequence, count, Logits::All);
                    found.extend(bits(&runner.step()));
                }
                found
            };
            assert!(run(true) == run(false), "{kernel}, KV of {kv:?}");
        }
    }
}

/// Logits, KV and state of one sequence are the same bits, however the work is cut.
fn same_bits(model: &Model, count: usize, chunks: &[usize]) {
    let tokens = some_tokens(count, model.config.vocab);
    for kernel in available_kernels() {
        for kv in [KvDtype::F32, KvDtype::F16] {
            let mut runner = Runner::new(model, &How { kv, threads: 1, ..how(*kernel) });
            let (logits, stored) = runner.logits_and_kv(&tokens, LIMITS.tokens);
            let expected = bits(&logits);
            for (i, chunk) in chunks.iter().enumerate() {
                let how = How {
                    kernel: *kernel,
                    kv,
                    threads: 1 + i % 3,
                    page_size: [1, 4, 16, 32, 5][i % 5],
                    is_grouped: i % 2 == 0,
                    order: i as u64,
                };
                let mut runner = Runner::new(model, &how);
                let (found, stored_again) = runner.logits_and_kv(&tokens, *chunk);
                assert!(bits(&found) == expected, "chunks of {chunk}, {how:?}");
                assert!(stored_again == stored, "KV or state: chunks of {chunk}, {how:?}");
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_chunks_pages_or_threads() {
    let config = ModelConfig { hidden: 96, heads: 6, head_dim: 32, intermediate: 160, ..small() };
    same_bits(&f32_model(config.clone()), 50, &[1, 3, 7, 16, 50]);
    for dtype in [TensorType::Q4_1, TensorType::Q8_0, TensorType::Bf16] {
        same_bits(&Model::random(config.clone(), 8, |_| dtype), 50, &[1, 3, 7, 16, 50]);
    }
    let config = ModelConfig { hidden: 256, heads: 4, head_dim: 64, intermediate: 256, ..small() };
    same_bits(&Model::random(config.clone(), 9, |_| TensorType::Q6_K), 40, &[1, 7]);
    same_bits(&Model::random(config, 9, |_| TensorType::Q4_K), 40, &[1, 7]);
}

#[test]
fn bits_of_experts_do_not_depend_on_chunks_pages_or_threads() {
    let shared = with_experts(|experts| {
        (experts.shared_intermediate, experts.normalised) = (Some(64), false);
        experts.intermediate = 64;
    });
    for (config, dtype) in [
        (sparse(), TensorType::F32),
        (shared.clone(), TensorType::Q8_0),
        (ModelConfig { layers: 1, ..shared }, TensorType::Bf16),
    ] {
        same_bits(&Model::random(config, 12, |_| dtype), 300, &[1, 3, 7, 16, 50, 257]);
    }
}

#[test]
fn bits_do_not_depend_on_chunks_over_a_long_context() {
    let config = ModelConfig { layers: 1, ..small() };
    same_bits(&Model::random(config, 10, |_| TensorType::Q8_0), 600, &[1, 37, 250, 256, 257]);
    for window in [1, 40, 256, 300] {
        same_bits(&f32_model(windowed(window, &[1])), 600, &[1, 37, 250, 256, 257]);
    }
    for dtype in [TensorType::F32, TensorType::Q8_0] {
        same_bits(&Model::random(gemma(), 14, |_| dtype), 300, &[1, 37, 250, 256, 257]);
    }
}

/// The bits of all logits and of the KV of one sequence, on one family.
fn logits_and_kv(
    model: &Model,
    tokens: &[u32],
    kernel: KernelFamily,
    kv: KvDtype,
) -> (Vec<Vec<u32>>, Vec<u8>) {
    let mut runner = Runner::new(model, &How { kv, ..how(kernel) });
    let mut sequence = runner.sequence(tokens);
    let mut logits = vec![];
    for count in [1, 7, 37, 1].into_iter().chain(iter::repeat(64)) {
        let count = count.min(tokens.len() - sequence.done);
        if count == 0 {
            break;
        }
        runner.push(&mut sequence, count, Logits::All);
        logits.extend(bits(&runner.step()));
    }
    (logits, runner.kv_bytes(&sequence))
}

/// Logits and KV are the same bits in all families of a bit class.
#[test]
fn families_of_a_bit_class_have_equal_bits() {
    use TensorType::*;
    let wide = ModelConfig { hidden: 256, heads: 4, head_dim: 64, intermediate: 512, ..small() };
    // Heads and rows that do not fill vectors, and groups of four and of three queries.
    let odd = ModelConfig { hidden: 96, heads: 8, head_dim: 24, intermediate: 160, ..small() };
    let tiny = ModelConfig { heads: 12, kv_heads: 4, head_dim: 8, ..odd.clone() };
    let mut models = Vec::new();
    for (i, dtype) in
        [F32, F16, Bf16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K].into_iter().enumerate()
    {
        let architecture = [Architecture::Llama, Architecture::Qwen2, Architecture::Qwen3][i % 3];
        for config in [&wide, &odd, &tiny].into_iter().take(if i < 4 { 3 } else { 1 }) {
            models.push((dtype, ModelConfig { architecture, ..config.clone() }, 1.0));
        }
    }
    // Scores that are far apart: most weights of the softmax are near zero.
    models.push((F32, wide, 30.0));
    models.push((F32, sparse(), 1.0));
    models.push((F32, gemma(), 1.0));
    models.push((F32, recurrent(), 1.0));
    models.push((Q8_0, with_experts(|experts| experts.intermediate = 64), 1.0));
    let mut found = [0; 2];
    for (i, (dtype, config, spread)) in models.into_iter().enumerate() {
        let tokens = some_tokens(300, config.vocab);
        let mut model = Model::random(config, i as u64, |_| dtype);
        if spread != 1.0 {
            model.scale("q_proj.weight", spread);
        }
        for kv in [KvDtype::F32, KvDtype::F16, KvDtype::Bf16] {
            let of = |&family: &KernelFamily| (family, logits_and_kv(&model, &tokens, family, kv));
            let results: Vec<_> = available_kernels().iter().map(of).collect();
            for (at, (one, ours)) in results.iter().enumerate() {
                for (other, theirs) in &results[..at] {
                    let is_one_class = one.bit_class() == other.bit_class();
                    if is_one_class {
                        assert!(ours == theirs, "{dtype:?}, KV of {kv:?}: {one} and {other}");
                    }
                    found[usize::from(is_one_class)] += usize::from(is_one_class || ours != theirs);
                }
            }
        }
    }
    let [differ, equal] = found;
    let classes: Vec<&str> = available_kernels().iter().map(|family| family.bit_class()).collect();
    assert!(differ > 0 || classes.len() == 1, "two classes have equal bits, so they are one");
    if equal == 0 {
        println!("SKIPPED: this CPU has no two families of one bit class");
    }
}

#[test]
fn bits_do_not_depend_on_neighbours() {
    let wide = ModelConfig { hidden: 96, heads: 6, head_dim: 32, intermediate: 160, ..small() };
    let sparse = with_experts(|experts| experts.shared_intermediate = Some(96));
    for config in [wide, sparse] {
        check_neighbours(&Model::random(config, 11, |name| match name.contains("down") {
            true => TensorType::F32,
            false => TensorType::Q4_1,
        }));
    }
}

fn check_neighbours(model: &Model) {
    let tokens = some_tokens(60, 100);
    for kernel in available_kernels() {
        let how = How { kv: KvDtype::F16, ..how(*kernel) };
        let mut runner = Runner::new(model, &how);
        let mut alone = runner.sequence(&tokens);
        runner.push(&mut alone, 59, Logits::None);
        assert!(runner.step().is_empty());
        runner.push(&mut alone, 1, Logits::Last);
        let expected = (bits(&runner.step()), runner.kv_bytes(&alone));

        let mut runner = Runner::new(model, &How { page_size: 4, ..how });
        let mut others: Vec<_> =
            (0..20).map(|i| runner.sequence(&some_tokens(30 + i, 90)[i..])).collect();
        let mut among = runner.sequence(&tokens);
        for (i, count) in [20, 1, 38, 1].into_iter().enumerate() {
            let (before, after) = others.split_at_mut(10 + i);
            before.iter_mut().for_each(|other| runner.push(other, 1 + i, Logits::Last));
            let last = if among.done + count == 60 { Logits::Last } else { Logits::None };
            runner.push(&mut among, count, last);
            after.iter_mut().for_each(|other| runner.push(other, 2, Logits::None));
            let found = runner.step();
            if last == Logits::Last {
                assert_eq!(bits(&found[before.len()..]), expected.0, "{kernel}");
            }
        }
        assert!(runner.kv_bytes(&among) == expected.1, "{kernel}");
    }
}

#[test]
fn the_caller_can_stop_after_a_layer() {
    let model = f32_model(ModelConfig { layers: 4, ..small() });
    let mut runner = Runner::new(&model, &how(KernelFamily::Portable));
    let mut sequence = runner.sequence(&some_tokens(5, 100));
    runner.push(&mut sequence, 5, Logits::Last);
    assert_eq!(runner.step_until(1), (StepEnd::Stopped, 2));
    let mut sequence = runner.sequence(&some_tokens(5, 100));
    runner.push(&mut sequence, 5, Logits::Last);
    assert_eq!(runner.step_until(9), (StepEnd::Complete, 4));
}

fn options() -> CpuOptions {
    CpuOptions { threads: 1, limits: LIMITS, kernel: fastest_kernels(), pin: None }
}

#[test]
fn progress_and_memory_count_each_tensor() {
    let shared = with_experts(|experts| experts.shared_intermediate = Some(80));
    for config in [
        small(),
        ModelConfig { tied_head: false, attention_bias: true, mlp_bias: true, ..small() },
        with_experts(|experts| experts.dense_layers = vec![0]),
        ModelConfig { tied_head: false, ..shared },
    ] {
        let model = f32_model(config);
        let mut calls = vec![];
        let mut count = |done, total| calls.push((done, total));
        let loaded = CpuModel::load(&model.config, &model, &options(), &mut count).unwrap();
        let total = model.tensors.len();
        assert_eq!(calls, (1..=total).map(|done| (done, total)).collect::<Vec<_>>());

        let is_matrix = |name: &str| !name.contains("norm") && !name.ends_with("bias");
        let matrices = model.tensors.iter().filter(|(name, _)| is_matrix(name));
        let bytes = matrices.map(|(_, tensor)| tensor.rows.next_multiple_of(16) * tensor.cols * 4);
        let biases = model.tensors.iter().filter(|(name, _)| name.ends_with("bias"));
        let biases = biases.map(|(_, tensor)| tensor.cols.next_multiple_of(16) * 4);
        assert_eq!(loaded.memory_bytes().weights, bytes.chain(biases).sum::<usize>());
    }
}

/// Parts of a matrix are padded to sixteen rows.
#[test]
fn memory_counts_the_matrices_of_recurrent_layers() {
    for config in [recurrent(), hybrid(), delta()] {
        let model = f32_model(config);
        let loaded = CpuModel::load(&model.config, &model, &options(), &mut |_, _| {}).unwrap();
        let is_matrix = |rows: usize, cols: usize| rows > 1 && cols > 16;
        let sizes = model.tensors.values().map(|tensor| (tensor.rows, tensor.cols));
        let least: usize =
            sizes.filter(|&(rows, cols)| is_matrix(rows, cols)).map(|(r, c)| r * c * 4).sum();
        let found = loaded.memory_bytes().weights;
        assert!(found >= least && found < least + least / 3, "{found} for {least}");
    }
}

#[test]
fn a_faulty_model_is_refused_by_name() {
    let load = |model: &Model| {
        let loaded = CpuModel::load(&model.config, model, &options(), &mut |_, _| {});
        loaded.err().map(|e| e.to_string())
    };
    let mut model = f32_model(small());
    model.tensors.remove("model.layers.1.mlp.up_proj.weight");
    let error = load(&model).unwrap();
    assert!(
        error.contains("model.layers.1.mlp.up_proj.weight: expected 96 × 64, found nothing"),
        "{error}"
    );

    let mut model = f32_model(small());
    model.config.intermediate = 80;
    let error = load(&model).unwrap();
    assert!(error.contains("mlp.gate_proj.weight: expected 80 × 64, found 96 × 64"), "{error}");

    let mut model = f32_model(small());
    model.tensors.get_mut("model.norm.weight").unwrap().dtype = TensorType::Q8_0;
    let error = load(&model).unwrap();
    assert!(error.contains("model.norm.weight: expected F32, F16 or BF16, found Q8_0"), "{error}");
    assert!(load(&f32_model(small())).is_none());

    let mut model = f32_model(sparse());
    model.tensors.remove("model.layers.1.mlp.experts.6.down_proj.weight");
    let error = load(&model).unwrap();
    assert!(error.contains("experts.6.down_proj.weight: expected 64 × 48, found"), "{error}");
}

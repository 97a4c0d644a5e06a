//! Tests of GGUF files that are accepted and files that are refused.

use super::writer::GgufWriter;
use super::*;
use crate::model::config::{ExpertConfig, GemmaConfig, RopeScaling, WindowConfig};
use crate::model::hf::HfDirectory;
use crate::model::quant::dequantise_row;
use crate::model::recurrent_config::{DeltaConfig, MambaConfig};
use crate::model::testing::{Scratch, fixture};

/// A model of some layers without their MLPs: two heads of two elements, four ids.
fn attention_layers(count: u32) -> GgufWriter {
    let matrix = [0; 64];
    let mut writer = GgufWriter::default()
        .string("general.architecture", "llama")
        .u32("llama.embedding_length", 4)
        .u32("llama.block_count", count)
        .u32("llama.feed_forward_length", 4)
        .u32("llama.attention.head_count", 2)
        .u32("llama.context_length", 16)
        .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .tensor("token_embd.weight", &[4, 4], 0, &matrix)
        .tensor("output_norm.weight", &[4], 0, &matrix[..16]);
    for layer in 0..count {
        for part in ["attn_norm", "ffn_norm"] {
            writer = writer.tensor(&format!("blk.{layer}.{part}.weight"), &[4], 0, &matrix[..16]);
        }
        for part in ["attn_q", "attn_k", "attn_v", "attn_output"] {
            writer = writer.tensor(&format!("blk.{layer}.{part}.weight"), &[4, 4], 0, &matrix);
        }
    }
    writer
}

/// A model of one layer without its last tensor.
fn writer() -> GgufWriter {
    ["ffn_gate", "ffn_up"].iter().fold(attention_layers(1), |writer, part| {
        writer.tensor(&format!("blk.0.{part}.weight"), &[4, 4], 0, &[0; 64])
    })
}

fn whole() -> GgufWriter {
    writer().tensor("blk.0.ffn_down.weight", &[4, 4], 0, &[0; 64])
}

fn open(writer: GgufWriter) -> Result<GgufFile, String> {
    let scratch = Scratch::new();
    let path = scratch.path().join("model.gguf");
    std::fs::write(&path, writer.finish()).unwrap();
    GgufFile::open(&path).map_err(|error| error.to_string())
}

#[test]
fn a_whole_model_opens() {
    let file = open(whole()).unwrap();
    let config = file.config();
    assert_eq!((config.kv_heads, config.head_dim, config.vocab), (2, 2, 4));
    assert!(config.tied_head && config.eos.is_empty());
    let order = |name| file.tensor(name).unwrap().unwrap().order;
    let interleaved = RowOrder::RopeInterleaved { head_dim: 2 };
    assert_eq!(order("model.layers.0.self_attn.k_proj.weight"), interleaved);
    assert_eq!(order("model.layers.0.self_attn.v_proj.weight"), RowOrder::Natural);
    assert!(file.tensor("lm_head.weight").unwrap().is_none());
}

#[test]
fn an_unsupported_gguf_model_is_refused_by_name() {
    let factors = |values: &[f32]| {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        open(whole().tensor("rope_freqs.weight", &[values.len() as u64], 0, &bytes)).unwrap_err()
    };
    for (message, parts) in [
        (
            open(GgufWriter::default().string("general.architecture", "gemma2")).unwrap_err(),
            ["gemma2", "llama"],
        ),
        (open(GgufWriter::default()).unwrap_err(), ["general.architecture", "nothing"]),
        (
            open(whole().u32("llama.expert_count", 8)).unwrap_err(),
            ["llama.expert_used_count", "nothing"],
        ),
        (
            open(whole().f32("llama.attention.scale", 0.1)).unwrap_err(),
            ["llama.attention.scale", "0.1"],
        ),
        (open(whole().u32("llama.attention.key_length", 3)).unwrap_err(), ["key_length", "3"]),
        (
            open(whole().u32("llama.rope.dimension_count", 1)).unwrap_err(),
            ["dimension_count", "expected 2"],
        ),
        (
            open(whole().string("llama.rope.scaling.type", "longrope")).unwrap_err(),
            ["scaling.type", "longrope"],
        ),
        (
            open(whole().string("llama.rope.scaling.type", "linear")).unwrap_err(),
            ["scaling.factor", "nothing"],
        ),
        (open(whole().u32("llama.vocab_size", 5)).unwrap_err(), ["llama.vocab_size", "found 5"]),
        (
            open(whole().string("llama.rope.freq_base", "x")).unwrap_err(),
            ["rope.freq_base", "a number"],
        ),
        (
            open(whole().tensor("blk.0.attn_sinks", &[4], 0, &[0; 16])).unwrap_err(),
            ["attn_sinks", "only"],
        ),
        (open(writer()).unwrap_err(), ["mlp.down_proj.weight", "no such tensor"]),
        (factors(&[f32::NAN]), ["rope_freqs.weight", "NaN"]),
        (factors(&[2.0]), ["rope_freqs.weight", "2 at 0"]),
        (factors(&[1.0, 1.0]), ["rope_freqs.weight", "1 elements"]),
    ] {
        assert!(message.contains("model.gguf"), "{message}");
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
}

/// A complete Mixtral of two layers with three experts, of which the first layer has none.
fn sparse(used: u32) -> GgufWriter {
    let matrix = [0; 64];
    let mut writer = attention_layers(2).u32("llama.expert_count", 3);
    writer = writer.u32("llama.expert_used_count", used);
    writer = writer.u32("llama.expert_feed_forward_length", 2);
    for part in ["ffn_gate", "ffn_up", "ffn_down"] {
        writer = writer.tensor(&format!("blk.0.{part}.weight"), &[4, 4], 0, &matrix);
    }
    let experts: Vec<u8> = (0..24u8).flat_map(|n| f32::from(n).to_le_bytes()).collect();
    writer
        .tensor("blk.1.ffn_gate_inp.weight", &[4, 3], 0, &matrix[..48])
        .tensor("blk.1.ffn_gate_exps.weight", &[4, 2, 3], 0, &experts)
        .tensor("blk.1.ffn_up_exps.weight", &[4, 2, 3], 0, &experts)
        .tensor("blk.1.ffn_down_exps.weight", &[2, 4, 3], 0, &experts)
}

#[test]
fn experts_are_matrices_of_one_tensor() {
    let file = open(sparse(2)).unwrap();
    let experts = ExpertConfig {
        count: 3,
        used: 2,
        intermediate: 2,
        shared_intermediate: None,
        normalised: true,
        dense_layers: vec![0],
    };
    assert_eq!(file.config().architecture, Architecture::Mixtral);
    assert_eq!(file.config().experts, Some(experts));
    for (expert, part, shape) in [(0, "gate_proj", (2, 4)), (2, "down_proj", (4, 2))] {
        let name = format!("model.layers.1.mlp.experts.{expert}.{part}.weight");
        let tensor = file.tensor(&name).unwrap().unwrap();
        assert_eq!((tensor.rows, tensor.cols), shape);
        let mut row = vec![0.0; tensor.cols];
        dequantise_row(&tensor, 1, &mut row);
        let first = (8 * expert + tensor.cols) as f32;
        assert_eq!(row, (0..tensor.cols).map(|n| first + n as f32).collect::<Vec<_>>());
    }
    let order = |name| file.tensor(name).unwrap().unwrap().order;
    let interleaved = RowOrder::RopeInterleaved { head_dim: 2 };
    assert_eq!(order("model.layers.0.self_attn.k_proj.weight"), interleaved);

    for (writer, parts) in [
        (sparse(4), ["llama.expert_used_count", "the 3"]),
        (
            sparse(2).tensor("blk.1.ffn_up.0.weight", &[4, 2], 0, &[0; 32]),
            ["experts.0.up_proj.weight", "twice"],
        ),
        (sparse(2).u32("llama.expert_gating_func", 2), ["expert_gating_func", "found 2"]),
        (sparse(2).f32("llama.expert_weights_scale", 2.5), ["expert_weights_scale", "2.5"]),
        (sparse(2).u32("llama.expert_group_count", 4), ["expert_group_count", "no such field"]),
        (sparse(2).tensor("blk.1.ffn_up_shexp.weight", &[4, 4], 0, &[0; 64]), ["up_proj", "only"]),
    ] {
        let message = open(writer).unwrap_err();
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
    let unnormalised = open(sparse(2).bool("llama.expert_weights_norm", false)).unwrap();
    assert!(!unnormalised.config().experts.as_ref().unwrap().normalised);
}

#[test]
fn gemma_is_read() {
    let file = GgufFile::open(&fixture("gemma3-plain.F32.gguf")).unwrap();
    let config = file.config();
    let gemma = GemmaConfig {
        query_scalar: 8.0,
        window_rope_theta: 1e4,
        norm_offset: 0.0,
        logit_cap: None,
    };
    assert_eq!((config.architecture, config.gemma.as_ref()), (Architecture::Gemma3, Some(&gemma)));
    assert_eq!(config.window, Some(WindowConfig { tokens: 9, full_layers: vec![5] }));
    assert_eq!((config.rope_theta, config.tied_head), (1e6, true));
    for (writer, part) in [
        (whole().u32("llama.attention.sliding_window", 8), "llama.attention.sliding_window"),
        (whole().f32("llama.final_logit_softcapping", 30.0), "llama.final_logit_softcapping"),
        (whole().f32("llama.attn_logit_softcapping", 50.0), "llama.attn_logit_softcapping"),
        (whole().f32("llama.rope.freq_base", 1.0), "llama.rope.freq_base"),
    ] {
        let message = open(writer).unwrap_err();
        assert!(message.contains(part), "{message}");
    }
}

/// The configuration of a Gemma file without its layers.
fn gemma(
    layers: u32,
    change: impl FnOnce(GgufWriter) -> GgufWriter,
) -> Result<ModelConfig, String> {
    let writer = GgufWriter::default()
        .string("general.architecture", "gemma3")
        .u32("gemma3.embedding_length", 168)
        .u32("gemma3.block_count", layers)
        .u32("gemma3.feed_forward_length", 4)
        .u32("gemma3.attention.head_count", 2)
        .u32("gemma3.attention.key_length", 16)
        .u32("gemma3.attention.value_length", 16)
        .u32("gemma3.attention.sliding_window", 512)
        .u32("gemma3.context_length", 16)
        .f32("gemma3.attention.layer_norm_rms_epsilon", 1e-6)
        .tensor("token_embd.weight", &[168, 4], 0, &[0; 168 * 16]);
    let bytes = change(writer).finish();
    let header = Header::parse(&bytes).unwrap();
    let metadata = Metadata { file: Path::new("model.gguf"), bytes: &bytes, header: &header };
    config::read(&metadata).map_err(|error| error.to_string())
}

#[test]
fn formulas_of_gemma_follow_from_its_metadata() {
    let scalar = |layers| gemma(layers, |w| w).unwrap().gemma.unwrap().query_scalar;
    assert_eq!((scalar(18), scalar(62)), (16.0, 84.0));
    let config = gemma(12, |w| {
        w.string("gemma3.rope.scaling.type", "linear")
            .f32("gemma3.rope.scaling.factor", 8.0)
            .f32("gemma3.rope.freq_base_swa", 5e3)
            .u32("gemma3.attention.sliding_window_pattern", 4)
            .f32("gemma3.final_logit_softcapping", 30.0)
    })
    .unwrap();
    let gemma_config = config.gemma.unwrap();
    assert_eq!(
        (config.rope_scaling, config.rope_theta),
        (RopeScaling::Linear { factor: 8.0 }, 1e6)
    );
    assert_eq!((gemma_config.window_rope_theta, gemma_config.logit_cap), (5e3, Some(30.0)));
    assert_eq!(config.window, Some(WindowConfig { tokens: 512, full_layers: vec![3, 7, 11] }));
    for cap in [-1.0, f32::NAN, f32::INFINITY] {
        let message = gemma(12, |w| w.f32("gemma3.final_logit_softcapping", cap)).unwrap_err();
        assert!(message.contains("gemma3.final_logit_softcapping"), "{message}");
    }
}

/// The converter of Gemma's instruction models names the end of the text only.
#[test]
fn tokens_that_end_a_turn_end_a_generation() {
    let tokens = ["<pad>", "<eos>", "<bos>", "<end_of_turn>"];
    let eos = |change: fn(GgufWriter) -> GgufWriter| {
        let with = |w: GgufWriter| change(w.strings("tokenizer.ggml.tokens", &tokens));
        gemma(6, with).unwrap().eos
    };
    assert_eq!(eos(|w| w.u32("tokenizer.ggml.eos_token_id", 1)), [1, 3]);
    assert_eq!(eos(|w| w.u32("tokenizer.ggml.eos_token_id", 3)), [3]);
}

/// Only Qwen's first models with experts leave their weights as they are.
#[test]
fn weights_of_experts_are_normalised_unless_the_architecture_says_otherwise() {
    for (name, normalised) in [("llama", true), ("qwen3moe", true), ("qwen2moe", false)] {
        let key = |part: &str| format!("{name}.{part}");
        let bytes = GgufWriter::default()
            .string("general.architecture", name)
            .u32(&key("embedding_length"), 4)
            .u32(&key("block_count"), 1)
            .u32(&key("feed_forward_length"), 4)
            .u32(&key("attention.head_count"), 2)
            .u32(&key("context_length"), 16)
            .f32(&key("attention.layer_norm_rms_epsilon"), 1e-5)
            .u32(&key("expert_count"), 3)
            .u32(&key("expert_used_count"), 2)
            .u32(&key("expert_feed_forward_length"), 2)
            .u32(&key("expert_shared_feed_forward_length"), 2)
            .tensor("token_embd.weight", &[4, 4], 0, &[0; 64])
            .finish();
        let header = Header::parse(&bytes).unwrap();
        let metadata = Metadata { file: Path::new("model.gguf"), bytes: &bytes, header: &header };
        let experts = config::read(&metadata).unwrap().experts.unwrap();
        assert_eq!(experts.normalised, normalised, "{name}");
    }
}

#[test]
fn rope_scaling_is_read() {
    let linear =
        whole().string("llama.rope.scaling.type", "linear").f32("llama.rope.scaling.factor", 4.0);
    assert_eq!(open(linear).unwrap().config().rope_scaling, RopeScaling::Linear { factor: 4.0 });
    let llama3 = GgufFile::open(&fixture("llama-mha-llama3.F16.gguf")).unwrap();
    assert!(matches!(llama3.config().rope_scaling, RopeScaling::Llama3 { factor: 8.0, .. }));
}

/// In natural row order, a file holds the same tensors as the directory from which it was
/// converted.
#[test]
fn tensors_are_those_of_the_directory() {
    for (file, directory, tolerance) in [
        ("llama.F32.gguf", "llama-f32", 0.0),
        ("llama.BF16.gguf", "llama-bf16", 0.0),
        ("llama-mha-llama3.F16.gguf", "llama-mha-llama3-bf16", 0.02),
        ("qwen2.Q8_0.gguf", "qwen2-f32", 0.02),
        ("qwen3.Q5_1.gguf", "qwen3-f32", 0.2),
        ("mixtral.F32.gguf", "mixtral-f32", 0.0),
        ("qwen2-moe.F32.gguf", "qwen2-moe-f32", 0.0),
    ] {
        let file = GgufFile::open(&fixture(file)).unwrap();
        let directory = HfDirectory::open(&fixture(directory)).unwrap();
        assert_eq!(file.config(), directory.config());
        for name in directory.names() {
            let [ours, theirs] = [&file as &dyn WeightSource, &directory].map(|source| {
                let tensor = source.tensor(name).unwrap().unwrap();
                let mut values = vec![0.0; tensor.rows * tensor.cols];
                for (row, out) in values.chunks_exact_mut(tensor.cols).enumerate() {
                    dequantise_row(&tensor, row, out);
                }
                values
            });
            let largest = theirs.iter().fold(0.0f32, |max, x| max.max(x.abs()));
            // Norms are also rounded to the directory's type.
            let allowed =
                if tolerance == 0.0 && theirs.len() == 64 { 0.01 } else { tolerance } * largest;
            assert_eq!(ours.len(), theirs.len());
            assert!(ours.iter().zip(&theirs).all(|(a, b)| (a - b).abs() <= allowed), "{name}");
        }
    }
}

#[test]
fn recurrent_layers_are_those_of_the_directory() {
    let file = GgufFile::open(&fixture("mamba2.F32.gguf")).unwrap();
    let directory = HfDirectory::open(&fixture("mamba2-f32")).unwrap();
    let expected = directory.config();
    let mamba = expected.mamba.clone().unwrap();
    let expected = ModelConfig {
        context: 1 << 20,
        mamba: Some(MambaConfig { log_decay: false, ..mamba }),
        ..expected.clone()
    };
    assert_eq!(file.config(), &expected);
    for name in directory.names() {
        let [ours, theirs] = [&file as &dyn WeightSource, &directory].map(|source| {
            let tensor = source.tensor(name).unwrap().unwrap();
            bytemuck::pod_collect_to_vec::<u8, f32>(tensor.bytes)
        });
        // The file has A, and the directory ln(-A).
        let is_decay = name.ends_with("A_log");
        let of = |x: &f32| if is_decay { -x.exp() } else { *x };
        let is_equal =
            |(ours, theirs): (&f32, &f32)| (ours - of(theirs)).abs() <= 1e-5 * ours.abs();
        assert!(ours.len() == theirs.len() && ours.iter().zip(&theirs).all(is_equal), "{name}");
    }
}

/// The converter applies Falcon's multipliers and completes the norms of Qwen3-Next.
#[test]
fn hybrids_are_those_of_the_directory() {
    for name in ["falcon-h1", "qwen3-next"] {
        let file = GgufFile::open(&fixture(&format!("{name}.F32.gguf"))).unwrap();
        let directory = HfDirectory::open(&fixture(&format!("{name}-f32"))).unwrap();
        let directory = directory.config().clone();
        let expected = ModelConfig {
            mamba: directory.mamba.clone().map(|mamba| MambaConfig { log_decay: false, ..mamba }),
            multipliers: None,
            delta: directory.delta.clone().map(|delta| DeltaConfig {
                by_key_head: false,
                log_decay: false,
                norm_offset: 0.0,
                ..delta
            }),
            ..directory
        };
        assert_eq!(file.config(), &expected);
    }
}

/// The fork of llama.cpp by the authors of Falcon-H1 leaves the multipliers out of the weights.
#[test]
fn falcon_without_its_multipliers_in_the_weights_is_refused_by_name() {
    let falcon = || GgufWriter::default().string("general.architecture", "falcon-h1");
    let with_head = || falcon().tensor("output.weight", &[4, 4], 0, &[0; 64]);
    let refusal = |writer| open(writer).unwrap_err();
    assert!(refusal(with_head().bool("falcon-h1.ssm.has_mup", true)).contains("ssm.has_mup"));
    for part in ["mlp_gate_multiplier", "mlp_down_multiplier"] {
        let message = refusal(with_head().f32(&format!("falcon-h1.{part}"), 0.5));
        assert!(message.contains(part), "{message}");
    }
    assert!(refusal(falcon()).contains("output.weight: expected a head"));
    assert!(refusal(with_head()).contains("falcon-h1.rope.freq_base"));
}

#[test]
fn layers_for_speculation_are_refused_by_name() {
    let next = GgufWriter::default().string("general.architecture", "qwen3next");
    let message = open(next.u32("qwen3next.nextn_predict_layers", 1)).unwrap_err();
    assert!(message.contains("qwen3next.nextn_predict_layers"), "{message}");
}

/// The refusal of a model with these sizes, of which one is another.
fn refusal_of_sizes(
    architecture: &str,
    sizes: &[(&str, u32)],
    (part, size): (&str, u32),
) -> String {
    let writer = GgufWriter::default()
        .string("general.architecture", architecture)
        .f32(&format!("{architecture}.attention.layer_norm_rms_epsilon"), 1e-5)
        .tensor("token_embd.weight", &[4, 4], 0, &[0; 64])
        .tensor("output_norm.weight", &[4], 0, &[0; 16]);
    open(sizes.iter().fold(writer, |writer, &(name, fitting)| {
        let size = if name == part { size } else { fitting };
        writer.u32(&format!("{architecture}.{name}"), size)
    }))
    .unwrap_err()
}

#[test]
fn sizes_that_no_model_has_are_refused_by_name() {
    for (part, expected) in [
        ("embedding_length", "at most 1048576"),
        ("attention.head_count", "at most 16384"),
        ("attention.key_length", "up to 4096"),
    ] {
        let sizes = [
            ("embedding_length", 4),
            ("block_count", 1),
            ("attention.head_count", 2),
            ("attention.key_length", 2),
        ];
        let message = refusal_of_sizes("llama", &sizes, (part, u32::MAX - 1));
        assert!(message.contains(part) && message.contains(expected), "{message}");
    }
}

#[test]
fn a_hybrid_with_sizes_that_do_not_fit_is_refused_by_name() {
    let refusal = |part: &str, size: u32| {
        let sizes = [
            ("embedding_length", 4),
            ("block_count", 4),
            ("context_length", 16),
            ("feed_forward_length", 4),
            ("attention.head_count", 1),
            ("attention.key_length", 4),
            ("rope.dimension_count", 2),
            ("expert_count", 2),
            ("expert_used_count", 1),
            ("expert_feed_forward_length", 4),
            ("expert_shared_feed_forward_length", 4),
            ("full_attention_interval", 4),
            ("ssm.conv_kernel", 4),
            ("ssm.inner_size", 8),
            ("ssm.state_size", 4),
            ("ssm.time_step_rank", 2),
            ("ssm.group_count", 1),
        ];
        refusal_of_sizes("qwen3next", &sizes, (part, size))
    };
    assert!(refusal("none", 0).contains("input_layernorm.weight"), "all sizes fit");
    for (part, size) in [
        ("full_attention_interval", 1),
        ("full_attention_interval", 5),
        ("rope.dimension_count", 3),
        ("rope.dimension_count", 6),
        ("ssm.time_step_rank", 3),
        ("expert_count", 0),
    ] {
        let message = refusal(part, size);
        let part = if part == "ssm.time_step_rank" { "ssm.inner_size" } else { part };
        assert!(message.contains(&format!("qwen3next.{part}: expected ")), "{part}: {message}");
    }
}

#[test]
fn a_recurrent_model_with_sizes_that_do_not_fit_is_refused_by_name() {
    let refusal = |part: &str, size: u32| {
        let sizes = [
            ("embedding_length", 4),
            ("block_count", 1),
            ("context_length", 16),
            ("ssm.conv_kernel", 4),
            ("ssm.inner_size", 8),
            ("ssm.state_size", 4),
            ("ssm.time_step_rank", 2),
            ("ssm.group_count", 1),
        ];
        refusal_of_sizes("mamba2", &sizes, (part, size))
    };
    assert!(refusal("none", 0).contains("input_layernorm.weight"), "all sizes fit");
    for (part, size) in [
        ("ssm.conv_kernel", 1),
        ("ssm.conv_kernel", 1 << 20),
        ("ssm.inner_size", 9),
        ("ssm.inner_size", u32::MAX),
        ("ssm.state_size", 1 << 20),
        ("ssm.time_step_rank", u32::MAX),
        ("ssm.group_count", 3),
        ("ssm.group_count", 0),
    ] {
        let message = refusal(part, size);
        assert!(message.contains(&format!("mamba2.{part}: expected ")), "{part}: {message}");
    }
}

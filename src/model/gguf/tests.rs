//! Tests of GGUF files that are accepted and files that are refused.

use super::writer::GgufWriter;
use super::*;
use crate::model::config::RopeScaling;
use crate::model::hf::HfDirectory;
use crate::model::quant::dequantise_row;
use crate::model::testing::{Scratch, fixture};

/// A complete model of one layer: two heads of two elements, four ids.
fn writer() -> GgufWriter {
    let matrix = [0; 64];
    let mut writer = GgufWriter::default()
        .string("general.architecture", "llama")
        .u32("llama.embedding_length", 4)
        .u32("llama.block_count", 1)
        .u32("llama.feed_forward_length", 4)
        .u32("llama.attention.head_count", 2)
        .u32("llama.context_length", 16)
        .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .tensor("token_embd.weight", &[4, 4], 0, &matrix)
        .tensor("output_norm.weight", &[4], 0, &matrix[..16]);
    for part in ["attn_norm", "ffn_norm"] {
        writer = writer.tensor(&format!("blk.0.{part}.weight"), &[4], 0, &matrix[..16]);
    }
    for part in ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up"] {
        writer = writer.tensor(&format!("blk.0.{part}.weight"), &[4, 4], 0, &matrix);
    }
    writer
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
            open(GgufWriter::default().string("general.architecture", "gemma3")).unwrap_err(),
            ["gemma3", "llama"],
        ),
        (open(GgufWriter::default()).unwrap_err(), ["general.architecture", "nothing"]),
        (open(whole().u32("llama.expert_count", 8)).unwrap_err(), ["llama.expert_count", "8"]),
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
    ] {
        let file = GgufFile::open(&fixture(file)).unwrap();
        let directory = HfDirectory::open(&fixture(directory)).unwrap();
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

//! Reads `config.json` and `generation_config.json`, in the formats of transformers 4 and 5. It
//! refuses features that change results and are not supported, and names them. A model without them
//! would write fluent but wrong text.

use super::json_object::Object;
use super::recurrent_fields::{delta, falcon_mamba, mamba};
use crate::limits::{EXPERTS_MAX, HEAD_DIM_MAX, HEADS_MAX, HIDDEN_MAX, MODEL_LAYERS_MAX};
use crate::model::config::{
    Architecture, ExpertConfig, GemmaConfig, ModelConfig, MultiplierConfig, RopeScaling,
    WindowConfig,
};
use crate::model::recurrent_config::recurrent_context;
use crate::model::tensor::TensorType;
use crate::model::weights::LoadError;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

/// Fields that change the computation. They must be null or have the value given here.
const ONLY: [(&str, Value); 7] = [
    ("use_dual_chunk_attention", Value::Bool(false)),
    ("quantization_config", Value::Null),
    ("dual_chunk_attention_config", Value::Null),
    ("logits_scaling", Value::Null),
    ("embedding_multiplier", Value::Null),
    ("attn_logit_softcapping", Value::Null),
    ("use_bidirectional_attention", Value::Bool(false)),
];

/// Sampling parameters recommended by the model's makers; `None` if there is no recommendation.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct SamplingDefaults {
    /// Divisor of logits.
    pub temperature: Option<f32>,
    /// Probability mass that is kept.
    pub top_p: Option<f32>,
    /// Number of tokens that are kept.
    pub top_k: Option<u32>,
    /// Minimum probability relative to the likeliest token.
    pub min_p: Option<f32>,
    /// Penalty on repeated tokens.
    pub repetition_penalty: Option<f32>,
}

/// Reads the configuration of the model in `directory`.
pub fn read(directory: &Path) -> Result<ModelConfig, LoadError> {
    let mut config = parse(&Object::read(&directory.join("config.json"))?)?;
    let generation = directory.join("generation_config.json");
    if generation.exists() {
        let generation = Object::read(&generation)?;
        let eos = generation.ids("eos_token_id")?;
        if !eos.is_empty() {
            config.eos = eos;
        }
    }
    Ok(config)
}

/// The element type in `config.json`; bfloat16 if none is given.
pub fn dtype(directory: &Path) -> Result<TensorType, LoadError> {
    let config = Object::read(&directory.join("config.json"))?;
    match config.string("dtype")?.or(config.string("torch_dtype")?) {
        Some("float32") => Ok(TensorType::F32),
        Some("float16") => Ok(TensorType::F16),
        Some("bfloat16") | None => Ok(TensorType::Bf16),
        Some(other) => Err(config.wrong("dtype", "float32, float16 or bfloat16", other)),
    }
}

/// Reads `generation_config.json`, if it exists.
pub fn sampling_defaults(directory: &Path) -> Result<SamplingDefaults, LoadError> {
    let path = directory.join("generation_config.json");
    if !path.exists() {
        return Ok(SamplingDefaults::default());
    }
    let generation = Object::read(&path)?;
    Ok(SamplingDefaults {
        temperature: generation.number("temperature")?,
        top_p: generation.number("top_p")?,
        top_k: generation.u32("top_k")?,
        min_p: generation.number("min_p")?,
        repetition_penalty: generation.number("repetition_penalty")?,
    })
}

/// Reads the configuration of a model from `config.json`.
pub fn parse(config: &Object) -> Result<ModelConfig, LoadError> {
    let architecture = architecture(config)?;
    refuse_unserved(config, architecture)?;
    let layers = config.size_up_to("num_hidden_layers", MODEL_LAYERS_MAX)?;
    match architecture {
        Architecture::Mamba2 => recurrent(config, layers),
        _ => transformer(config, architecture, layers),
    }
}

fn transformer(
    config: &Object,
    architecture: Architecture,
    layers: usize,
) -> Result<ModelConfig, LoadError> {
    let hidden = config.size_up_to("hidden_size", HIDDEN_MAX)?;
    let heads = config.size_up_to("num_attention_heads", HEADS_MAX)?;
    let kv_heads = config.optional_size("num_key_value_heads")?.unwrap_or(heads);
    let default_head = match architecture {
        Architecture::Qwen3 => 128,
        Architecture::Gemma3 | Architecture::Qwen3Next => 256,
        _ => hidden / heads,
    };
    let head_dim = config.optional_size("head_dim")?.unwrap_or(default_head);
    if !heads.is_multiple_of(kv_heads) {
        return Err(config.wrong("num_key_value_heads", format!("a divisor of {heads}"), kv_heads));
    }
    if !head_dim.is_multiple_of(2) || !(2..=HEAD_DIM_MAX).contains(&head_dim) {
        let expected = format!("an even number up to {HEAD_DIM_MAX}");
        return Err(config.wrong("head_dim", expected, head_dim));
    }
    let (attention_bias, output_bias) = attention_biases(config, architecture)?;
    let default_theta = match architecture {
        Architecture::Mixtral => 1e6,
        Architecture::Gemma3 => GemmaConfig::ROPE_THETA,
        _ => 1e4,
    };
    let (rope_theta, rope_scaling) = rope(config, architecture, default_theta)?;
    Ok(ModelConfig {
        architecture,
        hidden,
        layers,
        heads,
        kv_heads,
        head_dim,
        intermediate: config.size("intermediate_size")?,
        vocab: config.size("vocab_size")?,
        context: config.size("max_position_embeddings")?,
        norm_eps: config.required_number("rms_norm_eps")?,
        rope_theta,
        rope_scaling,
        tied_head: config
            .bool("tie_word_embeddings")?
            .unwrap_or(architecture == Architecture::Gemma3),
        attention_bias,
        output_bias,
        mlp_bias: architecture == Architecture::Llama && config.bool("mlp_bias")?.unwrap_or(false),
        bos: config.ids("bos_token_id")?.first().copied(),
        eos: config.ids("eos_token_id")?,
        experts: experts(config, architecture, layers)?,
        window: window(config, architecture, layers)?,
        gemma: gemma(config, architecture)?,
        mamba: falcon_mamba(config, architecture)?,
        multipliers: multipliers(config, architecture)?,
        delta: match architecture {
            Architecture::Qwen3Next => Some(delta(config, layers, rotary_dim(config, head_dim)?)?),
            _ => None,
        },
    })
}

/// A model of recurrent layers. Sizes must be there; other fields have the defaults of
/// transformers.
fn recurrent(config: &Object, layers: usize) -> Result<ModelConfig, LoadError> {
    Ok(ModelConfig {
        hidden: config.size_up_to("hidden_size", HIDDEN_MAX)?,
        layers,
        vocab: config.size("vocab_size")?,
        context: recurrent_context(config.optional_size("max_position_embeddings")?),
        norm_eps: config.required_number("layer_norm_epsilon")?,
        tied_head: config.bool("tie_word_embeddings")?.unwrap_or(false),
        bos: config.ids("bos_token_id")?.first().copied(),
        eos: config.ids("eos_token_id")?,
        ..ModelConfig::of_mamba(mamba(config)?)
    })
}

/// The rotated part of a head, from a factor at one of two places.
fn rotary_dim(config: &Object, head_dim: usize) -> Result<usize, LoadError> {
    const FIELD: &str = "partial_rotary_factor";
    let inner = match rope_objects(config)?.1 {
        Some(rotation) => rotation.positive(FIELD)?,
        None => None,
    };
    let factor = inner.or(config.positive(FIELD)?).unwrap_or(0.25);
    let rotary = (head_dim as f64 * f64::from(factor)) as usize;
    if rotary > head_dim || rotary < 2 || !rotary.is_multiple_of(2) {
        let expected = format!("a factor that makes an even part of {head_dim} elements");
        return Err(config.wrong(FIELD, expected, factor));
    }
    Ok(rotary)
}

/// Falcon's multipliers, with the defaults of transformers.
fn multipliers(
    config: &Object,
    architecture: Architecture,
) -> Result<Option<MultiplierConfig>, LoadError> {
    if architecture != Architecture::FalconH1 {
        return Ok(None);
    }
    let one = |field: &str| Ok(config.positive(field)?.unwrap_or(1.0));
    let ssm = config.numbers("ssm_multipliers")?.unwrap_or([1.0; 5]);
    let [gate, down] = config.numbers("mlp_multipliers")?.unwrap_or([1.0; 2]);
    Ok(Some(MultiplierConfig {
        embedding: one("embedding_multiplier")?,
        head: one("lm_head_multiplier")?,
        attention_in: one("attention_in_multiplier")?,
        attention_out: one("attention_out_multiplier")?,
        key: one("key_multiplier")?,
        ssm_in: one("ssm_in_multiplier")?,
        ssm_out: one("ssm_out_multiplier")?,
        ssm,
        gate,
        down,
    }))
}

fn architecture(config: &Object) -> Result<Architecture, LoadError> {
    const SERVED: &str = "llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe, \
                          gemma3_text, mamba2, falcon_h1 or qwen3_next";
    match config.string("model_type")? {
        Some("llama" | "mistral") => Ok(Architecture::Llama),
        Some("mixtral") => Ok(Architecture::Mixtral),
        Some("qwen2") => Ok(Architecture::Qwen2),
        Some("qwen2_moe") => Ok(Architecture::Qwen2Moe),
        Some("qwen3") => Ok(Architecture::Qwen3),
        Some("qwen3_moe") => Ok(Architecture::Qwen3Moe),
        Some("gemma3_text") => Ok(Architecture::Gemma3),
        Some("mamba2") => Ok(Architecture::Mamba2),
        Some("falcon_h1") => Ok(Architecture::FalconH1),
        Some("qwen3_next") => Ok(Architecture::Qwen3Next),
        other => Err(config.wrong("model_type", SERVED, other.unwrap_or("nothing"))),
    }
}

/// Whether q, k and v have biases, and whether the projection after attention has one.
fn attention_biases(
    config: &Object,
    architecture: Architecture,
) -> Result<(bool, bool), LoadError> {
    Ok(match architecture {
        Architecture::Llama
        | Architecture::Qwen3
        | Architecture::Qwen3Moe
        | Architecture::Gemma3 => {
            let bias = config.bool("attention_bias")?.unwrap_or(false);
            (bias, bias)
        }
        Architecture::Mixtral
        | Architecture::Mamba2
        | Architecture::FalconH1
        | Architecture::Qwen3Next => (false, false),
        Architecture::Qwen2 => (config.bool("attention_bias")?.unwrap_or(true), false),
        Architecture::Qwen2Moe => (config.bool("qkv_bias")?.unwrap_or(true), false),
    })
}

/// The experts of an architecture that has them. Fields that are missing have the defaults of
/// transformers, except sizes.
fn experts(
    config: &Object,
    architecture: Architecture,
    layers: usize,
) -> Result<Option<ExpertConfig>, LoadError> {
    let (mut name, mut other) = ("num_experts", "num_local_experts");
    let (intermediate, shared) = match architecture {
        Architecture::Llama
        | Architecture::Qwen2
        | Architecture::Qwen3
        | Architecture::Gemma3
        | Architecture::Mamba2
        | Architecture::FalconH1 => return Ok(None),
        Architecture::Mixtral => {
            (name, other) = (other, name);
            ("intermediate_size", None)
        }
        Architecture::Qwen2Moe | Architecture::Qwen3Next => {
            ("moe_intermediate_size", Some("shared_expert_intermediate_size"))
        }
        Architecture::Qwen3Moe => ("moe_intermediate_size", None),
    };
    // transformers writes one or the other, and each version reads both.
    if config.value[name].is_null() && !config.value[other].is_null() {
        name = other;
    }
    let count = config.size_up_to(name, EXPERTS_MAX)?;
    let used = config.size("num_experts_per_tok")?;
    if used > count {
        let expected = format!("at most the {count} of {name}");
        return Err(config.wrong("num_experts_per_tok", expected, used));
    }
    let is_mixtral = architecture == Architecture::Mixtral;
    Ok(Some(ExpertConfig {
        count,
        used,
        intermediate: config.size(intermediate)?,
        shared_intermediate: shared.map(|field| config.size(field)).transpose()?,
        normalised: is_mixtral
            || config.bool("norm_topk_prob")?.unwrap_or(architecture == Architecture::Qwen3Next),
        dense_layers: if is_mixtral { Vec::new() } else { dense_layers(config, layers)? },
    }))
}

/// The layers without experts: those of a list, and those between every `decoder_sparse_step`-th.
fn dense_layers(config: &Object, layers: usize) -> Result<Vec<usize>, LoadError> {
    let step = config.optional_size("decoder_sparse_step")?.unwrap_or(1);
    let listed = config.field("mlp_only_layers", "a list of layers", |value| {
        value.as_array()?.iter().map(Value::as_u64).collect::<Option<BTreeSet<u64>>>()
    })?;
    let listed = listed.unwrap_or_default();
    let is_dense =
        |&layer: &usize| !(layer + 1).is_multiple_of(step) || listed.contains(&(layer as u64));
    Ok((0..layers).filter(is_dense).collect())
}

/// The window and the layers that have it, with the defaults of transformers.
fn window(
    config: &Object,
    architecture: Architecture,
    layers: usize,
) -> Result<Option<WindowConfig>, LoadError> {
    if architecture == Architecture::Qwen3Next {
        return Ok(None);
    }
    let is_used = match architecture {
        Architecture::Llama => config.string("model_type")? == Some("mistral"),
        Architecture::Mixtral | Architecture::Gemma3 => true,
        Architecture::Mamba2 | Architecture::FalconH1 | Architecture::Qwen3Next => false,
        // Qwen's files contain a window that a switch disables.
        Architecture::Qwen2
        | Architecture::Qwen2Moe
        | Architecture::Qwen3
        | Architecture::Qwen3Moe => config.bool("use_sliding_window")?.unwrap_or(false),
    };
    if architecture == Architecture::Llama && !is_used && !config.value["sliding_window"].is_null()
    {
        return Err(config.wrong("sliding_window", "null", &config.value["sliding_window"]));
    }
    let tokens = match is_used {
        false => None,
        // Without the field, a window has this size.
        true if config.value.get("sliding_window").is_none() => {
            (architecture != Architecture::Mixtral).then_some(4096)
        }
        true => config.optional_size("sliding_window")?,
    };
    let full_layers = full_layers(config, architecture, layers, tokens.is_some())?;
    match tokens {
        Some(tokens) if full_layers.len() < layers => {
            Ok(Some(WindowConfig { tokens: tokens as u32, full_layers }))
        }
        _ => Ok(None),
    }
}

/// The layers without a window.
fn full_layers(
    config: &Object,
    architecture: Architecture,
    layers: usize,
    has_window: bool,
) -> Result<Vec<usize>, LoadError> {
    let listed = config.layer_kinds(layers)?;
    let from = config.u32("max_window_layers")?.unwrap_or(28) as usize;
    let period = config.optional_size("sliding_window_pattern")?.unwrap_or(GemmaConfig::PERIOD);
    let is_full = |layer: usize| match architecture {
        _ if listed.is_some() => listed.is_some_and(|list| list[layer] == "full_attention"),
        Architecture::Qwen2Moe => !has_window || !layer.is_multiple_of(2) || layer >= from,
        Architecture::Qwen2 | Architecture::Qwen3 => !has_window || layer < from,
        Architecture::Gemma3 => (layer + 1).is_multiple_of(period),
        Architecture::Llama
        | Architecture::Mixtral
        | Architecture::Qwen3Moe
        | Architecture::Mamba2
        | Architecture::FalconH1
        | Architecture::Qwen3Next => !has_window,
    };
    let full: Vec<usize> = (0..layers).filter(|&layer| is_full(layer)).collect();
    // transformers does not read the list of these architectures.
    let has_windows_alone = matches!(
        architecture,
        Architecture::Llama | Architecture::Mixtral | Architecture::Qwen3Moe
    );
    if !has_window && full.len() < layers {
        let found = &config.value["sliding_window"];
        let expected =
            "a window that is used, because layers of the kind sliding_attention have one";
        return Err(config.wrong("sliding_window", expected, found));
    }
    if has_window && has_windows_alone && !full.is_empty() {
        let expected = "sliding_attention in all layers, because sliding_window is set";
        return Err(config.wrong("layer_types", expected, "full_attention"));
    }
    Ok(full)
}

/// Gemma's formulas, with the defaults of transformers.
fn gemma(config: &Object, architecture: Architecture) -> Result<Option<GemmaConfig>, LoadError> {
    if architecture != Architecture::Gemma3 {
        return Ok(None);
    }
    let new = match config.object("rope_parameters")? {
        Some(kinds) => kinds.object("sliding_attention")?,
        None => None,
    };
    let window_rope_theta = match &new {
        Some(new) => {
            let kind = new.string("rope_type")?.unwrap_or("default");
            if kind != "default" {
                return Err(new.wrong("rope_type", "default", kind));
            }
            refuse_rope_fields(new, architecture)?;
            new.theta("rope_theta")?
        }
        None => None,
    };
    let window_rope_theta = window_rope_theta.or(config.theta("rope_local_base_freq")?);
    Ok(Some(GemmaConfig {
        query_scalar: config.positive("query_pre_attn_scalar")?.unwrap_or(256.0),
        window_rope_theta: window_rope_theta.unwrap_or(GemmaConfig::WINDOW_ROPE_THETA),
        norm_offset: 1.0,
        logit_cap: config.positive("final_logit_softcapping")?,
    }))
}

/// The object of rotations in the new spelling, and the one with their scaling in either spelling.
/// Gemma has objects for each kind of layer, and here are those of full layers.
fn rope_objects(config: &Object) -> Result<(Option<Object>, Option<Object>), LoadError> {
    let new = || match config.object("rope_parameters")? {
        Some(kinds) if kinds.value.get("full_attention").is_some() => {
            kinds.object("full_attention")
        }
        new => Ok(new),
    };
    let scaling = match new()? {
        None => config.object("rope_scaling")?,
        scaling => scaling,
    };
    Ok((new()?, scaling))
}

/// Base and scaling, from `rope_parameters` or from `rope_theta` and `rope_scaling`. Gemma has
/// parameters for each kind of layer, and here are those of full layers.
fn rope(
    config: &Object,
    architecture: Architecture,
    default_theta: f32,
) -> Result<(f32, RopeScaling), LoadError> {
    let (new, scaling) = rope_objects(config)?;
    let theta = match (&new, config.theta("rope_theta")?) {
        (Some(new), outer) => new.theta("rope_theta")?.or(outer),
        (None, outer) => outer,
    };
    let theta = theta.unwrap_or(default_theta);
    let Some(scaling) = &scaling else { return Ok((theta, RopeScaling::None)) };
    refuse_rope_fields(scaling, architecture)?;
    let positive = |field: &str| {
        scaling.positive(field)?.ok_or_else(|| scaling.missing(field, "a positive number"))
    };
    let original = || match scaling.u32("original_max_position_embeddings")? {
        Some(0) => Err(scaling.wrong("original_max_position_embeddings", "a positive number", 0)),
        Some(context) => Ok(context),
        None => Ok(config.size("max_position_embeddings")? as u32),
    };
    let kind = scaling.string("rope_type")?.or(scaling.string("type")?).unwrap_or("default");
    let scaling = match kind {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: positive("factor")? },
        "llama3" => RopeScaling::Llama3 {
            factor: positive("factor")?,
            low_freq_factor: positive("low_freq_factor")?,
            high_freq_factor: positive("high_freq_factor")?,
            original_context: original()?,
        },
        "yarn" => RopeScaling::Yarn {
            factor: positive("factor")?,
            original_context: original()?,
            beta_fast: scaling.number("beta_fast")?.unwrap_or(32.0),
            beta_slow: scaling.number("beta_slow")?.unwrap_or(1.0),
            attention_factor: scaling.number("attention_factor")?,
        },
        other => return Err(scaling.wrong("rope_type", "default, linear, llama3 or yarn", other)),
    };
    Ok((theta, scaling))
}

/// Fields of a rotation that change the computation.
fn refuse_rope_fields(config: &Object, architecture: Architecture) -> Result<(), LoadError> {
    for field in ["partial_rotary_factor", "mscale", "mscale_all_dim", "truncate", "mrope_section"]
    {
        let served = match field {
            "partial_rotary_factor" => {
                architecture == Architecture::Qwen3Next || config.number(field)? == Some(1.0)
            }
            "truncate" => config.bool(field)? == Some(true),
            _ => false,
        };
        if !config.value[field].is_null() && !served {
            return Err(config.wrong(field, "no such field", &config.value[field]));
        }
    }
    Ok(())
}

fn refuse_unserved(config: &Object, architecture: Architecture) -> Result<(), LoadError> {
    let is_own =
        |field: &str| architecture == Architecture::FalconH1 && field == "embedding_multiplier";
    for (field, served) in ONLY.into_iter().filter(|(field, _)| !is_own(field)) {
        let found = &config.value[field];
        if !found.is_null() && *found != served {
            return Err(config.wrong(field, served, found));
        }
    }
    let layers = config.field("layer_types", "a list of layer kinds", Value::as_array)?;
    let other = match architecture {
        Architecture::Qwen3Next => "linear_attention",
        _ => "sliding_attention",
    };
    let is_served = |kind: &&Value| **kind == "full_attention" || **kind == other;
    if let Some(unknown) = layers.into_iter().flatten().find(|kind| !is_served(kind)) {
        return Err(config.wrong("layer_types", format!("full_attention or {other}"), unknown));
    }
    refuse_activation(config, architecture)
}

/// Gemma's checkpoints have the field `hidden_activation`, or the older `hidden_act`, which
/// transformers does not read.
fn refuse_activation(config: &Object, architecture: Architecture) -> Result<(), LoadError> {
    let (field, served) = match architecture {
        Architecture::Gemma3 => ("hidden_activation", ["gelu_pytorch_tanh"; 2]),
        _ => ("hidden_act", ["silu", "swish"]),
    };
    match config.string(field)? {
        Some(other) if !served.contains(&other) => Err(config.wrong(field, served[0], other)),
        _ => Ok(()),
    }
}

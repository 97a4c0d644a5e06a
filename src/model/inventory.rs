//! The tensors that a model of a given configuration must have. A model with a missing or an extra
//! tensor is refused when it is opened.

use super::config::ModelConfig;
use super::recurrent_config::{DeltaConfig, MambaConfig, MambaNorm};
use super::tensor::RowOrder;
use super::weights::{LoadError, WeightSource};
use std::collections::BTreeSet;
use std::path::Path;

/// A tensor that a model must have.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Expected {
    /// Hugging Face's name.
    pub name: String,
    /// Output features; 1 for a vector.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
}

/// All tensors of a model, first those outside layers, then layer by layer. The fingerprint hashes
/// them in this order, so another order makes workers of other versions refuse each other.
pub fn tensors(config: &ModelConfig) -> impl Iterator<Item = Expected> + '_ {
    let ends = [
        Expected {
            name: "model.embed_tokens.weight".into(),
            rows: config.vocab,
            cols: config.hidden,
        },
        Expected { name: "model.norm.weight".into(), rows: 1, cols: config.hidden },
    ];
    let head = (!config.tied_head).then(|| Expected {
        name: "lm_head.weight".into(),
        rows: config.vocab,
        cols: config.hidden,
    });
    ends.into_iter().chain(head).chain((0..config.layers).flat_map(|index| layer(config, index)))
}

fn layer(config: &ModelConfig, index: usize) -> Vec<Expected> {
    let recurrent = match (&config.mamba, &config.delta) {
        (Some(mamba), _) => recurrent_part(config, mamba, index),
        (None, Some(delta)) if config.has_state(index) => delta_part(config, delta, index),
        _ => Vec::new(),
    };
    if config.has_mlp() {
        return [transformer_layer(config, index), recurrent].concat();
    }
    let norm = format!("model.layers.{index}.input_layernorm.weight");
    let norm = Expected { name: norm, rows: 1, cols: config.hidden };
    [vec![norm], recurrent].concat()
}

fn delta_part(config: &ModelConfig, delta: &DeltaConfig, index: usize) -> Vec<Expected> {
    let (keys, values, heads) = (delta.keys(), delta.values(), delta.value_heads);
    let mixed = match delta.by_key_head {
        true => vec![("in_proj_qkvz.weight", 2 * keys + 2 * values)],
        false => vec![("in_proj_qkv.weight", 2 * keys + values), ("in_proj_z.weight", values)],
    };
    let mixed = mixed.into_iter().map(|(part, rows)| (part, rows, config.hidden));
    let parts = [
        ("in_proj_ba.weight", 2 * heads, config.hidden),
        ("conv1d.weight", 2 * keys + values, delta.conv_width),
        ("dt_bias", 1, heads),
        ("A_log", 1, heads),
        ("norm.weight", 1, delta.value_dim),
        ("out_proj.weight", config.hidden, values),
    ];
    let name = |part| format!("model.layers.{index}.linear_attn.{part}");
    let parts = mixed.chain(parts);
    parts.map(|(part, rows, cols)| Expected { name: name(part), rows, cols }).collect()
}

fn recurrent_part(config: &ModelConfig, mamba: &MambaConfig, index: usize) -> Vec<Expected> {
    let (hidden, inner, channels) = (config.hidden, mamba.inner(), mamba.channels());
    let parts = [
        ("mamba.in_proj.weight", mamba.projected(), hidden, true),
        ("mamba.in_proj.bias", 1, mamba.projected(), mamba.input_bias),
        ("mamba.conv1d.weight", channels, mamba.conv_width, true),
        ("mamba.conv1d.bias", 1, channels, mamba.conv_bias),
        ("mamba.dt_bias", 1, mamba.heads, true),
        ("mamba.A_log", 1, mamba.heads, true),
        ("mamba.D", 1, mamba.heads, true),
        ("mamba.norm.weight", 1, inner, mamba.norm != MambaNorm::None),
        ("mamba.out_proj.weight", hidden, inner, true),
        ("mamba.out_proj.bias", 1, hidden, mamba.output_bias),
    ];
    let is_there = parts.into_iter().filter(|&(.., is_there)| is_there);
    is_there
        .map(|(part, rows, cols, _)| Expected {
            name: format!("model.layers.{index}.{part}"),
            rows,
            cols,
        })
        .collect()
}

fn transformer_layer(config: &ModelConfig, index: usize) -> Vec<Expected> {
    let hidden = config.hidden;
    let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
    let mut list = Vec::with_capacity(16);
    let mut add = |part: &str, rows, cols| {
        list.push(Expected { name: format!("model.layers.{index}.{part}"), rows, cols });
    };
    add("input_layernorm.weight", 1, hidden);
    add(config.mlp_norm_name(), 1, hidden);
    if config.gemma.is_some() {
        add("post_attention_layernorm.weight", 1, hidden);
        add("post_feedforward_layernorm.weight", 1, hidden);
    }
    let attention = [
        ("self_attn.q_proj", q, hidden, config.attention_bias),
        ("self_attn.k_proj", kv, hidden, config.attention_bias),
        ("self_attn.v_proj", kv, hidden, config.attention_bias),
        ("self_attn.o_proj", hidden, q, config.output_bias),
    ];
    let attention = attention.into_iter().filter(|_| config.has_attention(index));
    for (part, rows, cols, bias) in attention {
        // Gates lie between the queries.
        let is_double = config.delta.is_some() && part == "self_attn.q_proj";
        let rows = if is_double { rows.saturating_mul(2) } else { rows };
        add(&format!("{part}.weight"), rows, cols);
        if bias {
            add(&format!("{part}.bias"), 1, rows);
        }
    }
    let mut add_mlp = |prefix: &str, inner, bias| {
        let parts = [("gate_proj", inner, hidden), ("up_proj", inner, hidden)];
        for (part, rows, cols) in parts.into_iter().chain([("down_proj", hidden, inner)]) {
            add(&format!("{prefix}.{part}.weight"), rows, cols);
            if bias {
                add(&format!("{prefix}.{part}.bias"), 1, rows);
            }
        }
    };
    match config.layer_experts(index) {
        None => add_mlp("mlp", config.intermediate, config.mlp_bias),
        Some(experts) => {
            for expert in 0..experts.count {
                add_mlp(&format!("mlp.experts.{expert}"), experts.intermediate, false);
            }
            if let Some(inner) = experts.shared_intermediate {
                add_mlp("mlp.shared_expert", inner, false);
                add("mlp.shared_expert_gate.weight", 1, hidden);
            }
            add("mlp.gate.weight", experts.count, hidden);
        }
    }
    if config.architecture.has_head_norms() && config.has_attention(index) {
        add("self_attn.q_norm.weight", 1, config.head_dim);
        add("self_attn.k_norm.weight", 1, config.head_dim);
    }
    list
}

/// Compares `source`, which holds the tensors `present`, with the requirements of `config`.
pub fn check<'a>(
    config: &ModelConfig,
    source: &dyn WeightSource,
    present: impl IntoIterator<Item = &'a str>,
    file: &Path,
) -> Result<(), LoadError> {
    let mut known = BTreeSet::new();
    for expected in tensors(config) {
        let shape = format!("shape [{}, {}]", expected.rows, expected.cols);
        let Some(found) = source.tensor(&expected.name)? else {
            return Err(LoadError::tensor(file, expected.name, shape, "no such tensor"));
        };
        if (found.rows, found.cols) != (expected.rows, expected.cols) {
            let found = format!("shape [{}, {}]", found.rows, found.cols);
            return Err(LoadError::tensor(file, expected.name, shape, found));
        }
        if let RowOrder::RopeInterleaved { head_dim } = found.order {
            debug_assert!(head_dim.is_multiple_of(2) && found.rows.is_multiple_of(head_dim));
        }
        known.insert(expected.name);
    }
    match present.into_iter().find(|name| !known.contains(*name)) {
        None => Ok(()),
        Some(name) => Err(LoadError::tensor(
            file,
            name,
            format!("only tensors of a {:?} model", config.architecture),
            "an unknown tensor",
        )),
    }
}

//! Fields of `config.json` about recurrent layers.
//!
//! Sizes must be there. Other fields have the defaults of transformers.

use super::json_object::Object;
use crate::limits::{RECURRENT_CONV_MAX, RECURRENT_HEADS_MAX, RECURRENT_STATE_MAX};
use crate::model::config::Architecture;
use crate::model::recurrent_config::{DeltaConfig, MambaConfig, MambaNorm};
use crate::model::weights::LoadError;
use serde_json::Value;

/// The recurrent part of Mamba-2.
pub fn mamba(config: &Object) -> Result<MambaConfig, LoadError> {
    let fields = MambaFields {
        heads: "num_heads",
        head_dim: "head_dim",
        state: "state_size",
        groups: ("n_groups", 8),
        conv_width: "conv_kernel",
    };
    let sizes = mamba_sizes(config, &fields)?;
    let MambaConfig { heads, head_dim, .. } = sizes;
    let inner = config.size("hidden_size")?.saturating_mul(config.size("expand")?);
    if inner != sizes.inner() {
        let expected = format!("{heads} heads of {head_dim} elements of hidden_size");
        return Err(config.wrong("expand", expected, &config.value["expand"]));
    }
    let bias = config.bool("use_bias")?.unwrap_or(false);
    Ok(MambaConfig {
        conv_bias: config.bool("use_conv_bias")?.unwrap_or(true),
        input_bias: bias,
        output_bias: bias,
        norm: MambaNorm::AfterGate,
        ..sizes
    })
}

/// The recurrent part of Falcon-H1, with the defaults of transformers.
pub fn falcon_mamba(
    config: &Object,
    architecture: Architecture,
) -> Result<Option<MambaConfig>, LoadError> {
    if architecture != Architecture::FalconH1 {
        return Ok(None);
    }
    for field in ["attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"] {
        if config.bool(field)? == Some(true) {
            return Err(config.wrong(field, "false", "true"));
        }
    }
    let fields = MambaFields {
        heads: "mamba_n_heads",
        head_dim: "mamba_d_head",
        state: "mamba_d_state",
        groups: ("mamba_n_groups", 1),
        conv_width: "mamba_d_conv",
    };
    let sizes = mamba_sizes(config, &fields)?;
    let MambaConfig { heads, head_dim, .. } = sizes;
    let inner = match config.optional_size("mamba_d_ssm")? {
        Some(inner) => inner,
        None => config.size("hidden_size")?.saturating_mul(config.size("mamba_expand")?),
    };
    if inner != sizes.inner() {
        let expected = format!("{heads} heads of {head_dim} elements");
        return Err(config.wrong("mamba_d_ssm", expected, inner));
    }
    let has_norm = config.bool("mamba_rms_norm")?.unwrap_or(false);
    let is_before = config.bool("mamba_norm_before_gate")?.unwrap_or(true);
    Ok(Some(MambaConfig {
        conv_bias: config.bool("mamba_conv_bias")?.unwrap_or(true),
        norm: match (has_norm, is_before) {
            (false, _) => MambaNorm::None,
            (true, true) => MambaNorm::BeforeGate,
            (true, false) => MambaNorm::AfterGate,
        },
        ..sizes
    }))
}

/// The layers of Qwen3-Next with a gated delta net, with the defaults of transformers.
pub fn delta(config: &Object, layers: usize, rotary_dim: usize) -> Result<DeltaConfig, LoadError> {
    if config.bool("attention_bias")? == Some(true) {
        return Err(config.wrong("attention_bias", "false", "true"));
    }
    let key_heads = config.size_up_to("linear_num_key_heads", RECURRENT_HEADS_MAX)?;
    let value_heads = config.size_up_to("linear_num_value_heads", RECURRENT_HEADS_MAX)?;
    if !value_heads.is_multiple_of(key_heads) {
        let expected = format!("a multiple of {key_heads}");
        return Err(config.wrong("linear_num_value_heads", expected, value_heads));
    }
    let conv_width = conv_width(config, "linear_conv_kernel_dim")?;
    let period = config.optional_size("full_attention_interval")?.unwrap_or(DeltaConfig::PERIOD);
    let listed = config.layer_kinds(layers)?;
    let is_full = |layer: &usize| match listed {
        Some(list) => list[*layer] == "full_attention",
        None => (layer + 1).is_multiple_of(period),
    };
    let full_layers: Vec<usize> = (0..layers).filter(is_full).collect();
    if full_layers.is_empty() || full_layers.len() == layers {
        let expected = "layers of both kinds, full_attention and linear_attention";
        return Err(config.wrong("layer_types", expected, "one kind"));
    }
    Ok(DeltaConfig {
        key_heads,
        value_heads,
        key_dim: config.size_up_to("linear_key_head_dim", RECURRENT_STATE_MAX)?,
        value_dim: config.size_up_to("linear_value_head_dim", RECURRENT_STATE_MAX)?,
        conv_width,
        full_layers,
        rotary_dim,
        by_key_head: true,
        log_decay: true,
        norm_offset: 1.0,
    })
}

/// The fields of the sizes of a recurrent part.
struct MambaFields {
    heads: &'static str,
    head_dim: &'static str,
    state: &'static str,
    /// With the number of groups if the field is missing.
    groups: (&'static str, usize),
    conv_width: &'static str,
}

/// The sizes of a recurrent part, without biases and norm.
fn mamba_sizes(config: &Object, fields: &MambaFields) -> Result<MambaConfig, LoadError> {
    let heads = config.size_up_to(fields.heads, RECURRENT_HEADS_MAX)?;
    let (groups_field, default) = fields.groups;
    let groups = config.optional_size(groups_field)?.unwrap_or(default);
    if !heads.is_multiple_of(groups) {
        return Err(config.wrong(groups_field, format!("a divisor of {heads}"), groups));
    }
    let conv_width = conv_width(config, fields.conv_width)?;
    let limit = &config.value["time_step_limit"];
    // transformers 5 spells an infinity as an object.
    let is_endless = |high: &Value| *high == "inf" || high["__float__"] == "Infinity";
    let is_served = match limit.as_array().map(Vec::as_slice) {
        Some([low, high]) => low.as_f64() == Some(0.0) && is_endless(high),
        _ => limit.is_null(),
    };
    if !is_served {
        return Err(config.wrong("time_step_limit", "[0.0, Infinity]", limit));
    }
    Ok(MambaConfig {
        heads,
        head_dim: config.size_up_to(fields.head_dim, RECURRENT_STATE_MAX)?,
        state: config.size_up_to(fields.state, RECURRENT_STATE_MAX)?,
        groups,
        conv_width,
        conv_bias: false,
        input_bias: false,
        output_bias: false,
        norm: MambaNorm::None,
        log_decay: true,
    })
}

/// The tokens that the convolution sees.
fn conv_width(config: &Object, field: &str) -> Result<usize, LoadError> {
    match config.optional_size(field)?.unwrap_or(4) {
        width if (2..=RECURRENT_CONV_MAX).contains(&width) => Ok(width),
        width => Err(config.wrong(field, format!("2 to {RECURRENT_CONV_MAX}"), width)),
    }
}

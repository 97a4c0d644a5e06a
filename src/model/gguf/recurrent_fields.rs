//! The keys of recurrent layers.

use super::config::{Reader, eos};
use crate::limits::{RECURRENT_CONV_MAX, RECURRENT_HEADS_MAX, RECURRENT_STATE_MAX};
use crate::model::config::ModelConfig;
use crate::model::recurrent_config::{DeltaConfig, MambaConfig, MambaNorm, recurrent_context};
use crate::model::weights::LoadError;

/// Sizes that all kinds of recurrent layers have.
struct Sizes {
    /// Heads of the state.
    heads: usize,
    /// Elements of a head's output.
    head_dim: usize,
    /// Rows of a head's state.
    state: usize,
    /// Groups that share B and C, or key heads; a divisor of `heads`.
    groups: usize,
    conv_width: usize,
}

impl Reader<'_> {
    /// A model of recurrent layers.
    pub fn recurrent(&self, hidden: usize, layers: usize) -> Result<ModelConfig, LoadError> {
        Ok(ModelConfig {
            hidden,
            layers,
            vocab: self.vocab()?,
            context: recurrent_context(Some(self.size("context_length")?)),
            norm_eps: self.epsilon()?,
            tied_head: !self.has("output.weight"),
            bos: self.metadata.u32("tokenizer.ggml.bos_token_id")?,
            eos: eos(self.metadata)?,
            ..ModelConfig::of_mamba(self.mamba()?)
        })
    }

    /// The recurrent part of Mamba-2 and of Falcon-H1.
    pub fn mamba(&self) -> Result<MambaConfig, LoadError> {
        let sizes = self.recurrent_sizes()?;
        // Only Falcon-H1 can be without a norm. The files do not say where it is; llama.cpp has it
        // after the gate.
        let has_norm = self.name == "mamba2" || self.has("blk.0.ssm_norm.weight");
        Ok(MambaConfig {
            heads: sizes.heads,
            head_dim: sizes.head_dim,
            state: sizes.state,
            groups: sizes.groups,
            conv_width: sizes.conv_width,
            conv_bias: self.has("blk.0.ssm_conv1d.bias"),
            input_bias: self.has("blk.0.ssm_in.bias"),
            output_bias: self.has("blk.0.ssm_out.bias"),
            norm: if has_norm { MambaNorm::AfterGate } else { MambaNorm::None },
            log_decay: false,
        })
    }

    /// The layers of Qwen3-Next with a gated delta net.
    pub fn delta(&self, layers: usize, head_dim: usize) -> Result<DeltaConfig, LoadError> {
        const PERIOD: &str = "full_attention_interval";
        let sizes = self.recurrent_sizes()?;
        let period = self.optional_size(PERIOD)?.unwrap_or(DeltaConfig::PERIOD);
        let is_full = |layer: &usize| (layer + 1).is_multiple_of(period);
        let full_layers: Vec<usize> = (0..layers).filter(is_full).collect();
        if full_layers.is_empty() || full_layers.len() == layers {
            return Err(self.wrong(PERIOD, "a period that leaves layers of both kinds", period));
        }
        let rotary_dim = self.size("rope.dimension_count")?;
        if rotary_dim > head_dim || !rotary_dim.is_multiple_of(2) {
            let expected = format!("an even number up to {head_dim}");
            return Err(self.wrong("rope.dimension_count", expected, rotary_dim));
        }
        Ok(DeltaConfig {
            key_heads: sizes.groups,
            value_heads: sizes.heads,
            key_dim: sizes.state,
            value_dim: sizes.head_dim,
            conv_width: sizes.conv_width,
            full_layers,
            rotary_dim,
            by_key_head: self.has("blk.0.ssm_in.weight"),
            log_decay: false,
            norm_offset: 0.0,
        })
    }

    fn recurrent_sizes(&self) -> Result<Sizes, LoadError> {
        let heads = self.size_up_to("ssm.time_step_rank", RECURRENT_HEADS_MAX)?;
        let inner = self.size_up_to("ssm.inner_size", heads * RECURRENT_STATE_MAX)?;
        if !inner.is_multiple_of(heads) {
            let expected = format!("a multiple of the {heads} heads of ssm.time_step_rank");
            return Err(self.wrong("ssm.inner_size", expected, inner));
        }
        let groups = self.size("ssm.group_count")?;
        if !heads.is_multiple_of(groups) {
            return Err(self.wrong("ssm.group_count", format!("a divisor of {heads}"), groups));
        }
        let conv_width = self.size("ssm.conv_kernel")?;
        if !(2..=RECURRENT_CONV_MAX).contains(&conv_width) {
            let expected = format!("2 to {RECURRENT_CONV_MAX}");
            return Err(self.wrong("ssm.conv_kernel", expected, conv_width));
        }
        Ok(Sizes {
            heads,
            head_dim: inner / heads,
            state: self.size_up_to("ssm.state_size", RECURRENT_STATE_MAX)?,
            groups,
            conv_width,
        })
    }
}

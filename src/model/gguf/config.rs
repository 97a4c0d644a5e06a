//! Reads the configuration of a model from its GGUF metadata. It refuses features that change
//! results and are not supported, and names them. A model without them would write fluent but wrong
//! text.

use super::header::Value;
use super::metadata::Metadata;
use super::names;
use crate::limits::{EXPERTS_MAX, HEAD_DIM_MAX, HEADS_MAX, HIDDEN_MAX, MODEL_LAYERS_MAX};
use crate::model::config::{
    Architecture, ExpertConfig, GemmaConfig, ModelConfig, RopeScaling, WindowConfig,
};
use crate::model::tensor::{TensorPlace, TensorType};
use crate::model::weights::LoadError;

/// Keys below the architecture that change the computation and are not supported.
const REFUSED: [&str; 21] = [
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attn_logit_softcapping",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "expert_group_count",
    "expert_group_used_count",
    "expert_group_scale",
    "experts_per_group",
    "expert_chunk_feed_forward_length",
    "moe_every_n_layers",
    "moe_latent_size",
    "leading_dense_block_count",
    "attention.layer_norm_epsilon",
    "rope.scale_linear",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_log_multiplier",
    "nextn_predict_layers",
];

/// Reads the configuration and checks it for consistency.
pub fn read(metadata: &Metadata<'_>) -> Result<ModelConfig, LoadError> {
    let (name, architecture) = read_architecture(metadata)?;
    let reader = Reader { metadata, name };
    reader.refuse_unserved()?;

    let hidden = reader.size_up_to("embedding_length", HIDDEN_MAX)?;
    let layers = reader.size_up_to("block_count", MODEL_LAYERS_MAX)?;
    if architecture == Architecture::Mamba2 {
        return reader.recurrent(hidden, layers);
    }
    let [heads, kv_heads, head_dim] = reader.heads(hidden)?;
    let is_next = architecture == Architecture::Qwen3Next;
    if !is_next {
        reader.equal("rope.dimension_count", head_dim)?;
    }
    let is_gemma = architecture == Architecture::Gemma3;
    let default_theta = if is_gemma { GemmaConfig::ROPE_THETA } else { 1e4 };
    let rope_theta = reader.theta("rope.freq_base")?.unwrap_or(default_theta);
    let rope_scaling = match metadata.header.tensors.get(names::ROPE_FACTORS) {
        None => reader.rope_scaling()?,
        Some(factors) => llama3_scaling(metadata, factors, rope_theta, head_dim)?,
    };
    Ok(ModelConfig {
        architecture,
        hidden,
        layers,
        heads,
        kv_heads,
        head_dim,
        intermediate: reader.size("feed_forward_length")?,
        vocab: reader.vocab()?,
        context: reader.size("context_length")?,
        norm_eps: reader.epsilon()?,
        rope_theta,
        rope_scaling,
        tied_head: !reader.has("output.weight"),
        attention_bias: reader.has("blk.0.attn_q.bias"),
        output_bias: reader.has("blk.0.attn_output.bias"),
        mlp_bias: reader.has("blk.0.ffn_up.bias"),
        bos: metadata.u32("tokenizer.ggml.bos_token_id")?,
        eos: eos(metadata)?,
        experts: reader.experts(architecture, layers)?,
        window: if is_gemma { reader.window(layers)? } else { None },
        gemma: if is_gemma { Some(reader.gemma(layers, hidden / heads, head_dim)?) } else { None },
        mamba: if architecture == Architecture::FalconH1 { Some(reader.mamba()?) } else { None },
        // The converter to GGUF has applied them.
        multipliers: None,
        delta: if is_next { Some(reader.delta(layers, head_dim)?) } else { None },
    })
}

/// The architecture, and its name in the file, which is the prefix of its keys.
fn read_architecture<'a>(metadata: &Metadata<'a>) -> Result<(&'a str, Architecture), LoadError> {
    const KEY: &str = "general.architecture";
    const SERVED: &str = "llama, qwen2, qwen2moe, qwen3, qwen3moe, gemma3, mamba2, falcon-h1 or \
                          qwen3next";
    let name = metadata.string(KEY)?.ok_or_else(|| metadata.missing(KEY, SERVED))?;
    let architecture = match name {
        // Mixtral has no name of its own.
        "llama" if metadata.u32("llama.expert_count")?.unwrap_or(0) > 0 => Architecture::Mixtral,
        "llama" => Architecture::Llama,
        "qwen2" => Architecture::Qwen2,
        "qwen2moe" => Architecture::Qwen2Moe,
        "qwen3" => Architecture::Qwen3,
        "qwen3moe" => Architecture::Qwen3Moe,
        "gemma3" => Architecture::Gemma3,
        "mamba2" => Architecture::Mamba2,
        "falcon-h1" => Architecture::FalconH1,
        "qwen3next" => Architecture::Qwen3Next,
        _ => return Err(LoadError::field(metadata.file, KEY, SERVED, name)),
    };
    Ok((name, architecture))
}

/// Tokens that end a turn or a message. Many files have no key for them, and llama.cpp finds them
/// by these texts.
const TURN_ENDS: [&str; 5] = ["<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>"];

/// Ids for end of sequence, turn and message. Each of them ends a generation.
pub(super) fn eos(metadata: &Metadata<'_>) -> Result<Vec<u32>, LoadError> {
    let mut ids = Vec::new();
    for name in ["eos", "eot", "eom"] {
        let id = metadata.u32(&format!("tokenizer.ggml.{name}_token_id"))?;
        ids.extend(id.filter(|id| !ids.contains(id)));
    }
    let tokens = metadata.strings("tokenizer.ggml.tokens")?.unwrap_or_default();
    for (id, _) in (0..).zip(tokens).filter(|(_, token)| TURN_ENDS.contains(token)) {
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    Ok(ids)
}

/// Reads the keys of one architecture.
pub(super) struct Reader<'a> {
    pub metadata: &'a Metadata<'a>,
    /// The architecture's name in the file, which is the prefix of its keys.
    pub name: &'a str,
}

impl Reader<'_> {
    fn key(&self, part: &str) -> String {
        format!("{}.{part}", self.name)
    }

    pub fn wrong(
        &self,
        part: &str,
        expected: impl std::fmt::Display,
        found: impl std::fmt::Display,
    ) -> LoadError {
        LoadError::field(self.metadata.file, self.key(part), expected, found)
    }

    pub fn optional_size(&self, part: &str) -> Result<Option<usize>, LoadError> {
        let size = self.metadata.u32(&self.key(part))?;
        match size {
            Some(0) => Err(self.wrong(part, "a positive number", 0)),
            _ => Ok(size.map(|n| n as usize)),
        }
    }

    pub fn size(&self, part: &str) -> Result<usize, LoadError> {
        self.optional_size(part)?
            .ok_or_else(|| self.metadata.missing(&self.key(part), "a positive number"))
    }

    pub fn size_up_to(&self, part: &str, most: usize) -> Result<usize, LoadError> {
        match self.size(part)? {
            size if size <= most => Ok(size),
            size => Err(self.wrong(part, format!("at most {most}"), size)),
        }
    }

    /// Checks that `part`, if present, has the value `value`.
    pub fn equal(&self, part: &str, value: usize) -> Result<(), LoadError> {
        match self.optional_size(part)? {
            Some(found) if found != value => Err(self.wrong(part, value, found)),
            _ => Ok(()),
        }
    }

    /// Query heads, KV heads and the size of a head.
    fn heads(&self, hidden: usize) -> Result<[usize; 3], LoadError> {
        let heads = self.size_up_to("attention.head_count", HEADS_MAX)?;
        let kv_heads = self.optional_size("attention.head_count_kv")?.unwrap_or(heads);
        let head_dim = self.optional_size("attention.key_length")?.unwrap_or(hidden / heads);
        self.equal("attention.value_length", head_dim)?;
        if !heads.is_multiple_of(kv_heads) {
            let expected = format!("a divisor of {heads}");
            return Err(self.wrong("attention.head_count_kv", expected, kv_heads));
        }
        if !head_dim.is_multiple_of(2) || !(2..=HEAD_DIM_MAX).contains(&head_dim) {
            let expected = format!("an even head size up to {HEAD_DIM_MAX}");
            return Err(self.wrong("attention.key_length", expected, head_dim));
        }
        Ok([heads, kv_heads, head_dim])
    }

    /// Whether the file has a tensor with this name.
    pub fn has(&self, tensor: &str) -> bool {
        self.metadata.header.tensors.contains_key(tensor)
    }

    /// Rows of the embedding.
    pub fn vocab(&self) -> Result<usize, LoadError> {
        const NAME: &str = "token_embd.weight";
        let metadata = self.metadata;
        let embedding = metadata.header.tensors.get(NAME).ok_or_else(|| {
            LoadError::tensor(metadata.file, NAME, "the embedding", "no such tensor")
        })?;
        self.equal("vocab_size", embedding.rows)?;
        Ok(embedding.rows)
    }

    pub fn epsilon(&self) -> Result<f32, LoadError> {
        let key = self.key("attention.layer_norm_rms_epsilon");
        self.metadata.f32(&key)?.ok_or_else(|| self.metadata.missing(&key, "a number"))
    }

    fn refuse_unserved(&self) -> Result<(), LoadError> {
        if self.name == "falcon-h1" {
            self.refuse_falcon_without_multipliers()?;
        }
        let windows = ["attention.sliding_window", "final_logit_softcapping"];
        let windows = if self.name == "gemma3" { &[][..] } else { &windows };
        REFUSED.iter().chain(windows).try_for_each(|part| self.refuse(part))
    }

    /// Refuses files of Falcon-H1 that have no multipliers in their weights. The fork of llama.cpp
    /// by the model's authors has them as keys, and the base of rotation under another key. The
    /// weights of a tied head have the multiplier of the embedding.
    fn refuse_falcon_without_multipliers(&self) -> Result<(), LoadError> {
        ["ssm.has_mup", "mlp_gate_multiplier", "mlp_down_multiplier"]
            .into_iter()
            .try_for_each(|part| self.refuse(part))?;
        if !self.has("output.weight") {
            let (file, expected) = (self.metadata.file, "a head, because it has a multiplier");
            return Err(LoadError::tensor(file, "output.weight", expected, "no such tensor"));
        }
        match self.theta("rope.freq_base")? {
            Some(_) => Ok(()),
            None => Err(self.metadata.missing(&self.key("rope.freq_base"), "a number")),
        }
    }

    /// Checks that `part` is not present, or zero.
    fn refuse(&self, part: &str) -> Result<(), LoadError> {
        match self.metadata.header.metadata.get(&self.key(part)) {
            None | Some(Value::Unsigned(0) | Value::Signed(0)) => Ok(()),
            Some(Value::Float(x)) if *x == 0.0 => Ok(()),
            Some(found) => Err(self.wrong(part, "no such field", format!("{found:?}"))),
        }
    }

    /// The experts of an architecture that has them. Layers without an expert router are dense.
    fn experts(
        &self,
        architecture: Architecture,
        layers: usize,
    ) -> Result<Option<ExpertConfig>, LoadError> {
        let shared_intermediate = match architecture {
            Architecture::Llama
            | Architecture::Qwen2
            | Architecture::Qwen3
            | Architecture::Gemma3
            | Architecture::Mamba2
            | Architecture::FalconH1 => {
                self.refuse("expert_count")?;
                return Ok(None);
            }
            Architecture::Qwen2Moe | Architecture::Qwen3Next => {
                Some(self.size("expert_shared_feed_forward_length")?)
            }
            Architecture::Mixtral | Architecture::Qwen3Moe => None,
        };
        let count = self.size_up_to("expert_count", EXPERTS_MAX)?;
        let used = self.size("expert_used_count")?;
        if used > count {
            let expected = format!("at most the {count} of expert_count");
            return Err(self.wrong("expert_used_count", expected, used));
        }
        // 1 is the softmax.
        self.equal("expert_gating_func", 1)?;
        let scale = self.metadata.f32(&self.key("expert_weights_scale"))?;
        if let Some(scale) = scale.filter(|&scale| scale != 0.0 && scale != 1.0) {
            return Err(self.wrong("expert_weights_scale", 1, scale));
        }
        let intermediate = match self.optional_size("expert_feed_forward_length")? {
            None if architecture == Architecture::Mixtral => self.size("feed_forward_length")?,
            None => self.size("expert_feed_forward_length")?,
            Some(intermediate) => intermediate,
        };
        // Without the key, llama.cpp normalises the weights of all but one architecture.
        let normalised = self.metadata.bool(&self.key("expert_weights_norm"))?;
        let is_dense = |layer: &usize| {
            !self.metadata.header.tensors.contains_key(&format!("blk.{layer}.ffn_gate_inp.weight"))
        };
        Ok(Some(ExpertConfig {
            count,
            used,
            intermediate,
            shared_intermediate,
            normalised: normalised.unwrap_or(architecture != Architecture::Qwen2Moe),
            dense_layers: (0..layers).filter(is_dense).collect(),
        }))
    }

    /// The base of rotary frequencies.
    fn theta(&self, part: &str) -> Result<Option<f32>, LoadError> {
        match self.metadata.f32(&self.key(part))? {
            Some(theta) if !theta.is_finite() || theta <= 1.0 => {
                Err(self.wrong(part, "a finite number above 1", theta))
            }
            theta => Ok(theta),
        }
    }

    /// Gemma's windows.
    fn window(&self, layers: usize) -> Result<Option<WindowConfig>, LoadError> {
        let tokens = self.size("attention.sliding_window")? as u32;
        let period = self.optional_size("attention.sliding_window_pattern")?;
        Ok(WindowConfig::periodic(tokens, period.unwrap_or(GemmaConfig::PERIOD), layers))
    }

    fn gemma(
        &self,
        layers: usize,
        hidden_per_head: usize,
        head_dim: usize,
    ) -> Result<GemmaConfig, LoadError> {
        let cap = self.metadata.f32(&self.key("final_logit_softcapping"))?;
        if let Some(cap) = cap.filter(|&cap| !(0.0..f32::INFINITY).contains(&cap)) {
            return Err(self.wrong("final_logit_softcapping", "a positive number", cap));
        }
        // Files do not hold the scalar. Gemma 3 27B, which alone has 62 layers, has another one.
        let query_scalar = if layers == 62 { hidden_per_head } else { head_dim };
        Ok(GemmaConfig {
            query_scalar: query_scalar as f32,
            window_rope_theta: self
                .theta("rope.freq_base_swa")?
                .unwrap_or(GemmaConfig::WINDOW_ROPE_THETA),
            // The converter to GGUF has added it.
            norm_offset: 0.0,
            logit_cap: cap.filter(|&cap| cap != 0.0),
        })
    }

    fn rope_scaling(&self) -> Result<RopeScaling, LoadError> {
        let field = "rope.scaling.type";
        let kind = self.metadata.string(&self.key(field))?.unwrap_or("none");
        let number = |part: &str| self.metadata.f32(&self.key(part));
        let factor = || {
            let factor = number("rope.scaling.factor")?;
            match factor {
                Some(factor) if factor >= 1.0 => Ok(factor),
                Some(factor) => Err(self.wrong("rope.scaling.factor", "at least 1", factor)),
                None => Err(self.metadata.missing(&self.key("rope.scaling.factor"), "at least 1")),
            }
        };
        match kind {
            "none" => Ok(RopeScaling::None),
            "linear" => Ok(RopeScaling::Linear { factor: factor()? }),
            "yarn" => {
                let factor = factor()?;
                let given = number("rope.scaling.attn_factor")?;
                Ok(RopeScaling::Yarn {
                    factor,
                    original_context: self
                        .metadata
                        .required_u32(&self.key("rope.scaling.original_context_length"))?,
                    beta_fast: number("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                    beta_slow: number("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                    // ggml multiplies YaRN's own factor by the given one.
                    attention_factor: given.map(|given| given * (0.1 * factor.ln() + 1.0)),
                })
            }
            other => Err(self.wrong(field, "none, linear or yarn", other)),
        }
    }
}

/// Recovers the parameters of Llama 3 rope scaling. The files hold only the result, one divisor per
/// frequency. All published models have the parameters below and differ only in the factor. A
/// tensor with other divisors is refused.
fn llama3_scaling(
    metadata: &Metadata<'_>,
    info: &TensorPlace,
    rope_theta: f32,
    head_dim: usize,
) -> Result<RopeScaling, LoadError> {
    let refuse = |expected: &str, found: String| {
        Err(LoadError::tensor(metadata.file, names::ROPE_FACTORS, expected, found))
    };
    if info.dtype != TensorType::F32 || (info.rows, info.cols) != (1, head_dim / 2) {
        let found = format!("{:?} of shape [{}, {}]", info.dtype, info.rows, info.cols);
        return refuse(&format!("F32 of {} elements", head_dim / 2), found);
    }
    let (chunks, _) = metadata.bytes[info.data.clone()].as_chunks();
    let divisors: Vec<f32> = chunks.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
    let factor = divisors[head_dim / 2 - 1];
    let (low, high, context) = (1.0f64, 4.0f64, 8192u32);
    for (index, &found) in divisors.iter().enumerate() {
        let exponent = 2.0 * index as f64 / head_dim as f64;
        let wavelength = std::f64::consts::TAU * f64::from(rope_theta).powf(exponent);
        let rotations = f64::from(context) / wavelength;
        let blend = ((rotations - low) / (high - low)).clamp(0.0, 1.0);
        let expected = 1.0 / ((1.0 - blend) / f64::from(factor) + blend);
        let close = (f64::from(found) - expected).abs() <= 1e-3 * expected;
        if !close {
            return refuse(
                "the divisors of Llama 3 (factors 1 and 4 of 8192 tokens)",
                format!("{found} at {index} instead of {expected}"),
            );
        }
    }
    Ok(RopeScaling::Llama3 {
        factor,
        low_freq_factor: low as f32,
        high_freq_factor: high as f32,
        original_context: context,
    })
}

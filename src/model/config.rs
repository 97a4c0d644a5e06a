//! Configuration of a model: sizes and constants that the forward pass needs. Plain values, no
//! parsing.

use crate::kv::groups::KvGroups;
use crate::kv::layout::{KvDtype, KvLayout};
use crate::kv::state_layout::{StateLayout, StateShape};
use crate::model::recurrent_config::{DeltaConfig, MambaConfig, RecurrentSizes};

/// Supported kinds of decoder layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Architecture {
    /// Llama, SmolLM2, Mistral.
    Llama,
    /// Like Llama, with experts in each layer.
    Mixtral,
    /// Like Llama, with biases on q, k and v.
    Qwen2,
    /// Like Qwen2, with experts, and a shared expert beside them.
    Qwen2Moe,
    /// Like Llama, with RMS norms over each head of q and k.
    Qwen3,
    /// Like Qwen3, with experts.
    Qwen3Moe,
    /// Like Qwen3, with the formulas of [`GemmaConfig`].
    Gemma3,
    /// Layers of [`MambaConfig`] alone, without attention and without MLPs.
    Mamba2,
    /// Like Llama, with a recurrent part beside attention in each layer, and with the formulas of
    /// [`MultiplierConfig`].
    FalconH1,
    /// Like Qwen2Moe, with layers of [`DeltaConfig`]. The others have gated attention, of which a
    /// part of each head is rotated.
    Qwen3Next,
}

impl Architecture {
    /// Whether q and k have RMS norms over each head.
    pub const fn has_head_norms(self) -> bool {
        use Architecture::{Gemma3, Qwen3, Qwen3Moe, Qwen3Next};
        matches!(self, Qwen3 | Qwen3Moe | Gemma3 | Qwen3Next)
    }
}

/// The experts of a model: MLPs of which each token uses some. An expert router chooses them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExpertConfig {
    /// Experts of a layer.
    pub count: usize,
    /// Experts that one token uses; at most `count`.
    pub used: usize,
    /// Width inside one expert.
    pub intermediate: usize,
    /// Width inside the shared expert, which each token uses with a weight of its own.
    pub shared_intermediate: Option<usize>,
    /// Whether the weights of the chosen experts are divided by their sum.
    pub normalised: bool,
    /// Layers without experts, ascending.
    pub dense_layers: Vec<usize>,
}

/// Layers in which a token sees the last tokens only: window layers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WindowConfig {
    /// Tokens that a query sees, its own included; positive.
    pub tokens: u32,
    /// Layers in which a token sees all tokens before it, ascending.
    pub full_layers: Vec<usize>,
}

impl WindowConfig {
    /// Windows in all layers but every `period`-th; `None` if no layer is left.
    pub fn periodic(tokens: u32, period: usize, layers: usize) -> Option<WindowConfig> {
        let is_full = |layer: &usize| (layer + 1).is_multiple_of(period);
        let full_layers: Vec<usize> = (0..layers).filter(is_full).collect();
        (full_layers.len() < layers).then_some(WindowConfig { tokens, full_layers })
    }
}

/// Formulas of Gemma 3 that differ from Llama's. Besides these, embeddings are multiplied by
/// √hidden, the gate of the MLP is a GELU, and the outputs of attention and MLP have norms.
#[derive(Clone, PartialEq, Debug)]
pub struct GemmaConfig {
    /// Scores are divided by the root of this; positive.
    pub query_scalar: f32,
    /// Base of the rotary frequencies of window layers, which have no scaling.
    pub window_rope_theta: f32,
    /// The number that the weights of norms lack in the files.
    pub norm_offset: f32,
    /// Logits become `cap · tanh(logit / cap)`; positive.
    pub logit_cap: Option<f32>,
}

impl GemmaConfig {
    /// Period of full layers, if a file does not say it.
    pub const PERIOD: usize = 6;
    /// Base of the rotary frequencies of full layers, if a file does not say it.
    pub const ROPE_THETA: f32 = 1e6;
    /// The same of window layers.
    pub const WINDOW_ROPE_THETA: f32 = 1e4;
}

/// Multipliers of Falcon-H1, each a factor of the outputs of one projection, of the embedding or of
/// the logits.
#[derive(Clone, PartialEq, Debug)]
pub struct MultiplierConfig {
    /// Of embeddings.
    pub embedding: f32,
    /// Of logits.
    pub head: f32,
    /// Of the inputs of attention.
    pub attention_in: f32,
    /// Of the outputs of attention.
    pub attention_out: f32,
    /// Of keys.
    pub key: f32,
    /// Of the inputs of the recurrent part.
    pub ssm_in: f32,
    /// Of its outputs.
    pub ssm_out: f32,
    /// Of its gate, x, B, C and time steps, before the convolution.
    pub ssm: [f32; 5],
    /// Of the gate of the MLP.
    pub gate: f32,
    /// Of the outputs of the MLP.
    pub down: f32,
}

impl Default for MultiplierConfig {
    /// Multipliers that change nothing.
    fn default() -> MultiplierConfig {
        MultiplierConfig {
            embedding: 1.0,
            head: 1.0,
            attention_in: 1.0,
            attention_out: 1.0,
            key: 1.0,
            ssm_in: 1.0,
            ssm_out: 1.0,
            ssm: [1.0; 5],
            gate: 1.0,
            down: 1.0,
        }
    }
}

/// The function of an MLP's gate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Activation {
    /// x · sigmoid(x)
    Silu,
    /// GELU's approximation by tanh: x · (1 + tanh(√(2/π) · (x + 0.044715 x³))) / 2.
    GeluTanh,
}

/// How rotary frequencies are scaled beyond the context of the first training.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum RopeScaling {
    /// No scaling.
    None,
    /// Positions divided by `factor`.
    Linear {
        /// Divisor of positions.
        factor: f32,
    },
    /// Llama 3: frequencies of long wavelengths are divided by `factor`, those of short ones are
    /// kept, and those in between are blended.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f32,
        /// Frequencies with wavelengths above `original_context / low_freq_factor` are divided.
        low_freq_factor: f32,
        /// Frequencies with wavelengths below `original_context / high_freq_factor` are kept.
        high_freq_factor: f32,
        /// Context of the first training, in tokens.
        original_context: u32,
    },
    /// YaRN: a ramp over dimensions between interpolation and extrapolation.
    Yarn {
        /// Divisor of interpolated frequencies.
        factor: f32,
        /// Context of the first training, in tokens.
        original_context: u32,
        /// A dimension with more rotations over the original context than this is kept.
        beta_fast: f32,
        /// A dimension with fewer rotations over the original context than this is interpolated.
        beta_slow: f32,
        /// Multiplier of cos and sin; `None` means `0.1 ln(factor) + 1`.
        attention_factor: Option<f32>,
    },
}

/// Sizes, constants and special ids of a model. All sizes are positive, `kv_heads` divides `heads`,
/// and `head_dim` is even; readers check this. A model without attention has no heads, and one
/// without MLPs has no `intermediate`: these sizes are 0. Workers compare the text of all fields: a
/// new field must not change that of models without it ([`super::fingerprint`]).
#[derive(Clone, PartialEq, Debug)]
pub struct ModelConfig {
    /// Kind of layer.
    pub architecture: Architecture,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of one head; `heads * head_dim` can differ from `hidden`.
    pub head_dim: usize,
    /// Width inside the MLP of a layer without experts.
    pub intermediate: usize,
    /// Rows of the embedding and of the head.
    pub vocab: usize,
    /// Longest sequence in tokens according to the model.
    pub context: usize,
    /// Epsilon of the RMS norms.
    pub norm_eps: f32,
    /// Base of the rotary frequencies.
    pub rope_theta: f32,
    /// Scaling of the rotary frequencies.
    pub rope_scaling: RopeScaling,
    /// The embedding is also the head; there is no `lm_head.weight`.
    pub tied_head: bool,
    /// Whether q, k and v have biases.
    pub attention_bias: bool,
    /// Whether the projection after attention has a bias.
    pub output_bias: bool,
    /// Whether gate, up and down have biases.
    pub mlp_bias: bool,
    /// Beginning-of-sequence id.
    pub bos: Option<u32>,
    /// Ids that end a generation.
    pub eos: Vec<u32>,
    /// The experts, if there are any.
    pub experts: Option<ExpertConfig>,
    /// The window, if a layer has one.
    pub window: Option<WindowConfig>,
    /// Gemma's formulas.
    pub gemma: Option<GemmaConfig>,
    /// The recurrent part of layers, if there is any. Then all layers have it.
    pub mamba: Option<MambaConfig>,
    /// Falcon's multipliers.
    pub multipliers: Option<MultiplierConfig>,
    /// Layers with a gated delta net, if there are any.
    pub delta: Option<DeltaConfig>,
}

impl ModelConfig {
    /// A model of recurrent layers alone. Its own sizes are still 0.
    pub fn of_mamba(mamba: MambaConfig) -> ModelConfig {
        ModelConfig {
            architecture: Architecture::Mamba2,
            hidden: 0,
            layers: 0,
            heads: 0,
            kv_heads: 0,
            head_dim: 0,
            intermediate: 0,
            vocab: 0,
            context: 0,
            norm_eps: 0.0,
            rope_theta: 1e4,
            rope_scaling: RopeScaling::None,
            tied_head: false,
            attention_bias: false,
            output_bias: false,
            mlp_bias: false,
            bos: None,
            eos: Vec::new(),
            experts: None,
            window: None,
            gemma: None,
            mamba: Some(mamba),
            multipliers: None,
            delta: None,
        }
    }

    /// The experts of a layer; `None` if it has one MLP for all tokens.
    pub fn layer_experts(&self, layer: usize) -> Option<&ExpertConfig> {
        self.experts.as_ref().filter(|experts| !experts.dense_layers.contains(&layer))
    }

    /// How many tokens a query of a layer sees, its own included; `None` if all.
    pub fn layer_window(&self, layer: usize) -> Option<u32> {
        let window = self.window.as_ref().filter(|window| !window.full_layers.contains(&layer));
        window.map(|window| window.tokens)
    }

    /// Query heads that share a KV head; 1 without attention.
    pub fn queries_per_head(&self) -> usize {
        self.heads.checked_div(self.kv_heads).unwrap_or(1)
    }

    /// Whether a layer has attention.
    pub fn has_attention(&self, layer: usize) -> bool {
        self.heads > 0 && self.delta.as_ref().is_none_or(|delta| delta.full_layers.contains(&layer))
    }

    /// Whether a layer has recurrent state.
    pub fn has_state(&self, layer: usize) -> bool {
        self.mamba.is_some() || self.delta.is_some() && !self.has_attention(layer)
    }

    /// The sizes of recurrent layers, if there are any.
    pub fn recurrent_sizes(&self) -> Option<RecurrentSizes> {
        let mamba = self.mamba.as_ref().map(MambaConfig::sizes);
        mamba.or(self.delta.as_ref().map(DeltaConfig::sizes))
    }

    /// The state of a sequence, if there is any.
    pub fn state_shape(&self) -> Option<StateShape> {
        let layers = (0..self.layers).filter(|&layer| self.has_state(layer)).count();
        self.recurrent_sizes().map(|sizes| sizes.state_shape(layers))
    }

    /// Elements of a head that are rotated.
    pub fn rotary_dim(&self) -> usize {
        self.delta.as_ref().map_or(self.head_dim, |delta| delta.rotary_dim)
    }

    /// Whether layers have MLPs or experts.
    pub fn has_mlp(&self) -> bool {
        self.heads > 0
    }

    /// The layers that can share pages, and the layout of a pool of pages of `page_size` tokens. A
    /// page of a model without attention holds the state of a sequence, whatever the page size and
    /// the element type.
    ///
    /// # Errors
    /// The number of bytes that a page must have, if it is too small for a piece of the state.
    pub fn kv_memory(&self, page_size: u32, dtype: KvDtype) -> Result<(KvGroups, KvLayout), u64> {
        let shape = self.state_shape();
        if let Some(shape) = shape.filter(|_| self.heads == 0) {
            let StateShape { layers, pieces, piece_elements } = shape;
            let layout = KvLayout::state_slots(layers, pieces, piece_elements, KvDtype::F32);
            let layout = layout.expect("a piece has vectors of 16 elements");
            let state = StateLayout::new(shape, layout.page_bytes());
            let state = state.expect("a page holds the whole state");
            return Ok((KvGroups::of_state(self.layers, state), layout));
        }
        let is_attending: Vec<bool> =
            (0..self.layers).map(|layer| self.has_attention(layer)).collect();
        let attending = (0..self.layers).filter(|&layer| is_attending[layer]);
        let windows: Vec<_> = attending.map(|layer| self.layer_window(layer)).collect();
        let groups = KvGroups::of(&windows).among(&is_attending);
        let (heads, head_dim) = (self.kv_heads as u32, self.head_dim as u32);
        let layout = KvLayout::page_major(page_size, groups.layers(), heads, head_dim, dtype);
        let groups = match shape {
            None => groups,
            Some(shape) => match StateLayout::new(shape, layout.page_bytes()) {
                Some(state) => groups.with_state(state),
                None => return Err(shape.piece_bytes()),
            },
        };
        Ok((groups, layout))
    }

    /// The function of the MLPs' gates.
    pub fn activation(&self) -> Activation {
        if self.gemma.is_some() { Activation::GeluTanh } else { Activation::Silu }
    }

    /// Divisor of the products of queries and keys.
    pub fn score_divisor(&self) -> f32 {
        let gemma = self.gemma.as_ref();
        gemma.map_or(self.head_dim as f32, |gemma| gemma.query_scalar).sqrt()
    }

    /// Multiplier of embeddings. transformers rounds it to the type of the weights; this one is not
    /// rounded, as in llama.cpp.
    pub fn embedding_scale(&self) -> f32 {
        let multiplier = self.multipliers.as_ref().map_or(1.0, |all| all.embedding);
        if self.gemma.is_some() { (self.hidden as f32).sqrt() } else { multiplier }
    }

    /// The number that the weight of a norm with this name lacks in the files.
    pub fn norm_offset(&self, name: &str) -> f32 {
        match (&self.gemma, &self.delta) {
            (Some(gemma), _) => gemma.norm_offset,
            (None, Some(delta)) if !name.contains(".linear_attn.") => delta.norm_offset,
            _ => 0.0,
        }
    }

    /// The last part of the name of the norm before the MLP.
    pub fn mlp_norm_name(&self) -> &'static str {
        match self.architecture {
            // Gemma gives the usual name to the norm of attention's output.
            Architecture::Gemma3 => "pre_feedforward_layernorm.weight",
            Architecture::FalconH1 => "pre_ff_layernorm.weight",
            _ => "post_attention_layernorm.weight",
        }
    }
}

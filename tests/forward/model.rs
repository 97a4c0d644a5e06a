//! Models with seeded random weights, in any type, made in memory.

use baton::model::config::{
    Architecture, ExpertConfig, GemmaConfig, ModelConfig, MultiplierConfig, RopeScaling,
    WindowConfig,
};
use baton::model::recurrent_config::{DeltaConfig, MambaConfig, MambaNorm};
use baton::model::tensor::{RowOrder, TensorType, TensorView};
use baton::model::weights::{LoadError, WeightSource};
use half::{bf16, f16};
use std::collections::HashMap;

/// splitmix64
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Even over −1..1.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }
}

pub struct Tensor {
    pub dtype: TensorType,
    pub rows: usize,
    pub cols: usize,
    pub order: RowOrder,
    pub bytes: Vec<u8>,
}

pub struct Model {
    pub config: ModelConfig,
    pub tensors: HashMap<String, Tensor>,
}

impl WeightSource for Model {
    fn tensor(&self, name: &str) -> Result<Option<TensorView<'_>>, LoadError> {
        Ok(self.tensors.get(name).map(|t| TensorView {
            dtype: t.dtype,
            rows: t.rows,
            cols: t.cols,
            order: t.order,
            bytes: &t.bytes,
        }))
    }

    fn describe(&self) -> String {
        "random".into()
    }
}

/// A small Llama; tests change what they are about.
pub fn small() -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Llama,
        hidden: 64,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        intermediate: 96,
        vocab: 100,
        context: 2048,
        norm_eps: 1e-5,
        rope_theta: 10000.0,
        rope_scaling: RopeScaling::None,
        tied_head: true,
        attention_bias: false,
        output_bias: false,
        mlp_bias: false,
        bos: None,
        eos: vec![],
        experts: None,
        window: None,
        gemma: None,
        mamba: None,
        multipliers: None,
        delta: None,
    }
}

/// [`small`] with experts.
#[allow(dead_code)]
pub fn sparse() -> ModelConfig {
    let experts = ExpertConfig {
        count: 7,
        used: 3,
        intermediate: 48,
        shared_intermediate: None,
        normalised: true,
        dense_layers: vec![],
    };
    ModelConfig { architecture: Architecture::Qwen3Moe, experts: Some(experts), ..small() }
}

/// [`small`] with Gemma's formulas, and a window in the first layer.
#[allow(dead_code)]
pub fn gemma() -> ModelConfig {
    let gemma = GemmaConfig {
        query_scalar: 10.0,
        window_rope_theta: 500.0,
        norm_offset: 1.0,
        logit_cap: Some(3.0),
    };
    ModelConfig {
        architecture: Architecture::Gemma3,
        window: Some(WindowConfig { tokens: 40, full_layers: vec![1] }),
        gemma: Some(gemma),
        ..small()
    }
}

/// Two recurrent layers. Some sizes fill no vector.
#[allow(dead_code)]
pub fn recurrent() -> ModelConfig {
    let mamba = MambaConfig {
        heads: 6,
        head_dim: 20,
        state: 11,
        groups: 2,
        conv_width: 4,
        conv_bias: true,
        input_bias: false,
        output_bias: false,
        norm: MambaNorm::AfterGate,
        log_decay: true,
    };
    let ModelConfig { hidden, layers, vocab, context, norm_eps, tied_head, .. } = small();
    ModelConfig {
        hidden,
        layers,
        vocab,
        context,
        norm_eps,
        tied_head,
        ..ModelConfig::of_mamba(mamba)
    }
}

/// Three layers with a gated delta net, and one with gated attention.
#[allow(dead_code)]
pub fn delta() -> ModelConfig {
    let delta = DeltaConfig {
        key_heads: 2,
        value_heads: 6,
        key_dim: 3,
        value_dim: 12,
        conv_width: 4,
        full_layers: vec![2],
        rotary_dim: 6,
        by_key_head: true,
        log_decay: true,
        norm_offset: 1.0,
    };
    let experts = ExpertConfig { shared_intermediate: Some(96), ..sparse().experts.unwrap() };
    ModelConfig {
        architecture: Architecture::Qwen3Next,
        layers: 4,
        // A page of one token is as large as a piece of state.
        head_dim: 32,
        experts: Some(experts),
        delta: Some(delta),
        ..small()
    }
}

/// [`small`] with a recurrent part beside attention, and multipliers that all differ.
#[allow(dead_code)]
pub fn hybrid() -> ModelConfig {
    let multipliers = MultiplierConfig {
        embedding: 1.5,
        head: 0.5,
        attention_in: 1.25,
        attention_out: 0.75,
        key: 0.625,
        ssm_in: 1.125,
        ssm_out: 0.875,
        ssm: [0.5, 1.5, 0.75, 1.25, 0.375],
        gate: 0.625,
        down: 1.375,
    };
    // A piece of state is as small as a page of one token.
    let (head_dim, state, norm) = (16, 2, MambaNorm::None);
    let mamba = MambaConfig { head_dim, state, norm, ..recurrent().mamba.unwrap() };
    ModelConfig {
        architecture: Architecture::FalconH1,
        mamba: Some(mamba),
        multipliers: Some(multipliers),
        ..small()
    }
}

impl Model {
    /// Matrices of the type that `dtype` names for them, vectors in F32.
    pub fn random(config: ModelConfig, seed: u64, dtype: impl Fn(&str) -> TensorType) -> Model {
        let mut maker = Maker { tensors: HashMap::new(), random: Random(seed), dtype: &dtype };
        let c = &config;
        let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        maker.matrix("model.embed_tokens.weight", c.vocab, c.hidden, 1.0);
        if !c.tied_head {
            maker.matrix("lm_head.weight", c.vocab, c.hidden, 1.0);
        }
        maker.vector("model.norm.weight", c.hidden, 0.2, 0.1);
        for layer in 0..c.layers {
            let name = |part: &str| format!("model.layers.{layer}.{part}");
            maker.vector(&name("input_layernorm.weight"), c.hidden, 1.0, 0.3);
            if let Some(mamba) = &c.mamba {
                maker.mamba(&name("mamba"), c.hidden, mamba);
            }
            if !c.has_mlp() {
                continue;
            }
            if let Some(delta) = c.delta.as_ref().filter(|_| c.has_state(layer)) {
                maker.delta(&name("linear_attn"), c.hidden, delta);
            }
            let mlp_norm = if c.gemma.is_some() {
                "post_attention_layernorm.weight"
            } else {
                c.mlp_norm_name()
            };
            maker.vector(&name(mlp_norm), c.hidden, 1.0, 0.3);
            if c.gemma.is_some() {
                maker.vector(&name("pre_feedforward_layernorm.weight"), c.hidden, 0.2, 0.3);
                maker.vector(&name("post_feedforward_layernorm.weight"), c.hidden, -0.2, 0.3);
            }
            if c.architecture.has_head_norms() && c.has_attention(layer) {
                maker.vector(&name("self_attn.q_norm.weight"), c.head_dim, 1.0, 0.3);
                maker.vector(&name("self_attn.k_norm.weight"), c.head_dim, 1.0, 0.3);
            }
            for (part, rows, columns, bias) in [
                ("self_attn.q_proj", q, c.hidden, c.attention_bias),
                ("self_attn.k_proj", kv, c.hidden, c.attention_bias),
                ("self_attn.v_proj", kv, c.hidden, c.attention_bias),
                ("self_attn.o_proj", c.hidden, q, c.output_bias),
            ] {
                let is_double = c.delta.is_some() && part == "self_attn.q_proj";
                let rows = if is_double { 2 * rows } else { rows };
                if c.has_attention(layer) {
                    maker.linear(&name(part), rows, columns, bias);
                }
            }
            let Some(experts) = c.layer_experts(layer) else {
                maker.mlp(&name("mlp"), c.hidden, c.intermediate, c.mlp_bias);
                continue;
            };
            // Logits of a spread that makes near ties rare.
            maker.matrix(&name("mlp.gate.weight"), experts.count, c.hidden, 0.5);
            for expert in 0..experts.count {
                let name = name(&format!("mlp.experts.{expert}"));
                maker.mlp(&name, c.hidden, experts.intermediate, false);
            }
            if let Some(inside) = experts.shared_intermediate {
                maker.mlp(&name("mlp.shared_expert"), c.hidden, inside, false);
                maker.matrix(&name("mlp.shared_expert_gate.weight"), 1, c.hidden, 0.3);
            }
        }
        let tensors = maker.tensors;
        Model { config, tensors }
    }

    /// Multiplies all matrices of this part, which are F32.
    #[allow(dead_code)]
    pub fn scale(&mut self, part: &str, factor: f32) {
        for (_, tensor) in self.tensors.iter_mut().filter(|(name, _)| name.contains(part)) {
            assert_eq!(tensor.dtype, TensorType::F32);
            for bytes in tensor.bytes.chunks_exact_mut(4) {
                let value = f32::from_le_bytes(bytes.try_into().unwrap());
                bytes.copy_from_slice(&(value * factor).to_le_bytes());
            }
        }
    }
}

struct Maker<'a> {
    tensors: HashMap<String, Tensor>,
    random: Random,
    dtype: &'a dyn Fn(&str) -> TensorType,
}

impl Maker<'_> {
    fn matrix(&mut self, name: &str, rows: usize, cols: usize, spread: f32) {
        let dtype = (self.dtype)(name);
        let bytes = random_bytes(&mut self.random, dtype, rows * cols, spread);
        self.put(name, dtype, rows, cols, bytes);
    }

    fn delta(&mut self, name: &str, hidden: usize, delta: &DeltaConfig) {
        let part = |part: &str| format!("{name}.{part}");
        let (keys, values, heads) = (delta.keys(), delta.values(), delta.value_heads);
        self.linear(&part("in_proj_qkvz"), 2 * keys + 2 * values, hidden, false);
        self.linear(&part("in_proj_ba"), 2 * heads, hidden, false);
        self.linear(&part("out_proj"), hidden, values, false);
        let (channels, width) = (2 * keys + values, delta.conv_width);
        let conv = random_bytes(&mut self.random, TensorType::F32, channels * width, 0.5);
        self.put(&part("conv1d.weight"), TensorType::F32, channels, width, conv);
        self.vector(&part("dt_bias"), heads, -2.0, 2.0);
        self.vector(&part("A_log"), heads, 0.0, 1.0);
        self.vector(&part("norm.weight"), delta.value_dim, 1.0, 0.3);
    }

    fn mamba(&mut self, name: &str, hidden: usize, mamba: &MambaConfig) {
        let part = |part: &str| format!("{name}.{part}");
        let (inner, channels, width) = (mamba.inner(), mamba.channels(), mamba.conv_width);
        self.linear(&part("in_proj"), mamba.projected(), hidden, mamba.input_bias);
        self.linear(&part("out_proj"), hidden, inner, mamba.output_bias);
        let conv = random_bytes(&mut self.random, TensorType::F32, channels * width, 0.5);
        self.put(&part("conv1d.weight"), TensorType::F32, channels, width, conv);
        if mamba.conv_bias {
            self.vector(&part("conv1d.bias"), channels, 0.0, 0.5);
        }
        // Heads that forget at once, and heads that remember for hundreds of tokens.
        self.vector(&part("dt_bias"), mamba.heads, -2.0, 2.0);
        self.vector(&part("A_log"), mamba.heads, 0.0, 1.0);
        self.vector(&part("D"), mamba.heads, 1.0, 0.3);
        if mamba.norm != MambaNorm::None {
            self.vector(&part("norm.weight"), inner, 1.0, 0.3);
        }
    }

    fn linear(&mut self, name: &str, rows: usize, cols: usize, bias: bool) {
        self.matrix(&format!("{name}.weight"), rows, cols, 1.5 / (cols as f32).sqrt());
        if bias {
            self.vector(&format!("{name}.bias"), rows, 0.0, 0.5);
        }
    }

    fn mlp(&mut self, name: &str, hidden: usize, inside: usize, bias: bool) {
        self.linear(&format!("{name}.gate_proj"), inside, hidden, bias);
        self.linear(&format!("{name}.up_proj"), inside, hidden, bias);
        self.linear(&format!("{name}.down_proj"), hidden, inside, bias);
    }

    fn vector(&mut self, name: &str, len: usize, middle: f32, spread: f32) {
        let values = (0..len).flat_map(|_| (middle + spread * self.random.unit()).to_le_bytes());
        let bytes = values.collect();
        self.put(name, TensorType::F32, 1, len, bytes);
    }

    fn put(&mut self, name: &str, dtype: TensorType, rows: usize, cols: usize, bytes: Vec<u8>) {
        let tensor = Tensor { dtype, rows, cols, order: RowOrder::Natural, bytes };
        self.tensors.insert(name.into(), tensor);
    }
}

/// Weights of about `spread` in magnitude: plain numbers, or blocks of random levels with scales of
/// that magnitude.
pub fn random_bytes(
    random: &mut Random,
    dtype: TensorType,
    elements: usize,
    spread: f32,
) -> Vec<u8> {
    let (columns, size) = dtype.block();
    let mut bytes = vec![0u8; elements / columns * size];
    for block in bytes.chunks_exact_mut(size) {
        block.iter_mut().for_each(|byte| *byte = random.bits() as u8);
        let jitter = 1.0 + 0.5 * random.unit();
        let mut half = |at: usize, value: f32| {
            block[at..at + 2].copy_from_slice(&f16::from_f32(value * jitter).to_le_bytes())
        };
        match dtype {
            TensorType::F32 => block.copy_from_slice(&(spread * random.unit()).to_le_bytes()),
            TensorType::F16 => {
                block.copy_from_slice(&f16::from_f32(spread * random.unit()).to_le_bytes())
            }
            TensorType::Bf16 => {
                block.copy_from_slice(&bf16::from_f32(spread * random.unit()).to_le_bytes())
            }
            TensorType::Q8_0 => half(0, spread / 128.0),
            TensorType::Q4_0 => half(0, spread / 8.0),
            TensorType::Q5_0 => half(0, spread / 16.0),
            TensorType::Q4_1 => (half(0, spread / 8.0), half(2, -spread)).1,
            TensorType::Q5_1 => (half(0, spread / 16.0), half(2, -spread)).1,
            TensorType::Q4_K => (half(0, spread / 8.0 / 32.0), half(2, spread / 32.0)).1,
            TensorType::Q5_K => (half(0, spread / 16.0 / 32.0), half(2, spread / 32.0)).1,
            TensorType::Q6_K => half(208, spread / 32.0 / 64.0),
        }
    }
    bytes
}

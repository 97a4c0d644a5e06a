//! A slow, plain forward pass in double precision, written from the definitions.

use crate::model::Model;
use baton::kv::layout::KvDtype;
use baton::model::config::{ExpertConfig, ModelConfig, RopeScaling};
use baton::model::recurrent_config::{DeltaConfig, MambaConfig, MambaNorm};
use baton::model::tensor::{TensorType, TensorView};
use baton::model::weights::WeightSource;
use half::{bf16, f16};

fn half_at(bytes: &[u8], at: usize) -> f64 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f64()
}

/// One row's numbers, by GGUF's definitions of its blocks.
pub fn dequantise(dtype: TensorType, row: &[u8]) -> Vec<f64> {
    let (_, size) = dtype.block();
    let mut out = Vec::new();
    for b in row.chunks_exact(size) {
        let d = if size > 4 { half_at(b, 0) } else { 0.0 };
        match dtype {
            TensorType::F32 => out.push(f32::from_le_bytes(b.try_into().unwrap()) as f64),
            TensorType::F16 => out.push(half_at(b, 0)),
            TensorType::Bf16 => out.push(bf16::from_le_bytes([b[0], b[1]]).to_f64()),
            TensorType::Q8_0 => out.extend(b[2..].iter().map(|q| *q as i8 as f64 * d)),
            TensorType::Q4_0 => {
                out.extend(b[2..].iter().map(|q| ((q & 15) as f64 - 8.0) * d));
                out.extend(b[2..].iter().map(|q| ((q >> 4) as f64 - 8.0) * d));
            }
            TensorType::Q4_1 => {
                let m = half_at(b, 2);
                out.extend(b[4..].iter().map(|q| (q & 15) as f64 * d + m));
                out.extend(b[4..].iter().map(|q| (q >> 4) as f64 * d + m));
            }
            TensorType::Q5_0 | TensorType::Q5_1 => {
                let one = dtype == TensorType::Q5_1;
                let at = if one { 4 } else { 2 };
                let high = u32::from_le_bytes(b[at..at + 4].try_into().unwrap());
                for i in 0..32 {
                    let byte = b[at + 4 + i % 16];
                    let low = if i < 16 { byte & 15 } else { byte >> 4 } as u32;
                    let q = (low | (high >> i & 1) << 4) as f64;
                    out.push(if one { q * d + half_at(b, 2) } else { (q - 16.0) * d });
                }
            }
            TensorType::Q4_K | TensorType::Q5_K => k_block(dtype, b, &mut out),
            TensorType::Q6_K => {
                let d = half_at(b, 208);
                for n in 0..2 {
                    let (ql, qh, sc) = (&b[64 * n..], &b[128 + 32 * n..], &b[192 + 8 * n..]);
                    for i in 0..128 {
                        let l = i % 32;
                        let q = match i / 32 {
                            0 => ql[l] & 15 | (qh[l] & 3) << 4,
                            1 => ql[l + 32] & 15 | (qh[l] >> 2 & 3) << 4,
                            2 => ql[l] >> 4 | (qh[l] >> 4 & 3) << 4,
                            _ => ql[l + 32] >> 4 | (qh[l] >> 6 & 3) << 4,
                        };
                        out.push(d * sc[i / 16] as i8 as f64 * (q as f64 - 32.0));
                    }
                }
            }
        }
    }
    out
}

fn k_block(dtype: TensorType, b: &[u8], out: &mut Vec<f64>) {
    let (d, dmin) = (half_at(b, 0), half_at(b, 2));
    let s = &b[4..16];
    for j in 0..8 {
        let (sc, m) = if j < 4 {
            (s[j] & 63, s[j + 4] & 63)
        } else {
            (s[j + 4] & 15 | s[j - 4] >> 6 << 4, s[j + 4] >> 4 | s[j] >> 6 << 4)
        };
        for l in 0..32 {
            let q = if dtype == TensorType::Q4_K {
                b[16 + 32 * (j / 2) + l] >> (4 * (j % 2)) & 15
            } else {
                (b[48 + 32 * (j / 2) + l] >> (4 * (j % 2)) & 15) + (b[16 + l] >> j & 1) * 16
            };
            out.push(d * sc as f64 * q as f64 - dmin * m as f64);
        }
    }
}

fn matrix(view: &TensorView<'_>) -> Vec<Vec<f64>> {
    (0..view.rows).map(|row| dequantise(view.dtype, view.row(row))).collect()
}

struct Names<'a>(&'a Model);

impl Names<'_> {
    fn matrix(&self, name: &str) -> Option<Vec<Vec<f64>>> {
        self.0.tensor(name).unwrap().map(|view| matrix(&view))
    }

    fn vector(&self, name: &str) -> Vec<f64> {
        self.matrix(name).unwrap_or_else(|| panic!("{name}")).remove(0)
    }

    /// The weight of a norm.
    fn norm(&self, name: &str) -> Vec<f64> {
        let offset = self.0.config.norm_offset(name) as f64;
        self.vector(name).into_iter().map(|weight| weight + offset).collect()
    }

    fn linear(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let bias = self.matrix(&format!("{name}.bias")).map(|mut rows| rows.remove(0));
        let rows = self.matrix(&format!("{name}.weight")).unwrap();
        let dot = |row: &Vec<f64>| row.iter().zip(x).map(|(a, b)| a * b).sum::<f64>();
        rows.iter()
            .enumerate()
            .map(|(i, row)| dot(row) + bias.as_ref().map_or(0.0, |b| b[i]))
            .collect()
    }
}

fn norm(x: &[f64], weight: &[f64], epsilon: f32) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(weight).map(|(x, w)| x / (mean + epsilon as f64).sqrt() * w).collect()
}

/// Inverse frequencies and the factor of cos and sin, as transformers' `modeling_rope_utils`.
pub fn frequencies(config: &ModelConfig) -> (Vec<f64>, f64) {
    use std::f64::consts::PI;
    let (dim, base) = (config.rotary_dim() as f64, config.rope_theta as f64);
    let plain: Vec<f64> =
        (0..config.rotary_dim() / 2).map(|i| base.powf(-(2.0 * i as f64) / dim)).collect();
    match config.rope_scaling {
        RopeScaling::None => (plain, 1.0),
        RopeScaling::Linear { factor } => (plain.iter().map(|f| f / factor as f64).collect(), 1.0),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            let (factor, low, high) =
                (factor as f64, low_freq_factor as f64, high_freq_factor as f64);
            let old = original_context as f64;
            let scaled = plain.iter().map(|f| {
                let wavelength = 2.0 * PI / f;
                if wavelength > old / low {
                    f / factor
                } else if wavelength < old / high {
                    *f
                } else {
                    let smooth = (old / wavelength - low) / (high - low);
                    (1.0 - smooth) * f / factor + smooth * f
                }
            });
            (scaled.collect(), 1.0)
        }
        RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, attention_factor } => {
            let factor = factor as f64;
            let correction = |rotations: f32| {
                dim * (original_context as f64 / (rotations as f64 * 2.0 * PI)).ln()
                    / (2.0 * base.ln())
            };
            let low = correction(beta_fast).floor().max(0.0);
            let high = correction(beta_slow).ceil().min(dim - 1.0);
            let scaled = plain.iter().enumerate().map(|(i, f)| {
                let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                f / factor * ramp + f * (1.0 - ramp)
            });
            let usual = 0.1 * factor.ln() + 1.0;
            (scaled.collect(), attention_factor.map_or(usual, |f| f as f64))
        }
    }
}

/// A configuration with the rotary frequencies of a layer as those of the model.
fn rope_of(config: &ModelConfig, layer: usize) -> ModelConfig {
    let mut config = config.clone();
    if let (Some(_), Some(gemma)) = (config.layer_window(layer), &config.gemma) {
        (config.rope_theta, config.rope_scaling) = (gemma.window_rope_theta, RopeScaling::None);
    }
    config
}

fn rotate(config: &ModelConfig, head: &mut [f64], position: usize) {
    let (frequencies, factor) = frequencies(config);
    let half = config.rotary_dim() / 2;
    for i in 0..half {
        let (sin, cos) = (position as f64 * frequencies[i]).sin_cos();
        let (x, y) = (head[i], head[i + half]);
        head[i] = (x * cos - y * sin) * factor;
        head[i + half] = (y * cos + x * sin) * factor;
    }
}

fn stored(dtype: KvDtype, x: f64) -> f64 {
    match dtype {
        KvDtype::F32 => x as f32 as f64,
        KvDtype::F16 => f16::from_f64(x).to_f64(),
        KvDtype::Bf16 => bf16::from_f64(x).to_f64(),
    }
}

/// Logits of every position.
pub fn logits(model: &Model, tokens: &[u32], kv: KvDtype) -> Vec<Vec<f64>> {
    let names = Names(model);
    let c = &model.config;
    let embedding = names.matrix("model.embed_tokens.weight").unwrap();
    // As transformers' `Gemma3TextScaledWordEmbedding`.
    let multiplier = c.multipliers.as_ref().map_or(1.0, |all| all.embedding as f64);
    let scale = if c.gemma.is_some() { (c.hidden as f64).sqrt() } else { multiplier };
    let embed = |token: &u32| embedding[*token as usize].iter().map(|x| x * scale).collect();
    let mut stream: Vec<Vec<f64>> = tokens.iter().map(embed).collect();
    for layer in 0..c.layers {
        let name = format!("model.layers.{layer}");
        let weight = names.norm(&format!("{name}.input_layernorm.weight"));
        let normed: Vec<_> = stream.iter().map(|x| norm(x, &weight, c.norm_eps)).collect();
        if let Some(mamba) = &c.mamba {
            let outs = recurrent_part(&names, (c, mamba), &name, &normed);
            for (x, out) in stream.iter_mut().zip(outs) {
                x.iter_mut().zip(out).for_each(|(x, o)| *x += o);
            }
        }
        if let Some(delta) = c.delta.as_ref().filter(|_| c.has_state(layer)) {
            let outs =
                delta_part(&names, delta, &format!("{name}.linear_attn"), &normed, c.norm_eps);
            for (x, out) in stream.iter_mut().zip(outs) {
                x.iter_mut().zip(out).for_each(|(x, o)| *x += o);
            }
        }
        if c.has_mlp() {
            layer_forward(&names, c, &name, (&mut stream, &normed), kv);
        }
    }
    let head = names.matrix("lm_head.weight").unwrap_or(embedding);
    let weight = names.norm("model.norm.weight");
    let cap = c.gemma.as_ref().and_then(|gemma| gemma.logit_cap).map(f64::from);
    let capped = |logit: f64| cap.map_or(logit, |cap| cap * (logit / cap).tanh());
    let of = |x: &Vec<f64>| {
        let x = norm(x, &weight, c.norm_eps);
        let scale = c.multipliers.as_ref().map_or(1.0, |all| all.head as f64);
        head.iter()
            .map(|row| capped(scale * row.iter().zip(&x).map(|(a, b)| a * b).sum::<f64>()))
            .collect()
    };
    stream.iter().map(of).collect()
}

fn layer_forward(
    names: &Names<'_>,
    c: &ModelConfig,
    layer: &str,
    (stream, normed): (&mut [Vec<f64>], &[Vec<f64>]),
    kv: KvDtype,
) {
    let name = |part: &str| format!("{layer}.{part}");
    let dim = c.head_dim;
    let index = layer.rsplit('.').next().unwrap().parse().unwrap();
    let (rope, gemma) = (rope_of(c, index), c.gemma.as_ref());
    let scalar = gemma.map_or(dim as f64, |gemma| gemma.query_scalar as f64);
    let (mut keys, mut values): (Vec<Vec<f64>>, Vec<Vec<f64>>) = (vec![], vec![]);
    let multipliers = c.multipliers.clone().unwrap_or_default();
    let [read, write, key] =
        [multipliers.attention_in, multipliers.attention_out, multipliers.key].map(f64::from);
    for (position, x) in stream.iter_mut().enumerate() {
        let normed: Vec<f64> = normed[position].iter().map(|x| x * read).collect();
        if !c.has_attention(index) {
            add_mlp(names, c, (layer, index), x);
            continue;
        }
        let mut q = names.linear(&name("self_attn.q_proj"), &normed);
        let mut gates = vec![];
        if c.delta.is_some() {
            // Each head has its queries, then its gates.
            gates = q.chunks(2 * dim).flat_map(|head| head[dim..].to_vec()).collect();
            q = q.chunks(2 * dim).flat_map(|head| head[..dim].to_vec()).collect();
        }
        let mut k = names.linear(&name("self_attn.k_proj"), &normed);
        k.iter_mut().for_each(|k| *k *= key);
        let v = names.linear(&name("self_attn.v_proj"), &normed);
        for (heads, which) in
            [(&mut q, "self_attn.q_norm.weight"), (&mut k, "self_attn.k_norm.weight")]
        {
            for head in heads.chunks_mut(dim) {
                if c.architecture.has_head_norms() {
                    head.copy_from_slice(&norm(head, &names.norm(&name(which)), c.norm_eps));
                }
                rotate(&rope, head, position);
            }
        }
        keys.push(k.into_iter().map(|x| stored(kv, x)).collect());
        values.push(v.into_iter().map(|x| stored(kv, x)).collect());
        let mut attended = vec![0.0; c.heads * dim];
        for head in 0..c.heads {
            let at = head / (c.heads / c.kv_heads) * dim;
            let query = &q[head * dim..(head + 1) * dim];
            let score = |k: &Vec<f64>| -> f64 {
                query.iter().zip(&k[at..at + dim]).map(|(a, b)| a * b).sum::<f64>() / scalar.sqrt()
            };
            let window = c.layer_window(index).map_or(usize::MAX, |window| window as usize);
            let behind = keys.len().saturating_sub(window);
            let scores: Vec<f64> = keys[behind..].iter().map(score).collect();
            let largest = scores.iter().fold(f64::NEG_INFINITY, |a, b| a.max(*b));
            let total: f64 = scores.iter().map(|x| (x - largest).exp()).sum();
            for (score, v) in scores.iter().zip(&values[behind..]) {
                let weight = (score - largest).exp() / total;
                for d in 0..dim {
                    attended[head * dim + d] += weight * v[at + d];
                }
            }
        }
        for (x, gate) in attended.iter_mut().zip(&gates) {
            *x /= 1.0 + (-gate).exp();
        }
        let mut out = names.linear(&name("self_attn.o_proj"), &attended);
        out.iter_mut().for_each(|out| *out *= write);
        if gemma.is_some() {
            let weight = names.norm(&name("post_attention_layernorm.weight"));
            out = norm(&out, &weight, c.norm_eps);
        }
        x.iter_mut().zip(out).for_each(|(x, o)| *x += o);
        add_mlp(names, c, (layer, index), x);
    }
}

fn add_mlp(names: &Names<'_>, c: &ModelConfig, (layer, index): (&str, usize), x: &mut [f64]) {
    let name = |part: &str| format!("{layer}.{part}");
    let normed = norm(x, &names.norm(&name(c.mlp_norm_name())), c.norm_eps);
    let mut out = match c.layer_experts(index) {
        None => mlp(names, &name("mlp"), &normed),
        Some(experts) => sparse_mlp(names, experts, &name("mlp"), &normed),
    };
    if c.gemma.is_some() {
        out = norm(&out, &names.norm(&name("post_feedforward_layernorm.weight")), c.norm_eps);
    }
    x.iter_mut().zip(out).for_each(|(x, o)| *x += o);
}

/// A gated delta net token by token, as transformers' `torch_recurrent_gated_delta_rule`.
fn delta_part(
    names: &Names<'_>,
    delta: &DeltaConfig,
    layer: &str,
    normed: &[Vec<f64>],
    epsilon: f32,
) -> Vec<Vec<f64>> {
    let name = |part: &str| format!("{layer}.{part}");
    let silu = |x: f64| x / (1.0 + (-x).exp());
    let unit = |x: &[f64]| -> Vec<f64> {
        let length = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
        x.iter().map(|x| x / length).collect()
    };
    let [steps, decays] = ["dt_bias", "A_log"].map(|part| names.vector(&name(part)));
    let conv = names.matrix(&name("conv1d.weight")).unwrap();
    let weight = names.vector(&name("norm.weight"));
    let (keys, dim, values) = (delta.keys(), delta.key_dim, delta.value_dim);
    let shared = delta.value_heads / delta.key_heads;
    let mut inputs: Vec<Vec<f64>> = vec![];
    let mut states = vec![vec![vec![0.0; values]; dim]; delta.value_heads];
    let mut outs = vec![];
    for x in normed {
        let (mixed, ba) =
            (names.linear(&name("in_proj_qkvz"), x), names.linear(&name("in_proj_ba"), x));
        let stride = 2 * dim + 2 * shared * values;
        let part = |first: usize, count: usize| -> Vec<f64> {
            mixed.chunks(stride).flat_map(|head| head[first..first + count].to_vec()).collect()
        };
        let [q, k] = [0, dim].map(|first| part(first, dim));
        let [v, gate] = [2 * dim, 2 * dim + shared * values].map(|at| part(at, shared * values));
        inputs.push([q, k, v].concat());
        let convolved = |channel: usize| {
            let taps = conv[channel].iter().rev().zip(inputs.iter().rev());
            silu(taps.map(|(weight, input)| weight * input[channel]).sum())
        };
        let mixed: Vec<f64> = (0..conv.len()).map(convolved).collect();
        let mut out = vec![];
        for head in 0..delta.value_heads {
            let key_head = head / shared;
            let q = unit(&mixed[key_head * dim..][..dim]);
            let k = unit(&mixed[keys + key_head * dim..][..dim]);
            let v = &mixed[2 * keys + head * values..][..values];
            let scalars = &ba[key_head * 2 * shared..][..2 * shared];
            let share = 1.0 / (1.0 + (-scalars[head % shared]).exp());
            let step = (scalars[shared + head % shared] + steps[head]).exp().ln_1p();
            let decay = (-decays[head].exp() * step).exp();
            let state = &mut states[head];
            state.iter_mut().flatten().for_each(|x| *x *= decay);
            let column = |state: &[Vec<f64>], x: &[f64], at: usize| -> f64 {
                state.iter().zip(x).map(|(row, x)| row[at] * x).sum()
            };
            for at in 0..values {
                let missing = (v[at] - column(state, &k, at)) * share;
                state.iter_mut().zip(&k).for_each(|(row, k)| row[at] += k * missing);
            }
            let y: Vec<f64> =
                (0..values).map(|at| column(state, &q, at) / (dim as f64).sqrt()).collect();
            let y = norm(&y, &weight, epsilon);
            out.extend(y.iter().zip(&gate[head * values..]).map(|(y, gate)| y * silu(*gate)));
        }
        outs.push(names.linear(&name("out_proj"), &out));
    }
    outs
}

/// Mamba-2 token by token, as transformers' `mamba2_selective_state_update`.
fn recurrent_part(
    names: &Names<'_>,
    (c, mamba): (&ModelConfig, &MambaConfig),
    layer: &str,
    normed: &[Vec<f64>],
) -> Vec<Vec<f64>> {
    let name = |part: &str| format!("{layer}.mamba.{part}");
    let silu = |x: f64| x / (1.0 + (-x).exp());
    let [steps, decays, skips] = ["dt_bias", "A_log", "D"].map(|part| names.vector(&name(part)));
    let conv = names.matrix(&name("conv1d.weight")).unwrap();
    let bias = names.matrix(&name("conv1d.bias")).map(|mut rows| rows.remove(0));
    let (dim, state, inner) = (mamba.head_dim, mamba.state, mamba.inner());
    let mut inputs: Vec<Vec<f64>> = vec![];
    let mut states = vec![vec![vec![0.0; state]; dim]; mamba.heads];
    let multipliers = c.multipliers.clone().unwrap_or_default();
    let part = |at: usize| match at {
        _ if at < inner => 0,
        _ if at < 2 * inner => 1,
        _ if at < 2 * inner + mamba.groups * state => 2,
        _ if at < inner + mamba.channels() => 3,
        _ => 4,
    };
    let mut outs = vec![];
    for x in normed {
        let x: Vec<f64> = x.iter().map(|x| x * multipliers.ssm_in as f64).collect();
        let mut projected = names.linear(&name("in_proj"), &x);
        for (at, x) in projected.iter_mut().enumerate() {
            *x *= multipliers.ssm[part(at)] as f64;
        }
        let (gate, rest) = projected.split_at(inner);
        let (input, step) = rest.split_at(mamba.channels());
        inputs.push(input.to_vec());
        let convolved = |channel: usize| {
            let taps = conv[channel].iter().rev().zip(inputs.iter().rev());
            let sum: f64 = taps.map(|(weight, input)| weight * input[channel]).sum();
            silu(sum + bias.as_ref().map_or(0.0, |bias| bias[channel]))
        };
        let mixed: Vec<f64> = (0..mamba.channels()).map(convolved).collect();
        let mut out = vec![0.0; inner];
        for head in 0..mamba.heads {
            let shared = inner + head / (mamba.heads / mamba.groups) * state;
            let b = &mixed[shared..][..state];
            let c = &mixed[shared + mamba.groups * state..][..state];
            let step = (step[head] + steps[head]).exp().ln_1p();
            let decay = (-decays[head].exp() * step).exp();
            for (d, row) in states[head].iter_mut().enumerate() {
                let x = mixed[head * dim + d];
                row.iter_mut().zip(b).for_each(|(h, b)| *h = *h * decay + step * x * b);
                let sum: f64 = row.iter().zip(c).map(|(h, c)| h * c).sum();
                out[head * dim + d] = sum + skips[head] * x;
            }
        }
        let multiply = |out: &mut Vec<f64>| {
            out.iter_mut().zip(gate).for_each(|(out, gate)| *out *= silu(*gate));
        };
        if mamba.norm != MambaNorm::BeforeGate {
            multiply(&mut out);
        }
        if mamba.norm != MambaNorm::None {
            let (weight, size) = (names.vector(&name("norm.weight")), inner / mamba.groups);
            for (out, weight) in out.chunks_mut(size).zip(weight.chunks(size)) {
                out.copy_from_slice(&norm(out, weight, c.norm_eps));
            }
        }
        if mamba.norm == MambaNorm::BeforeGate {
            multiply(&mut out);
        }
        let out = names.linear(&name("out_proj"), &out);
        outs.push(out.into_iter().map(|x| x * multipliers.ssm_out as f64).collect());
    }
    outs
}

fn mlp(names: &Names<'_>, mlp: &str, x: &[f64]) -> Vec<f64> {
    let gate = names.linear(&format!("{mlp}.gate_proj"), x);
    let up = names.linear(&format!("{mlp}.up_proj"), x);
    let silu = |g: f64| g / (1.0 + (-g).exp());
    let gelu = |g: f64| {
        let inner = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g.powi(3));
        0.5 * g * (1.0 + inner.tanh())
    };
    let is_gemma = names.0.config.gemma.is_some();
    let activate = |g: f64| if is_gemma { gelu(g) } else { silu(g) };
    let multipliers = names.0.config.multipliers.clone().unwrap_or_default();
    let [before, after] = [multipliers.gate, multipliers.down].map(f64::from);
    let inside: Vec<f64> = gate.iter().zip(up).map(|(g, u)| activate(*g * before) * u).collect();
    let down = names.linear(&format!("{mlp}.down_proj"), &inside);
    down.into_iter().map(|x| x * after).collect()
}

/// Softmax over all experts, then the likeliest ones, as transformers' `Qwen2MoeSparseMoeBlock`.
fn sparse_mlp(names: &Names<'_>, experts: &ExpertConfig, layer: &str, x: &[f64]) -> Vec<f64> {
    let powers: Vec<f64> =
        names.linear(&format!("{layer}.gate"), x).into_iter().map(f64::exp).collect();
    let total: f64 = powers.iter().sum();
    let mut order: Vec<usize> = (0..experts.count).collect();
    order.sort_by(|&a, &b| powers[b].total_cmp(&powers[a]));
    order.truncate(experts.used);
    let chosen: f64 = order.iter().map(|&expert| powers[expert]).sum();
    let total = if experts.normalised { chosen } else { total };
    let mut sum = vec![0.0; x.len()];
    let mut add = |weight: f64, out: Vec<f64>| {
        sum.iter_mut().zip(out).for_each(|(sum, out)| *sum += weight * out);
    };
    for expert in order {
        add(powers[expert] / total, mlp(names, &format!("{layer}.experts.{expert}"), x));
    }
    if experts.shared_intermediate.is_some() {
        let gate = names.linear(&format!("{layer}.shared_expert_gate"), x)[0];
        add(1.0 / (1.0 + (-gate).exp()), mlp(names, &format!("{layer}.shared_expert"), x));
    }
    sum
}

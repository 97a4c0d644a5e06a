//! Loads a model's tensors by name, checks their shapes and types, and repacks them.

use super::arena::Arena;
use super::layer_weights::{
    AttentionWeights, DeltaHead, ExpertLayer, Layer, LayerMlp, MambaHead, Mlp, ModelWeights,
    RecurrentWeights, ScanWeights,
};
use super::matrix::{Matrix, plain_number};
use super::matrix_product::Linear;
use super::simd::LANES;
use crate::model::config::{ExpertConfig, ModelConfig};
use crate::model::inventory;
use crate::model::recurrent_config::{DeltaConfig, MambaConfig, MambaNorm};
use crate::model::tensor::TensorView;
use crate::model::weights::{LoadError, WeightSource};
use crate::stdx::team::Team;

impl ModelWeights {
    /// Loads all tensors. `progress` gets the number of loaded tensors and the total.
    pub fn load(
        config: &ModelConfig,
        source: &dyn WeightSource,
        team: &mut Team,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<ModelWeights, LoadError> {
        // A tied head that exists nevertheless is loaded.
        let head = config.tied_head && source.tensor(HEAD)?.is_some();
        let total = inventory::tensors(config).count() + usize::from(head);
        let arena = Arena::default();
        let mut loader = Loader { config, source, team, arena, progress, done: 0, total };
        loader.weights()
    }
}

/// The decays A of heads, from numbers of the files. `is_log`: the files have `ln(-A)`.
fn decays(stored: Vec<f32>, is_log: bool) -> Vec<f32> {
    if !is_log {
        return stored;
    }
    stored.iter().map(|log| -(f64::from(*log).exp() as f32)).collect()
}

/// The head, if the embedding is not the head, too.
const HEAD: &str = "lm_head.weight";

struct Loader<'a> {
    config: &'a ModelConfig,
    source: &'a dyn WeightSource,
    team: &'a mut Team,
    arena: Arena,
    progress: &'a mut dyn FnMut(usize, usize),
    done: usize,
    total: usize,
}

impl<'a> Loader<'a> {
    fn weights(&mut self) -> Result<ModelWeights, LoadError> {
        let config = self.config;
        let embedding = self.matrix("model.embed_tokens.weight", config.vocab, config.hidden)?;
        let layers = (0..config.layers).map(|layer| self.layer(layer)).collect::<Result<_, _>>()?;
        let norm = self.norm("model.norm.weight", config.hidden)?;
        // If the files hold a head, it is used, because a configuration can say "tied" although a
        // head exists.
        let own_head = !config.tied_head || self.source.tensor(HEAD)?.is_some();
        let (head, embedding) = match own_head {
            true => (self.matrix(HEAD, config.vocab, config.hidden)?, Some(embedding)),
            false => (embedding, None),
        };
        debug_assert_eq!(self.done, self.total, "the inventory has other tensors");
        let scale = config.multipliers.as_ref().map_or(1.0, |multipliers| multipliers.head);
        let head = Linear::new(vec![head], vec![None]).scaled(&[&[(config.vocab, scale)]]);
        Ok(ModelWeights { layers, norm, head, embedding })
    }

    fn layer(&mut self, layer: usize) -> Result<Layer, LoadError> {
        let (config, hidden) = (self.config, self.config.hidden);
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        Ok(Layer {
            input_norm: self.norm(&name("input_layernorm.weight"), hidden)?,
            attention: match config.has_attention(layer) {
                true => Some(self.attention(name)?),
                false => None,
            },
            recurrent: match (&config.mamba, &config.delta) {
                (Some(mamba), _) => Some(self.mamba((layer, name), mamba)?),
                (None, Some(delta)) if config.has_state(layer) => {
                    Some(self.delta((layer, name), delta)?)
                }
                _ => None,
            },
            output_norms: match config.gemma {
                Some(_) => Some([
                    self.norm(&name("post_attention_layernorm.weight"), hidden)?,
                    self.norm(&name("post_feedforward_layernorm.weight"), hidden)?,
                ]),
                None => None,
            },
            mlp: match config.has_mlp() {
                true => Some(self.layer_mlp(layer, name)?),
                false => None,
            },
        })
    }

    fn attention(&mut self, name: impl Fn(&str) -> String) -> Result<AttentionWeights, LoadError> {
        let (config, hidden) = (self.config, self.config.hidden);
        let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let head_norms = match config.architecture.has_head_norms() {
            true => Some([
                self.head_norm(&name("self_attn.q_norm.weight"))?,
                self.head_norm(&name("self_attn.k_norm.weight"))?,
            ]),
            false => None,
        };
        let parts = [
            (name("self_attn.q_proj"), q),
            (name("self_attn.k_proj"), kv),
            (name("self_attn.v_proj"), kv),
        ];
        if config.delta.is_some() {
            return self.gated_attention(name, head_norms);
        }
        let multipliers = config.multipliers.clone().unwrap_or_default();
        let (read, key) = (multipliers.attention_in, multipliers.key);
        let qkv = self.linear(&parts, hidden, config.attention_bias)?;
        let output = self.linear(&[(name("self_attn.o_proj"), hidden)], q, config.output_bias)?;
        Ok(AttentionWeights {
            qkv: qkv.scaled(&[&[(q, read)], &[(kv, read * key)], &[(kv, read)]]),
            head_norms,
            output: output.scaled(&[&[(hidden, multipliers.attention_out)]]),
        })
    }

    /// Attention with a gate. Its rows lie head by head behind those of q.
    fn gated_attention(
        &mut self,
        name: impl Fn(&str) -> String,
        head_norms: Option<[Vec<f32>; 2]>,
    ) -> Result<AttentionWeights, LoadError> {
        let (config, hidden, dim) = (self.config, self.config.hidden, self.config.head_dim);
        let (q, kv) = (config.heads * dim, config.kv_heads * dim);
        let query = name("self_attn.q_proj.weight");
        let view = self.tensor(&query, 2 * q, hidden)?;
        let [queries, gates] = [0, dim].map(|first| view.of_blocks(dim, 2 * dim, first));
        let [queries, gates] = [self.pack(&query, &queries)?, self.pack(&query, &gates)?];
        self.count_tensor();
        let keys = self.matrix(&name("self_attn.k_proj.weight"), kv, hidden)?;
        let values = self.matrix(&name("self_attn.v_proj.weight"), kv, hidden)?;
        Ok(AttentionWeights {
            qkv: Linear::new(vec![queries, keys, values, gates], vec![None; 4]),
            head_norms,
            output: self.linear(&[(name("self_attn.o_proj"), hidden)], q, false)?,
        })
    }

    fn delta(
        &mut self,
        (layer, name): (usize, impl Fn(&str) -> String),
        delta: &DeltaConfig,
    ) -> Result<RecurrentWeights, LoadError> {
        let hidden = self.config.hidden;
        let (keys, values, heads) = (delta.keys(), delta.values(), delta.value_heads);
        let mut matrices = self.delta_projections(&name, delta)?;
        let scalars = name("linear_attn.in_proj_ba.weight");
        let view = self.tensor(&scalars, 2 * heads, hidden)?;
        let block = heads / delta.key_heads;
        for first in [0, block] {
            matrices.push(self.pack(&scalars, &view.of_blocks(block, 2 * block, first))?);
        }
        self.count_tensor();
        let biases = vec![None; matrices.len()];
        let [step_bias, decay] = [
            self.vector(&name("linear_attn.dt_bias"), heads)?,
            self.vector(&name("linear_attn.A_log"), heads)?,
        ];
        let decay = decays(decay, delta.log_decay);
        self.check_decays(&name("linear_attn.A_log"), &decay[..heads])?;
        let head = |head: usize| DeltaHead { step_bias: step_bias[head], decay: decay[head] };
        let conv =
            self.tensor(&name("linear_attn.conv1d.weight"), 2 * keys + values, delta.conv_width)?;
        let norm = self.norm(&name("linear_attn.norm.weight"), delta.value_dim)?;
        let norm = norm[..delta.value_dim].repeat(heads);
        let [keys_at, values_at] = delta.channels_at();
        let places = [(0, 0, keys), (keys, keys_at, keys), (2 * keys, values_at, values)];
        let conv = self.placed_columns(&name("linear_attn.conv1d.weight"), conv, &places)?;
        let channels = delta.sizes().channels.next_multiple_of(LANES);
        Ok(RecurrentWeights {
            layer: self.state_layer(layer),
            input: Linear::new(matrices, biases),
            conv,
            conv_bias: vec![0.0; channels],
            scan: ScanWeights::Delta {
                heads: (0..heads).map(head).collect(),
                key_heads: delta.key_heads,
                channels_at: delta.channels_at(),
            },
            norm,
            norm_kind: (MambaNorm::BeforeGate, delta.value_dim),
            output: self.linear(&[(name("linear_attn.out_proj"), hidden)], values, false)?,
        })
    }

    /// The matrices of gate, q, k and v.
    fn delta_projections(
        &mut self,
        name: &impl Fn(&str) -> String,
        delta: &DeltaConfig,
    ) -> Result<Vec<Matrix>, LoadError> {
        let hidden = self.config.hidden;
        let (keys, values) = (delta.keys(), delta.values());
        if !delta.by_key_head {
            let gate = self.matrix(&name("linear_attn.in_proj_z.weight"), values, hidden)?;
            let mixed = name("linear_attn.in_proj_qkv.weight");
            let view = self.tensor(&mixed, 2 * keys + values, hidden)?;
            let mut matrices = vec![gate];
            for rows in [0..keys, keys..2 * keys, 2 * keys..2 * keys + values] {
                matrices.push(self.pack(&mixed, &view.of_rows(rows))?);
            }
            self.count_tensor();
            return Ok(matrices);
        }
        // The rows of a key head lie together: q, k, and v and gate of its value heads.
        let (dim, shared) = (delta.key_dim, values / delta.key_heads);
        let stride = 2 * dim + 2 * shared;
        let mixed = name("linear_attn.in_proj_qkvz.weight");
        let view = self.tensor(&mixed, 2 * keys + 2 * values, hidden)?;
        let parts = [(shared, 2 * dim + shared), (dim, 0), (dim, dim), (shared, 2 * dim)];
        let mut matrices = Vec::with_capacity(6);
        for (block, first) in parts {
            matrices.push(self.pack(&mixed, &view.of_blocks(block, stride, first))?);
        }
        self.count_tensor();
        Ok(matrices)
    }

    /// Refuses decays that make the state grow, or that are no numbers.
    fn check_decays(&self, name: &str, decays: &[f32]) -> Result<(), LoadError> {
        match decays.iter().find(|decay| !decay.is_finite() || **decay > 0.0) {
            Some(decay) => Err(self.wrong(name, "a decay of each head", decay)),
            None => Ok(()),
        }
    }

    /// Index among the layers with state.
    fn state_layer(&self, layer: usize) -> u32 {
        (0..layer).filter(|&before| self.config.has_state(before)).count() as u32
    }

    fn mamba(
        &mut self,
        (layer, name): (usize, impl Fn(&str) -> String),
        mamba: &MambaConfig,
    ) -> Result<RecurrentWeights, LoadError> {
        let (hidden, inner, channels) = (self.config.hidden, mamba.inner(), mamba.channels());
        let parts = [inner, channels, mamba.heads];
        let output = [(name("mamba.out_proj"), hidden)];
        let multipliers = self.config.multipliers.clone().unwrap_or_default();
        let [gate, x, b, c, step] = multipliers.ssm.map(|part| part * multipliers.ssm_in);
        let shared = mamba.groups * mamba.state;
        let scales: [&[(usize, f32)]; 3] =
            [&[(inner, gate)], &[(inner, x), (shared, b), (shared, c)], &[(mamba.heads, step)]];
        let input =
            self.parts_of_linear(&name("mamba.in_proj"), &parts, hidden, mamba.input_bias)?;
        let [step_bias, decay, skip] = [
            self.vector(&name("mamba.dt_bias"), mamba.heads)?,
            self.vector(&name("mamba.A_log"), mamba.heads)?,
            self.vector(&name("mamba.D"), mamba.heads)?,
        ];
        let decay = decays(decay, mamba.log_decay);
        self.check_decays(&name("mamba.A_log"), &decay[..mamba.heads])?;
        let head = |head: usize| MambaHead {
            step_bias: step_bias[head],
            decay: decay[head],
            skip: skip[head],
        };
        let conv = name("mamba.conv1d.weight");
        let view = self.tensor(&conv, channels, mamba.conv_width)?;
        Ok(RecurrentWeights {
            layer: self.state_layer(layer),
            input: input.scaled(&scales),
            conv: self.placed_columns(&conv, view, &[(0, 0, channels)])?,
            conv_bias: match mamba.conv_bias {
                true => self.vector(&name("mamba.conv1d.bias"), channels)?,
                false => vec![0.0; channels.next_multiple_of(LANES)],
            },
            scan: ScanWeights::Mamba {
                heads: (0..mamba.heads).map(head).collect(),
                groups: mamba.groups,
            },
            norm_kind: (mamba.norm, inner / mamba.groups),
            norm: match mamba.norm {
                MambaNorm::None => Vec::new(),
                _ => self.norm(&name("mamba.norm.weight"), inner)?,
            },
            output: self
                .linear(&output, inner, mamba.output_bias)?
                .scaled(&[&[(hidden, multipliers.ssm_out)]]),
        })
    }

    fn layer_mlp(
        &mut self,
        layer: usize,
        name: impl Fn(&str) -> String,
    ) -> Result<(Vec<f32>, LayerMlp), LoadError> {
        let config = self.config;
        let norm = self.norm(&name(config.mlp_norm_name()), config.hidden)?;
        let mlp = match config.layer_experts(layer) {
            None => {
                LayerMlp::Dense(self.mlp(&name("mlp"), config.intermediate, config.mlp_bias)?)
            }
            Some(experts) => LayerMlp::Sparse(self.expert_layer(&name("mlp"), experts)?),
        };
        Ok((norm, mlp))
    }

    fn mlp(&mut self, name: &str, inside: usize, bias: bool) -> Result<Mlp, LoadError> {
        let hidden = self.config.hidden;
        let parts = ["gate_proj", "up_proj"].map(|part| (format!("{name}.{part}"), inside));
        let multipliers = self.config.multipliers.clone().unwrap_or_default();
        let gate_up = self.linear(&parts, hidden, bias)?;
        let down = self.linear(&[(format!("{name}.down_proj"), hidden)], inside, bias)?;
        Ok(Mlp {
            gate_up: gate_up.scaled(&[&[(inside, multipliers.gate)], &[(inside, 1.0)]]),
            down: down.scaled(&[&[(hidden, multipliers.down)]]),
            activation: self.config.activation(),
        })
    }

    fn expert_layer(
        &mut self,
        name: &str,
        experts: &ExpertConfig,
    ) -> Result<ExpertLayer, LoadError> {
        let mut router = vec![(format!("{name}.gate"), experts.count)];
        if experts.shared_intermediate.is_some() {
            router.push((format!("{name}.shared_expert_gate"), 1));
        }
        let mut mlps = Vec::with_capacity(experts.count);
        for expert in 0..experts.count {
            let name = format!("{name}.experts.{expert}");
            mlps.push(self.mlp(&name, experts.intermediate, false)?);
        }
        let shared = experts.shared_intermediate;
        Ok(ExpertLayer {
            router: self.linear(&router, self.config.hidden, false)?,
            experts: mlps,
            shared: match shared {
                Some(inside) => Some(self.mlp(&format!("{name}.shared_expert"), inside, false)?),
                None => None,
            },
        })
    }

    fn linear(
        &mut self,
        parts: &[(String, usize)],
        columns: usize,
        bias: bool,
    ) -> Result<Linear, LoadError> {
        let mut matrices = Vec::with_capacity(parts.len());
        let mut biases = Vec::with_capacity(parts.len());
        for (name, rows) in parts {
            matrices.push(self.matrix(&format!("{name}.weight"), *rows, columns)?);
            biases.push(match bias {
                true => Some(self.vector(&format!("{name}.bias"), *rows)?),
                false => None,
            });
        }
        Ok(Linear::new(matrices, biases))
    }

    /// One stored matrix. Its outputs become parts of these sizes, each padded to sixteen.
    fn parts_of_linear(
        &mut self,
        name: &str,
        parts: &[usize],
        columns: usize,
        bias: bool,
    ) -> Result<Linear, LoadError> {
        let weight = format!("{name}.weight");
        let view = self.tensor(&weight, parts.iter().sum(), columns)?;
        let bias = match bias {
            true => Some(self.vector(&format!("{name}.bias"), view.rows)?),
            false => None,
        };
        let (mut matrices, mut biases, mut first) = (Vec::new(), Vec::new(), 0);
        for &part in parts {
            let rows = first..first + part;
            matrices.push(self.pack(&weight, &view.of_rows(rows.clone()))?);
            biases.push(bias.as_ref().map(|bias| bias[rows].to_vec()));
            first += part;
        }
        self.count_tensor();
        Ok(Linear::new(matrices, biases))
    }

    /// The columns of a matrix as rows, padded with zeros to a multiple of sixteen. `places` has
    /// parts of the matrix: the first row, its place, and the number of rows.
    fn placed_columns(
        &mut self,
        name: &str,
        view: TensorView<'_>,
        places: &[(usize, usize, usize)],
    ) -> Result<Vec<f32>, LoadError> {
        self.check_plain(name, &view)?;
        let end = places.iter().map(|(_, place, rows)| place + rows).max().unwrap_or(0);
        let stride = end.next_multiple_of(LANES);
        let mut turned = vec![0.0; view.cols * stride];
        for &(first, place, rows) in places {
            for row in 0..rows {
                let from = view.row(first + row);
                for column in 0..view.cols {
                    let number = plain_number(view.dtype, from, column);
                    turned[column * stride + place + row] = number;
                }
            }
        }
        self.count_tensor();
        Ok(turned)
    }

    fn head_norm(&mut self, name: &str) -> Result<Vec<f32>, LoadError> {
        let mut norm = self.norm(name, self.config.head_dim)?;
        norm.truncate(self.config.head_dim);
        Ok(norm)
    }

    /// The weight of a norm, padded like a [`Loader::vector`].
    fn norm(&mut self, name: &str, len: usize) -> Result<Vec<f32>, LoadError> {
        let mut norm = self.vector(name, len)?;
        norm[..len].iter_mut().for_each(|weight| *weight += self.config.norm_offset(name));
        Ok(norm)
    }

    fn matrix(&mut self, name: &str, rows: usize, columns: usize) -> Result<Matrix, LoadError> {
        let view = self.tensor(name, rows, columns)?;
        let matrix = self.pack(name, &view)?;
        self.count_tensor();
        Ok(matrix)
    }

    fn pack(&mut self, name: &str, view: &TensorView<'_>) -> Result<Matrix, LoadError> {
        let (block, _) = view.dtype.block();
        if !view.cols.is_multiple_of(block) {
            let expected = format!("rows of a multiple of {block} elements for {:?}", view.dtype);
            return Err(self.wrong(name, expected, view.cols));
        }
        Matrix::pack(view, &mut self.arena, self.team)
            .map_err(|error| LoadError::io(self.source.describe(), error))
    }

    fn check_plain(&self, name: &str, view: &TensorView<'_>) -> Result<(), LoadError> {
        match view.dtype.block().0 {
            1 => Ok(()),
            _ => Err(self.wrong(name, "F32, F16 or BF16", format!("{:?}", view.dtype))),
        }
    }

    fn count_tensor(&mut self) {
        self.done += 1;
        (self.progress)(self.done, self.total);
    }

    /// A vector of the model, padded with zeros to a multiple of sixteen.
    fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, LoadError> {
        let view = self.tensor(name, 1, len)?;
        self.check_plain(name, &view)?;
        let row = view.row(0);
        let mut vector: Vec<f32> = (0..len).map(|i| plain_number(view.dtype, row, i)).collect();
        vector.resize(len.next_multiple_of(LANES), 0.0);
        self.count_tensor();
        Ok(vector)
    }

    fn tensor(&self, name: &str, rows: usize, columns: usize) -> Result<TensorView<'a>, LoadError> {
        let shape = format!("{rows} × {columns}");
        let view = self.source.tensor(name)?.ok_or_else(|| self.wrong(name, &shape, "nothing"))?;
        if (view.rows, view.cols) != (rows, columns) {
            return Err(self.wrong(name, shape, format!("{} × {}", view.rows, view.cols)));
        }
        Ok(view)
    }

    fn wrong(
        &self,
        name: &str,
        expected: impl std::fmt::Display,
        found: impl std::fmt::Display,
    ) -> LoadError {
        LoadError::tensor(self.source.describe(), name, expected, found)
    }
}

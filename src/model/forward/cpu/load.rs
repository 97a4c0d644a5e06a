//! Loads a model's tensors by name, checks their shapes and types, and repacks them.

use super::arena::Arena;
use super::matrix::{Matrix, plain_number};
use super::matrix_product::Linear;
use super::simd::LANES;
use crate::model::config::{Activation, ExpertConfig, MambaConfig, MambaNorm, ModelConfig};
use crate::model::inventory;
use crate::model::tensor::TensorView;
use crate::model::weights::{LoadError, WeightSource};
use crate::stdx::team::Team;

/// One decoder layer.
pub struct Layer {
    /// Norm before what mixes tokens; padded.
    pub input_norm: Vec<f32>,
    /// Attention, if the layer has it.
    pub attention: Option<AttentionWeights>,
    /// Its recurrent part, if it has one.
    pub mamba: Option<MambaWeights>,
    /// Norms of the outputs of attention and MLP (Gemma); padded.
    pub output_norms: Option<[Vec<f32>; 2]>,
    /// The MLP, and the norm before it, padded; `None` without an MLP.
    pub mlp: Option<(Vec<f32>, LayerMlp)>,
}

/// The weights of attention.
pub struct AttentionWeights {
    /// q, k and v, each padded to sixteen.
    pub qkv: Linear,
    /// Norms of each head of q and k (Qwen3, Gemma).
    pub head_norms: Option<[Vec<f32>; 2]>,
    /// The output projection.
    pub output: Linear,
}

/// The weights of Mamba-2.
pub struct MambaWeights {
    /// Gate, then x, B and C together, then time steps, each padded to sixteen.
    pub input: Linear,
    /// `[conv_width][channels]`, the oldest token first; channels are padded to sixteen.
    pub conv: Vec<f32>,
    /// The bias of the convolution, padded; zeros if it has none.
    pub conv_bias: Vec<f32>,
    /// By head.
    pub heads: Vec<MambaHead>,
    /// The norm of the output; padded. Empty without a norm.
    pub norm: Vec<f32>,
    /// The output projection.
    pub output: Linear,
}

/// The scalars of a head.
#[derive(Clone, Copy)]
pub struct MambaHead {
    /// Added to its time steps.
    pub step_bias: f32,
    /// The logarithm of the state's decay in a time step of 1; negative.
    pub decay: f32,
    /// The share of x in the output.
    pub skip: f32,
}

/// The part of a layer after attention.
pub enum LayerMlp {
    /// One MLP for all tokens.
    Dense(Mlp),
    /// Experts.
    Sparse(ExpertLayer),
}

/// An MLP: down(activation(gate) · up).
pub struct Mlp {
    /// gate and up, each padded to sixteen.
    pub gate_up: Linear,
    /// The output projection.
    pub down: Linear,
    /// The function of the gate.
    pub activation: Activation,
}

/// The experts of a layer.
pub struct ExpertLayer {
    /// The expert router: one output for each expert, padded to sixteen. With a shared expert, its
    /// gate comes next.
    pub router: Linear,
    /// Of equal sizes.
    pub experts: Vec<Mlp>,
    /// The expert of all tokens.
    pub shared: Option<Mlp>,
}

impl Layer {
    /// The MLP that all tokens use: that of a dense layer, or the shared expert.
    pub fn common_mlp(&self) -> Option<&Mlp> {
        match &self.mlp.as_ref()?.1 {
            LayerMlp::Dense(mlp) => Some(mlp),
            LayerMlp::Sparse(sparse) => sparse.shared.as_ref(),
        }
    }

    fn sparse(&self) -> Option<&ExpertLayer> {
        match &self.mlp.as_ref()?.1 {
            LayerMlp::Dense(_) => None,
            LayerMlp::Sparse(sparse) => Some(sparse),
        }
    }

    /// The MLPs of which each token uses some.
    pub fn experts(&self) -> &[Mlp] {
        self.sparse().map_or(&[], |sparse| &sparse.experts)
    }

    /// The products of all tokens.
    pub fn common_linears(&self) -> impl Iterator<Item = &Linear> {
        let attention = self.attention.iter().flat_map(|it| [&it.qkv, &it.output]);
        let mamba = self.mamba.iter().flat_map(|it| [&it.input, &it.output]);
        let router = self.sparse().map(|sparse| &sparse.router);
        let mlp = self.common_mlp().into_iter().flat_map(Mlp::linears);
        attention.chain(mamba).chain(router).chain(mlp)
    }
}

impl Mlp {
    /// Both products.
    pub fn linears(&self) -> [&Linear; 2] {
        [&self.gate_up, &self.down]
    }
}

/// All weights of a model.
pub struct ModelWeights {
    /// Decoder layers.
    pub layers: Vec<Layer>,
    /// Norm after the last layer; padded.
    pub norm: Vec<f32>,
    /// The head's matrix.
    pub head: Linear,
    /// The embedding, unless it is also the head.
    pub embedding: Option<Matrix>,
}

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

    /// Bytes held.
    pub fn memory(&self) -> usize {
        let common = self.layers.iter().flat_map(Layer::common_linears);
        let experts = self.layers.iter().flat_map(Layer::experts).flat_map(Mlp::linears);
        common.chain(experts).chain([&self.head]).map(Linear::memory).sum::<usize>()
            + self.embedding.as_ref().map_or(0, Matrix::memory)
    }

    /// The matrix with the tokens' embeddings as rows.
    pub fn embedding(&self) -> &Matrix {
        self.embedding.as_ref().unwrap_or_else(|| self.head.first())
    }
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
            attention: match config.has_attention() {
                true => Some(self.attention(name)?),
                false => None,
            },
            mamba: match &config.mamba {
                Some(mamba) => Some(self.mamba(name, mamba)?),
                None => None,
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

    fn mamba(
        &mut self,
        name: impl Fn(&str) -> String,
        mamba: &MambaConfig,
    ) -> Result<MambaWeights, LoadError> {
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
        let decay = |head: usize| match mamba.log_decay {
            true => -(f64::from(decay[head]).exp() as f32),
            false => decay[head],
        };
        if let Some(head) = (0..mamba.heads).find(|&head| decay(head) > 0.0 || decay(head).is_nan())
        {
            return Err(self.wrong(&name("mamba.A_log"), "a decay of each head", decay(head)));
        }
        let head = |head: usize| MambaHead {
            step_bias: step_bias[head],
            decay: decay(head),
            skip: skip[head],
        };
        Ok(MambaWeights {
            input: input.scaled(&scales),
            conv: self.columns(&name("mamba.conv1d.weight"), channels, mamba.conv_width)?,
            conv_bias: match mamba.conv_bias {
                true => self.vector(&name("mamba.conv1d.bias"), channels)?,
                false => vec![0.0; channels.next_multiple_of(LANES)],
            },
            heads: (0..mamba.heads).map(head).collect(),
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

    /// The columns of a matrix as rows, each padded with zeros to a multiple of sixteen.
    fn columns(&mut self, name: &str, rows: usize, columns: usize) -> Result<Vec<f32>, LoadError> {
        let view = self.tensor(name, rows, columns)?;
        self.check_plain(name, &view)?;
        let stride = rows.next_multiple_of(LANES);
        let mut turned = vec![0.0; columns * stride];
        for row in 0..rows {
            let from = view.row(row);
            for column in 0..columns {
                turned[column * stride + row] = plain_number(view.dtype, from, column);
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
        norm[..len].iter_mut().for_each(|weight| *weight += self.config.norm_offset());
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

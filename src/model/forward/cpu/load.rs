//! Loads a model's tensors by name, checks their shapes and types, and repacks them.

use super::arena::Arena;
use super::matrix::{Matrix, plain_number};
use super::matrix_product::Linear;
use super::simd::LANES;
use crate::model::config::{Architecture, ModelConfig};
use crate::model::tensor::TensorView;
use crate::model::weights::{LoadError, WeightSource};
use crate::stdx::team::Team;

/// One decoder layer.
pub struct Layer {
    /// Norm before attention; padded.
    pub input_norm: Vec<f32>,
    /// q, k and v, each padded to sixteen.
    pub qkv: Linear,
    /// Norms of each head of q and k (Qwen3).
    pub head_norms: Option<[Vec<f32>; 2]>,
    /// Attention's output projection.
    pub output: Linear,
    /// Norm before the MLP; padded.
    pub mlp_norm: Vec<f32>,
    /// gate and up, each padded to sixteen.
    pub gate_up: Linear,
    /// The MLP's output projection.
    pub down: Linear,
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
        let total = 3 + config.layers * 9;
        let arena = Arena::default();
        let mut loader = Loader { config, source, team, arena, progress, done: 0, total };
        loader.weights()
    }

    /// Bytes held.
    pub fn memory(&self) -> usize {
        let linears = self.layers.iter().flat_map(|l| [&l.qkv, &l.output, &l.gate_up, &l.down]);
        linears.chain([&self.head]).map(Linear::memory).sum::<usize>()
            + self.embedding.as_ref().map_or(0, Matrix::memory)
    }

    /// The matrix with the tokens' embeddings as rows.
    pub fn embedding(&self) -> &Matrix {
        self.embedding.as_ref().unwrap_or_else(|| self.head.first())
    }
}

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
        let norm = self.vector("model.norm.weight", config.hidden)?;
        // If the files hold a head, it is used, because a configuration can say "tied" although a
        // head exists.
        let own_head = !config.tied_head || self.source.tensor("lm_head.weight")?.is_some();
        let (head, embedding) = match own_head {
            true => (self.matrix("lm_head.weight", config.vocab, config.hidden)?, Some(embedding)),
            false => (embedding, None),
        };
        (self.progress)(self.total, self.total);
        Ok(ModelWeights { layers, norm, head: Linear::new(vec![head], vec![None]), embedding })
    }

    fn layer(&mut self, layer: usize) -> Result<Layer, LoadError> {
        let config = self.config;
        let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let (hidden, inside) = (config.hidden, config.intermediate);
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let head_norms = match config.architecture {
            Architecture::Qwen3 => Some([
                self.head_norm(&name("self_attn.q_norm.weight"))?,
                self.head_norm(&name("self_attn.k_norm.weight"))?,
            ]),
            Architecture::Llama | Architecture::Qwen2 => None,
        };
        let parts = [
            (name("self_attn.q_proj"), q),
            (name("self_attn.k_proj"), kv),
            (name("self_attn.v_proj"), kv),
        ];
        Ok(Layer {
            input_norm: self.vector(&name("input_layernorm.weight"), hidden)?,
            qkv: self.linear(&parts, hidden, config.attention_bias)?,
            head_norms,
            output: self.linear(&[(name("self_attn.o_proj"), hidden)], q, config.output_bias)?,
            mlp_norm: self.vector(&name("post_attention_layernorm.weight"), hidden)?,
            gate_up: self.linear(
                &[(name("mlp.gate_proj"), inside), (name("mlp.up_proj"), inside)],
                hidden,
                config.mlp_bias,
            )?,
            down: self.linear(&[(name("mlp.down_proj"), hidden)], inside, config.mlp_bias)?,
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

    fn head_norm(&mut self, name: &str) -> Result<Vec<f32>, LoadError> {
        let mut norm = self.vector(name, self.config.head_dim)?;
        norm.truncate(self.config.head_dim);
        Ok(norm)
    }

    fn matrix(&mut self, name: &str, rows: usize, columns: usize) -> Result<Matrix, LoadError> {
        let view = self.tensor(name, rows, columns)?;
        let (block, _) = view.dtype.block();
        if !columns.is_multiple_of(block) {
            let expected = format!("rows of a multiple of {block} elements for {:?}", view.dtype);
            return Err(self.wrong(name, expected, columns));
        }
        let matrix = Matrix::pack(&view, &mut self.arena, self.team)
            .map_err(|error| LoadError::io(self.source.describe(), error))?;
        self.done += 1;
        (self.progress)(self.done.min(self.total), self.total);
        Ok(matrix)
    }

    /// The weight of a norm or a bias, padded with zeros to a multiple of sixteen.
    fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, LoadError> {
        let view = self.tensor(name, 1, len)?;
        if view.dtype.block().0 != 1 {
            return Err(self.wrong(name, "F32, F16 or BF16", format!("{:?}", view.dtype)));
        }
        let row = view.row(0);
        let mut vector: Vec<f32> = (0..len).map(|i| plain_number(view.dtype, row, i)).collect();
        vector.resize(len.next_multiple_of(LANES), 0.0);
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

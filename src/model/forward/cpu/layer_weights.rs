//! The weights of a model in the order of the kernels.

use super::matrix::Matrix;
use super::matrix_product::Linear;
use crate::model::config::Activation;
use crate::model::recurrent_config::MambaNorm;

/// One decoder layer.
pub struct Layer {
    /// Norm before what mixes tokens; padded.
    pub input_norm: Vec<f32>,
    /// Attention, if the layer has it.
    pub attention: Option<AttentionWeights>,
    /// Its recurrent part, if it has one.
    pub recurrent: Option<RecurrentWeights>,
    /// Norms of the outputs of attention and MLP (Gemma); padded.
    pub output_norms: Option<[Vec<f32>; 2]>,
    /// The MLP, and the norm before it, padded; `None` without an MLP.
    pub mlp: Option<(Vec<f32>, LayerMlp)>,
}

/// The weights of attention.
pub struct AttentionWeights {
    /// q, k and v, each padded to sixteen. With a gate, it comes next.
    pub qkv: Linear,
    /// Norms of each head of q and k (Qwen3, Gemma).
    pub head_norms: Option<[Vec<f32>; 2]>,
    /// The output projection.
    pub output: Linear,
}

/// The weights of a recurrent layer.
pub struct RecurrentWeights {
    /// Index among the layers with state.
    pub layer: u32,
    /// Gate, then channels, then scalars, each padded to sixteen.
    pub input: Linear,
    /// `[conv_width][channels]`, the oldest token first; channels are padded to sixteen.
    pub conv: Vec<f32>,
    /// The bias of the convolution, padded; zeros if it has none.
    pub conv_bias: Vec<f32>,
    /// What the scan needs.
    pub scan: ScanWeights,
    /// The norm of the output; padded. Empty without a norm.
    pub norm: Vec<f32>,
    /// Its place, and the number of elements that it normalises together.
    pub norm_kind: (MambaNorm, usize),
    /// The output projection.
    pub output: Linear,
}

/// What a scan needs besides the projections.
pub enum ScanWeights {
    /// Mamba-2.
    Mamba {
        /// By head.
        heads: Vec<MambaHead>,
        /// Groups of heads that share B and C.
        groups: usize,
    },
    /// A gated delta net.
    Delta {
        /// By value head.
        heads: Vec<DeltaHead>,
        /// Heads of q and k.
        key_heads: usize,
        /// The first channels of k and of v.
        channels_at: [usize; 2],
    },
}

/// The scalars of a head of a gated delta net.
#[derive(Clone, Copy)]
pub struct DeltaHead {
    /// Added to its time steps.
    pub step_bias: f32,
    /// The logarithm of the state's decay in a time step of 1; not positive.
    pub decay: f32,
}

/// The scalars of a head of Mamba-2.
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
        let recurrent = self.recurrent.iter().flat_map(|it| [&it.input, &it.output]);
        let router = self.sparse().map(|sparse| &sparse.router);
        let mlp = self.common_mlp().into_iter().flat_map(Mlp::linears);
        attention.chain(recurrent).chain(router).chain(mlp)
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

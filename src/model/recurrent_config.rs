//! Sizes and constants of recurrent layers: layers that keep a state for a whole sequence.

use crate::kv::state_layout::StateShape;
use crate::limits::CONTEXT_MAX;

/// Mamba-2: layers that keep a state for the whole sequence. A layer projects each token to a gate,
/// to x, B and C, and to a time step for each head. x, B and C pass a convolution over the last
/// tokens. The state of a head, a matrix of `state × head_dim`, decays with the time step. Then
/// B · x is added. The output is C · state, with a gate and a norm.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MambaConfig {
    /// Heads of x; a multiple of `groups`.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements of B and C.
    pub state: usize,
    /// Groups of heads that share B and C, and of the elements that share a norm.
    pub groups: usize,
    /// Tokens that the convolution sees, its own included; at least 2.
    pub conv_width: usize,
    /// Whether the convolution has a bias.
    pub conv_bias: bool,
    /// Whether the projection before has a bias.
    pub input_bias: bool,
    /// Whether the projection after has a bias.
    pub output_bias: bool,
    /// The norm of the output.
    pub norm: MambaNorm,
    /// Whether the files have A as `ln(-A)`, as those of Hugging Face. GGUF files have A itself.
    pub log_decay: bool,
}

/// The norm of a recurrent layer's output.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MambaNorm {
    /// There is none: the output is multiplied by silu(gate) only.
    None,
    /// The norm comes before the product with silu(gate).
    BeforeGate,
    /// The norm comes after the product with silu(gate).
    AfterGate,
}

impl MambaConfig {
    /// Elements of x, and of the gate.
    pub const fn inner(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Elements of x, B and C together.
    pub const fn channels(&self) -> usize {
        self.inner() + 2 * self.groups * self.state
    }

    /// Outputs of the projection: gate, then x, B and C, then the time steps.
    pub const fn projected(&self) -> usize {
        self.inner() + self.channels() + self.heads
    }

    /// The sizes that all kinds of recurrent layers have.
    pub const fn sizes(&self) -> RecurrentSizes {
        RecurrentSizes {
            heads: self.heads,
            rows: self.state,
            columns: self.head_dim,
            channels: self.channels(),
            conv_width: self.conv_width,
            scalars: self.heads,
        }
    }
}

/// Gated delta net: layers that keep a state, beside layers with gated attention (Qwen3-Next). A
/// layer projects each token to a gate, to q, k and v, and to two scalars for each value head. q, k
/// and v pass a convolution over the last tokens. The state of a head, a matrix of `key_dim ×
/// value_dim`, decays. What it gives for k is replaced by v, by a share of the second scalar. The
/// output is q · state, with a norm and a gate.
#[derive(Clone, PartialEq, Debug)]
pub struct DeltaConfig {
    /// Heads of q and k.
    pub key_heads: usize,
    /// Heads of v; a multiple of `key_heads`.
    pub value_heads: usize,
    /// Elements of a head of q and k.
    pub key_dim: usize,
    /// Elements of a head of v.
    pub value_dim: usize,
    /// Tokens that the convolution sees, its own included; at least 2.
    pub conv_width: usize,
    /// Layers with attention in place of the recurrence, ascending.
    pub full_layers: Vec<usize>,
    /// Elements of a head of attention that are rotated: the first ones.
    pub rotary_dim: usize,
    /// Whether the files have q, k, v and gate in one matrix, key head by key head. If not, one
    /// matrix has all of q, k and v, and another one has the gate.
    pub by_key_head: bool,
    /// Whether the files have A as `ln(-A)`, as those of Hugging Face. GGUF files have A itself.
    pub log_decay: bool,
    /// The number that the weights of norms lack in the files. The norm of the delta net lacks
    /// none.
    pub norm_offset: f32,
}

impl DeltaConfig {
    /// Period of layers with attention, if a file does not say it.
    pub const PERIOD: usize = 4;

    /// Elements of q, and of k.
    pub const fn keys(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Elements of v, and of the gate.
    pub const fn values(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Channels before those of k, and before those of v: the parts are padded.
    pub const fn channels_at(&self) -> [usize; 2] {
        let keys = self.keys().next_multiple_of(STATE_ALIGNMENT);
        [keys, 2 * keys]
    }

    /// The sizes that all kinds of recurrent layers have.
    pub const fn sizes(&self) -> RecurrentSizes {
        let [_, values_at] = self.channels_at();
        RecurrentSizes {
            heads: self.value_heads,
            rows: self.key_dim,
            columns: self.value_dim,
            channels: values_at + self.values(),
            conv_width: self.conv_width,
            scalars: 2 * self.value_heads.next_multiple_of(STATE_ALIGNMENT),
        }
    }
}

/// Sizes of a recurrent layer, of either kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecurrentSizes {
    /// Heads, each with a state of `rows × columns`.
    pub heads: usize,
    /// See above.
    pub rows: usize,
    /// See above. Also the elements of a head's output.
    pub columns: usize,
    /// Channels of the convolution.
    pub channels: usize,
    /// Tokens that the convolution sees.
    pub conv_width: usize,
    /// Scalars of a token, for all heads together.
    pub scalars: usize,
}

impl RecurrentSizes {
    /// Elements of the output, and of the gate.
    pub const fn inner(&self) -> usize {
        self.heads * self.columns
    }

    /// Elements from a row of a head's state to the next: `columns`, padded to the lanes of a
    /// vector.
    pub const fn state_stride(&self) -> usize {
        self.columns.next_multiple_of(STATE_ALIGNMENT)
    }

    /// Channels of one piece of the convolution's state.
    pub const fn channels_per_piece(&self) -> usize {
        let fitting = self.rows * self.state_stride() / self.conv_width;
        let whole = fitting - fitting % STATE_ALIGNMENT;
        if whole == 0 { STATE_ALIGNMENT } else { whole }
    }

    /// The state of a sequence in `layers` layers. The first pieces of a layer are its heads, each
    /// `[rows][columns]`. The others are the last `conv_width` inputs of the convolution, each
    /// `[conv_width][channels_per_piece]`.
    pub fn state_shape(&self, layers: usize) -> StateShape {
        let head = self.rows * self.state_stride();
        let columns = self.conv_width * self.channels_per_piece();
        StateShape {
            layers: layers as u32,
            pieces: (self.heads + self.channels.div_ceil(self.channels_per_piece())) as u32,
            piece_elements: head.max(columns) as u32,
        }
    }
}

/// The context of a recurrent model, if its files name this one. Its state has one size for any
/// context, so files name none, or a number without a meaning.
pub fn recurrent_context(named: Option<usize>) -> usize {
    named.unwrap_or(usize::MAX).min(CONTEXT_MAX as usize)
}

/// Elements of a vector of the kernels.
const STATE_ALIGNMENT: usize = 16;

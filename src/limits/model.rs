//! Limits of model files and of the sizes that they name.

/// Longest head of a safetensors file: the format's own bound.
pub const SAFETENSORS_HEADER_MAX: usize = 100_000_000;
/// Longest JSON file of a model directory, except the tokenizer. The indices of large models reach
/// some megabytes.
pub const MODEL_JSON_MAX: usize = 64 << 20;
/// Most layers of a model. The deepest published models have under two hundred.
pub const MODEL_LAYERS_MAX: usize = 1024;
/// Most heads of attention. The largest published models have under two hundred.
pub const HEADS_MAX: usize = 16_384;
/// Most elements of a head of attention. Published models have up to 512.
pub const HEAD_DIM_MAX: usize = 4096;
/// Most elements between layers. The largest published models have under twenty thousand.
pub const HIDDEN_MAX: usize = 1 << 20;
/// Most experts of a layer. The largest published ones have under six hundred.
pub const EXPERTS_MAX: usize = 1024;
/// Most heads of a recurrent layer. The largest published models have under three hundred.
pub const RECURRENT_HEADS_MAX: usize = 16_384;
/// Most rows and columns of the state of a head. Published models have up to 256.
pub const RECURRENT_STATE_MAX: usize = 4096;
/// Most tokens that the convolution of a recurrent layer sees. Published models have 4.
pub const RECURRENT_CONV_MAX: usize = 16;
/// Context of a recurrent model without `--max-model-len`, in tokens, unless its own is shorter.
/// Its state has one size for any context, but a request reserves memory for its ids.
pub const RECURRENT_CONTEXT: usize = 1 << 17;
/// Elements of the largest tensor of a model with dummy weights, which is held in memory.
/// Embeddings of the largest published models have two billion.
pub const DUMMY_ELEMENTS_MAX: usize = 1 << 32;

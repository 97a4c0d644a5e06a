//! Every bound on what comes from outside or waits inside, each with its reason. Modules own no
//! limits of their own.

/// Longest HTTP request head in bytes; the field's proxies send well under 16 KiB.
pub const HTTP_HEAD_MAX: usize = 64 << 10;
/// Most header lines of an HTTP message.
pub const HTTP_HEADERS_MAX: usize = 100;
/// Longest HTTP body: prompts of a million ids as JSON fit.
pub const HTTP_BODY_MAX: usize = 32 << 20;

// model files
/// Most metadata entries of a GGUF file; published ones hold under a hundred.
pub const GGUF_METADATA_MAX: usize = 4096;
/// Most tensors of a GGUF file; the largest published models hold a few thousand.
pub const GGUF_TENSORS_MAX: usize = 1 << 16;
/// Longest key or tensor name of a GGUF file, the format's own bound.
pub const GGUF_NAME_MAX: usize = 65535;
/// Most ids of a vocabulary; the largest published ones have 300 thousand.
pub const TOKENIZER_VOCAB_MAX: usize = 1 << 24;
/// Most alternatives shown beside a token; the most that OpenAI's interface takes.
pub const TOP_LOGPROBS_MAX: usize = 20;
/// Most layers of a model with dummy weights; the deepest published ones have under two hundred.
pub const DUMMY_LAYERS_MAX: usize = 1024;
/// Elements of its largest tensor, which is held in memory; embeddings of the largest published models
/// have two thousand million.
pub const DUMMY_ELEMENTS_MAX: usize = 1 << 32;
/// Longest head of a safetensors file, the format's own bound.
pub const SAFETENSORS_HEADER_MAX: usize = 100_000_000;
/// Longest JSON file of a model's directory but for its tokenizer; indices of large models reach
/// some megabytes.
pub const MODEL_JSON_MAX: usize = 64 << 20;

//! A model: its files, its configuration, its tokenizer and chat template, the forward pass over
//! paged KV, and the sampler.

pub mod answer;
pub mod chat;
pub mod config;
pub mod dummy;
pub mod expert_stack;
pub mod files;
pub mod fingerprint;
pub mod forward;
pub mod gguf;
pub mod grammar;
pub mod hf;
pub mod inventory;
pub mod logprobs;
pub mod mapped_file;
pub mod quant;
pub mod recurrent_config;
pub mod sampler;
pub mod tensor;
#[cfg(test)]
pub(crate) mod testing;
pub mod tokenizer;
pub mod weights;

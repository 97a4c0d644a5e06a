//! A model: its files, its configuration, its tokenizer and chat template, the forward pass over
//! paged KV, and the sampler.

pub mod forward;
pub mod logprobs;
pub mod sampler;
pub mod tensor;

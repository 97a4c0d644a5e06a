//! The bodies of the API: OpenAI's completions and chat, SGLang's `/generate`, and the small
//! endpoints around them.
//!
//! Thread: any. Owns: field names, ranges and defaults; one [`GenerateRequest`] for all three
//! endpoints; the JSON of answers ([`render`]) and of errors ([`error`]); stop strings ([`stop`]).
//! Invariants: a field of OpenAI's that is not supported is refused by name, never ignored; what
//! a body can make us hold is bounded by `limits`; no input panics. Not here: HTTP, tokenising,
//! checks against the model (vocabulary, context length).

pub mod bootstrap;
pub mod chat;
pub mod completion;
pub mod error;
mod fields;
pub mod generate;
pub mod info;
pub mod kv_transfer;
pub mod render;
pub mod request;
pub mod resume;
pub mod routed;
pub mod stop;
pub mod tokenize;

pub use bootstrap::Bootstrap;
pub use error::ApiError;
pub use kv_transfer::{Keep, KeptKv, PrefillAddress, ToldKv};
pub use render::{Choice, Renderer};
pub use request::{Endpoint, GenerateRequest, Prompts, Sampling};
pub use stop::StopMatcher;

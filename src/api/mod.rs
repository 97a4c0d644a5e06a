//! Request and response bodies of the API: OpenAI's completions and chat, SGLang's `/generate`, and
//! smaller endpoints.
//!
//! Thread: any. Owns: field names, ranges and defaults; one [`GenerateRequest`] for all three
//! endpoints; the JSON of answers ([`render`]) and of errors ([`error`]).
//! Invariants: an unsupported field of OpenAI is refused with an error that names it, and never
//! ignored. `limits` bounds the memory that a body can take. No input panics. Not here: HTTP,
//! tokenising, checks against the model (vocabulary, context length).

pub mod bootstrap;
pub mod chat;
pub mod completion;
pub mod error;
mod fields;
pub mod generate;
pub mod info;
pub mod kv_transfer;
pub mod peer_fields;
pub mod render;
pub mod request;
pub mod resume;
pub mod routed_body;
pub mod structured_output;
pub mod token_rules;
pub mod tokenize;
pub mod tools;
pub mod translation;
pub mod usage;

pub use bootstrap::BootstrapParams;
pub use error::{ApiError, ErrorCode};
pub use kv_transfer::{Keep, KeptKv, KvTransferParams, PrefillAddress};
pub use render::{Choice, Renderer};
pub use request::{ApiEndpoint, GenerateRequest, IGNORED_FIELDS, Prompts, Sampling};
pub use translation::{AnswerTranslator, TranslatedEndpoint};

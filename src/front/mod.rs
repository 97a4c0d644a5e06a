//! HTTP and OpenAI at the edge.

pub mod http;
pub mod openai;

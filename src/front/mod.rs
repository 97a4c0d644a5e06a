//! HTTP and OpenAI at the edge.

pub mod http;

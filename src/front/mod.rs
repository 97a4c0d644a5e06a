//! HTTP and OpenAI at the edge.

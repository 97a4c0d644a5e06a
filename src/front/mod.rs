//! HTTP and OpenAI at the edge, and the services that join sockets to the pure cores.

pub mod handoff;
pub mod worker;

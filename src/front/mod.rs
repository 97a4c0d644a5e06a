//! HTTP and OpenAI at the edge, and the services that join sockets to the pure cores.

pub mod asking;
pub mod bootstrap;
pub mod connections;
pub mod directory;
pub mod drain;
pub mod errands;
pub mod exchange;
pub mod generations;
pub mod handoff;
pub mod http;
pub mod lanes;
pub mod openai;
pub mod passing;
pub mod peers;
pub mod progress;
pub mod registrar;
pub mod reload;
pub mod resolver;
pub mod router;
pub mod routes;
pub mod service;
mod shortage;
pub mod stages;
pub mod telemetry;
pub mod text;
pub mod turning;
pub mod worker;

//! A worker: its `ctl` loop receives HTTP requests for text and sends tokens.
//!
//! Owns: the table of requests (`requests`) and the HTTP client that asks prefill
//! (`prefill_client`). `service` calls both of them and the hand-off (`link::handoff`). Thread:
//! `ctl`. Not here: batches and the model (`sched`, `model`), links to peers (`link`).

pub mod metrics;
pub mod prefill_client;
pub mod progress;
pub mod requests;
pub mod response;
pub mod routes;
pub mod service;
mod shortage;
pub mod stages;
pub mod telemetry;
pub mod text;

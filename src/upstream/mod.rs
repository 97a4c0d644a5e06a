//! HTTP calls from this process to another server: sending the request, reading the response, and
//! the cause of a failure.
//!
//! Thread: `ctl`. Not here: connections and which of them a call uses (`router::pool`,
//! `worker::prefill_client`).

pub mod answer;
pub(crate) mod failure;
pub mod request;

//! HTTP calls from this process to another server: the request, the response, and the cause of a
//! failure.
//!
//! Thread: `ctl`. Not here: connections, and the choice of the connection for a call
//! (`router::pool`, `worker::prefill_client`).

pub mod answer;
pub(crate) mod failure;
pub mod request;

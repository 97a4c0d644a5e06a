//! `baton serve` from a client's view, with the real binary, a tiny model and real sockets.

mod abuse;
mod client;
mod endpoints;
mod gone;
mod hub;
mod key_limits;
mod metrics;
mod newer_apis;
mod priorities;
mod process;
mod prompt_logprobs;
mod refusals;
mod same_bits;
mod scripted_hub;
mod server;

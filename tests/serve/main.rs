//! `baton serve` as its clients see it: the real binary, a tiny model, real sockets.

mod abuse;
mod client;
mod endpoints;
mod gone;
mod metrics;
mod process;
mod refusals;
mod same_bits;
mod server;

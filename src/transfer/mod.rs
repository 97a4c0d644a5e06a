//! The hand-off: the transfer of one request's KV cache between workers.

pub mod answer;
pub mod aux;
pub mod command;
pub mod copy;
pub mod copy_pool;
pub mod counters;
pub mod event_loop;
pub mod handle;
pub mod manager;
pub mod mover;
pub mod pages;
pub mod plan;
pub mod rings;
pub mod status;
pub mod target;
pub mod thread_names;
pub mod transport;

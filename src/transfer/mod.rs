//! The hand-off of KV between workers.

pub mod aux;
pub mod command;
pub mod copiers;
pub mod copy;
pub mod handle;
pub mod manager;
pub mod mover;
pub mod pages;
pub mod plan;
pub mod rings;
pub mod status;
pub mod tally;
pub mod transport;
pub mod waiter;

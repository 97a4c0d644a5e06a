//! The hand-off of KV between workers.

pub mod aux;
pub mod command;
pub mod handle;
pub mod pages;
pub mod status;
pub mod transport;

//! How a decode worker finds prefill workers: the bootstrap registry of a prefill worker and its
//! client.
//!
//! Thread: `ctl`. Not here: the links between them (`link`), other registries (`registry`).

pub mod bootstrap;
pub mod directory;

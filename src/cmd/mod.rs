//! Commands that are not servers: `baton bench`, `baton doctor`, `baton drain`.
//!
//! They use every layer below; no layer uses them.

pub mod bench;
pub mod doctor;
pub mod drain;

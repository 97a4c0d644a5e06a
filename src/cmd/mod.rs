//! Commands that are not servers: `baton bench`, `baton doctor`, `baton drain`.
//!
//! They can use every layer below. No layer uses them.

pub mod bench;
pub mod doctor;
pub mod drain;

//! The atomics of the protocols between threads and processes.
//!
//! `tools/loom` compiles the files that import from here against a module of this name that gives loom's
//! instead: so what it models is what runs. They take nothing from `std::sync::atomic` directly.

pub use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

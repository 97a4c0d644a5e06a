//! The atomics and locks of the protocols between threads and processes, and how they wait.
//!
//! `tools/loom` compiles the files that import from here against a module of this name that gives loom's
//! instead: so what it models is what runs. They take nothing from `std::sync::atomic` directly.

pub use std::sync::Mutex;
pub use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
pub use std::thread::{sleep, yield_now};

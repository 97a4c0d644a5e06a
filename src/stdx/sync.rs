//! The atomics, locks and waits of the protocols between threads and processes.
//!
//! `tools/loom` compiles the files that import from here against a module of the same name with
//! loom's types. So the modelled code is the real code. Those files use nothing from
//! `std::sync::atomic` directly.

pub use std::sync::Mutex;
pub use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
pub use std::thread::{sleep, yield_now};

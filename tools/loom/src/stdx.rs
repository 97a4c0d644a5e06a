//! The product's `stdx` with loom's atomics.

#[path = "../../../src/stdx/barrier.rs"]
pub mod barrier;
#[path = "../../../src/stdx/event_count.rs"]
pub mod event_count;

#[path = "../../../src/stdx/failpoint.rs"]
pub mod failpoint;

/// Replaces the product's module, which exports the types of `std`.
pub mod sync {
    pub use loom::sync::Mutex;
    pub use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
    pub use loom::thread::yield_now;

    /// Time does not pass in a model. Other threads run instead.
    pub fn sleep(_time: std::time::Duration) {
        yield_now();
    }
}

/// Does nothing: models can allocate.
pub mod seal {
    pub fn seal_thread() {}
}

//! The product's `stdx`, on loom's atomics.

#[path = "../../../src/stdx/bell.rs"]
pub mod bell;
#[path = "../../../src/stdx/phase.rs"]
pub mod phase;

#[path = "../../../src/stdx/planted.rs"]
pub mod planted;

/// In the place of the product's module, which gives those of `std`.
pub mod sync {
    pub use loom::sync::Mutex;
    pub use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
    pub use loom::thread::yield_now;

    /// Time does not pass here: others run.
    pub fn sleep(_time: std::time::Duration) {
        yield_now();
    }
}

/// Models may allocate.
pub mod seal {
    pub fn seal_thread() {}
}

//! A doorbell: wakes a thread that may be parked, at the price of a fence when it is not.
//!
//! Thread: any may ring; one listens. Invariant: no lost wake-up. The listener announces that it
//! parks, *then* looks once more for work; a ringer stores its work, *then* looks whether somebody
//! parks; a SeqCst fence between the two on both sides.

use crate::stdx::sync::{AtomicBool, Ordering, fence};

/// Rings whoever waits behind it.
pub struct Bell {
    parked: AtomicBool,
    wake: Box<dyn Fn() + Send + Sync>,
}

impl Bell {
    /// A bell that calls `wake` when the listener is parked. `wake` must make the listener's wait end,
    /// also when called just before the wait begins.
    pub fn new(wake: impl Fn() + Send + Sync + 'static) -> Bell {
        Bell { parked: AtomicBool::new(false), wake: Box::new(wake) }
    }

    /// After work was stored where the listener looks.
    #[inline]
    pub fn ring(&self) {
        fence(Ordering::SeqCst);
        // Of several ringers one wakes. Who loses stores nothing, which loom could not tell from a store after the
        // next announcement.
        let woken =
            || self.parked.compare_exchange(true, false, Ordering::Relaxed, Ordering::Relaxed);
        if self.parked.load(Ordering::Relaxed) && woken().is_ok() {
            (self.wake)();
        }
    }

    /// The listener is about to park. It must look for work once more after this, and park only if
    /// there is none.
    pub fn announce(&self) {
        self.parked.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// The listener is awake.
    pub fn dismiss(&self) {
        self.parked.store(false, Ordering::Relaxed);
    }
}

impl std::fmt::Debug for Bell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bell").field("parked", &self.parked).finish_non_exhaustive()
    }
}

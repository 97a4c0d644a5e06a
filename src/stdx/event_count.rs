//! Wakes a thread that may be parked. If it is not parked, a wake-up costs one fence.
//!
//! Thread: any thread may notify; one listens. Invariant: no lost wake-up. The listener announces
//! that it parks, *then* looks for work once more. A notifier stores its work, *then* checks
//! whether the listener parks. Both sides have a SeqCst fence between the two steps.

use crate::stdx::sync::{AtomicBool, Ordering, fence};

/// The wake-up flag of one listener; see the module.
pub struct EventCount {
    parked: AtomicBool,
    wake: Box<dyn Fn() + Send + Sync>,
}

impl EventCount {
    /// An event count that calls `wake` if the listener is parked. `wake` must end the listener's
    /// wait, even if it is called just before the wait begins.
    pub fn new(wake: impl Fn() + Send + Sync + 'static) -> EventCount {
        EventCount { parked: AtomicBool::new(false), wake: Box::new(wake) }
    }

    /// Wakes the listener. Call it after work was stored where the listener looks.
    #[inline]
    pub fn notify(&self) {
        fence(Ordering::SeqCst);
        // One of several notifiers wakes the listener. The others store nothing: loom could not
        // distinguish such a store from one after the next announcement.
        let woken =
            || self.parked.compare_exchange(true, false, Ordering::Relaxed, Ordering::Relaxed);
        if self.parked.load(Ordering::Relaxed) && woken().is_ok() {
            (self.wake)();
        }
    }

    /// Announces that the listener parks. After this it must look for work once more, and park only
    /// if there is none.
    pub fn prepare_wait(&self) {
        self.parked.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Whether the listener has announced that it parks, and was not notified since.
    pub fn is_parked(&self) -> bool {
        self.parked.load(Ordering::Relaxed)
    }

    /// Announces that the listener is awake.
    pub fn cancel_wait(&self) {
        self.parked.store(false, Ordering::Relaxed);
    }
}

impl std::fmt::Debug for EventCount {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventCount").field("parked", &self.parked).finish_non_exhaustive()
    }
}

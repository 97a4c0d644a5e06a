//! Whether an engine hangs: its count of turns and layers, and when it last moved. A hung worker looks dead to routers and
//! peers, a busy one does not.
//!
//! Thread: `ctl`. Not here: who is told (`service`).

use crate::limits::ENGINE_STILL_MAX;
use crate::stdx::planted::is_planted;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// An engine's count, and when it last moved.
#[derive(Debug)]
pub struct Progress {
    count: Arc<AtomicU64>,
    seen: u64,
    moved: Instant,
}

impl Progress {
    /// Of an engine that counts there.
    pub fn new(count: Arc<AtomicU64>, now: Instant) -> Progress {
        Progress { count, seen: 0, moved: now }
    }

    /// Looks from now on.
    pub fn begin(&mut self, now: Instant) {
        self.moved = now;
    }

    /// Whether the engine hangs: a busy one moves with each layer, an idle one with each look for work.
    pub fn stands_still(&mut self, now: Instant) -> bool {
        let count = self.count.load(Ordering::Relaxed);
        if count != self.seen {
            (self.seen, self.moved) = (count, now);
        }
        let still = now.saturating_duration_since(self.moved);
        match () {
            () if is_planted("hung engine looks well") => false,
            () if is_planted("busy engine looks hung") => still > Duration::from_millis(100),
            () => still > ENGINE_STILL_MAX,
        }
    }
}

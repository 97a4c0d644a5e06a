//! Whether an engine hangs: its count of turns and layers, and when it last moved. A hung worker looks dead to routers and
//! peers, a busy one does not.
//!
//! Thread: `ctl`. Invariant: what passes while nobody looks, since the process or its host was paused, is not the engine's.
//! Not here: who is told (`service`).

use crate::limits::{ENGINE_STILL_MAX, LOOK_GAP_MAX};
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
    /// When it was looked at last.
    looked: Instant,
    /// Whether that was long after the look before.
    late: bool,
    /// For how long nobody looked, until that is told.
    paused: Option<Duration>,
}

impl Progress {
    /// Of an engine that counts there.
    pub fn new(count: Arc<AtomicU64>, now: Instant) -> Progress {
        Progress { count, seen: 0, moved: now, looked: now, late: false, paused: None }
    }

    /// Looks from now on.
    pub fn begin(&mut self, now: Instant) {
        (self.moved, self.looked) = (now, now);
    }

    /// For how long this process stood still as a whole, once for each time that it did.
    pub fn take_pause(&mut self) -> Option<Duration> {
        self.paused.take()
    }

    /// Whether the engine hangs: a busy one moves with each layer, an idle one with each look for work.
    pub fn stands_still(&mut self, now: Instant) -> bool {
        let gap = now.saturating_duration_since(std::mem::replace(&mut self.looked, now));
        let is_late = gap > LOOK_GAP_MAX;
        // One gap behind another is this thread's own slowness, which excuses nobody.
        if is_late && !std::mem::replace(&mut self.late, is_late) {
            self.moved += gap;
            self.paused = Some(gap);
        }
        self.late = is_late;
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

#[cfg(test)]
mod tests {
    use super::*;

    const TICK: Duration = Duration::from_millis(100);

    fn looks(progress: &mut Progress, now: &mut Instant, times: u32) -> bool {
        (0..times).any(|_| {
            *now += TICK;
            progress.stands_still(*now)
        })
    }

    #[test]
    fn an_engine_that_does_not_move_hangs_and_a_process_that_was_paused_does_not() {
        let (count, mut now) = (Arc::<AtomicU64>::default(), Instant::now());
        let mut progress = Progress::new(count.clone(), now);
        assert!(!looks(&mut progress, &mut now, 90));
        now += 3 * ENGINE_STILL_MAX;
        assert!(!progress.stands_still(now), "nobody moved");
        assert_eq!(
            (progress.take_pause(), progress.take_pause()),
            (Some(3 * ENGINE_STILL_MAX), None)
        );
        assert!(!looks(&mut progress, &mut now, 9), "it has the rest of its time");
        assert!(looks(&mut progress, &mut now, 5), "and no more");
        count.store(1, Ordering::Relaxed);
        assert!(!looks(&mut progress, &mut now, 50));
    }

    #[test]
    fn who_looks_rarely_finds_out_as_well() {
        let mut now = Instant::now();
        let mut progress = Progress::new(Arc::default(), now);
        let hangs = (0..20).any(|_| {
            now += 2 * LOOK_GAP_MAX;
            progress.stands_still(now)
        });
        assert!(hangs, "each look is late");
    }
}

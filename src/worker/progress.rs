//! Detects an engine that hangs, from its counter of turns and layers. A hung worker looks dead to
//! routers and peers; a busy one does not.
//!
//! Thread: `ctl`. Invariant: if the process or its host was paused, the pause does not count
//! against the engine. Not here: the effects of a hang (`service`).

use crate::limits::{ENGINE_STILL_MAX, LOOK_GAP_MAX};
use crate::stdx::failpoint::is_failpoint_active;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// An engine's counter, and the time of its last change.
#[derive(Debug)]
pub struct EngineWatchdog {
    count: Arc<AtomicU64>,
    seen: u64,
    moved: Instant,
    /// Time of the last check.
    looked: Instant,
    /// Whether the last check was long after the previous one.
    late: bool,
    /// Duration of a pause of the process, until [`EngineWatchdog::take_pause`] returns it.
    paused: Option<Duration>,
}

impl EngineWatchdog {
    /// Watches the engine that increments `count`.
    pub fn new(count: Arc<AtomicU64>, now: Instant) -> EngineWatchdog {
        EngineWatchdog { count, seen: 0, moved: now, looked: now, late: false, paused: None }
    }

    /// Starts to watch now.
    pub fn begin(&mut self, now: Instant) {
        (self.moved, self.looked) = (now, now);
    }

    /// Duration of a pause of the whole process. Returned once for each pause.
    pub fn take_pause(&mut self) -> Option<Duration> {
        self.paused.take()
    }

    /// Whether the engine hangs now. Also detects a pause of the process. A busy engine counts each
    /// layer, and an idle engine counts each check for work.
    pub fn check_hang(&mut self, now: Instant) -> bool {
        let gap = now.saturating_duration_since(std::mem::replace(&mut self.looked, now));
        let is_late = gap > LOOK_GAP_MAX;
        // Two gaps in a row mean that this thread is slow, not paused. That does not excuse the
        // engine.
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
            () if is_failpoint_active("hung engine looks well") => false,
            () if is_failpoint_active("busy engine looks hung") => {
                still > Duration::from_millis(100)
            }
            () => still > ENGINE_STILL_MAX,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICK: Duration = Duration::from_millis(100);

    fn looks(progress: &mut EngineWatchdog, now: &mut Instant, times: u32) -> bool {
        (0..times).any(|_| {
            *now += TICK;
            progress.check_hang(*now)
        })
    }

    #[test]
    fn an_engine_that_does_not_move_hangs_and_a_process_that_was_paused_does_not() {
        let (count, mut now) = (Arc::<AtomicU64>::default(), Instant::now());
        let mut progress = EngineWatchdog::new(count.clone(), now);
        assert!(!looks(&mut progress, &mut now, 90));
        now += 3 * ENGINE_STILL_MAX;
        assert!(!progress.check_hang(now), "the whole process was paused");
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
    fn a_watchdog_that_looks_rarely_also_finds_a_hang() {
        let mut now = Instant::now();
        let mut progress = EngineWatchdog::new(Arc::default(), now);
        let hangs = (0..20).any(|_| {
            now += 2 * LOOK_GAP_MAX;
            progress.check_hang(now)
        });
        assert!(hangs, "each look is late");
    }
}

//! Clocks: the time of day, the host's monotonic clock, and the CPU time of this process.
#![allow(unsafe_code)]

use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A clock for threads without a reactor: the system's, or that of a simulated host.
#[derive(Clone, Default, Debug)]
pub struct Clock(Option<Arc<dyn TimeSource>>);

/// The time of a simulated host.
pub trait TimeSource: Send + Sync + Debug {
    /// The time. It never goes back.
    fn now(&self) -> Instant;

    /// Time since 1970-01-01 UTC.
    fn since_epoch(&self) -> Duration;
}

impl Clock {
    /// The clock of a simulated host.
    pub fn simulated(source: Arc<dyn TimeSource>) -> Clock {
        Clock(Some(source))
    }

    /// The time. It never goes back.
    pub fn now(&self) -> Instant {
        self.0.as_ref().map_or_else(Instant::now, |source| source.now())
    }

    /// Time since 1970-01-01 UTC.
    pub fn since_epoch(&self) -> Duration {
        self.0.as_ref().map_or_else(since_epoch, |source| source.since_epoch())
    }
}

/// Nanoseconds since a moment that is the same for all processes of this host (CLOCK_MONOTONIC).
pub fn monotonic_ns() -> u64 {
    read(libc::CLOCK_MONOTONIC)
}

/// Time since 1970-01-01 UTC; zero if the host's clock is before that.
pub fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Nanoseconds of CPU time used by all threads of this process.
pub fn process_cpu_ns() -> u64 {
    read(libc::CLOCK_PROCESS_CPUTIME_ID)
}

fn read(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes the given struct. Both clocks exist on every Linux, so it does not
    // fail.
    unsafe { libc::clock_gettime(clock, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_passes_and_work_takes_some_of_it() {
        let (begun, cpu) = (monotonic_ns(), process_cpu_ns());
        let until = Instant::now() + Duration::from_millis(20);
        while Instant::now() < until {
            std::hint::spin_loop();
        }
        assert!(monotonic_ns() - begun >= 20_000_000);
        assert!(process_cpu_ns() > cpu);
    }
}

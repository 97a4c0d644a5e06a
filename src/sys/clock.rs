//! Clocks: the time of day, the host's monotonic clock, and the CPU time of this process.
#![allow(unsafe_code)]

use std::time::{Duration, SystemTime, UNIX_EPOCH};

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
    use std::time::Instant;

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

//! Signals of the threads that a library starts in the process of its caller.
//!
//! Thread: any; a mask belongs to one thread. Invariant: a thread keeps the mask of the thread that
//! starts it.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::ptr;

/// Runs `start` with all signals blocked, then restores the caller's mask. Threads that `start`
/// starts get no signal: handlers of the process do not run on them, and a write to a closed socket
/// is an error there, also if SIGPIPE ends the process.
pub fn with_blocked<T>(start: impl FnOnce() -> T) -> T {
    let (mut all, mut former) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: both sets are writable. `sigfillset` fills the first one, which the mask then reads;
    // the second one gets the former mask.
    let blocked = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), former.as_mut_ptr())
    };
    let started = start();
    if blocked == 0 {
        // SAFETY: the call above has filled `former`.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, former.as_ptr(), ptr::null_mut()) };
    }
    started
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    fn blocked() -> Vec<usize> {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap();
        let mask = u64::from_str_radix(line.trim(), 16).unwrap();
        (1..=64).filter(|signal| mask >> (signal - 1) & 1 == 1).collect()
    }

    #[test]
    fn only_the_started_thread_gets_no_signals() {
        let former = blocked();
        let inside = with_blocked(|| thread::spawn(blocked).join().unwrap());
        assert!(inside.contains(&(libc::SIGPIPE as usize)), "{inside:?}");
        assert!(inside.contains(&(libc::SIGTERM as usize)), "{inside:?}");
        assert_eq!(blocked(), former);
    }
}

//! Signals of the threads that a library starts in the process of its caller.
//!
//! Thread: any; a mask belongs to one thread. Invariants: a thread keeps the mask of the thread
//! that starts it. Signals of a fault stay open, so that the handlers of the process report it.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::ptr;

/// Signals that an instruction of the thread itself raises.
const FAULTS: [libc::c_int; 6] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];

/// Runs `start` with all signals blocked but those of a fault, then restores the caller's mask.
/// Threads that `start` starts get no other signal: handlers of the process do not run on them. A
/// write to a closed socket is an error there, also if SIGPIPE ends the process.
pub fn with_blocked<T>(start: impl FnOnce() -> T) -> T {
    let _former = FormerMask::block();
    start()
}

/// The mask of this thread before a block. Its drop restores it, also after a panic.
struct FormerMask(Option<libc::sigset_t>);

impl FormerMask {
    fn block() -> FormerMask {
        let (mut all, mut former) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: both sets are writable. `sigfillset` fills the first one, which the other calls
        // then use; the second one gets the former mask, if the call succeeds.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            for signal in FAULTS {
                libc::sigdelset(all.as_mut_ptr(), signal);
            }
            match libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), former.as_mut_ptr()) {
                0 => FormerMask(Some(former.assume_init())),
                _ => FormerMask(None),
            }
        }
    }
}

impl Drop for FormerMask {
    fn drop(&mut self) {
        if let Some(former) = &self.0 {
            // SAFETY: the set is readable.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, former, ptr::null_mut()) };
        }
    }
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
        assert!(FAULTS.iter().all(|fault| !inside.contains(&(*fault as usize))), "{inside:?}");
        assert_eq!(blocked(), former);
    }

    #[test]
    fn a_panic_restores_the_mask() {
        let former = blocked();
        let panicked = std::panic::catch_unwind(|| with_blocked(|| panic!("planted")));
        assert!(panicked.is_err());
        assert_eq!(blocked(), former);
    }
}

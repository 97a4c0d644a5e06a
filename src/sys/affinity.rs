//! The CPUs on which a thread can run.
//!
//! Thread: each for itself. Invariants: a thread starts with the CPUs of the thread that starts it.
//! Not here: the CPUs of each thread (`process::cpu_plan`), facts of CPUs (`topology`).
#![allow(unsafe_code)]

use std::io;

/// Linux's maximum number of logical CPUs.
pub const CPUS_MAX: usize = 8192;

/// A bit for each CPU. Linux reads it in words of `unsigned long`.
type Mask = [libc::c_ulong; CPUS_MAX / libc::c_ulong::BITS as usize];

const EMPTY: Mask = [0; CPUS_MAX / libc::c_ulong::BITS as usize];

/// The word and the bit of a CPU.
fn place(cpu: usize) -> (usize, libc::c_ulong) {
    let bits = libc::c_ulong::BITS as usize;
    (cpu / bits, 1 << (cpu % bits))
}

/// The CPUs of the calling thread, in ascending order.
///
/// # Errors
/// The system does not tell them.
pub fn allowed() -> io::Result<Vec<usize>> {
    let mut mask = EMPTY;
    // SAFETY: `mask` is writable for its size. The system writes whole words of a bit mask.
    let result = unsafe {
        libc::sched_getaffinity(0, size_of::<Mask>(), mask.as_mut_ptr().cast::<libc::cpu_set_t>())
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    let is_set = |cpu: &usize| {
        let (word, bit) = place(*cpu);
        mask[word] & bit != 0
    };
    Ok((0..CPUS_MAX).filter(is_set).collect())
}

/// Restricts the calling thread to `cpus`. Allocates nothing.
///
/// # Errors
/// The process can use none of them, or a number is too large.
pub fn restrict(cpus: &[usize]) -> io::Result<()> {
    let mut mask = EMPTY;
    for &cpu in cpus {
        let (word, bit) = place(cpu);
        *mask.get_mut(word).ok_or(io::ErrorKind::InvalidInput)? |= bit;
    }
    // SAFETY: `mask` is readable for its size. The system only reads it.
    let result = unsafe {
        libc::sched_setaffinity(0, size_of::<Mask>(), mask.as_ptr().cast::<libc::cpu_set_t>())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Runs `start` on `cpus`, then continues on the former CPUs, also after a panic. Threads that
/// `start` starts keep `cpus`.
///
/// # Errors
/// The CPUs cannot be used. `start` has run on the former CPUs.
pub fn start_on<T>(cpus: &[usize], start: impl FnOnce() -> T) -> (T, io::Result<()>) {
    let moved = allowed().and_then(|former| restrict(cpus).map(|()| FormerCpus(former)));
    let started = start();
    (started, moved.and_then(FormerCpus::restore))
}

/// The CPUs of this thread before a restriction. Its drop restores them.
struct FormerCpus(Vec<usize>);

impl FormerCpus {
    fn restore(mut self) -> io::Result<()> {
        restrict(&std::mem::take(&mut self.0))
    }
}

impl Drop for FormerCpus {
    fn drop(&mut self) {
        if !self.0.is_empty() {
            let _ = restrict(&self.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn a_thread_runs_on_its_allowed_cpus() {
        let inner = || {
            let all = allowed().unwrap();
            assert!(!all.is_empty() && all.is_sorted());
            let last = *all.last().unwrap();
            restrict(&[last]).unwrap();
            assert_eq!(allowed().unwrap(), [last]);
            restrict(&all).unwrap();
            assert_eq!(allowed().unwrap(), all);
            assert!(restrict(&[]).is_err() && restrict(&[CPUS_MAX]).is_err());
            assert_eq!(allowed().unwrap(), all);
        };
        // Other tests can use this test's thread.
        thread::spawn(inner).join().unwrap();
    }

    #[test]
    fn a_started_thread_keeps_the_cpus_and_its_starter_gets_its_own_back() {
        let inner = || {
            let all = allowed().unwrap();
            let first = &all[..1];
            let (started, moved) =
                start_on(first, || thread::spawn(|| allowed().unwrap()).join().unwrap());
            assert!(moved.is_ok());
            assert_eq!((started, allowed().unwrap()), (first.to_vec(), all.clone()));
            let (started, moved) = start_on(&[], || allowed().unwrap());
            assert!(moved.is_err());
            assert_eq!((started, allowed().unwrap()), (all.clone(), all.clone()));
            let panicked = std::panic::catch_unwind(|| start_on(first, || panic!("planted")));
            assert!(panicked.is_err());
            assert_eq!(allowed().unwrap(), all);
        };
        thread::spawn(inner).join().unwrap();
    }
}

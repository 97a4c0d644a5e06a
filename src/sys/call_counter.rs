//! Counts the system calls of this process. The kernel counts them, at its tracepoint `sys_enter`.
//!
//! Thread: any. Invariants: it counts the threads that run when it starts, and those that they
//! start. Calls are slower meanwhile, so nothing is timed at the same time.
#![allow(unsafe_code)]

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{FromRawFd, OwnedFd};

/// Places of the number of the tracepoint. The file system `tracefs` is there, and usually only
/// root can read it.
const NUMBERS: [&str; 2] = [
    "/sys/kernel/tracing/events/raw_syscalls/sys_enter/id",
    "/sys/kernel/debug/tracing/events/raw_syscalls/sys_enter/id",
];

/// `perf_event_attr` of the kernel, as in its first version.
#[derive(Default)]
#[repr(C)]
struct EventAttributes {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    breakpoint_type: u32,
    breakpoint_address: u64,
}

const PERF_TYPE_TRACEPOINT: u32 = 2;
/// New threads are counted, too.
const INHERIT: u64 = 1 << 1;
const PERF_FLAG_FD_CLOEXEC: libc::c_ulong = 1 << 3;

/// A count that has begun: the name and the count of each thread. The counting thread is last.
#[derive(Debug)]
pub struct CallCounter(Vec<(String, File)>);

impl CallCounter {
    /// Begins to count.
    ///
    /// # Errors
    /// `Unsupported`: the tracepoint cannot be read. `PermissionDenied`: this process cannot use
    /// it. The text names what is missing.
    pub fn start() -> io::Result<CallCounter> {
        let number = NUMBERS.iter().find_map(|path| fs::read_to_string(path).ok());
        let number = number.ok_or_else(|| {
            let why = format!("{} cannot be read; is tracefs mounted?", NUMBERS[0]);
            io::Error::new(io::ErrorKind::Unsupported, why)
        })?;
        let number = number.trim().parse().map_err(|_| io::ErrorKind::InvalidData)?;
        let own = fs::read_link("/proc/thread-self")?;
        let own = own.file_name().ok_or(io::ErrorKind::InvalidData)?.to_owned();
        let mut threads = Vec::new();
        for thread in fs::read_dir("/proc/self/task")? {
            threads.push(thread?.file_name());
        }
        threads.retain(|thread| *thread != own);
        threads.push(own);
        let mut counts = Vec::with_capacity(threads.len());
        for thread in &threads {
            let thread = thread.to_str().ok_or(io::ErrorKind::InvalidData)?;
            let name = match fs::read_to_string(format!("/proc/self/task/{thread}/comm")) {
                Err(error) if has_ended(&error) || error.kind() == io::ErrorKind::NotFound => {
                    continue;
                }
                name => name?,
            };
            let thread = thread.parse().map_err(|_| io::ErrorKind::InvalidData)?;
            match open(number, thread) {
                Err(error) if has_ended(&error) => {}
                count => counts.push((name.trim_end().to_owned(), count?)),
            }
        }
        Ok(CallCounter(counts))
    }

    /// The name of each thread and its calls since the start, without those of this counter.
    ///
    /// # Errors
    /// The kernel does not tell a count.
    pub fn finish(self) -> io::Result<Vec<(String, u64)>> {
        // The counting thread's own count is read first. It includes the call of this read.
        let mut reads = 1;
        let read = |(name, mut thread): (String, File)| {
            let mut count = [0; 8];
            thread.read_exact(&mut count)?;
            let calls = u64::from_ne_bytes(count).saturating_sub(reads);
            reads = 0;
            Ok((name, calls))
        };
        self.0.into_iter().rev().map(read).collect()
    }
}

/// Whether a call failed because its thread has ended.
fn has_ended(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ESRCH)
}

/// Begins to count the calls of one thread.
fn open(tracepoint: u64, thread: libc::pid_t) -> io::Result<File> {
    let attributes = EventAttributes {
        kind: PERF_TYPE_TRACEPOINT,
        size: size_of::<EventAttributes>() as u32,
        config: tracepoint,
        flags: INHERIT,
        ..EventAttributes::default()
    };
    let (any_cpu, no_group): (libc::c_int, libc::c_int) = (-1, -1);
    // SAFETY: the attributes are readable for their size, and the result is checked.
    let descriptor = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            &raw const attributes,
            thread,
            any_cpu,
            no_group,
            PERF_FLAG_FD_CLOEXEC,
        )
    };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a fresh descriptor without another owner.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor as libc::c_int) }.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::event::EventFd;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    /// Whether this host does not let this process count.
    fn is_missing(why: &io::Error) -> bool {
        matches!(why.kind(), io::ErrorKind::Unsupported | io::ErrorKind::PermissionDenied)
    }

    #[test]
    fn calls_are_counted() {
        let event = EventFd::new().unwrap();
        let counter = match CallCounter::start() {
            Ok(counter) => counter,
            Err(why) if is_missing(&why) => return eprintln!("SKIPPED: {why}"),
            Err(why) => panic!("{why}"),
        };
        (0..1000).for_each(|_| event.signal());
        let counted = counter.finish().unwrap();
        assert_eq!(counted[0].1, 1000, "{counted:?}");
    }

    #[test]
    fn threads_that_end_meanwhile_are_left_out() {
        let is_over = AtomicBool::new(false);
        let failed = thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let _ = thread::spawn(|| ()).join();
                }
            });
            let failed = (0..200).find_map(|_| CallCounter::start().err());
            is_over.store(true, Ordering::Relaxed);
            failed
        });
        match failed {
            Some(why) if is_missing(&why) => eprintln!("SKIPPED: {why}"),
            failed => assert!(failed.is_none(), "{failed:?}"),
        }
    }
}

//! What a thread does if a NIC can still access memory that is about to be reused.
//!
//! In a worker, the process ends, because nothing less stops the NIC. In the process of another
//! program, the thread ends by a panic: its leases never end, so their memory is not reused, and
//! the memory stays mapped. Thread: each has its own setting.

use std::cell::Cell;
use std::fmt;
use std::thread;

thread_local! {
    static IS_GUEST: Cell<bool> = const { Cell::new(false) };
}

/// Runs `body` as a part of another program's process: nothing in it ends the process.
pub fn as_guest<T>(body: impl FnOnce() -> T) -> T {
    struct Former(bool);
    impl Drop for Former {
        fn drop(&mut self) {
            IS_GUEST.set(self.0);
        }
    }
    let _former = Former(IS_GUEST.replace(true));
    body()
}

/// Ends the process, or the thread of a guest. A guest's thread that already panics goes on.
///
/// # Panics
/// The thread is a guest.
pub fn end(why: fmt::Arguments<'_>) {
    if !IS_GUEST.get() {
        eprintln!("{why}: the process ends");
        std::process::abort();
    }
    if !thread::panicking() {
        panic!("{why}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_panics_once_and_another_thread_is_no_guest() {
        struct EndsAgain;
        impl Drop for EndsAgain {
            fn drop(&mut self) {
                end(format_args!("a second queue pair hangs"));
            }
        }
        let guest = || {
            as_guest(|| {
                let _again = EndsAgain;
                end(format_args!("a queue pair hangs"));
            });
        };
        let panic = thread::spawn(guest).join().unwrap_err();
        assert_eq!(*panic.downcast::<String>().unwrap(), "a queue pair hangs");
        assert!(!IS_GUEST.get());
    }
}

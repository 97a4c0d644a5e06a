//! Mistakes planted on purpose, one at a time, to test whether the checkers find them.
//!
//! Failpoints belong to a thread, so that parallel tests do not interfere. Without debug assertions
//! no failpoint is active and the checks compile to nothing. The name of a failpoint is the mistake
//! in words.

use std::cell::Cell;

thread_local! {
    static PLANTED: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// Plants a mistake in this thread, or removes it.
pub fn set_failpoint(mistake: Option<&'static str>) {
    PLANTED.set(mistake);
}

/// The mistake planted in this thread.
pub fn active_failpoint() -> Option<&'static str> {
    PLANTED.get()
}

/// Whether this mistake is planted.
#[inline]
pub fn is_failpoint_active(mistake: &str) -> bool {
    cfg!(debug_assertions) && PLANTED.get() == Some(mistake)
}

/// Runs `step` with this mistake planted and returns the message of its panic, for a test.
///
/// # Panics
/// `step` does not panic.
#[cfg(test)]
pub fn panic_of(mistake: &'static str, step: impl FnOnce()) -> String {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    set_failpoint(Some(mistake));
    let found = catch_unwind(AssertUnwindSafe(step));
    set_failpoint(None);
    let message = found.expect_err("the mistake is found");
    match message.downcast::<String>() {
        Ok(text) => *text,
        Err(other) => (*other.downcast::<&str>().expect("a message of assert!")).to_owned(),
    }
}

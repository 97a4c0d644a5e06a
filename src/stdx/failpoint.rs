//! Mistakes planted on purpose, one at a time, to test whether the checkers find them.
//!
//! Failpoints belong to a thread, so that parallel tests do not interfere. Without debug assertions
//! no failpoint is active and the checks compile to nothing. The code that checks a failpoint names
//! it in words.

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

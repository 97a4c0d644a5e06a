//! Mistakes planted on purpose, one at a time, to see whether what looks for mistakes finds them.
//!
//! By thread, so that tests beside each other do not meet. Where debug assertions are not compiled in, nothing
//! is ever planted and nothing is left of the question. Who asks names the mistake in words.

use std::cell::Cell;

thread_local! {
    static PLANTED: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// Plants a mistake in this thread, or none.
pub fn plant(mistake: Option<&'static str>) {
    PLANTED.set(mistake);
}

/// What is planted in this thread.
pub fn planted() -> Option<&'static str> {
    PLANTED.get()
}

/// Whether this one is.
#[inline]
pub fn is_planted(mistake: &str) -> bool {
    cfg!(debug_assertions) && PLANTED.get() == Some(mistake)
}

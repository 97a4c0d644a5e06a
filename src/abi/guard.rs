//! What surrounds each call: no unwinding, no use in a forked child, and the text of an error.

use super::types::BatonError;
use crate::obs::log::{self, LogConfig, LogFormat, LogLevel};
use crate::sys::fork_mark::ForkMark;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

/// Why a call fails, with a text for people.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) error: BatonError,
    pub(super) text: String,
}

impl Failure {
    pub(super) fn new(error: BatonError, text: impl Into<String>) -> Failure {
        Failure { error, text: text.into() }
    }

    /// An argument that cannot be used.
    pub(super) fn argument(text: impl Into<String>) -> Failure {
        Failure::new(BatonError::Argument, text)
    }
}

impl From<BatonError> for Failure {
    fn from(error: BatonError) -> Failure {
        Failure::new(error, error.text())
    }
}

thread_local! {
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
}

/// The text of the last error of this thread. A thread that ends loses it before its last
/// destructors run.
pub(super) fn with_last_error(read: impl Fn(&str) -> usize) -> usize {
    LAST.try_with(|last| read(&last.borrow())).unwrap_or_else(|_| read(""))
}

/// The mark of the process that makes the first call.
fn mark() -> Result<&'static ForkMark, Failure> {
    static MARK: OnceLock<ForkMark> = OnceLock::new();
    if let Some(mark) = MARK.get() {
        return Ok(mark);
    }
    // A later call tries again.
    let made = ForkMark::new();
    let made = made.map_err(|error| Failure::new(BatonError::System, error.to_string()))?;
    Ok(MARK.get_or_init(|| {
        log::configure(LogConfig { level: LogLevel::Warn, format: LogFormat::Text });
        made
    }))
}

/// Runs the body of a call: a count, or the number of an error.
pub(super) fn call(body: impl FnOnce() -> Result<i32, Failure>) -> i32 {
    let checked = || {
        if mark()?.is_forked() {
            return Err(BatonError::Forked.into());
        }
        body()
    };
    // A panic leaves an object of the library in an unknown state. Its agent has ended or ends, and
    // the other objects do not share its state.
    let result = catch_unwind(AssertUnwindSafe(checked));
    let result = result.unwrap_or_else(|_| Err(BatonError::Panic.into()));
    result.unwrap_or_else(|failure| {
        // Destructors of thread-local data may call, too. The text is gone there.
        let _ = LAST.try_with(|last| *last.borrow_mut() = failure.text);
        failure.error as i32
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last_error() -> String {
        let text = RefCell::new(String::new());
        with_last_error(|last| {
            text.borrow_mut().push_str(last);
            last.len()
        });
        text.into_inner()
    }

    #[test]
    fn a_panic_becomes_an_error_with_a_text() {
        assert_eq!(call(|| Ok(7)), 7);
        assert_eq!(call(|| Err(Failure::argument("a is zero"))), BatonError::Argument as i32);
        assert_eq!(last_error(), "a is zero");
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        assert_eq!(call(|| panic!("planted")), BatonError::Panic as i32);
        std::panic::set_hook(hook);
        assert_eq!(last_error(), BatonError::Panic.text());
    }
}

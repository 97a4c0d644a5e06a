//! The text of a panic that was caught.

use std::any::Any;

/// The message of a panic, if it has one.
pub fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without a message")
}

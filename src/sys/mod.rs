//! Foreign functions: small safe wrappers around what the kernel offers and the standard library lacks.

pub mod clock;
pub mod event;
pub mod files;
pub mod heap;
pub mod verbs;

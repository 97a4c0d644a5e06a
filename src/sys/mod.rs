//! Foreign functions: small safe wrappers around kernel features that the standard library lacks.

pub mod affinity;
pub mod clock;
pub mod event;
pub mod files;
pub mod heap;
pub mod host;
pub mod stream;
pub mod topology;
pub mod verbs;

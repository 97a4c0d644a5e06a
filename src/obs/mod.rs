//! What the process tells about itself: a log of events for people, metrics for machines.
//!
//! Thread: any but a sealed one may log, since formatting allocates; any at all may record a metric.
//! Invariant: neither carries a prompt, an answer or a secret; metric labels are bounded, and never a
//! request's id.

pub mod exposition;
pub mod log;
pub mod metrics;
pub mod output;
pub mod registry;

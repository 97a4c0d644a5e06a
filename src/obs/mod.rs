//! What the process reports about itself: a log of events and metrics.
//!
//! Thread: any thread can record a metric. Any unsealed thread can log; formatting allocates.
//! Invariants: neither carries a prompt, an answer or a secret. Metric labels are bounded and never
//! hold a request's id.

pub mod buckets;
pub mod exposition;
pub mod instruments;
pub mod log;
pub mod output;
pub mod registry;

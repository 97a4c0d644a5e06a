//! The choice of workers for a request: policies, load, health, attempts and retries.
//!
//! Thread: `ctl` of a router.
//! Invariants: no I/O and no clock. A worker that is not usable is never chosen. A reservation is
//! released once.
//! Not here: connections to workers (`router`), the set of workers (`registry`).

pub mod attempts;
pub mod balancer;
pub mod breaker;
pub mod compatibility;
pub mod demand;
pub mod forecast;
pub mod health;
pub mod load;
pub mod policy;
pub mod prefixes;
pub mod remote_prefill;
pub mod retries;
pub mod role_balancer;

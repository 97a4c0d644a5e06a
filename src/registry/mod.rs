//! The registries of workers: entries, leases and proofs, the HTTP registry, etcd, and the
//! bootstrap directory of prefill workers.
//!
//! Thread: `ctl`. Only `client` and `registrar` do I/O.
//! Invariants: an entry that is not renewed ends.
//! Not here: the choice of a worker for a request (`routing`).

pub mod bootstrap;
pub mod call;
pub mod client;
pub mod entry;
pub mod etcd;
pub mod lease;
pub mod membership;
pub mod proof;
pub mod registrar;
pub mod router_lease;

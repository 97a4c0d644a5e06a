//! The cluster as a router sees it: which workers there are, which can be used, and which are chosen.
//!
//! Thread: `ctl` of a router. Invariants: no I/O and no clock; a worker that is not usable is never chosen;
//! what was booked is released once. Not here: connections to workers, and what is sent over them
//! (`front::router`).

pub mod asked;
pub mod breaker;
pub mod enrolment;
pub mod entry;
pub mod errand;
pub mod etcd;
pub mod flight;
pub mod forecast;
pub mod health;
pub mod keeping;
pub mod kinds;
pub mod loads;
pub mod membership;
pub mod policy;
pub mod prefixes;
pub mod proof;
pub mod registry;
pub mod retries;
pub mod roles;
pub mod router;
pub mod work;

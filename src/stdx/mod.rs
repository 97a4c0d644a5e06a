//! Extensions of the standard library, without any term of the domain.

pub mod barrier;
pub mod budget;
pub mod cidr;
pub mod date;
pub mod disjoint_parts;
pub mod event_count;
pub mod event_queue;
pub mod failpoint;
pub mod hash_map;
pub mod hex;
pub mod panic_message;
pub mod rng;
pub mod seal;
pub mod sync;
pub mod team;
pub mod text_matcher;

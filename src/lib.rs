//! Baton serves large language models with prefill and decode on different workers and hands the
//! KV cache from one's memory into the other's. `docs/design.md` fixes words, invariants, formats.
//!
//! Modules import downwards only (design, section 12): `stdx`, `sys` → `limits`, `ids` → `wire`,
//! `kv` → `model`, `transfer`, `cluster`, `net` → `sched` → `front` → `sim`, `role` → `bench`.

pub mod bench;
pub mod cause;
pub mod cluster;
pub mod config;
pub mod doctor;
pub mod drain;
pub mod front;
pub mod ids;
pub mod kv;
pub mod limits;
pub mod model;
pub mod net;
pub mod obs;
pub mod role;
pub mod sched;
pub mod sim;
pub mod stdx;
pub mod sys;
pub mod transfer;
pub mod wire;

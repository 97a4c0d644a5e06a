//! The fault mode of `baton sim`: a cluster in one thread. Production code runs with a simulated
//! clock, network and forward pass. Checkers test the rules of docs/design/invariants.md.
//!
//! ```text
//! plan ──▶ cluster: event queue ──▶ one turn of one thread of one process ──▶ checkers
//!             ▲                   (handoff, managers, movers, engine,        │
//!             └── parcels, answers ◀── pools: the code of production)        ▼ trace: hash, lines
//! ```
//! Replaced: sockets, HTTP, the router's connections and the model. `edge` replaces
//! `peer::control`, `peer::shm_handshake`, `worker::prefill_client` and `worker::requests` by
//! parcels. `router` replaces `router::requests`, and `model` replaces the model. Not covered: the
//! reactor and weak memory. `services` is another mode: it runs the services themselves, over
//! kernels in memory. Invariant: the same seed gives the same run.

pub mod campaign;
pub mod checkers;
pub mod cluster;
pub mod edge;
pub mod faults;
pub mod machines;
pub mod model;
pub mod plan;
pub mod process;
pub mod router;
pub mod services;
pub mod trace;
pub mod workload;

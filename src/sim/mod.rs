//! A cluster in one thread under one seed: the cores of production with a simulated clock, network
//! and forward pass. Checkers test what must always hold (docs/design/invariants.md).
//!
//! ```text
//! plan ──▶ cluster: event queue ──▶ one turn of one thread of one process ──▶ checkers
//!             ▲                   (handoff, managers, movers, engine,        │
//!             └── parcels, answers ◀── pools: the code of production)        ▼ trace: hash, lines
//! ```
//! Not of production here: sockets, HTTP, the router's connections and the model. `edge` replaces
//! `peer::control`, `peer::shm_handshake`, `worker::prefill_client` and `worker::requests` by
//! parcels. `router` replaces `router::requests`, and `model` replaces the model. The simulation
//! covers neither the reactor nor weak memory. Invariant: a seed repeats itself exactly.

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
pub mod trace;
pub mod workload;

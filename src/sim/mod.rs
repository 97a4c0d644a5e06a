//! A cluster in one thread under one seed: the cores of production, with a simulated clock, network and forward
//! pass, and checkers for what must always hold (design, section 3).
//!
//! ```text
//! plan ──▶ cluster: agenda ──▶ one turn of one thread of one process ──▶ checkers
//!             ▲                   (handoff, managers, movers, engine,        │
//!             └── parcels, answers ◀── pools: the code of production)        ▼ story: hash, trace
//! ```
//! What is not of production here: sockets (`edge` plays `front::peers`, `front::passing`,
//! `front::asking` and `front::generations` with parcels instead), HTTP and its router's connections (`router` plays
//! `front::router::flights`), the model (`model`). It sees neither the reactor nor weak memory.
//! Invariant: a seed repeats itself, to the last happening.

pub mod agenda;
pub mod campaign;
pub mod checkers;
pub mod cluster;
pub mod dice;
pub mod edge;
pub mod faults;
pub mod load;
pub mod machines;
pub mod model;
pub mod plan;
pub mod process;
pub mod router;
pub mod story;
pub mod workload;

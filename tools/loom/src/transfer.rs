//! The parts of the product's `transfer` that share memory or notify other threads.

#[path = "../../../src/transfer/command.rs"]
pub mod command;
#[path = "../../../src/transfer/event_loop.rs"]
pub mod event_loop;
#[path = "../../../src/transfer/transport/rdma/flight.rs"]
pub mod flight;
#[path = "../../../src/transfer/handle.rs"]
pub mod handle;
#[path = "../../../src/transfer/mover/mod.rs"]
pub mod mover;
#[path = "../../../src/transfer/pages.rs"]
pub mod pages;
#[path = "../../../src/transfer/transport/shm/ring.rs"]
pub mod ring;
#[path = "../../../src/transfer/rings.rs"]
pub mod rings;
pub mod session;
#[path = "../../../src/transfer/transport/rdma/split.rs"]
pub mod split;
#[path = "../../../src/transfer/status.rs"]
pub mod status;
#[path = "../../../src/transfer/target.rs"]
pub mod target;
pub mod transport;

/// Replaces the product's module over verbs.
pub mod posts {
    pub use super::session::Posting;
}

/// Replaces the product's module over verbs.
pub mod completions {
    pub use super::session::Reaping;
}

/// Replaces the product's record. The models do not read its fields.
pub mod aux {
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct AuxRecord(pub u64);
}

//! The parts of the product's `transfer` that share memory or tell others what they did.

#[path = "../../../src/transfer/command.rs"]
pub mod command;
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
pub mod transport;
#[path = "../../../src/transfer/waiter.rs"]
pub mod waiter;

/// In the place of the product's, over verbs.
pub mod posting {
    pub use super::session::Posting;
}

/// Likewise.
pub mod reaping {
    pub use super::session::Reaping;
}

/// In the place of the product's record, which nobody here looks into.
pub mod aux {
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct AuxRecord(pub u64);
}

//! The parts of the product's `transfer` that share memory.

#[path = "../../../src/transfer/pages.rs"]
pub mod pages;
#[path = "../../../src/transfer/status.rs"]
pub mod status;

pub mod transport {
    //! What the ring's callers know of it.

    /// No room.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct Full;

    /// A number that cannot be.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct Lost;
}

#[path = "../../../src/transfer/transport/shm/ring.rs"]
pub mod ring;

//! Typed indices and identities. A number that names something has its own type here, so that a
//! page can never be passed for a slot. Widths are those of the wire (design, sections 1 and 5).

use bytemuck::{Pod, Zeroable};
use std::fmt;

macro_rules! index {
    ($(#[$doc:meta])* $name:ident($int:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Pod, Zeroable)]
        #[repr(transparent)]
        pub struct $name(pub $int);

        impl $name {
            /// The value as an array index.
            #[inline]
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

index!(
    /// A page of a worker's KV pool; equal on all ranks of the worker.
    PageId(u32)
);
index!(
    /// An entry of a worker's status table, and of the aux region beside it.
    SlotId(u32)
);
index!(
    /// How many times a slot has been given out, from 1; 24 bits travel in the status word.
    Generation(u32)
);
index!(
    /// One *attempt* of one request across workers: 63 bits drawn by the router. 0 is a room like any other.
    Room(u64)
);
index!(
    /// One announcement of a destination worker to a source worker, counted from 1 by the destination.
    SessionGeneration(u32)
);
index!(
    /// A worker inside this process (`baton serve` has several).
    WorkerId(u32)
);
index!(
    /// A request inside this process, never used twice.
    RequestId(u64)
);

/// A worker process across restarts: a name that stays and a random incarnation, compared for
/// equality only.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct Peer {
    /// Stays the same over restarts under the same address and role.
    pub id: [u8; 16],
    /// Drawn at each start.
    pub incarnation: [u8; 16],
}

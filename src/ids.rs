//! Typed indices and identities. Each number that names something has its own type, so that a page
//! cannot be passed as a slot. The widths are those of the wire (`docs/design/wire.md`).

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
    /// A page of a worker's KV pool. The number is the same on all ranks of the worker.
    PageId(u32)
);
index!(
    /// An entry of a worker's status table, and of the aux region.
    SlotId(u32)
);
index!(
    /// How many times a slot has been assigned, from 1. The status word holds 24 bits of it.
    Generation(u32)
);
index!(
    /// One *attempt* of one request across workers: 63 random bits, from the router, or from a
    /// prefill worker that keeps KV for a router that names none. 0 is a valid room.
    Room(u64)
);
index!(
    /// One announcement of a destination worker to a source worker. The destination counts from 1.
    SessionGeneration(u32)
);
index!(
    /// A worker inside this process (`baton serve` has several).
    WorkerId(u32)
);
index!(
    /// A request inside this process. A number is never reused.
    RequestId(u64)
);

index!(
    /// A client's request in the table of a worker: the key of its legs, texts and replies.
    RequestKey(u64)
);

/// A worker process: an id that survives restarts and a random incarnation. Compare only for
/// equality.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct Peer {
    /// Stays the same over restarts with the same address, also if its role changes.
    pub id: [u8; 16],
    /// Random at each start and each role change.
    pub incarnation: [u8; 16],
}

/// Role of a worker. The number is the one on the wire.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Role {
    /// Computes the KV cache of prompts.
    Prefill = 1,
    /// Generates tokens.
    Decode = 2,
    /// Both, without a hand-off.
    Mixed = 3,
}

impl Role {
    /// All roles.
    pub const ALL: [Role; 3] = [Role::Prefill, Role::Decode, Role::Mixed];
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Mixed => "mixed",
        })
    }
}

/// The part of a request that one worker serves. A mixed worker that is registered as a decode
/// worker serves the decode leg.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Leg {
    /// Computes the KV cache of the prompt.
    Prefill,
    /// Generates tokens.
    Decode,
}

impl Leg {
    /// The leg with this name.
    pub fn named(name: &str) -> Option<Leg> {
        [Leg::Prefill, Leg::Decode].into_iter().find(|leg| leg.to_string() == name)
    }

    /// The leg at the other end of a hand-off.
    pub fn other(self) -> Leg {
        match self {
            Leg::Prefill => Leg::Decode,
            Leg::Decode => Leg::Prefill,
        }
    }
}

impl fmt::Display for Leg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Leg::Prefill => "prefill",
            Leg::Decode => "decode",
        })
    }
}

/// When a decode worker allocates pages for a prompt.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serve", derive(serde::Serialize, clap::ValueEnum))]
#[cfg_attr(feature = "serve", serde(rename_all = "lowercase"))]
pub enum DecodeAllocation {
    /// Before prefill starts; each chunk is transferred when it is computed.
    #[default]
    Early,
    /// When prefill has finished; the prefill worker keeps the KV until then.
    #[cfg_attr(feature = "serve", value(alias = "prefill_complete"))]
    Late,
}

impl DecodeAllocation {
    /// The name in the registry, as in SGLang.
    pub fn registered(self) -> &'static str {
        match self {
            DecodeAllocation::Early => "early",
            DecodeAllocation::Late => "prefill_complete",
        }
    }
}

impl Room {
    /// The largest room: 63 bits, so that signed integers hold it.
    pub const MAX: Room = Room(u64::MAX >> 1);
}

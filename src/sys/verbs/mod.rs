//! RDMA devices by way of `libibverbs.so.1`, which is opened when it is asked for and need not be there.
//!
//! The published `ibverbs` crate links the library, so that a program made with it does not start without it,
//! and knows neither RDMA WRITE nor chains of work requests; hence own bindings.
//! Setting up is for threads that may call into the kernel. Thread: `post` posts, `poll` polls; neither waits,
//! allocates or enters the kernel there. Not here: which bytes go where, and when memory may be used again.

pub mod abi;
mod chain;
mod completion;
mod device;
mod devices;
mod endpoint;
mod library;
mod memory;
pub mod provider;
mod queue_pair;

pub use chain::{Chain, Marks, Piece, Remote};
pub use completion::{Completion, CompletionQueue, Completions, Ended, Fault};
pub use device::{Device, Domain, NotOpen};
pub use devices::{Address, AddressKind, Closed, DeviceInfo, LinkLayer, PortInfo, list};
pub use endpoint::{Endpoint, Route};
pub use library::Unavailable;
pub use memory::{Access, Backing, Registration};
pub use queue_pair::{Capacity, QueuePair, Refused};

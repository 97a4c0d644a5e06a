//! RDMA devices through `libibverbs.so.1`. The library is opened at run time and is optional. A
//! static file has it inside, or not at all.
//!
//! Baton has its own bindings because the published `ibverbs` crate links the library: a program
//! with it does not start if the library is missing. That crate also lacks RDMA WRITE and chains of
//! work requests. Thread: setup runs on threads that can enter the kernel. `post` posts and `poll`
//! polls; neither waits, allocates or enters the kernel. Not here: which bytes go where, and when
//! memory can be reused.

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

pub use chain::{Chain, LocalPiece, Marks, RemoteAddress};
pub use completion::{Completion, CompletionError, CompletionKind, CompletionQueue, Completions};
pub use device::{Device, Domain, NotOpen};
pub use devices::{Closed, DeviceInfo, GidKind, LinkLayer, PortGid, PortInfo, list};
pub use endpoint::{Endpoint, Route};
pub use library::{LINKAGE, Linkage, Unavailable};
pub use memory::{Access, Backing, Registration};
pub use queue_pair::{Capacity, PostError, QueuePair};

//! Baton serves large language models with prefill and decode on different workers. It transfers
//! the KV cache from the memory of the prefill worker into the memory of the decode worker.
//!
//! A module imports from lower layers only. `docs/internals/architecture.md` has the table of
//! layers.

#[cfg(feature = "library")]
pub mod abi;
pub mod agent;
#[cfg(feature = "serve")]
pub mod api;
pub mod cause;
#[cfg(feature = "serve")]
pub mod cli;
#[cfg(feature = "serve")]
pub mod cmd;
#[cfg(feature = "serve")]
pub mod config;
#[cfg(feature = "serve")]
pub mod http;
#[cfg(feature = "serve")]
pub mod hub;
pub mod ids;
pub mod kv;
pub mod limits;
pub mod link;
#[cfg(feature = "serve")]
pub mod model;
pub mod net;
pub mod obs;
#[cfg(feature = "serve")]
pub mod peer;
#[cfg(feature = "serve")]
pub mod planner;
#[cfg(feature = "serve")]
pub mod process;
#[cfg(feature = "serve")]
pub mod registry;
#[cfg(feature = "serve")]
pub mod router;
#[cfg(feature = "serve")]
pub mod routing;
#[cfg(feature = "serve")]
pub mod sched;
#[cfg(feature = "serve")]
pub mod server;
#[cfg(feature = "serve")]
pub mod sim;
pub mod stdx;
pub mod sys;
pub mod transfer;
#[cfg(feature = "serve")]
pub mod upstream;
pub mod wire;
#[cfg(feature = "serve")]
pub mod worker;

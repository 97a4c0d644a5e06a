//! Common parts of the HTTP servers of worker and router: client connections, limits of API
//! keys, drain, reload of keys and certificates, role change.
//!
//! Thread: `ctl`. Not here: the meaning of a request (`worker`, `router`), bodies (`api`).

pub mod authorization;
mod client;
pub mod connections;
pub mod drain;
pub mod key_limits;
pub mod origins;
mod pending_response;
pub mod reload;
pub mod role_change;

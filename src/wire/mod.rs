//! Bytes between peers, without I/O. A message is a [`Multipart`]: [`zmtp`] frames it, [`message`]
//! gives it meaning and [`auth`] seals it. [`link`] joins the three into a connection between
//! workers.
//!
//! Thread: any; used by `ctl`.
//! Invariants: no input panics; nothing waits, and no buffer grows, beyond `limits`.
//! Not here: sockets (`net`), the effects of a message (`transfer`, `peer`).

pub mod auth;
pub mod link;
pub mod message;
pub mod multipart;
#[cfg(test)]
mod recorded_tests;
pub mod zmtp;

pub use multipart::{Multipart, Parts};

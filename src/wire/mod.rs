//! The protocol between workers, without I/O. A message is a [`Multipart`]: [`message`] encodes it,
//! [`auth`] seals it and [`zmtp`] frames it. [`link`] joins the three into a connection.
//!
//! Thread: any; used by `ctl`.
//! Invariants: no input causes a panic; no buffer grows beyond its bound in `limits`.
//! Not here: sockets (`net`), the effects of a message (`transfer`, `link`).

pub mod auth;
pub mod link;
pub mod message;
pub mod multipart;
#[cfg(test)]
mod recorded_tests;
pub mod zmtp;

pub use multipart::{Multipart, Parts};

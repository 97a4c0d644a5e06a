//! Bytes between peers, without I/O: a message is a [`Multipart`]; [`zmtp`] frames it, [`message`]
//! gives it meaning, [`auth`] seals it, and [`link`] joins the three into one connection between
//! workers.
//!
//! Thread: any; used by `ctl`.
//! Invariants: no input panics; nothing waits, and no buffer grows, beyond `limits`.
//! Not here: sockets (`net`), what a message causes (`transfer`, `cluster`).

pub mod auth;
pub mod link;
pub mod message;
pub mod multipart;
#[cfg(test)]
mod recorded_tests;
pub mod zmtp;

pub use multipart::{Multipart, Parts};

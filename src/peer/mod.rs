//! Connections between workers: control links, the handshakes of shared memory and TCP, and the
//! hand-off.
//!
//! Thread: `ctl`. Not here: KV bytes (`transfer`), HTTP (`server`, `upstream`), the requests that
//! use the hand-off (`worker::requests`).

pub mod bootstrap;
pub mod control;
pub mod directory;
pub mod handoff;
pub mod local_worker;
pub mod shm_handshake;
pub mod tcp_handshake;

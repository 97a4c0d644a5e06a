//! Links between workers: control links, the handshakes of shared memory and TCP, sessions, and the
//! hand-off of each slot.
//!
//! Thread: `ctl`. Not here: KV bytes (`transfer`), engines, the way to find a source (`lookup` has
//! the interface), the requests that use the hand-off.

pub mod control;
pub mod handoff;
pub mod local_worker;
pub mod lookup;
pub mod shm_handshake;
pub mod tcp_handshake;

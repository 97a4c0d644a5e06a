//! Scheduling: which request gets pages and a place in the batch, turn by turn.
//!
//! Thread: `engine`. Owns: the page pool of each worker, the queues, the running batch. Never touches a
//! socket, a lock or a disk, never waits for a transfer: it polls the status table. Whole pages only.

pub mod mailbox;
pub mod request;

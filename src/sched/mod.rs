//! Scheduling: which request gets pages and a place in the batch, turn by turn.
//!
//! Thread: `engine`. Owns: the page pool of each worker, the queues, the running batch. Never touches a
//! socket, a lock or a disk, never waits for a transfer: it polls the status table. Whole pages only.
//!
//! [`engine`] steps [`worker`]s: [`prefill`], [`decode`], [`mixed`]. They share [`slots`] (requests by
//! slot), [`line`] (fair waiting), [`admission`] (the arithmetic), [`chunks`] (parts of prompts),
//! [`running`] (the batch), [`retraction`]
//! (who gives pages up), [`pace`] (how fast things go).

pub mod admission;
pub mod chunks;
pub mod config;
pub mod decode;
pub mod engine;
pub mod line;
pub mod mail;
pub mod mailbox;
pub mod mixed;
pub mod pace;
pub mod prefill;
pub mod request;
pub mod retraction;
pub mod running;
pub mod slots;
pub mod stats;
pub mod worker;

//! Scheduling: assigns pages and places in the batch to requests, turn by turn.
//!
//! Owns: the page pool of each worker, the queues, the running batch.
//! Thread: `engine`.
//! Invariants: it never touches a socket, a lock or a disk, and never waits for a transfer. It
//! polls the status table. It handles whole pages only.
//!
//! [`engine`] steps [`worker`]s: [`prefill`], [`decode`], [`mixed`]. Shared parts are [`slots`],
//! [`wait_queue`], [`admission`], [`chunks`], [`running_batch`], [`retraction`], [`masks`] and
//! [`throughput`].

pub mod admission;
pub mod channel;
pub mod chunks;
pub mod config;
pub mod decode;
pub mod engine;
pub mod first_token;
pub mod masks;
pub mod messages;
pub mod mixed;
pub mod prefill;
pub mod request;
pub mod retraction;
pub mod running_batch;
pub mod slots;
pub mod stats;
pub mod throughput;
pub mod wait_queue;
pub mod worker;

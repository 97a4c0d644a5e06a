//! Bounds of rooms and of agents, the transfer engine under another engine.

use std::time::Duration;

/// Destinations kept for requests that have not arrived yet. The router sends both legs at once, so
/// few wait at any moment. A flood of them must not exhaust the worker.
pub const EARLY_DESTINATIONS_MAX: usize = 1024;
/// How long an early destination is kept: longer than a router needs to dispatch over a slow
/// network, short compared with a client's timeout.
pub const EARLY_DESTINATION_LIFE: Duration = Duration::from_secs(30);
/// How long a prefill worker keeps computed KV in the prefill-first flow until decode claims it. A
/// router passes the answer on at once, so older KV was abandoned.
pub const KEPT_KV_LIFE: Duration = Duration::from_secs(30);
/// Ended rooms that are still answered with their real outcome.
pub const TOMBSTONES_MAX: usize = 16_384;
/// Time from an Abort to its answer before the session is reset. A source answers after its posted
/// writes have completed. A NIC may use all its retries for that.
pub const ABORT_ANSWER_MAX: Duration = Duration::from_secs(2);
/// How long a tombstone is kept: longer than every deadline of the other side.
pub const TOMBSTONE_LIFE: Duration = Duration::from_secs(600);

// agent

/// Orders that an agent takes before it looks at its sockets again.
pub const AGENT_ORDERS_PER_TURN: usize = 256;
/// Longest wait of an agent that ends, for the last bytes to its peers: a peer that does not read
/// must not hold up the engine.
pub const AGENT_CLOSE_TIME: Duration = Duration::from_secs(1);
/// Agents of a process, and regions, of the library. An engine needs one of each for a worker.
pub const ABI_HANDLES_MAX: usize = 64;
/// Requests of an agent at a time, through the library. vLLM has at most 1,024 by default.
pub const ABI_SLOTS_MAX: usize = 4096;
/// Most log lines that wait for the callback of a program. A longer pause of the callback loses
/// lines, because the threads of an agent never wait for it.
pub const LOG_LINES_MAX: usize = 1024;
/// How long a callback still gets lines that wait when another one follows: long enough for most
/// logs, and as long as an agent that ends.
pub const LOG_END_TIME: Duration = Duration::from_secs(1);
/// Pages in the lists of all slots of an agent, through the library: 256 MiB of page numbers. A
/// million pages for each of 64 requests are as many.
pub const ABI_LISTED_PAGES_MAX: usize = 1 << 26;
/// Longest wait of the library's only call that waits.
pub const ABI_WAIT_MAX: Duration = Duration::from_secs(60);
/// Bytes of the longest text of the library's caller: an address, a list of names.
pub const ABI_TEXT_MAX: usize = 4096;

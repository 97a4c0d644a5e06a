//! Every bound on what comes from outside or waits inside, each with its reason. Modules own no
//! limits of their own.

use std::time::Duration;

/// Longest HTTP request head in bytes; the field's proxies send well under 16 KiB.
pub const HTTP_HEAD_MAX: usize = 64 << 10;
/// Most header lines of an HTTP message.
pub const HTTP_HEADERS_MAX: usize = 100;
/// Longest HTTP body: prompts of a million ids as JSON fit.
pub const HTTP_BODY_MAX: usize = 32 << 20;

// config

/// Longest page in tokens: a request wastes half a page on average, and longer pages gain nothing.
pub const PAGE_SIZE_MAX: u32 = 256;
/// Most requests running in a worker; slots, aux records and batch arrays are allocated for all of them.
pub const RUNNING_REQUESTS_MAX: u32 = 4096;
/// Most requests waiting in a worker; each holds its body's ids.
pub const QUEUED_REQUESTS_MAX: u32 = 65_536;
/// Most workers of one role in one process; they share its cores, so more only cuts the memory up.
pub const WORKERS_MAX: u32 = 16;
/// Most threads of a team: beyond any machine of today.
pub const THREADS_MAX: u32 = 1024;
/// Longest context in tokens that may be asked for; beyond any model of today.
pub const CONTEXT_MAX: u32 = 1 << 24;
/// Longest chunk of a prompt in ms: a chunk that runs longer stalls its worker's streams.
pub const CHUNK_MS_MAX: u32 = 60_000;
/// Least KV memory of a worker in bytes: less holds not even a few pages of a toy model.
pub const KV_MEMORY_MIN: u64 = 1 << 20;
/// Most KV memory of a worker in bytes: beyond any machine of today; guards sums against overflow.
pub const KV_MEMORY_MAX: u64 = 1 << 46;
/// Fewest bytes of a cluster key: the strength of HMAC-SHA-256.
pub const CLUSTER_KEY_MIN: usize = 32;
/// Most bytes of a cluster key; a longer file is something else.
pub const CLUSTER_KEY_MAX: usize = 4096;
/// Most bytes of a file of API keys.
pub const API_KEYS_FILE_MAX: usize = 1 << 20;
/// Most workers of one role behind a router.
pub const ROUTER_WORKERS_MAX: usize = 1024;

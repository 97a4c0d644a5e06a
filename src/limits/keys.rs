//! Bounds on keys in files, and on their limits.

/// Shortest cluster key in bytes: as strong as the hash that it keys.
pub const CLUSTER_KEY_MIN: usize = 32;
/// Most bytes of a cluster key. A longer file is not a key.
pub const CLUSTER_KEY_MAX: usize = 4096;
/// Most bytes of a file of API keys or admin keys.
pub const API_KEYS_FILE_MAX: usize = 1 << 20;
/// Most requests or tokens per minute of an API key: more than a cluster can compute.
pub const KEY_PER_MINUTE_MAX: u32 = 1 << 30;

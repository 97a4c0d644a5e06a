//! The key files of a simulated cluster. Each host has its own, in memory.

use crate::stdx::rng::Rng;
use crate::sys::file_access::MemoryFiles;

/// The key that clients send.
pub const API_KEY: &str = "key-of-clients";
/// The key that the operator sends.
pub const ADMIN_KEY: &str = "key-of-operators";
/// A key that no process accepts.
pub const WRONG_KEY: &str = "key-of-nobody";

/// The flag of processes with a cluster key.
const CLUSTER_FLAG: &str = " --cluster-key-file /cluster";
/// The flags of processes with a cluster key that is exchanged.
const EXCHANGE_FLAGS: &str = " --cluster-key-file /cluster --cluster-key-file /other";
/// The flag of processes with API keys.
const API_FLAG: &str = " --api-key-file /api";
/// The flag of processes with admin keys.
const ADMIN_FLAG: &str = " --admin-key-file /admin";

/// The first byte of the cluster key.
pub const OLD: u8 = 7;
/// The first byte of the key that takes its place.
pub const NEW: u8 = 8;
/// In one of so many runs with a cluster key, the operator exchanges it.
const EXCHANGED: u64 = 8;

/// The keys of the processes of a run.
#[derive(Clone, Copy, Debug)]
pub struct ClusterKeys {
    /// Whether the processes have a cluster key.
    pub has_cluster_key: bool,
    /// Whether the cluster key is exchanged.
    pub is_exchanged: bool,
    /// Whether clients need an API key.
    pub has_api_keys: bool,
    /// Whether the operator needs an admin key.
    pub has_admin_keys: bool,
}

impl ClusterKeys {
    /// Draws which keys there are.
    pub fn draw(mut dice: Rng, mut exchange: Rng) -> ClusterKeys {
        let mut draw = || dice.one_in(2);
        let (has_cluster_key, has_api_keys, has_admin_keys) = (draw(), draw(), draw());
        let is_exchanged = has_cluster_key && exchange.one_in(EXCHANGED);
        ClusterKeys { has_cluster_key, is_exchanged, has_api_keys, has_admin_keys }
    }

    /// The flags of each process.
    pub fn flags(self) -> String {
        let peers = match self.has_cluster_key {
            true if self.is_exchanged => EXCHANGE_FLAGS,
            true => CLUSTER_FLAG,
            false => " --insecure",
        };
        let clients = if self.has_api_keys { API_FLAG } else { "" };
        let operators = if self.has_admin_keys { ADMIN_FLAG } else { "" };
        format!("{peers}{clients}{operators}")
    }

    /// The key that the operator sends.
    pub fn operator_key(self) -> Option<&'static str> {
        match (self.has_admin_keys, self.has_api_keys) {
            (true, _) => Some(ADMIN_KEY),
            (false, true) => Some(API_KEY),
            (false, false) => None,
        }
    }
}

/// The key files of a host.
pub fn key_files() -> MemoryFiles {
    let files = MemoryFiles::default();
    write_cluster_keys(&files, [OLD, OLD]);
    files.write("/api", API_KEY.as_bytes());
    files.write("/admin", ADMIN_KEY.as_bytes());
    files
}

/// Writes both files of cluster keys. Each key is one byte, repeated.
pub fn write_cluster_keys(files: &MemoryFiles, [first, second]: [u8; 2]) {
    files.write("/cluster", &[first; 32]);
    files.write("/other", &[second; 32]);
}

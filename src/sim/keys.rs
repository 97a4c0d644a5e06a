//! The key files of a simulated cluster. Each host has its own, in memory.

use crate::stdx::rng::Rng;
use crate::sys::file_access::MemoryFiles;

/// A key that no process ever accepts.
const WRONG_KEY: &str = "key-of-nobody";

/// The flag of processes with a cluster key.
const CLUSTER_FLAG: &str = " --cluster-key-file /cluster";
/// The flags of processes with a cluster key that is exchanged.
const EXCHANGE_FLAGS: &str = " --cluster-key-file /cluster --cluster-key-file /other";
/// The flag of processes with API keys.
const API_FLAG: &str = " --api-key-file /api";
/// The flag of processes with admin keys.
const ADMIN_FLAG: &str = " --admin-key-file /admin";

/// In one of so many runs with a cluster key, or with API keys or admin keys, the operator
/// exchanges it.
const EXCHANGED: u64 = 8;

/// A key, before or after its exchange.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KeyAge {
    /// The key at the start.
    Old,
    /// The key that takes its place.
    New,
}

impl KeyAge {
    /// The key that clients send.
    pub fn api_key(self) -> &'static str {
        match self {
            KeyAge::Old => "key-of-clients",
            KeyAge::New => "new-key-of-clients",
        }
    }

    /// The key that the operator sends.
    pub fn admin_key(self) -> &'static str {
        match self {
            KeyAge::Old => "key-of-operators",
            KeyAge::New => "new-key-of-operators",
        }
    }

    /// The cluster key: one byte, repeated.
    fn cluster_key(self) -> [u8; 32] {
        match self {
            KeyAge::Old => [7; 32],
            KeyAge::New => [8; 32],
        }
    }
}

/// A client's choice of a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ClientKey {
    /// A key that the processes accept.
    Right,
    /// Another one: the old key after its exchange.
    Wrong,
}

/// The API keys that clients send.
#[derive(Clone, Copy, Debug)]
pub struct ClientKeys {
    /// The right one.
    pub right: KeyAge,
    /// Whether no process accepts the old one.
    pub is_old_refused: bool,
}

impl ClientKeys {
    /// The key of a client.
    pub fn key_of(self, key: ClientKey) -> &'static str {
        match key {
            ClientKey::Right => self.right.api_key(),
            ClientKey::Wrong if self.is_old_refused => KeyAge::Old.api_key(),
            ClientKey::Wrong => WRONG_KEY,
        }
    }
}

/// Keys that the operator exchanges.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExchangedKeys {
    /// The cluster key.
    Cluster,
    /// The API key and the admin key.
    Bearer,
}

/// The keys of the processes of a run.
#[derive(Clone, Copy, Debug)]
pub struct ClusterKeys {
    /// Whether the processes have a cluster key.
    pub has_cluster_key: bool,
    /// Whether clients need an API key.
    pub has_api_keys: bool,
    /// Whether the operator needs an admin key.
    pub has_admin_keys: bool,
    /// Which keys are exchanged.
    pub exchanged: Option<ExchangedKeys>,
}

impl ClusterKeys {
    /// Draws which keys there are.
    pub fn draw(mut dice: Rng, mut exchange: Rng) -> ClusterKeys {
        let mut draw = || dice.one_in(2);
        let (has_cluster_key, has_api_keys, has_admin_keys) = (draw(), draw(), draw());
        let exchanged = match () {
            () if has_cluster_key && exchange.one_in(EXCHANGED) => Some(ExchangedKeys::Cluster),
            () if (has_api_keys || has_admin_keys) && exchange.one_in(EXCHANGED) => {
                Some(ExchangedKeys::Bearer)
            }
            () => None,
        };
        ClusterKeys { has_cluster_key, has_api_keys, has_admin_keys, exchanged }
    }

    /// The flags of each process.
    pub fn flags(self) -> String {
        let peers = match self.has_cluster_key {
            true if self.exchanged == Some(ExchangedKeys::Cluster) => EXCHANGE_FLAGS,
            true => CLUSTER_FLAG,
            false => " --insecure",
        };
        let clients = if self.has_api_keys { API_FLAG } else { "" };
        let operators = if self.has_admin_keys { ADMIN_FLAG } else { "" };
        format!("{peers}{clients}{operators}")
    }

    /// The key that the operator sends.
    pub fn operator_key(self, age: KeyAge) -> Option<&'static str> {
        match (self.has_admin_keys, self.has_api_keys) {
            (true, _) => Some(age.admin_key()),
            (false, true) => Some(age.api_key()),
            (false, false) => None,
        }
    }

    /// A key that is known and not enough for orders.
    pub fn low_key(self, age: KeyAge) -> Option<&'static str> {
        (self.has_admin_keys && self.has_api_keys).then(|| age.api_key())
    }
}

/// The key files of a host.
pub fn key_files() -> MemoryFiles {
    let files = MemoryFiles::default();
    write_cluster_keys(&files, [KeyAge::Old, KeyAge::Old]);
    write_bearer_keys(&files, &[KeyAge::Old]);
    files
}

/// Writes both files of cluster keys.
pub fn write_cluster_keys(files: &MemoryFiles, [first, second]: [KeyAge; 2]) {
    files.write("/cluster", &first.cluster_key());
    files.write("/other", &second.cluster_key());
}

/// Writes the files of API keys and of admin keys.
pub fn write_bearer_keys(files: &MemoryFiles, ages: &[KeyAge]) {
    let lines = |key: fn(KeyAge) -> &'static str| {
        ages.iter().map(|&age| format!("{}\n", key(age))).collect::<String>()
    };
    files.write("/api", lines(KeyAge::api_key).as_bytes());
    files.write("/admin", lines(KeyAge::admin_key).as_bytes());
}

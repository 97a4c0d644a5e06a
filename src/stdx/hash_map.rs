//! Hash maps and sets with an order that a simulation can repeat.
//!
//! Invariant: the hash of a key depends on a secret of the process, so a client cannot choose
//! keys that collide. A simulation fixes the secret first.

use std::collections::hash_map::{DefaultHasher, RandomState};
use std::hash::{BuildHasher, Hasher};
use std::sync::OnceLock;

/// A map with [`ProcessHasher`].
pub type HashMap<K, V> = std::collections::HashMap<K, V, ProcessHasher>;
/// A set with [`ProcessHasher`].
pub type HashSet<K> = std::collections::HashSet<K, ProcessHasher>;

/// A hasher that has read the secret. Maps copy it, so that they hash the secret only once.
static BEGUN: OnceLock<DefaultHasher> = OnceLock::new();

/// Makes hashers that begin with the secret of the process.
#[derive(Clone, Copy, Default, Debug)]
pub struct ProcessHasher;

impl BuildHasher for ProcessHasher {
    type Hasher = DefaultHasher;

    fn build_hasher(&self) -> DefaultHasher {
        BEGUN.get_or_init(|| with_secret(RandomState::new().hash_one(0))).clone()
    }
}

/// Fixes the secret, so that maps have the same order in each run. Without effect after the first
/// map.
pub fn fix_secret() {
    let _ = BEGUN.set(with_secret(0));
}

fn with_secret(secret: u64) -> DefaultHasher {
    let mut hasher = DefaultHasher::new();
    hasher.write_u64(secret);
    hasher
}

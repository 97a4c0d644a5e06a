//! Keys of the pages of a sequence, by which the prefix cache finds them.
//!
//! A key is a digest of the tenant, of the page's ids and of all ids before them. So two pages with
//! one key hold the same KV. The digest is SHA-256 with a random secret, cut to 128 bits: no client
//! can find two sequences with the same key.
//! Thread: `engine`.
//! Invariants: nothing is allocated. Keys are not comparable between pools.

use crate::stdx::failpoint::is_failpoint_active;
use sha2::{Digest, Sha256};
use std::hash::{BuildHasher, RandomState};

/// A digest of a tenant's name. It separates tenants: a tenant can neither use nor detect pages
/// that another tenant has cached.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Salt(pub u128);

impl Salt {
    /// The salt of `name` within this salt.
    pub fn of(self, name: &str) -> Salt {
        let digest = Sha256::new().chain_update(self.0.to_le_bytes()).chain_update(name);
        Salt(first_half(digest))
    }
}

/// The ids of a sequence: prompt, then output.
#[derive(Clone, Copy, Debug)]
pub struct Sequence<'a> {
    /// Its tenant.
    pub salt: Salt,
    /// The first part.
    pub prompt: &'a [u32],
    /// The second part.
    pub output: &'a [u32],
}

impl Sequence<'_> {
    /// The ids of its `index`-th page, in two parts.
    fn page(&self, index: usize, page_size: usize) -> [&[u32]; 2] {
        let (begin, end) = (index * page_size, (index + 1) * page_size);
        let part = |ids: &'_ [u32], before: usize| {
            let clamp = |at: usize| at.saturating_sub(before).min(ids.len());
            clamp(begin)..clamp(end)
        };
        [&self.prompt[part(self.prompt, 0)], &self.output[part(self.output, self.prompt.len())]]
    }
}

/// The key of one full page of a sequence.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PageKey(u128);

impl PageKey {
    /// The key of the same tokens in a group of layers.
    pub(in crate::kv) fn in_group(self, group: usize) -> PageKey {
        PageKey(self.0 ^ group as u128)
    }

    /// Its lowest bits, for an index of buckets.
    pub(in crate::kv) fn low_bits(self) -> usize {
        self.0 as usize
    }
}

/// Makes the keys of one pool.
pub(in crate::kv) struct KeyChain {
    page_size: usize,
    secret: u128,
}

impl KeyChain {
    /// A chain over pages of `page_size` tokens, with a secret of its own.
    pub fn new(page_size: u32) -> KeyChain {
        // The standard library seeds this state from the system's entropy.
        let state = RandomState::new();
        let half = |number: u8| u128::from(state.hash_one(number));
        let secret = half(0) << 64 | half(1);
        KeyChain { page_size: page_size as usize, secret }
    }

    /// Tokens of a page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Full pages of the first `tokens` tokens.
    pub fn full_pages(&self, tokens: u32) -> usize {
        tokens as usize / self.page_size
    }

    /// Appends the missing keys of the full pages of the first `tokens` tokens. `keys` has those of
    /// the first pages, and the capacity for all.
    pub fn extend(&self, sequence: &Sequence<'_>, tokens: u32, keys: &mut Vec<PageKey>) {
        for index in keys.len()..self.full_pages(tokens) {
            let before = keys.last().filter(|_| !is_failpoint_active("key lacks the ids before"));
            let before = before.map_or(sequence.salt.0, |key| key.0);
            let mut digest = Sha256::new();
            digest.update(self.secret.to_le_bytes());
            digest.update(before.to_le_bytes());
            let ids = sequence.page(index, self.page_size);
            ids.iter().for_each(|ids| digest.update(bytemuck::cast_slice(ids)));
            debug_assert!(keys.len() < keys.capacity(), "the engine allocates nothing");
            keys.push(PageKey(first_half(digest)));
        }
    }
}

fn first_half(digest: Sha256) -> u128 {
    let digest: [u8; 32] = digest.finalize().into();
    u128::from_le_bytes(*digest.first_chunk().expect("sixteen of its bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(chain: &KeyChain, salt: u128, prompt: &[u32], output: &[u32]) -> Vec<PageKey> {
        let tokens = (prompt.len() + output.len()) as u32;
        let mut keys = Vec::with_capacity(16);
        chain.extend(&Sequence { salt: Salt(salt), prompt, output }, tokens, &mut keys);
        keys
    }

    #[test]
    fn a_key_names_tenant_and_all_ids_up_to_the_end_of_its_page() {
        let chain = KeyChain::new(2);
        let long = keys(&chain, 1, &[1, 2, 3, 4, 5], &[]);
        assert_eq!(long.len(), 2, "the third page is not full");
        assert_eq!(long, keys(&chain, 1, &[1, 2, 3], &[4, 9]), "wherever the ids stand");
        assert_eq!(long[..1], keys(&chain, 1, &[1, 2], &[]), "whatever follows");
        let mut grown = Vec::with_capacity(2);
        for (prompt, output) in [(&[1, 2, 3][..], &[][..]), (&[1, 2, 3], &[4])] {
            let tokens = (prompt.len() + output.len()) as u32;
            chain.extend(&Sequence { salt: Salt(1), prompt, output }, tokens, &mut grown);
        }
        assert_eq!(long, grown, "in several calls");
        let others = [
            keys(&chain, 2, &[1, 2, 3, 4], &[]),
            keys(&chain, 1, &[7, 2, 3, 4], &[]),
            keys(&KeyChain::new(2), 1, &[1, 2, 3, 4], &[]),
        ];
        for other in others {
            assert!(other[0] != long[0] && other[1] != long[1], "each of them counts");
        }
        assert_ne!(keys(&chain, 1, &[3, 4], &[])[0], long[1], "ids before the page count");
    }
}

//! Requests with different salts share no KV. Each cached part of a prompt came with a request of
//! the same salt. On a decode worker without a cluster key, it also came from the same source.

use super::{Checked, Checker, Finding};
use crate::kv::prefix::Salt;
use crate::stdx::rng::scramble;
use std::collections::HashMap;

/// Prefixes, in whole pages, that a worker can have in its cache.
#[derive(Debug)]
pub struct Salts {
    page_size: usize,
    /// How many requests had each prefix.
    beginnings: HashMap<u64, u32>,
}

impl Salts {
    /// An empty cache with pages of `page_size` tokens.
    pub fn new(page_size: u32) -> Salts {
        Salts { page_size: page_size as usize, beginnings: HashMap::new() }
    }

    /// Records a request with this prompt and this future answer.
    pub fn brought(&mut self, salt: Salt, prompt: &[u32], answer: &[u32]) {
        let tokens = prompt.iter().chain(answer).copied();
        for beginning in beginnings(self.page_size, salt, tokens) {
            *self.beginnings.entry(beginning).or_default() += 1;
        }
    }

    /// Checks a hit of the first `tokens` tokens of a prompt. [`Salts::brought`] has already
    /// counted this request, so a second request must have had the same prefix.
    pub fn found(&self, request: usize, salt: Salt, prompt: &[u32], tokens: u32) -> Checked {
        let found = prompt[..tokens as usize].iter().copied();
        match beginnings(self.page_size, salt, found).last() {
            Some(beginning)
                if self.beginnings.get(&beginning).is_none_or(|&requests| requests < 2) =>
            {
                let what = format!(
                    "request {request} was served {tokens} tokens that are not of its salt"
                );
                Err(Finding::about(Checker::Salts, request, what))
            }
            _ => Ok(()),
        }
    }
}

/// One hash per page, over the salt and all tokens up to the page's end.
fn beginnings(
    page_size: usize,
    salt: Salt,
    tokens: impl Iterator<Item = u32>,
) -> impl Iterator<Item = u64> {
    let root = scramble(salt.0 as u64 ^ scramble((salt.0 >> 64) as u64));
    let hashes = tokens.scan(root, |hash, token| {
        *hash = scramble(*hash ^ u64::from(token));
        Some(*hash)
    });
    hashes.skip(page_size - 1).step_by(page_size)
}

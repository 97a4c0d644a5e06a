//! Who names another salt shares nothing: what a prefix cache has of a prompt was brought to it by a request of the
//! same salt, and on a decode worker, where no key proves sources, by one from the same source.

use super::{Checked, Checker, Finding};
use crate::kv::prefix::Salt;
use crate::sim::model::mix;
use std::collections::HashMap;

/// Beginnings that a worker may have in its cache, in whole pages.
#[derive(Debug)]
pub struct Salts {
    page_size: usize,
    /// How many requests each was of.
    beginnings: HashMap<u64, u32>,
}

impl Salts {
    /// An empty cache of pages of so many tokens.
    pub fn new(page_size: u32) -> Salts {
        Salts { page_size: page_size as usize, beginnings: HashMap::new() }
    }

    /// A request has come with this prompt, and will have this answer.
    pub fn brought(&mut self, salt: Salt, prompt: &[u32], answer: &[u32]) {
        let tokens = prompt.iter().chain(answer).copied();
        for beginning in beginnings(self.page_size, salt, tokens) {
            *self.beginnings.entry(beginning).or_default() += 1;
        }
    }

    /// The first `tokens` of a prompt were found, that of a request that has been brought: it was not the only one.
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

/// A hash for each page, of the salt and all tokens up to its end.
fn beginnings(
    page_size: usize,
    salt: Salt,
    tokens: impl Iterator<Item = u32>,
) -> impl Iterator<Item = u64> {
    let root = mix(salt.0 as u64 ^ mix((salt.0 >> 64) as u64));
    let hashes = tokens.scan(root, |hash, token| {
        *hash = mix(*hash ^ u64::from(token));
        Some(*hash)
    });
    hashes.skip(page_size - 1).step_by(page_size)
}

//! The demand of a request. It is an estimate, because a router has no tokeniser.
//!
//! Owns: the size of a prompt and the names of its blocks. The name of a block is a hash over the
//! block and all blocks before it, so equal names mean equal beginnings.
//! Not here: the workers that have a block (`prefixes`), the split of a body (`api::routed_body`).

use crate::stdx::rng::mix;

/// The demand of a request.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Demand {
    /// Sequences that are generated in parallel: prompts times samples.
    pub sequences: u32,
    /// Samples of each prompt.
    pub samples: u32,
    /// Tokens of all prompts, possibly an estimate.
    pub tokens: u32,
    /// Tokens of a block, possibly an estimate.
    pub block: u32,
    /// Names of the complete blocks at the beginning of the prompt.
    pub blocks: Box<[u64]>,
}

impl Demand {
    /// The demand of this many sequences with an unknown prompt.
    pub fn of(sequences: u32) -> Demand {
        Demand { sequences, samples: 1, ..Demand::default() }
    }

    /// Prompt tokens of all sequences.
    pub fn context(&self) -> u64 {
        u64::from(self.tokens) * u64::from(self.samples)
    }

    /// Prompt tokens that a worker with the first `blocks` blocks must compute. It is at least one,
    /// because the last token is always computed.
    pub fn missing(&self, blocks: u32) -> u32 {
        self.tokens.saturating_sub(blocks.saturating_mul(self.block)).max(self.tokens.min(1))
    }
}

/// The name of a block that follows the block named `before`.
pub fn chained(before: u64, bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(mix(before ^ bytes.len() as u64), |hash, bytes| {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        mix(hash ^ u64::from_le_bytes(word))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_stands_for_all_before_it() {
        let (one, other) = (chained(0, b"one"), chained(0, b"other"));
        assert_ne!(one, other);
        assert_ne!(chained(one, b"more"), chained(other, b"more"));
        assert_eq!(chained(one, b"more"), chained(chained(0, b"one"), b"more"));
        assert_ne!(chained(0, b"a"), chained(0, b"a\0"), "what is missing is no zero");
    }

    #[test]
    fn a_worker_with_the_whole_prompt_cached_computes_one_token() {
        let work =
            Demand { sequences: 1, samples: 1, tokens: 100, block: 50, blocks: Box::new([1, 2]) };
        assert_eq!([work.missing(0), work.missing(1), work.missing(2)], [100, 50, 1]);
        assert_eq!(Demand::of(1).missing(0), 0);
    }
}

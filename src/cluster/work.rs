//! What a request asks of workers, as far as a router can tell, which has no tokenizer.
//!
//! Owns: the size of a prompt and the names of its blocks. A block's name stands for all before it as well, so that equal
//! names mean equal beginnings. Not here: who has them (`prefixes`), where they come from (`front`, `sim`).

/// What a request asks.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Work {
    /// Sequences that are generated side by side: prompts times samples.
    pub sequences: u32,
    /// Of each prompt.
    pub samples: u32,
    /// Tokens of the prompt, or of all prompts, or about so many.
    pub tokens: u32,
    /// Tokens of a block, or about so many.
    pub block: u32,
    /// The whole blocks that the prompt begins with.
    pub blocks: Box<[u64]>,
}

impl Work {
    /// So many sequences of a prompt of which nothing is known.
    pub fn of(sequences: u32) -> Work {
        Work { sequences, samples: 1, ..Work::default() }
    }

    /// Tokens that all sequences have before them.
    pub fn context(&self) -> u64 {
        u64::from(self.tokens) * u64::from(self.samples)
    }

    /// What of the prompt a worker lacks that has its first blocks. One token at least is computed, for what it says.
    pub fn missing(&self, blocks: u32) -> u32 {
        self.tokens.saturating_sub(blocks.saturating_mul(self.block)).max(self.tokens.min(1))
    }
}

/// The name of a block behind one of this name.
pub fn chained(before: u64, bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(mix(before ^ bytes.len() as u64), |hash, bytes| {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        mix(hash ^ u64::from_le_bytes(word))
    })
}

/// Spreads what differs in a bit over all bits. (The finalizer of splitmix64: Steele, Lea and Flood, 2014.)
pub fn mix(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
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
    fn who_has_all_computes_a_token() {
        let work =
            Work { sequences: 1, samples: 1, tokens: 100, block: 50, blocks: Box::new([1, 2]) };
        assert_eq!([work.missing(0), work.missing(1), work.missing(2)], [100, 50, 1]);
        assert_eq!(Work::of(1).missing(0), 0);
    }
}

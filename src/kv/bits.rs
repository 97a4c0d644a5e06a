//! A set of small numbers, searched a word at a time.

/// A set of small numbers.
pub(in crate::kv) struct Bits {
    words: Box<[u64]>,
    len: usize,
}

impl Bits {
    /// All numbers below `len`.
    pub fn ones(len: usize) -> Bits {
        let mut bits = Bits { words: vec![0; len.div_ceil(64)].into(), len };
        (0..len).for_each(|index| bits.set(index, true));
        bits
    }

    /// Whether `index` is a member.
    pub fn get(&self, index: usize) -> bool {
        self.words[index / 64] >> (index % 64) & 1 == 1
    }

    /// Adds `index` if `value` is true, else removes it.
    pub fn set(&mut self, index: usize, value: bool) {
        let bit = 1 << (index % 64);
        if value {
            self.words[index / 64] |= bit;
        } else {
            self.words[index / 64] &= !bit;
        }
    }

    /// The first run of members at or after `from`: (start, length).
    pub fn run(&self, from: usize) -> Option<(usize, usize)> {
        let start = self.find(from, 0)?;
        let end = self.find(start, u64::MAX).unwrap_or(self.len);
        Some((start, end - start))
    }

    /// The first index at or after `from` with a set bit, after `flip` is applied to each word.
    fn find(&self, from: usize, flip: u64) -> Option<usize> {
        let mut index = from;
        while index < self.len {
            let word = (self.words[index / 64] ^ flip) >> (index % 64);
            if word != 0 {
                let found = index + word.trailing_zeros() as usize;
                return (found < self.len).then_some(found);
            }
            index = (index / 64 + 1) * 64;
        }
        None
    }
}

//! A seeded generator for simulations, and the hash functions behind it. The generator is forked
//! for each part, so that the draws of one part do not change those of another.

/// A seeded generator.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Returns the same numbers for the same seed.
    pub fn new(seed: u64) -> Rng {
        Rng(scramble(seed ^ 0x5eed))
    }

    /// An independent generator for the part of this name.
    pub fn fork(&self, part: &str) -> Rng {
        Rng(part.bytes().fold(self.0, |state, byte| scramble(state ^ u64::from(byte))))
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(1);
        scramble(self.0)
    }

    /// A random number in `low..=high`.
    pub fn range_u64(&mut self, low: u64, high: u64) -> u64 {
        low + self.next_u64() % (high - low + 1)
    }

    /// A random number in `low..=high`.
    pub fn range_u32(&mut self, low: u32, high: u32) -> u32 {
        self.range_u64(low.into(), high.into()) as u32
    }

    /// True once in `n` times on average.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.next_u64().is_multiple_of(n)
    }

    /// A random element.
    pub fn pick<T: Copy>(&mut self, among: &[T]) -> T {
        among[self.next_u64() as usize % among.len()]
    }
}

/// What splitmix64 adds to its state for each number: 2^64 divided by the golden ratio.
pub const INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finalizer of splitmix64 over a product instead of a sum. Seeds of the simulator and recorded
/// runs depend on exactly these values.
pub const fn scramble(state: u64) -> u64 {
    finalize(state.wrapping_mul(INCREMENT))
}

/// One step of splitmix64 (Steele, Lea and Flood, 2014): spreads a difference in one bit over all
/// bits.
pub const fn mix(word: u64) -> u64 {
    finalize(word.wrapping_add(INCREMENT))
}

/// The finalizer of splitmix64 alone.
pub const fn finalize(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

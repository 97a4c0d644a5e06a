//! Random numbers that a stranger cannot guess; under a seed, the same numbers in each run.

use crate::stdx::rng::Rng;

/// A source of random numbers.
#[derive(Clone, Debug)]
pub enum Entropy {
    /// The generator of the operating system.
    System,
    /// A generator with a seed, for the simulator.
    Seeded(Rng),
}

impl Entropy {
    /// Random bytes.
    pub fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        match self {
            // The system's generator cannot fail after it is seeded.
            Entropy::System => drop(getrandom::fill(&mut bytes)),
            Entropy::Seeded(rng) => bytes.fill_with(|| rng.next_u64() as u8),
        }
        bytes
    }

    /// 32 random bits.
    pub fn next_u32(&mut self) -> u32 {
        u32::from_le_bytes(self.bytes())
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        u64::from_le_bytes(self.bytes())
    }

    /// A source for another part. Under a seed, the draws of one part do not change those of
    /// another.
    pub fn fork(&self, part: &str) -> Entropy {
        match self {
            Entropy::System => Entropy::System,
            Entropy::Seeded(rng) => Entropy::Seeded(rng.fork(part)),
        }
    }
}

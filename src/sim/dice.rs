//! All chance of a simulation: one seeded generator, from which each part has a fork of its own, so that what
//! one part draws does not move what another one does.

use super::model::mix;

/// A seeded generator.
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// The same numbers for the same seed.
    pub fn new(seed: u64) -> Dice {
        Dice(mix(seed ^ 0x5eed))
    }

    /// A generator of its own for the part of this name.
    pub fn fork(&self, part: &str) -> Dice {
        Dice(part.bytes().fold(self.0, |state, byte| mix(state ^ u64::from(byte))))
    }

    /// 64 bits.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix(self.0)
    }

    /// In `low..=high`.
    pub fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.draw() % (high - low + 1)
    }

    /// In `low..=high`.
    pub fn number(&mut self, low: u32, high: u32) -> u32 {
        self.within(low.into(), high.into()) as u32
    }

    /// Once in `n` times.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.draw().is_multiple_of(n)
    }

    /// One of them.
    pub fn pick<T: Copy>(&mut self, among: &[T]) -> T {
        among[self.draw() as usize % among.len()]
    }
}

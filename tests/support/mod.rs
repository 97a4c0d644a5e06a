//! A cluster of one engine, which tests step by hand. The output of its pseudo-model depends on
//! every byte of KV that it reads. Movers copy pages, and `ctl` only opens slots and passes
//! messages on.

pub mod mover;
pub mod rig;

/// A small seeded generator for workloads.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(1);
        baton::stdx::rng::scramble(self.0)
    }

    /// A number in `low..=high`.
    pub fn within(&mut self, low: u32, high: u32) -> u32 {
        low + (self.next() % u64::from(high - low + 1)) as u32
    }

    pub fn one_in(&mut self, n: u32) -> bool {
        self.within(1, n) == 1
    }
}

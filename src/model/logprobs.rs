//! Logprobs of one position, passed by value from the sampler to the client and never allocated.

use crate::limits::TOP_LOGPROBS_MAX;

/// The best tokens of one position, best first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TopLogprobs {
    len: u8,
    entries: [(u32, f32); TOP_LOGPROBS_MAX],
}

impl TopLogprobs {
    /// No alternatives.
    pub const EMPTY: TopLogprobs = TopLogprobs { len: 0, entries: [(0, 0.0); TOP_LOGPROBS_MAX] };

    /// Adds the next best entry. Entries past the limit are dropped.
    pub fn push(&mut self, token: u32, logprob: f32) {
        if let Some(entry) = self.entries.get_mut(self.len as usize) {
            *entry = (token, logprob);
            self.len += 1;
        }
    }

    /// Inserts an entry at its place among the best `count`. Of equal entries, the first inserted
    /// stays ahead.
    pub fn insert(&mut self, token: u32, logprob: f32, count: usize) {
        let (len, count) = (self.len as usize, count.min(TOP_LOGPROBS_MAX));
        if count == 0 || (len == count && logprob <= self.entries[count - 1].1) {
            return;
        }
        let place = self.as_slice().partition_point(|entry| entry.1 >= logprob);
        let len = count.min(len + 1);
        self.len = len as u8;
        self.entries[place..len].rotate_right(1);
        self.entries[place] = (token, logprob);
    }

    /// The entries, for changes in place.
    pub fn as_mut_slice(&mut self) -> &mut [(u32, f32)] {
        &mut self.entries[..self.len as usize]
    }

    /// Pairs of (token, logprob), best first.
    pub fn as_slice(&self) -> &[(u32, f32)] {
        &self.entries[..self.len as usize]
    }
}

/// The outcome of sampling one position.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampled {
    /// The chosen token.
    pub token: u32,
    /// Natural logarithm of the unscaled softmax at `token`.
    pub logprob: f32,
    /// The requested alternatives.
    pub top: TopLogprobs,
}

//! Logprobs of one position, passed by value from the sampler to the client and never allocated.
//! Those of a prompt are in memory that `ctl` allocates and the engine fills.

use crate::limits::TOP_LOGPROBS_MAX;
use std::ops::Range;

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

/// A token of a prompt, as the model would have sampled it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoredToken {
    /// Natural logarithm of the unscaled softmax at the token.
    pub logprob: f32,
    /// Number of tokens that are at least as likely, itself included.
    pub rank: u32,
    /// The likeliest tokens.
    pub top: TopLogprobs,
}

/// The logprobs of a range of a prompt, in order of position. Never grows past its range.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptLogprobs {
    positions: Range<u32>,
    tokens: Vec<(f32, u32)>,
    /// `top` entries for each position.
    alternatives: Vec<(u32, f32)>,
    top: usize,
}

impl PromptLogprobs {
    /// Room for the tokens at `positions`, with `top` alternatives each. The first token of a
    /// prompt has no logprob, because nothing comes before it.
    pub fn new(positions: Range<u32>, top: usize) -> PromptLogprobs {
        debug_assert!(positions.start > 0 && top <= TOP_LOGPROBS_MAX);
        PromptLogprobs {
            tokens: Vec::with_capacity(positions.len()),
            alternatives: Vec::with_capacity(positions.len() * top),
            positions,
            top,
        }
    }

    /// Memory for that many positions and alternatives, in bytes.
    pub const fn bytes_for(positions: usize, top: usize) -> usize {
        positions * (size_of::<(f32, u32)>() + top * size_of::<(u32, f32)>())
    }

    /// Alternatives for each position.
    pub fn top(&self) -> usize {
        self.top
    }

    /// Position of the next token to push.
    pub fn next_position(&self) -> u32 {
        self.positions.start + self.tokens.len() as u32
    }

    /// Whether all positions have their logprob.
    pub fn is_complete(&self) -> bool {
        self.tokens.len() == self.positions.len()
    }

    /// Adds the token at the next position.
    pub fn push(&mut self, scored: &ScoredToken) {
        debug_assert!(!self.is_complete(), "a position is scored once");
        self.tokens.push((scored.logprob, scored.rank));
        // A vocabulary can have fewer tokens than alternatives are wanted.
        let padded = scored.top.as_slice().iter().copied().chain(std::iter::repeat((0, f32::NAN)));
        self.alternatives.extend(padded.take(self.top));
    }

    /// All logprobs as bytes, little-endian: for each position the logprob and the rank, then all
    /// alternatives.
    pub fn to_bytes(&self) -> Vec<u8> {
        debug_assert!(self.is_complete(), "only complete logprobs are sent");
        let tokens = self.tokens.iter().map(|&(logprob, rank)| [logprob.to_bits(), rank]);
        let others = self.alternatives.iter().map(|&(token, logprob)| [token, logprob.to_bits()]);
        tokens.chain(others).flatten().flat_map(u32::to_le_bytes).collect()
    }

    /// Reads [`PromptLogprobs::to_bytes`] of the same positions and number of alternatives. `None`
    /// if the bytes have another length, or a number is not possible.
    pub fn from_bytes(positions: Range<u32>, top: usize, bytes: &[u8]) -> Option<PromptLogprobs> {
        let mut scored = PromptLogprobs::new(positions, top);
        if bytes.len() != PromptLogprobs::bytes_for(scored.positions.len(), top) {
            return None;
        }
        let (pairs, _) = bytes.as_chunks::<8>();
        let word = |pair: &[u8; 8], at: usize| {
            u32::from_le_bytes([pair[at], pair[at + 1], pair[at + 2], pair[at + 3]])
        };
        let (tokens, others) = pairs.split_at(scored.positions.len());
        scored
            .tokens
            .extend(tokens.iter().map(|pair| (f32::from_bits(word(pair, 0)), word(pair, 4))));
        let entries = others.iter().map(|pair| (word(pair, 0), f32::from_bits(word(pair, 4))));
        scored.alternatives.extend(entries);
        let is_token = |&(logprob, rank): &(f32, u32)| logprob.is_finite() && rank > 0;
        let is_other = |&(_, logprob): &(u32, f32)| !logprob.is_infinite();
        let is_valid =
            scored.tokens.iter().all(is_token) && scored.alternatives.iter().all(is_other);
        is_valid.then_some(scored)
    }

    /// The tokens so far, with their positions.
    pub fn iter(&self) -> impl Iterator<Item = (u32, ScoredToken)> + '_ {
        let scored = |(at, &(logprob, rank)): (usize, &(f32, u32))| {
            let mut top = TopLogprobs::EMPTY;
            let entries = &self.alternatives[at * self.top..(at + 1) * self.top];
            let known = entries.iter().filter(|(_, logprob)| !logprob.is_nan());
            known.for_each(|&(token, logprob)| top.push(token, logprob));
            (self.positions.start + at as u32, ScoredToken { logprob, rank, top })
        };
        self.tokens.iter().enumerate().map(scored)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_tokens() -> PromptLogprobs {
        let mut scored = PromptLogprobs::new(3..5, 2);
        for (logprob, rank, others) in
            [(-0.5, 1, &[(7, -0.5), (2, -1.5)][..]), (-9.25, 8, &[(4, -0.125)])]
        {
            let mut top = TopLogprobs::EMPTY;
            others.iter().for_each(|&(token, logprob)| top.push(token, logprob));
            scored.push(&ScoredToken { logprob, rank, top });
        }
        scored
    }

    #[test]
    fn prompt_logprobs_come_back_from_bytes() {
        let scored = two_tokens();
        assert!(scored.is_complete());
        let bytes = scored.to_bytes();
        assert_eq!(bytes.len(), PromptLogprobs::bytes_for(2, 2));
        let read = PromptLogprobs::from_bytes(3..5, 2, &bytes).unwrap();
        assert_eq!(read.iter().collect::<Vec<_>>(), scored.iter().collect::<Vec<_>>());
        assert_eq!(
            read.iter().map(|(at, one)| (at, one.rank)).collect::<Vec<_>>(),
            [(3, 1), (4, 8)]
        );
        assert_eq!(read.iter().last().unwrap().1.top.as_slice(), [(4, -0.125)]);
    }

    #[test]
    fn bytes_of_other_logprobs_are_refused() {
        let bytes = two_tokens().to_bytes();
        let read = |bytes: &[u8]| PromptLogprobs::from_bytes(3..5, 2, bytes);
        assert!(read(&bytes[1..]).is_none() && read(&[&bytes[..], &[0]].concat()).is_none());
        assert!(PromptLogprobs::from_bytes(3..6, 2, &bytes).is_none());
        let with = |at: usize, word: u32| {
            let mut changed = bytes.clone();
            changed[at..at + 4].copy_from_slice(&word.to_le_bytes());
            changed
        };
        assert!(read(&with(0, f32::NAN.to_bits())).is_none());
        assert!(read(&with(4, 0)).is_none());
        assert!(read(&with(20, f32::INFINITY.to_bits())).is_none());
    }
}

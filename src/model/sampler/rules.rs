//! Rules of a request about tokens: a bias, tokens that are allowed, words that must not occur, and
//! a shortest length.
//!
//! Invariant: applying them allocates nothing.

use super::{TokenHistory, known};
use std::sync::atomic::AtomicU32;

/// Rules about tokens. `ctl` makes them, and the engine applies them.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct TokenRules {
    /// Added to the logits of these ids.
    pub bias: Vec<(u32, f32)>,
    /// The only ids that can be chosen: bit `id % 32` of word `id / 32`; empty: all.
    pub allowed: Vec<u32>,
    /// Sequences of ids that must not occur in the output, none of them empty.
    pub banned: Vec<Vec<u32>>,
    /// Tokens of the output before one of `ends` can be chosen.
    pub min_tokens: u32,
    /// Ids that end the output.
    pub ends: Vec<u32>,
}

/// What limits the choice of one token.
#[derive(Clone, Copy, Default, Debug)]
pub struct TokenLimits<'a> {
    /// The mask of a grammar: it allows the tokens with bit `id % 32` of word `id / 32`.
    pub mask: Option<&'a [AtomicU32]>,
    /// The rules of the request.
    pub rules: Option<&'a TokenRules>,
}

impl TokenRules {
    /// Whether no rule has an effect.
    pub fn is_empty(&self) -> bool {
        self.bias.is_empty()
            && self.allowed.is_empty()
            && self.banned.is_empty()
            && self.min_tokens == 0
    }

    /// Adds the bias to logits.
    pub(super) fn add_bias(&self, logits: &mut [f32]) {
        for &(id, bias) in &self.bias {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit += bias;
            }
        }
    }

    /// Makes each token impossible that the rules forbid behind `history`.
    pub(super) fn forbid(&self, logits: &mut [f32], history: &TokenHistory<'_>) {
        let vocab = logits.len();
        if !self.allowed.is_empty() {
            for (id, logit) in logits.iter_mut().enumerate() {
                let word = self.allowed.get(id / 32).copied().unwrap_or(0);
                *logit = if word >> (id % 32) & 1 == 0 { f32::NEG_INFINITY } else { *logit };
            }
        }
        for sequence in &self.banned {
            if let Some((&last, before)) = sequence.split_last()
                && ends_with(history, before)
            {
                known(&[last], vocab).for_each(|id| logits[id] = f32::NEG_INFINITY);
            }
        }
        if ((history.resumed.len() + history.output.len()) as u32) < self.min_tokens {
            known(&self.ends, vocab).for_each(|id| logits[id] = f32::NEG_INFINITY);
        }
    }
}

/// Whether the output of all attempts ends with these ids.
fn ends_with(history: &TokenHistory<'_>, ids: &[u32]) -> bool {
    let TokenHistory { resumed, output, .. } = history;
    let from_output = ids.len().min(output.len());
    let (first, last) = ids.split_at(ids.len() - from_output);
    output.ends_with(last) && resumed.ends_with(first)
}

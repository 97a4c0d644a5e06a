//! What a forward pass costs: a polynomial of its tokens and contexts in place of the pass.
//!
//! Owns: the clock of the turn, which a pass puts forward. Tokens are a hash of the token before and the position; no
//! KV is read or written. Not here: where coefficients come from (`plan`).

use super::super::model::mix;
use crate::cluster::router::Role;
use crate::model::forward::batch::{Batch, Logits};
use crate::model::forward::{Forward, KvPool, StepEnd};
use crate::transfer::command::SourceCommand;
use crossbeam_channel::Receiver;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Token ids are below this: enough that pages of eight tokens and more differ where their prompts do (48 bits), few
/// enough that choosing one costs nothing beside a turn.
pub const VOCAB: u32 = 64;

/// Coefficients, in milliseconds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Cost {
    /// `a + Σ (b·new + c·new·(prefix + new/2)) + d·(Σ new)²` over the prompts of a step.
    pub prefill: [f64; 4],
    /// `a + b·Σ context + c·batch + d·(Σ context)²` over its sequences.
    pub decode: [f64; 4],
}

/// Qwen3-32B-FP8 on two H200 under vLLM 0.24, fitted to an estimator's table (mean error 2.4 % and 1.7 %).
pub const DEFAULT: Cost =
    Cost { prefill: [8.322, 0.033051, 1.7068e-6, 0.0], decode: [9.7902, 2.0797e-5, 0.028017, 0.0] };

impl Cost {
    /// Of a step that reads so many new tokens behind so many, prompt by prompt.
    pub fn prefill_ms(&self, prompts: impl Iterator<Item = (u32, u32)>) -> f64 {
        let [a, b, c, d] = self.prefill;
        let (mut ms, mut sum) = (a, 0.0);
        for (new, prefix) in prompts {
            let (new, prefix) = (f64::from(new), f64::from(prefix));
            ms += b * new + c * new * (prefix + new / 2.0);
            sum += new;
        }
        ms + d * sum * sum
    }

    /// Of a step that generates a token for each of `batch` sequences of `context` tokens in all.
    pub fn decode_ms(&self, context: u64, batch: usize) -> f64 {
        let [a, b, c, d] = self.decode;
        let context = context as f64;
        a + b * context + c * batch as f64 + d * context * context
    }
}

/// The model of all workers, which take their turns one at a time.
pub struct CostModel {
    cost: Cost,
    /// Whose turn it is.
    pub role: Role,
    /// What the worker whose turn it is, if it is a source, tells its mover,
    pub told: Option<Receiver<SourceCommand>>,
    /// and how much of it was told before the pass.
    pub told_before: usize,
    clock: Arc<AtomicU64>,
    tokens: Vec<u32>,
    /// One that is likelier than `VOCAB - 1` others before and behind it.
    peak: [f32; 2 * VOCAB as usize],
}

impl CostModel {
    /// One that puts `clock`, in nanoseconds, forward; a step takes at most `rows` sequences.
    pub fn new(cost: Cost, clock: Arc<AtomicU64>, rows: usize) -> CostModel {
        let mut peak = [0.0; 2 * VOCAB as usize];
        peak[VOCAB as usize] = 10.0;
        let tokens = Vec::with_capacity(rows);
        CostModel { cost, role: Role::Prefill, told: None, told_before: 0, clock, tokens, peak }
    }
}

impl Forward for CostModel {
    fn step(
        &mut self,
        batch: &Batch,
        _kv: KvPool<'_>,
        on_layer: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> StepEnd {
        self.told_before = self.told.as_ref().map_or(0, Receiver::len);
        let rows = || batch.rows().iter().map(|row| (batch.token_range(row).len() as u32, row.start));
        let ms = match self.role {
            Role::Prefill => self.cost.prefill_ms(rows()),
            Role::Decode => {
                let context = rows().map(|(new, start)| u64::from(start + new)).sum();
                self.cost.decode_ms(context, batch.rows().len())
            }
        };
        // What a fit says of a step outside its range may be less than nothing.
        self.clock.fetch_add((ms.max(0.0) * 1e6).round() as u64, Ordering::Relaxed);
        self.tokens.clear();
        for row in batch.rows().iter().filter(|row| row.logits != Logits::None) {
            let tokens = batch.token_range(row);
            let last = batch.tokens()[tokens.end - 1];
            let position = u64::from(row.start) + tokens.len() as u64;
            self.tokens.push(mix(position << 32 | u64::from(last)) as u32 % VOCAB);
        }
        if on_layer(0).is_break() { StepEnd::Stopped } else { StepEnd::Complete }
    }

    fn logits(&self, index: usize) -> &[f32] {
        let first = VOCAB - self.tokens[index];
        &self.peak[first as usize..][..VOCAB as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_costs_what_its_polynomial_says() {
        let cost = Cost { prefill: [10.0, 0.5, 0.01, 0.25], decode: [5.0, 0.1, 2.0, 0.001] };
        assert_eq!(cost.prefill_ms([(4, 0)].into_iter()), 10.0 + 2.0 + 0.04 * 2.0 + 4.0);
        assert_eq!(cost.prefill_ms([(4, 6), (2, 0)].into_iter()), 10.0 + 3.0 + 0.04 * 8.0 + 0.02 + 9.0);
        assert_eq!(cost.decode_ms(100, 3), 5.0 + 10.0 + 6.0 + 10.0);
    }

    #[test]
    fn a_prompt_in_two_chunks_costs_its_start_once_more() {
        let whole = DEFAULT.prefill_ms([(8192, 0)].into_iter());
        let parts =
            DEFAULT.prefill_ms([(4096, 0)].into_iter()) + DEFAULT.prefill_ms([(4096, 4096)].into_iter());
        assert!((parts - whole - DEFAULT.prefill[0]).abs() < 1e-9);
    }

    #[test]
    fn the_chosen_token_is_the_likeliest() {
        let mut model = CostModel::new(DEFAULT, Arc::default(), 1);
        for token in [0, 1, VOCAB - 1] {
            model.tokens = vec![token];
            let logits = model.logits(0);
            assert_eq!(logits.iter().position(|&logit| logit > 0.0), Some(token as usize));
        }
    }
}

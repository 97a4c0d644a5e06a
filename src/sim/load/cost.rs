//! What a forward pass costs: a polynomial of its tokens and contexts in place of the pass.
//!
//! Owns: the clock of the turn, which a pass puts forward. Tokens are a hash of the token before and the position; no
//! KV is read or written. Not here: where coefficients come from (`plan`).

use super::super::model::mix;
use crate::cluster::router::Role;
pub use crate::config::resolved::{COST_DEFAULT as DEFAULT, Cost};
use crate::model::forward::batch::{Batch, Logits, Row};
use crate::model::forward::{Forward, KvPool, StepEnd};
use crate::transfer::command::SourceCommand;
use crossbeam_channel::Receiver;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Token ids are below this: enough that pages of eight tokens and more differ where their prompts do (48 bits), few
/// enough that choosing one costs nothing beside a turn.
pub const VOCAB: u32 = 64;

/// The model of all workers, which take their turns one at a time.
pub struct CostModel {
    cost: Cost,
    /// Whose turn it is.
    pub role: Role,
    /// What the worker whose turn it is, if it is a source, tells its mover,
    pub told: Option<Receiver<SourceCommand>>,
    /// and how much of it was told before the pass.
    pub told_before: usize,
    /// Passes of the turn so far.
    pub passes: u32,
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
        CostModel {
            cost,
            role: Role::Prefill,
            told: None,
            told_before: 0,
            passes: 0,
            clock,
            tokens,
            peak,
        }
    }
}

impl Forward for CostModel {
    fn step(
        &mut self,
        batch: &Batch,
        _kv: KvPool<'_>,
        on_layer: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> StepEnd {
        self.passes += 1;
        self.told_before = self.told.as_ref().map_or(0, Receiver::len);
        let rows =
            || batch.rows().iter().map(|row| (batch.token_range(row).len() as u32, row.start));
        let ms = match self.role {
            Role::Prefill => self.cost.prefill_ms(rows()),
            // A decode worker reads prompts, too, in passes of their own.
            Role::Decode if batch.rows().iter().any(|row| is_chunk(batch, row)) => {
                self.cost.prefill_ms(rows())
            }
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

/// Whether it is part of a prompt: a step that generates takes one token of each sequence. A prompt of which all but one
/// token is in the cache looks like that, and costs what it costs.
fn is_chunk(batch: &Batch, row: &Row) -> bool {
    batch.token_range(row).len() > 1 || row.logits == Logits::None
}

#[cfg(test)]
mod tests {
    use super::*;

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

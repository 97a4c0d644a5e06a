//! The cost model: a polynomial of tokens and contexts replaces a forward pass.
//!
//! Owns: the clock of the turn, which a pass advances. A token is a hash of the previous token and
//! the position; no KV is read or written. Not here: the source of coefficients (`plan`).

pub use crate::config::{COST_DEFAULT as DEFAULT, Cost};
use crate::ids::Leg;
use crate::model::forward::batch::{Batch, Logits, Row};
use crate::model::forward::{Forward, KvPool, StepEnd};
use crate::stdx::rng::scramble;
use crate::transfer::command::SourceCommand;
use crossbeam_channel::Receiver;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of token ids. With it, pages of at least eight tokens (48 bits) differ if their prompts
/// differ, and sampling is cheap compared with a turn.
pub const VOCAB: u32 = 64;

/// The model of all workers, which take their turns one at a time.
pub struct CostModel {
    cost: Cost,
    /// Role of the worker that takes its turn.
    pub role: Leg,
    /// The commands to the mover of that worker, if it is a source.
    pub mover_commands: Option<Receiver<SourceCommand>>,
    /// How many of them were sent before the pass.
    pub commands_before: usize,
    /// Passes of the turn so far.
    pub passes: u32,
    clock: Arc<AtomicU64>,
    tokens: Vec<u32>,
    /// One large logit, with `VOCAB - 1` zeros before it and more zeros behind it.
    peak: [f32; 2 * VOCAB as usize],
}

impl CostModel {
    /// A model that advances `clock`, in nanoseconds. A step takes at most `rows` sequences.
    pub fn new(cost: Cost, clock: Arc<AtomicU64>, rows: usize) -> CostModel {
        let mut peak = [0.0; 2 * VOCAB as usize];
        peak[VOCAB as usize] = 10.0;
        let tokens = Vec::with_capacity(rows);
        CostModel {
            cost,
            role: Leg::Prefill,
            mover_commands: None,
            commands_before: 0,
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
        self.commands_before = self.mover_commands.as_ref().map_or(0, Receiver::len);
        let rows =
            || batch.rows().iter().map(|row| (batch.token_range(row).len() as u32, row.start));
        let ms = match self.role {
            Leg::Prefill => self.cost.prefill_ms(rows()),
            // A decode worker can also compute prompts, in separate passes.
            Leg::Decode if batch.rows().iter().any(|row| is_chunk(batch, row)) => {
                self.cost.prefill_ms(rows())
            }
            Leg::Decode => {
                let context = rows().map(|(new, start)| u64::from(start + new)).sum();
                self.cost.decode_ms(context, batch.rows().len())
            }
        };
        // A fit can be negative outside its range.
        self.clock.fetch_add((ms.max(0.0) * 1e6).round() as u64, Ordering::Relaxed);
        self.tokens.clear();
        for row in batch.rows().iter().filter(|row| row.logits != Logits::None) {
            let tokens = batch.token_range(row);
            let last = batch.tokens()[tokens.end - 1];
            let position = u64::from(row.start) + tokens.len() as u64;
            self.tokens.push(scramble(position << 32 | u64::from(last)) as u32 % VOCAB);
        }
        if on_layer(0).is_break() { StepEnd::Stopped } else { StepEnd::Complete }
    }

    fn logits(&self, index: usize) -> &[f32] {
        let first = VOCAB - self.tokens[index];
        &self.peak[first as usize..][..VOCAB as usize]
    }
}

/// Whether the row is part of a prompt. A decode step takes one token of each sequence. If only one
/// token of a prompt is missing in the cache, it looks the same and costs the same.
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

//! Which part of which prompts is computed next.
//!
//! Owns: the waiting line of prompts, the one prompt whose chunks have begun, the measured speed.
//! Invariants: that one continues first; a chunk that is not the last ends on a page; a prompt gets all its
//! pages with its first chunk, which begins behind what the prefix cache has of it; a chunk is bounded in tokens
//! and, as far as the past foretells, in time.

use crate::ids::SlotId;
use crate::kv::pool::PagePool;
use crate::limits::{PREFIX_LOOKUPS_PER_TURN, UNMEASURED_CHUNK_TOKENS};
use crate::model::forward::batch::{Batch, Logits};
use crate::model::forward::{KvPool, StepEnd};
use crate::sched::config::SchedConfig;
use crate::sched::line::Line;
use crate::sched::mail::Mail;
use crate::sched::slots::{Held, Slots};
use crate::sched::worker::Turn;
use std::ops::Range;
use std::time::Duration;

/// Part of one prompt in a step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Chunk {
    /// Whose.
    pub slot: SlotId,
    /// Which tokens.
    pub tokens: Range<u32>,
    /// Ends with the prompt's last token, whose logits are wanted.
    pub last: bool,
}

/// Prompts that wait, and those of the current step.
#[derive(Debug)]
pub struct Chunks {
    config: SchedConfig,
    line: Line,
    begun: Option<SlotId>,
    picked: Vec<Chunk>,
    pace: Pace,
}

/// What a pick may take.
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    /// Pages that are not promised.
    pub pages: u32,
    /// Prompts that may begin.
    pub prompts: usize,
}

impl Chunks {
    /// For a worker of `slots` slots.
    pub fn new(config: SchedConfig, slots: usize) -> Chunks {
        Chunks {
            config,
            line: Line::new(slots),
            begun: None,
            picked: Vec::with_capacity(config.max_running),
            pace: Pace::default(),
        }
    }

    /// A prompt goes to the end of the line.
    pub fn join(&mut self, slot: SlotId) {
        self.line.join(slot);
    }

    /// A request is over.
    pub fn leave(&mut self, slot: SlotId) {
        self.line.leave(slot);
        if self.begun == Some(slot) {
            self.begun = None;
        }
    }

    /// The parts of the step that ran last; empty when none did.
    pub fn picked(&self) -> &[Chunk] {
        &self.picked
    }

    /// How long `tokens` take at the measured speed.
    pub fn estimate(&self, tokens: u64) -> Option<Duration> {
        self.pace.estimate(tokens)
    }

    /// Fills the turn's batch. `need` gives the pages that a request is promised when it begins.
    pub fn pick<S>(
        &mut self,
        slots: &mut Slots<S>,
        pool: &mut PagePool,
        turn: &mut Turn<'_>,
        allowance: Allowance,
        need: impl Fn(u32, u32) -> u32,
    ) {
        self.picked.clear();
        turn.batch.clear();
        let mut left = self.pace.tokens_in(self.config.chunk_ms).min(self.config.chunk_tokens());
        left = left.max(self.config.page_size);
        if let Some(slot) = self.begun {
            left -= self.add(slot, slots, turn.batch, left);
        }
        let Allowance { mut pages, mut prompts } = allowance;
        let need = |held: &Held<S>| need(held.prompt_tokens(), held.request.max_new);
        let mut lookups = PREFIX_LOOKUPS_PER_TURN;
        while self.begun.is_none()
            && prompts > 0
            && self.picked.len() < self.config.max_running
            && left >= self.config.page_size
        {
            let fits = |slot| slots[slot].fits(need(&slots[slot]), pages, pool, &mut lookups);
            let Some(slot) = self.line.next(fits) else { break };
            prompts -= 1;
            let held = &mut slots[slot];
            let (tokens, taken) = held.take_prompt_pages(need(held), pool, self.config.page_size);
            pages -= taken;
            (held.computed, held.cached) = (tokens, tokens);
            held.request.stamps.admitted = Some(turn.now);
            left -= self.add(slot, slots, turn.batch, left);
        }
    }

    /// Runs what was picked. False when it was stopped, as nobody wants it any more.
    pub fn run<S>(
        &mut self,
        slots: &mut Slots<S>,
        turn: &mut Turn<'_>,
        kv: KvPool<'_>,
        gone: impl Fn(&Slots<S>, &[Chunk], &Mail) -> bool,
    ) -> bool {
        let begin = (turn.clock)();
        if turn.forward(kv, |mail| gone(slots, &self.picked, mail)) == StepEnd::Stopped {
            self.picked.clear();
            return false;
        }
        let end = (turn.clock)();
        self.pace.measure(turn.batch.tokens().len(), end.saturating_duration_since(begin));
        for chunk in &self.picked {
            let held = &mut slots[chunk.slot];
            held.computed = chunk.tokens.end;
            if chunk.last {
                held.request.stamps.filled = Some(end);
            }
        }
        true
    }

    /// Adds the next chunk of at most `left` tokens (a page or more) of a prompt; how many it took.
    fn add<S>(&mut self, slot: SlotId, slots: &Slots<S>, batch: &mut Batch, left: u32) -> u32 {
        let held = &slots[slot];
        let remaining = held.prompt_tokens() - held.computed;
        let last = remaining <= left;
        let taken = if last { remaining } else { left - left % self.config.page_size };
        let tokens = held.computed..held.computed + taken;
        let pages = tokens.end.div_ceil(self.config.page_size) as usize;
        let pushed = batch.push(
            &held.request.prompt[tokens.start as usize..tokens.end as usize],
            tokens.start,
            &held.request.pages[..pages],
            if last { Logits::Last } else { Logits::None },
        );
        assert!(pushed.is_ok(), "a chunk within its bounds does not fit the batch: {pushed:?}");
        self.begun = (!last).then_some(slot);
        self.picked.push(Chunk { slot, tokens, last });
        taken
    }
}

/// Tokens per second of past chunks, the recent ones counting most.
#[derive(Debug, Default)]
struct Pace {
    tokens: f64,
    seconds: f64,
}

/// What a chunk of [`PACE_TOKENS`] or more leaves of the weight of the earlier ones; a smaller one, most of which is the
/// step's own cost, leaves more.
const PACE_MEMORY: f64 = 0.75;
const PACE_TOKENS: f64 = 64.0;

impl Pace {
    fn measure(&mut self, tokens: usize, took: Duration) {
        if took.is_zero() {
            return;
        }
        let weight = (tokens as f64 / PACE_TOKENS).min(1.0);
        let memory = PACE_MEMORY.powf(weight);
        self.tokens = self.tokens * memory + weight * tokens as f64;
        self.seconds = self.seconds * memory + weight * took.as_secs_f64();
    }

    /// Tokens that fit into `ms` milliseconds.
    fn tokens_in(&self, ms: u32) -> u32 {
        if ms == 0 {
            u32::MAX
        } else if self.seconds == 0.0 {
            UNMEASURED_CHUNK_TOKENS
        } else {
            (self.tokens / self.seconds * f64::from(ms) / 1000.0).round() as u32
        }
    }

    fn estimate(&self, tokens: u64) -> Option<Duration> {
        (self.tokens > 0.0)
            .then(|| Duration::try_from_secs_f64(self.seconds / self.tokens * tokens as f64).ok())
            .flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pace_follows_the_machine() {
        let mut pace = Pace::default();
        assert_eq!(pace.tokens_in(50), UNMEASURED_CHUNK_TOKENS);
        assert_eq!(pace.estimate(1), None);
        pace.measure(100, Duration::ZERO);
        assert_eq!(pace.tokens_in(50), UNMEASURED_CHUNK_TOKENS);
        pace.measure(100, Duration::from_millis(100));
        assert_eq!(pace.tokens_in(50), 50);
        assert_eq!(pace.estimate(500), Some(Duration::from_millis(500)));
        (0..40).for_each(|_| pace.measure(100, Duration::from_millis(50)));
        assert!((95..=100).contains(&pace.tokens_in(50)));
        assert_eq!(pace.tokens_in(0), u32::MAX);
    }
}

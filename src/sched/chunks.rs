//! Which part of which prompts is computed next.
//!
//! Owns: the waiting line of prompts, those whose chunks have begun, the measured speed.
//! Invariants: those continue first, one after the other; a chunk that is not the last ends on a page; a prompt gets all
//! its pages with its first chunk, which begins behind what the prefix cache has of it; of what several begin with a pass reads
//! a large part for one of them, and the others begin behind it; a chunk is bounded in tokens
//! and, as far as the past foretells, in time. What was retracted and dropped is computed again in the same way: as a
//! prompt that has its pages and wants no logits, since the token behind it is known.

use crate::ids::SlotId;
use crate::kv::pool::PagePool;
use crate::limits::{
    PACE_TOKENS, PREFIX_LOOKUPS_PER_TURN, SHARED_PART_OF_PASS, SHARED_TOKENS_PER_TURN,
    UNMEASURED_CHUNK_TOKENS,
};
use crate::model::forward::batch::{Batch, Logits};
use crate::model::forward::{KvPool, StepEnd};
use crate::sched::admission::Room;
use crate::sched::config::SchedConfig;
use crate::sched::line::Line;
use crate::sched::mail::Mail;
use crate::sched::mailbox::Outcome;
use crate::sched::pace::Pace;
use crate::sched::running::accept;
use crate::sched::slots::Slots;
use crate::sched::stats::WorkerStats;
use crate::sched::worker::Turn;
use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

/// Part of one prompt in a step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Chunk {
    /// Whose.
    pub slot: SlotId,
    /// Which tokens.
    pub tokens: Range<u32>,
    /// What is to be in place is, behind it. A prompt's last token is in it, whose logits are wanted.
    pub last: bool,
}

/// What a request is after a chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Computed {
    /// To be computed further.
    Part,
    /// In place, with a token to go on from.
    Whole,
    /// At its end with its first token.
    Over(Outcome),
}

/// Prompts that wait, and those of the current step.
#[derive(Debug)]
pub struct Chunks {
    config: SchedConfig,
    line: Line,
    begun: VecDeque<SlotId>,
    picked: Vec<Chunk>,
    pace: Pace,
}

/// What a pick may take.
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    /// Pages.
    pub room: Room,
    /// Prompts that may begin.
    pub prompts: usize,
}

impl Chunks {
    /// For a worker of `slots` slots.
    pub fn new(config: SchedConfig, slots: usize) -> Chunks {
        Chunks {
            config,
            line: Line::new(slots),
            begun: VecDeque::with_capacity(slots),
            picked: Vec::with_capacity(config.max_running),
            pace: Pace::new(PACE_TOKENS),
        }
    }

    /// A prompt goes to the end of the line.
    pub fn join(&mut self, slot: SlotId) {
        self.line.join(slot);
    }

    /// Whether nothing is to be computed.
    pub fn is_empty(&self) -> bool {
        self.line.is_empty() && self.begun.is_empty()
    }

    /// How many wait for their first chunk.
    pub fn waiting(&self) -> usize {
        self.line.len()
    }

    /// How many have begun.
    pub fn begun(&self) -> usize {
        self.begun.len()
    }

    /// One that has its pages is to be computed as far as it is not.
    pub fn go_on(&mut self, slot: SlotId) {
        self.begun.push_back(slot);
    }

    /// A request is over.
    pub fn leave(&mut self, slot: SlotId) {
        self.line.leave(slot);
        self.begun.retain(|&begun| begun != slot);
    }

    /// The parts of the step that ran last; empty when none did.
    pub fn picked(&self) -> &[Chunk] {
        &self.picked
    }

    /// Whether what waits and has begun takes longer than `left`, so that who has come last comes too late. Who has no time
    /// left is late already, and ended for that.
    pub fn is_beyond<S>(&self, slots: &Slots<S>, left: Duration) -> bool {
        let all = self.line.slots().chain(self.begun.iter().copied());
        let tokens = all.map(|slot| u64::from(slots[slot].uncomputed())).sum();
        !left.is_zero() && self.estimate(tokens).is_some_and(|takes| takes > left)
    }

    /// How long `tokens` take at the measured speed.
    pub fn estimate(&self, tokens: u64) -> Option<Duration> {
        self.pace.estimate(tokens as f64)
    }

    /// Fills the turn's batch.
    pub fn pick<S>(
        &mut self,
        slots: &mut Slots<S>,
        pool: &mut PagePool,
        turn: &mut Turn<'_>,
        allowance: Allowance,
    ) {
        self.picked.clear();
        turn.batch.clear();
        let whole =
            self.tokens_in_time().min(self.config.chunk_tokens()).max(self.config.page_size);
        let mut left = whole;
        let mut at = 0;
        while let Some(&slot) = self.begun.get(at)
            && self.has_place(left)
        {
            left -= self.add(slot, slots, turn.batch, left);
            at += 1;
        }
        let Allowance { mut room, mut prompts } = allowance;
        let mut lookups = PREFIX_LOOKUPS_PER_TURN;
        let (mut from, mut compared) =
            (0, if self.config.prefix_cache { SHARED_TOKENS_PER_TURN } else { 0 });
        while at == self.begun.len() && prompts > 0 && self.has_place(left) {
            let least = (whole / SHARED_PART_OF_PASS).max(1);
            let begins = |slot| {
                let held = &slots[slot];
                let is_read_now = |chunk: &Chunk| {
                    if compared == 0 {
                        return false;
                    }
                    let shared =
                        slots[chunk.slot].shares(&chunk.tokens, held, self.config.page_size);
                    compared = compared.saturating_sub(1 + shared);
                    shared >= least
                };
                held.fits(&self.config, &room, pool, &mut lookups)
                    && !self.picked.iter().any(is_read_now)
            };
            let Some(slot) = self.line.next_from(&mut from, begins) else { break };
            prompts -= 1;
            let held = &mut slots[slot];
            let (tokens, taken) = held.take_pages(&self.config, pool);
            room.take(taken);
            (held.computed, held.cached) = (tokens, tokens);
            held.request.stamps.cached = tokens;
            held.request.stamps.admitted = Some(turn.now);
            self.begun.push_back(slot);
            left -= self.add(slot, slots, turn.batch, left);
            at += 1;
        }
    }

    /// Whether a chunk more fits the batch, of which `left` tokens are left.
    fn has_place(&self, left: u32) -> bool {
        self.picked.len() < self.config.max_running && left >= self.config.page_size
    }

    fn tokens_in_time(&self) -> u32 {
        match self.config.chunk_ms {
            0 => u32::MAX,
            ms => {
                let tokens = self.pace.amount_in(Duration::from_millis(ms.into()));
                tokens.map_or(UNMEASURED_CHUNK_TOKENS, |tokens| tokens.round() as u32)
            }
        }
    }

    /// Runs what was picked. False when it was stopped, as nobody wants it any more.
    pub fn run<S>(
        &mut self,
        slots: &mut Slots<S>,
        turn: &mut Turn<'_>,
        kv: KvPool<'_>,
        mut gone: impl FnMut(&mut Slots<S>, &[Chunk], &mut Mail) -> bool,
    ) -> bool {
        let begin = (turn.clock)();
        if turn.forward(kv, |mail| gone(slots, &self.picked, mail)) == StepEnd::Stopped {
            self.picked.clear();
            return false;
        }
        let end = (turn.clock)();
        self.pace.measure(turn.batch.tokens().len() as f64, end.saturating_duration_since(begin));
        for chunk in &self.picked {
            let held = &mut slots[chunk.slot];
            held.computed = chunk.tokens.end;
            if chunk.last {
                self.begun.retain(|&begun| begun != chunk.slot);
                held.request.stamps.filled.get_or_insert(end);
            }
        }
        true
    }

    /// Takes in what a chunk has computed, at a worker that generates: its full pages go into the prefix cache, and a
    /// prompt that is whole gets its first token from the next of the step's `logits`.
    pub fn finish<S>(
        &self,
        chunk: &Chunk,
        logits: &mut usize,
        slots: &mut Slots<S>,
        pool: &mut PagePool,
        stats: &WorkerStats,
        turn: &mut Turn<'_>,
    ) -> Computed {
        let held = &mut slots[chunk.slot];
        held.keep(pool);
        let tokens = chunk.tokens.end - chunk.tokens.start;
        // What was computed again has its next token.
        let is_prompt = held.request.output.is_empty();
        if is_prompt {
            stats.computed(tokens);
            // What the cache had is before the first chunk.
            stats.had(if chunk.tokens.start == held.cached { held.cached } else { 0 });
        } else {
            stats.recomputed(tokens)
        }
        if !chunk.last {
            return Computed::Part;
        }
        if !is_prompt {
            return Computed::Whole;
        }
        let sampled = turn.sample(*logits, &held.request);
        *logits += 1;
        stats.generated(1);
        let outcome = accept(&mut held.request, sampled, turn.mail, turn.clock);
        outcome.map_or(Computed::Whole, Computed::Over)
    }

    /// Adds the next chunk of at most `left` tokens (a page or more) of one that has its pages; how many it took.
    fn add<S>(&mut self, slot: SlotId, slots: &Slots<S>, batch: &mut Batch, left: u32) -> u32 {
        let held = &slots[slot];
        let remaining = held.fill - held.computed;
        let last = remaining <= left;
        let taken = if last { remaining } else { left - left % self.config.page_size };
        let tokens = held.computed..held.computed + taken;
        let pages = tokens.end.div_ceil(self.config.page_size) as usize;
        let wanted =
            if last && held.request.output.is_empty() { Logits::Last } else { Logits::None };
        let parts = held.request.tokens(tokens.clone());
        let pushed = batch.push_joined(parts, tokens.start, &held.request.pages[..pages], wanted);
        assert!(pushed.is_ok(), "a chunk within its bounds does not fit the batch: {pushed:?}");
        self.picked.push(Chunk { slot, tokens, last });
        taken
    }
}

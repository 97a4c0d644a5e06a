//! Selects the prompts, and the part of each, that the next step computes.
//!
//! Owns: the wait queue of prompts, the prompts with a begun chunk, the measured speed.
//! Invariants: begun prompts continue first, in order. A chunk other than the last ends on a page
//! boundary. A prompt gets all its pages with its first chunk, which begins after its cached
//! prefix. A chunk ends where a checkpoint of recurrent state is wanted, if there are pages for it.
//! The pages that no later token sees go back after each chunk. If prompts share a large
//! prefix, one of them computes it, and the others wait and begin behind it. A chunk is bounded in
//! tokens and, by the measured speed, in time. Dropped KV of a retracted request is computed again
//! in the same way. Such a request already has its pages and needs no logits, because its next
//! token is known. A prompt with logprobs needs logits for most of its tokens, and its chunks are
//! bounded by the room for them.

use crate::ids::SlotId;
use crate::kv::pool::PagePool;
use crate::limits::{
    PACE_TOKENS, PREFIX_LOOKUPS_PER_TURN, SHARED_PART_OF_PASS, SHARED_TOKENS_PER_TURN,
    UNMEASURED_CHUNK_TOKENS,
};
use crate::model::forward::batch::{Batch, Logits};
use crate::model::forward::{KvPool, StepEnd};
use crate::sched::admission::PageBudget;
use crate::sched::channel::EngineChannel;
use crate::sched::config::SchedConfig;
use crate::sched::messages::FinishReason;
use crate::sched::request::EngineRequest;
use crate::sched::running_batch::accept;
use crate::sched::slots::{SlotEntry, Slots};
use crate::sched::stats::WorkerStats;
use crate::sched::throughput::Throughput;
use crate::sched::wait_queue::WaitQueue;
use crate::sched::worker::TurnContext;
use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

/// Part of one prompt in a step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Chunk {
    /// The slot of its request.
    pub slot: SlotId,
    /// The range of tokens.
    pub tokens: Range<u32>,
    /// Whether the chunk completes its request. The last chunk of a prompt holds the last token and
    /// produces its logits.
    pub last: bool,
    /// Number of its tokens, from the end, that have logits.
    pub logits: u32,
}

/// The state of a request after a chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Computed {
    /// More chunks are needed.
    Part,
    /// Complete, with a token to continue from.
    Whole,
    /// Ended with its first token.
    Over(FinishReason),
}

/// Waiting prompts, and those of the current step.
#[derive(Debug)]
pub struct ChunkScheduler {
    config: SchedConfig,
    line: WaitQueue,
    begun: VecDeque<SlotId>,
    picked: Vec<Chunk>,
    pace: Throughput,
}

/// The limits of one pick.
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    /// Pages.
    pub room: PageBudget,
    /// Prompts that can begin.
    pub prompts: usize,
}

impl ChunkScheduler {
    /// Makes a scheduler for a worker with `slots` slots.
    pub fn new(config: SchedConfig, slots: usize) -> ChunkScheduler {
        ChunkScheduler {
            config,
            line: WaitQueue::new(slots),
            begun: VecDeque::with_capacity(slots),
            picked: Vec::with_capacity(config.max_running),
            pace: Throughput::new(PACE_TOKENS),
        }
    }

    /// Adds a prompt to the wait queue.
    pub fn join(&mut self, slot: SlotId, priority: i32) {
        self.line.push(slot, priority);
    }

    /// Whether there is nothing to compute.
    pub fn is_empty(&self) -> bool {
        self.line.is_empty() && self.begun.is_empty()
    }

    /// Number of prompts that wait for their first chunk.
    pub fn waiting(&self) -> usize {
        self.line.len()
    }

    /// Number of begun prompts.
    pub fn begun(&self) -> usize {
        self.begun.len()
    }

    /// Adds a request that already has its pages, to compute its missing KV.
    pub fn go_on(&mut self, slot: SlotId) {
        self.begun.push_back(slot);
    }

    /// Removes an ended request.
    pub fn leave(&mut self, slot: SlotId) {
        self.line.remove(slot);
        self.begun.retain(|&begun| begun != slot);
    }

    /// The chunks of the last step; empty if none ran.
    pub fn picked(&self) -> &[Chunk] {
        &self.picked
    }

    /// Whether a waiting request would be too late: it and all work before it take longer than
    /// `left`. If no time is left, it returns false, because other code ends such a request.
    pub fn is_beyond<S>(&self, slots: &Slots<S>, slot: SlotId, left: Duration) -> bool {
        let before = self.line.iter().take_while(|&other| other != slot);
        let all = before.chain([slot]).chain(self.begun.iter().copied());
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
        turn: &mut TurnContext<'_>,
        allowance: Allowance,
    ) {
        self.picked.clear();
        turn.batch.clear();
        let whole =
            self.tokens_in_time().min(self.config.chunk_tokens()).max(self.config.page_size);
        let mut left = whole;
        let Allowance { mut room, mut prompts } = allowance;
        let mut at = 0;
        while let Some(&slot) = self.begun.get(at)
            && self.has_place(left)
            && has_logits(&slots[slot], turn.batch, self.config.page_size)
        {
            left -= self.add((slot, left), slots, (pool, &mut room), turn.batch);
            at += 1;
        }
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
                    let (shared, tokens) =
                        slots[chunk.slot].shares(&chunk.tokens, held, &self.config);
                    compared = compared.saturating_sub(1 + tokens);
                    shared >= least
                };
                has_logits(held, turn.batch, self.config.page_size)
                    && held.fits(&self.config, &room, pool, &mut lookups)
                    && !self.picked.iter().any(is_read_now)
            };
            let Some(slot) = self.line.pop_fitting_from(&mut from, begins) else { break };
            prompts -= 1;
            let held = &mut slots[slot];
            let (tokens, taken) = held.take_pages(&self.config, &room, pool);
            room.take_pages(taken);
            (held.computed, held.cached) = (tokens, tokens);
            held.request.stamps.cached = tokens;
            held.request.stamps.admitted = Some(turn.now);
            self.begun.push_back(slot);
            left -= self.add((slot, left), slots, (pool, &mut room), turn.batch);
            at += 1;
        }
    }

    /// Whether one more chunk fits the batch, with `left` tokens left.
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

    /// Runs the picked chunks. Returns false if the step was stopped because all its requests are
    /// gone.
    pub fn run<S>(
        &mut self,
        slots: &mut Slots<S>,
        turn: &mut TurnContext<'_>,
        kv: KvPool<'_>,
        mut gone: impl FnMut(&mut Slots<S>, &[Chunk], &mut EngineChannel) -> bool,
    ) -> bool {
        let begin = (turn.clock)();
        if turn.forward(kv, |channel| gone(slots, &self.picked, channel)) == StepEnd::Stopped {
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

    /// Records the result of a chunk, at a worker that generates tokens. Full pages go into the
    /// prefix cache. A complete prompt gets its first token from the step's next `logits`.
    pub fn finish<S>(
        &self,
        chunk: &Chunk,
        logits: &mut usize,
        slots: &mut Slots<S>,
        pool: &mut PagePool,
        stats: &WorkerStats,
        turn: &mut TurnContext<'_>,
    ) -> Computed {
        let held = &mut slots[chunk.slot];
        held.end_chunk(&self.config, pool);
        let tokens = chunk.tokens.end - chunk.tokens.start;
        // A recomputed request already has its next token.
        let is_prompt = held.request.output.is_empty();
        if is_prompt {
            stats.computed(tokens);
            // The cached prefix counts once, at the first chunk.
            stats.had(if chunk.tokens.start == held.cached { held.cached } else { 0 });
        } else {
            stats.recomputed(tokens)
        }
        let next = score_chunk(chunk, logits, &mut held.request, turn);
        if !chunk.last {
            return Computed::Part;
        }
        if !is_prompt {
            return Computed::Whole;
        }
        let sampled = turn.sample_first(next, &held.request);
        stats.generated(1);
        let outcome = accept(&mut held.request, sampled, turn);
        outcome.map_or(Computed::Whole, Computed::Over)
    }

    /// Adds the next chunk of a request that has its pages. The chunk has at most `left` tokens,
    /// which are at least a page. It leaves a checkpoint at its end if `room` has the pages.
    /// Returns the number of tokens.
    fn add<S>(
        &mut self,
        (slot, left): (SlotId, u32),
        slots: &mut Slots<S>,
        (pool, room): (&mut PagePool, &mut PageBudget),
        batch: &mut Batch,
    ) -> u32 {
        let held = &mut slots[slot];
        let checkpoint = held
            .checkpoint_ahead(&self.config)
            .filter(|_| room.pages >= self.config.origin_pages());
        let left = checkpoint.map_or(left, |ahead| left.min(ahead));
        let remaining = held.fill - held.computed;
        // Pages before the first token with a logprob. The logits at a position are for the token
        // at the next one.
        let before = held.request.next_scored().map(|at| {
            let tokens = (at - 1).saturating_sub(held.computed);
            tokens - tokens % self.config.page_size
        });
        let most = match before {
            None => left,
            Some(0) => left.min(room_for_logprobs(batch) as u32),
            Some(before) => left.min(before),
        };
        let last = remaining <= most;
        let taken = if last { remaining } else { most - most % self.config.page_size };
        let tokens = held.computed..held.computed + taken;
        let pages = tokens.end.div_ceil(self.config.page_size) as usize;
        let wanted = match before {
            Some(0) => Logits::All,
            _ if last && held.request.output.is_empty() => Logits::Last,
            _ => Logits::None,
        };
        if checkpoint == Some(taken) {
            held.request.pages.begin_checkpoint(pool);
            room.take_pages(self.config.origin_pages());
        }
        let free = batch.free_logits();
        let seen = held.request.pages.set_state_tokens(tokens.end);
        let parts = held.request.tokens(tokens.clone());
        let sequence = &held.request.pages;
        let (pages, state) = (sequence.up_to(pages), sequence.state(seen));
        let pushed = batch.push_joined(parts, tokens.start, (pages, state), wanted);
        assert!(pushed.is_ok(), "a chunk within its bounds does not fit the batch: {pushed:?}");
        let logits = (free - batch.free_logits()) as u32;
        self.picked.push(Chunk { slot, tokens, last, logits });
        taken
    }
}

/// Whether the batch has room for the logits of the next chunk of a request. There is always room
/// for those of its last token.
fn has_logits<S>(held: &SlotEntry<S>, batch: &Batch, page_size: u32) -> bool {
    let is_scored = held.request.next_scored().is_some();
    !is_scored || room_for_logprobs(batch) >= page_size as usize
}

/// Logits that no other row can need for its last token.
fn room_for_logprobs(batch: &Batch) -> usize {
    let others = batch.limits().rows - batch.rows().len();
    batch.free_logits().saturating_sub(others)
}

/// Takes the logits of a chunk of a prompt: the next ones of the step. Records the logprobs that
/// its request wants. Returns the index of the chunk's last logits.
pub fn score_chunk(
    chunk: &Chunk,
    logits: &mut usize,
    request: &mut EngineRequest,
    turn: &mut TurnContext<'_>,
) -> usize {
    let from = *logits;
    *logits += chunk.logits as usize;
    if let Some(mut scored) = request.prompt_logprobs.take() {
        let start = chunk.tokens.end - chunk.logits;
        while !scored.is_complete() && scored.next_position() <= chunk.tokens.end {
            let at = scored.next_position();
            debug_assert!(at > start, "logits of a position were not computed");
            let index = from + (at - 1 - start) as usize;
            scored.push(&turn.score(index, request.prompt[at as usize], scored.top()));
        }
        request.prompt_logprobs = Some(scored);
    }
    logits.saturating_sub(1)
}

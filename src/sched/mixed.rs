//! The mixed worker: reads prompts and runs on from them over one pool, without a hand-off.
//!
//! Life of a request here: waiting line → chunks → running batch → over. Each turn computes a prefill chunk,
//! then a decode step, so that a long prompt does not stall the streams for longer than a chunk.
//! Not here: picking chunks (`chunks`), what fits (`admission`), the batch (`running`).

use crate::cause::Cause;
use crate::ids::{SlotId, WorkerId};
use crate::kv::pool::PagePool;
use crate::sched::admission;
use crate::sched::chunks::{Allowance, Chunks};
use crate::sched::config::SchedConfig;
use crate::sched::mail::Mail;
use crate::sched::mailbox::{Command, Event, Outcome};
use crate::sched::request::Request;
use crate::sched::running::{Running, accept};
use crate::sched::slots::{Held, Slots, refuse};
use crate::sched::stats::{Census, WorkerStats};
use crate::sched::worker::{Activity, KvMemory, Turn, Worker};
use std::sync::Arc;
use std::time::Instant;

/// A mixed worker.
pub struct MixedWorker {
    id: WorkerId,
    config: SchedConfig,
    kv: KvMemory,
    pool: PagePool,
    slots: Slots<Stage>,
    chunks: Chunks,
    running: Running,
    stats: Arc<WorkerStats>,
}

/// In order of life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// In line for its first chunk.
    Waiting,
    /// Pages are there, chunks are computed.
    Prompt,
    /// In the batch.
    Running,
}

impl MixedWorker {
    /// A worker over an empty pool, of `slots` requests at a time.
    pub fn new(id: WorkerId, config: SchedConfig, kv: KvMemory, slots: usize) -> MixedWorker {
        MixedWorker {
            id,
            config,
            pool: config.pool(kv.pages),
            stats: Arc::new(WorkerStats::new(kv.pages)),
            kv,
            slots: Slots::new(slots),
            chunks: Chunks::new(config, slots),
            running: Running::new(config.max_running),
        }
    }

    /// Its figures.
    pub fn stats(&self) -> &Arc<WorkerStats> {
        &self.stats
    }

    fn submit(&mut self, request: Box<Request>, mail: &mut Mail) {
        let slot = request.slot;
        let fits = admission::fits_empty(&self.config, self.kv.pages, &request);
        if let Err(request) = self.slots.insert(request, Stage::Waiting) {
            refuse(request, mail);
        } else if fits {
            self.slots[slot].foresee(&self.pool, self.config.page_size);
            self.chunks.join(slot);
        } else {
            self.finish(slot, Outcome::Failed(Cause::Refused), mail);
        }
    }

    fn end_overdue(&mut self, now: Instant, mail: &mut Mail) {
        let mut from = 0;
        while let Some(slot) = self.slots.next_from(from) {
            from = slot.0 + 1;
            if now >= self.slots[slot].request.deadline {
                self.finish(slot, Outcome::Failed(Cause::Deadline), mail);
            }
        }
    }

    /// Computes one batch of chunks. False when there was nothing to compute.
    fn run_chunks(&mut self, turn: &mut Turn<'_>) -> bool {
        let allowance = self.allowance();
        let page_size = self.config.page_size;
        let need = |prompt, max_new| admission::need(page_size, prompt, max_new);
        self.chunks.pick(&mut self.slots, &mut self.pool, turn, allowance, need);
        if self.chunks.picked().is_empty() {
            return false;
        }
        for chunk in self.chunks.picked() {
            self.slots[chunk.slot].state = Stage::Prompt;
        }
        let id = self.id;
        let completed = self.chunks.run(&mut self.slots, turn, self.kv.pool(), |slots, chunks, mail| {
            chunks.iter().all(|chunk| mail.aborts(id, chunk.slot, slots[chunk.slot].request.generation))
        });
        if completed {
            self.use_chunks(turn);
        }
        true
    }

    /// What running requests and begun prompts leave.
    fn allowance(&self) -> Allowance {
        let (mut promised, mut places) = (0, self.config.max_running);
        for held in self.slots.iter().filter(|held| held.state != Stage::Waiting) {
            let need = admission::need(self.config.page_size, held.prompt_tokens(), held.request.max_new);
            promised += admission::promised(need, held.request.pages.len() as u32);
            places -= 1;
        }
        let counts = self.pool.counts();
        let pages = admission::allocatable(counts.free, counts.cached, promised);
        Allowance { pages, prompts: places }
    }

    /// Prompts that are complete get their first token and join the batch.
    fn use_chunks(&mut self, turn: &mut Turn<'_>) {
        let mut logits = 0;
        for index in 0..self.chunks.picked().len() {
            let chunk = self.chunks.picked()[index].clone();
            self.slots[chunk.slot].keep(&mut self.pool);
            self.stats.computed(chunk.tokens.end - chunk.tokens.start);
            if !chunk.last {
                continue;
            }
            let Held { request, state, .. } = &mut self.slots[chunk.slot];
            let sampled = turn.sample(logits, request);
            logits += 1;
            self.stats.generated(1);
            match accept(request, sampled, turn.mail, turn.clock) {
                Some(outcome) => self.finish(chunk.slot, outcome, turn.mail),
                None => {
                    *state = Stage::Running;
                    self.running.join(chunk.slot, request, (turn.clock)());
                }
            }
        }
    }

    fn run_batch(&mut self, turn: &mut Turn<'_>) -> bool {
        let ran = self.running.step(self.id, &mut self.slots, &mut self.pool, &self.kv, turn);
        while let Some((slot, outcome)) = self.running.next_ended() {
            self.finish(slot, outcome, turn.mail);
        }
        self.stats.generated(ran.unwrap_or(0));
        ran.is_some()
    }

    fn finish(&mut self, slot: SlotId, outcome: Outcome, mail: &mut Mail) {
        self.chunks.leave(slot);
        self.running.leave(slot);
        self.slots[slot].finish(outcome, &mut self.pool, mail);
        self.slots.let_go(slot, mail);
    }

    fn publish(&self) {
        let mut census = Census::default();
        for held in self.slots.iter() {
            match held.state {
                Stage::Waiting => census.waiting += 1,
                Stage::Prompt | Stage::Running => census.running += 1,
            }
            census.waiting_tokens += u64::from(held.uncomputed());
        }
        self.stats.publish(&self.pool, census);
    }
}

impl Worker for MixedWorker {
    fn id(&self) -> WorkerId {
        self.id
    }

    fn slots(&self) -> usize {
        self.slots.capacity()
    }

    fn take(&mut self, command: Command, _now: Instant, mail: &mut Mail) {
        match command {
            Command::Submit(request) => self.submit(request, mail),
            Command::Abort { slot, generation, cause, .. } => {
                if self.slots.named(slot, generation).is_some() {
                    self.finish(slot, Outcome::Failed(cause), mail);
                }
            }
            Command::Flush { worker } => mail.tell(Event::Flushed { worker, pages: self.pool.flush() }),
            Command::Granted { .. } | Command::SessionReady { .. } => {
                debug_assert!(false, "a mixed worker hands nothing over");
            }
        }
    }

    fn step(&mut self, turn: &mut Turn<'_>) -> Activity {
        self.end_overdue(turn.now, turn.mail);
        let prefilled = self.run_chunks(turn);
        let decoded = self.run_batch(turn);
        self.publish();
        if cfg!(debug_assertions) {
            self.pool.invariants();
        }
        self.slots.activity(prefilled || decoded)
    }
}

//! The mixed worker: computes prompts and generates from them over one pool, without a hand-off.
//!
//! A request passes through the wait queue, chunks and the running batch. Each turn computes a
//! prefill chunk, then a decode step, so a long prompt stalls the streams for one chunk at most. A
//! retracted request keeps its place in the batch. If its KV was dropped, chunks compute it again.
//! Not here: picking chunks (`chunks`), admission (`admission`), the batch (`running_batch`), the
//! choice to retract (`retraction`).

use crate::cause::Cause;
use crate::ids::{SlotId, WorkerId};
use crate::kv::pool::PagePool;
use crate::kv::tier::Tier;
use crate::sched::admission::{self, Claim, Claims};
use crate::sched::channel::EngineChannel;
use crate::sched::chunks::{Allowance, ChunkScheduler, Computed};
use crate::sched::config::SchedConfig;
use crate::sched::messages::{EngineCommand, FinishReason, RequestEvent};
use crate::sched::request::EngineRequest;
use crate::sched::retraction::Retraction;
use crate::sched::running_batch::Running;
use crate::sched::slots::{Slots, refuse};
use crate::sched::stats::{Census, WorkerStats};
use crate::sched::worker::{Activity, KvMemory, TurnContext, Worker};
use crate::transfer::answer::TransferAnswer;
use std::sync::Arc;
use std::time::Instant;

/// A mixed worker.
pub struct MixedWorker {
    id: WorkerId,
    config: SchedConfig,
    kv: KvMemory,
    pool: PagePool,
    slots: Slots<Stage>,
    chunks: ChunkScheduler,
    running: Running,
    retraction: Retraction,
    stats: Arc<WorkerStats>,
}

/// Stages in order of a request's life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// In the queue for its first chunk.
    Waiting,
    /// Has pages; chunks are computed.
    Prompt,
    /// In the batch.
    Running,
    /// It was in the batch, but other requests needed its pages.
    Retracted,
}

impl MixedWorker {
    /// Makes a worker with an empty pool and an empty tier, for `slots` requests at a time.
    pub fn new(
        id: WorkerId,
        config: SchedConfig,
        kv: KvMemory,
        tier: Tier,
        slots: usize,
    ) -> MixedWorker {
        MixedWorker {
            id,
            config,
            pool: config.pool(kv.pages),
            stats: Arc::new(WorkerStats::new(kv.pages)),
            kv,
            slots: Slots::new(slots),
            chunks: ChunkScheduler::new(config, slots),
            running: Running::new(config),
            retraction: Retraction::new(slots, tier),
        }
    }

    /// Its statistics.
    pub fn stats(&self) -> &Arc<WorkerStats> {
        &self.stats
    }

    /// Queues a new request. Refuses it if it can never run, or if its deadline would pass before
    /// its turn.
    fn submit(&mut self, request: Box<EngineRequest>, now: Instant, channel: &mut EngineChannel) {
        let (slot, left) = (request.slot, request.deadline.saturating_duration_since(now));
        let fits = admission::fits_empty(&self.config, self.kv.pages, &request);
        if let Err(request) = self.slots.insert(request, Stage::Waiting) {
            return refuse(request, channel);
        }
        if !fits {
            return self.finish(slot, FinishReason::Failed(Cause::Refused), channel);
        }
        self.slots[slot].foresee(&self.config, &self.pool);
        self.chunks.join(slot, self.slots[slot].request.priority);
        if self.is_full() || self.chunks.is_beyond(&self.slots, slot, left) {
            self.finish(slot, FinishReason::Failed(Cause::Overloaded), channel);
        }
    }

    /// Whether more requests wait than allowed.
    fn is_full(&self) -> bool {
        let Allowance { room, prompts: mut places } = self.allowance();
        let takes_place = |_: &_| places.checked_sub(1).inspect(|left| places = *left).is_some();
        self.slots.overflow(&self.config, room, |held| held.state == Stage::Waiting, takes_place)
    }

    fn end_overdue(&mut self, now: Instant, channel: &mut EngineChannel) {
        let mut from = 0;
        while let Some(slot) = self.slots.next_from(from) {
            from = slot.0 + 1;
            if now >= self.slots[slot].request.deadline {
                self.finish(slot, FinishReason::Failed(Cause::Deadline), channel);
            }
        }
    }

    /// Computes one batch of chunks. Returns false if there was nothing to compute.
    fn run_chunks(&mut self, turn: &mut TurnContext<'_>) -> bool {
        let allowance = self.allowance();
        self.chunks.pick(&mut self.slots, &mut self.pool, turn, allowance);
        if self.chunks.picked().is_empty() {
            return false;
        }
        for chunk in self.chunks.picked() {
            self.slots[chunk.slot].state = Stage::Prompt;
        }
        let id = self.id;
        let completed =
            self.chunks.run(&mut self.slots, turn, self.kv.pool(), |slots, chunks, channel| {
                chunks.iter().all(|chunk| {
                    channel.aborts(id, chunk.slot, slots[chunk.slot].request.generation)
                })
            });
        if completed {
            self.use_chunks(turn);
        }
        true
    }

    /// The pages that all requests need.
    fn claims(&self) -> Claims {
        let mut claims = Claims::default();
        for held in self.slots.iter() {
            let claim = Claim::of(&self.config, &held.request, &self.pool);
            match held.state {
                Stage::Waiting => {}
                Stage::Prompt | Stage::Running => claims.hold(claim),
                Stage::Retracted => claims.retract(held.need(&self.config)),
            }
        }
        claims
    }

    /// The pages and places left for new requests.
    fn allowance(&self) -> Allowance {
        let taken = self.slots.iter().filter(|held| held.state != Stage::Waiting).count();
        let room = self.claims().budget_for_new(self.pool.counts());
        Allowance { room, prompts: self.config.max_running - taken }
    }

    /// Gives a retracted request pages again, if there are pages. At most one in a turn, because
    /// the turn copies its KV.
    fn resume(&mut self, now: Instant) {
        if self.retraction.is_empty() {
            return;
        }
        let room = self.claims().budget_for_retracted(self.pool.counts());
        let (slots, pool) = (&mut self.slots, &mut self.pool);
        let Some(slot) = self.retraction.resume(slots, &room, &self.config, pool, &self.kv) else {
            return;
        };
        self.stats.resumed();
        if self.slots[slot].is_filled() {
            self.join(slot, now);
        } else {
            self.slots[slot].state = Stage::Prompt;
            self.chunks.go_on(slot);
        }
    }

    fn join(&mut self, slot: SlotId, now: Instant) {
        let held = &mut self.slots[slot];
        held.state = Stage::Running;
        self.running.join(slot, &mut held.request, now);
    }

    /// Adds requests with complete KV to the batch. A prompt also gets its first token.
    fn use_chunks(&mut self, turn: &mut TurnContext<'_>) {
        let mut logits = 0;
        for index in 0..self.chunks.picked().len() {
            let chunk = self.chunks.picked()[index].clone();
            match self.chunks.finish(
                &chunk,
                &mut logits,
                &mut self.slots,
                &mut self.pool,
                &self.stats,
                turn,
            ) {
                Computed::Part => {}
                Computed::Whole => self.join(chunk.slot, (turn.clock)()),
                Computed::Over(outcome) => self.finish(chunk.slot, outcome, turn.channel),
            }
        }
    }

    /// Retracts requests from the batch if the pool has too few pages for the next step.
    fn retract_requests(&mut self, turn: &TurnContext<'_>) {
        let recompute = |tokens| self.chunks.estimate(tokens);
        let (running, slots, pool) = (&mut self.running, &mut self.slots, &mut self.pool);
        while let Some(slot) =
            self.retraction.retract_one(running, slots, pool, &self.kv, recompute, turn.clock)
        {
            slots[slot].state = Stage::Retracted;
            self.stats.retracted();
        }
    }

    fn run_batch(&mut self, turn: &mut TurnContext<'_>) -> bool {
        self.retract_requests(turn);
        let ran = self.running.step(self.id, &mut self.slots, &mut self.pool, &self.kv, turn);
        while let Some((slot, outcome)) = self.running.next_ended() {
            self.finish(slot, outcome, turn.channel);
        }
        self.stats.generated(ran.unwrap_or(0));
        ran.is_some()
    }

    fn finish(&mut self, slot: SlotId, outcome: FinishReason, channel: &mut EngineChannel) {
        self.chunks.leave(slot);
        self.running.leave(slot);
        self.retraction.leave(slot, &mut self.slots[slot]);
        self.slots[slot].finish(outcome, &mut self.pool, channel);
        self.slots.let_go(slot, channel);
    }

    fn publish(&self) {
        let mut census = Census::default();
        for held in self.slots.iter() {
            match held.state {
                Stage::Waiting => census.waiting += 1,
                Stage::Prompt | Stage::Running => census.running += 1,
                Stage::Retracted => census.retracted += 1,
            }
            // For a retracted request the number of tokens to recompute is not known yet.
            if held.state != Stage::Retracted {
                census.waiting_tokens += u64::from(held.uncomputed());
            }
        }
        census.swapped = self.retraction.stored();
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

    fn pool(&self) -> &PagePool {
        &self.pool
    }

    fn handle_command(
        &mut self,
        command: EngineCommand,
        now: Instant,
        channel: &mut EngineChannel,
    ) {
        match command {
            EngineCommand::Submit(request) => self.submit(request, now, channel),
            EngineCommand::Answer(TransferAnswer::Abort { slot, generation, cause, .. }) => {
                if self.slots.find_mut(slot, generation).is_some() {
                    self.finish(slot, FinishReason::Failed(cause), channel);
                }
            }
            EngineCommand::Flush { worker } => {
                channel.send_event(RequestEvent::Flushed { worker, pages: self.pool.flush() })
            }
            EngineCommand::Answer(_) => {
                debug_assert!(false, "a mixed worker has no hand-offs");
            }
        }
    }

    fn step(&mut self, turn: &mut TurnContext<'_>) -> Activity {
        self.end_overdue(turn.now, turn.channel);
        self.resume(turn.now);
        let prefilled = self.run_chunks(turn);
        let decoded = self.run_batch(turn);
        self.publish();
        self.slots.activity(prefilled || decoded)
    }
}

//! The mixed worker: reads prompts and runs on from them over one pool, without a hand-off.
//!
//! Life of a request here: waiting line → chunks → running batch → over. Each turn computes a prefill chunk,
//! then a decode step, so that a long prompt does not stall the streams for longer than a chunk. From the batch a request
//! may be retracted; it keeps its place there, and comes back at once or by way of chunks.
//! Not here: picking chunks (`chunks`), what fits (`admission`), the batch (`running`), who gives up its pages
//! (`retraction`).

use crate::cause::Cause;
use crate::ids::{SlotId, WorkerId};
use crate::kv::pool::PagePool;
use crate::kv::tier::Tier;
use crate::sched::admission::{self, Claim, Claims};
use crate::sched::chunks::{Allowance, Chunks, Computed};
use crate::sched::config::SchedConfig;
use crate::sched::mail::Mail;
use crate::sched::mailbox::{Command, Event, Outcome};
use crate::sched::request::Request;
use crate::sched::retraction::Retraction;
use crate::sched::running::Running;
use crate::sched::slots::{Slots, refuse};
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
    retraction: Retraction,
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
    /// Was in the batch, until others needed its pages.
    Retracted,
}

impl MixedWorker {
    /// A worker over an empty pool and an empty tier, of `slots` requests at a time.
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
            chunks: Chunks::new(config, slots),
            running: Running::new(config.max_running),
            retraction: Retraction::new(slots, tier),
        }
    }

    /// Its figures.
    pub fn stats(&self) -> &Arc<WorkerStats> {
        &self.stats
    }

    /// A newcomer gets in line, unless it can never run, or its deadline would pass before its turn.
    fn submit(&mut self, request: Box<Request>, now: Instant, mail: &mut Mail) {
        let (slot, left) = (request.slot, request.deadline.saturating_duration_since(now));
        let fits = admission::fits_empty(&self.config, self.kv.pages, &request);
        if let Err(request) = self.slots.insert(request, Stage::Waiting) {
            return refuse(request, mail);
        }
        if !fits {
            return self.finish(slot, Outcome::Failed(Cause::Refused), mail);
        }
        self.slots[slot].foresee(&self.pool, self.config.page_size);
        self.chunks.join(slot);
        if self.is_full() || self.chunks.is_beyond(&self.slots, left) {
            self.finish(slot, Outcome::Failed(Cause::Overloaded), mail);
        }
    }

    /// Whether more wait than may.
    fn is_full(&self) -> bool {
        let Allowance { room, prompts: mut places } = self.allowance();
        let takes_place = |_: &_| places.checked_sub(1).inspect(|left| places = *left).is_some();
        self.slots.overflow(&self.config, room, |held| held.state == Stage::Waiting, takes_place)
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
        self.chunks.pick(&mut self.slots, &mut self.pool, turn, allowance);
        if self.chunks.picked().is_empty() {
            return false;
        }
        for chunk in self.chunks.picked() {
            self.slots[chunk.slot].state = Stage::Prompt;
        }
        let id = self.id;
        let completed =
            self.chunks.run(&mut self.slots, turn, self.kv.pool(), |slots, chunks, mail| {
                chunks
                    .iter()
                    .all(|chunk| mail.aborts(id, chunk.slot, slots[chunk.slot].request.generation))
            });
        if completed {
            self.use_chunks(turn);
        }
        true
    }

    /// What all want of the pool.
    fn claims(&self) -> Claims {
        let mut claims = Claims::default();
        for held in self.slots.iter() {
            let claim = Claim::of(&self.config, &held.request);
            match held.state {
                Stage::Waiting => {}
                Stage::Prompt | Stage::Running => claims.hold(claim),
                Stage::Retracted => claims.retract(claim),
            }
        }
        claims
    }

    /// What is left for newcomers.
    fn allowance(&self) -> Allowance {
        let taken = self.slots.iter().filter(|held| held.state != Stage::Waiting).count();
        let room = self.claims().room_for_newcomers(self.pool.counts());
        Allowance { room, prompts: self.config.max_running - taken }
    }

    /// One that was retracted gets pages again, if there are: one a turn, since its KV is copied meanwhile.
    fn resume(&mut self, now: Instant) {
        if self.retraction.is_empty() {
            return;
        }
        let room = self.claims().room_for_retracted(self.pool.counts());
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

    /// What is complete joins the batch, a prompt with its first token.
    fn use_chunks(&mut self, turn: &mut Turn<'_>) {
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
                Computed::Over(outcome) => self.finish(chunk.slot, outcome, turn.mail),
            }
        }
    }

    /// Where the pool has too few pages for the next step of all, some leave the batch.
    fn make_room(&mut self, turn: &Turn<'_>) {
        let recompute = |tokens| self.chunks.estimate(tokens);
        let (running, slots, pool) = (&mut self.running, &mut self.slots, &mut self.pool);
        while let Some(slot) =
            self.retraction.make_room(running, slots, pool, &self.kv, recompute, turn.clock)
        {
            slots[slot].state = Stage::Retracted;
            self.stats.retracted();
        }
    }

    fn run_batch(&mut self, turn: &mut Turn<'_>) -> bool {
        self.make_room(turn);
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
        self.retraction.leave(slot, &mut self.slots[slot]);
        self.slots[slot].finish(outcome, &mut self.pool, mail);
        self.slots.let_go(slot, mail);
    }

    fn publish(&self) {
        let mut census = Census::default();
        for held in self.slots.iter() {
            match held.state {
                Stage::Waiting => census.waiting += 1,
                Stage::Prompt | Stage::Running => census.running += 1,
                Stage::Retracted => census.retracted += 1,
            }
            // Nobody knows yet how much of it is to be computed again.
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

    fn take(&mut self, command: Command, now: Instant, mail: &mut Mail) {
        match command {
            Command::Submit(request) => self.submit(request, now, mail),
            Command::Abort { slot, generation, cause, .. } => {
                if self.slots.named(slot, generation).is_some() {
                    self.finish(slot, Outcome::Failed(cause), mail);
                }
            }
            Command::Flush { worker } => {
                mail.tell(Event::Flushed { worker, pages: self.pool.flush() })
            }
            Command::Granted { .. } | Command::Awaited { .. } | Command::SessionReady { .. } => {
                debug_assert!(false, "a mixed worker hands nothing over");
            }
        }
    }

    fn step(&mut self, turn: &mut Turn<'_>) -> Activity {
        self.end_overdue(turn.now, turn.mail);
        self.resume(turn.now);
        let prefilled = self.run_chunks(turn);
        let decoded = self.run_batch(turn);
        self.publish();
        if cfg!(debug_assertions) {
            self.pool.invariants();
        }
        self.slots.activity(prefilled || decoded)
    }
}

//! The decode worker: receives KV and continues from the first token.
//!
//! A request waits for `SessionReady`, then in the preallocation queue. With leased pages it waits
//! for its transfer and polls the status table. After arrival it reports its first token and waits
//! for a place in the batch, without a forward pass over its prompt. A retracted request returns to
//! the batch before any new request. If its KV was dropped, chunks compute it again. The prompt of
//! a request without a prefill worker is computed here, in chunks. Mirrors [`super::prefill`].
//! Not here: admission (`admission`), the batch (`running_batch`), the choice to retract
//! (`retraction`), moving bytes (`transfer`).

use crate::cause::Cause;
use crate::ids::{Generation, SlotId, WorkerId};
use crate::kv::pool::PagePool;
use crate::kv::tier::Tier;
use crate::limits::PREFIX_LOOKUPS_PER_TURN;
use crate::sched::admission::{self, Claim, Claims, PageBudget};
use crate::sched::channel::EngineChannel;
use crate::sched::chunks::{Allowance, ChunkScheduler, Computed};
use crate::sched::config::SchedConfig;
use crate::sched::first_token::FirstTokenRecord;
use crate::sched::messages::{EngineCommand, FinishReason, RequestEvent, TransferEvent};
use crate::sched::request::EngineRequest;
use crate::sched::retraction::Retraction;
use crate::sched::running_batch::{Running, accept};
use crate::sched::slots::{LeaseState, SlotEntry, Slots, refuse};
use crate::sched::stats::{Census, WorkerStats};
use crate::sched::wait_queue::WaitQueue;
use crate::sched::worker::{Activity, KvMemory, TurnContext, Worker, WriteLease};
use crate::stdx::failpoint::is_failpoint_active;
use crate::transfer::answer::TransferAnswer;
use crate::transfer::aux::AuxRecord;
use crate::transfer::handle::DestinationHandle;
use crate::transfer::status::State;
use crate::transfer::target::SessionId;
use std::sync::Arc;
use std::time::Instant;

/// A decode worker.
pub struct DecodeWorker {
    id: WorkerId,
    config: SchedConfig,
    kv: KvMemory,
    pool: PagePool,
    transfers: DestinationHandle,
    slots: Slots<Decode>,
    /// Preallocation queue.
    line: WaitQueue,
    /// Arrived requests that wait for a place in the batch.
    arrived: WaitQueue,
    running: Running,
    retraction: Retraction,
    /// Work computed here: prompts without a prefill worker, and dropped KV.
    chunks: ChunkScheduler,
    /// The next free place goes to a prompt, not to a transferred request.
    is_prompts_turn: bool,
    stats: Arc<WorkerStats>,
}

/// Additional state of a request.
#[derive(Debug)]
struct Decode {
    stage: Stage,
    session: Option<SessionId>,
    lease: LeaseState,
    /// Number of its first pages that come from the prefix cache, or that it never reads. The lease
    /// covers the pages behind them.
    prefix: usize,
    /// The first page of window groups that it reads.
    window_from: usize,
    /// The aux record that came with the KV.
    aux: Option<AuxRecord>,
}

/// Stages in order of a request's life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// No session to its prefill worker yet.
    Connecting,
    /// In the queue for pages.
    Waiting,
    /// Pages are leased, KV is in transfer.
    Transferring,
    /// KV and first token are here; the batch is full.
    Arrived,
    /// In the batch.
    Running,
    /// It was in the batch, but other requests needed its pages.
    Retracted,
    /// Without a prefill worker, in the queue for its first chunk.
    Unread,
    /// Has pages; their KV is computed here.
    Computing,
    /// Finished was sent, but the mover can still have the lease.
    Over,
}

impl DecodeWorker {
    /// Makes a worker with an empty pool and an empty tier. The handle owns status table and
    /// rings.
    pub fn new(
        id: WorkerId,
        config: SchedConfig,
        kv: KvMemory,
        tier: Tier,
        transfers: DestinationHandle,
    ) -> DecodeWorker {
        let slots = transfers.status.slots();
        DecodeWorker {
            id,
            config,
            pool: config.pool(kv.pages),
            stats: Arc::new(WorkerStats::new(kv.pages)),
            kv,
            transfers,
            slots: Slots::new(slots),
            line: WaitQueue::new(slots),
            arrived: WaitQueue::new(slots),
            running: Running::new(config),
            retraction: Retraction::new(slots, tier),
            chunks: ChunkScheduler::new(config, slots),
            is_prompts_turn: false,
        }
    }

    /// Its statistics.
    pub fn stats(&self) -> &Arc<WorkerStats> {
        &self.stats
    }

    fn submit(&mut self, request: Box<EngineRequest>, now: Instant, channel: &mut EngineChannel) {
        let slot = request.slot;
        let fits = admission::fits_empty(&self.config, self.kv.pages, &request);
        let stage = if request.alone { Stage::Unread } else { Stage::Connecting };
        let state = Decode {
            stage,
            session: None,
            lease: LeaseState::None,
            prefix: 0,
            window_from: 0,
            aux: None,
        };
        let is_transferred = !request.alone;
        if let Err(request) = self.slots.insert(request, state) {
            return refuse(request, channel);
        }
        self.slots[slot].is_transferred = is_transferred;
        if !fits {
            self.fail(slot, Cause::Refused, channel);
        } else if self.is_full(slot) {
            self.fail(slot, Cause::Overloaded, channel);
        } else if stage == Stage::Unread {
            self.read(slot, now, channel);
        }
    }

    /// Whether more requests wait than allowed.
    fn is_full(&self, newcomer: SlotId) -> bool {
        let room = self.claims().budget_for_new(self.pool.counts());
        // A request without a session, or with a prompt that prefill computes before pages are
        // leased, does not count here.
        let waits = |held: &SlotEntry<Decode>| {
            matches!(held.state.stage, Stage::Waiting | Stage::Unread)
                || held.request.slot == newcomer
        };
        let (mut handed, mut read) = (self.places_to_arrive(), self.places());
        let takes_place = |held: &SlotEntry<Decode>| {
            let places = if held.state.stage == Stage::Unread { &mut read } else { &mut handed };
            places.checked_sub(1).inspect(|left| *places = *left).is_some()
        };
        self.slots.overflow(&self.config, room, waits, takes_place)
    }

    /// Queues a request without a prefill worker. If its deadline would pass before its turn, ends
    /// it.
    fn read(&mut self, slot: SlotId, now: Instant, channel: &mut EngineChannel) {
        self.slots[slot].foresee(&self.config, &self.pool);
        self.chunks.join(slot, self.slots[slot].request.priority);
        let left = self.slots[slot].request.deadline.saturating_duration_since(now);
        if self.chunks.is_beyond(&self.slots, slot, left) {
            self.fail(slot, Cause::Overloaded, channel);
        }
    }

    /// Takes back pages from leases that the mover has ended. Success also brings the aux record.
    fn take_ends(&mut self) {
        while let Some(end) = self.transfers.poll_end() {
            let (slot, generation) = (end.ended.slot(), end.ended.generation());
            let held = self
                .slots
                .find_mut(slot, generation)
                .filter(|held| held.state.lease == LeaseState::Out);
            debug_assert!(held.is_some(), "a lease of slot {slot} ended that was not out");
            if let Some(held) = held {
                held.state.lease = LeaseState::Back;
                held.state.aux = end.aux;
                let leased = held.request.pages.from(held.state.prefix, held.state.window_from);
                self.pool.end_lease(end.ended, leased.flat_map(|span| span.pages));
            }
        }
    }

    /// Checks every request once: the status of its transfer and its deadline.
    fn sweep(&mut self, turn: &mut TurnContext<'_>) {
        let mut from = 0;
        while let Some(slot) = self.slots.next_from(from) {
            from = slot.0 + 1;
            if self.slots[slot].state.stage != Stage::Over {
                self.check_request(slot, turn);
            }
            if self.slots[slot].state.stage == Stage::Over {
                self.let_go(slot, turn.channel);
            }
        }
    }

    fn check_request(&mut self, slot: SlotId, turn: &mut TurnContext<'_>) {
        let status = self.transfers.status(slot);
        match (status.state, self.slots[slot].state.stage) {
            (State::Failed, _) => {
                let cause = status.cause.unwrap_or(Cause::Internal);
                self.finish(slot, FinishReason::Failed(cause), turn.channel);
            }
            (State::Success, Stage::Transferring) => {
                // The mover sent the end of the lease before the status word showed Success.
                self.take_ends();
                self.arrive(slot, turn);
            }
            _ if turn.now >= self.slots[slot].request.deadline => {
                self.fail(slot, Cause::Deadline, turn.channel)
            }
            _ => {}
        }
    }

    /// Handles the arrival of a prompt's KV: reports the first token, which prefill has sampled.
    fn arrive(&mut self, slot: SlotId, turn: &mut TurnContext<'_>) {
        let held = &mut self.slots[slot];
        let tokens = held.prompt_tokens();
        let (room, generation) = (held.request.room, held.request.generation);
        let aux = held.state.aux.take().filter(|aux| aux.belongs_to(room, generation));
        let first = aux.map(|aux| FirstTokenRecord::of_aux(&aux));
        let Some(first) = first.filter(|first| first.token < self.config.vocab) else {
            self.finish(slot, FinishReason::Failed(Cause::Corrupt), turn.channel);
            return;
        };
        held.computed = tokens;
        if !is_failpoint_active("arrived state counts as new") {
            held.request.pages.set_state_tokens(tokens);
        }
        held.keep(&mut self.pool);
        held.cached = first.cached_tokens.min(tokens);
        held.request.stamps.cached = held.cached;
        // Not `turn.now`, because a prefill worker of this engine can have computed the KV in this
        // turn.
        held.request.stamps.filled = Some((turn.clock)());
        held.request.stamps.prefill_us = Some((first.queue_us, first.prefill_us));
        held.state.stage = Stage::Arrived;
        self.stats.generated(1);
        match accept(&mut held.request, first.sampled(), turn) {
            Some(outcome) => self.finish(slot, outcome, turn.channel),
            None => self.arrived.push(slot, held.request.priority),
        }
    }

    /// The pages that all requests need.
    fn claims(&self) -> Claims {
        let mut claims = Claims::default();
        for held in self.slots.iter() {
            let claim = Claim::of(&self.config, &held.request, &self.pool);
            match held.state.stage {
                Stage::Connecting | Stage::Waiting | Stage::Unread | Stage::Over => {}
                Stage::Transferring | Stage::Arrived | Stage::Computing | Stage::Running => {
                    claims.hold(claim)
                }
                Stage::Retracted => claims.retract(held.need(&self.config)),
            }
        }
        claims
    }

    /// Gives a retracted request pages again, if there are pages and a place in the batch. At most
    /// one in a turn, because the turn copies its KV.
    fn resume(&mut self, now: Instant) {
        if self.retraction.is_empty() || self.places() == 0 {
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
            self.slots[slot].state.stage = Stage::Computing;
            self.chunks.go_on(slot);
        }
    }

    /// Leases pages to queued requests that fit, for their transfers.
    fn admit(&mut self, now: Instant, channel: &mut EngineChannel) {
        // If it is the prompts' turn, they get pages first.
        if self.line.is_empty() || (self.is_prompts_turn && self.chunks.waiting() > 0) {
            return;
        }
        let mut room = self.claims().budget_for_new(self.pool.counts());
        let mut lookups = PREFIX_LOOKUPS_PER_TURN;
        let mut places = self.places_to_arrive();
        while places > 0 && self.transfers.has_room() {
            let (slots, pool) = (&self.slots, &self.pool);
            let fits = |slot| slots[slot].fits(&self.config, &room, pool, &mut lookups);
            let Some(slot) = self.line.pop_fitting(fits) else { break };
            room.take_pages(self.expect(slot, &room, (now, channel)));
            places -= 1;
        }
    }

    /// Leases the prompt's uncached pages, without those that decode never reads, to the transfer.
    /// Sends Expecting, so that `ctl` sends Destination. Returns the pages taken from the budget.
    fn expect(
        &mut self,
        slot: SlotId,
        budget: &PageBudget,
        (now, channel): (Instant, &mut EngineChannel),
    ) -> u32 {
        let tokens = self.slots[slot].prompt_tokens();
        let held = &mut self.slots[slot];
        let Some(session) = held.state.session else { return 0 };
        let (prefix, taken) = held.take_pages(&self.config, budget, &mut self.pool);
        let SlotEntry { request, state, .. } = held;
        let (room, generation) = (request.room, request.generation);
        request.stamps.admitted = Some(now);
        state.prefix = (prefix / self.config.page_size) as usize;
        state.window_from = request.pages.behind();
        let (first, window_from) = (state.prefix, state.window_from);
        let leased = request.pages.from(first, window_from).flat_map(|span| span.pages);
        let lease = self.pool.lease_to_write(slot, generation, leased);
        state.lease = LeaseState::Out;
        let page_size = self.config.page_size;
        let end = request.pages.listed_tokens(first, window_from, tokens, page_size);
        let pages = request.pages.listed(first, window_from);
        let tokens = prefix..end;
        state.stage = Stage::Transferring;
        // If the slot has failed in the meantime, the next sweep ends the request.
        if self.transfers.expect(slot, generation, (session, room), tokens.clone(), pages, lease) {
            channel.send_event(TransferEvent::Expecting {
                worker: self.id,
                slot,
                generation,
                session,
                room,
                tokens,
            });
        }
        taken
    }

    /// Free places for KV in transfer, or arrived while the batch is full.
    fn places_to_arrive(&self) -> usize {
        let arriving = |held: &&SlotEntry<Decode>| {
            matches!(held.state.stage, Stage::Transferring | Stage::Arrived)
        };
        self.config.max_arriving().saturating_sub(self.slots.iter().filter(arriving).count())
    }

    /// Places in the batch that are free and not kept for requests in computation.
    fn places(&self) -> usize {
        self.config.max_running - self.running.len() - self.chunks.begun()
    }

    fn join(&mut self, slot: SlotId, now: Instant) {
        let held = &mut self.slots[slot];
        held.state.stage = Stage::Running;
        self.running.join(slot, &mut held.request, now);
    }

    /// Moves arrived requests into the free places of the batch. One place is kept for a prompt if
    /// it is the prompts' turn.
    fn fill_batch(&mut self, now: Instant) {
        let kept = usize::from(self.is_prompts_turn && self.chunks.waiting() > 0);
        while self.places() > kept
            && let Some(slot) = self.arrived.pop_fitting(|_| true)
        {
            self.join(slot, now);
            self.is_prompts_turn = true;
        }
    }

    /// Computes one batch of chunks. Returns false if there was nothing to compute.
    fn run_chunks(&mut self, turn: &mut TurnContext<'_>) -> bool {
        if self.chunks.is_empty() {
            return false;
        }
        // The prompts' turn ends here, also if no prompt fits.
        self.is_prompts_turn = false;
        let room = self.claims().budget_for_new(self.pool.counts());
        let allowance = Allowance { room, prompts: self.places() };
        self.chunks.pick(&mut self.slots, &mut self.pool, turn, allowance);
        if self.chunks.picked().is_empty() {
            return false;
        }
        for chunk in self.chunks.picked() {
            self.slots[chunk.slot].state.stage = Stage::Computing;
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
                Computed::Whole => self.join(chunk.slot, turn.now),
                Computed::Over(outcome) => {
                    self.finish(chunk.slot, outcome, turn.channel);
                    self.let_go(chunk.slot, turn.channel);
                }
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
            slots[slot].state.stage = Stage::Retracted;
            self.stats.retracted();
        }
    }

    fn run_batch(&mut self, turn: &mut TurnContext<'_>) -> bool {
        self.retract_requests(turn);
        let ran = self.running.step(self.id, &mut self.slots, &mut self.pool, &self.kv, turn);
        while let Some((slot, outcome)) = self.running.next_ended() {
            self.finish(slot, outcome, turn.channel);
            self.let_go(slot, turn.channel);
        }
        self.stats.generated(ran.unwrap_or(0));
        ran.is_some()
    }

    /// Ends a request. It ends the transfer first, so that no more bytes can arrive.
    fn fail(&mut self, slot: SlotId, cause: Cause, channel: &mut EngineChannel) {
        self.transfers.fail(slot, self.slots[slot].request.generation, cause);
        self.finish(slot, FinishReason::Failed(cause), channel);
    }

    fn finish(&mut self, slot: SlotId, outcome: FinishReason, channel: &mut EngineChannel) {
        self.line.remove(slot);
        self.arrived.remove(slot);
        self.running.leave(slot);
        self.chunks.leave(slot);
        let held = &mut self.slots[slot];
        self.retraction.leave(slot, held);
        held.state.stage = Stage::Over;
        held.finish(outcome, &mut self.pool, channel);
    }

    /// Frees the slot of a finished request, unless the mover has its lease. It also waits until
    /// the mover's ring has room, so that the ring always has room for one Cancel per slot.
    fn let_go(&mut self, slot: SlotId, channel: &mut EngineChannel) {
        if self.slots[slot].state.lease != LeaseState::Out && self.transfers.has_room() {
            self.slots.let_go(slot, channel);
        }
    }

    fn publish(&self) {
        let mut census = Census::default();
        for held in self.slots.iter() {
            match held.state.stage {
                Stage::Connecting => census.bootstrapping += 1,
                Stage::Waiting | Stage::Unread => census.waiting += 1,
                Stage::Transferring => census.transferring += 1,
                Stage::Arrived => census.arrived += 1,
                Stage::Running | Stage::Computing => census.running += 1,
                Stage::Retracted => census.retracted += 1,
                Stage::Over => census.ending += 1,
            }
            if matches!(held.state.stage, Stage::Connecting | Stage::Waiting | Stage::Transferring)
            {
                census.waiting_tokens += u64::from(held.prompt_tokens());
            } else if matches!(held.state.stage, Stage::Unread | Stage::Computing) {
                census.waiting_tokens += u64::from(held.uncomputed());
            }
        }
        census.swapped = self.retraction.stored();
        self.stats.publish(&self.pool, census);
    }
}

impl Worker for DecodeWorker {
    fn id(&self) -> WorkerId {
        self.id
    }

    fn slots(&self) -> usize {
        self.slots.capacity()
    }

    fn pool(&self) -> &PagePool {
        &self.pool
    }

    fn has_lease(&self, slot: SlotId, generation: Generation) -> bool {
        let held = self.slots.find(slot, generation);
        held.is_some_and(|held| held.state.lease == LeaseState::Out)
    }

    fn write_leases(&self) -> Vec<WriteLease<'_>> {
        let leased = self.slots.iter().filter(|held| held.state.lease == LeaseState::Out);
        let leased = leased.map(|held| WriteLease {
            slot: held.request.slot,
            generation: held.request.generation,
            prompt: &held.request.prompt,
            pages: held.request.pages.from(held.state.prefix, held.state.window_from).collect(),
        });
        leased.collect()
    }

    fn handle_command(
        &mut self,
        command: EngineCommand,
        now: Instant,
        channel: &mut EngineChannel,
    ) {
        match command {
            EngineCommand::Submit(request) => self.submit(request, now, channel),
            EngineCommand::Answer(TransferAnswer::SessionReady {
                slot,
                generation,
                session,
                ..
            }) => {
                let held = self.slots.find_mut(slot, generation);
                if let Some(held) = held.filter(|held| held.state.stage == Stage::Connecting) {
                    held.state.session = Some(session);
                    held.state.stage = Stage::Waiting;
                    held.request.stamps.bootstrapped = Some(now);
                    held.extend_prompt_keys(&self.pool);
                    self.line.push(slot, held.request.priority);
                }
            }
            EngineCommand::Answer(TransferAnswer::Abort { slot, generation, cause, .. }) => {
                let held = self.slots.find_mut(slot, generation);
                if held.is_some_and(|held| held.state.stage != Stage::Over) {
                    self.fail(slot, cause, channel);
                }
            }
            EngineCommand::Flush { worker } => {
                channel.send_event(RequestEvent::Flushed { worker, pages: self.pool.flush() })
            }
            EngineCommand::Answer(
                TransferAnswer::Granted { .. } | TransferAnswer::Awaited { .. },
            ) => {
                debug_assert!(false, "a decode worker gets no Destination");
            }
        }
    }

    fn step(&mut self, turn: &mut TurnContext<'_>) -> Activity {
        self.take_ends();
        self.sweep(turn);
        self.resume(turn.now);
        self.admit(turn.now, turn.channel);
        self.fill_batch(turn.now);
        let computed = self.run_chunks(turn);
        let decoded = self.run_batch(turn);
        self.publish();
        self.slots.activity(computed || decoded)
    }
}

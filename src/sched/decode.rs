//! The decode worker: takes KV in and runs on from the first token.
//!
//! Life of a request here: until `SessionReady` → preallocation line → pages leased, transfer queue, polling
//! the status table → arrived, first token told, waiting for a place → running batch, without a forward pass
//! over its prompt → over. From the batch a request may be retracted, and comes back, before any newcomer is let in, at
//! once or by way of chunks that compute what was dropped. One that comes alone, for want of a prefill worker, is read here,
//! in chunks, and joins the batch. Mirrors [`super::prefill`].
//! Not here: what fits (`admission`), the batch (`running`), who gives up its pages (`retraction`), moving bytes
//! (`transfer`).

use crate::cause::Cause;
use crate::ids::{SlotId, WorkerId};
use crate::kv::pool::PagePool;
use crate::kv::tier::Tier;
use crate::limits::PREFIX_LOOKUPS_PER_TURN;
use crate::sched::admission::{self, Claim, Claims};
use crate::sched::chunks::{Allowance, Chunks, Computed};
use crate::sched::config::SchedConfig;
use crate::sched::line::Line;
use crate::sched::mail::Mail;
use crate::sched::mailbox::{Command, Event, Outcome};
use crate::sched::request::Request;
use crate::sched::retraction::Retraction;
use crate::sched::running::{Running, accept};
use crate::sched::slots::{Held, LeaseState, Slots, refuse};
use crate::sched::stats::{Census, WorkerStats};
use crate::sched::worker::{Activity, KvMemory, Turn, Worker};
use crate::transfer::aux::AuxRecord;
use crate::transfer::command::SessionId;
use crate::transfer::handle::Receiver;
use crate::transfer::status::State;
use std::sync::Arc;
use std::time::Instant;

/// A decode worker.
pub struct DecodeWorker {
    id: WorkerId,
    config: SchedConfig,
    kv: KvMemory,
    pool: PagePool,
    receiver: Receiver,
    slots: Slots<Decode>,
    /// Preallocation queue.
    line: Line,
    /// Arrived requests that wait for a place in the batch.
    arrived: Line,
    running: Running,
    retraction: Retraction,
    /// What is computed here: prompts of those that come alone, and what was dropped.
    chunks: Chunks,
    /// Of those that wait for a place, prompts come next, not what was handed over.
    is_prompts_turn: bool,
    stats: Arc<WorkerStats>,
}

/// What is kept of a request besides.
#[derive(Debug)]
struct Decode {
    stage: Stage,
    session: Option<SessionId>,
    lease: LeaseState,
    /// Pages of its own that the cache had; the lease is over those behind them.
    prefix: usize,
    /// What came with the KV.
    aux: Option<AuxRecord>,
}

/// In order of life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// No session to its prefill worker yet.
    Connecting,
    /// In line for pages.
    Waiting,
    /// Pages are leased, KV is on its way.
    Transferring,
    /// KV and first token are here; the batch is full.
    Arrived,
    /// In the batch.
    Running,
    /// Was in the batch, until others needed its pages.
    Retracted,
    /// Alone, in line for its first chunk.
    Unread,
    /// Has pages; their KV is computed here.
    Computing,
    /// Finished was told; the lease may be out.
    Over,
}

impl DecodeWorker {
    /// A worker over an empty pool and an empty tier. Status table and rings are the receiver's.
    pub fn new(
        id: WorkerId,
        config: SchedConfig,
        kv: KvMemory,
        tier: Tier,
        receiver: Receiver,
    ) -> DecodeWorker {
        let slots = receiver.status.slots();
        DecodeWorker {
            id,
            config,
            pool: config.pool(kv.pages),
            stats: Arc::new(WorkerStats::new(kv.pages)),
            kv,
            receiver,
            slots: Slots::new(slots),
            line: Line::new(slots),
            arrived: Line::new(slots),
            running: Running::new(config.max_running),
            retraction: Retraction::new(slots, tier),
            chunks: Chunks::new(config, slots),
            is_prompts_turn: false,
        }
    }

    /// Its figures.
    pub fn stats(&self) -> &Arc<WorkerStats> {
        &self.stats
    }

    fn submit(&mut self, request: Box<Request>, now: Instant, mail: &mut Mail) {
        let slot = request.slot;
        let fits = admission::fits_empty(&self.config, self.kv.pages, &request);
        let stage = if request.alone { Stage::Unread } else { Stage::Connecting };
        let state = Decode { stage, session: None, lease: LeaseState::None, prefix: 0, aux: None };
        if let Err(request) = self.slots.insert(request, state) {
            refuse(request, mail);
        } else if !fits {
            self.fail(slot, Cause::Refused, mail);
        } else if self.is_full(slot) {
            self.fail(slot, Cause::Overloaded, mail);
        } else if stage == Stage::Unread {
            self.read(slot, now, mail);
        }
    }

    /// Whether more wait than may.
    fn is_full(&self, newcomer: SlotId) -> bool {
        let room = self.claims().room_for_newcomers(self.pool.counts());
        // Others without a session, or whose prompts are read before pages are leased, wait elsewhere.
        let waits = |held: &Held<Decode>| {
            matches!(held.state.stage, Stage::Waiting | Stage::Unread)
                || held.request.slot == newcomer
        };
        let (mut handed, mut read) = (self.places_to_arrive(), self.places());
        let takes_place = |held: &Held<Decode>| {
            let places = if held.state.stage == Stage::Unread { &mut read } else { &mut handed };
            places.checked_sub(1).inspect(|left| *places = *left).is_some()
        };
        self.slots.overflow(&self.config, room, waits, takes_place)
    }

    /// One that comes alone gets in line, unless its deadline would pass before its turn.
    fn read(&mut self, slot: SlotId, now: Instant, mail: &mut Mail) {
        self.slots[slot].foresee(&self.pool, self.config.page_size);
        self.chunks.join(slot);
        let left = self.slots[slot].request.deadline.saturating_duration_since(now);
        if self.chunks.is_beyond(&self.slots, left) {
            self.fail(slot, Cause::Overloaded, mail);
        }
    }

    /// Pages come back with the leases that the mover has ended; with Success comes the record.
    fn take_ends(&mut self) {
        while let Some(end) = self.receiver.poll_end() {
            let (slot, generation) = (end.ended.slot(), end.ended.generation());
            let held = self
                .slots
                .named(slot, generation)
                .filter(|held| held.state.lease == LeaseState::Out);
            debug_assert!(held.is_some(), "a lease of slot {slot} ended that was not out");
            if let Some(held) = held {
                held.state.lease = LeaseState::Back;
                held.state.aux = end.aux;
                self.pool.end(end.ended, &held.request.pages[held.state.prefix..]);
            }
        }
    }

    /// Looks at every request once: news of its transfer, its deadline.
    fn sweep(&mut self, turn: &mut Turn<'_>) {
        let mut from = 0;
        while let Some(slot) = self.slots.next_from(from) {
            from = slot.0 + 1;
            if self.slots[slot].state.stage != Stage::Over {
                self.look_at(slot, turn);
            }
            if self.slots[slot].state.stage == Stage::Over {
                self.let_go(slot, turn.mail);
            }
        }
    }

    fn look_at(&mut self, slot: SlotId, turn: &mut Turn<'_>) {
        let status = self.receiver.status(slot);
        match (status.state, self.slots[slot].state.stage) {
            (State::Failed, _) => {
                let cause = status.cause.unwrap_or(Cause::Internal);
                self.finish(slot, Outcome::Failed(cause), turn.mail);
            }
            (State::Success, Stage::Transferring) => {
                // The lease's end was sent before Success could be seen.
                self.take_ends();
                self.arrive(slot, turn);
            }
            _ if turn.now >= self.slots[slot].request.deadline => {
                self.fail(slot, Cause::Deadline, turn.mail)
            }
            _ => {}
        }
    }

    /// The KV of a prompt is here: tells the first token, which prefill has sampled.
    fn arrive(&mut self, slot: SlotId, turn: &mut Turn<'_>) {
        let held = &mut self.slots[slot];
        let tokens = held.prompt_tokens();
        let (room, generation) = (held.request.room, held.request.generation);
        let valid = |aux: &AuxRecord| {
            aux.belongs_to(room, generation) && aux.first_token < self.config.vocab
        };
        let Some(aux) = held.state.aux.take().filter(valid) else {
            self.finish(slot, Outcome::Failed(Cause::Corrupt), turn.mail);
            return;
        };
        held.computed = tokens;
        held.keep(&mut self.pool);
        held.cached = aux.cached_tokens.min(tokens);
        held.request.stamps.cached = held.cached;
        // Not the turn's time: a prefill worker of this engine may have computed since it began.
        held.request.stamps.filled = Some((turn.clock)());
        held.request.stamps.prefill_us = Some((aux.queue_us, aux.prefill_us));
        held.state.stage = Stage::Arrived;
        self.stats.generated(1);
        match accept(&mut held.request, aux.first(), turn.mail, turn.clock) {
            Some(outcome) => self.finish(slot, outcome, turn.mail),
            None => self.arrived.join(slot),
        }
    }

    /// What all want of the pool.
    fn claims(&self) -> Claims {
        let mut claims = Claims::default();
        for held in self.slots.iter() {
            let claim = Claim::of(&self.config, &held.request);
            match held.state.stage {
                Stage::Connecting | Stage::Waiting | Stage::Unread | Stage::Over => {}
                Stage::Transferring | Stage::Arrived | Stage::Computing | Stage::Running => {
                    claims.hold(claim)
                }
                Stage::Retracted => claims.retract(claim),
            }
        }
        claims
    }

    /// One that was retracted gets pages again, if there are pages and a place in the batch: one a turn, since its KV is
    /// copied meanwhile.
    fn resume(&mut self, now: Instant) {
        if self.retraction.is_empty() || self.places() == 0 {
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
            self.slots[slot].state.stage = Stage::Computing;
            self.chunks.go_on(slot);
        }
    }

    /// Leases pages to the transfers of those in line that fit.
    fn admit(&mut self, now: Instant, mail: &mut Mail) {
        // In their turn prompts look for pages first.
        if self.line.is_empty() || (self.is_prompts_turn && self.chunks.waiting() > 0) {
            return;
        }
        let mut room = self.claims().room_for_newcomers(self.pool.counts());
        let mut lookups = PREFIX_LOOKUPS_PER_TURN;
        let mut places = self.places_to_arrive();
        while places > 0 && self.receiver.has_room() {
            let (slots, pool) = (&self.slots, &self.pool);
            let fits = |slot| slots[slot].fits(&self.config, &room, pool, &mut lookups);
            let Some(slot) = self.line.next(fits) else { break };
            room.take(self.expect(slot, now, mail));
            places -= 1;
        }
    }

    /// Leases the prompt's pages, but those that the prefix cache has, to the transfer and lets Destination leave. What
    /// it took of the room.
    fn expect(&mut self, slot: SlotId, now: Instant, mail: &mut Mail) -> u32 {
        let tokens = self.slots[slot].prompt_tokens();
        let held = &mut self.slots[slot];
        let Some(session) = held.state.session else { return 0 };
        let (prefix, taken) = held.take_pages(&self.config, &mut self.pool);
        let Held { request, state, .. } = held;
        let (room, generation) = (request.room, request.generation);
        request.stamps.admitted = Some(now);
        state.prefix = (prefix / self.config.page_size) as usize;
        let lease = self.pool.lease_to_write(slot, generation, &request.pages[state.prefix..]);
        state.lease = LeaseState::Out;
        let tokens = prefix..tokens;
        state.stage = Stage::Transferring;
        // When the slot has failed meanwhile, the next sweep sees it.
        if self.receiver.expect(
            slot,
            generation,
            (session, room),
            tokens.clone(),
            &request.pages,
            lease,
        ) {
            mail.tell(Event::Expecting {
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

    /// Places for KV on its way, or here while the batch is full, that nobody has.
    fn places_to_arrive(&self) -> usize {
        let arriving =
            |held: &&Held<Decode>| matches!(held.state.stage, Stage::Transferring | Stage::Arrived);
        self.config.max_arriving().saturating_sub(self.slots.iter().filter(arriving).count())
    }

    /// Places in the batch that nobody has, nor takes when it is computed.
    fn places(&self) -> usize {
        self.config.max_running - self.running.len() - self.chunks.begun()
    }

    fn join(&mut self, slot: SlotId, now: Instant) {
        let held = &mut self.slots[slot];
        held.state.stage = Stage::Running;
        self.running.join(slot, &mut held.request, now);
    }

    /// Arrived requests take the free places of the batch, but for one that a prompt may take in its turn.
    fn fill_batch(&mut self, now: Instant) {
        let kept = usize::from(self.is_prompts_turn && self.chunks.waiting() > 0);
        while self.places() > kept
            && let Some(slot) = self.arrived.next(|_| true)
        {
            self.join(slot, now);
            self.is_prompts_turn = true;
        }
    }

    /// Computes one batch of chunks. False when there was nothing to compute.
    fn run_chunks(&mut self, turn: &mut Turn<'_>) -> bool {
        if self.chunks.is_empty() {
            return false;
        }
        // One that begins had its turn, and so had one that does not fit.
        self.is_prompts_turn = false;
        let room = self.claims().room_for_newcomers(self.pool.counts());
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
                Computed::Whole => self.join(chunk.slot, turn.now),
                Computed::Over(outcome) => {
                    self.finish(chunk.slot, outcome, turn.mail);
                    self.let_go(chunk.slot, turn.mail);
                }
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
            slots[slot].state.stage = Stage::Retracted;
            self.stats.retracted();
        }
    }

    fn run_batch(&mut self, turn: &mut Turn<'_>) -> bool {
        self.make_room(turn);
        let ran = self.running.step(self.id, &mut self.slots, &mut self.pool, &self.kv, turn);
        while let Some((slot, outcome)) = self.running.next_ended() {
            self.finish(slot, outcome, turn.mail);
            self.let_go(slot, turn.mail);
        }
        self.stats.generated(ran.unwrap_or(0));
        ran.is_some()
    }

    /// Ends a request: its transfer first, so that nothing may land any more.
    fn fail(&mut self, slot: SlotId, cause: Cause, mail: &mut Mail) {
        self.receiver.fail(slot, self.slots[slot].request.generation, cause);
        self.finish(slot, Outcome::Failed(cause), mail);
    }

    fn finish(&mut self, slot: SlotId, outcome: Outcome, mail: &mut Mail) {
        self.line.leave(slot);
        self.arrived.leave(slot);
        self.running.leave(slot);
        self.chunks.leave(slot);
        let held = &mut self.slots[slot];
        self.retraction.leave(slot, held);
        held.state.stage = Stage::Over;
        held.finish(outcome, &mut self.pool, mail);
    }

    /// Gives the slot of a finished request back, unless its lease is out. Not before the mover's ring has
    /// room, so that it always takes one Cancel per slot.
    fn let_go(&mut self, slot: SlotId, mail: &mut Mail) {
        if self.slots[slot].state.lease != LeaseState::Out && self.receiver.has_room() {
            self.slots.let_go(slot, mail);
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

    fn take(&mut self, command: Command, now: Instant, mail: &mut Mail) {
        match command {
            Command::Submit(request) => self.submit(request, now, mail),
            Command::SessionReady { slot, generation, session, .. } => {
                let held = self.slots.named(slot, generation);
                if let Some(held) = held.filter(|held| held.state.stage == Stage::Connecting) {
                    held.state.session = Some(session);
                    held.state.stage = Stage::Waiting;
                    held.request.stamps.bootstrapped = Some(now);
                    self.line.join(slot);
                }
            }
            Command::Abort { slot, generation, cause, .. } => {
                let held = self.slots.named(slot, generation);
                if held.is_some_and(|held| held.state.stage != Stage::Over) {
                    self.fail(slot, cause, mail);
                }
            }
            Command::Flush { worker } => {
                mail.tell(Event::Flushed { worker, pages: self.pool.flush() })
            }
            Command::Granted { .. } | Command::Awaited { .. } => {
                debug_assert!(false, "a decode worker gets no Destination");
            }
        }
    }

    fn step(&mut self, turn: &mut Turn<'_>) -> Activity {
        self.take_ends();
        self.sweep(turn);
        self.resume(turn.now);
        self.admit(turn.now, turn.mail);
        self.fill_batch(turn.now);
        let computed = self.run_chunks(turn);
        let decoded = self.run_batch(turn);
        self.publish();
        if cfg!(debug_assertions) {
            self.pool.invariants();
        }
        self.slots.activity(computed || decoded)
    }
}

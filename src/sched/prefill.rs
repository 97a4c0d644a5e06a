//! The prefill worker: computes prompts and transfers their KV, chunk by chunk.
//!
//! A request waits in the bootstrap queue until `Granted` or `Awaited`; with `keep` it does not
//! wait. Then it joins the wait queue and runs in chunks. After `Granted`, each computed chunk is
//! transferred at once. If the whole prompt is computed before `Granted`, the request is parked
//! until then. After its last chunk it is inflight until Success, then over until its lease is
//! back. Mirrors [`super::decode`].
//! Not here: picking chunks (`chunks`), moving bytes (`transfer`).

use crate::cause::Cause;
use crate::ids::{Generation, SlotId, WorkerId};
use crate::kv::pool::PagePool;
use crate::kv::window::KvWindow;
use crate::limits::{KEPT_KV_LIFE, REQUEST_TIME_MAX};
use crate::sched::admission::{self, Claims};
use crate::sched::channel::EngineChannel;
use crate::sched::chunks::{Allowance, ChunkScheduler, score_chunk};
use crate::sched::config::SchedConfig;
use crate::sched::first_token::FirstTokenRecord;
use crate::sched::messages::{EngineCommand, FinishReason, RequestEvent, TransferEvent};
use crate::sched::request::{EngineRequest, Stamps};
use crate::sched::running_batch::accept;
use crate::sched::slots::{LeaseState, SlotEntry, Slots, refuse};
use crate::sched::stats::{Census, WorkerStats};
use crate::sched::worker::{Activity, KvMemory, TurnContext, Worker};
use crate::stdx::failpoint::is_failpoint_active;
use crate::transfer::answer::TransferAnswer;
use crate::transfer::aux::AuxRecord;
use crate::transfer::handle::SourceHandle;
use crate::transfer::status::State;
use crate::transfer::target::{SessionId, Target};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A prefill worker.
pub struct PrefillWorker {
    id: WorkerId,
    config: SchedConfig,
    kv: KvMemory,
    pool: PagePool,
    transfers: SourceHandle,
    slots: Slots<Prefill>,
    chunks: ChunkScheduler,
    stats: Arc<WorkerStats>,
}

/// Additional state of a request.
#[derive(Debug)]
struct Prefill {
    stage: Stage,
    target: Option<Target>,
    lease: LeaseState,
    /// Tokens with KV that the mover has got, or that the destination already holds.
    handed: u32,
    /// The aux record for the last chunk.
    aux: Option<AuxRecord>,
    /// A Destination will come.
    awaited: bool,
}

/// Stages in order of a request's life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// No `Granted` or `Awaited` yet.
    Bootstrapping,
    /// In the queue for its first chunk, or between chunks.
    Prompt,
    /// Fully computed, without a Destination. Kept KV, for a decode leg that comes after the
    /// answer, also waits in this stage.
    Parked,
    /// Fully computed; KV and final notices are in transfer.
    Inflight,
    /// Finished was sent, but the mover can still have the lease.
    Over,
}

impl Prefill {
    /// Records the destination of the KV. Nothing is sent of the first `unread` tokens, which only
    /// [`SessionId::NOBODY`] names.
    fn aim(&mut self, target: Target, unread: u32) {
        self.target = Some(target);
        let prefix = if is_failpoint_active("prefix is sent again") { 0 } else { target.prefix };
        self.handed = prefix.max(unread);
    }
}

impl PrefillWorker {
    /// Makes a worker with an empty pool. The handle owns status table and rings.
    pub fn new(
        id: WorkerId,
        config: SchedConfig,
        kv: KvMemory,
        transfers: SourceHandle,
    ) -> PrefillWorker {
        let slots = transfers.status.slots();
        PrefillWorker {
            id,
            config,
            pool: config.pool(kv.pages),
            stats: Arc::new(WorkerStats::new(kv.pages)),
            kv,
            transfers,
            slots: Slots::new(slots),
            chunks: ChunkScheduler::new(config, slots),
        }
    }

    /// Its statistics.
    pub fn stats(&self) -> &Arc<WorkerStats> {
        &self.stats
    }

    fn submit(
        &mut self,
        mut request: Box<EngineRequest>,
        now: Instant,
        channel: &mut EngineChannel,
    ) {
        // A prefill worker always generates one token.
        request.max_new = 1;
        let slot = request.slot;
        let fits = admission::fits_empty(&self.config, self.kv.pages, &request);
        let state = Prefill {
            stage: Stage::Bootstrapping,
            target: None,
            lease: LeaseState::None,
            handed: 0,
            aux: None,
            awaited: false,
        };
        if let Err(request) = self.slots.insert(request, state) {
            return refuse(request, channel);
        }
        let held = &mut self.slots[slot];
        held.stay_from = first_sent_page(&self.config, held.prompt_tokens());
        if !fits {
            self.fail(slot, Cause::Refused, channel);
        } else if self.is_full() {
            self.fail(slot, Cause::Overloaded, channel);
        } else if self.slots[slot].request.keep {
            self.begin(slot, now, channel);
        }
    }

    /// Whether more requests wait than allowed.
    fn is_full(&self) -> bool {
        let room = Claims::default().budget_for_new(self.pool.counts());
        let waits = |held: &SlotEntry<Prefill>| match held.state.stage {
            Stage::Bootstrapping => true,
            Stage::Prompt => held.request.pages.is_empty(),
            Stage::Parked | Stage::Inflight | Stage::Over => false,
        };
        let mut places = self.config.max_running.saturating_sub(self.chunks.begun());
        let takes_place = |_: &_| places.checked_sub(1).inspect(|left| places = *left).is_some();
        self.slots.overflow(&self.config, room, waits, takes_place)
    }

    /// Handles the arrival of a Destination.
    fn granted(&mut self, slot: SlotId, target: Target, now: Instant, channel: &mut EngineChannel) {
        let held = &mut self.slots[slot];
        if target.session != SessionId::NOBODY && self.config.groups.is_single() {
            // A destination that knows no windows wants all tokens. Their pages can still be here.
            held.stay_from = held.stay_from.min(target.prefix / self.config.page_size);
            if held.request.pages.behind() > held.stay_from as usize {
                return self.fail(slot, Cause::Incompatible, channel);
            }
        }
        let unread = unread_tokens(&self.config, held.stay_from);
        let state = &mut held.state;
        state.aim(target, unread);
        match state.stage {
            Stage::Bootstrapping => self.begin(slot, now, channel),
            Stage::Parked => state.stage = Stage::Inflight,
            Stage::Prompt | Stage::Inflight | Stage::Over => {}
        }
    }

    /// Queues a request. If its deadline would pass before its turn, ends it. A Destination is here
    /// or will come, or the KV is kept.
    fn begin(&mut self, slot: SlotId, now: Instant, channel: &mut EngineChannel) {
        let held = &mut self.slots[slot];
        held.state.stage = Stage::Prompt;
        held.request.stamps.bootstrapped = Some(now);
        let left = held.request.deadline.saturating_duration_since(now);
        held.foresee(&self.config, &self.pool);
        self.chunks.join(slot, held.request.priority);
        if self.chunks.is_beyond(&self.slots, slot, left) {
            self.fail(slot, Cause::Overloaded, channel);
        }
    }

    /// Takes back pages from leases that the mover has ended.
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
                let leased = held.request.pages.from(0, held.stay_from as usize);
                let leased = leased.flat_map(|span| span.pages);
                self.pool.end_lease(end.ended, leased);
            }
        }
    }

    /// Checks every request once: the status of its transfer, its deadline, and KV that did not fit
    /// the mover's ring.
    fn sweep(&mut self, now: Instant, channel: &mut EngineChannel) {
        let mut from = 0;
        while let Some(slot) = self.slots.next_from(from) {
            from = slot.0 + 1;
            if self.slots[slot].state.stage != Stage::Over {
                self.check_request(slot, now, channel);
            }
            let Prefill { stage, lease, .. } = self.slots[slot].state;
            // Waits until the mover's ring has room, so that the ring always has room for one
            // Cancel per slot.
            if stage == Stage::Over && lease != LeaseState::Out && self.transfers.has_room() {
                self.slots.let_go(slot, channel);
            }
        }
    }

    fn check_request(&mut self, slot: SlotId, now: Instant, channel: &mut EngineChannel) {
        let status = self.transfers.status(slot);
        match (status.state, self.slots[slot].state.stage) {
            (State::Failed, _) => {
                let cause = status.cause.unwrap_or(Cause::Internal);
                self.finish(slot, FinishReason::Failed(cause), channel);
            }
            (State::Success, Stage::Inflight) => {
                self.finish(slot, FinishReason::HandedOver, channel)
            }
            _ if self.is_overdue(slot, now) => self.fail(slot, Cause::Deadline, channel),
            _ => self.hand_over(slot),
        }
    }

    fn is_overdue(&self, slot: SlotId, now: Instant) -> bool {
        let SlotEntry { request, state, .. } = &self.slots[slot];
        // Kept KV that decode claims at the last moment gets the same time again for its transfer.
        let is_claimed = request.keep && state.target.is_some();
        now >= request.deadline + if is_claimed { KEPT_KV_LIFE } else { Duration::ZERO }
    }

    fn hand_over(&mut self, slot: SlotId) {
        hand_over(&self.config, &mut self.slots[slot], &mut self.pool, &self.transfers);
    }

    /// Computes one batch of chunks. Returns false if there was nothing to compute.
    fn run_chunks(&mut self, turn: &mut TurnContext<'_>) -> bool {
        // A begun prompt has all its pages. It takes more only for checkpoints.
        let room = Claims::default().budget_for_new(self.pool.counts());
        let allowance = Allowance { room, prompts: self.config.max_running };
        self.chunks.pick(&mut self.slots, &mut self.pool, turn, allowance);
        if self.chunks.picked().is_empty() {
            return false;
        }
        // The cached prefix is transferred while the rest is computed.
        for index in 0..self.chunks.picked().len() {
            self.hand_over(self.chunks.picked()[index].slot);
        }
        let (transfers, pool) = (&self.transfers, &mut self.pool);
        let (id, config) = (self.id, &self.config);
        let completed =
            self.chunks.run(&mut self.slots, turn, self.kv.pool(), |slots, chunks, channel| {
                hand_over_parked((id, config), slots, pool, transfers, channel);
                chunks.iter().all(|chunk| {
                    transfers.status(chunk.slot).state == State::Failed
                        || channel.aborts(id, chunk.slot, slots[chunk.slot].request.generation)
                })
            });
        if completed {
            self.use_chunks(turn);
        }
        true
    }

    /// Transfers the chunks that the step computed. Complete prompts get their first token.
    fn use_chunks(&mut self, turn: &mut TurnContext<'_>) {
        let mut logits = 0;
        for index in 0..self.chunks.picked().len() {
            let chunk = self.chunks.picked()[index].clone();
            let held = &mut self.slots[chunk.slot];
            held.end_chunk(&self.config, &mut self.pool);
            self.stats.computed(chunk.tokens.end - chunk.tokens.start);
            let SlotEntry { request, cached, state, .. } = &mut self.slots[chunk.slot];
            let next = score_chunk(&chunk, &mut logits, request, turn);
            if chunk.last {
                let sampled = turn.sample_first(next, request);
                let mut first = FirstTokenRecord::new(&sampled, *cached);
                (first.queue_us, first.prefill_us) = shares(&request.stamps);
                state.aux = Some(first.to_aux(request.room));
                state.stage = if state.target.is_some() { Stage::Inflight } else { Stage::Parked };
                accept(request, sampled, turn);
                self.stats.generated(1);
                if state.stage == Stage::Parked {
                    if request.keep && !state.awaited {
                        let life =
                            if is_failpoint_active("KV is kept for an hour") { 120 } else { 1 };
                        request.deadline = (turn.clock)() + KEPT_KV_LIFE * life;
                    }
                    self.tell_computed(chunk.slot, turn.channel);
                }
            }
            self.hand_over(chunk.slot);
        }
    }

    fn tell_computed(&self, slot: SlotId, channel: &mut EngineChannel) {
        let SlotEntry { request, cached, .. } = &self.slots[slot];
        channel.send_event(TransferEvent::Computed {
            worker: self.id,
            slot,
            generation: request.generation,
            request: request.id,
            cached_tokens: *cached,
        });
    }

    /// Ends a request. It ends the transfer first, so that the mover stops.
    fn fail(&mut self, slot: SlotId, cause: Cause, channel: &mut EngineChannel) {
        self.transfers.fail(slot, self.slots[slot].request.generation, cause);
        self.finish(slot, FinishReason::Failed(cause), channel);
    }

    fn finish(&mut self, slot: SlotId, outcome: FinishReason, channel: &mut EngineChannel) {
        self.chunks.leave(slot);
        let held = &mut self.slots[slot];
        held.state.stage = Stage::Over;
        held.finish(outcome, &mut self.pool, channel);
    }

    fn publish(&self) {
        let mut census = Census::default();
        for held in self.slots.iter() {
            match held.state.stage {
                Stage::Bootstrapping => census.bootstrapping += 1,
                Stage::Prompt if held.request.pages.is_empty() => census.waiting += 1,
                Stage::Prompt => census.running += 1,
                Stage::Parked | Stage::Inflight => census.transferring += 1,
                Stage::Over => census.ending += 1,
            }
            if held.state.stage == Stage::Prompt {
                census.waiting_tokens += u64::from(held.uncomputed());
            }
        }
        self.stats.publish(&self.pool, census);
    }
}

impl Worker for PrefillWorker {
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

    fn handle_command(
        &mut self,
        command: EngineCommand,
        now: Instant,
        channel: &mut EngineChannel,
    ) {
        match command {
            EngineCommand::Submit(request) => self.submit(request, now, channel),
            EngineCommand::Answer(TransferAnswer::Granted { slot, generation, target, .. }) => {
                let held = self
                    .slots
                    .find_mut(slot, generation)
                    .filter(|held| held.state.stage != Stage::Over);
                if held.is_some_and(|held| held.state.target.is_none()) {
                    self.granted(slot, target, now, channel);
                }
            }
            EngineCommand::Answer(TransferAnswer::Awaited { slot, generation, .. }) => {
                let Some(held) = self.slots.find_mut(slot, generation) else { return };
                held.state.awaited = true;
                match held.state.stage {
                    Stage::Bootstrapping => self.begin(slot, now, channel),
                    Stage::Parked => {
                        // From now on decode's own deadline applies. Decode may spend it in its
                        // queue for pages.
                        held.request.deadline = held.request.deadline.max(now + REQUEST_TIME_MAX);
                        self.tell_computed(slot, channel);
                    }
                    Stage::Prompt | Stage::Inflight | Stage::Over => {}
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
            EngineCommand::Answer(TransferAnswer::SessionReady { .. }) => {
                debug_assert!(false, "a prefill worker opens no session")
            }
        }
    }

    fn step(&mut self, turn: &mut TurnContext<'_>) -> Activity {
        self.take_ends();
        self.sweep(turn.now, turn.channel);
        let busy = self.run_chunks(turn);
        self.publish();
        self.slots.activity(busy)
    }
}

/// Passes new KV to the mover, if its ring has room.
fn hand_over(
    config: &SchedConfig,
    held: &mut SlotEntry<Prefill>,
    pool: &mut PagePool,
    transfers: &SourceHandle,
) {
    let SlotEntry { request, fill, computed, stay_from, state, .. } = held;
    let (slot, generation) = (request.slot, request.generation);
    let Some(target) = state.target else { return };
    // The destination can already hold more tokens than are computed here.
    if state.handed >= *computed || state.lease == LeaseState::Back {
        return;
    }
    // State is complete with the last chunk.
    if config.groups.total() == 0 && *computed < *fill {
        return;
    }
    // A single group is listed from the first page that is here, so its places are its tokens.
    let (first, windowed) = match config.groups.is_single() {
        true => (0, *stay_from),
        false => (target.prefix / config.page_size, config.window().pages_behind(*fill)),
    };
    let (first, windowed) = (first as usize, windowed as usize);
    if state.lease == LeaseState::None {
        if !transfers.has_room() {
            return;
        }
        let leased = request.pages.from(0, *stay_from as usize);
        let lease = pool.lease(slot, generation, leased.flat_map(|span| span.pages));
        transfers.begin(slot, generation, target, request.pages.listed(first, windowed), lease);
        state.lease = LeaseState::Out;
    }
    if transfers.has_room() {
        // Further groups and state cross with the last chunk.
        let is_early = is_failpoint_active("state crosses with any chunk");
        let is_last = *computed == *fill || is_early && config.groups.state_pages > 0;
        let mut end = match is_last {
            true => request.pages.listed_tokens(first, windowed, *fill, config.page_size),
            false => *computed,
        };
        if is_failpoint_active("last chunk leaves the state out") {
            end -= config.groups.state_pages * config.page_size;
        }
        transfers.chunk(slot, generation, state.handed..end, state.aux.take());
        state.handed = *computed;
    }
}

/// Tokens at the beginning of a prompt that no destination gets. If there are full groups, it can
/// get all.
fn unread_tokens(config: &SchedConfig, stay_from: u32) -> u32 {
    if config.groups.full == 0 { stay_from * config.page_size } else { 0 }
}

/// The first page of a prompt that a destination can want. The destination reads the tokens that
/// the first token of the answer sees, and wants whole pages of its own size.
fn first_sent_page(config: &SchedConfig, prompt: u32) -> u32 {
    debug_assert!(config.largest_page.is_multiple_of(config.page_size), "pages are powers of two");
    let of_largest = KvWindow::new(config.groups.window, config.largest_page).pages_behind(prompt);
    of_largest * (config.largest_page / config.page_size)
}

/// Transfers parked requests as soon as their Destination arrives, even while other requests are
/// computed.
fn hand_over_parked(
    (worker, config): (WorkerId, &SchedConfig),
    slots: &mut Slots<Prefill>,
    pool: &mut PagePool,
    transfers: &SourceHandle,
    channel: &mut EngineChannel,
) {
    loop {
        let granted = channel.take_early(|command| match *command {
            EngineCommand::Answer(TransferAnswer::Granted {
                worker: of,
                slot,
                generation,
                target,
            }) if of == worker => {
                let held = slots.find_mut(slot, generation)?;
                let is_open = transfers.status(slot).state == State::WaitingForInput;
                let unread = unread_tokens(config, held.stay_from);
                let has_all = target.prefix >= unread;
                let is_next = held.state.stage == Stage::Parked && is_open && has_all;
                is_next.then_some((slot, target))
            }
            _ => None,
        });
        let Some((slot, target)) = granted else { return };
        let held = &mut slots[slot];
        held.state.aim(target, unread_tokens(config, held.stay_from));
        held.state.stage = Stage::Inflight;
        hand_over(config, held, pool, transfers);
    }
}

/// The parts of the time to first token that pass on prefill, in µs: (queue, prefill).
fn shares(stamps: &Stamps) -> (u32, u32) {
    let micros = |duration: Duration| u32::try_from(duration.as_micros()).unwrap_or(u32::MAX);
    let begin = stamps.admitted.unwrap_or(stamps.arrived);
    let end = stamps.filled.unwrap_or(begin);
    (
        micros(begin.saturating_duration_since(stamps.arrived)),
        micros(end.saturating_duration_since(begin)),
    )
}

//! The transfer engine under another engine: the managers, links and mover of one worker, without
//! a scheduler and a model.
//!
//! ```text
//!  engine ─▶ enter ─▶ poll_answer ─▶ begin, chunk ─┐              ┌─▶ status ─▶ poll_end ─▶ leave
//!                                └─▶ expect ───────┴─▶ KV moves ──┘
//! ```
//! Owns: one worker with its slots, leases and links. Thread: the owner's thread is `ctl`, and
//! calls [`Agent::turn`]. `move-0` is a thread that parks, as in a worker. With busy polling, the
//! owner runs the mover's steps, too. Invariants: a page is leased from `begin` or `expect` until
//! `poll_end` returns the end of its lease. Dropping the agent ends its thread. Not here: which
//! pages an engine uses, and how it learns of a request.

pub mod client;
mod config;
mod mover_runner;
pub mod requests;
pub(crate) mod service;
pub mod thread;

pub use config::AgentConfig;

use crate::cause::Cause;
use crate::ids::{DecodeAllocation, PageId, Peer, Role, Room, WorkerId};
use crate::kv::groups::GroupCounts;
use crate::kv::lease::MoverRight;
use crate::kv::page_span::PageSpan;
use crate::kv::pool::PagePool;
use crate::limits::LANES_MAX;
use crate::link::control::{ControlLinks, PeerIdentity};
use crate::link::handoff::{
    EndpointKind, Handoff, Source, TransportCapabilities, WorkerEndpoint, prompt_of,
};
use crate::link::local_worker::{LocalWorker, Ring};
use crate::link::lookup::DirectLookup;
use crate::link::shm_handshake::ShmHandshake;
use crate::link::tcp_handshake::TcpHandshake;
use crate::net::{Event, ListenerId, Reactor};
use crate::stdx::event_count::EventCount;
use crate::transfer::answer::TransferAnswer;
use crate::transfer::aux::AuxRecord;
use crate::transfer::command::{Cancel, DestinationCommand, LeaseEnd, SourceCommand};
use crate::transfer::copy_pool::CopyPool;
use crate::transfer::event_loop::Waiter;
use crate::transfer::handle::TransferHandle;
use crate::transfer::manager::destination::DestinationManager;
use crate::transfer::manager::identity::WorkerIdentity;
use crate::transfer::manager::rooms::{Prompt, Slot};
use crate::transfer::manager::source::SourceManager;
use crate::transfer::mover::Mover;
use crate::transfer::mover::destination::DestinationMover;
use crate::transfer::mover::source::SourceMover;
use crate::transfer::pages::PageLists;
use crate::transfer::rings::{Bells, Rings};
use crate::transfer::status::{SlotStatus, StatusTable};
use crate::transfer::target::{SessionId, Target};
use crate::transfer::transport::Memory;
use crate::transfer::transport::rdma::{DataThreads, Rails, Settings};
use crate::wire::message::Transport;
use crossbeam_channel as channel;
use mover_runner::MoverRunner;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The only worker of an agent.
const WORKER: WorkerId = WorkerId(0);
/// Interval of the checks for deadlines.
const TICK: Duration = Duration::from_millis(50);

/// One worker and its threads; `C` is the command type of its mover.
pub struct Agent<C> {
    /// The KV memory.
    pub memory: Memory,
    /// Sockets and time. The owner can have connections of its own here.
    pub reactor: Reactor,
    handle: TransferHandle<C>,
    prompt_pages: usize,
    pool: PagePool,
    /// The leased pages of each slot.
    leased: Vec<Vec<PageId>>,
    answers: channel::Receiver<TransferAnswer>,
    links: ControlLinks,
    handoff: Handoff,
    bell: Arc<EventCount>,
    mover: MoverRunner,
    /// Poster and poller threads of NICs. They end after the mover.
    data: DataThreads,
    /// The port for peers: of control links at a source, of lanes at a destination with tcp.
    address: Option<SocketAddr>,
    next_tick: Instant,
}

/// An agent that computes prompts.
pub type SourceAgent = Agent<SourceCommand>;
/// An agent that uses the KV of prompts.
pub type DestinationAgent = Agent<DestinationCommand>;

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// The parts that both roles need.
struct Parts {
    config: AgentConfig,
    memory: Memory,
    status: Arc<StatusTable>,
    reactor: Reactor,
    bell: Arc<EventCount>,
    waiter: Waiter,
    data: DataThreads,
    answers: (channel::Sender<TransferAnswer>, channel::Receiver<TransferAnswer>),
}

impl Parts {
    fn new(config: AgentConfig, reactor: Reactor) -> Result<Parts, String> {
        let lists = PageLists::new(config.slots, config.prompt_pages).map_err(text)?;
        let memory = Memory {
            groups: GroupCounts::FULL,
            region: config.region.clone(),
            layout: config.layout,
            pages: config.pages,
            lists: Arc::new(lists),
            counters: Arc::default(),
            copy_pool: CopyPool::new(config.copy_threads).map_err(text)?,
        };
        let waker = reactor.waker();
        Ok(Parts {
            memory,
            status: Arc::new(StatusTable::new(config.slots)),
            reactor,
            bell: Arc::new(EventCount::new(move || waker.wake())),
            waiter: Waiter::new(true).map_err(text)?,
            data: DataThreads::of_guest(),
            // A slot gets at most Awaited, Granted or SessionReady, and Abort.
            answers: channel::bounded(4 * config.slots),
            config,
        })
    }

    fn rings<C>(&self) -> Rings<C> {
        let bells = Bells {
            engine: self.bell.clone(),
            ctl: self.bell.clone(),
            mover: self.waiter.bell.clone(),
        };
        Rings::new(&self.status, &self.memory.lists, self.config.sessions, &bells)
    }

    fn identity(&self) -> WorkerIdentity {
        WorkerIdentity {
            groups: GroupCounts::FULL,
            fingerprint: self.config.fingerprint,
            bit_class: self.config.bit_class,
            layout: self.memory.layout,
            pages: self.memory.pages,
            pool_bytes: self.memory.region.len() as u64,
            slots: self.config.slots as u32,
            host: self.config.machine,
        }
    }

    fn worker(&mut self, role: Role) -> Result<LocalWorker, String> {
        let ring = Ring::new(self.answers.0.clone(), self.bell.clone());
        let mut worker = LocalWorker::new(WORKER, ring, self.status.clone(), self.memory.clone());
        let config = &self.config;
        if config.transports.contains(&Transport::Rdma) {
            let (lanes, pieces) = (config.lanes.into(), config.pieces);
            let settings = Settings { lanes, pieces, ..Settings::default() };
            let tokens = config.prompt_pages * config.layout.page_size as usize;
            let rails = Rails::new(&config.nics, &self.memory, config.slots, tokens, settings);
            let mut rails = rails.map_err(|error| format!("registering the pool: {error}"))?;
            if config.has_data_threads && role == Role::Prefill {
                for split in rails.split(&self.waiter.bell, true).map_err(text)? {
                    self.data.start(split, None).map_err(text)?;
                }
            }
            worker.rails = Some(Arc::new(rails));
        }
        Ok(worker)
    }

    fn listen(&mut self) -> Result<(ListenerId, SocketAddr), String> {
        // Links, all lanes of each session, and the lanes of sessions that are ending.
        let connections = 2 * LANES_MAX.max(self.config.sessions);
        let address = SocketAddr::new(self.config.host, 0);
        let listener = self.reactor.listen(&address.into(), connections).map_err(text)?;
        let address =
            self.reactor.local_address(listener).ok_or("a listener without an address")?;
        Ok((listener, address))
    }

    fn own(&mut self, role: Role) -> PeerIdentity {
        let entropy = self.reactor.entropy();
        let peer = Peer { id: entropy.bytes(), incarnation: entropy.bytes() };
        PeerIdentity { peer, role, keys: self.config.keys.clone() }
    }

    fn agent<C>(
        self,
        endpoint: WorkerEndpoint,
        handle: TransferHandle<C>,
        mover: Mover,
        links: ControlLinks,
        (address, data): (Option<SocketAddr>, Option<SocketAddr>),
    ) -> Result<Agent<C>, String> {
        let Parts { config, memory, mut reactor, bell, waiter, data: threads, answers, .. } = self;
        let mut pool = PagePool::new(memory.pages);
        // The engine uses all pages, and only pages in use can be leased.
        let mut all = Vec::with_capacity(memory.pages as usize);
        if !pool.allocate(memory.pages, &mut all) {
            return Err("the pool has no pages".into());
        }
        let offer = TransportCapabilities {
            transports: config.transports,
            host: config.machine,
            data,
            lanes: config.lanes,
        };
        let waiter = (!config.busy_poll).then_some(waiter);
        let mover = MoverRunner::new(mover, waiter, &memory).map_err(text)?;
        let entropy = reactor.entropy().clone();
        Ok(Agent {
            next_tick: reactor.now(),
            prompt_pages: config.prompt_pages,
            leased: (0..config.slots).map(|_| Vec::with_capacity(config.prompt_pages)).collect(),
            handoff: Handoff::new(vec![endpoint], offer, entropy),
            answers: answers.1,
            data: threads,
            memory,
            reactor,
            handle,
            pool,
            links,
            bell,
            mover,
            address,
        })
    }
}

impl SourceAgent {
    /// Creates a source, with a port for the control links of destinations.
    ///
    /// # Errors
    /// The port, a thread, or the memory of a NIC cannot be had.
    pub fn source(config: AgentConfig, reactor: Reactor) -> Result<SourceAgent, String> {
        if config.transports.contains(&Transport::Shm) && !config.region.is_shareable() {
            return Err("a source with shm needs memory that peers can map".into());
        }
        let mut parts = Parts::new(config, reactor)?;
        let sessions = parts.config.sessions;
        let Rings { links, handle, commands, reports } = parts.rings::<SourceCommand>();
        let (control, address) = parts.listen()?;
        let mut passing = ShmHandshake::default();
        passing.listen(&mut parts.reactor).map_err(text)?;
        let (right, memory) = (MoverRight::for_mover_thread(), parts.memory.clone());
        let source = SourceMover::new(links, memory, sessions, right);
        let mover = Mover { sources: vec![source], destinations: Vec::new() };
        let (transports, status) = (parts.config.transports.clone(), parts.status.clone());
        let early = DecodeAllocation::Early;
        let manager = SourceManager::new(parts.identity(), transports, early, status, sessions);
        let ring = Ring::new(commands, parts.waiter.bell.clone());
        let kind = EndpointKind::Prefill { manager: Box::new(manager), mover: ring };
        let worker = parts.worker(Role::Prefill)?;
        let endpoint = WorkerEndpoint { worker, kind, reports: Some(reports) };
        let links = ControlLinks::new(
            parts.own(Role::Prefill),
            Some(control),
            Box::new(DirectLookup::new(Vec::new())),
            passing,
            TcpHandshake::new(None, parts.waiter.set.clone()),
            parts.config.timeouts,
            parts.reactor.now(),
        );
        parts.agent(endpoint, handle, mover, links, (Some(address), None))
    }

    /// Leases the first pages of the prompt, and aims at the granted target.
    ///
    /// # Panics
    /// The pages are not those of the pool.
    pub fn begin(&mut self, slot: Slot, target: Target, pages: &[PageId]) {
        let lease = self.pool.lease(slot.id, slot.generation, pages);
        self.note_lease(slot, pages);
        self.handle.begin(slot.id, slot.generation, target, [PageSpan::whole(pages)], lease);
    }

    /// Leases the pages of the prompt that are not in its lease yet. `pages` are those of the whole
    /// list, and the page list of the slot has them.
    fn extend_lease(&mut self, slot: Slot, pages: &[PageId]) {
        let leased = &mut self.leased[slot.id.index()];
        let new = &pages[leased.len()..];
        self.pool.extend_lease(new);
        leased.extend_from_slice(new);
    }

    /// Hands over the KV of these tokens, with the aux record if they are the last. Their pages are
    /// leased. They end with a page, unless they are the last.
    pub fn chunk(&mut self, slot: Slot, tokens: Range<u32>, last: Option<AuxRecord>) {
        self.handle.chunk(slot.id, slot.generation, tokens, last);
    }
}

impl DestinationAgent {
    /// Creates a destination.
    ///
    /// # Errors
    /// A port, a thread, or the memory of a NIC cannot be had.
    pub fn destination(config: AgentConfig, reactor: Reactor) -> Result<DestinationAgent, String> {
        let mut parts = Parts::new(config, reactor)?;
        let sessions = parts.config.sessions;
        let Rings { links, handle, commands, reports } = parts.rings::<DestinationCommand>();
        let has_tcp = parts.config.transports.contains(&Transport::Tcp);
        let (listener, data) = has_tcp.then(|| parts.listen()).transpose()?.unzip();
        let (right, memory) = (MoverRight::for_mover_thread(), parts.memory.clone());
        let destination = DestinationMover::new(links, memory, sessions, right);
        let mover = Mover { sources: Vec::new(), destinations: vec![destination] };
        let manager = DestinationManager::new(parts.identity(), parts.status.clone(), sessions);
        let ring = Ring::new(commands, parts.waiter.bell.clone());
        let doorbell = parts.waiter.doorbell.duplicate().map_err(text)?;
        let kind = EndpointKind::Decode { manager: Box::new(manager), mover: ring, doorbell };
        let worker = parts.worker(Role::Decode)?;
        let endpoint = WorkerEndpoint { worker, kind, reports: Some(reports) };
        let links = ControlLinks::new(
            parts.own(Role::Decode),
            None,
            Box::new(DirectLookup::new(parts.config.allowed.clone())),
            ShmHandshake::default(),
            TcpHandshake::new(listener, parts.waiter.set.clone()),
            parts.config.timeouts,
            parts.reactor.now(),
        );
        parts.agent(endpoint, handle, mover, links, (None, data))
    }

    /// Leases the pages of the tokens to the transfer, and asks the source for their KV. `pages`
    /// are those of the whole prompt. False if the request has failed in the meantime; its lease
    /// ends at once.
    ///
    /// # Panics
    /// The pages are not those of the pool.
    pub fn expect(
        &mut self,
        slot: Slot,
        from: (SessionId, Room),
        tokens: Range<u32>,
        pages: &[PageId],
    ) -> bool {
        let lease = self.pool.lease_to_write(slot.id, slot.generation, pages);
        self.note_lease(slot, pages);
        let span = [PageSpan::whole(pages)];
        let granted =
            self.handle.expect(slot.id, slot.generation, from, tokens.clone(), span, lease);
        self.handoff.handle_expecting(WORKER, slot, tokens, self.reactor.now());
        granted
    }
}

impl<C: Cancel> Agent<C> {
    /// The address that a destination needs for this source. At a destination, the port of its
    /// lanes is no such address, so there is none.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// Takes a slot before its request comes.
    fn take_slot(&mut self) -> Option<Slot> {
        let now = self.reactor.now();
        self.handoff.worker_mut(WORKER).take_slot(prompt_of(&[]), now)
    }

    /// Takes a slot for a prompt in `room`. At a destination, `source` computes the prompt. Answers
    /// come from [`Agent::poll_answer`].
    ///
    /// # Errors
    /// No slot is free.
    pub fn enter(
        &mut self,
        room: Room,
        prompt: Prompt,
        source: Option<&Source>,
        deadline: Instant,
    ) -> Result<Slot, String> {
        let slot = self.take_slot().ok_or("no slot is free")?;
        self.enter_in(slot, room, (prompt, deadline), source);
        Ok(slot)
    }

    fn enter_in(
        &mut self,
        slot: Slot,
        room: Room,
        (prompt, deadline): (Prompt, Instant),
        source: Option<&Source>,
    ) {
        self.handoff.worker_mut(WORKER).set_prompt(slot, prompt, deadline);
        self.handoff.enter(WORKER, slot, room, source, self.reactor.now());
    }

    /// Whether the mover takes one more command of each kind.
    fn has_room(&self) -> bool {
        self.handle.has_room()
    }

    /// The next answer to a request that has entered.
    pub fn poll_answer(&mut self) -> Option<TransferAnswer> {
        self.answers.try_recv().ok()
    }

    /// The slot's status.
    pub fn status(&self, slot: Slot) -> SlotStatus {
        self.handle.status(slot.id)
    }

    /// The slot of the next lease that has ended, and the received aux record. The pages belong to
    /// the engine again.
    pub fn poll_end(&mut self) -> Option<(Slot, Option<AuxRecord>)> {
        let LeaseEnd { ended, aux } = self.handle.poll_end()?;
        let slot = Slot { id: ended.slot(), generation: ended.generation() };
        let pages = &mut self.leased[slot.id.index()];
        self.pool.end_lease(ended, &*pages);
        pages.clear();
        Some((slot, aux))
    }

    /// Ends a request and frees its slot. Its lease has ended, or it never had one.
    pub fn leave(&mut self, slot: Slot, failure: Option<Cause>) {
        self.finish(slot, failure);
        self.release(slot);
    }

    /// The engine does not need the KV. The source learns it, even if it has not learnt of the
    /// request.
    fn decline(&mut self, slot: Slot) {
        self.handoff.handle_declined(WORKER, slot);
    }

    /// The request has its outcome: peers learn it.
    fn finish(&mut self, slot: Slot, failure: Option<Cause>) {
        self.handoff.handle_finished(WORKER, slot, failure, self.reactor.now());
    }

    /// Frees the slot of a request that has finished.
    fn release(&mut self, slot: Slot) {
        assert!(self.leased[slot.id.index()].is_empty(), "a slot is free after its lease");
        self.handoff.release_slot(WORKER, slot);
    }

    /// Ends the transfer of a slot. Its lease ends when no byte can arrive any more. False if the
    /// transfer has already ended.
    pub fn cancel(&mut self, slot: Slot, cause: Cause) -> bool {
        self.handle.fail(slot.id, slot.generation, cause)
    }

    /// Ends the agent: waits until its peers have all bytes of hand-overs that have ended here,
    /// sends what they must still learn, says Bye, and ends its thread. It waits until `until` at
    /// the latest. Requests that have not ended fail at their peers. Then no peer reads or writes
    /// the pages any more, or a copy that is still running is void.
    ///
    /// # Errors
    /// The reactor failed.
    pub fn close(mut self, until: Instant) -> Result<(), String> {
        let (bell, now) = (self.bell.clone(), self.reactor.now());
        // A peer that stands still leaves time for the last messages.
        let confirm_until = now + until.saturating_duration_since(now) * 3 / 4;
        while self.handoff.unconfirmed() > 0 {
            let left = confirm_until.saturating_duration_since(self.reactor.now());
            if left.is_zero() {
                break;
            }
            self.step_mover();
            bell.prepare_wait();
            self.turn_within(left.min(TICK), |_| Ok(()))?;
            bell.cancel_wait();
        }
        let now = self.reactor.now();
        self.links.run_remote_actions(&mut self.reactor, &mut self.handoff, now);
        self.links.close(&mut self.reactor);
        while self.reactor.queued_total() > 0 && self.reactor.now() < until {
            self.reactor.poll(Some(until)).map_err(text)?;
            while self.reactor.next_event().is_some() {}
        }
        Ok(())
    }

    fn note_lease(&mut self, slot: Slot, pages: &[PageId]) {
        let leased = &mut self.leased[slot.id.index()];
        debug_assert!(leased.is_empty(), "a slot has one lease");
        leased.extend_from_slice(pages);
    }

    /// Whether nothing of any request is left.
    ///
    /// # Errors
    /// What is left.
    pub fn check_idle(&self) -> Result<(), String> {
        let pages: usize = self.leased.iter().map(Vec::len).sum();
        match (pages, self.handoff.open_rooms()) {
            (0, 0) => self.handoff.check_confirmed(),
            (pages, rooms) => Err(format!("{pages} leased pages, {rooms} rooms")),
        }
    }

    /// Panics unless the tables of the agent agree.
    pub fn invariants(&self) {
        self.pool.invariants();
        self.links.invariants();
        self.handoff.invariants();
    }

    /// What wakes the owner: an answer, the end of a lease, a state.
    pub fn bell(&self) -> &EventCount {
        &self.bell
    }

    /// Runs a step of the mover. Returns false if another thread runs it.
    pub fn step_mover(&mut self) -> bool {
        self.mover.step()
    }

    /// Runs one turn of `ctl`. If it `can_park`, it waits for an event, at most for an interval of
    /// the checks, unless busy polling is set. Events of the owner's connections go to `foreign`.
    ///
    /// # Errors
    /// The reactor failed, or `foreign` did.
    pub fn turn(
        &mut self,
        can_park: bool,
        foreign: impl FnMut(Event) -> Result<(), String>,
    ) -> Result<(), String> {
        self.turn_within(if can_park { TICK } else { Duration::ZERO }, foreign)
    }

    /// As [`Agent::turn`], with a wait of `wait_max` at most.
    fn turn_within(
        &mut self,
        wait_max: Duration,
        mut foreign: impl FnMut(Event) -> Result<(), String>,
    ) -> Result<(), String> {
        // What the owner has asked for since the last turn leaves before the wait.
        let now = self.reactor.now();
        self.links.run_remote_actions(&mut self.reactor, &mut self.handoff, now);
        let can_wait = self.mover.is_thread() && !self.handoff.has_events();
        let wait = if can_wait { wait_max } else { Duration::ZERO };
        self.reactor.poll(Some(now + wait)).map_err(text)?;
        let now = self.reactor.now();
        while let Some(event) = self.reactor.next_event() {
            if self.links.owns(&event) {
                self.links.handle(event, &mut self.reactor, &mut self.handoff, now);
            } else {
                foreign(event)?;
            }
        }
        self.handoff.step(now);
        // An engine has no use for the logprobs of a prompt.
        while self.handoff.poll_record().is_some() {}
        self.links.run_remote_actions(&mut self.reactor, &mut self.handoff, now);
        if now >= self.next_tick {
            if self.mover.has_ended() || self.data.has_ended() {
                return Err("a thread of the agent has ended".into());
            }
            self.next_tick = now + TICK;
            self.handoff.expire(now);
            self.links.expire(&mut self.reactor, &mut self.handoff, now);
        }
        Ok(())
    }
}

//! The requests of an agent: which hand-over each slot waits for, and what its engine learns.
//!
//! ```text
//!         Enter                  met and pages           Success or Failed      lease is back
//!  Free ───────▶ Open (no lease) ─────────────▶ Open (lease out) ──▶ Over (lease out) ──▶ Ended
//!   ▲                └──────────────── Failed ──────────────────▶ Over (no lease) ─────────▶ │
//!   └──────────────────────────────────── Release ──────────────────────────────────────────┘
//! ```
//! Owns: the state of each slot between its order and its release. Thread: `ctl` of the agent.
//! Invariants: an engine gets one outcome for each request, then one end, and no event after its
//! release. A page that a transfer writes is in one lease. Not here: slots and rings (`client`).

use super::Agent;
use crate::cause::Cause;
use crate::ids::{PageId, Role, Room};
use crate::limits::AGENT_ORDERS_PER_TURN;
use crate::link::handoff::Source;
use crate::stdx::failpoint::is_failpoint_active;
use crate::transfer::answer::TransferAnswer;
use crate::transfer::aux::{AUX_PAYLOAD_BYTES, AuxRecord};
use crate::transfer::command::{Cancel, DestinationCommand, SourceCommand};
use crate::transfer::manager::rooms::{Prompt, Slot};
use crate::transfer::status::State;
use crate::transfer::target::{SessionId, Target};
use crossbeam_channel::{Receiver, Sender};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes that a source sends with the last tokens of a prompt.
pub type AuxPayload = [u8; AUX_PAYLOAD_BYTES];

/// What an engine orders. Each order comes at most once for a request.
#[derive(Debug)]
pub enum AgentOrder {
    /// A prompt takes part in the hand-off of `room`. At a destination, `source` computes it.
    Enter {
        /// A free slot.
        slot: Slot,
        /// The attempt.
        room: Room,
        /// What both ends must agree on.
        prompt: Prompt,
        /// The computing worker.
        source: Option<Source>,
        /// The request fails after this time.
        within: Duration,
    },
    /// At a source: what the destination gets with the last tokens.
    Last {
        /// The request.
        slot: Slot,
        /// The bytes.
        payload: AuxPayload,
    },
    /// The request is no longer wanted.
    Cancel {
        /// The request.
        slot: Slot,
        /// The reason.
        cause: Cause,
    },
    /// The engine does not use the slot any more. The request has ended.
    Release {
        /// The request.
        slot: Slot,
    },
}

/// What an engine learns about a request.
#[derive(Clone, Debug, PartialEq)]
pub enum AgentEventKind {
    /// The other end is known: at a source, a destination waits for the KV; at a destination, the
    /// session with the source is open.
    Met,
    /// Outcome: the KV is handed over. At a destination, with the bytes of the source.
    Landed(Option<AuxPayload>),
    /// Outcome: the KV is not handed over.
    Failed(Cause),
    /// The pages can be used for something else. It follows the outcome.
    Ended,
}

/// An event of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct AgentEvent {
    /// The request.
    pub slot: Slot,
    /// Its room.
    pub room: Room,
    /// What happened.
    pub kind: AgentEventKind,
}

/// Events of a request: Met, an outcome, Ended.
pub(super) const EVENTS_OF_A_REQUEST: usize = 3;
/// Orders of a request: one of each kind.
pub(super) const ORDERS_OF_A_REQUEST: usize = 4;

/// What the engine has done for the request of a slot. `ctl` reads it in each turn. A count with
/// the generation of another request is none.
#[derive(Debug, Default)]
pub(super) struct SlotProgress {
    /// Pages in the slot's page list, with the generation.
    pub(super) leased: AtomicU64,
    /// Tokens of the prompt that are computed, with the generation.
    pub(super) computed: AtomicU64,
    /// Tokens that a destination already has. They are stored before the pages.
    pub(super) prefix: AtomicU32,
}

/// A generation and a number in one word.
pub(super) fn pack(slot: Slot, number: u32) -> u64 {
    u64::from(slot.generation.0) << 32 | u64::from(number)
}

/// The number in a word of this generation.
pub(super) fn unpack(word: u64, slot: Slot) -> Option<u32> {
    (word >> 32 == u64::from(slot.generation.0)).then_some(word as u32)
}

/// The ends of an engine's rings at the agent.
#[derive(Debug)]
pub(super) struct AgentRings {
    /// Orders of the engine.
    pub(super) orders: Receiver<AgentOrder>,
    /// Events for the engine.
    pub(super) events: Sender<AgentEvent>,
    /// Free slots for the engine; each is already open in the status table.
    pub(super) free: Sender<Slot>,
    /// By slot.
    pub(super) progress: Arc<[SlotProgress]>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Stage {
    /// The engine has no request here.
    #[default]
    Free,
    /// It has no outcome.
    Open,
    /// It has an outcome.
    Over,
    /// It waits for its release.
    Ended,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum LeaseState {
    #[default]
    None,
    Out,
    Back,
}

/// The other end of a request, once it is known.
#[derive(Clone, Copy, Debug)]
enum OtherEnd {
    Target(Target),
    Session(SessionId),
}

/// A slot and its request.
#[derive(Debug)]
pub(crate) struct SlotState {
    slot: Slot,
    stage: Stage,
    lease: LeaseState,
    room: Room,
    tokens: u32,
    deadline: Instant,
    met: Option<OtherEnd>,
    pages: Vec<PageId>,
    /// At a source: tokens that are handed over or that the destination has. At a destination:
    /// tokens that it has.
    handed: u32,
    payload: Option<AuxPayload>,
}

/// The part of the rules that depends on the role.
pub(crate) trait AgentRole: Cancel + Sized {
    /// The role.
    const ROLE: Role;
    /// Whether transfers write its pages.
    const IS_DESTINATION: bool = matches!(Self::ROLE, Role::Decode);

    /// Gives the mover what the engine has ordered, if its ring has room. `computed` tokens of the
    /// prompt are computed.
    fn advance(agent: &mut Agent<Self>, held: &mut SlotState, computed: u32);
}

/// All requests of an agent.
#[derive(Debug)]
pub(super) struct AgentRequests {
    slots: Vec<SlotState>,
    rings: AgentRings,
    /// Pages that transfers write.
    written: Vec<bool>,
    /// Whether the engine has events since [`AgentRequests::take_told`].
    has_told: bool,
}

impl AgentRequests {
    /// Takes all slots of an agent, and gives them to its engine.
    pub(super) fn new<C: AgentRole>(agent: &mut Agent<C>, rings: AgentRings) -> AgentRequests {
        let (pages, now) = (agent.memory.pages as usize, agent.reactor.now());
        let mut requests = AgentRequests {
            slots: Vec::new(),
            rings,
            written: vec![false; pages],
            has_told: false,
        };
        while let Some(slot) = agent.take_slot() {
            requests.slots.push(SlotState {
                slot,
                stage: Stage::Free,
                lease: LeaseState::None,
                room: Room(0),
                tokens: 0,
                deadline: now,
                met: None,
                pages: Vec::new(),
                handed: 0,
                payload: None,
            });
        }
        requests.slots.sort_by_key(|held| held.slot.id);
        for held in &requests.slots {
            let given = requests.rings.free.try_send(held.slot);
            debug_assert!(given.is_ok(), "the ring has room for all slots");
        }
        requests
    }

    /// Takes orders, answers and ends of leases, and gives the engine its events. Returns whether
    /// there was anything to do.
    pub(super) fn turn<C: AgentRole>(&mut self, agent: &mut Agent<C>) -> bool {
        let mut is_busy = false;
        for _ in 0..AGENT_ORDERS_PER_TURN {
            let Ok(order) = self.rings.orders.try_recv() else { break };
            self.take_order(order, agent);
            is_busy = true;
        }
        while let Some(answer) = agent.poll_answer() {
            self.take_answer(&answer, agent);
            is_busy = true;
        }
        while let Some((slot, aux)) = agent.poll_end() {
            self.take_end(slot, aux);
            is_busy = true;
        }
        for index in 0..self.slots.len() {
            is_busy |= self.advance(index, agent);
        }
        is_busy
    }

    fn find(&mut self, slot: Slot) -> Option<&mut SlotState> {
        self.slots.get_mut(slot.id.index()).filter(|held| held.slot == slot)
    }

    fn take_order<C: AgentRole>(&mut self, order: AgentOrder, agent: &mut Agent<C>) {
        match order {
            AgentOrder::Enter { slot, room, prompt, source, within } => {
                let deadline = agent.reactor.now() + within;
                let Some(held) = self.find(slot) else { return };
                debug_assert_eq!(held.stage, Stage::Free, "a request enters a free slot");
                (held.stage, held.room, held.tokens) = (Stage::Open, room, prompt.tokens);
                held.deadline = deadline;
                agent.enter_in(slot, room, (prompt, deadline), source.as_ref());
            }
            AgentOrder::Last { slot, payload } => {
                let Some(held) = self.find(slot) else { return };
                held.payload = Some(payload);
            }
            AgentOrder::Cancel { slot, cause } => {
                let is_open = self.find(slot).is_some_and(|held| held.stage == Stage::Open);
                if is_open {
                    agent.decline(slot);
                    agent.cancel(slot, cause);
                }
            }
            AgentOrder::Release { slot } => self.release(slot, agent),
        }
    }

    /// Takes the pages that the engine has leased since the last turn. At a destination, it refuses
    /// pages that another transfer writes, because the bytes of two prompts would mix. The pages of
    /// the prefix are not written.
    fn take_pages<C: AgentRole>(&mut self, index: usize, agent: &mut Agent<C>) {
        let (held, progress) = (&mut self.slots[index], &self.rings.progress[index]);
        let leased = progress.leased.load(Ordering::Acquire);
        let leased = unpack(leased, held.slot).unwrap_or(0) as usize;
        if leased == held.pages.len() {
            return;
        }
        let (slot, lists) = (held.slot, &agent.memory.lists);
        held.pages.extend((held.pages.len()..leased).map(|index| lists.page(slot.id, index)));
        if C::IS_DESTINATION {
            held.handed = progress.prefix.load(Ordering::Relaxed);
            let written = &held.pages[(held.handed / agent.memory.layout.page_size) as usize..];
            // A page that is in the list twice is taken, too.
            let take = |page: &PageId| !std::mem::replace(&mut self.written[page.index()], true);
            let free = written.iter().map(take).take_while(|&is_free| is_free).count();
            if free < written.len() && !is_failpoint_active("pages of another transfer are taken") {
                written[..free].iter().for_each(|page| self.written[page.index()] = false);
                held.pages.clear();
                agent.cancel(slot, Cause::Refused);
            }
        }
    }

    fn take_answer<C: AgentRole>(&mut self, answer: &TransferAnswer, agent: &mut Agent<C>) {
        let (slot, met) = match *answer {
            TransferAnswer::Granted { slot: id, generation, target, .. } => {
                (Slot { id, generation }, OtherEnd::Target(target))
            }
            TransferAnswer::SessionReady { slot: id, generation, session, .. } => {
                (Slot { id, generation }, OtherEnd::Session(session))
            }
            // The destination will come.
            TransferAnswer::Awaited { .. } => return,
            TransferAnswer::Abort { slot: id, generation, cause, .. } => {
                let slot = Slot { id, generation };
                if self.find(slot).is_some_and(|held| held.stage == Stage::Open) {
                    agent.cancel(slot, cause);
                }
                return;
            }
        };
        let Some(held) = self.find(slot).filter(|held| held.stage == Stage::Open) else { return };
        if held.met.replace(met).is_some() {
            return;
        }
        if let OtherEnd::Target(target) = met {
            held.handed = target.prefix;
        }
        self.tell(slot, AgentEventKind::Met);
    }

    fn take_end(&mut self, slot: Slot, aux: Option<AuxRecord>) {
        let Some(held) = self.find(slot) else { return };
        debug_assert_eq!(held.lease, LeaseState::Out, "a lease ends once");
        held.lease = LeaseState::Back;
        held.payload = aux.map(|aux| aux.payload);
    }

    /// Advances a request as far as possible. Returns whether its engine got an event.
    fn advance<C: AgentRole>(&mut self, index: usize, agent: &mut Agent<C>) -> bool {
        let held = &mut self.slots[index];
        let slot = held.slot;
        if held.stage == Stage::Open {
            let status = agent.status(slot);
            match status.state {
                State::Failed => {
                    let cause = status.cause.unwrap_or(Cause::Internal);
                    held.stage = Stage::Over;
                    agent.finish(slot, Some(cause));
                    self.tell(slot, AgentEventKind::Failed(cause));
                    return true;
                }
                // The bytes of the source come with the end of the lease.
                State::Success if held.lease == LeaseState::Back || !C::IS_DESTINATION => {
                    let payload = held.payload.take().filter(|_| C::IS_DESTINATION);
                    held.stage = Stage::Over;
                    agent.finish(slot, None);
                    self.tell(slot, AgentEventKind::Landed(payload));
                    return true;
                }
                State::Success => {}
                _ if agent.reactor.now() >= held.deadline
                    && !is_failpoint_active("deadline of a request is not watched") =>
                {
                    agent.cancel(slot, Cause::Deadline);
                }
                _ => {
                    let computed = self.rings.progress[index].computed.load(Ordering::Acquire);
                    let computed = unpack(computed, slot).unwrap_or(0);
                    // The pages of these tokens were leased before.
                    self.take_pages(index, agent);
                    C::advance(agent, &mut self.slots[index], computed);
                }
            }
        }
        let held = &mut self.slots[index];
        // The ring to the mover must always have room for a Cancel of each slot.
        let is_back = held.lease != LeaseState::Out
            || is_failpoint_active("end comes before the lease is back");
        if held.stage == Stage::Over && is_back && agent.has_room() {
            held.stage = Stage::Ended;
            if C::IS_DESTINATION {
                let kept = (held.handed / agent.memory.layout.page_size) as usize;
                let written = held.pages.iter().skip(kept);
                written.for_each(|page| self.written[page.index()] = false);
            }
            held.pages.clear();
            self.tell(slot, AgentEventKind::Ended);
            return true;
        }
        false
    }

    fn release<C: AgentRole>(&mut self, slot: Slot, agent: &mut Agent<C>) {
        let Some(held) = self.find(slot) else { return };
        debug_assert_eq!(held.stage, Stage::Ended, "a request is released after its end");
        agent.release(slot);
        let Some(next) = agent.take_slot() else { return };
        debug_assert_eq!(next.id, slot.id, "no other slot is free");
        let held = &mut self.slots[slot.id.index()];
        (held.slot, held.stage, held.lease) = (next, Stage::Free, LeaseState::None);
        (held.met, held.handed, held.payload) = (None, 0, None);
        if is_failpoint_active("released slot is lost") {
            return;
        }
        let given = self.rings.free.try_send(next);
        debug_assert!(given.is_ok(), "the ring has room for all slots");
    }

    /// Whether the engine has got events since the last call.
    pub(super) fn take_told(&mut self) -> bool {
        std::mem::take(&mut self.has_told)
    }

    fn tell(&mut self, slot: Slot, kind: AgentEventKind) {
        self.has_told = true;
        let room = self.slots[slot.id.index()].room;
        let told = self.rings.events.try_send(AgentEvent { slot, room, kind });
        debug_assert!(told.is_ok(), "the ring has room for all events of all slots");
    }
}

impl AgentRole for SourceCommand {
    const ROLE: Role = Role::Prefill;

    fn advance(agent: &mut Agent<SourceCommand>, held: &mut SlotState, computed: u32) {
        let Some(OtherEnd::Target(target)) = held.met else { return };
        if held.pages.is_empty() || !agent.has_room() {
            return;
        }
        if held.lease == LeaseState::None {
            agent.begin(held.slot, target, &held.pages);
            held.lease = LeaseState::Out;
        } else if held.lease == LeaseState::Out {
            agent.extend_lease(held.slot, &held.pages);
        }
        // The last tokens leave with the bytes for the destination.
        let is_last = computed == held.tokens && held.payload.is_some();
        let due = if is_last { computed } else { whole_pages(agent, held, computed) };
        if held.lease == LeaseState::Out && held.handed < due && agent.has_room() {
            let payload = if is_last { held.payload.take() } else { None };
            let aux = payload.map(|payload| AuxRecord::new(held.room, payload));
            agent.chunk(held.slot, held.handed..due, aux);
            held.handed = due;
        }
    }
}

/// Tokens of the whole pages that can leave before the last tokens. Two chunks must not share a
/// page: both would write it, over lanes that have no common order.
fn whole_pages(agent: &Agent<SourceCommand>, held: &SlotState, computed: u32) -> u32 {
    let early = computed.min(held.tokens - 1);
    match is_failpoint_active("chunks share a page") {
        true => early,
        false => early - early % agent.memory.layout.page_size,
    }
}

impl AgentRole for DestinationCommand {
    const ROLE: Role = Role::Decode;

    fn advance(agent: &mut Agent<DestinationCommand>, held: &mut SlotState, _: u32) {
        let Some(OtherEnd::Session(session)) = held.met else { return };
        if !held.pages.is_empty() && held.lease == LeaseState::None && agent.has_room() {
            held.lease = LeaseState::Out;
            let tokens = held.handed..held.tokens;
            agent.expect(held.slot, (session, held.room), tokens, &held.pages);
        }
    }
}

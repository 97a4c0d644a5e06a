//! A decode worker's side of the protocol: one session per prefill worker, announced once, and the
//! slots that wait for it or use it. Mirrors [`super::source`].
//!
//! Life of a source: down → dialling → announced → binding → ready. An error leads back to down,
//! fails the waiting slots, and delays the next dial. One exception: if a transport cannot be set
//! up, the worker announces the session again without it, until no transport is left.
//! Not here: the steps of a session (`sessions`), the bound of sessions (`session_table`), the
//! effects of messages on slots (`slots`). This file handles the worker's requests and outside
//! events.

mod effects;
mod session_table;
mod sessions;
mod slots;

pub use effects::{DestinationEffects, DestinationSetup};
pub use session_table::{SessionTable, Standing, Vacancy};

use crate::cause::Cause;
use crate::ids::{PageId, Room, SessionGeneration, SlotId};
use crate::limits::{ABORT_ANSWER_MAX, SESSION_SETUP_DEADLINE};
use crate::stdx::failpoint::is_failpoint_active;
use crate::stdx::hash_map::{HashMap, HashSet};
use crate::transfer::command::DestinationCommand;
use crate::transfer::manager::identity::WorkerIdentity;
use crate::transfer::manager::rooms::{Prompt, Slot};
use crate::transfer::mover::Report;
use crate::transfer::status::{State, StatusTable};
use crate::transfer::target::SessionId;
use crate::transfer::transport::DestinationBinding;
use crate::wire::message::{Abort, Destination, Done, Interest, Message, TransferId, Transport};
use sessions::{Source, Stage};
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Instant;

/// A request of this decode worker. A prefill worker computes its prompt.
#[derive(Clone, Copy, Debug)]
pub struct PromptRequest {
    /// The room in which the legs meet.
    pub room: Room,
    /// The prompt.
    pub prompt: Prompt,
    /// The request's deadline.
    pub deadline: Instant,
}

/// The part of a prompt's KV that a decode worker needs.
#[derive(Clone, Copy, Debug)]
pub struct MissingPages<'a> {
    /// Tokens at the beginning of the prompt that it already holds.
    pub prefix: u32,
    /// The pages for the tokens after the prefix.
    pub pages: &'a [PageId],
}

#[derive(Debug)]
struct Waiting<A> {
    generation: crate::ids::Generation,
    asked: PromptRequest,
    source: A,
    /// Interest or Destination has been sent; the source must learn of a failure.
    sent: bool,
    /// The request needs nothing of its source, which must learn of it, too.
    declined: bool,
    /// The source of a late session has not sent Ready yet.
    ready_due: bool,
    /// The source has sent the record of the prompt. It sends one.
    has_record: bool,
}

/// All sessions and slots of one decode worker.
#[derive(Debug)]
pub struct DestinationManager<L, A> {
    identity: WorkerIdentity,
    status: Arc<StatusTable>,
    sources: HashMap<A, Source<L>>,
    sessions: SessionTable<A>,
    slots: HashMap<SlotId, Waiting<A>>,
    /// Slots with a request that failed here. A source can still write into their pages.
    aborting: HashMap<SlotId, Aborting<A>>,
}

/// An Abort without an answer.
#[derive(Debug)]
struct Aborting<A> {
    generation: crate::ids::Generation,
    room: Room,
    source: A,
    /// Time at which its session is reset.
    until: Instant,
}

impl<L, A> DestinationManager<L, A>
where
    L: Copy + Eq + Hash,
    A: Clone + Eq + Hash + Debug,
{
    /// A worker without sessions; `sessions` bounds their number.
    pub fn new(identity: WorkerIdentity, status: Arc<StatusTable>, sessions: usize) -> Self {
        DestinationManager {
            identity,
            status,
            sources: HashMap::default(),
            sessions: SessionTable::new(sessions),
            slots: HashMap::default(),
            aborting: HashMap::default(),
        }
    }

    /// Adds a request. `source` computes its prompt. Its slot is in Bootstrapping, and the
    /// scheduler knows it. An error ends the request.
    pub fn enter(
        &mut self,
        slot: Slot,
        asked: PromptRequest,
        source: &A,
        now: Instant,
        effects: &mut impl DestinationEffects<L, A>,
    ) -> Result<(), Cause> {
        debug_assert!(!self.slots.contains_key(&slot.id), "a slot has one request");
        let generation = self.status.load(slot.id).generation;
        debug_assert_eq!(generation, slot.generation, "a request enters in its use of a slot");
        if !self.sources.contains_key(source) {
            let fresh = self.take_session(now, effects).ok_or(Cause::Overloaded)?;
            self.sessions.assign(fresh.session, source.clone());
            self.sources.insert(source.clone(), fresh);
        }
        let Some(entry) = self.sources.get_mut(source) else { return Err(Cause::Internal) };
        entry.used = now;
        let waiting = Waiting {
            generation: slot.generation,
            asked,
            source: source.clone(),
            sent: false,
            declined: false,
            ready_due: false,
            has_record: false,
        };
        match entry.stage {
            Stage::Ready { .. } => {
                self.slots.insert(slot.id, waiting);
                self.begin(slot, now, effects);
                return Ok(());
            }
            Stage::Down { until, cause } if until > now => return Err(cause),
            Stage::Down { .. } => {
                entry.stage = Stage::Dialling { deadline: now + SESSION_SETUP_DEADLINE };
                effects.dial(source);
            }
            Stage::Dialling { .. } | Stage::Announced { .. } | Stage::Binding { .. } => {}
        }
        self.slots.insert(slot.id, waiting);
        Ok(())
    }

    /// Continues a slot with a ready session: the scheduler can lease pages, or a source with late
    /// allocation computes first.
    fn begin(&mut self, slot: Slot, now: Instant, effects: &mut impl DestinationEffects<L, A>) {
        let Some(waiting) = self.slots.get_mut(&slot.id) else { return };
        let Some(source) = self.sources.get(&waiting.source) else { return };
        let Stage::Ready { link, late, .. } = source.stage else { return };
        if !late {
            return effects.ready(slot, source.session);
        }
        debug_assert!(!waiting.sent, "a source gets one Interest of a slot");
        (waiting.sent, waiting.ready_due) = (true, true);
        let interest = Interest {
            id: TransferId { room: waiting.asked.room, slot: slot.id, generation: slot.generation },
            session: source.generation,
            tokens: waiting.asked.prompt.tokens,
            ids_hash: waiting.asked.prompt.hash,
            deadline_ms: millis_until(waiting.asked.deadline, now),
        };
        effects.send(link, &Message::Interest(interest));
    }

    /// The scheduler has leased the pages of `rest` and set WaitingForInput: sends Destination.
    /// Returns the transport of the KV.
    pub fn expecting(
        &mut self,
        slot: Slot,
        rest: MissingPages<'_>,
        now: Instant,
        effects: &mut impl DestinationEffects<L, A>,
    ) -> Option<Transport> {
        // If the slot has failed in the meantime, its lease can have ended with its session. So its
        // pages must not be sent.
        let status = self.status.load(slot.id);
        if status.generation != slot.generation || status.state == State::Failed {
            return None;
        }
        let held = self.slots.get_mut(&slot.id);
        let waiting = held.filter(|held| held.generation == slot.generation)?;
        let source = self.sources.get(&waiting.source);
        let Some((link, source)) = source.and_then(|source| Some((source.link()?, source))) else {
            self.fail(slot, Cause::PeerLost, effects);
            return None;
        };
        debug_assert!(source.transport().is_some(), "pages are leased after the session is ready");
        waiting.sent = true;
        let PromptRequest { room, prompt, deadline } = waiting.asked;
        let id = TransferId { room, slot: slot.id, generation: slot.generation };
        let destination = Destination {
            id,
            session: source.generation,
            tokens: prompt.tokens,
            prefix_tokens: rest.prefix,
            ids_hash: prompt.hash,
            aux_index: slot.id.0,
            deadline_ms: millis_until(deadline, now),
            pages: rest.pages.into(),
        };
        effects.send(link, &Message::Destination(destination));
        source.transport()
    }

    /// The request needs nothing of its source. If its session is ready, the source learns it when
    /// the request leaves.
    pub fn decline(&mut self, slot: Slot) {
        let held = self.slots.get_mut(&slot.id);
        if let Some(waiting) = held.filter(|held| held.generation == slot.generation) {
            waiting.declined = true;
        }
    }

    /// Removes a request that has ended here. If it failed after Interest or Destination, sends an
    /// Abort to the source. If the source writes into this worker's pages, its answer or the
    /// session's reset ends the slot's lease.
    pub fn leave(
        &mut self,
        slot: Slot,
        failure: Option<Cause>,
        now: Instant,
        effects: &mut impl DestinationEffects<L, A>,
    ) {
        if self.slots.get(&slot.id).is_none_or(|held| held.generation != slot.generation) {
            return;
        }
        let Some(waiting) = self.slots.remove(&slot.id) else { return };
        let Some(cause) = failure else { return };
        let source = self.sources.get(&waiting.source);
        let writes = source.and_then(Source::transport).is_some_and(Transport::writes_remotely);
        match source.and_then(Source::link).filter(|_| waiting.sent || waiting.declined) {
            Some(link) => {
                let Waiting { generation, asked: PromptRequest { room, .. }, source, .. } = waiting;
                let id = TransferId { room, slot: slot.id, generation };
                effects.send(link, &Message::Abort(Abort { id, cause }));
                if writes {
                    let until = now + ABORT_ANSWER_MAX;
                    self.aborting.insert(slot.id, Aborting { generation, room, source, until });
                }
            }
            // The source does not know the room, or posts nothing more for it.
            None if writes => {
                effects.mover(DestinationCommand::Quiet {
                    slot: slot.id,
                    generation: slot.generation,
                });
            }
            None => {}
        }
    }

    /// Announces the session on a dialled link that is open and proven.
    pub fn link_up(
        &mut self,
        source: &A,
        link: L,
        now: Instant,
        effects: &mut impl DestinationEffects<L, A>,
    ) {
        let Some(entry) = self.sources.get_mut(source) else { return effects.hang_up(link) };
        if !matches!(entry.stage, Stage::Dialling { .. }) {
            return effects.hang_up(link);
        }
        entry.without.clear();
        debug_assert!(self.source_of(link).is_none(), "a link carries one session");
        self.announce(source, link, Cause::Incompatible, now, effects);
    }

    /// Handles a dial that failed, or a source without a valid proof.
    pub fn dial_failed(
        &mut self,
        source: &A,
        cause: Cause,
        now: Instant,
        effects: &mut impl DestinationEffects<L, A>,
    ) {
        let stage = self.sources.get(source).map(|entry| &entry.stage);
        // A dial can fail after its deadline has ended the set-up.
        if matches!(stage, Some(Stage::Dialling { .. })) {
            self.down(source, now, cause, effects);
        }
    }

    /// Handles a message about sessions and transfers.
    pub fn receive(
        &mut self,
        link: L,
        message: &Message<'_>,
        now: Instant,
        effects: &mut impl DestinationEffects<L, A>,
    ) {
        let Some(source) = self.source_of(link) else { return };
        match message {
            Message::Welcome(welcome) => self.welcome(&source, link, welcome, now, effects),
            Message::Refused(refused) => self.refused(&source, refused, now, effects),
            Message::AbortAck(ack) => self.abort_ack(&source, ack, now, effects),
            Message::Status(status) => self.status(&source, status, now, effects),
            Message::Ready(ready) => self.computed(&source, &ready.id, effects),
            Message::PromptRecord(record) if self.holds(&source, &record.id) => {
                let held = self.slots.get_mut(&record.id.slot);
                let is_first =
                    held.is_some_and(|held| !std::mem::replace(&mut held.has_record, true));
                if is_first {
                    effects.record(Slot::from(record.id), record.bytes);
                }
            }
            // The other messages are for a source, or for the link itself.
            _ => {}
        }
    }

    /// Handles the result of [`DestinationEffects::bind`]: the transport is set up, or cannot be.
    pub fn bound(
        &mut self,
        session: SessionId,
        generation: SessionGeneration,
        half: Result<Box<DestinationBinding>, String>,
        now: Instant,
        effects: &mut impl DestinationEffects<L, A>,
    ) {
        let Some(source) = self.sessions.source(session).cloned() else { return };
        let Some(entry) =
            self.sources.get_mut(&source).filter(|entry| entry.generation == generation)
        else {
            return;
        };
        let Stage::Binding { link, transport, late, .. } = entry.stage else { return };
        match half {
            Ok(binding) => effects.mover(DestinationCommand::Open { session, generation, binding }),
            Err(_) => {
                return self.announce_without(&source, transport, Cause::PeerLost, now, effects);
            }
        }
        entry.stage = Stage::Ready { link, transport, late };
        for slot in self.waiting_for(&source) {
            self.begin(slot, now, effects);
        }
    }

    /// Handles a dead link: the session ends and its transfers fail.
    pub fn link_down(
        &mut self,
        link: L,
        cause: Cause,
        now: Instant,
        effects: &mut impl DestinationEffects<L, A>,
    ) {
        if let Some(source) = self.source_of(link) {
            self.down(&source, now, cause, effects);
        }
    }

    /// Handles a report of the mover.
    pub fn report(
        &mut self,
        report: Report,
        now: Instant,
        effects: &mut impl DestinationEffects<L, A>,
    ) {
        match report {
            Report::Arrived { slot, generation, room, session } => {
                let source = self.sessions.source(session);
                let link = source.and_then(|source| self.sources.get(source)?.link());
                if let Some(link) = link.filter(|_| !is_failpoint_active("done is not told")) {
                    self.trust(session);
                    let id = TransferId { room, slot, generation };
                    effects.send(link, &Message::Done(Done { id }));
                }
            }
            // The mover has marked the slot and ended its lease. The source gets an Abort when the
            // request leaves.
            Report::Failed { slot, generation, cause } => {
                effects.failed(Slot { id: slot, generation }, cause)
            }
            Report::Lost { session, generation, cause } => {
                let source = self.sessions.source(session).cloned();
                // The link can have reported the same end before, and a new dial can be under way.
                let is_meant = |source: &A| {
                    self.sources.get(source).is_some_and(|entry| {
                        entry.generation == generation && entry.transport().is_some()
                    })
                };
                if let Some(source) = source.filter(is_meant) {
                    self.down(&source, now, cause, effects);
                }
            }
            Report::Withdrawn { .. } => {}
        }
    }

    /// Ends set-ups and Aborts after their deadlines.
    pub fn expire(&mut self, now: Instant, effects: &mut impl DestinationEffects<L, A>) {
        let overdue = |source: &Source<L>| match source.stage {
            Stage::Dialling { deadline }
            | Stage::Announced { deadline, .. }
            | Stage::Binding { deadline, .. } => deadline <= now,
            Stage::Down { .. } | Stage::Ready { .. } => false,
        };
        let is_late = |name: &&A| self.sources.get(*name).is_some_and(overdue);
        let named = self.sessions.sources().map(|(_, name)| name);
        let late: Vec<A> = named.filter(is_late).cloned().collect();
        for source in late {
            self.down(&source, now, Cause::PeerLost, effects);
        }
        // RDMA can be used again, so an idle session with another transport ends and is set up
        // again.
        while let Some(source) = self.regained(now) {
            self.down(&source, now, Cause::PeerLost, effects);
        }
        while let Some(source) = self.unanswered(now) {
            self.down(&source, now, Cause::PeerLost, effects);
        }
        if cfg!(debug_assertions) {
            self.invariants();
        }
    }

    /// Asserts the rules that hold between calls. Debug builds call it at each tick.
    ///
    /// # Panics
    /// A source and its session do not name each other, two sessions have one link, or a slot waits
    /// for an answer that no source will send.
    pub fn invariants(&self) {
        let mut taken = 0;
        for (session, name) in self.sessions.sources() {
            assert_eq!(self.sources[name].session, session, "a source has one session");
            taken += 1;
        }
        assert_eq!(self.sources.len(), taken, "each source has a session");
        let links: Vec<L> = self.sources.values().filter_map(Source::link).collect();
        let distinct = links.iter().copied().collect::<HashSet<L>>().len();
        assert_eq!(distinct, links.len(), "a link carries one session");
        for waiting in self.slots.values() {
            let source = self.sources.get(&waiting.source);
            let transport = source.expect("a slot's source is known").transport();
            assert!(!waiting.sent || transport.is_some(), "a source knows slots of its session");
        }
        for (slot, asked) in &self.aborting {
            let transport = self.sources.get(&asked.source).and_then(Source::transport);
            let writes = transport.is_some_and(Transport::writes_remotely);
            assert!(writes, "only a source that can write owes an answer");
            let next = self.slots.get(slot).map(|waiting| waiting.generation);
            assert_ne!(next, Some(asked.generation), "a slot that was aborted has left");
        }
    }

    /// Whether a session is established, or is being set up.
    pub fn is_open(&self, session: SessionId) -> bool {
        let mut sources = self.sessions.sources();
        sources.any(|(id, name)| id == session && self.sources[name].link().is_some())
    }

    /// Slots that have not ended.
    pub fn open_slots(&self) -> usize {
        self.slots.len()
    }
}

/// Milliseconds until the deadline, in the wire's format.
fn millis_until(deadline: Instant, now: Instant) -> u32 {
    u32::try_from(deadline.saturating_duration_since(now).as_millis()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;

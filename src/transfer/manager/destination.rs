//! A decode worker's side of the protocol: one session per prefill worker, announced once, and the slots
//! that wait for it or in it. Mirrors [`super::source`].
//!
//! Life of a source: down → dialling → announced → binding → ready; any trouble leads back to down, fails
//! what waited, and holds off the next dial for a while. Only a transport that cannot be set up leads from
//! announced or binding back to announced, without that transport, until none is left.

use crate::cause::Cause;
use crate::ids::{PageId, Room, SessionGeneration, SlotId};
use crate::kv::layout::KvLayout;
use crate::limits::{ABORT_ANSWER_MAX, DIAL_HOLD_OFF, RDMA_BARRED, SESSION_SETUP_DEADLINE};
use crate::stdx::planted::is_planted;
use crate::transfer::command::{DestinationCommand, SessionId};
use crate::transfer::manager::choice::Choice;
use crate::transfer::manager::identity::{Identity, Mismatch};
use crate::transfer::manager::rooms::{Prompt, Slot};
use crate::transfer::manager::trust::Trust;
use crate::transfer::mover::Report;
use crate::transfer::plan::Template;
use crate::transfer::status::{Move, State, StatusTable};
use crate::transfer::transport::DestinationBinding;
use crate::wire::message::{
    Abort, AbortAck, Announce, Destination, Done, Interest, Message, Rank, Refusal, Refused, Status,
    TransferId, Transport, Welcome,
};
use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a decode worker wants to be read for it.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// Where the legs meet.
    pub room: Room,
    /// The prompt.
    pub prompt: Prompt,
    /// When the request is over.
    pub deadline: Instant,
}

/// What a decode worker wants of a prompt's KV.
#[derive(Clone, Copy, Debug)]
pub struct Rest<'a> {
    /// Tokens at its beginning that it holds already.
    pub prefix: u32,
    /// Where it wants those behind them.
    pub pages: &'a [PageId],
}

/// What the protocol makes happen. `L` names a link, `A` where a prefill worker is reached.
pub trait DestinationEffects<L, A> {
    /// Sends a message over a link.
    fn send(&mut self, link: L, message: &Message<'_>);
    /// Tells the worker's mover.
    fn mover(&mut self, command: DestinationCommand);
    /// Opens a link; [`DestinationManager::link_up`] or [`DestinationManager::dial_failed`] follows.
    fn dial(&mut self, source: &A);
    /// Ends a link.
    fn hang_up(&mut self, link: L);
    /// What this worker offers to a source in a new session: one rank, these transports not in it. `None`
    /// where nothing is left to offer.
    fn offer(&mut self, session: SessionId, source: &A, without: &[Transport]) -> Option<Rank>;
    /// What was offered for a session that has not come to be is not wanted any more.
    fn withdraw(&mut self, session: SessionId);
    /// Sets up this side of the transport that the source chose; [`DestinationManager::bound`] follows.
    fn bind(&mut self, link: L, session: SessionId, how: Binding<'_>);
    /// Tells the scheduler that the slot's session stands, and that pages may be leased.
    fn ready(&mut self, slot: Slot, session: SessionId);
    /// Tells the scheduler that a slot has failed; it is marked already.
    fn failed(&mut self, slot: Slot, cause: Cause);
    /// A transport that breaks again and again is not offered for a while; for the log.
    fn left_out(&mut self, source: &A, transport: Transport, time: Duration);
    /// Two workers do not fit; for the log.
    fn refused(&mut self, source: &A, mismatch: &Mismatch);
}

/// What a transport is made of.
#[derive(Debug)]
pub struct Binding<'a> {
    /// What the source chose, and why.
    pub choice: Choice,
    /// The source's answer.
    pub welcome: &'a Welcome,
    /// The source's layout, checked.
    pub layout: KvLayout,
    /// Where the bytes come to.
    pub template: Template,
}

#[derive(Debug)]
enum Stage<L> {
    /// Not dialled before this time, for this reason.
    Down {
        until: Instant,
        cause: Cause,
    },
    Dialling {
        deadline: Instant,
    },
    Announced {
        link: L,
        offered: Box<Rank>,
        deadline: Instant,
    },
    Binding {
        link: L,
        transport: Transport,
        late: bool,
        deadline: Instant,
    },
    Ready {
        link: L,
        transport: Transport,
        /// Pages are leased when the source says that it has computed.
        late: bool,
    },
}

#[derive(Debug)]
struct Source<L> {
    stage: Stage<L>,
    /// Counted by this worker over all uses of the session's index.
    generation: SessionGeneration,
    session: SessionId,
    /// Transports that could not be set up over the link of now.
    without: Vec<Transport>,
    rdma: Trust,
}

#[derive(Debug)]
struct Waiting<A> {
    generation: crate::ids::Generation,
    asked: Asked,
    source: A,
    /// Interest or Destination has left; a failure is told to the source.
    sent: bool,
    /// The source of a late session owes it Ready.
    ready_due: bool,
}

/// All sessions and slots of one decode worker.
#[derive(Debug)]
pub struct DestinationManager<L, A> {
    identity: Identity,
    status: Arc<StatusTable>,
    sources: HashMap<A, Source<L>>,
    sessions: Vec<Option<A>>,
    slots: HashMap<SlotId, Waiting<A>>,
    /// Slots whose requests have failed here and into whose pages a source may still write.
    aborting: HashMap<SlotId, Aborting<A>>,
}

/// An Abort that is not answered.
#[derive(Debug)]
struct Aborting<A> {
    generation: crate::ids::Generation,
    room: Room,
    source: A,
    /// Then its session is reset.
    until: Instant,
}

impl<L, A> DestinationManager<L, A>
where
    L: Copy + Eq + Hash,
    A: Clone + Eq + Hash + Debug,
{
    /// A worker without sessions; `sessions` bounds their number.
    pub fn new(identity: Identity, status: Arc<StatusTable>, sessions: usize) -> Self {
        DestinationManager {
            identity,
            status,
            sources: HashMap::new(),
            sessions: (0..sessions).map(|_| None).collect(),
            slots: HashMap::new(),
            aborting: HashMap::new(),
        }
    }

    /// A request has come whose prompt is read by `source`; its slot is in Bootstrapping and the scheduler
    /// has it. An error is the request's end.
    pub fn enter(
        &mut self,
        slot: Slot,
        asked: Asked,
        source: &A,
        now: Instant,
        effects: &mut impl DestinationEffects<L, A>,
    ) -> Result<(), Cause> {
        if !self.sources.contains_key(source) {
            let fresh = self.make_room(now).ok_or(Cause::Overloaded)?;
            self.sessions[fresh.session.0 as usize] = Some(source.clone());
            self.sources.insert(source.clone(), fresh);
        }
        let Some(entry) = self.sources.get_mut(source) else { return Err(Cause::Internal) };
        let waiting = Waiting {
            generation: slot.generation,
            asked,
            source: source.clone(),
            sent: false,
            ready_due: false,
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

    /// The session of a slot stands: the scheduler may lease pages, or the source is asked to compute first.
    fn begin(&mut self, slot: Slot, now: Instant, effects: &mut impl DestinationEffects<L, A>) {
        let Some(waiting) = self.slots.get_mut(&slot.id) else { return };
        let Some(source) = self.sources.get(&waiting.source) else { return };
        let Stage::Ready { link, late, .. } = source.stage else { return };
        if !late {
            return effects.ready(slot, source.session);
        }
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

    /// The scheduler has leased the pages of `rest` and set WaitingForInput: Destination may leave. Tells how its KV
    /// comes.
    pub fn expecting(
        &mut self,
        slot: Slot,
        rest: Rest<'_>,
        now: Instant,
        effects: &mut impl DestinationEffects<L, A>,
    ) -> Option<Transport> {
        // A slot that has failed meanwhile may have lost its lease with its session: nobody is told of its pages.
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
        waiting.sent = true;
        let Asked { room, prompt, deadline } = waiting.asked;
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

    /// The request in `slot` has ended here. A failure after Interest or Destination is told to the source, and where the
    /// source writes by itself its answer, or the session's reset, ends the slot's lease.
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
        let writes = source.and_then(Source::transport).is_some_and(Transport::writes);
        match source.and_then(Source::link).filter(|_| waiting.sent) {
            Some(link) => {
                let Waiting { generation, asked: Asked { room, .. }, source, .. } = waiting;
                let id = TransferId { room, slot: slot.id, generation };
                effects.send(link, &Message::Abort(Abort { id, cause }));
                if writes {
                    let until = now + ABORT_ANSWER_MAX;
                    self.aborting.insert(slot.id, Aborting { generation, room, source, until });
                }
            }
            // The source never heard of it, or will post nothing more.
            None if writes => {
                effects.mover(DestinationCommand::Quiet { slot: slot.id, generation: slot.generation });
            }
            None => {}
        }
    }

    /// The link that was dialled has been proven: announces the session.
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
        self.announce(source, link, Cause::Incompatible, now, effects);
    }

    /// The source could not be reached or proven.
    pub fn dial_failed(
        &mut self,
        source: &A,
        cause: Cause,
        now: Instant,
        effects: &mut impl DestinationEffects<L, A>,
    ) {
        self.down(source, now, cause, effects);
    }

    /// A message of the transfer's kinds has come.
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
            // The rest is for a source, or the link's own.
            _ => {}
        }
    }

    /// The transport of a session stands on this side, or could not be set up.
    pub fn bound(
        &mut self,
        session: SessionId,
        generation: SessionGeneration,
        half: Result<Box<DestinationBinding>, String>,
        now: Instant,
        effects: &mut impl DestinationEffects<L, A>,
    ) {
        let Some(source) = self.sessions[session.0 as usize].clone() else { return };
        let Some(entry) = self.sources.get_mut(&source).filter(|entry| entry.generation == generation) else {
            return;
        };
        let Stage::Binding { link, transport, late, .. } = entry.stage else { return };
        match half {
            Ok(binding) => effects.mover(DestinationCommand::Open { session, generation, binding }),
            Err(_) => return self.announce_without(&source, transport, Cause::PeerLost, now, effects),
        }
        entry.stage = Stage::Ready { link, transport, late };
        for slot in self.waiting_for(&source) {
            self.begin(slot, now, effects);
        }
    }

    /// The link is dead: the session is void and what it carried fails.
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

    /// What the mover has to say.
    pub fn report(&mut self, report: Report, now: Instant, effects: &mut impl DestinationEffects<L, A>) {
        match report {
            Report::Arrived { slot, generation, room, session } => {
                let source = self.sessions[session.0 as usize].as_ref();
                let link = source.and_then(|source| self.sources.get(source)?.link());
                if let Some(link) = link.filter(|_| !is_planted("done is not told")) {
                    self.trust(session);
                    let id = TransferId { room, slot, generation };
                    effects.send(link, &Message::Done(Done { id }));
                }
            }
            // Marked and its lease ended by the mover; the source hears of it when the request leaves.
            Report::Failed { slot, generation, cause } => {
                effects.failed(Slot { id: slot, generation }, cause)
            }
            Report::Lost { session, generation, cause } => {
                let source = self.sessions[session.0 as usize].clone();
                let is_meant =
                    |source: &A| self.sources.get(source).is_some_and(|entry| entry.generation == generation);
                if let Some(source) = source.filter(is_meant) {
                    self.down(&source, now, cause, effects);
                }
            }
            Report::Withdrawn { .. } => {}
        }
    }

    /// Ends set-ups that take too long.
    pub fn expire(&mut self, now: Instant, effects: &mut impl DestinationEffects<L, A>) {
        let overdue = |source: &Source<L>| match source.stage {
            Stage::Dialling { deadline }
            | Stage::Announced { deadline, .. }
            | Stage::Binding { deadline, .. } => deadline <= now,
            Stage::Down { .. } | Stage::Ready { .. } => false,
        };
        let is_late = |name: &&A| self.sources.get(*name).is_some_and(overdue);
        let late: Vec<A> = self.sessions.iter().flatten().filter(is_late).cloned().collect();
        for source in late {
            self.down(&source, now, Cause::PeerLost, effects);
        }
        // RDMA may be used again: a session that went another way is built anew once nobody waits in it.
        while let Some(source) = self.regained(now) {
            self.down(&source, now, Cause::PeerLost, effects);
        }
        while let Some(source) = self.unanswered(now) {
            self.down(&source, now, Cause::PeerLost, effects);
        }
    }

    /// A source whose RDMA was left out until now, in a session of another transport that no slot waits for.
    fn regained(&mut self, now: Instant) -> Option<A> {
        let slots = &self.slots;
        let is_idle = |name: &A| slots.values().all(|waiting| waiting.source != *name);
        let other = |source: &Source<L>| source.transport().is_some_and(|way| way != Transport::Rdma);
        self.sessions.iter().flatten().filter(|name| is_idle(name)).find_map(|name| {
            let source = self.sources.get_mut(name).filter(|source| other(source))?;
            source.rdma.take_end(now).then(|| name.clone())
        })
    }

    /// Bytes have come over the session's transport.
    fn trust(&mut self, session: SessionId) {
        let source = self.sessions[session.0 as usize].as_ref();
        let entry = source.and_then(|source| self.sources.get_mut(source));
        if let Some(entry) = entry.filter(|entry| entry.transport() == Some(Transport::Rdma)) {
            entry.rdma.carry();
        }
    }

    /// A source that owes an answer.
    fn unanswered(&self, now: Instant) -> Option<A> {
        let late = self.aborting.iter().filter(|(_, asked)| asked.until <= now);
        late.min_by_key(|(slot, _)| **slot).map(|(_, asked)| asked.source.clone())
    }

    /// Slots that have not ended.
    pub fn open_slots(&self) -> usize {
        self.slots.len()
    }

    /// A source without a name yet, in a free session or in that of the source that has been down for the
    /// longest and that no slot waits for: prefill workers come and go, and what is left of one must not keep
    /// the next one out. Generations go on where the session's last source left them, so that a late lane
    /// or report of it is not taken for one of the new source.
    fn make_room(&mut self, now: Instant) -> Option<Source<L>> {
        let down = |session, generation| Source {
            stage: Stage::Down { until: now, cause: Cause::PeerLost },
            generation,
            session,
            without: Vec::new(),
            rdma: Trust::default(),
        };
        if let Some(free) = self.sessions.iter().position(Option::is_none) {
            return Some(down(SessionId(free as u32), SessionGeneration(0)));
        }
        let is_awaited = |name: &A| self.slots.values().any(|waiting| waiting.source == *name);
        let idle = self.sources.iter().filter_map(|(name, source)| match source.stage {
            Stage::Down { until, .. } => Some((until, source.session, name)),
            _ => None,
        });
        let idle = idle.filter(|(.., name)| !is_awaited(name));
        let (.., oldest) = idle.min_by_key(|&(until, session, _)| (until, session.0))?;
        let oldest = oldest.clone();
        self.sources.remove(&oldest).map(|gone| down(gone.session, gone.generation))
    }

    fn source_of(&self, link: L) -> Option<A> {
        self.sources.iter().find(|(_, source)| source.link() == Some(link)).map(|(name, _)| name.clone())
    }

    fn welcome(
        &mut self,
        source: &A,
        link: L,
        welcome: &Welcome,
        now: Instant,
        effects: &mut impl DestinationEffects<L, A>,
    ) {
        let Some(entry) = self.sources.get_mut(source) else { return };
        let Stage::Announced { offered, .. } = &entry.stage else { return };
        if welcome.session != entry.generation {
            return;
        }
        // It chooses among what was offered. Another one, such as fake, would pass off old pages as KV.
        if !offered.offers(welcome.transport) {
            let theirs = Transport::ALL.into_iter().filter(|&transport| offered.offers(transport));
            let mismatch = Mismatch {
                reason: Refusal::Transport,
                field: "transport".into(),
                source: welcome.transport.to_string(),
                destination: Transport::list(theirs),
            };
            effects.refused(source, &mismatch);
            return self.down(source, now, Cause::Incompatible, effects);
        }
        match self.identity.plan_from(welcome) {
            Ok((layout, template)) => {
                let transport = welcome.transport;
                let offers = |way: &Transport| offered.offers(*way);
                let left: Vec<Transport> = Transport::ALL.into_iter().filter(offers).collect();
                let choice = Choice::explain(transport, &left, &entry.without, None);
                let deadline = now + SESSION_SETUP_DEADLINE;
                entry.stage = Stage::Binding { link, transport, late: welcome.late, deadline };
                effects.bind(link, entry.session, Binding { choice, welcome, layout, template });
            }
            Err(mismatch) => {
                effects.refused(source, &mismatch);
                self.down(source, now, Cause::Incompatible, effects);
            }
        }
    }

    fn refused(
        &mut self,
        source: &A,
        refused: &Refused<'_>,
        now: Instant,
        effects: &mut impl DestinationEffects<L, A>,
    ) {
        let Some(entry) = self.sources.get(source).filter(|entry| entry.generation == refused.session) else {
            return;
        };
        let mismatch = Mismatch {
            reason: refused.reason,
            field: refused.field.into(),
            source: refused.source.into(),
            destination: refused.destination.into(),
        };
        effects.refused(source, &mismatch);
        match &entry.stage {
            // Of those offered a source without other wishes takes the best.
            Stage::Announced { offered, .. } if refused.reason == Refusal::Transport => {
                match Transport::ALL.into_iter().find(|&transport| offered.offers(transport)) {
                    Some(best) => self.announce_without(source, best, Cause::Incompatible, now, effects),
                    None => self.down(source, now, Cause::Incompatible, effects),
                }
            }
            _ if refused.reason == Refusal::Busy => self.down(source, now, Cause::Overloaded, effects),
            _ => self.down(source, now, Cause::Incompatible, effects),
        }
    }

    /// Announces a session, in whose place the link may have had another. `failure` is for where nothing is
    /// left to offer.
    fn announce(
        &mut self,
        source: &A,
        link: L,
        failure: Cause,
        now: Instant,
        effects: &mut impl DestinationEffects<L, A>,
    ) {
        let Some(entry) = self.sources.get_mut(source) else { return };
        entry.generation = SessionGeneration(entry.generation.0.wrapping_add(1).max(1));
        let barred = entry.rdma.is_barred(now).then(|| [&entry.without[..], &[Transport::Rdma]].concat());
        let offered = barred.and_then(|without| effects.offer(entry.session, source, &without));
        // What is barred is better than nothing.
        let offered = offered.or_else(|| effects.offer(entry.session, source, &entry.without));
        let Some(offered) = offered else {
            effects.hang_up(link);
            return self.down(source, now, failure, effects);
        };
        entry.rdma.begin(offered.rdma.map_or(0, |grant| grant.rails));
        let deadline = now + SESSION_SETUP_DEADLINE;
        entry.stage = Stage::Announced { link, offered: Box::new(offered), deadline };
        let announce = Announce {
            session: entry.generation,
            fingerprint: self.identity.fingerprint,
            kv: self.identity.kv_claim(),
            aux: self.identity.aux_claim(),
            ranks: vec![offered],
        };
        effects.send(link, &Message::Announce(Box::new(announce)));
    }

    /// A transport could not be set up: the session is announced anew with what is left.
    fn announce_without(
        &mut self,
        source: &A,
        transport: Transport,
        failure: Cause,
        now: Instant,
        effects: &mut impl DestinationEffects<L, A>,
    ) {
        let Some((entry, link)) = self.sources.get_mut(source).and_then(|entry| {
            let link = entry.link()?;
            Some((entry, link))
        }) else {
            return;
        };
        entry.without.push(transport);
        entry.stage = Stage::Dialling { deadline: now };
        self.announce(source, link, failure, now, effects);
    }

    /// Asked for or not: the source posts nothing more for this use of the slot, and, if quiet, has nothing under
    /// way. If it is not, only a reset makes sure of that. The lease is the mover's to end.
    fn abort_ack(
        &mut self,
        source: &A,
        ack: &AbortAck,
        now: Instant,
        effects: &mut impl DestinationEffects<L, A>,
    ) {
        let slot = Slot::from(ack.id);
        let asked = self.aborting.get(&slot.id).is_some_and(|asked| {
            asked.generation == slot.generation && asked.room == ack.id.room && asked.source == *source
        });
        if asked {
            self.aborting.remove(&slot.id);
        } else if self.holds(source, &ack.id) {
            self.fail(slot, ack.cause, effects);
            // It knows nothing more of this attempt, and would not answer an Abort.
            if let Some(waiting) = self.slots.get_mut(&slot.id).filter(|_| ack.quiet) {
                waiting.sent = false;
            }
        } else {
            return;
        }
        let writes = self.sources.get(source).and_then(Source::transport).is_some_and(Transport::writes);
        match (writes, ack.quiet) {
            (false, _) => {}
            (true, true) => {
                effects.mover(DestinationCommand::Quiet { slot: slot.id, generation: slot.generation });
            }
            (true, false) => self.down(source, now, Cause::PeerLost, effects),
        }
    }

    fn status(
        &mut self,
        source: &A,
        status: &Status,
        now: Instant,
        effects: &mut impl DestinationEffects<L, A>,
    ) {
        if !self.holds(source, &status.id) || status.state != State::Failed as u8 {
            return;
        }
        let cause = status.cause.unwrap_or(Cause::OtherLeg);
        self.fail(Slot::from(status.id), cause, effects);
        let Some(entry) = self.sources.get_mut(source) else { return };
        let by_rdma = entry.transport() == Some(Transport::Rdma);
        if by_rdma && cause == Cause::Unreachable && entry.rdma.fail(now) {
            effects.left_out(source, Transport::Rdma, RDMA_BARRED);
        }
    }

    /// The source has computed what it was asked for: pages may be leased.
    fn computed(&mut self, source: &A, id: &TransferId, effects: &mut impl DestinationEffects<L, A>) {
        if !self.holds(source, id) {
            return;
        }
        let session = self.sources.get(source).map(|source| source.session);
        let waiting = self.slots.get_mut(&id.slot);
        // Once: the scheduler is told of nothing that was not asked for.
        let is_due = waiting.is_some_and(|waiting| std::mem::take(&mut waiting.ready_due));
        if let Some(session) = session.filter(|_| is_due) {
            effects.ready(Slot::from(*id), session);
        }
    }

    fn holds(&self, source: &A, id: &TransferId) -> bool {
        self.slots.get(&id.slot).is_some_and(|held| {
            held.generation == id.generation && held.asked.room == id.room && held.source == *source
        })
    }

    /// Marks the slot Failed, then sends Cancel down the mover's ring, then tells the scheduler. A slot in
    /// Success runs on.
    fn fail(&self, slot: Slot, cause: Cause, effects: &mut impl DestinationEffects<L, A>) {
        if self.status.advance(slot.id, slot.generation, Move::Fail(cause)).is_ok() {
            effects.mover(DestinationCommand::Cancel { slot: slot.id, generation: slot.generation });
            effects.failed(slot, cause);
        }
    }

    /// The session is void, or never came to be.
    fn down(&mut self, source: &A, now: Instant, cause: Cause, effects: &mut impl DestinationEffects<L, A>) {
        let Some(entry) = self.sources.get_mut(source) else { return };
        let link = entry.link();
        let stood = matches!(entry.stage, Stage::Ready { .. });
        let session = entry.session;
        // A session that stood may be rebuilt at once; a source that cannot be reached is left alone a while.
        let hold_off = match () {
            () if is_planted("held off for an hour") => DIAL_HOLD_OFF * 3600,
            () if is_planted("held off for seven seconds") => DIAL_HOLD_OFF * 7,
            () => DIAL_HOLD_OFF,
        };
        let until = if stood { now } else { now + hold_off };
        entry.stage = Stage::Down { until, cause };
        match stood {
            true => effects.mover(DestinationCommand::Close { session }),
            false => effects.withdraw(session),
        }
        if let Some(link) = link {
            effects.hang_up(link);
        }
        // Reset, nothing is owed any more: closing the session has ended the leases.
        self.aborting.retain(|_, asked| asked.source != *source);
        for slot in self.waiting_for(source) {
            if let Some(waiting) = self.slots.get_mut(&slot.id) {
                waiting.sent = false;
            }
            self.fail(slot, cause, effects);
        }
    }

    /// In the order of their indices, so that what is told of them is told in one order.
    fn waiting_for(&self, source: &A) -> Vec<Slot> {
        let waiting = self.slots.iter().filter(|(_, waiting)| waiting.source == *source);
        let mut slots: Vec<Slot> =
            waiting.map(|(&id, waiting)| Slot { id, generation: waiting.generation }).collect();
        slots.sort_unstable_by_key(|slot| slot.id);
        slots
    }
}

/// Milliseconds left, as the wire has them.
fn millis_until(deadline: Instant, now: Instant) -> u32 {
    u32::try_from(deadline.saturating_duration_since(now).as_millis()).unwrap_or(u32::MAX)
}

impl<L: Copy> Source<L> {
    fn transport(&self) -> Option<Transport> {
        match self.stage {
            Stage::Ready { transport, .. } => Some(transport),
            _ => None,
        }
    }

    fn link(&self) -> Option<L> {
        match self.stage {
            Stage::Announced { link, .. } | Stage::Binding { link, .. } | Stage::Ready { link, .. } => {
                Some(link)
            }
            Stage::Down { .. } | Stage::Dialling { .. } => None,
        }
    }
}

#[cfg(test)]
#[path = "destination_tests.rs"]
mod tests;

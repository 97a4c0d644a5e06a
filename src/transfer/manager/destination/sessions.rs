//! The session of each source: how it is announced, bound and ended.
//!
//! Invariants: a source has at most one session, and a generation is never reused; the transfers of
//! a session fail with it.

use super::{DestinationEffects, DestinationManager, DestinationSetup, Standing, Vacancy};
use crate::cause::Cause;
use crate::ids::SessionGeneration;
use crate::limits::{DIAL_HOLD_OFF, SESSION_SETUP_DEADLINE};
use crate::stdx::failpoint::is_failpoint_active;
use crate::stdx::hash_map::HashSet;
use crate::transfer::command::DestinationCommand;
use crate::transfer::manager::choice::TransportChoice;
use crate::transfer::manager::identity::Mismatch;
use crate::transfer::manager::trust::Trust;
use crate::transfer::target::SessionId;
use crate::wire::message::{Announce, Message, Rank, Refusal, Refused, Transport, Welcome};
use std::fmt::Debug;
use std::hash::Hash;
use std::time::Instant;

#[derive(Debug)]
pub(super) enum Stage<L> {
    /// There is no dial before `until`; `cause` is the reason.
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
        /// Pages are leased when the source sends Ready.
        late: bool,
    },
}

#[derive(Debug)]
pub(super) struct Source<L> {
    pub(super) stage: Stage<L>,
    /// Counted by this worker over all uses of the session's index.
    pub(super) generation: SessionGeneration,
    pub(super) session: SessionId,
    /// The time at which its last slot came.
    pub(super) used: Instant,
    /// Transports that could not be set up over the current link.
    pub(super) without: Vec<Transport>,
    pub(super) rdma: Trust,
}

impl<L: Copy> Source<L> {
    pub(super) fn transport(&self) -> Option<Transport> {
        match self.stage {
            Stage::Ready { transport, .. } => Some(transport),
            _ => None,
        }
    }

    pub(super) fn link(&self) -> Option<L> {
        match self.stage {
            Stage::Announced { link, .. }
            | Stage::Binding { link, .. }
            | Stage::Ready { link, .. } => Some(link),
            Stage::Down { .. } | Stage::Dialling { .. } => None,
        }
    }
}

impl<L, A> DestinationManager<L, A>
where
    L: Copy + Eq + Hash,
    A: Clone + Eq + Hash + Debug,
{
    /// A new source, in the session that the table finds for it. `None`: each session has a slot.
    /// Generations continue from the replaced source, so that its late lanes and reports do not
    /// match the new one.
    pub(super) fn take_session(
        &mut self,
        now: Instant,
        effects: &mut impl DestinationEffects<L, A>,
    ) -> Option<Source<L>> {
        let down = |session, generation| Source {
            stage: Stage::Down { until: now, cause: Cause::PeerLost },
            generation,
            session,
            used: now,
            without: Vec::new(),
            rdma: Trust::default(),
        };
        let Vacancy { session, replaced } = self.find_vacancy()?;
        let Some(gone) = replaced else { return Some(down(session, SessionGeneration(0))) };
        if self.sources[&gone].transport().is_some() {
            // The source has nothing to send: each slot here that it knows of has ended.
            self.down(&gone, now, Cause::PeerLost, effects);
        }
        self.sources.remove(&gone).map(|gone| down(session, gone.generation))
    }

    /// The session that a new source gets.
    fn find_vacancy(&self) -> Option<Vacancy<A>> {
        let busy: HashSet<&A> = self
            .slots
            .values()
            .map(|waiting| &waiting.source)
            .chain(self.aborting.values().map(|aborting| &aborting.source))
            .collect();
        self.sessions.find_vacancy(|name| match self.sources[name].stage {
            _ if busy.contains(name) => Standing::Busy,
            Stage::Down { until, .. } => Standing::Down(until),
            Stage::Ready { .. } => Standing::Idle(self.sources[name].used),
            _ => Standing::Busy,
        })
    }

    pub(super) fn source_of(&self, link: L) -> Option<A> {
        self.sources
            .iter()
            .find(|(_, source)| source.link() == Some(link))
            .map(|(name, _)| name.clone())
    }

    pub(super) fn welcome(
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
        // The source must choose an offered transport. Another one, such as fake, would leave old
        // data in the pages and report it as KV.
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
                let choice = TransportChoice::explain(transport, &left, &entry.without, None);
                let deadline = now + SESSION_SETUP_DEADLINE;
                entry.stage = Stage::Binding { link, transport, late: welcome.late, deadline };
                effects.bind(
                    link,
                    entry.session,
                    DestinationSetup { choice, welcome, layout, template },
                );
            }
            Err(mismatch) => {
                effects.refused(source, &mismatch);
                self.down(source, now, Cause::Incompatible, effects);
            }
        }
    }

    pub(super) fn refused(
        &mut self,
        source: &A,
        refused: &Refused<'_>,
        now: Instant,
        effects: &mut impl DestinationEffects<L, A>,
    ) {
        let Some(entry) =
            self.sources.get(source).filter(|entry| entry.generation == refused.session)
        else {
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
            // By default a source takes the best of the offered transports.
            Stage::Announced { offered, .. } if refused.reason == Refusal::Transport => {
                match Transport::ALL.into_iter().find(|&transport| offered.offers(transport)) {
                    Some(best) => {
                        self.announce_without(source, best, Cause::Incompatible, now, effects)
                    }
                    None => self.down(source, now, Cause::Incompatible, effects),
                }
            }
            _ if refused.reason == Refusal::Busy => {
                self.down(source, now, Cause::Overloaded, effects)
            }
            _ => self.down(source, now, Cause::Incompatible, effects),
        }
    }

    /// Announces a session, which replaces the link's earlier one. `failure` is the cause if no
    /// transport is left to offer.
    pub(super) fn announce(
        &mut self,
        source: &A,
        link: L,
        failure: Cause,
        now: Instant,
        effects: &mut impl DestinationEffects<L, A>,
    ) {
        let Some(entry) = self.sources.get_mut(source) else { return };
        entry.generation = SessionGeneration(entry.generation.0.wrapping_add(1).max(1));
        let barred =
            entry.rdma.is_barred(now).then(|| [&entry.without[..], &[Transport::Rdma]].concat());
        let offered = barred.and_then(|without| effects.make_rank(entry.session, source, &without));
        // A barred transport is better than no transport.
        let offered = offered.or_else(|| effects.make_rank(entry.session, source, &entry.without));
        let Some(offered) = offered else {
            effects.hang_up(link);
            return self.down(source, now, failure, effects);
        };
        let is_absent = |way: &Transport| !offered.offers(*way);
        debug_assert!(
            entry.without.iter().all(is_absent),
            "what could not be set up is not offered"
        );
        entry.rdma.begin(offered.rdma.map_or(0, |grant| grant.rails));
        let deadline = now + SESSION_SETUP_DEADLINE;
        entry.stage = Stage::Announced { link, offered: Box::new(offered), deadline };
        let announce = Announce {
            session: entry.generation,
            fingerprint: self.identity.fingerprint,
            bit_class: self.identity.bit_class,
            kv: self.identity.kv_claim(),
            aux: self.identity.aux_claim(),
            ranks: vec![offered],
        };
        effects.send(link, &Message::Announce(Box::new(announce)));
    }

    /// A transport could not be set up: announces the session again without it.
    pub(super) fn announce_without(
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
        debug_assert!(!entry.without.contains(&transport), "a transport is left out once");
        entry.without.push(transport);
        entry.stage = Stage::Dialling { deadline: now };
        self.announce(source, link, failure, now, effects);
    }

    /// A source that can use RDMA again and has an idle session with another transport.
    pub(super) fn regained(&mut self, now: Instant) -> Option<A> {
        let slots = &self.slots;
        let is_idle = |name: &A| slots.values().all(|waiting| waiting.source != *name);
        let other =
            |source: &Source<L>| source.transport().is_some_and(|way| way != Transport::Rdma);
        self.sessions.sources().filter(|(_, name)| is_idle(name)).find_map(|(_, name)| {
            let source = self.sources.get_mut(name).filter(|source| other(source))?;
            source.rdma.take_end(now).then(|| name.clone())
        })
    }

    /// Bytes have arrived over the session's transport.
    pub(super) fn trust(&mut self, session: SessionId) {
        let source = self.sessions.source(session);
        let entry = source.and_then(|source| self.sources.get_mut(source));
        if let Some(entry) = entry.filter(|entry| entry.transport() == Some(Transport::Rdma)) {
            entry.rdma.carry();
        }
    }

    /// The session has ended, or was never established.
    pub(super) fn down(
        &mut self,
        source: &A,
        now: Instant,
        cause: Cause,
        effects: &mut impl DestinationEffects<L, A>,
    ) {
        let Some(entry) = self.sources.get_mut(source) else { return };
        debug_assert!(!matches!(entry.stage, Stage::Down { .. }), "a session ends once");
        let link = entry.link();
        let stood = matches!(entry.stage, Stage::Ready { .. });
        let session = entry.session;
        // A session that was ready can be rebuilt at once. A source that cannot be reached is not
        // dialled for a while.
        let times = if is_failpoint_active("held off for an hour") { 3600 } else { 1 };
        let until = if stood { now } else { now + DIAL_HOLD_OFF * times };
        entry.stage = Stage::Down { until, cause };
        match stood {
            true => effects.mover(DestinationCommand::Close { session }),
            false => effects.withdraw(session),
        }
        if let Some(link) = link {
            effects.hang_up(link);
        }
        // After a reset no answer is due, because the end of the session has ended the leases.
        if !is_failpoint_active("answer is awaited after a reset") {
            self.aborting.retain(|_, asked| asked.source != *source);
        }
        for slot in self.waiting_for(source) {
            if let Some(waiting) = self.slots.get_mut(&slot.id) {
                waiting.sent = false;
            }
            self.fail(slot, cause, effects);
        }
    }
}

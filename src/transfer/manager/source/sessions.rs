//! A source's sessions. A destination announces a session, the source answers when its transport is
//! set up, and it ends with its link.
//!
//! Invariants: the end of a session fails every room that is bound to it.
//! Not here: rooms (`rooms`, `source`), compatibility (`identity`), reasons for a transport
//! (`choice`).

use super::{Session, SourceEffects, SourceManager, SourceSetup, transfer_id};
use crate::cause::Cause;
use crate::ids::{DecodeAllocation, SessionGeneration};
use crate::stdx::failpoint::is_failpoint_active;
use crate::transfer::command::SourceCommand;
use crate::transfer::manager::choice::TransportChoice;
use crate::transfer::manager::identity::Mismatch;
use crate::transfer::manager::rooms::Slot;
use crate::transfer::status::State;
use crate::transfer::target::SessionId;
use crate::wire::message::{Announce, Message, Rank, Refusal, Refused, Status, Transport, Welcome};
use std::hash::Hash;

impl<L: Copy + Eq + Hash> SourceManager<L> {
    /// Handles the result of [`SourceEffects::bind`]: the transport is set up, or cannot be.
    pub fn bound(
        &mut self,
        session: SessionId,
        rank: Result<Rank, String>,
        effects: &mut impl SourceEffects<L>,
    ) {
        let Some(entry) = self.sessions[session.0 as usize].as_ref() else { return };
        let (link, generation, transport) = (entry.link, entry.generation, entry.transport);
        match rank {
            Ok(rank) => {
                let kv = self.identity.kv_claim();
                let late = self.allocation == DecodeAllocation::Late;
                let welcome =
                    Welcome { session: generation, transport, late, kv, ranks: vec![rank] };
                effects.send(link, &Message::Welcome(Box::new(welcome)));
            }
            Err(why) => {
                self.close(session, effects);
                // The peer can have sent Destinations before Welcome.
                self.fail_rooms(link, Cause::PeerLost, effects);
                let mismatch = Mismatch {
                    reason: Refusal::Transport,
                    field: "transport".into(),
                    source: why,
                    destination: transport.to_string(),
                };
                self.refuse(link, generation, &mismatch, effects);
            }
        }
    }

    /// Handles a dead link: its session ends and its rooms fail.
    pub fn link_down(&mut self, link: L, effects: &mut impl SourceEffects<L>) {
        if let Some(&session) = self.by_link.get(&link) {
            self.close(session, effects);
        }
        self.fail_rooms(link, Cause::PeerLost, effects);
    }

    /// The generation of an open session's index at the mover.
    pub fn mover_generation(&self, session: SessionId) -> Option<SessionGeneration> {
        self.sessions[session.0 as usize].as_ref().map(|session| session.mover_generation)
    }

    pub(super) fn announce(
        &mut self,
        link: L,
        announce: &Announce,
        effects: &mut impl SourceEffects<L>,
    ) {
        // A new Announce on a link ends the link's earlier session, with all its rooms and early
        // Destinations.
        self.link_down(link, effects);
        let accepted = self.identity.accept(announce).and_then(|(layout, template)| {
            let choice = self.choose(announce)?;
            Ok((layout, template, choice))
        });
        let (layout, template, choice) = match accepted {
            Ok(accepted) => accepted,
            Err(mismatch) => return self.refuse(link, announce.session, &mismatch, effects),
        };
        let Some(free) = self.sessions.iter().position(Option::is_none) else {
            let mismatch = Mismatch {
                reason: Refusal::Busy,
                field: "sessions".into(),
                source: format!("{} in use", self.sessions.len()),
                destination: "one more".into(),
            };
            return self.refuse(link, announce.session, &mismatch, effects);
        };
        let session = SessionId(free as u32);
        self.begun = SessionGeneration(self.begun.0.wrapping_add(1));
        self.sessions[free] = Some(Session {
            link,
            generation: announce.session,
            transport: choice.transport,
            page_size: layout.page_size,
            pages: announce.kv.pages,
            slots: announce.aux.slots,
            mover_generation: self.begun,
        });
        let before = self.by_link.insert(link, session);
        debug_assert!(before.is_none(), "a link has one session at a time");
        effects.bind(link, session, SourceSetup { choice, announce, template });
    }

    pub(super) fn choose(&self, announce: &Announce) -> Result<TransportChoice, Mismatch> {
        let here = |rank: &Rank| rank.shm.is_some_and(|grant| grant.host == self.identity.host);
        let offered = |transport: Transport| match transport {
            Transport::Shm => announce.ranks.iter().all(here),
            Transport::Rdma | Transport::Tcp | Transport::Fake => {
                announce.ranks.iter().all(|rank| rank.offers(transport))
            }
        };
        let chosen = self.allowed.iter().copied().find(|&transport| offered(transport));
        if let Some(transport) = chosen {
            let theirs: Vec<Transport> = Transport::ALL
                .into_iter()
                .filter(|&transport| announce.ranks.iter().all(|rank| rank.offers(transport)))
                .collect();
            return Ok(TransportChoice::explain(transport, &self.allowed, &[], Some(&theirs)));
        }
        let theirs = Transport::ALL.into_iter().filter(|&transport| offered(transport));
        Err(Mismatch {
            reason: Refusal::Transport,
            field: "transport".into(),
            source: Transport::list(self.allowed.iter().copied()),
            destination: Transport::list(theirs),
        })
    }

    pub(super) fn refuse(
        &self,
        link: L,
        session: SessionGeneration,
        mismatch: &Mismatch,
        effects: &mut impl SourceEffects<L>,
    ) {
        effects.refused(link, mismatch);
        let refused = Refused {
            session,
            reason: mismatch.reason,
            field: &mismatch.field,
            source: &mismatch.source,
            destination: &mismatch.destination,
        };
        effects.send(link, &Message::Refused(refused));
    }

    /// The session of a link, if its generation matches. Messages of an ended session get no
    /// answer, because their sender resets the session.
    pub(super) fn session_of(
        &self,
        link: L,
        generation: SessionGeneration,
    ) -> Option<(SessionId, &Session<L>)> {
        let id = *self.by_link.get(&link)?;
        let session = self.sessions[id.0 as usize].as_ref()?;
        (session.generation == generation).then_some((id, session))
    }

    pub(super) fn close(&mut self, session: SessionId, effects: &mut impl SourceEffects<L>) {
        if let Some(entry) = self.sessions[session.0 as usize].take() {
            if !is_failpoint_active("link keeps its ended session") {
                let known = self.by_link.remove(&entry.link);
                debug_assert_eq!(known, Some(session), "a session and its link name each other");
            }
            effects.mover(SourceCommand::Close { session });
        }
    }

    /// Sends the cause of each failed room of a broken session. The link ends afterwards.
    pub(super) fn tell_causes(&self, link: L, effects: &mut impl SourceEffects<L>) {
        let mut partners: Vec<_> = self.rooms.partners(link).collect();
        partners.sort_unstable_by_key(|(slot, ..)| slot.id);
        for (slot, room, wanted) in partners {
            let status = self.status.load(slot.id);
            if status.generation == slot.generation && !matches!(status.state, State::Success) {
                // A room that had not begun has no cause of its own.
                let cause = status.cause.or(Some(Cause::Flushed));
                let status =
                    Status { id: transfer_id(room, wanted), state: State::Failed as u8, cause };
                effects.send(link, &Message::Status(status));
            }
        }
    }

    pub(super) fn fail_rooms(
        &mut self,
        link: L,
        cause: Cause,
        effects: &mut impl SourceEffects<L>,
    ) {
        let mut slots = Vec::new();
        let has_begun = |slot: Slot| {
            let status = self.status.load(slot.id);
            status.generation == slot.generation
                && matches!(status.state, State::Transferring | State::Success)
        };
        self.rooms.unlink(link, |slot, is_told| {
            // If Done came, the mover has it too, and the hand-off is complete. A Done for a
            // transfer that has not begun is false, and no transfer may begin to a lost peer.
            if !is_told || !has_begun(slot) {
                slots.push(slot);
            }
        });
        slots.sort_unstable_by_key(|slot: &Slot| slot.id);
        debug_assert!(
            self.rooms.partners(link).next().is_none(),
            "the rooms of a dead link have no other end"
        );
        for slot in slots {
            self.fail(slot, cause, effects);
        }
    }
}

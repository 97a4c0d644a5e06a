//! Sessions' transports: what is set up at both ends of one, and told to managers and movers.
//!
//! Thread: `ctl`. Invariant: what a session was set up with goes with it, and opens nothing behind its end. Not here: sessions
//! themselves (`transfer::manager`), connections (`peers`, `lanes`, `passing`).

use super::effects::{Effects, rank};
use super::parties::{Link, Member, Role};
use super::wishes::{DestinationSession, SourceSession};
use super::{Handoff, sequence};
use crate::front::worker::DestinationRing;
use crate::ids::{SessionGeneration, WorkerId};
use crate::net::ConnId;
use crate::obs::log::event;
use crate::sys::event::{EventCounter, WaitSet};
use crate::transfer::command::{SessionId, SourceCommand};
use crate::transfer::transport::rdma::RdmaSource;
use crate::transfer::transport::shm::{PeerShape, ShmCursor, ShmRing};
use crate::transfer::transport::{DestinationBinding, SourceBinding, fake::Fake};
use crate::wire::message::{Rank, Transport};
use std::time::Instant;

impl Handoff {
    /// Wakes a decode worker's mover.
    pub fn doorbell(&self, id: WorkerId) -> Option<&EventCounter> {
        match &self.members[id.index()].role {
            Role::Decode { doorbell, .. } => Some(doorbell),
            Role::Prefill { .. } | Role::Mixed => None,
        }
    }

    /// The session that the holder of a token may open lanes of.
    pub fn session_of(&self, token: &[u8; 16]) -> Option<(WorkerId, SessionId)> {
        self.tokens.get(token).copied()
    }

    /// A source's half of a transport stands, except for what `open` brings later, or cannot be set up.
    pub fn bound_source(
        &mut self,
        id: WorkerId,
        session: SessionId,
        outcome: Result<Rank, String>,
        now: Instant,
    ) {
        let Member { worker, role: Role::Prefill { manager, mover }, .. } =
            &mut self.members[id.index()]
        else {
            return;
        };
        manager.bound(
            session,
            outcome,
            &mut Effects { worker, mover, wishes: &mut self.wishes, offer: &self.offer },
        );
        self.settle(now);
    }

    /// Whether a source's session that was announced on this link still stands.
    pub fn stands(&self, conn: ConnId, session: &SourceSession) -> bool {
        let SourceSession { worker, session, generation, .. } = *session;
        self.bound.get(&Link::Remote(conn)) == Some(&(worker, session, generation))
    }

    /// Gives a source's mover its half.
    pub fn open_source(&mut self, id: WorkerId, session: SessionId, binding: Box<SourceBinding>) {
        if let Role::Prefill { manager, mover } = &mut self.members[id.index()].role
            && let Some(generation) = manager.usage(session)
        {
            mover.send(SourceCommand::Open { session, generation, binding });
        }
    }

    /// Gives a source's mover the half that moves nothing; what Welcome says of it.
    pub fn open_fake_source(&mut self, id: WorkerId, session: SessionId) -> Rank {
        self.open_source(id, session, Box::new(Fake));
        rank(self.worker(id), &[Transport::Fake], &self.offer, None)
    }

    /// Connects a source's queue pairs to those it was told of, and gives its mover its half; what Welcome says.
    pub fn open_rdma_source(
        &mut self,
        session: SourceSession,
        wait: &WaitSet,
    ) -> Result<Rank, String> {
        let worker = self.worker(session.worker);
        let rails = worker.rails.as_ref().ok_or("there is no rdma here")?;
        for nic in rails.left_out() {
            event!(Warn, "handoff", "a NIC is left out", nic = nic);
        }
        let peer = session.rank.rdma.ok_or("the destination names no queue pairs")?;
        let made = RdmaSource::new(rails, &peer, session.template, wait, sequence);
        let (half, told) = made.map_err(|error| format!("queue pairs: {error}"))?;
        let mut rank = rank(worker, &[], &self.offer, None);
        rank.rdma = Some(told);
        self.open_source(session.worker, session.session, Box::new(half));
        Ok(rank)
    }

    /// Connects the queue pairs that a source was told of to its own.
    pub fn rdma_destination(
        &mut self,
        session: &DestinationSession,
        wait: &WaitSet,
    ) -> Result<Box<DestinationBinding>, String> {
        let offer = self.offers.remove(&(session.worker, session.session));
        let offer = offer.ok_or("no queue pairs were offered")?;
        let source = session.rank.rdma.ok_or("the source names no queue pairs")?;
        let half = offer.connect(&source, wait).map_err(|error| format!("queue pairs: {error}"))?;
        Ok(Box::new(half))
    }

    /// Commands for a decode worker's mover that come with its transports.
    pub fn destination_mover(&mut self, id: WorkerId) -> Option<&mut DestinationRing> {
        match &mut self.members[id.index()].role {
            Role::Decode { mover, .. } => Some(mover),
            Role::Prefill { .. } | Role::Mixed => None,
        }
    }

    /// A destination's half of a transport stands, or cannot be set up.
    pub fn bound_destination(
        &mut self,
        id: WorkerId,
        session: SessionId,
        generation: SessionGeneration,
        half: Result<Box<DestinationBinding>, String>,
        now: Instant,
    ) {
        let Member { worker, role: Role::Decode { manager, mover, .. }, .. } =
            &mut self.members[id.index()]
        else {
            return;
        };
        if let Err(why) = &half {
            event!(Warn, "handoff", "a session could not be set up", worker = id, why = why);
        }
        let effects = &mut Effects { worker, mover, wishes: &mut self.wishes, offer: &self.offer };
        manager.bound(session, generation, half, now, effects);
        self.settle(now);
    }

    pub(super) fn bind_source(&mut self, session: &SourceSession) {
        let SourceSession { worker: id, session, transport, .. } = *session;
        let ring = match transport {
            Transport::Shm => ShmRing::new().map(Some).map_err(|error| error.to_string()),
            Transport::Fake => Ok(None),
            Transport::Tcp => Err("tcp inside one process".to_string()),
            Transport::Rdma => Err("rdma inside one process".to_string()),
        };
        let Member { worker, role: Role::Prefill { manager, mover }, .. } =
            &mut self.members[id.index()]
        else {
            return;
        };
        let outcome = ring.map(|ring| {
            match ring {
                Some(ring) => drop(self.rings.insert((id, session), ring)),
                None => {
                    let generation = manager.usage(session).unwrap_or(SessionGeneration(0));
                    mover.send(SourceCommand::Open {
                        session,
                        generation,
                        binding: Box::new(Fake),
                    });
                }
            }
            rank(worker, &[transport], &self.offer, None)
        });
        let effects = &mut Effects { worker, mover, wishes: &mut self.wishes, offer: &self.offer };
        manager.bound(session, outcome, effects);
    }

    pub(super) fn bind_destination(
        &mut self,
        link: Link,
        asked: &DestinationSession,
    ) -> Result<Box<DestinationBinding>, String> {
        if asked.transport == Transport::Fake {
            return Ok(Box::new(Fake));
        }
        let &(worker, session, _) = self.bound.get(&link).ok_or("the source's session is gone")?;
        let key = (worker, session);
        let ring = self.rings.remove(&key).ok_or("the source's session is gone")?;
        let text = |error: std::io::Error| error.to_string();
        let cursor = ShmCursor::new().map_err(text)?;
        let Role::Decode { doorbell, .. } = &self.members[asked.worker.index()].role else {
            return Err("not a decode worker".into());
        };
        let shown = cursor.descriptors(doorbell).map_err(text)?;
        let memory = &self.members[key.0.index()].worker.memory;
        let peer = PeerShape {
            pool_bytes: memory.region.len() as u64,
            pages: asked.pages,
            lists: memory.lists.shape(),
        };
        let descriptors = ring.descriptors(memory).map_err(text)?;
        let template = asked.template.clone();
        let half =
            cursor.connect(descriptors, &peer, asked.layout.page_size, template).map_err(text)?;
        let source_half = ring.connect(shown).map_err(text)?;
        self.open_source(key.0, key.1, Box::new(source_half));
        Ok(Box::new(half))
    }
}

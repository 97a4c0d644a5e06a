//! Transports of sessions: their set-up at both ends, and the hand-over to managers and movers.
//!
//! Thread: `ctl`. Invariant: the parts of a session's transport end with the session, and nothing
//! can use them later. Not here: sessions themselves (`transfer::manager`), connections (`control`,
//! `tcp_handshake`, `shm_handshake`).

use super::Handoff;
use super::actions::{DestinationSession, SourceSession};
use super::effects::{Effects, rank};
use super::endpoints::{EndpointKind, LinkId, WorkerEndpoint};
use crate::ids::{SessionGeneration, WorkerId};
use crate::link::local_worker::DestinationRing;
use crate::net::ConnId;
use crate::obs::log::event;
use crate::sys::event::{EventFd, WaitSet};
use crate::transfer::answer::TransferAnswer;
use crate::transfer::command::SourceCommand;
use crate::transfer::target::SessionId;
use crate::transfer::transport::rdma::RdmaSource;
use crate::transfer::transport::shm::{PeerShape, ShmCursor, ShmRing};
use crate::transfer::transport::{DestinationBinding, SourceBinding, fake::Fake};
use crate::wire::message::{Rank, Transport};
use std::time::Instant;

impl<E: From<TransferAnswer>> Handoff<E> {
    /// The doorbell that wakes a decode worker's mover.
    pub fn doorbell(&self, id: WorkerId) -> Option<&EventFd> {
        match &self.endpoints[id.index()].kind {
            EndpointKind::Decode { doorbell, .. } => Some(doorbell),
            EndpointKind::Prefill { .. } | EndpointKind::Mixed => None,
        }
    }

    /// The session of this token. The token opens its lanes.
    pub fn session_of(&self, token: &[u8; 16]) -> Option<(WorkerId, SessionId)> {
        self.tokens.get(token).copied()
    }

    /// Takes the outcome of the set-up of a source's half. The other side can still have to
    /// connect.
    pub fn bound_source(
        &mut self,
        id: WorkerId,
        session: SessionId,
        outcome: Result<Rank, String>,
        now: Instant,
    ) {
        let WorkerEndpoint { worker, kind: EndpointKind::Prefill { manager, mover }, .. } =
            &mut self.endpoints[id.index()]
        else {
            return;
        };
        manager.bound(session, outcome, &mut Effects { worker, mover, outbox: &mut self.outbox });
        self.run_actions(now);
    }

    /// Whether a source session announced on this link is still open.
    pub fn stands(&self, conn: ConnId, session: &SourceSession) -> bool {
        let SourceSession { worker, session, generation, .. } = *session;
        self.bound.get(&LinkId::Remote(conn)) == Some(&(worker, session, generation))
    }

    /// Gives a source's mover its half.
    pub fn open_source(&mut self, id: WorkerId, session: SessionId, binding: Box<SourceBinding>) {
        if let EndpointKind::Prefill { manager, mover } = &mut self.endpoints[id.index()].kind
            && let Some(generation) = manager.mover_generation(session)
        {
            mover.send(SourceCommand::Open { session, generation, binding });
        }
    }

    /// Gives a source's mover a half that moves no bytes. Returns the rank for Welcome.
    pub fn open_fake_source(&mut self, id: WorkerId, session: SessionId) -> Rank {
        self.open_source(id, session, Box::new(Fake));
        rank(self.worker(id), &[Transport::Fake], &self.outbox.offer, None)
    }

    /// Connects a source's queue pairs to those of the destination and gives its mover its half.
    /// Returns the rank for Welcome.
    ///
    /// # Errors
    /// This worker has no RDMA, the destination offers none, or the queue pairs cannot be set up.
    pub fn open_rdma_source(
        &mut self,
        session: SourceSession,
        wait: &WaitSet,
    ) -> Result<Rank, String> {
        let worker = &self.endpoints[session.worker.index()].worker;
        let rails = worker.rails.as_ref().ok_or("this worker has no RDMA")?;
        for nic in rails.left_out() {
            event!(Warn, "handoff", "a NIC is left out", nic = nic);
        }
        let peer = session.rank.rdma.ok_or("the destination names no queue pairs")?;
        let made = RdmaSource::new(rails, &peer, session.template, wait, || {
            self.outbox.entropy.next_u32()
        });
        let (half, queue_pairs) = made.map_err(|error| format!("queue pairs: {error}"))?;
        let mut rank = rank(worker, &[], &self.outbox.offer, None);
        rank.rdma = Some(queue_pairs);
        self.open_source(session.worker, session.session, Box::new(half));
        Ok(rank)
    }

    /// Connects the queue pairs that this destination offered to those of the source.
    ///
    /// # Errors
    /// This destination offered no queue pairs, the source names none, or they cannot be connected.
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

    /// The ring to a decode worker's mover, for commands of the handshakes.
    pub fn destination_mover(&mut self, id: WorkerId) -> Option<&mut DestinationRing> {
        match &mut self.endpoints[id.index()].kind {
            EndpointKind::Decode { mover, .. } => Some(mover),
            EndpointKind::Prefill { .. } | EndpointKind::Mixed => None,
        }
    }

    /// Takes the outcome of the set-up of a destination's half.
    pub fn bound_destination(
        &mut self,
        id: WorkerId,
        session: SessionId,
        generation: SessionGeneration,
        half: Result<Box<DestinationBinding>, String>,
        now: Instant,
    ) {
        let WorkerEndpoint { worker, kind: EndpointKind::Decode { manager, mover, .. }, .. } =
            &mut self.endpoints[id.index()]
        else {
            return;
        };
        if let Err(why) = &half {
            event!(Warn, "handoff", "a session could not be set up", worker = id, why = why);
        }
        let effects = &mut Effects { worker, mover, outbox: &mut self.outbox };
        manager.bound(session, generation, half, now, effects);
        self.run_actions(now);
    }

    pub(super) fn bind_source(&mut self, session: &SourceSession) {
        let SourceSession { worker: id, session, transport, .. } = *session;
        let ring = match transport {
            Transport::Shm => ShmRing::new().map(Some).map_err(|error| error.to_string()),
            Transport::Fake => Ok(None),
            Transport::Tcp => Err("tcp inside one process".to_string()),
            Transport::Rdma => Err("rdma inside one process".to_string()),
        };
        let WorkerEndpoint { worker, kind: EndpointKind::Prefill { manager, mover }, .. } =
            &mut self.endpoints[id.index()]
        else {
            return;
        };
        let outcome = ring.map(|ring| {
            match ring {
                Some(ring) => {
                    let before = self.rings.insert((id, session), ring);
                    debug_assert!(before.is_none(), "a session has one ring");
                }
                None => {
                    let generation =
                        manager.mover_generation(session).unwrap_or(SessionGeneration(0));
                    mover.send(SourceCommand::Open {
                        session,
                        generation,
                        binding: Box::new(Fake),
                    });
                }
            }
            rank(worker, &[transport], &self.outbox.offer, None)
        });
        let effects = &mut Effects { worker, mover, outbox: &mut self.outbox };
        manager.bound(session, outcome, effects);
    }

    pub(super) fn bind_destination(
        &mut self,
        link: LinkId,
        asked: &DestinationSession,
    ) -> Result<Box<DestinationBinding>, String> {
        debug_assert!(matches!(link, LinkId::Local { .. }), "the source is in this process");
        if asked.transport == Transport::Fake {
            return Ok(Box::new(Fake));
        }
        let &(worker, session, _) = self.bound.get(&link).ok_or("the source's session is gone")?;
        let key = (worker, session);
        let ring = self.rings.remove(&key).ok_or("the source's session is gone")?;
        let text = |error: std::io::Error| error.to_string();
        let cursor = ShmCursor::new().map_err(text)?;
        let EndpointKind::Decode { doorbell, .. } = &self.endpoints[asked.worker.index()].kind
        else {
            return Err("not a decode worker".into());
        };
        let shown = cursor.descriptors(doorbell).map_err(text)?;
        let memory = &self.endpoints[key.0.index()].worker.memory;
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

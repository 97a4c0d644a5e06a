//! Control links of a process, by the rules of `peer::control`, and the passing of descriptors, by
//! those of `peer::shm_handshake`. A worker whose engine hangs answers no PING, so that it looks dead to
//! its peers.

use super::{ConnNumber, Edge, FIRST_PORT, Output, Parcel, Peering, Shown, Turn, number};
use crate::cause::Cause;
use crate::limits::{PEER_PING_EVERY, PEER_SILENCE_MAX};
use crate::net::ConnId;
use crate::peer::handoff::{DestinationSession, LinkId, RemoteAction, Source, SourceSession, rank};
use crate::sim::process::WORKER;
use crate::stdx::event_queue::Nanos;
use crate::transfer::transport::DestinationBinding;
use crate::transfer::transport::shm::{DestinationDescriptors, PeerShape, ShmCursor, ShmRing};
use crate::wire::Multipart;
use crate::wire::message::{Message, Rank, ShmGrant, SocketName, Token, Transport};
use std::time::{Duration, Instant};

impl Edge {
    pub(super) fn receive(&mut self, conn: ConnNumber, parcel: Parcel, now: Instant) {
        let Some(peering) = self.links.get_mut(&conn) else { return };
        peering.heard = now;
        match parcel {
            Parcel::Message(message) if peering.open => {
                let message =
                    Message::decode(message.parts(), None).expect("a worker's message decodes");
                if let Some(message) = message {
                    self.handoff.receive_message(ConnId::outside(conn), &message, now);
                }
            }
            Parcel::Ping if !self.hangs => self.outbox.push(Output::Parcel(conn, Parcel::Pong)),
            Parcel::Message(_) | Parcel::Ping | Parcel::Pong => {}
            Parcel::Close => self.down(conn, now),
        }
    }

    /// Of several connections of a decode worker the newest counts: of one process the one it
    /// dialled last, of two the one that was accepted last.
    pub(super) fn accept(&mut self, conn: ConnNumber, from: (usize, u32), now: Instant) {
        let same = |peering: &Peering| peering.from.is_some_and(|(process, _)| process == from.0);
        let older = self.links.iter().filter(|(_, peering)| same(peering));
        let older: Vec<_> = older.map(|(&conn, peering)| (conn, peering.from)).collect();
        for (older, whose) in older {
            if whose == Some(from) && older > conn {
                return self.outbox.push(Output::Parcel(conn, Parcel::Close));
            }
            self.outbox.push(Output::Parcel(older, Parcel::Close));
            self.down(older, now);
        }
        self.add(conn, None, Some(from), true, now);
    }

    pub(super) fn dialled(&mut self, conn: ConnNumber, stands: bool, now: Instant) {
        let Some(peering) = self.links.get_mut(&conn) else { return };
        let Some(source) = peering.dialled.clone() else { return };
        if stands {
            (peering.open, peering.heard) = (true, now);
            self.handoff.link_up(WORKER, &source, LinkId::Remote(ConnId::outside(conn)), now);
        } else {
            self.links.remove(&conn);
            self.handoff.dial_failed(WORKER, &source, Cause::PeerLost, now);
        }
    }

    pub(super) fn add(
        &mut self,
        conn: ConnNumber,
        dialled: Option<Source>,
        from: Option<(usize, u32)>,
        open: bool,
        now: Instant,
    ) {
        let next_ping = now + PEER_PING_EVERY;
        self.links.insert(conn, Peering { dialled, from, open, heard: now, next_ping });
    }

    pub(super) fn down(&mut self, conn: ConnNumber, now: Instant) {
        let Some(peering) = self.links.remove(&conn) else { return };
        self.forget_calls(conn);
        match peering.dialled {
            Some(source) if !peering.open => {
                self.handoff.dial_failed(WORKER, &source, Cause::PeerLost, now);
            }
            _ => self.handoff.link_down(ConnId::outside(conn), Cause::PeerLost, now),
        }
    }

    pub(super) fn forget_calls(&mut self, conn: ConnNumber) {
        self.pending.retain(|_, (control, ..)| *control != conn);
        self.calling.remove(&conn);
    }

    /// Silent links end, the others are kept warm.
    pub(super) fn expire(&mut self, now: Instant) {
        let still = now.saturating_duration_since(self.looked);
        let stood_still = still > PEER_PING_EVERY;
        let excused = if stood_still && !self.stood_still { still } else { Duration::ZERO };
        (self.looked, self.stood_still) = (now, stood_still);
        let mut late = Vec::new();
        for (&conn, peering) in self.links.iter_mut().filter(|(_, peering)| peering.open) {
            peering.heard = (peering.heard + excused).min(now);
            if now.saturating_duration_since(peering.heard) > PEER_SILENCE_MAX {
                late.push(conn);
            } else if now >= peering.next_ping {
                peering.next_ping = now + PEER_PING_EVERY;
                self.outbox.push(Output::Parcel(conn, Parcel::Ping));
            }
        }
        for conn in late {
            self.outbox.push(Output::Parcel(conn, Parcel::Close));
            self.down(conn, now);
        }
        if let Some(lanes) = &mut self.lanes {
            lanes.expire(now);
        }
        let handoff = &self.handoff;
        self.pending
            .retain(|_, (conn, session, _)| handoff.stands(ConnId::outside(*conn), session));
    }

    pub(super) fn serve(&mut self, remote: RemoteAction, turn: &mut Turn<'_>) {
        match remote {
            RemoteAction::Send(conn, message) => self.send(conn, message),
            RemoteAction::Dial { source, .. } if self.is_on_its_way(&source) => {}
            RemoteAction::Dial { source, until, .. } => {
                let Source::Remote(address) = source else { return };
                *turn.conns += 1;
                let (conn, to) = (*turn.conns, usize::from(address.port() - FIRST_PORT));
                let patience = until.saturating_duration_since(turn.now).as_nanos() as Nanos;
                self.add(conn, Some(source), None, false, turn.now);
                self.outbox.push(Output::Dial { conn, to, patience });
            }
            RemoteAction::HangUp(conn) => {
                let conn = number(conn);
                self.links.remove(&conn);
                self.forget_calls(conn);
                self.outbox.push(Output::Parcel(conn, Parcel::Close));
            }
            RemoteAction::BindSource(conn, session) => {
                let (worker, id) = (session.worker, session.session);
                let outcome = match (session.transport, &self.wait) {
                    (Transport::Shm, _) => self.offer(number(conn), session),
                    (Transport::Rdma, Some(wait)) => self.handoff.open_rdma_source(session, wait),
                    (Transport::Tcp, _) => self.dial_lanes(session),
                    (other, _) => Err(format!("{other} is not simulated")),
                };
                self.handoff.bound_source(worker, id, outcome, turn.now);
            }
            RemoteAction::BindDestination(_, session) if session.transport == Transport::Tcp => {
                let Some(lanes) = &mut self.lanes else { return };
                let (worker, id, generation) =
                    (session.worker, session.session, session.generation);
                let half = lanes.expect(&session, &self.handoff);
                self.handoff.bound_destination(worker, id, generation, Ok(half), turn.now);
                lanes.opened(id, generation, &mut self.handoff);
            }
            RemoteAction::BindDestination(conn, session) => {
                let (worker, id, generation) =
                    (session.worker, session.session, session.generation);
                let half = match (session.transport, &self.wait) {
                    (Transport::Rdma, Some(wait)) => {
                        Some(self.handoff.rdma_destination(&session, wait))
                    }
                    _ => self.call(number(conn), session).err().map(Err),
                };
                if let Some(half) = half {
                    self.handoff.bound_destination(worker, id, generation, half, turn.now);
                }
            }
            RemoteAction::Resolve(name) => {
                unreachable!("no worker has a name here, nor has {name}")
            }
        }
    }

    pub(super) fn send(&mut self, conn: ConnId, message: Multipart) {
        let conn = number(conn);
        if self.links.contains_key(&conn) {
            self.outbox.push(Output::Parcel(conn, Parcel::Message(message)));
        }
    }

    pub(super) fn is_on_its_way(&self, source: &Source) -> bool {
        self.links.values().any(|peering| !peering.open && peering.dialled.as_ref() == Some(source))
    }

    /// Prepares a source's half.
    pub(super) fn offer(
        &mut self,
        conn: ConnNumber,
        session: SourceSession,
    ) -> Result<Rank, String> {
        let ring = ShmRing::new().map_err(|error| error.to_string())?;
        self.next_token += 1;
        let token = u128::from(self.next_token).to_le_bytes();
        let mut rank =
            rank(self.handoff.worker(WORKER), &[Transport::Shm], self.handoff.offer(), None);
        let socket = SocketName::new(b"-").expect("one byte fits");
        rank.shm = Some(ShmGrant { host: self.handoff.offer().host, socket, token: Token(token) });
        self.pending.retain(|_, (control, ..)| *control != conn);
        self.pending.insert(self.next_token, (conn, session, ring));
        Ok(rank)
    }

    /// Calls the source of a destination's session.
    pub(super) fn call(
        &mut self,
        conn: ConnNumber,
        session: DestinationSession,
    ) -> Result<(), String> {
        let text = |error: std::io::Error| error.to_string();
        let grant = session.rank.shm.ok_or("the source names no socket")?;
        let cursor = ShmCursor::new().map_err(text)?;
        let doorbell = self.handoff.doorbell(session.worker).ok_or("not a decode worker")?;
        let shown = cursor.descriptors(doorbell).map_err(text)?;
        self.calling.insert(conn, (session, cursor));
        self.outbox.push(Output::Call(conn, grant.token, shown));
        Ok(())
    }

    /// A destination has called: its token decides what it is shown.
    pub(super) fn called(
        &mut self,
        token: Token,
        shown: DestinationDescriptors,
    ) -> Option<Box<Shown>> {
        let number = u64::from_le_bytes(token.0[..8].try_into().expect("eight bytes"));
        let (conn, session, ring) = self.pending.remove(&number)?;
        if !self.handoff.stands(ConnId::outside(conn), &session) {
            return None;
        }
        let memory = self.handoff.worker(WORKER).memory.clone();
        let descriptors = ring.descriptors(&memory).ok()?;
        let half = ring.connect(shown).ok()?;
        self.handoff.open_source(session.worker, session.session, Box::new(half));
        let pool_bytes = memory.region.len() as u64;
        let shape = PeerShape { pool_bytes, pages: memory.pages, lists: memory.lists.shape() };
        Some(Box::new(Shown { descriptors, shape }))
    }

    pub(super) fn shown(&mut self, conn: ConnNumber, shown: Option<Box<Shown>>, now: Instant) {
        let Some((session, cursor)) = self.calling.remove(&conn) else { return };
        let DestinationSession { worker, session, generation, pages, layout, template, .. } =
            session;
        let half = match shown {
            None => Err("the source closed its socket".to_string()),
            Some(shown) => {
                let Shown { descriptors, shape } = *shown;
                let shape = PeerShape { pages, ..shape };
                let half = cursor.connect(descriptors, &shape, layout.page_size, template);
                half.map(|half| Box::new(half) as Box<DestinationBinding>)
                    .map_err(|error| error.to_string())
            }
        };
        self.handoff.bound_destination(worker, session, generation, half, now);
    }
}

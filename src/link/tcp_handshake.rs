//! Set-up of TCP lanes. A source dials the data port of a destination and shows the token of its
//! Announce. Then the movers get the streams.
//!
//! Thread: `ctl`; only movers read and write a lane after that. Invariant: a lane can arrive before
//! the destination's session is open, and then waits. Number and time of such lanes are bounded.

use crate::ids::{SessionGeneration, WorkerId};
use crate::limits::{
    EARLY_LANES_MAX, PEER_PROOF_TIME_MAX, SESSION_SETUP_DEADLINE, UNPROVEN_CONNECTIONS_MAX,
};
use crate::link::handoff::{DestinationSession, Handoff, SourceSession, rank};
use crate::net::{ConnId, Event, ListenerId, Reactor};
use crate::obs::log::event;
use crate::stdx::hash_map::HashMap;
use crate::sys::event::WaitSet;
use crate::transfer::answer::TransferAnswer;
use crate::transfer::command::DestinationCommand;
use crate::transfer::target::SessionId;
use crate::transfer::transport::tcp::{Preamble, TcpDestination, TcpSource};
use crate::transfer::transport::{Arrival, DestinationBinding};
use crate::wire::message::{Rank, Transport};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

/// A lane that waits for its session to open.
#[derive(Debug)]
struct EarlyLane {
    worker: WorkerId,
    session: SessionId,
    generation: SessionGeneration,
    arrival: Arrival,
    until: Instant,
}

/// Lanes that no mover has yet.
#[derive(Debug)]
pub struct TcpHandshake {
    listener: Option<ListenerId>,
    wait: Arc<WaitSet>,
    /// Incoming connections that have not sent their preamble.
    callers: HashMap<ConnId, Instant>,
    early: Vec<EarlyLane>,
    open: HashMap<(WorkerId, SessionId), SessionGeneration>,
}

impl TcpHandshake {
    /// Creates the state. `listener` is the data port of a decode worker; the mover parks in
    /// `wait`.
    pub fn new(listener: Option<ListenerId>, wait: Arc<WaitSet>) -> TcpHandshake {
        TcpHandshake {
            listener,
            wait,
            callers: HashMap::default(),
            early: Vec::new(),
            open: HashMap::default(),
        }
    }

    /// The set of descriptors on which the mover parks.
    pub fn wait(&self) -> &WaitSet {
        &self.wait
    }

    /// Whether an event belongs to one of these connections.
    pub fn owns(&self, event: &Event) -> bool {
        match *event {
            Event::Accepted { listener, .. } => self.listener == Some(listener),
            Event::Connected(conn)
            | Event::Received(conn)
            | Event::Eof(conn)
            | Event::Drained(conn)
            | Event::Closed { conn, .. } => self.callers.contains_key(&conn),
            Event::Woken | Event::Terminate | Event::Hangup => false,
        }
    }

    /// Takes an event of one of these connections.
    pub fn handle<E: From<TransferAnswer>>(
        &mut self,
        event: Event,
        reactor: &mut Reactor,
        handoff: &mut Handoff<E>,
        now: Instant,
    ) {
        match event {
            Event::Accepted { conn, .. } => {
                if self.callers.len() >= UNPROVEN_CONNECTIONS_MAX
                    && let Some((&oldest, _)) = self.callers.iter().min_by_key(|(_, until)| **until)
                {
                    self.callers.remove(&oldest);
                    reactor.close(oldest);
                }
                self.callers.insert(conn, now + PEER_PROOF_TIME_MAX);
            }
            Event::Received(conn) => self.read(conn, reactor, handoff, now),
            Event::Eof(conn) => {
                self.callers.remove(&conn);
                reactor.close(conn);
            }
            Event::Closed { conn, .. } => drop(self.callers.remove(&conn)),
            Event::Connected(_)
            | Event::Drained(_)
            | Event::Woken
            | Event::Terminate
            | Event::Hangup => {}
        }
    }

    /// Dials a destination's data port and gives the source's mover its half. `peer` is the remote
    /// address of the control link. It is used if the destination names no address of its own.
    pub fn connect<E: From<TransferAnswer>>(
        &self,
        session: SourceSession,
        peer: Option<SocketAddr>,
        handoff: &mut Handoff<E>,
        reactor: &mut Reactor,
    ) -> Result<Rank, String> {
        let grant = session.rank.tcp.ok_or("the destination names no data port")?;
        let ip = match grant.address.ip() {
            ip if ip.is_unspecified() => peer.ok_or("the destination names no address")?.ip(),
            ip => ip,
        };
        let address = SocketAddr::new(ip, grant.address.port());
        let streams: Result<Vec<_>, _> =
            (0..session.rank.lanes).map(|_| reactor.dial(address)).collect();
        let streams = streams.map_err(|error| format!("{address}: {error}"))?;
        let worker = handoff.worker(session.worker);
        let rank = rank(worker, &[Transport::Tcp], handoff.offer(), None);
        let proof = (grant.token, session.generation);
        let half =
            TcpSource::new(streams, proof, session.template, worker.slots(), self.wait.clone());
        let half = half.map_err(|error| error.to_string())?;
        handoff.open_source(session.worker, session.session, Box::new(half));
        Ok(rank)
    }

    /// The destination's half of a session. The caller opens it and then calls
    /// [`TcpHandshake::opened`].
    pub fn expect<E: From<TransferAnswer>>(
        &self,
        session: &DestinationSession,
        handoff: &Handoff<E>,
    ) -> Box<DestinationBinding> {
        let slots = handoff.worker(session.worker).slots();
        let lanes = usize::from(handoff.offer().lanes);
        Box::new(TcpDestination::new(session.template.clone(), lanes, slots, self.wait.clone()))
    }

    /// Gives the mover the lanes that arrived before it had the session's half.
    pub fn opened<E: From<TransferAnswer>>(
        &mut self,
        worker: WorkerId,
        session: SessionId,
        generation: SessionGeneration,
        handoff: &mut Handoff<E>,
    ) {
        self.open.insert((worker, session), generation);
        for early in std::mem::take(&mut self.early) {
            if (early.worker, early.session, early.generation) == (worker, session, generation) {
                join(worker, session, early.arrival, handoff);
            } else {
                self.early.push(early);
            }
        }
    }

    /// Closes all connections and stops listening.
    pub fn close(self, reactor: &mut Reactor) {
        self.callers.into_keys().for_each(|conn| reactor.close(conn));
        if let Some(listener) = self.listener {
            reactor.stop_listening(listener);
        }
    }

    /// Closes connections that sent no preamble in time. Drops lanes of sessions that never opened.
    pub fn expire(&mut self, reactor: &mut Reactor, now: Instant) {
        self.callers.retain(|&conn, until| {
            let in_time = *until > now;
            if !in_time {
                reactor.close(conn);
            }
            in_time
        });
        self.early.retain(|early| early.until > now);
    }

    fn read<E: From<TransferAnswer>>(
        &mut self,
        conn: ConnId,
        reactor: &mut Reactor,
        handoff: &mut Handoff<E>,
        now: Instant,
    ) {
        let Some(bytes) = reactor.received(conn).get(..Preamble::BYTES) else { return };
        let bytes: &[u8; Preamble::BYTES] = bytes.try_into().expect("as many bytes");
        self.callers.remove(&conn);
        let known = match Preamble::parse(bytes) {
            Ok(preamble) => {
                handoff.session_of(&preamble.token.0).map(|session| (preamble, session))
            }
            Err(error) => {
                event!(Warn, "lanes", "an unknown peer dialled the data port", why = error);
                None
            }
        };
        let Some((preamble, (worker, session))) =
            known.filter(|(preamble, _)| preamble.lanes == handoff.offer().lanes)
        else {
            return reactor.close(conn);
        };
        reactor.consume(conn, Preamble::BYTES);
        let Some((stream, early)) = reactor.take_stream(conn) else { return };
        let arrival = Arrival { lane: preamble.lane, stream, early };
        if self.open.get(&(worker, session)) == Some(&preamble.session) {
            join(worker, session, arrival, handoff);
        } else if self.early.len() < EARLY_LANES_MAX {
            let (generation, until) = (preamble.session, now + SESSION_SETUP_DEADLINE);
            self.early.push(EarlyLane { worker, session, generation, arrival, until });
        }
    }
}

fn join<E: From<TransferAnswer>>(
    worker: WorkerId,
    session: SessionId,
    arrival: Arrival,
    handoff: &mut Handoff<E>,
) {
    if let Some(mover) = handoff.destination_mover(worker) {
        mover.send(DestinationCommand::Join { session, arrival });
    }
}

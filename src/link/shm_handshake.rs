//! Passes descriptors of shared memory to a peer on the same host, over an abstract unix socket.
//! The peer must show a token, which only a proven peer gets.
//!
//! ```text
//!  source: Welcome{socket, token} ─▶ destination connects ─▶ token + {cursor, doorbell}
//!          {pool, page lists, ring} + their shapes ─▶ destination maps them, movers get halves
//! ```
//! Thread: `ctl`. Invariants: a token is valid for one session, and not for a later session of the
//! same link. The number of exchanges is at most the number of sessions, and each connection has a
//! deadline.

use crate::limits::{PASSING_CONNECTIONS_MAX, SESSION_SETUP_DEADLINE};
use crate::link::handoff::{DestinationSession, Handoff, SourceSession, rank};
use crate::net::{Address, ConnId, Event, ListenerId, Reactor};
use crate::stdx::hash_map::HashMap;
use crate::transfer::answer::TransferAnswer;
use crate::transfer::pages::Shape;
use crate::transfer::transport::DestinationBinding;
use crate::transfer::transport::shm::{
    DestinationDescriptors, PeerShape, ShmCursor, ShmRing, SourceDescriptors,
};
use crate::wire::message::{Rank, ShmGrant, SocketName, Token, Transport};
use bytemuck::{Pod, Zeroable};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

/// The message that a source sends with its descriptors.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct SourceShape {
    pool_bytes: u64,
    slots: u32,
    capacity: u32,
}

const TOKEN_BYTES: usize = 16;
/// Why an exchange has ended.
const CLOSED: &str = "the source closed its socket";

/// A source's session that waits for its destination to connect.
#[derive(Debug)]
struct PendingSource {
    control: ConnId,
    session: SourceSession,
    ring: ShmRing,
}

/// A destination's session that waits for its source's descriptors.
#[derive(Debug)]
struct PendingDestination {
    control: ConnId,
    session: DestinationSession,
    cursor: ShmCursor,
    deadline: Instant,
}

/// All exchanges in progress.
#[derive(Debug, Default)]
pub struct ShmHandshake {
    listener: Option<(ListenerId, SocketName)>,
    pending: HashMap<[u8; TOKEN_BYTES], PendingSource>,
    calling: HashMap<ConnId, PendingDestination>,
    /// Incoming connections that have not shown their token yet.
    callers: HashMap<ConnId, Instant>,
}

impl ShmHandshake {
    /// Listens on an unguessable socket name. Only sources call it.
    pub fn listen(&mut self, reactor: &mut Reactor) -> io::Result<()> {
        let secret: [u8; 12] = reactor.entropy().bytes();
        let name: String = secret.iter().map(|byte| format!("{byte:02x}")).collect();
        let name = format!("baton-{name}");
        let listener = reactor
            .listen(&Address::Abstract(name.clone().into_bytes()), PASSING_CONNECTIONS_MAX)?;
        let socket = SocketName::new(name.as_bytes()).ok_or(io::ErrorKind::InvalidInput)?;
        self.listener = Some((listener, socket));
        Ok(())
    }

    /// Whether an event belongs to one of these connections.
    pub fn owns(&self, event: &Event) -> bool {
        let conn = match *event {
            Event::Accepted { listener, .. } => {
                return self.listener.is_some_and(|(own, _)| own == listener);
            }
            Event::Connected(conn)
            | Event::Received(conn)
            | Event::Eof(conn)
            | Event::Drained(conn)
            | Event::Closed { conn, .. } => conn,
            Event::Woken | Event::Terminate | Event::Hangup => return false,
        };
        self.calling.contains_key(&conn) || self.callers.contains_key(&conn)
    }

    /// Prepares a source's half and returns the rank for Welcome.
    pub fn prepare_source<E: From<TransferAnswer>>(
        &mut self,
        control: ConnId,
        session: SourceSession,
        handoff: &Handoff<E>,
        reactor: &mut Reactor,
    ) -> Result<Rank, String> {
        let (_, socket) = self.listener.ok_or("this worker does not share its memory")?;
        let token: [u8; TOKEN_BYTES] = reactor.entropy().bytes();
        let ring = ShmRing::new().map_err(|error| error.to_string())?;
        let mut rank =
            rank(handoff.worker(session.worker), &[Transport::Shm], handoff.offer(), None);
        rank.shm = Some(ShmGrant { host: handoff.offer().host, socket, token: Token(token) });
        // A new session on the same link replaces the old one's offer.
        self.pending.retain(|_, pending| pending.control != control);
        self.pending.insert(token, PendingSource { control, session, ring });
        Ok(rank)
    }

    /// Connects to the source of a destination's session.
    pub fn call(
        &mut self,
        control: ConnId,
        session: DestinationSession,
        reactor: &mut Reactor,
        now: Instant,
    ) -> Result<(), String> {
        let grant = session.rank.shm.ok_or("the source names no socket")?;
        let cursor = ShmCursor::new().map_err(|error| error.to_string())?;
        let address = Address::Abstract(grant.socket.as_bytes().to_vec());
        let deadline = now + SESSION_SETUP_DEADLINE;
        let conn = reactor.connect(&address, deadline).map_err(|reason| reason.to_string())?;
        self.calling.insert(conn, PendingDestination { control, session, cursor, deadline });
        Ok(())
    }

    /// Ends the exchanges of a link that is dead.
    pub fn link_down(&mut self, control: ConnId, reactor: &mut Reactor) {
        self.pending.retain(|_, pending| pending.control != control);
        let dead: Vec<ConnId> = self
            .calling
            .iter()
            .filter(|(_, call)| call.control == control)
            .map(|(&conn, _)| conn)
            .collect();
        for conn in dead {
            self.calling.remove(&conn);
            reactor.close(conn);
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
                self.callers.insert(conn, now + SESSION_SETUP_DEADLINE);
            }
            Event::Connected(conn) => self.show_cursor(conn, reactor, handoff, now),
            Event::Received(conn) if self.callers.contains_key(&conn) => {
                self.answer(conn, reactor, handoff)
            }
            Event::Received(conn) => self.receive(conn, reactor, handoff, now),
            Event::Eof(conn) => {
                reactor.close(conn);
                self.ended(conn, CLOSED, handoff, now);
            }
            Event::Closed { conn, .. } => self.ended(conn, CLOSED, handoff, now),
            Event::Drained(_) | Event::Woken | Event::Terminate | Event::Hangup => {}
        }
    }

    /// Closes all connections and stops listening.
    pub fn close(self, reactor: &mut Reactor) {
        self.calling
            .into_keys()
            .chain(self.callers.into_keys())
            .for_each(|conn| reactor.close(conn));
        if let Some((listener, _)) = self.listener {
            reactor.stop_listening(listener);
        }
    }

    /// Closes connections without a token, or without descriptors, in time. Drops offers of ended
    /// sessions.
    pub fn expire<E: From<TransferAnswer>>(
        &mut self,
        reactor: &mut Reactor,
        handoff: &mut Handoff<E>,
        now: Instant,
    ) {
        let is_late = |call: &PendingDestination| call.deadline <= now;
        let late = self.calling.iter().filter(|(_, call)| is_late(call));
        for conn in late.map(|(&conn, _)| conn).collect::<Vec<_>>() {
            reactor.close(conn);
            self.ended(conn, "the source sent no descriptors in time", handoff, now);
        }
        self.pending.retain(|_, pending| handoff.stands(pending.control, &pending.session));
        self.callers.retain(|&conn, until| {
            let in_time = *until > now;
            if !in_time {
                reactor.close(conn);
            }
            in_time
        });
    }

    fn ended<E: From<TransferAnswer>>(
        &mut self,
        conn: ConnId,
        why: &str,
        handoff: &mut Handoff<E>,
        now: Instant,
    ) {
        self.callers.remove(&conn);
        if let Some(PendingDestination { session, .. }) = self.calling.remove(&conn) {
            let why = Err(why.to_owned());
            handoff.bound_destination(
                session.worker,
                session.session,
                session.generation,
                why,
                now,
            );
        }
    }

    fn show_cursor<E: From<TransferAnswer>>(
        &mut self,
        conn: ConnId,
        reactor: &mut Reactor,
        handoff: &mut Handoff<E>,
        now: Instant,
    ) {
        let Some(call) = self.calling.get(&conn) else { return };
        let token = call.session.rank.shm.map_or([0; TOKEN_BYTES], |grant| grant.token.0);
        let shown =
            handoff.doorbell(call.session.worker).map(|doorbell| call.cursor.descriptors(doorbell));
        let Some(Ok(DestinationDescriptors { cursor, doorbell })) = shown else {
            reactor.close(conn);
            return self.ended(conn, CLOSED, handoff, now);
        };
        if reactor.send_descriptors(conn, &token, &[cursor.as_fd(), doorbell.as_fd()]).is_err() {
            reactor.close(conn);
            self.ended(conn, CLOSED, handoff, now);
        }
    }

    /// A destination has connected. Its token selects the session.
    fn answer<E: From<TransferAnswer>>(
        &mut self,
        conn: ConnId,
        reactor: &mut Reactor,
        handoff: &mut Handoff<E>,
    ) {
        let Some(token) = reactor.received(conn).get(..TOKEN_BYTES) else { return };
        let token: [u8; TOKEN_BYTES] = token.try_into().expect("sixteen bytes");
        self.callers.remove(&conn);
        let descriptors = reactor.take_descriptors(conn);
        // The index of an ended session can belong to a new session that already has its half.
        let stands = |pending: &PendingSource| handoff.stands(pending.control, &pending.session);
        let Some(pending) = self.pending.remove(&token).filter(stands) else {
            return reactor.close(conn);
        };
        if exchange(conn, pending, descriptors, reactor, handoff).is_none() {
            reactor.close(conn);
        }
    }

    /// The source has answered. Maps its memory.
    fn receive<E: From<TransferAnswer>>(
        &mut self,
        conn: ConnId,
        reactor: &mut Reactor,
        handoff: &mut Handoff<E>,
        now: Instant,
    ) {
        let Some(shown) = reactor.received(conn).get(..size_of::<SourceShape>()) else { return };
        let shown: SourceShape = bytemuck::pod_read_unaligned(shown);
        let descriptors = reactor.take_descriptors(conn);
        reactor.close(conn);
        let Some(call) = self.calling.remove(&conn) else { return };
        let (worker, session, generation) =
            (call.session.worker, call.session.session, call.session.generation);
        let half = connect(call, &shown, descriptors);
        handoff.bound_destination(worker, session, generation, half, now);
    }
}

/// Gives the source's mover its half and the destination its descriptors.
fn exchange<E: From<TransferAnswer>>(
    conn: ConnId,
    pending: PendingSource,
    descriptors: Vec<OwnedFd>,
    reactor: &mut Reactor,
    handoff: &mut Handoff<E>,
) -> Option<()> {
    let [cursor, doorbell] = <[OwnedFd; 2]>::try_from(descriptors).ok()?;
    let PendingSource { session, ring, .. } = pending;
    let memory = handoff.worker(session.worker).memory.clone();
    let Shape { slots, capacity } = memory.lists.shape();
    let shown = SourceShape { pool_bytes: memory.region.len() as u64, slots, capacity };
    let SourceDescriptors { pool, lists, ring: offers } = ring.descriptors(&memory).ok()?;
    let half = ring.connect(DestinationDescriptors { cursor, doorbell }).ok()?;
    handoff.open_source(session.worker, session.session, Box::new(half));
    let shown_to = [pool.as_fd(), lists.as_fd(), offers.as_fd()];
    reactor.send_descriptors(conn, bytemuck::bytes_of(&shown), &shown_to).ok()?;
    reactor.close_after_flush(conn);
    Some(())
}

fn connect(
    call: PendingDestination,
    shown: &SourceShape,
    descriptors: Vec<OwnedFd>,
) -> Result<Box<DestinationBinding>, String> {
    let PendingDestination { session, cursor, .. } = call;
    let [pool, lists, ring] = <[OwnedFd; 3]>::try_from(descriptors)
        .map_err(|_| "the source did not send its descriptors".to_string())?;
    if shown.pool_bytes != session.rank.regions.kv {
        return Err(format!(
            "the source has a pool of {} bytes, but its Welcome says {}",
            shown.pool_bytes, session.rank.regions.kv
        ));
    }
    let peer = PeerShape {
        pool_bytes: shown.pool_bytes,
        pages: session.pages,
        lists: Shape { slots: shown.slots, capacity: shown.capacity },
    };
    let from = SourceDescriptors { pool, lists, ring };
    let half = cursor.connect(from, &peer, session.layout.page_size, session.template);
    half.map(|half| Box::new(half) as Box<DestinationBinding>).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::handoff::TransportCapabilities;
    use crate::net::Entropy;
    use crate::wire::message::HostId;
    use std::io::{Read, Write};
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixStream};
    use std::time::Duration;

    /// Handles what has come, at this time.
    fn turn<E: From<TransferAnswer>>(
        shm: &mut ShmHandshake,
        reactor: &mut Reactor,
        handoff: &mut Handoff<E>,
        now: Instant,
    ) {
        reactor.poll(Some(Instant::now() + Duration::from_millis(20))).unwrap();
        while let Some(event) = reactor.next_event() {
            shm.handle(event, reactor, handoff, now);
        }
    }

    /// Whether the other side has closed this connection. Not one byte may have come.
    fn is_closed(stream: &mut UnixStream) -> bool {
        match stream.read(&mut [0]) {
            Ok(count) => {
                assert_eq!(count, 0, "a stranger gets no data");
                true
            }
            Err(error) => error.kind() != io::ErrorKind::WouldBlock,
        }
    }

    #[test]
    fn strangers_have_64_connections_for_5_seconds_and_get_no_data() {
        const MOST: usize = 64;
        let mut reactor = Reactor::new().unwrap();
        let offer = TransportCapabilities {
            transports: vec![Transport::Shm],
            host: HostId([7; 16]),
            data: None,
            lanes: 1,
        };
        let mut handoff: Handoff = Handoff::new(Vec::new(), offer, Entropy::System);
        let mut shm = ShmHandshake::default();
        shm.listen(&mut reactor).unwrap();
        let (_, name) = shm.listener.unwrap();
        let address = SocketAddr::from_abstract_name(name.as_bytes()).unwrap();
        let now = Instant::now();
        let mut strangers: Vec<UnixStream> = Vec::new();
        for index in 0..MOST + 6 {
            let mut stranger = UnixStream::connect_addr(&address).unwrap();
            // Some begin a token. The connections above the limit can be closed already.
            let _ = stranger.write_all(&vec![b'x'; index % TOKEN_BYTES]);
            stranger.set_nonblocking(true).unwrap();
            strangers.push(stranger);
        }
        for _ in 0..5 {
            turn(&mut shm, &mut reactor, &mut handoff, now);
        }
        assert_eq!(shm.callers.len(), MOST);
        let are_closed = |strangers: &mut [UnixStream]| {
            strangers.iter_mut().map(is_closed).collect::<Vec<bool>>()
        };
        let expected: Vec<bool> = (0..MOST + 6).map(|index| index >= MOST).collect();
        assert_eq!(are_closed(&mut strangers), expected);
        // A token that was never given ends its connection at once.
        strangers[0].write_all(&[b'x'; TOKEN_BYTES]).unwrap();
        turn(&mut shm, &mut reactor, &mut handoff, now);
        assert!(is_closed(&mut strangers[0]) && !is_closed(&mut strangers[1]));
        let end = now + Duration::from_secs(5);
        shm.expire(&mut reactor, &mut handoff, end - Duration::from_millis(1));
        assert!(!is_closed(&mut strangers[1]));
        shm.expire(&mut reactor, &mut handoff, end);
        assert_eq!(are_closed(&mut strangers), [true; MOST + 6]);
    }
}

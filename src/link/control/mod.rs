//! Control links to workers of other processes. Decode dials and prefill accepts. A link carries
//! ZMTP, Hello, Proof and then the messages of the hand-off.
//!
//! Owns: links and their deadlines, the look-up of sources (`lookup`), the handshakes of
//! shared memory (`shm_handshake`) and TCP (`tcp_handshake`). Thread: `ctl`. Invariants: this
//! worker closes a link that is not proven in time or is silent for too long. When a link closes,
//! its peer counts as dead at once. Not here: the meaning of messages (`link::handoff`), bytes
//! (`wire::link`).

mod establishment;
mod peer_link;

use crate::cause::Cause;
use crate::ids::{Peer, Role};
use crate::limits::{PEER_PING_EVERY, PEER_PROOF_TIME_MAX, PEER_SILENCE_MAX};
use crate::link::handoff::{DestinationSession, Handoff, RemoteAction};
use crate::link::lookup::SourceLookup;
use crate::link::shm_handshake::ShmHandshake;
use crate::link::tcp_handshake::TcpHandshake;
use crate::net::{ConnId, Event, ListenerId, Reactor};
use crate::obs::log::event;
use crate::stdx::hash_map::{HashMap, HashSet};
use crate::transfer::answer::TransferAnswer;
use crate::transfer::transport::fake::Fake;
use crate::wire::Multipart;
use crate::wire::auth::{Keyring, Side};
use crate::wire::link::{self, ControlLink};
use crate::wire::message::{Bye, Message, Transport};
use peer_link::{LinkEnd, PeerLink};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

/// How this worker identifies itself to peers.
#[derive(Clone, Debug)]
pub struct PeerIdentity {
    /// Peer id and incarnation.
    pub peer: Peer,
    /// Its role.
    pub role: Role,
    /// Cluster keys. This worker proves the first to its peers; a peer must prove one of them.
    pub keys: Keyring,
}

/// All links of this process.
#[derive(Debug)]
pub struct ControlLinks {
    own: PeerIdentity,
    control: Option<ListenerId>,
    links: HashMap<ConnId, PeerLink>,
    lookup: Box<dyn SourceLookup>,
    shm_handshake: ShmHandshake,
    tcp_handshake: TcpHandshake,
    connections: u64,
    /// Whether this worker drains. Open links have Bye then, and each new link gets it when it
    /// opens.
    draining: bool,
    timeouts: LinkTimeouts,
    /// Time of the last check of deadlines, and whether that check was late.
    looked: Instant,
    stood_still: bool,
    /// Whether this worker shows its peers that it is well.
    is_well: bool,
}

/// Deadlines of a link.
#[derive(Clone, Copy, Debug)]
pub struct LinkTimeouts {
    /// Longest time from the connection to the proof.
    pub proof: Duration,
    /// Longest silence of the peer.
    pub silence: Duration,
}

impl Default for LinkTimeouts {
    fn default() -> LinkTimeouts {
        LinkTimeouts { proof: PEER_PROOF_TIME_MAX, silence: PEER_SILENCE_MAX }
    }
}

impl LinkTimeouts {
    /// Time between two PINGs on a quiet link: a quarter of the allowed silence at most.
    fn ping_every(&self) -> Duration {
        PEER_PING_EVERY.min(self.silence / 4)
    }
}

impl ControlLinks {
    /// Creates the state without links. Decode workers dial `control`.
    pub fn new(
        own: PeerIdentity,
        control: Option<ListenerId>,
        lookup: Box<dyn SourceLookup>,
        shm_handshake: ShmHandshake,
        tcp_handshake: TcpHandshake,
        timeouts: LinkTimeouts,
        now: Instant,
    ) -> ControlLinks {
        ControlLinks {
            own,
            control,
            links: HashMap::default(),
            lookup,
            shm_handshake,
            tcp_handshake,
            connections: 0,
            draining: false,
            timeouts,
            looked: now,
            stood_still: false,
            is_well: true,
        }
    }

    /// Sets whether this worker shows that it is well: it answers PINGs and sends its own. A hung
    /// worker must look dead, a busy one must not.
    pub fn show_health(&mut self, is_well: bool) {
        self.is_well = is_well;
        for peer_link in self.links.values_mut() {
            peer_link.link.answer_pings(is_well);
        }
    }

    /// New links prove the first of these keys and require one of them. Open links stay.
    pub fn set_keys(&mut self, keys: Keyring) {
        self.own.keys = keys;
    }

    /// Asserts the rule that holds between turns. Debug builds call it at each tick.
    ///
    /// # Panics
    /// A peer has two links that it dialled.
    pub fn invariants(&self) {
        let accepted = self.links.values().filter(|peer_link| peer_link.dialled.is_none());
        let peers: Vec<_> = accepted.filter_map(|peer_link| peer_link.peer).collect();
        let distinct = peers.iter().map(|(peer, _)| peer.id).collect::<HashSet<_>>().len();
        assert_eq!(distinct, peers.len(), "a peer has one link that it dialled");
    }

    /// Whether an event belongs to one of these connections.
    pub fn owns(&self, event: &Event) -> bool {
        let own = match *event {
            Event::Accepted { listener, .. } => self.control == Some(listener),
            Event::Connected(conn)
            | Event::Received(conn)
            | Event::Eof(conn)
            | Event::Drained(conn)
            | Event::Closed { conn, .. } => self.links.contains_key(&conn),
            Event::Woken | Event::Terminate | Event::Hangup => false,
        };
        own || self.lookup.owns(event)
            || self.shm_handshake.owns(event)
            || self.tcp_handshake.owns(event)
    }

    /// Takes an event of one of these connections.
    pub fn handle<E: From<TransferAnswer>>(
        &mut self,
        event: Event,
        reactor: &mut Reactor,
        handoff: &mut Handoff<E>,
        now: Instant,
    ) {
        if self.shm_handshake.owns(&event) {
            return self.shm_handshake.handle(event, reactor, handoff, now);
        }
        if self.tcp_handshake.owns(&event) {
            return self.tcp_handshake.handle(event, reactor, handoff, now);
        }
        if self.lookup.owns(&event) {
            if let Some(found) = self.lookup.handle(event, reactor) {
                self.handle_lookup(found, reactor, handoff, now);
            }
            return;
        }
        match event {
            Event::Accepted { conn, peer, .. } => {
                self.close_oldest_unproven(reactor, handoff, now);
                let hello = self.hello(reactor);
                let link = ControlLink::new(Side::Acceptor, hello, self.own.keys.clone());
                self.add(conn, link, None, peer, now);
            }
            Event::Connected(conn) => {
                if let Some(peer_link) = self.links.get_mut(&conn) {
                    peer_link.since = now;
                }
                self.flush(conn, reactor, handoff, now);
            }
            Event::Received(conn) => self.receive(conn, reactor, handoff, now),
            Event::Eof(conn) => {
                reactor.close(conn);
                let end = self
                    .links
                    .get(&conn)
                    .map_or(LinkEnd::closed("closed by the peer"), PeerLink::closed);
                self.drop_link(conn, &end, reactor, handoff, now);
            }
            Event::Closed { conn, reason } => {
                self.drop_link(conn, &LinkEnd::lost(reason), reactor, handoff, now)
            }
            Event::Drained(_) | Event::Woken | Event::Terminate | Event::Hangup => {}
        }
    }

    /// Whether a resolved name waits for [`ControlLinks::poll_resolved`].
    pub fn has_events(&self) -> bool {
        self.lookup.has_events()
    }

    /// Announces on all links that this worker drains.
    pub fn drain<E: From<TransferAnswer>>(
        &mut self,
        reactor: &mut Reactor,
        handoff: &mut Handoff<E>,
        now: Instant,
    ) {
        self.draining = true;
        let open = self.links.iter().filter(|(_, peer_link)| peer_link.peer.is_some());
        for conn in open.map(|(&conn, _)| conn).collect::<Vec<_>>() {
            self.say_bye(conn, Cause::Draining);
            self.flush(conn, reactor, handoff, now);
        }
    }

    /// Sends Bye on open links, closes all links and look-ups, and stops listening.
    pub fn close(mut self, reactor: &mut Reactor) {
        let conns: Vec<ConnId> = self.links.keys().copied().collect();
        for conn in conns {
            self.say_bye(conn, Cause::Draining);
            let Some(peer_link) = self.links.get_mut(&conn) else { continue };
            // If the connection is full, it closes without Bye.
            let _ = reactor.send(conn, peer_link.link.transmit());
            reactor.close_after_flush(conn);
        }
        if let Some(control) = self.control {
            reactor.stop_listening(control);
        }
        self.lookup.close(reactor);
        self.shm_handshake.close(reactor);
        self.tcp_handshake.close(reactor);
    }

    fn say_bye(&mut self, conn: ConnId, cause: Cause) {
        if let Some(peer_link) = self.links.get_mut(&conn) {
            // A link that is full or not open ends without Bye.
            let _ = peer_link.link.send(&Message::Bye(Bye { cause: Some(cause) }));
        }
    }

    /// The next host name of a prefill worker with its address, or an error.
    pub fn poll_resolved(&mut self, now: Instant) -> Option<(String, Result<IpAddr, String>)> {
        self.lookup.resolved(now)
    }

    /// The look-up of sources: the hosts that can be dialled, and their names.
    pub fn lookup_mut(&mut self) -> &mut dyn SourceLookup {
        &mut *self.lookup
    }

    /// Runs the actions of the hand-off that need other processes.
    pub fn run_remote_actions<E: From<TransferAnswer>>(
        &mut self,
        reactor: &mut Reactor,
        handoff: &mut Handoff<E>,
        now: Instant,
    ) {
        while let Some(remote) = handoff.poll_remote() {
            match remote {
                RemoteAction::Send(conn, message) => {
                    self.send(conn, &message, reactor, handoff, now)
                }
                RemoteAction::Resolve(name) => {
                    if let Some(address) = self.lookup.resolve(&name, now) {
                        handoff.resolved(&name, address, now);
                    }
                }
                // The dial in progress answers this one, too.
                RemoteAction::Dial { worker, source, .. }
                    if self.is_on_its_way(worker, &source) => {}
                RemoteAction::Dial { worker, source, until } => {
                    if let Some(found) = self.lookup.look_up(worker, source, until, reactor) {
                        self.handle_lookup(found, reactor, handoff, now);
                    }
                }
                RemoteAction::HangUp(conn) => {
                    let peer_link = self.links.remove(&conn);
                    if let Some((_, source)) = peer_link.and_then(|peer_link| peer_link.dialled) {
                        self.lookup.forget(&source);
                    }
                    self.shm_handshake.link_down(conn, reactor);
                    reactor.close_after_flush(conn);
                }
                RemoteAction::BindSource(conn, session) => {
                    let (worker, id) = (session.worker, session.session);
                    let outcome = match session.transport {
                        Transport::Shm => {
                            self.shm_handshake.prepare_source(conn, session, handoff, reactor)
                        }
                        Transport::Tcp => {
                            let peer =
                                self.links.get(&conn).and_then(|peer_link| peer_link.address);
                            self.tcp_handshake.connect(session, peer, handoff, reactor)
                        }
                        Transport::Rdma => {
                            handoff.open_rdma_source(session, self.tcp_handshake.wait())
                        }
                        Transport::Fake => Ok(handoff.open_fake_source(worker, id)),
                    };
                    handoff.bound_source(worker, id, outcome, now);
                }
                RemoteAction::BindDestination(conn, session) => {
                    self.bind_destination(conn, session, reactor, handoff, now)
                }
            }
        }
    }

    /// Closes overdue links and sends due PINGs.
    pub fn expire<E: From<TransferAnswer>>(
        &mut self,
        reactor: &mut Reactor,
        handoff: &mut Handoff<E>,
        now: Instant,
    ) {
        self.shm_handshake.expire(reactor, handoff, now);
        self.tcp_handshake.expire(reactor, now);
        for found in self.lookup.expire(reactor, now) {
            self.handle_lookup(found, reactor, handoff, now);
        }
        // If this thread paused, its peers are not at fault for the silence during the pause. Two
        // late checks in a row mean a slow host, and a slow host must still detect dead peers.
        let still = now.saturating_duration_since(self.looked);
        let stood_still = still > PEER_PING_EVERY;
        let excused = if stood_still && !self.stood_still { still } else { Duration::ZERO };
        (self.looked, self.stood_still) = (now, stood_still);
        let ping_every = self.timeouts.ping_every();
        let mut late = Vec::new();
        let mut due = Vec::new();
        for (&conn, peer_link) in &mut self.links {
            for since in [&mut peer_link.heard, &mut peer_link.since] {
                *since = (*since + excused).min(now);
            }
            let open = peer_link.peer.is_some();
            let (since, limit) = match open {
                true => (peer_link.heard, self.timeouts.silence),
                false => (peer_link.since, self.timeouts.proof),
            };
            let is_silent = now.saturating_duration_since(since) > limit;
            if is_silent {
                late.push((conn, open));
            } else if open && self.is_well && now >= peer_link.next_ping {
                peer_link.next_ping = now + ping_every;
                // If the link is too full for a PING, the limit on silence ends it.
                let _ = peer_link.link.ping(0, 0);
                due.push(conn);
            }
        }
        for (conn, open) in late {
            reactor.close(conn);
            let why = if open { "silent for too long" } else { "did not prove itself in time" };
            self.drop_link(conn, &LinkEnd::lost(why), reactor, handoff, now);
        }
        for conn in due {
            self.flush(conn, reactor, handoff, now);
        }
    }

    fn bind_destination<E: From<TransferAnswer>>(
        &mut self,
        conn: ConnId,
        session: DestinationSession,
        reactor: &mut Reactor,
        handoff: &mut Handoff<E>,
        now: Instant,
    ) {
        let (worker, id, generation) = (session.worker, session.session, session.generation);
        match session.transport {
            // Continues when the source has sent its descriptors.
            Transport::Shm => {
                if let Err(why) = self.shm_handshake.call(conn, session, reactor, now) {
                    handoff.bound_destination(worker, id, generation, Err(why), now);
                }
            }
            Transport::Tcp => {
                let half = self.tcp_handshake.expect(&session, handoff);
                handoff.bound_destination(worker, id, generation, Ok(half), now);
                self.tcp_handshake.opened(worker, id, generation, handoff);
            }
            Transport::Rdma => {
                let half = handoff.rdma_destination(&session, self.tcp_handshake.wait());
                handoff.bound_destination(worker, id, generation, half, now);
            }
            Transport::Fake => {
                handoff.bound_destination(worker, id, generation, Ok(Box::new(Fake)), now);
            }
        }
    }

    fn receive<E: From<TransferAnswer>>(
        &mut self,
        conn: ConnId,
        reactor: &mut Reactor,
        handoff: &mut Handoff<E>,
        now: Instant,
    ) {
        match self.take_in(conn, reactor, handoff, now) {
            Ok(()) => self.flush(conn, reactor, handoff, now),
            Err(end) => {
                // A pending proof is flushed, too, because the peer can have to reject it. If the
                // peer waits for a proof, any other message shows it that this worker has no key.
                self.say_bye(conn, end.cause);
                self.flush(conn, reactor, handoff, now);
                reactor.close_after_flush(conn);
                self.drop_link(conn, &end, reactor, handoff, now);
            }
        }
    }

    fn take_in<E: From<TransferAnswer>>(
        &mut self,
        conn: ConnId,
        reactor: &mut Reactor,
        handoff: &mut Handoff<E>,
        now: Instant,
    ) -> Result<(), LinkEnd> {
        loop {
            let Some(peer_link) = self.links.get_mut(&conn) else { return Ok(()) };
            peer_link.heard = now;
            let used =
                peer_link.link.handle_input(reactor.received(conn)).map_err(LinkEnd::from)?;
            reactor.consume(conn, used);
            let mut opened = None;
            let mut more = used > 0;
            match peer_link.link.poll_event().map_err(LinkEnd::from)? {
                Some(link::LinkEvent::Open(hello)) => opened = Some(*hello),
                Some(link::LinkEvent::Message(message)) => {
                    // Messages count only from the newest connection of a peer.
                    if peer_link.peer.is_some() {
                        if let Message::Bye(bye) = &message {
                            peer_link.bye = bye.cause;
                        }
                        handoff.receive_message(conn, &message, now);
                    }
                }
                Some(link::LinkEvent::Pong { .. }) => {}
                None => more = used > 0 && !reactor.received(conn).is_empty(),
            }
            if let Some(hello) = opened {
                self.open_link(conn, &hello, reactor, handoff, now)?;
            }
            if !more {
                return Ok(());
            }
        }
    }

    fn send<E: From<TransferAnswer>>(
        &mut self,
        conn: ConnId,
        message: &Multipart,
        reactor: &mut Reactor,
        handoff: &mut Handoff<E>,
        now: Instant,
    ) {
        let Some(peer_link) = self.links.get_mut(&conn) else { return };
        let Ok(Some(message)) = Message::decode(message.parts(), None) else {
            debug_assert!(false, "a message of our own does not decode");
            return;
        };
        match peer_link.link.send(&message) {
            Ok(()) => self.flush(conn, reactor, handoff, now),
            Err(error) => {
                reactor.close(conn);
                self.drop_link(conn, &LinkEnd::lost(error), reactor, handoff, now);
            }
        }
    }

    fn flush<E: From<TransferAnswer>>(
        &mut self,
        conn: ConnId,
        reactor: &mut Reactor,
        handoff: &mut Handoff<E>,
        now: Instant,
    ) {
        let Some(peer_link) = self.links.get_mut(&conn) else { return };
        let bytes = peer_link.link.transmit();
        if bytes.is_empty() {
            return;
        }
        let count = bytes.len();
        match reactor.send(conn, bytes) {
            Ok(()) => peer_link.link.transmitted(count),
            Err(error) => {
                reactor.close(conn);
                self.drop_link(conn, &LinkEnd::lost(error), reactor, handoff, now);
            }
        }
    }

    fn drop_link<E: From<TransferAnswer>>(
        &mut self,
        conn: ConnId,
        end: &LinkEnd,
        reactor: &mut Reactor,
        handoff: &mut Handoff<E>,
        now: Instant,
    ) {
        let Some(peer_link) = self.links.remove(&conn) else { return };
        let LinkEnd { cause, ref why, closed } = *end;
        let address = display(peer_link.address);
        if peer_link.bye == Some(Cause::Draining) && closed {
            event!(Info, "peers", "control link closed after Bye", address = address, why = why);
        } else {
            event!(Warn, "peers", "link is down", address = address, why = why);
        }
        self.shm_handshake.link_down(conn, reactor);
        match &peer_link.dialled {
            // The link never opened, so the hand-off knows only the dial.
            Some((worker, source)) if peer_link.peer.is_none() => {
                self.lookup.forget(source);
                handoff.dial_failed(*worker, source, cause, now);
            }
            Some((_, source)) => {
                self.lookup.forget(source);
                handoff.link_down(conn, cause, now);
            }
            None => handoff.link_down(conn, cause, now),
        }
    }
}

fn display(address: Option<SocketAddr>) -> String {
    address.map_or("?".into(), |address| address.to_string())
}

#[cfg(test)]
mod tests;

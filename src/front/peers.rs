//! Control links to workers of other processes: dialled by decode, accepted by prefill; ZMTP, Hello, Proof,
//! then the hand-off's messages.
//!
//! Thread: `ctl`. Owns: links and their deadlines, the look-up of prefill workers (`directory`), what they are asked over
//! HTTP (`asking`), the passing of descriptors (`passing`) and of lanes (`lanes`). A link that has not proven itself within a second, or
//! is silent for too long, is closed; a closed link is a dead peer at once.

mod opening;
mod peering;

use crate::cause::Cause;
use crate::front::asking::Asking;
use crate::front::directory::Directory;
use crate::front::handoff::{DestinationSession, Handoff, Remote};
use crate::front::lanes::Lanes;
use crate::front::passing::Passing;
use crate::ids::Peer;
use crate::limits::{PEER_PING_EVERY, PEER_PROOF_TIME_MAX, PEER_SILENCE_MAX};
use crate::net::{Authorities, ConnId, Event, ListenerId, Reactor};
use crate::obs::log::event;
use crate::transfer::transport::fake::Fake;
use crate::wire::Multipart;
use crate::wire::auth::{Keyring, Side};
use crate::wire::link::{self, Link};
use crate::wire::message::{Bye, Message, Role, Transport};
use peering::{End, Peering};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Who this worker is to its peers.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Name and incarnation.
    pub peer: Peer,
    /// What it does.
    pub role: Role,
    /// What it proves to know, and peers must.
    pub keys: Keyring,
}

/// All links of this process.
#[derive(Debug)]
pub struct Peers {
    own: Identity,
    control: Option<ListenerId>,
    links: HashMap<ConnId, Peering>,
    directory: Directory,
    asking: Asking,
    passing: Passing,
    lanes: Lanes,
    connections: u64,
    /// Said on each link, now or once it opens.
    draining: bool,
    patience: Patience,
    /// When deadlines were looked at last, and whether that was long after the time before.
    looked: Instant,
    stood_still: bool,
}

/// How long a link may take, and be silent.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// From its connection to its proof.
    pub proof: Duration,
    /// Between two signs of life.
    pub silence: Duration,
}

impl Default for Patience {
    fn default() -> Patience {
        Patience { proof: PEER_PROOF_TIME_MAX, silence: PEER_SILENCE_MAX }
    }
}

impl Patience {
    /// Between two PINGs on a quiet link: four fit into a silence.
    fn ping_every(&self) -> Duration {
        PEER_PING_EVERY.min(self.silence / 4)
    }
}

impl Peers {
    /// No links yet. `control` is where decode workers dial.
    pub fn new(
        own: Identity,
        control: Option<ListenerId>,
        directory: Directory,
        passing: Passing,
        lanes: Lanes,
        patience: Patience,
    ) -> Peers {
        Peers {
            own,
            control,
            links: HashMap::new(),
            directory,
            asking: Asking::default(),
            passing,
            lanes,
            connections: 0,
            draining: false,
            patience,
            looked: Instant::now(),
            stood_still: false,
        }
    }

    /// Whether PINGs are answered: a hung worker looks dead, a busy one does not.
    pub fn answer_pings(&mut self, answer: bool) {
        for peering in self.links.values_mut() {
            peering.link.answer_pings(answer);
        }
    }

    /// Links that are made from now on prove the first of these and ask for any; those that stand stay.
    pub fn set_keys(&mut self, keys: Keyring) {
        self.own.keys = keys;
    }

    /// Prefill workers that are asked over TLS must be vouched for by these from now on.
    pub fn trust(&mut self, authorities: Authorities) {
        self.asking.trust(authorities);
    }

    /// Whether an event is of one of these connections.
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
        own || self.directory.owns(event)
            || self.asking.owns(event)
            || self.passing.owns(event)
            || self.lanes.owns(event)
    }

    /// Takes an event of one of these connections.
    pub fn handle(
        &mut self,
        event: Event,
        reactor: &mut Reactor,
        handoff: &mut Handoff,
        now: Instant,
    ) {
        if self.passing.owns(&event) {
            return self.passing.handle(event, reactor, handoff, now);
        }
        if self.lanes.owns(&event) {
            return self.lanes.handle(event, reactor, handoff, now);
        }
        if self.asking.owns(&event) {
            self.asking.handle(event, reactor, now);
            return self.tell_words(handoff);
        }
        if self.directory.owns(&event) {
            if let Some(found) = self.directory.handle(event, reactor) {
                self.found(found, reactor, handoff, now);
            }
            return;
        }
        match event {
            Event::Accepted { conn, peer, .. } => {
                self.make_room(reactor, handoff, now);
                let link = Link::new(Side::Acceptor, self.hello(), self.own.keys.clone());
                self.add(conn, link, None, peer, now);
            }
            Event::Connected(conn) => {
                if let Some(peering) = self.links.get_mut(&conn) {
                    peering.since = now;
                }
                self.flush(conn, reactor, handoff, now);
            }
            Event::Received(conn) => self.receive(conn, reactor, handoff, now),
            Event::Eof(conn) => {
                reactor.close(conn);
                let end = self
                    .links
                    .get(&conn)
                    .map_or(End::closed("closed by the peer"), Peering::closed);
                self.down(conn, &end, reactor, handoff, now);
            }
            Event::Closed { conn, reason } => {
                self.down(conn, &End::lost(reason), reactor, handoff, now)
            }
            Event::Drained(_) | Event::Woken | Event::Terminate | Event::Hangup => {}
        }
    }

    /// Whether a name was resolved.
    pub fn has_news(&self) -> bool {
        self.directory.has_news()
    }

    /// Says on all links that nothing new is begun here.
    pub fn drain(&mut self, reactor: &mut Reactor, handoff: &mut Handoff, now: Instant) {
        self.draining = true;
        let open = self.links.iter().filter(|(_, peering)| peering.who.is_some());
        for conn in open.map(|(&conn, _)| conn).collect::<Vec<_>>() {
            self.say_bye(conn, Cause::Draining);
            self.flush(conn, reactor, handoff, now);
        }
    }

    /// Ends all links and what was to become some, after a last word on those that stand, and listens no more.
    pub fn close(mut self, reactor: &mut Reactor) {
        let conns: Vec<ConnId> = self.links.keys().copied().collect();
        for conn in conns {
            self.say_bye(conn, Cause::Draining);
            let Some(peering) = self.links.get_mut(&conn) else { continue };
            // One that takes no more is closed without.
            let _ = reactor.send(conn, peering.link.transmit());
            reactor.close_after_flush(conn);
        }
        if let Some(control) = self.control {
            reactor.stop_listening(control);
        }
        self.asking.close(reactor);
        self.directory.close(reactor);
        self.passing.close(reactor);
        self.lanes.close(reactor);
    }

    fn say_bye(&mut self, conn: ConnId, cause: Cause) {
        if let Some(peering) = self.links.get_mut(&conn) {
            // One that is too full for it, or not open, ends without.
            let _ = peering.link.send(&Message::Bye(Bye { cause: Some(cause) }));
        }
    }

    /// Does what the managers want done for links to other processes.
    pub fn serve(&mut self, reactor: &mut Reactor, handoff: &mut Handoff, now: Instant) {
        while let Some((name, address)) = self.directory.resolved(now) {
            self.asking.resolved(&name, &address, reactor, now);
            handoff.resolved(&name, address, now);
        }
        while let Some(remote) = handoff.poll_remote() {
            match remote {
                Remote::Send(conn, message) => self.send(conn, &message, reactor, handoff, now),
                Remote::Resolve(name) => {
                    if let Some(address) = self.directory.resolve(&name, now) {
                        handoff.resolved(&name, address, now);
                    }
                }
                Remote::Ask(ask) => self.asking.begin(*ask, &mut self.directory, reactor, now),
                Remote::Unask(exchange) => self.asking.cancel(exchange, reactor),
                // What became of the dial before it is the answer to this one too.
                Remote::Dial { worker, source, .. } if self.is_on_its_way(worker, &source) => {}
                Remote::Dial { worker, source, until } => {
                    if let Some(found) = self.directory.look_up(worker, source, until, reactor) {
                        self.found(found, reactor, handoff, now);
                    }
                }
                Remote::HangUp(conn) => {
                    let peering = self.links.remove(&conn);
                    if let Some((_, source)) = peering.and_then(|peering| peering.dialled) {
                        self.directory.forget(&source);
                    }
                    self.passing.link_down(conn, reactor);
                    reactor.close_after_flush(conn);
                }
                Remote::BindSource(conn, session) => {
                    let (worker, id) = (session.worker, session.session);
                    let outcome = match session.transport {
                        Transport::Shm => self.passing.offer(conn, session, handoff),
                        Transport::Tcp => {
                            let peer = self.links.get(&conn).and_then(|peering| peering.address);
                            self.lanes.connect(session, peer, handoff)
                        }
                        Transport::Rdma => handoff.open_rdma_source(session, self.lanes.wait()),
                        Transport::Fake => Ok(handoff.open_fake_source(worker, id)),
                    };
                    handoff.bound_source(worker, id, outcome, now);
                }
                Remote::BindDestination(conn, session) => {
                    self.bind_destination(conn, session, reactor, handoff, now)
                }
            }
        }
        self.tell_words(handoff);
    }

    /// What prefill workers say that were asked.
    fn tell_words(&mut self, handoff: &mut Handoff) {
        while let Some((exchange, word)) = self.asking.poll() {
            handoff.hear(exchange, word);
        }
    }

    /// Closes what is overdue and keeps the rest warm.
    pub fn expire(&mut self, reactor: &mut Reactor, handoff: &mut Handoff, now: Instant) {
        self.passing.expire(reactor, handoff, now);
        self.asking.expire(reactor, now);
        self.tell_words(handoff);
        self.lanes.expire(reactor, now);
        for found in self.directory.expire(reactor, now) {
            self.found(found, reactor, handoff, now);
        }
        // While this thread stood still (a host that was paused) it heard nobody: that is nobody else's silence.
        // Twice in a row it is no pause but how slow this host is, and the dead must be found on slow hosts, too.
        let still = now.saturating_duration_since(self.looked);
        let stood_still = still > PEER_PING_EVERY;
        let excused = if stood_still && !self.stood_still { still } else { Duration::ZERO };
        (self.looked, self.stood_still) = (now, stood_still);
        let ping_every = self.patience.ping_every();
        let mut late = Vec::new();
        let mut due = Vec::new();
        for (&conn, peering) in &mut self.links {
            for since in [&mut peering.heard, &mut peering.since] {
                *since = (*since + excused).min(now);
            }
            let open = peering.who.is_some();
            let (since, limit) = match open {
                true => (peering.heard, self.patience.silence),
                false => (peering.since, self.patience.proof),
            };
            if now.saturating_duration_since(since) > limit {
                late.push((conn, open));
            } else if open && now >= peering.next_ping {
                peering.next_ping = now + ping_every;
                // A link too full for a PING has other trouble, which silence will tell.
                let _ = peering.link.ping(0, 0);
                due.push(conn);
            }
        }
        for (conn, open) in late {
            reactor.close(conn);
            let why = if open { "silent for too long" } else { "did not prove itself in time" };
            self.down(conn, &End::lost(why), reactor, handoff, now);
        }
        for conn in due {
            self.flush(conn, reactor, handoff, now);
        }
    }

    fn bind_destination(
        &mut self,
        conn: ConnId,
        session: DestinationSession,
        reactor: &mut Reactor,
        handoff: &mut Handoff,
        now: Instant,
    ) {
        let (worker, id, generation) = (session.worker, session.session, session.generation);
        match session.transport {
            // Goes on when the source has shown its memory.
            Transport::Shm => {
                if let Err(why) = self.passing.call(conn, session, reactor, now) {
                    handoff.bound_destination(worker, id, generation, Err(why), now);
                }
            }
            Transport::Tcp => {
                let half = self.lanes.expect(&session, handoff);
                handoff.bound_destination(worker, id, generation, Ok(half), now);
                self.lanes.opened(worker, id, generation, handoff);
            }
            Transport::Rdma => {
                let half = handoff.rdma_destination(&session, self.lanes.wait());
                handoff.bound_destination(worker, id, generation, half, now);
            }
            Transport::Fake => {
                handoff.bound_destination(worker, id, generation, Ok(Box::new(Fake)), now);
            }
        }
    }

    fn receive(
        &mut self,
        conn: ConnId,
        reactor: &mut Reactor,
        handoff: &mut Handoff,
        now: Instant,
    ) {
        match self.take_in(conn, reactor, handoff, now) {
            Ok(()) => self.flush(conn, reactor, handoff, now),
            Err(end) => {
                // A proof of ours that still waits may be wrong for the peer, too; and to one that waits for
                // a proof, anything else says that there is no key here.
                self.say_bye(conn, end.cause);
                self.flush(conn, reactor, handoff, now);
                reactor.close_after_flush(conn);
                self.down(conn, &end, reactor, handoff, now);
            }
        }
    }

    fn take_in(
        &mut self,
        conn: ConnId,
        reactor: &mut Reactor,
        handoff: &mut Handoff,
        now: Instant,
    ) -> Result<(), End> {
        loop {
            let Some(peering) = self.links.get_mut(&conn) else { return Ok(()) };
            peering.heard = now;
            let used = peering.link.handle_input(reactor.received(conn)).map_err(End::from)?;
            reactor.consume(conn, used);
            let mut opened = None;
            let mut more = used > 0;
            match peering.link.poll_event().map_err(End::from)? {
                Some(link::Event::Open(hello)) => opened = Some(*hello),
                Some(link::Event::Message(message)) => {
                    // Before it is known to be the newest connection of its peer nothing is heard from it.
                    if peering.who.is_some() {
                        if let Message::Bye(bye) = &message {
                            peering.bye = bye.cause;
                        }
                        handoff.receive(conn, &message, now);
                    }
                }
                Some(link::Event::Pong { .. }) => {}
                None => more = used > 0 && !reactor.received(conn).is_empty(),
            }
            if let Some(hello) = opened {
                self.open(conn, &hello, reactor, handoff, now)?;
            }
            if !more {
                return Ok(());
            }
        }
    }

    fn send(
        &mut self,
        conn: ConnId,
        message: &Multipart,
        reactor: &mut Reactor,
        handoff: &mut Handoff,
        now: Instant,
    ) {
        let Some(peering) = self.links.get_mut(&conn) else { return };
        let Ok(Some(message)) = Message::decode(message.parts(), None) else {
            debug_assert!(false, "a message of our own does not decode");
            return;
        };
        match peering.link.send(&message) {
            Ok(()) => self.flush(conn, reactor, handoff, now),
            Err(error) => {
                reactor.close(conn);
                self.down(conn, &End::lost(error), reactor, handoff, now);
            }
        }
    }

    fn flush(&mut self, conn: ConnId, reactor: &mut Reactor, handoff: &mut Handoff, now: Instant) {
        let Some(peering) = self.links.get_mut(&conn) else { return };
        let bytes = peering.link.transmit();
        if bytes.is_empty() {
            return;
        }
        let count = bytes.len();
        match reactor.send(conn, bytes) {
            Ok(()) => peering.link.transmitted(count),
            Err(error) => {
                reactor.close(conn);
                self.down(conn, &End::lost(error), reactor, handoff, now);
            }
        }
    }

    fn down(
        &mut self,
        conn: ConnId,
        end: &End,
        reactor: &mut Reactor,
        handoff: &mut Handoff,
        now: Instant,
    ) {
        let Some(peering) = self.links.remove(&conn) else { return };
        let End { cause, ref why, closed } = *end;
        let address = display(peering.address);
        if peering.bye == Some(Cause::Draining) && closed {
            event!(Info, "peers", "link is down, as announced", address = address, why = why);
        } else {
            event!(Warn, "peers", "link is down", address = address, why = why);
        }
        self.passing.link_down(conn, reactor);
        match &peering.dialled {
            // Never open: nobody knows it by its link.
            Some((worker, source)) if peering.who.is_none() => {
                self.directory.forget(source);
                handoff.dial_failed(*worker, source, cause, now);
            }
            Some((_, source)) => {
                self.directory.forget(source);
                handoff.link_down(conn, cause, now);
            }
            None => handoff.link_down(conn, cause, now),
        }
    }
}

fn display(address: Option<SocketAddr>) -> String {
    address.map_or("?".into(), |address| address.to_string())
}

//! A control link with a stream as its other end.

use super::*;
use crate::link::handoff::TransportCapabilities;
use crate::link::lookup::DirectLookup;
use crate::net::{Address, Entropy};
use crate::sys::event::WaitSet;
use crate::wire::message::{Hello, HostId, MINOR};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

const MOMENT: Duration = Duration::from_millis(5);

/// A prefill worker without workers of its own, and a decode worker that has a link to it.
struct Rig {
    reactor: Reactor,
    handoff: Handoff,
    links: ControlLinks,
    stream: TcpStream,
    peer: ControlLink,
    now: Instant,
}

impl Rig {
    fn new() -> Rig {
        let mut reactor = Reactor::new().unwrap();
        let loopback = Address::Tcp("127.0.0.1:0".parse().unwrap());
        let control = reactor.listen(&loopback, 4).unwrap();
        let stream = TcpStream::connect(reactor.local_address(control).unwrap()).unwrap();
        stream.set_nonblocking(true).unwrap();
        let host = HostId([7; 16]);
        let offer = TransportCapabilities { transports: vec![], host, data: None, lanes: 1 };
        let now = Instant::now();
        let links = ControlLinks::new(
            PeerIdentity {
                peer: Peer { id: [1; 16], incarnation: [1; 16] },
                role: Role::Prefill,
                keys: Keyring::default(),
            },
            Some(control),
            Box::new(DirectLookup::new(Vec::new())),
            ShmHandshake::default(),
            TcpHandshake::new(None, Arc::new(WaitSet::new().unwrap())),
            LinkTimeouts::default(),
            now,
        );
        let hello = Hello {
            peer: Peer { id: [2; 16], incarnation: [2; 16] },
            connection: 1,
            capabilities: 0,
            software: [0, 1, 0],
            ranks: 1,
            role: Role::Decode,
            nonce: [3; 32],
            minor: MINOR,
            keys: Default::default(),
        };
        Rig {
            reactor,
            handoff: Handoff::new(Vec::new(), offer, Entropy::System),
            links,
            stream,
            peer: ControlLink::new(Side::Dialer, hello, Keyring::default()),
            now,
        }
    }

    /// Carries bytes until none has come for a moment. Returns the number of bytes that the decode
    /// worker got.
    fn settle(&mut self) -> usize {
        let (mut heard, mut quiet) = (0, 0);
        while quiet < 3 {
            let sent = self.stream.write(self.peer.transmit()).unwrap();
            self.peer.transmitted(sent);
            self.reactor.poll(Some(Instant::now() + MOMENT)).unwrap();
            while let Some(event) = self.reactor.next_event() {
                self.links.handle(event, &mut self.reactor, &mut self.handoff, self.now);
            }
            let mut bytes = [0; 4096];
            let count = match self.stream.read(&mut bytes) {
                Ok(0) => return heard,
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
                Err(error) => panic!("{error}"),
            };
            let mut input = &bytes[..count];
            while !input.is_empty() {
                let used = self.peer.handle_input(input).unwrap();
                input = &input[used..];
                while self.peer.poll_event().unwrap().is_some() {}
            }
            quiet = if count + sent == 0 { quiet + 1 } else { 0 };
            heard += count;
        }
        heard
    }

    /// A second passes. Returns the number of bytes that the decode worker got.
    fn pass(&mut self) -> usize {
        let mut heard = 0;
        for _ in 0..10 {
            self.now += Duration::from_millis(100);
            self.links.expire(&mut self.reactor, &mut self.handoff, self.now);
            heard += self.settle();
        }
        heard
    }
}

/// Its peers would otherwise wait for a worker that computes nothing.
#[test]
fn a_hung_worker_is_silent_until_it_is_well_again() {
    let mut rig = Rig::new();
    rig.settle();
    assert!(rig.peer.peer().is_some(), "the link is open");
    assert!(rig.pass() > 0, "a PING comes");
    rig.links.show_health(false);
    rig.peer.ping(0, 7).unwrap();
    assert_eq!(rig.pass(), 0, "neither a PING nor an answer");
    rig.links.show_health(true);
    assert!(rig.pass() > 0, "a PING comes again");
}

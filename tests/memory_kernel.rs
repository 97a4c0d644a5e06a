//! Reactors on operating systems in memory: the same events as over sockets, and the same in each
//! run of a seed.

use baton::limits::NET_HOST_SILENCE_MAX;
use baton::net::{Address, CloseReason, ConnId, Event, MemoryKernel, Reactor, Signal};
use baton::stdx::rng::Rng;
use baton::sys::stream::memory::StreamKernel;
use std::fs::File;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

const ROOM: usize = 64;

/// A process that has only a reactor.
struct Host {
    kernel: MemoryKernel,
    reactor: Reactor,
    address: SocketAddr,
}

impl Host {
    fn new(address: &str, seed: u64, now: Instant) -> Host {
        let address: SocketAddr = address.parse().unwrap();
        let kernel = MemoryKernel::new(address.ip(), ROOM, now, Rng::new(seed));
        Host { reactor: Reactor::in_memory(kernel.clone()).unwrap(), kernel, address }
    }

    fn events(&mut self) -> Vec<Event> {
        self.reactor.poll(None).unwrap();
        std::iter::from_fn(|| self.reactor.next_event()).collect()
    }
}

/// Carries the bytes between two kernels' sides, in pieces of at most three bytes.
fn carry(ends: &[StreamKernel; 2]) {
    for (from, to) in [(0, 1), (1, 0)] {
        while ends[from].unsent() > 0 {
            ends[to].receive(ends[from].take(3));
        }
    }
}

/// A connection from `client` to a new listener of `server`.
fn connect(
    server: &mut Host,
    client: &mut Host,
    address: &Address,
) -> ([StreamKernel; 2], ConnId, ConnId) {
    server.reactor.listen(address, 2).unwrap();
    let until = client.reactor.now() + Duration::from_secs(1);
    let dialled = client.reactor.connect(address, until).unwrap();
    assert_eq!(client.events(), [], "the network has not answered");
    let dial = client.kernel.take_dials().pop_front().unwrap();
    assert_eq!(dial.address, *address);
    let far = server.kernel.offer(&dial.address, dial.from).unwrap();
    dial.stream.connected();
    assert_eq!(client.events(), [Event::Connected(dialled)]);
    assert_eq!(dial.stream.silence_max(), Some(NET_HOST_SILENCE_MAX));
    let [Event::Accepted { conn, peer, .. }] = server.events()[..] else { panic!("not accepted") };
    assert_eq!(peer, dial.from);
    ([dial.stream, far], dialled, conn)
}

fn pair() -> (Host, Host) {
    let now = Instant::now();
    (Host::new("10.0.0.1:80", 1, now), Host::new("10.0.0.2:0", 2, now))
}

#[test]
fn bytes_arrive_in_order_and_a_full_stream_blocks_the_writer() {
    let (mut server, mut client) = pair();
    let address = Address::Tcp(server.address);
    let (ends, dialled, accepted) = connect(&mut server, &mut client, &address);
    let sent: Vec<u8> = (0..200).collect();
    client.reactor.send(dialled, &sent).unwrap();
    client.reactor.write_due();
    assert_eq!((ends[0].unsent(), client.reactor.queued(dialled)), (ROOM, sent.len() - ROOM));
    let mut events = Vec::new();
    for _ in 0..4 {
        carry(&ends);
        events.extend(client.events());
    }
    assert_eq!(events, [Event::Drained(dialled)]);
    assert_eq!(server.events(), [Event::Received(accepted)]);
    assert_eq!(server.reactor.received(accepted), sent);
    server.reactor.consume(accepted, sent.len());
    ends[1].end();
    assert_eq!(server.events(), [Event::Eof(accepted)]);
    ends[0].reset();
    let reset = CloseReason::Io(ErrorKind::ConnectionReset);
    assert_eq!(client.events(), [Event::Closed { conn: dialled, reason: reset }]);
}

#[test]
fn descriptors_travel_with_their_bytes() {
    let (mut server, mut client) = pair();
    let address = Address::Abstract(b"baton-test".to_vec());
    let (ends, dialled, accepted) = connect(&mut server, &mut client, &address);
    let null = File::open("/dev/null").unwrap();
    client.reactor.send_descriptors(dialled, b"two", &[null.as_fd(), null.as_fd()]).unwrap();
    carry(&ends);
    assert_eq!(server.events(), [Event::Received(accepted)]);
    assert_eq!(server.reactor.received(accepted), b"two");
    assert_eq!(server.reactor.take_descriptors(accepted).len(), 2);
}

#[test]
fn a_dial_without_a_listener_fails_or_misses_its_deadline() {
    let (server, mut client) = pair();
    let address = Address::Tcp(server.address);
    let until = client.reactor.now() + Duration::from_secs(1);
    let refused = client.reactor.connect(&address, until).unwrap();
    let silent = client.reactor.connect(&address, until).unwrap();
    let dials = client.kernel.take_dials();
    assert!(server.kernel.offer(&dials[0].address, dials[0].from).is_none());
    dials[0].stream.fail(ErrorKind::ConnectionRefused);
    let reason = CloseReason::Io(ErrorKind::ConnectionRefused);
    assert_eq!(client.events(), [Event::Closed { conn: refused, reason }]);
    assert_eq!(client.reactor.prepare(None), Some(until), "the next wait ends at the deadline");
    client.kernel.set_now(until);
    let reason = CloseReason::ConnectDeadline;
    assert_eq!(client.events(), [Event::Closed { conn: silent, reason }]);
    assert!(dials[1].stream.is_closed());
}

#[test]
fn wakes_and_signals_are_events() {
    let (mut host, _) = pair();
    host.reactor.watch_signals().unwrap();
    host.reactor.watch_hangups().unwrap();
    assert!(!host.kernel.is_ready());
    host.reactor.waker().wake();
    host.kernel.raise(Signal::Terminate);
    host.kernel.raise(Signal::Hangup);
    assert!(host.kernel.is_ready());
    assert_eq!(host.events(), [Event::Woken, Event::Terminate, Event::Hangup]);
}

#[test]
fn random_numbers_depend_on_the_seed_alone() {
    let now = Instant::now();
    let draw = |seed| {
        let mut host = Host::new("10.0.0.1:80", seed, now);
        let mut part = host.reactor.entropy().fork("part");
        [host.reactor.entropy().next_u64(), part.next_u64(), host.reactor.entropy().next_u64()]
    };
    let [first, part, second] = draw(7);
    assert_eq!(draw(7), [first, part, second]);
    assert_ne!(draw(8), [first, part, second]);
    assert!(first != part && first != second && part != second);
}

#[test]
#[should_panic(expected = "the process watches the signal")]
fn a_signal_that_no_process_watches_is_an_error() {
    let (host, _) = pair();
    host.kernel.raise(Signal::Hangup);
}

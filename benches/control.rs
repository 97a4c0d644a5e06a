//! The control plane beside a bare TCP ping-pong of the same bytes, interleaved in one run: `cargo
//! bench --bench control`. Figures are medians; ratios are medians over repeats.

use baton::ids::{Generation, PageId, Peer, Role, Room, SessionGeneration, SlotId};
use baton::net::{ConnId, Event, Reactor};
use baton::wire::auth::{ClusterKey, Side};
use baton::wire::link::{self, ControlLink};
use baton::wire::message::{
    Destination, Done, Hello, MINOR, Message, PageList, TransferId, ids_hash,
};
use baton::wire::zmtp::{Connection, Limits, Socket};
use baton::wire::{Multipart, zmtp};
use std::hint::black_box;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const REPEATS: usize = 9;
const PINGS: usize = 1000;
const PACED: usize = 300;
const PATIENCE: Duration = Duration::from_secs(30);
const ID: TransferId = TransferId { room: Room(7), slot: SlotId(3), generation: Generation(9) };

fn main() {
    let pages: Vec<PageId> = (0..1024).map(|page| PageId(page * 7)).collect();
    for pages in [&[][..], &pages] {
        let message = message(pages);
        let len = wire_len(&message);
        println!(
            "\n{} ({len} bytes)",
            if pages.is_empty() { "Done" } else { "Destination, 1,024 pages" }
        );
        codec(&message);
        compare("round trip", REPEATS, || bare_round_trip(len), |key| round_trip(pages, key));
        compare("one way", REPEATS, || bare_one_way(len), |key| one_way(pages, key));
    }
}

/// A Done message if there are no pages, else a Destination message.
fn message(pages: &[PageId]) -> Message<'_> {
    if pages.is_empty() {
        return Message::Done(Done { id: ID });
    }
    Message::Destination(Destination {
        id: ID,
        session: SessionGeneration(1),
        tokens: 16 * 1024,
        prefix_tokens: 0,
        ids_hash: ids_hash(&[1, 2, 3]),
        aux_index: 5,
        deadline_ms: 30_000,
        pages: PageList::from(pages),
    })
}

/// Runs all three in turn, so that noise of the machine affects them equally.
fn compare(
    what: &str,
    repeats: usize,
    bare: impl Fn() -> f64,
    ours: impl Fn(Option<ClusterKey>) -> f64,
) {
    let key = || ClusterKey::new(&[1; 32]).ok();
    let runs: Vec<[f64; 3]> = (0..repeats).map(|_| [bare(), ours(None), ours(key())]).collect();
    let column = |at: usize| median(runs.iter().map(|run| run[at]).collect());
    let ratio = |at: usize| median(runs.iter().map(|run| run[at] / run[0]).collect());
    println!(
        "  {what:<11} bare tcp {:6.1} us   ours {:6.1} us = {:.2} x   \
         with a cluster key {:6.1} us = {:.2} x",
        column(0),
        column(1),
        ratio(1),
        column(2),
        ratio(2)
    );
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn micros(duration: Duration) -> f64 {
    duration.as_nanos() as f64 / 1000.0
}

// Codec alone.

/// Length of the message in bytes, with its frame headers.
fn wire_len(message: &Message<'_>) -> usize {
    let (mut connection, mut out) = (open_connection(), Multipart::new());
    message.encode(None, &mut out);
    connection.send(out.parts()).expect("room");
    connection.transmit().len()
}

fn open_connection() -> Connection {
    let (mut ours, mut theirs) = (
        Connection::new(Socket::Dealer, b"", Limits::PEER),
        Connection::new(Socket::Router, b"", Limits::PEER),
    );
    for _ in 0..2 {
        for (from, to) in [(0, 1), (1, 0)] {
            let both = [&mut ours, &mut theirs];
            let bytes = both[from].transmit().to_vec();
            both[from].transmitted(bytes.len());
            let mut taken = 0;
            while taken < bytes.len() {
                taken += both[to].handle_input(&bytes[taken..]).expect("our own bytes");
                both[to].poll_event();
            }
        }
    }
    ours
}

fn codec(message: &Message<'_>) {
    const COUNT: usize = 20_000;
    let (mut connection, mut out) = (open_connection(), Multipart::new());
    let started = Instant::now();
    for _ in 0..COUNT {
        black_box(message).encode(None, &mut out);
        connection.send(out.parts()).expect("room");
        connection.transmitted(black_box(connection.transmit()).len());
    }
    let encode = micros(started.elapsed()) * 1000.0 / COUNT as f64;
    connection.send(out.parts()).expect("room");
    let bytes = connection.transmit().to_vec();
    let started = Instant::now();
    for _ in 0..COUNT {
        let mut taken = 0;
        while taken < bytes.len() {
            taken += connection.handle_input(black_box(&bytes[taken..])).expect("our own bytes");
        }
        match connection.poll_event() {
            Some(zmtp::ZmtpEvent::Message(parts)) => {
                black_box(Message::decode(parts, None)).expect("our own message");
            }
            other => panic!("{other:?}"),
        }
    }
    let decode = micros(started.elapsed()) * 1000.0 / COUNT as f64;
    println!("  codec       encode and frame {encode:.0} ns   unframe and decode {decode:.0} ns");
}

// Bare TCP.

fn bare_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let dialled = TcpStream::connect(listener.local_addr().expect("bound")).expect("loopback");
    let accepted = listener.accept().expect("loopback").0;
    dialled.set_nodelay(true).expect("tcp");
    accepted.set_nodelay(true).expect("tcp");
    (dialled, accepted)
}

fn bare_round_trip(len: usize) -> f64 {
    let (mut ours, mut theirs) = bare_pair();
    let echo = std::thread::spawn(move || {
        let mut bytes = vec![0; len];
        while theirs.read_exact(&mut bytes).is_ok() {
            theirs.write_all(&bytes).expect("open");
        }
    });
    let mut bytes = vec![0; len];
    let times = (0..PINGS)
        .map(|_| {
            let started = Instant::now();
            ours.write_all(&bytes).expect("open");
            ours.read_exact(&mut bytes).expect("open");
            micros(started.elapsed())
        })
        .collect();
    drop(ours);
    echo.join().expect("echo ends");
    median(times)
}

fn bare_one_way(len: usize) -> f64 {
    let (mut ours, mut theirs) = bare_pair();
    paced(
        move |arrived| {
            let mut bytes = vec![0; len];
            while theirs.read_exact(&mut bytes).is_ok() {
                arrived();
            }
        },
        move || {
            let bytes = vec![0; len];
            move || ours.write_all(&bytes).expect("open")
        },
    )
}

/// Median time from `send` to `arrived`. The receiver sleeps before each message.
fn paced<S: FnMut()>(
    receive: impl FnOnce(&mut dyn FnMut()) + Send + 'static,
    sender: impl FnOnce() -> S,
) -> f64 {
    let start = Instant::now();
    // Nanoseconds from `start` to the latest arrival; 0 before it.
    let arrival = Arc::new(AtomicU64::new(0));
    let theirs = arrival.clone();
    let receiver = std::thread::spawn(move || {
        receive(&mut || theirs.store(start.elapsed().as_nanos() as u64, Ordering::Release));
    });
    let mut send = sender();
    let mut times = Vec::with_capacity(PACED);
    for _ in 0..PACED {
        std::thread::sleep(Duration::from_micros(100));
        arrival.store(0, Ordering::Release);
        let sent = start.elapsed().as_nanos() as u64;
        send();
        let arrived = loop {
            match arrival.load(Ordering::Acquire) {
                0 => std::thread::sleep(Duration::from_micros(20)),
                at => break at,
            }
        };
        times.push((arrived - sent) as f64 / 1000.0);
    }
    drop(send);
    receiver.join().expect("receiver ends");
    median(times)
}

// Ours.

struct Node {
    reactor: Reactor,
    link: ControlLink,
    conn: ConnId,
    pages: Vec<PageId>,
}

impl Node {
    fn new(side: Side, reactor: Reactor, conn: ConnId, key: Option<ClusterKey>) -> Node {
        let hello = Hello {
            peer: Peer::default(),
            connection: 1,
            capabilities: 0,
            software: [0; 3],
            ranks: 1,
            role: Role::Mixed,
            nonce: [side as u8; 32],
            minor: MINOR,
            keys: Default::default(),
        };
        Node {
            reactor,
            link: ControlLink::new(side, hello, key),
            conn,
            pages: Vec::with_capacity(1024),
        }
    }

    fn pair(key: Option<ClusterKey>) -> (Node, Node) {
        let (mut theirs, mut ours) =
            (Reactor::new().expect("epoll"), Reactor::new().expect("epoll"));
        let loopback: std::net::SocketAddr = "127.0.0.1:0".parse().expect("an address");
        let listener = theirs.listen(&loopback.into(), 1).expect("loopback");
        let address = theirs.local_address(listener).expect("bound").into();
        let dialled = ours.connect(&address, Instant::now() + PATIENCE).expect("room");
        let accepted = loop {
            theirs.poll(None).expect("epoll");
            if let Some(Event::Accepted { conn, .. }) = theirs.next_event() {
                break conn;
            }
        };
        let acceptor = Node::new(Side::Acceptor, theirs, accepted, key.clone());
        let mut nodes = (Node::new(Side::Dialer, ours, dialled, key), acceptor);
        while nodes.0.link.peer().is_none() || nodes.1.link.peer().is_none() {
            for node in [&mut nodes.0, &mut nodes.1] {
                node.flush();
                node.turn(Some(Duration::from_millis(1)));
            }
        }
        nodes
    }

    fn send(&mut self, pages: &[PageId]) {
        self.link.send(&message(pages)).expect("open");
        self.flush();
    }

    fn flush(&mut self) {
        if !self.link.transmit().is_empty() {
            self.reactor.send(self.conn, self.link.transmit()).expect("open");
            self.link.transmitted(self.link.transmit().len());
        }
    }

    /// Polls once. Returns the number of received messages; `None` if the peer is gone. The pages
    /// of the last message are in `pages`.
    fn turn(&mut self, timeout: Option<Duration>) -> Option<usize> {
        self.reactor.poll(timeout.map(|timeout| Instant::now() + timeout)).expect("epoll");
        let mut messages = 0;
        while let Some(event) = self.reactor.next_event() {
            match event {
                Event::Received(conn) => messages += self.receive(conn),
                Event::Eof(_) | Event::Closed { .. } => return None,
                _ => {}
            }
        }
        Some(messages)
    }

    fn receive(&mut self, conn: ConnId) -> usize {
        let input = self.reactor.received(conn);
        let (mut taken, mut messages) = (0, 0);
        while taken < input.len() {
            taken += self.link.handle_input(&input[taken..]).expect("our own bytes");
            if let Some(link::LinkEvent::Message(message)) =
                self.link.poll_event().expect("our own message")
            {
                messages += 1;
                self.pages.clear();
                if let Message::Destination(destination) = message {
                    self.pages.extend(destination.pages.iter());
                }
            }
        }
        self.reactor.consume(conn, taken);
        messages
    }
}

fn round_trip(pages: &[PageId], key: Option<ClusterKey>) -> f64 {
    let (mut ours, mut theirs) = Node::pair(key);
    let echo = std::thread::spawn(move || {
        while let Some(messages) = theirs.turn(None) {
            let pages = std::mem::take(&mut theirs.pages);
            (0..messages).for_each(|_| theirs.send(&pages));
            theirs.pages = pages;
        }
    });
    let times = (0..PINGS)
        .map(|_| {
            let started = Instant::now();
            ours.send(pages);
            while ours.turn(None).expect("open") == 0 {}
            assert_eq!(ours.pages.len(), pages.len());
            micros(started.elapsed())
        })
        .collect();
    drop(ours);
    echo.join().expect("echo ends");
    median(times)
}

fn one_way(pages: &[PageId], key: Option<ClusterKey>) -> f64 {
    let (mut ours, mut theirs) = Node::pair(key);
    paced(
        move |arrived| {
            while let Some(messages) = theirs.turn(None) {
                (0..messages).for_each(|_| arrived());
            }
        },
        move || {
            move || {
                ours.send(pages);
                // The reactor sends when it is about to wait.
                ours.turn(Some(Duration::ZERO));
            }
        },
    )
}

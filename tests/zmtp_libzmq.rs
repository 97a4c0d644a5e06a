//! Our framing against the real libzmq, in both directions: handshake, multipart messages, long
//! frames, PINGs between parts, and the end of the connection. The test needs the environment of
//! `tools/venv`. Without it, the test is skipped with a message, or fails with
//! `BATON_REQUIRE_VENV=1`.

use baton::net::{Address, ConnId, Event, Reactor};
use baton::wire::Multipart;
use baton::wire::zmtp::{self, Connection, FrameHeader, Limits, Socket};
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

/// The environment's Python, or `None` where the test is to be skipped.
fn python() -> Option<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let python = cache.or_else(home)?.join("baton/venv/bin/python");
    if python.exists() {
        return Some(python);
    }
    assert!(
        std::env::var_os("BATON_REQUIRE_VENV").is_none_or(|value| value != "1"),
        "BATON_REQUIRE_VENV=1 and no {}: run tools/venv",
        python.display()
    );
    eprintln!("SKIPPED: no {}; run tools/venv to test against the real libzmq", python.display());
    None
}

fn peer(python: &Path, arguments: &[&str]) -> Child {
    Command::new(python)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tools/libzmq-peer"))
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("python starts")
}

/// What our side of a connection has seen.
#[derive(Default)]
struct Seen {
    ready: Option<(Socket, Vec<u8>, bool)>,
    messages: Vec<Vec<Vec<u8>>>,
    pongs: Vec<u64>,
    gone: bool,
}

/// One connection with libzmq; a message is echoed where `echo` says so.
struct Side {
    reactor: Reactor,
    zmtp: Connection,
    conn: Option<ConnId>,
    echo: bool,
    tap: Tap,
    seen: Seen,
}

/// Follows frames on its own, to see that libzmq does put commands between the parts of a message.
struct Tap {
    head: Vec<u8>,
    /// Bytes to skip: the greeting, then bodies.
    skip: usize,
    inside_message: bool,
    commands_inside: usize,
}

impl Tap {
    fn watch(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let skipped = self.skip.min(bytes.len());
            self.skip -= skipped;
            bytes = &bytes[skipped..];
            let Some((&first, rest)) = bytes.split_first() else { return };
            self.head.push(first);
            bytes = rest;
            if self.head.len() == FrameHeader::header_len(self.head[0]) {
                let header = FrameHeader::parse(&self.head).unwrap();
                self.head.clear();
                self.skip = header.len as usize;
                if header.command {
                    self.commands_inside += usize::from(self.inside_message);
                } else {
                    self.inside_message = header.more;
                }
            }
        }
    }
}

impl Side {
    fn new(socket: Socket, reactor: Reactor, conn: Option<ConnId>, echo: bool) -> Side {
        let zmtp = Connection::new(socket, b"baton", Limits::PEER);
        let tap = Tap { head: Vec::new(), skip: 64, inside_message: false, commands_inside: 0 };
        Side { reactor, zmtp, conn, echo, tap, seen: Seen::default() }
    }

    /// Goes on until `over` says that enough was seen.
    fn run(&mut self, over: impl Fn(&Seen) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !over(&self.seen) {
            assert!(
                Instant::now() < deadline,
                "libzmq keeps us waiting, after {} messages and {} pongs",
                self.seen.messages.len(),
                self.seen.pongs.len()
            );
            self.flush();
            self.reactor.poll(Some(deadline)).unwrap();
            while let Some(event) = self.reactor.next_event() {
                match event {
                    Event::Accepted { conn, .. } => self.conn = Some(conn),
                    Event::Received(conn) => self.receive(conn),
                    Event::Eof(_) | Event::Closed { .. } => self.seen.gone = true,
                    _ => {}
                }
            }
        }
    }

    fn receive(&mut self, conn: ConnId) {
        while !self.reactor.received(conn).is_empty() {
            let taken = self.zmtp.handle_input(self.reactor.received(conn)).unwrap();
            self.tap.watch(&self.reactor.received(conn)[..taken]);
            self.reactor.consume(conn, taken);
            match self.zmtp.poll_event() {
                Some(zmtp::ZmtpEvent::Ready(ready)) => {
                    self.seen.ready =
                        Some((ready.socket, ready.identity.to_vec(), ready.heartbeats));
                }
                Some(zmtp::ZmtpEvent::Message(parts)) => {
                    let message: Vec<Vec<u8>> = parts.iter().map(<[u8]>::to_vec).collect();
                    if self.echo {
                        self.send(&message);
                    }
                    self.seen.messages.push(message);
                }
                Some(zmtp::ZmtpEvent::Pong { context }) => self.seen.pongs.push(context),
                None => {}
            }
        }
    }

    fn send(&mut self, message: &[Vec<u8>]) {
        let mut parts = Multipart::new();
        message.iter().for_each(|part| parts.push(part));
        self.zmtp.send(parts.parts()).unwrap();
    }

    fn flush(&mut self) {
        let Some(conn) = self.conn else { return };
        self.reactor.send(conn, self.zmtp.transmit()).unwrap();
        self.zmtp.transmitted(self.zmtp.transmit().len());
    }
}

#[test]
fn our_dealer_talks_to_libzmqs_router() {
    let Some(python) = python() else { return };
    let mut router = peer(&python, &["router"]);
    let mut port = String::new();
    BufReader::new(router.stdout.as_mut().unwrap()).read_line(&mut port).unwrap();
    let address = SocketAddr::from(([127, 0, 0, 1], port.trim().parse().unwrap()));

    let mut reactor = Reactor::new().unwrap();
    let conn = reactor.connect(&address.into(), Instant::now() + PATIENCE).unwrap();
    let mut dealer = Side::new(Socket::Dealer, reactor, Some(conn), false);
    dealer.run(|seen| seen.ready.is_some());
    assert_eq!(dealer.seen.ready, Some((Socket::Router, vec![], true)));

    let messages: Vec<Vec<Vec<u8>>> =
        [vec![1], vec![0, 255, 0], vec![256, 1 << 20, 7], vec![70_000; 20]]
            .into_iter()
            .map(|sizes| sizes.into_iter().map(|size| vec![size as u8; size]).collect())
            .collect();
    for round in 0..10 {
        for message in &messages {
            dealer.send(message);
            dealer.zmtp.ping(0, round).unwrap();
            // One by one at first, then all at once.
            if round < 7 {
                let count = dealer.seen.messages.len();
                dealer.run(|seen| seen.messages.len() > count);
            }
        }
    }
    // Not every PONG comes: libzmq keeps one command at a time; a PING of its own, or the answer to
    // a second PING of ours, takes its place.
    dealer.run(|seen| seen.messages.len() == 10 * messages.len() && !seen.pongs.is_empty());
    for (seen, sent) in dealer.seen.messages.iter().zip(messages.iter().cycle()) {
        assert!(seen == sent);
    }
    assert!(dealer.seen.pongs.is_sorted());
    assert!(dealer.tap.commands_inside > 0, "no PING came between two parts");

    dealer.send(&[b"end".to_vec()]);
    dealer.run(|seen| seen.messages.last().is_some_and(|message| message == &[b"end"]));
    drop(router.stdin.take());
    dealer.run(|seen| seen.gone);
    assert!(router.wait().unwrap().success());
}

#[test]
fn libzmqs_dealer_talks_to_our_router() {
    let Some(python) = python() else { return };
    let mut reactor = Reactor::new().unwrap();
    let listener = reactor.listen(&Address::Tcp("127.0.0.1:0".parse().unwrap()), 1).unwrap();
    let port = reactor.local_address(listener).unwrap().port().to_string();
    let mut dealer = peer(&python, &["dealer", &port]);
    let mut router = Side::new(Socket::Router, reactor, None, true);
    router.run(|seen| seen.gone);
    assert_eq!(router.seen.ready, Some((Socket::Dealer, b"libzmq".to_vec(), true)));
    assert_eq!(router.seen.messages.len(), 401);
    assert!(router.tap.commands_inside > 0, "no PING came between two parts");
    assert!(dealer.wait().unwrap().success(), "libzmq saw an echo that differs");
}

//! Connections over real sockets.

use super::*;
use crate::net::Address;
use crate::obs::registry::Registry;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);

struct Server {
    reactor: Reactor,
    connections: Connections,
    listener: crate::net::ListenerId,
    /// How far its clock is ahead.
    ahead: Duration,
}

impl Server {
    fn new(connections: Connections) -> Server {
        let mut reactor = Reactor::new().unwrap();
        let address = Address::Tcp("127.0.0.1:0".parse().unwrap());
        let listener = reactor.listen(&address, 16).unwrap();
        Server { reactor, connections, listener, ahead: Duration::ZERO }
    }

    fn client(&self) -> TcpStream {
        let stream =
            TcpStream::connect(self.reactor.local_address(self.listener).unwrap()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Runs the server until an event comes or `is_over` holds.
    fn turn_until(&mut self, is_over: impl Fn(&Connections) -> bool) -> Option<ClientEvent> {
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            self.reactor.poll(Some(Instant::now() + Duration::from_millis(5))).unwrap();
            while let Some(event) = self.reactor.next_event() {
                self.connections.handle(&mut self.reactor, event, Instant::now() + self.ahead);
            }
            let incoming = self.connections.poll_event();
            if incoming.is_some() || is_over(&self.connections) {
                return incoming;
            }
        }
        panic!("no event came");
    }

    /// All bytes that a client still receives.
    fn rest(&mut self, mut client: TcpStream) -> String {
        let mut answer = String::new();
        let reader = std::thread::spawn(move || client.read_to_string(&mut answer).map(|_| answer));
        while !reader.is_finished() {
            self.reactor.poll(Some(Instant::now() + Duration::from_millis(5))).unwrap();
            while self.reactor.next_event().is_some() {}
        }
        reader.join().unwrap().unwrap()
    }

    #[track_caller]
    fn request(&mut self) -> (ConnId, Box<Request>) {
        match self.turn_until(|_| false) {
            Some(ClientEvent::Request(conn, request)) => (conn, request),
            other => panic!("{other:?}"),
        }
    }
}

fn post(client: &mut TcpStream, length: usize, sent: usize) {
    write!(client, "POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n").unwrap();
    client.write_all(&vec![b'x'; sent]).unwrap();
}

/// Incomplete bodies and bodies of unanswered requests both count.
#[test]
fn bodies_are_bounded_in_total() {
    let limits = HttpLimits { body: 1 << 20, ..HttpLimits::default() };
    let mut server = Server::new(Connections::with_limits(limits).holding(512 << 10));
    let (mut first, mut second, mut third) = (server.client(), server.client(), server.client());
    post(&mut first, 400 << 10, 400 << 10);
    let (conn, request) = server.request();
    assert_eq!((request.body.len(), server.connections.held), (400 << 10, 400 << 10));
    // An announced length reserves no memory.
    post(&mut second, 300 << 10, 12 << 10);
    server.turn_until(|connections| connections.held == 412 << 10);
    // A body of usual length is accepted, even if others hold many bytes.
    post(&mut third, 12 << 10, 12 << 10);
    let (usual, _) = server.request();
    second.write_all(&vec![b'x'; 120 << 10]).unwrap();
    server.turn_until(|connections| connections.count() == 2);
    let mut answer = [0; 256];
    let count = second.read(&mut answer).unwrap();
    let answer = String::from_utf8_lossy(&answer[..count]);
    assert!(answer.starts_with("HTTP/1.1 429") && answer.contains("retry-after: 1"), "{answer}");
    for conn in [conn, usual] {
        server.connections.send_response(
            &mut server.reactor,
            conn,
            &Response::json(b"{}"),
            Instant::now(),
        );
    }
    assert_eq!(server.connections.held, 0);
}

/// Bytes without meaning distinguish a half-closed client from a disconnected one: only the second
/// refuses them.
#[test]
fn a_disconnected_client_is_not_taken_for_half_closed() {
    for is_stream in [false, true] {
        for is_gone in [false, true] {
            let mut server = Server::new(Connections::default());
            let mut client = server.client();
            post(&mut client, 1, 1);
            let (conn, _) = server.request();
            if is_stream {
                server.connections.open_stream(&mut server.reactor, conn);
            }
            client.shutdown(std::net::Shutdown::Write).unwrap();
            if is_gone {
                drop(client);
                let incoming = server.turn_until(|_| false);
                assert!(
                    matches!(incoming, Some(ClientEvent::Disconnected(gone)) if gone == conn),
                    "{incoming:?}"
                );
                continue;
            }
            server.turn_until(|connections| connections.clients[&conn].half_closed);
            match is_stream {
                false => {
                    let answer = Response::json(b"{}");
                    server.connections.send_response(
                        &mut server.reactor,
                        conn,
                        &answer,
                        Instant::now(),
                    );
                }
                true => server.connections.end_stream(&mut server.reactor, conn, Instant::now()),
            }
            assert_eq!(server.connections.count(), 0, "the connection is closed");
            let answer = server.rest(client);
            match is_stream {
                false => {
                    assert!(
                        answer.starts_with("HTTP/1.1 100") && answer.ends_with("\r\n\r\n{}"),
                        "{answer}"
                    )
                }
                true => assert!(answer.ends_with("3\r\n:\n\n\r\n0\r\n\r\n"), "{answer}"),
            }
        }
    }
}

/// The bytes without meaning are not part of an event.
#[test]
fn a_half_closed_client_gets_each_event_whole() {
    for (piece, is_told) in
        [("data: hel", false), ("data: hel\n", false), ("data: a\r\n\r\n", true)]
    {
        let mut server = Server::new(Connections::default());
        let mut client = server.client();
        post(&mut client, 1, 1);
        let (conn, _) = server.request();
        server.connections.open_stream(&mut server.reactor, conn);
        server.connections.send_chunk(&mut server.reactor, conn, piece.as_bytes());
        client.shutdown(std::net::Shutdown::Write).unwrap();
        server.turn_until(|connections| connections.clients[&conn].half_closed);
        server.connections.end_stream(&mut server.reactor, conn, Instant::now());
        let answer = server.rest(client);
        assert_eq!(answer.contains(":\n\n"), is_told, "{answer}");
    }
}

/// A longer body has more time. A client that is too slow for that gets an error.
#[test]
fn a_client_that_sends_too_slowly_gets_an_error() {
    let limits = HttpLimits { body: 1 << 20, ..HttpLimits::default() };
    let mut server = Server::new(Connections::with_limits(limits));
    let mut client = server.client();
    let begun = Instant::now();
    post(&mut client, 1 << 20, 512 << 10);
    server.turn_until(|connections| connections.held == 512 << 10);
    server.ahead = HTTP_REQUEST_TIME_MAX / 2;
    client.write_all(b"x").unwrap();
    server.turn_until(|connections| connections.held > 512 << 10);
    let longer = Duration::from_secs(4);
    server.connections.expire(&mut server.reactor, begun + HTTP_REQUEST_TIME_MAX + longer);
    assert_eq!(server.connections.count(), 1, "half a body has come");
    let late = Instant::now() + HTTP_REQUEST_TIME_MAX + 2 * longer;
    server.connections.expire(&mut server.reactor, late);
    assert_eq!(server.connections.count(), 0);
    let answer = server.rest(client);
    assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("timeout_error"), "{answer}");
    // Fast bytes at the start allow no longer pause later.
    let mut still = server.client();
    server.ahead = Duration::ZERO;
    let begun = Instant::now();
    post(&mut still, 1 << 20, 1 << 19);
    server.turn_until(|connections| connections.held == 1 << 19);
    server.connections.expire(&mut server.reactor, begun + HTTP_REQUEST_TIME_MAX / 2);
    assert_eq!(server.connections.count(), 1);
    server.connections.expire(&mut server.reactor, Instant::now() + HTTP_REQUEST_TIME_MAX);
    assert!(server.rest(still).starts_with("HTTP/1.1 408"));
    // A client without a request gets no response.
    let idle = server.client();
    server.turn_until(|connections| connections.count() == 1);
    server.connections.expire(&mut server.reactor, late + HTTP_IDLE_MAX);
    assert_eq!(server.rest(idle), "");
}

/// Its request and its end can come in one turn. The caller then charges a connection that is gone.
#[test]
fn a_client_that_has_left_is_not_charged() {
    let limits = KeyLimits::of_one_key(10);
    let mut server = Server::new(Connections::default().limiting(limits));
    let mut client = server.client();
    post(&mut client, 1, 1);
    let (conn, _) = server.request();
    drop(client);
    server.turn_until(|connections| connections.count() == 0);
    let refusals = KeyRefusals::register(&mut Registry::default());
    server.connections.charge(conn, (0, 9), &refusals, Instant::now()).unwrap();
    assert!(!server.connections.key_limits.is_charged(conn));
    server.connections.invariants();
    let mut other = server.client();
    post(&mut other, 1, 1);
    let (conn, _) = server.request();
    server.connections.charge(conn, (0, 9), &refusals, Instant::now()).unwrap();
    assert!(server.connections.key_limits.is_charged(conn));
}

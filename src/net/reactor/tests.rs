//! The reactor against blocking std sockets over loopback. No test asserts on time. If an event
//! does not come, its test fails after `PATIENCE`.

use super::*;
use crate::limits::{NET_QUEUED_MAX, NET_RECEIVED_MAX};
use proptest::prelude::*;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd;

const PATIENCE: Duration = Duration::from_secs(20);

/// Polls until `wanted` gives an answer; other events are dropped.
fn wait<T>(reactor: &mut Reactor, mut wanted: impl FnMut(&mut Reactor, Event) -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        while let Some(event) = reactor.next_event() {
            if let Some(answer) = wanted(reactor, event) {
                return answer;
            }
        }
        assert!(Instant::now() < deadline, "waited in vain");
        reactor.poll(Some(deadline)).unwrap();
    }
}

fn accepted(reactor: &mut Reactor) -> ConnId {
    wait(reactor, |_, event| match event {
        Event::Accepted { conn, .. } => Some(conn),
        _ => None,
    })
}

fn loopback() -> Address {
    Address::Tcp("127.0.0.1:0".parse().unwrap())
}

/// A reactor that listens, and one client connected to it.
fn served() -> (Reactor, ListenerId, ConnId, TcpStream) {
    let mut reactor = Reactor::new().unwrap();
    let listener = reactor.listen(&loopback(), 2).unwrap();
    let client = TcpStream::connect(reactor.local_address(listener).unwrap()).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    let conn = accepted(&mut reactor);
    (reactor, listener, conn, client)
}

/// Sends, and flushes.
fn send(reactor: &mut Reactor, conn: ConnId, bytes: &[u8]) {
    reactor.send(conn, bytes).unwrap();
    reactor.write_due();
}

/// Consumes until `count` bytes have come.
fn take(reactor: &mut Reactor, conn: ConnId, count: usize) -> Vec<u8> {
    let mut bytes = reactor.received(conn).to_vec();
    reactor.consume(conn, bytes.len());
    while bytes.len() < count {
        wait(reactor, |_, event| (event == Event::Received(conn)).then_some(()));
        bytes.extend_from_slice(reactor.received(conn));
        reactor.consume(conn, reactor.received(conn).len());
    }
    bytes
}

#[test]
fn two_reactors_connect_talk_and_part() {
    let (mut server, mut client) = (Reactor::new().unwrap(), Reactor::new().unwrap());
    let listener = server.listen(&loopback(), 10).unwrap();
    let address = server.local_address(listener).unwrap().into();
    let dialled = client.connect(&address, Instant::now() + PATIENCE).unwrap();
    client.send(dialled, b"early ").unwrap();
    wait(&mut client, |_, event| (event == Event::Connected(dialled)).then_some(()));
    wait(&mut client, |_, event| (event == Event::Drained(dialled)).then_some(()));
    send(&mut client, dialled, b"late");
    let conn = accepted(&mut server);
    assert_eq!(take(&mut server, conn, 10), b"early late");
    send(&mut server, conn, b"answer");
    assert_eq!(take(&mut client, dialled, 6), b"answer");
    server.close(conn);
    assert_eq!(server.connections(), 0);
    wait(&mut client, |_, event| (event == Event::Eof(dialled)).then_some(()));
    client.close(dialled);
    assert_eq!(client.next_event(), None);
}

#[test]
fn a_refused_dial_is_told_by_an_event() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut reactor = Reactor::new().unwrap();
    let conn = reactor.connect(&address.into(), Instant::now() + PATIENCE).unwrap();
    let reason = wait(&mut reactor, |_, event| match event {
        Event::Closed { conn: closed, reason } if closed == conn => Some(reason),
        _ => None,
    });
    assert_eq!(reason, CloseReason::Io(ErrorKind::ConnectionRefused));
    assert_eq!(reactor.connections(), 0);
    assert_eq!(reactor.send(conn, b"x"), Err(SendError::Closed));
}

#[test]
fn an_unanswered_dial_ends_by_its_deadline() {
    // An address reserved for documentation: no host answers there.
    let mut reactor = Reactor::new().unwrap();
    let address = Address::Tcp("192.0.2.1:9".parse().unwrap());
    let conn = reactor.connect(&address, Instant::now() + Duration::from_millis(20)).unwrap();
    // On a host without a route it fails at once, which is also correct.
    wait(&mut reactor, |_, event| {
        matches!(event, Event::Closed { conn: c, .. } if c == conn).then_some(())
    });
    assert_eq!((reactor.connections(), reactor.timers.len()), (0, 0));
}

#[test]
fn unconsumed_data_is_bounded_and_no_byte_is_lost() {
    let (mut reactor, _, conn, mut client) = served();
    let sent: Vec<u8> = (0..3 << 20u32).map(|at| ((at * 31) >> 7) as u8).collect();
    let copy = sent.clone();
    let writer = std::thread::spawn(move || {
        client.write_all(&copy).unwrap();
        client
    });
    wait(&mut reactor, |reactor, _| {
        (reactor.received(conn).len() == NET_RECEIVED_MAX).then_some(())
    });
    for _ in 0..3 {
        reactor.poll(Some(Instant::now())).unwrap();
        assert_eq!(reactor.received(conn).len(), NET_RECEIVED_MAX);
    }
    assert!(take(&mut reactor, conn, sent.len()) == sent);
    // The reactor reports the peer's close, even if it came while reading was paused.
    drop(writer.join().unwrap());
    wait(&mut reactor, |_, event| (event == Event::Eof(conn)).then_some(()));
}

#[test]
fn a_slow_reader_is_an_error_and_a_drained_queue_an_event() {
    let (mut reactor, _, conn, mut client) = served();
    let chunk = vec![5; 1 << 20];
    let mut taken = 0;
    while reactor.send(conn, &chunk).is_ok() {
        taken += chunk.len();
        assert!(reactor.queued(conn) <= NET_QUEUED_MAX);
    }
    assert_eq!(reactor.send(conn, &chunk), Err(SendError::Full));
    assert_eq!(reactor.queued_total, reactor.queued(conn));
    let reader = std::thread::spawn(move || {
        let mut bytes = vec![0; taken];
        client.read_exact(&mut bytes).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 5));
        client
    });
    wait(&mut reactor, |_, event| (event == Event::Drained(conn)).then_some(()));
    assert_eq!((reactor.queued(conn), reactor.queued_total), (0, 0));
    reactor.send(conn, b"again").unwrap();
    drop(reader.join().unwrap());
}

#[test]
fn data_sent_in_one_turn_leaves_together_before_the_next_wait() {
    let (mut reactor, _, conn, mut client) = served();
    let mut buffer = [0; 64];
    for part in ["one ", "two ", "three"] {
        reactor.send(conn, part.as_bytes()).unwrap();
    }
    client.set_nonblocking(true).unwrap();
    assert_eq!(client.read(&mut buffer).unwrap_err().kind(), ErrorKind::WouldBlock);
    reactor.poll(Some(Instant::now())).unwrap();
    client.set_nonblocking(false).unwrap();
    let count = client.read(&mut buffer).unwrap();
    assert_eq!(&buffer[..count], b"one two three");
    // A piece that does not fit the buffer does not wait, and neither do the bytes before it.
    reactor.send(conn, b"four").unwrap();
    reactor.send(conn, &vec![5; limits::NET_BUFFER_KEPT]).unwrap();
    let mut large = vec![0; 4 + limits::NET_BUFFER_KEPT];
    client.read_exact(&mut large).unwrap();
    assert_eq!((&large[..4], large[large.len() - 1]), (&b"four"[..], 5));
    assert_eq!((reactor.next_event(), reactor.queued_total()), (None, 0), "no byte had to wait");
    reactor.send(conn, b"last").unwrap();
    reactor.close(conn);
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).unwrap();
    assert_eq!((&rest[..], reactor.queued_total()), (&b"last"[..], 0));
    let (mut reactor, _, conn, mut client) = served();
    reactor.send(conn, b"last words").unwrap();
    drop(reactor);
    let mut words = String::new();
    client.read_to_string(&mut words).unwrap();
    assert_eq!(words, "last words");
}

#[test]
fn the_peers_end_leaves_our_direction_open() {
    let (mut reactor, _, conn, mut client) = served();
    client.write_all(b"request").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let mut seen = Vec::new();
    wait(&mut reactor, |_, event| {
        seen.push(event);
        (event == Event::Eof(conn)).then_some(())
    });
    assert_eq!(seen, [Event::Received(conn), Event::Eof(conn)]);
    assert_eq!(reactor.received(conn), b"request");
    reactor.send(conn, b"answer").unwrap();
    reactor.close_after_flush(conn);
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    assert_eq!(answer, "answer");
    assert_eq!(reactor.connections(), 0);
}

#[test]
fn closing_connections_may_be_given_more_time() {
    let answer = vec![9; NET_QUEUED_MAX];
    for (more_before, more_after) in [(true, false), (false, true)] {
        let (mut reactor, _, conn, mut client) = served();
        let until = Instant::now() + PATIENCE;
        if more_before {
            reactor.flush_until(until);
        }
        reactor.send(conn, &answer).unwrap();
        reactor.close_after_flush(conn);
        if more_after {
            reactor.flush_until(until);
        }
        // Longer than the usual linger time.
        let pause = Instant::now() + limits::NET_LINGER + Duration::from_secs(1);
        while Instant::now() < pause {
            reactor.poll(Some(pause)).unwrap();
        }
        assert!(reactor.queued_total() > 0, "the sockets hold all bytes");
        let reader = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            client.read_to_end(&mut bytes).map(|_| bytes)
        });
        let deadline = Instant::now() + PATIENCE;
        while !reader.is_finished() {
            assert!(Instant::now() < deadline, "waited in vain");
            reactor.poll(Some(Instant::now() + Duration::from_millis(20))).unwrap();
        }
        assert!(reader.join().unwrap().unwrap() == answer);
        assert_eq!(reactor.queued_total(), 0);
    }
}

#[test]
fn a_flushed_close_delivers_everything_though_input_is_unread() {
    let (mut reactor, _, conn, mut client) = served();
    // Unconsumed input would make a plain close reset the connection.
    client.write_all(&vec![1; 1 << 16]).unwrap();
    let answer = vec![9; 8 << 20];
    reactor.send(conn, &answer).unwrap();
    reactor.close_after_flush(conn);
    assert_eq!(reactor.send(conn, b"more"), Err(SendError::Closed));
    assert_eq!(reactor.received(conn), b"");
    let reader = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        client.write_all(&[2; 1000]).unwrap();
        client.read_to_end(&mut bytes).unwrap();
        bytes
    });
    let deadline = Instant::now() + PATIENCE;
    while reactor.connections() > 0 {
        assert!(Instant::now() < deadline);
        reactor.poll(Some(deadline)).unwrap();
        assert_eq!(reactor.next_event(), None);
    }
    assert!(reader.join().unwrap() == answer);
    assert_eq!((reactor.queued_total, reactor.timers.len()), (0, 0));
}

#[test]
fn a_reset_ends_one_connection_and_no_other() {
    let (mut reactor, listener, conn, client) = served();
    let mut other = TcpStream::connect(reactor.local_address(listener).unwrap()).unwrap();
    let kept = accepted(&mut reactor);
    // Closing with unread input resets the connection.
    send(&mut reactor, conn, b"unread");
    client.peek(&mut [0; 1]).unwrap();
    drop(client);
    let reason = wait(&mut reactor, |_, event| match event {
        Event::Closed { conn: closed, reason } if closed == conn => Some(reason),
        _ => None,
    });
    assert_eq!(reason, CloseReason::Io(ErrorKind::ConnectionReset));
    other.write_all(b"well").unwrap();
    assert_eq!(take(&mut reactor, kept, 4), b"well");
}

#[test]
fn a_listener_at_its_limit_closes_newcomers_and_recovers() {
    let (mut reactor, listener, first, _client) = served();
    let address = reactor.local_address(listener).unwrap();
    let _second = TcpStream::connect(address).unwrap();
    accepted(&mut reactor);
    let mut third = TcpStream::connect(address).unwrap();
    let deadline = Instant::now() + PATIENCE;
    while reactor.refused() == 0 {
        assert!(Instant::now() < deadline);
        reactor.poll(Some(deadline)).unwrap();
    }
    assert_eq!(third.read(&mut [0; 1]).unwrap(), 0);
    reactor.close(first);
    let _fourth = TcpStream::connect(address).unwrap();
    accepted(&mut reactor);
    assert_eq!(reactor.connections(), 2);
    reactor.stop_listening(listener);
    assert!(TcpStream::connect(address).is_err());
}

/// A worker opens and closes ports at each role change.
#[test]
fn a_listener_that_is_gone_makes_room_for_another_that_owes_it_nothing() {
    let (mut reactor, mut listener, told, _client) = served();
    for _ in 0..2 * limits::NET_LISTENERS_MAX {
        let address = reactor.local_address(listener).unwrap();
        let mut untold = TcpStream::connect(address).unwrap();
        untold.set_read_timeout(Some(PATIENCE)).unwrap();
        reactor.poll(Some(Instant::now() + PATIENCE)).unwrap();
        reactor.stop_listening(listener);
        assert_eq!(reactor.next_event(), None, "a connection of a closed listener is not reported");
        assert_eq!(untold.read(&mut [0; 1]).unwrap(), 0);
        listener = reactor.listen(&loopback(), 1).unwrap();
    }
    // The only place of the last listener is free, although older connections close.
    reactor.close(told);
    let _next = TcpStream::connect(reactor.local_address(listener).unwrap()).unwrap();
    let next = accepted(&mut reactor);
    reactor.close(next);
    let _last = TcpStream::connect(reactor.local_address(listener).unwrap()).unwrap();
    accepted(&mut reactor);
    assert_eq!((reactor.connections(), reactor.refused()), (1, 0));
}

#[test]
fn a_stale_id_does_nothing() {
    let (mut reactor, listener, old, _client) = served();
    reactor.close(old);
    let _next = TcpStream::connect(reactor.local_address(listener).unwrap()).unwrap();
    let new = accepted(&mut reactor);
    assert_eq!((old.index, old.generation + 1), (new.index, new.generation));
    reactor.close(old);
    reactor.close_after_flush(old);
    reactor.consume(old, 1);
    assert_eq!(reactor.send(old, b"x"), Err(SendError::Closed));
    assert_eq!(reactor.connections(), 1);
    reactor.send(new, b"x").unwrap();
}

#[test]
fn events_of_a_closed_connection_are_withdrawn() {
    let (mut reactor, _, conn, mut client) = served();
    client.write_all(b"x").unwrap();
    let deadline = Instant::now() + PATIENCE;
    while reactor.received(conn).is_empty() {
        reactor.poll(Some(deadline)).unwrap();
    }
    reactor.close(conn);
    assert_eq!(reactor.next_event(), None);
}

#[test]
fn every_wake_is_followed_by_an_event() {
    let mut reactor = Reactor::new().unwrap();
    let waker = reactor.waker();
    let (sender, receiver) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        for number in 0..1000 {
            sender.send(number).unwrap();
            waker.wake();
        }
    });
    let mut seen = Vec::new();
    wait(&mut reactor, |_, event| {
        assert_eq!(event, Event::Woken);
        seen.extend(receiver.try_iter());
        (seen.len() == 1000).then_some(())
    });
    thread.join().unwrap();
}

#[test]
fn descriptors_pass_between_reactors() {
    let (mut source, mut destination) = (Reactor::new().unwrap(), Reactor::new().unwrap());
    let name = format!("baton-test-{}", std::process::id()).into_bytes();
    source.listen(&Address::Abstract(name.clone()), 1).unwrap();
    let dialled = destination.connect(&Address::Abstract(name), Instant::now() + PATIENCE).unwrap();
    let conn = accepted(&mut source);
    let (read, mut write) = std::io::pipe().unwrap();
    source.send(conn, b"plain ").unwrap();
    source.send_descriptors(conn, b"passed", &[read.as_fd(), read.as_fd()]).unwrap();
    assert_eq!(take(&mut destination, dialled, 12), b"plain passed");
    let mut taken = destination.take_descriptors(dialled);
    assert_eq!(taken.len(), 2);
    write.write_all(b"!").unwrap();
    let mut byte = [0; 1];
    File::from(taken.remove(0)).read_exact(&mut byte).unwrap();
    assert_eq!(&byte, b"!");
    // More descriptors than allowed end the connection.
    for _ in 0..=limits::DESCRIPTORS_MAX {
        source.send_descriptors(conn, b"x", &[read.as_fd()]).unwrap();
    }
    let closed = Event::Closed { conn: dialled, reason: CloseReason::Descriptors };
    wait(&mut destination, |_, event| (event == closed).then_some(()));
}

#[derive(Clone, Debug)]
enum Step {
    Send { side: usize, len: usize },
    Consume { side: usize, len: usize },
    Poll { side: usize },
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(30))]
    #[test]
    fn streams_arrive_as_sent_whatever_the_order_of_calls(
        steps in proptest::collection::vec(prop_oneof![
            (0usize..2, 0usize..300_000).prop_map(|(side, len)| Step::Send { side, len }),
            (0usize..2, 0usize..300_000).prop_map(|(side, len)| Step::Consume { side, len }),
            (0usize..2).prop_map(|side| Step::Poll { side }),
        ], 0..60),
    ) {
        let mut reactors = [Reactor::new().unwrap(), Reactor::new().unwrap()];
        let listener = reactors[0].listen(&loopback(), 1).unwrap();
        let address = reactors[0].local_address(listener).unwrap().into();
        let dialled = reactors[1].connect(&address, Instant::now() + PATIENCE).unwrap();
        wait(&mut reactors[1], |_, event| (event == Event::Connected(dialled)).then_some(()));
        let ids = [accepted(&mut reactors[0]), dialled];
        // What each side has sent and consumed.
        let (mut sent, mut seen) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
        let mut consume = |reactors: &mut [Reactor; 2], side: usize, len: usize| {
            let bytes = reactors[side].received(ids[side]);
            let len = len.min(bytes.len());
            seen[side].extend_from_slice(&bytes[..len]);
            reactors[side].consume(ids[side], len);
            seen[side].len()
        };
        for step in steps {
            match step {
                Step::Send { side, len } => {
                    let from = sent[side].len();
                    let bytes: Vec<u8> = (from..from + len).map(|at| (at >> 3) as u8).collect();
                    if reactors[side].send(ids[side], &bytes).is_ok() {
                        sent[side].extend_from_slice(&bytes);
                    }
                }
                Step::Consume { side, len } => drop(consume(&mut reactors, side, len)),
                Step::Poll { side } => {
                    reactors[side].poll(Some(Instant::now())).unwrap();
                    while reactors[side].next_event().is_some() {}
                }
            }
        }
        reactors[1].close_after_flush(ids[1]);
        // The other end consumes everything although the first has closed.
        let deadline = Instant::now() + PATIENCE;
        while consume(&mut reactors, 0, usize::MAX) < sent[1].len() {
            prop_assert!(Instant::now() < deadline, "waited in vain");
            for reactor in &mut reactors {
                reactor.poll(Some(Instant::now())).unwrap();
                while reactor.next_event().is_some() {}
            }
        }
        prop_assert!(seen[0] == sent[1]);
        prop_assert!(sent[0].starts_with(&seen[1]));
    }
}

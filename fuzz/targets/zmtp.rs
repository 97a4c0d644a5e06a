//! A ZMTP connection from the first byte of its greeting. The same bytes give the same events,
//! however they are split. They stay within the limits. A received message can be sent and is
//! received unchanged.

use baton::wire::Multipart;
use baton::wire::zmtp::{
    Connection, FrameHeader, Limits, Socket, ZmtpError, ZmtpEvent, ZmtpSendError,
};

const LIMITS: Limits = Limits { message_bytes: 256, parts: 4, queued_bytes: 128 };

/// The first byte is the size of the pieces.
pub fn run(data: &[u8]) {
    let Some((&step, bytes)) = data.split_first() else { return };
    header(bytes);
    let pieces = receive(bytes, usize::from(step).max(1));
    let whole = receive(bytes, usize::MAX);
    assert_eq!(pieces, whole);
    send_back(whole.seen.iter().filter_map(|seen| match seen {
        Seen::Message(parts) => Some(parts),
        Seen::Ready(..) | Seen::Pong(_) => None,
    }));
}

/// If a header is read, written and read again, both results are equal.
fn header(bytes: &[u8]) {
    let Some(&flags) = bytes.first() else { return };
    let Some(bytes) = bytes.get(..FrameHeader::header_len(flags)) else { return };
    let Ok(header) = FrameHeader::parse(bytes) else { return };
    let mut again = Vec::new();
    header.write(&mut again);
    assert!(again.len() <= bytes.len());
    assert_eq!(FrameHeader::parse(&again), Ok(header));
}

/// The results of a connection for its input.
#[derive(PartialEq, Debug)]
struct Received {
    seen: Vec<Seen>,
    error: Option<ZmtpError>,
    sent: Vec<u8>,
}

#[derive(PartialEq, Debug)]
enum Seen {
    Ready(Socket, Vec<u8>, bool),
    Message(Vec<Vec<u8>>),
    Pong(u64),
}

/// The bytes that the connection sends are not taken, so that its queue is tested, too.
fn receive(bytes: &[u8], step: usize) -> Received {
    let mut connection = Connection::new(Socket::Router, b"", LIMITS);
    let mut received = Received { seen: Vec::new(), error: None, sent: Vec::new() };
    'input: for mut piece in bytes.chunks(step) {
        while !piece.is_empty() {
            match connection.handle_input(piece) {
                Ok(taken) => {
                    piece = &piece[taken..];
                    let event = connection.poll_event().map(see);
                    assert!(taken > 0 || event.is_some(), "no progress and no event");
                    received.seen.extend(event);
                }
                Err(error) => {
                    assert_eq!(
                        connection.handle_input(piece),
                        Err(error.clone()),
                        "an error is final"
                    );
                    received.error = Some(error);
                    break 'input;
                }
            }
            // One command can exceed the limit.
            assert!(connection.transmit().len() <= LIMITS.queued_bytes + 2 + 255);
        }
    }
    assert_eq!(connection.is_open(), received.error.is_none() && !received.seen.is_empty());
    received.sent = connection.transmit().to_vec();
    received
}

fn see(event: ZmtpEvent<'_>) -> Seen {
    match event {
        ZmtpEvent::Ready(ready) => {
            assert!(ready.identity.len() <= 255);
            Seen::Ready(ready.socket, ready.identity.to_vec(), ready.heartbeats)
        }
        ZmtpEvent::Message(parts) => {
            assert!(
                (1..=LIMITS.parts).contains(&parts.len())
                    && parts.byte_len() <= LIMITS.message_bytes
            );
            Seen::Message(parts.iter().map(<[u8]>::to_vec).collect())
        }
        ZmtpEvent::Pong { context } => Seen::Pong(context),
    }
}

/// Sends messages over an open connection. They arrive unchanged, and no other messages arrive.
fn send_back<'a>(messages: impl Iterator<Item = &'a Vec<Vec<u8>>>) {
    let mut messages = messages.peekable();
    if messages.peek().is_none() {
        return;
    }
    // Each queues a whole message and the headers of its frames.
    let limits = Limits { queued_bytes: 2 * LIMITS.message_bytes, ..LIMITS };
    let mut dealer = Connection::new(Socket::Dealer, b"", limits);
    let mut router = Connection::new(Socket::Router, b"", limits);
    for _ in 0..2 {
        carry(&mut dealer, &mut router);
        carry(&mut router, &mut dealer);
    }
    assert!(dealer.is_open() && router.is_open());
    for parts in messages {
        let mut message = Multipart::new();
        parts.iter().for_each(|part| message.push(part));
        let sent: Result<(), ZmtpSendError> = dealer.send(message.parts());
        assert_eq!(sent, Ok(()));
        assert_eq!(carry(&mut dealer, &mut router), [Seen::Message(parts.clone())]);
    }
}

fn carry(from: &mut Connection, to: &mut Connection) -> Vec<Seen> {
    let (mut seen, bytes) = (Vec::new(), from.transmit().to_vec());
    from.transmitted(bytes.len());
    let mut rest = &bytes[..];
    while !rest.is_empty() {
        let taken = to.handle_input(rest).expect("bytes of our own");
        rest = &rest[taken..];
        seen.extend(to.poll_event().map(see));
    }
    seen
}

//! One side of a ZMTP connection: bytes in, events out, and a queue of bytes to transmit.

use super::command::Command;
use super::frame::{FrameHeader, HEADER_MAX};
use super::greeting::{GREETING_LEN, check_greeting, greeting, knows_ping};
use super::{ZmtpError, ZmtpSendError};
use crate::limits;
use crate::wire::{Multipart, Parts};

/// Supported socket types.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Socket {
    /// Dials: decode workers.
    Dealer,
    /// Accepts: prefill workers.
    Router,
}

impl Socket {
    /// Its name in READY.
    pub const fn name(self) -> &'static str {
        match self {
            Socket::Dealer => "DEALER",
            Socket::Router => "ROUTER",
        }
    }

    pub(super) fn from_name(name: &[u8]) -> Option<Socket> {
        [Socket::Dealer, Socket::Router].into_iter().find(|socket| socket.name().as_bytes() == name)
    }
}

/// Bounds of one connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Bytes of all parts of a message, and so also of a frame.
    pub message_bytes: usize,
    /// Parts of a message.
    pub parts: usize,
    /// Bytes that can wait to be transmitted.
    pub queued_bytes: usize,
}

impl Limits {
    /// For a peer that has not proven itself: enough for Hello and Proof.
    pub const UNPROVEN: Limits = Limits {
        message_bytes: limits::ZMTP_UNPROVEN_MESSAGE_MAX,
        parts: limits::ZMTP_UNPROVEN_PARTS_MAX,
        queued_bytes: limits::ZMTP_UNPROVEN_MESSAGE_MAX * 2,
    };
    /// For a worker of the cluster.
    pub const PEER: Limits = Limits {
        message_bytes: limits::ZMTP_MESSAGE_MAX,
        parts: limits::ZMTP_PARTS_MAX,
        queued_bytes: limits::ZMTP_QUEUED_MAX,
    };
}

/// An event of the connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ZmtpEvent<'a> {
    /// The handshake is complete; messages can be sent.
    Ready(ZmtpPeer<'a>),
    /// A whole message.
    Message(Parts<'a>),
    /// The answer to our PING with this context.
    Pong {
        /// As given to [`Connection::ping`].
        context: u64,
    },
}

/// The peer's description of itself in its greeting and READY.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ZmtpPeer<'a> {
    /// Its socket type.
    pub socket: Socket,
    /// Its routing identity. If it is empty, this side chooses one.
    pub identity: &'a [u8],
    /// Whether it answers PING (version 3.1).
    pub heartbeats: bool,
}

/// One side of a connection; see the contract in the module's header.
#[derive(Debug)]
pub struct Connection {
    socket: Socket,
    limits: Limits,
    state: State,
    failed: Option<ZmtpError>,
    /// A greeting or a frame header that has arrived in part.
    head: [u8; GREETING_LEN],
    head_len: usize,
    /// The frame with the arriving body, and the bytes still missing. Only set after the greeting.
    frame: Option<(FrameHeader, usize)>,
    command: Vec<u8>,
    message: Multipart,
    /// `message` is complete; the next part clears it.
    message_is_over: bool,
    event: Option<Pending>,
    output: Vec<u8>,
    output_sent: usize,
    /// Our identity until our READY is queued, then the peer's.
    identity: Vec<u8>,
    peer_knows_ping: bool,
    answers_pings: bool,
}

/// Life of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Waits for the peer's 64 bytes.
    Greeting,
    /// Waits for the peer's READY.
    Handshake,
    /// Carries messages and heartbeats until the connection ends.
    Open,
}

#[derive(Clone, Copy, Debug)]
enum Pending {
    Ready(Socket),
    Message,
    Pong(u64),
}

impl Connection {
    /// A new connection; its greeting is queued. `identity` (at most 200 bytes, can be empty) is
    /// our identity in READY.
    pub fn new(socket: Socket, identity: &[u8], limits: Limits) -> Connection {
        assert!(identity.len() <= 200, "identity of {} bytes", identity.len());
        Connection {
            socket,
            limits,
            state: State::Greeting,
            failed: None,
            head: [0; GREETING_LEN],
            head_len: 0,
            frame: None,
            command: Vec::new(),
            message: Multipart::new(),
            message_is_over: false,
            event: None,
            output: greeting().to_vec(),
            output_sent: 0,
            identity: identity.to_vec(),
            peer_knows_ping: false,
            answers_pings: true,
        }
    }

    /// Takes bytes from the peer and returns their number. It takes fewer than given if an event is
    /// ready. An error is final: further calls return it again.
    pub fn handle_input(&mut self, input: &[u8]) -> Result<usize, ZmtpError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let mut taken = 0;
        while taken < input.len() && self.event.is_none() {
            match self.advance(&input[taken..]) {
                Ok(count) => taken += count,
                Err(error) => {
                    self.failed = Some(error.clone());
                    return Err(error);
                }
            }
        }
        Ok(taken)
    }

    /// The event that stopped `handle_input`; returned once.
    pub fn poll_event(&mut self) -> Option<ZmtpEvent<'_>> {
        Some(match self.event.take()? {
            Pending::Ready(socket) => ZmtpEvent::Ready(ZmtpPeer {
                socket,
                identity: &self.identity,
                heartbeats: self.peer_knows_ping,
            }),
            Pending::Message => ZmtpEvent::Message(self.message.parts()),
            Pending::Pong(context) => ZmtpEvent::Pong { context },
        })
    }

    /// Queues a whole message of at least one part. On an error it queues nothing.
    pub fn send(&mut self, parts: Parts<'_>) -> Result<(), ZmtpSendError> {
        assert!(!parts.is_empty(), "a message has at least one part");
        if self.state != State::Open || self.failed.is_some() {
            return Err(ZmtpSendError::NotOpen);
        }
        let len = parts.byte_len() + parts.len() * HEADER_MAX;
        if self.transmit().len() + len > self.limits.queued_bytes {
            return Err(ZmtpSendError::Full { limit: self.limits.queued_bytes });
        }
        let last = parts.len() - 1;
        for (index, part) in parts.iter().enumerate() {
            let header = FrameHeader { more: index < last, command: false, len: part.len() as u64 };
            header.write(&mut self.output);
            self.output.extend_from_slice(part);
        }
        Ok(())
    }

    /// Queues a PING: `ttl_tenths` as in RFC 37, and the PONG returns `context`. Only for a peer
    /// with [`ZmtpPeer::heartbeats`].
    pub fn ping(&mut self, ttl_tenths: u16, context: u64) -> Result<(), ZmtpSendError> {
        if self.state != State::Open || self.failed.is_some() {
            return Err(ZmtpSendError::NotOpen);
        }
        self.queue_command(|out| Command::write_ping(ttl_tenths, &context.to_be_bytes(), out))
            .map_err(|_| ZmtpSendError::Full { limit: self.limits.queued_bytes })
    }

    /// Whether PINGs are answered. A hung worker sends no PONG, so that its peers count it as dead.
    pub fn answer_pings(&mut self, answer: bool) {
        self.answers_pings = answer;
    }

    /// Sets new bounds for frames announced and messages queued from now on.
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// Whether the handshake is complete and no error has occurred.
    pub fn is_open(&self) -> bool {
        self.state == State::Open && self.failed.is_none()
    }

    /// Bytes to write to the peer: the whole queue in one piece.
    pub fn transmit(&self) -> &[u8] {
        &self.output[self.output_sent..]
    }

    /// The first `count` bytes of [`transmit`](Self::transmit) have been written.
    pub fn transmitted(&mut self, count: usize) {
        self.output_sent += count;
        assert!(self.output_sent <= self.output.len(), "more transmitted than queued");
        if self.output_sent == self.output.len() {
            self.output_sent = 0;
            self.output.clear();
            self.output.shrink_to(limits::ZMTP_BUFFER_KEPT);
        }
    }

    /// Takes at least one byte of a non-empty input.
    fn advance(&mut self, input: &[u8]) -> Result<usize, ZmtpError> {
        match (self.state, self.frame) {
            (State::Greeting, _) => self.take_greeting(input),
            (_, None) => self.take_header(input),
            (_, Some((header, missing))) => self.take_body(header, missing, input),
        }
    }

    fn take_greeting(&mut self, input: &[u8]) -> Result<usize, ZmtpError> {
        let taken = self.fill_head(input, GREETING_LEN);
        check_greeting(&self.head[..self.head_len])?;
        if self.head_len == GREETING_LEN {
            self.head_len = 0;
            self.state = State::Handshake;
            self.peer_knows_ping = knows_ping(&self.head);
            let (socket, identity) = (self.socket, std::mem::take(&mut self.identity));
            self.queue_command(|out| Command::write_ready(socket, &identity, out))?;
        }
        Ok(taken)
    }

    fn take_header(&mut self, input: &[u8]) -> Result<usize, ZmtpError> {
        let flags = if self.head_len == 0 { input[0] } else { self.head[0] };
        let header_len = FrameHeader::header_len(flags);
        let taken = self.fill_head(input, header_len);
        if self.head_len == header_len {
            self.head_len = 0;
            let header = FrameHeader::parse(&self.head[..header_len])?;
            let len = self.admit(header)?;
            self.frame = Some((header, len));
            if len == 0 {
                self.finish_frame(header)?;
            }
        }
        Ok(taken)
    }

    /// Checks an announced frame against order and bounds, before any byte of it is stored.
    fn admit(&mut self, header: FrameHeader) -> Result<usize, ZmtpError> {
        if header.command {
            self.command.clear();
            return match usize::try_from(header.len) {
                Ok(len) if len <= limits::ZMTP_COMMAND_MAX => Ok(len),
                _ => Err(ZmtpError::CommandTooLong {
                    len: header.len,
                    limit: limits::ZMTP_COMMAND_MAX,
                }),
            };
        }
        if self.state != State::Open {
            return Err(ZmtpError::OutOfOrder);
        }
        if self.message_is_over {
            self.message_is_over = false;
            self.message.clear(limits::ZMTP_BUFFER_KEPT);
        }
        let Limits { message_bytes, parts, .. } = self.limits;
        if self.message.parts().len() == parts {
            return Err(ZmtpError::TooManyParts { limit: parts });
        }
        let len = header.len.saturating_add(self.message.byte_len() as u64);
        if len > message_bytes as u64 {
            return Err(ZmtpError::MessageTooLong { len, limit: message_bytes });
        }
        Ok(header.len as usize)
    }

    fn take_body(
        &mut self,
        header: FrameHeader,
        missing: usize,
        input: &[u8],
    ) -> Result<usize, ZmtpError> {
        let taken = missing.min(input.len());
        if header.command {
            self.command.extend_from_slice(&input[..taken]);
        } else {
            self.message.extend(&input[..taken]);
        }
        self.frame = Some((header, missing - taken));
        if taken == missing {
            self.finish_frame(header)?;
        }
        Ok(taken)
    }

    fn finish_frame(&mut self, header: FrameHeader) -> Result<(), ZmtpError> {
        self.frame = None;
        if header.command {
            return self.handle_command();
        }
        self.message.end_part();
        if !header.more {
            self.message_is_over = true;
            self.event = Some(Pending::Message);
        }
        Ok(())
    }

    fn handle_command(&mut self) -> Result<(), ZmtpError> {
        let body = std::mem::take(&mut self.command);
        let result = self.apply_command(&body);
        self.command = body;
        result
    }

    fn apply_command(&mut self, body: &[u8]) -> Result<(), ZmtpError> {
        let command = Command::parse(body);
        if command == Err(ZmtpError::SocketType) {
            self.queue_command(|out| Command::write_error("Invalid socket type", out))?;
        }
        match (self.state, command?) {
            (State::Handshake, Command::Ready { socket, identity }) => {
                self.identity.extend_from_slice(identity);
                self.state = State::Open;
                self.event = Some(Pending::Ready(socket));
                Ok(())
            }
            (_, Command::Error { reason }) => {
                Err(ZmtpError::Refused(String::from_utf8_lossy(reason).into_owned()))
            }
            (State::Open, Command::Ping { context }) if self.answers_pings => {
                self.queue_command(|out| Command::write_pong(context, out))
            }
            (State::Open, Command::Pong { context }) => {
                let context = context.try_into().map_err(|_| ZmtpError::Command("PONG"))?;
                self.event = Some(Pending::Pong(u64::from_be_bytes(context)));
                Ok(())
            }
            (State::Open, Command::Ping { .. } | Command::Unknown) => Ok(()),
            _ => Err(ZmtpError::OutOfOrder),
        }
    }

    /// Queues a command; all commands sent here fit the short form.
    fn queue_command(&mut self, write: impl FnOnce(&mut Vec<u8>)) -> Result<(), ZmtpError> {
        let limit = self.limits.queued_bytes;
        if self.transmit().len() > limit {
            return Err(ZmtpError::OutputFull { limit });
        }
        FrameHeader { more: false, command: true, len: 0 }.write(&mut self.output);
        let start = self.output.len();
        write(&mut self.output);
        self.output[start - 1] = u8::try_from(self.output.len() - start).expect("a short command");
        Ok(())
    }

    /// Moves bytes into `head` until it holds `wanted`.
    fn fill_head(&mut self, input: &[u8], wanted: usize) -> usize {
        let taken = (wanted - self.head_len).min(input.len());
        self.head[self.head_len..self.head_len + taken].copy_from_slice(&input[..taken]);
        self.head_len += taken;
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// An event with owned data.
    #[derive(PartialEq, Debug, Clone)]
    enum Seen {
        Ready(Socket, Vec<u8>, bool),
        Message(Vec<Vec<u8>>),
        Pong(u64),
    }

    fn feed(
        connection: &mut Connection,
        mut input: &[u8],
        step: usize,
    ) -> Result<Vec<Seen>, ZmtpError> {
        let mut seen = Vec::new();
        while !input.is_empty() {
            let taken = connection.handle_input(&input[..step.min(input.len())])?;
            input = &input[taken..];
            match connection.poll_event() {
                Some(ZmtpEvent::Ready(ready)) => {
                    seen.push(Seen::Ready(ready.socket, ready.identity.to_vec(), ready.heartbeats));
                }
                Some(ZmtpEvent::Message(parts)) => {
                    seen.push(Seen::Message(parts.iter().map(<[u8]>::to_vec).collect()));
                }
                Some(ZmtpEvent::Pong { context }) => seen.push(Seen::Pong(context)),
                None => assert!(taken > 0, "no progress and no event"),
            }
        }
        Ok(seen)
    }

    fn drain(connection: &mut Connection) -> Vec<u8> {
        let bytes = connection.transmit().to_vec();
        connection.transmitted(bytes.len());
        bytes
    }

    fn message(parts: &[&[u8]]) -> Multipart {
        let mut message = Multipart::new();
        parts.iter().for_each(|part| message.push(part));
        message
    }

    /// Two open connections with limits of a proven peer.
    fn pair() -> (Connection, Connection) {
        let mut dealer = Connection::new(Socket::Dealer, b"dealer", Limits::PEER);
        let mut router = Connection::new(Socket::Router, b"", Limits::PEER);
        for _ in 0..2 {
            let bytes = drain(&mut dealer);
            feed(&mut router, &bytes, 7).unwrap();
            let bytes = drain(&mut router);
            feed(&mut dealer, &bytes, 7).unwrap();
        }
        assert!(dealer.is_open() && router.is_open());
        (dealer, router)
    }

    #[test]
    fn a_handshake_gives_each_side_the_socket_type_and_name_of_the_other() {
        for step in [1, 3, 64, 1000] {
            let mut dealer = Connection::new(Socket::Dealer, b"dealer", Limits::UNPROVEN);
            let mut router = Connection::new(Socket::Router, b"", Limits::UNPROVEN);
            assert_eq!(dealer.send(message(&[b"early"]).parts()), Err(ZmtpSendError::NotOpen));
            let greeting = drain(&mut dealer);
            assert_eq!(feed(&mut router, &greeting, step), Ok(vec![]));
            let both = drain(&mut router);
            let seen = feed(&mut dealer, &both, step).unwrap();
            assert_eq!(seen, [Seen::Ready(Socket::Router, vec![], true)]);
            let ready = drain(&mut dealer);
            let seen = feed(&mut router, &ready, step).unwrap();
            assert_eq!(seen, [Seen::Ready(Socket::Dealer, b"dealer".to_vec(), true)]);
        }
    }

    #[test]
    fn messages_pass_whole_whatever_the_pieces() {
        let large = vec![7; 100_000];
        let sent: [&[&[u8]]; 4] = [&[b"one"], &[b"", b"two", b""], &[&large, b"tail"], &[b"last"]];
        for step in [1, 2, 1000, usize::MAX] {
            let (mut dealer, mut router) = pair();
            sent.iter().for_each(|parts| dealer.send(message(parts).parts()).unwrap());
            let bytes = drain(&mut dealer);
            let seen = feed(&mut router, &bytes, step).unwrap();
            let expected: Vec<_> = sent
                .map(|parts| Seen::Message(parts.iter().map(|part| part.to_vec()).collect()))
                .into();
            assert_eq!(seen, expected);
        }
    }

    #[test]
    fn a_ping_between_two_parts_is_answered_and_leaves_the_message_whole() {
        let (mut dealer, _) = pair();
        let bytes = b"\x01\x02ab\x04\x0a\x04PING\x00\x0actx\x00\x02cd";
        let seen = feed(&mut dealer, bytes, 1).unwrap();
        assert_eq!(seen, [Seen::Message(vec![b"ab".to_vec(), b"cd".to_vec()])]);
        assert_eq!(drain(&mut dealer), b"\x04\x08\x04PONGctx");
    }

    #[test]
    fn our_ping_brings_its_context_back_unless_answers_are_withheld() {
        let (mut dealer, mut router) = pair();
        dealer.ping(10, 0x1234).unwrap();
        let ping = drain(&mut dealer);
        feed(&mut router, &ping, 3).unwrap();
        let pong = drain(&mut router);
        assert_eq!(feed(&mut dealer, &pong, 3), Ok(vec![Seen::Pong(0x1234)]));
        router.answer_pings(false);
        feed(&mut router, &ping, 3).unwrap();
        assert_eq!(drain(&mut router), b"");
    }

    #[test]
    fn bounds_hold_before_the_bytes_arrive() {
        let limits = Limits { message_bytes: 10, parts: 2, queued_bytes: 100 };
        let open = || {
            let (mut connection, _) = pair();
            connection.set_limits(limits);
            connection
        };
        let long = |len: u64| [&[2][..], &len.to_be_bytes()].concat();
        let too_long = |len| Err(ZmtpError::MessageTooLong { len, limit: 10 });
        assert_eq!(feed(&mut open(), &long(11), 9), too_long(11));
        assert_eq!(feed(&mut open(), &long(u64::MAX), 9), too_long(u64::MAX));
        assert_eq!(feed(&mut open(), b"\x01\x0312\x33\x01\x08", 9), too_long(11));
        assert_eq!(
            feed(&mut open(), &[1, 0, 1, 0, 1, 0], 9),
            Err(ZmtpError::TooManyParts { limit: 2 })
        );
        let command = [&[6][..], &(1u64 << 40).to_be_bytes()].concat();
        let limit = limits::ZMTP_COMMAND_MAX;
        assert_eq!(
            feed(&mut open(), &command, 9),
            Err(ZmtpError::CommandTooLong { len: 1 << 40, limit })
        );
        // An error is final.
        let mut failed = open();
        feed(&mut failed, &[8, 0], 1).unwrap_err();
        feed(&mut failed, &[0, 0], 1).unwrap_err();
        assert_eq!(failed.send(message(&[b"late"]).parts()), Err(ZmtpSendError::NotOpen));
    }

    #[test]
    fn a_peer_that_does_not_read_is_noticed() {
        let (mut dealer, mut router) = pair();
        router.set_limits(Limits { queued_bytes: 100, ..Limits::PEER });
        dealer.ping(0, 1).unwrap();
        let ping = drain(&mut dealer);
        let flood = ping.repeat(20);
        assert_eq!(feed(&mut router, &flood, 99), Err(ZmtpError::OutputFull { limit: 100 }));
        dealer.set_limits(Limits { queued_bytes: 100, ..Limits::PEER });
        let parts = message(&[&[0; 80]]);
        dealer.send(parts.parts()).unwrap();
        assert_eq!(dealer.send(parts.parts()), Err(ZmtpSendError::Full { limit: 100 }));
        drain(&mut dealer);
        dealer.send(parts.parts()).unwrap();
    }

    #[test]
    fn an_unsuitable_socket_gets_an_error_command_and_ours_names_the_reason() {
        let mut router = Connection::new(Socket::Router, b"", Limits::PEER);
        feed(&mut router, &greeting(), 64).unwrap();
        drain(&mut router);
        let ready = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB";
        assert_eq!(feed(&mut router, ready, 64), Err(ZmtpError::SocketType));
        let error = drain(&mut router);
        let mut dealer = Connection::new(Socket::Dealer, b"", Limits::PEER);
        feed(&mut dealer, &greeting(), 64).unwrap();
        assert_eq!(
            feed(&mut dealer, &error, 1),
            Err(ZmtpError::Refused("Invalid socket type".into()))
        );
    }

    #[test]
    fn order_is_kept() {
        let (mut dealer, _) = pair();
        let ready = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06ROUTER";
        assert_eq!(feed(&mut dealer, ready, 64), Err(ZmtpError::OutOfOrder));
        let mut early = Connection::new(Socket::Dealer, b"", Limits::PEER);
        feed(&mut early, &greeting(), 64).unwrap();
        assert_eq!(feed(&mut early, b"\0\x01a", 64), Err(ZmtpError::OutOfOrder));
        let mut pinged = Connection::new(Socket::Dealer, b"", Limits::PEER);
        feed(&mut pinged, &greeting(), 64).unwrap();
        assert_eq!(feed(&mut pinged, b"\x04\x07\x04PING\0\0", 64), Err(ZmtpError::OutOfOrder));
    }

    #[test]
    fn buffers_are_reused_and_large_ones_given_back() {
        let (mut dealer, mut router) = pair();
        let mut pass = |len: usize| {
            dealer.send(message(&[&vec![1; len]]).parts()).unwrap();
            let bytes = drain(&mut dealer);
            feed(&mut router, &bytes, usize::MAX).unwrap();
            (dealer.output.capacity(), router.message.byte_len())
        };
        let (before, _) = pass(1000);
        let (after, _) = pass(1000);
        assert_eq!(before, after);
        let (large, _) = pass(1 << 20);
        assert!(large <= limits::ZMTP_BUFFER_KEPT, "{large}");
    }

    proptest! {
        #[test]
        fn no_input_panics_and_cutting_it_changes_nothing(
            noise in proptest::collection::vec(any::<u8>(), 0..300),
            frames in proptest::collection::vec(
                (0u8..8, proptest::collection::vec(any::<u8>(), 0..40)),
                0..8,
            ),
            step in 1usize..50,
        ) {
            let mut bytes = Vec::new();
            for (flags, body) in &frames {
                bytes.extend_from_slice(&[flags & !2, body.len() as u8]);
                bytes.extend_from_slice(body);
            }
            bytes.extend_from_slice(&noise);
            let (mut whole, mut cut) = (pair().0, pair().0);
            prop_assert_eq!(feed(&mut whole, &bytes, usize::MAX), feed(&mut cut, &bytes, step));
            prop_assert_eq!(whole.transmit(), cut.transmit());
            let _ = feed(&mut Connection::new(Socket::Router, b"", Limits::UNPROVEN), &noise, step);
        }
    }
}

//! A connection between two workers: ZMTP, then a Hello from each side. With a cluster key, a Proof
//! from each side follows, and the key seals all later messages.
//!
//! ```text
//!  Greeting … READY ──▶ Hello ◀─▶ Hello ──▶ (Proof ◀─▶ Proof) ──▶ Open: messages
//! ```
//! The contract is that of [`zmtp`]: `handle_input`, then `poll_event` until `None`.
//! Invariants: until the link is open, only Hello and Proof pass, with small bounds on their size.
//! Not here: deadlines of proof and heartbeat, which peer may connect (`link`, `transfer`).

use super::Multipart;
use super::auth::{Hellos, KeyId, Keyring, Seal, Side};
use super::message::{Hello, Message, MessageError, Proof};
use super::zmtp::{self, Connection, Limits, Socket, ZmtpError, ZmtpSendError};
use std::fmt;

/// One end of a connection between workers.
#[derive(Debug)]
pub struct ControlLink {
    zmtp: Connection,
    side: Side,
    keys: Keyring,
    state: State,
    our_hello: Hello,
    /// The only part of each side's Hello, once it is sent or received.
    our_bytes: Vec<u8>,
    peer_bytes: Vec<u8>,
    peer: Option<Hello>,
    outgoing: Option<Seal>,
    incoming: Option<Seal>,
    scratch: Multipart,
}

/// Life of a link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Waits for ZMTP and the peer's Hello.
    Hello,
    /// With a cluster key: waits for the peer's Proof.
    Proof,
    /// Carries messages.
    Open,
}

/// An event of the link.
#[derive(PartialEq, Debug)]
pub enum LinkEvent<'a> {
    /// The peer has sent its Hello and, if a cluster key is required, a valid Proof.
    Open(&'a Hello),
    /// A message.
    Message(Message<'a>),
    /// The answer to our PING with this context.
    Pong {
        /// As given to [`ControlLink::ping`].
        context: u64,
    },
}

/// A fault of the peer; the connection must be closed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LinkError {
    /// In the framing.
    Zmtp(ZmtpError),
    /// In a message.
    Message(MessageError),
    /// A message came too early.
    OutOfOrder,
    /// The peer sent a Proof, but this worker has no key.
    UnexpectedProof,
    /// The peer sent another message when its Proof was due: it has no key, but this worker has
    /// one.
    NoProof,
    /// The peer's proof is wrong: it used another key.
    WrongProof,
    /// The peer proves a key that this worker does not have.
    UnknownKey(KeyId),
    /// The peer does not have the key that this worker proves.
    UnsharedKey(KeyId),
    /// The peer does not read its input.
    Send(ZmtpSendError),
}

impl fmt::Display for LinkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LinkError::Zmtp(error) => error.fmt(f),
            LinkError::Message(error) => error.fmt(f),
            LinkError::OutOfOrder => write!(f, "message before Hello or Proof"),
            LinkError::UnexpectedProof => write!(f, "peer has a cluster key, this worker has none"),
            LinkError::NoProof => write!(f, "peer has no cluster key, this worker has one"),
            LinkError::WrongProof => write!(f, "peer has another cluster key than this worker"),
            LinkError::UnknownKey(id) => write!(
                f,
                "peer has another cluster key than this worker: \
                 it proves key {id}, which is not here"
            ),
            LinkError::UnsharedKey(id) => write!(
                f,
                "peer has another cluster key than this worker: \
                 it does not have key {id}, which is proven here"
            ),
            LinkError::Send(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for LinkError {}

impl From<ZmtpError> for LinkError {
    fn from(error: ZmtpError) -> LinkError {
        LinkError::Zmtp(error)
    }
}

impl From<MessageError> for LinkError {
    fn from(error: MessageError) -> LinkError {
        LinkError::Message(error)
    }
}

impl From<ZmtpSendError> for LinkError {
    fn from(error: ZmtpSendError) -> LinkError {
        LinkError::Send(error)
    }
}

impl ControlLink {
    /// A new link that will send `hello`, which holds a fresh nonce. If `keys` is not empty, the
    /// link proves the first key and requires a proof of any of them.
    pub fn new(side: Side, hello: Hello, keys: impl Into<Keyring>) -> ControlLink {
        let socket = match side {
            Side::Dialer => Socket::Dealer,
            Side::Acceptor => Socket::Router,
        };
        ControlLink {
            zmtp: Connection::new(socket, b"", Limits::UNPROVEN),
            side,
            keys: keys.into(),
            state: State::Hello,
            our_hello: hello,
            our_bytes: Vec::new(),
            peer_bytes: Vec::new(),
            peer: None,
            outgoing: None,
            incoming: None,
            scratch: Multipart::new(),
        }
    }

    /// Takes bytes from the peer and returns their number. It takes fewer than given if an event is
    /// due.
    pub fn handle_input(&mut self, input: &[u8]) -> Result<usize, LinkError> {
        Ok(self.zmtp.handle_input(input)?)
    }

    /// The event that stopped `handle_input`, unless the link handles it itself.
    pub fn poll_event(&mut self) -> Result<Option<LinkEvent<'_>>, LinkError> {
        if self.state != State::Open {
            return self.poll_handshake();
        }
        Ok(match self.zmtp.poll_event() {
            Some(zmtp::ZmtpEvent::Message(parts)) => {
                match Message::decode(parts, self.incoming.as_mut())? {
                    Some(Message::Proof(_)) if self.keys.first().is_none() => {
                        return Err(LinkError::UnexpectedProof);
                    }
                    Some(Message::Hello(_) | Message::Proof(_)) => {
                        return Err(LinkError::OutOfOrder);
                    }
                    message => message.map(LinkEvent::Message),
                }
            }
            Some(zmtp::ZmtpEvent::Pong { context }) => Some(LinkEvent::Pong { context }),
            Some(zmtp::ZmtpEvent::Ready(_)) | None => None,
        })
    }

    /// Queues the whole message. On an error it queues nothing.
    pub fn send(&mut self, message: &Message<'_>) -> Result<(), ZmtpSendError> {
        if self.state != State::Open {
            return Err(ZmtpSendError::NotOpen);
        }
        message.encode(self.outgoing.as_mut(), &mut self.scratch);
        self.zmtp.send(self.scratch.parts())
    }

    /// Queues a PING; see [`Connection::ping`].
    pub fn ping(&mut self, ttl_tenths: u16, context: u64) -> Result<(), ZmtpSendError> {
        self.zmtp.ping(ttl_tenths, context)
    }

    /// Whether PINGs are answered; see [`Connection::answer_pings`].
    pub fn answer_pings(&mut self, answer: bool) {
        self.zmtp.answer_pings(answer);
    }

    /// Whether the peer has sent its Hello and its proof is due.
    pub fn awaits_proof(&self) -> bool {
        self.state == State::Proof
    }

    /// The peer's Hello, once the link is open.
    pub fn peer(&self) -> Option<&Hello> {
        self.peer.as_ref().filter(|_| self.state == State::Open)
    }

    /// The minor version that both sides speak.
    pub fn minor(&self) -> u8 {
        self.peer.map_or(self.our_hello.minor, |peer| peer.minor.min(self.our_hello.minor))
    }

    /// Bytes to write to the peer.
    pub fn transmit(&self) -> &[u8] {
        self.zmtp.transmit()
    }

    /// The first `count` bytes of [`transmit`](Self::transmit) have been written.
    pub fn transmitted(&mut self, count: usize) {
        self.zmtp.transmitted(count);
    }

    fn poll_handshake(&mut self) -> Result<Option<LinkEvent<'_>>, LinkError> {
        match self.zmtp.poll_event() {
            Some(zmtp::ZmtpEvent::Ready(_)) => self.say(&Message::Hello(self.our_hello))?,
            Some(zmtp::ZmtpEvent::Message(parts)) => {
                let message = Message::decode(parts, None)?.ok_or(LinkError::OutOfOrder)?;
                match (self.state, message) {
                    (State::Hello, Message::Hello(hello)) => {
                        self.peer_bytes.extend_from_slice(parts.get(0).unwrap_or_default());
                        self.peer = Some(hello);
                        return self.greeted();
                    }
                    (State::Proof, Message::Proof(proof)) => return self.proven(&proof),
                    (State::Proof, _) => return Err(LinkError::NoProof),
                    _ => return Err(LinkError::OutOfOrder),
                }
            }
            Some(zmtp::ZmtpEvent::Pong { .. }) | None => {}
        }
        Ok(None)
    }

    /// Handles the peer's Hello. Ours was sent earlier, when ZMTP was ready.
    fn greeted(&mut self) -> Result<Option<LinkEvent<'_>>, LinkError> {
        let Some(key) = self.keys.first() else { return Ok(Some(self.open())) };
        let tag = key.proof(self.side, &self.hellos());
        self.compare_keys()?;
        self.say(&Message::Proof(Proof { tag }))?;
        self.state = State::Proof;
        Ok(None)
    }

    /// Compares the key ids of both Hellos, so that each side can log the missing key before any
    /// proof. A stranger that claims a false id only loses its own link. A peer without key ids
    /// (minor 0) shows by its proof whether it has the right key.
    fn compare_keys(&self) -> Result<(), LinkError> {
        let (ours, theirs) =
            (self.keys.ids(), self.peer.map_or(Default::default(), |peer| peer.keys));
        if theirs[0] == KeyId::NONE {
            Ok(())
        } else if !ours.contains(&theirs[0]) {
            Err(LinkError::UnknownKey(theirs[0]))
        } else if !theirs.contains(&ours[0]) {
            Err(LinkError::UnsharedKey(ours[0]))
        } else {
            Ok(())
        }
    }

    fn proven(&mut self, proof: &Proof) -> Result<Option<LinkEvent<'_>>, LinkError> {
        let (hellos, theirs) = (self.hellos(), self.side.other());
        let ours = self.keys.first().expect("state Proof needs a key");
        let prover = self.keys.prover(&proof.tag, theirs, &hellos).ok_or(LinkError::WrongProof)?;
        let (outgoing, incoming) = (ours.seal(self.side, &hellos), prover.seal(theirs, &hellos));
        (self.outgoing, self.incoming) = (Some(outgoing), Some(incoming));
        Ok(Some(self.open()))
    }

    fn open(&mut self) -> LinkEvent<'_> {
        self.state = State::Open;
        self.zmtp.set_limits(Limits::PEER);
        LinkEvent::Open(self.peer.as_ref().expect("its Hello has come"))
    }

    fn say(&mut self, message: &Message<'_>) -> Result<(), LinkError> {
        message.encode(None, &mut self.scratch);
        if let Message::Hello(_) = message {
            self.our_bytes.extend_from_slice(self.scratch.parts().get(0).unwrap_or_default());
        }
        Ok(self.zmtp.send(self.scratch.parts())?)
    }

    fn hellos(&self) -> Hellos<'_> {
        match self.side {
            Side::Dialer => Hellos { dialer: &self.our_bytes, acceptor: &self.peer_bytes },
            Side::Acceptor => Hellos { dialer: &self.peer_bytes, acceptor: &self.our_bytes },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cause::Cause;
    use crate::ids::{Peer, Role};
    use crate::wire::auth::ClusterKey;
    use crate::wire::message::{Bye, MINOR, VERSION};

    fn hello(role: Role, nonce: u8) -> Hello {
        Hello {
            peer: Peer { id: [role as u8; 16], incarnation: [9; 16] },
            connection: 1,
            capabilities: 0,
            software: [0, 1, 0],
            ranks: 1,
            role,
            nonce: [nonce; 32],
            minor: MINOR,
            keys: Default::default(),
        }
    }

    fn key(byte: u8) -> Option<ClusterKey> {
        Some(ClusterKey::new(&[byte; 32]).unwrap())
    }

    fn links(
        dialer: Option<ClusterKey>,
        acceptor: Option<ClusterKey>,
    ) -> (ControlLink, ControlLink) {
        rings(dialer.into(), acceptor.into())
    }

    /// Links that announce the ids of their keys.
    fn rings(dialer: Keyring, acceptor: Keyring) -> (ControlLink, ControlLink) {
        let telling = |hello: Hello, keys: &Keyring| Hello { keys: keys.ids(), ..hello };
        (
            ControlLink::new(Side::Dialer, telling(hello(Role::Decode, 1), &dialer), dialer),
            ControlLink::new(Side::Acceptor, telling(hello(Role::Prefill, 2), &acceptor), acceptor),
        )
    }

    fn ring(bytes: &[u8]) -> Keyring {
        Keyring::new(bytes.iter().filter_map(|&byte| key(byte)))
    }

    /// Carries all that `from` has queued to `to`; returns the events of `to` as text.
    fn carry(from: &mut ControlLink, to: &mut ControlLink) -> Result<Vec<String>, LinkError> {
        let bytes = from.transmit().to_vec();
        from.transmitted(bytes.len());
        deliver(&bytes, to)
    }

    fn carry_into(
        from: &mut ControlLink,
        to: &mut ControlLink,
        seen: &mut Result<Vec<String>, LinkError>,
    ) {
        if let Ok(events) = seen {
            match carry(from, to) {
                Ok(more) => events.extend(more),
                Err(error) => *seen = Err(error),
            }
        }
    }

    fn deliver(bytes: &[u8], to: &mut ControlLink) -> Result<Vec<String>, LinkError> {
        let (mut seen, mut taken) = (Vec::new(), 0);
        while taken < bytes.len() {
            taken += to.handle_input(&bytes[taken..])?;
            match to.poll_event()? {
                Some(LinkEvent::Open(hello)) => seen.push(format!("open {:?}", hello.role)),
                Some(LinkEvent::Message(message)) => seen.push(format!("{message:?}")),
                Some(LinkEvent::Pong { context }) => seen.push(format!("pong {context}")),
                None => {}
            }
        }
        Ok(seen)
    }

    /// Exchanges bytes until nothing moves.
    fn settle(
        a: &mut ControlLink,
        b: &mut ControlLink,
    ) -> (Result<Vec<String>, LinkError>, Result<Vec<String>, LinkError>) {
        let (mut seen_a, mut seen_b) = (Ok(Vec::new()), Ok(Vec::new()));
        for _ in 0..6 {
            carry_into(a, b, &mut seen_b);
            carry_into(b, a, &mut seen_a);
        }
        (seen_a, seen_b)
    }

    #[test]
    fn links_open_with_the_same_key_or_none_and_carry_messages() {
        for shared in [None, key(1)] {
            let (mut dialer, mut acceptor) = links(shared.clone(), shared);
            let bye = Message::Bye(Bye { cause: Some(Cause::Draining) });
            assert_eq!(dialer.send(&bye), Err(ZmtpSendError::NotOpen));
            let (seen_dialer, seen_acceptor) = settle(&mut dialer, &mut acceptor);
            assert_eq!(seen_dialer.unwrap(), ["open Prefill"]);
            assert_eq!(seen_acceptor.unwrap(), ["open Decode"]);
            assert_eq!(acceptor.peer().unwrap().role, Role::Decode);
            for _ in 0..2 {
                dialer.send(&bye).unwrap();
                assert_eq!(carry(&mut dialer, &mut acceptor).unwrap(), [format!("{bye:?}")]);
            }
            acceptor.send(&bye).unwrap();
            assert_eq!(carry(&mut acceptor, &mut dialer).unwrap(), [format!("{bye:?}")]);
        }
    }

    #[test]
    fn keys_that_differ_and_keys_that_are_missing_are_told_apart() {
        let run = |a, b| {
            let (mut dialer, mut acceptor) = links(a, b);
            settle(&mut dialer, &mut acceptor)
        };
        let [one, two] = [1, 2].map(|byte| key(byte).unwrap().id());
        let (dialer, acceptor) = run(key(1), key(2));
        assert_eq!(dialer, Err(LinkError::UnknownKey(two)));
        assert_eq!(acceptor, Err(LinkError::UnknownKey(one)));
        // If peers announce no key ids, the proof reveals the difference.
        let silent = |role, byte| ControlLink::new(Side::Dialer, hello(role, byte), key(byte));
        let mut dialer = silent(Role::Decode, 1);
        let mut acceptor = ControlLink::new(Side::Acceptor, hello(Role::Prefill, 2), key(2));
        assert_eq!(
            settle(&mut dialer, &mut acceptor),
            (Err(LinkError::WrongProof), Err(LinkError::WrongProof))
        );
        // Without a key a link opens at once, so it takes the Proof as a message.
        let (dialer, _) = run(None, key(2));
        assert_eq!(dialer, Err(LinkError::UnexpectedProof));
        let (mut dialer, mut acceptor) = links(None, key(2));
        settle(&mut dialer, &mut acceptor).1.unwrap();
    }

    /// The steps of a key rotation: the old key; both keys, the old one first; both keys, the new
    /// one first; the new key. Two workers link if they are at the same step or one step apart, but
    /// not if they are two steps apart.
    #[test]
    fn keys_are_exchanged_while_links_are_made() {
        let steps = [&[1][..], &[1, 2], &[2, 1], &[2]];
        let bye = Message::Bye(Bye { cause: None });
        for (at, step) in steps.iter().enumerate() {
            for next in &steps[at..steps.len().min(at + 2)] {
                for (a, b) in [(step, next), (next, step)] {
                    let (mut dialer, mut acceptor) = rings(ring(a), ring(b));
                    let opened = settle(&mut dialer, &mut acceptor);
                    assert!(opened.0.is_ok() && opened.1.is_ok(), "{a:?} {b:?}: {opened:?}");
                    dialer.send(&bye).unwrap();
                    carry(&mut dialer, &mut acceptor).unwrap();
                    acceptor.send(&bye).unwrap();
                    carry(&mut acceptor, &mut dialer).unwrap();
                }
            }
        }
        let [one, two] = [1, 2].map(|byte| key(byte).unwrap().id());
        let (mut dialer, mut acceptor) = rings(ring(&[1]), ring(&[2, 1]));
        let ended = settle(&mut dialer, &mut acceptor);
        assert_eq!(ended, (Err(LinkError::UnknownKey(two)), Err(LinkError::UnsharedKey(two))));
        let (mut dialer, mut acceptor) = rings(ring(&[1, 2]), ring(&[2]));
        let ended = settle(&mut dialer, &mut acceptor);
        assert_eq!(ended, (Err(LinkError::UnsharedKey(one)), Err(LinkError::UnknownKey(one))));
    }

    #[test]
    fn a_message_in_place_of_a_proof_is_refused() {
        let (mut dialer, mut acceptor) = links(None, key(2));
        // The acceptor's Proof is held back, so the dialer stays open and sends.
        for _ in 0..2 {
            carry(&mut dialer, &mut acceptor).unwrap();
            carry(&mut acceptor, &mut dialer).ok();
        }
        let mut forged = Multipart::new();
        Message::Bye(Bye { cause: None }).encode(None, &mut forged);
        dialer.zmtp.send(forged.parts()).unwrap();
        assert_eq!(settle(&mut dialer, &mut acceptor).1, Err(LinkError::NoProof));
    }

    #[test]
    fn a_changed_or_repeated_message_ends_a_keyed_link() {
        let open = || {
            let (mut dialer, mut acceptor) = links(key(1), key(1));
            settle(&mut dialer, &mut acceptor).0.unwrap();
            dialer.send(&Message::Bye(Bye { cause: None })).unwrap();
            let bytes = dialer.transmit().to_vec();
            (bytes, acceptor)
        };
        let (bytes, mut acceptor) = open();
        deliver(&bytes, &mut acceptor).unwrap();
        assert_eq!(deliver(&bytes, &mut acceptor), Err(LinkError::Message(MessageError::Seal)));
        let (mut bytes, mut acceptor) = open();
        bytes[12] ^= 1;
        assert_eq!(deliver(&bytes, &mut acceptor), Err(LinkError::Message(MessageError::Seal)));
    }

    /// A peer of a later minor version, made by hand: its Hello has grown, and it sends kinds that
    /// this version does not know.
    struct Newer {
        zmtp: Connection,
        hello: Vec<u8>,
    }

    impl Newer {
        /// Sends Hello, in messages of this major version.
        fn greet(version: u8, acceptor: &mut ControlLink) -> Newer {
            let zmtp = Connection::new(Socket::Dealer, b"", Limits::PEER);
            let mut newer = Newer { zmtp, hello: Vec::new() };
            for _ in 0..3 {
                newer.carry(acceptor).unwrap();
                let bytes = acceptor.transmit().to_vec();
                acceptor.transmitted(bytes.len());
                let mut taken = 0;
                while taken < bytes.len() {
                    taken += newer.zmtp.handle_input(&bytes[taken..]).unwrap();
                    let _ = newer.zmtp.poll_event();
                }
            }
            let mut said = Multipart::new();
            let hello =
                Hello { minor: MINOR + 1, keys: acceptor.keys.ids(), ..hello(Role::Decode, 1) };
            Message::Hello(hello).encode(None, &mut said);
            newer.hello = [said.parts().get(0).unwrap(), &[0xaa; 24]].concat();
            newer.hello[2] = version;
            let grown = newer.hello.clone();
            newer.say(&[&grown]);
            newer
        }

        fn say(&mut self, parts: &[&[u8]]) {
            let mut message = Multipart::new();
            parts.iter().for_each(|part| message.push(part));
            self.zmtp.send(message.parts()).unwrap();
        }

        fn carry(&mut self, to: &mut ControlLink) -> Result<Vec<String>, LinkError> {
            let bytes = self.zmtp.transmit().to_vec();
            self.zmtp.transmitted(bytes.len());
            deliver(&bytes, to)
        }
    }

    /// The header of a message of this kind, of one part.
    fn header(version: u8, kind: u8, flags: u8, parts: u8) -> [u8; 8] {
        [b'B', b'T', version, kind, flags, 0, parts, 0]
    }

    #[test]
    fn a_later_minor_version_is_understood_as_far_as_this_one_goes() {
        let bye = format!("{:?}", Message::Bye(Bye { cause: Some(Cause::Draining) }));
        for keys in [ring(&[]), ring(&[1])] {
            let (_, mut acceptor) = rings(ring(&[]), keys.clone());
            let mut newer = Newer::greet(VERSION, &mut acceptor);
            let mut opened = newer.carry(&mut acceptor).unwrap();
            let ours = acceptor.our_bytes.clone();
            let hellos = Hellos { dialer: &newer.hello.clone(), acceptor: &ours };
            let mut seal = keys.first().map(|key| key.seal(Side::Dialer, &hellos));
            if let Some(key) = keys.first() {
                let mut proof = Multipart::new();
                Message::Proof(Proof { tag: key.proof(Side::Dialer, &hellos) })
                    .encode(None, &mut proof);
                newer.say(&[proof.parts().get(0).unwrap()]);
                opened = newer.carry(&mut acceptor).unwrap();
            }
            assert_eq!(opened, ["open Decode"]);
            assert_eq!(acceptor.minor(), MINOR);
            let sealed = u8::from(seal.is_some());
            let mut said = |parts: &[&[u8]], newer: &mut Newer| {
                let mut message = Multipart::new();
                parts.iter().for_each(|part| message.push(part));
                seal.iter_mut().for_each(|seal| seal.close(&mut message));
                newer.zmtp.send(message.parts()).unwrap();
                newer.carry(&mut acceptor)
            };
            // A kind that this version does not know, and a Bye with more fields.
            let unknown = header(VERSION, 200, 0, 1 + sealed);
            assert_eq!(said(&[&unknown, b"what"], &mut newer).unwrap(), [""; 0]);
            let longer = [&header(VERSION, 13, 0, sealed)[..], &[9], &[0xaa; 40]].concat();
            assert_eq!(said(&[&longer], &mut newer).unwrap(), std::slice::from_ref(&bye));
            let must = header(VERSION, 200, 1, 1 + sealed);
            let error = said(&[&must, b"what"], &mut newer).unwrap_err();
            assert_eq!(error, LinkError::Message(MessageError::Kind(200)));
        }
    }

    #[test]
    fn another_major_version_is_refused_by_name() {
        let (_, mut acceptor) = links(None, None);
        let mut newer = Newer::greet(VERSION + 1, &mut acceptor);
        let error = newer.carry(&mut acceptor).unwrap_err();
        let said =
            format!("peer's messages are of version {}, ours of version {VERSION}", VERSION + 1);
        assert_eq!(error.to_string(), said);
    }

    #[test]
    fn an_unproven_peer_gets_narrow_bounds() {
        let (mut dialer, mut acceptor) = links(None, None);
        carry(&mut dialer, &mut acceptor).unwrap();
        carry(&mut acceptor, &mut dialer).unwrap();
        let bytes = dialer.transmit().to_vec();
        // READY arrives, then a frame of a megabyte where Hello is due.
        let ready_len = 2 + usize::from(bytes[1]);
        deliver(&bytes[..ready_len], &mut acceptor).unwrap();
        let long = [&[2][..], &(1u64 << 20).to_be_bytes()].concat();
        let error = deliver(&long, &mut acceptor).unwrap_err();
        assert!(matches!(error, LinkError::Zmtp(ZmtpError::MessageTooLong { .. })), "{error}");
    }
}

//! Recorded conversations between a prefill and a decode worker of earlier minor versions. They
//! hold three hand-offs (the last with two different prompts), a client that left, and a prefill
//! worker that drained. This version must read and write the same messages. Never record again: a
//! recording defines compatibility. `3.0-keyed` was made with a key of 40 times `k`.

use super::auth::{ClusterKey, Hellos, Keyring, Side};
use super::link::{ControlLink, LinkEvent};
use super::message::{Hello, Message};
use super::zmtp::{self, Connection, Limits, Socket};
use super::{Multipart, Parts};

struct Recording {
    key: Option<ClusterKey>,
    dialer: &'static [u8],
    acceptor: &'static [u8],
}

fn recordings() -> [Recording; 2] {
    [
        Recording {
            key: None,
            dialer: include_bytes!("../../tests/recordings/3.0-open.dialer"),
            acceptor: include_bytes!("../../tests/recordings/3.0-open.acceptor"),
        },
        Recording {
            key: ClusterKey::new(&[b'k'; 40]).ok(),
            dialer: include_bytes!("../../tests/recordings/3.0-keyed.dialer"),
            acceptor: include_bytes!("../../tests/recordings/3.0-keyed.acceptor"),
        },
    ]
}

impl Recording {
    fn said(&self, side: Side) -> &'static [u8] {
        match side {
            Side::Dialer => self.dialer,
            Side::Acceptor => self.acceptor,
        }
    }

    /// The messages of one side in order, seals included.
    fn messages(&self, side: Side) -> Vec<Multipart> {
        // As the other side receives it.
        let socket = if side == Side::Dialer { Socket::Router } else { Socket::Dealer };
        let mut zmtp = Connection::new(socket, b"", Limits::PEER);
        let (mut messages, mut rest) = (Vec::new(), self.said(side));
        while !rest.is_empty() {
            let used = zmtp.handle_input(rest).unwrap();
            rest = &rest[used..];
            if let Some(zmtp::ZmtpEvent::Message(parts)) = zmtp.poll_event() {
                messages.push(copy(parts));
            }
        }
        messages
    }

    fn hello(&self, side: Side) -> (Hello, Vec<u8>) {
        let messages = self.messages(side);
        let Ok(Some(Message::Hello(hello))) = Message::decode(messages[0].parts(), None) else {
            panic!("no Hello");
        };
        (hello, messages[0].parts().get(0).unwrap().to_vec())
    }
}

fn copy(parts: Parts<'_>) -> Multipart {
    let mut out = Multipart::new();
    parts.iter().for_each(|part| out.push(part));
    out
}

/// The first word of its debug form.
fn kind(message: &Message<'_>) -> String {
    let text = format!("{message:?}");
    text.split(|c: char| !c.is_ascii_alphanumeric()).next().unwrap().to_owned()
}

const DECODE_SAYS: &[&str] = &[
    "Announce",
    "Destination",
    "Done",
    "Destination",
    "Done",
    "Destination",
    "Destination",
    "Abort",
];
const PREFILL_SAYS: &[&str] = &["Welcome", "AbortAck", "AbortAck", "Bye"];

/// This version replaces one side: it proves itself, accepts the other side's proof, and reads all
/// its messages.
#[test]
fn an_earlier_conversation_is_held_with_this_version() {
    for recording in recordings() {
        for (own, heard) in [(Side::Acceptor, DECODE_SAYS), (Side::Dialer, PREFILL_SAYS)] {
            let (hello, _) = recording.hello(own);
            assert_eq!(hello.minor, 0);
            let mut link = ControlLink::new(own, hello, Keyring::from(recording.key.clone()));
            let (mut kinds, mut rest) = (Vec::new(), recording.said(own.other()));
            let mut opened = None;
            while !rest.is_empty() {
                let used = link.handle_input(rest).unwrap();
                rest = &rest[used..];
                match link.poll_event().unwrap() {
                    Some(LinkEvent::Open(_)) => opened = Some(link.transmit().to_vec()),
                    Some(LinkEvent::Message(message)) => kinds.push(kind(&message)),
                    Some(LinkEvent::Pong { .. }) | None => {}
                }
            }
            assert_eq!(kinds, heard, "{own:?}");
            // Greeting, READY, Hello and, with a key, Proof equal the recorded bytes.
            let said = opened.expect("it opens");
            assert!(!said.is_empty() && recording.said(own).starts_with(&said), "{own:?}");
        }
    }
}

/// An earlier version can read this version's messages: bodies differ from the recorded ones only
/// by fields appended at the end.
#[test]
fn messages_begin_with_the_bytes_that_an_earlier_version_reads() {
    for recording in recordings() {
        let [dialer, acceptor] = [Side::Dialer, Side::Acceptor].map(|side| recording.hello(side).1);
        let hellos = Hellos { dialer: &dialer, acceptor: &acceptor };
        for side in [Side::Dialer, Side::Acceptor] {
            let mut seal = recording.key.as_ref().map(|key| key.seal(side, &hellos));
            let handshake = if seal.is_some() { 2 } else { 1 };
            for (at, recorded) in recording.messages(side).iter().enumerate() {
                let seal = if at < handshake { None } else { seal.as_mut() };
                let sealed = usize::from(seal.is_some());
                let message =
                    Message::decode(recorded.parts(), seal).unwrap().expect("a known kind");
                let mut now = Multipart::new();
                message.encode(None, &mut now);
                let (now, then) = (now.parts(), recorded.parts());
                assert_eq!(now.len(), then.len() - sealed, "{message:?}");
                for index in 0..now.len() {
                    let (mut now, mut then) = (now.get(index).unwrap(), then.get(index).unwrap());
                    if index == 0 {
                        // Magic, version, kind and flags. The number of parts follows, which the
                        // seal increases.
                        assert_eq!(now[..6], then[..6], "{message:?}");
                        (now, then) = (&now[8..], &then[8..]);
                    }
                    assert!(now.starts_with(then), "part {index} of {message:?}");
                }
            }
        }
    }
}

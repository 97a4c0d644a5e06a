//! Recorded conversations between a prefill and a decode worker, one set for each recorded minor
//! version (`tools/record-link`). They hold three hand-offs (in the last, the two legs have
//! different prompts), a client that left, and a prefill worker that drained. This version must
//! read and write the same messages. Never record again: a recording defines compatibility.

use super::auth::{ClusterKey, Hellos, Keyring, Side};
use super::link::{ControlLink, LinkEvent};
use super::message::{Hello, MINOR, Message, VERSION};
use super::zmtp::{self, Connection, Limits, Socket};
use super::{Multipart, Parts};
use std::path::Path;

/// The two files `VERSION.MINOR-NAME.dialer` and `.acceptor`.
struct Recording {
    minor: u8,
    name: String,
    dialer: Vec<u8>,
    acceptor: Vec<u8>,
}

/// All recordings of this major version.
fn recordings() -> Vec<Recording> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recordings");
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).expect("the folder is there") {
        let path = entry.expect("the folder can be read").path();
        let file = path.file_name().and_then(|name| name.to_str()).expect("names are text");
        let Some(stem) = file.strip_suffix(".dialer") else { continue };
        let Some(rest) = stem.strip_prefix(&format!("{VERSION}.")) else { continue };
        let (minor, name) = rest.split_once('-').expect("a recording has a name");
        found.push(Recording {
            minor: minor.parse().expect("a minor version"),
            name: name.to_owned(),
            dialer: std::fs::read(&path).expect("a recording"),
            acceptor: std::fs::read(path.with_extension("acceptor")).expect("its other side"),
        });
    }
    assert!(found.len() >= 5, "two recordings of 3.0, three of 3.2");
    found
}

impl Recording {
    fn said(&self, side: Side) -> &[u8] {
        match side {
            Side::Dialer => &self.dialer,
            Side::Acceptor => &self.acceptor,
        }
    }

    fn key(&self) -> Option<ClusterKey> {
        (self.name == "keyed").then(|| ClusterKey::new(&[b'k'; 40]).expect("long enough"))
    }

    /// The kinds of messages that a side sends after the handshake.
    fn kinds(&self, side: Side) -> &'static [&'static str] {
        let is_late = match self.name.as_str() {
            "open" | "keyed" => false,
            "late" => true,
            name => panic!("no known conversation: {name}"),
        };
        match (side, is_late) {
            (Side::Dialer, false) => DECODE_SAYS,
            (Side::Dialer, true) => LATE_DECODE_SAYS,
            (Side::Acceptor, false) => PREFILL_SAYS,
            (Side::Acceptor, true) => LATE_PREFILL_SAYS,
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

/// With late allocation.
const LATE_DECODE_SAYS: &[&str] = &[
    "Announce",
    "Interest",
    "Destination",
    "Done",
    "Interest",
    "Destination",
    "Done",
    "Interest",
    "Interest",
    "Abort",
];
const LATE_PREFILL_SAYS: &[&str] = &["Welcome", "Ready", "Ready", "AbortAck", "AbortAck", "Bye"];

/// A minor version is recorded before the one after it begins. So a change of the wire format meets
/// a recording of the version that is in use.
#[test]
fn the_version_before_this_one_is_recorded() {
    let newest = recordings().iter().map(|recording| recording.minor).max();
    let newest = newest.expect("there are recordings");
    assert!(
        MINOR <= newest + 1,
        "the wire has version {VERSION}.{MINOR}, and the newest recording has {VERSION}.{newest}: \
         run tools/record-link with a program of {VERSION}.{}",
        MINOR - 1
    );
}

/// This version replaces one side: it proves itself, accepts the other side's proof, and reads all
/// its messages.
#[test]
fn an_earlier_conversation_is_held_with_this_version() {
    for recording in recordings() {
        for own in [Side::Acceptor, Side::Dialer] {
            let (hello, _) = recording.hello(own);
            assert_eq!(hello.minor, recording.minor);
            let mut link = ControlLink::new(own, hello, Keyring::from(recording.key()));
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
            let heard = recording.kinds(own.other());
            assert_eq!(kinds, heard, "3.{} {}, {own:?}", recording.minor, recording.name);
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
            let mut seal = recording.key().map(|key| key.seal(side, &hellos));
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

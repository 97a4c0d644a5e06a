//! Scripted peers that send messages which no worker would send.

use crate::process::PATIENCE;
use baton::ids::{Peer, Role};
use baton::wire::Multipart;
use baton::wire::auth::{Keyring, Side};
use baton::wire::link::{ControlLink, LinkEvent};
use baton::wire::message::{Hello, Message};
use baton::wire::zmtp::{self, Connection, Limits, Socket};
use serde_json::json;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;

pub fn connect(address: SocketAddr) -> TcpStream {
    open(TcpStream::connect(address).expect("it listens"))
}

fn open(stream: TcpStream) -> TcpStream {
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// What it sends until it closes. It must close.
#[track_caller]
pub fn until_closed(stream: &mut TcpStream) -> Vec<u8> {
    let (mut said, mut bytes) = (Vec::new(), [0; 4096]);
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return said,
            Ok(count) => said.extend_from_slice(&bytes[..count]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                panic!("the connection stays open")
            }
            Err(_) => return said,
        }
    }
}

/// The link of a worker: Hello, its proof if it has a key, and the messages of a test.
pub struct Stranger {
    pub stream: TcpStream,
    pub link: ControlLink,
    /// All bytes that it has sent.
    pub sent: Vec<u8>,
    /// Changes its bytes on their way.
    alter: fn(&mut [u8]),
    input: Vec<u8>,
}

impl Stranger {
    pub fn dial(control: SocketAddr, number: u8) -> Stranger {
        Stranger::dial_with(control, number, Keyring::default())
    }

    /// A decode worker, as far as the other side accepts it.
    pub fn dial_with(control: SocketAddr, number: u8, keys: impl Into<Keyring>) -> Stranger {
        Stranger::dial_altered(control, number, keys, |_| {})
    }

    /// A peer with bytes that are changed on their way.
    pub fn dial_altered(
        control: SocketAddr,
        number: u8,
        keys: impl Into<Keyring>,
        alter: fn(&mut [u8]),
    ) -> Stranger {
        Stranger::over(connect(control), Side::Dialer, number, keys.into(), alter)
    }

    /// A prefill worker for the next worker that dials.
    pub fn accept(listener: &TcpListener, number: u8, keys: impl Into<Keyring>) -> Stranger {
        let (stream, _) = listener.accept().unwrap();
        Stranger::over(open(stream), Side::Acceptor, number, keys.into(), |_| {})
    }

    fn over(
        stream: TcpStream,
        side: Side,
        number: u8,
        keys: Keyring,
        alter: fn(&mut [u8]),
    ) -> Stranger {
        let hello = hello(side, number, &keys);
        let link = ControlLink::new(side, hello, keys);
        let mut stranger = Stranger { stream, link, sent: Vec::new(), alter, input: Vec::new() };
        stranger.flush();
        while stranger.link.peer().is_none() && stranger.take_in() {}
        stranger
    }

    /// The next message, if one arrives before the end.
    pub fn next<T>(&mut self, take: impl Fn(&Message<'_>) -> T) -> Option<T> {
        loop {
            let used = self.link.handle_input(&self.input).ok()?;
            self.input.drain(..used);
            match self.link.poll_event() {
                Ok(Some(LinkEvent::Message(message))) => return Some(take(&message)),
                Ok(Some(_)) => {}
                Ok(None) if used > 0 => {}
                Ok(None) => {
                    self.flush();
                    let mut bytes = [0; 4096];
                    let count = self.stream.read(&mut bytes).ok().filter(|&count| count > 0)?;
                    self.input.extend_from_slice(&bytes[..count]);
                }
                Err(_) => return None,
            }
        }
    }

    pub fn say(&mut self, message: &Message<'_>) {
        self.link.send(message).unwrap();
        self.flush();
    }

    /// The other side has possibly closed; the test will find out.
    pub fn flush(&mut self) {
        let mut bytes = self.link.transmit().to_vec();
        self.link.transmitted(bytes.len());
        (self.alter)(&mut bytes);
        let _ = self.stream.write_all(&bytes);
        self.sent.extend_from_slice(&bytes);
    }

    /// Continues the handshake. Returns whether more can follow.
    fn take_in(&mut self) -> bool {
        let mut bytes = [0; 4096];
        let count = self.stream.read(&mut bytes).unwrap_or(0);
        self.input.extend_from_slice(&bytes[..count]);
        while self.link.peer().is_none() {
            let Ok(used) = self.link.handle_input(&self.input) else { return false };
            self.input.drain(..used);
            match self.link.poll_event() {
                Ok(None) if used == 0 => break,
                Ok(_) => {}
                // All pending bytes are sent.
                Err(_) => {
                    self.flush();
                    return false;
                }
            }
        }
        self.flush();
        count > 0
    }
}

pub fn hello(side: Side, number: u8, keys: &Keyring) -> Hello {
    Hello {
        peer: Peer { id: [number; 16], incarnation: [number; 16] },
        connection: 1,
        capabilities: u64::MAX,
        software: [u16::MAX; 3],
        ranks: 1,
        role: if side == Side::Dialer { Role::Decode } else { Role::Prefill },
        nonce: [number; 32],
        minor: u8::MAX,
        keys: keys.ids(),
    }
}

/// A connection with framed parts of any content.
pub struct Framed {
    pub stream: TcpStream,
    zmtp: Connection,
    input: Vec<u8>,
}

impl Framed {
    pub fn dial(control: SocketAddr) -> Framed {
        let zmtp = Connection::new(Socket::Dealer, b"", Limits::PEER);
        let mut framed = Framed { stream: connect(control), zmtp, input: Vec::new() };
        framed.flush();
        while !framed.zmtp.is_open() {
            assert!(framed.hear_once().is_none());
        }
        framed
    }

    pub fn say(&mut self, parts: &[&[u8]]) {
        let mut message = Multipart::new();
        parts.iter().for_each(|part| message.push(part));
        self.zmtp.send(message.parts()).unwrap();
        self.flush();
    }

    /// The parts of the next message.
    #[track_caller]
    pub fn hear(&mut self) -> Vec<Vec<u8>> {
        loop {
            if let Some(parts) = self.hear_once() {
                return parts;
            }
        }
    }

    #[track_caller]
    fn hear_once(&mut self) -> Option<Vec<Vec<u8>>> {
        let used = self.zmtp.handle_input(&self.input).unwrap();
        self.input.drain(..used);
        if let Some(event) = self.zmtp.poll_event() {
            return match event {
                zmtp::ZmtpEvent::Message(parts) => Some(parts.iter().map(<[u8]>::to_vec).collect()),
                _ => None,
            };
        }
        if used == 0 {
            self.flush();
            let mut bytes = [0; 4096];
            let count = self.stream.read(&mut bytes).unwrap();
            assert!(count > 0, "it hangs up");
            self.input.extend_from_slice(&bytes[..count]);
        }
        None
    }

    fn flush(&mut self) {
        let bytes = self.zmtp.transmit();
        let count = bytes.len();
        let _ = self.stream.write_all(bytes);
        self.zmtp.transmitted(count);
    }
}

/// One message as the only part of its bytes.
pub fn bytes_of(message: &Message<'_>) -> Vec<u8> {
    let mut out = Multipart::new();
    message.encode(None, &mut out);
    out.parts().get(0).unwrap().to_vec()
}

/// A registry that names this control host and port to every client, for as long as the test runs.
pub fn registry(control_host: Option<&'static str>, control_port: u16) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let body = json!({
        "attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, "page_size": 16,
        "kv_cache_dtype": "f32", "follow_bootstrap_room": true, "decode_allocation_policy": "early",
        "prefill_http_port": 1, "control_host": control_host, "control_port": control_port,
    })
    .to_string();
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let mut stream = open(stream);
            let _ = stream.read(&mut [0; 4096]);
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
            let _ = stream.write_all((head + &body).as_bytes());
        }
    });
    address
}

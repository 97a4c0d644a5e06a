//! Abuse of the ports between workers costs the sender at most its connection. The ports are the
//! control and the registry port of a prefill worker, and the data port of a decode worker.

use crate::keys::KeyFile;
use crate::process::{PATIENCE, Process};
use crate::stranger::{Stranger, connect, until_closed};
use crate::{body, choices, dual, prefill, start, with_room};
use baton::cause::Cause;
use baton::ids::{Generation, PageId, Room, SessionGeneration, SlotId};
use baton::limits::ZMTP_PARTS_MAX;
use baton::transfer::transport::tcp::Preamble;
use baton::wire::auth::ClusterKey;
use baton::wire::message::{Abort, AbortAck, Bye, Destination, Done, Message, Token, TransferId};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

/// Most memory that abuse can cost. A worker allocates the memory for its own work before.
const GROWTH_MAX: u64 = 8 << 20;
const IDLE_CONNECTIONS: usize = 200;
/// The byte that the cluster key consists of, if there is a key.
const KEY: u8 = b'k';
/// Length of a ZMTP 3.1 greeting with the NULL mechanism.
const GREETING: usize = 64;

struct Pair {
    key: Option<KeyFile>,
    prefill: Process,
    decode: Process,
    room: u64,
}

impl Pair {
    fn start() -> Pair {
        Pair::with(None)
    }

    fn with(key: Option<KeyFile>) -> Pair {
        let mut flags = vec!["--transfer", "tcp"];
        if let Some(key) = &key {
            flags.extend(["--cluster-key-file", key.path()]);
        }
        let (prefill, decode) = (prefill(&flags), start("decode", &flags));
        let mut pair = Pair { key, prefill, decode, room: 0 };
        for _ in 0..8 {
            pair.check_works();
        }
        pair
    }

    /// Hand-offs continue in the established session.
    #[track_caller]
    fn check_works(&mut self) {
        self.room += 1;
        let body = with_room(body(self.room as u32 % 9, 100, 4), &self.prefill, self.room);
        let (reader, writer) = dual(self.prefill.address, self.decode.address, body);
        assert_eq!(choices(&writer)[0]["token_ids"].as_array().unwrap().len(), 4);
        choices(&reader);
    }

    fn ports(&self) -> [(&'static str, SocketAddr); 3] {
        let at = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        assert!(
            self.prefill.control_port != 0
                && self.prefill.bootstrap_port != 0
                && self.decode.data_port != 0
        );
        [
            ("control", at(self.prefill.control_port)),
            ("registry", at(self.prefill.bootstrap_port)),
            ("data", at(self.decode.data_port)),
        ]
    }

    fn resident(&self) -> [u64; 2] {
        [self.prefill.resident(), self.decode.resident()]
    }

    /// The session and the processes are the same, and the memory has not grown.
    #[track_caller]
    fn check_unharmed(&mut self, before: [u64; 2]) {
        self.check_works();
        for (worker, before) in [&mut self.prefill, &mut self.decode].into_iter().zip(before) {
            worker.await_idle();
            worker.check_alive();
            let now = worker.resident();
            eprintln!("memory grew by {} KiB", now.saturating_sub(before) >> 10);
            assert!(now < before + GROWTH_MAX, "grew from {before} to {now} bytes");
            assert_eq!(worker.metric("baton_request_failures_total{", ""), 0.0);
        }
    }
}

fn noise(mut state: u64, length: usize) -> Vec<u8> {
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 56) as u8
    };
    (0..length).map(|_| next()).collect()
}

fn greeting() -> Vec<u8> {
    let mut bytes = vec![0; GREETING];
    (bytes[0], bytes[8], bytes[9], bytes[10], bytes[11]) = (0xff, 1, 0x7f, 3, 1);
    bytes[12..16].copy_from_slice(b"NULL");
    bytes
}

/// A READY command of a DEALER.
fn ready() -> Vec<u8> {
    let body = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER";
    [&[4, body.len() as u8], &body[..]].concat()
}

fn attacks() -> Vec<(&'static str, Vec<u8>)> {
    let after_greeting = |bytes: &[u8]| [greeting(), bytes.to_vec()].concat();
    let after_ready = |bytes: &[u8]| [greeting(), ready(), bytes.to_vec()].concat();
    let huge = u64::MAX.to_be_bytes();
    let mut attacks = vec![
        ("nothing", Vec::new()),
        ("a byte", vec![0xff]),
        ("an HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\x12\x04\0\0\0\0\0".to_vec()),
        ("a TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec()),
        ("a huge head", [b"GET /", &vec![b'a'; 300 << 10][..], b" HTTP/1.1\r\n\r\n"].concat()),
        ("a huge length", b"PUT /route HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n".to_vec()),
        (
            "no JSON",
            b"PUT /route HTTP/1.1\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{]".to_vec(),
        ),
        ("a body cut short", b"PUT /route HTTP/1.1\r\ncontent-length: 50\r\n\r\n{\"attn".to_vec()),
        ("a greeting cut short", greeting()[..40].to_vec()),
        ("a greeting and noise", after_greeting(&noise(5, 100_000))),
        ("a huge command", after_greeting(&[&[6][..], &huge].concat())),
        ("a command cut short", after_greeting(&ready()[..10])),
        ("READY and noise", after_ready(&noise(6, 100_000))),
        ("READY and a huge frame", after_ready(&[&[2][..], &huge].concat())),
        ("READY and many parts", after_ready(&[1, 0].repeat(10_000))),
        ("READY and a frame cut short", after_ready(&[0, 200, 1, 2, 3])),
        ("READY and a false Hello", after_ready(&[&[0, 200][..], &noise(7, 200)].concat())),
        ("a preamble of no session", preamble()),
        ("a preamble cut short", preamble()[..20].to_vec()),
    ];
    for length in [7, 100, 5000, 500_000] {
        attacks.push(("noise", noise(length as u64, length)));
    }
    attacks
}

/// A valid preamble with a token that was never given out.
fn preamble() -> Vec<u8> {
    let token = Token(noise(8, 16).try_into().expect("16 bytes"));
    Preamble { token, session: SessionGeneration(1), lane: 0, lanes: 1 }.encode().to_vec()
}

/// One connection, left open: the control and the data port close it by themselves, the registry
/// when nothing more arrives.
#[test]
fn nonsense_costs_its_sender_the_connection() {
    nonsense(Pair::start());
}

#[test]
fn nonsense_costs_its_sender_the_connection_if_there_is_a_key() {
    nonsense(Pair::with(Some(KeyFile::new(KEY))));
}

#[track_caller]
fn nonsense(mut pair: Pair) {
    let before = pair.resident();
    for (port, address) in pair.ports() {
        for (name, bytes) in attacks() {
            eprintln!("== {name} at the {port} port");
            let mut stream = connect(address);
            // The port can close the connection before all bytes are sent.
            let _ = stream.write_all(&bytes);
            if port == "registry" {
                let _ = stream.shutdown(Shutdown::Write);
            }
            let said = until_closed(&mut stream);
            if port == "registry" {
                let said = String::from_utf8_lossy(&said);
                assert!(said.is_empty() || said.starts_with("HTTP/1.1 4"), "{name}: {said}");
            }
            pair.check_works();
        }
    }
    pair.check_unharmed(before);
}

#[test]
fn hundreds_of_idle_connections_delay_no_request() {
    let mut pair = Pair::start();
    let before = pair.resident();
    let crowd = |port: SocketAddr| -> Vec<TcpStream> {
        (0..IDLE_CONNECTIONS).map(|_| connect(port)).collect()
    };
    let mut idle: Vec<(&str, Vec<TcpStream>)> =
        pair.ports().into_iter().map(|(port, address)| (port, crowd(address))).collect();
    for (index, stream) in idle.iter_mut().flat_map(|(_, streams)| streams).enumerate() {
        let _ = stream.write_all(&greeting()[..index % 3]);
    }
    for _ in 0..5 {
        pair.check_works();
    }
    // Connections without a handshake are closed.
    for (port, streams) in &mut idle {
        if *port != "registry" {
            streams.iter_mut().for_each(|stream| drop(until_closed(stream)));
        }
    }
    pair.check_unharmed(before);
    drop(idle);
    pair.check_unharmed(before);
}

/// After Hello a peer counts as a worker, but its messages are checked. An invalid message costs
/// its link; an unknown room costs nothing. Rooms of others continue.
#[test]
fn a_peer_that_talks_nonsense_harms_itself_alone() {
    let mut pair = Pair::start();
    let before = pair.resident();
    let control = pair.ports()[0].1;
    let id =
        TransferId { room: Room(1), slot: SlotId(u32::MAX), generation: Generation(0xff_ffff) };
    let destination = Destination {
        id,
        session: SessionGeneration(1),
        tokens: u32::MAX,
        prefix_tokens: u32::MAX,
        ids_hash: [0; 16],
        aux_index: u32::MAX,
        deadline_ms: u32::MAX,
        pages: [PageId(u32::MAX); 5000][..].into(),
    };
    let harmless = [
        Message::Destination(destination),
        Message::Abort(Abort { id, cause: Cause::PeerLost }),
        Message::AbortAck(AbortAck { id, quiet: true, cause: Cause::PeerLost }),
        Message::Done(Done { id }),
    ];
    let frame = |bytes: &[u8]| [&[0, bytes.len() as u8], bytes].concat();
    let fatal = [
        frame(&noise(1, 100)),
        frame(b""),
        [&[2][..], &u64::MAX.to_be_bytes()].concat(),
        [1, 0].repeat(ZMTP_PARTS_MAX + 1),
        vec![4, 3, 9, 9, 9],
    ];
    for bytes in &fatal {
        let mut peer = Stranger::dial(control, 1);
        peer.stream.write_all(bytes).unwrap();
        until_closed(&mut peer.stream);
        pair.check_works();
    }
    let mut peer = Stranger::dial(control, 2);
    for message in &harmless {
        peer.link.send(message).unwrap();
        peer.flush();
        pair.check_works();
    }
    // A peer that stops in the middle of a message is closed after a time.
    peer.stream.write_all(&[0, 200, 1, 2, 3]).unwrap();
    until_closed(&mut peer.stream);
    pair.check_unharmed(before);
}

/// A peer without the key gets no further than Hello. A peer with the key that sends a message with
/// a wrong seal loses its link.
#[test]
fn strangers_to_the_key_and_forgers_harm_themselves_alone() {
    let mut pair = Pair::with(Some(KeyFile::new(KEY)));
    let before = pair.resident();
    let [(_, control), (_, registry), _] = pair.ports();
    let key = |byte| Some(ClusterKey::new(&[byte; 40]).unwrap());
    for (number, key) in [(3, None), (4, key(KEY + 1))] {
        let mut peer = Stranger::dial_with(control, number, key);
        let id = TransferId { room: Room(1), slot: SlotId(0), generation: Generation(1) };
        let _ = peer.link.send(&Message::Abort(Abort { id, cause: Cause::PeerLost }));
        peer.flush();
        until_closed(&mut peer.stream);
        pair.check_works();
    }
    // The seal covers every byte of a message, and no message is valid twice.
    let bye = Message::Bye(Bye { cause: None });
    for (count, forged) in [Some(12), Some(20), None].into_iter().enumerate() {
        let mut peer = Stranger::dial_with(control, 5, key(KEY));
        peer.flush();
        peer.link.send(&bye).unwrap();
        let mut bytes = peer.link.transmit().to_vec();
        match forged {
            Some(at) => bytes[at] ^= 1,
            None => bytes = [&bytes[..], &bytes].concat(),
        }
        peer.stream.write_all(&bytes).unwrap();
        until_closed(&mut peer.stream);
        let begun = Instant::now();
        while pair.prefill.times_said("seal is missing or wrong") <= count {
            assert!(begun.elapsed() < PATIENCE, "it was closed for something else");
            thread::sleep(Duration::from_millis(5));
        }
        pair.check_works();
    }
    let mut stream = connect(registry);
    let body = r#"{"attn_tp_size":1,"attn_tp_rank":0,"rank_ip":"127.0.0.1","rank_port":1}"#;
    let length = body.len();
    let put = format!(
        "PUT /route HTTP/1.1\r\nhost: t\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n\
         {body}"
    );
    stream.write_all(put.as_bytes()).unwrap();
    let said = String::from_utf8(until_closed(&mut stream)).unwrap();
    assert!(said.starts_with("HTTP/1.1 401"), "{said}");
    drop(pair.key.take());
    pair.check_unharmed(before);
}

/// The time limit of a connection counts from its first byte, not from its last.
#[test]
fn a_slow_stranger_is_not_waited_for() {
    let mut pair = Pair::start();
    let before = pair.resident();
    let slow = pair.ports().map(|(port, address)| (port, thread::spawn(move || drip(address))));
    for (port, drip) in slow {
        pair.check_works();
        let taken = drip.join().unwrap();
        // The registry allows a minute for a request. It must only serve others meanwhile.
        assert!(
            port == "registry" || taken < GREETING,
            "the {port} port took {taken} bytes, one by one"
        );
    }
    pair.check_unharmed(before);
}

/// Sends a greeting and more in single bytes until the other side closes. Returns how many bytes it
/// took.
fn drip(address: SocketAddr) -> usize {
    let mut stream = connect(address);
    stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let begun = Instant::now();
    for (index, byte) in greeting().into_iter().chain([4; 16]).enumerate() {
        if stream.write_all(&[byte]).is_err() || begun.elapsed() > PATIENCE {
            return index;
        }
        // The answer is ignored; only the close counts.
        let waits = Instant::now();
        while let Some(left) = Duration::from_millis(300).checked_sub(waits.elapsed()) {
            match stream.read(&mut [0; 64]) {
                Ok(0) => return index,
                Ok(_) => thread::sleep(left.min(Duration::from_millis(50))),
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(_) => return index,
            }
        }
    }
    greeting().len() + 16
}

//! Attacks on the hand-off between workers that share a key, one test each
//! (`docs/operate/security.md`):
//! - handshakes and messages that are replayed, reflected, truncated or forged;
//! - wrong keys, and misuse of a right key;
//! - clients that name other hosts.
//!
//! Each attack costs the sender its connection. The hand-offs of others continue.

use crate::keys::KeyFile;
use crate::process::{Process, post};
use crate::stranger::{Framed, Stranger, bytes_of, connect, hello, registry, until_closed};
use crate::{body, choices, dual, prefill, start, with_room};
use baton::cause::Cause;
use baton::config::secret::Secret;
use baton::ids::{Generation, PageId, Room, SessionGeneration, SlotId};
use baton::registry::proof::{NONCE, PROOF, SignedRequest, prove};
use baton::transfer::transport::tcp::Preamble;
use baton::wire::auth::{ClusterKey, Keyring, Side};
use baton::wire::message::{Announce, Bye, Destination, Message, Proof, TransferId};
use serde_json::{Value, json};
use std::io::Write;
use std::net::{Shutdown, SocketAddr, TcpListener};
use std::thread;
use std::time::{Duration, Instant};

const KEY: u8 = b'k';
const WRONG_PROOF: &str = "peer has another cluster key than this worker\"";
const BYE: Message<'_> = Message::Bye(Bye { cause: None });

fn ring(byte: u8) -> Keyring {
    ClusterKey::new(&[byte; 40]).ok().into()
}

/// A prefill and a decode worker with a key, and working hand-offs.
struct Pair {
    prefill: Process,
    decode: Process,
    control: SocketAddr,
    room: u64,
    _key: KeyFile,
}

impl Pair {
    fn start() -> Pair {
        let key = KeyFile::new(KEY);
        let flags = ["--transfer", "tcp", "--cluster-key-file", key.path()];
        let (prefill, decode) = (prefill(&flags), start("decode", &flags));
        let control = SocketAddr::new(prefill.address.ip(), prefill.control_port);
        let mut pair = Pair { prefill, decode, control, room: 0, _key: key };
        pair.check_works();
        pair
    }

    #[track_caller]
    fn check_works(&mut self) {
        self.room += 1;
        let body = with_room(body(self.room as u32 % 9, 60, 4), &self.prefill, self.room);
        let (reader, writer) = dual(self.prefill.address, self.decode.address, body);
        choices(&reader);
        choices(&writer);
    }

    /// Only the pair's own link was ever opened, and `more` others.
    #[track_caller]
    fn check_unharmed(mut self, more: usize) {
        self.check_works();
        assert_eq!(self.prefill.times_said("control link from a decode worker is open"), 1 + more);
        assert_eq!(self.decode.times_said("control link to a prefill worker is open"), 1);
        for worker in [&mut self.prefill, &mut self.decode] {
            worker.await_idle();
            worker.check_alive();
        }
    }
}

/// A recorded handshake opens no second link, because the other side's Hello has another nonce.
#[test]
fn a_replayed_handshake_proves_nothing() {
    let mut pair = Pair::start();
    let genuine = Stranger::dial_with(pair.control, 7, ring(KEY));
    assert!(genuine.link.peer().is_some(), "it opened");
    let recorded = genuine.sent.clone();
    drop(genuine);
    for times in 1..=2 {
        let mut again = connect(pair.control);
        again.write_all(&recorded).unwrap();
        until_closed(&mut again);
        pair.prefill.await_times(WRONG_PROOF, times);
        pair.check_works();
    }
    pair.check_unharmed(1);
}

/// A sealed message is valid once, on its own connection.
#[test]
fn a_replayed_message_ends_the_link_that_it_came_on() {
    let mut pair = Pair::start();
    let seal = "seal is missing or wrong";
    let mut one = Stranger::dial_with(pair.control, 7, ring(KEY));
    let before = one.sent.len();
    one.say(&BYE);
    let sealed = one.sent[before..].to_vec();
    one.stream.write_all(&sealed).unwrap();
    until_closed(&mut one.stream);
    pair.prefill.await_times(seal, 1);
    let mut other = Stranger::dial_with(pair.control, 8, ring(KEY));
    other.stream.write_all(&sealed).unwrap();
    until_closed(&mut other.stream);
    pair.prefill.await_times(seal, 2);
    pair.check_works();
    pair.check_unharmed(2);
}

/// A peer without a key sends the worker's own proof back, from this connection or another, under
/// its own Hello or the worker's.
#[test]
fn a_reflected_proof_proves_nothing() {
    let mut pair = Pair::start();
    let ours = bytes_of(&Message::Hello(hello(Side::Dialer, 9, &ring(KEY))));
    let handshake = |own: Option<&[u8]>| {
        let mut framed = Framed::dial(pair.control);
        let theirs = framed.hear().remove(0);
        framed.say(&[own.unwrap_or(&theirs)]);
        let proof = framed.hear().remove(0);
        (framed, proof)
    };
    let (_other, proof_of_other) = handshake(Some(&ours));
    for (times, own) in [(1, Some(&ours[..])), (3, None)] {
        let (mut framed, proof) = handshake(own);
        framed.say(&[&proof]);
        until_closed(&mut framed.stream);
        let (mut framed, _) = handshake(own);
        framed.say(&[&proof_of_other]);
        until_closed(&mut framed.stream);
        pair.prefill.await_times(WRONG_PROOF, times + 1);
    }
    pair.check_works();
    pair.check_unharmed(0);
}

#[test]
fn a_truncated_handshake_or_message_opens_nothing() {
    let mut pair = Pair::start();
    let mut genuine = Stranger::dial_with(pair.control, 7, ring(KEY));
    let handshake = genuine.sent.clone();
    for length in (0..handshake.len()).step_by(23) {
        let mut stream = connect(pair.control);
        stream.write_all(&handshake[..length]).unwrap();
        let _ = stream.shutdown(Shutdown::Write);
        until_closed(&mut stream);
    }
    // The last part of a message is its seal. Here it is removed, and all lengths are corrected.
    genuine.link.send(&BYE).unwrap();
    let mut message = genuine.link.transmit().to_vec();
    assert_eq!(
        (message[0], message[message.len() - 18..][..2].to_vec()),
        (1, vec![0, 16]),
        "two frames"
    );
    message.truncate(message.len() - 18);
    (message[0], message[2 + 6]) = (0, 0);
    genuine.stream.write_all(&message).unwrap();
    until_closed(&mut genuine.stream);
    pair.prefill.await_times("seal is missing or wrong", 1);
    pair.check_works();
    pair.check_unharmed(1);
}

/// An invented proof, a proof by another key under the right name, or a message in its place.
#[test]
fn a_forged_proof_proves_nothing() {
    let mut pair = Pair::start();
    let ours = bytes_of(&Message::Hello(hello(Side::Dialer, 9, &ring(KEY))));
    let other = ClusterKey::new(&[KEY + 1; 40]).unwrap();
    for times in 1..=2 {
        let mut framed = Framed::dial(pair.control);
        let theirs = framed.hear().remove(0);
        framed.say(&[&ours]);
        let hellos = baton::wire::auth::Hellos { dialer: &ours, acceptor: &theirs };
        let tag = if times == 1 { [0x5a; 32] } else { other.proof(Side::Dialer, &hellos) };
        framed.say(&[&bytes_of(&Message::Proof(Proof { tag }))]);
        until_closed(&mut framed.stream);
        pair.prefill.await_times(WRONG_PROOF, times);
    }
    let mut framed = Framed::dial(pair.control);
    framed.say(&[&ours]);
    framed.say(&[&bytes_of(&BYE)]);
    until_closed(&mut framed.stream);
    pair.prefill.await_times("peer has no cluster key, this worker has one", 1);
    pair.check_works();
    pair.check_unharmed(0);
}

/// The proof covers the identity: if the incarnation is changed on the way, it fails.
#[test]
fn a_proof_is_of_one_identity_and_incarnation() {
    let mut pair = Pair::start();
    for (times, alter) in [(1, alter_id as fn(&mut [u8])), (2, alter_incarnation), (3, alter_nonce)]
    {
        let mut peer = Stranger::dial_altered(pair.control, 7, ring(KEY), alter);
        until_closed(&mut peer.stream);
        pair.prefill.await_times(WRONG_PROOF, times);
    }
    pair.check_works();
    pair.check_unharmed(0);
}

/// In a Hello of stranger 7, ID and incarnation are 32 sevens. The nonce has as many sevens after
/// other bytes.
fn alter(bytes: &mut [u8], at: usize) {
    if let Some(found) = bytes.windows(32).position(|window| window == [7; 32]) {
        bytes[found + at] ^= 1;
    }
}

fn alter_id(bytes: &mut [u8]) {
    alter(bytes, 0);
}

fn alter_incarnation(bytes: &mut [u8]) {
    alter(bytes, 16);
}

fn alter_nonce(bytes: &mut [u8]) {
    if let Some(found) = bytes.windows(32).rposition(|window| window == [7; 32]) {
        bytes[found] ^= 1;
    }
}

/// Both sides log which key is missing, and neither sends a key.
#[test]
fn a_peer_with_another_key_is_told_by_the_keys_names() {
    let mut pair = Pair::start();
    let mut peer = Stranger::dial_with(pair.control, 7, ring(KEY + 1));
    until_closed(&mut peer.stream);
    let name = ring(KEY + 1).ids()[0];
    pair.prefill.await_times(&format!("it proves key {name}, which is not here"), 1);
    pair.check_works();
    pair.check_unharmed(0);
    let (one, two) = (KeyFile::new(b'1'), KeyFile::new(b'2'));
    let [one_name, two_name] = [b'1', b'2'].map(|byte| ring(byte).ids()[0]);
    let with = |role: &str, keys: &[&KeyFile]| {
        let flags: Vec<&str> =
            keys.iter().flat_map(|key| ["--cluster-key-file", key.path()]).collect();
        if role == "prefill" { prefill(&flags) } else { start(role, &flags) }
    };
    // During a key rotation, and after it.
    let (old, new) = (with("prefill", &[&one, &two]), with("decode", &[&two, &one]));
    choices(&dual(old.address, new.address, with_room(body(1, 20, 4), &old, 1)).1);
    let last = with("decode", &[&two]);
    let (status, text) = last.post("/v1/completions", &with_room(body(1, 20, 4), &old, 2));
    assert!(status == 502 && text.contains("incompatible"), "{status} {text}");
    last.await_times(&format!("it proves key {one_name}, which is not here"), 1);
    old.await_times(&format!("it does not have key {one_name}, which is proven here"), 1);
    for worker in [&old, &new] {
        assert!(worker.has_said(&one_name.to_string()) && worker.has_said(&two_name.to_string()));
    }
}

/// A process that takes a prefill worker's port without the key learns only the dialler's identity,
/// and nothing about its memory.
#[test]
fn an_impostor_without_the_key_is_announced_nothing() {
    let key = KeyFile::new(KEY);
    let decode = start("decode", &["--transfer", "tcp", "--cluster-key-file", key.path()]);
    let control = TcpListener::bind("127.0.0.1:0").unwrap();
    let registry = registry(None, control.local_addr().unwrap().port());
    for (room, keys) in [(1, Keyring::default()), (2, ring(KEY + 1))] {
        let asked = asking(&decode, "127.0.0.1", registry.port(), room);
        let mut impostor = Stranger::accept(&control, 3, keys);
        assert_eq!(impostor.next(|message| format!("{message:?}")), None);
        let (status, text) = asked.join().unwrap();
        assert_eq!(status, 502, "{text}");
        // Waits until the decode worker dials again.
        thread::sleep(baton::limits::DIAL_HOLD_OFF + Duration::from_millis(200));
    }
    decode.await_idle();
}

fn asking(decode: &Process, host: &str, port: u16, room: u64) -> thread::JoinHandle<(u16, String)> {
    let mut body = body(1, 60, 4);
    body["bootstrap_host"] = json!(host);
    body["bootstrap_port"] = json!(port);
    body["bootstrap_room"] = json!(room);
    let address = decode.address;
    thread::spawn(move || post(address, "/v1/completions", &body.to_string()))
}

/// What a real decode worker announces to a peer with its keys.
pub fn announced(decode: &Process, keys: impl Into<Keyring>) -> Announce {
    let control = TcpListener::bind("127.0.0.1:0").unwrap();
    let registry = registry(None, control.local_addr().unwrap().port());
    let asked = asking(decode, "127.0.0.1", registry.port(), 77);
    let mut impostor = Stranger::accept(&control, 4, keys);
    let announce = impostor.next(|message| match message {
        Message::Announce(announce) => Some((**announce).clone()),
        _ => None,
    });
    drop(impostor);
    assert_eq!(asked.join().unwrap().0, 502);
    announce.flatten().expect("an Announce")
}

#[test]
fn a_peer_with_the_key_announces_nothing_beyond_its_regions() {
    let mut pair = Pair::start();
    let good = announced(&pair.decode, ring(KEY));
    type Change = fn(&mut Announce);
    let changes: [(&str, Change); 8] = [
        ("more pages than its region holds", |bad| bad.kv.pages += 1),
        ("all pages there can be", |bad| bad.kv.pages = u32::MAX),
        ("a region too short", |bad| bad.ranks[0].regions.kv -= 1),
        ("pages that reach beyond 64 bits", |bad| bad.kv.page_stride = u64::MAX / 2),
        ("heads that reach beyond 64 bits", |bad| bad.kv.head_stride = u64::MAX),
        ("ranks that are not there", |bad| (bad.kv.ranks, bad.kv.rank_stride) = (64, u64::MAX / 8)),
        ("elements of no type", |bad| bad.kv.dtype = 9),
        ("another model", |bad| bad.fingerprint.weights[0] ^= 1),
    ];
    let mut links = 0;
    for (what, change) in changes {
        let mut announce = good.clone();
        change(&mut announce);
        let mut peer = Stranger::dial_with(pair.control, 7, ring(KEY));
        links += 1;
        peer.say(&Message::Announce(Box::new(announce)));
        let answer = peer.next(|message| format!("{message:?}"));
        assert!(
            answer.as_ref().is_some_and(|answer| answer.starts_with("Refused")),
            "{what}: {answer:?}"
        );
        pair.check_works();
    }
    // A valid session with requests outside the announced regions.
    let data = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut announce = good;
    if let Some(tcp) = &mut announce.ranks[0].tcp {
        tcp.address = data.local_addr().unwrap();
    }
    let mut peer = Stranger::dial_with(pair.control, 7, ring(KEY));
    peer.say(&Message::Announce(Box::new(announce.clone())));
    let welcome = peer.next(|message| format!("{message:?}")).expect("an answer");
    assert!(welcome.starts_with("Welcome"), "{welcome}");
    let (pool, slots) = (announce.kv.pages, announce.aux.slots);
    let wish =
        |peer: &mut Stranger, room: u64, tokens: u32, prefix_tokens: u32, page: u32, slot: u32| {
            let id = TransferId { room: Room(room), slot: SlotId(slot), generation: Generation(1) };
            peer.say(&Message::Destination(Destination {
                id,
                session: announce.session,
                tokens,
                prefix_tokens,
                ids_hash: [0; 16],
                aux_index: slot,
                deadline_ms: 60_000,
                pages: [PageId(page)][..].into(),
            }));
            let refused = peer.next(|message| match message {
                Message::AbortAck(ack) => Some((ack.id, ack.quiet, ack.cause)),
                _ => None,
            });
            (refused.flatten(), Some((id, true, Cause::Mismatch)))
        };
    for (at, (tokens, prefix, page, slot)) in
        [(1, 0, pool, 0), (1, 0, u32::MAX, 0), (1, 0, 0, slots), (40, 0, 0, 0), (9, 3, 0, 0)]
            .into_iter()
            .enumerate()
    {
        let (answer, refusal) = wish(&mut peer, 5000 + at as u64, tokens, prefix, page, slot);
        assert_eq!(answer, refusal, "wish {at}");
    }
    pair.check_works();
    // A prefix longer than the prompt is invalid and costs the link.
    assert_eq!(wish(&mut peer, 5100, 1, 16, 0, 0).0, None);
    pair.check_works();
    drop(peer);
    // The decode worker has also linked to the impostor.
    assert_eq!(pair.decode.times_said("control link to a prefill worker is open"), 2);
    pair.check_works();
    assert_eq!(pair.prefill.times_said("control link from a decode worker is open"), 2 + links);
    pair.prefill.check_alive();
    pair.decode.check_alive();
}

/// A lane's token is valid as long as its session. The token of a closed session opens nothing.
#[test]
fn a_lane_opens_nothing_once_its_session_is_over() {
    let mut pair = Pair::start();
    let announce = announced(&pair.decode, ring(KEY));
    let token = announce.ranks[0].tcp.expect("lanes").token;
    let data = SocketAddr::new(pair.decode.address.ip(), pair.decode.data_port);
    let lanes = announce.ranks[0].lanes;
    for session in
        [announce.session, SessionGeneration(announce.session.0 + 1), SessionGeneration(1)]
    {
        let begun = Instant::now();
        let mut lane = connect(data);
        lane.write_all(&Preamble { token, session, lane: 0, lanes }.encode()).unwrap();
        until_closed(&mut lane);
        // A lane of an expected session would stay open as long.
        assert!(begun.elapsed() < baton::limits::SESSION_SETUP_DEADLINE, "it was kept");
    }
    pair.check_works();
    pair.decode.check_alive();
}

/// A recorded write to the registry cannot be repeated or changed. Without the key no write is
/// possible.
#[test]
fn a_registry_takes_no_write_twice_and_none_without_the_key() {
    let mut pair = Pair::start();
    let registry = SocketAddr::new(pair.prefill.address.ip(), pair.prefill.bootstrap_port);
    let ask = |request: String| {
        let mut stream = connect(registry);
        stream.write_all(request.as_bytes()).unwrap();
        let said = String::from_utf8(until_closed(&mut stream)).unwrap();
        let (head, body) = said.split_once("\r\n\r\n").expect("an answer");
        (head[9..12].to_owned(), body.to_owned())
    };
    let challenge = || {
        let (status, told) = ask(
            "POST /challenge HTTP/1.1\r\nhost: t\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
                .into(),
        );
        assert_eq!(status, "200");
        let told: Value = serde_json::from_str(&told).unwrap();
        told["nonce"].as_str().unwrap().to_owned()
    };
    let placement = |room: u64| format!(r#"{{"bootstrap_room":{room},"dp_rank":3}}"#);
    let write = |body: &str, nonce: &str, proof: &str| {
        let length = body.len();
        let fields = format!("{NONCE}: {nonce}\r\n{PROOF}: {proof}\r\n");
        let head = "POST /register_dp_rank HTTP/1.1\r\nhost: t\r\nconnection: close\r\n";
        ask(format!("{head}{fields}content-length: {length}\r\n\r\n{body}")).0
    };
    let proof = |key: u8, nonce: &str, body: &str| {
        let asked =
            SignedRequest { method: "POST", path: "/register_dp_rank", body: body.as_bytes() };
        prove(&Secret::of_bytes(&[key; 40]), asked, nonce)
    };
    let (nonce, body) = (challenge(), placement(1));
    assert_eq!(write(&body, &nonce, &proof(KEY, &nonce, &body)), "200");
    assert_eq!(write(&body, &nonce, &proof(KEY, &nonce, &body)), "401", "replayed");
    let nonce = challenge();
    assert_eq!(write(&placement(2), &nonce, &proof(KEY, &nonce, &body)), "401", "another body");
    assert_eq!(
        write(&body, &nonce, &proof(KEY, &nonce, &body)),
        "200",
        "a wrong proof uses nothing up"
    );
    let nonce = challenge();
    assert_eq!(write(&body, &nonce, &proof(KEY + 1, &nonce, &body)), "401", "another key");
    let own = "00".repeat(16);
    assert_eq!(write(&body, &own, &proof(KEY, &own, &body)), "401", "a nonce of its own");
    assert_eq!(write(&body, &challenge(), ""), "401", "no proof");
    pair.check_works();
    pair.check_unharmed(0);
}

/// A client names hosts outside the cluster. None of them is dialled.
#[test]
fn a_client_cannot_send_a_worker_elsewhere() {
    let mut pair = Pair::start();
    let foreign = [
        "192.0.2.1",
        "10.1.2.3",
        "169.254.169.254",
        "[::ffff:192.0.2.1]",
        "2001:db8::1",
        "0.0.0.0",
        "2.2.2.2",
        "no-such-host.invalid",
        "127.0.0.1.example.invalid",
        "http://127.0.0.1",
        "user@127.0.0.1",
        "127.0.0.1/../",
        "127.0.0.1\r\nx: y",
        "",
    ];
    for (at, host) in foreign.into_iter().enumerate() {
        let (status, text) = asking(&pair.decode, host, 80, 100 + at as u64).join().unwrap();
        assert!(matches!(status, 400 | 502), "{host:?}: {status} {text}");
        pair.check_works();
    }
    assert!(pair.decode.times_said("lies in no network of --bootstrap-allow") >= 6);
    // An allowed registry names a host that is not allowed.
    let (status, text) =
        asking(&pair.decode, "127.0.0.1", registry(Some("192.0.2.1"), 80).port(), 200)
            .join()
            .unwrap();
    assert_eq!(status, 502, "{text}");
    pair.decode.await_times("the registry's control_host 192.0.2.1 lies in no network", 1);
    // Another service on this host receives one query, and nothing of the request.
    let service = TcpListener::bind("127.0.0.1:0").unwrap();
    let asked = asking(&pair.decode, "127.0.0.1", service.local_addr().unwrap().port(), 300);
    let (mut stream, _) = service.accept().unwrap();
    let mut heard = [0; 4096];
    let count = std::io::Read::read(&mut stream, &mut heard).unwrap();
    assert!(heard[..count].starts_with(b"GET /route?prefill_dp_rank=-1"));
    stream.write_all(b"SSH-2.0-what\r\n\r\n").unwrap();
    assert_eq!(asked.join().unwrap().0, 502);
    pair.check_unharmed(0);
}

/// Many connections without a handshake keep no worker out, and their number is bounded.
#[test]
fn strangers_are_few_and_the_oldest_go_first() {
    let mut pair = Pair::start();
    let mut crowd: Vec<_> = (0..200).map(|_| connect(pair.control)).collect();
    pair.prefill
        .await_times("too many connections are unproven, and this one is the oldest", 200 - 64);
    // A worker that connects last is accepted at once.
    let peer = Stranger::dial_with(pair.control, 7, ring(KEY));
    assert!(peer.link.peer().is_some());
    crowd.iter_mut().for_each(|stream| drop(until_closed(stream)));
    drop(peer);
    pair.check_works();
    pair.check_unharmed(1);
}

/// Workers that differ in what a hand-off needs are never paired, though each is healthy.
#[test]
fn a_router_never_pairs_workers_that_do_not_fit() {
    let (reader, narrow) = (prefill(&[]), start("decode", &["--kv-dtype", "f16"]));
    let url = |worker: &Process| format!("http://{}", worker.address);
    let port = reader.bootstrap_port.to_string();
    let wide = start("decode", &[]);
    let more = ["--prefill", &url(&reader), &port, "--decode", &url(&narrow)];
    let route = |more: &[&str]| Process::start(&[&["router", "--port", "0"], more].concat());
    let alone = route(&more);
    alone.await_times("worker is up", 2);
    alone.await_times("two workers do not fit", 1);
    assert!(alone.has_said("kv differs: "));
    assert_eq!(alone.get("/readiness").0, 503);
    let (status, text) = alone.post("/v1/completions", &body(1, 20, 4).to_string());
    assert!(status == 503 && text.contains("fits a reachable prefill worker"), "{status} {text}");
    let both = route(&[&more[..], &["--decode", &url(&wide)]].concat());
    both.await_times("worker is up", 3);
    for salt in 0..6 {
        choices(&both.post("/v1/completions", &body(salt, 20, 4).to_string()));
    }
    assert_eq!(narrow.metric("baton_request_failures_total{", ""), 0.0);
    let info: Value = serde_json::from_str(&reader.get("/server_info").1).unwrap();
    assert_eq!(info["handoff"]["wire"], json!("3.4"));
}

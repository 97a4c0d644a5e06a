//! HTTPS, and secrets that are replaced while the process runs.

use crate::process::{PATIENCE, Process, get, post_with};
use crate::{MODEL, body, choices, dual, prefill, start, with_room};
use baton::limits::{NET_HANDSHAKE_TIME, NET_HANDSHAKES_MAX};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{
    ClientConfig, ClientConnection, DEFAULT_VERSIONS, RootCertStore, ServerConfig,
    ServerConnection, StreamOwned, SupportedProtocolVersion,
};
use serde_json::json;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fs, thread};

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/certificates");

pub type Secured = StreamOwned<ClientConnection, TcpStream>;

pub fn fixture(name: &str) -> PathBuf {
    Path::new(FIXTURES).join(name)
}

fn certificate(name: &str) -> CertificateDer<'static> {
    CertificateDer::from_pem_file(fixture(name)).unwrap()
}

/// A client that trusts only the test's certificate authority.
fn session(versions: &[&'static SupportedProtocolVersion]) -> ClientConnection {
    let mut roots = RootCertStore::empty();
    roots.add(certificate("ca.pem")).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(versions)
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").unwrap();
    ClientConnection::new(Arc::new(config), name).unwrap()
}

/// A server's session with this certificate.
pub fn server_session(name: &str) -> ServerConnection {
    let key = PrivateKeyDer::from_pem_file(fixture(&format!("{name}.key"))).unwrap();
    let config =
        ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate(&format!("{name}.pem"))], key)
            .unwrap();
    ServerConnection::new(Arc::new(config)).unwrap()
}

pub fn connect(address: SocketAddr) -> Secured {
    let tcp = TcpStream::connect(address).unwrap();
    tcp.set_read_timeout(Some(PATIENCE)).unwrap();
    StreamOwned::new(session(DEFAULT_VERSIONS), tcp)
}

pub fn ask(stream: &mut Secured, fields: &str, body: &str) {
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: t\r\n{fields}content-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(&[head.as_bytes(), body.as_bytes()].concat()).unwrap();
}

pub fn fetch(address: SocketAddr, path: &str) -> String {
    let mut stream = connect(address);
    stream
        .write_all(
            format!("GET {path} HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n").as_bytes(),
        )
        .unwrap();
    rest(stream)
}

pub fn rest(mut stream: Secured) -> String {
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

/// The certificate that a server shows now.
fn shown(address: SocketAddr) -> CertificateDer<'static> {
    let mut stream = connect(address);
    stream.flush().unwrap();
    ask(&mut stream, "connection: close\r\n", "{}");
    let shown = stream.conn.peer_certificates().expect("a handshake")[0].clone().into_owned();
    assert!(rest(stream).starts_with("HTTP/1.1 "));
    shown
}

/// Files that can be replaced, in a directory that is removed on drop.
pub struct Files(PathBuf);

impl Files {
    pub fn new(name: &str) -> Files {
        let path = std::env::temp_dir().join(format!("baton-tls-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Files(path)
    }

    /// Replaces a file by another complete one.
    pub fn put(&self, name: &str, bytes: &[u8]) -> String {
        let (path, new) = (self.0.join(name), self.0.join("new"));
        fs::write(&new, bytes).unwrap();
        fs::rename(&new, &path).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn put_identity(&self, of: &str) -> [String; 2] {
        ["pem", "key"].map(|kind| {
            self.put(
                &format!("server.{kind}"),
                &fs::read(fixture(&format!("{of}.{kind}"))).unwrap(),
            )
        })
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

pub fn hang_up(process: &Process) {
    process.signal("HUP");
}

#[track_caller]
fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "never {what}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// Both servers that clients use.
fn servers(files: &Files, with: impl Fn(&[&str])) {
    let [cert, key] = files.put_identity("one");
    with(&["--tls-cert-file", &cert, "--tls-key-file", &key]);
    with(&["--ssl-certfile", &cert, "--ssl-keyfile", &key]);
}

#[test]
fn clients_of_each_version_of_tls_are_served() {
    let files = Files::new("versions");
    let [cert, key] = files.put_identity("one");
    let server = start("serve", &["--tls-cert-file", &cert, "--tls-key-file", &key]);
    for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
        let tcp = TcpStream::connect(server.address).unwrap();
        tcp.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut stream = StreamOwned::new(session(&[version]), tcp);
        stream.write_all(b"GET /health HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n").unwrap();
        assert_eq!(stream.conn.protocol_version(), Some(version.version));
        let answer = rest(stream);
        assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("OK"), "{answer}");
    }
}

#[test]
fn clients_are_served_over_tls() {
    let files = Files::new("served");
    servers(&files, |flags| {
        let mut server = start("serve", flags);
        let address = server.address;
        // A body of many records, a stream of many events, and a second request on the connection.
        let asked = json!({"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": true,
            "stream": true, "return_token_ids": true, "note": "x".repeat(1 << 20)});
        let mut stream = connect(address);
        ask(&mut stream, "", &asked.to_string());
        ask(
            &mut stream,
            "connection: close\r\n",
            &json!({"prompt": [5], "max_tokens": 2}).to_string(),
        );
        let answer = rest(stream);
        assert_eq!(answer.matches("HTTP/1.1 200").count(), 2, "{answer}");
        assert!(
            answer.matches("data: ").count() >= 200 && answer.contains("data: [DONE]"),
            "{answer}"
        );
        // An announced end means that no requests follow. Answers still arrive.
        let mut stream = connect(address);
        ask(&mut stream, "", &asked.to_string());
        stream.conn.send_close_notify();
        stream.flush().unwrap();
        assert!(rest(stream).contains("data: [DONE]"));
        // A client without TLS is answered that this port speaks HTTPS.
        let mut plain = TcpStream::connect(address).unwrap();
        plain.set_read_timeout(Some(PATIENCE)).unwrap();
        plain.write_all(b"GET /health HTTP/1.1\r\nhost: t\r\n\r\n").unwrap();
        let mut got = Vec::new();
        let _ = plain.read_to_end(&mut got);
        let got = String::from_utf8_lossy(&got);
        assert!(
            got.starts_with("HTTP/1.1 400") && got.contains("this port only speaks HTTPS"),
            "{got}"
        );
        let (head, body) = got.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}\r\n", body.len())), "{got}");
        server.check_alive();
    });
}

/// Each byte of a client's first message can arrive alone. Any byte except the first can be a
/// letter.
#[test]
fn a_handshake_may_come_byte_by_byte() {
    let files = Files::new("slowly");
    let [cert, key] = files.put_identity("one");
    let router = Process::start(&[
        "router",
        "--port",
        "0",
        "--tls-cert-file",
        &cert,
        "--tls-key-file",
        &key,
    ]);
    let mut stream = connect(router.address);
    stream.sock.set_nodelay(true).unwrap();
    let mut hello = Vec::new();
    stream.conn.write_tls(&mut hello).unwrap();
    assert!(
        hello[1..].iter().any(u8::is_ascii_uppercase),
        "some byte that could be taken for HTTP's"
    );
    for byte in hello {
        stream.sock.write_all(&[byte]).unwrap();
        thread::sleep(Duration::from_millis(2));
    }
    ask(&mut stream, "connection: close\r\n", "{}");
    assert!(rest(stream).starts_with("HTTP/1.1 "));
}

/// Connections that never finish their handshake keep no other client out.
#[test]
fn handshakes_are_bounded_in_number() {
    let files = Files::new("bounded");
    let [cert, key] = files.put_identity("one");
    let mut router = Process::start(&[
        "router",
        "--port",
        "0",
        "--tls-cert-file",
        &cert,
        "--tls-key-file",
        &key,
    ]);
    let idle: Vec<TcpStream> =
        (0..NET_HANDSHAKES_MAX + 20).map(|_| TcpStream::connect(router.address).unwrap()).collect();
    assert_eq!(shown(router.address), certificate("one.pem"));
    let mut oldest = &idle[0];
    oldest.set_read_timeout(Some(NET_HANDSHAKE_TIME / 2)).unwrap();
    let gave_way = match oldest.read(&mut [0]) {
        Ok(count) => count == 0,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    };
    assert!(gave_way, "the oldest waits on, and its time is not up");
    router.check_alive();
}

#[test]
fn a_certificate_is_exchanged_while_streams_run() {
    let files = Files::new("exchanged");
    let [cert, key] = files.put_identity("one");
    let server = start("serve", &["--tls-cert-file", &cert, "--tls-key-file", &key]);
    let address = server.address;
    assert_eq!(shown(address), certificate("one.pem"));
    let mut stream = connect(address);
    let asked = json!({"prompt": [5], "max_tokens": 400, "ignore_eos": true, "stream": true});
    ask(&mut stream, "connection: close\r\n", &asked.to_string());
    stream.flush().unwrap();
    files.put_identity("two");
    hang_up(&server);
    wait_until("the other certificate", || shown(address) == certificate("two.pem"));
    assert!(rest(stream).contains("data: [DONE]"), "open streams stay");
    // A certificate that does not belong to its key: the old one stays.
    files.put("server.pem", &fs::read(fixture("one.pem")).unwrap());
    hang_up(&server);
    server.await_said("the old content stays in use");
    assert_eq!(shown(address), certificate("two.pem"));
    // A changed file is found without a signal.
    files.put_identity("one");
    wait_until("the first certificate again", || shown(address) == certificate("one.pem"));
}

#[test]
fn keys_of_clients_are_exchanged() {
    let files = Files::new("clients");
    // Each process has its own file, so that it logs nothing before its turn.
    let [at_server, at_router] =
        ["server.keys", "router.keys"].map(|name| files.put(name, b"first\n"));
    let server = start("serve", &["--api-key-file", &at_server]);
    let router = Process::start(&["router", "--port", "0", "--api-key-file", &at_router]);
    let status = |process: &Process, key: &str| {
        let fields = format!("authorization: Bearer {key}\r\n");
        post_with(process.address, "/v1/completions", &fields, "{}").0
    };
    for (process, name) in [(&server, "server.keys"), (&router, "router.keys")] {
        assert_ne!(status(process, "first"), 401);
        files.put(name, b"second\n");
        hang_up(process);
        wait_until("the second key", || status(process, "second") != 401);
        assert_eq!(status(process, "first"), 401);
        files.put(name, b"\n");
        hang_up(process);
        process.await_said("the old content stays in use");
        assert_ne!(status(process, "second"), 401);
    }
}

/// Established links stay; new ones use the new key.
#[test]
fn the_key_of_the_cluster_is_exchanged() {
    let files = Files::new("cluster");
    let key = files.put("key", &[1; 40]);
    let flags = ["--cluster-key-file", key.as_str()];
    let (reader, writer) = (prefill(&flags), start("decode", &flags));
    let hand_over = |reader: &Process, writer: &Process, room: u64| {
        let asked = with_room(body(room as u32, 40, 4), reader, room);
        let (_, answer) = dual(reader.address, writer.address, asked);
        answer
    };
    choices(&hand_over(&reader, &writer, 1));
    files.put("key", &[2; 40]);
    hang_up(&reader);
    reader.await_said("file reloaded");
    choices(&hand_over(&reader, &writer, 2));
    let newcomer = start("decode", &flags);
    choices(&hand_over(&reader, &newcomer, 3));
    let old = files.put("old", &[1; 40]);
    let late = start("decode", &["--cluster-key-file", &old]);
    let asked = with_room(body(4, 40, 4), &reader, 4);
    let (status, _) =
        post_with(late.address, "/v1/completions", "x-request-timeout-ms: 2000\r\n", &asked);
    assert_ne!(status, 200, "the old key is no longer taken");
    let told = |process: &Process| get(process.address, "/server_info").1;
    let ids =
        |text: &str| text.split_once("\"cluster_keys\":").map(|(_, rest)| rest[..12].to_owned());
    assert_eq!(ids(&told(&reader)), ids(&told(&newcomer)), "routers see it");
    assert_ne!(ids(&told(&reader)), ids(&told(&late)));
}

#[test]
fn a_wrong_certificate_or_key_file_ends_the_start() {
    let path = |name| fixture(name).to_str().unwrap().to_owned();
    for (cert, key, why) in [
        (path("one.pem"), path("two.key"), "one.pem"),
        (path("one.key"), path("one.key"), "holds no certificate"),
        (path("one.pem"), path("one.pem"), "holds no private key"),
        (path("none.pem"), path("one.key"), "none.pem"),
        (path("v1.pem"), path("v1.key"), "not of X.509 version 3"),
    ] {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_baton"))
            .args(["serve", MODEL, "--port", "0", "--tls-cert-file", &cert, "--tls-key-file", &key])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(why), "{said}");
        assert!(!said.contains("model"), "before a model is read: {said}");
    }
}

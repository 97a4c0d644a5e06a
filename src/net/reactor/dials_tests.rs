//! Dialled connections over TLS, against blocking servers over loopback.

use super::*;
use crate::limits::NET_TLS_READS_MAX;
use rustls::crypto::cipher::{MessageEncrypter, OutboundChunks, OutboundPlainMessage};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{
    ConnectionTrafficSecrets, ContentType, ProtocolVersion, ServerConfig, ServerConnection,
    StreamOwned, SupportedCipherSuite,
};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(20);
/// Longer than one record, and more than a socket takes at once.
const LONG: usize = 2 << 20;

fn fixture(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/certificates")).join(name)
}

fn believed() -> Authorities {
    Authorities::read(&fixture("ca.pem")).unwrap()
}

/// A server that runs `serve` on its first connection.
fn server<T: Send + 'static>(
    serve: impl FnOnce(TcpStream) -> T + Send + 'static,
) -> (SocketAddr, JoinHandle<T>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (address, thread::spawn(move || serve(listener.accept().unwrap().0)))
}

/// The server's end of a session.
fn accept(tcp: TcpStream) -> StreamOwned<ServerConnection, TcpStream> {
    let chain = vec![CertificateDer::from_pem_file(fixture("one.pem")).unwrap()];
    let key = PrivateKeyDer::from_pem_file(fixture("one.key")).unwrap();
    let mut config =
        ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .unwrap();
    config.enable_secret_extraction = true;
    StreamOwned::new(ServerConnection::new(Arc::new(config)).unwrap(), tcp)
}

/// Polls until the connection ends. Returns all received bytes, whether `Connected` came, and the
/// end.
fn to_the_end(reactor: &mut Reactor, conn: ConnId) -> (Vec<u8>, bool, Result<(), CloseReason>) {
    let deadline = Instant::now() + PATIENCE;
    let (mut bytes, mut is_told) = (Vec::new(), false);
    loop {
        while let Some(event) = reactor.next_event() {
            bytes.extend_from_slice(reactor.received(conn));
            reactor.consume(conn, reactor.received(conn).len());
            match event {
                Event::Connected(_) => is_told = true,
                Event::Eof(_) => return (bytes, is_told, Ok(())),
                Event::Closed { reason, .. } => return (bytes, is_told, Err(reason)),
                _ => {}
            }
        }
        assert!(Instant::now() < deadline, "the connection never ended");
        reactor.poll(Some(deadline)).unwrap();
    }
}

fn dial(reactor: &mut Reactor, address: SocketAddr, host: &str, within: Duration) -> ConnId {
    let until = Instant::now() + within;
    let conn = reactor.connect_secured(&address.into(), (&believed(), host), until).unwrap();
    reactor.send(conn, b"secret").unwrap();
    conn
}

#[test]
fn queued_data_follows_the_handshake_and_an_unannounced_end_is_an_error() {
    for announced in [true, false] {
        let (address, serves) = server(move |tcp| {
            let mut stream = accept(tcp);
            let mut got = [0; 6];
            stream.read_exact(&mut got).unwrap();
            stream.write_all(&vec![7; LONG]).unwrap();
            if announced {
                stream.conn.send_close_notify();
            }
            stream.flush().unwrap();
            got
        });
        let mut reactor = Reactor::new().unwrap();
        let conn = dial(&mut reactor, address, "localhost", PATIENCE);
        let (bytes, is_told, end) = to_the_end(&mut reactor, conn);
        assert!(is_told && bytes.len() == LONG);
        let expected =
            if announced { Ok(()) } else { Err(CloseReason::Io(ErrorKind::UnexpectedEof)) };
        assert_eq!(end, expected);
        assert_eq!(&serves.join().unwrap(), b"secret");
    }
}

/// Records with the session keys of a server, in its sending direction.
struct Records {
    tcp: TcpStream,
    encrypter: Box<dyn MessageEncrypter>,
    count: u64,
}

impl Records {
    /// Takes over a session after its handshake.
    fn of(stream: StreamOwned<ServerConnection, TcpStream>) -> Records {
        let StreamOwned { conn, sock } = stream;
        let Some(SupportedCipherSuite::Tls13(suite)) = conn.negotiated_cipher_suite() else {
            panic!()
        };
        let (count, secrets) = conn.dangerous_extract_secrets().unwrap().tx;
        let (ConnectionTrafficSecrets::Aes256Gcm { key, iv }
        | ConnectionTrafficSecrets::Aes128Gcm { key, iv }
        | ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv }) = secrets
        else {
            panic!()
        };
        Records { tcp: sock, encrypter: suite.aead_alg.encrypter(key, iv), count }
    }

    fn send(&mut self, typ: ContentType, bytes: &[u8]) {
        let payload = OutboundChunks::Single(bytes);
        let record = OutboundPlainMessage { typ, version: ProtocolVersion::TLSv1_3, payload };
        let sealed = self.encrypter.encrypt(record, self.count).unwrap();
        self.count += 1;
        self.tcp.write_all(&sealed.encode()).unwrap();
    }
}

/// A trusted server can send many records without data. The reactor must read them turn by turn.
#[test]
fn records_with_little_data_are_read_turn_by_turn() {
    const RECORDS: usize = 64;
    // The maximum number of reads, of one buffer each.
    const TURN: usize = NET_TLS_READS_MAX * (18 << 10);
    // NewSessionTicket: a lifetime, a mask of its age, no nonce, one byte of ticket, no extensions.
    let ticket = [4, 0, 0, 14, 0, 0, 14, 16, 0, 0, 0, 0, 0, 0, 1, 7, 0, 0];
    let record = ticket.repeat(800);
    let length = record.len();
    let (address, serves) = server(move |tcp| {
        let mut stream = accept(tcp);
        let mut got = [0; 6];
        stream.read_exact(&mut got).unwrap();
        let mut records = Records::of(stream);
        for at in 0..RECORDS {
            records.send(ContentType::Handshake, &record);
            // Only every second ticket record is followed by data.
            if at % 2 == 0 {
                records.send(ContentType::ApplicationData, b".");
            }
        }
        records.send(ContentType::ApplicationData, b"done");
        // Wait until the peer has read it.
        let _ = records.tcp.read(&mut got);
    });
    let mut reactor = Reactor::new().unwrap();
    let conn = dial(&mut reactor, address, "localhost", PATIENCE);
    let deadline = Instant::now() + PATIENCE;
    let (mut polls, mut bytes) = (0, Vec::new());
    while !bytes.ends_with(b"done") {
        assert!(Instant::now() < deadline, "the records were never read");
        reactor.poll(Some(deadline)).unwrap();
        polls += 1;
        while let Some(event) = reactor.next_event() {
            assert!(!matches!(event, Event::Closed { .. }), "{event:?}");
            bytes.extend_from_slice(reactor.received(conn));
            reactor.consume(conn, reactor.received(conn).len());
        }
    }
    assert_eq!(bytes.len(), RECORDS / 2 + 4);
    assert!(polls * TURN >= RECORDS * length, "{polls} turns were enough");
    drop(reactor);
    serves.join().unwrap();
}

#[test]
fn a_server_that_does_not_prove_its_identity_receives_no_data() {
    let answer: fn(TcpStream) -> Vec<u8> = |mut tcp| {
        let mut got = vec![0; 4096];
        let count = tcp.read(&mut got).unwrap();
        tcp.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        got.truncate(count);
        let _ = tcp.read_to_end(&mut got);
        got
    };
    let close: fn(TcpStream) -> Vec<u8> = |mut tcp| {
        let mut got = vec![0; 4096];
        let count = tcp.read(&mut got).unwrap();
        got.truncate(count);
        got
    };
    let is_silent: fn(TcpStream) -> Vec<u8> = |mut tcp| {
        let mut got = Vec::new();
        let _ = tcp.read_to_end(&mut got);
        got
    };
    let shows: fn(TcpStream) -> Vec<u8> = |tcp| {
        let mut got = Vec::new();
        let _ = accept(tcp).read_to_end(&mut got);
        got
    };
    for (serve, host, within, why) in [
        (answer, "localhost", PATIENCE, TlsError::Plain),
        (close, "localhost", PATIENCE, TlsError::Refused),
        (is_silent, "localhost", Duration::from_millis(200), TlsError::Slow),
        (shows, "elsewhere.test", PATIENCE, TlsError::Name),
    ] {
        let (address, serves) = server(serve);
        let mut reactor = Reactor::new().unwrap();
        let conn = dial(&mut reactor, address, host, within);
        let (bytes, is_told, end) = to_the_end(&mut reactor, conn);
        assert_eq!((bytes.len(), is_told, end), (0, false, Err(CloseReason::Tls(why))));
        assert_eq!((reactor.connections(), reactor.timers.len()), (0, 0));
        let got = serves.join().unwrap();
        assert!(!got.windows(6).any(|bytes| bytes == b"secret"), "{why}");
    }
}

#[test]
fn a_file_without_authorities_says_so() {
    for (name, why) in [("one.key", "holds no certificate"), ("none.pem", "none.pem")] {
        let error = Authorities::read(&fixture(name)).unwrap_err();
        assert!(error.contains(why), "{error}");
    }
}

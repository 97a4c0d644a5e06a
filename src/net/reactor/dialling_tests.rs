//! Dialled connections over TLS, against blocking servers over loopback.

use super::*;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(20);
/// Several records, and more than a socket takes at once.
const LONG: usize = 2 << 20;

fn fixture(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/certificates")).join(name)
}

fn believed() -> Authorities {
    Authorities::read(&fixture("ca.pem")).unwrap()
}

/// Somebody who listens, and does this with the first who connects.
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
    let config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    StreamOwned::new(ServerConnection::new(Arc::new(config)).unwrap(), tcp)
}

/// Polls until the connection ends: all that came, whether it was told of, and how it ended.
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
        assert!(Instant::now() < deadline, "it never ends");
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
fn what_was_queued_follows_the_handshake_and_an_end_that_is_not_announced_is_none() {
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
        let expected = if announced { Ok(()) } else { Err(CloseReason::Io(ErrorKind::UnexpectedEof)) };
        assert_eq!(end, expected);
        assert_eq!(&serves.join().unwrap(), b"secret");
    }
}

#[test]
fn who_does_not_show_who_it_is_is_told_nothing() {
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
        (answer, "localhost", PATIENCE, Distrust::Plain),
        (close, "localhost", PATIENCE, Distrust::Refused),
        (is_silent, "localhost", Duration::from_millis(200), Distrust::Slow),
        (shows, "elsewhere.test", PATIENCE, Distrust::Name),
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

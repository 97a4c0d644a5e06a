//! What a look at a process comes to, over TLS, against blocking servers over loopback. What the command makes of it is in
//! `tests/cluster/ending.rs`.

use super::*;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

fn fixture(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/certificates")).join(name)
}

fn believed() -> Authorities {
    Authorities::read(&fixture("ca.pem")).unwrap()
}

/// The server's end of a session.
fn accept(listener: &TcpListener) -> StreamOwned<ServerConnection, TcpStream> {
    let chain = vec![CertificateDer::from_pem_file(fixture("one.pem")).unwrap()];
    let key = PrivateKeyDer::from_pem_file(fixture("one.key")).unwrap();
    let config =
        ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .unwrap();
    let (tcp, _) = listener.accept().unwrap();
    StreamOwned::new(ServerConnection::new(Arc::new(config)).unwrap(), tcp)
}

fn answer_of_drain(listener: &TcpListener) {
    let mut stream = accept(listener);
    let mut asked = Vec::new();
    while !asked.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        asked.extend(byte);
    }
    let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{DRAINING}", DRAINING.len());
    stream.write_all(answer.as_bytes()).unwrap();
    stream.flush().unwrap();
}

/// What is said of a process that is looked at so often, and listens all the while: whether each look is answered, or cut off
/// before the handshake.
fn looked_at(looks: &'static [bool]) -> DrainError {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url: WorkerUrl =
        format!("https://localhost:{}", listener.local_addr().unwrap().port()).parse().unwrap();
    let serves: JoinHandle<TcpListener> = thread::spawn(move || {
        for is_answered in looks {
            match is_answered {
                true => answer_of_drain(&listener),
                false => drop(listener.accept().unwrap()),
            }
        }
        listener
    });
    let (authorities, mut looks) = (believed(), looks.iter());
    let at = At { url: &url, authorities: Some(&authorities) };
    let error = await_end(&at, || looks.next().is_some()).unwrap_err();
    serves.join().unwrap();
    error
}

/// Who is there and drains is stuck; of who cut off the last look nobody knows that.
#[test]
fn what_was_seen_last_is_told_when_time_is_up() {
    assert!(matches!(looked_at(&[true, true]), DrainError::Stuck));
    assert!(matches!(looked_at(&[true, false]), DrainError::Unseen(_)));
    assert!(
        matches!(looked_at(&[false, true]), DrainError::Stuck),
        "it was only cut off in between"
    );
}

/// Of the time for all there is some left for the second address, and for the handshake with who is there.
#[test]
fn an_address_that_drops_what_comes_leaves_the_next_its_share() {
    let [full, taken] = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let [drops, takes] = [&full, &taken].map(|listener| listener.local_addr().unwrap());
    let moment = Duration::from_millis(200);
    let mut waiting = Vec::new();
    let dropped = loop {
        match TcpStream::connect_timeout(&drops, moment) {
            Ok(stream) => waiting.push(stream),
            Err(error) => break error,
        }
    };
    assert_eq!(dropped.kind(), ErrorKind::TimedOut, "it has no room for more");
    let serves = thread::spawn(move || {
        let mut stream = accept(&taken);
        stream.write_all(b"here").unwrap();
        stream.flush().unwrap();
    });
    let stream = Timed::connect(&[drops, takes], Instant::now() + Duration::from_secs(4)).unwrap();
    let mut said = [0; 4];
    believed().secure(stream, "localhost").unwrap().read_exact(&mut said).unwrap();
    assert_eq!(&said, b"here");
    serves.join().unwrap();
}

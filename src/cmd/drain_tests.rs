//! Tests of the wait for a server's end over TLS, against blocking servers on loopback. Tests of
//! the command are in `tests/cluster/ends.rs`.

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

/// Accepts a TLS session as the server.
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

/// The error of a wait for a server that keeps listening. `looks` says for each check whether the
/// server answers it or cuts it off before the handshake.
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
    let at = DrainTarget { url: &url, authorities: Some(&authorities) };
    let error = await_end(&at, || looks.next().is_some()).unwrap_err();
    serves.join().unwrap();
    error
}

/// After an answered last check, the error is `Stuck`. After a cut-off one, it is `Unseen`.
#[test]
fn a_timeout_reports_the_result_of_the_last_check() {
    assert!(matches!(looked_at(&[true, true]), DrainError::Stuck));
    assert!(matches!(looked_at(&[true, false]), DrainError::Unseen(_)));
    assert!(
        matches!(looked_at(&[false, true]), DrainError::Stuck),
        "only a check before the last one was cut off"
    );
}

/// The second address gets enough of the time for its TLS handshake.
#[test]
fn an_address_that_drops_connections_leaves_time_for_the_next_address() {
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
    assert_eq!(dropped.kind(), ErrorKind::TimedOut, "its backlog is full");
    let serves = thread::spawn(move || {
        let mut stream = accept(&taken);
        stream.write_all(b"here").unwrap();
        stream.flush().unwrap();
    });
    let stream =
        DeadlineStream::connect(&[drops, takes], Instant::now() + Duration::from_secs(4)).unwrap();
    let mut said = [0; 4];
    believed().secure(stream, "localhost").unwrap().read_exact(&mut said).unwrap();
    assert_eq!(&said, b"here");
    serves.join().unwrap();
}

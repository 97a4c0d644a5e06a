//! `baton drain` when another server answers at the worker's address. It never waits without end,
//! and reports the worker's end only if the worker has ended.

use crate::process::PATIENCE;
use crate::tls::{fixture, server_session};
use rustls::StreamOwned;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Output, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How the server handles a connection.
#[derive(Clone, Copy)]
enum Step {
    /// Answers with this body and status 200.
    Answer(&'static str),
    /// Closes the connection before the handshake.
    Cut,
    /// Shows the certificate of another host.
    Elsewhere,
}

/// A server that handles these connections one after the other, and then stops listening. Returns
/// how many came.
fn server(steps: Vec<Step>) -> (String, JoinHandle<usize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("https://localhost:{}", listener.local_addr().unwrap().port());
    let serve = move || {
        let (last, mut listener) = (steps.len() - 1, Some(listener));
        for (index, step) in steps.iter().enumerate() {
            let (tcp, _) = listener.as_ref().unwrap().accept().unwrap();
            tcp.set_read_timeout(Some(PATIENCE)).unwrap();
            listener = listener.filter(|_| index < last);
            match step {
                Step::Answer(body) => answer(tcp, body),
                Step::Cut => {}
                Step::Elsewhere => {
                    drop(StreamOwned::new(server_session("elsewhere"), tcp).read(&mut [0]))
                }
            }
        }
        steps.len()
    };
    (url, thread::spawn(serve))
}

fn answer(tcp: TcpStream, body: &str) {
    let mut stream = StreamOwned::new(server_session("one"), tcp);
    let mut asked = Vec::new();
    while !asked.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        assert_eq!(stream.read(&mut byte).unwrap(), 1, "it asks");
        asked.push(byte[0]);
    }
    let head =
        format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all((head + body).as_bytes()).unwrap();
    stream.conn.send_close_notify();
    stream.flush().unwrap();
}

/// The output of the command, which must end.
fn drain(url: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(["drain", url, "--wait", "--tls-ca-file"]).arg(fixture("ca.pem"));
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > PATIENCE {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("it never ends");
        }
        thread::sleep(Duration::from_millis(20));
    }
    child.wait_with_output().unwrap()
}

fn said(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

/// Single bytes of a handshake or an answer do not extend the time limit.
#[test]
fn a_server_that_sends_single_bytes_does_not_extend_the_time_limit() {
    // The head of a long record, and of an answer without end.
    for (scheme, begin) in
        [("https", &b"\x16\x03\x03\x40\x00"[..]), ("http", b"HTTP/1.1 200 OK\r\nx: ")]
    {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("{scheme}://localhost:{}", listener.local_addr().unwrap().port());
        let trickles = thread::spawn(move || {
            let (mut tcp, _) = listener.accept().unwrap();
            tcp.write_all(begin).unwrap();
            while tcp.write_all(b"a").is_ok() {
                thread::sleep(Duration::from_millis(20));
            }
        });
        let output = drain(&url);
        let (_, error) = said(&output);
        assert!(output.status.code() == Some(1) && error.contains("cannot be reached"), "{error}");
        trickles.join().unwrap();
    }
}

/// A server at its connection limit, or busy otherwise, closes a connection, and is still there.
#[test]
fn a_connection_that_is_cut_off_is_no_end() {
    let steps =
        vec![Step::Answer("{\"running\":1}"), Step::Cut, Step::Cut, Step::Answer("draining")];
    let (url, server) = server(steps);
    let output = drain(&url);
    let (words, error) = said(&output);
    assert!(output.status.success() && words.contains("has ended"), "{words}{error}");
    assert!(server.is_finished(), "it was there");
    assert_eq!(server.join().unwrap(), 4);
}

/// It can be the worker with a new certificate, or another server in its place: that is unknown.
#[test]
fn a_certificate_that_is_not_believed_is_no_end() {
    let (url, server) = server(vec![Step::Answer("{\"running\":1}"), Step::Elsewhere]);
    let output = drain(&url);
    let (words, error) = said(&output);
    assert!(output.status.code() == Some(1) && !words.contains("has ended"), "{words}");
    assert!(
        error.contains("drains, but its end cannot be observed")
            && error.contains("not signed by a trusted CA"),
        "{error}"
    );
    assert_eq!(server.join().unwrap(), 2);
}

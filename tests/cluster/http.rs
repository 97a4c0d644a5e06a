//! HTTP/1.1 as different clients and proxies use it, with a router, its workers and a mixed worker.

use crate::fleet::Fleet;
use crate::network::data_segments;
use crate::process::{PATIENCE, Process};
use crate::{prefill, start};
use serde_json::{Value, json};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};

struct Wire {
    stream: TcpStream,
    got: Vec<u8>,
}

impl Wire {
    fn to(address: SocketAddr) -> Wire {
        let stream = TcpStream::connect(address).expect("it listens");
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Wire { stream, got: Vec::new() }
    }

    fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// The received text, once `is_enough`.
    #[track_caller]
    fn until(&mut self, is_enough: impl Fn(&str) -> bool) -> String {
        loop {
            let text = String::from_utf8_lossy(&self.got).into_owned();
            if is_enough(&text) {
                return text;
            }
            assert!(self.read(), "it ends before: {text}");
        }
    }

    /// All text until the other side closes.
    #[track_caller]
    fn rest(mut self) -> String {
        while self.read() {}
        String::from_utf8_lossy(&self.got).into_owned()
    }

    #[track_caller]
    fn read(&mut self) -> bool {
        let mut bytes = [0; 64 << 10];
        match self.stream.read(&mut bytes) {
            Ok(0) => false,
            Err(error) if error.kind() == ErrorKind::ConnectionReset => false,
            Ok(count) => {
                self.got.extend_from_slice(&bytes[..count]);
                true
            }
            Err(error) => panic!("no answer: {error}: {}", String::from_utf8_lossy(&self.got)),
        }
    }
}

fn body(tokens: u32, stream: bool) -> Value {
    json!({"prompt": [5, 6, 7, 8], "max_tokens": tokens, "temperature": 0, "ignore_eos": true,
        "stream": stream})
}

fn request(path: &str, fields: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!("POST {path} HTTP/1.1\r\nhost: t\r\n{fields}content-length: {length}\r\n\r\n{body}")
        .into_bytes()
}

fn count(text: &str, words: &str) -> usize {
    text.matches(words).count()
}

fn keeps_alive_and_answers_pipelined_requests(address: SocketAddr) {
    let mut wire = Wire::to(address);
    let whole = request("/v1/completions", "", &body(2, false).to_string());
    for answers in 1..=2 {
        wire.send(&whole);
        wire.until(|text| count(text, "\"usage\"") == answers);
    }
    let stream = request("/v1/completions", "", &body(3, true).to_string());
    let last = request("/v1/completions", "connection: close\r\n", &body(2, false).to_string());
    // Complete requests, one of them a stream, and half of the next.
    wire.send(&[&whole[..], &stream, &last[..30]].concat());
    wire.until(|text| text.contains("[DONE]"));
    wire.send(&last[30..]);
    let text = wire.rest();
    assert_eq!((count(&text, "HTTP/1.1 200"), count(&text, "\"usage\"")), (5, 4), "{text}");
    let (before, behind) = text.split_once("[DONE]\n\n\r\n0\r\n\r\n").expect("a proper end");
    assert_eq!((count(before, "\"usage\""), count(behind, "\"usage\"")), (3, 1), "{text}");
}

fn says_to_continue(address: SocketAddr) {
    let text = body(2, false).to_string();
    let (mut wire, length) = (Wire::to(address), text.len());
    let head = |length| {
        format!(
            "POST /v1/completions HTTP/1.1\r\nhost: t\r\nexpect: 100-continue\r\n\
             connection: close\r\ncontent-length: {length}\r\n\r\n"
        )
    };
    wire.send(head(length).as_bytes());
    assert_eq!(wire.until(|text| text.ends_with("\r\n\r\n")), "HTTP/1.1 100 Continue\r\n\r\n");
    wire.send(text.as_bytes());
    assert!(wire.rest().contains("\r\n\r\nHTTP/1.1 200"));
    // Not for a body that is refused anyway.
    let mut wire = Wire::to(address);
    wire.send(head(1 << 40).as_bytes());
    let answer = wire.rest();
    assert!(answer.starts_with("HTTP/1.1 413") && answer.contains("connection: close"), "{answer}");
}

fn takes_a_body_in_chunks(address: SocketAddr) {
    let mut wire = Wire::to(address);
    let head = "POST /v1/completions HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\
        transfer-encoding: chunked\r\n\r\n";
    wire.send(head.as_bytes());
    for piece in body(2, false).to_string().as_bytes().chunks(7) {
        wire.send(&[format!("{:x};a=b\r\n", piece.len()).as_bytes(), piece, b"\r\n"].concat());
    }
    wire.send(b"0\r\nx-sum: 1\r\n\r\n");
    let answer = wire.rest();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"usage\""), "{answer}");
}

/// A client that has closed its own end still gets its answers.
fn answers_a_half_closed_client(address: SocketAddr) {
    for stream in [false, true] {
        let mut wire = Wire::to(address);
        let asked = request("/v1/completions", "", &body(200, stream).to_string());
        wire.send(&asked);
        wire.stream.shutdown(Shutdown::Write).unwrap();
        let answer = wire.rest();
        assert!(answer.contains("HTTP/1.1 200"), "{answer}");
        assert!(answer.contains("\"finish_reason\":\"length\""), "{answer}");
        assert!(!stream || answer.ends_with("data: [DONE]\n\n\r\n0\r\n\r\n"), "{answer}");
        let mut wire = Wire::to(address);
        wire.send(&[&asked[..], &asked].concat());
        wire.stream.shutdown(Shutdown::Write).unwrap();
        assert_eq!(count(&wire.rest(), "HTTP/1.1 200"), 2, "what is pipelined is served");
    }
}

/// The head is sent with the first event, and the end with the last.
fn writes_once_for_each_event(address: SocketAddr) {
    for (stream, most) in [(false, 1), (true, 20 + 1)] {
        let mut wire = Wire::to(address);
        // The connection is used for a while before anything is counted.
        wire.send(&request("/v1/completions", "", &body(20, stream).to_string()));
        wire.until(|text| text.contains(if stream { "\r\n0\r\n\r\n" } else { "\"usage\"" }));
        let segments = data_segments(&wire.stream);
        assert!((1..=most).contains(&segments), "{segments} segments");
    }
}

fn speaks_http(address: SocketAddr) {
    keeps_alive_and_answers_pipelined_requests(address);
    says_to_continue(address);
    takes_a_body_in_chunks(address);
    answers_a_half_closed_client(address);
    writes_once_for_each_event(address);
}

#[test]
fn a_router_and_its_workers_speak_http() {
    let mut fleet = Fleet::new(vec![prefill(&[])], vec![start("decode", &["--local-prefill"])]);
    speaks_http(fleet.router.address);
    // A worker that is asked directly.
    speaks_http(fleet.decode[0].address);
    fleet.check_idle();
}

#[test]
fn one_process_speaks_http() {
    let mut server = start("serve", &[]);
    speaks_http(server.address);
    server.await_idle();
    server.check_alive();
}

/// Larger bodies than by default, if a flag allows them, at both ends of a router.
#[test]
fn bodies_are_as_long_as_a_flag_says() {
    let long = ["--max-payload-size", "64MiB"];
    let mut fleet = Fleet::with(vec![prefill(&long)], vec![start("decode", &long)], &long);
    let ask = |address, length: usize| {
        let mut body = body(2, false);
        body["note"] = json!("x".repeat(length));
        let mut wire = Wire::to(address);
        let asked = request("/v1/completions", "connection: close\r\n", &body.to_string());
        // A server that refuses need not read everything.
        let _ = wire.stream.write_all(&asked);
        wire.rest()
    };
    let mut short = body(2, false);
    short["note"] = json!("");
    let most = (64 << 20) - short.to_string().len();
    // A body that the router accepts is also accepted by the workers, with the router's additions.
    let answer = ask(fleet.router.address, most);
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let answer = ask(fleet.router.address, most + 1);
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 413"), "{answer}");
    assert!(answer.is_empty() || answer.contains("(--max-payload-size)"), "{answer}");
    fleet.check_idle();
    let server: Process = start("serve", &[]);
    let answer = ask(server.address, 33 << 20);
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 413"), "{answer}");
}

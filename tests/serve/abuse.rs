//! Abusive input costs its sender at most the connection.

use crate::client::Client;
use crate::server::{Server, endless};
use baton::http::Method;
use baton::limits::{HTTP_BODY_MAX, HTTP_HEAD_MAX, HTTP_HEADERS_MAX};
use serde_json::json;
use std::net::Shutdown;
use std::thread;
use std::time::Duration;

/// Sends `bytes` and reads to the end: either no bytes, or one response with status 4xx, 501 or
/// 505.
#[track_caller]
fn check_refused(server: &Server, bytes: &[u8]) {
    let mut client = server.connect();
    client.raw(bytes);
    let _ = client.stream.shutdown(Shutdown::Write);
    let answer = client.until_closed();
    let text = String::from_utf8_lossy(&answer);
    let status = text.strip_prefix("HTTP/1.1 ").map(|rest| &rest[..3]);
    let refused =
        status.is_none_or(|status| status.starts_with('4') || status == "505" || status == "501");
    assert!(refused && (answer.is_empty() || status.is_some()), "{text}");
    server.check_works();
}

#[test]
fn bytes_that_are_no_http() {
    let server = Server::start(&[]);
    let mut state = 1u64;
    for length in [1, 2, 7, 100, 5000, 200_000] {
        let bytes: Vec<u8> = (0..length)
            .map(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 56) as u8
            })
            .collect();
        check_refused(&server, &bytes);
    }
    let long = format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(HTTP_HEAD_MAX));
    let field = format!("GET / HTTP/1.1\r\nx: {}\r\n\r\n", "a".repeat(HTTP_HEAD_MAX));
    let fields = format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(HTTP_HEADERS_MAX + 1));
    let body = format!("POST /generate HTTP/1.1\r\ncontent-length: {}\r\n\r\n", HTTP_BODY_MAX + 1);
    for bytes in [
        &b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\x12\x04\0\0\0\0\0"[..],
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/3\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET  / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\n x: folded\r\n\r\n",
        b"POST /generate HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /generate HTTP/1.1\r\ncontent-length: 99999999999999999999\r\n\r\n",
        b"POST /generate HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n{}",
        b"POST /generate HTTP/1.1\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
        b"POST /generate HTTP/1.1\r\ntransfer-encoding: gzip\r\n\r\n{}",
        b"POST /generate HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /generate HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n",
        long.as_bytes(),
        field.as_bytes(),
        fields.as_bytes(),
        body.as_bytes(),
    ] {
        check_refused(&server, bytes);
    }
}

#[test]
fn requests_cut_short() {
    let server = Server::start(&[]);
    let body = json!({"prompt": "a", "max_tokens": 2}).to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let whole = format!("{head}{body}");
    for cut in [0, 1, 4, 20, head.len() - 1, head.len(), whole.len() - 1] {
        check_refused(&server, &whole.as_bytes()[..cut]);
        // Also without an orderly end.
        let mut client = server.connect();
        client.raw(&whole.as_bytes()[..cut]);
    }
    server.wait_until_idle();
}

#[test]
fn a_slow_sender_is_served_and_delays_no_other_client() {
    let server = Server::start(&[]);
    let body = json!({"prompt": "a", "max_tokens": 2, "ignore_eos": true}).to_string();
    let whole = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut client = server.connect();
    for (index, byte) in whole.bytes().enumerate() {
        assert!(client.raw(&[byte]));
        thread::sleep(Duration::from_millis(1));
        if index % 40 == 0 {
            server.check_works();
        }
    }
    assert_eq!(client.reply(Method::Post).ok()["usage"]["completion_tokens"], 2);
}

#[test]
fn hundreds_of_idle_connections() {
    let server = Server::start(&[]);
    let mut idle: Vec<Client> = (0..300).map(|_| server.connect()).collect();
    for (index, client) in idle.iter_mut().enumerate().filter(|(index, _)| index % 3 == 0) {
        client.raw(&b"POST /v1/completions HTTP/1.1\r\n"[..index % 30]);
    }
    server.check_works();
    for client in idle.iter_mut().skip(1).step_by(30) {
        client.send(Method::Get, "/health", &[], None);
        assert_eq!(client.reply(Method::Get).status(), 200);
    }
    drop(idle);
    server.check_works();
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let server = Server::start(&[]);
    let mut client = server.connect();
    let mut all = Vec::new();
    for count in 1..=8 {
        let body = json!({"prompt": [5, 6], "max_tokens": count, "ignore_eos": true,
            "stream": count % 3 == 0})
        .to_string();
        let request = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        all.extend_from_slice(request.as_bytes());
    }
    assert!(client.raw(&all));
    for count in 1..=8 {
        let reply = client.reply(Method::Post);
        match count % 3 {
            0 => {
                assert_eq!(reply.events().last().unwrap()["choices"][0]["finish_reason"], "length")
            }
            _ => assert_eq!(reply.ok()["usage"]["completion_tokens"], count),
        }
    }
    // A refused request ends the connection.
    let mut client = server.connect();
    client.raw(
        b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nnonsense\r\n\r\n\
          GET /health HTTP/1.1\r\nhost: x\r\n\r\n",
    );
    assert_eq!(client.reply(Method::Get).status(), 200);
    assert_eq!(client.reply(Method::Get).status(), 400);
    assert!(client.try_reply(Method::Get).is_none());
    server.check_works();
}

#[test]
fn bodies_in_chunks_and_on_demand() {
    let server = Server::start(&[]);
    let body = json!({"prompt": "a", "max_tokens": 3, "ignore_eos": true}).to_string();
    let mut client = server.connect();
    client.raw(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n");
    for piece in body.as_bytes().chunks(7) {
        client.raw(format!("{:x};ext=1\r\n", piece.len()).as_bytes());
        client.raw(piece);
        client.raw(b"\r\n");
    }
    client.raw(b"0\r\ntrailer: x\r\n\r\n");
    assert_eq!(client.reply(Method::Post).ok()["usage"]["completion_tokens"], 3);
    client.raw(
        format!(
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n\
             content-length: {}\r\n\r\n",
            body.len()
        )
        .as_bytes(),
    );
    client.wait_for("HTTP/1.1 100");
    client.raw(body.as_bytes());
    assert_eq!(client.reply(Method::Post).ok()["usage"]["completion_tokens"], 3);
}

#[test]
fn http_1_0_and_connection_close() {
    let server = Server::start(&[]);
    let body =
        json!({"prompt": "a", "max_tokens": 3, "ignore_eos": true, "stream": true}).to_string();
    for line in ["HTTP/1.0\r\n", "HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"] {
        let mut client = server.connect();
        client.raw(
            format!("POST /v1/completions {line}content-length: {}\r\n\r\n{body}", body.len())
                .as_bytes(),
        );
        let answer = String::from_utf8(client.until_closed()).unwrap();
        assert!(
            answer.starts_with("HTTP/1.1 200 ") && answer.contains("data: [DONE]\n\n"),
            "{answer}"
        );
    }
}

/// A stream continues, token for token, while other clients abuse the port.
#[test]
fn a_stream_is_not_disturbed() {
    let server = Server::start_long(&[]);
    let mut body = endless();
    body["max_tokens"] = json!(1500);
    let expected = server.post("/v1/completions", &body);
    let mut client = server.connect();
    client.post("/v1/completions", &body);
    client.wait_for("data: ");
    for _ in 0..30 {
        let mut other = server.connect();
        other.raw(b"\x00\x01\x02 nonsense\r\n\r\n");
        let mut gone = server.connect();
        gone.post("/v1/completions", &endless());
    }
    let text = |reply: &crate::client::Reply| -> String {
        reply
            .events()
            .iter()
            .filter_map(|event| event["choices"][0]["text"].as_str().map(str::to_owned))
            .collect()
    };
    assert_eq!(text(&client.reply(Method::Post)), text(&expected));
    server.wait_until_idle();
}

//! `baton router` with scripted workers.

mod ahead;
mod client;
mod flows;
mod foreign;
mod launched;
mod membership;
mod retries;
mod selection;
mod turns;
mod worker;

use client::Router;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;
use worker::{IdentityReply, Worker};

const PROMPT: &str = r#"{"prompt":"a","max_tokens":4}"#;
const STREAM: &str = r#"{"prompt":"a","stream":true}"#;

/// A prefill worker, a decode worker and a router that is ready.
fn trio() -> (Worker, Worker, Router) {
    trio_with(&[])
}

fn trio_with(flags: &[&str]) -> (Worker, Worker, Router) {
    let (prefill, decode) = (Worker::start(), Worker::start());
    let router = Router::ready(&[&prefill], &[&decode], flags);
    (prefill, decode, router)
}

#[test]
fn both_workers_get_the_same_request_and_decode_answers() {
    let (prefill, decode, router) = trio();
    let mut client = router.connect();
    let fields = "authorization: Bearer k\r\ntraceparent: 00-1\r\nx-request-timeout-ms: 900\r\n\
        x-request-id: mine\r\ncookie: c\r\n";
    client.post("/v1/completions?x=1", fields, r#"{"prompt":["a","b"],"bootstrap_room":5,"n":2}"#);
    let (mut at_prefill, mut at_decode) = (prefill.asked(), decode.asked());
    for (asked, worker) in [(&at_prefill, &prefill), (&at_decode, &decode)] {
        assert_eq!(asked.line, "POST /v1/completions?x=1 HTTP/1.1");
        assert_eq!(asked.header("host"), Some(worker.address.to_string().as_str()));
        assert_eq!(asked.header("authorization"), Some("Bearer k"));
        assert_eq!(asked.header("traceparent"), Some("00-1"));
        // The time that the request has spent in the router is subtracted.
        let left = asked.header("x-request-timeout-ms").and_then(|left| left.parse().ok());
        assert!(left.is_some_and(|left: u64| (1..=900).contains(&left)), "{left:?}");
        assert_eq!(asked.header("x-request-id"), Some("mine"));
        assert_eq!(asked.header("content-type"), Some("application/json"));
        assert_eq!(asked.header("cookie"), None);
    }
    assert_eq!(at_prefill.body, at_decode.body);
    let body = at_decode.json();
    assert_eq!((&body["prompt"], &body["n"]), (&serde_json::json!(["a", "b"]), &2.into()));
    assert_eq!(
        (&body["bootstrap_host"], &body["bootstrap_port"]),
        (&"127.0.0.1".into(), &9000.into())
    );
    assert!(body["bootstrap_room"].as_u64().is_some_and(|room| room != 5 && room < 1 << 63));
    at_decode.answer("200 OK", r#"{"choices":[]}"#);
    assert_eq!(client.answer(), (200, r#"{"choices":[]}"#.into()));
    assert_eq!(client.header("content-type"), Some("application/json"));
    assert_eq!(client.header("content-length"), Some("14"));
    assert_eq!(client.header("x-request-id"), Some("mine"));
    at_prefill.answer("200 OK", "{}");
}

#[test]
fn every_attempt_has_a_room_and_a_name_of_its_own() {
    let (prefill, decode, router) = trio();
    let mut seen = Vec::new();
    for _ in 0..2 {
        let mut client = router.post("/v1/chat/completions", PROMPT);
        let (mut at_prefill, mut at_decode) = (prefill.asked(), decode.asked());
        at_prefill.answer("200 OK", "{}");
        at_decode.answer("200 OK", "{}");
        client.answer();
        assert_eq!(client.header("x-request-id"), at_decode.header("x-request-id"));
        let room = at_decode.json()["bootstrap_room"].as_u64().unwrap();
        seen.push((room, at_decode.header("x-request-id").unwrap().to_owned()));
    }
    assert!(seen[0].0 != seen[1].0 && seen[0].1 != seen[1].1, "{seen:?}");
}

#[test]
fn a_stream_does_not_wait_for_prefill_and_its_later_error_is_ignored() {
    let (prefill, decode, router) = trio();
    let mut client = router.post("/v1/completions", STREAM);
    let (mut at_prefill, mut at_decode) = (prefill.asked(), decode.asked());
    at_decode.open_stream();
    at_decode.chunk("data: 1\n\n");
    assert_eq!(client.piece().as_deref(), Some("data: 1\n\n"));
    assert_eq!(client.header("content-type"), Some("text/event-stream; charset=utf-8"));
    at_prefill.answer("500 Oh", "{}");
    at_decode.chunk("data: 2\n\n");
    assert_eq!(client.piece().as_deref(), Some("data: 2\n\n"));
    at_decode.end_stream();
    assert_eq!(client.piece(), None);
    assert!(at_decode.is_open());
}

/// A decode worker that has become mixed serves its leg alone, and prefill waits for it in vain.
#[test]
fn a_prefill_leg_that_runs_on_is_ended_after_decode_s_answer() {
    let (prefill, decode, router) = trio();
    let mut client = router.post("/v1/completions", PROMPT);
    let (at_prefill, mut at_decode) = (prefill.asked(), decode.asked());
    at_decode.answer("200 OK", "{}");
    assert_eq!(client.answer(), (200, "{}".into()));
    assert!(at_prefill.is_closed());
}

#[test]
fn an_error_of_prefill_before_the_first_byte_is_the_answer() {
    let (prefill, decode, router) = trio();
    for is_stream_open in [false, true] {
        let mut client = router.post("/generate", STREAM);
        let (mut at_prefill, mut at_decode) = (prefill.asked(), decode.asked());
        if is_stream_open {
            // A head alone is no answer yet.
            at_decode.open_stream();
        }
        at_prefill.answer("429 Too Many Requests", r#"{"error":{"message":"full"}}"#);
        assert_eq!(client.answer(), (429, r#"{"error":{"message":"full"}}"#.into()));
        assert_eq!(client.header("retry-after"), Some("7"));
        assert!(at_decode.is_closed());
        assert!(at_prefill.is_open(), "its connection can be used again");
    }
}

#[test]
fn an_error_of_decode_is_the_answer_and_ends_prefill() {
    let (prefill, decode, router) = trio();
    let mut client = router.post("/v1/completions", STREAM);
    let (at_prefill, mut at_decode) = (prefill.asked(), decode.asked());
    at_decode.answer("503 Service Unavailable", r#"{"error":{}}"#);
    assert_eq!(client.answer(), (503, r#"{"error":{}}"#.into()));
    assert_eq!(client.header("retry-after"), Some("7"));
    assert!(at_prefill.is_closed());
}

#[test]
fn a_lost_decode_worker_is_a_bad_gateway_before_the_first_byte() {
    let (prefill, decode, router) = trio_with(&["--disable-retries"]);
    for begin in ["", "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{\"cut"] {
        let mut client = router.post("/v1/completions", PROMPT);
        let (at_prefill, mut at_decode) = (prefill.asked(), decode.asked());
        at_decode.send(begin.as_bytes());
        at_decode.hang_up();
        let (status, body) = client.answer();
        assert_eq!(status, 502, "{body}");
        assert!(body.contains(r#""code":"peer_lost""#), "{body}");
        assert!(at_prefill.is_closed());
    }
    assert!(prefill.is_unasked(), "nothing is sent again where that is not wanted");
}

#[test]
fn a_worker_that_speaks_no_http_is_a_bad_gateway() {
    let (prefill, decode, router) = trio_with(&["--disable-retries"]);
    let mut client = router.post("/v1/completions", PROMPT);
    let (at_prefill, mut at_decode) = (prefill.asked(), decode.asked());
    at_decode.send(b"SSH-2.0-what\r\n\r\n");
    assert_eq!(client.answer().0, 502);
    assert!(at_prefill.is_closed() && at_decode.is_closed());
}

#[test]
fn a_stream_ends_with_an_error_event_if_its_worker_dies() {
    let (prefill, decode, router) = trio();
    let mut client = router.post("/v1/completions", STREAM);
    let (at_prefill, mut at_decode) = (prefill.asked(), decode.asked());
    at_decode.open_stream();
    at_decode.chunk("data: 1\n\ndata: cu");
    assert_eq!(client.piece().as_deref(), Some("data: 1\n\ndata: cu"));
    at_decode.hang_up();
    let rest: String = std::iter::from_fn(|| client.piece()).collect();
    assert!(rest.starts_with("\n\ndata: {\"error\":{") && rest.ends_with("}}\n\n"), "{rest}");
    assert!(rest.contains(r#""code":"peer_lost""#), "{rest}");
    assert!(at_prefill.is_closed());
}

#[test]
fn decode_decides_about_a_request_that_lost_its_prefill_leg() {
    let (prefill, decode, router) = trio();
    let mut client = router.post("/v1/completions", STREAM);
    let (at_prefill, mut at_decode) = (prefill.asked(), decode.asked());
    at_prefill.hang_up();
    // The worker itself is healthy, and serves other requests meanwhile.
    let mut other = router.get("/health_generate");
    prefill.asked().answer("200 OK", "{}");
    decode.asked().answer("200 OK", "{}");
    assert_eq!(other.answer().0, 200);
    at_decode.open_stream();
    at_decode.chunk("data: 1\n\n");
    at_decode.end_stream();
    assert_eq!(client.answer(), (200, "data: 1\n\n".into()));
}

#[test]
fn a_request_that_lost_its_prefill_leg_ends_even_if_decode_is_silent() {
    let (prefill, decode, router) = trio_with(&["--disable-retries"]);
    let mut client = router.post("/v1/completions", STREAM);
    let (at_prefill, at_decode) = (prefill.asked(), decode.asked());
    at_prefill.hang_up();
    let (status, body) = client.answer();
    assert_eq!(status, 502, "{body}");
    assert!(body.contains("prefill worker was lost"), "{body}");
    assert!(at_decode.is_closed());
}

#[test]
fn a_client_that_goes_away_ends_both_legs() {
    let (prefill, decode, router) = trio();
    for is_streaming in [false, true] {
        let mut client = router.post("/v1/completions", STREAM);
        let (at_prefill, mut at_decode) = (prefill.asked(), decode.asked());
        if is_streaming {
            at_decode.open_stream();
            at_decode.chunk("data: 1\n\n");
            client.piece();
        }
        drop(client);
        assert!(at_prefill.is_closed() && at_decode.is_closed());
    }
}

#[test]
fn connections_are_kept_on_both_sides() {
    let (prefill, decode, router) = trio();
    let mut client = router.connect();
    for _ in 0..3 {
        client.post("/v1/completions", "", PROMPT);
        let (mut at_prefill, mut at_decode) = (prefill.asked(), decode.asked());
        // The connection of the first probe, or a second one beside a later probe.
        assert!(at_prefill.connection <= 1 && at_decode.connection <= 1);
        at_prefill.answer("200 OK", "{}");
        // Its connection is free again once the router has read that.
        at_decode.open_stream();
        at_decode.chunk("data: 1\n\n");
        client.piece();
        at_decode.end_stream();
        assert_eq!(client.piece(), None);
    }
}

#[test]
fn without_a_pair_requests_are_refused_and_the_router_is_not_healthy() {
    let (prefill, decode) = (Worker::start(), Worker::start());
    decode.stop();
    let router = Router::start(&[&prefill], &[&decode], &[]);
    for path in ["/health", "/readiness"] {
        let mut client = router.get(path);
        assert_eq!(client.answer().0, 503);
        assert!(client.header("retry-after").is_some());
    }
    let mut client = router.post("/v1/completions", PROMPT);
    let (status, body) = client.answer();
    assert!(status == 503 && body.contains(r#""code":"no_worker""#), "{status} {body}");
    assert!(client.header("retry-after").is_some());
    assert_eq!(router.get("/liveness").answer().0, 200);
}

#[test]
fn a_pair_is_healthy_and_a_dead_worker_is_noticed() {
    let (_prefill, decode, router) = trio();
    assert_eq!(router.get("/health").answer(), (200, "OK".into()));
    decode.stop();
    router.wait_for("/health", 503);
    assert_eq!(router.post("/v1/completions", PROMPT).answer().0, 503);
}

#[test]
fn a_worker_that_takes_no_connection_is_passed_over() {
    let prefill = Worker::start();
    let decode = [Worker::start(), Worker::start()];
    let router =
        Router::ready(&[&prefill], &[&decode[0], &decode[1]], &["--policy", "round_robin"]);
    decode[0].stop();
    for _ in 0..3 {
        let mut client = router.post("/v1/completions", PROMPT);
        let (mut at_prefill, mut at_decode) = (prefill.asked(), decode[1].asked());
        at_prefill.answer("200 OK", "{}");
        at_decode.answer("200 OK", "{}");
        assert_eq!(client.answer().0, 200);
    }
    assert!(prefill.is_unasked(), "nothing is sent before both connections stand");
}

#[test]
fn a_worker_that_reports_draining_as_its_health_is_not_used() {
    let (_prefill, decode, router) = trio();
    decode.drain();
    router.wait_for("/readiness", 503);
    router.wait_for("/health", 503);
    assert!(decode.is_unasked());
}

/// The requests of a worker are given up if it hangs, and not if one probe of many is lost.
#[test]
fn a_draining_worker_keeps_its_requests_if_a_probe_is_lost() {
    let (prefill, decode, router) = trio();
    let mut client = router.post("/v1/completions", PROMPT);
    let (mut at_prefill, mut at_decode) = (prefill.asked(), decode.asked());
    decode.drain();
    decode.await_probes(4);
    decode.ignore_probes(1);
    decode.await_probes(2);
    assert!(at_decode.is_open());
    at_prefill.answer("200 OK", "{}");
    at_decode.answer("200 OK", "{\"well\":1}");
    assert_eq!(client.answer(), (200, "{\"well\":1}".into()));
}

/// Its own report counts at once, before the next probe. A report about the prefill worker does not
/// count for itself.
#[test]
fn a_worker_that_answers_that_it_drains_is_asked_no_more() {
    let prefill = Worker::start();
    let decode = [Worker::start(), Worker::start()];
    let flags = ["--policy", "round_robin", "--disable-retries"];
    let router = Router::ready(&[&prefill], &[&decode[0], &decode[1]], &flags);
    router.wait_for_workers(3);
    let drains = |param: &str| format!(r#"{{"error":{{"code":"draining","param":{param}}}}}"#);
    for param in [r#""bootstrap_host""#, "null"] {
        let _client = router.post("/v1/completions", PROMPT);
        prefill.asked().answer("200 OK", "{}");
        let mut asked = decode[0].asked();
        if param == "null" {
            decode[0].drain();
        }
        asked.answer("503 Service Unavailable", &drains(param));
        let mut client = router.post("/v1/completions", PROMPT);
        prefill.asked().answer("200 OK", "{}");
        decode[1].asked().answer("200 OK", "{}");
        assert_eq!(client.answer().0, 200);
    }
    for _ in 0..4 {
        let mut client = router.post("/v1/completions", PROMPT);
        prefill.asked().answer("200 OK", "{}");
        decode[1].asked().answer("200 OK", "{}");
        assert_eq!(client.answer().0, 200);
    }
    assert!(decode[0].is_unasked());
}

#[test]
fn a_worker_of_another_role_is_not_used() {
    let prefill = Worker::with_identity(r#"{"disaggregation_mode":"prefill"}"#);
    let wrong = Worker::with_identity(r#"{"disaggregation_mode":"null"}"#);
    let decode = Worker::with_identity(r#"{"disaggregation_mode":"decode","version":"0.5"}"#);
    let router = Router::start(&[&prefill], &[&wrong, &decode], &["--policy", "round_robin"]);
    // Until a pair is up, the mixed worker alone makes the router ready.
    router.wait_for_workers(3);
    for _ in 0..3 {
        let mut client = router.post("/v1/completions", PROMPT);
        let (mut at_prefill, mut at_decode) = (prefill.asked(), decode.asked());
        at_prefill.answer("200 OK", "{}");
        at_decode.answer("200 OK", "{}");
        assert_eq!(client.answer().0, 200);
    }
    assert!(wrong.is_unasked());
}

/// An engine that does not report its identity, or needs a key for that, is used.
#[test]
fn a_worker_that_does_not_report_its_identity_is_used() {
    for said in [
        Some(("404 Not Found", "")),
        Some(("401 Unauthorized", "{}")),
        Some(("500 No", "{}")),
        None,
    ] {
        let (prefill, decode) = (Worker::start(), Worker::at("127.0.0.1:0".parse().unwrap(), said));
        let router = Router::ready(&[&prefill], &[&decode], &[]);
        let mut client = router.post("/v1/completions", PROMPT);
        prefill.asked().answer("200 OK", "{}");
        decode.asked().answer("200 OK", "{}");
        assert_eq!(client.answer().0, 200, "{said:?}");
    }
}

#[test]
fn a_worker_at_the_address_of_another_is_asked_for_its_identity() {
    const READER: IdentityReply = Some(("200 OK", r#"{"disaggregation_mode":"prefill"}"#));
    const WRITER: IdentityReply = Some(("200 OK", r#"{"disaggregation_mode":"decode"}"#));
    let (prefill, decode) = (Worker::start(), Worker::at("127.0.0.1:0".parse().unwrap(), WRITER));
    let router = Router::ready(&[&prefill], &[&decode], &[]);
    decode.stop();
    let wrong = Worker::at(decode.address, READER);
    wrong.await_identity_query();
    thread::sleep(Duration::from_millis(100));
    assert_eq!(router.get("/readiness").answer().0, 503);
    wrong.stop();
    let _right = Worker::at(decode.address, WRITER);
    router.wait_for("/readiness", 200);
}

#[test]
fn requests_go_to_the_worker_with_the_least_load() {
    let prefill = [Worker::start(), Worker::start()];
    let decode = [Worker::start(), Worker::start()];
    let router = Router::start(&[&prefill[0], &prefill[1]], &[&decode[0], &decode[1]], &[]);
    router.wait_for_workers(4);
    let _held: Vec<_> = (0..4).map(|_| router.post("/v1/completions", PROMPT)).collect();
    for worker in prefill.iter().chain(&decode) {
        worker.asked();
        worker.asked();
        assert!(worker.is_unasked());
    }
}

#[test]
fn other_paths_are_served_by_the_worker_or_the_router_they_concern() {
    let (prefill, decode, router) = trio();
    let mut client = router.get("/v1/models");
    prefill.asked().answer("200 OK", r#"{"data":[1]}"#);
    assert_eq!(client.answer(), (200, r#"{"data":[1]}"#.into()));
    let mut client = router.get("/get_server_info");
    prefill.asked().answer("200 OK", "{}");
    assert_eq!(client.answer().0, 200);
    let mut client = router.post("/tokenize", PROMPT);
    let mut asked = decode.asked();
    assert_eq!(asked.body, PROMPT.as_bytes());
    asked.answer("200 OK", r#"{"count":1}"#);
    assert_eq!(client.answer(), (200, r#"{"count":1}"#.into()));
    assert!(router.get("/metrics").answer().1.contains("smg_router_requests_total 0"));
    let loads: serde_json::Value =
        serde_json::from_str(&router.get("/v1/loads").answer().1).unwrap();
    let load = &loads["loads"][0];
    assert_eq!((&load["num_running_reqs"], &load["num_waiting_reqs"]), (&0.into(), &0.into()));
    let untold = ["gen_throughput", "num_used_tokens", "max_running_requests"];
    assert!(
        untold.iter().all(|field| load.get(field).is_none()),
        "no worker has reported it: {load}"
    );
    assert!(router.get("/version").answer().1.contains("version"));
    for (mut client, status) in [
        (router.get("/nothing"), 404),
        (router.get("/v1/completions"), 405),
        (router.post("/v1/completions", "[]"), 400),
        (router.post("/v1/completions", r#"{"a":1"#), 400),
    ] {
        let (seen, body) = client.answer();
        assert!(seen == status && body.starts_with(r#"{"error":{"message":"#), "{seen} {body}");
    }
    for (method, path, allow) in [
        ("PUT", "/v1/completions", "POST"),
        ("POST", "/health", "GET, HEAD"),
        ("DELETE", "/workers", "GET, POST"),
        ("POST", "/registry", "PUT, DELETE"),
        ("POST", "/workers/0", "GET, DELETE"),
        ("DELETE", "/workers/0/role", "GET, POST"),
    ] {
        let mut client = router.connect();
        client.ask(method, path, "", "");
        assert_eq!(
            (client.answer().0, client.header("allow")),
            (405, Some(allow)),
            "{method} {path}"
        );
    }
    assert!(prefill.is_unasked() && decode.is_unasked());
}

#[test]
fn every_worker_is_asked_and_one_failure_is_told() {
    let (prefill, decode, router) = trio();
    for (status, expected) in [("200 OK", 200), ("500 No", 502)] {
        let mut client = router.post("/abort_request", r#"{"rid":"r"}"#);
        let (mut at_prefill, mut at_decode) = (prefill.asked(), decode.asked());
        assert_eq!(at_prefill.body, br#"{"rid":"r"}"#);
        assert_eq!(at_prefill.body, at_decode.body);
        at_prefill.answer("200 OK", "{}");
        at_decode.answer(status, "{}");
        assert_eq!(client.answer().0, expected);
    }
}

#[test]
fn workers_that_are_down_are_named_and_the_others_asked() {
    let prefill = Worker::start();
    let decode = [Worker::start(), Worker::start()];
    let router = Router::ready(&[&prefill], &[&decode[0], &decode[1]], &[]);
    decode[0].stop();
    let gone = format!("http://{}", decode[0].address);
    for path in ["/abort_request", "/flush_cache"] {
        let mut client = router.post(path, r#"{"abort_all":true}"#);
        for worker in [&prefill, &decode[1]] {
            let mut asked = worker.asked();
            assert_eq!(asked.line, format!("POST {path} HTTP/1.1"));
            asked.answer("200 OK", "{}");
        }
        let (status, body) = client.answer();
        let body: serde_json::Value = serde_json::from_str(&body).unwrap();
        let mut told = serde_json::json!({"success": false, "workers": 2, "unreached": [gone]});
        if path == "/abort_request" {
            told["aborted"] = 0.into();
            told["aborted_at_workers"] = 0.into();
        }
        assert_eq!((status, body), (200, told));
    }
    // An error of a worker that was reached still counts.
    let mut client = router.post("/flush_cache", "{}");
    prefill.asked().answer("500 No", "{}");
    decode[1].asked().answer("200 OK", "{}");
    let (status, body) = client.answer();
    assert!(
        status == 502 && body.contains("status 500") && body.contains(&gone),
        "{status} {body}"
    );
    prefill.stop();
    decode[1].stop();
    let (status, body) = router.post("/flush_cache", "{}").answer();
    assert!(status == 502 && body.contains("no worker was reached"), "{status} {body}");
}

#[test]
fn a_trial_asks_a_pair_for_one_token() {
    let (prefill, decode, router) = trio();
    let mut client = router.get("/health_generate");
    let (mut at_prefill, mut at_decode) = (prefill.asked(), decode.asked());
    assert_eq!(at_decode.line, "POST /generate HTTP/1.1");
    assert_eq!(at_decode.json()["sampling_params"]["max_new_tokens"], 1);
    at_prefill.answer("200 OK", "{}");
    at_decode.answer("200 OK", "{}");
    assert_eq!(client.answer().0, 200);
}

#[test]
fn a_body_beyond_all_buffers_arrives_whole_on_both_sides() {
    let (prefill, decode, router) = trio();
    let body = format!(r#"{{"prompt":"{}"}}"#, "x".repeat(20 << 20));
    let mut client = router.post("/v1/completions", &body);
    let (mut at_prefill, mut at_decode) = (prefill.asked(), decode.asked());
    assert!(at_prefill.body == at_decode.body && at_prefill.body.len() > body.len());
    at_prefill.answer("200 OK", "{}");
    at_decode.answer("200 OK", "{}");
    assert_eq!(client.answer().0, 200);
}

#[test]
fn a_slow_reader_slows_its_worker_and_loses_nothing() {
    const CHUNKS: usize = 1024;
    let (_prefill, decode, router) = trio();
    let mut client = router.post("/v1/completions", STREAM);
    let mut at_decode = decode.asked();
    let sent = Arc::new(AtomicUsize::new(0));
    let progress = sent.clone();
    let writer = thread::spawn(move || {
        at_decode.open_stream();
        let event = format!("data: {}\n\n", "x".repeat(64 << 10));
        for _ in 0..CHUNKS {
            at_decode.chunk(&event);
            progress.fetch_add(1, Ordering::SeqCst);
        }
        at_decode.end_stream();
    });
    // Reads nothing while the worker can still send.
    let mut last = usize::MAX;
    while sent.load(Ordering::SeqCst) != last {
        last = sent.load(Ordering::SeqCst);
        thread::sleep(Duration::from_millis(500));
    }
    assert!(last < CHUNKS, "the router took {last} chunks for a client that reads none");
    let total: usize = std::iter::from_fn(|| client.piece()).map(|piece| piece.len()).sum();
    assert_eq!(total, CHUNKS * ((64 << 10) + 8));
    writer.join().unwrap();
}

#[test]
fn keys_are_asked_for_but_not_for_health() {
    let path = std::env::temp_dir().join(format!("baton-router-keys-{}", std::process::id()));
    std::fs::write(&path, "secret\n").unwrap();
    let (prefill, decode) = (Worker::start(), Worker::start());
    let router =
        Router::ready(&[&prefill], &[&decode], &["--api-key-file", path.to_str().unwrap()]);
    assert_eq!(router.post("/v1/completions", PROMPT).answer().0, 401);
    assert_eq!(router.get("/v1/models").answer().0, 401);
    let mut client = router.connect();
    client.post("/v1/completions", "authorization: Bearer secret\r\n", PROMPT);
    decode.asked().answer("200 OK", "{}");
    assert_eq!(client.answer().0, 200);
    std::fs::remove_file(path).unwrap();
}

/// A client with any admin key can administer; the workers see the first key of the file.
#[test]
fn workers_are_administered_with_the_admin_key_and_else_asked_with_another() {
    let files = ["clients", "admins"].map(|kind| {
        std::env::temp_dir().join(format!("baton-router-{kind}-{}", std::process::id()))
    });
    let [clients, admins] = &files;
    std::fs::write(clients, "client\n").unwrap();
    std::fs::write(admins, "chief\nroot\n").unwrap();
    let (prefill, decode) = (Worker::start(), Worker::start());
    let [clients, admins] = files.each_ref().map(|path| path.to_str().unwrap());
    let flags = ["--api-key-file", clients, "--admin-key-file", admins];
    let router = Router::ready(&[&prefill], &[&decode], &flags);
    let send = |path: &str, key: &str, body: &str| {
        let mut client = router.connect();
        client.post(path, &format!("authorization: Bearer {key}\r\n"), body);
        client
    };
    let check = |path: &str, body: &str, sent: &str, seen: &str| {
        let mut client = send(path, sent, body);
        for worker in [&prefill, &decode] {
            let mut asked = worker.asked();
            let keys: Vec<_> =
                asked.headers.iter().filter(|(name, _)| name == "authorization").collect();
            assert!(keys.len() == 1 && keys[0].1 == format!("Bearer {seen}"), "{path} {keys:?}");
            asked.answer("200 OK", "{}");
        }
        assert_eq!(client.answer().0, 200);
    };
    for (path, body) in [("/flush_cache", ""), ("/abort_request", r#"{"abort_all":true}"#)] {
        let (status, text) = send(path, "client", body).answer();
        assert!(status == 403 && text.contains("admin_key_required"), "{status} {text}");
        assert!(prefill.is_unasked() && decode.is_unasked());
        check(path, body, "root", "chief");
    }
    check("/abort_request", r#"{"rid":"r"}"#, "client", "client");
    check("/abort_request", r#"{"rid":"r"}"#, "root", "root");
    std::fs::write(admins, "second\n").unwrap();
    router.await_said("file reloaded what=\"admin keys\"");
    assert_eq!(send("/flush_cache", "root", "").answer().0, 401);
    check("/flush_cache", "", "second", "second");
    files.iter().for_each(|file| std::fs::remove_file(file).unwrap());
}

#[test]
fn a_drain_finishes_running_requests() {
    let (_prefill, decode, router) = trio();
    let mut other = router.connect();
    let mut client = router.post("/v1/completions", STREAM);
    let mut at_decode = decode.asked();
    at_decode.open_stream();
    at_decode.chunk("data: 1\n\n");
    client.piece();
    router.terminate();
    // The arrival of the signal is not reported. From then on requests are refused.
    loop {
        other.post("/generate", "", "[]");
        let status = other.answer().0;
        if status == 503 {
            break;
        }
        assert_eq!(status, 400);
    }
    at_decode.chunk("data: 2\n\n");
    at_decode.end_stream();
    assert_eq!(client.answer(), (200, "data: 2\n\n".into()));
    assert_eq!(router.exit_status(), Some(0));
}

/// A load balancer in front of it sees that it needs no restart.
#[test]
fn a_router_that_drains_is_healthy_while_it_reaches_a_pair() {
    let (prefill, decode, router) = trio();
    let mut client = router.post("/v1/completions", STREAM);
    prefill.asked().answer("200 OK", "{}");
    let mut at_decode = decode.asked();
    at_decode.open_stream();
    at_decode.chunk("data: 1\n\n");
    assert_eq!(client.piece().as_deref(), Some("data: 1\n\n"));
    assert_eq!(router.get("/health").answer(), (200, "OK".into()));
    router.terminate();
    router.wait_for("/readiness", 503);
    for path in ["/health", "/liveness"] {
        assert_eq!(router.get(path).answer(), (200, "draining".into()), "{path}");
    }
    prefill.stop();
    router.wait_for("/health", 503);
    let (_, body) = router.get("/health").answer();
    assert!(body.contains(r#""code":"no_worker""#), "{body}");
    assert_eq!(router.get("/liveness").answer(), (200, "draining".into()));
    at_decode.end_stream();
    assert_eq!(client.piece(), None);
    assert_eq!(router.exit_status(), Some(0));
}

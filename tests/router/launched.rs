//! Flags that a start script for sglang-router uses. Each must have its effect.

use crate::client::Router;
use crate::worker::{Asked, Worker};
use crate::{PROMPT, trio_with};
use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

fn serve(mut at_prefill: Asked, mut at_decode: Asked) {
    at_prefill.answer("200 OK", "{}");
    at_decode.answer("200 OK", "{}");
}

#[test]
fn so_many_run_so_many_wait_and_the_next_is_told() {
    let flags =
        ["--max-concurrent-requests", "1", "--queue-size", "2", "--queue-timeout-secs", "1"];
    let (prefill, decode, router) = trio_with(&flags);
    let mut first = router.post("/v1/completions", r#"{"prompt":"first"}"#);
    let (at_prefill, at_decode) = (prefill.asked(), decode.asked());
    let mut second = router.post("/v1/completions", r#"{"prompt":"second"}"#);
    thread::sleep(Duration::from_millis(50));
    let mut third = router.post("/v1/completions", PROMPT);
    thread::sleep(Duration::from_millis(50));
    let (status, told) = router.post("/v1/completions", PROMPT).answer();
    assert!(status == 429 && told.contains("overloaded"), "{status} {told}");
    // A request without generation does not wait.
    let mut models = router.get("/v1/models");
    prefill.asked().answer("200 OK", "[]");
    assert_eq!(models.answer().0, 200);
    assert!(decode.is_unasked(), "the others wait");
    serve(at_prefill, at_decode);
    assert_eq!(first.answer().0, 200);
    let (at_prefill, at_decode) = (prefill.asked(), decode.asked());
    assert_eq!(at_decode.json()["prompt"], "second", "first come, first served");
    let (status, told) = third.answer();
    assert!(status == 408 && told.contains("deadline"), "{status} {told}");
    serve(at_prefill, at_decode);
    assert_eq!(second.answer().0, 200);
}

#[test]
fn a_request_that_leaves_the_queue_is_not_served_and_delays_no_other() {
    let flags = ["--max-concurrent-requests", "1", "--queue-size", "2"];
    let (prefill, decode, router) = trio_with(&flags);
    let mut first = router.post("/v1/completions", PROMPT);
    let (at_prefill, at_decode) = (prefill.asked(), decode.asked());
    let gone = router.post("/v1/completions", r#"{"prompt":"gone"}"#);
    thread::sleep(Duration::from_millis(50));
    let mut aborted = router.post("/v1/completions", r#"{"prompt":"aborted","rid":"a"}"#);
    thread::sleep(Duration::from_millis(50));
    drop(gone);
    let mut abort = router.post("/abort_request", r#"{"rid":"a"}"#);
    prefill.asked().answer("200 OK", "{}");
    decode.asked().answer("200 OK", "{}");
    assert_eq!(abort.answer().0, 200);
    assert_eq!(aborted.answer().0, 499);
    let mut last = router.post("/v1/completions", r#"{"prompt":"last"}"#);
    serve(at_prefill, at_decode);
    assert_eq!(first.answer().0, 200);
    let (at_prefill, at_decode) = (prefill.asked(), decode.asked());
    assert_eq!(at_decode.json()["prompt"], "last");
    serve(at_prefill, at_decode);
    assert_eq!(last.answer().0, 200);
}

#[test]
fn a_client_stands_in_line_no_longer_than_it_said() {
    let (prefill, decode, router) = trio_with(&["--max-concurrent-requests", "1"]);
    let mut first = router.post("/v1/completions", PROMPT);
    let (at_prefill, at_decode) = (prefill.asked(), decode.asked());
    let mut patient = router.post("/v1/completions", PROMPT);
    thread::sleep(Duration::from_millis(50));
    let mut client = router.connect();
    client.post("/v1/completions", "x-request-timeout-ms: 300\r\n", PROMPT);
    assert_eq!(client.answer().0, 408);
    serve(at_prefill, at_decode);
    assert_eq!(first.answer().0, 200);
    serve(prefill.asked(), decode.asked());
    assert_eq!(patient.answer().0, 200);
}

#[test]
fn a_request_has_as_long_as_the_router_was_told() {
    let (prefill, decode, router) = trio_with(&["--request-timeout-secs", "1"]);
    let begun = Instant::now();
    let mut client = router.post("/v1/completions", PROMPT);
    let (at_prefill, at_decode) = (prefill.asked(), decode.asked());
    for asked in [&at_prefill, &at_decode] {
        assert!((1..=1000).contains(&patience(asked)), "so that a worker ends it by itself");
    }
    assert_eq!(client.answer().0, 408);
    assert!(begun.elapsed() >= Duration::from_secs(1));
    let (prefill, decode, router) = trio_with(&["--request-timeout-secs", "60"]);
    for (asks, gets) in [("30000", 30_000), ("90000", 60_000)] {
        let mut client = router.connect();
        client.post("/v1/completions", &format!("x-request-timeout-ms: {asks}\r\n"), PROMPT);
        let (at_prefill, at_decode) = (prefill.asked(), decode.asked());
        // The rest of the time limit at the moment of sending.
        let left = patience(&at_decode);
        assert!(left <= gets && left > gets / 2, "{left} of {asks}");
        serve(at_prefill, at_decode);
        assert_eq!(client.answer().0, 200);
    }
    let mut client = router.connect();
    client.post("/v1/completions", "x-request-timeout-ms: soon\r\n", PROMPT);
    let (at_prefill, at_decode) = (prefill.asked(), decode.asked());
    assert_eq!(
        at_decode.header("x-request-timeout-ms"),
        Some("soon"),
        "the worker says what is wrong with it"
    );
    serve(at_prefill, at_decode);
    assert_eq!(client.answer().0, 200);
}

/// Milliseconds that a worker can take at most.
fn patience(asked: &Asked) -> u64 {
    asked.header("x-request-timeout-ms").and_then(|told| told.parse().ok()).expect("milliseconds")
}

#[test]
fn requests_are_named_and_measured_as_was_said() {
    let flags = ["--request-id-headers", "X-Trace-Id", "x-request-id", "--max-payload-size", "64"];
    let (prefill, decode, router) = trio_with(&flags);
    for (fields, name) in [
        ("x-request-id: a\r\nx-trace-id: b\r\n", "b"),
        ("x-request-id: a\r\n", "a"),
        ("x-trace-id: c\r\n", "c"),
    ] {
        let mut client = router.connect();
        client.post("/v1/completions", fields, PROMPT);
        let (at_prefill, at_decode) = (prefill.asked(), decode.asked());
        assert_eq!(at_decode.header("x-request-id"), Some(name));
        serve(at_prefill, at_decode);
        assert_eq!(client.answer().0, 200);
        assert_eq!(client.header("x-request-id"), Some(name));
    }
    let (status, told) =
        router.post("/v1/completions", &format!("{{\"prompt\":\"{}\"}}", "a".repeat(64))).answer();
    assert!(status == 413 && told.contains("64"), "{status} {told}");
}

#[test]
fn metrics_have_a_port_of_their_own_that_asks_for_no_key() {
    let keys = std::env::temp_dir().join(format!("baton-launched-{}", std::process::id()));
    std::fs::write(&keys, "secret-of-this-test\n").unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let flags = [
        "--prometheus-port",
        &port,
        "--prometheus-host",
        "127.0.0.1",
        "--api-key-file",
        keys.to_str().unwrap(),
    ];
    let (_prefill, _decode, router) = trio_with(&flags);
    std::fs::remove_file(keys).unwrap();
    assert_eq!(router.get("/metrics").answer().0, 401);
    let mut scraper = Router::client_of(&format!("127.0.0.1:{port}"));
    for (path, status) in [
        ("/metrics", 200),
        ("/v1/models", 404),
        ("/workers", 404),
        ("/health", 404),
        ("/metrics", 200),
    ] {
        scraper.ask("GET", path, "", "");
        let (got, body) = scraper.answer();
        assert_eq!(got, status, "{path}: {body}");
        assert_eq!(got == 200, body.contains("smg_worker_health{"), "{path}: {body}");
    }
    scraper.ask("POST", "/metrics", "", "");
    assert_eq!(scraper.answer().0, 405);
}

#[test]
fn health_checks_use_the_configured_path_and_thresholds() {
    let (prefill, decode) = (Worker::start(), Worker::start());
    let flags = [
        "--health-check-endpoint",
        "/ready",
        "--health-success-threshold",
        "2",
        "--health-check-timeout-secs",
        "20",
    ];
    let router = Router::start(&[&prefill], &[&decode], &flags);
    for count in 0..2 {
        for worker in [&prefill, &decode] {
            let mut asked = worker.asked();
            assert_eq!(asked.line, "GET /ready HTTP/1.1");
            assert_eq!(router.get("/readiness").answer().0, 503, "after {count}");
            asked.answer("200 OK", "{}");
        }
    }
    router.wait_for("/readiness", 200);
    // After three failures in a row the worker is down, and the log has the reason.
    for _ in 0..3 {
        decode.asked().answer("500 Sick", "{}");
    }
    router.await_said("/ready answers with status 500");
}

#[test]
fn one_that_does_not_come_in_time_is_no_longer_looked_for() {
    let decode = Worker::start();
    // A worker that starts later at this address.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let args = [
        "--prefill",
        &format!("http://{address}"),
        "9000",
        "--decode",
        &crate::client::url(&decode),
    ];
    let args: Vec<String> = args
        .iter()
        .chain(&["--worker-startup-timeout-secs", "1"])
        .map(|arg| arg.to_string())
        .collect();
    let router = Router::run(&args);
    router.wait_for_workers(1);
    router.await_said("not up in time: probing stopped");
    let late = Worker::at(address, Some(("200 OK", "{}")));
    thread::sleep(Duration::from_millis(2500));
    assert_eq!(router.get("/readiness").answer().0, 503);
    assert!(late.is_unasked());
    // A worker that is announced again is probed again.
    let named =
        format!(r#"{{"url":"http://{address}","worker_type":"prefill","bootstrap_port":9000}}"#);
    assert_eq!(router.post("/workers", &named).answer().0, 202);
    router.wait_for("/readiness", 200);
}

/// By default one failure is enough for a worker to be chosen last. With a higher threshold it is
/// not.
#[test]
fn a_circuit_opens_after_as_many_failures_as_was_said() {
    for (threshold, first_is_asked_again) in [("1", false), ("3", true)] {
        let (prefill, decode) = (Worker::start(), [Worker::start(), Worker::start()]);
        let flags = [
            "--disable-retries",
            "--cb-failure-threshold",
            threshold,
            "--cb-timeout-duration-secs",
            "60",
        ];
        let router = Router::start(&[&prefill], &[&decode[0], &decode[1]], &flags);
        router.wait_for_workers(3);
        let mut client = router.post("/v1/completions", PROMPT);
        let _at_prefill = prefill.asked();
        decode[0].asked().answer("500 No", "{}");
        assert_eq!(client.answer().0, 500);
        // The other worker in turn, and then the first again, or not.
        for which in [1, if first_is_asked_again { 0 } else { 1 }] {
            let mut client = router.post("/v1/completions", PROMPT);
            let mut at_decode = decode[which].asked();
            prefill.asked().answer("200 OK", "{}");
            at_decode.answer("200 OK", "{}");
            assert_eq!(client.answer().0, 200);
        }
    }
}

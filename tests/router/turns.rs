//! Role changes that the router's role balancer orders.

use crate::STREAM;
use crate::client::{Client, Router, url};
use crate::worker::{Asked, PATIENCE, Worker};
use std::thread;
use std::time::{Duration, Instant};

/// One request puts decode workers under pressure. Prompts put no pressure on prefill workers.
const FLAGS: [&str; 7] = [
    "--rebalance",
    "--rebalance-window-secs",
    "1",
    "--rebalance-dwell-secs",
    "1",
    "--prefill-ms",
    "1,0,0",
];
const REFUSED: &str = r#"{"error":{"code":"role_not_possible","message":"no"}}"#;
const LATER: &str = r#"{"error":{"code":"role_changes","message":"not now"}}"#;

fn told(role: &str, weights: &str) -> &'static str {
    format!(
        r#"{{"disaggregation_mode":"{role}","role_changes":0,"max_running_requests":1,
        "max_total_tokens":1000,
        "handoff":{{"weights":"{weights}"}}}}"#
    )
    .leak()
}

/// An answer that continues, and the request that keeps it open.
fn pressed(router: &Router, readers: &[Worker], decode: &Worker) -> (Client, Asked) {
    let mut client = router.post("/v1/completions", STREAM);
    let mut at_decode = decode.asked();
    at_decode.open_stream();
    at_decode.chunk("data: 1\n\n");
    assert_eq!(client.piece().as_deref(), Some("data: 1\n\n"));
    let begun = Instant::now();
    let mut at_prefill = loop {
        if let Some(asked) = readers.iter().find_map(Worker::try_asked) {
            break asked;
        }
        assert!(begun.elapsed() < PATIENCE, "none of them reads");
        thread::sleep(Duration::from_millis(1));
    };
    at_prefill.answer("200 OK", "{}");
    (client, at_decode)
}

/// The next request, which orders it to be a decode worker.
#[track_caller]
fn asked(worker: &Worker) -> Asked {
    let asked = worker.asked();
    assert_eq!(asked.line, "POST /role HTTP/1.1");
    assert_eq!(asked.json()["role"], "decode");
    asked
}

#[test]
fn a_worker_that_cannot_change_is_not_asked_again_but_another() {
    let readers = [(); 3].map(|()| Worker::with_identity(told("prefill", "aa")));
    let decode = Worker::with_identity(told("decode", "aa"));
    let router = Router::ready(&readers.each_ref(), &[&decode], &FLAGS);
    router.wait_for_workers(4);
    let _runs = pressed(&router, &readers, &decode);
    asked(&readers[0]).answer("409 Conflict", LATER);
    asked(&readers[0]).answer("409 Conflict", REFUSED);
    router.await_said("it answers with status 409, code role_not_possible");
    asked(&readers[1]).answer("409 Conflict", REFUSED);
    asked(&readers[2]).answer("202 Accepted", "{}");
    assert!(readers[0].is_unasked() && readers[1].is_unasked());
}

/// Also for an operator; a query of the role needs no admin key.
#[test]
fn a_role_is_changed_with_the_admin_key() {
    let path = std::env::temp_dir().join(format!("baton-turn-keys-{}", std::process::id()));
    std::fs::write(&path, "chief\n").unwrap();
    let readers = [(); 2].map(|()| Worker::with_identity(told("prefill", "aa")));
    let decode = Worker::with_identity(told("decode", "aa"));
    let flags = [&FLAGS[..], &["--admin-key-file", path.to_str().unwrap()]].concat();
    let router = Router::ready(&readers.each_ref(), &[&decode], &flags);
    router.wait_for_workers(3);
    let key = |asked: &Asked| {
        let mut keys = asked.headers.iter().filter(|(name, _)| name == "authorization");
        keys.next().map(|(_, key)| key.clone())
    };
    let chief = Some(String::from("Bearer chief"));
    let path_of_role = format!("/workers/{}/role", id_of(&router, &readers[1]));
    let mut client = router.get(&path_of_role);
    let mut queried = readers[1].asked();
    assert_eq!((queried.line.as_str(), key(&queried)), ("GET /role HTTP/1.1", None));
    queried.answer("200 OK", "{}");
    assert_eq!(client.answer().0, 200);
    assert_eq!(router.post(&path_of_role, r#"{"role":"decode"}"#).answer().0, 401);
    let mut client = router.connect();
    client.post(&path_of_role, "authorization: Bearer chief\r\n", r#"{"role":"decode"}"#);
    let mut told = asked(&readers[1]);
    assert_eq!(key(&told), chief);
    told.answer("409 Conflict", LATER);
    assert_eq!(client.answer().0, 409);
    router.wait_for_workers(3);
    let _runs = pressed(&router, &readers, &decode);
    let mut told = asked(&readers[0]);
    assert_eq!(key(&told), chief);
    told.answer("202 Accepted", "{}");
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_worker_that_its_role_needs_is_passed_over_for_a_spare_one() {
    let readers = ["aa", "bb"].map(|weights| Worker::with_identity(told("prefill", weights)));
    let decode = Worker::with_identity(told("decode", "aa"));
    let router = Router::ready(&readers.each_ref(), &[&decode], &FLAGS);
    router.wait_for_workers(3);
    let _runs = pressed(&router, &readers, &decode);
    asked(&readers[1]).answer("202 Accepted", "{}");
    assert!(readers[0].is_unasked(), "without it there is no pair");
}

/// Its ID in the list of workers.
fn id_of(router: &Router, worker: &Worker) -> String {
    let listed: serde_json::Value =
        serde_json::from_str(&router.get("/workers").answer().1).unwrap();
    let is_it = |listed: &&serde_json::Value| listed["url"] == url(worker);
    let found = listed["workers"].as_array().unwrap().iter().find(is_it).expect("it is listed");
    found["id"].as_str().unwrap().to_owned()
}

#[test]
fn the_role_that_a_worker_reports_is_passed_on() {
    let (reader, decode) = (Worker::start(), Worker::start());
    let router = Router::ready(&[&reader], &[&decode], &[]);
    let path = format!("/workers/{}/role", id_of(&router, &reader));
    let mut client = router.get(&path);
    let mut asked = reader.asked();
    assert_eq!(asked.line, "GET /role HTTP/1.1");
    asked.answer("200 OK", r#"{"role":"prefill"}"#);
    assert_eq!(client.answer(), (200, r#"{"role":"prefill"}"#.into()));
    let mut client = router.get(&path);
    reader.asked().answer("404 Not Found", "{}");
    assert_eq!(client.answer().0, 404, "it has no role to tell");
    assert_eq!(router.get("/workers/99/role").answer().0, 404);
}

/// The probe was sent before the order to change, and its answer comes after that.
#[test]
fn a_worker_that_is_to_change_is_not_up_by_a_late_answer() {
    let (reader, [stays, turns]) = (Worker::start(), [Worker::start(), Worker::start()]);
    let router =
        Router::ready(&[&reader], &[&stays, &turns], &["--health-check-timeout-secs", "10"]);
    router.wait_for_workers(3);
    let up = format!("worker is up role=decode worker={}", url(&turns));
    router.await_said(&up);
    turns.hold_probes(true);
    turns.await_probes(1);
    let path = format!("/workers/{}/role", id_of(&router, &turns));
    let mut client = router.post(&path, r#"{"role":"prefill"}"#);
    turns.asked().answer("202 Accepted", "{}");
    assert_eq!(client.answer().0, 202);
    turns.drain();
    turns.hold_probes(false);
    turns.await_probes(2);
    assert_eq!(router.times_said(&up), 1);
}

//! Roles that a router has its workers change by itself.

use crate::STREAM;
use crate::client::{Client, Router};
use crate::worker::{Asked, Worker};

/// Decode workers are pressed by one request, and nobody by prompts.
const FLAGS: [&str; 7] =
    ["--rebalance", "--rebalance-window-secs", "1", "--rebalance-dwell-secs", "1", "--prefill-ms", "1,0,0"];
const REFUSED: &str = r#"{"error":{"code":"role_not_possible","message":"no"}}"#;
const LATER: &str = r#"{"error":{"code":"role_changes","message":"not now"}}"#;

fn told(role: &str, weights: &str) -> &'static str {
    format!(
        r#"{{"disaggregation_mode":"{role}","role_changes":0,"max_running_requests":1,"max_total_tokens":1000,
        "handoff":{{"weights":"{weights}"}}}}"#
    )
    .leak()
}

/// An answer that goes on, and what keeps it going.
fn pressed(router: &Router, readers: &[Worker], decode: &Worker) -> (Client, Asked) {
    let mut client = router.post("/v1/completions", STREAM);
    let mut at_decode = decode.asked();
    at_decode.open_stream();
    at_decode.chunk("data: 1\n\n");
    assert_eq!(client.piece().as_deref(), Some("data: 1\n\n"));
    let mut at_prefill = readers.iter().find_map(Worker::try_asked).expect("one of them reads");
    at_prefill.answer("200 OK", "{}");
    (client, at_decode)
}

/// The next that it is asked, which is to be a decode worker.
#[track_caller]
fn asked(worker: &Worker) -> Asked {
    let asked = worker.asked();
    assert_eq!(asked.line, "POST /role HTTP/1.1");
    assert_eq!(asked.json()["role"], "decode");
    asked
}

#[test]
fn a_worker_that_cannot_change_is_not_asked_again_but_another() {
    let readers = [(); 3].map(|()| Worker::introduced(told("prefill", "aa")));
    let decode = Worker::introduced(told("decode", "aa"));
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

#[test]
fn one_that_the_others_need_is_passed_over_for_one_that_they_do_not() {
    let readers = ["aa", "bb"].map(|weights| Worker::introduced(told("prefill", weights)));
    let decode = Worker::introduced(told("decode", "aa"));
    let router = Router::ready(&readers.each_ref(), &[&decode], &FLAGS);
    router.wait_for_workers(3);
    let _runs = pressed(&router, &readers, &decode);
    asked(&readers[1]).answer("202 Accepted", "{}");
    assert!(readers[0].is_unasked(), "without it there is no pair");
}

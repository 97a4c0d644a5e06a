//! Streams that begin with prefill's token have the same bytes as streams that begin with decode's
//! token. This holds for all requests and after each kind of death.

use crate::fleet::Fleet;
use crate::leg::Leg;
use crate::moves::{Slow, cases, check_same, events, open};
use crate::process::{PATIENCE, Process};
use crate::{prefill, start};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

const AHEAD: [&str; 2] = ["--first-token", "prefill"];

/// Special first tokens: the only one, the end of the answer, half of a character. Also the
/// beginning or all of a stop string, and one of several choices.
fn corners() -> Vec<(&'static str, Value)> {
    let ids: Vec<u32> = (0..40).map(|i| 3 + (7 + i * 131) % 300).collect();
    let usage = json!({ "include_usage": true });
    let mut corners = Vec::new();
    for salt in 0..12 {
        let mut body = json!({"prompt": ids, "max_tokens": 3, "temperature": 40, "seed": salt,
            "return_token_ids": true, "stream_options": usage, "n": 2});
        corners.push(("/v1/completions", body.clone()));
        body["max_tokens"] = json!(1);
        corners.push(("/v1/completions", body.clone()));
        body["return_token_ids"] = json!(false);
        corners.push(("/v1/completions", body));
    }
    corners
}

/// The same request, changed so that its first token ends the answer.
fn ending(body: &Value, first: &Value) -> Vec<Value> {
    let Some(token) = first["choices"][0]["token_ids"].get(0).cloned() else { return Vec::new() };
    let text = first["choices"][0]["text"].as_str().unwrap_or_default().to_owned();
    let with = |field: &str, value: Value| {
        let mut body = body.clone();
        body["max_tokens"] = json!(6);
        body[field] = value;
        body
    };
    let mut bodies = vec![with("stop_token_ids", json!([token]))];
    if !text.is_empty() {
        bodies.push(with("stop", json!([text])));
        // The text is held back until the next token shows that it is no stop string.
        bodies.push(with("stop", json!([format!("{text}\u{1}never")])));
    }
    bodies
}

/// Sends the request to both and checks that they answer the same.
#[track_caller]
fn compare(ahead: SocketAddr, plain: SocketAddr, case: &(&'static str, Value)) -> Vec<String> {
    let expected = events(&open(plain, case).end());
    check_same(&open(ahead, case).end(), &expected, &case.1);
    expected
}

fn all(ahead: SocketAddr, plain: SocketAddr) {
    for case in cases() {
        compare(ahead, plain, &case);
    }
    for case in corners() {
        let told = compare(ahead, plain, &case);
        let first = told[0].strip_prefix("data: ").and_then(|data| serde_json::from_str(data).ok());
        for body in ending(&case.1, &first.unwrap_or(Value::Null)) {
            compare(ahead, plain, &(case.0, body));
        }
    }
}

#[test]
fn a_router_answers_the_same_whichever_worker_sends_the_first_token() {
    let mut fleet = Fleet::with(vec![prefill(&[])], vec![start("decode", &[])], &AHEAD);
    let worker = |worker: &Process| format!("http://{}", worker.address);
    let (reader, writer) = (&fleet.prefill[0], &fleet.decode[0]);
    let port = reader.bootstrap_port.to_string();
    let mut plain = Process::start(&[
        "router",
        "--port",
        "0",
        "--prefill",
        &worker(reader),
        &port,
        "--decode",
        &worker(writer),
    ]);
    let begun = Instant::now();
    while plain.get("/readiness").0 != 200 {
        assert!(begun.elapsed() < PATIENCE, "the router never sees its workers");
        thread::sleep(Duration::from_millis(20));
    }
    all(fleet.router.address, plain.address);
    fleet.check_idle();
    plain.check_alive();
}

#[test]
fn one_process_answers_the_same_whichever_worker_sends_the_first_token() {
    let (mut ahead, mut plain) = (start("serve", &AHEAD), start("serve", &[]));
    all(ahead.address, plain.address);
    for server in [&mut ahead, &mut plain] {
        server.await_idle();
        server.check_alive();
    }
}

/// One of the legs dies after the first token, or in the middle of the stream.
#[test]
fn streams_that_prefill_began_survive_deaths() {
    let mut slow = Slow::with("shm", &AHEAD);
    let address = slow.fleet.router.address;
    for case in cases() {
        let expected = events(&open(address, &case).end());
        for after in [1, 9] {
            for worker in &slow.fleet.prefill {
                worker.post("/flush_cache", "");
            }
            let mut stream: Leg = open(address, &case);
            stream.await_events(after);
            let victim = slow.busy();
            slow.kill_decode(victim);
            check_same(&stream.end(), &expected, &case.1);
            slow.restart_decode(victim);
        }
    }
    slow.fleet.check_idle();
}

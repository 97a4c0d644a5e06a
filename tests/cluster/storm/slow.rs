//! A client that stops reading for a long time or for ever. The router and the worker hold a
//! bounded amount of its data, and no other request waits. The client gets its complete answer, or
//! an error at its deadline.

use super::clients::{cases, text};
use super::cluster::{Model, mib};
use crate::dummy::Dummy;
use crate::fleet::Fleet;
use crate::leg::Leg;
use crate::process::{PATIENCE, Process, parse, post};
use baton::limits::NET_QUEUED_MAX;
use serde_json::{Value, json};
use std::thread;
use std::time::{Duration, Instant};

/// Most memory of a router for it: the queue for a client, the data received from the worker, and
/// buffers that grow by doubling.
const ROUTER_MAX: u64 = 2 << 20;

const TOKENS: usize = 1600;

/// Time for a real model on a busy machine to generate as much.
const GENERATED: Duration = Duration::from_secs(900);

/// More data than the kernels buffer on the way to the client, and less than a worker does.
fn much() -> Value {
    json!({"prompt": (3..43).collect::<Vec<_>>(), "max_tokens": TOKENS, "n": 8, "logprobs": 20,
        "temperature": 1.0, "seed": 5, "ignore_eos": true, "stream": true})
}

fn fleet(model: &Model) -> Fleet {
    // All its choices fit into the KV memory at once.
    let common = ["--transfer", "tcp", "--max-running-requests", "16", "--kv-memory", "512MiB"];
    let prefill = model.start(0, "prefill", &[&common[..], &["--bootstrap-port", "0"]].concat());
    let decode = model.start(0, "decode", &common);
    Fleet::new(vec![prefill], vec![decode])
}

fn model() -> Model {
    Model::get_or(|| Dummy::new(&json!({"max_position_embeddings": 2048})))
}

fn asked(router: &Process, fields: &str) -> Leg {
    let leg = Leg::open(router.address, "/v1/completions", fields, &much());
    leg.narrow();
    leg
}

/// The events of each choice separately, because they interleave at random.
fn events(answer: &str) -> Vec<Vec<Value>> {
    let mut choices = vec![Vec::new(); 8];
    for data in answer.lines().filter_map(|line| line.strip_prefix("data: ")) {
        if let Ok(event) = serde_json::from_str::<Value>(data) {
            let choice = event["choices"][0].clone();
            choices[choice["index"].as_u64().expect("an index") as usize].push(choice);
        }
    }
    choices
}

#[test]
fn a_slow_reader_delays_no_other_client_and_gets_its_whole_answer() {
    let model = model();
    let others = cases(&model, |_| {});
    let alone = model.start(0, "serve", &["--mixed", "--max-running-requests", "16"]);
    let answer = post(alone.address, "/v1/completions", &much().to_string()).1;
    let expected = events(&answer);
    assert!(expected.iter().all(|choice| choice.len() >= TOKENS), "an event a token");
    drop(alone);
    let mut fleet = fleet(&model);
    let ask_others = |fleet: &Fleet| {
        let begun = Instant::now();
        for case in &others {
            let answer = fleet.router.post("/v1/completions", &case.body.to_string());
            assert_eq!(text(&answer).as_ref(), Ok(&case.expected));
        }
        begun.elapsed()
    };
    let without = ask_others(&fleet);
    let memory = |fleet: &Fleet| [&fleet.router, &fleet.decode[0]].map(Process::resident_alone);
    let before = memory(&fleet);
    let mut leg = asked(&fleet.router, "");
    leg.await_events(1);
    let beside = ask_others(&fleet);
    // Both workers have finished it, and its pages are free, though its client has received almost
    // nothing.
    fleet.workers().for_each(|worker| worker.await_idle_within(GENERATED));
    let within = memory(&fleet);
    ask_others(&fleet);
    let held = fleet.router.get("/v1/loads").1;
    eprintln!("STORM of {} MiB, held: {held}", mib(answer.len() as u64));
    assert!(held.contains("\"num_running_reqs\":1"), "the router waits for it: {held}");
    let mut sips = 0;
    while leg.sip(4096) {
        sips += 1;
        if sips % 64 == 0 {
            thread::sleep(Duration::from_millis(10));
        }
    }
    let answer = leg.end();
    eprintln!(
        "STORM a slow reader of {} MiB: router {} MiB, then {}; decode worker {} MiB, then {}; \
         others {without:.2?} without, \
         {beside:.2?} beside it",
        mib(answer.len() as u64),
        mib(before[0]),
        mib(within[0]),
        mib(before[1]),
        mib(within[1]),
    );
    let answer = parse(&answer).1;
    assert!(answer.ends_with("data: [DONE]\n\n"), "it has a proper end");
    assert_eq!(events(&answer), expected);
    assert!(within[0] < before[0] + ROUTER_MAX, "the router holds what its client does not read");
    // The queue doubles as it grows.
    assert!(
        within[1] < before[1] + 3 * NET_QUEUED_MAX as u64,
        "the worker holds data that is not read"
    );
    fleet.check_idle();
}

#[test]
fn a_request_ends_at_its_deadline_if_its_client_never_reads() {
    let model = model();
    let mut fleet = fleet(&model);
    let mut leg = asked(&fleet.router, "x-request-timeout-ms: 4000\r\n");
    let begun = Instant::now();
    leg.await_events(1);
    while !fleet.router.get("/v1/loads").1.contains("\"num_running_reqs\":0") {
        assert!(begun.elapsed() < PATIENCE, "the router waits for a client that never reads");
        thread::sleep(Duration::from_millis(50));
    }
    eprintln!("STORM a client that never reads is given up after {:.1?}", begun.elapsed());
    fleet.check_idle();
    // Broken off: the client has no end of the answer.
    let answer = leg.end();
    assert!(!answer.contains("data: [DONE]"), "so much is no answer that kernels keep");
}

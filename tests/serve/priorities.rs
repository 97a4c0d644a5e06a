//! Requests with priorities that wait in a router. Those that wait in a worker: `tests/sched.rs`.

use crate::client::{Client, PATIENCE};
use crate::server::{Routed, Server, endless};
use serde_json::json;
use std::thread;
use std::time::{Duration, Instant};

const PRIORITY: [&str; 2] = ["--scheduling-policy", "priority"];
const ONE_AT_A_TIME: [&str; 2] = ["--max-concurrent-requests", "1"];

/// Waits until this many requests wait in the router.
#[track_caller]
fn await_waiting(router: &Server, count: u64) {
    let begun = Instant::now();
    loop {
        let loads = router.get("/v1/loads").ok();
        let waiting = loads["loads"][0]["num_waiting_reqs"].as_u64().expect("a number");
        if waiting == count {
            return;
        }
        assert!(begun.elapsed() < PATIENCE, "{waiting} requests wait, not {count}: {loads}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Sends requests that run until their clients leave, one after the other. The first one runs, and
/// the others wait. Returns their numbers in the order in which they run.
fn order(router: &Server, asked: &[(&str, i32)]) -> Vec<usize> {
    let send = |&(path, priority): &(&str, i32)| {
        let mut body = endless();
        if path == "/generate" {
            let sampling = json!({"max_new_tokens": 60000, "ignore_eos": true});
            body = json!({"input_ids": [5, 6], "sampling_params": sampling, "stream": true});
        }
        body["priority"] = json!(priority);
        let mut client = router.connect();
        client.post(path, &body);
        client
    };
    let mut clients: Vec<(usize, Client)> = Vec::new();
    for (number, request) in asked.iter().enumerate() {
        clients.push((number, send(request)));
        if number == 0 {
            clients[0].1.wait_for("data: ");
        }
        await_waiting(router, number as u64);
    }
    let mut order = Vec::new();
    while !clients.is_empty() {
        let begun = Instant::now();
        let at = loop {
            if let Some(at) = clients.iter_mut().position(|(_, client)| client.has_bytes()) {
                break at;
            }
            assert!(begun.elapsed() < PATIENCE, "no request runs");
            thread::sleep(Duration::from_millis(5));
        };
        order.push(clients.remove(at).0);
    }
    order
}

#[test]
fn the_most_urgent_request_in_a_router_runs_first() {
    let routed = Routed::start(&PRIORITY, &ONE_AT_A_TIME);
    // In `/generate`, the highest number is the first.
    let asked = [
        ("/v1/completions", 0),
        ("/v1/completions", 5),
        ("/v1/completions", 0),
        ("/generate", 7),
        ("/v1/completions", -3),
        ("/v1/completions", 0),
    ];
    assert_eq!(order(&routed.router, &asked), [0, 3, 4, 2, 5, 1]);
}

#[test]
fn a_router_without_the_policy_has_the_order_of_arrival() {
    let routed = Routed::start(&[], &ONE_AT_A_TIME);
    let asked = [("/v1/completions", 0); 3];
    assert_eq!(order(&routed.router, &asked), [0, 1, 2]);
    // The workers refuse a priority without the policy, and so does no router.
    let mut urgent = endless();
    urgent["priority"] = json!(-1);
    let (status, code, param) = routed.router.post("/v1/completions", &urgent).error();
    assert_eq!((status, code.as_str(), param.as_deref()), (400, "invalid_value", Some("priority")));
}

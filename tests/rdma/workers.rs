//! Real workers that transfer KV over the NIC: a router with prefill and decode, and a mixed worker
//! for comparison.

use crate::fleet::Fleet;
use crate::process::{PATIENCE, Process};
use serde_json::{Value, json};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/llama-f32");
/// A full layer between window layers.
const GEMMA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/gemma3-f32");
/// Recurrent layers alone, and beside attention.
const MAMBA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/mamba2-f32");
const FALCON: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/falcon-h1-f32");
pub const MODELS: [&str; 4] = [MODEL, GEMMA, MAMBA, FALCON];

pub fn arguments<'a>(command: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    arguments_for(MODEL, command, more)
}

fn arguments_for<'a>(model: &'a str, command: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let common =
        ["--port", "0", "--kv-memory", "8MiB", "--threads", "1", "--max-running-requests", "4"];
    [&[command, model], &common[..], more].concat()
}

pub fn start(command: &str, more: &[&str]) -> Process {
    Process::start(&arguments(command, more))
}

pub fn ids(answer: (u16, String)) -> Value {
    let (status, text) = answer;
    assert_eq!(status, 200, "{text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    json!([answer["choices"][0]["token_ids"], answer["choices"][0]["logprobs"]["token_logprobs"]])
}

fn pair(rdma: &[&str]) -> Fleet {
    pair_of(MODEL, rdma)
}

fn pair_of(model: &str, rdma: &[&str]) -> Fleet {
    let start = |command, more: &[&str]| Process::start(&arguments_for(model, command, more));
    // A second try would hide what became of the first one.
    let prefill =
        start("prefill", &[rdma, &["--bootstrap-port", "0", "--control-port", "0"]].concat());
    Fleet::with(vec![prefill], vec![start("decode", &rdma[..2])], &["--disable-retries"])
}

/// Each is a tenant of its own, so that no cache has any of it.
pub fn body(salt: u32, tokens: u32) -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let tenant = COUNT.fetch_add(1, Ordering::Relaxed).to_string();
    let prompt: Vec<u32> = (0..tokens).map(|i| 10 + (i * 7 + salt * 13) % 300).collect();
    json!({
        "prompt": prompt, "max_tokens": 12, "temperature": 0.7, "seed": salt, "ignore_eos": true,
        "logprobs": 1, "return_token_ids": true, "cache_salt": tenant,
    })
    .to_string()
}

#[test]
#[ignore = "needs an RDMA device"]
fn answers_are_those_of_one_process_byte_for_byte() {
    for model in MODELS {
        answers_are_those_of_one_process(model, "early");
        answers_are_those_of_one_process(model, "late");
    }
}

fn answers_are_those_of_one_process(model: &str, allocation: &str) {
    let flags = ["--chunked-prefill-size", "32", "--decode-allocation", allocation];
    let mut fleet = pair_of(model, &[&["--transfer", "rdma"], &flags[..]].concat());
    let alone = Process::start(&arguments_for(model, "serve", &["--mixed"]));
    for (salt, tokens) in [(1, 5), (2, 16), (3, 100), (4, 33)] {
        let body = body(salt, tokens);
        let expected = ids(alone.post("/v1/completions", &body));
        // The second time all but the last page is there.
        for time in ["first", "second"] {
            let found = ids(fleet.router.post("/v1/completions", &body));
            assert_eq!(found, expected, "{model}: {tokens} tokens, the {time} time");
        }
    }
    let hits = fleet.decode[0].metric("vllm:prefix_cache_hits_total{", "");
    // State arrives as a whole.
    assert!(if model == MAMBA { hits == 0.0 } else { hits >= 96.0 + 32.0 }, "{model}: {hits}");
    assert!(fleet.decode[0].has_said("transport=rdma"), "the session says how KV moves");
    fleet.check_idle();
}

/// A client leaves at any time of the hand-off. Nothing of its request stays, and no bytes of other
/// requests change.
#[test]
#[ignore = "needs an RDMA device"]
fn clients_that_leave_at_any_time_leave_nothing() {
    clients_that_leave_leave_nothing("early");
    clients_that_leave_leave_nothing("late");
}

fn clients_that_leave_leave_nothing(allocation: &str) {
    let mut fleet = pair(&[
        "--transfer",
        "rdma",
        "--chunked-prefill-size",
        "32",
        "--decode-allocation",
        allocation,
    ]);
    let ask = |fleet: &Fleet| ids(fleet.router.post("/v1/completions", &body(2, 70)));
    let expected = ask(&fleet);
    for wait in [0, 5, 10, 20, 40, 60, 80, 120, 160, 240, 400] {
        let mut leaving = std::net::TcpStream::connect(fleet.router.address).unwrap();
        let body = json!({"prompt": vec![11; 200], "max_tokens": 100, "stream": true,
            "cache_salt": wait.to_string()})
        .to_string();
        let length = body.len();
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        std::io::Write::write_all(&mut leaving, head.as_bytes()).unwrap();
        thread::sleep(Duration::from_millis(wait));
        drop(leaving);
        // In the pages that it gives back, perhaps.
        assert_eq!(ask(&fleet), expected, "after {wait} ms");
    }
    fleet.check_idle();
}

/// The answer once there is one: a request right behind one that failed may still meet the session
/// that broke.
pub fn await_served(fleet: &Fleet, body: &str) -> Value {
    let begun = Instant::now();
    loop {
        let (status, text) = fleet.router.post("/v1/completions", body);
        if status == 200 {
            return ids((status, text));
        }
        assert!(begun.elapsed() < PATIENCE, "still {status} {text}");
        thread::sleep(Duration::from_millis(200));
    }
}

fn set_link(number: u32, state: &str) {
    let link = format!("dummy{number}");
    assert!(Command::new("ip").args(["link", "set", &link, state]).status().unwrap().success());
}

/// Of two NICs one goes: what was under way over both is lost and says why, what follows takes the
/// other.
#[test]
#[ignore = "needs an RDMA device"]
fn sessions_go_on_over_the_nics_that_are_left() {
    let mut fleet = pair(&["--transfer", "rdma"]);
    let ask = |fleet: &Fleet| fleet.router.post("/v1/completions", &body(1, 40));
    let expected = ids(ask(&fleet));
    set_link(0, "down");
    let (status, text) = ask(&fleet);
    let answer: Value = serde_json::from_str(&text).unwrap();
    let over_one = await_served(&fleet, &body(1, 40));
    set_link(1, "down");
    let (none, _) = ask(&fleet);
    set_link(0, "up");
    set_link(1, "up");
    assert_eq!((status, &answer["error"]["code"]), (502, &json!("unreachable")), "{text}");
    assert_eq!(over_one, expected);
    assert_eq!(none, 502);
    assert_eq!(await_served(&fleet, &body(1, 40)), expected, "both are back");
    fleet.check_idle();
}

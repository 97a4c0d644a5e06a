//! `--decode-allocation late`: prefill computes a prompt first, and then decode allocates pages for
//! it.

use crate::fleet::Fleet;
use crate::leg::Leg;
use crate::process::{PATIENCE, Process, get};
use crate::{MODEL, body, choices, dual, prefill, start, with_room};
use serde_json::{Value, json};
use std::thread;
use std::time::{Duration, Instant};

/// A request that waits for pages has been claimed, so it is not given up after a second.
const LATE: [&str; 6] =
    ["--decode-allocation", "late", "--chunked-prefill-size", "32", "--bootstrap-timeout", "1"];

/// KV memory for 16 requests of 512 tokens.
fn narrow_decode(transfer: &str) -> Process {
    let args = ["decode", MODEL, "--port", "0", "--threads", "1", "--transfer", transfer];
    let narrow = ["--kv-memory", "4MiB", "--swap-memory", "0"];
    Process::start(&[&args[..], &narrow].concat())
}

/// Computed prompts with KV that is not handed over.
fn parked(prefill: &Process) -> f64 {
    prefill.metric("sglang:num_prefill_inflight_queue_reqs{", "")
}

#[track_caller]
fn await_parked(prefill: &Process, count: f64) {
    let begun = Instant::now();
    while parked(prefill) != count {
        assert!(begun.elapsed() < PATIENCE, "{count} prompts are never computed");
        thread::sleep(Duration::from_millis(1));
    }
}

fn streamed(salt: u32, max_tokens: u32) -> Value {
    let mut body = body(salt, 100, max_tokens);
    body["stream"] = json!(true);
    body
}

/// Streams that take all pages of a narrow decode worker.
fn fill(fleet: &Fleet) -> Vec<Leg> {
    let open = |salt| Leg::open(fleet.router.address, "/v1/completions", "", &streamed(salt, 400));
    let mut streams: Vec<Leg> = (10..26).map(open).collect();
    streams.iter_mut().for_each(|stream| stream.await_events(2));
    streams
}

#[test]
fn late_pages_give_the_same_tokens_bit_for_bit() {
    let whole = start("serve", &["--mixed", "--disable-radix-cache"]);
    let one = start("serve", &["--decode-allocation", "late", "--chunked-prefill-size", "16"]);
    for transfer in ["shm", "tcp"] {
        let prefill = prefill(&[&LATE[..], &["--transfer", transfer]].concat());
        let decode = start("decode", &["--page-size", "32", "--transfer", transfer]);
        let mut running = Vec::new();
        for salt in 0..6 {
            // The last prompt begins like a known one: the part that decode has is not handed over.
            let body = body(salt % 5, 5 + (salt % 5) * 29, 12);
            let expected = choices(&whole.post("/v1/completions", &body.to_string()));
            assert_eq!(choices(&one.post("/v1/completions", &body.to_string())), expected);
            let (from, to, sent) =
                (prefill.address, decode.address, with_room(body, &prefill, salt.into()));
            running.push((expected, thread::spawn(move || dual(from, to, sent))));
        }
        for (expected, legs) in running {
            let (reader, writer) = legs.join().unwrap();
            assert_eq!(choices(&writer), expected, "{transfer}");
            assert_eq!(choices(&reader)[0]["token_ids"][0], expected[0]["token_ids"][0]);
        }
        prefill.await_idle();
        decode.await_idle();
        assert_eq!(prefill.metric("baton_request_failures_total{", ""), 0.0);
    }
}

/// Other decode workers learn the policy from the registry.
#[test]
fn the_registry_tells_the_policy() {
    let policy = |worker: &Process| {
        let registry = std::net::SocketAddr::from(([127, 0, 0, 1], worker.bootstrap_port));
        let any =
            "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1";
        let (status, answer) = get(registry, any);
        assert_eq!(status, 200, "{answer}");
        serde_json::from_str::<Value>(&answer).unwrap()["decode_allocation_policy"].clone()
    };
    assert_eq!(policy(&prefill(&LATE)), "prefill_complete");
    assert_eq!(policy(&prefill(&["--disaggregation-decode-allocation-policy", "early"])), "early");
}

/// While decode has no pages left, prefill continues. Computed prompts are not lost, and do not
/// wait for ever.
#[test]
fn prompts_are_read_while_decode_is_full() {
    for transfer in ["shm", "tcp"] {
        let mut fleet = Fleet::new(
            vec![prefill(&[&LATE[..], &["--transfer", transfer]].concat())],
            vec![narrow_decode(transfer)],
        );
        let whole = start("serve", &["--mixed"]);
        let full = fill(&fleet);
        let rest: Vec<_> = (1..4)
            .map(|salt| {
                let (to, sent) = (fleet.router.address, body(salt, 100, 20).to_string());
                thread::spawn(move || crate::process::post(to, "/v1/completions", &sent))
            })
            .collect();
        await_parked(&fleet.prefill[0], 3.0);
        for stream in full {
            assert!(stream.end().contains("[DONE]"));
        }
        for (salt, rest) in (1..).zip(rest) {
            let expected =
                choices(&whole.post("/v1/completions", &body(salt, 100, 20).to_string()));
            assert_eq!(choices(&rest.join().unwrap()), expected);
        }
        fleet.check_idle();
    }
}

/// Computed prompts that wait leave nothing behind when their client disconnects or their decode
/// worker dies.
#[test]
fn a_prompt_that_waits_for_pages_ends_with_its_client_or_its_decode_worker() {
    for transfer in ["shm", "tcp"] {
        let prefill = prefill(&[&LATE[..], &["--transfer", transfer]].concat());
        let mut fleet =
            Fleet::with(vec![prefill], vec![narrow_decode(transfer)], &["--disable-retries"]);
        let full = fill(&fleet);
        let left = Leg::open(fleet.router.address, "/v1/completions", "", &streamed(2, 20));
        let (to, sent) = (fleet.router.address, body(3, 100, 20).to_string());
        let lost = thread::spawn(move || crate::process::post(to, "/v1/completions", &sent));
        await_parked(&fleet.prefill[0], 2.0);
        drop(left);
        await_parked(&fleet.prefill[0], 1.0);
        fleet.decode[0].kill();
        assert_eq!(lost.join().unwrap().0, 502);
        drop(full);
        fleet.decode.clear();
        fleet.check_idle();
        assert_eq!(parked(&fleet.prefill[0]), 0.0);
    }
}

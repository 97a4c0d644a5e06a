//! Without a prefill worker: decode workers with `--local-prefill` compute prompts themselves.

use crate::fleet::Fleet;
use crate::process::{PATIENCE, Process, get};
use crate::{body, choices, prefill, start};
use std::thread;
use std::time::{Duration, Instant};

#[track_caller]
fn await_readiness(router: &Process, status: u16) {
    let begun = Instant::now();
    while get(router.address, "/readiness").0 != status {
        assert!(begun.elapsed() < PATIENCE, "the router's readiness never becomes {status}");
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn requests_go_on_at_decode_when_the_last_prefill_worker_is_gone() {
    let whole = start("serve", &["--mixed"]);
    let expected = |seed| choices(&whole.post("/v1/completions", &body(seed, 100, 20).to_string()));
    let mut fleet = Fleet::new(
        vec![prefill(&[])],
        vec![start("decode", &["--local-prefill"]), start("decode", &[])],
    );
    let ask = |fleet: &Fleet, seed| {
        choices(&fleet.router.post("/v1/completions", &body(seed, 100, 20).to_string()))
    };
    let computed = |fleet: &Fleet| fleet.decode[0].metric("sglang:prompt_tokens_total{", "");
    for seed in 1..5 {
        assert_eq!(ask(&fleet, seed), expected(seed));
    }
    assert_eq!(computed(&fleet), 0.0, "there is a prefill worker");
    fleet.prefill[0].kill();
    // The first of these requests finds out.
    for seed in 5..9 {
        assert_eq!(ask(&fleet, seed), expected(seed));
    }
    assert_eq!(computed(&fleet), 400.0);
    // A prompt that is cached except for its last tokens is still served as a prompt.
    assert_eq!(ask(&fleet, 8), expected(8));
    assert_eq!(computed(&fleet), 500.0);
    let known = ["vllm:prefix_cache_hits_total{", "sglang:cached_tokens_total{"];
    assert_eq!(known.map(|name| fleet.decode[0].metric(name, "")), [96.0; 2]);
    assert_eq!(fleet.decode[1].metric("sglang:prompt_tokens_total{", ""), 0.0);
    await_readiness(&fleet.router, 200);
    fleet.decode[0].kill();
    await_readiness(&fleet.router, 503);
    fleet.decode.remove(0);
    fleet.prefill.clear();
    fleet.check_idle();
}

/// A request without a prefill worker gets an error that says what is missing.
#[test]
fn a_decode_worker_serves_no_request_alone_without_local_prefill() {
    let decode = start("decode", &[]);
    let (status, answer) = decode.post("/v1/completions", &body(1, 10, 2).to_string());
    assert!(
        status == 400 && answer.contains("bootstrap_room") && answer.contains("--local-prefill"),
        "{answer}"
    );
    let decode = start("decode", &["--local-prefill"]);
    assert_eq!(
        choices(&decode.post("/v1/completions", &body(1, 10, 2).to_string()))[0]["finish_reason"],
        "length"
    );
}

//! The prefix cache between processes: a prefix that both workers have is neither computed nor sent
//! again. The tokens stay the same.

use crate::fleet::Fleet;
use crate::keys::KeyFile;
use crate::process::Process;
use crate::{body, choices, dual, prefill, start, with_room};
use serde_json::{Value, json};

/// Prompt tokens that were not computed, and the choices.
pub fn ask(worker: &Process, body: &Value) -> (u64, Value) {
    let answer = worker.post("/v1/completions", &body.to_string());
    let choices = choices(&answer);
    let answer: Value = serde_json::from_str(&answer.1).unwrap();
    (answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count"), choices)
}

pub fn sent(fleet: &Fleet) -> f64 {
    fleet.decode[0].metric("baton_kv_transfer_bytes_total{", "")
}

/// The next turn of a conversation: all earlier tokens, and more.
pub fn next_turn(body: &Value, choices: &Value, more: u32) -> Value {
    let mut next = body.clone();
    let ids = next["prompt"].as_array_mut().expect("ids");
    ids.extend(choices[0]["token_ids"].as_array().expect("ids").iter().cloned());
    ids.extend((0..more).map(|id| json!(5 + id)));
    next
}

fn turns_of_a_conversation(transfer: &str, page_sizes: [&str; 2]) {
    let whole = start("serve", &["--mixed", "--disable-radix-cache"]);
    let [from, to] = page_sizes;
    let fleet = Fleet::new(
        vec![prefill(&[
            "--transfer",
            transfer,
            "--page-size",
            from,
            "--chunked-prefill-size",
            "32",
        ])],
        vec![start("decode", &["--transfer", transfer, "--page-size", to])],
    );
    let bytes_of_a_token = {
        let (first, before) = (body(9, 64, 2), sent(&fleet));
        assert_eq!(ask(&fleet.router, &first), (0, ask(&whole, &first).1));
        (sent(&fleet) - before) / 64.0
    };
    let [from, to] = page_sizes.map(|size| size.parse::<u64>().unwrap());
    let mut turn = body(1, 100, 30);
    let (mut read, mut held) = (0, 0);
    for _ in 0..3 {
        let tokens = turn["prompt"].as_array().unwrap().len() as u64;
        let (expected, before) = (ask(&whole, &turn).1, sent(&fleet));
        let (cached, choices) = ask(&fleet.router, &turn);
        assert_eq!(choices, expected, "{transfer}, {page_sizes:?}");
        assert_eq!(cached, read / from * from);
        let pages = tokens.div_ceil(to) - held / to;
        assert_eq!(sent(&fleet) - before, bytes_of_a_token * (pages * to) as f64);
        // The last token of an answer has no KV.
        (read, held) = (tokens, tokens + 30 - 1);
        turn = next_turn(&turn, &choices, 7);
    }
    let mut other = turn.clone();
    other["cache_salt"] = json!("another tenant");
    let expected = ask(&whole, &turn).1;
    assert_eq!(
        ask(&fleet.router, &other),
        (0, expected.clone()),
        "what others said is not to be had"
    );
    assert!(fleet.prefill[0].metric("baton_pages{", "state=\"cached\"") > 0.0);
    assert_eq!(fleet.router.post("/flush_cache", "{}").0, 200);
    for worker in [&fleet.prefill[0], &fleet.decode[0]] {
        assert_eq!(worker.metric("baton_pages{", "state=\"cached\""), 0.0);
    }
    assert_eq!(ask(&fleet.router, &turn), (0, expected));
    let hits = fleet.prefill[0].metric("vllm:prefix_cache_hits_total{", "");
    let queries = fleet.prefill[0].metric("vllm:prefix_cache_queries_total{", "");
    assert!(0.0 < hits && hits < queries, "{hits} of {queries}");
}

#[test]
fn turns_of_a_conversation_over_shm() {
    turns_of_a_conversation("shm", ["16", "16"]);
    turns_of_a_conversation("shm", ["8", "16"]);
}

#[test]
fn turns_of_a_conversation_over_tcp() {
    turns_of_a_conversation("tcp", ["16", "16"]);
    turns_of_a_conversation("tcp", ["16", "4"]);
}

/// More prompts than a pool holds: cached pages are evicted, no request fails, and all tokens are
/// right.
#[test]
fn cached_pages_are_evicted_for_running_requests() {
    let whole = start("serve", &["--mixed", "--disable-radix-cache"]);
    let fleet = Fleet::new(vec![prefill(&[])], vec![start("decode", &[])]);
    let mut full = false;
    for round in 0..60 {
        let body = body(round % 45, 320 + round % 7 * 20, 20);
        assert_eq!(ask(&fleet.router, &body).1, ask(&whole, &body).1, "round {round}");
        full |= fleet.decode[0].metric("baton_pages{", "state=\"free\"") < 32.0;
    }
    assert!(full, "the pool was never full");
    fleet.workers().for_each(Process::await_idle);
}

/// Without a key, anybody can pose as a prefill worker and send any bytes.
#[test]
fn without_a_cluster_key_kv_is_reused_only_for_the_prefill_worker_that_sent_it() {
    let key = KeyFile::new(b'k');
    for (flags, is_shared) in [(&[][..], false), (&["--cluster-key-file", key.path()], true)] {
        let (one, other) = (prefill(flags), prefill(flags));
        let decode = start("decode", flags);
        let mut room = 0;
        // Bytes that come from this worker for the same prompt.
        let mut sent = |from: &Process| {
            room += 1;
            let bytes = || decode.metric("baton_kv_transfer_bytes_total{", "");
            let before = bytes();
            let answer = dual(from.address, decode.address, with_room(body(1, 100, 2), from, room));
            choices(&answer.1);
            decode.await_idle();
            bytes() - before
        };
        let (whole, rest) = (sent(&one), sent(&one));
        assert!(0.0 < rest && rest < whole, "{rest} of {whole}");
        assert_eq!(sent(&other), if is_shared { rest } else { whole }, "{flags:?}");
        assert_eq!([sent(&one), sent(&other)], [rest; 2], "{flags:?}");
    }
}

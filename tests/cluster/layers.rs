//! Models of every architecture between three processes: the answers are those of one process, for
//! each turn of a conversation, greedy and seeded. Each flow has a transport, pages and chunks.

use crate::fleet::Fleet;
use crate::prefix::{ask, next_turn};
use crate::process::Process;
use crate::{body, path_of, start_model};
use serde_json::{Value, json};

const MODELS: [&str; 10] = [
    "mistral-f32",
    "gemma3-f32",
    "mixtral-f32",
    "qwen2-moe-f32",
    "qwen3-moe-f32",
    "mamba2-f32",
    "falcon-h1-f32",
    "falcon-h1-after.Q8_0.gguf",
    "qwen3-next-f32",
    "qwen3-next.Q8_0.gguf",
];

/// Two turns. The prompt of the second one begins with the first one and its answer.
fn check_turns(whole: &Process, fleet: &Fleet, mut turn: Value, about: &str) {
    for number in 0..2 {
        let expected = ask(whole, &turn).1;
        let (_, found) = ask(&fleet.router, &turn);
        assert_eq!(found, expected, "{about}, turn {number}");
        turn = next_turn(&turn, &found, 40);
    }
}

fn pairs_answer_like_one_process(transfer: &str, flow: &[&str], [page, chunk]: [&str; 2]) {
    for model in MODELS {
        let path = path_of(model);
        let whole = start_model(&path, "serve", &["--mixed", "--disable-radix-cache"]);
        let flags = ["--transfer", transfer, "--page-size", page];
        let more = ["--bootstrap-port", "0", "--chunked-prefill-size", chunk];
        let fleet = Fleet::with(
            vec![start_model(&path, "prefill", &[&flags[..], &more].concat())],
            vec![start_model(&path, "decode", &flags)],
            flow,
        );
        let about = format!("{model}, {transfer}, {flow:?}, pages of {page}, chunks of {chunk}");
        check_turns(&whole, &fleet, body(1, 90, 20), &about);
        let mut greedy = body(2, 120, 20);
        greedy["temperature"] = json!(0);
        check_turns(&whole, &fleet, greedy, &format!("{about}, greedy"));
        assert!(fleet.decode[0].metric("baton_kv_transfer_bytes_total{", "") > 0.0, "{about}");
    }
}

#[test]
fn every_architecture_crosses_over_shm() {
    pairs_answer_like_one_process("shm", &[], ["16", "32"]);
}

#[test]
fn every_architecture_crosses_over_tcp() {
    pairs_answer_like_one_process("tcp", &["--flow", "prefill-first"], ["8", "100"]);
}

#[test]
fn every_architecture_crosses_if_decode_is_asked_first() {
    pairs_answer_like_one_process("tcp", &["--flow", "decode-first"], ["4", "20"]);
}

//! Real workers whose KV goes over the NIC: a router, prefill and decode, and one process that does without.

use crate::fleet::Fleet;
use crate::process::Process;
use serde_json::{Value, json};

pub const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/llama-f32");

fn start(command: &str, more: &[&str]) -> Process {
    let common = ["--port", "0", "--kv-memory", "8MiB", "--threads", "1", "--max-running-requests", "4"];
    Process::start(&[&[command, MODEL], &common[..], more].concat())
}

fn ids(answer: (u16, String)) -> Value {
    let (status, text) = answer;
    assert_eq!(status, 200, "{text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    json!([answer["choices"][0]["token_ids"], answer["choices"][0]["logprobs"]["token_logprobs"]])
}

#[test]
#[ignore = "needs an RDMA device"]
fn answers_are_those_of_one_process_byte_for_byte() {
    let rdma = ["--transfer", "rdma", "--chunked-prefill-size", "32"];
    let prefill = start("prefill", &[&rdma[..], &["--bootstrap-port", "0", "--control-port", "0"]].concat());
    let decode = start("decode", &rdma[..2]);
    let alone = start("serve", &["--mixed"]);
    let mut fleet = Fleet::new(vec![prefill], vec![decode]);
    for (salt, tokens) in [(1, 5), (2, 16), (3, 100), (4, 33)] {
        let prompt: Vec<u32> = (0..tokens).map(|i| 10 + (i * 7 + salt * 13) % 300).collect();
        let body = json!({
            "prompt": prompt, "max_tokens": 12, "temperature": 0.7, "seed": salt, "ignore_eos": true,
            "logprobs": 1, "return_token_ids": true,
        })
        .to_string();
        let expected = ids(alone.post("/v1/completions", &body));
        assert_eq!(ids(fleet.router.post("/v1/completions", &body)), expected, "{tokens} tokens");
    }
    assert!(fleet.decode[0].has_said("transport=rdma"), "the session says how KV moves");
    // A client that leaves costs nothing that stays.
    let mut aborted = std::net::TcpStream::connect(fleet.router.address).unwrap();
    let body = json!({"prompt": vec![11; 200], "max_tokens": 100, "stream": true}).to_string();
    let head =
        format!("POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    std::io::Write::write_all(&mut aborted, head.as_bytes()).unwrap();
    drop(aborted);
    fleet.check_idle();
}

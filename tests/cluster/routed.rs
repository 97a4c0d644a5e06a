//! IDs and logprobs do not depend on the number of processes. A router with prefill and decode
//! workers returns exactly the JSON of one process without a hand-off.

use crate::fleet::Fleet;
use crate::keys::KeyFile;
use crate::leg::Leg;
use crate::process::{get, post, post_with};
use crate::{prefill, start};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::thread;

/// A path and a body.
type Case = (&'static str, Value);

fn ids(seed: u32, count: u32) -> Vec<u32> {
    (0..count).map(|i| 3 + (seed * 7919 + i * 104_729) % 380).collect()
}

/// Greedy and seeded, short and of many pages, one and several choices, IDs, text and chat.
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (length, tokens) in [(1, 20), (16, 17), (17, 24), (150, 9), (333, 12)] {
        let body = json!({"prompt": ids(length, length), "max_tokens": tokens, "temperature": 0,
            "ignore_eos": true, "logprobs": 3, "return_token_ids": true});
        cases.push(("/v1/completions", body));
    }
    for seed in 0..4 {
        // The temperature is so high that another random number gives another token.
        let body = json!({"prompt": ids(seed, 20 + 60 * seed), "max_tokens": 16, "temperature": 40,
            "top_p": 0.95, "top_k": 50, "seed": seed, "n": 2, "ignore_eos": true, "logprobs": 2,
            "return_token_ids": true});
        cases.push(("/v1/completions", body));
    }
    let batch = json!({"prompt": [ids(1, 40), ids(2, 3), ids(3, 90)], "max_tokens": 10,
        "temperature": 0, "ignore_eos": true, "logprobs": 1, "return_token_ids": true});
    let chat = json!({"messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 20, "seed": 9, "temperature": 40, "logprobs": true, "top_logprobs": 4,
        "return_token_ids": true, "n": 2});
    cases.extend([("/v1/completions", batch), ("/v1/chat/completions", chat)]);
    cases
}

/// The choices of a complete answer, as text.
#[track_caller]
fn choices((status, text): &(u16, String)) -> String {
    assert_eq!(*status, 200, "{text}");
    let begin = text.find("\"choices\":").expect("choices");
    text[begin..text.rfind(",\"usage\":").expect("usage")].to_owned()
}

fn ask(address: SocketAddr, (path, body): &Case) -> String {
    choices(&post(address, path, &body.to_string()))
}

/// The chunks of a stream, joined for each choice.
fn streamed(address: SocketAddr, (path, body): &Case) -> Value {
    let mut body = body.clone();
    body["stream"] = json!(true);
    let (status, text) = post(address, path, &body.to_string());
    assert_eq!(status, 200, "{text}");
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    let mut choices: Vec<Value> = Vec::new();
    for event in
        text.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]")
    {
        let event: Value = serde_json::from_str(event).expect("an event in JSON");
        for chunk in event["choices"].as_array().expect("choices") {
            let index = chunk["index"].as_u64().expect("an index") as usize;
            choices.resize(choices.len().max(index + 1), json!({}));
            merge(&mut choices[index], chunk);
        }
    }
    json!(choices)
}

fn merge(whole: &mut Value, piece: &Value) {
    for (name, new) in piece.as_object().expect("an object") {
        let slot = &mut whole[name.as_str()];
        match (slot, new) {
            (Value::String(text), Value::String(more)) if name != "role" => text.push_str(more),
            (Value::Array(list), Value::Array(more)) => list.extend(more.iter().cloned()),
            (slot @ Value::Object(_), Value::Object(_)) => merge(slot, new),
            (slot @ Value::Null, new) => *slot = new.clone(),
            _ => {}
        }
    }
}

/// The answers of one process that computes every prompt as a whole, complete and streamed.
fn expected(cases: &[Case]) -> Vec<(String, Value)> {
    let mixed = start("serve", &["--mixed", "--disable-radix-cache"]);
    let expected: Vec<_> = cases
        .iter()
        .map(|case| (ask(mixed.address, case), streamed(mixed.address, case)))
        .collect();
    for (case, (whole, pieces)) in cases.iter().zip(&expected) {
        // Otherwise there would be nothing to compare.
        assert!(
            whole.contains("logprobs\":{") && whole.contains("token_ids\":["),
            "{}: {whole}",
            case.1
        );
        assert!(pieces[0]["logprobs"].is_object() && pieces[0]["token_ids"].is_array(), "{pieces}");
    }
    expected
}

fn check(address: SocketAddr, case: &Case, (whole, pieces): &(String, Value)) {
    let found = ask(address, case);
    assert!(found == *whole, "{}\n{whole}\n{found}", case.1);
    assert_eq!(streamed(address, case), *pieces, "stream of {}", case.1);
}

/// One after the other, then all at once, each complete and streamed.
fn same_as_one_process(workers: [usize; 2], transfer: &str) {
    let cases = cases();
    let expected = expected(&cases);
    // No two workers cut the work in the same way.
    let prefill = (0..workers[0]).map(|number| {
        let chunk = ["32", "48"][number % 2];
        prefill(&["--chunked-prefill-size", chunk, "--page-size", "8", "--transfer", transfer])
    });
    let decode = (0..workers[1]).map(|number| {
        let page = ["16", "4", "8"][number % 3];
        start("decode", &["--page-size", page, "--transfer", transfer])
    });
    let mut fleet = Fleet::new(prefill.collect(), decode.collect());
    let address = fleet.router.address;
    for (case, expected) in cases.iter().zip(&expected) {
        check(address, case, expected);
    }
    thread::scope(|scope| {
        for (case, expected) in cases.iter().zip(&expected) {
            scope.spawn(move || check(address, case, expected));
        }
    });
    fleet.check_idle();
    // Every worker was used: each prefill worker has computed prompts, and each decode worker has
    // generated tokens. The KV moved over the transport under test.
    let way = format!("transport={transfer}");
    for worker in &fleet.prefill {
        assert!(worker.metric("sglang:prompt_tokens_total{", "") > 0.0);
    }
    for worker in &fleet.decode {
        assert!(worker.metric("sglang:generation_tokens_total{", "") > 0.0);
        assert!(worker.has_said(&way), "{way}");
    }
    let sessions = format!("transport=\"{transfer}\",why=\"asked_for\"");
    for worker in fleet.workers() {
        assert_eq!(worker.metric("baton_request_failures_total{", ""), 0.0);
        assert!(worker.metric("baton_sessions_total{", &sessions) > 0.0);
    }
}

#[test]
fn a_router_and_two_workers_answer_like_one_process_over_shm() {
    same_as_one_process([1, 1], "shm");
}

#[test]
fn a_router_and_two_workers_answer_like_one_process_over_tcp() {
    same_as_one_process([1, 1], "tcp");
}

#[test]
fn two_prefill_and_three_decode_workers_answer_like_one_process_over_shm() {
    same_as_one_process([2, 3], "shm");
}

#[test]
fn two_prefill_and_three_decode_workers_answer_like_one_process_over_tcp() {
    same_as_one_process([2, 3], "tcp");
}

/// The router lacks their API key, so these workers report nothing, as those of other engines do.
/// The router reaches them over HTTP and pairs them without a check.
#[test]
fn workers_that_report_nothing_answer_like_one_process() {
    let key = KeyFile::new(b'K');
    let keyed = ["--api-key-file", key.path()];
    let fleet = Fleet::new(vec![prefill(&keyed)], vec![start("decode", &keyed)]);
    assert_eq!(fleet.router.times_said("/server_info answers with status 401"), 2);
    let fields = format!("authorization: Bearer {}\r\n", "K".repeat(40));
    let one = start("serve", &["--mixed"]);
    for (path, body) in cases() {
        let found = choices(&post_with(fleet.router.address, path, &fields, &body.to_string()));
        assert_eq!(found, choices(&one.post(path, &body.to_string())), "{path} {body}");
    }
    let (status, text) = post_with(fleet.router.address, "/v1/completions", "", "{\"prompt\":[5]}");
    assert!(
        status == 401 && text.contains("invalid_api_key"),
        "theirs is the answer: {status} {text}"
    );
}

/// Clients of a router learn what those of a single process learn.
#[test]
fn a_router_tells_its_clients_what_workers_tell() {
    let fleet = Fleet::new(vec![prefill(&[])], vec![start("decode", &[])]);
    let mut body = json!({"prompt": ids(1, 9), "max_tokens": 4, "temprature": 1});
    for stream in [false, true] {
        body["stream"] = json!(stream);
        let answer = Leg::open(fleet.router.address, "/v1/completions", "", &body).end();
        assert!(answer.contains("x-ignored-fields: temprature\r\n"), "{answer}");
    }
    let owner = |address: SocketAddr| {
        let (status, models) = get(address, "/v1/models");
        assert_eq!(status, 200, "{models}");
        let models: Value = serde_json::from_str(&models).unwrap();
        models["data"][0]["owned_by"].as_str().unwrap().to_owned()
    };
    assert_eq!(owner(fleet.router.address), "baton");
    // SGLang's router needs this.
    assert_eq!(owner(fleet.decode[0].address), "sglang");
}

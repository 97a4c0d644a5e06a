//! The prefill-first flow: prefill names the kept KV, and the router passes the name to decode. The
//! tests replay recorded requests of vllm-router 0.1.17 (`tools/vllm-router --record`).

use crate::leg::Leg;
use crate::process::{Process, post_with};
use crate::{body, choices, path_of, prefill, start, start_model};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// The body that this router sends to prefill.
fn for_prefill(body: &Value) -> Value {
    let mut body = body.clone();
    body["stream"] = json!(false);
    (body["max_tokens"], body["min_tokens"]) = (json!(1), json!(1));
    body.as_object_mut().unwrap().remove("stream_options");
    body["kv_transfer_params"] = json!({
        "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
        "remote_block_ids": null, "remote_host": null, "remote_port": null,
    });
    body
}

/// The same request ID for both.
fn named(prefill: &Process, decode: &Process) -> String {
    let (from, to) = (prefill.address, decode.address);
    format!(
        "x-request-id: ___prefill_addr_{from}___decode_addr_{to}_\
         0123456789abcdef0123456789abcdef\r\n"
    )
}

/// Prefill's answer, and the body for decode.
fn keep(prefill: &Process, decode: &Process, path: &str, body: &Value) -> (Value, Value) {
    let (status, answer) =
        post_with(prefill.address, path, &named(prefill, decode), &for_prefill(body).to_string());
    assert_eq!(status, 200, "{answer}");
    let answer: Value = serde_json::from_str(&answer).unwrap();
    let mut sent = body.clone();
    sent["kv_transfer_params"] = answer["kv_transfer_params"].clone();
    (answer, sent)
}

fn claim(prefill: &Process, decode: &Process, path: &str, sent: &Value) -> (u16, String) {
    post_with(decode.address, path, &named(prefill, decode), &sent.to_string())
}

#[test]
fn decode_continues_from_the_kv_that_prefill_has_kept() {
    let whole = start("serve", &["--mixed"]);
    for (transfer, allocation) in
        [("shm", "early"), ("shm", "late"), ("tcp", "early"), ("tcp", "late")]
    {
        let prefill = prefill(&["--transfer", transfer, "--decode-allocation", allocation]);
        let decode = start("decode", &["--transfer", transfer]);
        let chat = json!({
            "messages": [{"role": "user", "content": "Where does the baton go?"}], "max_tokens": 9,
            "temperature": 0, "ignore_eos": true, "return_token_ids": true, "logprobs": true,
        });
        let mut several = body(3, 70, 8);
        several["n"] = json!(2);
        let mut list = body(4, 40, 8);
        list["prompt"] = json!([list["prompt"], [5, 6, 7, 8, 9]]);
        for (path, body) in [
            (COMPLETIONS, body(1, 100, 12)),
            (CHAT, chat),
            (COMPLETIONS, several),
            (COMPLETIONS, list),
        ] {
            let expected = choices(&whole.post(path, &body.to_string()));
            let (kept, sent) = keep(&prefill, &decode, path, &body);
            assert_eq!(
                kept["choices"].as_array().unwrap().len(),
                expected.as_array().unwrap().len()
            );
            for (kept, expected) in
                kept["choices"].as_array().unwrap().iter().zip(expected.as_array().unwrap())
            {
                assert_eq!(kept["finish_reason"], "length");
                assert_eq!(
                    kept["token_ids"][0], expected["token_ids"][0],
                    "prefill tells the first token"
                );
            }
            let found = choices(&claim(&prefill, &decode, path, &sent));
            assert_eq!(found, expected, "{transfer}, {allocation}, {path}");
        }
        for worker in [&prefill, &decode] {
            worker.await_idle();
            assert_eq!(worker.metric("baton_request_failures_total{", ""), 0.0);
        }
        assert_eq!(
            decode.metric("baton_sessions_total{", &format!("transport=\"{transfer}\"")),
            1.0
        );
    }
}

/// State, and KV of windows, are kept, handed over, released and waited for.
#[test]
fn state_and_windows_are_kept() {
    for model in ["mamba2-f32", "falcon-h1-f32", "qwen3-next-f32", "gemma3-f32"] {
        let path = path_of(model);
        let begin = |command: &str, more: &[&str]| start_model(&path, command, more);
        let whole = begin("serve", &["--mixed"]);
        for (transfer, allocation) in [("shm", "late"), ("tcp", "early")] {
            let flags = ["--bootstrap-port", "0", "--transfer", transfer];
            let more = ["--decode-allocation", allocation, "--chunked-prefill-size", "32"];
            let prefill = begin("prefill", &[&flags[..], &more].concat());
            let decode = begin("decode", &["--transfer", transfer]);
            let (_, released) = keep(&prefill, &decode, COMPLETIONS, &body(5, 90, 12));
            assert_eq!(prefill.post("/abort_request", r#"{"abort_all":true}"#).0, 200);
            prefill.await_idle();
            let (status, answer) = claim(&prefill, &decode, COMPLETIONS, &released);
            assert_eq!(status, 502, "{model}: {answer}");
            // The kept state stays what it is while another prompt is computed.
            let bodies = [body(1, 100, 12), body(2, 90, 12)];
            let kept = bodies.each_ref().map(|body| keep(&prefill, &decode, COMPLETIONS, body).1);
            assert_eq!(prefill.post("/drain", "").0, 200);
            for (body, sent) in bodies.iter().zip(&kept).rev() {
                let expected = choices(&whole.post(COMPLETIONS, &body.to_string()));
                let found = choices(&claim(&prefill, &decode, COMPLETIONS, sent));
                assert_eq!(found, expected, "{model}, {transfer}, {allocation}");
            }
            assert_eq!(prefill.exit_code(), Some(0), "{model}");
            decode.await_idle();
        }
    }
}

/// Kept KV can be claimed once. A late or second claim gets an error, and harms no other request.
#[test]
fn kept_kv_is_handed_over_once() {
    let (prefill, decode) = (prefill(&[]), start("decode", &[]));
    let (_, mut sent) = keep(&prefill, &decode, COMPLETIONS, &body(1, 100, 12));
    sent["stream"] = json!(true);
    let mut first = Leg::open(decode.address, COMPLETIONS, "", &sent);
    first.await_events(2);
    // Prefill has possibly received Done by then.
    let (status, answer) = claim(&prefill, &decode, COMPLETIONS, &sent);
    assert!([400, 502].contains(&status), "{answer}");
    assert!(first.end().contains("[DONE]"));
    prefill.await_idle();
    let (status, answer) = claim(&prefill, &decode, COMPLETIONS, &sent);
    assert_eq!(status, 502, "{answer}");
    // Another prompt than that of the kept KV.
    let (_, mut sent) = keep(&prefill, &decode, COMPLETIONS, &body(2, 100, 12));
    sent["prompt"][0] = json!(9);
    let (status, answer) = claim(&prefill, &decode, COMPLETIONS, &sent);
    assert!(status == 400 && answer.contains("mismatch"), "{answer}");
    prefill.await_idle();
    decode.await_idle();
}

/// The first token completes a stop string. Decode ends, but the KV must not be dropped before
/// decode has claimed it.
#[test]
fn a_first_token_that_ends_the_answer_is_handed_over_all_the_same() {
    let (prefill, decode, whole) =
        (prefill(&[]), start("decode", &[]), start("serve", &["--mixed"]));
    let mut tried = 0;
    for salt in 1..8 {
        let one = choices(&whole.post(COMPLETIONS, &body(salt, 30, 1).to_string()));
        let text = one[0]["text"].as_str().unwrap();
        if text.is_empty() || text.contains('\u{fffd}') {
            continue;
        }
        tried += 1;
        let mut body = body(salt, 30, 8);
        body["stop"] = json!([text]);
        let expected = choices(&whole.post(COMPLETIONS, &body.to_string()));
        assert_eq!(expected[0]["finish_reason"], "stop");
        let (_, sent) = keep(&prefill, &decode, COMPLETIONS, &body);
        assert_eq!(choices(&claim(&prefill, &decode, COMPLETIONS, &sent)), expected);
    }
    assert!(tried > 0, "some first token has a text");
    prefill.await_idle();
    decode.await_idle();
}

/// `/abort_request` also drops kept KV.
#[test]
fn kept_kv_can_be_released() {
    let (prefill, decode) = (prefill(&[]), start("decode", &[]));
    let (_, sent) = keep(&prefill, &decode, COMPLETIONS, &body(1, 100, 12));
    let (status, answer) = prefill.post("/abort_request", r#"{"abort_all":true}"#);
    assert_eq!(status, 200, "{answer}");
    prefill.await_idle();
    assert_ne!(claim(&prefill, &decode, COMPLETIONS, &sent).0, 200);
    decode.await_idle();
}

/// The router's abort goes over another connection, so it can overtake the request.
#[test]
fn an_abort_that_comes_before_its_request_refuses_it() {
    let prefill = prefill(&[]);
    let (status, answer) = prefill.post("/abort_request", r#"{"bootstrap_room":77}"#);
    assert_eq!((status, answer.contains(r#""aborted":0"#)), (200, true), "{answer}");
    let mut asked = body(1, 40, 4);
    asked["kv_transfer_params"] = json!({"do_remote_decode": true, "bootstrap_room": 77});
    let (status, answer) = prefill.post("/v1/completions", &asked.to_string());
    assert_eq!((status, answer.contains("other_leg")), (502, true), "{answer}");
    prefill.await_idle();
}

/// A drain waits until the kept KV is claimed.
#[test]
fn a_draining_worker_keeps_its_word() {
    let (prefill, decode) = (prefill(&[]), start("decode", &[]));
    let (_, sent) = keep(&prefill, &decode, COMPLETIONS, &body(1, 100, 12));
    prefill.post("/drain", "");
    let claimed = claim(&prefill, &decode, COMPLETIONS, &sent);
    assert_eq!(choices(&claimed)[0]["finish_reason"], "length");
    assert_eq!(prefill.exit_code(), Some(0));
}

#[test]
fn an_impossible_request_to_keep_kv_is_refused_by_name() {
    let prefill = start("prefill", &["--bootstrap-port", "0", "--host", "0.0.0.0", "--insecure"]);
    let (decode, whole) = (start("decode", &[]), start("serve", &[]));
    for (worker, why) in [
        (&prefill, "--advertise-host"),
        (&decode, "this is not a prefill worker"),
        (&whole, "this is not a prefill worker"),
    ] {
        let (status, answer) = worker.post(COMPLETIONS, &for_prefill(&body(1, 20, 4)).to_string());
        assert!(
            status == 400 && answer.contains(why) && answer.contains("kv_transfer_params"),
            "{answer}"
        );
    }
}

/// The requests to the router, to prefill and to decode.
fn recorded() -> Vec<(String, [String; 3])> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recordings/vllm-router-0.1.17");
    let files = fs::read_dir(&folder).unwrap().map(|file| file.unwrap().path());
    let clients = files.filter(|file| file.extension().is_some_and(|role| role == "client"));
    let read = |path: PathBuf| fs::read_to_string(path).unwrap();
    let all = clients.map(|client| {
        let beside = |role: &str| read(client.with_extension(role));
        let name = client.file_stem().unwrap().to_string_lossy().into_owned();
        (name, [read(client.clone()), beside("prefill"), beside("decode")])
    });
    let all: Vec<_> = all.collect();
    assert!(all.len() > 10, "the recordings are there");
    all
}

/// Path, request ID and body of a recorded request.
fn taken_apart(sent: &str) -> (&str, String, Value) {
    let (head, body) = sent.split_once("\r\n\r\n").unwrap();
    let path = head.split(' ').nth(1).unwrap();
    let id = head.lines().find(|line| line.starts_with("x-request-id: ")).unwrap();
    (path, format!("{id}\r\n"), serde_json::from_str(body).unwrap())
}

/// Texts of the choices, in order, from a complete answer or from a stream with a proper end.
fn texts(answer: (u16, String)) -> Vec<String> {
    let (status, answer) = answer;
    assert_eq!(status, 200, "{answer}");
    let events: Vec<Value> = match answer.strip_suffix("data: [DONE]\n\n") {
        Some(events) => {
            let data =
                events.split_terminator("\n\n").map(|event| event.strip_prefix("data: ").unwrap());
            data.map(|data| serde_json::from_str(data).unwrap()).collect()
        }
        None => vec![serde_json::from_str(&answer).unwrap()],
    };
    let mut texts = BTreeMap::<u64, String>::new();
    for choice in events.iter().flat_map(|event| event["choices"].as_array().unwrap()) {
        let said = [&choice["text"], &choice["delta"]["content"], &choice["message"]["content"]];
        let text = texts.entry(choice["index"].as_u64().unwrap()).or_default();
        said.iter().filter_map(|said| said.as_str()).for_each(|said| text.push_str(said));
    }
    texts.into_values().collect()
}

#[test]
fn requests_of_vllms_router_are_answered_as_by_one_process() {
    let named = ["--served-model-name", "smol"];
    let (prefill, decode) = (prefill(&named), start("decode", &named));
    let whole = start("serve", &[&named[..], &["--mixed"]].concat());
    for (name, [client, to_prefill, to_decode]) in recorded() {
        let (path, id, body) = taken_apart(&to_prefill);
        let (status, answer) = post_with(prefill.address, path, &id, &body.to_string());
        assert_eq!(status, 200, "{name}: {answer}");
        let kept: Value = serde_json::from_str(&answer).unwrap();
        let (path, id, mut body) = taken_apart(&to_decode);
        let fields =
            |object: &Value| object.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        assert_eq!(
            fields(&body["kv_transfer_params"]),
            fields(&kept["kv_transfer_params"]),
            "as then"
        );
        body["kv_transfer_params"] = kept["kv_transfer_params"].clone();
        let found = texts(post_with(decode.address, path, &id, &body.to_string()));
        assert_eq!(found, texts(whole.post(path, &client)), "{name}");
    }
    for worker in [&prefill, &decode] {
        worker.await_idle();
        assert_eq!(worker.metric("baton_request_failures_total{", ""), 0.0);
    }
}

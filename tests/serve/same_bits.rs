//! Ids and logprobs in the JSON are equal byte for byte. They do not depend on chunks, placement
//! and other requests.

use crate::client::Reply;
use crate::server::{MODEL, Server, fixture};
use serde_json::{Value, json};
use std::thread;

/// A request with a comparable answer.
struct Case {
    path: &'static str,
    body: Value,
}

fn ids(seed: u32, count: u32) -> Vec<u32> {
    (0..count).map(|i| 3 + (seed * 7919 + i * 104_729) % 380).collect()
}

/// Short and long prompts, greedy and seeded, one and several choices, on all endpoints.
fn cases() -> Vec<Case> {
    let greedy = |prompt: Value, max_tokens: u32| {
        json!({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true,
            "logprobs": 3, "return_token_ids": true})
    };
    let mut cases: Vec<Case> =
        [(1, 30), (5, 24), (16, 17), (17, 40), (150, 9), (333, 20), (480, 32)]
            .map(|(length, tokens)| Case {
                path: "/v1/completions",
                body: greedy(json!(ids(length, length)), tokens),
            })
            .into();
    cases.push(Case {
        path: "/v1/completions",
        body: greedy(json!([ids(1, 40), ids(2, 3), ids(3, 90)]), 12),
    });
    cases.push(Case { path: "/v1/completions", body: greedy(json!("To be, or not to be"), 25) });
    for seed in 0..4 {
        cases.push(Case {
            path: "/v1/completions",
            body: json!({"prompt": ids(seed, 20 + 60 * seed), "max_tokens": 30, "temperature": 40,
                "top_p": 0.95,
                "top_k": 50, "min_p": 0.001, "frequency_penalty": 0.3, "presence_penalty": 0.1,
                "seed": seed, "n": 3, "logprobs": 2, "return_token_ids": true}),
        });
    }
    cases.push(Case {
        path: "/v1/chat/completions",
        body: json!({"messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 40, "seed": 9, "temperature": 40, "logprobs": true, "top_logprobs": 4,
            "return_token_ids": true, "n": 2}),
    });
    cases.push(Case {
        path: "/generate",
        body: json!({"input_ids": [ids(4, 70), ids(5, 6)], "return_logprob": true,
            "top_logprobs_num": 2,
            "rid": ["a", "b"], "sampling_params": {"temperature": 0, "max_new_tokens": 21,
            "ignore_eos": true}}),
    });
    cases.push(Case {
        path: "/v1/completions",
        body: json!({"prompt": ids(6, 44), "max_tokens": 30, "min_tokens": 12, "temperature": 40,
            "seed": 8, "n": 2, "logprobs": 2, "return_token_ids": true,
            "logit_bias": {"2": 60, "40": 20, "77": -100}, "bad_words": ["e", "th"],
            "repetition_penalty": 1.2, "stop_token_ids": [40]}),
    });
    cases.extend(structured());
    cases
}

/// Requests with a grammar.
fn structured() -> [Case; 4] {
    let schema = json!({"type": "object", "properties": {"name": {"type": "string"},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 4}},
        "required": ["name", "sizes"], "additionalProperties": false});
    [
        Case {
            path: "/v1/chat/completions",
            body: json!({"messages": [{"role": "user", "content": "Name a river."}],
                "max_tokens": 40, "seed": 3, "temperature": 40, "logprobs": true,
                "response_format": {"type": "json_schema", "json_schema": {"name": "river",
                "strict": true, "schema": schema}}}),
        },
        Case {
            path: "/v1/completions",
            body: json!({"prompt": [ids(7, 33), ids(8, 5)], "max_tokens": 30, "temperature": 40,
                "seed": 4, "n": 2, "logprobs": 2, "return_token_ids": true,
                "structured_outputs": {"choice": ["upstream", "downstream", "upriver"]}}),
        },
        Case {
            path: "/generate",
            body: json!({"input_ids": [ids(9, 60)], "return_logprob": true, "rid": ["c"],
                "sampling_params": {"temperature": 0, "max_new_tokens": 25,
                "ebnf": "root ::= ([a-f] \" \"){30}"}}),
        },
        Case {
            path: "/v1/chat/completions",
            body: json!({"messages": [{"role": "user", "content": "Go north, then east."}],
                "max_tokens": 90, "seed": 5, "temperature": 40, "logprobs": true, "n": 2,
                "tool_choice": "required", "tools": [{"type": "function", "function": {
                "name": "walk", "parameters": {"type": "object", "properties": {
                "to": {"enum": ["north", "east"]}, "steps": {"type": "integer", "maximum": 9}},
                "required": ["to"]}}}]}),
        },
    ]
}

#[test]
fn an_answer_obeys_its_grammar() {
    let server = Server::start(&["--threads", "2"]);
    let [chat, choice, generate, calls] =
        structured().map(|case| server.post(case.path, &case.body).ok());
    let message = &chat["choices"][0];
    if message["finish_reason"] == "stop" {
        let text = message["message"]["content"].as_str().unwrap();
        let value: Value = serde_json::from_str(text).expect(text);
        assert!(value["name"].is_string() && value["sizes"].is_array(), "{text}");
    }
    for choice in choice["choices"].as_array().unwrap() {
        assert_eq!(choice["finish_reason"], "stop");
        let text = choice["text"].as_str().unwrap();
        assert!(["upstream", "downstream", "upriver"].contains(&text), "{text}");
    }
    let text = generate[0]["text"].as_str().unwrap();
    let mut letters = text.bytes().enumerate();
    assert!(text.len() >= 25, "{text}");
    assert!(letters.all(|(at, b)| if at % 2 == 0 { b"abcdef".contains(&b) } else { b == b' ' }));
    for choice in calls["choices"].as_array().unwrap() {
        let message = &choice["message"];
        let is_whole = choice["finish_reason"] == "tool_calls";
        let (last, others) = message["tool_calls"].as_array().unwrap().split_last().unwrap();
        for call in others.iter().chain(is_whole.then_some(last)) {
            assert_eq!(
                (&call["type"], &call["function"]["name"]),
                (&json!("function"), &json!("walk"))
            );
            let arguments = call["function"]["arguments"].as_str().unwrap();
            let arguments: Value = serde_json::from_str(arguments).expect(arguments);
            assert!(["north", "east"].contains(&arguments["to"].as_str().unwrap()));
        }
        assert_eq!(message["content"], Value::Null, "{message}");
    }
    assert!(server.metrics().sum("baton_grammar_mask_seconds_count", "") > 20.0);
}

#[test]
fn a_grammar_that_cannot_be_used_is_refused_with_its_field() {
    let server = Server::start(&["--mixed"]);
    let long = "a".repeat(70 << 10);
    for (fields, param, why) in [
        (json!({"regex": "a("}), "regex", "unclosed group"),
        (json!({"regex": long}), "regex", "at most 65536"),
        (
            json!({"guided_json": {"type": "array", "uniqueItems": true}}),
            "guided_json",
            "uniqueItems",
        ),
        (json!({"guided_grammar": "root ::= other"}), "guided_grammar", "`other`"),
        (
            json!({"structured_outputs": {"grammar": format!("start: {}", "(".repeat(300))}}),
            "structured_outputs.grammar",
            "open brackets",
        ),
        (json!({"guided_choice": ["a"], "ignore_eos": true}), "ignore_eos", "guided_choice"),
        (json!({"json_schema": {"$ref": "#"}}), "json_schema", "no text matches"),
    ] {
        let mut body = json!({"prompt": "x", "max_tokens": 4});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let reply = server.post("/v1/completions", &body);
        let error = &reply.json()["error"];
        assert_eq!((reply.status(), &error["param"]), (400, &json!(param)), "{error}");
        assert!(error["message"].as_str().unwrap().contains(why), "{error}");
    }
    server.check_works();
}

/// The answer without its ids and times.
fn essence(case: &Case, reply: &Reply) -> String {
    assert_eq!(reply.status(), 200, "{}", reply.text());
    let text = reply.text();
    if case.path == "/generate" {
        // Everything except the number of cached tokens.
        let mut parts = text.split("\"cached_tokens\":");
        let first = parts.next().unwrap().to_owned();
        return parts.fold(first, |said, part| {
            said + part.trim_start_matches(|c: char| c.is_ascii_digit())
        });
    }
    let begin = text.find("\"choices\":").unwrap();
    without_call_ids(&text[begin..text.rfind(",\"usage\":").unwrap()])
}

/// The same text without ids of tool calls, which no two answers share.
fn without_call_ids(text: &str) -> String {
    let mut parts = text.split("\"call_");
    let first = parts.next().unwrap().to_owned();
    parts.fold(first, |said, part| said + "\"" + part.split_once('"').unwrap().1)
}

/// A stream's chunks put together, choice by choice: texts and lists are concatenated.
fn joined(case: &Case, reply: &Reply) -> Value {
    let events = reply.events();
    if case.path == "/generate" {
        // Each event repeats everything so far.
        let count = case.body["input_ids"].as_array().unwrap().len();
        let last = |index: usize| {
            let mut own = events.iter().rev().filter(|event| event["index"] == index);
            let mut last = own.next().unwrap().clone();
            last.as_object_mut().unwrap().shift_remove("index");
            uncounted(last)
        };
        return (0..count).map(last).collect();
    }
    let mut choices: Vec<Value> = Vec::new();
    for event in &events {
        for chunk in event["choices"].as_array().unwrap() {
            let index = chunk["index"].as_u64().unwrap() as usize;
            choices.resize(choices.len().max(index + 1), json!({"index": index}));
            choices[index]["index"] = json!(index);
            merge(&mut choices[index], chunk);
        }
    }
    for choice in &mut choices {
        let calls = choice.pointer_mut("/delta/tool_calls").and_then(Value::as_array_mut);
        calls.into_iter().flatten().for_each(|call| call["id"] = json!("any"));
    }
    json!(choices)
}

fn merge(whole: &mut Value, piece: &Value) {
    for (name, new) in piece.as_object().unwrap() {
        let slot = &mut whole[name.as_str()];
        match (slot, new) {
            (Value::String(text), Value::String(more)) if name != "role" => text.push_str(more),
            (Value::Array(list), Value::Array(more)) if name == "tool_calls" => {
                for part in more {
                    match list.iter_mut().find(|call| call["index"] == part["index"]) {
                        Some(call) => merge(call, part),
                        None => list.push(part.clone()),
                    }
                }
            }
            (Value::Array(list), Value::Array(more)) => list.extend(more.iter().cloned()),
            (slot @ Value::Object(_), Value::Object(_)) => merge(slot, new),
            (slot @ Value::Null, new) => *slot = new.clone(),
            _ => {}
        }
    }
}

/// Everything except the number of cached tokens.
fn uncounted(mut answer: Value) -> Value {
    answer["meta_info"].as_object_mut().unwrap().shift_remove("cached_tokens").unwrap();
    answer
}

/// The choices of a whole answer in the form of [`joined`].
fn whole(case: &Case, reply: &Reply) -> Value {
    let answer = reply.ok();
    if case.path == "/generate" {
        return answer.as_array().unwrap().iter().cloned().map(uncounted).collect();
    }
    let mut choices = answer["choices"].clone();
    for choice in choices.as_array_mut().unwrap() {
        let choice = choice.as_object_mut().unwrap();
        if let Some(mut message) = choice.shift_remove("message") {
            message.as_object_mut().unwrap().shift_remove("refusal");
            // A stream begins with an empty text, and counts its calls.
            if message["content"].is_null() {
                message["content"] = json!("");
            }
            let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
            for (index, call) in calls.into_iter().flatten().enumerate() {
                call["index"] = json!(index);
                call["id"] = json!("any");
            }
            choice.insert("delta".into(), message);
        }
    }
    choices
}

fn ask(server: &Server, case: &Case) -> String {
    essence(case, &server.post(case.path, &case.body))
}

/// Runs all cases, in sequence or at once.
fn all(server: &Server, cases: &[Case], at_once: bool) -> Vec<String> {
    if !at_once {
        return cases.iter().map(|case| ask(server, case)).collect();
    }
    thread::scope(|scope| {
        let asked: Vec<_> =
            cases.iter().map(|case| scope.spawn(move || ask(server, case))).collect();
        asked.into_iter().map(|answer| answer.join().unwrap()).collect()
    })
}

#[track_caller]
fn check(expected: &[String], found: &[String], cases: &[Case], how: &str) {
    for ((expected, found), case) in expected.iter().zip(found).zip(cases) {
        assert!(expected == found, "{how}: {}\n{expected}\n{found}", case.body);
    }
}

#[test]
fn split_equals_mixed_however_the_work_is_cut() {
    split_equals_mixed(
        MODEL,
        &[
            "--mixed --chunked-prefill-size 7 --page-size 4 --threads 2",
            "--threads 1 --page-size 1 --chunked-prefill-size 16",
            "--threads 3 --page-size 4 --chunked-prefill-size 33 --max-running-requests 3",
            "--threads 2 --page-size 16 --chunk-ms 1 --prefill-workers 2 --decode-workers 2 \
             --chunked-prefill-size 64",
        ],
    );
}

#[test]
fn other_layers_split_as_they_mix_however_the_work_is_cut() {
    for model in [
        "mistral-f32",
        "gemma3-f32",
        "qwen2-moe-f32",
        "qwen3-moe-f32",
        "mixtral-f32",
        "mamba2-f32",
        "falcon-h1-f32",
        "qwen3-next-f32",
    ] {
        split_equals_mixed(
            model,
            &[
                "--mixed --chunked-prefill-size 7 --page-size 4 --threads 2",
                "--threads 2 --page-size 8 --chunk-ms 1 --prefill-workers 2 --decode-workers 2 \
                 --chunked-prefill-size 64",
            ],
        );
    }
}

fn split_equals_mixed(model: &str, layouts: &[&str]) {
    let cases = cases();
    let start = |flags: &[&str]| Server::start_model(&fixture(model), flags);
    let expected = {
        let server = start(&["--mixed", "--threads", "1", "--disable-radix-cache"]);
        all(&server, &cases, false)
    };
    assert!(expected.iter().all(|answer| answer.contains("logprob")));
    for flags in layouts {
        let flags: Vec<&str> = flags.split(' ').collect();
        let server = start(&flags);
        // First everything is computed, twice; then cached prefixes are used.
        for (at_once, flush) in [(false, false), (true, true), (true, false)] {
            if flush {
                assert_eq!(server.post("/flush_cache", &json!({})).status(), 200);
            }
            check(
                &expected,
                &all(&server, &cases, at_once),
                &cases,
                &format!("{model}, {flags:?}, {at_once}"),
            );
        }
        server.wait_until_idle();
    }
}

/// Many long answers at once, in a pool that holds a quarter of them.
#[test]
fn a_retracted_request_continues_with_the_same_bits() {
    retracted_requests_continue(
        MODEL,
        &[
            "--mixed --swap-memory 0",
            "--mixed --swap-memory 4MiB --disable-radix-cache",
            "--swap-memory 0 --disable-radix-cache",
            "--swap-memory 4MiB",
            "",
        ],
    );
}

/// The state of a request does not grow, so a model with state alone retracts none. Pages have 128
/// tokens. A window needs one of them, and two while it crosses their border.
#[test]
fn a_retracted_request_with_other_layers_continues_with_the_same_bits() {
    for model in ["mistral-f32", "gemma3-f32", "qwen2-moe-f32", "falcon-h1-f32", "qwen3-next-f32"] {
        retracted_requests_continue(
            model,
            &["--mixed --swap-memory 0 --page-size 128", "--swap-memory 4MiB --page-size 128"],
        );
    }
}

fn retracted_requests_continue(model: &str, layouts: &[&str]) {
    let greedy = |seed: u32| {
        json!({"prompt": ids(seed, 30 + 9 * seed), "max_tokens": 300, "temperature": 0,
            "logprobs": 2, "return_token_ids": true})
    };
    let seeded = |seed: u32| {
        json!({"prompt": ids(seed, 40 + 9 * seed), "max_tokens": 250, "temperature": 40,
            "top_k": 50, "seed": seed,
            "frequency_penalty": 0.3, "logprobs": 2, "return_token_ids": true})
    };
    let bodies = (0..8).flat_map(|seed| [greedy(seed), seeded(seed)]);
    let cases: Vec<_> = bodies.map(|body| Case { path: "/v1/completions", body }).collect();
    let start = |flags: &[&str]| Server::start_model(&fixture(model), flags);
    let expected = {
        let server = start(&["--mixed", "--threads", "1", "--disable-radix-cache"]);
        all(&server, &cases, false)
    };
    for &flags in layouts {
        let scarce =
            ["--kv-memory", "1MiB", "--num-reserved-decode-tokens", "16", "--threads", "2"];
        let more: Vec<&str> = flags.split_whitespace().collect();
        let server = start(&[&scarce[..], &more].concat());
        check(&expected, &all(&server, &cases, true), &cases, &format!("{model}, {flags}"));
        server.wait_until_idle();
        let metrics = server.metrics();
        let count = |name| metrics.sum(name, "");
        let (retracted, recomputed) =
            (count("vllm:num_preemptions_total"), count("baton_recomputed_tokens_total"));
        assert!(retracted > 0.0, "{model}, {flags}: no request was retracted");
        assert_eq!(count("sglang:num_retracted_reqs"), 0.0);
        // The log reports all retractions, in a line now and then.
        server.wait_until("told", |_| {
            let told = server.said("KV memory ran out").into_iter().map(|line| {
                let (_, rest) = line.split_once(" count=").expect("a count");
                rest.split(' ')
                    .next()
                    .and_then(|count| count.parse::<f64>().ok())
                    .expect("a number")
            });
            told.sum::<f64>() == retracted
        });
        // How much is copied depends on measured speeds. `sched::retraction` tests the choice.
        if flags.contains("--swap-memory 0") {
            assert!(recomputed > 0.0, "{flags}");
        }
    }
}

#[test]
fn a_stream_has_the_same_content_as_a_whole_answer() {
    for layout in [&["--mixed"][..], &[]] {
        let server = Server::start(layout);
        for case in cases() {
            let expected = whole(&case, &server.post(case.path, &case.body));
            let mut body = case.body.clone();
            body["stream"] = json!(true);
            assert_eq!(server.post("/flush_cache", &json!({})).status(), 200);
            let found = joined(&case, &server.post(case.path, &body));
            assert_eq!(found, expected, "{}", case.body);
        }
    }
}

#[test]
fn other_types_and_architectures_split_as_they_mix() {
    let cases = cases();
    for model in [
        "qwen2-bf16",
        "qwen3-f16",
        "qwen2-moe-f32",
        "mistral-f32",
        "gemma3-f32",
        "mamba2-bf16",
        "mamba2-odd-f32",
        "falcon-h1-bf16",
        "falcon-h1-norm-f32",
        "qwen3-next-bf16",
        "qwen3-next.F32.gguf",
        "falcon-h1-after.Q8_0.gguf",
        "llama.Q4_K.gguf",
        "qwen3.Q5_1.gguf",
        "llama-mqa-yarn.Q8_0.gguf",
    ] {
        let mixed = Server::start_model(&fixture(model), &["--mixed", "--threads", "1"]);
        let split = Server::start_model(
            &fixture(model),
            &["--threads", "2", "--chunked-prefill-size", "48"],
        );
        check(&all(&mixed, &cases, false), &all(&split, &cases, true), &cases, model);
    }
}

/// The server generates the reference's greedy ids, up to the first near tie.
#[test]
fn the_references_ids_come_out() {
    // All tokens are seen; pages behind a window go back; a state has seen all tokens.
    for model in [MODEL, "mistral-f32", "mamba2-f32"] {
        references_ids_come_out(model);
    }
}

fn references_ids_come_out(model: &str) {
    let golden = fixture("").join(format!("../goldens/tiny/{model}.json"));
    let goldens: Value = serde_json::from_str(&std::fs::read_to_string(golden).unwrap()).unwrap();
    let server = Server::start_model(&fixture(model), &["--page-size", "4"]);
    for case in goldens.as_array().unwrap() {
        let body = json!({"prompt": case["prompt"],
            "max_tokens": case["ids"].as_array().unwrap().len(), "temperature": 0,
            "ignore_eos": true, "logprobs": 0, "return_token_ids": true});
        let answer = server.post("/v1/completions", &body).ok();
        let choice = &answer["choices"][0];
        assert_eq!(choice["token_ids"], case["ids"]);
        let found = choice["logprobs"]["token_logprobs"].as_array().unwrap();
        for (found, expected) in found.iter().zip(case["logprobs"].as_array().unwrap()) {
            let difference = found.as_f64().unwrap() - expected.as_f64().unwrap();
            assert!(difference.abs() < 0.005, "{found} {expected}");
        }
    }
}

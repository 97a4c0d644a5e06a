//! Logprobs of prompts. The numbers are those of generation, bit by bit: a token that was generated
//! has the same logprob when it is a part of a prompt.

use crate::server::Server;
use serde_json::{Value, json};

/// Both roles in one process, without and with a hand-off. A prompt with logprobs is computed in
/// several chunks.
const LAYOUTS: [&[&str]; 2] =
    [&["--mixed", "--max-running-requests", "4"], &["--max-running-requests", "4"]];
const TOP: usize = 3;

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap_or_else(|| panic!("no list: {value}"))
}

fn complete(server: &Server, prompt: &Value, more: Value) -> Value {
    let mut body = json!({"prompt": prompt, "temperature": 0, "ignore_eos": true,
        "return_tokens_as_token_ids": true});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    server.post("/v1/completions", &body).ok()["choices"].clone()
}

/// A prompt of 60 tokens that the model has written, except for the first four tokens, and the
/// logprobs of the tokens that it has written.
fn written(server: &Server) -> (Value, Value) {
    let begin = json!([17, 309, 11, 40]);
    let more = json!({"max_tokens": 56, "logprobs": TOP, "return_token_ids": true});
    let choice = complete(server, &begin, more)[0].take();
    let prompt: Vec<_> = list(&begin).iter().chain(list(&choice["token_ids"])).cloned().collect();
    (json!(prompt), choice["logprobs"].clone())
}

#[test]
fn echoed_tokens_have_the_logprobs_of_generation() {
    for layout in LAYOUTS {
        let server = Server::start(layout);
        let (prompt, expected) = written(&server);
        let more = json!({"max_tokens": 2, "logprobs": TOP, "echo": true});
        // The second time, the prefix cache has the prompt.
        for _ in 0..2 {
            let choice = complete(&server, &prompt, more.clone())[0].take();
            let found = &choice["logprobs"];
            for name in ["token_logprobs", "top_logprobs", "tokens"] {
                assert_eq!(list(&found[name])[4..60], list(&expected[name])[..], "{layout:?}");
                assert_eq!(list(&found[name]).len(), 62, "the prompt, then two tokens");
            }
            let first = (&found["token_logprobs"][0], &found["top_logprobs"][0]);
            assert_eq!(first, (&Value::Null, &Value::Null), "nothing comes before it");
            assert!(list(&found["token_logprobs"])[1..].iter().all(Value::is_f64));
            let offsets = list(&found["text_offset"]);
            assert!(offsets.is_sorted_by_key(|at| at.as_u64()) && offsets[0] == 0, "{offsets:?}");
            let usage = complete(&server, &prompt, json!({"max_tokens": 2}));
            assert!(choice["text"].as_str().unwrap().ends_with(usage[0]["text"].as_str().unwrap()));
        }
        let greedy = list(&expected["tokens"]).iter().zip(list(&expected["top_logprobs"]));
        for (token, top) in greedy {
            let best = top.as_object().unwrap().values().map(|it| it.as_f64().unwrap());
            let best = best.fold(f64::NEG_INFINITY, f64::max);
            assert_eq!(top[token.as_str().unwrap()].as_f64(), Some(best), "it was chosen greedily");
        }
        server.wait_until_idle();
    }
}

/// `max_tokens` of 0 asks for the echo alone.
#[test]
fn an_answer_can_be_the_prompt_alone() {
    for layout in LAYOUTS {
        let server = Server::start(layout);
        let (prompt, _) = written(&server);
        let with = |most: u32| {
            let more = json!({"max_tokens": most, "logprobs": TOP, "echo": true,
                "return_token_ids": true});
            complete(&server, &prompt, more)[0].take()
        };
        let (alone, longer) = (with(0), with(1));
        for name in ["token_logprobs", "top_logprobs", "tokens", "text_offset"] {
            assert_eq!(list(&alone["logprobs"][name])[..], list(&longer["logprobs"][name])[..60]);
        }
        assert_eq!((&alone["token_ids"], &alone["finish_reason"]), (&json!([]), &json!("length")));
        assert!(longer["text"].as_str().unwrap().starts_with(alone["text"].as_str().unwrap()));
        server.wait_until_idle();
    }
}

#[test]
fn a_stream_begins_with_the_prompt() {
    for layout in LAYOUTS {
        let server = Server::start(layout);
        let (prompt, expected) = written(&server);
        let body = json!({"prompt": prompt, "temperature": 0, "ignore_eos": true, "max_tokens": 3,
            "logprobs": TOP, "echo": true, "stream": true});
        let events = server.post("/v1/completions", &body).events();
        let of = |event: &Value, name: &str| list(&event["choices"][0]["logprobs"][name]).to_vec();
        let first = of(&events[0], "token_logprobs");
        assert_eq!(first[4..60], list(&expected["token_logprobs"])[..]);
        let whole =
            complete(&server, &prompt, json!({"max_tokens": 3, "logprobs": TOP, "echo": true}));
        for name in ["token_logprobs", "text_offset"] {
            let all: Vec<Value> = events
                .iter()
                .filter(|event| event["choices"][0]["logprobs"].is_object())
                .flat_map(|event| of(event, name))
                .collect();
            assert_eq!(json!(all), whole[0]["logprobs"][name], "{name}");
        }
    }
}

#[test]
fn the_field_of_vllm_has_ranks() {
    for layout in LAYOUTS {
        let server = Server::start(layout);
        let (prompt, expected) = written(&server);
        let more = json!({"max_tokens": 1, "prompt_logprobs": TOP, "n": 2});
        let choices = complete(&server, &json!([prompt, [5], prompt]), more);
        assert_eq!(list(&choices).len(), 6);
        let found = list(&choices[0]["prompt_logprobs"]);
        assert_eq!((found.len(), &found[0]), (60, &Value::Null));
        for (at, entries) in found.iter().enumerate().skip(4) {
            let id = prompt[at].to_string();
            let entry = &entries[&id];
            assert_eq!(entry["logprob"], expected["token_logprobs"][at - 4]);
            assert_eq!(entry["rank"], 1, "it was chosen greedily");
            assert!(entry["decoded_token"].is_string());
            let mut ranks: Vec<u64> = entries
                .as_object()
                .unwrap()
                .values()
                .map(|entry| entry["rank"].as_u64().unwrap())
                .collect();
            ranks.sort_unstable();
            assert_eq!(ranks, [1, 2, 3]);
        }
        for other in [1, 4, 5] {
            assert_eq!(choices[other]["prompt_logprobs"], choices[0]["prompt_logprobs"]);
        }
        assert_eq!(choices[2]["prompt_logprobs"], json!([null]), "a prompt of one token");
        let messages = json!([{"role": "user", "content": "What is the capital of France?"}]);
        let body = json!({"messages": messages, "max_tokens": 1, "prompt_logprobs": 0,
            "return_token_ids": true});
        let answer = server.post("/v1/chat/completions", &body).ok();
        let ids = list(&answer["prompt_token_ids"]);
        let found = list(&answer["prompt_logprobs"]);
        assert_eq!((found.len(), &found[0]), (ids.len(), &Value::Null));
        for (id, entries) in ids.iter().zip(found).skip(1) {
            let entries = entries.as_object().unwrap();
            assert_eq!(entries.keys().collect::<Vec<_>>(), [&id.to_string()]);
        }
    }
}

#[test]
fn sglangs_input_logprobs_begin_where_the_request_says() {
    for layout in LAYOUTS {
        let server = Server::start(layout);
        let (prompt, expected) = written(&server);
        let ask = |start: i64, more: Value| {
            let sampling = json!({"max_new_tokens": 1, "temperature": 0, "ignore_eos": true});
            let mut body = json!({"input_ids": prompt, "sampling_params": sampling,
                "return_logprob": true, "logprob_start_len": start});
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            server.post("/generate", &body).ok()["meta_info"].clone()
        };
        for start in [0, 1, 20, 33, 58, 59] {
            let meta = ask(start, json!({"top_logprobs_num": TOP}));
            let found = list(&meta["input_token_logprobs"]);
            let start = start as usize;
            assert_eq!(found.len(), 60 - start, "{layout:?}, from {start}");
            assert_eq!(found[0], json!([null, prompt[start], null]));
            assert_eq!(meta["input_top_logprobs"][0], Value::Null);
            for (index, triple) in found.iter().enumerate().skip(1).filter(|(i, _)| start + i >= 4)
            {
                let at = start + index;
                let logprob = &expected["token_logprobs"][at - 4];
                assert_eq!(*triple, json!([logprob, prompt[at], null]), "{at}");
                let top = list(&meta["input_top_logprobs"][index]);
                assert_eq!((top.len(), &top[0][0], &top[0][1]), (TOP, logprob, &prompt[at]));
            }
        }
        assert_eq!(ask(60, json!({}))["input_token_logprobs"], json!([]));
        assert_eq!(ask(99, json!({}))["input_token_logprobs"], json!([]));
        assert_eq!(ask(-1, json!({}))["input_token_logprobs"], json!([]));
        let text = ask(58, json!({"return_text_in_logprobs": true}));
        assert!(text["input_token_logprobs"][0][2].is_string());
    }
}

/// Requests with and without logprobs of their prompts share the steps of the engine.
#[test]
fn neighbours_change_no_bit() {
    for layout in LAYOUTS {
        let server = Server::start(layout);
        let (prompt, _) = written(&server);
        let more = json!({"max_tokens": 8, "logprobs": TOP, "echo": true});
        let alone = complete(&server, &prompt, more.clone());
        let plain =
            complete(&server, &json!([9, 8, 7]), json!({"max_tokens": 40, "logprobs": TOP}));
        std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for number in 0..8 {
                let (server, prompt, more, alone, plain) =
                    (&server, &prompt, &more, &alone, &plain);
                threads.push(scope.spawn(move || match number % 2 {
                    0 => assert_eq!(complete(server, prompt, more.clone()), *alone),
                    _ => assert_eq!(
                        complete(
                            server,
                            &json!([9, 8, 7]),
                            json!({"max_tokens": 40, "logprobs": TOP})
                        ),
                        *plain
                    ),
                }));
            }
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
        server.wait_until_idle();
    }
}

#[test]
fn what_cannot_be_answered_is_refused_by_name() {
    let server = Server::start(&[]);
    let post = |path: &str, body: Value| server.post(path, &body);
    for (path, body, param) in [
        ("/v1/completions", json!({"prompt": [1, 2], "prompt_logprobs": 21}), "prompt_logprobs"),
        ("/v1/completions", json!({"prompt": [1, 2], "prompt_logprobs": -1}), "prompt_logprobs"),
        ("/v1/completions", json!({"prompt": [1, 2], "max_tokens": 0}), "max_tokens"),
        (
            "/v1/completions",
            json!({"prompt": [1, 2], "max_tokens": 0, "echo": true, "stream": true}),
            "max_tokens",
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "a"}], "prompt_logprobs": 1,
                "stream": true}),
            "prompt_logprobs",
        ),
        ("/generate", json!({"input_ids": [1], "prompt_logprobs": 1}), "prompt_logprobs"),
        (
            "/generate",
            json!({"input_ids": [1], "return_logprob": true, "logprob_start_len": -2}),
            "logprob_start_len",
        ),
    ] {
        let reply = post(path, body);
        assert_eq!((reply.status(), &reply.json()["error"]["param"]), (400, &json!(param)));
    }
}

/// Many tokens with many alternatives are more than the memory for one prompt.
#[test]
fn logprobs_that_are_too_large_are_refused() {
    let server = Server::start_long(&["--mixed"]);
    let prompt = vec![5; 7000];
    let ask = |top: usize| {
        let body = json!({"prompt": prompt, "max_tokens": 1, "prompt_logprobs": top});
        server.post("/v1/completions", &body)
    };
    let reply = ask(20);
    assert_eq!(reply.status(), 400);
    assert!(
        reply.text().contains("6999 tokens of prompts with 20 alternatives"),
        "{}",
        reply.text()
    );
    assert_eq!(ask(1).status(), 200);
    // All choices of a request count.
    let body = json!({"prompt": vec![5; 4000], "max_tokens": 1, "prompt_logprobs": 20, "n": 2});
    let reply = server.post("/v1/completions", &body);
    assert_eq!(reply.status(), 400, "{}", reply.text());
    server.wait_until_idle();
}

//! Every endpoint and field of the public API, with and without streaming.

use crate::server::Server;
use baton::http::Method;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// The body with these fields added.
fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn completion(more: Value) -> Value {
    with(
        json!({"prompt": [17, 309, 11, 40], "max_tokens": 40, "temperature": 0,
            "ignore_eos": true}),
        more,
    )
}

fn chat(more: Value) -> Value {
    let messages = json!([{"role": "user", "content": "What is the capital of France?"}]);
    with(
        json!({"messages": messages, "max_tokens": 40, "temperature": 0, "ignore_eos": true}),
        more,
    )
}

fn list(value: &Value) -> &Vec<Value> {
    value.as_array().unwrap_or_else(|| panic!("no list: {value}"))
}

fn texts(value: &Value) -> Vec<&str> {
    list(value).iter().map(|text| text.as_str().unwrap()).collect()
}

#[test]
fn completions_take_prompts_in_all_forms() {
    let server = Server::start(&[]);
    let ask = |body: Value| server.post("/v1/completions", &body).ok();
    let ids = server.post("/tokenize", &json!({"prompt": "Hello, world"})).ok()["tokens"].clone();
    let prompt_ids = json!({"return_token_ids": true});
    let text = ask(with(completion(json!({"prompt": "Hello, world"})), prompt_ids.clone()));
    let as_ids = ask(with(completion(json!({"prompt": ids})), prompt_ids.clone()));
    assert_eq!(text["choices"], as_ids["choices"]);
    assert_eq!(text["choices"][0]["prompt_token_ids"], ids);
    let several = ask(with(
        completion(json!({"prompt": ["Hello, world", "Good bye", "Hello, world"]})),
        prompt_ids.clone(),
    ));
    let choices = list(&several["choices"]);
    assert_eq!(choices.len(), 3);
    for (index, choice) in choices.iter().enumerate() {
        assert_eq!(choice["index"], index);
        assert_eq!(choice["text"] == text["choices"][0]["text"], index != 1);
    }
    let lists = ask(with(completion(json!({"prompt": [ids, [5], ids]})), prompt_ids));
    assert_eq!(lists["choices"][2]["token_ids"], choices[2]["token_ids"]);
    assert_eq!(lists["choices"][1]["prompt_token_ids"], json!([5]));
    let count = list(&ids).len() as u64;
    assert_eq!(
        lists["usage"],
        json!({"prompt_tokens": 2 * count + 1, "completion_tokens": 120,
        "total_tokens": 2 * count + 121, "prompt_tokens_details": {"cached_tokens": 0}})
    );
    for answer in [&text, &several] {
        assert_eq!(answer["object"], "text_completion");
        assert_eq!(answer["model"], "tiny");
        assert!(
            answer["id"].as_str().unwrap().starts_with("cmpl-")
                && answer["created"].as_u64().unwrap() > 1_600_000_000
        );
    }
    let own = ask(completion(json!({"model": "tiny"})));
    assert_eq!(own["choices"][0]["finish_reason"], "length");
    assert_eq!(
        list(
            &ask(json!({"prompt": "a", "ignore_eos": true, "return_token_ids": true}))["choices"]
                [0]["token_ids"]
        )
        .len(),
        16
    );
}

#[test]
fn samples_differ_and_seeds_repeat() {
    let server = Server::start(&[]);
    // The model is so confident that only a high temperature gives different samples.
    for (path, body, text) in [
        ("/v1/completions", completion(json!({"temperature": 60, "n": 4, "seed": 5})), "/text"),
        (
            "/v1/chat/completions",
            chat(json!({"temperature": 60, "n": 4, "seed": 5})),
            "/message/content",
        ),
    ] {
        let ask = |body: &Value| server.post(path, body).ok();
        let answer = ask(&body);
        let texts: Vec<&str> = list(&answer["choices"])
            .iter()
            .map(|choice| choice.pointer(text).unwrap().as_str().unwrap())
            .collect();
        assert_eq!(texts.len(), 4);
        for (i, a) in texts.iter().enumerate() {
            assert_eq!(answer["choices"][i]["index"], i);
            assert!(texts[..i].iter().all(|b| a != b), "{texts:?}");
        }
        // The prompt is counted only once.
        let one = ask(&with(body.clone(), json!({"n": 1})));
        assert_eq!(answer["usage"]["prompt_tokens"], one["usage"]["prompt_tokens"]);
        assert_eq!(answer["usage"]["completion_tokens"], 160);
        assert_eq!(ask(&body)["choices"], answer["choices"]);
        let other = with(body.clone(), json!({"seed": 6}));
        assert_ne!(ask(&other)["choices"], answer["choices"]);
        let unseeded = with(body.clone(), json!({"seed": null}));
        assert_ne!(ask(&unseeded)["choices"], ask(&unseeded)["choices"]);
    }
}

#[test]
fn an_echo_comes_first() {
    let server = Server::start(&[]);
    let plain = server.post("/v1/completions", &completion(json!({"prompt": "Hello"}))).ok();
    let body = completion(json!({"prompt": "Hello", "echo": true}));
    let text = format!("Hello{}", plain["choices"][0]["text"].as_str().unwrap());
    assert_eq!(server.post("/v1/completions", &body).ok()["choices"][0]["text"], text);
    let events = server.post("/v1/completions", &with(body, json!({"stream": true}))).events();
    assert_eq!(joined(&events, "/text"), text);
}

/// The texts of a stream's only choice, concatenated.
fn joined(events: &[Value], text: &str) -> String {
    let pieces =
        events.iter().filter_map(|event| event.pointer(&format!("/choices/0{text}"))?.as_str());
    pieces.collect()
}

#[test]
fn stop_strings_end_the_text_before_them() {
    let server = Server::start(&[]);
    let ask =
        |more: Value| server.post("/v1/completions", &completion(more)).ok()["choices"][0].clone();
    let whole = ask(json!({"logprobs": 0, "return_token_ids": true}));
    let text = whole["text"].as_str().unwrap();
    let tokens = texts(&whole["logprobs"]["tokens"]);
    let plain =
        |token: &str| !token.is_empty() && token.chars().all(|c| c.is_ascii_graphic() || c == ' ');
    // The end of one token and the start of the next, which do not occur earlier in the text.
    let across = tokens.windows(2).filter(|pair| pair.iter().all(|token| plain(token)));
    let across: Vec<String> =
        across.map(|pair| format!("{}{}", &pair[0][pair[0].len() - 1..], &pair[1][..1])).collect();
    assert!(across.len() > 2, "the output has no place to stop: {tokens:?}");
    let inside = tokens
        .iter()
        .find(|token| plain(token) && token.len() > 1)
        .map(|token| token[1..].to_owned());
    for stop in across.iter().chain(&inside) {
        let expected = &text[..text.find(stop.as_str()).unwrap()];
        for stop in [json!(stop), json!(["never said", stop])] {
            let body = json!({"stop": stop});
            let choice = ask(body.clone());
            assert_eq!(choice["text"], expected);
            assert_eq!(
                (&choice["finish_reason"], &choice["stop_reason"]),
                (&json!("stop"), stop.get(1).unwrap_or(&stop))
            );
            let body = completion(with(body, json!({"stream": true})));
            let events = server.post("/v1/completions", &body).events();
            assert_eq!(joined(&events, "/text"), expected, "some of {stop} was streamed");
            assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "stop");
        }
    }
    let never = ask(json!({"stop": "never said", "logprobs": 0, "return_token_ids": true}));
    assert_eq!(never, whole);
    server.wait_until_idle();
}

#[test]
fn stop_ids_and_the_end_of_sequence_end_it() {
    let server = Server::start(&[]);
    let ask = |more: Value| {
        let body = completion(with(json!({"return_token_ids": true}), more));
        server.post("/v1/completions", &body).ok()["choices"][0].clone()
    };
    let whole = ask(json!({}));
    let ids = list(&whole["token_ids"]);
    let stop = &ids[9];
    let end = ids.iter().position(|id| id == stop).unwrap();
    let choice = ask(json!({"stop_token_ids": [stop]}));
    assert_eq!(list(&choice["token_ids"])[..], ids[..=end]);
    assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("stop"), stop));
    assert!(whole["text"].as_str().unwrap().starts_with(choice["text"].as_str().unwrap()));
    // At this temperature every id is about equally likely, so an end of sequence (id 2) usually
    // comes within 400 tokens.
    let hot = json!({"temperature": 1000, "seed": 3, "max_tokens": 400, "n": 8,
        "return_token_ids": true});
    let ask = |more: Value| {
        let body = completion(with(hot.clone(), more));
        server.post("/v1/completions", &body).ok()["choices"].clone()
    };
    let (on, off) = (ask(json!({})), ask(json!({"ignore_eos": false})));
    let mut ended = 0;
    for (on, off) in list(&on).iter().zip(list(&off)) {
        let (on_ids, off_ids) = (list(&on["token_ids"]), list(&off["token_ids"]));
        assert_eq!((on_ids.len(), on["finish_reason"].as_str()), (400, Some("length")));
        let end = on_ids.iter().position(|id| id == 2);
        assert_eq!(off_ids[..], on_ids[..end.map_or(400, |end| end + 1)]);
        let reason = if end.is_some() { "stop" } else { "length" };
        assert_eq!(
            (off["finish_reason"].as_str(), &off["stop_reason"]),
            (Some(reason), &Value::Null)
        );
        assert!(!off["text"].as_str().unwrap().contains("<|im_end|>"));
        ended += usize::from(end.is_some());
    }
    assert!(ended > 0);
}

#[test]
fn logprobs_are_one_finite_number_per_id() {
    let server = Server::start(&[]);
    for k in [0, 1, 5, 20] {
        let body = completion(
            json!({"logprobs": k, "return_token_ids": true, "temperature": 1, "seed": 1}),
        );
        let choice = server.post("/v1/completions", &body).ok()["choices"][0].clone();
        let logprobs = &choice["logprobs"];
        assert_eq!(list(&choice["token_ids"]).len(), 40);
        assert_eq!(list(&logprobs["text_offset"])[0], 0);
        for (index, number) in list(&logprobs["token_logprobs"]).iter().enumerate() {
            let number = number.as_f64().unwrap();
            assert!(number <= 0.0 && number.is_finite());
            let top = logprobs["top_logprobs"][index].as_object().unwrap();
            assert!(!top.is_empty() && top.len() <= k + 1, "{top:?}");
            let token = logprobs["tokens"][index].as_str().unwrap();
            assert_eq!(top[token].as_f64(), Some(number));
        }
        assert_eq!(list(&logprobs["tokens"]).len(), 40);
    }
    let plain = server.post("/v1/completions", &completion(json!({}))).ok();
    assert_eq!(plain["choices"][0]["logprobs"], Value::Null);
}

#[test]
fn a_stream_ends_with_usage_if_asked_for() {
    let server = Server::start(&[]);
    for (path, body, object) in [
        ("/v1/completions", completion(json!({"stream": true})), "text_completion"),
        ("/v1/chat/completions", chat(json!({"stream": true})), "chat.completion.chunk"),
    ] {
        let usage = || {
            server.post(path, &with(body.clone(), json!({"stream": false}))).ok()["usage"].clone()
        };
        // From the second request on, the prompt is cached.
        usage();
        let usage = usage();
        let events = server.post(path, &body).events();
        assert!(
            events.iter().all(|event| event.get("usage").is_none() && event["object"] == object)
        );
        assert!(events.iter().all(|event| list(&event["choices"]).len() == 1));
        let mut client = server.connect();
        client.post(path, &with(body, json!({"stream_options": {"include_usage": true}})));
        let reply = client.reply(Method::Post);
        let events = reply.events();
        let (last, rest) = events.split_last().unwrap();
        assert_eq!((&last["choices"], &last["usage"]), (&json!([]), &usage));
        assert!(rest.iter().all(|event| event["usage"].is_null() && event.get("usage").is_some()));
        assert_eq!(rest.last().unwrap()["choices"][0]["finish_reason"], "length");
        assert!(rest.iter().all(|event| event["id"] == last["id"]));
        // The body has ended properly, so the connection stays open.
        assert!(reply.keep_alive);
        client.send(Method::Get, "/health", &[], None);
        assert_eq!(client.reply(Method::Get).status(), 200);
    }
}

#[test]
fn chat_answers_in_a_message() {
    let server = Server::start(&[]);
    let ask = |more: Value| server.post("/v1/chat/completions", &chat(more)).ok();
    let answer = ask(json!({"logprobs": true, "top_logprobs": 4, "return_token_ids": true}));
    assert_eq!(answer["object"], "chat.completion");
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"));
    let prompt =
        json!({"messages": [{"role": "user", "content": "What is the capital of France?"}]});
    let tokenised = server.post("/tokenize", &prompt).ok();
    assert_eq!(answer["prompt_token_ids"], tokenised["tokens"]);
    assert_eq!(answer["usage"]["prompt_tokens"], tokenised["count"]);
    let choice = &answer["choices"][0];
    assert_eq!(
        (&choice["message"]["role"], &choice["finish_reason"]),
        (&json!("assistant"), &json!("length"))
    );
    assert_eq!(list(&choice["token_ids"]).len(), 40);
    let content = list(&choice["logprobs"]["content"]);
    assert_eq!(content.len(), 40);
    let mut bytes = Vec::new();
    for token in content {
        assert!(token["logprob"].as_f64().unwrap() <= 0.0);
        let top = list(&token["top_logprobs"]);
        assert_eq!(top.len(), 4);
        // Greedy sampling: the chosen token is the best one.
        assert_eq!((&top[0]["token"], &top[0]["logprob"]), (&token["token"], &token["logprob"]));
        bytes.extend(list(&token["bytes"]).iter().map(|byte| byte.as_u64().unwrap() as u8));
    }
    let text = choice["message"]["content"].as_str().unwrap();
    let special = |text: &str| {
        text.replace("<|endoftext|>", "").replace("<|im_start|>", "").replace("<|im_end|>", "")
    };
    assert_eq!(text, special(&String::from_utf8_lossy(&bytes)));
    let plain = ask(json!({}));
    assert_eq!(plain["choices"][0]["message"]["content"], text);
    assert_eq!(plain["choices"][0]["logprobs"], Value::Null);
    assert!(plain["choices"][0].get("token_ids").is_none());
    let renamed = ask(json!({"max_tokens": null, "max_completion_tokens": 40}));
    assert_eq!(renamed["choices"], plain["choices"]);
    let parts = json!([{"role": "user", "content": [{"type": "text",
        "text": "What is the capital of France?"}]}]);
    assert_eq!(ask(json!({"messages": parts}))["choices"], plain["choices"]);
    // Without a length, generation runs to the end of the context.
    let long = ask(json!({"max_tokens": null}));
    assert_eq!(long["usage"]["total_tokens"], 512);
}

#[test]
fn a_chat_stream_opens_each_choice_and_cuts_no_character() {
    let server = Server::start(&[]);
    let more = json!({"n": 2, "temperature": 60, "seed": 4, "max_tokens": 200});
    let whole = server.post("/v1/chat/completions", &chat(more.clone())).ok();
    let body = chat(with(more, json!({"stream": true})));
    let events = server.post("/v1/chat/completions", &body).events();
    for index in 0..2 {
        let own: Vec<&Value> = events
            .iter()
            .map(|event| &event["choices"][0])
            .filter(|choice| choice["index"] == index)
            .collect();
        assert_eq!(own[0]["delta"], json!({"role": "assistant", "content": ""}));
        let text: String =
            own.iter().filter_map(|choice| choice["delta"]["content"].as_str()).collect();
        assert_eq!(text, whole["choices"][index]["message"]["content"].as_str().unwrap());
        let reasons: Vec<&str> =
            own.iter().filter_map(|choice| choice["finish_reason"].as_str()).collect();
        assert_eq!(reasons, ["length"]);
        assert!(!own.last().unwrap()["finish_reason"].is_null());
    }
}

#[test]
fn generate_answers_as_sglang() {
    let server = Server::start(&[]);
    let body = json!({"input_ids": [17, 309, 11, 40], "return_logprob": true, "rid": "mine",
        "sampling_params": {"temperature": 0, "max_new_tokens": 40, "ignore_eos": true}});
    let answer = server.post("/generate", &body).ok();
    let same = server
        .post("/v1/completions", &completion(json!({"logprobs": 0, "return_token_ids": true})))
        .ok();
    let choice = &same["choices"][0];
    assert_eq!((&answer["text"], &answer["output_ids"]), (&choice["text"], &choice["token_ids"]));
    let meta = &answer["meta_info"];
    assert_eq!(meta["id"], "mine");
    assert_eq!(meta["finish_reason"], json!({"type": "length", "length": 40}));
    assert_eq!(
        (&meta["prompt_tokens"], &meta["completion_tokens"], &meta["cached_tokens"]),
        (&json!(4), &json!(40), &json!(0))
    );
    assert_eq!(meta["input_token_logprobs"], json!([]));
    for (index, triple) in list(&meta["output_token_logprobs"]).iter().enumerate() {
        let expected =
            json!([choice["logprobs"]["token_logprobs"][index], choice["token_ids"][index], null]);
        assert_eq!(triple, &expected);
    }
    let events = server.post("/generate", &with(body.clone(), json!({"stream": true}))).events();
    assert_eq!(events.last().unwrap(), &answer);
    assert!(events.windows(2).all(|pair| {
        pair[1]["text"].as_str().unwrap().starts_with(pair[0]["text"].as_str().unwrap())
    }));
    let text = json!({"text": ["Hello", "Good bye"], "sampling_params": {"max_new_tokens": 3,
        "n": 2, "ignore_eos": true}});
    let answers = server.post("/generate", &text).ok();
    assert_eq!(list(&answers).len(), 4);
    assert!(
        list(&answers).iter().all(|one| one["meta_info"].get("output_token_logprobs").is_none())
    );
    let one = server.post("/generate", &json!({"text": "Hello"})).ok();
    assert!(
        one["text"].is_string() && one["meta_info"]["completion_tokens"].as_u64().unwrap() <= 128
    );
}

#[test]
fn text_goes_to_ids_and_back() {
    let server = Server::start(&[]);
    for text in ["Hello, world!", "naïve 日本 \n\t", "<|im_start|>user"] {
        let answer =
            server.post("/tokenize", &json!({"prompt": text, "return_token_strs": true})).ok();
        let tokens = list(&answer["tokens"]);
        assert_eq!(
            (answer["count"].as_u64(), answer["max_model_len"].as_u64()),
            (Some(tokens.len() as u64), Some(512))
        );
        assert_eq!(list(&answer["token_strs"]).len(), tokens.len());
        let info = server.get("/tokenizer_info").ok();
        let end = json!({"prompt": info["eos_token"], "add_special_tokens": false});
        assert_eq!(server.post("/tokenize", &end).ok()["tokens"], json!([2]), "{info}");
        assert!(info["chat_template"].as_str().unwrap().contains("messages"), "{info}");
        let back = server.post("/detokenize", &json!({"tokens": tokens})).ok();
        assert_eq!(back, json!({"prompt": text}));
    }
}

#[test]
fn a_server_tells_about_itself() {
    for (layout, workers) in [(&["--mixed"][..], 1.0), (&[], 2.0)] {
        let server = Server::start(layout);
        for path in ["/health", "/readiness", "/health_generate"] {
            assert_eq!(server.get(path).status(), 200, "{path}");
        }
        assert_eq!(server.request(Method::Head, "/health", &[], b"").body, b"");
        let models = server.get("/v1/models").ok();
        assert_eq!((&models["object"], &models["data"][0]["id"]), (&json!("list"), &json!("tiny")));
        assert_eq!(models["data"][0]["max_model_len"], 512);
        assert_eq!(server.get("/v1/models/tiny").ok(), models["data"][0]);
        assert_eq!(server.get("/v1/models/other").error().0, 404);
        let info = server.get("/server_info").ok();
        let pages = server.metrics().sum("baton_pages", "") / workers;
        assert_eq!(info["max_total_tokens"].as_f64(), Some(pages * 16.0));
        for (name, value) in [
            ("served_model_name", json!("tiny")),
            ("context_length", json!(512)),
            ("page_size", json!(16)),
            ("status", json!("ready")),
            ("tp_size", json!(1)),
            ("disaggregation_mode", json!("null")),
        ] {
            assert_eq!(info[name], value, "{name}");
        }
        assert_eq!(server.get("/get_server_info").ok(), info);
        let model = server.get("/model_info").ok();
        assert_eq!(
            (&model["is_generation"], &model["model_type"]),
            (&json!(true), &json!("llama"))
        );
        assert_eq!(server.get("/get_model_info").ok(), model);
        // The lease of the self-test can outlive its response.
        server.wait_until_idle();
        let loads = server.get("/v1/loads").ok();
        let load = &loads["loads"][0];
        assert_eq!((&load["num_total_reqs"], &load["num_used_tokens"]), (&json!(0), &json!(0)));
        assert_eq!(load["max_total_num_tokens"].as_f64(), Some(pages * 16.0 * workers));
        let version = server.get("/version").ok();
        assert_eq!(version["version"], env!("CARGO_PKG_VERSION"));
        assert_eq!(server.post("/flush_cache", &json!({})).ok()["success"], true);
        assert_eq!(server.request(Method::Post, "/flush_cache", &[], b"").status(), 200);
    }
}

#[test]
fn a_request_keeps_its_name() {
    let server = Server::start(&[]);
    let body = completion(json!({})).to_string();
    let reply = server.request(
        Method::Post,
        "/v1/completions",
        &[("x-request-id", "abc-1")],
        body.as_bytes(),
    );
    assert_eq!(reply.head.headers.get("x-request-id"), Some("abc-1"));
    assert_eq!(reply.ok()["id"], "cmpl-abc-1");
    let made =
        |reply: crate::client::Reply| reply.head.headers.get("x-request-id").unwrap().to_owned();
    let (a, b) = (made(server.get("/health")), made(server.get("/nowhere")));
    assert!(!a.is_empty() && a != b);
}

#[test]
fn timings_tell_where_the_time_went() {
    let server = Server::start(&[]);
    let body = completion(json!({"return_timings": true}));
    let timings = server.post("/v1/completions", &body).ok()["timings"].clone();
    assert_eq!((&timings["prefill_tokens"], &timings["decode_tokens"]), (&json!(4), &json!(39)));
    assert_eq!(timings["transport"], "shm");
    assert_eq!(timings["handover_bytes"].as_u64(), Some(8 << 10));
    for name in ["queue_ms", "bootstrap_ms", "prefill_ms", "handover_ms", "join_ms", "decode_ms"] {
        assert!(timings[name].as_f64().is_some_and(|ms| ms >= 0.0), "{name}: {timings}");
    }
    let events = server.post("/v1/completions", &with(body, json!({"stream": true}))).events();
    assert_eq!(events.last().unwrap()["timings"]["decode_tokens"], 39);
}

/// This includes an answer that a stop string ends, which happens before its worker knows.
#[test]
fn timings_and_cached_tokens_are_reported_if_a_stop_string_ends_the_answer() {
    for flags in [&[][..], &["--mixed"]] {
        let server = Server::start(flags);
        let prompt: Vec<u32> = (0..40).map(|i| 10 + i).collect();
        let body =
            completion(json!({"prompt": prompt, "return_timings": true, "return_token_ids": true}));
        let whole = server.post("/v1/completions", &body).ok();
        // A string from the middle of the text completes within a token in the middle.
        let text: Vec<char> = whole["choices"][0]["text"].as_str().unwrap().chars().collect();
        let stop: String = text[text.len() / 2..text.len() / 2 + 4].iter().collect();
        let body = with(body, json!({"stop": stop}));
        let answer = server.post("/v1/completions", &body).ok();
        assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
        let generated = answer["usage"]["completion_tokens"].as_u64().unwrap();
        assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 32, "{answer}");
        let streamed =
            server.post("/v1/completions", &with(body, json!({"stream": true}))).events();
        for timings in [&answer["timings"], &streamed.last().unwrap()["timings"]] {
            assert_eq!(
                (&timings["prefill_tokens"], &timings["decode_tokens"]),
                (&json!(8), &json!(generated - 1))
            );
            assert!(timings["decode_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{timings}");
        }
    }
}

/// Timings of a resumed answer cover only the part generated here, and name the resumed tokens.
#[test]
fn timings_of_an_answer_that_goes_on_are_of_these_workers_alone() {
    // The second time, prefill finds the prompt in its cache. A mixed worker has also cached what
    // it generated.
    for (flags, computed) in [(&[][..], [32, 32 - 16]), (&["--mixed"], [32 - 16, 32 - 16])] {
        let server = Server::start(flags);
        let asked =
            completion(json!({"return_timings": true, "stream": true, "return_token_ids": true}));
        let ids = |events: &[Value]| -> Vec<u64> {
            let ids = events.iter().filter_map(|event| event["choices"][0]["token_ids"].as_array());
            ids.flatten().map(|id| id.as_u64().unwrap()).collect()
        };
        let whole = server.post("/v1/completions", &asked).events();
        assert!(
            whole.last().unwrap()["timings"]["resumed_tokens"].is_null(),
            "the answer was not resumed"
        );
        let told = &ids(&whole)[..28];
        let resume = json!({"baton_resume": {"created": 7, "choices": [{"ids": told}]}});
        for computed in computed {
            let events =
                server.post("/v1/completions", &with(asked.clone(), resume.clone())).events();
            assert_eq!([told, &ids(&events)].concat(), ids(&whole));
            let timings = &events.last().unwrap()["timings"];
            let counts =
                ["resumed_tokens", "prefill_tokens", "decode_tokens"].map(|name| &timings[name]);
            assert_eq!(counts, [&json!(28), &json!(computed), &json!(40 - 28 - 1)], "{timings}");
        }
    }
}

/// The router's fields for a hand-off are read. They have no effect if both workers are in this
/// process.
#[test]
fn a_routers_fields_are_accepted() {
    let server = Server::start(&[]);
    let expected = server.post("/v1/completions", &completion(json!({}))).ok();
    let added = json!({"bootstrap_host": null, "bootstrap_port": null, "bootstrap_room": null,
        "cache_salt": "s", "user": "u"});
    assert_eq!(
        server.post("/v1/completions", &completion(added)).ok()["choices"],
        expected["choices"]
    );
}

/// Other requests continue while the tokeniser is busy. A client that leaves early has no lasting
/// effect. The test retries, because a machine can stall for as long as the text takes.
#[test]
fn a_long_text_delays_no_other_request() {
    let server = Server::start(&[]);
    let body = json!({"prompt": "the cat sat on a mat, ".repeat(100_000)});
    let answered_meanwhile = || {
        let done = AtomicBool::new(false);
        let mut client = server.connect();
        client.post("/tokenize", &body);
        thread::scope(|scope| {
            scope.spawn(|| {
                // Wait for the first bytes only: reading the whole response takes long enough for
                // many others.
                client.wait_for("200 OK");
                done.store(true, Ordering::SeqCst);
            });
            // By now a tokeniser thread has it.
            thread::sleep(Duration::from_millis(300));
            let mut answered = 0;
            while !done.load(Ordering::SeqCst) {
                assert_eq!(server.get("/health").status(), 200);
                answered += usize::from(!done.load(Ordering::SeqCst));
            }
            answered
        })
    };
    assert!((0..5).any(|_| answered_meanwhile() > 20), "no other request was answered");
    server.connect().post("/tokenize", &body);
    server.check_works();
    let ids = server.post("/tokenize", &json!({"prompt": "a mat"})).ok()["tokens"].clone();
    assert_eq!(server.post("/detokenize", &json!({"tokens": ids})).ok()["prompt"], "a mat");
}

#[test]
fn reasoning_is_apart_from_content() {
    const THINK: &str = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n\
                         </think>\n\n{% else %}<think>\n{% endif %}";
    let server = Server::start_template(THINK, &[]);
    let ask = |more: Value| server.post("/v1/chat/completions", &chat(more)).ok();
    let message = |answer: &Value| answer["choices"][0]["message"].clone();
    let thinks = ask(json!({}));
    let thought = message(&thinks)["reasoning_content"].as_str().unwrap().to_owned();
    assert!(!thought.is_empty());
    assert_eq!(message(&thinks)["content"], Value::Null);
    assert_eq!(message(&thinks)["reasoning"], json!(thought));
    let details = &thinks["usage"]["completion_tokens_details"];
    assert_eq!(details["reasoning_tokens"], thinks["usage"]["completion_tokens"]);
    let whole = message(&ask(json!({"separate_reasoning": false})));
    assert_eq!((&whole["content"], whole.get("reasoning")), (&json!(thought), None));
    let events = server.post("/v1/chat/completions", &chat(json!({"stream": true}))).events();
    let deltas = events.iter().map(|event| &event["choices"][0]["delta"]);
    let streamed: String = deltas.filter_map(|delta| delta["reasoning_content"].as_str()).collect();
    assert_eq!(streamed, thought);
    let quiet = json!({"chat_template_kwargs": {"enable_thinking": false}});
    let silent = message(&ask(quiet.clone()));
    assert!(!silent["content"].as_str().unwrap().is_empty() && silent.get("reasoning").is_none());
    // A grammar holds behind the reasoning. This model never ends its own.
    let choice = json!({"structured_outputs": {"choice": ["yes", "no"]}, "ignore_eos": false});
    let answer = ask(choice.clone());
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert!(message(&answer)["reasoning"].is_string() && message(&answer)["content"].is_null());
    let answer = message(&ask(with(quiet, choice)));
    assert!(["yes", "no"].contains(&answer["content"].as_str().unwrap()), "{answer}");
    let flags = ["--reasoning-parser", "none"];
    let server = Server::start_template(THINK, &flags);
    let answer = server.post("/v1/chat/completions", &chat(json!({}))).ok();
    assert_eq!(message(&answer)["content"], json!(thought));
}

#[test]
fn a_worker_without_a_parser_refuses_tools() {
    // The template of this model has no place for tools, so only `hermes` can be used.
    for parser in ["none", "mistral"] {
        let server = Server::start(&["--mixed", "--tool-call-parser", parser]);
        let tools = json!({"tools": [{"type": "function", "function": {"name": "f"}}]});
        let reply = server.post("/v1/chat/completions", &chat(tools));
        assert_eq!((reply.status(), &reply.json()["error"]["param"]), (400, &json!("tools")));
    }
}

#[test]
fn rules_decide_which_tokens_come() {
    for layout in [&["--mixed"][..], &[]] {
        let server = Server::start(layout);
        let id = |text: &str| {
            let body = json!({"prompt": text, "add_special_tokens": false});
            server.post("/tokenize", &body).ok()["tokens"][0].as_u64().unwrap()
        };
        let (a, b) = (id("a"), id("b"));
        let ask = |more: Value| {
            let more = with(json!({"return_token_ids": true, "max_tokens": 8}), more);
            server.post("/v1/completions", &completion(more)).ok()["choices"][0].clone()
        };
        let ids = |choice: &Value| -> Vec<u64> {
            list(&choice["token_ids"]).iter().map(|id| id.as_u64().unwrap()).collect()
        };
        let plain = ids(&ask(json!({})))[0];
        let bias = json!({"logit_bias": {plain.to_string(): -100, a.to_string(): 100}});
        assert_ne!(ids(&ask(bias))[0], plain);
        let one = json!({"allowed_token_ids": [a], "temperature": 1, "seed": 1});
        assert_eq!(ids(&ask(one.clone())), vec![a; 8]);
        let both = json!({"allowed_token_ids": [a, b],
            "logit_bias": {a.to_string(): 100, b.to_string(): -100}});
        assert_eq!(ids(&ask(both.clone())), vec![a; 8]);
        assert_eq!(ids(&ask(with(both.clone(), json!({"bad_words": ["a"]})))), vec![b; 8]);
        let pairs = ids(&ask(with(both.clone(), json!({"bad_words": ["ab a"]}))));
        assert_eq!(pairs, vec![a; 8], "only the whole word is forbidden");
        // The token that ends the answer comes as soon as it may.
        let ends = with(both.clone(), json!({"stop_token_ids": [a]}));
        assert_eq!(ids(&ask(ends.clone())), [a]);
        let late = ask(with(ends.clone(), json!({"min_tokens": 3})));
        assert_eq!((ids(&late), &late["text"]), (vec![b, b, b, a], &json!("bbb")));
        let kept = ask(with(ends, json!({"min_tokens": 3, "include_stop_str_in_output": true})));
        assert_eq!(kept["text"], "bbba");
        let text = with(both, json!({"bad_words": ["a"], "stop": "bb", "min_tokens": 4}));
        assert_eq!(ask(text.clone())["text"], "bbbb");
        let whole = with(text, json!({"no_stop_trim": true}));
        assert_eq!(ask(whole)["text"], "bbbbbb");
        let params = with(one, json!({"max_new_tokens": 3, "min_new_tokens": 2}));
        let body = json!({"input_ids": [5, 6], "sampling_params": params});
        assert_eq!(server.post("/generate", &body).ok()["output_ids"], json!([a, a, a]));
    }
}

#[test]
fn tokens_and_usage_come_in_the_form_that_is_asked() {
    let server = Server::start(&[]);
    let more = json!({"logprobs": 2, "return_tokens_as_token_ids": true, "max_tokens": 4,
        "return_token_ids": true});
    let choice = server.post("/v1/completions", &completion(more)).ok()["choices"][0].clone();
    let named = |id: &Value| json!(format!("token_id:{id}"));
    let names: Vec<Value> = list(&choice["token_ids"]).iter().map(named).collect();
    assert_eq!(list(&choice["logprobs"]["tokens"]), &names);
    assert!(choice["logprobs"]["top_logprobs"][0].get(names[0].as_str().unwrap()).is_some());
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let more = json!({"stream": true, "stream_options": options, "max_tokens": 4, "logprobs": true,
        "return_tokens_as_token_ids": true});
    let events = server.post("/v1/chat/completions", &chat(more)).events();
    let counts: Vec<u64> =
        events.iter().map(|event| event["usage"]["completion_tokens"].as_u64().unwrap()).collect();
    assert!(counts.is_sorted() && counts[0] == 0 && counts.last() == Some(&4), "{counts:?}");
    let name = events[1]["choices"][0]["logprobs"]["content"][0]["token"].as_str().unwrap();
    assert!(name.starts_with("token_id:"), "{name}");
}

#[test]
fn a_conversation_continues_its_last_message() {
    let server = Server::start(&["--mixed"]);
    let tokens = |body: Value| server.post("/tokenize", &body).ok()["tokens"].clone();
    let user = json!({"role": "user", "content": "Count."});
    let messages = |last: &str| json!([user, {"role": "assistant", "content": last}]);
    let continued =
        |last: &str| tokens(json!({"messages": messages(last), "continue_final_message": true}));
    let text = "<|im_start|>user\nCount.<|im_end|>\n<|im_start|>assistant\nOne, two";
    let expected = |text: &str| tokens(json!({"prompt": text, "add_special_tokens": false}));
    assert_eq!(continued("One, two"), expected(text));
    assert_eq!(continued("One, two, "), expected(&format!("{text}, ")));
    let head = text.trim_end_matches("One, two");
    // A message that is a part of the end tag, and an empty one.
    assert_eq!(continued("end"), expected(&format!("{head}end")));
    assert_eq!(continued(""), expected(head));
    let body = json!({"messages": messages("One, two"), "continue_final_message": true,
        "max_tokens": 4, "temperature": 0, "return_token_ids": true});
    let answer = server.post("/v1/chat/completions", &body).ok();
    assert_eq!(answer["prompt_token_ids"], expected(text));
    let both = with(body, json!({"add_generation_prompt": true}));
    let error = server.post("/v1/chat/completions", &both).json()["error"].clone();
    assert_eq!(error["param"], "continue_final_message");
    for (special, first) in [(json!(true), true), (json!(false), false)] {
        let body = json!({"prompt": "x", "max_tokens": 1, "add_special_tokens": special,
            "return_token_ids": true});
        let ids = server.post("/v1/completions", &body).ok()["choices"][0].clone();
        let plain = tokens(json!({"prompt": "x", "add_special_tokens": first}));
        assert_eq!(ids["prompt_token_ids"], plain);
    }
}

//! Refused requests: their errors, and the state of the server after them.

use crate::server::{Server, endless};
use baton::http::Method;
use serde_json::{Value, json};

#[test]
fn each_error_has_its_status_and_names_its_field() {
    let server = Server::start(&["--max-running-requests", "2", "--max-queued-requests", "2"]);
    let long: Vec<u32> = vec![5; 510];
    let chat = |more: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let (completions, chats, generate) = ("/v1/completions", "/v1/chat/completions", "/generate");
    let cases = [
        (
            completions,
            json!({"prompt": "a", "model": "other"}),
            404,
            "model_not_found",
            Some("model"),
        ),
        (chats, chat(json!({"model": "other"})), 404, "model_not_found", Some("model")),
        (
            completions,
            json!({"prompt": long, "max_tokens": 3}),
            400,
            "context_length_exceeded",
            Some("prompt"),
        ),
        (
            completions,
            json!({"prompt": "a", "max_tokens": 512}),
            400,
            "context_length_exceeded",
            Some("prompt"),
        ),
        (chats, chat(json!({"max_tokens": 512})), 400, "context_length_exceeded", Some("messages")),
        (
            generate,
            json!({"input_ids": vec![5; 512]}),
            400,
            "context_length_exceeded",
            Some("input_ids"),
        ),
        (completions, json!({"prompt": [384]}), 400, "invalid_value", Some("prompt")),
        (completions, json!({"prompt": ""}), 400, "invalid_value", Some("prompt")),
        (completions, json!({"prompt": []}), 400, "invalid_value", Some("prompt")),
        (
            completions,
            json!({"prompt": "a", "temperature": -1}),
            400,
            "invalid_value",
            Some("temperature"),
        ),
        (chats, chat(json!({"temperature": -0.5})), 400, "invalid_value", Some("temperature")),
        (completions, json!({"prompt": "a", "top_p": 1.5}), 400, "invalid_value", Some("top_p")),
        (
            completions,
            json!({"prompt": "a", "max_tokens": 0}),
            400,
            "invalid_value",
            Some("max_tokens"),
        ),
        (completions, json!({"prompt": "a", "n": 5}), 400, "too_many_choices", None),
        (
            completions,
            json!({"prompt": "a", "logprobs": 21}),
            400,
            "invalid_value",
            Some("logprobs"),
        ),
        (
            completions,
            json!({"prompt": "a", "suffix": "b"}),
            400,
            "unsupported_field",
            Some("suffix"),
        ),
        (
            completions,
            json!({"prompt": "a", "logit_bias": {"50000": 1}}),
            400,
            "invalid_value",
            Some("logit_bias"),
        ),
        (
            chats,
            chat(json!({"tools": [{"type": "function"}]})),
            400,
            "invalid_value",
            Some("tools[0].function"),
        ),
        (
            chats,
            chat(json!({"tools": [{"type": "web_search"}]})),
            400,
            "unsupported_field",
            Some("tools[0].type"),
        ),
        (
            chats,
            chat(json!({"tool_choice": "required"})),
            400,
            "invalid_value",
            Some("tool_choice"),
        ),
        (
            chats,
            chat(json!({"tool_choice": "required", "tools": [{"type": "function", "function": {
                "name": "f", "parameters": {"uniqueItems": true, "type": "array"}}}]})),
            400,
            "invalid_value",
            Some("tool_choice"),
        ),
        (
            chats,
            chat(json!({"response_format": {"type": "structural_tag"}})),
            400,
            "unsupported_field",
            Some("response_format.type"),
        ),
        (chats, chat(json!({"top_logprobs": 2})), 400, "invalid_value", Some("top_logprobs")),
        (chats, json!({"messages": []}), 400, "invalid_value", Some("messages")),
        (chats, json!({}), 400, "invalid_value", Some("messages")),
        (
            generate,
            json!({"text": "a", "sampling_params": {"temperature": -1}}),
            400,
            "invalid_value",
            Some("sampling_params.temperature"),
        ),
        (
            generate,
            json!({"text": "a", "sampling_params": {"structural_tag": "b"}}),
            400,
            "unsupported_field",
            Some("sampling_params.structural_tag"),
        ),
        (
            "/tokenize",
            json!({"prompt": "a", "model": "other"}),
            404,
            "model_not_found",
            Some("model"),
        ),
        ("/tokenize", json!({}), 400, "invalid_value", Some("prompt")),
        ("/detokenize", json!({"tokens": [-1]}), 400, "invalid_value", Some("tokens")),
        ("/abort_request", json!({}), 400, "invalid_value", Some("rid")),
    ];
    for (path, body, status, code, param) in cases {
        let expected = (status, code.to_owned(), param.map(str::to_owned));
        assert_eq!(server.post(path, &body).error(), expected, "{path} {body}");
        // A stream gets the same error, before it starts.
        let mut streamed = body.clone();
        streamed["stream"] = json!(true);
        let reply = server.post(path, &streamed);
        assert_eq!(reply.error(), expected, "{path} {streamed}");
        assert_eq!(reply.head.headers.get("content-type"), Some("application/json"));
    }
    for body in [
        &b"{"[..],
        b"",
        b"[]",
        b"null",
        b"\"a\"",
        b"{\"prompt\":\"a\"}x",
        b"\xff\xfe",
        b"{\"prompt\":\"\xff\"}",
    ] {
        for path in [completions, chats, generate, "/tokenize", "/detokenize", "/abort_request"] {
            let (status, ..) = server.request(Method::Post, path, &[], body).error();
            assert_eq!(status, 400, "{path} {}", String::from_utf8_lossy(body));
        }
    }
    server.check_works();
}

#[test]
fn unknown_paths_and_other_methods() {
    let server = Server::start(&[]);
    for path in ["/", "/v1", "/v1/completions/", "/v1/embeddings", "/metrics2", "/%00", "/..%2f"] {
        assert_eq!(server.get(path).error().0, 404, "{path}");
        assert_eq!(server.post(path, &json!({})).error().0, 404, "{path}");
    }
    for path in [
        "/v1/completions",
        "/v1/chat/completions",
        "/generate",
        "/tokenize",
        "/detokenize",
        "/abort_request",
    ] {
        assert_eq!(server.get(path).error().0, 405, "{path}");
        let reply = server.request(Method::Put, path, &[], b"");
        assert_eq!(
            (reply.error().0, reply.head.headers.get("allow")),
            (405, Some("POST")),
            "{path}"
        );
    }
    for path in ["/health", "/metrics", "/v1/models", "/server_info", "/version", "/readiness"] {
        let reply = server.post(path, &json!({}));
        let is_health = ["/health", "/readiness"].contains(&path);
        let allow = if is_health { "GET, HEAD" } else { "GET" };
        assert_eq!(
            (reply.error().0, reply.head.headers.get("allow")),
            (405, Some(allow)),
            "{path}"
        );
    }
    assert_eq!(server.get("/").head.headers.get("allow"), None);
}

#[test]
fn an_unknown_field_is_ignored() {
    let server = Server::start(&[]);
    let body = json!({"prompt": "a", "max_tokens": 2, "ignore_eos": true, "model": null,
        "stop": null, "foo": {"bar": 1}});
    assert_eq!(server.post("/v1/completions", &body).ok()["usage"]["completion_tokens"], 2);
}

#[test]
fn a_full_queue_says_when_to_come_back() {
    // Only one request runs, because of the batch limit or the KV memory. Without `--mixed`, two
    // more can already have pages for their hand-off.
    let (one, small): (&[&str], &[&str]) =
        (&["--max-running-requests", "1"], &["--kv-memory", "1MiB"]);
    for (bound, layout, taken) in
        [(one, "mixed", 3), (one, "split", 5), (small, "mixed", 3), (small, "split", 3)]
    {
        let mut flags = [bound, &["--max-queued-requests", "2"]].concat();
        flags.extend((layout == "mixed").then_some("--mixed"));
        let server = Server::start_long(&flags);
        let mut body = endless();
        body["max_tokens"] = json!(if bound == small { 2000 } else { 60000 });
        let mut clients = Vec::new();
        for count in 1..=taken {
            let mut client = server.connect();
            client.post("/v1/completions", &body);
            clients.push(client);
            server.wait_until("taken", |metrics| {
                let worker = if layout == "mixed" { "unified" } else { "decode" };
                let names = ["vllm:num_requests_running", "vllm:num_requests_waiting"];
                names.map(|name| metrics.sum(name, worker)).iter().sum::<f64>() == f64::from(count)
            });
        }
        for stream in [false, true] {
            body["stream"] = json!(stream);
            let reply = server.post("/v1/completions", &body);
            assert_eq!(reply.error(), (429, "overloaded".into(), None));
            assert!(reply.text().contains("(--max-queued-requests)"), "{}", reply.text());
            let seconds: u32 = reply.head.headers.get("retry-after").unwrap().parse().unwrap();
            assert!(seconds >= 1);
        }
        assert_eq!(server.get("/health").status(), 200);
        drop(clients);
        server.wait_until_idle();
        server.check_works();
    }
}

/// A request that exceeds the pool is refused at once. A request that fits waits.
#[test]
fn a_request_that_can_never_fit_is_refused_and_one_that_fits_waits() {
    for layout in [&["--mixed"][..], &[]] {
        // A token takes 512 bytes.
        let total = 2048;
        let server = Server::start_long(&[&["--kv-memory", "1MiB"], layout].concat());
        assert!(server.metrics().pools().values().all(|&pages| pages * 16.0 == total as f64));
        let body = |max_tokens: usize| {
            json!({"prompt": [5, 6], "max_tokens": max_tokens,
                "ignore_eos": true})
        };
        let refused = server.post("/v1/completions", &body(total - 1));
        assert_eq!(refused.error(), (400, "refused".into(), None));
        for said in
            ["KV for 2049 tokens (2 of the prompt, 2047 to generate)", "for 2048 (--kv-memory)"]
        {
            assert!(refused.text().contains(said), "{}", refused.text());
        }
        let long = json!({"prompt": vec![5; total], "max_tokens": 1});
        assert_eq!(server.post("/v1/completions", &long).error(), (400, "refused".into(), None));
        std::thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| server.post("/v1/completions", &body(total - 10)).ok());
            }
        });
        server.wait_until_idle();
    }
}

#[test]
fn without_its_key_only_health_is_told() {
    let path = std::env::temp_dir().join(format!("baton-keys-{}", std::process::id()));
    std::fs::write(&path, "first-key\nsecond-key\n").unwrap();
    let server = Server::start(&["--api-key-file", path.to_str().unwrap()]);
    std::fs::remove_file(&path).unwrap();
    let body = json!({"prompt": "a", "max_tokens": 2, "ignore_eos": true}).to_string();
    let ask = |value: Option<&str>| {
        let headers: Vec<_> = value.map(|value| ("authorization", value)).into_iter().collect();
        server.request(Method::Post, "/v1/completions", &headers, body.as_bytes())
    };
    for wrong in [
        None,
        Some("first-key"),
        Some("Bearer "),
        Some("Bearer first-kez"),
        Some("Bearer first-key2"),
    ] {
        assert_eq!(ask(wrong).error().0, 401, "{wrong:?}");
    }
    for right in ["Bearer first-key", "Bearer second-key"] {
        ask(Some(right)).ok();
    }
    for path in ["/metrics", "/v1/models", "/server_info", "/health_generate", "/nowhere"] {
        assert_eq!(server.get(path).error().0, 401, "{path}");
    }
    for path in ["/health", "/readiness", "/liveness", "/ping"] {
        assert_eq!(server.get(path).status(), 200, "{path}");
    }
}

/// The error of a value above its limit has both the limit and the value.
#[test]
fn a_value_above_its_limit_is_refused_with_the_limit() {
    let server = Server::start(&["--max-running-requests", "2", "--max-queued-requests", "1"]);
    let (completions, chat) = ("/v1/completions", "/v1/chat/completions");
    let many = |count: usize| vec!["a"; count];
    let messages = json!([{"role": "user", "content": "hi"}]);
    for (path, body, limit, given) in [
        (completions, json!({"prompt": many(1025)}), "1024", "1025"),
        (completions, json!({"prompt": vec![vec![5]; 1026]}), "1024", "1026"),
        (completions, json!({"prompt": many(600), "n": 2}), "1024", "1200"),
        (completions, json!({"prompt": many(4)}), "3", "4"),
        (completions, json!({"prompt": "a", "stop": many(33)}), "32", "33"),
        (completions, json!({"prompt": "a", "stop": "x".repeat(1025)}), "1024", "1025"),
        (completions, json!({"prompt": "a", "stop_token_ids": vec![1; 257]}), "256", "257"),
        (completions, json!({"prompt": "a", "rid": "x".repeat(513)}), "512", "513"),
        (completions, json!({"prompt": "a", "cache_salt": "x".repeat(514)}), "512", "514"),
        (completions, json!({"prompt": "a", "x".repeat(515): 1}), "512", "515"),
        (completions, json!({"prompt": "a", "n": 129}), "128", "n"),
        (completions, json!({"prompt": "a", "max_tokens": 600}), "512", "600"),
        (
            chat,
            json!({"messages": messages, "chat_template_kwargs": {"a": vec![0; 131_072]}}),
            "131072",
            "131074",
        ),
    ] {
        let reply = server.post(path, &body);
        let error: Value = serde_json::from_str(reply.text()).unwrap();
        let message = error["error"]["message"].as_str().unwrap();
        assert_eq!(reply.status(), 400, "{message}");
        assert!(
            message.contains(limit) && message.contains(given),
            "{limit} and {given}: {message}"
        );
    }
}

/// An unsupported field is refused. An unknown field is logged once.
#[test]
fn no_field_is_dropped_without_a_word() {
    let server = Server::start(&[]);
    for (field, value) in [
        ("structural_tag", json!("{}")),
        ("tools", json!([{"type": "function"}])),
        ("tool_choice", json!("required")),
    ] {
        for (path, prompt) in [("/v1/completions", "prompt"), ("/generate", "text")] {
            let expected = (400, "unsupported_field".to_owned(), Some(field.to_owned()));
            assert_eq!(
                server.post(path, &json!({prompt: "a", field: value})).error(),
                expected,
                "{path}"
            );
        }
    }
    let short =
        json!({"prompt": [5, 6], "max_completion_tokens": 3, "ignore_eos": true, "temprature": 0});
    for _ in 0..2 {
        assert_eq!(server.post("/v1/completions", &short).ok()["usage"]["completion_tokens"], 3);
    }
    let told = server.said("unknown request field ignored");
    let is_it = |line: &String| line.contains(" WARN ") && line.ends_with("field=temprature");
    assert!(told.len() == 1 && told.iter().all(is_it), "{told:?}");
}

/// A client's own timeout ends its request, and the error says so.
#[test]
fn a_client_s_own_deadline_is_kept() {
    let server = Server::start(&[]);
    let ask = |milliseconds: &str, more: Value| {
        let mut body = json!({"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": true});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let headers = [("X-Request-Timeout-Ms", milliseconds)];
        server.request(Method::Post, "/v1/completions", &headers, body.to_string().as_bytes())
    };
    let late = ask("1", json!({}));
    let error: Value = serde_json::from_str(late.text()).unwrap();
    assert_eq!((late.status(), &error["error"]["code"]), (408, &json!("deadline")));
    assert_eq!(error["error"]["type"], "timeout_error");
    // By now the throughput is known, so the deadline can be predicted and the request refused.
    let late = ask("1", json!({"stream": true})).text().to_owned();
    assert!(late.contains("\"deadline\"") || late.contains("\"overloaded\""), "{late}");
    assert_eq!(ask("60000", json!({"max_tokens": 3})).status(), 200);
    for wrong in ["0", "-1", "soon", "1.5", "99999999999999999999999"] {
        let refused = ask(wrong, json!({}));
        let error: Value = serde_json::from_str(refused.text()).unwrap();
        let found = (refused.status(), &error["error"]["code"], &error["error"]["param"]);
        assert_eq!(
            found,
            (400, &json!("invalid_value"), &json!("x-request-timeout-ms")),
            "{wrong}"
        );
    }
    server.wait_until_idle();
}

/// Its status is sent by then, so the error is an event.
#[test]
fn a_stream_that_has_begun_ends_with_an_error_event_at_its_client_s_deadline() {
    let server = Server::start_long(&["--mixed"]);
    let mut body = endless();
    body["max_tokens"] = json!(3000);
    let body = body.to_string();
    // A slow machine can need longer for the first token.
    let stream = ["50", "200", "800", "3200", "12800"].into_iter().find_map(|milliseconds| {
        let headers = [("X-Request-Timeout-Ms", milliseconds)];
        let reply = server.request(Method::Post, "/v1/completions", &headers, body.as_bytes());
        (reply.status() == 200).then_some(reply)
    });
    let stream = stream.expect("a stream begins in time");
    let events: Vec<&str> = stream.text().split_terminator("\n\n").collect();
    let (last, before) = events.split_last().unwrap();
    assert!(!before.is_empty(), "tokens come first: {last}");
    let error: Value = serde_json::from_str(last.strip_prefix("data: ").unwrap()).unwrap();
    assert_eq!(error["error"]["code"], "deadline", "{last}");
    server.wait_until_idle();
}

#[test]
fn an_error_says_what_is_meant() {
    let server = Server::start(&["--mixed"]);
    for (path, right) in [
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/completions", "/v1/completions"),
        ("/v1/generate", "/generate"),
        ("/models/", "/v1/models"),
    ] {
        let error = &server.post(path, &json!({})).json()["error"];
        let message = error["message"].as_str().unwrap();
        assert_eq!(error["code"], "not_found");
        assert!(message.ends_with(&format!("did you mean {right}?")), "{path}: {message}");
    }
    let error = &server.post("/nothing", &json!({})).json()["error"];
    assert_eq!(error["message"], "there is nothing at /nothing");
    for body in [r#"{"prompt":"\ud83d"}"#, r#"{"prompt":["a","\ude00"]}"#] {
        let reply = server.request(Method::Post, "/v1/completions", &[], body.as_bytes());
        let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains("half of a surrogate pair"), "{message}");
    }
    let encoded = [("content-encoding", "gzip")];
    let reply = server.request(Method::Post, "/v1/completions", &encoded, b"x");
    assert_eq!(
        (reply.status(), &reply.json()["error"]["code"]),
        (415, &json!("unsupported_media"))
    );
    let models = server.get("/v1/models").ok();
    let names: Vec<&Value> = models["data"].as_array().unwrap().iter().map(|m| &m["id"]).collect();
    assert_eq!(names, [&models["data"][0]["root"]], "no path, and each model once");
    assert_eq!(models["data"][0]["owned_by"], "baton");
}

#[test]
fn a_priority_needs_its_policy() {
    let ask = |server: &Server, path: &str, body: Value| server.post(path, &body);
    let body = json!({"prompt": "a", "max_tokens": 1, "priority": -3});
    let generate = json!({"text": "a", "sampling_params": {"max_new_tokens": 1}, "priority": 3});
    let usual = Server::start(&[]);
    for (path, body) in [("/v1/completions", &body), ("/generate", &generate)] {
        let reply = ask(&usual, path, body.clone());
        assert_eq!(reply.error(), (400, "invalid_value".into(), Some("priority".into())));
        assert!(reply.text().contains("--scheduling-policy priority"), "{}", reply.text());
    }
    let server = Server::start(&["--scheduling-policy", "priority"]);
    ask(&server, "/v1/completions", body).ok();
    ask(&server, "/generate", generate).ok();
    for wrong in [json!("high"), json!(1.5), json!(1_u64 << 40)] {
        let body = json!({"prompt": "a", "max_tokens": 1, "priority": wrong});
        let error = ask(&server, "/v1/completions", body).error();
        assert_eq!(error, (400, "invalid_value".into(), Some("priority".into())));
    }
}

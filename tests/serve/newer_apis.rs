//! `/v1/responses` and `/v1/messages`: the same answers as the chat endpoint, in their own forms.

use crate::client::{Client, Reply};
use crate::server::Server;
use baton::http::Method;
use baton::http::sse::EventReader;
use serde_json::{Value, json};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;

const LAYOUTS: [&[&str]; 2] = [&["--mixed"], &[]];

/// A question with a repeatable answer.
const QUESTION: &str = "What is the capital of France?";

/// Fields that all three endpoints have.
fn with(mut body: Value, more: &Value) -> Value {
    let common = json!({"temperature": 40, "seed": 9, "ignore_eos": true});
    for fields in [&common, more] {
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
    }
    body
}

fn chat(more: Value) -> Value {
    let messages = json!([{"role": "user", "content": QUESTION}]);
    with(json!({"messages": messages, "max_tokens": 24}), &more)
}

fn response(more: Value) -> Value {
    with(json!({"input": QUESTION, "max_output_tokens": 24}), &more)
}

fn message(more: Value) -> Value {
    let messages = json!([{"role": "user", "content": QUESTION}]);
    with(json!({"messages": messages, "max_tokens": 24}), &more)
}

/// The data of a stream's events. Each has its type as its name.
fn events(reply: &Reply) -> Vec<Value> {
    assert_eq!(reply.status(), 200, "{}", reply.text());
    let (mut reader, mut rest, mut events) = (EventReader::default(), &reply.body[..], Vec::new());
    while let (used, Some(data)) = reader.read(rest).unwrap() {
        let data: Value = serde_json::from_slice(&data).unwrap();
        let name = format!("event: {}\n", data["type"].as_str().unwrap());
        assert!(rest.starts_with(name.as_bytes()), "{data}");
        rest = &rest[used..];
        events.push(data);
    }
    assert_eq!(rest, b"", "no event is cut");
    events
}

/// Without what differs between two equal requests.
fn without_ids(mut value: Value) -> Value {
    match &mut value {
        Value::Object(fields) => {
            for name in ["id", "call_id", "created_at", "cached_tokens", "usage"] {
                fields.remove(name);
            }
            for field in fields.values_mut() {
                *field = without_ids(field.take());
            }
        }
        Value::Array(items) => {
            for item in items {
                *item = without_ids(item.take());
            }
        }
        _ => {}
    }
    value
}

#[test]
fn responses_are_those_of_the_chat() {
    for layout in LAYOUTS {
        let server = Server::start(layout);
        let expected = server.post("/v1/chat/completions", &chat(json!({}))).ok();
        let text = &expected["choices"][0]["message"]["content"];
        let answer = server.post("/v1/responses", &response(json!({"metadata": {"a": "b"}}))).ok();
        let item = &answer["output"][0];
        assert_eq!((&item["type"], &item["content"][0]["text"]), (&json!("message"), text));
        assert_eq!(answer["status"], "incomplete");
        assert_eq!(answer["incomplete_details"]["reason"], "max_output_tokens");
        assert_eq!((&answer["object"], &answer["store"]), (&json!("response"), &json!(false)));
        assert_eq!(answer["metadata"], json!({"a": "b"}));
        assert_eq!(answer["max_output_tokens"], 24);
        let [input, output] = ["input_tokens", "output_tokens"].map(|name| &answer["usage"][name]);
        let usage = &expected["usage"];
        assert_eq!((input, output), (&usage["prompt_tokens"], &usage["completion_tokens"]));
        let stream = response(json!({"stream": true, "metadata": {"a": "b"}}));
        let events = events(&server.post("/v1/responses", &stream));
        let deltas = events.iter().filter(|event| event["type"] == "response.output_text.delta");
        let deltas = deltas.map(|event| event["delta"].as_str().unwrap());
        assert_eq!(json!(deltas.collect::<String>()), *text);
        let last = events.last().unwrap();
        assert_eq!(last["type"], "response.incomplete");
        assert_eq!(without_ids(last["response"].clone()), without_ids(answer));
        for (number, event) in events.iter().enumerate() {
            assert_eq!(event["sequence_number"], number);
        }
    }
}

#[test]
fn messages_are_those_of_the_chat() {
    for layout in LAYOUTS {
        let server = Server::start(layout);
        let expected = server.post("/v1/chat/completions", &chat(json!({}))).ok();
        let text = &expected["choices"][0]["message"]["content"];
        let answer = server.post("/v1/messages", &message(json!({}))).ok();
        assert_eq!(answer["content"], json!([{"type": "text", "text": text}]));
        assert_eq!(answer["stop_reason"], "max_tokens");
        let usage = &answer["usage"];
        let prompt = ["input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"]
            .map(|name| usage[name].as_u64().unwrap());
        assert_eq!(prompt.iter().sum::<u64>(), expected["usage"]["prompt_tokens"]);
        let events = events(&server.post("/v1/messages", &message(json!({"stream": true}))));
        let deltas = events.iter().filter_map(|event| event["delta"]["text"].as_str());
        assert_eq!(json!(deltas.collect::<String>()), *text);
        let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
        let [first, .., delta, last] = &kinds[..] else { panic!("{kinds:?}") };
        assert_eq!([*first, *delta, *last], ["message_start", "message_delta", "message_stop"]);
        assert!(events[0]["message"]["usage"]["input_tokens"].as_u64().unwrap() > 0);
        let counted = json!({"messages": [{"role": "user", "content": QUESTION}]});
        let count = server.post("/v1/messages/count_tokens", &counted).ok();
        assert_eq!(count["input_tokens"], expected["usage"]["prompt_tokens"]);
        // The text goes on behind a beginning.
        let begun = json!([{"role": "user", "content": QUESTION},
            {"role": "assistant", "content": "It is"}]);
        let continued = server.post("/v1/messages", &message(json!({"messages": begun}))).ok();
        let same = json!({"messages": begun, "continue_final_message": true});
        let chat = server.post("/v1/chat/completions", &chat(same)).ok();
        assert_eq!(continued["content"][0]["text"], chat["choices"][0]["message"]["content"]);
    }
}

#[test]
fn a_stop_sequence_is_named() {
    let server = Server::start(&[]);
    let text = server.post("/v1/messages", &message(json!({}))).ok()["content"][0]["text"].clone();
    let stop: String = text.as_str().unwrap().chars().skip(4).take(3).collect();
    let stopped = server.post("/v1/messages", &message(json!({"stop_sequences": [stop]}))).ok();
    assert_eq!(stopped["stop_reason"], "stop_sequence");
    assert_eq!(stopped["stop_sequence"], json!(stop));
}

#[test]
fn tools_are_called_in_both_forms() {
    let schema = json!({"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"], "additionalProperties": false});
    for layout in LAYOUTS {
        let server = Server::start(layout);
        let free = json!({"ignore_eos": false});
        let of_responses = with(
            json!({"input": QUESTION, "tool_choice": "required",
                "parallel_tool_calls": false, "tools": [{"type": "function",
                "name": "weather", "parameters": schema}]}),
            &free,
        );
        let answer = server.post("/v1/responses", &of_responses).ok();
        assert_eq!(answer["status"], "completed", "{answer}");
        let call = answer["output"].as_array().unwrap().last().unwrap().clone();
        let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
        assert!(["Oslo", "Rome"].contains(&arguments["city"].as_str().unwrap()));
        let result = json!([{"role": "user", "content": QUESTION}, call,
            {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}]);
        let next = server.post("/v1/responses", &response(json!({"input": result}))).ok();
        assert_eq!(next["output"][0]["type"], "message");
        let tools = json!([{"name": "weather", "input_schema": schema}]);
        let body = json!({"tools": tools, "tool_choice": {"type": "tool", "name": "weather"},
            "max_tokens": 100, "ignore_eos": false});
        let answer = server.post("/v1/messages", &message(body.clone())).ok();
        assert_eq!(answer["stop_reason"], "tool_use", "{answer}");
        let used = answer["content"].as_array().unwrap().last().unwrap();
        assert_eq!((&used["name"], &used["input"]), (&json!("weather"), &arguments));
        let stream = with(message(body), &json!({"stream": true, "ignore_eos": false}));
        let events = events(&server.post("/v1/messages", &stream));
        let parts = events.iter().filter_map(|event| event["delta"]["partial_json"].as_str());
        let streamed: Value = serde_json::from_str(&parts.collect::<String>()).unwrap();
        assert_eq!(streamed, arguments);
        let turns = json!([{"role": "user", "content": QUESTION},
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": used["id"],
                "content": "rain"}]}]);
        let next = server.post("/v1/messages", &message(json!({"messages": turns}))).ok();
        assert_eq!(next["content"][0]["type"], "text");
    }
}

#[test]
fn errors_have_the_form_of_their_api() {
    let path = std::env::temp_dir().join(format!("baton-newer-apis-{}", std::process::id()));
    std::fs::write(&path, "one\n").unwrap();
    std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    let server = Server::start(&["--api-key-file", path.to_str().unwrap()]);
    std::fs::remove_file(&path).unwrap();
    let ask = |path: &str, headers: &[(&str, &str)], body: &Value| {
        let mut client = Client::new(server.address);
        client.send(Method::Post, path, headers, Some(body.to_string().as_bytes()));
        client.reply(Method::Post)
    };
    let key = [("x-api-key", "one"), ("anthropic-version", "2023-06-01")];
    assert_eq!(ask("/v1/messages", &key, &message(json!({}))).status(), 200);
    let bearer = [("authorization", "Bearer one")];
    assert_eq!(ask("/v1/messages", &bearer, &message(json!({}))).status(), 200);
    for (headers, more, status, kind, words) in [
        (&[("x-api-key", "two")][..], json!({}), 401, "authentication_error", "API key"),
        (&key, json!({"model": "other"}), 404, "not_found_error", "`other`"),
        (&key, json!({"temperature": -1}), 400, "invalid_request_error", "`temperature`"),
        (&key, json!({"stop_sequences": [7]}), 400, "invalid_request_error", "`stop_sequences`"),
        (&key, json!({"max_tokens": null}), 400, "invalid_request_error", "`max_tokens`"),
        (&key, json!({"max_tokens": 100_000}), 400, "invalid_request_error", "context"),
    ] {
        let reply = ask("/v1/messages", headers, &message(more));
        let told = reply.json();
        assert_eq!((reply.status(), &told["error"]["type"]), (status, &json!(kind)), "{told}");
        assert_eq!(told["type"], "error");
        assert!(told["error"]["message"].as_str().unwrap().contains(words), "{told}");
    }
    let too_long = ask("/v1/responses", &bearer, &response(json!({"max_output_tokens": 0})));
    let named = Some("max_output_tokens".to_owned());
    assert_eq!(too_long.error(), (400, "invalid_value".into(), named));
    let kept = ask("/v1/responses", &bearer, &response(json!({"store": true})));
    assert_eq!(kept.error(), (400, "unsupported_field".into(), Some("store".into())));
    let broken = ask("/v1/responses", &bearer, &json!([]));
    assert_eq!(broken.error(), (400, "invalid_json".into(), None));
    let mut client = Client::new(server.address);
    client.send(Method::Get, "/v1/messages", &bearer, None);
    assert_eq!(client.reply(Method::Get).status(), 405);
    let elsewhere = ask("/v1/responses/resp_1/cancel", &bearer, &json!({}));
    assert_eq!(elsewhere.status(), 404);
}

#[test]
fn an_unknown_field_is_named_and_counted() {
    let server = Server::start(&[]);
    let reply = server.post("/v1/chat/completions", &chat(json!({"temprature": 1, "a\nb": 2})));
    assert_eq!(reply.status(), 200);
    let named = reply.head.headers.get("x-ignored-fields").unwrap();
    let mut names: Vec<&str> = named.split(", ").collect();
    names.sort_unstable();
    assert_eq!(names, ["a?b", "temprature"]);
    let stream = server.post("/v1/responses", &response(json!({"tmp": 1, "stream": true})));
    assert_eq!(stream.head.headers.get("x-ignored-fields"), Some("tmp"));
    let known = server.post("/v1/chat/completions", &chat(json!({})));
    assert_eq!(known.head.headers.get("x-ignored-fields"), None);
    assert_eq!(server.metrics().sum("baton_ignored_fields_total", ""), 3.0);
}

#[test]
fn a_web_page_of_an_allowed_origin_reads_answers() {
    const PAGE: &str = "https://chat.example.com";
    let server = Server::start(&["--allowed-origins", PAGE]);
    let ask = |method: Method, path: &str, origin: &str| {
        let mut client = Client::new(server.address);
        let headers = [
            ("origin", origin),
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", "authorization,content-type"),
        ];
        let body = chat(json!({})).to_string();
        client.send(method, path, &headers, (method == Method::Post).then_some(body.as_bytes()));
        client.reply(method)
    };
    let allowed =
        |reply: &Reply| reply.head.headers.get("access-control-allow-origin").map(str::to_owned);
    let before = ask(Method::Options, "/v1/chat/completions", PAGE);
    assert_eq!((before.status(), allowed(&before).as_deref()), (200, Some(PAGE)));
    let headers = before.head.headers.get("access-control-allow-headers");
    assert_eq!(headers, Some("authorization,content-type"));
    let answer = ask(Method::Post, "/v1/chat/completions", PAGE);
    assert_eq!((answer.status(), allowed(&answer).as_deref()), (200, Some(PAGE)));
    let strange = ask(Method::Options, "/v1/chat/completions", "https://evil.example.com");
    assert_eq!((strange.status(), allowed(&strange)), (405, None));
    assert_eq!(allowed(&ask(Method::Post, "/v1/chat/completions", "null")), None);
    for administrative in ["/drain", "/flush_cache", "/abort_request"] {
        assert_eq!(ask(Method::Post, administrative, PAGE).status(), 403, "{administrative}");
    }
    let closed = Server::start(&[]);
    let mut client = Client::new(closed.address);
    client.send(Method::Options, "/v1/models", &[("origin", PAGE)], None);
    assert_eq!(client.reply(Method::Options).status(), 405);
}

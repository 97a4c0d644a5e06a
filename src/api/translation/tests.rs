//! Tests of the translation, without a server: requests as chat requests, and chat answers in the
//! form of each API. Whole conversations are in `tests/serve/newer_apis.rs`.

use super::*;
use crate::api::{Sampling, chat};
use proptest::prelude::*;
use serde_json::Value;

const RESPONSES: TranslatedEndpoint = TranslatedEndpoint::Responses;
const MESSAGES: TranslatedEndpoint = TranslatedEndpoint::Messages;

fn chat_of(endpoint: TranslatedEndpoint, body: &Value) -> Value {
    let (body, _) = endpoint.translate(body.to_string().as_bytes()).unwrap();
    serde_json::from_slice(&body).unwrap()
}

fn refused(endpoint: TranslatedEndpoint, body: &Value) -> String {
    let error = match endpoint.translate(body.to_string().as_bytes()) {
        Err(error) => error,
        Ok((body, mut translator)) => {
            let text = String::from_utf8_lossy(&body);
            let error = chat::parse(&body, &Sampling::default()).expect_err(&text);
            let told = translator.translate_body(error.status, &error.to_json());
            // Anthropic's form names the field in the message alone.
            let told: Value = serde_json::from_slice(&told).unwrap();
            let message = told["error"]["message"].as_str().unwrap();
            return message.split('`').nth(1).unwrap_or_default().to_owned();
        }
    };
    assert_eq!(error.status, 400);
    error.param.unwrap_or_default()
}

/// As for fields of the body: the client learns of a typo, and the request is served.
#[test]
fn keys_that_are_not_known_are_named() {
    let named = |endpoint: TranslatedEndpoint, body: Value| {
        let (body, _) = endpoint.translate(body.to_string().as_bytes()).unwrap();
        let mut unknown = chat::parse(&body, &Sampling::default()).unwrap().unknown;
        unknown.sort_unstable();
        unknown
    };
    let tool = json!({"type": "function", "name": "f", "parameters": {}, "defer_loading": true});
    let found = named(
        RESPONSES,
        json!({"input": [{"role": "user", "content": "a", "to": "b"}], "tools": [tool],
            "reasoning": {"efort": "low"}, "stream_options": {"x": 1}, "tpyo": 1}),
    );
    let paths = ["input[0].to", "reasoning.efort", "stream_options.x", "tools[0].defer_loading"];
    assert_eq!(found, [&paths[..], &["tpyo"]].concat());
    let block = json!({"type": "text", "text": "a", "x": 1});
    let mut tool = json!({"name": "f", "input_schema": {}, "ttl": 1});
    tool["nothing"] = Value::Null;
    let messages = json!([{"role": "user", "content": [block]}]);
    let found = named(MESSAGES, json!({"max_tokens": 1, "messages": messages, "tools": [tool]}));
    assert_eq!(found, ["messages[0].content[0].x", "tools[0].ttl"]);
    let many: Vec<Value> =
        (0..100).map(|_| json!({"role": "user", "content": "a", "x": 1})).collect();
    let found = named(RESPONSES, json!({ "input": many }));
    assert_eq!(found.len(), crate::limits::UNKNOWN_KEYS_MAX);
}

#[test]
fn a_conversation_of_responses_becomes_a_chat() {
    let chat = chat_of(
        RESPONSES,
        &json!({
            "model": "m", "instructions": "Be brief.", "max_output_tokens": 9, "stream": true,
            "top_k": 3, "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"format": {"type": "json_schema", "name": "a", "strict": true,
                "schema": {"type": "object"}}},
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"},
                "strict": null}],
            "tool_choice": {"type": "function", "name": "f"},
            "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
            "input": [
                {"role": "developer", "content": "And kind."},
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"type": "reasoning", "id": "rs_1", "summary": [],
                    "content": [{"type": "reasoning_text", "text": "Hm"}]},
                {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
                    "content": [{"type": "output_text", "text": "Yo", "annotations": []}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "d", "name": "f", "arguments": "{\"x\":1}"},
                {"type": "function_call_output", "call_id": "c", "output": "4"},
            ],
        }),
    );
    let call = |id: &str, arguments: &str| {
        let function = json!({"name": "f", "arguments": arguments});
        json!({"id": id, "type": "function", "function": function})
    };
    assert_eq!(
        chat,
        json!({
            "messages": [
                {"role": "system", "content": "Be brief.\n\nAnd kind."},
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "reasoning_content": "Hm", "content": "Yo",
                    "tool_calls": [call("c", "{}"), call("d", "{\"x\":1}")]},
                {"role": "tool", "tool_call_id": "c", "content": "4"},
            ],
            "max_completion_tokens": 9,
            "response_format": {"type": "json_schema", "json_schema":
                {"name": "a", "strict": true, "schema": {"type": "object"}}},
            "reasoning_effort": "low",
            "tools": [{"type": "function",
                "function": {"name": "f", "parameters": {"type": "object"}}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "parallel_tool_calls": true, "logprobs": true, "stream": true,
            "stream_options": {"include_usage": true, "continuous_usage_stats": true},
            "model": "m", "top_k": 3,
        })
    );
}

#[test]
fn a_conversation_of_messages_becomes_a_chat() {
    let chat = chat_of(
        MESSAGES,
        &json!({
            "model": "m", "max_tokens": 9, "stop_sequences": ["x"], "top_k": 3,
            "system": [{"type": "text", "text": "Be brief.",
                "cache_control": {"type": "ephemeral"}}],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"},
                "eager_input_streaming": true}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": true},
            "metadata": {"user_id": "u"},
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "Hm", "signature": ""},
                    {"type": "text", "text": "Yo"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "c",
                        "content": [{"type": "text", "text": "4"}]},
                    {"type": "text", "text": "and"}, {"type": "text", "text": "so"}]},
            ],
        }),
    );
    assert_eq!(
        chat,
        json!({
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "reasoning_content": "Hm", "content": "Yo",
                    "tool_calls": [{"id": "c", "type": "function",
                        "function": {"name": "f", "arguments": "{\"x\":1}"}}]},
                {"role": "tool", "tool_call_id": "c", "content": "4"},
                {"role": "user", "content": "and\nso"},
            ],
            "chat_template_kwargs": {"enable_thinking": true},
            "tools": [{"type": "function", "function":
                {"name": "f", "description": "d", "parameters": {"type": "object"}}}],
            "tool_choice": "required", "parallel_tool_calls": false, "max_tokens": 9,
            "stop": ["x"], "stream": false, "model": "m", "top_k": 3,
        })
    );
    let begun = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
    let chat = chat_of(MESSAGES, &json!({"max_tokens": 1, "messages": begun}));
    assert_eq!(chat["continue_final_message"], true);
}

#[test]
fn a_field_that_has_no_meaning_here_is_refused_by_name() {
    let input = |field: &str, value: Value| json!({"input": "a", field: value});
    for (field, value, param) in [
        ("store", json!(true), "store"),
        ("previous_response_id", json!("resp_1"), "previous_response_id"),
        ("background", json!(true), "background"),
        ("n", json!(2), "n"),
        ("messages", json!([]), "messages"),
        ("tools", json!([{"type": "web_search"}]), "tools[0].type"),
        ("tools", json!([{"type": "function"}]), "tools[0].name"),
        ("include", json!(["x"]), "include[0]"),
        ("metadata", json!({"a": "b".repeat(513)}), "metadata"),
        ("input", json!([{"role": "user"}]), "input[0].content"),
        (
            "input",
            json!([{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]),
            "input[0].arguments",
        ),
        ("tools", json!([{"type": "function", "name": "a b"}]), "tools[0].name"),
        (
            "tools",
            json!([{"type": "function", "name": "a", "parameters": 1}]),
            "tools[0].parameters",
        ),
        ("tool_choice", json!({"type": "function"}), "tool_choice.name"),
        ("truncation", json!("auto"), "truncation"),
        ("input", json!([]), "input"),
        ("input", json!(7), "input"),
        ("input", json!([{"role": "user", "content": 7}]), "input[0].content"),
        ("input", json!([{"type": "item_reference", "id": "x"}]), "input[0].type"),
        ("input", json!([{"type": "function_call", "call_id": "c"}]), "input[0].name"),
        (
            "input",
            json!([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
            "input[0].content[0].type",
        ),
    ] {
        assert_eq!(refused(RESPONSES, &input(field, value)), param, "{field}");
    }
    assert_eq!(refused(RESPONSES, &json!({})), "input");
    let message = |field: &str, value: Value| {
        let mut body = json!({"max_tokens": 1, "messages": [{"role": "user", "content": "a"}]});
        body[field] = value;
        body
    };
    let content = |block: Value| json!([{"role": "user", "content": [block]}]);
    for (field, value, param) in [
        ("max_tokens", json!(null), "max_tokens"),
        ("max_tokens", json!(0), "max_tokens"),
        ("messages", json!([]), "messages"),
        ("messages", json!([{"role": "tool", "content": "a"}]), "messages[0].role"),
        ("messages", json!([{"role": "user"}]), "messages[0].content"),
        (
            "messages",
            content(json!({"type": "image", "source": {}})),
            "messages[0].content[0].type",
        ),
        ("messages", content(json!({"type": "tool_result"})), "messages[0].content[0].tool_use_id"),
        ("tools", json!([{"name": "f"}]), "tools[0].input_schema"),
        ("tools", json!([{"name": "a b", "input_schema": {}}]), "tools[0].name"),
        ("tools", json!([{"type": "bash_20250124", "name": "bash"}]), "tools[0].type"),
        ("tool_choice", json!({"type": "all"}), "tool_choice.type"),
        ("mcp_servers", json!([{}]), "mcp_servers"),
        ("stop", json!(["x"]), "stop"),
        ("thinking", json!({"type": "much"}), "thinking.type"),
    ] {
        assert_eq!(refused(MESSAGES, &message(field, value)), param, "{field}");
    }
}

#[test]
fn errors_of_chat_name_the_fields_of_the_request() {
    let error = |endpoint: TranslatedEndpoint, body: Value, chat: ApiError| {
        let (_, mut translator) = endpoint.translate(body.to_string().as_bytes()).unwrap();
        let body = translator.translate_body(chat.status, &chat.to_json());
        serde_json::from_slice::<Value>(&body).unwrap()
    };
    let wrong = ApiError::invalid("max_completion_tokens", "must be a whole number");
    let told = error(RESPONSES, json!({"input": "a"}), wrong);
    assert_eq!(told["error"]["param"], "max_output_tokens");
    assert_eq!(told["error"]["message"], "`max_output_tokens` must be a whole number");
    let body = json!({"max_tokens": 1, "messages": [{"role": "user", "content": "a"}]});
    let told = error(MESSAGES, body, ApiError::invalid("stop[3]", "must not be empty"));
    assert_eq!(
        told,
        json!({"type": "error", "error": {"type": "invalid_request_error",
            "message": "`stop_sequences[3]` must not be empty"}})
    );
    let mut early = AnswerTranslator::of_refusals(MESSAGES);
    let told = early.translate_body(429, &ApiError::queue_full().to_json());
    assert!(String::from_utf8(told).unwrap().contains("rate_limit_error"));
}

/// A stream of a chat: reasoning, text, a call.
fn stream(finish: &str) -> String {
    let chunk = |delta: Value, finish: Value| {
        let choice = json!({"index": 0, "delta": delta, "finish_reason": finish});
        json!({"id": "chatcmpl-r", "created": 7, "model": "m", "choices": [choice],
            "usage": {"prompt_tokens": 5, "completion_tokens": 0}})
    };
    let call = |part: Value| json!({"tool_calls": [part]});
    let named = json!({"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}});
    let [one, two] = ["{\"x\":", "1}"]
        .map(|arguments| call(json!({"index": 0, "function": {"arguments": arguments}})));
    let usage = json!({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 2}}});
    let events = [
        chunk(json!({"role": "assistant", "content": ""}), json!(null)),
        chunk(json!({"reasoning": "Hm", "reasoning_content": "Hm"}), json!(null)),
        chunk(json!({"content": "Y"}), json!(null)),
        chunk(json!({"content": "o"}), json!(null)),
        chunk(call(named), json!(null)),
        chunk(one, json!(null)),
        chunk(two, json!(finish)),
        usage,
    ];
    let events: Vec<String> = events.iter().map(|event| format!("data: {event}\n\n")).collect();
    format!("{}data: [DONE]\n\n", events.concat())
}

/// The types and data of events.
fn events(endpoint: TranslatedEndpoint, stream: &str, step: usize) -> Vec<(String, Value)> {
    let body = json!({"input": "a", "messages": [{"role": "user", "content": "a"}]});
    let mut body = body.as_object().unwrap().clone();
    match endpoint {
        TranslatedEndpoint::Responses => drop(body.remove("messages")),
        _ => drop(body.insert("max_tokens".into(), json!(9))),
    }
    let body = Value::Object(body).to_string();
    let (_, mut translator) = endpoint.translate(body.as_bytes()).unwrap();
    let mut out = Vec::new();
    for piece in stream.as_bytes().chunks(step) {
        translator.translate_events(piece, &mut out);
    }
    let text = String::from_utf8(out).unwrap();
    let event = |event: &str| {
        let (name, data) = event.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        let name = name.strip_prefix("event: ").unwrap();
        assert_eq!(data["type"], name);
        (name.to_owned(), data)
    };
    text.split_terminator("\n\n").map(event).collect()
}

#[test]
fn a_stream_of_responses_has_all_events_of_each_item() {
    let (stream, item) = (stream("tool_calls"), |kind: &str| format!("response.{kind}"));
    let all = events(RESPONSES, &stream, 7);
    assert_eq!(all, events(RESPONSES, &stream, stream.len()));
    let kinds: Vec<&str> = all.iter().map(|(kind, _)| &kind["response.".len()..]).collect();
    let text = |kind: &str, deltas: usize| {
        let (delta, done) = (format!("{kind}.delta"), format!("{kind}.done"));
        let begin = ["output_item.added", "content_part.added"].map(str::to_owned);
        let end = [done, "content_part.done".to_owned(), "output_item.done".to_owned()];
        [begin.to_vec(), vec![delta; deltas], end.to_vec()].concat()
    };
    let call = vec!["function_call_arguments.delta"; 2];
    let call = [vec!["output_item.added"], call, vec!["function_call_arguments.done"]].concat();
    let expected = [
        vec!["created".to_owned(), "in_progress".to_owned()],
        text("reasoning_text", 1),
        text("output_text", 2),
        call.into_iter().map(str::to_owned).collect(),
        vec!["output_item.done".to_owned(), "completed".to_owned()],
    ];
    assert_eq!(kinds, expected.concat());
    for (number, (_, data)) in all.iter().enumerate() {
        assert_eq!(data["sequence_number"], number);
    }
    let (kind, last) = all.last().unwrap();
    assert_eq!(*kind, item("completed"));
    let output = last["response"]["output"].as_array().unwrap();
    assert_eq!(output[0]["content"][0]["text"], "Hm");
    assert_eq!(output[1]["content"][0]["text"], "Yo");
    assert_eq!(
        (&output[2]["call_id"], &output[2]["arguments"]),
        (&json!("c"), &json!("{\"x\":1}"))
    );
    assert_eq!(last["response"]["usage"]["input_tokens_details"]["cached_tokens"], 2);
    let done: Vec<&Value> = all
        .iter()
        .filter(|(kind, _)| *kind == item("output_item.done"))
        .map(|(_, data)| &data["item"])
        .collect();
    assert_eq!(done, output.iter().collect::<Vec<_>>());
}

#[test]
fn a_stream_of_messages_has_all_events_of_each_block() {
    let stream = stream("tool_calls");
    let all = events(MESSAGES, &stream, 11);
    let kinds: Vec<&str> = all.iter().map(|(kind, _)| &kind[..]).collect();
    let block = |deltas: usize| {
        let deltas = ["content_block_delta"].repeat(deltas);
        [vec!["content_block_start"], deltas, vec!["content_block_stop"]].concat()
    };
    let blocks = [block(1), block(2), block(2)].concat();
    let ends = vec!["message_delta", "message_stop"];
    assert_eq!(kinds, [vec!["message_start"], blocks, ends].concat());
    assert_eq!(all[0].1["message"]["usage"]["input_tokens"], 5);
    let (_, delta) = &all[all.len() - 2];
    assert_eq!(delta["delta"]["stop_reason"], "tool_use");
    assert_eq!(
        (&delta["usage"]["input_tokens"], &delta["usage"]["output_tokens"]),
        (&json!(3), &json!(6))
    );
    let json: String =
        all.iter().filter_map(|(_, data)| data["delta"]["partial_json"].as_str()).collect();
    assert_eq!(json, "{\"x\":1}");
}

/// A position with the log probability of this token.
fn position(token: &str) -> Value {
    json!({"token": token, "logprob": -0.5, "bytes": token.as_bytes(), "top_logprobs": []})
}

#[test]
fn log_probabilities_are_those_of_the_text() {
    let usage = json!({"completion_tokens": 4, "completion_tokens_details":
        {"reasoning_tokens": 1}});
    let all = ["Hm", "Y", "o", "<end>"].map(position);
    let message = json!({"reasoning": "Hm", "content": "Yo"});
    let choice = json!({"message": message, "logprobs": {"content": all}, "finish_reason": "stop"});
    let body = json!({"id": "chatcmpl-r", "choices": [choice], "usage": usage}).to_string();
    let ask = br#"{"input": "a", "include": ["message.output_text.logprobs"]}"#;
    let mut whole = RESPONSES.translate(ask).unwrap().1;
    let answer: Value =
        serde_json::from_slice(&whole.translate_body(200, body.as_bytes())).unwrap();
    let expected = json!(["Y", "o"].map(position));
    assert_eq!(answer["output"][1]["content"][0]["logprobs"], expected);
    let chunk = |delta: Value, token: &str, finish: Value| {
        let logprobs = json!({"content": [position(token)]});
        let choice = json!({"delta": delta, "logprobs": logprobs, "finish_reason": finish});
        format!("data: {}\n\n", json!({"id": "chatcmpl-r", "choices": [choice]}))
    };
    let stream = [
        chunk(json!({"reasoning": "Hm"}), "Hm", json!(null)),
        // A token without text: it waits for the next one.
        chunk(json!({}), "Y", json!(null)),
        chunk(json!({"content": "Yo"}), "o", json!(null)),
        chunk(json!({}), "<end>", json!("stop")),
        "data: [DONE]\n\n".to_owned(),
    ];
    let mut out = Vec::new();
    let mut translator = RESPONSES.translate(ask).unwrap().1;
    translator.translate_events(stream.concat().as_bytes(), &mut out);
    let last = String::from_utf8(out).unwrap();
    let last = last.trim_end().rsplit_once("data: ").unwrap().1;
    let last: Value = serde_json::from_str(last).unwrap();
    assert_eq!(last["response"]["output"][1]["content"][0]["logprobs"], expected);
}

/// A worker of another project sends log probabilities without text and without end.
#[test]
fn log_probabilities_that_wait_are_bounded() {
    let positions = vec![position("x"); 1000];
    let choice = json!({"delta": {}, "logprobs": {"content": positions}});
    let chunk = format!("data: {}\n\n", json!({"id": "r", "choices": [choice]}));
    let mut translator = RESPONSES.translate(br#"{"input": "a"}"#).unwrap().1;
    let mut out = Vec::new();
    for _ in 0..2 * crate::limits::TRANSLATED_ANSWER_MAX / chunk.len() {
        translator.translate_events(chunk.as_bytes(), &mut out);
    }
    assert!(String::from_utf8(out).unwrap().contains("response.failed"));
}

#[test]
fn an_answer_that_breaks_off_says_so() {
    let all = events(RESPONSES, &stream("length"), 64);
    let (kind, last) = all.last().unwrap();
    assert_eq!(kind, "response.incomplete");
    assert_eq!(last["response"]["incomplete_details"]["reason"], "max_output_tokens");
    assert_eq!(last["response"]["output"][2]["status"], "incomplete");
    let cut = stream("stop");
    let cut = &cut[..cut.find("[DONE]").unwrap() - "data: ".len()];
    let lost =
        format!("{cut}data: {{\"error\":{{\"message\":\"lost\",\"code\":\"peer_lost\"}}}}\n\n");
    let all = events(RESPONSES, &lost, 64);
    let (kind, last) = all.last().unwrap();
    assert_eq!(
        (&kind[..], &last["response"]["error"]["message"]),
        ("response.failed", &json!("lost"))
    );
    let all = events(MESSAGES, &lost, 64);
    let (kind, last) = all.last().unwrap();
    assert_eq!((&kind[..], &last["error"]["message"]), ("error", &json!("lost")));
}

proptest! {
    #[test]
    fn no_body_and_no_answer_panics(
        body in prop::collection::vec(any::<u8>(), 0..200),
        answer in "(data: )?[{}\\[\\]\":,a-z0-9\n]{0,200}",
    ) {
        for endpoint in [RESPONSES, MESSAGES, TranslatedEndpoint::TokenCount] {
            let _ = endpoint.translate(&body);
            let mut translator = match endpoint {
                RESPONSES => endpoint.translate(b"{\"input\":\"a\"}").unwrap().1,
                _ => endpoint.translate(
                    b"{\"max_tokens\":1,\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]}",
                ).unwrap().1,
            };
            translator.translate_events(answer.as_bytes(), &mut Vec::new());
            let _ = translator.translate_body(200, answer.as_bytes());
            let _ = translator.translate_body(500, answer.as_bytes());
        }
    }
}

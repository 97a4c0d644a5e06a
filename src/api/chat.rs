//! The body of `POST /v1/chat/completions`.
//!
//! Owns: the accepted forms of a message. Invariant: in every accepted message, role and content
//! are strings, so that templates need not handle OpenAI's lists of parts.

use super::error::ApiError;
use super::fields::{Fields, Neutral};
use super::request::{ApiEndpoint, ChatPrompt, Dialect, GenerateRequest, Prompts, Sampling};
use super::tools;
use crate::limits::TOP_LOGPROBS_MAX;
use serde_json::{Map, Value};

const DIALECT: Dialect = Dialect {
    default_length: None,
    max_tokens: &["max_completion_tokens", "max_tokens"],
    least_tokens: 1,
    min_tokens: "min_tokens",
    seed: &["seed"],
};

/// Fields of OpenAI that are not supported, with the values that have no effect.
pub const REFUSED: &[Neutral<'_>] = &[
    ("audio", &[]),
    ("function_call", &["\"none\"", "\"auto\""]),
    ("modalities", &["[\"text\"]"]),
    ("moderation", &[]),
    ("prediction", &[]),
    ("service_tier", &["\"auto\"", "\"default\""]),
    ("store", &["false"]),
    ("verbosity", &["\"medium\""]),
    ("web_search_options", &[]),
    ("echo", &["false"]),
    ("input_ids", &[]),
];

/// Reads a body. Sampling fields that are absent take their values from `defaults`.
///
/// # Errors
/// A field is missing, malformed, out of range or not supported; the error names it.
pub fn parse(body: &[u8], defaults: &Sampling) -> Result<GenerateRequest, ApiError> {
    let mut fields = Fields::parse(body)?;
    fields.refuse(REFUSED)?;
    let (tools, forced) = tools::read(&mut fields)?;
    let conversation =
        conversation(&mut fields)?.ok_or_else(|| fields.invalid("messages", "is missing"))?;
    let prompts = Prompts::Chat(conversation.with_tools(tools.as_ref()));
    let mut request = GenerateRequest::read(ApiEndpoint::Chat, prompts, &mut fields)?;
    request.tools = tools;
    request.add_special_tokens = fields.get("add_special_tokens", "must be true or false")?;
    if let Some(forced) = forced {
        if let Some(structured) = &request.structured {
            let why = format!("and `{}` exclude each other", structured.field);
            return Err(fields.invalid("tool_choice", why));
        }
        request.structured = Some(forced);
    }
    request.separate_reasoning = fields.flag("separate_reasoning", true)?;
    request.include_reasoning = fields.flag("include_reasoning", true)?;
    request.stream_reasoning = fields.flag("stream_reasoning", true)?;
    request.read_sampling(&mut fields, &DIALECT, defaults)?;
    request.read_stream_options(&mut fields)?;
    let logprobs = fields.flag("logprobs", false)?;
    let top = fields.integer("top_logprobs", 0..=TOP_LOGPROBS_MAX as i128)?.unwrap_or(0);
    if top > 0 && !logprobs {
        return Err(ApiError::invalid("top_logprobs", "needs `logprobs` to be true"));
    }
    request.logprobs = logprobs.then_some(top);
    request.read_prompt_logprobs(&mut fields)?;
    request.finish(fields)
}

/// The conversation in a body of this endpoint or of `/tokenize`.
pub(super) fn conversation(fields: &mut Fields<'_>) -> Result<Option<ChatPrompt>, ApiError> {
    let must = "must be a list of objects";
    let Some(messages) = fields.tree::<Vec<Map<String, Value>>>("messages", must)? else {
        return Ok(None);
    };
    if messages.is_empty() {
        return Err(fields.invalid("messages", "must not be empty"));
    }
    let continues = fields.flag("continue_final_message", false)?;
    let add_generation_prompt = fields.flag("add_generation_prompt", !continues)?;
    if continues && add_generation_prompt {
        let why = "and `add_generation_prompt` exclude each other";
        return Err(fields.invalid("continue_final_message", why));
    }
    let mut template_kwargs: Map<String, Value> =
        fields.tree("chat_template_kwargs", "must be an object")?.unwrap_or_default();
    if let Some(effort) = fields.name("reasoning_effort")? {
        // Templates know either the effort or whether the model reasons at all, as in vLLM.
        template_kwargs.entry("enable_thinking").or_insert((effort != "none").into());
        template_kwargs.entry("reasoning_effort").or_insert(effort.into());
    }
    let messages = messages.into_iter().enumerate().map(|(i, message)| normalise(message, i));
    Ok(Some(ChatPrompt {
        messages: messages.collect::<Result<_, _>>()?,
        tools: Vec::new(),
        add_generation_prompt,
        continues,
        template: fields.text("chat_template")?,
        template_kwargs,
    }))
}

/// A message with its content as one string.
fn normalise(mut message: Map<String, Value>, index: usize) -> Result<Value, ApiError> {
    let at = |field: &str| format!("messages[{index}].{field}");
    let silent = match message.get("role") {
        // An assistant message that only calls a tool has no content.
        Some(Value::String(role)) if !role.is_empty() => role == "assistant",
        _ => return Err(ApiError::invalid(at("role"), "must be a string such as `user`")),
    };
    let content = match message.get_mut("content").map_or(Value::Null, Value::take) {
        Value::String(text) => text,
        Value::Array(parts) => join(parts, &at("content"))?,
        Value::Null if silent => String::new(),
        Value::Null => return Err(ApiError::invalid(at("content"), "is missing")),
        _ => return Err(ApiError::invalid(at("content"), "must be a string or a list of parts")),
    };
    for field in ["audio", "function_call"] {
        if message.get(field).is_some_and(|value| !value.is_null()) {
            return Err(ApiError::unsupported(at(field)));
        }
    }
    message.insert("content".into(), Value::String(content));
    tools::parse_arguments(&mut message, index)?;
    // vLLM's name of the field that templates read.
    if let Some(reasoning) = message.remove("reasoning") {
        message.entry("reasoning_content").or_insert(reasoning);
    }
    Ok(Value::Object(message))
}

/// The texts of a list of parts, joined with line breaks.
fn join(parts: Vec<Value>, path: &str) -> Result<String, ApiError> {
    let mut joined = String::new();
    for (i, part) in parts.iter().enumerate() {
        let kind = part.get("type").and_then(Value::as_str);
        let text = match kind {
            Some("text") => part.get("text").and_then(Value::as_str),
            Some("refusal") => part.get("refusal").and_then(Value::as_str),
            Some(_) => return Err(ApiError::unsupported(format!("{path}[{i}].type"))),
            None => None,
        };
        let Some(text) = text else {
            return Err(ApiError::invalid(
                format!("{path}[{i}]"),
                "must be an object with a type and a text",
            ));
        };
        if i > 0 {
            joined.push('\n');
        }
        joined.push_str(text);
    }
    Ok(joined)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(body: &str) -> Result<GenerateRequest, ApiError> {
        parse(body.as_bytes(), &Sampling::default())
    }

    fn with(rest: &str) -> Result<GenerateRequest, ApiError> {
        read(&format!(r#"{{"messages":[{{"role":"user","content":"hi"}}],{rest}}}"#))
    }

    fn messages(json: &str) -> Result<Vec<Value>, ApiError> {
        match read(&format!("{{\"messages\":{json}}}"))?.prompts {
            Prompts::Chat(conversation) => Ok(conversation.messages),
            other => panic!("a conversation, not {other:?}"),
        }
    }

    #[test]
    fn a_content_becomes_one_text() {
        assert_eq!(
            messages(
                r#"[{"role":"system","content":"be"},
                {"role":"user","name":"u",
                "content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},
                {"role":"assistant","content":null,"reasoning":"r",
                "tool_calls":[{"id":"c","function":{"name":"f","arguments":"{\"x\": 1}"}},
                {"function":{"name":"g","arguments":""}}]},
                {"role":"assistant","tool_calls":[],"audio":null,
                "content":[{"type":"refusal","refusal":"no"}]},
                {"role":"tool","content":"4","tool_call_id":"c"}]"#
            ),
            Ok(vec![
                json!({"role":"system","content":"be"}),
                json!({"role":"user","name":"u","content":"a\nb"}),
                json!({"role":"assistant","content":"","reasoning_content":"r","tool_calls":[
                    {"id":"c","function":{"name":"f","arguments":{"x":1}}},
                    {"function":{"name":"g","arguments":{}}}]}),
                json!({"role":"assistant","content":"no","audio":null}),
                json!({"role":"tool","content":"4","tool_call_id":"c"}),
            ])
        );
    }

    #[test]
    fn refuses_messages_by_their_place() {
        let crowd = format!("[{}0]", "0,".repeat(1 << 17));
        for (json, param) in [
            ("\"hi\"", "messages"),
            ("[]", "messages"),
            ("[1]", "messages"),
            (&crowd, "messages"),
            (r#"[{"content":"a"}]"#, "messages[0].role"),
            (r#"[{"role":"user","content":"a"},{"role":7,"content":"a"}]"#, "messages[1].role"),
            (r#"[{"role":"user"}]"#, "messages[0].content"),
            (r#"[{"role":"user","content":null}]"#, "messages[0].content"),
            (r#"[{"role":"user","content":7}]"#, "messages[0].content"),
            (
                r#"[{"role":"user","content":[{"type":"image_url","image_url":{}}]}]"#,
                "messages[0].content[0].type",
            ),
            (r#"[{"role":"user","content":[{"type":"text"}]}]"#, "messages[0].content[0]"),
            (r#"[{"role":"user","content":["a"]}]"#, "messages[0].content[0]"),
            (
                r#"[{"role":"assistant","content":"a","function_call":{}}]"#,
                "messages[0].function_call",
            ),
            (r#"[{"role":"assistant","tool_calls":{}}]"#, "messages[0].tool_calls"),
            (
                r#"[{"role":"assistant","tool_calls":[{"id":"c"}]}]"#,
                "messages[0].tool_calls[0].function",
            ),
            (
                r#"[{"role":"assistant","tool_calls":[{"function":{"arguments":"{}"}}]}]"#,
                "messages[0].tool_calls[0].function.name",
            ),
            (
                r#"[{"role":"assistant",
                "tool_calls":[{"function":{"name":"f","arguments":"{"}}]}]"#,
                "messages[0].tool_calls[0].function.arguments",
            ),
        ] {
            let error = messages(json).expect_err(json);
            assert_eq!((error.status, error.param.as_deref()), (400, Some(param)), "{error}");
        }
        assert_eq!(read("{}").unwrap_err().param.as_deref(), Some("messages"));
    }

    #[test]
    fn refuses_fields_by_name_unless_they_ask_for_nothing() {
        for (field, value) in [
            ("audio", "{}"),
            ("function_call", "{\"name\":\"f\"}"),
            ("functions", "[{}]"),
            ("modalities", "[\"text\",\"audio\"]"),
            ("prediction", "{}"),
            ("service_tier", "\"flex\""),
            ("store", "true"),
            ("verbosity", "\"low\""),
            ("web_search_options", "{}"),
            ("truncate_prompt_tokens", "5"),
        ] {
            let error = with(&format!("\"{field}\":{value}")).expect_err(field);
            assert_eq!(
                (error.status, error.code.name(), error.param.as_deref()),
                (400, "unsupported_field", Some(field))
            );
        }
        let plain = with("\"n\":1").unwrap();
        for rest in [
            r#""tools":[],"tool_choice":"auto","functions":[],"function_call":"none",
            "parallel_tool_calls":true"#,
            r#""response_format":{ "type": "text" },"modalities":["text"],"logit_bias":{},
            "store":false"#,
            r#""user":"u","metadata":{"a":"b"},"safety_identifier":"s","prompt_cache_key":"k",
            "audio":null"#,
            r#""service_tier":"auto","verbosity":"medium","reasoning_effort":null,"logprobs":false,
            "top_logprobs":0"#,
            r#""separate_reasoning":true,"stream_reasoning":true,"continue_final_message":false,
            "routed_dp_rank":0"#,
        ] {
            assert_eq!(with(rest), Ok(plain.clone()), "{rest}");
        }
        assert_eq!(with("\"foo\":1").unwrap().unknown, ["foo"]);
    }

    #[test]
    fn both_names_of_the_length_mean_the_same() {
        assert_eq!(with("\"n\":1").unwrap().max_tokens, None);
        assert_eq!(with("\"max_tokens\":5").unwrap().max_tokens, Some(5));
        assert_eq!(with("\"max_completion_tokens\":6").unwrap().max_tokens, Some(6));
        assert_eq!(
            with("\"max_tokens\":5,\"max_completion_tokens\":6").unwrap().max_tokens,
            Some(6)
        );
        for field in ["max_tokens", "max_completion_tokens"] {
            let error = with(&format!("\"{field}\":0")).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(field));
        }
    }

    #[test]
    fn alternatives_need_logprobs() {
        assert_eq!(with("\"logprobs\":true").unwrap().logprobs, Some(0));
        assert_eq!(with("\"logprobs\":true,\"top_logprobs\":20").unwrap().logprobs, Some(20));
        for (rest, param) in [
            ("\"top_logprobs\":2", "top_logprobs"),
            ("\"logprobs\":true,\"top_logprobs\":21", "top_logprobs"),
            ("\"logprobs\":3", "logprobs"),
        ] {
            assert_eq!(with(rest).unwrap_err().param.as_deref(), Some(param));
        }
    }

    #[test]
    fn the_template_gets_its_variables() {
        let request = with(
            r#""add_generation_prompt":false,"chat_template_kwargs":{"enable_thinking":false}"#,
        );
        let Prompts::Chat(conversation) = request.unwrap().prompts else {
            panic!("a conversation")
        };
        assert!(!conversation.add_generation_prompt);
        assert_eq!(Value::Object(conversation.template_kwargs), json!({"enable_thinking": false}));
    }
}

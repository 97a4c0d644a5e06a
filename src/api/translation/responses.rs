//! The body of `POST /v1/responses`, as a chat request.
//!
//! Invariant: the server keeps no conversation, so a field that needs one is refused.

use super::chat_answer::{FieldName, InnerPath};
use super::chat_body::{ChatBody, ChatMessages, UnknownKeys, join_texts, text_in};
use crate::api::error::ApiError;
use crate::api::fields::{Fields, Neutral};
use crate::limits::{ECHO_BYTES_MAX, METADATA_BYTES_MAX, METADATA_ENTRIES_MAX, TOP_LOGPROBS_MAX};
use serde_json::{Map, Number, Value, json};

/// Chat fields and the fields that they come from.
pub(super) const NAMES: &[FieldName] = &[
    FieldName { chat: "messages", own: "input", inner: InnerPath::Dropped },
    FieldName { chat: "max_completion_tokens", own: "max_output_tokens", inner: SAME },
    FieldName {
        chat: "response_format",
        own: "text.format",
        inner: InnerPath::Renamed(&[(".json_schema", "")]),
    },
    FieldName { chat: "reasoning_effort", own: "reasoning.effort", inner: SAME },
    FieldName { chat: "verbosity", own: "text.verbosity", inner: SAME },
    FieldName { chat: "tools", own: "tools", inner: InnerPath::Renamed(&[(".function", "")]) },
    FieldName {
        chat: "tool_choice",
        own: "tool_choice",
        inner: InnerPath::Renamed(&[(".function", "")]),
    },
];
const SAME: InnerPath = InnerPath::Renamed(&[]);

/// Fields that are not supported, with the values that have no effect.
const REFUSED: &[Neutral<'_>] = &[
    ("background", &["false"]),
    ("context_management", &["[]"]),
    ("conversation", &[]),
    ("enable_response_messages", &["false"]),
    ("previous_input_messages", &["[]"]),
    ("previous_response_id", &[]),
    ("prompt", &[]),
    ("store", &["false"]),
    ("truncation", &["\"disabled\""]),
];

/// Fields of chat that this endpoint has under other names or not at all.
const FIELDS_OF_CHAT: &[Neutral<'_>] = &[
    ("add_generation_prompt", &["true"]),
    ("continue_final_message", &["false"]),
    ("function_call", &[]),
    ("functions", &["[]"]),
    ("logprobs", &[]),
    ("max_completion_tokens", &[]),
    ("max_tokens", &[]),
    ("messages", &[]),
    ("n", &["1"]),
    ("reasoning_effort", &[]),
    ("response_format", &[]),
    ("verbosity", &[]),
];

/// Values of `include`. All but the first concern items that no answer of this server has.
const INCLUDES: &[&str] = &[
    LOGPROBS,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
];
const LOGPROBS: &str = "message.output_text.logprobs";

/// The fields of the request that its answer repeats.
pub(super) type Echo = Map<String, Value>;

/// Without its long fields, if it is longer than [`ECHO_BYTES_MAX`].
fn shorten(echo: &mut Echo) {
    if serde_json::to_string(echo).is_ok_and(|text| text.len() > ECHO_BYTES_MAX) {
        echo["instructions"] = Value::Null;
        (echo["tools"], echo["text"]) = (json!([]), json!({"format": {"type": "text"}}));
        if echo["tool_choice"].is_object() {
            echo["tool_choice"] = json!("auto");
        }
    }
}

/// Translates a body.
///
/// # Errors
/// A field is missing, malformed or not supported; the error names it.
pub(super) fn translate(body: &[u8]) -> Result<(Vec<u8>, Echo), ApiError> {
    let mut fields = Fields::parse(body)?;
    fields.refuse(REFUSED)?;
    fields.refuse_as_unknown(FIELDS_OF_CHAT)?;
    let mut chat = ChatBody::default();
    let mut echo = Echo::new();
    let instructions = fields.text("instructions")?;
    let mut messages = ChatMessages::default();
    if let Some(instructions) = &instructions {
        messages.push("system", instructions.clone());
    }
    echo.insert("instructions".into(), instructions.into());
    read_input(&mut fields, &mut messages, &mut chat.unknown)?;
    chat.set("messages", messages.finish());
    let most = fields.integer::<u32>("max_output_tokens", 1..=i128::from(u32::MAX))?;
    echo.insert("max_output_tokens".into(), most.into());
    chat.set_some("max_completion_tokens", most);
    for name in ["temperature", "top_p"] {
        let value = fields.get::<Number>(name, "must be a number")?;
        echo.insert(name.into(), value.clone().into());
        chat.set_some(name, value);
    }
    for name in ["user", "safety_identifier", "prompt_cache_key"] {
        let value = fields.name(name)?;
        echo.insert(name.into(), value.clone().into());
        chat.set_some(name, value);
    }
    read_text(&mut fields, &mut chat, &mut echo)?;
    read_reasoning(&mut fields, &mut chat, &mut echo)?;
    read_tools(&mut fields, &mut chat, &mut echo)?;
    read_logprobs(&mut fields, &mut chat, &mut echo)?;
    let metadata = fields.tree::<Map<String, Value>>("metadata", "must be an object")?;
    let metadata = metadata.unwrap_or_default();
    let is_short =
        |value: &Value| value.as_str().is_some_and(|text| text.len() <= METADATA_BYTES_MAX);
    if metadata.len() > METADATA_ENTRIES_MAX || !metadata.values().all(is_short) {
        let must = format!(
            "must be an object of at most {METADATA_ENTRIES_MAX} strings, each of at most \
             {METADATA_BYTES_MAX} bytes"
        );
        return Err(fields.invalid("metadata", must));
    }
    echo.insert("metadata".into(), metadata.into());
    // It limits calls of the server's own tools, and there are none.
    let calls = fields.integer::<u32>("max_tool_calls", 1..=i128::from(u32::MAX))?;
    echo.insert("max_tool_calls".into(), calls.into());
    if let Some(mut options) = fields.object("stream_options")? {
        // Padding against observers of the network, which TLS is for.
        options.flag("include_obfuscation", false)?;
        chat.unknown.extend(options.rest());
    }
    chat.set_stream(fields.flag("stream", false)?);
    shorten(&mut echo);
    Ok((chat.finish(&fields), echo))
}

/// Reads `input`: a text, or the items of a conversation.
fn read_input(
    fields: &mut Fields<'_>,
    messages: &mut ChatMessages,
    unknown: &mut UnknownKeys,
) -> Result<(), ApiError> {
    let must = "must be a string or a list of items";
    let items = match fields.tree::<Value>("input", must)? {
        None => return Err(fields.invalid("input", "is missing")),
        Some(Value::String(text)) => {
            messages.push("user", text);
            return Ok(());
        }
        Some(Value::Array(items)) if items.is_empty() => {
            return Err(fields.invalid("input", "must not be empty"));
        }
        Some(Value::Array(items)) => items,
        Some(_) => return Err(fields.invalid("input", must)),
    };
    for (index, item) in items.iter().enumerate() {
        read_item(item, &format!("input[{index}]"), messages, unknown)?;
    }
    Ok(())
}

fn read_item(
    item: &Value,
    at: &str,
    messages: &mut ChatMessages,
    unknown: &mut UnknownKeys,
) -> Result<(), ApiError> {
    let kind = match item.get("type") {
        None | Some(Value::Null) => "message",
        Some(_) => text_in(item, at, "type")?,
    };
    match kind {
        "message" => {
            unknown.note(item, at, &["type", "id", "status", "role", "content", "phase"]);
            let role = match text_in(item, at, "role")? {
                // The newer name.
                "developer" => "system",
                role => role,
            };
            let types = ["input_text", "output_text", "text", "refusal"];
            if role != "assistant" && item.get("content").is_none_or(Value::is_null) {
                return Err(ApiError::invalid(format!("{at}.content"), "is missing"));
            }
            let content = join_texts(item.get("content"), &format!("{at}.content"), &types)?;
            messages.push(role, content);
        }
        "function_call" => {
            unknown.note(item, at, &["type", "id", "status", "call_id", "name", "arguments"]);
            let (id, name) = (text_in(item, at, "call_id")?, text_in(item, at, "name")?);
            let arguments = text_in(item, at, "arguments")?;
            let is_object = arguments.trim().is_empty()
                || serde_json::from_str::<Map<_, Value>>(arguments).is_ok();
            if !is_object {
                let must = "must be a JSON object in a string";
                return Err(ApiError::invalid(format!("{at}.arguments"), must));
            }
            messages.push_call(id, name, arguments.to_owned());
        }
        "function_call_output" => {
            unknown.note(item, at, &["type", "id", "status", "call_id", "output"]);
            if item.get("output").is_none_or(Value::is_null) {
                return Err(ApiError::invalid(format!("{at}.output"), "is missing"));
            }
            let output =
                join_texts(item.get("output"), &format!("{at}.output"), &["input_text", "text"])?;
            messages.push_result(text_in(item, at, "call_id")?, output);
        }
        "reasoning" => {
            let known = ["type", "id", "status", "summary", "content", "encrypted_content"];
            unknown.note(item, at, &known);
            let content =
                join_texts(item.get("content"), &format!("{at}.content"), &["reasoning_text"])?;
            // A client that keeps only the summary sends it back.
            let text = match content.is_empty() {
                true => {
                    join_texts(item.get("summary"), &format!("{at}.summary"), &["summary_text"])?
                }
                false => content,
            };
            messages.push_reasoning(text);
        }
        _ => return Err(ApiError::unsupported(format!("{at}.type"))),
    }
    Ok(())
}

/// Reads `text`: the format of the answer.
fn read_text(
    fields: &mut Fields<'_>,
    chat: &mut ChatBody,
    echo: &mut Echo,
) -> Result<(), ApiError> {
    let must = "must be an object";
    let text = fields.tree::<Value>("text", must)?.unwrap_or_else(|| json!({}));
    if !text.is_object() {
        return Err(fields.invalid("text", must));
    }
    chat.unknown.note(&text, "text", &["format", "verbosity"]);
    let format = text.get("format").filter(|format| !format.is_null());
    let format = format.cloned().unwrap_or_else(|| json!({"type": "text"}));
    chat.unknown.note(&format, "text.format", &["type", "name", "description", "schema", "strict"]);
    chat.set_some("verbosity", text.get("verbosity").cloned());
    match format.get("type").and_then(Value::as_str) {
        Some("text") => {}
        Some("json_schema") => {
            let mut schema = format.as_object().cloned().unwrap_or_default();
            schema.remove("type");
            chat.set("response_format", json!({"type": "json_schema", "json_schema": schema}));
        }
        _ => chat.set("response_format", format.clone()),
    }
    echo.insert("text".into(), json!({"format": format, "verbosity": text.get("verbosity")}));
    Ok(())
}

/// Reads `reasoning`: its effort. The reasoning itself is an item of the answer, so a summary adds
/// nothing.
fn read_reasoning(
    fields: &mut Fields<'_>,
    chat: &mut ChatBody,
    echo: &mut Echo,
) -> Result<(), ApiError> {
    let reasoning = fields.tree::<Value>("reasoning", "must be an object")?;
    let reasoning = reasoning.unwrap_or_else(|| json!({}));
    if !reasoning.is_object() {
        return Err(fields.invalid("reasoning", "must be an object"));
    }
    chat.unknown.note(&reasoning, "reasoning", &["effort", "summary", "generate_summary"]);
    let effort = reasoning.get("effort").filter(|effort| !effort.is_null());
    chat.set_some("reasoning_effort", effort.cloned());
    echo.insert("reasoning".into(), json!({"effort": effort, "summary": null}));
    Ok(())
}

/// Reads `tools` and the choice among them.
fn read_tools(
    fields: &mut Fields<'_>,
    chat: &mut ChatBody,
    echo: &mut Echo,
) -> Result<(), ApiError> {
    let tools = fields.tree::<Vec<Value>>("tools", "must be a list of objects")?;
    let tools = tools.unwrap_or_default();
    let mut functions = Vec::with_capacity(tools.len());
    for (index, tool) in tools.iter().enumerate() {
        let at = format!("tools[{index}]");
        if text_in(tool, &at, "type")? != "function" {
            return Err(ApiError::unsupported(format!("{at}.type")));
        }
        chat.unknown.note(tool, &at, &["type", "name", "description", "parameters", "strict"]);
        let name = text_in(tool, &at, "name")?;
        let mut function = Map::new();
        function.insert("name".into(), name.into());
        for key in ["description", "parameters", "strict"] {
            if let Some(value) = tool.get(key).filter(|value| !value.is_null()) {
                function.insert(key.into(), value.clone());
            }
        }
        functions.push(json!({"type": "function", "function": function}));
    }
    let choice = fields.tree::<Value>("tool_choice", "must be a string or an object")?;
    let of_chat = match &choice {
        Some(named @ Value::Object(_)) if named.get("type") == Some(&json!("function")) => {
            chat.unknown.note(named, "tool_choice", &["type", "name"]);
            let name = text_in(named, "tool_choice", "name")?;
            Some(json!({"type": "function", "function": {"name": name}}))
        }
        other => other.clone(),
    };
    chat.set("tools", functions);
    chat.set_some("tool_choice", of_chat);
    let parallel = fields.flag("parallel_tool_calls", true)?;
    chat.set("parallel_tool_calls", parallel);
    echo.insert("tools".into(), tools.into());
    echo.insert("tool_choice".into(), choice.unwrap_or_else(|| json!("auto")));
    echo.insert("parallel_tool_calls".into(), parallel.into());
    Ok(())
}

/// Reads `include` and `top_logprobs`.
fn read_logprobs(
    fields: &mut Fields<'_>,
    chat: &mut ChatBody,
    echo: &mut Echo,
) -> Result<(), ApiError> {
    let include = fields.tree::<Vec<String>>("include", "must be a list of strings")?;
    let include = include.unwrap_or_default();
    if let Some(at) = include.iter().position(|asked| !INCLUDES.contains(&&**asked)) {
        return Err(ApiError::unsupported(format!("include[{at}]")));
    }
    let top = fields.integer::<u32>("top_logprobs", 0..=TOP_LOGPROBS_MAX as i128)?;
    let top = top.filter(|top| *top > 0);
    echo.insert("top_logprobs".into(), top.unwrap_or(0).into());
    if top.is_some() || include.iter().any(|asked| asked == LOGPROBS) {
        chat.set("logprobs", true);
    }
    chat.set_some("top_logprobs", top);
    Ok(())
}

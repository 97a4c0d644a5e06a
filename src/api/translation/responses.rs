//! The body of `POST /v1/responses`, as a chat request.
//!
//! Invariant: the server keeps no conversation, so a field that needs one is refused.

use super::chat_body::{ChatBody, ChatMessages, join_texts, text_in};
use crate::api::error::ApiError;
use crate::api::fields::{Fields, Neutral};
use serde_json::{Map, Value, json};

/// Names of chat fields and of the fields that they come from.
pub(super) const NAMES: &[(&str, &str)] = &[
    ("messages", "input"),
    ("max_completion_tokens", "max_output_tokens"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("verbosity", "text.verbosity"),
];

/// Fields that are not supported, with the values that have no effect.
const REFUSED: &[Neutral<'_>] = &[
    ("background", &["false"]),
    ("context_management", &["[]"]),
    ("conversation", &[]),
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
    read_input(&mut fields, &mut messages)?;
    chat.set("messages", messages.finish());
    let most = fields.tree::<Value>("max_output_tokens", "must be a whole number")?;
    echo.insert("max_output_tokens".into(), most.clone().into());
    chat.set_some("max_completion_tokens", most);
    for name in ["temperature", "top_p", "user", "safety_identifier", "prompt_cache_key"] {
        let value = fields.tree::<Value>(name, "must be a value of JSON")?;
        echo.insert(name.into(), value.clone().into());
        chat.set_some(name, value);
    }
    read_text(&mut fields, &mut chat, &mut echo)?;
    read_reasoning(&mut fields, &mut chat, &mut echo)?;
    read_tools(&mut fields, &mut chat, &mut echo)?;
    read_logprobs(&mut fields, &mut chat, &mut echo)?;
    let metadata = fields.tree::<Map<String, Value>>("metadata", "must be an object")?;
    echo.insert("metadata".into(), metadata.unwrap_or_default().into());
    // It limits calls of the server's own tools, and there are none.
    let calls = fields.integer::<u32>("max_tool_calls", 1..=i128::from(u32::MAX))?;
    echo.insert("max_tool_calls".into(), calls.into());
    if let Some(mut options) = fields.object("stream_options")? {
        // Padding against observers of the network, which TLS is for.
        options.flag("include_obfuscation", false)?;
        if let Some(unknown) = options.rest().first() {
            return Err(ApiError::unknown(unknown));
        }
    }
    chat.set_stream(fields.flag("stream", false)?);
    Ok((chat.finish(&fields), echo))
}

/// Reads `input`: a text, or the items of a conversation.
fn read_input(fields: &mut Fields<'_>, messages: &mut ChatMessages) -> Result<(), ApiError> {
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
        read_item(item, &format!("input[{index}]"), messages)?;
    }
    Ok(())
}

fn read_item(item: &Value, at: &str, messages: &mut ChatMessages) -> Result<(), ApiError> {
    let kind = match item.get("type") {
        None => "message",
        Some(_) => text_in(item, at, "type")?,
    };
    match kind {
        "message" => {
            let role = match text_in(item, at, "role")? {
                // The newer name.
                "developer" => "system",
                role => role,
            };
            let types = ["input_text", "output_text", "text", "refusal"];
            let content = join_texts(item.get("content"), &format!("{at}.content"), &types)?;
            messages.push(role, content);
        }
        "function_call" => {
            let (id, name) = (text_in(item, at, "call_id")?, text_in(item, at, "name")?);
            messages.push_call(id, name, text_in(item, at, "arguments")?.to_owned());
        }
        "function_call_output" => {
            let output =
                join_texts(item.get("output"), &format!("{at}.output"), &["input_text", "text"])?;
            messages.push_result(text_in(item, at, "call_id")?, output);
        }
        "reasoning" => {
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
    let text = fields.tree::<Map<String, Value>>("text", must)?.unwrap_or_default();
    let format = text.get("format").cloned().unwrap_or_else(|| json!({"type": "text"}));
    if let Some(unknown) = text.keys().find(|key| !matches!(&***key, "format" | "verbosity")) {
        return Err(ApiError::unknown(format!("text.{unknown}")));
    }
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
    let reasoning = fields.tree::<Map<String, Value>>("reasoning", "must be an object")?;
    let reasoning = reasoning.unwrap_or_default();
    let known = ["effort", "summary", "generate_summary"];
    if let Some(unknown) = reasoning.keys().find(|key| !known.contains(&&***key)) {
        return Err(ApiError::unknown(format!("reasoning.{unknown}")));
    }
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
        Some(Value::Object(named)) if named.get("type") == Some(&json!("function")) => {
            let name = named.get("name").cloned();
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
    let top = fields.tree::<Value>("top_logprobs", "must be a whole number")?;
    let top = top.filter(|top| *top != json!(0));
    echo.insert("top_logprobs".into(), top.clone().unwrap_or_else(|| json!(0)));
    if top.is_some() || include.iter().any(|asked| asked == LOGPROBS) {
        chat.set("logprobs", true);
    }
    chat.set_some("top_logprobs", top);
    Ok(())
}

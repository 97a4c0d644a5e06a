//! The bodies of `POST /v1/messages` and `/v1/messages/count_tokens`, as requests for chat and for
//! tokens.

use super::chat_answer::{FieldName, InnerPath};
use super::chat_body::{ChatBody, ChatMessages, UnknownKeys, join_texts, text_in};
use crate::api::error::ApiError;
use crate::api::fields::{Fields, Neutral};
use serde_json::{Map, Value, json};

/// Chat fields and the fields that they come from.
pub(super) const NAMES: &[FieldName] = &[
    FieldName { chat: "messages", own: "messages", inner: InnerPath::Dropped },
    FieldName { chat: "stop", own: "stop_sequences", inner: InnerPath::Renamed(&[]) },
    FieldName {
        chat: "response_format",
        own: "output_config.format",
        inner: InnerPath::Renamed(&[(".json_schema", "")]),
    },
    FieldName {
        chat: "reasoning_effort",
        own: "output_config.effort",
        inner: InnerPath::Renamed(&[]),
    },
    FieldName {
        chat: "tools",
        own: "tools",
        inner: InnerPath::Renamed(&[(".function.parameters", ".input_schema"), (".function", "")]),
    },
    FieldName {
        chat: "tool_choice",
        own: "tool_choice",
        inner: InnerPath::Renamed(&[(".function", "")]),
    },
];

/// Fields that are not supported, with the values that have no effect.
const REFUSED: &[Neutral<'_>] = &[
    ("container", &[]),
    ("context_management", &[]),
    ("inference_geo", &[]),
    ("mcp_servers", &["[]"]),
    ("speed", &["\"standard\""]),
];

/// Fields of chat that this endpoint has under other names or not at all.
const FIELDS_OF_CHAT: &[Neutral<'_>] = &[
    ("add_generation_prompt", &[]),
    ("continue_final_message", &[]),
    ("function_call", &[]),
    ("functions", &["[]"]),
    ("logprobs", &["false"]),
    ("max_completion_tokens", &[]),
    ("n", &["1"]),
    ("parallel_tool_calls", &["true"]),
    ("reasoning_effort", &[]),
    ("response_format", &[]),
    ("stop", &[]),
    ("stream_options", &[]),
    ("top_logprobs", &[]),
];

/// Translates the body of `/v1/messages`.
///
/// # Errors
/// A field is missing, malformed or not supported; the error names it.
pub(super) fn translate(body: &[u8]) -> Result<Vec<u8>, ApiError> {
    let mut fields = Fields::parse(body)?;
    let mut chat = read_conversation(&mut fields)?;
    let most = fields.integer::<u32>("max_tokens", 1..=i128::from(u32::MAX))?;
    chat.set("max_tokens", most.ok_or_else(|| fields.invalid("max_tokens", "is missing"))?);
    chat.set_some("stop", fields.tree::<Value>("stop_sequences", "must be a list of strings")?);
    // It names the user to the provider; other keys have no meaning.
    fields.tree::<Map<String, Value>>("metadata", "must be an object")?;
    match fields.text("service_tier")?.as_deref() {
        None | Some("auto" | "standard_only") => {}
        Some(_) => return Err(ApiError::unsupported("service_tier")),
    }
    chat.set_stream(fields.flag("stream", false)?);
    Ok(chat.finish(&fields))
}

/// Translates the body of `/v1/messages/count_tokens`.
///
/// # Errors
/// As [`translate`].
pub(super) fn translate_count(body: &[u8]) -> Result<Vec<u8>, ApiError> {
    let mut fields = Fields::parse(body)?;
    let chat = read_conversation(&mut fields)?;
    Ok(chat.finish(&fields))
}

/// Reads the fields that make the prompt.
fn read_conversation(fields: &mut Fields<'_>) -> Result<ChatBody, ApiError> {
    fields.refuse(REFUSED)?;
    fields.refuse_as_unknown(FIELDS_OF_CHAT)?;
    let mut chat = ChatBody::default();
    read_messages(fields, &mut chat)?;
    read_thinking(fields, &mut chat)?;
    read_output_config(fields, &mut chat)?;
    read_tools(fields, &mut chat)?;
    Ok(chat)
}

fn read_messages(fields: &mut Fields<'_>, chat: &mut ChatBody) -> Result<(), ApiError> {
    let mut messages = ChatMessages::default();
    if let Some(system) = fields.tree::<Value>("system", "must be a string or a list of texts")? {
        messages.push("system", join_texts(Some(&system), "system", &["text"])?);
    }
    let turns = fields.tree::<Vec<Value>>("messages", "must be a list of objects")?;
    let turns = turns.ok_or_else(|| fields.invalid("messages", "is missing"))?;
    if turns.is_empty() {
        return Err(fields.invalid("messages", "must not be empty"));
    }
    for (index, turn) in turns.iter().enumerate() {
        let at = format!("messages[{index}]");
        let role = text_in(turn, &at, "role")?;
        if !matches!(role, "user" | "assistant" | "system") {
            return Err(ApiError::invalid(
                format!("{at}.role"),
                "must be `user`, `assistant` or `system`",
            ));
        }
        match turn.get("content") {
            Some(Value::String(text)) => messages.extend(role, text),
            Some(Value::Array(blocks)) => {
                for (index, block) in blocks.iter().enumerate() {
                    let at = format!("{at}.content[{index}]");
                    read_block((role, block), &at, &mut messages, &mut chat.unknown)?;
                }
            }
            _ => {
                let must = "must be a string or a list of blocks";
                return Err(ApiError::invalid(format!("{at}.content"), must));
            }
        }
    }
    if messages.ends_with_answer() {
        chat.set("continue_final_message", true);
        chat.set("add_generation_prompt", false);
    }
    chat.set("messages", messages.finish());
    Ok(())
}

fn read_block(
    (role, block): (&str, &Value),
    at: &str,
    messages: &mut ChatMessages,
    unknown: &mut UnknownKeys,
) -> Result<(), ApiError> {
    let kind = text_in(block, at, "type")?;
    let own: &[&str] = match kind {
        "text" => &["text", "citations"],
        "thinking" => &["thinking", "signature"],
        "redacted_thinking" => &["data"],
        "tool_use" => &["id", "name", "input"],
        "tool_result" => &["tool_use_id", "content", "is_error"],
        _ => return Err(ApiError::unsupported(format!("{at}.type"))),
    };
    unknown.note(block, at, &[own, &["type", "cache_control"]].concat());
    match (kind, role) {
        ("text", _) => messages.extend(role, text_in(block, at, "text")?),
        ("thinking", "assistant") => {
            messages.push_reasoning(text_in(block, at, "thinking")?.to_owned());
        }
        // The model of another provider wrote it, and only that provider can read it.
        ("redacted_thinking", "assistant") => {}
        ("tool_use", "assistant") => {
            let input = block.get("input").filter(|input| input.is_object());
            let input = input
                .ok_or_else(|| ApiError::invalid(format!("{at}.input"), "must be an object"))?;
            let (id, name) = (text_in(block, at, "id")?, text_in(block, at, "name")?);
            messages.push_call(id, name, input.to_string());
        }
        ("tool_result", "user") => {
            let id = text_in(block, at, "tool_use_id")?;
            let content = join_texts(block.get("content"), &format!("{at}.content"), &["text"])?;
            // Chats have no mark for it.
            let is_error = block.get("is_error").is_some_and(|mark| *mark == true);
            messages.push_result(id, if is_error { format!("Error: {content}") } else { content });
        }
        _ => return Err(ApiError::unsupported(format!("{at}.type"))),
    }
    Ok(())
}

/// Reads `thinking`: whether the model reasons. A budget of tokens has no effect.
fn read_thinking(fields: &mut Fields<'_>, chat: &mut ChatBody) -> Result<(), ApiError> {
    let variables =
        fields.tree::<Map<String, Value>>("chat_template_kwargs", "must be an object")?;
    let mut variables = variables.unwrap_or_default();
    let thinking = fields.tree::<Value>("thinking", "must be an object")?;
    if let Some(thinking) = &thinking {
        chat.unknown.note(thinking, "thinking", &["type", "budget_tokens", "display"]);
        let thinks = match text_in(thinking, "thinking", "type")? {
            "enabled" => Some(true),
            "disabled" => Some(false),
            "adaptive" => None,
            _ => return Err(ApiError::unsupported("thinking.type")),
        };
        if let Some(thinks) = thinks {
            variables.entry("enable_thinking").or_insert(thinks.into());
        }
    }
    chat.set("chat_template_kwargs", variables);
    Ok(())
}

/// Reads `output_config`: the effort and the format of the answer.
fn read_output_config(fields: &mut Fields<'_>, chat: &mut ChatBody) -> Result<(), ApiError> {
    let config = fields.tree::<Value>("output_config", "must be an object")?.unwrap_or_default();
    chat.unknown.note(&config, "output_config", &["effort", "format"]);
    chat.set_some("reasoning_effort", config.get("effort").cloned());
    // The older name of the format.
    let older = fields.tree::<Value>("output_format", "must be an object")?;
    let format = config.get("format").filter(|format| !format.is_null()).cloned().or(older);
    let Some(format) = format else { return Ok(()) };
    chat.unknown.note(&format, "output_config.format", &["type", "schema", "name"]);
    if format.get("type") != Some(&json!("json_schema")) {
        return Err(ApiError::unsupported("output_config.format.type"));
    }
    let schema = json!({"name": "answer", "schema": format.get("schema")});
    chat.set("response_format", json!({"type": "json_schema", "json_schema": schema}));
    Ok(())
}

/// Reads `tools` and the choice among them.
fn read_tools(fields: &mut Fields<'_>, chat: &mut ChatBody) -> Result<(), ApiError> {
    let tools = fields.tree::<Vec<Value>>("tools", "must be a list of objects")?;
    let tools = tools.unwrap_or_default();
    let mut functions = Vec::with_capacity(tools.len());
    for (index, tool) in tools.iter().enumerate() {
        let at = format!("tools[{index}]");
        if tool.get("type").is_some_and(|kind| *kind != "custom" && !kind.is_null()) {
            return Err(ApiError::unsupported(format!("{at}.type")));
        }
        let known = ["type", "name", "description", "input_schema", "strict"];
        // Streams always have arguments piece by piece, and the prefix cache needs no marks.
        let without_effect = ["eager_input_streaming", "cache_control"];
        chat.unknown.note(tool, &at, &[&known[..], &without_effect].concat());
        let schema = tool.get("input_schema").filter(|schema| schema.is_object());
        let schema = schema.ok_or_else(|| {
            ApiError::invalid(format!("{at}.input_schema"), "must be a JSON schema")
        })?;
        let mut function = Map::new();
        function.insert("name".into(), text_in(tool, &at, "name")?.into());
        if let Some(description) = tool.get("description").filter(|text| !text.is_null()) {
            function.insert("description".into(), description.clone());
        }
        if let Some(strict) = tool.get("strict").filter(|strict| !strict.is_null()) {
            function.insert("strict".into(), strict.clone());
        }
        function.insert("parameters".into(), schema.clone());
        functions.push(json!({"type": "function", "function": function}));
    }
    chat.set("tools", functions);
    let Some(choice) = fields.tree::<Value>("tool_choice", "must be an object")? else {
        return Ok(());
    };
    chat.unknown.note(&choice, "tool_choice", &["type", "name", "disable_parallel_tool_use"]);
    let of_chat = match text_in(&choice, "tool_choice", "type")? {
        "auto" => json!("auto"),
        "none" => json!("none"),
        "any" => json!("required"),
        "tool" => {
            let name = text_in(&choice, "tool_choice", "name")?;
            json!({"type": "function", "function": {"name": name}})
        }
        _ => return Err(ApiError::unsupported("tool_choice.type")),
    };
    chat.set("tool_choice", of_chat);
    let is_single = match choice.get("disable_parallel_tool_use") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(single)) => *single,
        Some(_) => {
            let path = "tool_choice.disable_parallel_tool_use";
            return Err(ApiError::invalid(path, "must be true or false"));
        }
    };
    chat.set("parallel_tool_calls", !is_single);
    Ok(())
}

//! Builds the body of a chat request, and reads the items that both APIs have as JSON trees.

use crate::api::error::ApiError;
use crate::api::fields::Fields;
use crate::limits::UNKNOWN_KEYS_MAX;
use serde_json::{Map, Value, json};

/// A chat request in the making.
#[derive(Default)]
pub(super) struct ChatBody {
    fields: Map<String, Value>,
    /// Keys inside the fields that are ignored.
    pub(super) unknown: UnknownKeys,
}

impl ChatBody {
    /// Sets a field.
    pub(super) fn set(&mut self, name: &str, value: impl Into<Value>) {
        self.fields.insert(name.to_owned(), value.into());
    }

    /// Sets a field, if there is a value.
    pub(super) fn set_some(&mut self, name: &str, value: Option<impl Into<Value>>) {
        if let Some(value) = value {
            self.set(name, value);
        }
    }

    /// Sets the form of a stream: the last chunk has the usage, and so has each other chunk.
    pub(super) fn set_stream(&mut self, stream: bool) {
        self.set("stream", stream);
        if stream {
            let options = json!({"include_usage": true, "continuous_usage_stats": true});
            self.set("stream_options", options);
        }
    }

    /// The body, with the fields that are not translated.
    pub(super) fn finish(self, rest: &Fields<'_>) -> Vec<u8> {
        let mut body = vec![b'{'];
        let mut write = |name: &str, value: &[u8]| {
            if body.len() > 1 {
                body.push(b',');
            }
            serde_json::to_writer(&mut body, name).expect("a string is JSON");
            body.push(b':');
            body.extend_from_slice(value);
        };
        self.fields.iter().for_each(|(name, value)| write(name, value.to_string().as_bytes()));
        self.unknown.0.iter().for_each(|path| write(path, b"true"));
        rest.entries().for_each(|(name, value)| write(name, value.get().as_bytes()));
        body.push(b'}');
        body
    }
}

/// The string in a field of an item.
pub(super) fn text_in<'v>(item: &'v Value, at: &str, name: &str) -> Result<&'v str, ApiError> {
    let text = item.get(name).and_then(Value::as_str);
    text.ok_or_else(|| ApiError::invalid(format!("{at}.{name}"), "must be a string"))
}

/// Keys of objects that are not known. The chat request gets them as fields that it does not know
/// either, so they are named to the client like all ignored fields.
#[derive(Default)]
pub(super) struct UnknownKeys(Vec<String>);

impl UnknownKeys {
    /// Notes the keys of an object that are not `known`, unless their value is null.
    pub(super) fn note(&mut self, object: &Value, at: &str, known: &[&str]) {
        let keys = object.as_object().into_iter().flatten();
        let unknown =
            keys.filter(|(key, value)| !value.is_null() && !known.contains(&key.as_str()));
        self.extend(unknown.map(|(key, _)| format!("{at}.{key}")));
    }

    /// Notes keys with their paths.
    pub(super) fn extend(&mut self, paths: impl IntoIterator<Item = String>) {
        let left = UNKNOWN_KEYS_MAX - self.0.len();
        self.0.extend(paths.into_iter().take(left));
    }
}

/// The texts of a content: a string, or a list of parts of these types.
pub(super) fn join_texts(
    content: Option<&Value>,
    at: &str,
    types: &[&str],
) -> Result<String, ApiError> {
    let parts = match content {
        None | Some(Value::Null) => return Ok(String::new()),
        Some(Value::String(text)) => return Ok(text.clone()),
        Some(Value::Array(parts)) => parts,
        Some(_) => return Err(ApiError::invalid(at, "must be a string or a list of parts")),
    };
    let mut joined = Vec::with_capacity(parts.len());
    for (index, part) in parts.iter().enumerate() {
        let at = format!("{at}[{index}]");
        match part.get("type").and_then(Value::as_str) {
            Some("refusal") if types.contains(&"refusal") => {
                joined.push(text_in(part, &at, "refusal")?);
            }
            Some(kind) if types.contains(&kind) => joined.push(text_in(part, &at, "text")?),
            Some(_) => return Err(ApiError::unsupported(format!("{at}.type"))),
            None => return Err(ApiError::invalid(format!("{at}.type"), "must be a string")),
        }
    }
    Ok(joined.join("\n"))
}

/// The conversation of a request in translation.
#[derive(Default)]
pub(super) struct ChatMessages(Vec<Value>);

impl ChatMessages {
    /// Appends a message with a text. Instructions at the start become one message, because
    /// templates take one.
    pub(super) fn push(&mut self, role: &str, text: String) {
        if role == "system" && text.is_empty() {
            return;
        }
        if role == "system"
            && let [Value::Object(first)] = &mut self.0[..]
            && first["role"] == "system"
            && let Some(Value::String(before)) = first.get_mut("content")
        {
            before.push_str("\n\n");
            before.push_str(&text);
            return;
        }
        match (role, self.assistant()) {
            ("assistant", Some(turn)) if !turn.contains_key("content") => {
                turn.insert("content".into(), text.into());
            }
            _ => self.0.push(json!({"role": role, "content": text})),
        }
    }

    /// Appends a text to the turn of this role, or begins a turn with it.
    pub(super) fn extend(&mut self, role: &str, text: &str) {
        let turn = self.0.last_mut().and_then(Value::as_object_mut);
        match turn.filter(|turn| turn["role"] == role) {
            Some(turn) => match turn.get_mut("content") {
                Some(Value::String(before)) => {
                    before.push('\n');
                    before.push_str(text);
                }
                _ => drop(turn.insert("content".into(), text.into())),
            },
            None => self.push(role, text.to_owned()),
        }
    }

    /// Appends reasoning of the assistant. Its text and calls follow.
    pub(super) fn push_reasoning(&mut self, text: String) {
        if let Some(turn) = self.assistant()
            && turn.len() == 2
            && let Some(Value::String(before)) = turn.get_mut("reasoning_content")
        {
            before.push('\n');
            before.push_str(&text);
            return;
        }
        self.0.push(json!({"role": "assistant", "reasoning_content": text}));
    }

    /// Appends a tool call to the assistant's turn.
    pub(super) fn push_call(&mut self, id: &str, name: &str, arguments: String) {
        let call = json!({"id": id, "type": "function",
            "function": {"name": name, "arguments": arguments}});
        if self.assistant().is_none() {
            self.0.push(json!({"role": "assistant"}));
        }
        let Some(turn) = self.assistant() else { return };
        match turn.get_mut("tool_calls").and_then(Value::as_array_mut) {
            Some(calls) => calls.push(call),
            None => drop(turn.insert("tool_calls".into(), json!([call]))),
        }
    }

    /// Appends the result of a tool call.
    pub(super) fn push_result(&mut self, id: &str, text: String) {
        self.0.push(json!({"role": "tool", "tool_call_id": id, "content": text}));
    }

    /// The last message, if it is the assistant's.
    fn assistant(&mut self) -> Option<&mut Map<String, Value>> {
        let last = self.0.last_mut()?.as_object_mut()?;
        (last["role"] == "assistant").then_some(last)
    }

    /// Whether the last message is a text of the assistant.
    pub(super) fn ends_with_answer(&self) -> bool {
        let last = self.0.last();
        last.is_some_and(|last| last["role"] == "assistant" && last.get("tool_calls").is_none())
    }

    /// The messages.
    pub(super) fn finish(self) -> Value {
        Value::Array(self.0)
    }
}

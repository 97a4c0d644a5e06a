//! Reads chat answers, whole and as chunks. They can come from Baton, vLLM or SGLang.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

/// A chat answer, or one chunk of it.
#[derive(Default, Debug, Deserialize)]
#[serde(default)]
pub(super) struct ChatAnswer {
    pub(super) id: String,
    pub(super) created: u64,
    pub(super) model: String,
    pub(super) choices: Vec<ChatChoice>,
    pub(super) usage: Option<ChatUsage>,
    /// An error event has only this.
    pub(super) error: Option<ChatError>,
}

/// A choice, or its new part.
#[derive(Default, Debug, Deserialize)]
#[serde(default)]
pub(super) struct ChatChoice {
    #[serde(alias = "message")]
    pub(super) delta: ChatDelta,
    pub(super) logprobs: Option<ChatLogprobs>,
    pub(super) finish_reason: Option<String>,
    /// The stop string or token that ended the answer.
    #[serde(alias = "matched_stop")]
    pub(super) stop_reason: Option<Value>,
}

/// The text of a choice.
#[derive(Default, Debug, Deserialize)]
#[serde(default)]
pub(super) struct ChatDelta {
    #[serde(deserialize_with = "or_empty")]
    pub(super) content: String,
    #[serde(deserialize_with = "or_empty")]
    pub(super) reasoning_content: String,
    #[serde(deserialize_with = "or_empty")]
    pub(super) reasoning: String,
    #[serde(deserialize_with = "or_empty")]
    pub(super) tool_calls: Vec<ChatCall>,
}

impl ChatDelta {
    /// The reasoning, which some servers give under two names.
    pub(super) fn reasoning(&self) -> &str {
        if self.reasoning.is_empty() { &self.reasoning_content } else { &self.reasoning }
    }
}

/// A tool call, or a part of it. Only the first part has an id and a name.
#[derive(Default, Debug, Deserialize)]
#[serde(default)]
pub(super) struct ChatCall {
    pub(super) id: Option<String>,
    pub(super) function: ChatFunction,
}

/// The function of a call.
#[derive(Default, Debug, Deserialize)]
#[serde(default)]
pub(super) struct ChatFunction {
    pub(super) name: Option<String>,
    #[serde(deserialize_with = "or_empty")]
    pub(super) arguments: String,
}

/// Log probabilities of a choice's tokens.
#[derive(Default, Debug, Deserialize)]
#[serde(default)]
pub(super) struct ChatLogprobs {
    /// One for each token, as JSON.
    #[serde(deserialize_with = "or_empty")]
    pub(super) content: Vec<Box<RawValue>>,
}

/// Token counts.
#[derive(Clone, Copy, Default, Debug, Deserialize)]
#[serde(default)]
pub(super) struct ChatUsage {
    pub(super) prompt_tokens: u64,
    pub(super) completion_tokens: u64,
    prompt_tokens_details: Option<CachedTokens>,
    completion_tokens_details: Option<ReasoningTokens>,
}

#[derive(Clone, Copy, Default, Debug, Deserialize)]
#[serde(default)]
struct CachedTokens {
    cached_tokens: Option<u64>,
}

#[derive(Clone, Copy, Default, Debug, Deserialize)]
#[serde(default)]
struct ReasoningTokens {
    reasoning_tokens: Option<u64>,
}

impl ChatUsage {
    /// Prompt tokens that were not computed.
    pub(super) fn cached(&self) -> u64 {
        self.prompt_tokens_details.and_then(|details| details.cached_tokens).unwrap_or(0)
    }

    /// Generated tokens that are reasoning.
    pub(super) fn reasoning(&self) -> u64 {
        self.completion_tokens_details.and_then(|details| details.reasoning_tokens).unwrap_or(0)
    }
}

/// An error of the chat endpoint.
#[derive(Clone, Default, Debug, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct ChatError {
    pub(super) message: String,
    pub(super) r#type: Value,
    pub(super) param: Option<String>,
    pub(super) code: Value,
}

impl ChatError {
    /// A failure of the server.
    pub(super) fn new(message: String) -> ChatError {
        let [kind, code] = ["server_error", "internal"].map(Value::from);
        ChatError { message, r#type: kind, param: None, code }
    }

    /// Reads the body of an error.
    pub(super) fn read(body: &[u8]) -> Option<ChatError> {
        serde_json::from_slice::<ChatAnswer>(body).ok()?.error
    }

    /// Replaces the path of a chat field, also in the message, if `chat` is the path or begins it.
    pub(super) fn rename(&mut self, FieldName { chat, own, inner }: &FieldName) -> bool {
        let Some(param) = self.param.as_deref() else { return false };
        let Some(rest) = param.strip_prefix(chat) else { return false };
        if !rest.is_empty() && !rest.starts_with(['.', '[']) {
            return false;
        }
        let rest = match inner {
            // The places of messages are not those of the request.
            InnerPath::Dropped => String::new(),
            InnerPath::Renamed(names) => {
                names.iter().fold(rest.to_owned(), |rest, (chat, own)| rest.replacen(chat, own, 1))
            }
        };
        let renamed = format!("{own}{rest}");
        self.message = self.message.replace(&format!("`{param}`"), &format!("`{renamed}`"));
        self.param = Some(renamed);
        true
    }
}

/// A chat field, and the field of another API that it comes from.
pub(super) struct FieldName {
    pub(super) chat: &'static str,
    pub(super) own: &'static str,
    pub(super) inner: InnerPath,
}

/// What becomes of the path inside a field.
pub(super) enum InnerPath {
    Dropped,
    /// The first of each of these parts is replaced.
    Renamed(&'static [(&'static str, &'static str)]),
}

/// Null is the same as an absent field.
fn or_empty<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

//! Answers of `/v1/messages` and `/v1/messages/count_tokens`, whole and as events.

use super::AnswerWriter;
use super::assembler::{AnswerBlock, AssembledAnswer, BlockDelta, bare_id};
use super::chat_answer::{ChatAnswer, ChatError, ChatUsage};
use crate::http::sse;
use serde_json::{Value, json};

/// Writes one answer.
#[derive(Debug)]
pub(super) struct MessagesWriter;

/// Appends an event of this type with these fields.
fn event(kind: &str, mut data: Value, out: &mut Vec<u8>) {
    data["type"] = kind.into();
    sse::write_named_event(out, kind, data.to_string().as_bytes());
}

/// The body of an error.
pub(super) fn error(kind: &str, message: &str) -> Vec<u8> {
    let error = json!({"type": kind, "message": message});
    json!({"type": "error", "error": error}).to_string().into_bytes()
}

/// The type of an error with this status.
pub(super) fn error_type(status: u16) -> &'static str {
    match status {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        408 | 504 => "timeout_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        400..500 => "invalid_request_error",
        _ => "api_error",
    }
}

/// The answer of `/v1/messages/count_tokens`, from that of `/tokenize`.
pub(super) fn token_count(body: &[u8]) -> Option<Vec<u8>> {
    let answer: Value = serde_json::from_slice(body).ok()?;
    let count = answer.get("count")?.as_u64()?;
    Some(json!({ "input_tokens": count }).to_string().into_bytes())
}

/// Token counts. The prompt tokens from the cache are not a part of `input_tokens`.
fn usage(usage: &ChatUsage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens.saturating_sub(usage.cached()),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached(),
        "output_tokens": usage.completion_tokens,
    })
}

/// Why the answer ended, and the stop sequence that ended it.
fn ending(answer: &AssembledAnswer) -> (Option<&str>, Option<&str>) {
    let reason = match answer.finish_reason.as_deref() {
        Some("stop") if answer.stop_string.is_some() => "stop_sequence",
        Some("stop") => "end_turn",
        Some("length") => "max_tokens",
        Some("tool_calls") => "tool_use",
        _ => return (None, None),
    };
    (Some(reason), answer.stop_string.as_deref())
}

/// A block of a whole answer. `None`: a call that broke off, which no client should run.
fn block(block: &AnswerBlock) -> Option<Value> {
    Some(match block {
        AnswerBlock::Reasoning { text } => {
            json!({"type": "thinking", "thinking": text, "signature": ""})
        }
        AnswerBlock::Text { text, .. } => json!({"type": "text", "text": text}),
        AnswerBlock::Call { id, name, arguments } => {
            // A call without parameters can have no arguments.
            let arguments = if arguments.trim().is_empty() { "{}" } else { arguments };
            let input: Value = serde_json::from_str(arguments).ok()?;
            json!({"type": "tool_use", "id": id, "name": name, "input": input})
        }
    })
}

impl AnswerWriter for MessagesWriter {
    fn begin(&mut self, answer: &ChatAnswer, out: &mut Vec<u8>) {
        let message = json!({
            "id": format!("msg_{}", bare_id(&answer.id)), "type": "message", "role": "assistant",
            "model": answer.model, "content": [], "stop_reason": null, "stop_sequence": null,
            "usage": usage(&answer.usage.unwrap_or_default()),
        });
        event("message_start", json!({"message": message}), out);
    }

    fn open(&mut self, index: usize, block: &AnswerBlock, out: &mut Vec<u8>) {
        let content = match block {
            AnswerBlock::Reasoning { .. } => {
                json!({"type": "thinking", "thinking": "", "signature": ""})
            }
            AnswerBlock::Text { .. } => json!({"type": "text", "text": ""}),
            AnswerBlock::Call { id, name, .. } => {
                json!({"type": "tool_use", "id": id, "name": name, "input": {}})
            }
        };
        event("content_block_start", json!({"index": index, "content_block": content}), out);
    }

    fn extend(&mut self, index: usize, block: &AnswerBlock, delta: &BlockDelta, out: &mut Vec<u8>) {
        let text = delta.text;
        let delta = match block {
            AnswerBlock::Reasoning { .. } => json!({"type": "thinking_delta", "thinking": text}),
            AnswerBlock::Text { .. } => json!({"type": "text_delta", "text": text}),
            AnswerBlock::Call { .. } => json!({"type": "input_json_delta", "partial_json": text}),
        };
        event("content_block_delta", json!({"index": index, "delta": delta}), out);
    }

    fn close(&mut self, index: usize, _: &AnswerBlock, _: bool, out: &mut Vec<u8>) {
        event("content_block_stop", json!({"index": index}), out);
    }

    fn end(&mut self, answer: &AssembledAnswer, out: &mut Vec<u8>) {
        if answer.finish_reason.as_deref() == Some("abort") {
            let error = ChatError { message: "it was aborted".into(), ..ChatError::default() };
            return self.fail(answer, &error, out);
        }
        let (reason, sequence) = ending(answer);
        let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
        event("message_delta", json!({"delta": delta, "usage": usage(&answer.usage)}), out);
        event("message_stop", json!({}), out);
    }

    fn fail(&mut self, _: &AssembledAnswer, error: &ChatError, out: &mut Vec<u8>) {
        let error = json!({"type": "api_error", "message": error.message});
        event("error", json!({"error": error}), out);
    }

    fn whole(&mut self, answer: &AssembledAnswer) -> Vec<u8> {
        let (reason, sequence) = ending(answer);
        let content: Vec<Value> = answer.blocks.iter().filter_map(block).collect();
        json!({
            "id": format!("msg_{}", answer.bare_id()), "type": "message", "role": "assistant",
            "model": answer.model, "content": content, "stop_reason": reason,
            "stop_sequence": sequence, "usage": usage(&answer.usage),
        })
        .to_string()
        .into_bytes()
    }
}

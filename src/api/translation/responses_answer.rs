//! Answers of `/v1/responses`, whole and as events.
//!
//! Invariants: events are numbered from 0 without a gap. The last event has the whole response. Log
//! probabilities are in deltas and in the last event, and in no other.

use super::AnswerWriter;
use super::assembler::{AnswerBlock, AssembledAnswer, BlockDelta, bare_id};
use super::chat_answer::{ChatAnswer, ChatError};
use super::responses::Echo;
use crate::http::sse;
use serde_json::{Value, json};

/// Writes one answer.
#[derive(Debug)]
pub(super) struct ResponsesWriter {
    /// The fields of the request that the response repeats.
    echo: Echo,
    /// The id without a prefix, from which items have theirs.
    id: String,
    events: u64,
}

impl ResponsesWriter {
    pub(super) fn new(echo: Echo) -> ResponsesWriter {
        ResponsesWriter { echo, id: String::new(), events: 0 }
    }

    /// Appends an event of this type with these fields.
    fn event(&mut self, kind: &str, mut data: Value, out: &mut Vec<u8>) {
        data["type"] = kind.into();
        data["sequence_number"] = self.events.into();
        self.events += 1;
        sse::write_named_event(out, kind, data.to_string().as_bytes());
    }

    /// A response without output.
    fn response(&self, id: &str, created: u64, model: &str, status: &str) -> Value {
        let mut response = json!({
            "id": format!("resp_{id}"), "object": "response", "created_at": created,
            "status": status, "background": false, "error": null, "incomplete_details": null,
            "model": model, "output": [], "previous_response_id": null, "prompt": null,
            "service_tier": "default", "store": false, "truncation": "disabled", "usage": null,
        });
        self.echo.iter().for_each(|(name, value)| response[name] = value.clone());
        response
    }

    /// The response with its output so far.
    fn full(&self, answer: &AssembledAnswer, status: &str) -> Value {
        let AssembledAnswer { created, model, blocks, usage, .. } = answer;
        let mut response = self.response(answer.bare_id(), *created, model, status);
        let last = blocks.len().saturating_sub(1);
        let items = blocks.iter().enumerate().map(|(index, block)| {
            let is_cut = index == last && status != "completed";
            let mut item = self.item(index, block, if is_cut { "incomplete" } else { "completed" });
            if let AnswerBlock::Text { logprobs, .. } = block {
                item["content"][0]["logprobs"] = json!(logprobs);
            }
            item
        });
        response["output"] = items.collect();
        response["usage"] = json!({
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached()},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning()},
            "total_tokens": usage.prompt_tokens.saturating_add(usage.completion_tokens),
        });
        response
    }

    /// The complete response, with its status.
    fn ended(&self, answer: &AssembledAnswer) -> Value {
        match answer.finish_reason.as_deref() {
            Some("length") => {
                let mut response = self.full(answer, "incomplete");
                response["incomplete_details"] = json!({"reason": "max_output_tokens"});
                response
            }
            Some("abort") => {
                let error = ChatError { message: "it was aborted".into(), ..ChatError::default() };
                self.failed(answer, &error)
            }
            _ => self.full(answer, "completed"),
        }
    }

    fn failed(&self, answer: &AssembledAnswer, error: &ChatError) -> Value {
        let mut response = self.full(answer, "failed");
        response["error"] = json!({"code": "server_error", "message": error.message});
        response
    }

    fn item_id(&self, index: usize, block: &AnswerBlock) -> String {
        let prefix = match block {
            AnswerBlock::Reasoning { .. } => "rs",
            AnswerBlock::Text { .. } => "msg",
            AnswerBlock::Call { .. } => "fc",
        };
        format!("{prefix}_{}_{index}", self.id)
    }

    fn item(&self, index: usize, block: &AnswerBlock, status: &str) -> Value {
        let id = self.item_id(index, block);
        let content: Vec<Value> =
            if status == "in_progress" { Vec::new() } else { part(block).into_iter().collect() };
        match block {
            AnswerBlock::Reasoning { .. } => json!({
                "id": id, "type": "reasoning", "summary": [], "content": content,
                "encrypted_content": null, "status": status,
            }),
            AnswerBlock::Text { .. } => json!({
                "id": id, "type": "message", "role": "assistant", "content": content,
                "status": status,
            }),
            AnswerBlock::Call { id: call, name, arguments } => json!({
                "id": id, "type": "function_call", "call_id": call, "name": name,
                "arguments": arguments, "status": status,
            }),
        }
    }
}

/// The content of an item, which a call does not have.
fn part(block: &AnswerBlock) -> Option<Value> {
    Some(match block {
        AnswerBlock::Reasoning { text } => json!({"type": "reasoning_text", "text": text}),
        AnswerBlock::Text { text, .. } => json!({
            "type": "output_text", "text": text, "annotations": [], "logprobs": [],
        }),
        AnswerBlock::Call { .. } => return None,
    })
}

impl AnswerWriter for ResponsesWriter {
    fn begin(&mut self, answer: &ChatAnswer, out: &mut Vec<u8>) {
        self.id = bare_id(&answer.id).to_owned();
        let response = self.response(&self.id, answer.created, &answer.model, "in_progress");
        for kind in ["response.created", "response.in_progress"] {
            self.event(kind, json!({"response": response}), out);
        }
    }

    fn open(&mut self, index: usize, block: &AnswerBlock, out: &mut Vec<u8>) {
        let item = self.item(index, block, "in_progress");
        let added = json!({"output_index": index, "item": item});
        self.event("response.output_item.added", added, out);
        if let Some(part) = part(block) {
            let data = json!({"item_id": self.item_id(index, block), "output_index": index,
                "content_index": 0, "part": part});
            self.event("response.content_part.added", data, out);
        }
    }

    fn extend(&mut self, index: usize, block: &AnswerBlock, delta: &BlockDelta, out: &mut Vec<u8>) {
        let mut data = json!({"item_id": self.item_id(index, block), "output_index": index,
            "delta": delta.text});
        let kind = match block {
            AnswerBlock::Call { .. } => "response.function_call_arguments.delta",
            AnswerBlock::Reasoning { .. } => "response.reasoning_text.delta",
            AnswerBlock::Text { .. } => {
                data["logprobs"] = json!(delta.logprobs);
                "response.output_text.delta"
            }
        };
        if !matches!(block, AnswerBlock::Call { .. }) {
            data["content_index"] = 0.into();
        }
        self.event(kind, data, out);
    }

    fn close(&mut self, index: usize, block: &AnswerBlock, is_cut: bool, out: &mut Vec<u8>) {
        let mut data = json!({"item_id": self.item_id(index, block), "output_index": index});
        let kind = match block {
            AnswerBlock::Call { name, arguments, .. } => {
                data["name"] = name.as_str().into();
                data["arguments"] = arguments.as_str().into();
                "response.function_call_arguments.done"
            }
            AnswerBlock::Reasoning { text } => {
                data["content_index"] = 0.into();
                data["text"] = text.as_str().into();
                "response.reasoning_text.done"
            }
            AnswerBlock::Text { text, .. } => {
                data["content_index"] = 0.into();
                data["text"] = text.as_str().into();
                data["logprobs"] = json!([]);
                "response.output_text.done"
            }
        };
        self.event(kind, data, out);
        if let Some(part) = part(block) {
            let data = json!({"item_id": self.item_id(index, block), "output_index": index,
                "content_index": 0, "part": part});
            self.event("response.content_part.done", data, out);
        }
        let item = self.item(index, block, if is_cut { "incomplete" } else { "completed" });
        let done = json!({"output_index": index, "item": item});
        self.event("response.output_item.done", done, out);
    }

    fn end(&mut self, answer: &AssembledAnswer, out: &mut Vec<u8>) {
        let response = self.ended(answer);
        let kind = match response["status"].as_str() {
            Some("incomplete") => "response.incomplete",
            Some("failed") => "response.failed",
            _ => "response.completed",
        };
        self.event(kind, json!({"response": response}), out);
    }

    fn fail(&mut self, answer: &AssembledAnswer, error: &ChatError, out: &mut Vec<u8>) {
        let response = self.failed(answer, error);
        self.event("response.failed", json!({"response": response}), out);
    }

    fn whole(&mut self, answer: &AssembledAnswer) -> Vec<u8> {
        self.ended(answer).to_string().into_bytes()
    }
}

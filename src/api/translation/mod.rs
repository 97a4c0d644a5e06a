//! `/v1/responses` of OpenAI and `/v1/messages` of Anthropic: their requests become chat requests,
//! and the chat answers become theirs.
//!
//! Thread: `ctl`. Owns: the fields of both APIs, and the state of an answer in translation.
//! Invariants: everything behind the translation sees a chat request, so routing, hand-offs and
//! failover have no other case. A field without a translation is passed on to the chat request,
//! which honours or refuses it. Not here: HTTP, and when a request is translated
//! (`server::connections`).

mod assembler;
mod chat_answer;
mod chat_body;
mod messages;
mod messages_answer;
mod responses;
mod responses_answer;

use super::error::ApiError;
use assembler::Assembler;
use chat_answer::{ChatAnswer, ChatError, FieldName};
use messages_answer::MessagesWriter;
use responses_answer::ResponsesWriter;
use serde_json::json;

/// An endpoint with requests that are translated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TranslatedEndpoint {
    /// `/v1/responses`.
    Responses,
    /// `/v1/messages`.
    Messages,
    /// `/v1/messages/count_tokens`.
    TokenCount,
}

impl TranslatedEndpoint {
    /// The endpoint at this path.
    pub fn at(path: &str) -> Option<TranslatedEndpoint> {
        Some(match path {
            "/v1/responses" => TranslatedEndpoint::Responses,
            "/v1/messages" => TranslatedEndpoint::Messages,
            "/v1/messages/count_tokens" => TranslatedEndpoint::TokenCount,
            _ => return None,
        })
    }

    /// The path that serves the translated request.
    pub fn target(self) -> &'static str {
        match self {
            TranslatedEndpoint::Responses | TranslatedEndpoint::Messages => "/v1/chat/completions",
            TranslatedEndpoint::TokenCount => "/tokenize",
        }
    }

    /// Translates the body of a request. The translator is for its answer.
    ///
    /// # Errors
    /// A field is missing, malformed or not supported; the error names it.
    pub fn translate(self, body: &[u8]) -> Result<(Vec<u8>, AnswerTranslator), ApiError> {
        let (body, form) = match self {
            TranslatedEndpoint::Responses => {
                let (body, echo) = responses::translate(body)?;
                (body, AnswerForm::Responses(Assembler::new(ResponsesWriter::new(echo))))
            }
            TranslatedEndpoint::Messages => {
                let body = messages::translate(body)?;
                (body, AnswerForm::Messages(Assembler::new(MessagesWriter)))
            }
            TranslatedEndpoint::TokenCount => {
                (messages::translate_count(body)?, AnswerForm::TokenCount)
            }
        };
        Ok((body, AnswerTranslator { endpoint: self, form }))
    }

    /// Names of chat fields and of the fields that they come from.
    fn names(self) -> &'static [FieldName] {
        match self {
            TranslatedEndpoint::Responses => responses::NAMES,
            TranslatedEndpoint::Messages | TranslatedEndpoint::TokenCount => messages::NAMES,
        }
    }
}

/// Translates the answer to one request.
#[derive(Debug)]
pub struct AnswerTranslator {
    endpoint: TranslatedEndpoint,
    form: AnswerForm,
}

#[derive(Debug)]
enum AnswerForm {
    /// The request is not translated, so its answer can only be an error.
    Refusal,
    Responses(Assembler<ResponsesWriter>),
    Messages(Assembler<MessagesWriter>),
    TokenCount,
}

impl AnswerTranslator {
    /// The translator of a request that is not translated yet.
    pub fn of_refusals(endpoint: TranslatedEndpoint) -> AnswerTranslator {
        AnswerTranslator { endpoint, form: AnswerForm::Refusal }
    }

    /// Translates a whole answer, which can be an error.
    pub fn translate_body(&mut self, status: u16, body: &[u8]) -> Vec<u8> {
        if status >= 400 {
            return self.translate_error(status, body);
        }
        let whole = |assembled: Option<Vec<u8>>| assembled.unwrap_or_else(|| body.to_vec());
        match &mut self.form {
            AnswerForm::Refusal => body.to_vec(),
            AnswerForm::Responses(assembler) => whole(assembler.take_whole(body)),
            AnswerForm::Messages(assembler) => whole(assembler.take_whole(body)),
            AnswerForm::TokenCount => whole(messages_answer::token_count(body)),
        }
    }

    /// Translates a part of a stream of events. Appends the events that are ready to `out`.
    pub fn translate_events(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        match &mut self.form {
            AnswerForm::Responses(assembler) => assembler.take_events(bytes, out),
            AnswerForm::Messages(assembler) => assembler.take_events(bytes, out),
            AnswerForm::Refusal | AnswerForm::TokenCount => out.extend_from_slice(bytes),
        }
    }

    /// The error in the form of this API. Names of chat fields become those of its request.
    fn translate_error(&self, status: u16, body: &[u8]) -> Vec<u8> {
        let unknown = || ChatError::new(format!("the worker answers with status {status}"));
        let mut error = ChatError::read(body).unwrap_or_else(unknown);
        if !matches!(self.form, AnswerForm::Refusal) {
            let _ = self.endpoint.names().iter().any(|name| error.rename(name));
        }
        match self.endpoint {
            TranslatedEndpoint::Responses => json!({ "error": error }).to_string().into_bytes(),
            TranslatedEndpoint::Messages | TranslatedEndpoint::TokenCount => {
                messages_answer::error(messages_answer::error_type(status), &error.message)
            }
        }
    }
}

/// The parts of an answer, as an API writes them.
trait AnswerWriter {
    /// Appends the events that begin the answer.
    fn begin(&mut self, answer: &ChatAnswer, out: &mut Vec<u8>);
    /// Appends the events that open a block.
    fn open(&mut self, index: usize, block: &AnswerBlock, out: &mut Vec<u8>);
    /// Appends the event with a new part of a block.
    fn extend(&mut self, index: usize, block: &AnswerBlock, delta: &BlockDelta, out: &mut Vec<u8>);
    /// Appends the events that close a block, which can be cut off.
    fn close(&mut self, index: usize, block: &AnswerBlock, is_cut: bool, out: &mut Vec<u8>);
    /// Appends the events that end the answer.
    fn end(&mut self, answer: &AssembledAnswer, out: &mut Vec<u8>);
    /// Appends the event that ends an answer which failed.
    fn fail(&mut self, answer: &AssembledAnswer, error: &ChatError, out: &mut Vec<u8>);
    /// The whole answer.
    fn whole(&mut self, answer: &AssembledAnswer) -> Vec<u8>;
}

use assembler::{AnswerBlock, AssembledAnswer, BlockDelta};

#[cfg(test)]
mod tests;

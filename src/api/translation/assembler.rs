//! Assembles the blocks of an answer (reasoning, texts, tool calls) from the chunks of a chat.
//!
//! Invariants: blocks come one after another, and at most the last one is open. Only the first
//! choice counts, because a translated request has one.

use super::AnswerWriter;
use super::chat_answer::{ChatAnswer, ChatChoice, ChatError, ChatUsage};
use crate::api::render::DONE;
use crate::http::sse::EventReader;
use crate::limits::TRANSLATED_ANSWER_MAX;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::mem::discriminant;

/// A block of an answer.
#[derive(Debug)]
pub(super) enum AnswerBlock {
    Reasoning { text: String },
    Text { text: String, logprobs: Vec<Box<RawValue>> },
    Call { id: String, name: String, arguments: String },
}

/// A new part of a block: its text, and the log probabilities of its tokens.
#[derive(Debug)]
pub(super) struct BlockDelta<'a> {
    pub(super) text: &'a str,
    pub(super) logprobs: &'a [Box<RawValue>],
}

/// An answer so far.
#[derive(Default, Debug)]
pub(super) struct AssembledAnswer {
    pub(super) id: String,
    pub(super) created: u64,
    pub(super) model: String,
    pub(super) blocks: Vec<AnswerBlock>,
    /// Why it ended.
    pub(super) finish_reason: Option<String>,
    /// The stop string that ended it.
    pub(super) stop_string: Option<String>,
    pub(super) usage: ChatUsage,
}

impl AssembledAnswer {
    /// The id without the prefix of a chat.
    pub(super) fn bare_id(&self) -> &str {
        bare_id(&self.id)
    }
}

/// An id of a chat without its prefix.
pub(super) fn bare_id(id: &str) -> &str {
    id.strip_prefix("chatcmpl-").unwrap_or(id)
}

/// Assembles one answer and writes it in the form of an API.
#[derive(Debug)]
pub(super) struct Assembler<W> {
    writer: W,
    reader: EventReader,
    answer: AssembledAnswer,
    has_begun: bool,
    /// Whether the last block is open.
    is_open: bool,
    has_ended: bool,
    /// Log probabilities of tokens without text so far.
    logprobs: Vec<Box<RawValue>>,
    /// Bytes of them.
    waiting: usize,
    /// Bytes of the blocks.
    held: usize,
}

/// Bytes that a block counts beside its text: its id, its name and its fields in an answer.
const BLOCK_BYTES: usize = 512;

fn bytes_of(logprobs: &[Box<RawValue>]) -> usize {
    logprobs.iter().map(|position| position.get().len()).sum()
}

/// Bytes of the token at a position with log probabilities.
fn token_bytes(position: &RawValue) -> usize {
    #[derive(Deserialize)]
    struct Token {
        #[serde(default)]
        token: String,
        bytes: Option<Vec<u8>>,
    }
    let token: Option<Token> = serde_json::from_str(position.get()).ok();
    token.map_or(0, |token| token.bytes.map_or(token.token.len(), |bytes| bytes.len()))
}

impl<W: AnswerWriter> Assembler<W> {
    pub(super) fn new(writer: W) -> Assembler<W> {
        Assembler {
            writer,
            reader: EventReader::default(),
            answer: AssembledAnswer::default(),
            has_begun: false,
            is_open: false,
            has_ended: false,
            logprobs: Vec::new(),
            waiting: 0,
            held: 0,
        }
    }

    /// Takes a whole answer. Returns `None` if it is no chat answer.
    pub(super) fn take_whole(&mut self, body: &[u8]) -> Option<Vec<u8>> {
        let answer: ChatAnswer = serde_json::from_slice(body).ok()?;
        // The events of a whole answer are not sent.
        self.take_chunk(answer, &mut Vec::new());
        Some(self.writer.whole(&self.answer))
    }

    /// Takes a part of a stream. Appends the events of the API to `out`.
    pub(super) fn take_events(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        let mut rest = bytes;
        while !rest.is_empty() && !self.has_ended {
            let event = match self.reader.read(rest) {
                Ok((used, event)) => {
                    rest = &rest[used..];
                    event
                }
                Err(too_long) => return self.fail(&too_long.to_string(), out),
            };
            let Some(event) = event else { continue };
            if event == DONE {
                self.close(out);
                self.writer.end(&self.answer, out);
                self.has_ended = true;
                continue;
            }
            match serde_json::from_slice::<ChatAnswer>(&event) {
                Ok(ChatAnswer { error: Some(error), .. }) => {
                    self.writer.fail(&self.answer, &error, out);
                    self.has_ended = true;
                }
                Ok(chunk) => {
                    self.take_chunk(chunk, out);
                    if self.held + self.waiting > TRANSLATED_ANSWER_MAX {
                        let why = format!("the answer has more than {TRANSLATED_ANSWER_MAX} bytes");
                        self.fail(&why, out);
                    }
                }
                Err(why) => self.fail(&format!("an event of the worker is malformed: {why}"), out),
            }
        }
    }

    fn fail(&mut self, why: &str, out: &mut Vec<u8>) {
        self.writer.fail(&self.answer, &ChatError::new(why.to_owned()), out);
        self.has_ended = true;
    }

    fn take_chunk(&mut self, mut chunk: ChatAnswer, out: &mut Vec<u8>) {
        self.answer.usage = chunk.usage.unwrap_or(self.answer.usage);
        if !self.has_begun {
            self.answer.id = chunk.id.clone();
            self.answer.created = chunk.created;
            self.answer.model = chunk.model.clone();
            self.has_begun = true;
            self.writer.begin(&chunk, out);
        }
        if !chunk.choices.is_empty() {
            self.take_choice(chunk.choices.swap_remove(0), out);
        }
    }

    fn take_choice(&mut self, choice: ChatChoice, out: &mut Vec<u8>) {
        let ChatChoice { delta, logprobs, finish_reason, stop_reason } = choice;
        let logprobs = logprobs.unwrap_or_default().content;
        self.waiting += bytes_of(&logprobs);
        self.logprobs.extend(logprobs);
        if !delta.reasoning().is_empty() {
            let reasoning = AnswerBlock::Reasoning { text: String::new() };
            self.take_text(delta.reasoning(), reasoning, out);
            // Log probabilities of reasoning are not told. In a whole answer they come first.
            let of_reasoning = match delta.content.is_empty() {
                true => usize::MAX,
                false => usize::try_from(self.answer.usage.reasoning()).unwrap_or(usize::MAX),
            };
            self.drain_logprobs(of_reasoning);
        }
        if !delta.content.is_empty() {
            let content = AnswerBlock::Text { text: String::new(), logprobs: Vec::new() };
            self.take_text(&delta.content, content, out);
        }
        for call in delta.tool_calls {
            self.drain_logprobs(usize::MAX);
            if let Some(name) = call.function.name {
                let id = call.id.unwrap_or_default();
                self.open(AnswerBlock::Call { id, name, arguments: String::new() }, out);
            }
            if let Some(AnswerBlock::Call { .. }) = self.answer.blocks.last() {
                self.extend(&call.function.arguments, Vec::new(), out);
            }
        }
        if finish_reason.is_some() {
            self.answer.finish_reason = finish_reason;
            self.answer.stop_string =
                stop_reason.and_then(|reason| Some(reason.as_str()?.to_owned()));
        }
    }

    /// Takes text for the open block if it is of the same kind as `new`, otherwise for `new`.
    fn take_text(&mut self, text: &str, new: AnswerBlock, out: &mut Vec<u8>) {
        let is_same = |block: &AnswerBlock| discriminant(block) == discriminant(&new);
        if !(self.is_open && self.answer.blocks.last().is_some_and(is_same)) {
            self.open(new, out);
        }
        let is_text = matches!(self.answer.blocks.last(), Some(AnswerBlock::Text { .. }));
        let logprobs = match is_text {
            true => self.take_logprobs(text),
            false => Vec::new(),
        };
        self.extend(text, logprobs, out);
    }

    /// The log probabilities of the tokens of this text: those that wait, up to its length.
    fn take_logprobs(&mut self, text: &str) -> Vec<Box<RawValue>> {
        let mut bytes = 0;
        let of_text = self.logprobs.iter().take_while(|position| {
            let before = bytes;
            bytes += token_bytes(position);
            before < text.len()
        });
        let count = of_text.count();
        self.drain_logprobs(count)
    }

    /// Takes the first log probabilities that wait, at most `count`.
    fn drain_logprobs(&mut self, count: usize) -> Vec<Box<RawValue>> {
        let count = count.min(self.logprobs.len());
        let taken: Vec<_> = self.logprobs.drain(..count).collect();
        self.waiting -= bytes_of(&taken);
        taken
    }

    fn open(&mut self, block: AnswerBlock, out: &mut Vec<u8>) {
        self.close(out);
        self.held += BLOCK_BYTES;
        self.writer.open(self.answer.blocks.len(), &block, out);
        self.answer.blocks.push(block);
        self.is_open = true;
    }

    fn extend(&mut self, text: &str, logprobs: Vec<Box<RawValue>>, out: &mut Vec<u8>) {
        let index = self.answer.blocks.len() - 1;
        let Some(block) = self.answer.blocks.last_mut().filter(|_| !text.is_empty()) else {
            return;
        };
        match block {
            AnswerBlock::Reasoning { text: all } | AnswerBlock::Text { text: all, .. } => {
                all.push_str(text);
            }
            AnswerBlock::Call { arguments, .. } => arguments.push_str(text),
        }
        self.writer.extend(index, block, &BlockDelta { text, logprobs: &logprobs }, out);
        self.held += text.len();
        let more = bytes_of(&logprobs);
        // The deltas have had them. The last event has them only if it stays short.
        if self.held + more <= TRANSLATED_ANSWER_MAX / 2
            && let AnswerBlock::Text { logprobs: all, .. } = block
        {
            self.held += more;
            all.extend(logprobs);
        }
    }

    fn close(&mut self, out: &mut Vec<u8>) {
        if std::mem::take(&mut self.is_open)
            && let Some(block) = self.answer.blocks.last()
        {
            let reason = self.answer.finish_reason.as_deref();
            let is_cut = matches!(reason, Some("length" | "abort"));
            self.writer.close(self.answer.blocks.len() - 1, block, is_cut, out);
        }
    }
}

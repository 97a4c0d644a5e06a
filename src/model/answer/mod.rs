//! Reads the text of an answer: reasoning, content and tool calls. It is the inverse of a chat
//! template.
//!
//! Owns: the formats in which models write tool calls ([`ToolFormat`]) and reasoning.
//! Thread: `ctl`, with the text of each token. Invariants: the parts do not depend on how the text
//! is cut. No text is lost, except tags and whitespace beside them. A part that was given out
//! is never taken back, so a stream and a whole answer are equal.
//! Not here: stop strings, the JSON of an answer (`api::render`).

mod format;
#[cfg(test)]
mod golden_tests;
mod hermes;
mod json_call;
mod llama;
mod mistral;
mod python_literal;
mod pythonic;
mod qwen_coder;
mod style;
#[cfg(test)]
mod tests;
mod thought;
mod typed_value;

pub use format::{ReasoningFormat, ToolFormat};
pub use style::{AnswerStyle, special_token};
pub use thought::ReasoningStart;
pub use typed_value::is_text;

use serde_json::{Map, Value};
use std::fmt;
use std::sync::Arc;
use thought::ReasoningReader;

/// A function that the model can call.
#[derive(Clone, PartialEq, Debug)]
pub struct ToolFunction {
    /// Its name.
    pub name: String,
    /// JSON schema of its arguments, an object.
    pub parameters: Map<String, Value>,
}

/// Whether a name of a function can have this character. Each format can write such a name.
pub fn is_name_character(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | '/' | ':')
}

/// A new part of a tool call.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct CallPart {
    /// The position of the call in the answer.
    pub index: usize,
    /// The name of the function, in the first part of a call.
    pub name: Option<String>,
    /// More text of the arguments, which are JSON.
    pub arguments: String,
}

/// A new part of an answer, or all parts so far.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct AnswerParts {
    /// Text before the answer proper.
    pub reasoning: String,
    /// The answer proper.
    pub content: String,
    /// Tool calls, at most one part of each.
    pub calls: Vec<CallPart>,
}

impl AnswerParts {
    /// Whether there is nothing.
    pub fn is_empty(&self) -> bool {
        self.reasoning.is_empty() && self.content.is_empty() && self.calls.is_empty()
    }

    /// Removes all parts.
    pub fn clear(&mut self) {
        self.reasoning.clear();
        self.content.clear();
        self.calls.clear();
    }
}

/// In which pieces reasoning is given out.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum ReasoningDelivery {
    /// As it comes.
    #[default]
    Pieces,
    /// At once, when it ends.
    Whole,
    /// Not at all.
    Left,
}

/// What a reader must know of a request.
#[derive(Clone, PartialEq, Debug)]
pub struct AnswerRules {
    /// How tool calls are written; `None`: a call is text like any other.
    pub tools: Option<ToolFormat>,
    /// The functions that the model can call.
    pub functions: Arc<[ToolFunction]>,
    /// Whether only the first call counts.
    pub is_single_call: bool,
    /// How reasoning is written; `None`: reasoning is content.
    pub reasoning: Option<ReasoningFormat>,
    /// In which pieces reasoning is given out.
    pub delivery: ReasoningDelivery,
    /// Whether a grammar limits the answer. Then no tool call is inside the reasoning.
    pub has_grammar: bool,
    /// Special tokens that must be in the text.
    pub tags: Arc<[u32]>,
}

/// Reads one answer.
#[derive(Debug)]
pub struct AnswerReader {
    reasoning: Option<ReasoningReader>,
    delivery: ReasoningDelivery,
    /// Reasoning that is not given out yet.
    held: String,
    calls: Option<Box<dyn CallReader>>,
    progress: AnswerProgress,
}

/// How far an answer is.
#[derive(Default, Debug)]
struct AnswerProgress {
    /// Whether only the first call counts.
    is_single_call: bool,
    /// Number of calls that have begun.
    calls: usize,
    /// Whitespace behind the content. It is content only if more content follows before a call, or
    /// if there is no call.
    blanks: String,
}

/// The part of a reader that knows one format of tool calls.
trait CallReader: fmt::Debug + Send {
    /// Takes more text.
    fn push(&mut self, text: &str, sink: &mut AnswerSink<'_>);

    /// Takes the end of the text.
    fn finish(&mut self, sink: &mut AnswerSink<'_>);
}

/// Takes the parts of an answer in their order.
struct AnswerSink<'a> {
    progress: &'a mut AnswerProgress,
    out: &'a mut AnswerParts,
}

impl AnswerSink<'_> {
    fn push_content(&mut self, text: &str) {
        let blanks = &mut self.progress.blanks;
        let words = text.trim_end();
        if !words.is_empty() {
            self.out.content.push_str(blanks);
            self.out.content.push_str(words);
            blanks.clear();
        }
        blanks.push_str(&text[words.len()..]);
    }

    /// Takes the start of a tag with which the text breaks off. Behind a call, it is no content.
    fn push_cut_tag(&mut self, text: &str) {
        if self.progress.calls == 0 {
            self.push_content(text);
        }
    }

    fn begin_call(&mut self, name: &str) {
        self.progress.blanks.clear();
        self.progress.calls += 1;
        if self.counts() {
            self.out.calls.push(CallPart {
                index: self.progress.calls - 1,
                name: Some(name.to_owned()),
                arguments: String::new(),
            });
        }
    }

    /// Adds to the arguments of the last call.
    fn push_arguments(&mut self, text: &str) {
        debug_assert!(self.progress.calls > 0, "arguments belong to a call");
        if text.is_empty() || !self.counts() {
            return;
        }
        let index = self.progress.calls - 1;
        match self.out.calls.last_mut().filter(|call| call.index == index) {
            Some(call) => call.arguments.push_str(text),
            None => {
                self.out.calls.push(CallPart { index, name: None, arguments: text.to_owned() });
            }
        }
    }

    /// Whether the last call counts.
    fn counts(&self) -> bool {
        !self.progress.is_single_call || self.progress.calls == 1
    }
}

impl AnswerReader {
    /// A reader for an answer after a prompt that left the reasoning at `start`.
    pub fn new(rules: &AnswerRules, start: ReasoningStart) -> AnswerReader {
        let reasoning = rules.reasoning.map(|format| {
            // A tool call ends the reasoning, if a tag shows it.
            let tools = rules.tools.filter(|_| !rules.has_grammar);
            let tag = tools.and_then(ToolFormat::opening_tag);
            ReasoningReader::new(format, start, tag)
        });
        let calls = rules.tools.map(|format| format.reader(&rules.functions));
        let is_single_call = rules.is_single_call;
        let progress = AnswerProgress { is_single_call, ..AnswerProgress::default() };
        let delivery = rules.delivery;
        AnswerReader { reasoning, delivery, held: String::new(), calls, progress }
    }

    /// Whether the text so far ends inside the reasoning.
    pub fn is_reasoning(&self) -> bool {
        self.reasoning.as_ref().is_some_and(ReasoningReader::is_inside)
    }

    /// Whether the answer has a tool call.
    pub fn has_call(&self) -> bool {
        self.progress.calls > 0
    }

    /// Takes more text, and adds the parts that it completes to `out`.
    pub fn push(&mut self, text: &str, out: &mut AnswerParts) {
        let Some(reasoning) = &mut self.reasoning else { return self.push_answer(text, out) };
        let mut answer = String::new();
        reasoning.push(text, &mut self.held, &mut answer);
        self.give_reasoning(out);
        self.push_answer(&answer, out);
    }

    /// Moves reasoning to `out`, if it is time.
    fn give_reasoning(&mut self, out: &mut AnswerParts) {
        match self.delivery {
            ReasoningDelivery::Whole if self.is_reasoning() => {}
            ReasoningDelivery::Pieces | ReasoningDelivery::Whole => {
                out.reasoning.push_str(&self.held);
                self.held.clear();
            }
            ReasoningDelivery::Left => self.held.clear(),
        }
    }

    /// Ends the answer.
    pub fn finish(&mut self, out: &mut AnswerParts) {
        let mut answer = String::new();
        if let Some(reasoning) = &mut self.reasoning {
            reasoning.finish(&mut self.held, &mut answer);
        }
        self.give_reasoning(out);
        self.push_answer(&answer, out);
        if let Some(calls) = &mut self.calls {
            calls.finish(&mut AnswerSink { progress: &mut self.progress, out });
        }
        let blanks = std::mem::take(&mut self.progress.blanks);
        if !self.has_call() {
            out.content.push_str(&blanks);
        }
    }

    /// Takes text that is no reasoning.
    fn push_answer(&mut self, text: &str, out: &mut AnswerParts) {
        match &mut self.calls {
            None => out.content.push_str(text),
            Some(calls) => calls.push(text, &mut AnswerSink { progress: &mut self.progress, out }),
        }
    }
}

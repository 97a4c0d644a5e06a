//! Tool calls of Hermes and Qwen: `<tool_call>{"name": "f", "arguments": {}}</tool_call>`.
//!
//! Invariants: a closing tag inside a JSON string does not end a call. Text in tags that is no call
//! is content. Text between the JSON of a call and its closing tag is dropped.

use super::json_call::{CallsEnd, JsonCalls};
use super::{AnswerSink, CallReader};
use crate::stdx::text_matcher::TextMatcher;

/// The tag that opens a call.
pub(super) const OPENING: &str = "<tool_call>";
/// The tag that closes a call.
pub(super) const CLOSING: &str = "</tool_call>";

#[derive(Debug)]
pub(super) struct HermesReader {
    state: State,
    opening: TextMatcher,
    /// Finds the closing tag, and the opening tag of another call.
    closing: TextMatcher,
}

#[derive(Debug)]
enum State {
    Content,
    Calls(JsonCalls),
    /// The JSON became malformed behind the name of its call. The text up to the tag is arguments.
    BrokenCall,
    AfterCalls,
}

impl HermesReader {
    pub(super) fn new() -> HermesReader {
        HermesReader {
            state: State::Content,
            opening: TextMatcher::new(&[OPENING]),
            closing: TextMatcher::new(&[CLOSING, OPENING]),
        }
    }

    /// Takes text up to the next change of state. Returns the rest.
    fn step<'t>(&mut self, text: &'t str, sink: &mut AnswerSink<'_>) -> &'t str {
        let mut passed = String::new();
        match &mut self.state {
            State::Content => {
                let found = self.opening.push(text, &mut passed);
                sink.push_content(&passed);
                let Some(found) = found else { return "" };
                self.state = State::Calls(JsonCalls::after(String::new()));
                &text[found.end..]
            }
            State::Calls(calls) => {
                let (end, rest) = calls.push_text(text, OPENING, sink);
                match end {
                    CallsEnd::None => {}
                    CallsEnd::Complete => self.state = State::AfterCalls,
                    CallsEnd::Broken => self.state = State::BrokenCall,
                    CallsEnd::NoCall => self.state = State::Content,
                }
                rest
            }
            State::BrokenCall | State::AfterCalls => {
                let found = self.closing.push(text, &mut passed);
                if matches!(self.state, State::BrokenCall) {
                    sink.push_arguments(&passed);
                }
                let Some(found) = found else { return "" };
                self.state = match found.index {
                    0 => State::Content,
                    _ => State::Calls(JsonCalls::after(String::new())),
                };
                &text[found.end..]
            }
        }
    }
}

impl CallReader for HermesReader {
    fn push(&mut self, mut text: &str, sink: &mut AnswerSink<'_>) {
        while !text.is_empty() {
            text = self.step(text, sink);
        }
    }

    fn finish(&mut self, sink: &mut AnswerSink<'_>) {
        let mut rest = String::new();
        match &mut self.state {
            State::Content => {
                self.opening.finish(&mut rest);
                sink.push_cut_tag(&rest);
            }
            State::Calls(calls) => calls.finish(OPENING, sink),
            State::BrokenCall => {
                self.closing.finish(&mut rest);
                sink.push_arguments(&rest);
            }
            State::AfterCalls => {}
        }
    }
}

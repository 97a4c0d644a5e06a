//! Tool calls of Mistral: `[TOOL_CALLS] [{"name": "f", "arguments": {}}]`, or in newer models
//! `[TOOL_CALLS]f[ARGS]{}`, also without `[ARGS]` or with `[CALL_ID]`.
//!
//! Invariant: text behind the tag that is no call is content.

use super::json_call::{CallsEnd, JsonCalls, JsonStep, JsonValue};
use super::{AnswerSink, CallReader};
use crate::stdx::text_matcher::TextMatcher;

/// The tag before a call, or before the list of all calls.
pub(super) const OPENING: &str = "[TOOL_CALLS]";
/// The tag between a name and arguments.
pub(super) const ARGUMENTS: &str = "[ARGS]";
/// The tag between a name and an id, which this reader ignores.
pub(super) const CALL_ID: &str = "[CALL_ID]";

#[derive(Debug)]
pub(super) struct MistralReader {
    state: State,
    opening: TextMatcher,
}

#[derive(Debug)]
enum State {
    Content,
    /// Behind the opening tag. Holds the whitespace there.
    BeforeCall(String),
    Calls(JsonCalls),
    /// In a name, and the tags behind it.
    Name(String),
    Arguments(JsonValue),
    /// The JSON became malformed behind the name of its call. The rest is arguments.
    BrokenCall,
}

impl MistralReader {
    pub(super) fn new() -> MistralReader {
        MistralReader { state: State::Content, opening: TextMatcher::new(&[OPENING]) }
    }

    /// Takes text up to the next change of state. Returns the rest.
    fn step<'t>(&mut self, text: &'t str, sink: &mut AnswerSink<'_>) -> &'t str {
        match &mut self.state {
            State::Content => {
                let mut passed = String::new();
                let found = self.opening.push(text, &mut passed);
                sink.push_content(&passed);
                let Some(found) = found else { return "" };
                self.state = State::BeforeCall(String::new());
                &text[found.end..]
            }
            State::BeforeCall(held) => {
                let Some(at) = text.find(|c: char| !c.is_whitespace()) else {
                    held.push_str(text);
                    return "";
                };
                held.push_str(&text[..at]);
                let held = std::mem::take(held);
                self.state = match text[at..].starts_with(['[', '{']) {
                    true => State::Calls(JsonCalls::after(held)),
                    false => State::Name(held),
                };
                &text[at..]
            }
            State::Calls(calls) => {
                let (end, rest) = calls.push_text(text, OPENING, sink);
                match end {
                    CallsEnd::None => {}
                    CallsEnd::Complete | CallsEnd::NoCall => self.state = State::Content,
                    CallsEnd::Broken => self.state = State::BrokenCall,
                }
                rest
            }
            State::Name(_) => self.push_name(text, sink),
            State::Arguments(value) => {
                for (at, c) in text.char_indices() {
                    let end = match value.push(c) {
                        JsonStep::Continues => continue,
                        JsonStep::Ends => at + c.len_utf8(),
                        JsonStep::EndsBefore | JsonStep::Fails => at,
                    };
                    sink.push_arguments(&text[..end]);
                    self.state = State::Content;
                    return &text[end..];
                }
                sink.push_arguments(text);
                ""
            }
            State::BrokenCall => {
                sink.push_arguments(text);
                ""
            }
        }
    }

    fn push_name<'t>(&mut self, text: &'t str, sink: &mut AnswerSink<'_>) -> &'t str {
        let State::Name(name) = &mut self.state else { return text };
        let Some(at) = text.find('{') else {
            name.push_str(text);
            return "";
        };
        name.push_str(&text[..at]);
        match name_of(name) {
            Some(bare) => {
                sink.begin_call(bare);
                self.state = State::Arguments(JsonValue::default());
            }
            None => {
                sink.push_content(OPENING);
                sink.push_content(name);
                self.state = State::Content;
            }
        }
        &text[at..]
    }
}

/// The name in a text such as `f[CALL_ID]x[ARGS]`. A name has no whitespace.
fn name_of(text: &str) -> Option<&str> {
    let name = text.split(CALL_ID).next().unwrap_or_default();
    let name = name.split(ARGUMENTS).next().unwrap_or_default().trim();
    (!name.is_empty() && !name.contains(char::is_whitespace)).then_some(name)
}

impl CallReader for MistralReader {
    fn push(&mut self, mut text: &str, sink: &mut AnswerSink<'_>) {
        while !text.is_empty() {
            text = self.step(text, sink);
        }
    }

    fn finish(&mut self, sink: &mut AnswerSink<'_>) {
        match &mut self.state {
            State::Content => {
                let mut rest = String::new();
                self.opening.finish(&mut rest);
                sink.push_cut_tag(&rest);
            }
            State::Name(name) if name.contains(ARGUMENTS) && name_of(name).is_some() => {
                // The model leaves an empty object out.
                sink.begin_call(name_of(name).unwrap_or_default());
                sink.push_arguments("{}");
            }
            State::BeforeCall(held) | State::Name(held) => {
                sink.push_content(OPENING);
                sink.push_content(held);
            }
            State::Calls(calls) => calls.finish(OPENING, sink),
            State::Arguments(_) | State::BrokenCall => {}
        }
    }
}

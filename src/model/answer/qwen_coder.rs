//! Tool calls of Qwen3-Coder: `<tool_call>`, `<function=f>`, any number of
//! `<parameter=x>` value `</parameter>`, `</function>`, `</tool_call>`.
//!
//! Invariants: a value gets its type from the JSON schema of the function. Without a closing tag, a
//! value ends at the next parameter or at the end of the function. Arguments are given out one by
//! one.

use super::{AnswerSink, CallReader, ToolFunction, hermes, typed_value};
use crate::stdx::text_matcher::TextMatcher;
use serde_json::Value;
use std::sync::Arc;

/// The beginning of a function.
pub(super) const FUNCTION: &str = "<function=";
/// The end of a function.
pub(super) const FUNCTION_END: &str = "</function>";
/// The beginning of a parameter.
pub(super) const PARAMETER: &str = "<parameter=";
/// The end of a parameter.
pub(super) const PARAMETER_END: &str = "</parameter>";

#[derive(Debug)]
pub(super) struct QwenCoderReader {
    functions: Arc<[ToolFunction]>,
    state: State,
    /// The function of the last call, if it is one of the request.
    function: Option<usize>,
    /// Arguments of the last call.
    arguments: usize,
    /// Whether the tag around functions is open.
    is_wrapped: bool,
    content: TextMatcher,
    wrapper: TextMatcher,
    name: TextMatcher,
    body: TextMatcher,
    value: TextMatcher,
}

#[derive(Debug)]
enum State {
    Content,
    /// In the tag around functions. Holds the text before the first function; later text is
    /// dropped.
    Wrapper {
        raw: String,
        is_used: bool,
    },
    /// In the name of a function.
    Name(String),
    /// In a function, between parameters. Text is dropped.
    Body,
    /// In the name of a parameter.
    Key(String),
    Value {
        key: String,
        text: String,
    },
}

impl QwenCoderReader {
    pub(super) fn new(functions: Arc<[ToolFunction]>) -> QwenCoderReader {
        QwenCoderReader {
            functions,
            state: State::Content,
            function: None,
            arguments: 0,
            is_wrapped: false,
            content: TextMatcher::new(&[hermes::OPENING, FUNCTION]),
            wrapper: TextMatcher::new(&[hermes::CLOSING, FUNCTION]),
            name: TextMatcher::new(&[">"]),
            body: TextMatcher::new(&[PARAMETER, FUNCTION_END, hermes::CLOSING]),
            value: TextMatcher::new(&[PARAMETER_END, PARAMETER, FUNCTION_END]),
        }
    }

    /// Takes text up to the next change of state. Returns the rest.
    fn step<'t>(&mut self, text: &'t str, sink: &mut AnswerSink<'_>) -> &'t str {
        let mut dropped = String::new();
        let found = match &mut self.state {
            State::Content => {
                let mut passed = String::new();
                let found = self.content.push(text, &mut passed);
                sink.push_content(&passed);
                found
            }
            State::Wrapper { raw, .. } => self.wrapper.push(text, raw),
            State::Body => self.body.push(text, &mut dropped),
            State::Name(name) | State::Key(name) => self.name.push(text, name),
            State::Value { text: value, .. } => self.value.push(text, value),
        };
        let Some(found) = found else { return "" };
        self.state = match std::mem::replace(&mut self.state, State::Content) {
            State::Content if found.index == 0 => {
                self.is_wrapped = true;
                State::Wrapper { raw: String::new(), is_used: false }
            }
            State::Wrapper { raw, is_used } if found.index == 0 => {
                self.is_wrapped = false;
                if !is_used {
                    for text in [hermes::OPENING, &raw, hermes::CLOSING] {
                        sink.push_content(text);
                    }
                }
                State::Content
            }
            State::Content | State::Wrapper { .. } => State::Name(String::new()),
            State::Name(name) => {
                let name = name.trim();
                sink.begin_call(name);
                self.function = self.functions.iter().position(|known| known.name == name);
                self.arguments = 0;
                State::Body
            }
            State::Body if found.index == 0 => State::Key(String::new()),
            State::Body => self.end_call(found.index == 2, sink),
            State::Key(key) => State::Value { key, text: String::new() },
            State::Value { key, text } => {
                self.give_argument(key.trim(), &text, sink);
                match found.index {
                    0 => State::Body,
                    1 => State::Key(String::new()),
                    _ => self.end_call(false, sink),
                }
            }
        };
        &text[found.end..]
    }

    fn give_argument(&mut self, key: &str, text: &str, sink: &mut AnswerSink<'_>) {
        // The line breaks beside the tags belong to the format.
        let text = text.strip_prefix('\n').unwrap_or(text);
        let text = text.strip_suffix('\n').unwrap_or(text);
        let value = match self.function {
            Some(at) => typed_value::read(text, key, &self.functions[at].parameters),
            None => Value::from(text).to_string(),
        };
        let comma = if self.arguments == 0 { "{" } else { ", " };
        sink.push_arguments(&format!("{comma}{}: {value}", Value::from(key)));
        self.arguments += 1;
    }

    fn end_call(&mut self, is_wrapper_over: bool, sink: &mut AnswerSink<'_>) -> State {
        sink.push_arguments(if self.arguments == 0 { "{}" } else { "}" });
        self.is_wrapped &= !is_wrapper_over;
        match self.is_wrapped {
            true => State::Wrapper { raw: String::new(), is_used: true },
            false => State::Content,
        }
    }
}

impl CallReader for QwenCoderReader {
    fn push(&mut self, mut text: &str, sink: &mut AnswerSink<'_>) {
        while !text.is_empty() {
            text = self.step(text, sink);
        }
    }

    fn finish(&mut self, sink: &mut AnswerSink<'_>) {
        let mut rest = String::new();
        match &self.state {
            State::Content => {
                self.content.finish(&mut rest);
                sink.push_cut_tag(&rest);
            }
            State::Wrapper { raw, is_used: false } => {
                self.wrapper.finish(&mut rest);
                for text in [hermes::OPENING, raw, &rest] {
                    sink.push_content(text);
                }
            }
            // A name or parameter that is cut off is no call and no argument.
            State::Wrapper { .. }
            | State::Name(_)
            | State::Body
            | State::Key(_)
            | State::Value { .. } => {}
        }
    }
}

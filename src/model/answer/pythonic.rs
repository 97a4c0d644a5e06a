//! Tool calls as calls of Python: `[f(x=1, y='a'), g()]`, as in Llama 4 and ToolACE.
//!
//! Invariants: a bracket begins calls only if the name of a function of the request and `(` follow.
//! Else it is content. Arguments are given out one by one, as JSON. An argument without a name is
//! dropped. A value that is no literal becomes a text.

use super::{AnswerSink, CallReader, ToolFunction, is_name_character, python_literal};
use crate::stdx::text_matcher::TextMatcher;
use serde_json::Value;
use std::sync::Arc;

/// Tags of Llama 4 around calls. They are left out.
pub(super) const TAGS: [&str; 2] = ["<|python_start|>", "<|python_end|>"];

#[derive(Debug)]
pub(super) struct PythonicReader {
    functions: Arc<[ToolFunction]>,
    tags: TextMatcher,
    state: State,
}

#[derive(Debug)]
enum State {
    Content,
    /// Before the parenthesis of a call. `raw` is the text since the bracket.
    Name {
        raw: String,
        name: String,
        is_first: bool,
    },
    /// In the name of an argument.
    Key {
        key: String,
        arguments: usize,
    },
    Value {
        key: String,
        raw: String,
        nesting: Nesting,
        arguments: usize,
    },
    AfterCall,
}

/// Open brackets and strings of a value.
#[derive(Default, Debug)]
struct Nesting {
    depth: usize,
    quote: Option<char>,
    is_escaped: bool,
}

impl Nesting {
    /// Takes the next character. Returns whether it ends the value.
    fn push(&mut self, c: char) -> bool {
        match (c, self.quote) {
            _ if self.is_escaped => self.is_escaped = false,
            ('\\', Some(_)) => self.is_escaped = true,
            (c, Some(quote)) if c == quote => self.quote = None,
            (_, Some(_)) => {}
            ('\'' | '"', None) => self.quote = Some(c),
            (',' | ')', None) if self.depth == 0 => return true,
            ('(' | '[' | '{', None) => self.depth += 1,
            (')' | ']' | '}', None) => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        false
    }
}

impl PythonicReader {
    pub(super) fn new(functions: Arc<[ToolFunction]>) -> PythonicReader {
        PythonicReader { functions, tags: TextMatcher::new(&TAGS), state: State::Content }
    }

    fn push_untagged(&mut self, text: &str, sink: &mut AnswerSink<'_>) {
        for c in text.chars() {
            self.push_char(c, sink);
        }
    }

    fn push_char(&mut self, c: char, sink: &mut AnswerSink<'_>) {
        let mut buffer = [0; 4];
        match &mut self.state {
            State::Content if c == '[' => {
                self.state = State::Name { raw: "[".into(), name: String::new(), is_first: true };
            }
            State::Content => sink.push_content(c.encode_utf8(&mut buffer)),
            State::Name { raw, name, is_first } => {
                if c == '(' && is_call(name, *is_first, &self.functions) {
                    sink.begin_call(name);
                    self.state = State::Key { key: String::new(), arguments: 0 };
                } else if is_name_character(c) {
                    raw.push(c);
                    name.push(c);
                } else if name.is_empty() && c.is_whitespace() {
                    raw.push(c);
                } else if name.is_empty() && !*is_first && c == ']' {
                    // A comma can follow the last call.
                    self.state = State::Content;
                } else {
                    let raw = std::mem::take(raw);
                    self.state = State::Content;
                    sink.push_content(&raw);
                    self.push_char(c, sink);
                }
            }
            State::Key { key, arguments } => match c {
                ')' => self.end_call(sink),
                ',' => key.clear(),
                '=' => {
                    self.state = State::Value {
                        key: std::mem::take(key).trim().to_owned(),
                        raw: String::new(),
                        nesting: Nesting::default(),
                        arguments: *arguments,
                    };
                }
                // An argument without a name.
                '\'' | '"' | '[' | '{' | '(' => {
                    let mut nesting = Nesting::default();
                    nesting.push(c);
                    let (key, arguments) = (String::new(), *arguments);
                    self.state = State::Value { key, raw: String::new(), nesting, arguments };
                }
                c => key.push(c),
            },
            State::Value { raw, nesting, .. } => match nesting.push(c) {
                false => raw.push(c),
                true => self.end_value(c, sink),
            },
            State::AfterCall => match c {
                ',' => {
                    let (raw, name) = (",".into(), String::new());
                    self.state = State::Name { raw, name, is_first: false };
                }
                ']' => self.state = State::Content,
                c if c.is_whitespace() => {}
                c => {
                    self.state = State::Content;
                    self.push_char(c, sink);
                }
            },
        }
    }

    fn end_value(&mut self, c: char, sink: &mut AnswerSink<'_>) {
        let State::Value { key, raw, arguments, .. } = &mut self.state else { return };
        let mut arguments = *arguments;
        if !key.is_empty() {
            let raw = raw.trim();
            // JSON stays as it is. Models write it, too.
            let value = match serde_json::from_str::<Value>(raw) {
                Ok(_) => raw.to_owned(),
                Err(_) => python_literal::parse(raw).unwrap_or_else(|| raw.into()).to_string(),
            };
            let key = Value::from(key.as_str());
            let comma = if arguments == 0 { "{" } else { ", " };
            sink.push_arguments(&format!("{comma}{key}: {value}"));
            arguments += 1;
        }
        self.state = State::Key { key: String::new(), arguments };
        if c == ')' {
            self.end_call(sink);
        }
    }

    fn end_call(&mut self, sink: &mut AnswerSink<'_>) {
        let State::Key { arguments, .. } = self.state else { return };
        sink.push_arguments(if arguments == 0 { "{}" } else { "}" });
        self.state = State::AfterCall;
    }
}

/// Whether a call begins with this name. Only the first one must be a function of the request.
fn is_call(name: &str, is_first: bool, functions: &[ToolFunction]) -> bool {
    !name.is_empty() && (!is_first || functions.iter().any(|function| function.name == name))
}

impl CallReader for PythonicReader {
    fn push(&mut self, mut text: &str, sink: &mut AnswerSink<'_>) {
        while !text.is_empty() {
            let mut passed = String::new();
            let found = self.tags.push(text, &mut passed);
            self.push_untagged(&passed, sink);
            text = found.map_or("", |found| &text[found.end..]);
        }
    }

    fn finish(&mut self, sink: &mut AnswerSink<'_>) {
        let mut rest = String::new();
        self.tags.finish(&mut rest);
        self.push_untagged(&rest, sink);
        if let State::Name { raw, .. } = &self.state {
            sink.push_content(raw);
        }
    }
}

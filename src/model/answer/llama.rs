//! Tool calls of Llama 3: `{"name": "f", "parameters": {}}` as the whole answer, with several
//! separated by `;`, or behind `<|python_tag|>`.
//!
//! Invariants: without the tag, an object counts as a call only if it names a function of the
//! request; the answer is held back until its name is known. Else it is content.

use super::json_call::{JsonCall, JsonStep};
use super::{AnswerSink, CallReader, ToolFunction};
use crate::stdx::text_matcher::TextMatcher;
use std::sync::Arc;

/// The tag before a call.
pub(super) const OPENING: &str = "<|python_tag|>";

#[derive(Debug)]
pub(super) struct LlamaReader {
    functions: Arc<[ToolFunction]>,
    state: State,
    opening: TextMatcher,
}

#[derive(Debug)]
enum State {
    /// Where a call can begin. Holds the whitespace there.
    Before {
        held: String,
        is_tagged: bool,
    },
    /// Behind a call.
    Between {
        is_tagged: bool,
    },
    Call {
        call: JsonCall,
        raw: String,
        is_tagged: bool,
    },
    /// The JSON became malformed behind the name of its call. The rest is arguments.
    BrokenCall,
    Content,
}

impl LlamaReader {
    pub(super) fn new(functions: Arc<[ToolFunction]>) -> LlamaReader {
        LlamaReader {
            functions,
            state: State::Before { held: String::new(), is_tagged: false },
            opening: TextMatcher::new(&[OPENING]),
        }
    }

    /// Takes text up to the next change of state. Returns the rest.
    fn step<'t>(&mut self, text: &'t str, sink: &mut AnswerSink<'_>) -> &'t str {
        match &mut self.state {
            State::Before { held, is_tagged } => {
                let Some(at) = text.find(|c: char| !c.is_whitespace()) else {
                    held.push_str(text);
                    return "";
                };
                held.push_str(&text[..at]);
                let (held, is_tagged) = (std::mem::take(held), *is_tagged);
                self.state = match text[at..].starts_with('{') {
                    true => State::Call { call: JsonCall::new(), raw: held, is_tagged },
                    false => {
                        sink.push_content(&held);
                        State::Content
                    }
                };
                &text[at..]
            }
            State::Between { is_tagged } => {
                let is_separator = |c: char| c.is_whitespace() || c == ';' || c == ',';
                let rest = text.trim_start_matches(is_separator);
                if !rest.is_empty() {
                    self.state = State::Before { held: String::new(), is_tagged: *is_tagged };
                }
                rest
            }
            State::Call { .. } => self.push_call(text, sink),
            State::BrokenCall => {
                sink.push_arguments(text);
                ""
            }
            State::Content => {
                let mut passed = String::new();
                let found = self.opening.push(text, &mut passed);
                sink.push_content(&passed);
                let Some(found) = found else { return "" };
                self.state = State::Before { held: String::new(), is_tagged: true };
                &text[found.end..]
            }
        }
    }

    fn push_call<'t>(&mut self, text: &'t str, sink: &mut AnswerSink<'_>) -> &'t str {
        let State::Call { call, raw, is_tagged } = &mut self.state else { return text };
        let is_tagged = *is_tagged;
        let is_call = |name: &str| is_tagged || self.functions.iter().any(|f| f.name == name);
        // The text is needed only until it turns out to be a call.
        let mut is_known = call.name().map(|_| true);
        for (at, c) in text.char_indices() {
            let rest = &text[at + c.len_utf8()..];
            let step = call.push(c);
            if is_known.is_none() {
                raw.push(c);
                is_known = call.name().map(is_call);
            }
            match (step, is_known) {
                (JsonStep::Continues, None | Some(true)) => {}
                (JsonStep::Ends, Some(true)) => {
                    call.give(sink);
                    self.state = State::Between { is_tagged };
                    return rest;
                }
                (JsonStep::Fails, Some(true)) => {
                    call.give(sink);
                    self.state = State::BrokenCall;
                    return &text[at..];
                }
                _ => {
                    sink.push_content(raw);
                    self.state = State::Content;
                    return rest;
                }
            }
        }
        // Its name is one of a function, or not known yet.
        call.give(sink);
        ""
    }
}

impl CallReader for LlamaReader {
    fn push(&mut self, mut text: &str, sink: &mut AnswerSink<'_>) {
        while !text.is_empty() {
            text = self.step(text, sink);
        }
    }

    fn finish(&mut self, sink: &mut AnswerSink<'_>) {
        match &mut self.state {
            State::Before { held, .. } => sink.push_content(held),
            State::Call { call, raw, .. } if call.name().is_none() => sink.push_content(raw),
            State::Between { .. } | State::Call { .. } | State::BrokenCall => {}
            State::Content => {
                let mut rest = String::new();
                self.opening.finish(&mut rest);
                sink.push_cut_tag(&rest);
            }
        }
    }
}

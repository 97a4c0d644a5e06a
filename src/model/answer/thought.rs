//! Reasoning: text between `<think>` and `</think>` before the answer proper.
//!
//! Invariants: reasoning occurs once, at the beginning. Later tags are text. Line breaks behind the
//! closing tag belong to the format and are dropped.

use super::format::ReasoningFormat;
use crate::stdx::text_matcher::TextMatcher;

const OPENING: &str = ReasoningFormat::TAGS[0];
const CLOSING: &str = ReasoningFormat::TAGS[1];

/// Where a prompt left the reasoning.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReasoningStart {
    /// The prompt has no tag at its end. The answer can open the reasoning.
    Outside,
    /// The prompt ends with an open reasoning.
    Inside,
    /// The prompt ends with a reasoning that is closed.
    Over,
}

impl ReasoningStart {
    /// Finds the tag with which a prompt ends. `end` is the text of its last tokens.
    pub fn of_prompt(end: &str) -> ReasoningStart {
        let end = end.trim_end();
        match () {
            () if end.ends_with(OPENING) => ReasoningStart::Inside,
            () if end.ends_with(CLOSING) => ReasoningStart::Over,
            () => ReasoningStart::Outside,
        }
    }
}

/// Separates reasoning from the text behind it.
#[derive(Debug)]
pub(super) struct ReasoningReader {
    state: State,
    /// Finds the closing tag, and the tag of a tool call, which closes the reasoning, too.
    closing: TextMatcher,
    /// The tag of a tool call, which is not a part of the reasoning.
    call: Option<&'static str>,
}

#[derive(Debug)]
enum State {
    /// Before the first word. Holds the whitespace so far, and the start of the opening tag.
    Before {
        blanks: String,
        tag: String,
        is_implied: bool,
    },
    Inside,
    /// Behind the closing tag, before the answer.
    Behind,
    Over,
}

impl ReasoningReader {
    /// `call`: the tag that opens a tool call in this answer.
    pub(super) fn new(
        format: ReasoningFormat,
        start: ReasoningStart,
        call: Option<&'static str>,
    ) -> ReasoningReader {
        let is_implied = format == ReasoningFormat::DeepseekR1;
        let before =
            |is_implied| State::Before { blanks: String::new(), tag: String::new(), is_implied };
        let state = match start {
            ReasoningStart::Outside => before(is_implied),
            // Some models repeat the tag of the prompt.
            ReasoningStart::Inside => before(true),
            ReasoningStart::Over => State::Over,
        };
        let tags: Vec<&str> = [CLOSING].into_iter().chain(call).collect();
        ReasoningReader { state, closing: TextMatcher::new(&tags), call }
    }

    pub(super) fn is_inside(&self) -> bool {
        match self.state {
            State::Inside => true,
            State::Before { is_implied, .. } => is_implied,
            State::Behind | State::Over => false,
        }
    }

    pub(super) fn push(&mut self, text: &str, reasoning: &mut String, answer: &mut String) {
        match &mut self.state {
            State::Over => answer.push_str(text),
            State::Inside => self.push_inside(text, reasoning, answer),
            State::Behind => {
                let text = text.trim_start_matches('\n');
                if !text.is_empty() {
                    self.state = State::Over;
                    answer.push_str(text);
                }
            }
            State::Before { blanks, tag, is_implied } => {
                let bare = if tag.is_empty() { text.trim_start() } else { text };
                blanks.push_str(&text[..text.len() - bare.len()]);
                tag.push_str(bare);
                if let Some(rest) = tag.strip_prefix(OPENING) {
                    let rest = rest.to_owned();
                    self.state = State::Inside;
                    self.push_inside(&rest, reasoning, answer);
                } else if !OPENING.starts_with(tag.as_str()) {
                    let held = std::mem::take(blanks) + tag;
                    self.state = if *is_implied { State::Inside } else { State::Over };
                    self.push(&held, reasoning, answer);
                }
            }
        }
    }

    fn push_inside(&mut self, text: &str, reasoning: &mut String, answer: &mut String) {
        let Some(found) = self.closing.push(text, reasoning) else { return };
        self.state = State::Behind;
        if let (1, Some(call)) = (found.index, self.call) {
            self.push(call, reasoning, answer);
        }
        self.push(&text[found.end..], reasoning, answer);
    }

    pub(super) fn finish(&mut self, reasoning: &mut String, answer: &mut String) {
        match std::mem::replace(&mut self.state, State::Over) {
            State::Before { blanks, tag, is_implied } => {
                let out = if is_implied { reasoning } else { answer };
                out.push_str(&blanks);
                out.push_str(&tag);
            }
            State::Inside => self.closing.finish(reasoning),
            State::Behind | State::Over => {}
        }
    }
}

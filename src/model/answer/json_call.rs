//! Tool calls as JSON objects, character by character: `{"name": "f", "arguments": {"x": 1}}`, or a
//! list of them.
//!
//! Invariants: the arguments are given out as they are written, as soon as the name is known.
//! `parameters` is another name of `arguments`. The values of other keys are skipped.

use super::AnswerSink;

/// How far a JSON text is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum JsonStep {
    /// The character belongs to it, and more follow.
    Continues,
    /// The character ends it, and belongs to it.
    Ends,
    /// The character ends it, and does not belong to it.
    EndsBefore,
    /// The character cannot be here.
    Fails,
}

/// Follows one JSON value. It checks brackets and strings, not the rest of the grammar.
#[derive(Clone, Default, Debug)]
pub(super) struct JsonValue {
    /// Closing brackets that are still to come.
    open: Vec<char>,
    is_string: bool,
    is_escaped: bool,
    /// Whether it is a number or a word, which ends before the next other character.
    is_word: bool,
}

impl JsonValue {
    /// Takes the next character, after any whitespace before the value.
    pub(super) fn push(&mut self, c: char) -> JsonStep {
        let ends = |open: &Vec<char>| match open.is_empty() {
            true => JsonStep::Ends,
            false => JsonStep::Continues,
        };
        if self.is_string {
            match c {
                _ if self.is_escaped => self.is_escaped = false,
                '\\' => self.is_escaped = true,
                '"' => {
                    self.is_string = false;
                    return ends(&self.open);
                }
                _ => {}
            }
            return JsonStep::Continues;
        }
        if self.is_word {
            let continues = c.is_alphanumeric() || matches!(c, '.' | '-' | '+' | '_');
            return if continues { JsonStep::Continues } else { JsonStep::EndsBefore };
        }
        match c {
            '{' => self.open.push('}'),
            '[' => self.open.push(']'),
            '"' => self.is_string = true,
            '}' | ']' => {
                return match self.open.pop() == Some(c) {
                    true => ends(&self.open),
                    false => JsonStep::Fails,
                };
            }
            _ if !self.open.is_empty() => {}
            c if c.is_alphanumeric() || c == '-' => self.is_word = true,
            _ => return JsonStep::Fails,
        }
        JsonStep::Continues
    }
}

/// Follows one tool call.
#[derive(Debug)]
pub(super) struct JsonCall {
    state: State,
    key: String,
    /// The name as JSON so far, with its quotes.
    name_json: String,
    name: Option<String>,
    /// Arguments that are not given out yet.
    arguments: String,
    /// Whether the arguments are complete. Further ones are skipped.
    has_arguments: bool,
    /// Whether the call has begun in the answer.
    has_begun: bool,
}

#[derive(Debug)]
enum State {
    BeforeObject,
    BeforeKey { is_first: bool },
    Key { is_escaped: bool },
    BeforeColon,
    BeforeValue,
    Value(JsonValue),
    AfterValue,
    Over,
}

impl JsonCall {
    pub(super) fn new() -> JsonCall {
        JsonCall {
            state: State::BeforeObject,
            key: String::new(),
            name_json: String::new(),
            name: None,
            arguments: String::new(),
            has_arguments: false,
            has_begun: false,
        }
    }

    /// The name, once it is complete.
    pub(super) fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Takes the next character.
    pub(super) fn push(&mut self, c: char) -> JsonStep {
        let is_blank = c.is_ascii_whitespace();
        match &mut self.state {
            State::BeforeObject if is_blank => {}
            State::BeforeObject if c == '{' => self.state = State::BeforeKey { is_first: true },
            State::BeforeKey { .. } if is_blank => {}
            State::BeforeKey { .. } if c == '"' => {
                self.key.clear();
                self.state = State::Key { is_escaped: false };
            }
            State::BeforeKey { is_first: true } if c == '}' => return self.end(),
            State::Key { is_escaped } => match c {
                _ if *is_escaped => *is_escaped = false,
                '\\' => *is_escaped = true,
                '"' => self.state = State::BeforeColon,
                c => self.key.push(c),
            },
            State::BeforeColon if is_blank => {}
            State::BeforeColon if c == ':' => self.state = State::BeforeValue,
            State::BeforeValue if is_blank => {}
            State::BeforeValue => {
                self.state = State::Value(JsonValue::default());
                return self.push_value(c);
            }
            State::Value(_) => return self.push_value(c),
            State::AfterValue if is_blank => {}
            State::AfterValue if c == ',' => self.state = State::BeforeKey { is_first: false },
            State::AfterValue if c == '}' => return self.end(),
            _ => return JsonStep::Fails,
        }
        JsonStep::Continues
    }

    fn push_value(&mut self, c: char) -> JsonStep {
        let State::Value(value) = &mut self.state else { return JsonStep::Fails };
        let step = value.push(c);
        if matches!(step, JsonStep::Continues | JsonStep::Ends) {
            match &*self.key {
                "name" => self.name_json.push(c),
                "arguments" | "parameters" if !self.has_arguments => self.arguments.push(c),
                _ => {}
            }
        }
        match step {
            JsonStep::Continues => JsonStep::Continues,
            JsonStep::Fails => JsonStep::Fails,
            JsonStep::Ends => {
                self.end_value();
                JsonStep::Continues
            }
            JsonStep::EndsBefore => {
                self.end_value();
                self.push(c)
            }
        }
    }

    fn end_value(&mut self) {
        self.state = State::AfterValue;
        match &*self.key {
            "name" if self.name.is_none() => {
                let name = serde_json::from_str(&self.name_json).ok();
                self.name = name.filter(|name: &String| !name.is_empty());
            }
            "arguments" | "parameters" => self.has_arguments = true,
            _ => {}
        }
    }

    fn end(&mut self) -> JsonStep {
        self.state = State::Over;
        match self.name {
            Some(_) => JsonStep::Ends,
            None => JsonStep::Fails,
        }
    }

    /// Gives out what is known so far. Without arguments, a call that is over has `{}`.
    pub(super) fn give(&mut self, sink: &mut AnswerSink<'_>) {
        if !self.has_begun {
            let Some(name) = &self.name else { return };
            sink.begin_call(name);
            self.has_begun = true;
        }
        if matches!(self.state, State::Over) && !self.has_arguments {
            self.has_arguments = true;
            self.arguments.push_str("{}");
        }
        sink.push_arguments(&self.arguments);
        self.arguments.clear();
    }
}

/// How a text of calls ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CallsEnd {
    /// Not yet.
    None,
    Complete,
    /// The JSON became malformed behind the name of a call.
    Broken,
    /// The text is no call.
    NoCall,
}

/// Follows one tool call, or a list of them.
#[derive(Debug)]
pub(super) struct JsonCalls {
    call: JsonCall,
    place: Place,
    /// The text of the last call, unless the call has begun in the answer.
    raw: String,
    /// Whether a call has begun in the answer.
    has_given: bool,
}

/// Where the next character is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    Before,
    Single,
    /// In an object of a list.
    Listed,
    BetweenListed,
}

impl JsonCalls {
    /// Calls after this whitespace.
    pub(super) fn after(blanks: String) -> JsonCalls {
        JsonCalls { call: JsonCall::new(), place: Place::Before, raw: blanks, has_given: false }
    }

    /// Whether the name of the last call is known, so that its text is a call.
    fn is_named(&self) -> bool {
        self.call.name().is_some()
    }

    /// Gives out the text that turned out to be no call, behind the tag `opening`. Behind other
    /// calls, the end of a list is no content.
    fn give_raw(&mut self, opening: &str, sink: &mut AnswerSink<'_>) {
        if !self.has_given {
            sink.push_content(opening);
            sink.push_content(&self.raw);
        }
        self.raw.clear();
    }

    /// Takes the next character. Calls that end are given out.
    fn push(&mut self, c: char, sink: &mut AnswerSink<'_>) -> JsonStep {
        self.raw.push(c);
        match self.place {
            Place::Before if c == '[' => {
                self.place = Place::BetweenListed;
                return JsonStep::Continues;
            }
            Place::Before if c.is_ascii_whitespace() => return JsonStep::Continues,
            Place::Before => self.place = Place::Single,
            Place::BetweenListed => match c {
                ']' => return JsonStep::Ends,
                '{' => self.place = Place::Listed,
                _ if c == ',' || c.is_ascii_whitespace() => return JsonStep::Continues,
                _ => return JsonStep::Fails,
            },
            Place::Single | Place::Listed => {}
        }
        let step = self.call.push(c);
        if step == JsonStep::Ends {
            self.give(sink);
            if self.place == Place::Listed {
                (self.call, self.place) = (JsonCall::new(), Place::BetweenListed);
                return JsonStep::Continues;
            }
        }
        step
    }

    /// Takes text behind the tag `opening`, up to the end of the calls. Returns how it ends, and
    /// the rest. Text that is no call is given out as content.
    pub(super) fn push_text<'t>(
        &mut self,
        text: &'t str,
        opening: &str,
        sink: &mut AnswerSink<'_>,
    ) -> (CallsEnd, &'t str) {
        for (at, c) in text.char_indices() {
            match self.push(c, sink) {
                JsonStep::Continues => {}
                JsonStep::Ends => return (CallsEnd::Complete, &text[at + c.len_utf8()..]),
                JsonStep::Fails | JsonStep::EndsBefore if self.is_named() => {
                    self.give(sink);
                    return (CallsEnd::Broken, &text[at..]);
                }
                JsonStep::Fails | JsonStep::EndsBefore => {
                    self.raw.pop();
                    self.give_raw(opening, sink);
                    return (CallsEnd::NoCall, &text[at..]);
                }
            }
        }
        self.give(sink);
        (CallsEnd::None, "")
    }

    /// The text ends before the calls do.
    pub(super) fn finish(&mut self, opening: &str, sink: &mut AnswerSink<'_>) {
        if !self.is_named() {
            self.give_raw(opening, sink);
        }
    }

    /// Gives out what is known of the last call.
    fn give(&mut self, sink: &mut AnswerSink<'_>) {
        self.call.give(sink);
        if self.call.has_begun {
            self.has_given = true;
            self.raw.clear();
        }
    }
}

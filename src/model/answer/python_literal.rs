//! Literals of Python as JSON: what `ast.literal_eval` takes, except bytes, sets and complex
//! numbers.
//!
//! Invariant: recursion is bounded, so no text overflows the stack.

use serde_json::{Map, Number, Value};
use std::iter::Peekable;
use std::str::Chars;

/// Deepest nesting of lists and dicts.
const DEPTH_MAX: usize = 64;

/// The value of a literal; `None`: the text is no literal.
pub(super) fn parse(text: &str) -> Option<Value> {
    let mut parser = Parser { rest: text.chars().peekable() };
    let value = parser.value(0)?;
    parser.skip_blanks();
    parser.rest.next().is_none().then_some(value)
}

struct Parser<'t> {
    rest: Peekable<Chars<'t>>,
}

impl Parser<'_> {
    fn skip_blanks(&mut self) {
        while self.rest.next_if(|c| c.is_whitespace()).is_some() {}
    }

    /// The next character that is not whitespace, without taking it.
    fn peek(&mut self) -> Option<char> {
        self.skip_blanks();
        self.rest.peek().copied()
    }

    fn take(&mut self, c: char) -> bool {
        self.peek() == Some(c) && self.rest.next().is_some()
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > DEPTH_MAX {
            return None;
        }
        match self.peek()? {
            '\'' | '"' => self.strings(),
            '[' => self.list(']', depth).map(Value::Array),
            '(' => self.list(')', depth).map(Value::Array),
            '{' => self.dict(depth).map(Value::Object),
            _ => self.word(),
        }
    }

    /// Values up to `end`. A comma can follow the last one.
    fn list(&mut self, end: char, depth: usize) -> Option<Vec<Value>> {
        self.rest.next();
        let mut items = Vec::new();
        while !self.take(end) {
            items.push(self.value(depth + 1)?);
            if !self.take(',') && self.peek() != Some(end) {
                return None;
            }
        }
        Some(items)
    }

    fn dict(&mut self, depth: usize) -> Option<Map<String, Value>> {
        self.rest.next();
        let mut fields = Map::new();
        while !self.take('}') {
            let key = match self.value(depth + 1)? {
                Value::String(key) => key,
                key @ (Value::Number(_) | Value::Bool(_) | Value::Null) => key.to_string(),
                Value::Array(_) | Value::Object(_) => return None,
            };
            if !self.take(':') {
                return None;
            }
            fields.insert(key, self.value(depth + 1)?);
            if !self.take(',') && self.peek() != Some('}') {
                return None;
            }
        }
        Some(fields)
    }

    /// A string, or several in a row, which are one.
    fn strings(&mut self) -> Option<Value> {
        let mut text = String::new();
        while let Some(quote @ ('\'' | '"')) = self.peek() {
            self.string(quote, &mut text)?;
        }
        Some(Value::String(text))
    }

    fn string(&mut self, quote: char, text: &mut String) -> Option<()> {
        self.rest.next();
        let mut is_triple = false;
        if self.rest.next_if_eq(&quote).is_some() {
            is_triple = self.rest.next_if_eq(&quote).is_some();
            if !is_triple {
                return Some(());
            }
        }
        loop {
            match self.rest.next()? {
                '\\' => self.escape(text)?,
                c if c == quote && !is_triple => return Some(()),
                c if c == quote => {
                    let mut rest = self.rest.clone();
                    if rest.next() == Some(quote) && rest.next() == Some(quote) {
                        self.rest = rest;
                        return Some(());
                    }
                    text.push(c);
                }
                '\n' if !is_triple => return None,
                c => text.push(c),
            }
        }
    }

    fn escape(&mut self, text: &mut String) -> Option<()> {
        let c = match self.rest.next()? {
            '\n' => return Some(()),
            'n' => '\n',
            't' => '\t',
            'r' => '\r',
            'a' => '\u{7}',
            'b' => '\u{8}',
            'f' => '\u{c}',
            'v' => '\u{b}',
            'x' => self.digits(16, 2)?,
            'u' => self.digits(16, 4)?,
            'U' => self.digits(16, 8)?,
            '0' => '\0',
            c @ ('\\' | '\'' | '"') => c,
            other => {
                text.push('\\');
                other
            }
        };
        text.push(c);
        Some(())
    }

    fn digits(&mut self, radix: u32, count: usize) -> Option<char> {
        let mut code = 0;
        for _ in 0..count {
            code = code * radix + self.rest.next()?.to_digit(radix)?;
        }
        char::from_u32(code)
    }

    /// A number or a word such as `True`. Models also write the words of JSON.
    fn word(&mut self) -> Option<Value> {
        let mut word = String::new();
        let is_part = |c: &char| c.is_alphanumeric() || matches!(c, '.' | '-' | '+' | '_');
        while let Some(c) = self.rest.next_if(is_part) {
            word.push(c);
        }
        match &*word {
            "None" | "null" => return Some(Value::Null),
            "True" | "true" => return Some(Value::Bool(true)),
            "False" | "false" => return Some(Value::Bool(false)),
            _ => {}
        }
        let number = word.replace('_', "");
        let bare = number.trim_start_matches('+');
        if !bare.trim_start_matches('-').starts_with(|c: char| c.is_ascii_digit() || c == '.') {
            return None;
        }
        if let Ok(whole) = bare.parse::<i64>() {
            return Some(whole.into());
        }
        if let Ok(whole) = bare.parse::<u64>() {
            return Some(whole.into());
        }
        Number::from_f64(bare.parse().ok()?).map(Value::Number)
    }
}

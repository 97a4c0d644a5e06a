//! Grammars in the GBNF of llama.cpp, which SGLang calls EBNF, as Lark.
//!
//! Both have the same operators, so each word of one becomes a word of the other, without a tree.
//! Each class of characters becomes a terminal for one character.

use super::GrammarError;
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write;

/// The name of the first rule.
const ROOT: &str = "root";

/// The same grammar in Lark.
///
/// # Errors
/// The grammar is malformed, or has no rule `root`.
pub(super) fn to_lark(text: &str) -> Result<String, GrammarError> {
    let mut words = Words { rest: text, line: 1 };
    let (mut lark, mut rules) = (String::new(), Rules::default());
    // The name before `::=`, which is only known to be one at `::=`.
    let mut name: Option<&str> = None;
    loop {
        let line = words.line;
        let word = words.next()?;
        if let (Some(name), is_definition) = (name.take(), word == Some(Word::Defines)) {
            let number = rules.number(name);
            match is_definition {
                true if !rules.define(number) => {
                    return Err(error(line, format_args!("the rule `{name}` is defined twice")));
                }
                true => {
                    write!(lark, "\n{}:", rule(number)).expect("a string takes all");
                    continue;
                }
                false if lark.is_empty() => {
                    return Err(error(line, format_args!("`::=` must follow `{name}`")));
                }
                false => write!(lark, " {}", rule(number)).expect("a string takes all"),
            }
        }
        match word {
            None => break,
            Some(Word::Name(next)) => name = Some(next),
            Some(_) if lark.is_empty() => return Err(error(line, "a rule must begin the grammar")),
            Some(Word::Defines) => return Err(error(line, "`::=` must follow the name of a rule")),
            Some(Word::Text(text)) => write!(lark, " {}", json!(text)).expect("a string takes all"),
            Some(Word::Class(class)) => write!(lark, " /{class}/").expect("a string takes all"),
            Some(Word::Operator(operator)) => lark.push_str(operator),
        }
    }
    match rules.undefined() {
        _ if !rules.numbers.contains_key(ROOT) => {
            Err(GrammarError::new(format_args!("the grammar has no rule `{ROOT}`")))
        }
        Some(name) => {
            Err(GrammarError::new(format_args!("the rule `{name}` is used, but is not defined")))
        }
        None => Ok(format!("start: {}{lark}\n", rule(rules.number(ROOT)))),
    }
}

fn error(line: usize, why: impl std::fmt::Display) -> GrammarError {
    GrammarError::new(format_args!("line {line}: {why}"))
}

fn rule(number: usize) -> String {
    format!("rule_{number}")
}

/// The rules by name, in order of their first use.
#[derive(Default)]
struct Rules<'a> {
    numbers: BTreeMap<&'a str, usize>,
    defined: Vec<bool>,
}

impl<'a> Rules<'a> {
    fn number(&mut self, name: &'a str) -> usize {
        let next = self.defined.len();
        let number = *self.numbers.entry(name).or_insert(next);
        if number == next {
            self.defined.push(false);
        }
        number
    }

    /// Records a definition. Returns whether it is the first.
    fn define(&mut self, number: usize) -> bool {
        !std::mem::replace(&mut self.defined[number], true)
    }

    fn undefined(&self) -> Option<&'a str> {
        self.numbers.iter().find(|&(_, &number)| !self.defined[number]).map(|(name, _)| *name)
    }
}

/// The words of a grammar.
struct Words<'a> {
    rest: &'a str,
    line: usize,
}

#[derive(PartialEq, Debug)]
enum Word<'a> {
    Name(&'a str),
    /// `::=`
    Defines,
    /// A text in quotes.
    Text(String),
    /// One character, as a regular expression.
    Class(String),
    /// An operator that both notations have.
    Operator(&'a str),
}

impl<'a> Words<'a> {
    fn next(&mut self) -> Result<Option<Word<'a>>, GrammarError> {
        self.skip_blanks();
        let Some(first) = self.rest.chars().next() else { return Ok(None) };
        let word = match first {
            ':' if self.rest.starts_with("::=") => {
                self.take(3);
                Word::Defines
            }
            '"' => Word::Text(self.text()?),
            '[' => Word::Class(self.class()?),
            '.' => {
                self.take(1);
                Word::Class("[\\u{0}-\\u{10FFFF}]".into())
            }
            '(' if self.rest[1..].trim_start().starts_with('=') => {
                return Err(error(self.line, "look-ahead `(=` is not supported"));
            }
            '|' => {
                self.take(1);
                Word::Operator(" |")
            }
            '(' | ')' | '*' | '+' | '?' => Word::Operator(self.take(1)),
            '{' => {
                let Some(end) = self.rest.find('}') else {
                    return Err(error(self.line, "`{` has no `}`"));
                };
                let count = self.take(end + 1);
                let is_count = |c: char| c.is_ascii_digit() || "{,} \t".contains(c);
                if !count.chars().all(is_count) {
                    return Err(error(self.line, format_args!("`{count}` is no repetition")));
                }
                Word::Operator(count)
            }
            c if is_of_name(c) => {
                let end = self.rest.find(|c| !is_of_name(c)).unwrap_or(self.rest.len());
                Word::Name(self.take(end))
            }
            c => return Err(error(self.line, format_args!("`{c}` is not expected here"))),
        };
        Ok(Some(word))
    }

    fn take(&mut self, len: usize) -> &'a str {
        let (taken, rest) = self.rest.split_at(len);
        self.rest = rest;
        taken
    }

    fn skip_blanks(&mut self) {
        while let Some(c) = self.rest.chars().next() {
            match c {
                '#' => {
                    let end = self.rest.find('\n').unwrap_or(self.rest.len());
                    self.take(end);
                }
                '\n' => {
                    self.line += 1;
                    self.take(1);
                }
                c if c.is_whitespace() => {
                    self.take(c.len_utf8());
                }
                _ => return,
            }
        }
    }

    /// The text between two quotes.
    fn text(&mut self) -> Result<String, GrammarError> {
        self.take(1);
        let mut text = String::new();
        loop {
            match self.character("\"")? {
                ('"', false) => return Ok(text),
                (c, _) => text.push(c),
            }
        }
    }

    /// A class of characters as a regular expression. Each character is written as a number, so no
    /// character has a meaning of its own.
    fn class(&mut self) -> Result<String, GrammarError> {
        self.take(1);
        let mut class = String::from("[");
        if self.rest.starts_with('^') {
            self.take(1);
            class.push('^');
        }
        let begin = class.len();
        loop {
            let (first, is_escaped) = self.character("]")?;
            if first == ']' && !is_escaped {
                break;
            }
            write!(class, "\\u{{{:X}}}", u32::from(first)).expect("a string takes all");
            let is_range = self.rest.starts_with('-') && !self.rest.starts_with("-]");
            if is_range {
                self.take(1);
                let (last, _) = self.character("]")?;
                if last < first {
                    let why = format_args!("the range from `{first}` to `{last}` is empty");
                    return Err(error(self.line, why));
                }
                write!(class, "-\\u{{{:X}}}", u32::from(last)).expect("a string takes all");
            }
        }
        if class.len() == begin {
            return Err(error(self.line, "a class has no characters"));
        }
        class.push(']');
        Ok(class)
    }

    /// The next character of a text or class, and whether it was escaped.
    fn character(&mut self, end: &str) -> Result<(char, bool), GrammarError> {
        let line = self.line;
        let missing = || error(line, format_args!("`{end}` is missing"));
        let c = self.rest.chars().next().filter(|&c| c != '\n').ok_or_else(missing)?;
        self.take(c.len_utf8());
        if c != '\\' {
            return Ok((c, false));
        }
        let escaped = self.rest.chars().next().ok_or_else(missing)?;
        self.take(escaped.len_utf8());
        let c = match escaped {
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            'x' => self.hex(2)?,
            'u' => self.hex(4)?,
            'U' => self.hex(8)?,
            '"' | '\'' | '\\' | '[' | ']' | '-' | '^' | '/' => escaped,
            _ => return Err(error(self.line, format_args!("`\\{escaped}` is no escape"))),
        };
        Ok((c, true))
    }

    fn hex(&mut self, digits: usize) -> Result<char, GrammarError> {
        let digits = self.rest.get(..digits).filter(|digits| digits.is_ascii());
        let c = digits.and_then(|digits| u32::from_str_radix(digits, 16).ok());
        let c = c.and_then(char::from_u32);
        let c = c.ok_or_else(|| error(self.line, "an escape has no valid hexadecimal number"))?;
        self.take(digits.map_or(0, str::len));
        Ok(c)
    }
}

fn is_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '-' || c == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lark(text: &str) -> String {
        to_lark(text).unwrap()
    }

    #[test]
    fn each_word_has_its_counterpart() {
        let text = "# a list\nroot ::= item (\",\" item){0,3} | \n  [^a-c\\n] . # end\n\
                    item::=\"a\\\"\" +\n";
        assert_eq!(
            lark(text),
            "start: rule_0\nrule_0: rule_1( \",\" rule_1){0,3} | /[^\\u{61}-\\u{63}\\u{A}]/ \
             /[\\u{0}-\\u{10FFFF}]/\nrule_1: \"a\\\"\"+\n"
        );
        assert_eq!(
            lark("root ::= [-a\\]-]"),
            "start: rule_0\nrule_0: /[\\u{2D}\\u{61}\\u{5D}\\u{2D}]/\n"
        );
        assert_eq!(
            lark("a ::= root\nroot ::= \"\\x41\\u0042\\U00000043\""),
            "start: rule_1\nrule_0: rule_1\nrule_1: \"ABC\"\n"
        );
    }

    #[test]
    fn an_error_names_its_line() {
        for (text, why) in [
            ("", "the grammar has no rule `root`"),
            ("a ::= \"x\"", "the grammar has no rule `root`"),
            ("root ::= a", "the rule `a` is used, but is not defined"),
            ("root ::= \"a\"\nroot ::= \"b\"", "line 2: the rule `root` is defined twice"),
            ("\nroot root", "line 2: `::=` must follow `root`"),
            ("::= \"a\"", "line 1: a rule must begin the grammar"),
            ("root ::= ::= \"a\"", "line 1: `::=` must follow the name of a rule"),
            ("root ::= \"a", "line 1: `\"` is missing"),
            ("root ::= [a", "line 1: `]` is missing"),
            ("root ::= []", "line 1: a class has no characters"),
            ("root ::= [b-a]", "line 1: the range from `b` to `a` is empty"),
            ("root ::= \"\\q\"", "line 1: `\\q` is no escape"),
            ("root ::= \"\\xg0\"", "line 1: an escape has no valid hexadecimal number"),
            ("root ::= \"a\"{1", "line 1: `{` has no `}`"),
            ("root ::= \"a\"{x}", "line 1: `{x}` is no repetition"),
            ("root ::= \"a\" (= \"b\")", "line 1: look-ahead `(=` is not supported"),
            ("root ::= \"a\" ;", "line 1: `;` is not expected here"),
        ] {
            assert_eq!(to_lark(text).map_err(|error| error.to_string()), Err(why.into()), "{text}");
        }
    }
}

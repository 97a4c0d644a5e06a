//! Converts JSON to template values and back, with keys in order, as Python's `json` writes it.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};
use serde_json::Value as Json;

/// Deepest nesting that is written. The parser bounds the nesting of client input.
const DEPTH_MAX: usize = 128;

/// Converts a request's JSON to a template value.
pub(super) fn to_value(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(b) => (*b).into(),
        Json::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(n), _) => n.into(),
            (_, Some(n)) => n.into(),
            _ => n.as_f64().unwrap_or(f64::NAN).into(),
        },
        Json::String(text) => text.as_str().into(),
        Json::Array(items) => items.iter().map(to_value).collect(),
        Json::Object(map) => Value::from_pairs(map.iter().map(|(k, v)| (k.as_str(), to_value(v)))),
    }
}

/// The filter `tojson(indent=None, separators=None, ensure_ascii=False)`.
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let ensure_ascii: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let (item, key) = match separators.as_deref() {
        None => (if indent.is_some() { "," } else { ", " }, ": "),
        Some([item, key]) => (item.as_str(), key.as_str()),
        Some(_) => {
            return Err(Error::new(ErrorKind::InvalidOperation, "separators must be a pair"));
        }
    };
    let ascii = ensure_ascii.unwrap_or(false);
    let mut writer = Writer { out: String::new(), indent, item, key, ascii };
    writer.value(value, 0)?;
    Ok(Value::from_safe_string(writer.out))
}

struct Writer<'a> {
    out: String,
    indent: Option<usize>,
    item: &'a str,
    key: &'a str,
    ascii: bool,
}

impl Writer<'_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            return Err(Error::new(ErrorKind::InvalidOperation, "tojson: nested too deeply"));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&value.to_string()),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                self.out.push('[');
                let mut empty = true;
                for item in value.try_iter()? {
                    self.separate(&mut empty, depth + 1);
                    self.value(&item, depth + 1)?;
                }
                self.close(']', empty, depth);
            }
            ValueKind::Map => {
                self.out.push('{');
                let mut empty = true;
                for key in value.try_iter()? {
                    self.separate(&mut empty, depth + 1);
                    self.string(&key.to_string());
                    self.out.push_str(self.key);
                    self.value(&value.get_item(&key)?, depth + 1)?;
                }
                self.close('}', empty, depth);
            }
            kind => {
                let what = format!("tojson: a value of kind {kind} is not JSON");
                return Err(Error::new(ErrorKind::InvalidOperation, what));
            }
        }
        Ok(())
    }

    fn separate(&mut self, empty: &mut bool, depth: usize) {
        if !std::mem::replace(empty, false) {
            self.out.push_str(self.item);
        }
        self.newline(depth);
    }

    fn close(&mut self, bracket: char, empty: bool, depth: usize) {
        if !empty {
            self.newline(depth);
        }
        self.out.push(bracket);
    }

    fn newline(&mut self, depth: usize) {
        if let Some(indent) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent.min(64) * depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || self.ascii && !c.is_ascii() => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        self.out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

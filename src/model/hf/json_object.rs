//! A JSON object of a model's configuration, read field by field. An error names the file, the
//! field with its path, the expected values and the value found.

use crate::limits::MODEL_JSON_MAX;
use crate::model::weights::LoadError;
use serde_json::Value;
use std::fmt::Display;
use std::path::{Path, PathBuf};

/// Reads a JSON file of bounded size.
pub fn read_json(path: &Path) -> Result<Value, LoadError> {
    let length = std::fs::metadata(path).map_err(|error| LoadError::io(path, error))?.len();
    if length > MODEL_JSON_MAX as u64 {
        return Err(LoadError::malformed(
            path,
            format!("expected at most {MODEL_JSON_MAX} bytes, found {length}"),
        ));
    }
    let bytes = std::fs::read(path).map_err(|error| LoadError::io(path, error))?;
    json_of_bytes(path, bytes)
}

fn json_of_bytes(path: &Path, mut bytes: Vec<u8>) -> Result<Value, LoadError> {
    quote_infinities(&mut bytes);
    serde_json::from_slice(&bytes).map_err(|error| LoadError::malformed(path, error))
}

/// Python writes infinities as words that JSON does not have. They become texts of the same length,
/// which fields of numbers refuse: `"inf"`.
fn quote_infinities(json: &mut [u8]) {
    const WORD: &[u8] = b"Infinity";
    const TEXT: &[u8] = b"\"inf\"   ";
    let (mut at, mut is_text) = (0, false);
    while at < json.len() {
        match json[at] {
            b'"' => is_text = !is_text,
            b'\\' if is_text => at += 1,
            b'I' if !is_text && json[at..].starts_with(WORD) => {
                json[at..at + WORD.len()].copy_from_slice(TEXT);
                if at > 0 && json[at - 1] == b'-' {
                    json[at - 1..at + 1].copy_from_slice(b"\"-");
                }
                at += WORD.len() - 1;
            }
            _ => {}
        }
        at += 1;
    }
}

/// A JSON object of a file, and its path in the file for errors.
pub struct Object {
    file: PathBuf,
    prefix: String,
    /// Its fields.
    pub value: Value,
}

impl Object {
    /// Reads a file with an object of bounded size.
    pub fn read(path: &Path) -> Result<Object, LoadError> {
        Object::of_value(path, read_json(path)?)
    }

    /// The object in the bytes of this file.
    pub fn of_bytes(path: &Path, bytes: Vec<u8>) -> Result<Object, LoadError> {
        Object::of_value(path, json_of_bytes(path, bytes)?)
    }

    fn of_value(path: &Path, value: Value) -> Result<Object, LoadError> {
        if !value.is_object() {
            return Err(LoadError::malformed(path, "expected a JSON object"));
        }
        Ok(Object { file: path.to_owned(), prefix: String::new(), value })
    }

    /// The error for a field with this value.
    pub fn wrong(&self, field: &str, expected: impl Display, found: impl Display) -> LoadError {
        LoadError::field(&self.file, format!("{}{field}", self.prefix), expected, found)
    }

    /// The error for a field that is not there.
    pub fn missing(&self, field: &str, expected: &str) -> LoadError {
        self.wrong(field, expected, "nothing")
    }

    /// Reads the field with `read`; `None` if it is null.
    pub fn field<'a, T>(
        &'a self,
        field: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, LoadError> {
        match &self.value[field] {
            Value::Null => Ok(None),
            value => read(value).map(Some).ok_or_else(|| self.wrong(field, expected, value)),
        }
    }

    /// An object inside this one; `None` if it is null.
    pub fn object(&self, field: &str) -> Result<Option<Object>, LoadError> {
        let value =
            self.field(field, "an object", |value| value.is_object().then(|| value.clone()))?;
        let prefix = format!("{}{field}.", self.prefix);
        Ok(value.map(|value| Object { file: self.file.clone(), prefix, value }))
    }

    /// A text; `None` if it is null.
    pub fn string(&self, field: &str) -> Result<Option<&str>, LoadError> {
        self.field(field, "a string", Value::as_str)
    }

    /// A truth value; `None` if it is null.
    pub fn bool(&self, field: &str) -> Result<Option<bool>, LoadError> {
        self.field(field, "true or false", Value::as_bool)
    }

    /// A number; `None` if it is null.
    pub fn number(&self, field: &str) -> Result<Option<f32>, LoadError> {
        self.field(field, "a number", |value| value.as_f64().map(|number| number as f32))
    }

    /// The base of rotary frequencies.
    pub fn theta(&self, field: &str) -> Result<Option<f32>, LoadError> {
        match self.number(field)? {
            Some(theta) if !theta.is_finite() || theta <= 1.0 => {
                Err(self.wrong(field, "a finite number above 1", theta))
            }
            theta => Ok(theta),
        }
    }

    /// A finite number above 0; `None` if it is null.
    pub fn positive(&self, field: &str) -> Result<Option<f32>, LoadError> {
        match self.number(field)? {
            Some(number) if !number.is_finite() || number <= 0.0 => {
                Err(self.wrong(field, "a positive number", number))
            }
            number => Ok(number),
        }
    }

    /// A number of 32 bits; `None` if it is null.
    pub fn u32(&self, field: &str) -> Result<Option<u32>, LoadError> {
        self.field(field, "a number of 32 bits", |value| value.as_u64()?.try_into().ok())
    }

    /// A positive number; `None` if it is null.
    pub fn optional_size(&self, field: &str) -> Result<Option<usize>, LoadError> {
        match self.u32(field)? {
            Some(0) => Err(self.wrong(field, "a positive number", 0)),
            size => Ok(size.map(|size| size as usize)),
        }
    }

    /// A list of `N` finite numbers; `None` if it is null.
    pub fn numbers<const N: usize>(&self, field: &str) -> Result<Option<[f32; N]>, LoadError> {
        let number = |value: &Value| {
            value.as_f64().map(|number| number as f32).filter(|number| number.is_finite())
        };
        self.field(field, &format!("a list of {N} numbers"), |value| {
            let numbers: Option<Vec<f32>> = value.as_array()?.iter().map(number).collect();
            numbers?.try_into().ok()
        })
    }

    /// A number that must be there.
    pub fn required_number(&self, field: &str) -> Result<f32, LoadError> {
        self.number(field)?.ok_or_else(|| self.missing(field, "a number"))
    }

    /// A positive number that must be there.
    pub fn size(&self, field: &str) -> Result<usize, LoadError> {
        self.optional_size(field)?.ok_or_else(|| self.missing(field, "a positive number"))
    }

    /// A positive number up to `most` that must be there.
    pub fn size_up_to(&self, field: &str, most: usize) -> Result<usize, LoadError> {
        match self.size(field)? {
            size if size <= most => Ok(size),
            size => Err(self.wrong(field, format!("at most {most}"), size)),
        }
    }

    /// The kinds of all `layers` layers, if they are listed.
    pub fn layer_kinds(&self, layers: usize) -> Result<Option<&Vec<Value>>, LoadError> {
        const FIELD: &str = "layer_types";
        let listed = self.field(FIELD, "a list of layer kinds", Value::as_array)?;
        match listed.filter(|list| list.len() != layers) {
            None => Ok(listed),
            Some(list) => {
                let expected = format!("{layers} kinds, as num_hidden_layers says");
                Err(self.wrong(FIELD, expected, list.len()))
            }
        }
    }

    /// Reads one id or a list of ids.
    pub fn ids(&self, field: &str) -> Result<Vec<u32>, LoadError> {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids = self.field(field, "an id or a list of ids", |value| match value {
            Value::Array(list) => list.iter().map(id).collect(),
            value => Some(vec![id(value)?]),
        })?;
        Ok(ids.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn infinities_of_python_become_texts() {
        let mut json = br#"{"a\"Infinity":[0.0,Infinity,-Infinity],"b":"-Infinity"}"#.to_vec();
        quote_infinities(&mut json);
        let value: Value = serde_json::from_slice(&json).unwrap();
        assert_eq!(value["a\"Infinity"], serde_json::json!([0.0, "inf", "-inf"]));
        assert_eq!(value["b"], "-Infinity");
        let mut word = *b"Infinity";
        quote_infinities(&mut word);
        assert_eq!(&word, b"\"inf\"   ");
    }
}

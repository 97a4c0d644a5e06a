//! Typed access to a GGUF file's metadata. A value of the wrong type is an error that names its
//! key.

use super::header::{Header, Value};
use crate::model::weights::LoadError;
use std::path::Path;

/// The metadata of one file.
#[derive(Clone, Copy)]
pub struct Metadata<'a> {
    /// The file, for errors.
    pub file: &'a Path,
    /// All of its bytes.
    pub bytes: &'a [u8],
    /// Its parsed head.
    pub header: &'a Header,
}

impl<'a> Metadata<'a> {
    /// The string under `key`.
    pub fn string(&self, key: &str) -> Result<Option<&'a str>, LoadError> {
        match self.header.metadata.get(key) {
            None => Ok(None),
            Some(Value::String(range)) => std::str::from_utf8(&self.bytes[range.clone()])
                .map(Some)
                .map_err(|_| self.wrong(key, "UTF-8", &"other bytes")),
            Some(other) => Err(self.wrong(key, "a string", other)),
        }
    }

    /// The index or size under `key`.
    pub fn u32(&self, key: &str) -> Result<Option<u32>, LoadError> {
        let Some(value) = self.header.metadata.get(key) else { return Ok(None) };
        integer(value).map(Some).ok_or_else(|| self.wrong(key, "a number of 32 bits", value))
    }

    /// The number under `key`.
    pub fn f32(&self, key: &str) -> Result<Option<f32>, LoadError> {
        match self.header.metadata.get(key) {
            None => Ok(None),
            Some(&Value::Float(x)) => Ok(Some(x as f32)),
            Some(&Value::Unsigned(n)) => Ok(Some(n as f32)),
            Some(&Value::Signed(n)) => Ok(Some(n as f32)),
            Some(other) => Err(self.wrong(key, "a number", other)),
        }
    }

    /// The boolean under `key`.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, LoadError> {
        match self.header.metadata.get(key) {
            None => Ok(None),
            Some(&Value::Bool(b)) => Ok(Some(b)),
            Some(other) => Err(self.wrong(key, "a boolean", other)),
        }
    }

    /// The strings under `key`.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&'a str>>, LoadError> {
        self.list(key, "a list of UTF-8 strings", |value| match value {
            Value::String(range) => std::str::from_utf8(&self.bytes[range]).ok(),
            _ => None,
        })
    }

    /// The numbers under `key`.
    pub fn u32s(&self, key: &str) -> Result<Option<Vec<u32>>, LoadError> {
        self.list(key, "a list of numbers of 32 bits", |value| integer(&value))
    }

    /// The numbers under `key`.
    pub fn f32s(&self, key: &str) -> Result<Option<Vec<f32>>, LoadError> {
        self.list(key, "a list of numbers", |value| match value {
            Value::Float(x) => Some(x as f32),
            _ => None,
        })
    }

    /// Like [`Metadata::u32`], for a required key.
    pub fn required_u32(&self, key: &str) -> Result<u32, LoadError> {
        self.u32(key)?.ok_or_else(|| self.missing(key, "a number"))
    }

    /// The error for a missing key.
    pub fn missing(&self, key: &str, expected: &str) -> LoadError {
        LoadError::field(self.file, key, expected, "nothing")
    }

    fn list<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl Fn(Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>, LoadError> {
        match self.header.metadata.get(key) {
            None => Ok(None),
            Some(Value::Array(list)) => list
                .values(self.bytes)
                .map(read)
                .collect::<Option<Vec<T>>>()
                .map(Some)
                .ok_or_else(|| LoadError::field(self.file, key, expected, "other elements")),
            Some(other) => Err(self.wrong(key, expected, other)),
        }
    }

    fn wrong(&self, key: &str, expected: &str, found: &dyn std::fmt::Debug) -> LoadError {
        LoadError::field(self.file, key, expected, format!("{found:?}"))
    }
}

fn integer(value: &Value) -> Option<u32> {
    match *value {
        Value::Unsigned(n) => n.try_into().ok(),
        Value::Signed(n) => n.try_into().ok(),
        _ => None,
    }
}

//! Reads a JSON object field by field. The code that reads a field gives its type and range. Fields
//! that are never read are reported as unknown.
//!
//! Invariants: values stay slices of the body until they are read, so an object takes memory only
//! for its list of fields. Null counts as absent. An error names the field at fault with its path.

use super::error::ApiError;
use crate::limits::{JSON_FIELDS_MAX, JSON_NODES_MAX, NAME_BYTES_MAX};
use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use std::fmt;
use std::marker::PhantomData;
use std::ops::RangeInclusive;

/// The fields of an object that have not been read yet.
#[derive(Default)]
pub(super) struct Fields<'a> {
    /// Prefix of a field's name in errors: empty, or `object.`.
    path: String,
    entries: Vec<(String, &'a RawValue)>,
    ignored: Vec<String>,
}

/// A field of the API, and the values for which it has no effect, as JSON without whitespace.
pub type Neutral<'s> = (&'s str, &'s [&'s str]);

impl<'a> Fields<'a> {
    /// The fields of a whole body.
    pub(super) fn parse(body: &'a [u8]) -> Result<Self, ApiError> {
        let text = std::str::from_utf8(body).map_err(ApiError::invalid_json)?;
        let Entries(entries) = serde_json::from_str(text).map_err(ApiError::invalid_json)?;
        Ok(Self { path: String::new(), entries, ignored: Vec::new() })
    }

    /// Removes the field `name` and returns the fields of its object.
    pub(super) fn object(&mut self, name: &str) -> Result<Option<Self>, ApiError> {
        let Some(raw) = self.take(name) else { return Ok(None) };
        let Entries(entries) = self.value(name, raw, "must be an object")?;
        Ok(Some(Self { path: format!("{}{name}.", self.path), entries, ignored: Vec::new() }))
    }

    /// Removes the field `name` and returns its value, unless it is null.
    pub(super) fn take(&mut self, name: &str) -> Option<&'a RawValue> {
        let at = self.entries.iter().position(|(key, _)| key == name)?;
        let raw = self.entries.swap_remove(at).1;
        (raw.get() != "null").then_some(raw)
    }

    /// Reads the field `name` as a `T`; `must` describes the allowed values for the error.
    pub(super) fn get<T: Deserialize<'a>>(
        &mut self,
        name: &str,
        must: &str,
    ) -> Result<Option<T>, ApiError> {
        self.take(name).map(|raw| self.value(name, raw, must)).transpose()
    }

    /// Reads a boolean.
    pub(super) fn flag(&mut self, name: &str, default: bool) -> Result<bool, ApiError> {
        Ok(self.get(name, "must be true or false")?.unwrap_or(default))
    }

    /// Reads a string.
    pub(super) fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        self.get(name, "must be a string")
    }

    /// Reads a string of 1 to [`NAME_BYTES_MAX`] bytes.
    pub(super) fn name(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        let text = self.text(name)?;
        self.sized(name, text.iter(), NAME_BYTES_MAX)?;
        Ok(text)
    }

    /// Checks that each of these strings of `name` has 1 to `most` bytes.
    pub(super) fn sized<'t>(
        &self,
        name: &str,
        texts: impl IntoIterator<Item = &'t String>,
        most: usize,
    ) -> Result<(), ApiError> {
        match texts.into_iter().find(|text| text.is_empty() || text.len() > most) {
            Some(text) => {
                Err(self
                    .invalid(name, format!("must have 1 to {most} bytes, but has {}", text.len())))
            }
            None => Ok(()),
        }
    }

    /// Reads a whole number within `range`. `1.0` is a whole number, too.
    pub(super) fn integer<T: TryFrom<i128>>(
        &mut self,
        name: &str,
        range: RangeInclusive<i128>,
    ) -> Result<Option<T>, ApiError> {
        let must = format!("must be a whole number from {} to {}", range.start(), range.end());
        let Some(number) = self.get::<serde_json::Number>(name, &must)? else { return Ok(None) };
        let value = whole(&number)
            .filter(|value| range.contains(value))
            .and_then(|value| T::try_from(value).ok());
        value.map(Some).ok_or_else(|| self.invalid(name, must))
    }

    /// Reads a number for which `valid` is true; `must` describes the same condition for the error.
    pub(super) fn number(
        &mut self,
        name: &str,
        default: f32,
        valid: impl Fn(f32) -> bool,
        must: &str,
    ) -> Result<f32, ApiError> {
        match self.get::<f64>(name, must)? {
            None => Ok(default),
            Some(value) if (value as f32).is_finite() && valid(value as f32) => Ok(value as f32),
            Some(_) => Err(self.invalid(name, must)),
        }
    }

    /// Reads the field `name` as one `T` or a list of at most `MAX`.
    pub(super) fn one_or_many<T: Deserialize<'a>, const MAX: usize>(
        &mut self,
        name: &str,
        must: &str,
    ) -> Result<Option<OneOrMany<T>>, ApiError> {
        let Some(raw) = self.take(name) else { return Ok(None) };
        let value = if raw.get().starts_with('[') {
            OneOrMany::Many(self.list::<T, MAX>(name, raw.get(), must)?)
        } else {
            OneOrMany::One(self.value(name, raw, must)?)
        };
        Ok(Some(value))
    }

    /// Parses `json`, the value of `name`, as a list of at most `MAX` items.
    pub(super) fn list<T: Deserialize<'a>, const MAX: usize>(
        &self,
        name: &str,
        json: &'a str,
        must: &str,
    ) -> Result<Vec<T>, ApiError> {
        let List { items, count } = serde_json::from_str::<List<T, MAX>>(json)
            .map_err(|error| self.explain(name, &error, must))?;
        if count > MAX {
            return Err(self.invalid(name, format!("has {count} items; at most {MAX} are allowed")));
        }
        Ok(items)
    }

    /// Reads the field `name` as a tree of bounded size.
    pub(super) fn tree<T: Deserialize<'a>>(
        &mut self,
        name: &str,
        must: &str,
    ) -> Result<Option<T>, ApiError> {
        let Some(raw) = self.take(name) else { return Ok(None) };
        let count = nodes(raw.get());
        if count > JSON_NODES_MAX {
            return Err(self.invalid(
                name,
                format!("holds {count} values; at most {JSON_NODES_MAX} are allowed"),
            ));
        }
        self.value(name, raw, must).map(Some)
    }

    /// Refuses unsupported fields of the API, unless they have a value without effect.
    pub(super) fn refuse(&mut self, fields: &[Neutral<'_>]) -> Result<(), ApiError> {
        self.refuse_as(ApiError::unsupported, fields)
    }

    /// Refuses fields that belong to another endpoint, unless they have a value without effect.
    pub(super) fn refuse_as_unknown(&mut self, fields: &[Neutral<'_>]) -> Result<(), ApiError> {
        self.refuse_as(ApiError::unknown, fields)
    }

    fn refuse_as(
        &mut self,
        error: impl Fn(String) -> ApiError,
        fields: &[Neutral<'_>],
    ) -> Result<(), ApiError> {
        for (name, defaults) in fields {
            if self.take(name).is_some_and(|raw| !is_one_of(raw.get(), defaults)) {
                return Err(error(format!("{}{name}", self.path)));
            }
        }
        Ok(())
    }

    /// The fields that were not read.
    pub(super) fn entries(&self) -> impl Iterator<Item = (&str, &'a RawValue)> {
        self.entries.iter().map(|(name, value)| (&name[..], *value))
    }

    /// Removes fields regardless of their values.
    pub(super) fn accept(&mut self, names: &[&str]) {
        for name in names {
            self.take(name);
        }
    }

    /// Reports the unread fields of an object of this one as its own.
    pub(super) fn absorb(&mut self, object: Self) {
        self.ignored.extend(object.rest());
    }

    /// The paths of all fields that were ignored or never read.
    pub(super) fn rest(self) -> Vec<String> {
        let unknown = self.entries.iter().filter(|(_, raw)| raw.get() != "null");
        let unknown = unknown.map(|(name, _)| format!("{}{name}", self.path));
        let mut rest = self.ignored.clone();
        rest.extend(unknown);
        rest
    }

    /// The path of the field `name`.
    pub(super) fn name_of(&self, name: &str) -> String {
        format!("{}{name}", self.path)
    }

    /// An error about the field `name`.
    pub(super) fn invalid(&self, name: &str, must: impl fmt::Display) -> ApiError {
        ApiError::invalid(format!("{}{name}", self.path), must)
    }

    fn value<T: Deserialize<'a>>(
        &self,
        name: &str,
        raw: &'a RawValue,
        must: &str,
    ) -> Result<T, ApiError> {
        serde_json::from_str(raw.get()).map_err(|error| self.explain(name, &error, must))
    }

    /// An error about the field `name`: half of a surrogate pair is named, else `must`.
    pub(super) fn explain(&self, name: &str, error: &serde_json::Error, must: &str) -> ApiError {
        let text = error.to_string();
        match text.contains("surrogate") || text.contains("hex escape") {
            true => self.invalid(name, HALF_PAIR),
            false => self.invalid(name, must),
        }
    }
}

/// What is wrong with a string such as `"\ud83d"`.
const HALF_PAIR: &str = "has half of a surrogate pair: an escape such as \\ud83d needs its other \
                         half, such as \\ude00";

/// The value of a number without a fraction.
fn whole(number: &serde_json::Number) -> Option<i128> {
    number.as_i128().or_else(|| {
        // Above 2^53 a float no longer identifies one whole number.
        number.as_f64().filter(|x| x.fract() == 0.0 && x.abs() < 9e15).map(|x| x as i128)
    })
}

fn is_one_of(json: &str, values: &[&str]) -> bool {
    let bare = || json.bytes().filter(|b| !b.is_ascii_whitespace());
    values.iter().any(|value| bare().eq(value.bytes()))
}

/// An upper bound of the values in a JSON text: commas and opening brackets outside of strings.
pub(super) fn nodes(json: &str) -> usize {
    let mut count = 1;
    let mut bytes = json.bytes();
    let mut quoted = false;
    while let Some(byte) = bytes.next() {
        match byte {
            b'\\' if quoted => drop(bytes.next()),
            b'"' => quoted = !quoted,
            b',' | b'[' | b'{' if !quoted => count += 1,
            _ => {}
        }
    }
    count
}

/// An object as (name, value) pairs, each name once.
pub(super) struct Entries<'a>(pub(super) Vec<(String, &'a RawValue)>);

impl<'de> Deserialize<'de> for Entries<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Entries<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries: Vec<(String, &RawValue)> = Vec::new();
                while let Some((name, value)) = map.next_entry::<String, &RawValue>()? {
                    if entries.len() == JSON_FIELDS_MAX {
                        return Err(A::Error::custom(format!(
                            "more than {JSON_FIELDS_MAX} fields"
                        )));
                    }
                    if name.len() > NAME_BYTES_MAX {
                        let bytes = name.len();
                        return Err(A::Error::custom(format!(
                            "a field's name has {bytes} bytes; at most {NAME_BYTES_MAX} are allowed"
                        )));
                    }
                    if entries.iter().any(|(earlier, _)| *earlier == name) {
                        return Err(A::Error::custom(format!("the field `{name}` appears twice")));
                    }
                    entries.push((name, value));
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(Object)
    }
}

/// A list: its first `MAX` items, and how many it has.
pub(super) struct List<T, const MAX: usize> {
    items: Vec<T>,
    count: usize,
}

impl<T, const MAX: usize> List<T, MAX> {
    /// All its items, unless it has more than `MAX`.
    pub(super) fn whole(self) -> Option<Vec<T>> {
        (self.count <= MAX).then_some(self.items)
    }
}

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for List<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Items<T, const MAX: usize>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for Items<T, MAX> {
            type Value = List<T, MAX>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let mut items = Vec::new();
                while items.len() < MAX
                    && let Some(item) = seq.next_element()?
                {
                    items.push(item);
                }
                let mut count = items.len();
                // Further items are only counted.
                while items.len() == MAX && seq.next_element::<IgnoredAny>()?.is_some() {
                    count += 1;
                }
                Ok(List { items, count })
            }
        }
        deserializer.deserialize_seq(Items(PhantomData))
    }
}

/// One `T`, or a list of them.
pub(super) enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

/// The first byte of a JSON list's first item, without parsing the list.
pub(super) fn first_item(json: &str) -> Option<u8> {
    json.strip_prefix('[')?.trim_start().bytes().next().filter(|&byte| byte != b']')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;

    fn parse(body: &str) -> Result<Fields<'_>, ApiError> {
        Fields::parse(body.as_bytes())
    }

    #[test]
    fn a_body_must_be_one_object_of_bounded_size() {
        let many =
            format!("{{{}}}", (0..257).map(|i| format!("\"{i}\":0")).collect::<Vec<_>>().join(","));
        let long = format!("{{\"{}\":0}}", "x".repeat(NAME_BYTES_MAX + 1));
        for body in [
            "",
            "{",
            "[]",
            "7",
            "{} x",
            "{\"a\":}",
            "{\"a\":1,\"a\":2}",
            "{\"a\":\"\u{1}\"}",
            &many,
            &long,
        ] {
            let error = parse(body).err().unwrap_or_else(|| panic!("{body} was accepted"));
            assert_eq!(
                (error.status, error.code.name(), error.param),
                (400, "invalid_json", None),
                "{body}"
            );
        }
        assert_eq!(
            Fields::parse(b"{\"a\":\"\xff\"}").err().map(|error| error.code.name()),
            Some("invalid_json")
        );
    }

    #[test]
    fn depth_is_bounded_when_a_tree_is_built() {
        let deep = format!("{{\"a\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
        let error = parse(&deep).unwrap().tree::<Value>("a", "must be shallow").unwrap_err();
        assert_eq!(error.message, "`a` must be shallow");
    }

    #[test]
    fn whole_numbers_may_be_written_as_floats() {
        let integer = |json: &str| {
            let body = format!("{{\"n\":{json}}}");
            parse(&body)
                .unwrap()
                .integer::<i128>("n", -1..=i128::from(u64::MAX))
                .map_err(|error| error.message)
        };
        assert_eq!(integer("5"), Ok(Some(5)));
        assert_eq!(integer("5.0"), Ok(Some(5)));
        assert_eq!(integer("-1"), Ok(Some(-1)));
        assert_eq!(integer("18446744073709551615"), Ok(Some(u64::MAX.into())));
        assert_eq!(integer("null"), Ok(None));
        for bad in ["5.5", "-2", "1e30", "18446744073709551616", "\"5\"", "true", "[5]", "1e999"] {
            let must = "`n` must be a whole number from -1 to 18446744073709551615".to_owned();
            assert_eq!(integer(bad), Err(must), "{bad}");
        }
    }

    #[test]
    fn fields_that_were_not_read_are_listed_as_the_rest() {
        let mut fields =
            parse(r#"{"a":1,"b":null,"c":{"d":1,"e":[ ]},"f":true,"g":false}"#).unwrap();
        assert_eq!(fields.integer("a", 0..=9), Ok(Some(1u8)));
        let mut inner = fields.object("c").unwrap().unwrap();
        assert_eq!(inner.refuse(&[("e", &["[]"])]), Ok(()));
        assert_eq!(inner.rest(), ["c.d"]);
        fields.accept(&["f"]);
        assert_eq!(fields.rest(), ["g"]);
    }

    fn values(tree: &Value) -> usize {
        match tree {
            Value::Array(items) => 1 + items.iter().map(values).sum::<usize>(),
            Value::Object(map) => 1 + map.values().map(values).sum::<usize>(),
            _ => 1,
        }
    }

    fn trees() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<i32>().prop_map(Value::from),
            ".{0,6}".prop_map(Value::from)
        ];
        leaf.prop_recursive(4, 40, 5, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
                prop::collection::vec((".{0,3}", inner), 0..5)
                    .prop_map(|entries| Value::Object(entries.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn nodes_are_never_counted_too_low(tree in trees()) {
            let counted = nodes(&tree.to_string());
            prop_assert!(counted >= values(&tree), "{} < {}", counted, values(&tree));
            prop_assert!(counted <= 2 * values(&tree));
        }

        #[test]
        fn no_body_panics(body in prop::collection::vec(any::<u8>(), 0..200)) {
            let defaults = super::super::Sampling::default();
            let _ = super::super::completion::parse(&body, &defaults);
            let _ = super::super::chat::parse(&body, &defaults);
            let _ = super::super::generate::parse(&body, &defaults);
        }
    }
}

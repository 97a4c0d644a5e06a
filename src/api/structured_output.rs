//! Structured output: what the answer must be, in the fields of OpenAI, vLLM, SGLang and llama.cpp.
//!
//! Invariant: a request has at most one grammar. Not here: whether the grammar is well formed
//! (`model::grammar`), which the compiler finds out.

use super::error::ApiError;
use super::fields::Fields;
use crate::limits::{GRAMMAR_BYTES_MAX, GRAMMAR_CHOICES_MAX};
use crate::model::grammar::{GrammarSource, WHITESPACE_OPTIONS};
use serde_json::Value;
use serde_json::value::RawValue;

/// What the answer of a request must be.
#[derive(Clone, PartialEq, Debug)]
pub struct StructuredOutput {
    /// Path of the field that says so, for errors.
    pub field: String,
    /// The grammar.
    pub source: GrammarSource,
}

/// A grammar found in a body, by the name of its field.
type Found = Option<(String, GrammarSource)>;

/// Reads all fields of a body that ask for a structured output. In `sampling_params` of `/generate`
/// are the same fields.
pub(super) fn read(fields: &mut Fields<'_>) -> Result<Option<StructuredOutput>, ApiError> {
    let found = [
        read_response_format(fields)?,
        read_structured_outputs(fields)?,
        read_schema(fields, "guided_json")?,
        read_text(fields, "guided_regex", GrammarSource::Regex)?,
        read_choice(fields, "guided_choice")?,
        read_text(fields, "guided_grammar", GrammarSource::Grammar)?,
        read_schema(fields, "json_schema")?,
        read_text(fields, "regex", GrammarSource::Regex)?,
        read_text(fields, "ebnf", GrammarSource::Grammar)?,
        read_text(fields, "grammar", GrammarSource::Grammar)?,
    ];
    let mut found = found.into_iter().flatten();
    let Some((field, source)) = found.next() else { return Ok(None) };
    match found.next() {
        Some((other, _)) => {
            Err(ApiError::invalid(other, format!("and `{field}` exclude each other")))
        }
        None => Ok(Some(StructuredOutput { field, source })),
    }
}

/// OpenAI's field. Also takes the schema beside `json_object`, as llama.cpp does.
fn read_response_format(fields: &mut Fields<'_>) -> Result<Found, ApiError> {
    let Some(mut format) = fields.object("response_format")? else { return Ok(None) };
    let kind = format.text("type")?.ok_or_else(|| format.invalid("type", "is missing"))?;
    let found = match &*kind {
        "text" => None,
        "json_object" => Some(match read_schema(&mut format, "schema")? {
            Some(found) => found,
            None => (format.name_of("type"), GrammarSource::JsonObject),
        }),
        "json_schema" => {
            let missing = format.invalid("json_schema", "is missing");
            let mut schema = format.object("json_schema")?.ok_or(missing)?;
            // Every schema is enforced, whether it is strict or not.
            schema.flag("strict", false)?;
            schema.accept(&["name", "description"]);
            let missing = schema.invalid("schema", "is missing");
            let found = read_schema(&mut schema, "schema")?.ok_or(missing)?;
            format.absorb(schema);
            Some(found)
        }
        _ => return Err(ApiError::unsupported(format.name_of("type"))),
    };
    fields.absorb(format);
    Ok(found)
}

/// vLLM's field.
fn read_structured_outputs(fields: &mut Fields<'_>) -> Result<Found, ApiError> {
    let Some(mut asked) = fields.object("structured_outputs")? else { return Ok(None) };
    asked.refuse(&[("structural_tag", &[]), ("disable_additional_properties", &["false"])])?;
    let is_dense = asked.flag("disable_any_whitespace", false)?;
    let blanks = asked.text("whitespace_pattern")?;
    let is_object = asked.flag("json_object", false)?;
    let object = is_object.then(|| (asked.name_of("json_object"), GrammarSource::JsonObject));
    let found = [
        read_schema(&mut asked, "json")?,
        read_text(&mut asked, "regex", GrammarSource::Regex)?,
        read_choice(&mut asked, "choice")?,
        read_text(&mut asked, "grammar", GrammarSource::Grammar)?,
        object,
    ];
    let mut found = found.into_iter().flatten();
    let must = "must have exactly one of `json`, `regex`, `choice`, `grammar`, `json_object`";
    let (Some((field, source)), None) = (found.next(), found.next()) else {
        return Err(fields.invalid("structured_outputs", must));
    };
    let source = match (is_dense, blanks) {
        (false, None) => source,
        (_, blanks) => with_blanks(source, blanks.as_deref())
            .ok_or_else(|| asked.invalid("whitespace_pattern", "needs `json`, an object"))?,
    };
    fields.absorb(asked);
    Ok(Some((field, source)))
}

/// The same schema with this pattern of blanks between its words; `None`: without blanks. Returns
/// `None` if the schema is no object.
fn with_blanks(source: GrammarSource, blanks: Option<&str>) -> Option<GrammarSource> {
    let schema = match source {
        GrammarSource::JsonObject => r#"{"type":"object"}"#.into(),
        GrammarSource::JsonSchema(schema) => schema,
        GrammarSource::Regex(_)
        | GrammarSource::Choice(_)
        | GrammarSource::Grammar(_)
        | GrammarSource::Calls(_) => return None,
    };
    let mut schema: serde_json::Map<String, Value> = serde_json::from_str(&schema).ok()?;
    let options = match blanks {
        Some(pattern) => serde_json::json!({"whitespace_pattern": pattern}),
        None => serde_json::json!({"whitespace_flexible": false}),
    };
    schema.insert(WHITESPACE_OPTIONS.into(), options);
    Some(GrammarSource::JsonSchema(Value::Object(schema).to_string()))
}

/// Reads a JSON schema: an object, or its text in a string.
fn read_schema(fields: &mut Fields<'_>, name: &str) -> Result<Found, ApiError> {
    let Some(raw) = fields.take(name) else { return Ok(None) };
    let must = "must be a JSON schema";
    let schema = match raw.get().starts_with('"') {
        true => serde_json::from_str(raw.get()).map_err(|_| fields.invalid(name, must))?,
        false => raw.get().to_owned(),
    };
    let checked: Result<&RawValue, _> = serde_json::from_str(&schema);
    let is_schema = checked.is_ok_and(|raw| raw.get().starts_with(['{', 't', 'f']));
    match is_schema {
        true => bounded(fields, name, schema, GrammarSource::JsonSchema),
        false => Err(fields.invalid(name, must)),
    }
}

/// Reads a grammar that is one text. An empty text counts as absent.
fn read_text(
    fields: &mut Fields<'_>,
    name: &str,
    source: impl Fn(String) -> GrammarSource,
) -> Result<Found, ApiError> {
    match fields.text(name)?.filter(|text| !text.is_empty()) {
        Some(text) => bounded(fields, name, text, source),
        None => Ok(None),
    }
}

fn bounded(
    fields: &Fields<'_>,
    name: &str,
    text: String,
    source: impl Fn(String) -> GrammarSource,
) -> Result<Found, ApiError> {
    match text.len() > GRAMMAR_BYTES_MAX {
        true => {
            let why = format!("has {} bytes; at most {GRAMMAR_BYTES_MAX} are allowed", text.len());
            Err(fields.invalid(name, why))
        }
        false => Ok(Some((fields.name_of(name), source(text)))),
    }
}

fn read_choice(fields: &mut Fields<'_>, name: &str) -> Result<Found, ApiError> {
    let Some(raw) = fields.take(name) else { return Ok(None) };
    let must = "must be a list of strings, none of them empty";
    let texts = fields.list::<String, GRAMMAR_CHOICES_MAX>(name, raw.get(), must)?;
    let bytes: usize = texts.iter().map(String::len).sum();
    if texts.is_empty() || texts.iter().any(String::is_empty) {
        return Err(fields.invalid(name, must));
    }
    if bytes > GRAMMAR_BYTES_MAX {
        let why = format!("has {bytes} bytes; at most {GRAMMAR_BYTES_MAX} are allowed");
        return Err(fields.invalid(name, why));
    }
    Ok(Some((fields.name_of(name), GrammarSource::Choice(texts))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(body: &str) -> Result<Option<StructuredOutput>, ApiError> {
        read(&mut Fields::parse(body.as_bytes()).unwrap())
    }

    #[test]
    fn reads_the_fields_of_each_engine() {
        let schema = || GrammarSource::JsonSchema(r#"{"type":"null"}"#.into());
        let grammar = || GrammarSource::Grammar("root ::= \"a\"".into());
        let choice = || GrammarSource::Choice(vec!["a".into(), "b".into()]);
        for (body, field, source) in [
            (
                r#"{"response_format":{"type":"json_object"}}"#,
                "response_format.type",
                GrammarSource::JsonObject,
            ),
            (
                r#"{"response_format":{"type":"json_object","schema":{"type":"null"}}}"#,
                "response_format.schema",
                schema(),
            ),
            (
                r#"{"response_format":{"type":"json_schema","json_schema":{"name":"n","strict":true,
             "description":"d","schema":{"type":"null"}}}}"#,
                "response_format.json_schema.schema",
                schema(),
            ),
            (
                r#"{"structured_outputs":{"json":{"type":"null"}}}"#,
                "structured_outputs.json",
                schema(),
            ),
            (
                r#"{"structured_outputs":{"json":"{\"type\":\"null\"}"}}"#,
                "structured_outputs.json",
                schema(),
            ),
            (
                r#"{"structured_outputs":{"regex":"a"}}"#,
                "structured_outputs.regex",
                GrammarSource::Regex("a".into()),
            ),
            (
                r#"{"structured_outputs":{"choice":["a","b"]}}"#,
                "structured_outputs.choice",
                choice(),
            ),
            (
                r#"{"structured_outputs":{"grammar":"root ::= \"a\""}}"#,
                "structured_outputs.grammar",
                grammar(),
            ),
            (
                r#"{"structured_outputs":{"json_object":true}}"#,
                "structured_outputs.json_object",
                GrammarSource::JsonObject,
            ),
            (
                r#"{"structured_outputs":{"json":{"type":"null"},"disable_any_whitespace":true}}"#,
                "structured_outputs.json",
                GrammarSource::JsonSchema(
                    r#"{"type":"null","x-guidance":{"whitespace_flexible":false}}"#.into(),
                ),
            ),
            (r#"{"guided_json":{"type":"null"}}"#, "guided_json", schema()),
            (r#"{"guided_regex":"a"}"#, "guided_regex", GrammarSource::Regex("a".into())),
            (r#"{"guided_choice":["a","b"]}"#, "guided_choice", choice()),
            (r#"{"guided_grammar":"root ::= \"a\""}"#, "guided_grammar", grammar()),
            (r#"{"json_schema":"{\"type\":\"null\"}"}"#, "json_schema", schema()),
            (r#"{"regex":"a"}"#, "regex", GrammarSource::Regex("a".into())),
            (r#"{"ebnf":"root ::= \"a\""}"#, "ebnf", grammar()),
            (r#"{"grammar":"root ::= \"a\""}"#, "grammar", grammar()),
        ] {
            let found = parse(body).unwrap().unwrap_or_else(|| panic!("{body} has none"));
            assert_eq!((&*found.field, found.source), (field, source), "{body}");
        }
        for body in [
            r#"{"response_format":{"type":"text"},"regex":"","grammar":""}"#,
            r#"{"response_format":null,"structured_outputs":null,"guided_json":null}"#,
        ] {
            assert_eq!(parse(body), Ok(None), "{body}");
        }
    }

    #[test]
    fn an_error_names_the_field() {
        let long = format!(r#"{{"regex":"{}"}}"#, "a".repeat(GRAMMAR_BYTES_MAX + 1));
        for (body, param) in [
            (r#"{"response_format":{}}"#, "response_format.type"),
            (r#"{"response_format":{"type":"grammar"}}"#, "response_format.type"),
            (r#"{"response_format":{"type":"json_schema"}}"#, "response_format.json_schema"),
            (
                r#"{"response_format":{"type":"json_schema","json_schema":{}}}"#,
                "response_format.json_schema.schema",
            ),
            (r#"{"structured_outputs":{}}"#, "structured_outputs"),
            (r#"{"structured_outputs":{"regex":"a","json":{}}}"#, "structured_outputs"),
            (
                r#"{"structured_outputs":{"structural_tag":"{}"}}"#,
                "structured_outputs.structural_tag",
            ),
            (
                r#"{"structured_outputs":{"regex":"a","whitespace_pattern":" "}}"#,
                "structured_outputs.whitespace_pattern",
            ),
            (r#"{"guided_json":[1]}"#, "guided_json"),
            (r#"{"json_schema":"{"}"#, "json_schema"),
            (r#"{"guided_choice":[]}"#, "guided_choice"),
            (r#"{"guided_choice":["a",""]}"#, "guided_choice"),
            (r#"{"regex":1}"#, "regex"),
            (r#"{"regex":"a","ebnf":"b"}"#, "ebnf"),
            (&long, "regex"),
        ] {
            let error = parse(body).expect_err(body);
            assert_eq!((error.status, error.param.as_deref()), (400, Some(param)), "{error}");
        }
    }
}

//! The value of an argument that a model wrote as plain text, by the type in its JSON schema.

use super::python_literal;
use serde_json::{Map, Value};

/// Deepest nesting of `anyOf` and the like that is followed.
const DEPTH_MAX: usize = 8;

/// Types of JSON schemas.
#[derive(Clone, Copy, Default, Debug)]
struct Types {
    string: bool,
    integer: bool,
    number: bool,
    boolean: bool,
    /// Arrays and objects.
    nested: bool,
    null: bool,
    /// A reference or a constant: any JSON.
    any: bool,
}

/// The JSON of `text` for the property `name` of the object that `schema` describes. A text that
/// does not fit the type stays a text.
pub(super) fn read(text: &str, name: &str, schema: &Map<String, Value>) -> String {
    let property = schema.get("properties").and_then(|properties| properties.get(name));
    let mut types = Types::default();
    collect(property.unwrap_or(&Value::Null), &mut types, 0);
    let bare = text.trim();
    if bare.eq_ignore_ascii_case("null") && (types.null || !types.string) {
        return "null".into();
    }
    match &*bare.to_ascii_lowercase() {
        "true" | "1" if types.boolean => return "true".into(),
        "false" | "0" if types.boolean => return "false".into(),
        _ => {}
    }
    match serde_json::from_str(bare) {
        // A number stays as it is written, because it can have any length.
        Ok(_) if types.any => return bare.into(),
        Ok(Value::Number(_)) if types.number => return bare.into(),
        Ok(Value::Number(_)) if types.integer && !bare.contains(['.', 'e', 'E']) => {
            return bare.into();
        }
        Ok(value @ (Value::Array(_) | Value::Object(_))) if types.nested => {
            return value.to_string();
        }
        Ok(_) => {}
        Err(_) if types.nested => {
            if let Some(value @ (Value::Array(_) | Value::Object(_))) = python_literal::parse(bare)
            {
                return value.to_string();
            }
        }
        Err(_) => {}
    }
    Value::from(text).to_string()
}

/// Whether a value of this schema can be any text, or has a type that is not known.
pub fn is_text(schema: &Value) -> bool {
    let mut types = Types::default();
    collect(schema, &mut types, 0);
    let has_type = types.number || types.integer || types.boolean || types.nested || types.null;
    types.string || !has_type && !types.any
}

/// Collects the types that a schema allows. Without a type, it is a string.
fn collect(schema: &Value, types: &mut Types, depth: usize) {
    let mut add = |name: &str| match name {
        "integer" => types.integer = true,
        "number" => (types.number, types.integer) = (true, true),
        "boolean" => types.boolean = true,
        "array" | "object" => types.nested = true,
        "null" => types.null = true,
        _ => types.string = true,
    };
    match schema.get("type") {
        Some(Value::String(name)) => add(name),
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).for_each(add),
        _ => {
            for value in schema.get("enum").and_then(Value::as_array).into_iter().flatten() {
                add(match value {
                    Value::Number(_) => "number",
                    Value::Bool(_) => "boolean",
                    Value::Array(_) | Value::Object(_) => "object",
                    Value::Null => "null",
                    Value::String(_) => "string",
                });
            }
            let has_fields = schema.get("properties").is_some() || schema.get("items").is_some();
            if has_fields {
                add("object");
            }
            if schema.get("$ref").is_some() || schema.get("const").is_some() {
                types.any = true;
            }
        }
    }
    if depth == DEPTH_MAX {
        return;
    }
    for key in ["anyOf", "oneOf", "allOf"] {
        for part in schema.get(key).and_then(Value::as_array).into_iter().flatten() {
            collect(part, types, depth + 1);
        }
    }
}

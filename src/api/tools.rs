//! Tools of a chat request: which functions the model can call, and which it must call.
//!
//! Invariants: a function has a name, and its parameters are the JSON schema of an object. Names
//! are unique. Not here: how a model writes a call (`model::answer`), and the check of the schemas,
//! which the compiler of grammars does.

use super::error::ApiError;
use super::fields::{Fields, nodes};
use super::structured_output::StructuredOutput;
use crate::limits::{JSON_NODES_MAX, NAME_BYTES_MAX, TOOLS_MAX};
use crate::model::answer::{ToolFunction, is_name_character};
use crate::model::grammar::{CallGrammar, GrammarSource};
use serde_json::{Map, Value};
use std::collections::HashSet;
use std::sync::Arc;

/// The tools of a request, at least one.
#[derive(Clone, PartialEq, Debug)]
pub struct Tools {
    /// The tools as sent, for the chat template.
    pub definitions: Vec<Value>,
    /// Their functions.
    pub functions: Arc<[ToolFunction]>,
    /// Whether the answer can have several calls.
    pub is_parallel: bool,
}

/// Which calls the answer has.
#[derive(Clone, PartialEq, Debug)]
enum ToolChoice {
    Auto,
    None,
    Required,
    /// A call of this function.
    Function(String),
}

/// Reads the fields of tools. Returns the tools that the model can call, and what the answer must
/// be, if it must call one.
pub(super) fn read(
    fields: &mut Fields<'_>,
) -> Result<(Option<Tools>, Option<StructuredOutput>), ApiError> {
    let definitions = fields.tree::<Vec<Value>>("tools", "must be a list of objects")?;
    let definitions = definitions.unwrap_or_default();
    if definitions.len() > TOOLS_MAX {
        let why = format!("has {} items; at most {TOOLS_MAX} are allowed", definitions.len());
        return Err(fields.invalid("tools", why));
    }
    let mut functions: Vec<ToolFunction> = Vec::with_capacity(definitions.len());
    let mut names = HashSet::new();
    for (index, definition) in definitions.iter().enumerate() {
        let function = read_function(definition, index)?;
        if !names.insert(function.name.clone()) {
            let path = format!("tools[{index}].function.name");
            return Err(ApiError::invalid(path, "is the name of an earlier tool"));
        }
        functions.push(function);
    }
    let choice = read_choice(fields)?;
    let is_parallel = fields.flag("parallel_tool_calls", true)?;
    let called = match &choice {
        ToolChoice::Auto | ToolChoice::None => Vec::new(),
        ToolChoice::Required => functions.clone(),
        ToolChoice::Function(name) => {
            functions.iter().filter(|known| known.name == *name).cloned().collect()
        }
    };
    match &choice {
        ToolChoice::None => return Ok((None, None)),
        ToolChoice::Auto => {}
        ToolChoice::Function(name) if called.is_empty() => {
            let why = format!("names `{name}`, which is not in `tools`");
            return Err(fields.invalid("tool_choice", why));
        }
        ToolChoice::Required if called.is_empty() => {
            return Err(fields.invalid("tool_choice", "needs `tools`"));
        }
        ToolChoice::Required | ToolChoice::Function(_) => {}
    }
    if functions.is_empty() {
        return Ok((None, None));
    }
    // A function that the request names is called once.
    let is_single = !is_parallel || matches!(choice, ToolChoice::Function(_));
    let forced = (!called.is_empty()).then(|| StructuredOutput {
        field: "tool_choice".into(),
        source: GrammarSource::Calls(CallGrammar { functions: called.into(), is_single }),
    });
    let tools = Tools { definitions, functions: functions.into(), is_parallel };
    Ok((Some(tools), forced))
}

fn read_function(definition: &Value, index: usize) -> Result<ToolFunction, ApiError> {
    let at = |path: &str| format!("tools[{index}]{path}");
    let kind = definition.get("type").and_then(Value::as_str);
    match kind {
        Some("function") => {}
        Some(_) => return Err(ApiError::unsupported(at(".type"))),
        None => return Err(ApiError::invalid(at(".type"), "must be `function`")),
    }
    let Some(function) = definition.get("function").and_then(Value::as_object) else {
        return Err(ApiError::invalid(at(".function"), "must be an object"));
    };
    let name = function.get("name").and_then(Value::as_str).unwrap_or_default();
    if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.chars().all(is_name_character) {
        let must =
            format!("must be a string of 1 to {NAME_BYTES_MAX} bytes: letters, digits and `_-./:`");
        return Err(ApiError::invalid(at(".function.name"), must));
    }
    let parameters = match function.get("parameters") {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(schema)) => schema.clone(),
        Some(_) => {
            return Err(ApiError::invalid(at(".function.parameters"), "must be a JSON schema"));
        }
    };
    Ok(ToolFunction { name: name.to_owned(), parameters })
}

fn read_choice(fields: &mut Fields<'_>) -> Result<ToolChoice, ApiError> {
    let must = "must be `auto`, `none`, `required` or an object that names a function";
    let choice = match fields.tree::<Value>("tool_choice", must)? {
        None => ToolChoice::Auto,
        Some(Value::String(name)) => match &*name {
            "auto" => ToolChoice::Auto,
            "none" => ToolChoice::None,
            "required" => ToolChoice::Required,
            _ => return Err(fields.invalid("tool_choice", must)),
        },
        Some(Value::Object(choice)) => {
            if choice.get("type").and_then(Value::as_str) != Some("function") {
                return Err(ApiError::unsupported(fields.name_of("tool_choice.type")));
            }
            let name = choice.get("function").and_then(|function| function.get("name"));
            match name.and_then(Value::as_str) {
                Some(name) => ToolChoice::Function(name.to_owned()),
                None => {
                    return Err(fields.invalid("tool_choice.function.name", "must be a string"));
                }
            }
        }
        Some(_) => return Err(fields.invalid("tool_choice", must)),
    };
    Ok(choice)
}

/// Makes the arguments of earlier calls objects, as templates expect them. OpenAI has them as text.
pub(super) fn parse_arguments(
    message: &mut Map<String, Value>,
    index: usize,
) -> Result<(), ApiError> {
    let at = |path: &str| format!("messages[{index}].{path}");
    let calls = match message.get_mut("tool_calls") {
        None => return Ok(()),
        Some(Value::Null) => {
            message.remove("tool_calls");
            return Ok(());
        }
        Some(Value::Array(calls)) => calls,
        Some(_) => return Err(ApiError::invalid(at("tool_calls"), "must be a list")),
    };
    let mut count = 0;
    for (number, call) in calls.iter_mut().enumerate() {
        let path = |rest: &str| at(&format!("tool_calls[{number}].function{rest}"));
        let Some(function) = call.get_mut("function").and_then(Value::as_object_mut) else {
            return Err(ApiError::invalid(path(""), "must be an object"));
        };
        if !function.get("name").is_some_and(Value::is_string) {
            return Err(ApiError::invalid(path(".name"), "must be a string"));
        }
        let arguments = match function.get("arguments") {
            None | Some(Value::Null) => Value::Object(Map::new()),
            Some(Value::String(text)) if text.trim().is_empty() => Value::Object(Map::new()),
            Some(Value::String(text)) => {
                count += nodes(text);
                if count > JSON_NODES_MAX {
                    let why = format!("holds {count} values; at most {JSON_NODES_MAX} are allowed");
                    return Err(ApiError::invalid(path(".arguments"), why));
                }
                serde_json::from_str(text).map_err(|_| {
                    ApiError::invalid(path(".arguments"), "must be JSON in a string")
                })?
            }
            Some(Value::Object(arguments)) => Value::Object(arguments.clone()),
            Some(_) => {
                return Err(ApiError::invalid(path(".arguments"), "must be JSON in a string"));
            }
        };
        function.insert("arguments".into(), arguments);
    }
    // Some templates ask whether the field is there, not whether it has calls.
    if calls.is_empty() {
        message.remove("tool_calls");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOOLS: &str = r#""tools":[{"type":"function","function":{"name":"f",
        "parameters":{"type":"object"}}},{"type":"function","function":{"name":"g"}}]"#;

    fn read(rest: &str) -> Result<(Option<Tools>, Option<StructuredOutput>), ApiError> {
        super::read(&mut Fields::parse(format!("{{{rest}}}").as_bytes()).unwrap())
    }

    /// The functions that must be called, and whether once.
    fn forced(rest: &str) -> Option<(Vec<String>, bool)> {
        let (_, forced) = read(&format!("{TOOLS},{rest}")).unwrap();
        let GrammarSource::Calls(calls) = forced?.source else { panic!("other grammar") };
        Some((calls.functions.iter().map(|f| f.name.clone()).collect(), calls.is_single))
    }

    #[test]
    fn the_choice_decides_which_calls_are_forced() {
        let both = || vec!["f".to_owned(), "g".to_owned()];
        assert_eq!(read("").unwrap(), (None, None));
        assert_eq!(read(r#""tools":[],"tool_choice":"auto""#).unwrap(), (None, None));
        let (tools, none) = read(TOOLS).unwrap();
        let tools = tools.unwrap();
        assert_eq!((tools.definitions.len(), tools.functions.len(), none), (2, 2, None));
        assert!(tools.is_parallel);
        assert_eq!(read(&format!("{TOOLS},\"tool_choice\":\"none\"")).unwrap(), (None, None));
        assert_eq!(forced(r#""tool_choice":"auto""#), None);
        assert_eq!(forced(r#""tool_choice":"required""#), Some((both(), false)));
        let single = r#""tool_choice":"required","parallel_tool_calls":false"#;
        assert_eq!(forced(single), Some((both(), true)));
        let named = r#""tool_choice":{"type":"function","function":{"name":"g"}}"#;
        assert_eq!(forced(named), Some((vec!["g".into()], true)));
    }

    #[test]
    fn tools_are_refused_by_their_place() {
        let tool =
            |function: &str| format!(r#""tools":[{{"type":"function","function":{function}}}]"#);
        let unknown = r#""tool_choice":{"type":"function","function":{"name":"h"}}"#;
        let unknown = format!("{TOOLS},{unknown}");
        let twice = r#""tools":[{"type":"function","function":{"name":"f"}},
            {"type":"function","function":{"name":"f"}}]"#;
        for (rest, param) in [
            (r#""tools":{}"#.to_owned(), "tools"),
            (r#""tools":[7]"#.to_owned(), "tools[0].type"),
            (r#""tools":[{"type":"web_search"}]"#.to_owned(), "tools[0].type"),
            (tool("7"), "tools[0].function"),
            (tool("{}"), "tools[0].function.name"),
            (tool(r#"{"name":"a b"}"#), "tools[0].function.name"),
            (tool(r#"{"name":"f","parameters":[]}"#), "tools[0].function.parameters"),
            (twice.to_owned(), "tools[1].function.name"),
            (r#""tool_choice":"required""#.to_owned(), "tool_choice"),
            (format!("{TOOLS},\"tool_choice\":\"some\""), "tool_choice"),
            (format!("{TOOLS},\"tool_choice\":{{\"type\":\"custom\"}}"), "tool_choice.type"),
            (
                format!("{TOOLS},\"tool_choice\":{{\"type\":\"function\"}}"),
                "tool_choice.function.name",
            ),
            (unknown, "tool_choice"),
        ] {
            let error = read(&rest).expect_err(&rest);
            assert_eq!((error.status, error.param.as_deref()), (400, Some(param)), "{error}");
        }
    }
}

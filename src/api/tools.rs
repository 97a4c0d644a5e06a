//! Tools of a chat request: which functions the model can call, and which it must call.
//!
//! Invariants: a function has a name, and its parameters are the JSON schema of an object. Names
//! are unique. Not here: how a model writes a call (`model::answer`), and the check of the schemas,
//! which the compiler of grammars does.

use super::error::ApiError;
use super::fields::Fields;
use super::structured_output::StructuredOutput;
use crate::limits::{NAME_BYTES_MAX, TOOLS_MAX};
use crate::model::answer::ToolFunction;
use crate::model::grammar::{CallGrammar, GrammarSource};
use serde_json::{Map, Value};
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
    for (index, definition) in definitions.iter().enumerate() {
        let function = read_function(definition, index)?;
        if functions.iter().any(|earlier| earlier.name == function.name) {
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
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        let must = format!("must be a string of 1 to {NAME_BYTES_MAX} bytes");
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
    let choice = match fields.get::<Value>("tool_choice", must)? {
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
            Some(Value::String(text)) => serde_json::from_str(text)
                .map_err(|_| ApiError::invalid(path(".arguments"), "must be JSON in a string"))?,
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

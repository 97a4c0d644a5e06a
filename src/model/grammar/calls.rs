//! Grammars for answers that must call a function, in the format of the model.
//!
//! Invariant: the reader of the format (`model::answer`) finds calls in each text of such a
//! grammar. Their arguments are valid for the schema of the function.

use super::{GrammarError, WHITESPACE_OPTIONS, blank_options};
use crate::limits::{GRAMMAR_BYTES_MAX, TOOL_SCHEMAS_BYTES_MAX};
use crate::model::answer::{ToolFormat, ToolFunction, is_name_character, is_text, special_token};
use crate::model::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::sync::Arc;

/// Which calls an answer must have.
#[derive(Clone, PartialEq, Debug)]
pub struct CallGrammar {
    /// The functions to choose from, at least one.
    pub functions: Arc<[ToolFunction]>,
    /// Whether there is one call only.
    pub is_single: bool,
}

/// Writes rules in Lark.
struct Rules<'a> {
    tokenizer: &'a Tokenizer,
    text: String,
    /// Number of rules with a made name.
    made: usize,
}

/// Refuses schemas that are too long for the compiler, or that the format cannot write.
pub(super) fn check(calls: &CallGrammar, format: ToolFormat) -> Result<(), GrammarError> {
    let mut all = 0;
    for function in calls.functions.iter() {
        if matches!(format, ToolFormat::Qwen3Coder | ToolFormat::Pythonic) {
            check_parameters(function)?;
        }
        let bytes = json!(function.parameters).to_string().len();
        if bytes > GRAMMAR_BYTES_MAX {
            return Err(GrammarError::new(format_args!(
                "the parameters of `{}` have {bytes} bytes; at most {GRAMMAR_BYTES_MAX} are \
                 allowed",
                function.name
            )));
        }
        all += bytes;
    }
    match all > TOOL_SCHEMAS_BYTES_MAX {
        true => Err(GrammarError::new(format_args!(
            "the parameters of all tools have {all} bytes; at most {TOOL_SCHEMAS_BYTES_MAX} are \
             allowed"
        ))),
        false => Ok(()),
    }
}

/// Refuses what cannot be written as a list of named values.
fn check_parameters(function: &ToolFunction) -> Result<(), GrammarError> {
    let ToolFunction { name, parameters } = function;
    let refuse = |what: &str| {
        let why = format!("the parameters of `{name}` have {what}, which this model cannot write");
        Err(GrammarError::new(why))
    };
    for keyword in ["$ref", "anyOf", "oneOf", "allOf", "patternProperties"] {
        if parameters.contains_key(keyword) {
            return refuse(&format!("`{keyword}`"));
        }
    }
    for (property, ..) in properties_of(parameters) {
        if property.is_empty() || !property.chars().all(is_name_character) {
            return refuse(&format!("the name {property:?}"));
        }
    }
    Ok(())
}

/// The grammar in Lark.
pub(super) fn to_lark(calls: &CallGrammar, format: ToolFormat, tokenizer: &Tokenizer) -> String {
    let mut rules = Rules { tokenizer, text: String::new(), made: 0 };
    // Newer models of Mistral have a tag behind the name.
    let is_tagged = special_token(tokenizer, ToolFormat::Mistral.tags()[1]).is_some();
    let write = |function: &ToolFunction| match format {
        ToolFormat::Hermes => rules.json(function, "arguments"),
        ToolFormat::Llama3Json => rules.json(function, "parameters"),
        ToolFormat::Mistral if is_tagged => rules.tagged(function),
        ToolFormat::Mistral => rules.json(function, "arguments"),
        ToolFormat::Qwen3Coder => rules.parameters(function),
        ToolFormat::Pythonic => rules.python(function),
    };
    let functions: Vec<String> = calls.functions.iter().map(write).collect();
    let call = rules.rule(&functions.join(" | "));
    let repeat = |call: &str, separator: &str| match calls.is_single {
        true => call.to_owned(),
        false => format!("{call} ({separator} {call})*"),
    };
    let start = match format {
        ToolFormat::Hermes | ToolFormat::Qwen3Coder => {
            let (opening, closing) = (rules.tag(format.tags()[0]), rules.tag(format.tags()[1]));
            let call = rules.rule(&format!(r#"{opening} "\n" {call} "\n" {closing}"#));
            repeat(&call, r#""\n""#)
        }
        ToolFormat::Llama3Json => repeat(&call, r#""; ""#),
        ToolFormat::Mistral if is_tagged => repeat(&call, ""),
        ToolFormat::Mistral => {
            format!(r#"{} " [" {} "]""#, rules.tag(format.tags()[0]), repeat(&call, r#"", ""#))
        }
        ToolFormat::Pythonic => format!(r#""[" {} "]""#, repeat(&call, r#"", ""#)),
    };
    format!("start: {start}\n{}", rules.text)
}

/// A text as a literal of Lark.
fn literal(text: &str) -> String {
    json!(text).to_string()
}

impl Rules<'_> {
    /// Adds a rule and returns its name.
    fn rule(&mut self, body: &str) -> String {
        let name = format!("r{}", self.made);
        self.made += 1;
        let _ = writeln!(self.text, "{name}: {body}");
        name
    }

    /// A tag, which can be a special token.
    fn tag(&self, text: &str) -> String {
        match special_token(self.tokenizer, text) {
            Some(id) => format!("<[{id}]>"),
            None => literal(text),
        }
    }

    /// `{"name": "f", "arguments": ...}`
    fn json(&mut self, function: &ToolFunction, key: &str) -> String {
        let head = format!("{{\"name\": {}, \"{key}\": ", json!(function.name));
        let arguments = schema_of_arguments(&function.parameters);
        self.rule(&format!("{} %json {arguments} \"}}\"", literal(&head)))
    }

    /// `[TOOL_CALLS]f[ARGS]...`
    fn tagged(&mut self, function: &ToolFunction) -> String {
        let arguments = schema_of_arguments(&function.parameters);
        let [opening, separator] = [0, 1].map(|at| self.tag(ToolFormat::Mistral.tags()[at]));
        let name = literal(&function.name);
        self.rule(&format!("{opening} {name} {separator} %json {arguments}"))
    }

    /// `<function=f>` and its parameters.
    fn parameters(&mut self, function: &ToolFunction) -> String {
        let mut body = literal(&format!("<function={}>\n", function.name));
        for (name, schema, is_required) in properties_of(&function.parameters) {
            let head = literal(&format!("<parameter={name}>\n"));
            let value = self.parameter_value(&schema);
            let optional = if is_required { "" } else { "?" };
            let _ = write!(body, " ({head} {value}){optional}");
        }
        self.rule(&format!("{body} \"</function>\""))
    }

    /// The value of a parameter, with its closing tag.
    fn parameter_value(&mut self, schema: &Value) -> String {
        let end = literal("\n</parameter>\n");
        let texts: Option<Vec<&str>> = schema
            .get("enum")
            .and_then(Value::as_array)
            .map(|values| values.iter().filter_map(Value::as_str).collect());
        match texts {
            Some(texts) if is_text(schema) && !texts.is_empty() => {
                let texts: Vec<String> = texts.into_iter().map(literal).collect();
                self.rule(&format!("({}) {end}", texts.join(" | ")))
            }
            _ if is_text(schema) => {
                let name = format!("r{}", self.made);
                self.made += 1;
                let _ = writeln!(self.text, "{name}[suffix={end}]: /(?s:.*)/");
                name
            }
            _ => self.rule(&format!("%json {} {end}", with_blanks(schema.clone()))),
        }
    }

    /// `f(x=1, y="a")`. The optional arguments come behind the required ones.
    fn python(&mut self, function: &ToolFunction) -> String {
        let mut required = Vec::new();
        let mut optional = Vec::new();
        for (name, schema, is_required) in properties_of(&function.parameters) {
            let value = with_blanks(schema);
            let argument = self.rule(&format!("{} %json {value}", literal(&format!("{name}="))));
            if is_required { required.push(argument) } else { optional.push(argument) }
        }
        let behind = |from: usize| -> String {
            optional[from..].iter().map(|argument| format!(" (\", \" {argument})?")).collect()
        };
        let arguments = match required.is_empty() {
            false => format!("{}{}", required.join(" \", \" "), behind(0)),
            true => {
                let first =
                    |(at, argument): (usize, &String)| format!("{argument}{}", behind(at + 1));
                let each: Vec<String> = optional.iter().enumerate().map(first).collect();
                if each.is_empty() { String::new() } else { format!("({})?", each.join(" | ")) }
            }
        };
        self.rule(&format!("{} {arguments} \")\"", literal(&format!("{}(", function.name))))
    }
}

/// The schema of a function's arguments. Without a word about it, no other arguments are allowed.
fn schema_of_arguments(parameters: &Map<String, Value>) -> Value {
    let mut schema = parameters.clone();
    schema.entry("type").or_insert_with(|| "object".into());
    let is_open = ["$ref", "anyOf", "oneOf", "allOf"].iter().any(|key| schema.contains_key(*key));
    if !is_open {
        schema.entry("properties").or_insert_with(|| json!({}));
        schema.entry("additionalProperties").or_insert(Value::Bool(false));
    }
    with_blanks(Value::Object(schema))
}

/// The properties of an object: name, schema, and whether it must be there. A schema gets the
/// definitions of the object, because it can refer to them.
fn properties_of(parameters: &Map<String, Value>) -> Vec<(String, Value, bool)> {
    let required = parameters.get("required").and_then(Value::as_array);
    let properties = parameters.get("properties").and_then(Value::as_object);
    let complete = |(name, schema): (&String, &Value)| {
        let mut schema = schema.clone();
        let refers = schema.to_string().contains("\"$ref\"");
        if let Some(fields) = schema.as_object_mut().filter(|_| refers) {
            for key in ["$defs", "definitions"] {
                if let Some(definitions) = parameters.get(key) {
                    fields.entry(key).or_insert_with(|| definitions.clone());
                }
            }
        }
        let is_required = required.is_some_and(|names| names.iter().any(|other| other == name));
        (name.clone(), schema, is_required)
    };
    properties.into_iter().flatten().map(complete).collect()
}

/// The same schema with the whitespace of all schemas here.
fn with_blanks(mut schema: Value) -> Value {
    if let Some(fields) = schema.as_object_mut() {
        fields.entry(WHITESPACE_OPTIONS).or_insert_with(blank_options);
    }
    schema
}

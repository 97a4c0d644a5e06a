//! The readers beside the parsers of vLLM and SGLang, as `tools/parser-goldens` recorded them.
//!
//! Where the peers differ, a reader does as one of them, in a whole answer or in a stream. Each
//! case in which it does as none of them is in [`OWN_WAYS`], with the reason.

use super::tests::read;
use super::*;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::LazyLock;

#[derive(Deserialize)]
struct Goldens {
    tools: Vec<Value>,
    tool_cases: Vec<ToolCase>,
    reasoning_cases: Vec<ReasoningCase>,
}

#[derive(Deserialize)]
struct ToolCase {
    format: String,
    name: String,
    text: String,
    peers: BTreeMap<String, Outcome>,
}

#[derive(Deserialize)]
struct Outcome {
    content: Option<String>,
    calls: Vec<RecordedCall>,
}

#[derive(Deserialize)]
struct RecordedCall {
    name: String,
    arguments: String,
}

#[derive(Deserialize)]
struct ReasoningCase {
    format: String,
    name: String,
    text: String,
    peers: BTreeMap<String, Separated>,
}

#[derive(Deserialize)]
struct Separated {
    reasoning: Option<String>,
    content: Option<String>,
}

static GOLDENS: LazyLock<Goldens> = LazyLock::new(|| {
    serde_json::from_str(include_str!("../../../tests/goldens/answers.json")).unwrap()
});

/// Cases in which a reader does as no peer: (format, name, reason).
const OWN_WAYS: &[(&str, &str, &str)] = &[
    ("hermes", "malformed JSON", BROKEN),
    ("hermes", "malformed, then a good call", "the good call counts, the other is content"),
    ("qwen3_coder", "JSON in the tag", NO_CALL),
    ("qwen3_coder", "truncated after the tag", NO_CALL),
    ("qwen3_coder", "spaces in the tags", "names have no spaces around them"),
    ("llama3_json", "unknown function", UNKNOWN),
    ("llama3_json", "malformed JSON", BROKEN),
    ("llama3_json", "single quotes", "what is no JSON is content, without the tag"),
    ("llama3_json", "truncated in the parameters", BROKEN),
    ("llama3_json", "truncated in the second call", BROKEN),
    ("mistral", "list: malformed JSON", BROKEN),
    ("mistral", "args: with a call id", "the id is no part of the name"),
    ("mistral", "bare: no arguments", "a name without arguments can be cut off"),
    ("mistral", "bare: text after", "text behind a call is content"),
    ("mistral", "truncated list, in the name", NO_CALL),
    ("mistral", "truncated after the tag", NO_CALL),
    ("mistral", "truncated args, in the name", "a name that is cut off is no name"),
    ("pythonic", "float that is infinite", LITERAL),
    ("pythonic", "raw newline in a string", LITERAL),
    ("pythonic", "an expression", LITERAL),
    ("pythonic", "call and a number", "the call counts, the rest is content"),
    ("pythonic", "unknown function", UNKNOWN),
    ("pythonic", "unknown function and a known one", UNKNOWN),
    ("pythonic", "malformed, no closing quote", BROKEN),
    ("pythonic", "malformed, no closing parenthesis", BROKEN),
    ("pythonic", "truncated in a string", BROKEN),
    ("pythonic", "truncated after a value", BROKEN),
    ("pythonic", "truncated in the second call", BROKEN),
    ("qwen3", "a tool call in the reasoning", NO_TOOLS),
    ("qwen3", "a tool call without reasoning", NO_TOOLS),
];

const BROKEN: &str = "a call that breaks off keeps what came; its arguments are no JSON, so no \
                      client runs it";
const UNKNOWN: &str = "without a tag, only a function of the request begins a call";
const LITERAL: &str = "a value that is no literal becomes a text";
const NO_CALL: &str = "text behind the tag that is no call is content, with the tag";
const NO_TOOLS: &str = "without tools in the request, the tag is text";

fn functions() -> Arc<[ToolFunction]> {
    let function = |tool: &Value| ToolFunction {
        name: tool["function"]["name"].as_str().unwrap().into(),
        parameters: tool["function"]["parameters"].as_object().cloned().unwrap_or_default(),
    };
    GOLDENS.tools.iter().map(function).collect()
}

fn format_of(name: &str) -> ToolFormat {
    match name {
        "hermes" => ToolFormat::Hermes,
        "qwen3_coder" => ToolFormat::Qwen3Coder,
        "llama3_json" => ToolFormat::Llama3Json,
        "mistral" => ToolFormat::Mistral,
        "pythonic" => ToolFormat::Pythonic,
        other => panic!("{other}"),
    }
}

/// Content without the whitespace around it, and calls with their arguments as values. Arguments
/// that are no JSON stay text.
fn compared<'t>(
    content: &str,
    calls: impl Iterator<Item = (&'t str, &'t str)>,
) -> (String, Vec<(String, Value)>) {
    let value = |text: &str| serde_json::from_str(text).unwrap_or_else(|_| text.into());
    (content.trim().into(), calls.map(|(name, text)| (name.into(), value(text))).collect())
}

/// Reads a text whole, by character, and cut once at each place. All must be equal.
fn read_each_way(rules: &AnswerRules, start: ReasoningStart, text: &str) -> AnswerParts {
    let whole = read(rules, start, [text]);
    for (at, c) in text.char_indices() {
        let (left, right) = text.split_at(at);
        assert_eq!(read(rules, start, [left, right]), whole, "cut at {at} before {c:?}: {text}");
    }
    let characters: Vec<String> = text.chars().map(String::from).collect();
    assert_eq!(read(rules, start, characters.iter().map(String::as_str)), whole, "{text}");
    whole
}

#[test]
fn calls_are_read_as_a_peer_reads_them() {
    let mut strays = Vec::new();
    for case in &GOLDENS.tool_cases {
        let rules = AnswerRules {
            tools: Some(format_of(&case.format)),
            functions: functions(),
            is_single_call: false,
            reasoning: None,
            delivery: ReasoningDelivery::Pieces,
            has_grammar: false,
            tags: [].into(),
        };
        let parts = read_each_way(&rules, ReasoningStart::Over, &case.text);
        let calls = parts.calls.iter();
        let ours = compared(
            &parts.content,
            calls.map(|call| (call.name.as_deref().unwrap(), call.arguments.as_str())),
        );
        let agrees = case.peers.values().any(|peer| {
            let calls = peer.calls.iter().map(|call| (&*call.name, &*call.arguments));
            compared(peer.content.as_deref().unwrap_or(""), calls) == ours
        });
        let is_own = OWN_WAYS
            .iter()
            .any(|(format, name, _)| (*format, *name) == (&*case.format, &*case.name));
        if agrees == is_own {
            strays.push(format!("{} {}: {:?} -> {ours:?}", case.format, case.name, case.text));
        }
    }
    assert!(strays.is_empty(), "{}", strays.join("\n"));
}

#[test]
fn reasoning_is_read_as_a_peer_reads_it() {
    let mut strays = Vec::new();
    for case in &GOLDENS.reasoning_cases {
        let rules = AnswerRules {
            tools: None,
            functions: [].into(),
            is_single_call: false,
            reasoning: Some(match &*case.format {
                "qwen3" => ReasoningFormat::Qwen3,
                _ => ReasoningFormat::DeepseekR1,
            }),
            delivery: ReasoningDelivery::Pieces,
            has_grammar: false,
            tags: [].into(),
        };
        for start in [ReasoningStart::Outside, ReasoningStart::Inside] {
            let parts = read_each_way(&rules, start, &case.text);
            let ours = (parts.reasoning.trim(), parts.content.trim());
            let agrees = case.peers.values().any(|peer| {
                let [reasoning, content] = [&peer.reasoning, &peer.content]
                    .map(|text| text.as_deref().unwrap_or("").trim());
                (reasoning, content) == ours
            });
            let is_own = OWN_WAYS
                .iter()
                .any(|(format, name, _)| (*format, *name) == (&*case.format, &*case.name));
            if !agrees && !is_own {
                strays.push(format!(
                    "{} {} {start:?}: {:?} -> {ours:?}",
                    case.format, case.name, case.text
                ));
            }
        }
    }
    assert!(strays.is_empty(), "{}", strays.join("\n"));
}

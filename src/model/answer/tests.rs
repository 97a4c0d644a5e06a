//! Readers of all formats: what is no call, what breaks off, and texts cut at any place.

use super::*;
use proptest::prelude::*;
use serde_json::json;

fn functions() -> Arc<[ToolFunction]> {
    let function = |name: &str, parameters: Value| ToolFunction {
        name: name.into(),
        parameters: parameters.as_object().cloned().unwrap_or_default(),
    };
    [
        function("f", json!({"properties": {"x": {"type": "integer"}, "s": {"type": "string"}}})),
        function("g", json!({})),
    ]
    .into()
}

fn rules(tools: ToolFormat) -> AnswerRules {
    AnswerRules {
        tools: Some(tools),
        functions: functions(),
        is_single_call: false,
        reasoning: Some(ReasoningFormat::Qwen3),
        delivery: ReasoningDelivery::Pieces,
        has_grammar: false,
        tags: [].into(),
    }
}

/// All parts of an answer that comes in these pieces.
pub(super) fn read<'t>(
    rules: &AnswerRules,
    start: ReasoningStart,
    pieces: impl IntoIterator<Item = &'t str>,
) -> AnswerParts {
    let mut reader = AnswerReader::new(rules, start);
    let mut all = AnswerParts::default();
    let mut add = |parts: AnswerParts| {
        all.reasoning.push_str(&parts.reasoning);
        all.content.push_str(&parts.content);
        for call in parts.calls {
            match &call.name {
                Some(_) => {
                    assert_eq!(call.index, all.calls.len(), "calls begin in their order");
                    all.calls.push(call);
                }
                None => {
                    let last = all.calls.last_mut().unwrap();
                    assert_eq!(call.index, last.index, "only the last call grows");
                    last.arguments.push_str(&call.arguments);
                }
            }
        }
    };
    for piece in pieces {
        let mut parts = AnswerParts::default();
        reader.push(piece, &mut parts);
        add(parts);
    }
    let mut parts = AnswerParts::default();
    reader.finish(&mut parts);
    add(parts);
    all
}

fn whole(format: ToolFormat, text: &str) -> (String, Vec<(String, String)>) {
    let parts = read(&rules(format), ReasoningStart::Outside, [text]);
    let calls = parts.calls.into_iter();
    (parts.content, calls.map(|call| (call.name.unwrap(), call.arguments)).collect())
}

fn call(name: &str, arguments: &str) -> (String, String) {
    (name.into(), arguments.into())
}

#[test]
fn a_call_that_is_none_stays_content() {
    use ToolFormat::{Hermes, Llama3Json, Mistral, Pythonic, Qwen3Coder};
    for (format, text) in [
        (Hermes, "a <tool_call>b</tool_call> c"),
        (Hermes, "<tool_call>{\"x\": 1}</tool_call>"),
        (Hermes, "<tool_call>"),
        (Hermes, "<tool_call>{\"na"),
        (Hermes, "a <tool_"),
        (Llama3Json, "{\"name\": \"Bob\", \"age\": 3}"),
        (Llama3Json, "{\"a\": [1]} and"),
        (Llama3Json, ", {\"name\": \"f\"}"),
        (Llama3Json, "{\"nam"),
        (Mistral, "[TOOL_CALLS] no call {"),
        (Mistral, "[TOOL_CALLS] [7]"),
        (Mistral, "[TOOL_CALLS]"),
        (Mistral, "[TOOL_"),
        (Pythonic, "see [1] and [x(y)] or [["),
        (Pythonic, "[f"),
        (Qwen3Coder, "a < b </tool"),
        (Qwen3Coder, "<tool_call>prose</tool_call> more"),
        (Qwen3Coder, "<tool_call>prose </to"),
        (Mistral, "[TOOL_CALLS]I call it[ARGS]"),
    ] {
        assert_eq!(whole(format, text), (text.to_owned(), vec![]), "{format:?}");
    }
}

#[test]
fn a_call_that_breaks_off_keeps_what_came() {
    use ToolFormat::{Hermes, Llama3Json, Mistral, Pythonic, Qwen3Coder};
    for (format, text, arguments) in [
        (Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": 1", "{\"x\": 1"),
        (
            Hermes,
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": 1]}</tool_call>",
            "{\"x\": 1]}",
        ),
        (Llama3Json, "{\"name\": \"f\", \"parameters\": {\"x", "{\"x"),
        (Llama3Json, "{\"name\": \"f\", \"parameters\": {]}", "{]}"),
        (Mistral, "[TOOL_CALLS]f[ARGS]{\"x\": [", "{\"x\": ["),
        (Pythonic, "[f(x=1, s='a", "{\"x\": 1"),
        (Qwen3Coder, "<tool_call><function=f><parameter=x>1</parameter><param", "{\"x\": 1"),
    ] {
        assert_eq!(whole(format, text), (String::new(), vec![call("f", arguments)]), "{text}");
    }
}

#[test]
fn text_behind_calls_stays_content() {
    use ToolFormat::{Hermes, Mistral, Pythonic, Qwen3Coder};
    for (format, text, content) in [
        (Qwen3Coder, "<function=f></function>\nDone.", "Done."),
        (Qwen3Coder, "<tool_call><function=f></function></tool_call>\nDone.", "Done."),
        (Mistral, "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {}}", ""),
        (Hermes, "<tool_call>[{\"name\": \"f\", \"arguments\": {}}", ""),
        (Pythonic, "[f(), hello]", ", hello]"),
        (Pythonic, "[f(), (x=1)]", ", (x=1)]"),
        (Hermes, "<tool_call><tool_call>{\"name\": \"f\"}</tool_call>", "<tool_call>"),
        (Mistral, "[TOOL_CALLS] [{\"name\": \"f\"}, junk", "junk"),
    ] {
        let (found, calls) = whole(format, text);
        assert_eq!((found.trim(), calls), (content, vec![call("f", "{}")]), "{text}");
    }
}

#[test]
fn no_call_is_inside_the_reasoning_of_a_forced_call() {
    let text = "<think><tool_call>x</think><tool_call>{\"name\": \"g\"}</tool_call>";
    let rules = AnswerRules { has_grammar: true, ..rules(ToolFormat::Hermes) };
    let parts = read(&rules, ReasoningStart::Outside, [text]);
    assert_eq!((&*parts.reasoning, &*parts.content), ("<tool_call>x", ""));
    assert_eq!(parts.calls.len(), 1);
}

#[test]
fn one_call_counts_if_the_request_says_so() {
    let text = "[f(x=1), g(), f(x=2)] end";
    let rules = AnswerRules { is_single_call: true, ..rules(ToolFormat::Pythonic) };
    let parts = read(&rules, ReasoningStart::Outside, [text]);
    assert_eq!(parts.calls.len(), 1);
    assert_eq!((parts.content.as_str(), parts.calls[0].arguments.as_str()), (" end", "{\"x\": 1}"));
}

#[test]
fn a_call_ends_the_reasoning() {
    let text = "<think>a <b> c<tool_call>{\"name\": \"g\"}</tool_call>";
    let parts = read(&rules(ToolFormat::Hermes), ReasoningStart::Outside, [text]);
    assert_eq!((parts.reasoning.as_str(), parts.content.as_str()), ("a <b> c", ""));
    assert_eq!(parts.calls[0].arguments, "{}");
}

#[test]
fn reasoning_comes_in_pieces_whole_or_not_at_all() {
    let pieces = ["<think>a", "b", "</think>", "c"];
    for (delivery, expected) in [
        (ReasoningDelivery::Pieces, ["a", "b", "", ""]),
        (ReasoningDelivery::Whole, ["", "", "ab", ""]),
        (ReasoningDelivery::Left, ["", "", "", ""]),
    ] {
        let rules = AnswerRules { delivery, ..rules(ToolFormat::Hermes) };
        let mut reader = AnswerReader::new(&rules, ReasoningStart::Outside);
        let found = pieces.map(|piece| {
            let mut parts = AnswerParts::default();
            reader.push(piece, &mut parts);
            assert_eq!(parts.content.is_empty(), piece != "c");
            parts.reasoning
        });
        assert_eq!(found, expected, "{delivery:?}");
    }
}

#[test]
fn the_prompt_decides_where_reasoning_begins() {
    let both = AnswerRules { tools: None, ..rules(ToolFormat::Hermes) };
    let implied = AnswerRules { reasoning: Some(ReasoningFormat::DeepseekR1), ..both.clone() };
    for (rules, prompt, text, reasoning, content) in [
        (&both, "user", "a</think>b", "", "a</think>b"),
        (&both, "user", "\n<think>a</think>b", "a", "b"),
        (&both, "<think>\n", "a</think>b", "a", "b"),
        (&both, "<think>\n", "<think>a</think>b", "a", "b"),
        (&both, "<think>\n\n</think>\n\n", "<think>a", "", "<think>a"),
        (&implied, "user", "a</think>b", "a", "b"),
        (&implied, "user", "<think>a", "a", ""),
        (&implied, "user", "<thi", "<thi", ""),
        (&implied, "</think>", "a", "", "a"),
    ] {
        let parts = read(rules, ReasoningStart::of_prompt(prompt), [text]);
        assert_eq!((&*parts.reasoning, &*parts.content), (reasoning, content), "{prompt} {text}");
    }
}

#[test]
fn a_template_shows_its_format() {
    for (template, format) in [
        ("<tool_call>\n{{ tool_call | tojson }}\n</tool_call>", Some(ToolFormat::Hermes)),
        ("<tool_call>\n<function=example>", Some(ToolFormat::Qwen3Coder)),
        ("[TOOL_CALLS]", Some(ToolFormat::Mistral)),
        ("<|start_header_id|>ipython", Some(ToolFormat::Llama3Json)),
        ("<|python_start|>", Some(ToolFormat::Pythonic)),
        ("{{ messages }}", None),
    ] {
        assert_eq!(ToolFormat::of_template(template), format, "{template}");
    }
}

fn pieces_of_a_call() -> impl Strategy<Value = String> {
    let word = prop::sample::select(vec![
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "{\"name\": \"f\"",
        "\"name\"",
        ":",
        ", \"arguments\": {\"x\": 1}",
        "}",
        "{",
        "[",
        "]",
        "\"",
        "\\",
        "\n",
        " ",
        "a",
        "é",
        "😀",
        "[TOOL_CALLS]",
        "[ARGS]",
        "f",
        "g",
        "(",
        ")",
        "x=",
        "'",
        ",",
        ";",
        "1",
        "<function=f>",
        "</function>",
        "<parameter=x>",
        "</parameter>",
        "<|python_tag|>",
        "<|python_start|>",
        "[f(",
        "null",
        "-",
    ]);
    prop::collection::vec(word, 0..24).prop_map(|words| words.concat())
}

fn formats() -> impl Strategy<Value = ToolFormat> {
    prop::sample::select(ToolFormat::ALL.to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    /// The parts do not depend on where the text is cut, and nothing panics.
    #[test]
    fn parts_do_not_depend_on_pieces(
        text in pieces_of_a_call(), format in formats(), is_inside in any::<bool>(),
    ) {
        let start = if is_inside { ReasoningStart::Inside } else { ReasoningStart::Outside };
        let rules = rules(format);
        let at_once = read(&rules, start, [&*text]);
        let by_character: Vec<String> = text.chars().map(String::from).collect();
        let singly = read(&rules, start, by_character.iter().map(String::as_str));
        prop_assert_eq!(&singly, &at_once);
    }

    /// Text without tags and brackets is content, to the last blank.
    #[test]
    fn plain_text_is_content(text in "[a-z é.,;\n]{0,40}", format in formats()) {
        let parts = read(&rules(format), ReasoningStart::Outside, [&*text]);
        prop_assert_eq!(parts.content, text);
        prop_assert!(parts.calls.is_empty() && parts.reasoning.is_empty());
    }
}

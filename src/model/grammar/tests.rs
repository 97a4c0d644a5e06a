//! Grammars of each kind: random texts obey them, and hostile ones have bounded work.

use super::*;
use crate::model::answer::{
    AnswerParts, AnswerReader, AnswerRules, ReasoningDelivery, ToolFunction,
};
use crate::model::testing::fixture;
use crate::stdx::rng::Rng;
use std::sync::{Arc, LazyLock};

fn tokenizer() -> Tokenizer {
    Tokenizer::from_hf(&fixture("llama-f32"), 384).unwrap()
}

fn ids_of(mask: &[u32]) -> Vec<u32> {
    let is_allowed = |id: &u32| mask[*id as usize / 32] >> (id % 32) & 1 == 1;
    (0..mask.len() as u32 * 32).filter(is_allowed).collect()
}

/// A text of the grammar, from random tokens; `None` if it did not end.
pub(super) fn text_of(source: &GrammarSource, seed: u64) -> Option<String> {
    text_in(source, GrammarContext::default(), seed)
}

fn text_in(source: &GrammarSource, context: GrammarContext, seed: u64) -> Option<String> {
    static PARTS: LazyLock<(Tokenizer, GrammarCompiler)> = LazyLock::new(|| {
        let tokenizer = tokenizer();
        let compiler = GrammarCompiler::new(tokenizer.vocab_size(), &[2]);
        (tokenizer, compiler)
    });
    let (tokenizer, compiler) = &*PARTS;
    let mut state = compiler.compile(tokenizer, source, context).unwrap();
    let (mut ids, mut dice) = (Vec::new(), Rng::new(seed));
    for _ in 0..400 {
        let mask = state.compute_mask().unwrap();
        let allowed = ids_of(&mask);
        // Random tokens hardly ever spell the end of a free text.
        if dice.one_in(8) && !allowed.contains(&2) {
            for end in ["</think>", "\n</parameter>\n"] {
                let end = tokenizer.encode(end, false).unwrap();
                let mut next = state.fork();
                if end.iter().all(|&id| next.advance(id).is_ok()) {
                    (state, ids) = (next, [ids, end].concat());
                }
            }
            continue;
        }
        // Ends as soon as it can.
        let id = if allowed.contains(&2) { 2 } else { dice.pick(&allowed) };
        state.advance(id).unwrap();
        if id == 2 {
            assert_eq!(state.compute_mask().unwrap(), {
                let mut only = vec![0; mask.len()];
                only[0] = 1 << 2;
                only
            });
            return Some(tokenizer.decode(&ids, false));
        }
        ids.push(id);
    }
    None
}

#[test]
fn each_kind_of_grammar_limits_the_text() {
    let schema = r#"{"type":"object","properties":{"a":{"enum":[1,"x"]}},"required":["a"],
        "additionalProperties":false}"#;
    let gbnf = "root ::= \"<\" [a-c]{2} \">\"".to_owned();
    let lark = "start: \"<\" /[a-c]/ /[a-c]/ \">\"".to_owned();
    for seed in 0..20 {
        let text = |source| text_of(&source, seed).unwrap();
        let json: serde_json::Value =
            serde_json::from_str(&text(GrammarSource::JsonSchema(schema.into()))).unwrap();
        assert!(json == json!({"a": 1}) || json == json!({"a": "x"}), "{json}");
        let choice = text(GrammarSource::Choice(vec!["yes".into(), "n\"o".into()]));
        assert!(["yes", "n\"o"].contains(&&*choice), "{choice}");
        let digits = text(GrammarSource::Regex("[0-9]{3}-x".into()));
        assert!(digits.len() == 5 && digits.ends_with("-x"), "{digits}");
        for source in [GrammarSource::Grammar(gbnf.clone()), GrammarSource::Grammar(lark.clone())] {
            let text = text(source);
            let inner = text.strip_prefix('<').and_then(|text| text.strip_suffix('>')).unwrap();
            assert!(inner.len() == 2 && inner.bytes().all(|b| b"abc".contains(&b)), "{text}");
        }
    }
}

#[test]
fn an_error_names_the_keyword() {
    let tokenizer = tokenizer();
    let compiler = GrammarCompiler::new(tokenizer.vocab_size(), &[2]);
    let error = |source| {
        compiler.compile(&tokenizer, &source, GrammarContext::default()).unwrap_err().to_string()
    };
    let schema = r#"{"type":"array","uniqueItems":true}"#;
    let told = error(GrammarSource::JsonSchema(schema.into()));
    assert!(told.contains("uniqueItems"), "{told}");
    let told = error(GrammarSource::Regex("a(".into()));
    assert!(!told.is_empty() && told.len() < 500, "{told}");
    let told = GrammarCompiler::new(tokenizer.vocab_size(), &[]).compile(
        &tokenizer,
        &GrammarSource::JsonObject,
        GrammarContext::default(),
    );
    assert!(told.unwrap_err().to_string().contains("end-of-sequence"));
}

/// A grammar of rules that each refer to the next, and its last rule.
fn chain(count: usize, rule: impl Fn(usize) -> String, last: &str) -> String {
    (0..count).map(rule).collect::<String>() + last
}

#[test]
fn a_hostile_grammar_is_refused_or_has_bounded_work() {
    let nested = |open: &str, close: &str, count: usize| {
        format!("start: {}\"a\"{}", open.repeat(count), close.repeat(count))
    };
    let rules = chain(3000, |i| format!("a{i} ::= a{} | \"x\"\n", i + 1), "a3000 ::= \"y\"");
    let terminals = chain(3500, |i| format!("A{i}: A{} \"x\"\n", i + 1), "A3500: \"y\"\n");
    let doubling = chain(40, |i| format!("A{i}: A{0} A{0}\n", i + 1), "A40: \"y\"\n");
    let next = |i| format!("\"d{i}\":{{\"$ref\":\"#/$defs/d{}\"}},", i + 1);
    let refs = chain(1800, next, "\"d1800\":{\"type\":\"null\"}");
    let either =
        |i| format!("{{\"anyOf\":[{{\"required\":[\"a{i}\"]}},{{\"required\":[\"b{i}\"]}}]}},");
    let many = |i| format!("\"p{i}\":{{\"type\":\"object\"}},");
    let sources = [
        GrammarSource::Grammar(format!("root ::= a0\n{rules}")),
        GrammarSource::Grammar(format!("start: A0\n{terminals}")),
        GrammarSource::Grammar(format!("start: A0\n{doubling}")),
        GrammarSource::Grammar(nested("(", ")", 250)),
        GrammarSource::Grammar(nested("(", ")", 9000)),
        GrammarSource::Grammar("start: s\ns: s s | \"a\" | \"\"".into()),
        GrammarSource::Regex("(((a{1,100}){1,100}){1,100}){1,100}".into()),
        GrammarSource::Regex("(.*a.{20}|.*b.{20}|.*c.{20}).*".into()),
        GrammarSource::JsonSchema(format!("{{\"$defs\":{{{refs}}},\"$ref\":\"#/$defs/d0\"}}")),
        GrammarSource::JsonSchema("{\"$ref\":\"#\"}".into()),
        GrammarSource::JsonSchema(format!("{{\"allOf\":[{}]}}", chain(14, either, "{}"))),
        GrammarSource::JsonSchema(format!(
            "{{\"properties\":{{{}}}}}",
            chain(1100, many, "\"x\":{}")
        )),
        GrammarSource::JsonSchema("{\"type\":\"string\",\"minLength\":1000000}".into()),
        GrammarSource::JsonSchema("{\"minimum\":-1e300,\"maximum\":1e300}".into()),
        GrammarSource::JsonSchema(format!("{}{{}}{}", "{\"items\":".repeat(200), "}".repeat(200))),
    ];
    let run = move || {
        let tokenizer = tokenizer();
        let compiler = GrammarCompiler::new(tokenizer.vocab_size(), &[2]);
        let mut states = Vec::new();
        for source in sources {
            let Ok(mut state) = compiler.compile(&tokenizer, &source, GrammarContext::default())
            else {
                continue;
            };
            let mut dice = Rng::new(1);
            for _ in 0..40 {
                let Ok(mask) = state.compute_mask() else { break };
                let allowed = ids_of(&mask);
                assert!(!allowed.is_empty(), "{source:?}");
                if state.advance(dice.pick(&allowed)).is_err() {
                    break;
                }
            }
            states.push(state);
        }
        states
    };
    // The compiler recurses, so the test has the stack that production has.
    let thread = std::thread::Builder::new().stack_size(crate::limits::GRAMMAR_STACK);
    let states = thread.spawn(run).unwrap().join().unwrap();
    // `ctl` drops some states. It has a usual stack.
    assert!(states.len() > 5);
}

/// A schema of which each property shows in the check.
fn functions() -> Arc<[ToolFunction]> {
    let function = |name: &str, parameters: Value| ToolFunction {
        name: name.into(),
        parameters: parameters.as_object().unwrap().clone(),
    };
    [
        function("ping", json!({})),
        function(
            "add",
            json!({
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "minimum": 0, "maximum": 99},
                    "kind": {"enum": ["x", "y"]},
                    "flag": {"type": "boolean"},
                    "list": {"type": "array", "items": {"$ref": "#/$defs/bit"}, "maxItems": 2},
                    "maybe": {"anyOf": [{"type": "integer", "maximum": 9}, {"type": "null"}]},
                    "bit": {"$ref": "#/$defs/bit"},
                },
                "required": ["a", "kind"],
                "$defs": {"bit": {"enum": [0, 1]}},
            }),
        ),
        function(
            "say",
            json!({"required": ["text"],
                "properties": {"text": {"type": "string", "maxLength": 5}}}),
        ),
    ]
    .into()
}

fn check_call(name: &str, arguments: &str) {
    let arguments: Value = serde_json::from_str(arguments).unwrap();
    let fields = arguments.as_object().unwrap();
    match name {
        "ping" => assert!(fields.is_empty()),
        "add" => {
            assert!(fields["a"].as_u64().unwrap() < 100 && fields["a"].is_u64());
            assert!(["x", "y"].contains(&fields["kind"].as_str().unwrap()));
            assert!(fields.get("flag").is_none_or(Value::is_boolean), "{arguments}");
            if let Some(list) = fields.get("list") {
                let list = list.as_array().unwrap();
                assert!(list.len() <= 2 && list.iter().all(|bit| *bit == 0 || *bit == 1));
            }
            let is_small =
                |value: &Value| value.is_null() || value.as_i64().is_some_and(|n| n < 10);
            assert!(fields.get("maybe").is_none_or(is_small), "{arguments}");
            assert!(fields.get("bit").is_none_or(|bit| *bit == 0 || *bit == 1), "{arguments}");
            let known = ["a", "kind", "flag", "list", "maybe", "bit"];
            assert!(fields.keys().all(|key| known.contains(&&**key)), "{arguments}");
        }
        "say" => assert!(fields["text"].is_string() && fields.len() == 1, "{arguments}"),
        _ => panic!("{name}"),
    }
}

#[test]
fn forced_calls_are_read_back_in_each_format() {
    for tools in ToolFormat::ALL {
        let mut names: Vec<String> = Vec::new();
        for (seed, is_single) in (0..60).map(|seed| (seed, seed % 2 == 0)) {
            let functions = functions();
            let calls = CallGrammar { functions: functions.clone(), is_single };
            let reasoning = [None, Some(ReasoningStart::Inside), Some(ReasoningStart::Outside)];
            let reasoning = reasoning[seed as usize % 3];
            let context = GrammarContext { tools, reasoning };
            let Some(text) = text_in(&GrammarSource::Calls(calls), context, seed) else { continue };
            let rules = AnswerRules {
                tools: Some(tools),
                functions,
                is_single_call: false,
                reasoning: reasoning.map(|_| ReasoningFormat::Qwen3),
                delivery: ReasoningDelivery::Pieces,
                has_grammar: false,
                tags: [].into(),
            };
            let start = reasoning.unwrap_or(ReasoningStart::Over);
            let mut parts = AnswerParts::default();
            let mut reader = AnswerReader::new(&rules, start);
            reader.push(&text, &mut parts);
            reader.finish(&mut parts);
            assert!(!parts.calls.is_empty() && parts.content.is_empty(), "{tools:?}: {text}");
            assert!(!is_single || parts.calls.len() == 1, "{text}");
            for call in &parts.calls {
                let name = call.name.as_deref().unwrap();
                check_call(name, &call.arguments);
                names.push(name.into());
            }
        }
        names.sort();
        names.dedup();
        assert_eq!(names, ["add", "ping", "say"], "{tools:?}");
    }
}

#[test]
fn schemas_of_tools_have_a_limit() {
    let tool = |index: usize, bytes: usize| ToolFunction {
        name: format!("f{index}"),
        parameters: json!({"description": "x".repeat(bytes)}).as_object().unwrap().clone(),
    };
    let refusal = |functions: Vec<ToolFunction>| {
        let calls = CallGrammar { functions: functions.into(), is_single: true };
        calls::check(&calls, ToolFormat::Hermes)
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default()
    };
    assert_eq!(refusal(vec![tool(0, 60_000)]), "");
    assert!(refusal(vec![tool(0, 1), tool(1, 70_000)]).contains("`f1` have 70018 bytes"));
    assert!(refusal((0..20).map(|i| tool(i, 60_000)).collect()).contains("all tools"));
}

#[test]
fn each_format_can_write_each_name() {
    for name in ["a", "é9", "server/tool", "a.b:c-d_e"] {
        for tools in ToolFormat::ALL {
            let function = ToolFunction { name: name.into(), parameters: Default::default() };
            let functions: Arc<[ToolFunction]> = [function].into();
            let calls = CallGrammar { functions: functions.clone(), is_single: true };
            let context = GrammarContext { tools, reasoning: None };
            let text = text_in(&GrammarSource::Calls(calls), context, 3).unwrap();
            let rules = AnswerRules {
                tools: Some(tools),
                functions,
                is_single_call: false,
                reasoning: None,
                delivery: ReasoningDelivery::Pieces,
                has_grammar: false,
                tags: [].into(),
            };
            let mut reader = AnswerReader::new(&rules, ReasoningStart::Over);
            let mut parts = AnswerParts::default();
            reader.push(&text, &mut parts);
            reader.finish(&mut parts);
            assert_eq!(parts.calls[0].name.as_deref(), Some(name), "{tools:?}: {text}");
        }
    }
}

#[test]
fn parameters_that_a_format_cannot_write_are_refused() {
    let refusal = |parameters: Value, format| {
        let parameters = parameters.as_object().unwrap().clone();
        let function = ToolFunction { name: "f".into(), parameters };
        let calls = CallGrammar { functions: [function].into(), is_single: true };
        calls::check(&calls, format).err().map(|error| error.to_string()).unwrap_or_default()
    };
    let either = json!({"anyOf": [{"type": "object"}]});
    assert_eq!(refusal(either.clone(), ToolFormat::Hermes), "");
    assert!(refusal(either, ToolFormat::Qwen3Coder).contains("`anyOf`"));
    let odd = json!({"properties": {"a b": {}}});
    assert!(refusal(odd, ToolFormat::Pythonic).contains("\"a b\""));
}

//! JSON schemas: the test suite of JSON Schema, and random schemas with their own check.

use super::tests::text_of;
use super::*;
use crate::model::testing::schema_suite;
use proptest::prelude::*;
use std::path::Path;

/// Ids that are bytes.
const BYTES: usize = 256;

/// Whether a grammar of bytes allows this text as a whole.
fn allows(mut state: GrammarState, text: &str) -> bool {
    for byte in text.bytes() {
        let mask = state.compute_mask().unwrap();
        if mask[byte as usize / 32] >> (byte % 32) & 1 == 0 {
            return false;
        }
        state.advance(u32::from(byte)).unwrap();
    }
    state.compute_mask().unwrap()[BYTES / 32] & 1 == 1
}

/// Draft 2020-12. No invalid instance is accepted, and no schema is refused that the parser takes
/// with its own limits. A valid instance can be refused, because the keys of an object have an
/// order.
#[test]
fn the_suite_of_json_schema_accepts_nothing_wrong() {
    let Some(suite) = schema_suite() else { return };
    let tokenizer = Tokenizer::of_bytes(BYTES, Path::new("none")).unwrap();
    let compiler = GrammarCompiler::new(BYTES + 1, &[BYTES as u32]);
    let plain = |schema: &Value| {
        let factory = compiler.factory.get().unwrap().as_ref().unwrap();
        let factory = factory.with_slices(&SlicedBiasComputer::general_slices()).unwrap();
        let grammar = TopLevelGrammar::from_json_schema(schema.clone());
        Matcher::new(factory.create_parser(grammar)).get_error()
    };
    let mut paths: Vec<_> = suite.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let (mut schemas, mut refused, mut accepted, mut missed) = (0, 0, 0, 0);
    for path in paths.iter().filter(|path| path.extension().is_some_and(|end| end == "json")) {
        let groups: Vec<Value> =
            serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        for group in groups {
            schemas += 1;
            let source = GrammarSource::JsonSchema(group["schema"].to_string());
            let fresh = match compiler.compile(&tokenizer, &source, GrammarContext::default()) {
                Ok(fresh) => fresh,
                Err(error) => {
                    refused += 1;
                    assert!(plain(&group["schema"]).is_some(), "{error}: {}", group["schema"]);
                    continue;
                }
            };
            for case in group["tests"].as_array().unwrap() {
                let text = case["data"].to_string();
                match (case["valid"] == true, allows(fresh.fork(), &text)) {
                    (true, true) => accepted += 1,
                    (true, false) => missed += 1,
                    (false, false) => {}
                    (false, true) => panic!("{text} is accepted: {}", group["schema"]),
                }
            }
        }
    }
    println!("{schemas} schemas, {refused} refused; {accepted} accepted, {missed} missed");
    assert!(schemas > 300 && refused < schemas * 6 / 10, "{refused} of {schemas} are refused");
    assert!(accepted > 20 * missed / 2, "{missed} valid instances are refused");
}

/// A schema that can check a value.
#[derive(Clone, Debug)]
enum Shape {
    Integer {
        least: i64,
        most: i64,
    },
    Text {
        most: usize,
    },
    Choice(Vec<Value>),
    Flag,
    Nothing,
    List {
        of: Box<Shape>,
        least: usize,
        most: usize,
    },
    /// Properties, and whether each is required.
    Object(Vec<(String, Shape, bool)>),
    Either(Vec<Shape>),
}

impl Shape {
    fn schema(&self) -> Value {
        match self {
            Shape::Integer { least, most } => {
                json!({"type": "integer", "minimum": least, "maximum": most})
            }
            Shape::Text { most } => json!({"type": "string", "maxLength": most}),
            Shape::Choice(values) => json!({"enum": values}),
            Shape::Flag => json!({"type": "boolean"}),
            Shape::Nothing => json!({"type": "null"}),
            Shape::List { of, least, most } => {
                let items = of.schema();
                json!({"type": "array", "items": items, "minItems": least, "maxItems": most})
            }
            Shape::Object(fields) => {
                let properties: serde_json::Map<String, Value> =
                    fields.iter().map(|(name, of, _)| (name.clone(), of.schema())).collect();
                let required: Vec<&String> =
                    fields.iter().filter(|field| field.2).map(|field| &field.0).collect();
                json!({"type": "object", "properties": properties, "required": required,
                    "additionalProperties": false})
            }
            Shape::Either(shapes) => {
                json!({"anyOf": shapes.iter().map(Shape::schema).collect::<Vec<_>>()})
            }
        }
    }

    fn fits(&self, value: &Value) -> bool {
        match self {
            // `-0` is a whole number, but no `i64`.
            Shape::Integer { least, most } => value.as_f64().is_some_and(|number| {
                number.fract() == 0.0 && (*least as f64..=*most as f64).contains(&number)
            }),
            Shape::Text { most } => {
                value.as_str().is_some_and(|text| text.chars().count() <= *most)
            }
            Shape::Choice(values) => values.contains(value),
            Shape::Flag => value.is_boolean(),
            Shape::Nothing => value.is_null(),
            Shape::List { of, least, most } => value.as_array().is_some_and(|items| {
                (*least..=*most).contains(&items.len()) && items.iter().all(|item| of.fits(item))
            }),
            Shape::Object(fields) => value.as_object().is_some_and(|object| {
                let is_known = |name: &String| fields.iter().any(|field| field.0 == *name);
                object.keys().all(is_known)
                    && fields.iter().all(|(name, of, is_required)| match object.get(name) {
                        Some(value) => of.fits(value),
                        None => !is_required,
                    })
            }),
            Shape::Either(shapes) => shapes.iter().any(|shape| shape.fits(value)),
        }
    }
}

fn shapes() -> impl Strategy<Value = Shape> {
    let leaf = prop_oneof![
        (-50_i64..50, 0_i64..100)
            .prop_map(|(least, more)| Shape::Integer { least, most: least + more }),
        (0_usize..6).prop_map(|most| Shape::Text { most }),
        prop::sample::subsequence(vec![json!(1), json!("a\"b"), json!(null), json!([2])], 1..4)
            .prop_map(Shape::Choice),
        Just(Shape::Flag),
        Just(Shape::Nothing),
    ];
    leaf.prop_recursive(3, 12, 3, |inner| {
        let names = prop::sample::subsequence(vec!["a", "b c", "ü", "\"q\""], 0..4);
        let fields = (names, prop::collection::vec((inner.clone(), any::<bool>()), 4));
        prop_oneof![
            (inner.clone(), 0_usize..3, 0_usize..3).prop_map(|(of, least, more)| Shape::List {
                of: Box::new(of),
                least,
                most: least + more,
            }),
            fields.prop_map(|(names, shapes)| Shape::Object(
                names
                    .into_iter()
                    .zip(shapes)
                    .map(|(name, (of, is_required))| (name.into(), of, is_required))
                    .collect()
            )),
            prop::collection::vec(inner, 1..3).prop_map(Shape::Either),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 256,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// A text that ends is JSON and fits its schema.
    #[test]
    fn each_answer_that_ends_is_valid(shape in shapes(), seed in any::<u64>()) {
        let source = GrammarSource::JsonSchema(shape.schema().to_string());
        if let Some(text) = text_of(&source, seed) {
            let value: Value = serde_json::from_str(&text).unwrap();
            prop_assert!(shape.fits(&value), "{} of {}", text, shape.schema());
        }
    }
}

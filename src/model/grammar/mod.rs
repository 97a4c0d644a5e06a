//! Structured output: grammars that limit which tokens a request can generate.
//!
//! Owns: the vocabulary as a trie, compiled grammars, the state of one choice.
//! Threads: `grammar` compiles, `masks` advances states.
//! Invariants: a mask depends only on the grammar and the tokens so far. Work and memory are
//! bounded in units that do not depend on the machine, so all workers accept the same grammars.
//! Not here: the table of masks that the engine reads (`sched::masks`), fields of requests
//! (`api::structured_output`). The parser is the crate `llguidance`.

mod gbnf;
mod vocabulary;

use crate::limits::{
    GRAMMAR_DEPTH_MAX, GRAMMAR_ERROR_BYTES_MAX, GRAMMAR_ITEMS_MAX, GRAMMAR_LEXER_FUEL,
    GRAMMAR_LEXER_STATES_MAX, GRAMMAR_ROW_ITEMS_MAX, GRAMMAR_STEP_FUEL, GRAMMAR_SYMBOLS_MAX,
};
use crate::model::tokenizer::Tokenizer;
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};
use std::fmt;
use std::sync::OnceLock;

/// The key of a JSON schema with the whitespace between its words.
pub const WHITESPACE_OPTIONS: &str = "x-guidance";

/// The whitespace between two words of JSON. It is bounded, because small models can repeat it
/// without an end.
const BLANKS: &str = r"[ \t]{1,20}|\r?\n(\r?\n)?[ \t]{0,40}";

/// What an answer must be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum GrammarSource {
    /// Any JSON object.
    JsonObject,
    /// JSON that is valid for this JSON schema.
    JsonSchema(String),
    /// A text that matches this regular expression as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A text of this grammar: in the GBNF of llama.cpp if it has `::=`, else in Lark.
    Grammar(String),
}

/// Why a grammar cannot be used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GrammarError(String);

impl GrammarError {
    fn new(error: impl fmt::Display) -> GrammarError {
        let mut text = error.to_string();
        // The parser adds its state to some errors, behind a line break and a tag.
        if let Some(at) = text.find("\n<") {
            text.truncate(at);
        }
        if text == "NoExtensionBias" {
            text = "no text matches it".into();
        }
        if text.len() > GRAMMAR_ERROR_BYTES_MAX {
            text.truncate(text.floor_char_boundary(GRAMMAR_ERROR_BYTES_MAX));
            text.push_str("...");
        }
        GrammarError(text)
    }
}

impl fmt::Display for GrammarError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for GrammarError {}

/// Compiles grammars for one vocabulary.
pub struct GrammarCompiler {
    /// Ids that end an answer.
    eos: Vec<u32>,
    /// Ids of the model.
    vocab: usize,
    /// Made with the first grammar, because it takes some hundred milliseconds.
    factory: OnceLock<Result<ParserFactory, GrammarError>>,
}

impl fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarCompiler").field("vocab", &self.vocab).finish_non_exhaustive()
    }
}

impl GrammarCompiler {
    /// A compiler for a model with `vocab` ids, of which `eos` end an answer.
    pub fn new(vocab: usize, eos: &[u32]) -> GrammarCompiler {
        let eos = eos.iter().copied().filter(|&id| (id as usize) < vocab).collect();
        GrammarCompiler { eos, vocab, factory: OnceLock::new() }
    }

    /// Compiles a grammar to the state before the first token.
    ///
    /// # Errors
    /// The grammar is malformed, exceeds a limit, or uses something that is not supported.
    pub fn compile(
        &self,
        tokenizer: &Tokenizer,
        source: &GrammarSource,
    ) -> Result<GrammarState, GrammarError> {
        let factory = self.factory.get_or_init(|| self.make_factory(tokenizer));
        let factory = factory.as_ref().map_err(GrammarError::clone)?;
        check_depth(source)?;
        let matcher = Matcher::new(factory.create_parser(parse(source)?));
        match matcher.get_error() {
            Some(error) => Err(GrammarError::new(error)),
            None => Ok(GrammarState { matcher, words: self.vocab.div_ceil(32) }),
        }
    }

    fn make_factory(&self, tokenizer: &Tokenizer) -> Result<ParserFactory, GrammarError> {
        if self.eos.is_empty() {
            let why = "the model has no end-of-sequence token, so no answer could end";
            return Err(GrammarError::new(why));
        }
        let vocabulary = vocabulary::of(tokenizer, self.vocab, &self.eos);
        let slices = SlicedBiasComputer::general_slices();
        let mut factory =
            ParserFactory::new(&vocabulary, InferenceCapabilities::default(), &slices)
                .map_err(GrammarError::new)?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits {
            max_items_in_row: GRAMMAR_ROW_ITEMS_MAX,
            initial_lexer_fuel: GRAMMAR_LEXER_FUEL,
            step_lexer_fuel: GRAMMAR_STEP_FUEL,
            step_max_items: GRAMMAR_ITEMS_MAX,
            max_lexer_states: GRAMMAR_LEXER_STATES_MAX,
            max_grammar_size: GRAMMAR_SYMBOLS_MAX,
            precompute_large_lexemes: true,
            verbose_errors: false,
        };
        Ok(factory)
    }
}

/// Refuses deep nesting, because the parser recurses into it. Brackets inside texts count, too.
fn check_depth(source: &GrammarSource) -> Result<(), GrammarError> {
    let text = match source {
        GrammarSource::Regex(text) | GrammarSource::Grammar(text) => text,
        // Its JSON has a bound of its own.
        GrammarSource::JsonSchema(_) | GrammarSource::JsonObject | GrammarSource::Choice(_) => {
            return Ok(());
        }
    };
    let mut depth = 0_usize;
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > GRAMMAR_DEPTH_MAX {
            let why = format_args!("has more than {GRAMMAR_DEPTH_MAX} open brackets at a time");
            return Err(GrammarError::new(why));
        }
    }
    Ok(())
}

fn parse(source: &GrammarSource) -> Result<TopLevelGrammar, GrammarError> {
    Ok(match source {
        GrammarSource::JsonObject => of_schema(json!({"type": "object"})),
        GrammarSource::JsonSchema(schema) => {
            of_schema(serde_json::from_str(schema).map_err(GrammarError::new)?)
        }
        GrammarSource::Regex(regex) => TopLevelGrammar::from_regex(regex),
        GrammarSource::Choice(texts) => {
            let texts: Vec<String> = texts.iter().map(|text| json!(text).to_string()).collect();
            TopLevelGrammar::from_lark(format!("start: {}", texts.join(" | ")))
        }
        GrammarSource::Grammar(text) if text.contains("::=") => {
            TopLevelGrammar::from_lark(gbnf::to_lark(text)?)
        }
        GrammarSource::Grammar(text) => TopLevelGrammar::from_lark(text.clone()),
    })
}

/// The grammar of a JSON schema. If the schema does not set its whitespace, [`BLANKS`] does.
fn of_schema(mut schema: Value) -> TopLevelGrammar {
    if schema == true {
        schema = json!({});
    }
    if let Some(fields) = schema.as_object_mut() {
        fields.entry(WHITESPACE_OPTIONS).or_insert_with(|| json!({"whitespace_pattern": BLANKS}));
    }
    TopLevelGrammar::from_json_schema(schema)
}

/// The state of one choice: which tokens can come next.
pub struct GrammarState {
    matcher: Matcher,
    /// Words of a mask.
    words: usize,
}

impl fmt::Debug for GrammarState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stop = self.matcher.stop_reason();
        f.debug_struct("GrammarState").field("stop", &stop).finish_non_exhaustive()
    }
}

impl GrammarState {
    /// The same state for another choice.
    pub fn fork(&self) -> GrammarState {
        GrammarState { matcher: self.matcher.deep_clone(), words: self.words }
    }

    /// Takes the next token of the answer.
    ///
    /// # Errors
    /// The grammar does not allow the token here, or a limit is reached. The state is then of no
    /// more use.
    pub fn advance(&mut self, token: u32) -> Result<(), GrammarError> {
        if self.matcher.is_stopped() && !self.matcher.is_error() {
            // The text is complete. Only ids that end the answer can follow.
            return Ok(());
        }
        self.matcher.consume_token(token).map_err(GrammarError::new)
    }

    /// The tokens that can come next: bit `id % 32` of word `id / 32`. If the text is complete,
    /// only ids that end the answer.
    ///
    /// # Errors
    /// A limit is reached.
    pub fn compute_mask(&mut self) -> Result<Vec<u32>, GrammarError> {
        let mask = self.matcher.compute_mask_or_eos().map_err(GrammarError::new)?;
        let mut mask = Vec::from(mask);
        // The parser's masks have a bit more.
        mask.truncate(self.words);
        Ok(mask)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::testing::fixture;
    use crate::stdx::rng::Rng;

    fn tokenizer() -> Tokenizer {
        Tokenizer::from_hf(&fixture("llama-f32")).unwrap()
    }

    fn ids_of(mask: &[u32]) -> Vec<u32> {
        let is_allowed = |id: &u32| mask[*id as usize / 32] >> (id % 32) & 1 == 1;
        (0..mask.len() as u32 * 32).filter(is_allowed).collect()
    }

    /// A text of the grammar, from random tokens; `None` if it did not end.
    fn text_of(source: &GrammarSource, seed: u64) -> Option<String> {
        let tokenizer = tokenizer();
        let compiler = GrammarCompiler::new(tokenizer.vocab_size(), &[2]);
        let mut state = compiler.compile(&tokenizer, source).unwrap();
        let (mut ids, mut dice) = (Vec::new(), Rng::new(seed));
        for _ in 0..400 {
            let mask = state.compute_mask().unwrap();
            let allowed = ids_of(&mask);
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
            for source in
                [GrammarSource::Grammar(gbnf.clone()), GrammarSource::Grammar(lark.clone())]
            {
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
        let error = |source| compiler.compile(&tokenizer, &source).unwrap_err().to_string();
        let schema = r#"{"type":"array","uniqueItems":true}"#;
        let told = error(GrammarSource::JsonSchema(schema.into()));
        assert!(told.contains("uniqueItems"), "{told}");
        let told = error(GrammarSource::Regex("a(".into()));
        assert!(!told.is_empty() && told.len() < 500, "{told}");
        let told = GrammarCompiler::new(tokenizer.vocab_size(), &[])
            .compile(&tokenizer, &GrammarSource::JsonObject);
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
            GrammarSource::JsonSchema(format!(
                "{}{{}}{}",
                "{\"items\":".repeat(200),
                "}".repeat(200)
            )),
        ];
        let run = move || {
            let tokenizer = tokenizer();
            let compiler = GrammarCompiler::new(tokenizer.vocab_size(), &[2]);
            let mut states = Vec::new();
            for source in sources {
                let Ok(mut state) = compiler.compile(&tokenizer, &source) else { continue };
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
}

//! Structured output: grammars that limit which tokens a request can generate.
//!
//! Owns: the vocabulary as a trie, compiled grammars, the state of one choice.
//! Threads: `grammar` compiles, `masks` advances states.
//! Invariants: a mask depends only on the grammar and the tokens so far. Work and memory are
//! bounded in units that do not depend on the machine, so all workers accept the same grammars.
//! Not here: the table of masks that the engine reads (`sched::masks`), fields of requests
//! (`api::structured_output`). The parser is the crate `llguidance`.

mod calls;
mod gbnf;
#[cfg(test)]
mod schema_tests;
#[cfg(test)]
mod tests;
mod vocabulary;

use crate::limits::{
    GRAMMAR_DEPTH_MAX, GRAMMAR_ERROR_BYTES_MAX, GRAMMAR_ITEMS_MAX, GRAMMAR_LEXER_FUEL,
    GRAMMAR_LEXER_STATES_MAX, GRAMMAR_ROW_ITEMS_MAX, GRAMMAR_STEP_FUEL, GRAMMAR_SYMBOLS_MAX,
    TOOL_SCHEMAS_BYTES_MAX,
};
use crate::model::answer::{ReasoningFormat, ReasoningStart, ToolFormat, special_token};
use crate::model::tokenizer::Tokenizer;
pub use calls::CallGrammar;
use llguidance::api::{GrammarWithLexer, ParserLimits, TopLevelGrammar};
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
#[derive(Clone, PartialEq, Debug)]
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
    /// Tool calls in the format of the model.
    Calls(CallGrammar),
}

/// What a grammar must know of the prompt and the model.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct GrammarContext {
    /// The format of tool calls.
    pub tools: ToolFormat,
    /// Where the prompt left the reasoning, if the answer can begin with reasoning, which has no
    /// grammar.
    pub reasoning: Option<ReasoningStart>,
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
        context: GrammarContext,
    ) -> Result<GrammarState, GrammarError> {
        let factory = self.factory.get_or_init(|| self.make_factory(tokenizer));
        let factory = factory.as_ref().map_err(GrammarError::clone)?;
        check_depth(source)?;
        let grammar = parse(source, tokenizer, context.tools)?;
        let grammar = after_reasoning(grammar, tokenizer, context.reasoning);
        let matcher = Matcher::new(factory.create_parser(grammar));
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
        GrammarSource::JsonSchema(_)
        | GrammarSource::JsonObject
        | GrammarSource::Choice(_)
        | GrammarSource::Calls(_) => return Ok(()),
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

fn parse(
    source: &GrammarSource,
    tokenizer: &Tokenizer,
    tools: ToolFormat,
) -> Result<TopLevelGrammar, GrammarError> {
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
        GrammarSource::Calls(calls) => {
            calls::check(calls, tools)?;
            let lark = calls::to_lark(calls, tools, tokenizer);
            // Each property that refers to definitions has them all.
            if lark.len() > 4 * TOOL_SCHEMAS_BYTES_MAX {
                let why = "the definitions of the parameters are too long for so many properties";
                return Err(GrammarError::new(why));
            }
            TopLevelGrammar::from_lark(lark)
        }
    })
}

/// The same grammar behind reasoning, if the answer can begin with reasoning.
fn after_reasoning(
    mut grammar: TopLevelGrammar,
    tokenizer: &Tokenizer,
    start: Option<ReasoningStart>,
) -> TopLevelGrammar {
    let opening = match start {
        None | Some(ReasoningStart::Over) => return grammar,
        Some(ReasoningStart::Inside) => String::new(),
        Some(ReasoningStart::Outside) => match special_token(tokenizer, ReasoningFormat::TAGS[0]) {
            Some(id) => format!("<[{id}]> "),
            None => format!("{} ", json!(ReasoningFormat::TAGS[0])),
        },
    };
    let optional = if opening.is_empty() { "" } else { "?" };
    let thoughts = match special_token(tokenizer, ReasoningFormat::TAGS[1]) {
        Some(id) => format!("thoughts: /(?s:.*)/ <[{id}]>"),
        None => format!("thoughts[suffix={}]: /(?s:.*)/", json!(ReasoningFormat::TAGS[1])),
    };
    // Models write an empty line behind the tag.
    let whole = format!("start: ({opening}thoughts /\\n{{0,2}}/){optional} @answer\n{thoughts}\n");
    for part in &mut grammar.grammars {
        part.name = Some("answer".into());
    }
    grammar.grammars.insert(0, GrammarWithLexer::from_lark(whole));
    grammar
}

fn blank_options() -> Value {
    json!({"whitespace_pattern": BLANKS})
}

/// The grammar of a JSON schema. If the schema does not set its whitespace, [`BLANKS`] does.
fn of_schema(mut schema: Value) -> TopLevelGrammar {
    if schema == true {
        schema = json!({});
    }
    if let Some(fields) = schema.as_object_mut() {
        fields.entry(WHITESPACE_OPTIONS).or_insert_with(blank_options);
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

//! Bounds on what a request for text says about its answer: grammars, tools, rules about tokens.

/// Tokens of prompts with logprobs in a step, if a page has no more: a step of so many tokens uses
/// the weights well, and their logits take 20 MB at most.
pub const PROMPT_LOGPROBS_ROWS: usize = 32;
/// Longest source of a grammar in bytes: schemas of large interfaces as OpenAPI have some ten
/// thousand. It bounds recursion in the compiler, which follows references between rules.
pub const GRAMMAR_BYTES_MAX: usize = 64 << 10;
/// Longest schemas of all tools together that a forced call can choose from, in bytes: a hundred
/// tools have some hundred thousand. The schema of one tool has the limit of a grammar.
pub const TOOL_SCHEMAS_BYTES_MAX: usize = 1 << 20;
/// Most open parentheses at a time in a grammar. The compiler recurses into each.
pub const GRAMMAR_DEPTH_MAX: usize = 256;
/// Most texts of a choice: more than any list of labels.
pub const GRAMMAR_CHOICES_MAX: usize = 4096;
/// Most entries of `logit_bias`: OpenAI's clients send a few hundred at most.
pub const LOGIT_BIASES_MAX: usize = 1024;
/// Largest bias of a logit, as in OpenAI's API.
pub const LOGIT_BIAS_MAX: f64 = 100.0;
/// Most ids of `allowed_token_ids`: the largest vocabularies have that many.
pub const ALLOWED_IDS_MAX: usize = 1 << 18;
/// Most texts of `bad_words`. Each costs some comparisons for each token.
pub const BAD_WORDS_MAX: usize = 256;
/// Most tools of a request: the limit of OpenAI is 128, and large agents come near it.
pub const TOOLS_MAX: usize = 1024;
/// Symbols in the rules of a compiled grammar: some ten megabytes.
pub const GRAMMAR_SYMBOLS_MAX: usize = 200_000;
/// Work of the compiler on regular expressions, in its own units: about 20 ms.
pub const GRAMMAR_LEXER_FUEL: u64 = 1_000_000;
/// Work on regular expressions for one mask, in the same units: about 15 ms. A usual mask takes a
/// hundredth of that.
pub const GRAMMAR_STEP_FUEL: u64 = 200_000;
/// Parser items for one mask: about 3 ms. A usual mask takes a hundredth of that.
pub const GRAMMAR_ITEMS_MAX: usize = 50_000;
/// Parser items after one byte. Grammars that are not ambiguous have less than a hundred.
pub const GRAMMAR_ROW_ITEMS_MAX: usize = 2_000;
/// States of a grammar's lexer, of 1 to 2 kB each. Usual schemas have some hundred.
pub const GRAMMAR_LEXER_STATES_MAX: usize = 10_000;
/// Longest error text of a grammar's compiler in bytes, because it can quote the grammar.
pub const GRAMMAR_ERROR_BYTES_MAX: usize = 400;
/// Stack of a thread that compiles a grammar or computes masks, for some thousand levels.
pub const GRAMMAR_STACK: usize = 256 << 20;
/// Ignored keys inside the fields of a request that are named; the header for them has no room for
/// more.
pub const UNKNOWN_KEYS_MAX: usize = 32;

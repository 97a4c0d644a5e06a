//! Grammars of clients: each is refused with a short text, or compiles. In each state at least one
//! token is allowed. A text that ends is JSON, if it must be.

use baton::limits::{GRAMMAR_BYTES_MAX, GRAMMAR_ERROR_BYTES_MAX, GRAMMAR_STACK};
use baton::model::grammar::{GrammarCompiler, GrammarContext, GrammarSource};
use baton::model::tokenizer::Tokenizer;
use std::path::Path;
use std::sync::LazyLock;

/// Ids that are bytes.
const BYTES: usize = 256;
/// The id that ends a text.
const END: u32 = BYTES as u32;
/// Memory of the compiler in bytes: its limits on states and symbols allow some ten megabytes. With
/// overflow checks, numbers near 2^63 are a panic that it catches; the text of a backtrace takes
/// some hundred megabytes.
const MEMORY: usize = 512 << 20;
/// Most tokens of a text.
const TOKENS: usize = 60;

static PARTS: LazyLock<(Tokenizer, GrammarCompiler)> = LazyLock::new(|| {
    let tokenizer = Tokenizer::of_bytes(BYTES, Path::new("none")).expect("bytes are a vocabulary");
    (tokenizer, GrammarCompiler::new(BYTES + 1, &[END]))
});

pub fn run(data: &[u8]) {
    let Some((&kind, text)) = data.split_first() else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    if text.len() > GRAMMAR_BYTES_MAX {
        return;
    }
    let source = match kind % 4 {
        0 => GrammarSource::JsonSchema(text.into()),
        1 => GrammarSource::Regex(text.into()),
        2 => GrammarSource::Grammar(text.into()),
        _ => GrammarSource::Choice(text.split('\n').map(str::to_owned).collect()),
    };
    crate::memory::allow(MEMORY);
    // The compiler recurses. Production has this stack, too.
    let thread = std::thread::Builder::new().stack_size(GRAMMAR_STACK);
    let walk = move || walk(&source);
    thread.spawn(walk).expect("a thread starts").join().expect("no panic");
}

fn walk(source: &GrammarSource) {
    let (tokenizer, compiler) = &*PARTS;
    let mut state = match compiler.compile(tokenizer, source, GrammarContext::default()) {
        Ok(state) => state,
        Err(error) => {
            return assert!(error.to_string().len() <= GRAMMAR_ERROR_BYTES_MAX + 3, "{error}");
        }
    };
    let mut text = Vec::new();
    for step in 0..TOKENS {
        // A limit can be reached at any token.
        let Ok(mask) = state.compute_mask() else { return };
        let is_allowed = |id: &u32| mask[*id as usize / 32] >> (id % 32) & 1 == 1;
        let allowed: Vec<u32> = (0..=END).filter(is_allowed).collect();
        assert!(!allowed.is_empty(), "no token is allowed behind {text:?}");
        let id = match allowed.contains(&END) {
            true => END,
            false => allowed[(step * 31 + text.len()) % allowed.len()],
        };
        if id == END {
            if matches!(source, GrammarSource::JsonSchema(_)) {
                let json = serde_json::from_slice::<serde::de::IgnoredAny>(&text);
                assert!(json.is_ok(), "{:?} is no JSON", String::from_utf8_lossy(&text));
            }
            return;
        }
        if state.advance(id).is_err() {
            return;
        }
        text.push(id as u8);
    }
}

//! The vocabulary as `llguidance` needs it: a trie over the bytes of each id.

use crate::model::tokenizer::Tokenizer;
use llguidance::toktrie::{TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use std::sync::Arc;

struct Vocabulary(TokTrie);

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.0
    }

    fn tokenize_bytes(&self, text: &[u8]) -> Vec<TokenId> {
        self.0.greedy_tokenize(text)
    }

    /// No token is forced, so the model chooses between all tokens that lead to a forced text.
    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}

/// The vocabulary of a model with `vocab` ids. Ids without text are never allowed, except those of
/// `eos`, at least one.
pub(super) fn of(tokenizer: &Tokenizer, vocab: usize, eos: &[u32]) -> TokEnv {
    let words: Vec<Vec<u8>> = (0..vocab as u32).map(|id| word(tokenizer, id)).collect();
    let trie = TokTrie::from(&TokRxInfo::new(vocab as u32, eos[0]), &words);
    Arc::new(Vocabulary(trie.with_eos_tokens(eos)))
}

/// The bytes of an id. No text has the marker of a special token, so its text is not taken for it.
fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let bytes = tokenizer.token_bytes(id);
    match tokenizer.is_special(id) && !bytes.is_empty() {
        true => [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat(),
        false => bytes.to_vec(),
    }
}

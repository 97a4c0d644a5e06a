//! Converts ids to text incrementally and never splits a character.

use super::Tokenizer;
use super::pieces::Decoding;
use std::sync::Arc;

/// Converts the ids of one text. It keeps the bytes of an unfinished character until the next id.
/// The cost of an id depends only on its own bytes.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    skip_special: bool,
    /// Special tokens that have text nevertheless.
    tags: Option<Arc<[u32]>>,
    started: bool,
    /// At most three bytes between calls.
    pending: Vec<u8>,
}

impl Detokenizer {
    /// A detokenizer for one text. `skip_special` omits special tokens.
    pub fn new(skip_special: bool) -> Detokenizer {
        Detokenizer { skip_special, tags: None, started: false, pending: Vec::new() }
    }

    /// The same, but these special tokens always have text.
    pub fn with_tags(self, tags: Option<Arc<[u32]>>) -> Detokenizer {
        Detokenizer { tags, ..self }
    }

    /// Appends the text that is complete after `id`. A malformed sequence becomes U+FFFD as soon as
    /// it is detected.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32, text: &mut String) {
        let is_tag = || self.tags.as_ref().is_some_and(|tags| tags.contains(&id));
        if self.skip_special && tokenizer.is_special(id) && !is_tag() {
            return;
        }
        let mut bytes = tokenizer.token_bytes(id);
        if !self.started && !bytes.is_empty() {
            self.started = true;
            if tokenizer.pieces.decoding == (Decoding::Fallback { strip: true }) {
                bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
            }
        }
        self.pending.extend_from_slice(bytes);
        let mut done = 0;
        while let Err(error) = std::str::from_utf8(&self.pending[done..]) {
            let valid = done + error.valid_up_to();
            append(&self.pending[done..valid], text);
            done = valid;
            let Some(length) = error.error_len() else {
                self.pending.drain(..done);
                return;
            };
            text.push(char::REPLACEMENT_CHARACTER);
            done += length;
        }
        append(&self.pending[done..], text);
        self.pending.clear();
    }

    /// Ends the text: an unfinished character becomes U+FFFD.
    pub fn finish(&mut self, text: &mut String) {
        append(&self.pending, text);
        self.pending.clear();
    }
}

fn append(bytes: &[u8], text: &mut String) {
    text.push_str(&String::from_utf8_lossy(bytes));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::testing::fixture;
    use proptest::prelude::*;
    use std::sync::LazyLock;

    static TOKENIZER: LazyLock<Tokenizer> =
        LazyLock::new(|| Tokenizer::from_hf(&fixture("llama-f32"), 384).unwrap());

    fn byte(byte: u8) -> u32 {
        (0..).find(|&id| TOKENIZER.token_bytes(id) == [byte]).unwrap()
    }

    #[test]
    fn a_character_comes_whole() {
        let mut detokenizer = Detokenizer::new(true);
        let steps: Vec<String> = [0xe2, 0x82, 0xac, b'!', 0xf0, 0x9f, b'?']
            .map(|b| {
                let mut text = String::new();
                detokenizer.push(&TOKENIZER, byte(b), &mut text);
                text
            })
            .into();
        assert_eq!(steps, ["", "", "€", "!", "", "", "\u{fffd}?"]);
    }

    #[test]
    fn the_rest_is_replaced_at_the_end() {
        let (mut detokenizer, mut text) = (Detokenizer::new(true), String::new());
        detokenizer.push(&TOKENIZER, byte(0xe2), &mut text);
        assert_eq!(text, "");
        detokenizer.finish(&mut text);
        assert_eq!(text, "\u{fffd}");
    }

    proptest! {
        /// The reference decodes all ids at once.
        #[test]
        fn pieces_add_up_to_the_whole(
            ids in prop::collection::vec(0u32..390, 0..60), skip_special in any::<bool>(),
        ) {
            let whole = TOKENIZER.inner.decode(&ids, skip_special).unwrap();
            prop_assert_eq!(TOKENIZER.decode(&ids, skip_special), whole);
        }
    }
}

//! Converts text to ids and back, for vocabularies of any file format.
//!
//! Thread: encoding on `tok`, decoding on any thread. Nothing changes after loading.
//! Invariants: `decode` equals the concatenated output of a [`Detokenizer`]. No id panics.
//! Not here: the chat template (`chat`), the ids that end a generation (`config`).

pub mod detokenizer;
mod gguf;
mod hf;
mod pieces;
mod sentence_piece;

pub use detokenizer::Detokenizer;

use super::weights::LoadError;
use pieces::{Decoding, Pieces};
use std::fmt;
use std::path::Path;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

/// A vocabulary with its rules.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    pieces: Pieces,
    /// Ids added before and after a text with special tokens, in addition to those that `inner`
    /// adds.
    begin: Option<u32>,
    end: Option<u32>,
}

/// A text cannot be encoded. Byte-level vocabularies can encode every text, so the vocabulary has
/// an error.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EncodeError(String);

impl fmt::Display for EncodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the text cannot be tokenised: {}", self.0)
    }
}

impl std::error::Error for EncodeError {}

impl Tokenizer {
    /// Reads the metadata of a GGUF file.
    pub fn from_gguf(
        metadata: &super::gguf::metadata::Metadata<'_>,
    ) -> Result<Tokenizer, LoadError> {
        gguf::read(metadata)
    }

    /// Reads `tokenizer.json` in a Hugging Face directory. The model has `vocab` ids, and added
    /// tokens with higher ids are left out.
    pub fn from_hf(directory: &Path, vocab: usize) -> Result<Tokenizer, LoadError> {
        hf::read(directory, vocab)
    }

    /// Makes a tokenizer with each byte as an id, for models without a tokenizer. Ids from `vocab`
    /// on are omitted.
    pub fn of_bytes(vocab: usize, file: &Path) -> Result<Tokenizer, LoadError> {
        let tokens = (0..=0x143).filter_map(char::from_u32);
        let tokens = tokens.filter_map(|c| Some((c.to_string(), pieces::byte_of(c)?.into())));
        let known = tokens.filter(|&(_, id): &(String, u32)| (id as usize) < vocab);
        let bpe = BPE::builder().vocab_and_merges(known.collect::<Vocab>(), Vec::new()).build();
        let mut inner =
            tokenizers::Tokenizer::new(bpe.map_err(|error| LoadError::malformed(file, error))?);
        inner.with_pre_tokenizer(Some(ByteLevel::new(false, true, false)));
        inner.with_decoder(Some(ByteLevel::default()));
        Tokenizer::new(inner, file)
    }

    fn new(mut inner: tokenizers::Tokenizer, file: &Path) -> Result<Tokenizer, LoadError> {
        // Some published files contain the settings of their training.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| LoadError::malformed(file, error))?;
        let pieces = Pieces::new(&inner, Decoding::of(&inner, file)?, file)?;
        Ok(Tokenizer { inner, pieces, begin: None, end: None })
    }

    /// The ids of `text`. A special token written in it becomes its id. `add_special` adds the
    /// tokens around a text that the model expects, such as a beginning of sequence.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, EncodeError> {
        let encoding = self
            .inner
            .encode_fast(text, add_special)
            .map_err(|error| EncodeError(error.to_string()))?;
        let [begin, end] = [self.begin, self.end].map(|id| id.filter(|_| add_special));
        Ok(begin.into_iter().chain(encoding.get_ids().iter().copied()).chain(end).collect())
    }

    /// The text of `ids`, with U+FFFD for invalid UTF-8. Unknown ids have no text.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut text = String::new();
        let mut detokenizer = Detokenizer::new(skip_special);
        for &id in ids {
            detokenizer.push(self, id, &mut text);
        }
        detokenizer.finish(&mut text);
        text
    }

    /// The text of a single id.
    pub fn token_text(&self, id: u32) -> String {
        String::from_utf8_lossy(self.token_bytes(id)).into_owned()
    }

    /// The bytes that an id adds to a text; none for an unknown id.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.pieces.bytes(id)
    }

    /// One more than the highest id.
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }

    /// Upper bound in bytes of the text of `tokens` ids, based on the longest piece.
    pub fn longest_text(&self, tokens: usize) -> usize {
        // Normalisation can shorten a text. NFC shortens a syllable of three letters to a third,
        // and NFKC a letter of four bytes to one byte.
        let shortened = if self.inner.get_normalizer().is_some() { 4 } else { 1 };
        tokens.saturating_mul(self.pieces.longest()).saturating_mul(shortened)
    }

    /// The vocabulary and its rules as one text. Equal texts give equal ids.
    pub fn rules(&self) -> String {
        let inner = self.inner.to_string(false).unwrap_or_default();
        format!("{:?} {:?} {inner}", self.begin, self.end)
    }

    /// Whether an id is a special token instead of text.
    pub fn is_special(&self, id: u32) -> bool {
        self.pieces.is_special(id)
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::gguf::GgufFile;
    use crate::model::testing::{Scratch, fixture, gemma3, smollm2};
    use serde::Deserialize;

    #[derive(Deserialize)]
    struct Golden {
        tokenizer: String,
        rows: Vec<Row>,
    }

    #[derive(Deserialize)]
    struct Row {
        text: String,
        ids: Vec<u32>,
        decoded: String,
        skipped: String,
    }

    fn conforms(name: &str, tokenizer: &Tokenizer) {
        let text = include_str!("../../../tests/goldens/tokenizers.json");
        let goldens: Vec<Golden> = serde_json::from_str(text).unwrap();
        let golden = goldens.iter().find(|golden| golden.tokenizer == name).unwrap();
        for row in &golden.rows {
            assert_eq!(
                tokenizer.encode(&row.text, true).unwrap(),
                row.ids,
                "{name}: {:?}",
                row.text
            );
            assert_eq!(tokenizer.decode(&row.ids, false), row.decoded, "{name}: {:?}", row.text);
            assert_eq!(tokenizer.decode(&row.ids, true), row.skipped, "{name}: {:?}", row.text);
        }
    }

    fn of_gguf(name: &str) -> Tokenizer {
        Tokenizer::from_gguf(&GgufFile::open(&fixture(name)).unwrap().metadata()).unwrap()
    }

    #[test]
    fn every_pre_tokenizer_conforms_from_gguf() {
        conforms("smollm", &of_gguf("llama.Q8_0.gguf"));
        conforms("gpt-2", &of_gguf("llama-mqa-yarn.Q8_0.gguf"));
        conforms("qwen2", &of_gguf("qwen2.Q8_0.gguf"));
        conforms("llama-bpe", &of_gguf("llama-mha-llama3.F16.gguf"));
    }

    #[test]
    fn falcon_h1_splits_texts_as_llama3() {
        let mut bytes = std::fs::read(fixture("llama-mha-llama3.F16.gguf")).unwrap();
        let (theirs, ours) = (b"llama-bpe", b"falcon-h1");
        let place = bytes.windows(theirs.len()).position(|found| found == theirs).unwrap();
        bytes[place..place + ours.len()].copy_from_slice(ours);
        let scratch = Scratch::new();
        let path = scratch.path().join("falcon.gguf");
        std::fs::write(&path, bytes).unwrap();
        let file = GgufFile::open(&path).unwrap();
        conforms("llama-bpe", &Tokenizer::from_gguf(&file.metadata()).unwrap());
    }

    #[test]
    fn directories_conform() {
        for (name, directory) in [
            ("smollm", "llama-f32"),
            ("qwen2", "qwen3-bf16"),
            ("gpt-2", "llama-mqa-yarn-f32"),
            ("llama-bpe", "llama-mha-llama3-bf16"),
        ] {
            conforms(name, &Tokenizer::from_hf(&fixture(directory), 384).unwrap());
        }
    }

    #[test]
    fn smollm2_conforms() {
        let Some(path) = smollm2() else { return };
        let tokenizer = Tokenizer::from_gguf(&GgufFile::open(&path).unwrap().metadata()).unwrap();
        conforms("smollm2", &tokenizer);
        assert_eq!(tokenizer.vocab_size(), 49152);
        assert_eq!(tokenizer.encode("<|im_start|>", false).unwrap(), [1]);
        assert!(tokenizer.is_special(1) && !tokenizer.is_special(17));
    }

    /// Against the tokenizer that Google has published.
    #[test]
    fn gemma3_conforms() {
        let Some(path) = gemma3() else { return };
        let tokenizer = Tokenizer::from_gguf(&GgufFile::open(&path).unwrap().metadata()).unwrap();
        conforms("gemma3", &tokenizer);
        assert_eq!(tokenizer.vocab_size(), 262_144);
        assert_eq!(tokenizer.encode("a", false).unwrap().len(), 1);
    }

    #[test]
    fn special_tokens_are_added_only_if_requested() {
        let tokenizer = of_gguf("llama-mha-llama3.F16.gguf");
        let bare = tokenizer.encode("x", false).unwrap();
        assert_eq!(tokenizer.encode("x", true).unwrap(), [&[0], bare.as_slice()].concat());
    }

    #[test]
    fn unknown_ids_are_harmless() {
        let tokenizer = of_gguf("llama.Q8_0.gguf");
        assert_eq!(tokenizer.decode(&[u32::MAX, 384], false), "");
        assert!(tokenizer.token_bytes(u32::MAX).is_empty() && !tokenizer.is_special(u32::MAX));
    }
}

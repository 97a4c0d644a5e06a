//! A table of the bytes that each id adds to a text.

use crate::limits::TOKENIZER_VOCAB_MAX;
use crate::model::weights::LoadError;
use serde_json::Value;
use std::path::Path;

/// The encoding of bytes in the vocabulary.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Decoding {
    /// GPT-2's: a printable character for each byte.
    ByteLevel,
    /// SentencePiece's: `▁` for a space, `<0x0A>` for a byte. With `strip` a text loses one leading
    /// space.
    Fallback { strip: bool },
}

impl Decoding {
    /// Finds the encoding from a tokenizer's decoder. The error shows an unknown decoder.
    pub(super) fn of(inner: &tokenizers::Tokenizer, file: &Path) -> Result<Decoding, LoadError> {
        let decoder = serde_json::to_value(inner.get_decoder()).unwrap_or(Value::Null);
        if decoder["type"] == "ByteLevel" {
            return Ok(Decoding::ByteLevel);
        }
        let steps = decoder["decoders"].as_array().map_or(&[][..], Vec::as_slice);
        let is = |at: usize, kind: &str| steps.get(at).is_some_and(|step| step["type"] == kind);
        let space =
            |at: usize| steps[at]["pattern"]["String"] == "▁" && steps[at]["content"] == " ";
        let strip = |at: usize| {
            let step = &steps[at];
            step["content"] == " " && step["start"] == 1 && step["stop"] == 0
        };
        if steps.len() == 1 && is(0, "ByteLevel") {
            return Ok(Decoding::ByteLevel);
        }
        if is(0, "Replace") && space(0) && is(1, "ByteFallback") && is(2, "Fuse") {
            match steps.len() {
                3 => return Ok(Decoding::Fallback { strip: false }),
                4 if is(3, "Strip") && strip(3) => return Ok(Decoding::Fallback { strip: true }),
                _ => {}
            }
        }
        Err(LoadError::field(file, "decoder", "ByteLevel, or ByteFallback as in Llama 2", decoder))
    }

    fn append(self, token: &str, bytes: &mut Vec<u8>) {
        match self {
            Decoding::ByteLevel => {
                let start = bytes.len();
                for c in token.chars() {
                    let Some(byte) = byte_of(c) else {
                        // An added token, written literally.
                        bytes.truncate(start);
                        bytes.extend(token.as_bytes());
                        return;
                    };
                    bytes.push(byte);
                }
            }
            Decoding::Fallback { .. } => {
                let hex = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
                match hex
                    .filter(|hex| hex.len() == 2)
                    .and_then(|hex| u8::from_str_radix(hex, 16).ok())
                {
                    Some(byte) => bytes.push(byte),
                    None => bytes.extend(token.replace('▁', " ").bytes()),
                }
            }
        }
    }
}

/// The byte that GPT-2 writes as `c`. A printable Latin-1 character is the byte with the same
/// value. The other bytes are written, in order, as the characters from U+0100.
pub(super) fn byte_of(c: char) -> Option<u8> {
    match u32::from(c) {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => Some(code as u8),
        code @ 0x100..=0x120 => Some((code - 0x100) as u8),
        code @ 0x121..=0x142 => Some((code - 0x121 + 0x7f) as u8),
        0x143 => Some(0xad),
        _ => None,
    }
}

/// The bytes of all ids.
pub(super) struct Pieces {
    bytes: Vec<u8>,
    /// End of each id's bytes; the sign bit marks a special token.
    ends: Vec<u32>,
    /// Length of the longest piece in bytes.
    longest: usize,
    pub(super) decoding: Decoding,
}

const SPECIAL: u32 = 1 << 31;

impl Pieces {
    pub(super) fn new(
        inner: &tokenizers::Tokenizer,
        decoding: Decoding,
        file: &Path,
    ) -> Result<Pieces, LoadError> {
        let vocab = inner.get_vocab(true);
        let size = vocab.values().max().map_or(0, |&id| id as usize + 1);
        if size == 0 || size > TOKENIZER_VOCAB_MAX {
            let expected = format!("a vocabulary of 1 to {TOKENIZER_VOCAB_MAX} ids");
            return Err(LoadError::field(file, "tokens", expected, size));
        }
        let mut tokens = vec![""; size];
        for (token, &id) in &vocab {
            tokens[id as usize] = token;
        }
        let added = inner.get_added_tokens_decoder();
        let (mut bytes, mut ends, mut longest) = (Vec::new(), Vec::with_capacity(size), 0);
        for (id, token) in (0..).zip(tokens) {
            let (added, start) = (added.get(&id), bytes.len());
            decoding.append(added.map_or(token, |added| &added.content), &mut bytes);
            longest = longest.max(bytes.len() - start);
            let special = added.is_some_and(|added| added.special);
            ends.push(bytes.len() as u32 | if special { SPECIAL } else { 0 });
        }
        if bytes.len() >= SPECIAL as usize {
            return Err(LoadError::field(file, "tokens", "less than 2 GiB of text", bytes.len()));
        }
        Ok(Pieces { bytes, ends, longest, decoding })
    }

    /// Most bytes that one id adds.
    pub(super) fn longest(&self) -> usize {
        self.longest
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(super) fn bytes(&self, id: u32) -> &[u8] {
        let end = |index: usize| (self.ends[index] & !SPECIAL) as usize;
        let index = id as usize;
        if index >= self.ends.len() {
            return &[];
        }
        &self.bytes[if index == 0 { 0 } else { end(index - 1) }..end(index)]
    }

    pub(super) fn is_special(&self, id: u32) -> bool {
        self.ends.get(id as usize).is_some_and(|end| end & SPECIAL != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_one_character() {
        let mut seen = [false; 256];
        for byte in (0..0x400).filter_map(char::from_u32).filter_map(byte_of) {
            assert!(!std::mem::replace(&mut seen[byte as usize], true));
        }
        assert_eq!(seen, [true; 256]);
        assert_eq!([byte_of('Ġ'), byte_of('Ċ'), byte_of(' ')], [Some(b' '), Some(b'\n'), None]);
    }

    #[test]
    fn fallback_writes_bytes_and_spaces() {
        let decoding = Decoding::Fallback { strip: true };
        let mut bytes = Vec::new();
        for token in ["▁a▁b", "<0xE2>", "<0x>", "<s>"] {
            decoding.append(token, &mut bytes);
        }
        assert_eq!(bytes, b" a b\xe2<0x><s>");
    }
}

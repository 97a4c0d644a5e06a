//! A tokenizer from GGUF metadata: byte-level BPE with the pre-tokenizer given in the file, or a
//! SentencePiece vocabulary.

use super::{Tokenizer, sentence_piece};
use crate::limits::TOKENIZER_VOCAB_MAX;
use crate::model::gguf::metadata::Metadata;
use crate::model::weights::LoadError;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior};

/// Token types of the format.
const CONTROL: u32 = 3;
const USER_DEFINED: u32 = 4;

/// The words of Qwen 2 and later models: each digit is a word.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The words of Llama 3: a word has up to three digits.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

pub(super) fn read(metadata: &Metadata<'_>) -> Result<Tokenizer, LoadError> {
    const MODEL: &str = "tokenizer.ggml.model";
    let tokens = required_strings(metadata, "tokenizer.ggml.tokens")?;
    if tokens.len() > TOKENIZER_VOCAB_MAX {
        let expected = format!("at most {TOKENIZER_VOCAB_MAX} tokens");
        let found = tokens.len();
        return Err(LoadError::field(metadata.file, "tokenizer.ggml.tokens", expected, found));
    }
    let types = types(metadata, tokens.len())?;
    let (mut inner, begins) = match metadata.string(MODEL)? {
        Some("gpt2") => byte_level(metadata, &tokens)?,
        Some("llama") => (sentence_piece::read(metadata, &tokens, &types)?, true),
        found => {
            let expected = "gpt2 (byte-level BPE) or llama (SentencePiece)";
            let found = found.unwrap_or("nothing");
            return Err(LoadError::field(metadata.file, MODEL, expected, found));
        }
    };
    inner.add_tokens(&added(&tokens, &types));

    let mut tokenizer = Tokenizer::new(inner, metadata.file)?;
    let around = |name: &str, default: bool| -> Result<Option<u32>, LoadError> {
        if !metadata.bool(&format!("tokenizer.ggml.add_{name}_token"))?.unwrap_or(default) {
            return Ok(None);
        }
        metadata.required_u32(&format!("tokenizer.ggml.{name}_token_id")).map(Some)
    };
    tokenizer.begin = around("bos", begins)?;
    tokenizer.end = around("eos", false)?;
    Ok(tokenizer)
}

/// A tokenizer with byte-level BPE, and whether a text begins with a token of its own unless the
/// file says otherwise.
fn byte_level(
    metadata: &Metadata<'_>,
    tokens: &[&str],
) -> Result<(tokenizers::Tokenizer, bool), LoadError> {
    const PRE: &str = "tokenizer.ggml.pre";
    let pre = metadata.string(PRE)?.unwrap_or("nothing");
    // llama.cpp splits texts of Falcon-H1 as those of Llama 3.
    let pre = if pre == "falcon-h1" { "llama-bpe" } else { pre };
    let Some(words) = words(pre) else {
        let expected = "smollm, qwen2, llama-bpe, falcon-h1, gpt-2 or default";
        return Err(LoadError::field(metadata.file, PRE, expected, pre));
    };
    let llama3 = pre == "llama-bpe";
    let mut inner = tokenizers::Tokenizer::new(bpe(metadata, tokens, llama3)?);
    inner.with_pre_tokenizer(Some(words));
    inner.with_decoder(Some(ByteLevel::default()));
    if pre == "qwen2" {
        inner.with_normalizer(Some(NFC));
    }
    Ok((inner, llama3))
}

/// The pre-tokenizer with this name in the format: it splits a text into words before merging.
fn words(pre: &str) -> Option<Sequence> {
    let level = |use_regex| PreTokenizerWrapper::from(ByteLevel::new(false, true, use_regex));
    let split = |regex: &str| {
        let pattern = SplitPattern::Regex(regex.to_owned());
        Some(Split::new(pattern, SplitDelimiterBehavior::Isolated, false).ok()?.into())
    };
    Some(Sequence::new(match pre {
        "smollm" => vec![Digits::new(true).into(), level(true)],
        "gpt-2" | "default" => vec![level(true)],
        "qwen2" => vec![split(QWEN2)?, level(false)],
        "llama-bpe" => vec![split(LLAMA3)?, level(false)],
        _ => return None,
    }))
}

fn bpe(metadata: &Metadata<'_>, tokens: &[&str], ignore_merges: bool) -> Result<BPE, LoadError> {
    const MERGES: &str = "tokenizer.ggml.merges";
    let merges = required_strings(metadata, MERGES)?
        .into_iter()
        .map(|merge| {
            let (left, right) = merge.split_once(' ').ok_or_else(|| {
                LoadError::field(metadata.file, MERGES, "two tokens and a space", merge)
            })?;
            Ok((left.to_owned(), right.to_owned()))
        })
        .collect::<Result<Vec<_>, LoadError>>()?;
    let vocab: Vocab = tokens.iter().map(|&token| token.to_owned()).zip(0..).collect();
    BPE::builder()
        .vocab_and_merges(vocab, merges)
        .ignore_merges(ignore_merges)
        .build()
        .map_err(|error| LoadError::field(metadata.file, MERGES, "merges of its tokens", error))
}

/// The type of each token.
fn types(metadata: &Metadata<'_>, tokens: usize) -> Result<Vec<u32>, LoadError> {
    const TYPES: &str = "tokenizer.ggml.token_type";
    let types =
        metadata.u32s(TYPES)?.ok_or_else(|| metadata.missing(TYPES, "a list of numbers"))?;
    if types.len() != tokens {
        return Err(LoadError::field(
            metadata.file,
            TYPES,
            format!("{tokens} numbers"),
            types.len(),
        ));
    }
    Ok(types)
}

/// Tokens that are matched before anything else: control tokens and user-defined tokens.
fn added(tokens: &[&str], types: &[u32]) -> Vec<AddedToken> {
    let added =
        tokens.iter().zip(types).filter(|(_, kind)| matches!(**kind, CONTROL | USER_DEFINED));
    added
        .map(|(&token, kind)| AddedToken::from(token, *kind == CONTROL).normalized(false))
        .collect()
}

fn required_strings<'a>(metadata: &Metadata<'a>, key: &str) -> Result<Vec<&'a str>, LoadError> {
    metadata.strings(key)?.ok_or_else(|| metadata.missing(key, "a list of strings"))
}

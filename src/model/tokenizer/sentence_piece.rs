//! A SentencePiece vocabulary from GGUF metadata, as Llama 2 and Gemma have it. Its BPE joins those
//! two neighbours that form the token with the highest score.

use crate::limits::{TOKENIZER_MERGES_MAX, TOKENIZER_PIECE_CHARS_MAX};
use crate::model::gguf::metadata::Metadata;
use crate::model::weights::LoadError;
use std::collections::HashMap;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence as Decoders;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::{NormalizerWrapper, Prepend, Replace, Sequence as Normalizers};

const SCORES: &str = "tokenizer.ggml.scores";
/// The type of tokens that are made of others.
const NORMAL: u32 = 1;
/// SentencePiece's letter for a space.
const SPACE: &str = "▁";

/// The tokenizer of these tokens and their types, without tokens around a text.
pub(super) fn read(
    metadata: &Metadata<'_>,
    tokens: &[&str],
    types: &[u32],
) -> Result<tokenizers::Tokenizer, LoadError> {
    let wrong = |error: tokenizers::Error| LoadError::field(metadata.file, SCORES, "BPE", error);
    let vocab: Vocab = tokens.iter().map(|&token| token.to_owned()).zip(0..).collect();
    let merges = merges(metadata, tokens, types)?;
    let mut bpe = BPE::builder().vocab_and_merges(vocab, merges).byte_fallback(true).fuse_unk(true);
    if let Some(id) = metadata.u32("tokenizer.ggml.unknown_token_id")? {
        let unknown = tokens.get(id as usize).ok_or_else(|| {
            let expected = format!("an id below {}", tokens.len());
            LoadError::field(metadata.file, "tokenizer.ggml.unknown_token_id", expected, id)
        })?;
        bpe = bpe.unk_token((*unknown).to_owned());
    }
    let mut inner = tokenizers::Tokenizer::new(bpe.build().map_err(wrong)?);
    let spaces: NormalizerWrapper = Replace::new(" ", SPACE).map_err(wrong)?.into();
    let mut decoders: Vec<DecoderWrapper> = vec![
        Replace::new(SPACE, " ").map_err(wrong)?.into(),
        ByteFallback::new().into(),
        Fuse::new().into(),
    ];
    if metadata.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true) {
        let prefix = Prepend::new(SPACE.into()).into();
        inner.with_normalizer(Some(Normalizers::new(vec![prefix, spaces])));
        decoders.push(Strip::new(' ', 1, 0).into());
    } else {
        inner.with_normalizer(Some(spaces));
    }
    inner.with_decoder(Some(Decoders::new(decoders)));
    Ok(inner)
}

/// All pairs of tokens that form a token, best first.
fn merges(metadata: &Metadata<'_>, tokens: &[&str], types: &[u32]) -> Result<Merges, LoadError> {
    let scores =
        metadata.f32s(SCORES)?.ok_or_else(|| metadata.missing(SCORES, "a list of numbers"))?;
    if scores.len() != tokens.len() {
        let expected = format!("{} numbers", tokens.len());
        return Err(LoadError::field(metadata.file, SCORES, expected, scores.len()));
    }
    let normal = |&(index, _): &(usize, &&str)| types[index] == NORMAL;
    let ids: HashMap<&str, usize> =
        tokens.iter().enumerate().filter(normal).map(|(index, &token)| (token, index)).collect();
    let mut pairs = Vec::new();
    let wrong = |expected: String, found: String| {
        LoadError::field(metadata.file, "tokenizer.ggml.tokens", expected, found)
    };
    for (id, &token) in tokens.iter().enumerate().filter(normal) {
        if token.chars().count() > TOKENIZER_PIECE_CHARS_MAX {
            let expected = format!("at most {TOKENIZER_PIECE_CHARS_MAX} letters in a token");
            return Err(wrong(expected, format!("more in token {id}")));
        }
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            if let (Some(&left), Some(&right)) = (ids.get(left), ids.get(right)) {
                pairs.push((id, left, right));
            }
        }
        if pairs.len() > TOKENIZER_MERGES_MAX {
            let expected = format!("at most {TOKENIZER_MERGES_MAX} pairs of tokens that form one");
            return Err(wrong(expected, format!("more in the first {} tokens", id + 1)));
        }
    }
    // Of equal scores, SentencePiece joins the leftmost pair first, and a rank cannot say that.
    pairs.sort_by(|a, b| scores[b.0].total_cmp(&scores[a.0]).then(a.cmp(b)));
    Ok(pairs
        .into_iter()
        .map(|(_, left, right)| (tokens[left].to_owned(), tokens[right].to_owned()))
        .collect())
}

#[cfg(test)]
mod tests {
    use crate::model::gguf::header::Header;
    use crate::model::gguf::metadata::Metadata;
    use crate::model::gguf::writer::GgufWriter;
    use crate::model::tokenizer::Tokenizer;
    use std::path::Path;

    const FIRST_BYTE: u32 = 4;
    const NORMAL: [(&str, f32); 10] = [
        ("▁", -1.0),
        ("a", -2.0),
        ("b", -3.0),
        ("c", -4.0),
        ("bc", -5.0),
        ("ab", -6.0),
        ("▁a", -7.0),
        ("abc", -8.0),
        ("▁abc", -9.0),
        ("bca", -4.5),
    ];

    /// The vocabulary above after control tokens, a user-defined token of two spaces and all bytes.
    fn writer(normal: &[(&str, f32)]) -> GgufWriter {
        writer_with(normal, usize::MAX, 0)
    }

    /// With only some of the scores, and another id of unknown letters.
    fn writer_with(normal: &[(&str, f32)], scored: usize, unknown: u32) -> GgufWriter {
        let bytes: Vec<String> = (0..256).map(|byte| format!("<0x{byte:02X}>")).collect();
        let mut tokens = vec!["<unk>", "<s>", "</s>", "  "];
        tokens.extend(bytes.iter().map(String::as_str));
        tokens.extend(normal.iter().map(|(token, _)| *token));
        let types = [vec![2, 3, 3, 4], vec![6; 256], vec![1; normal.len()]].concat();
        let scores = vec![0.0; FIRST_BYTE as usize + 256].into_iter();
        let scores: Vec<f32> =
            scores.chain(normal.iter().map(|(_, score)| *score)).take(scored).collect();
        GgufWriter::default()
            .string("tokenizer.ggml.model", "llama")
            .strings("tokenizer.ggml.tokens", &tokens)
            .i32s("tokenizer.ggml.token_type", &types)
            .f32s("tokenizer.ggml.scores", &scores)
            .u32("tokenizer.ggml.bos_token_id", 1)
            .u32("tokenizer.ggml.unknown_token_id", unknown)
    }

    fn read(writer: GgufWriter) -> Result<Tokenizer, String> {
        let bytes = writer.finish();
        let header = Header::parse(&bytes).unwrap();
        let metadata = Metadata { file: Path::new("model.gguf"), bytes: &bytes, header: &header };
        Tokenizer::from_gguf(&metadata).map_err(|error| error.to_string())
    }

    fn pieces(tokenizer: &Tokenizer, text: &str) -> Vec<String> {
        let ids = tokenizer.encode(text, false).unwrap();
        ids.iter().map(|&id| tokenizer.token_text(id)).collect()
    }

    #[test]
    fn the_best_union_of_neighbours_comes_first() {
        let tokenizer = read(writer(&NORMAL).bool("tokenizer.ggml.add_space_prefix", false));
        let tokenizer = tokenizer.unwrap();
        // From left to right, "ab" and "c" would remain "abc".
        assert_eq!(pieces(&tokenizer, "abca"), ["a", "bca"]);
        assert_eq!(pieces(&tokenizer, "abc"), ["abc"]);
        assert_eq!(pieces(&tokenizer, "x abc  ab"), ["x", " abc", "  ", "ab"]);
        assert_eq!(tokenizer.encode("é", false).unwrap(), [0xc3, 0xa9].map(|b| FIRST_BYTE + b));
        for text in ["", " ", "abc é\n  x", "</s>a"] {
            let ids = tokenizer.encode(text, true).unwrap();
            assert_eq!(ids[0], 1);
            assert_eq!(tokenizer.decode(&ids[1..], false), text);
        }
    }

    #[test]
    fn a_space_comes_first_unless_the_file_says_otherwise() {
        let tokenizer = read(writer(&NORMAL)).unwrap();
        assert_eq!(pieces(&tokenizer, "abc"), [" abc"]);
        let ids = tokenizer.encode("abc", false).unwrap();
        assert_eq!(tokenizer.decode(&ids, false), "abc");
    }

    #[test]
    fn vocabularies_that_do_not_fit_are_refused_by_name() {
        let long = "a".repeat(257);
        // All texts of two letters up to this length.
        let mut many = vec![String::new()];
        for length in 1..=17 {
            let longest = many.iter().filter(|text| text.len() + 1 == length);
            let longer: Vec<String> =
                longest.flat_map(|text| ["a", "b"].map(|end| text.clone() + end)).collect();
            many.extend(longer);
        }
        let many: Vec<(&str, f32)> = many[1..].iter().map(|text| (text.as_str(), 0.0)).collect();
        for (writer, parts) in [
            (writer(&many), ["tokenizer.ggml.tokens", "2097152 pairs"]),
            (writer(&[(&long, 0.0)]), ["tokenizer.ggml.tokens", "256 letters"]),
            (writer_with(&NORMAL, 9, 0), ["tokenizer.ggml.scores", "270 numbers"]),
            (writer_with(&NORMAL, 270, 900), ["unknown_token_id", "below 270"]),
        ] {
            let message = read(writer).unwrap_err();
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        }
    }
}

//! A tokenizer from the `tokenizer.json` of a Hugging Face directory.

use super::Tokenizer;
use crate::model::weights::LoadError;
use std::path::Path;

pub(super) fn read(directory: &Path) -> Result<Tokenizer, LoadError> {
    let path = directory.join("tokenizer.json");
    let bytes = std::fs::read(&path).map_err(|error| LoadError::io(&path, error))?;
    let inner = tokenizers::Tokenizer::from_bytes(bytes)
        .map_err(|error| LoadError::malformed(&path, format!("not a tokenizer: {error}")))?;
    Tokenizer::new(inner, &path)
}

//! A tokenizer from the `tokenizer.json` of a Hugging Face directory.

use super::Tokenizer;
use crate::model::weights::LoadError;
use serde_json::Value;
use std::path::Path;

/// Reads the file of a model with `vocab` ids.
pub(super) fn read(directory: &Path, vocab: usize) -> Result<Tokenizer, LoadError> {
    let path = directory.join("tokenizer.json");
    let bytes = std::fs::read(&path).map_err(|error| LoadError::io(&path, error))?;
    let wrong = |error: &dyn std::fmt::Display| {
        LoadError::malformed(&path, format!("not a tokenizer: {error}"))
    };
    let mut inner = tokenizers::Tokenizer::from_bytes(&bytes).map_err(|error| wrong(&error))?;
    let is_beyond = |id: u64| id >= vocab as u64;
    if inner.get_added_tokens_decoder().keys().any(|&id| is_beyond(id.into())) {
        // The text models of a family with images have the tokenizer of the others, but no row of
        // the embedding for a token of images.
        let mut file: Value = serde_json::from_slice(&bytes).map_err(|error| wrong(&error))?;
        if let Some(added) = file["added_tokens"].as_array_mut() {
            added.retain(|token| !token["id"].as_u64().is_some_and(is_beyond));
        }
        let within = serde_json::to_vec(&file).map_err(|error| wrong(&error))?;
        inner = tokenizers::Tokenizer::from_bytes(within).map_err(|error| wrong(&error))?;
    }
    Tokenizer::new(inner, &path)
}

//! The values that two workers compare before they share KV: equal parts mean equal models.

use super::chat::ChatTemplate;
use super::config::ModelConfig;
use super::inventory;
use super::tokenizer::Tokenizer;
use super::weights::{LoadError, WeightSource};
use bytemuck::{Pod, Zeroable};
use sha2::{Digest, Sha256};

/// A SHA-256.
pub type PartHash = [u8; 32];

/// One hash per part, so that an error can name the part that differs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Pod, Zeroable)]
#[repr(C)]
pub struct ModelFingerprint {
    /// Sizes and constants.
    pub config: PartHash,
    /// Names, types and shapes of all tensors, and samples of their bytes.
    pub weights: PartHash,
    /// The vocabulary and its rules.
    pub tokenizer: PartHash,
    /// The chat template and its special tokens; the hash of an empty string if there is none.
    pub template: PartHash,
}

/// Bytes of a sample, and samples of a tensor. Two trainings differ in every sample, so a few
/// samples suffice. Only a few memory pages of each tensor are read.
const SAMPLE: usize = 64;
const SAMPLES: usize = 4;

impl ModelFingerprint {
    /// Reads samples of all tensors.
    pub fn new(
        config: &ModelConfig,
        weights: &dyn WeightSource,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
    ) -> Result<ModelFingerprint, LoadError> {
        let mut hash = Sha256::new();
        for expected in inventory::tensors(config) {
            let Some(tensor) = weights.tensor(&expected.name)? else { continue };
            let head = (expected.name, tensor.dtype, tensor.rows, tensor.cols, tensor.order);
            hash.update(format!("{head:?}"));
            let last = tensor.bytes.len().saturating_sub(SAMPLE);
            for sample in 0..SAMPLES {
                let start = last * sample / (SAMPLES - 1);
                hash.update(&tensor.bytes[start..tensor.bytes.len().min(start + SAMPLE)]);
            }
        }
        Ok(ModelFingerprint {
            config: identity(Sha256::new().chain_update(config_text(config))),
            weights: identity(hash),
            tokenizer: identity(Sha256::new().chain_update(tokenizer.rules())),
            template: identity(
                Sha256::new().chain_update(template.map_or(String::new(), ChatTemplate::rules)),
            ),
        })
    }
}

/// The configuration as text, with the division of recurrent state, which crosses in pieces.
/// Earlier versions know neither experts nor windows nor Gemma nor recurrent layers, so a model
/// without them has the text that they hash.
fn config_text(config: &ModelConfig) -> String {
    let text = format!("{config:?}").replace(", delta: None }", " }");
    let text = text.replace(", multipliers: None }", " }");
    let text = text.replace(", mamba: None }", " }");
    let text = text.replace(", gemma: None }", " }");
    let text = text.replace(", window: None }", " }").replace(", experts: None }", " }");
    match config.state_shape() {
        Some(shape) => format!("{text} {shape:?}"),
        None => text,
    }
}

fn identity(hash: Sha256) -> PartHash {
    let mut identity = PartHash::default();
    identity.copy_from_slice(&hash.finalize()[..32]);
    identity
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::hf::config;
    use crate::model::testing::fixture;

    #[test]
    fn a_dense_model_has_the_text_of_versions_without_experts() {
        let dense = config_text(&config::read(&fixture("qwen3-f32")).unwrap());
        assert!(dense.ends_with("bos: Some(0), eos: [2] }"), "{dense}");
        let sparse = config_text(&config::read(&fixture("qwen3-moe-f32")).unwrap());
        assert!(sparse.contains("eos: [2], experts: Some(ExpertConfig { count: 5,"), "{sparse}");
        let recurrent = config_text(&config::read(&fixture("mamba2-f32")).unwrap());
        let shape = "} StateShape { layers: 2, pieces: 11, piece_elements: 256 }";
        assert!(recurrent.ends_with(shape), "{recurrent}");
    }
}

//! Random weights for any model configuration, to test without model files (`--load-format dummy`).
//!
//! Invariants: the same configuration gives the same weights. They take the memory of the largest
//! tensor: all tensors are windows of one random buffer, at offsets that follow from their names.

use super::config::ModelConfig;
use super::inventory;
use super::tensor::{RowOrder, TensorType, TensorView};
use super::weights::{LoadError, WeightSource};
use crate::limits::{DUMMY_ELEMENTS_MAX, MODEL_LAYERS_MAX};
use crate::stdx::rng::{INCREMENT, finalize, mix};
use half::{bf16, f16};
use std::collections::BTreeMap;
use std::path::Path;

/// Largest absolute value of a weight. The deviation is then 0.02, as in usual initialisations.
const SPREAD: f32 = 0.035;
/// Elements beyond the largest tensor, so that tensors of its size have different offsets.
const SLACK: usize = 4096;

/// Weights made only from a configuration.
pub struct DummyWeights {
    dtype: TensorType,
    config: ModelConfig,
    /// First element and shape by name. A norm has none in `random`.
    tensors: BTreeMap<String, (Option<usize>, usize, usize)>,
    random: Vec<u8>,
    /// Norms that change nothing, by the number that they lack: 0 and 1.
    norms: [Vec<u8>; 2],
}

impl DummyWeights {
    /// Weights of a plain `dtype`: F32, F16 or BF16. `file` is the file of `config`, for errors.
    pub fn new(
        config: &ModelConfig,
        dtype: TensorType,
        file: &Path,
    ) -> Result<DummyWeights, LoadError> {
        if config.layers > MODEL_LAYERS_MAX {
            let expected = format!("at most {MODEL_LAYERS_MAX}");
            return Err(LoadError::field(file, "num_hidden_layers", expected, config.layers));
        }
        let (mut tensors, mut largest, mut widest) = (BTreeMap::new(), 0, 0);
        for tensor in inventory::tensors(config) {
            let norm = tensor.name.contains("norm");
            let mut state =
                tensor.name.bytes().fold(0, |hash, byte| finalize(hash ^ u64::from(byte)));
            let offset = (!norm).then(|| next(&mut state) as usize % SLACK);
            let elements = tensor.rows.saturating_mul(tensor.cols);
            if elements > DUMMY_ELEMENTS_MAX {
                let expected = format!("at most {DUMMY_ELEMENTS_MAX} elements");
                return Err(LoadError::tensor(file, tensor.name, expected, elements));
            }
            largest = largest.max(elements);
            widest = widest.max(if norm { tensor.cols } else { 0 });
            tensors.insert(tensor.name, (offset, tensor.rows, tensor.cols));
        }
        let mut state = 0;
        let random = (0..largest + SLACK).map(|_| {
            let unit = (next(&mut state) >> 40) as f32 / (1u32 << 23) as f32 - 1.0;
            unit * SPREAD
        });
        let random = encode(dtype, random);
        let norms = [0.0, 1.0].map(|lacks| encode(dtype, std::iter::repeat_n(1.0 - lacks, widest)));
        Ok(DummyWeights { dtype, config: config.clone(), tensors, random, norms })
    }
}

impl WeightSource for DummyWeights {
    fn tensor(&self, name: &str) -> Result<Option<TensorView<'_>>, LoadError> {
        Ok(self.tensors.get(name).map(|&(offset, rows, cols)| {
            let size = self.dtype.block().1;
            let bytes = match offset {
                Some(offset) => &self.random[offset * size..(offset + rows * cols) * size],
                None => {
                    let lacks = self.config.norm_offset(name) == 1.0;
                    &self.norms[usize::from(lacks)][..cols * size]
                }
            };
            TensorView { dtype: self.dtype, rows, cols, order: RowOrder::Natural, bytes }
        }))
    }

    fn describe(&self) -> String {
        "dummy weights".to_owned()
    }
}

fn encode(dtype: TensorType, values: impl Iterator<Item = f32>) -> Vec<u8> {
    match dtype {
        TensorType::F16 => values.flat_map(|x| f16::from_f32(x).to_le_bytes()).collect(),
        TensorType::Bf16 => values.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
        _ => values.flat_map(f32::to_le_bytes).collect(),
    }
}

fn next(state: &mut u64) -> u64 {
    let word = mix(*state);
    *state = state.wrapping_add(INCREMENT);
    word
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::hf::HfDirectory;
    use crate::model::quant::dequantise_row;
    use crate::model::testing::fixture;

    #[test]
    fn every_tensor_is_there_and_always_the_same() {
        let directory = HfDirectory::open(&fixture("llama-mha-llama3-bf16")).unwrap();
        let config = directory.config();
        let file = Path::new("dummy");
        let make = |config: &ModelConfig| DummyWeights::new(config, TensorType::Bf16, file);
        let [one, two] = [(); 2].map(|()| make(config).unwrap());
        inventory::check(config, &one, directory.names(), file).unwrap();
        for name in directory.names() {
            let [a, b] = [&one, &two].map(|weights| weights.tensor(name).unwrap().unwrap());
            assert_eq!(a.bytes, b.bytes);
            let mut row = vec![0.0; a.cols];
            dequantise_row(&a, a.rows - 1, &mut row);
            assert!(
                row.iter().all(|x| x.abs() <= SPREAD * 1.01) != name.contains("norm"),
                "{name}"
            );
        }
        let sparse = HfDirectory::open(&fixture("qwen2-moe-f32")).unwrap();
        let weights = make(sparse.config()).unwrap();
        inventory::check(sparse.config(), &weights, sparse.names(), file).unwrap();
        let key = |part| {
            one.tensor(&format!("model.layers.0.self_attn.{part}_proj.weight")).unwrap().unwrap()
        };
        assert_ne!(key("q").bytes, key("k").bytes);

        let refusal = |config| make(&config).err().unwrap().to_string();
        let deep = ModelConfig { layers: u32::MAX as usize, ..config.clone() };
        assert!(refusal(deep).contains("num_hidden_layers"));
        let wide =
            ModelConfig { vocab: u32::MAX as usize, hidden: u32::MAX as usize, ..config.clone() };
        assert!(refusal(wide).contains("embed_tokens"));
    }
}

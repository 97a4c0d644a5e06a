//! A model in one GGUF file.
//!
//! Owns: the mapping, its parsed head and the canonical names of its tensors.
//! Invariants: every tensor that the configuration requires is present with its shape, and no
//! other.
//! Not here: dequantisation (`quant`, `forward`), the tokenizer in the metadata (`tokenizer`).

pub mod config;
pub mod header;
pub mod metadata;
pub mod names;
mod recurrent_fields;
#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) mod writer;

use super::config::{Architecture, ModelConfig};
use super::expert_stack;
use super::inventory;
use super::mapped_file::Mapped;
use super::tensor::{RowOrder, TensorPlace, TensorType, TensorView};
use super::weights::{LoadError, WeightSource};
use header::Header;
use metadata::Metadata;
use std::collections::BTreeMap;
use std::path::Path;

/// An opened file.
#[derive(Debug)]
pub struct GgufFile {
    mapped: Mapped,
    header: Header,
    config: ModelConfig,
    tensors: BTreeMap<String, Entry>,
}

#[derive(Debug)]
struct Entry {
    info: TensorPlace,
    order: RowOrder,
    /// The reordered data of a vector, if the file stores its elements in another order.
    natural: Option<Vec<u8>>,
}

impl GgufFile {
    /// Maps `path` and checks that it holds a complete, supported model.
    pub fn open(path: &Path) -> Result<GgufFile, LoadError> {
        let mapped = Mapped::open(path)?;
        let header =
            Header::parse(mapped.bytes()).map_err(|error| LoadError::malformed(path, error))?;
        let metadata = Metadata { file: path, bytes: mapped.bytes(), header: &header };
        let config = config::read(&metadata)?;
        let mut tensors = BTreeMap::new();
        let mut add = |name: String, entry: Entry| match tensors.insert(name.clone(), entry) {
            None => Ok(()),
            Some(_) => {
                let found = "it is there twice";
                Err(LoadError::tensor(path, name, "one tensor of that name", found))
            }
        };
        for (name, info) in header.tensors.iter().filter(|(name, _)| *name != names::ROPE_FACTORS) {
            let ours = names::canonical(name, config.architecture);
            match expert_stack::split(&ours, info, &config) {
                None => {
                    let entry = entry(&config, (name, &ours), info, mapped.bytes());
                    add(ours, entry)?;
                }
                Some(Ok(matrices)) => matrices.into_iter().try_for_each(|(name, info)| {
                    add(name, Entry { info, order: RowOrder::Natural, natural: None })
                })?,
                Some(Err(expected)) => {
                    let found = format!("shape [{}, {}]", info.rows, info.cols);
                    return Err(LoadError::tensor(path, name, expected, found));
                }
            }
        }
        let file = GgufFile { mapped, header, config, tensors };
        inventory::check(&file.config, &file, file.tensors.keys().map(String::as_str), path)?;
        Ok(file)
    }

    /// Sizes and constants.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The metadata, which also holds tokenizer and chat template.
    pub fn metadata(&self) -> Metadata<'_> {
        Metadata { file: self.mapped.path(), bytes: self.mapped.bytes(), header: &self.header }
    }
}

impl WeightSource for GgufFile {
    fn tensor(&self, name: &str) -> Result<Option<TensorView<'_>>, LoadError> {
        Ok(self.tensors.get(name).map(|entry| TensorView {
            dtype: entry.info.dtype,
            rows: entry.info.rows,
            cols: entry.info.cols,
            order: entry.order,
            bytes: match &entry.natural {
                Some(bytes) => bytes,
                None => &self.mapped.bytes()[entry.info.data.clone()],
            },
        }))
    }

    fn describe(&self) -> String {
        self.mapped.path().display().to_string()
    }
}

/// Vectors of recurrent layers, which a file can have as a column or as a row for each group.
const FLAT: [&str; 3] = ["mamba.A_log", "mamba.D", "mamba.norm.weight"];

/// Finds the row order of a tensor. Vectors are converted to natural order here. A tensor comes
/// with its name in the file and its canonical name.
fn entry(
    config: &ModelConfig,
    (name, ours): (&str, &str),
    info: &TensorPlace,
    bytes: &[u8],
) -> Entry {
    let mut entry = Entry { info: info.clone(), order: RowOrder::Natural, natural: None };
    if FLAT.iter().any(|part| ours.ends_with(part)) && plain(info.dtype) {
        (entry.info.rows, entry.info.cols) = (1, info.rows.saturating_mul(info.cols));
        return entry;
    }
    let rotated = ["attn_q.weight", "attn_k.weight", "attn_q.bias", "attn_k.bias"];
    let interleaved = matches!(config.architecture, Architecture::Llama | Architecture::Mixtral)
        && rotated.iter().any(|part| name.strip_prefix("blk.").is_some_and(|n| n.ends_with(part)));
    let head_dim = config.head_dim;
    if interleaved && info.rows.is_multiple_of(head_dim) {
        entry.order = RowOrder::RopeInterleaved { head_dim };
    } else if interleaved
        && info.rows == 1
        && info.cols.is_multiple_of(head_dim)
        && plain(info.dtype)
    {
        let column = TensorView {
            dtype: info.dtype,
            rows: info.cols,
            cols: 1,
            order: RowOrder::RopeInterleaved { head_dim },
            bytes: &bytes[info.data.clone()],
        };
        entry.natural = Some((0..info.cols).flat_map(|row| column.row(row)).copied().collect());
    }
    entry
}

fn plain(dtype: TensorType) -> bool {
    dtype.block().0 == 1
}

//! A model in a Hugging Face directory: `config.json`, `generation_config.json`, safetensors.
//!
//! Invariants: every tensor that the configuration requires is present with its shape. Other
//! tensors are refused, except tensors that are known to follow from the configuration.
//! Not here: tokenizer and chat template.

pub mod config;
pub mod header;
pub mod json_object;
mod names;
mod recurrent_fields;
#[cfg(test)]
mod tests;

use super::config::{Architecture, ModelConfig};
use super::expert_stack;
use super::inventory;
use super::mapped_file::Mapped;
use super::tensor::{RowOrder, TensorPlace, TensorView};
use super::weights::{LoadError, WeightSource};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// An opened directory.
#[derive(Debug)]
pub struct HfDirectory {
    path: PathBuf,
    shards: Vec<Mapped>,
    config: ModelConfig,
    /// Shard and place by tensor name.
    tensors: BTreeMap<String, (usize, TensorPlace)>,
}

impl HfDirectory {
    /// Maps the weights in `path` and checks that they are a complete, supported model.
    pub fn open(path: &Path) -> Result<HfDirectory, LoadError> {
        let config = config::read(path)?;
        let mut directory = HfDirectory {
            path: path.to_owned(),
            shards: Vec::new(),
            config,
            tensors: BTreeMap::new(),
        };
        for name in shard_names(path)? {
            directory.add_shard(&path.join(name))?;
        }
        // Layers that predict several tokens are not served, and the model does not need them.
        let has_predictors = directory.config.architecture == Architecture::Qwen3Next;
        let derived = |name: &&str| {
            name.ends_with(".rotary_emb.inv_freq")
                || directory.config.tied_head && *name == "lm_head.weight"
                || has_predictors && name.starts_with("mtp.")
        };
        let names = directory.names().filter(|name| !derived(name));
        inventory::check(&directory.config, &directory, names, path)?;
        Ok(directory)
    }

    /// Sizes and constants.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The mapped files.
    pub fn shards(&self) -> &[Mapped] {
        &self.shards
    }

    /// The tensors' canonical names, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    fn add_shard(&mut self, path: &Path) -> Result<(), LoadError> {
        let mapped = Mapped::open(path)?;
        let places = header::parse(mapped.bytes()).map_err(|error| error.in_file(path))?;
        for (name, place) in places {
            let name = names::canonical(name, self.config.architecture);
            match expert_stack::split(&name, &place, &self.config) {
                None => self.add_tensor(path, name, place)?,
                Some(Ok(matrices)) => matrices
                    .into_iter()
                    .try_for_each(|(name, place)| self.add_tensor(path, name, place))?,
                Some(Err(expected)) => {
                    let found = format!("shape [{}, {}]", place.rows, place.cols);
                    return Err(LoadError::tensor(path, name, expected, found));
                }
            }
        }
        self.shards.push(mapped);
        Ok(())
    }

    /// Adds a tensor of the shard that is being added.
    fn add_tensor(
        &mut self,
        path: &Path,
        name: String,
        place: TensorPlace,
    ) -> Result<(), LoadError> {
        if self.tensors.contains_key(&name) {
            let found = "it is there twice";
            return Err(LoadError::tensor(path, name, "one tensor of that name", found));
        }
        self.tensors.insert(name, (self.shards.len(), place));
        Ok(())
    }
}

impl WeightSource for HfDirectory {
    fn tensor(&self, name: &str) -> Result<Option<TensorView<'_>>, LoadError> {
        Ok(self.tensors.get(name).map(|(shard, place)| TensorView {
            dtype: place.dtype,
            rows: place.rows,
            cols: place.cols,
            order: RowOrder::Natural,
            bytes: &self.shards[*shard].bytes()[place.data.clone()],
        }))
    }

    fn describe(&self) -> String {
        self.path.display().to_string()
    }
}

/// The file of all weights.
pub const SINGLE: &str = "model.safetensors";
/// The list of the files with weights, if there are several.
pub const INDEX: &str = "model.safetensors.index.json";

/// The files that hold the weights: one file, or those in an index.
///
/// # Errors
/// The index cannot be read, or it names a file outside the directory.
pub fn shard_names(directory: &Path) -> Result<BTreeSet<String>, LoadError> {
    let path = directory.join(INDEX);
    if directory.join(SINGLE).exists() || !path.exists() {
        return Ok(BTreeSet::from([SINGLE.to_owned()]));
    }
    let index = json_object::read_json(&path)?;
    let map = index["weight_map"].as_object().ok_or_else(|| {
        LoadError::field(
            &path,
            "weight_map",
            "an object from tensors to files",
            &index["weight_map"],
        )
    })?;
    map.values()
        .map(|name| {
            let name = name.as_str().filter(|name| !name.is_empty() && !name.contains(['/', '\\']));
            name.map(str::to_owned).ok_or_else(|| {
                LoadError::field(&path, "weight_map", "names of files beside it", "something else")
            })
        })
        .collect()
}

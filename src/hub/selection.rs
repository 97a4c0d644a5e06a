//! Which files of a repository are a model, on the hub and in the cache.
//!
//! Thread: the thread that starts the process. Invariants: a name selects one model or none; two
//! candidates are an error that lists them. Not here: the fetch.

use super::ModelContents;
use super::cache::RepositoryCache;
use super::error::HubError;
use super::file_list::{HubFile, HubListing};
use crate::config::hub::{HubConfig, HubPart, is_gguf};
use crate::limits::HUB_FILES_SHOWN;
use crate::model::files::SIDE_FILES;
use crate::model::hf::{INDEX, SINGLE, shard_names};
use std::path::PathBuf;

/// The file that dummy weights need.
const CONFIG: &str = "config.json";

/// The files of a model.
#[derive(PartialEq, Eq, Debug)]
pub enum Selection<'a> {
    /// A GGUF file.
    File(&'a HubFile),
    /// A Hugging Face directory.
    Directory {
        /// Configuration, tokenizer and template.
        beside: Vec<&'a HubFile>,
        /// The file of all weights, or the index of their files.
        weights: Option<&'a HubFile>,
    },
}

impl Selection<'_> {
    /// Selects the files that the name means.
    ///
    /// # Errors
    /// The repository has no such model, or several.
    pub fn of<'a>(
        listing: &'a HubListing,
        hub: &HubConfig,
        contents: ModelContents,
    ) -> Result<Selection<'a>, HubError> {
        let repository = &hub.name.repository;
        let missing = |what: &str| {
            Err(HubError::Missing { repository: repository.clone(), what: what.to_owned() })
        };
        let all = contents == ModelContents::All;
        let weights = listing.file(SINGLE).or_else(|| listing.file(INDEX));
        let has_gguf = listing.files.iter().any(|file| is_gguf(&file.path));
        if hub.name.part.is_some() && !all {
            let what = "random weights need a config.json, and this names a .gguf file".to_owned();
            return Err(HubError::Choice { name: hub.name.to_string(), what });
        }
        if hub.name.part.is_some() || all && weights.is_none() && has_gguf {
            let paths: Vec<&str> = listing.files.iter().map(|file| file.path.as_str()).collect();
            let chosen = choose_gguf(&paths, hub.name.part.as_ref());
            let chosen =
                chosen.map_err(|what| HubError::Choice { name: hub.name.to_string(), what })?;
            return match listing.file(chosen) {
                Some(file) => Ok(Selection::File(file)),
                None => missing(chosen),
            };
        }
        let mut beside = Vec::new();
        for (name, is_necessary) in SIDE_FILES {
            match listing.file(name) {
                Some(file) => beside.push(file),
                None if is_necessary && (all || name == CONFIG) => return missing(name),
                None => {}
            }
        }
        if all && weights.is_none() {
            return missing("model.safetensors, an index of safetensors, or a .gguf file");
        }
        Ok(Selection::Directory { beside, weights: weights.filter(|_| all) })
    }
}

/// The GGUF file among these paths that a name means.
///
/// # Errors
/// None, or several, with a list.
fn choose_gguf<'a>(paths: &[&'a str], part: Option<&HubPart>) -> Result<&'a str, String> {
    let files: Vec<&str> = paths.iter().copied().filter(|path| is_model(path)).collect();
    let fitting: Vec<&str> = match part {
        None => files.clone(),
        Some(HubPart::File(name)) => files.iter().copied().filter(|path| path == name).collect(),
        Some(HubPart::Quant(quant)) => {
            files.iter().copied().filter(|path| has_quant(path, quant)).collect()
        }
    };
    let whole: Vec<&str> = fitting.iter().copied().filter(|path| !is_split(path)).collect();
    match (&whole[..], &fitting[..]) {
        ([one], _) => Ok(one),
        ([], []) if files.is_empty() => Err("the repository has no .gguf file".into()),
        ([], []) => {
            Err(format!("no .gguf file has this name; the repository has {}", listed(&files)))
        }
        ([], split) => Err(format!(
            "the file is split, and Baton reads one file: {}; `llama-gguf-split --merge` joins \
             the parts",
            listed(split)
        )),
        (several, _) => Err(format!(
            "several .gguf files fit: {}; name one as OWNER/REPOSITORY:FILE.gguf",
            listed(several)
        )),
    }
}

/// Whether a path is a GGUF file of a language model; a projector for images is none.
fn is_model(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path).to_ascii_lowercase();
    is_gguf(path) && !name.starts_with("mmproj")
}

/// Whether the path has the quantisation as a word of its own, in any case: `Q4_K` is no word of
/// `Q4_K_M`, and `Q4_0` is none of `IQ4_0`.
fn has_quant(path: &str, quant: &str) -> bool {
    let (path, quant) = (path.to_ascii_lowercase(), quant.to_ascii_lowercase());
    path.match_indices(&quant).any(|(at, _)| {
        let (before, after) = (&path[..at], &path[at + quant.len()..]);
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        !before.ends_with(|c: char| c.is_ascii_alphanumeric()) && !after.starts_with(is_word)
    })
}

/// Whether the name ends as a part of a split file does: `-00001-of-00003.gguf`.
fn is_split(path: &str) -> bool {
    let stem = path.rsplit_once('.').map_or(path, |(stem, _)| stem);
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let numbers = stem.rsplit_once("-of-").and_then(|(stem, count)| {
        let (_, number) = stem.rsplit_once('-')?;
        Some([number, count])
    });
    numbers.is_some_and(|numbers| numbers.into_iter().all(is_number))
}

fn listed(paths: &[&str]) -> String {
    let shown = paths[..paths.len().min(HUB_FILES_SHOWN)].join(", ");
    match paths.len().saturating_sub(HUB_FILES_SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// The model in the cache, if it is complete.
///
/// # Errors
/// The missing thing.
pub fn find_cached(
    cache: &RepositoryCache,
    hub: &HubConfig,
    contents: ModelContents,
) -> Result<PathBuf, String> {
    let (name, revision) = (&hub.name.repository, &hub.revision);
    let snapshot = cache.find_snapshot(revision);
    let snapshot = snapshot.ok_or_else(|| format!("{name} at the revision {revision}"))?;
    let of_it = |file: &str| format!("{file} of {name} at the revision {revision}");
    let files = cache.files_of(&snapshot);
    let paths: Vec<&str> = files.iter().map(String::as_str).collect();
    let has = |file: &str| snapshot.join(file).is_file();
    let is_directory = has(SINGLE) || has(INDEX) || contents == ModelContents::WithoutWeights;
    if hub.name.part.is_some() || !is_directory && paths.iter().any(|path| is_gguf(path)) {
        let chosen = choose_gguf(&paths, hub.name.part.as_ref());
        return match chosen {
            Ok(file) => Ok(snapshot.join(file)),
            Err(_) => Err(format!("{} at the revision {revision}", hub.name)),
        };
    }
    let all = contents == ModelContents::All;
    for (file, is_necessary) in SIDE_FILES {
        if is_necessary && (all || file == CONFIG) && !has(file) {
            return Err(of_it(file));
        }
    }
    if all {
        let shards = shard_names(&snapshot).map_err(|error| error.to_string())?;
        if let Some(shard) = shards.iter().find(|shard| !has(shard)) {
            return Err(of_it(shard));
        }
    }
    Ok(snapshot)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::hub::HubName;
    use crate::hub::file_list::HubDigest;

    fn hub(name: &str) -> HubConfig {
        HubConfig {
            name: HubName::parse(name).unwrap(),
            revision: "main".into(),
            endpoint: "http://hub".into(),
            cache: "/cache".into(),
            token: None,
            offline: false,
        }
    }

    fn listing(paths: &[&str]) -> HubListing {
        let file = |path: &&str| HubFile {
            path: (*path).into(),
            size: 1,
            digest: HubDigest::GitBlob("0".repeat(40)),
        };
        HubListing { commit: "0".repeat(40), files: paths.iter().map(file).collect() }
    }

    /// The paths of the selected files, or the error.
    fn select(name: &str, paths: &[&str], contents: ModelContents) -> Result<Vec<String>, String> {
        let listing = listing(paths);
        let files = match Selection::of(&listing, &hub(name), contents) {
            Ok(Selection::File(file)) => vec![file],
            Ok(Selection::Directory { beside, weights }) => {
                beside.into_iter().chain(weights).collect()
            }
            Err(error) => return Err(error.to_string()),
        };
        Ok(files.into_iter().map(|file| file.path.clone()).collect())
    }

    #[test]
    fn a_directory_is_what_the_loader_reads_and_nothing_else() {
        let paths = [
            "README.md",
            "config.json",
            "consolidated.safetensors",
            "model.safetensors",
            "original/model.safetensors",
            "pytorch_model.bin",
            "tokenizer.json",
            "x.gguf",
            "onnx/model.onnx",
            "chat_template.jinja",
            "training_args.bin",
        ];
        let beside = ["config.json", "tokenizer.json", "chat_template.jinja"];
        let all = [&beside[..], &["model.safetensors"]].concat();
        assert_eq!(select("a/b", &paths, ModelContents::All).unwrap(), all);
        assert_eq!(select("a/b", &paths, ModelContents::WithoutWeights).unwrap(), beside);
        let index = ["config.json", "tokenizer.json", INDEX, "model-00001-of-00002.safetensors"];
        assert_eq!(select("a/b", &index, ModelContents::All).unwrap(), index[..3]);
        for (paths, missing) in [
            (&["tokenizer.json", SINGLE][..], "config.json"),
            (&["config.json", SINGLE], "tokenizer.json"),
            (&["config.json", "tokenizer.json", "pytorch_model.bin"], "safetensors"),
            (&[], "config.json"),
        ] {
            let error = select("a/b", paths, ModelContents::All).unwrap_err();
            assert!(error.contains("a/b does not have") && error.contains(missing), "{error}");
        }
    }

    #[test]
    fn a_gguf_file_is_chosen_by_its_name_or_its_quantisation() {
        let paths = [
            "b-Q4_0.gguf",
            "b-Q4_K_M.gguf",
            "b-IQ4_0.gguf",
            "b.Q8_0.gguf",
            "sub/c_Q6_K.gguf",
            "mmproj-Q8_0.gguf",
            "d-F16-00001-of-00002.gguf",
            "d-F16-00002-of-00002.gguf",
            "e-Q5_0.gguf",
            "f-Q5_0.gguf",
            "config.json",
        ];
        for (part, expected) in [
            ("Q4_0", "b-Q4_0.gguf"),
            ("q4_k_m", "b-Q4_K_M.gguf"),
            ("IQ4_0", "b-IQ4_0.gguf"),
            ("Q8_0", "b.Q8_0.gguf"),
            ("Q6_K", "sub/c_Q6_K.gguf"),
            ("sub/c_Q6_K.gguf", "sub/c_Q6_K.gguf"),
            ("e-Q5_0.gguf", "e-Q5_0.gguf"),
        ] {
            let chosen = select(&format!("a/b:{part}"), &paths, ModelContents::All);
            assert_eq!(chosen.unwrap(), [expected], "{part}");
        }
        for (part, why) in [
            ("Q4_K", "no .gguf file has this name; the repository has b-Q4_0.gguf"),
            ("x.gguf", "no .gguf file has this name"),
            ("Q5_0", "several .gguf files fit: e-Q5_0.gguf, f-Q5_0.gguf"),
            ("F16", "is split, and Baton reads one file: d-F16-00001-of-00002.gguf"),
        ] {
            let error = select(&format!("a/b:{part}"), &paths, ModelContents::All).unwrap_err();
            assert!(error.starts_with(&format!("a/b:{part}: ")) && error.contains(why), "{error}");
        }
        let error = select("a/b", &paths, ModelContents::All).unwrap_err();
        assert!(error.contains("several .gguf files fit"), "{error}");
        let one = ["README.md", "only.gguf", "mmproj-F16.gguf"];
        assert_eq!(select("a/b", &one, ModelContents::All).unwrap(), ["only.gguf"]);
    }

    #[test]
    fn long_lists_are_cut() {
        let paths: Vec<String> = (0..HUB_FILES_SHOWN + 3).map(|at| format!("{at}.gguf")).collect();
        let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
        assert!(choose_gguf(&paths, None).unwrap_err().contains("19.gguf and 3 more"));
    }
}

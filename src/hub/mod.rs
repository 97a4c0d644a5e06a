//! A model on a hub: finds its files in the cache, and fetches the files that are not there.
//!
//! ```text
//!   locate: cached copy? ─▶ listing of the hub ─▶ selection ─▶ download of each file ─▶ path
//!              │ offline, or the hub is unreachable and the copy is complete        ▲
//!              └─────────────────────────────────────────────────────────────────────┘
//! ```
//! Thread: the thread that starts the process. Invariants: a returned path has all files that the
//! loader needs; each file in the cache had the size and the hash of the hub's listing when it got
//! its name. Not here: environment variables and names (`config::hub`), the model (`model`).

mod cache;
mod client;
mod download;
mod error;
pub mod file_list;
mod part;
mod selection;

pub use error::HubError;

use crate::config::hub::HubConfig;
use crate::limits::HUB_TRIES_MAX;
use crate::model::hf::{INDEX, shard_names};
use crate::obs::log::event;
use cache::RepositoryCache;
use client::HubClient;
use download::Downloader;
use file_list::{HubFile, HubListing};
use selection::Selection;
use std::path::{Path, PathBuf};

/// Which files of a model are needed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ModelContents {
    /// All that the loader reads.
    All,
    /// All except the weights.
    WithoutWeights,
}

/// The path of a model on this host: the directory of the snapshot, or the GGUF file in it.
///
/// # Errors
/// The hub does not have the model or refuses it, a file cannot be fetched or stored, or the hub
/// must not be asked and the cache is not complete.
pub fn locate(hub: &HubConfig, contents: ModelContents) -> Result<PathBuf, HubError> {
    let cache = RepositoryCache::new(&hub.cache, &hub.name.repository);
    let cached = selection::find_cached(&cache, hub, contents);
    if hub.offline {
        return cached.map_err(|missing| HubError::Offline { cache: hub.cache.clone(), missing });
    }
    let client = HubClient::new(hub)?;
    let tries = if cached.is_ok() { 1 } else { HUB_TRIES_MAX };
    let listing = client.list_files(&hub.name.repository, &hub.revision, tries);
    let fetched = listing.and_then(|listing| fetch(hub, &cache, &client, &listing, contents));
    match (fetched, cached) {
        (Err(HubError::Unreachable { reason, .. }), Ok(path)) => {
            event!(
                Warn,
                "hub",
                "hub is unreachable, the copy in the cache is used",
                model = hub.name,
                path = path.display(),
                why = reason
            );
            Ok(path)
        }
        (fetched, _) => fetched,
    }
}

/// Fetches the files of a model that the cache does not have. Weights come last, so a snapshot with
/// weights is complete.
fn fetch(
    hub: &HubConfig,
    cache: &RepositoryCache,
    client: &HubClient,
    listing: &HubListing,
    contents: ModelContents,
) -> Result<PathBuf, HubError> {
    let snapshot = cache.snapshot(&listing.commit);
    let downloader = Downloader { hub, cache, client, commit: &listing.commit };
    let path = match Selection::of(listing, hub, contents)? {
        Selection::File(file) => {
            downloader.fetch(file)?;
            snapshot.join(&file.path)
        }
        Selection::Directory { beside, weights } => {
            for file in beside {
                downloader.fetch(file)?;
            }
            match weights {
                Some(file) if file.path == INDEX => {
                    downloader.fetch(file)?;
                    for shard in shards(&snapshot, listing, hub)? {
                        downloader.fetch(shard)?;
                    }
                }
                Some(file) => downloader.fetch(file)?,
                None => {}
            }
            snapshot
        }
    };
    cache.write_ref(&hub.revision, &listing.commit)?;
    Ok(path)
}

/// The files that the index names.
fn shards<'a>(
    snapshot: &Path,
    listing: &'a HubListing,
    hub: &HubConfig,
) -> Result<Vec<&'a HubFile>, HubError> {
    let names = shard_names(snapshot).map_err(HubError::Index)?;
    let file = |name: String| {
        listing.file(&name).ok_or_else(|| HubError::Missing {
            repository: hub.name.repository.clone(),
            what: format!("{name}, which its {INDEX} names"),
        })
    };
    names.into_iter().map(file).collect()
}

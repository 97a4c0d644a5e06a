//! The reasons why a model of a hub cannot be used. Each prints one line.

use crate::model::weights::LoadError;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// The reason why a model of a hub cannot be used.
#[derive(Debug)]
pub enum HubError {
    /// The hub, or the host of a file, does not answer as it should, after some tries.
    Unreachable {
        /// The URL.
        url: String,
        /// The reason of the last try.
        reason: String,
        /// The tries in a row.
        tries: u32,
    },
    /// The answer is final: another try gives the same one.
    Refused {
        /// The URL.
        url: String,
        /// Its status.
        status: u16,
        /// What the reader can do.
        advice: String,
    },
    /// The host's certificate is not accepted.
    Certificate {
        /// The URL.
        url: String,
        /// The reason.
        reason: String,
    },
    /// The hub's answer violates its interface or a limit.
    Answer {
        /// The URL.
        url: String,
        /// The problem.
        what: String,
    },
    /// The repository does not have what is needed.
    Missing {
        /// The repository.
        repository: String,
        /// The missing thing.
        what: String,
    },
    /// The name does not select one GGUF file.
    Choice {
        /// The name.
        name: String,
        /// The problem, with the files.
        what: String,
    },
    /// The bytes that arrived are not those of the hub's listing. They are deleted.
    Mismatch {
        /// The file.
        file: String,
        /// The property that differs.
        what: &'static str,
        /// Its value in the listing.
        expected: String,
        /// Its value here.
        found: String,
    },
    /// A file of the cache cannot be read or written.
    Disk {
        /// The file or directory.
        path: PathBuf,
        /// The error.
        error: io::Error,
    },
    /// The disk is full.
    Full {
        /// The file.
        path: PathBuf,
        /// Bytes of the file that are missing.
        missing: u64,
    },
    /// Another process holds a lock and makes no progress.
    Locked {
        /// The lock.
        path: PathBuf,
        /// Seconds without progress.
        seconds: u64,
    },
    /// The index of the weights cannot be used.
    Index(LoadError),
    /// `HF_HUB_OFFLINE` is set, and the cache is not complete.
    Offline {
        /// The cache.
        cache: PathBuf,
        /// What it does not have.
        missing: String,
    },
}

impl HubError {
    /// [`HubError::Disk`].
    pub(super) fn disk(path: &Path, error: io::Error) -> HubError {
        HubError::Disk { path: path.to_owned(), error }
    }

    /// Whether another try would fail in the same way.
    pub fn is_usage_error(&self) -> bool {
        use HubError::{Choice, Index, Missing, Offline, Refused};
        matches!(self, Refused { .. } | Missing { .. } | Choice { .. } | Index(_) | Offline { .. })
    }
}

impl fmt::Display for HubError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HubError::Unreachable { url, reason, tries: 1 } => write!(f, "{url}: {reason}"),
            HubError::Unreachable { url, reason, tries } => {
                write!(f, "{url}: {reason} ({tries} tries in a row failed)")
            }
            HubError::Refused { url, status, advice } => {
                write!(f, "{url} answers with status {status}: {advice}")
            }
            HubError::Certificate { url, reason } => write!(
                f,
                "{url}: the certificate is not accepted: {reason}; if the host has a CA of its \
                 own, name the file of its certificate in SSL_CERT_FILE"
            ),
            HubError::Answer { url, what } => write!(f, "{url}: {what}"),
            HubError::Missing { repository, what } => {
                write!(f, "the repository {repository} does not have {what}")
            }
            HubError::Choice { name, what } => write!(f, "{name}: {what}"),
            HubError::Mismatch { file, what, expected, found } => write!(
                f,
                "{file}: the {what} is {found}, and the hub's listing says {expected}; the bytes \
                 are deleted, and the next start fetches them again"
            ),
            HubError::Disk { path, error } => write!(f, "{}: {error}", path.display()),
            HubError::Full { path, missing } => write!(
                f,
                "{}: the disk is full, and {missing} bytes of this file are missing; the next \
                 start continues; HF_HUB_CACHE can name a directory on another disk",
                path.display()
            ),
            HubError::Locked { path, seconds } => write!(
                f,
                "{}: another process has held this lock for {seconds} s without progress of its \
                 download",
                path.display()
            ),
            HubError::Index(error) => error.fmt(f),
            HubError::Offline { cache, missing } => write!(
                f,
                "HF_HUB_OFFLINE is set, and the cache {} does not have {missing}",
                cache.display()
            ),
        }
    }
}

impl std::error::Error for HubError {}

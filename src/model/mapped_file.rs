//! A file mapped for reading.
//!
//! Invariants: the bytes are those of the file, if no process changes the file. Operators must not
//! change a model's files while a server runs.
#![allow(unsafe_code)]

use super::weights::LoadError;
use memmap2::Mmap;
use std::fs::File;
use std::path::{Path, PathBuf};

/// A mapped file and its path.
#[derive(Debug)]
pub struct Mapped {
    path: PathBuf,
    map: Mmap,
}

impl Mapped {
    /// Maps the whole of `path`, which must not be empty.
    pub fn open(path: &Path) -> Result<Mapped, LoadError> {
        let file = File::open(path).map_err(|error| LoadError::io(path, error))?;
        let length = file.metadata().map_err(|error| LoadError::io(path, error))?.len();
        if length == 0 {
            return Err(LoadError::malformed(path, "the file is empty"));
        }
        // SAFETY: the mapping is private and read-only. By the module's invariant the file is not
        // changed or truncated while it is served, as with every engine that maps weights.
        let map = unsafe { Mmap::map(&file) }.map_err(|error| LoadError::io(path, error))?;
        Ok(Mapped { path: path.to_owned(), map })
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The bytes of the file.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }
}

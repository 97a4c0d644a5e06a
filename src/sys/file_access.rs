//! Access to the files of keys: those of this host, or files in memory for a simulated host.
//!
//! Thread: any. Invariants: each write of a file in memory gives it a new stamp; a stamp never
//! comes back. Not here: files of certificates and CAs, which are read from this host because the
//! simulator has no TLS; the models.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Permissions of users that are neither the owner nor in the group.
const OTHERS: u32 = 0o007;

/// Where files are read from.
#[derive(Clone, Debug)]
pub enum FileAccess {
    /// This host.
    Host,
    /// A simulated host.
    Memory(MemoryFiles),
}

/// Identity of a file's content. Equal stamps mean that the file has not changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileStamp {
    /// Of this host: inode, length, and modification time in seconds and nanoseconds.
    Host(u64, u64, i64, i64),
    /// In memory: the number of the write.
    Memory(u64),
}

/// A file that was read.
pub struct FileContent {
    /// Its bytes, up to the limit.
    pub bytes: Vec<u8>,
    /// Whether other users of the host can use the file.
    pub is_exposed: bool,
}

impl FileAccess {
    /// The stamp of a file, if it exists.
    pub fn stamp(&self, path: &Path) -> Option<FileStamp> {
        match self {
            FileAccess::Host => {
                let data = fs::metadata(path).ok()?;
                Some(FileStamp::Host(data.ino(), data.len(), data.mtime(), data.mtime_nsec()))
            }
            FileAccess::Memory(files) => {
                files.lock().by_path.get(path).map(|file| FileStamp::Memory(file.write))
            }
        }
    }

    /// Reads at most `bytes_max` bytes of a file.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(&self, path: &Path, bytes_max: u64) -> io::Result<FileContent> {
        match self {
            FileAccess::Host => {
                let file = File::open(path)?;
                let metadata = file.metadata()?;
                let is_exposed = metadata.is_file() && metadata.permissions().mode() & OTHERS != 0;
                let mut bytes = Vec::new();
                file.take(bytes_max).read_to_end(&mut bytes)?;
                Ok(FileContent { bytes, is_exposed })
            }
            FileAccess::Memory(files) => {
                let table = files.lock();
                let file = table.by_path.get(path).ok_or(ErrorKind::NotFound)?;
                let length = bytes_max.min(file.bytes.len() as u64) as usize;
                Ok(FileContent { bytes: file.bytes[..length].to_vec(), is_exposed: false })
            }
        }
    }
}

/// Files in memory. A clone has the same files.
#[derive(Clone, Default)]
pub struct MemoryFiles(Arc<Mutex<FileTable>>);

#[derive(Default)]
struct FileTable {
    by_path: BTreeMap<PathBuf, MemoryFile>,
    writes: u64,
}

struct MemoryFile {
    bytes: Vec<u8>,
    /// The number of the write.
    write: u64,
}

impl MemoryFiles {
    /// Writes a file, in place of an earlier one.
    pub fn write(&self, path: &str, bytes: &[u8]) {
        let mut table = self.lock();
        table.writes += 1;
        let file = MemoryFile { bytes: bytes.to_vec(), write: table.writes };
        table.by_path.insert(path.into(), file);
    }

    fn lock(&self) -> MutexGuard<'_, FileTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for MemoryFiles {
    /// Shows no key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.lock().by_path.keys()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both kinds of files follow the same rules.
    fn check(files: &FileAccess, path: &str, write: &dyn Fn(&[u8])) {
        let file = Path::new(path);
        let read = |bytes_max| files.read(file, bytes_max).map(|content| content.bytes);
        assert_eq!(files.stamp(file), None, "there is no file");
        assert_eq!(read(9).unwrap_err().kind(), ErrorKind::NotFound);
        write(b"first");
        let stamp = files.stamp(file);
        assert!(stamp.is_some() && stamp == files.stamp(file));
        assert_eq!(read(9).unwrap(), b"first");
        assert_eq!(read(5).unwrap(), b"first");
        assert_eq!(read(2).unwrap(), b"fi");
        assert_eq!(stamp, files.stamp(file), "reads change nothing");
        write(b"second");
        assert_ne!(files.stamp(file), stamp);
        assert_eq!(read(9).unwrap(), b"second");
    }

    #[test]
    fn files_of_the_host_and_in_memory_follow_the_same_rules() {
        let path = std::env::temp_dir().join(format!("baton-file-access-{}", std::process::id()));
        let path = path.to_str().unwrap();
        check(&FileAccess::Host, path, &|bytes| fs::write(path, bytes).unwrap());
        for (mode, is_exposed) in [(0o600, false), (0o640, false), (0o604, true)] {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
            let content = FileAccess::Host.read(Path::new(path), 1).unwrap();
            assert_eq!(content.is_exposed, is_exposed, "{mode:o}");
        }
        fs::remove_file(path).unwrap();
        let files = MemoryFiles::default();
        check(&FileAccess::Memory(files.clone()), "/key", &|bytes| files.write("/key", bytes));
    }

    #[test]
    fn a_file_in_memory_that_is_written_again_has_a_new_stamp_and_is_not_shown() {
        let files = MemoryFiles::default();
        let access = FileAccess::Memory(files.clone());
        let write = || {
            files.write("/key", b"secret");
            access.stamp(Path::new("/key")).unwrap()
        };
        assert_ne!(write(), write());
        assert_eq!(format!("{access:?}"), "Memory([\"/key\"])");
    }
}

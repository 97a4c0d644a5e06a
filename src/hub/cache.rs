//! The cache of one repository, in the layout of the Python package `huggingface_hub`.
//!
//! ```text
//!   models--OWNER--REPOSITORY/blobs/HASH               the content, as HASH.incomplete until whole
//!   models--OWNER--REPOSITORY/snapshots/COMMIT/PATH    a link to the content
//!   models--OWNER--REPOSITORY/refs/REVISION            the commit of a complete snapshot
//!   .locks/models--OWNER--REPOSITORY/HASH.lock         held by the process that fetches
//! ```
//! Thread: the thread that starts the process. Invariants: a directory is made only when a file is
//! written into it, so a complete cache can be read-only.

use super::error::HubError;
use super::file_list::{HubFile, is_hex};
use crate::limits::{HUB_FILES_MAX, HUB_LOCK_INTERVAL, HUB_LOCK_SILENCE_MAX, HUB_PROGRESS_EVERY};
use crate::obs::log::event;
use crate::stdx::hex::to_hex;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The cache of one repository.
#[derive(Debug)]
pub struct RepositoryCache {
    folder: PathBuf,
    locks: PathBuf,
}

/// The lock of one file's content. The kernel releases it at the end of the process, too.
#[derive(Debug)]
pub struct BlobLock(#[expect(dead_code, reason = "it is held, not used")] File);

impl RepositoryCache {
    /// The cache of this repository below the directory of all caches.
    pub fn new(cache: &Path, repository: &str) -> RepositoryCache {
        let name = format!("models--{}", repository.replace('/', "--"));
        RepositoryCache { folder: cache.join(&name), locks: cache.join(".locks").join(name) }
    }

    /// The directory of a commit.
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    /// The directory of a revision, if the cache has one.
    pub fn find_snapshot(&self, revision: &str) -> Option<PathBuf> {
        let stored = fs::read_to_string(self.ref_path(revision)).ok();
        let commit = stored.as_deref().map_or(revision, str::trim);
        let snapshot = is_hex(commit, 40).then(|| self.snapshot(commit))?;
        snapshot.is_dir().then_some(snapshot)
    }

    /// Paths of the files in a snapshot, in order.
    pub fn files_of(&self, snapshot: &Path) -> Vec<String> {
        let (mut files, mut folders) = (Vec::new(), vec![snapshot.to_owned()]);
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                let path = entry.path();
                // A link to a directory is not followed, so there is no circle.
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    folders.push(path);
                } else if path.is_file() && files.len() < HUB_FILES_MAX {
                    let below = path.strip_prefix(snapshot).ok().and_then(Path::to_str);
                    files.extend(below.map(str::to_owned));
                }
            }
        }
        files.sort();
        files
    }

    /// Whether the snapshot of a commit has this file, with its size.
    pub fn has(&self, commit: &str, file: &HubFile) -> bool {
        let found = fs::metadata(self.snapshot(commit).join(&file.path));
        found.is_ok_and(|found| found.is_file() && found.len() == file.size)
    }

    /// The content of a file.
    pub fn blob(&self, file: &HubFile) -> PathBuf {
        self.folder.join("blobs").join(file.digest.hex())
    }

    /// The content of a file that is not whole yet.
    pub fn part(&self, file: &HubFile) -> PathBuf {
        self.folder.join("blobs").join(format!("{}.incomplete", file.digest))
    }

    /// Links a file's content into the snapshot of a commit.
    ///
    /// # Errors
    /// The link cannot be made.
    pub fn link(&self, commit: &str, file: &HubFile) -> Result<(), HubError> {
        let path = self.snapshot(commit).join(&file.path);
        make_folder_of(&path)?;
        let up = "../".repeat(2 + file.path.matches('/').count());
        let target = format!("{up}blobs/{}", file.digest);
        let made = match symlink(&target, &path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists && !self.has(commit, file) => {
                fs::remove_file(&path).and_then(|()| symlink(&target, &path))
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
            made => made,
        };
        made.map_err(|error| HubError::disk(&path, error))
    }

    /// Stores the commit of a revision, because its snapshot is complete.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write_ref(&self, revision: &str, commit: &str) -> Result<(), HubError> {
        let path = self.ref_path(revision);
        if revision == commit || fs::read_to_string(&path).is_ok_and(|stored| stored == commit) {
            return Ok(());
        }
        make_folder_of(&path)?;
        // A reader sees the old commit or the new one, and never a part.
        // Processes of two containers can have the same id.
        let mut mark = [0; 8];
        let _ = getrandom::fill(&mut mark);
        let new = self.folder.join(format!(".ref-{}", to_hex(&mark)));
        let written = fs::write(&new, commit).and_then(|()| fs::rename(&new, &path));
        written.map_err(|error| {
            let _ = fs::remove_file(&new);
            HubError::disk(&path, error)
        })
    }

    /// Takes the lock of a file's content, and makes the directory of contents. If another process
    /// holds the lock, waits while the part of the file grows.
    ///
    /// # Errors
    /// The lock cannot be opened, or the part has not grown for [`HUB_LOCK_SILENCE_MAX`].
    pub fn lock(&self, file: &HubFile) -> Result<BlobLock, HubError> {
        make_folder_of(&self.blob(file))?;
        let path = self.locks.join(format!("{}.lock", file.digest));
        make_folder_of(&path)?;
        let disk = |error| HubError::disk(&path, error);
        let mut wait: Option<LockWait> = None;
        loop {
            let open = OpenOptions::new().write(true).create(true).truncate(false).open(&path);
            let lock = open.map_err(disk)?;
            match lock.try_lock() {
                Ok(()) if is_at(&lock, &path) => return Ok(BlobLock(lock)),
                // Its last holder has deleted it.
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    let length = self.part_bytes(file);
                    let now = Instant::now();
                    let wait = wait.get_or_insert_with(|| LockWait::new(length, now));
                    if !wait.step(file, length, now) {
                        let seconds = HUB_LOCK_SILENCE_MAX.as_secs();
                        return Err(HubError::Locked { path, seconds });
                    }
                    std::thread::sleep(HUB_LOCK_INTERVAL);
                }
                Err(TryLockError::Error(error)) => return Err(disk(error)),
            }
        }
    }

    /// Bytes of all parts of a file. The Python package gives its part a name with a random word.
    fn part_bytes(&self, file: &HubFile) -> u64 {
        let folder = self.folder.join("blobs");
        let is_part =
            |name: &str| name.starts_with(file.digest.hex()) && name.ends_with(".incomplete");
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let parts = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_part));
        parts.filter_map(|entry| Some(entry.metadata().ok()?.len())).sum()
    }

    fn ref_path(&self, revision: &str) -> PathBuf {
        self.folder.join("refs").join(revision)
    }
}

/// A wait for another process that fetches the same file.
#[derive(Debug)]
struct LockWait {
    /// Length of the part, and the time at which it changed last.
    length: u64,
    grown: Instant,
    /// Time of the last log line.
    told: Option<Instant>,
}

impl LockWait {
    fn new(length: u64, now: Instant) -> LockWait {
        LockWait { length, grown: now, told: None }
    }

    /// Logs the wait from time to time. Returns whether the wait may go on.
    fn step(&mut self, file: &HubFile, length: u64, now: Instant) -> bool {
        if length != self.length {
            (self.length, self.grown) = (length, now);
        }
        if self.told.is_none_or(|told| now.duration_since(told) >= HUB_PROGRESS_EVERY) {
            self.told = Some(now);
            event!(
                Info,
                "hub",
                "another process fetches the file",
                file = file.path,
                percent = percent(length, file.size)
            );
        }
        now.duration_since(self.grown) < HUB_LOCK_SILENCE_MAX
    }
}

/// Whole percents of a file, at most 100.
pub fn percent(length: u64, size: u64) -> u64 {
    let percent = (u128::from(length) * 100).checked_div(u128::from(size)).unwrap_or(100);
    percent.min(100) as u64
}

/// Whether an open file is still the one at this path.
fn is_at(file: &File, path: &Path) -> bool {
    let identity = |data: fs::Metadata| (data.dev(), data.ino());
    match (file.metadata(), fs::metadata(path)) {
        (Ok(open), Ok(there)) => identity(open) == identity(there),
        _ => false,
    }
}

fn make_folder_of(path: &Path) -> Result<(), HubError> {
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder).map_err(|error| HubError::disk(folder, error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::file_list::HubDigest;
    use std::time::Duration;

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Scratch {
            let path =
                std::env::temp_dir().join(format!("baton-hub-{}-{name}", std::process::id()));
            fs::create_dir(&path).unwrap();
            Scratch(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const COMMIT: &str = "0123456789012345678901234567890123456789";

    fn file(path: &str) -> HubFile {
        HubFile { path: path.into(), size: 3, digest: HubDigest::GitBlob("a".repeat(40)) }
    }

    #[test]
    fn a_file_lies_where_the_python_package_looks_for_it() {
        let scratch = Scratch::new("layout");
        let cache = RepositoryCache::new(&scratch.0, "owner/tiny");
        let (plain, deep) = (file("config.json"), file("a/b/c.gguf"));
        assert_eq!(cache.find_snapshot("main"), None);
        drop(cache.lock(&plain).unwrap());
        fs::write(cache.blob(&plain), "abc").unwrap();
        for file in [&plain, &deep] {
            assert!(!cache.has(COMMIT, file));
            cache.link(COMMIT, file).unwrap();
            cache.link(COMMIT, file).unwrap();
            assert!(cache.has(COMMIT, file));
        }
        let folder = scratch.0.join("models--owner--tiny");
        let snapshot = folder.join("snapshots").join(COMMIT);
        assert_eq!(fs::read(snapshot.join("a/b/c.gguf")).unwrap(), b"abc");
        let link = fs::read_link(snapshot.join("config.json")).unwrap();
        assert_eq!(link, Path::new("../../blobs").join("a".repeat(40)));
        assert!(
            scratch.0.join(".locks/models--owner--tiny").join("a".repeat(40) + ".lock").exists()
        );
        assert_eq!(cache.find_snapshot(COMMIT), Some(snapshot.clone()));
        for revision in ["main", "refs/pr/1"] {
            cache.write_ref(revision, COMMIT).unwrap();
            assert_eq!(fs::read_to_string(folder.join("refs").join(revision)).unwrap(), COMMIT);
            assert_eq!(cache.find_snapshot(revision), Some(snapshot.clone()));
        }
        assert_eq!(cache.files_of(&snapshot), ["a/b/c.gguf", "config.json"]);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 3, "no temporary file stays");
    }

    #[test]
    fn a_broken_link_is_replaced() {
        let scratch = Scratch::new("link");
        let cache = RepositoryCache::new(&scratch.0, "owner/tiny");
        let file = file("config.json");
        drop(cache.lock(&file).unwrap());
        fs::write(cache.blob(&file), "abc").unwrap();
        let path = cache.snapshot(COMMIT).join("config.json");
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink("../../blobs/nothing", &path).unwrap();
        cache.link(COMMIT, &file).unwrap();
        assert!(cache.has(COMMIT, &file));
    }

    #[test]
    fn a_lock_excludes_others_until_it_is_dropped() {
        let scratch = Scratch::new("lock");
        let cache = RepositoryCache::new(&scratch.0, "owner/tiny");
        let lock = cache.lock(&file("a")).unwrap();
        std::thread::scope(|scope| {
            let other = scope.spawn(|| cache.lock(&file("a")).map(drop));
            std::thread::sleep(2 * HUB_LOCK_INTERVAL);
            assert!(!other.is_finished());
            drop(lock);
            other.join().unwrap().unwrap();
        });
    }

    #[test]
    fn a_wait_lasts_while_the_other_process_makes_progress() {
        let (begin, file) = (Instant::now(), file("a"));
        let mut wait = LockWait::new(0, begin);
        let almost = HUB_LOCK_SILENCE_MAX - Duration::from_secs(1);
        assert!(wait.step(&file, 0, begin + almost));
        assert!(wait.step(&file, 1, begin + almost));
        assert!(wait.step(&file, 1, begin + 2 * almost));
        assert!(!wait.step(&file, 1, begin + 2 * almost + Duration::from_secs(1)));
    }
}

//! The part of a file that has arrived, with the hash of its bytes so far.
//!
//! Thread: the thread that starts the process. Owns: the file `HASH.incomplete`, under the lock of
//! its content. Invariants: the part is never longer than the listing says; a part with the wrong
//! hash is deleted and never gets the name of the content.

use super::error::HubError;
use super::file_list::{HubDigest, HubFile};
use crate::limits::HUB_PIECE;
use crate::stdx::hex::to_hex;
use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::PathBuf;

/// A file that arrives.
pub struct PartFile<'a> {
    wanted: &'a HubFile,
    path: PathBuf,
    file: File,
    length: u64,
    hash: Context,
}

impl<'a> PartFile<'a> {
    /// Opens the part of an earlier try, and hashes its bytes; or begins a new one.
    ///
    /// # Errors
    /// The file cannot be opened or read.
    pub fn open(path: PathBuf, wanted: &'a HubFile) -> Result<PartFile<'a>, HubError> {
        let disk = |error| HubError::disk(&path, error);
        let options =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).clone();
        let file = options.open(&path).map_err(disk)?;
        let mut left = file.metadata().map_err(disk)?.len();
        let mut part = PartFile { wanted, file, length: 0, hash: new_hash(wanted), path };
        if left > wanted.size {
            part.reset()?;
            left = 0;
        }
        let mut piece = vec![0; HUB_PIECE];
        while left > 0 {
            let most = piece.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            let count = part.file.read(&mut piece[..most]);
            let count = count.map_err(|error| HubError::disk(&part.path, error))?;
            if count == 0 {
                break;
            }
            part.hash.update(&piece[..count]);
            part.length += count as u64;
            left -= count as u64;
        }
        Ok(part)
    }

    /// Bytes that have arrived.
    pub fn len(&self) -> u64 {
        self.length
    }

    /// Whether all bytes have arrived.
    pub fn is_whole(&self) -> bool {
        self.length == self.wanted.size
    }

    /// Drops all bytes.
    ///
    /// # Errors
    /// The file cannot be truncated.
    pub fn reset(&mut self) -> Result<(), HubError> {
        let emptied = self.file.set_len(0).and_then(|()| self.file.seek(SeekFrom::Start(0)));
        emptied.map_err(|error| HubError::disk(&self.path, error))?;
        (self.length, self.hash) = (0, new_hash(self.wanted));
        Ok(())
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// There are more bytes than the listing says, or the disk does not take them.
    pub fn append(&mut self, bytes: &[u8]) -> Result<(), HubError> {
        let missing = self.wanted.size - self.length;
        if bytes.len() as u64 > missing {
            let found = format!("more than {} bytes", self.wanted.size);
            return Err(self.refuse("size", format!("{} bytes", self.wanted.size), found));
        }
        let written = self.file.write_all(bytes);
        written.map_err(|error| match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
                HubError::Full { path: self.path.clone(), missing }
            }
            _ => HubError::disk(&self.path, error),
        })?;
        self.hash.update(bytes);
        self.length += bytes.len() as u64;
        Ok(())
    }

    /// Checks the hash of a whole file, and gives it its name.
    ///
    /// # Errors
    /// The hash differs, or the file cannot be renamed.
    pub fn finish(self, blob: &std::path::Path) -> Result<(), HubError> {
        assert!(self.is_whole(), "a part that is not whole has no hash");
        let found = to_hex(self.hash.clone().finish().as_ref());
        if found != self.wanted.digest.hex() {
            let expected = self.wanted.digest.hex().to_owned();
            return Err(self.refuse(self.wanted.digest.kind(), expected, found));
        }
        // The name promises the content, also after a loss of power.
        let named = self.file.sync_data().and_then(|()| fs::rename(&self.path, blob));
        named.map_err(|error| HubError::disk(blob, error))
    }

    /// Deletes the part, because its bytes are not those of the listing.
    pub fn refuse(&self, what: &'static str, expected: String, found: String) -> HubError {
        match fs::remove_file(&self.path) {
            Ok(()) => HubError::Mismatch { file: self.wanted.path.clone(), what, expected, found },
            Err(error) => HubError::disk(&self.path, error),
        }
    }
}

fn new_hash(wanted: &HubFile) -> Context {
    match wanted.digest {
        HubDigest::Sha256(_) => Context::new(&SHA256),
        HubDigest::GitBlob(_) => {
            let mut hash = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
            hash.update(format!("blob {}\0", wanted.size).as_bytes());
            hash
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The file `hello\n` and its hashes, from `git hash-object` and `sha256sum`.
    const HELLO: &[u8] = b"hello\n";
    const BLOB: &str = "ce013625030ba8dba906f756967f9e9ca394464a";
    const SHA: &str = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Scratch {
            let name = format!("baton-part-{}-{name}", std::process::id());
            Scratch(std::env::temp_dir().join(name))
        }

        fn blob(&self) -> PathBuf {
            self.0.with_extension("blob")
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = (fs::remove_file(&self.0), fs::remove_file(self.blob()));
        }
    }

    fn hello(digest: HubDigest) -> HubFile {
        HubFile { path: "hello".into(), size: HELLO.len() as u64, digest }
    }

    #[test]
    fn a_part_goes_on_where_it_stopped_and_its_hash_is_that_of_the_whole_file() {
        for digest in [HubDigest::GitBlob(BLOB.into()), HubDigest::Sha256(SHA.into())] {
            let (scratch, wanted) = (Scratch::new(digest.hex()), hello(digest));
            for (at, byte) in HELLO.iter().enumerate() {
                let mut part = PartFile::open(scratch.0.clone(), &wanted).unwrap();
                assert_eq!((part.len(), part.is_whole()), (at as u64, false));
                part.append(&[*byte]).unwrap();
            }
            let part = PartFile::open(scratch.0.clone(), &wanted).unwrap();
            assert!(part.is_whole());
            part.finish(&scratch.blob()).unwrap();
            assert_eq!(fs::read(scratch.blob()).unwrap(), HELLO);
            assert!(!scratch.0.exists());
        }
    }

    #[test]
    fn wrong_bytes_are_deleted() {
        let (scratch, wanted) = (Scratch::new("wrong"), hello(HubDigest::GitBlob(BLOB.into())));
        let mut part = PartFile::open(scratch.0.clone(), &wanted).unwrap();
        part.append(b"Hello\n").unwrap();
        let error = part.finish(&scratch.blob()).unwrap_err().to_string();
        assert!(error.contains("hello: the SHA-1 of the git blob is"), "{error}");
        assert!(error.contains(BLOB) && !scratch.0.exists() && !scratch.blob().exists());
        let mut part = PartFile::open(scratch.0.clone(), &wanted).unwrap();
        let error = part.append(b"hello\n\n").unwrap_err().to_string();
        assert!(error.contains("the size is more than 6 bytes"), "{error}");
        assert!(!scratch.0.exists());
    }

    #[test]
    fn a_part_that_is_too_long_begins_anew() {
        let (scratch, wanted) = (Scratch::new("long"), hello(HubDigest::Sha256(SHA.into())));
        fs::write(&scratch.0, b"of another version").unwrap();
        let mut part = PartFile::open(scratch.0.clone(), &wanted).unwrap();
        assert_eq!(part.len(), 0);
        part.append(HELLO).unwrap();
        part.finish(&scratch.blob()).unwrap();
        assert_eq!(fs::read(scratch.blob()).unwrap(), HELLO);
    }
}

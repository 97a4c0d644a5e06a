//! Reloads files of certificates and keys while the process runs: on SIGHUP, and after a file has
//! changed.
//!
//! Thread: `ctl`; the files are small and bounded. Invariants: a changed file is read only after
//! two checks in a row have found it the same. It is therefore not read during a write. A file that
//! is unreadable or invalid is logged once and changes nothing; the read is tried again. Files of
//! keys can be in memory, in the simulator; those of TLS are always files of this host. Not here:
//! the users of the files (`worker::service`, `router`).

use crate::config::ServerConfig;
use crate::config::api_key::{ApiKey, read_api_keys};
use crate::config::secret::{Secret, read_bearer_keys, read_cluster_key};
use crate::limits::RELOAD_INTERVAL;
use crate::net::{Authorities, Credentials, Reactor};
use crate::obs::log::event;
use crate::sys::file_access::{FileAccess, FileStamp};
use crate::wire::auth::{ClusterKey, Keyring};
use std::io;
use std::path::PathBuf;
use std::time::Instant;

/// The content of a reloaded file.
#[derive(Debug)]
pub enum ReloadedFile {
    /// The certificate and key for clients.
    Credentials(Credentials),
    /// The CAs of workers that are reached over TLS.
    Authorities(Authorities),
    /// API keys; a client must present one of them.
    ApiKeys(Vec<ApiKey>),
    /// Admin keys; an administrative request must present one of them.
    AdminKeys(Vec<Secret>),
    /// Cluster keys; a peer must prove one of them. The worker proves the first one to its peers.
    ClusterKeys(Vec<Secret>),
}

/// The stamp of a file; `None` if it is absent.
type Stamp = Option<FileStamp>;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FileKind {
    Credentials,
    Authorities,
    ApiKeys,
    AdminKeys,
    ClusterKeys,
}

impl FileKind {
    fn name(self) -> &'static str {
        match self {
            FileKind::Credentials => "certificate and key",
            FileKind::Authorities => "CA certificates",
            FileKind::ApiKeys => "API keys",
            FileKind::AdminKeys => "admin keys",
            FileKind::ClusterKeys => "cluster keys",
        }
    }
}

/// Files that are read together.
#[derive(Debug)]
struct Group {
    what: FileKind,
    access: FileAccess,
    files: Vec<PathBuf>,
    /// `read`: stamps at the time of the last read; `last`: stamps at the last check.
    read: Vec<Stamp>,
    last: Vec<Stamp>,
    /// Why the last read failed.
    failed: Option<String>,
}

impl Group {
    fn new(what: FileKind, files: Vec<PathBuf>, access: &FileAccess) -> Option<Group> {
        if files.is_empty() {
            return None;
        }
        let (access, last, read) = (access.clone(), Vec::new(), Vec::new());
        let mut group = Group { what, access, files, last, read, failed: None };
        group.last = group.stamps();
        group.read.clone_from(&group.last);
        Some(group)
    }

    fn stamps(&self) -> Vec<Stamp> {
        self.files.iter().map(|file| self.access.stamp(file)).collect()
    }

    fn read(&mut self) -> Option<ReloadedFile> {
        let stamps = self.stamps();
        let mut warnings = Vec::new();
        let fresh = match self.what {
            FileKind::Credentials => {
                Credentials::read(&self.files[0], &self.files[1]).map(ReloadedFile::Credentials)
            }
            FileKind::Authorities => {
                Authorities::read(&self.files[0]).map(ReloadedFile::Authorities)
            }
            FileKind::ApiKeys => {
                let keys = read_api_keys(&self.access, &self.files[0], &mut warnings);
                keys.map(ReloadedFile::ApiKeys).map_err(|error| error.to_string())
            }
            FileKind::AdminKeys => {
                const FLAG: &str = "--admin-key-file";
                let keys = read_bearer_keys(&self.access, FLAG, &self.files[0], &mut warnings);
                keys.map(ReloadedFile::AdminKeys).map_err(|error| error.to_string())
            }
            FileKind::ClusterKeys => {
                let read = |file: &PathBuf| read_cluster_key(&self.access, file, &mut warnings);
                let keys = self.files.iter().map(read);
                keys.collect::<Result<_, _>>()
                    .map(ReloadedFile::ClusterKeys)
                    .map_err(|error| error.to_string())
            }
        };
        let what = self.what.name();
        match fresh {
            Ok(fresh) => {
                for warning in warnings {
                    event!(Warn, "reload", "other users can read a key file", why = warning);
                }
                event!(Info, "reload", "file reloaded", what = what);
                (self.read, self.failed) = (stamps, None);
                Some(fresh)
            }
            Err(why) => {
                if self.failed.as_ref() != Some(&why) {
                    event!(
                        Error,
                        "reload",
                        "not reloaded: the old content stays in use",
                        what = what,
                        why = why
                    );
                    self.failed = Some(why);
                }
                None
            }
        }
    }
}

/// All files that are reloaded.
#[derive(Debug)]
pub struct Reload {
    groups: Vec<Group>,
    next: Instant,
}

impl Reload {
    /// Watches the files of these settings. `access` leads to the files of keys.
    pub fn new(
        server: &ServerConfig,
        cluster_keys: &[Secret],
        access: &FileAccess,
        now: Instant,
    ) -> Reload {
        let files =
            |keys: &[Secret]| keys.iter().map(|key| key.source().to_owned()).collect::<Vec<_>>();
        let credentials =
            server.tls.iter().flat_map(|(certificates, key)| [certificates.clone(), key.clone()]);
        // All API keys are in one file, and so are all admin keys.
        let first = |key: Option<&Secret>| files(key.map_or(&[], std::slice::from_ref));
        let api_key = server.api_keys.first().map(|key| &key.secret);
        let groups = [
            Group::new(FileKind::Credentials, credentials.collect(), &FileAccess::Host),
            Group::new(FileKind::ApiKeys, first(api_key), access),
            Group::new(FileKind::AdminKeys, first(server.admin_keys.first()), access),
            Group::new(FileKind::ClusterKeys, files(cluster_keys), access),
        ];
        Reload { groups: groups.into_iter().flatten().collect(), next: now + RELOAD_INTERVAL }
    }

    /// Also watches this file of CAs, if there is one.
    pub fn with_authorities(mut self, file: Option<&PathBuf>) -> Reload {
        let files = file.into_iter().cloned().collect();
        self.groups.extend(Group::new(FileKind::Authorities, files, &FileAccess::Host));
        self
    }

    /// Watches no files.
    pub fn nothing(now: Instant) -> Reload {
        Reload { groups: Vec::new(), next: now + RELOAD_INTERVAL }
    }

    /// Whether no file is watched.
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// From now on also reloads on SIGHUP, if there are files.
    ///
    /// # Errors
    /// The signal handler cannot be installed.
    pub fn watched(self, reactor: &mut Reactor) -> io::Result<Reload> {
        if !self.is_empty() {
            reactor.watch_hangups()?;
        }
        Ok(self)
    }

    /// Reads all files.
    pub fn all(&mut self) -> Vec<ReloadedFile> {
        self.groups.iter_mut().filter_map(Group::read).collect()
    }

    /// Reads the changed files, if the next check is due.
    pub fn changed(&mut self, now: Instant) -> Vec<ReloadedFile> {
        if now < self.next {
            return Vec::new();
        }
        self.next = now + RELOAD_INTERVAL;
        let changed = |group: &mut Group| {
            let stamps = group.stamps();
            let is_whole = stamps == group.last;
            group.last = stamps;
            if is_whole && group.last != group.read { group.read() } else { None }
        };
        self.groups.iter_mut().filter_map(changed).collect()
    }
}

/// The cluster keys in the form in which peers prove them.
///
/// # Errors
/// A key is too short.
pub fn keyring(secrets: &[Secret]) -> Result<Keyring, String> {
    let keys = secrets.iter().map(|key| ClusterKey::new(key.bytes()));
    keys.collect::<Result<Vec<_>, _>>().map(Keyring::new).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::api_key::RateLimits;
    use crate::sys::file_access::MemoryFiles;
    use std::path::Path;
    use std::time::Duration;

    const SECOND: Duration = Duration::from_secs(1);

    /// The files of two cluster keys, and their reload.
    fn two_keys(now: Instant) -> (MemoryFiles, Reload) {
        let files = MemoryFiles::default();
        files.write("/1", &[1; 32]);
        files.write("/2", &[1; 32]);
        let access = FileAccess::Memory(files.clone());
        let read = |path| read_cluster_key(&access, Path::new(path), &mut Vec::new()).unwrap();
        let server = ServerConfig {
            host: "127.0.0.1".parse().unwrap(),
            port: 0,
            api_keys: Vec::new(),
            key_limits: RateLimits::default(),
            admin_keys: Vec::new(),
            tls: None,
            body_max: 1,
            allowed_origins: Vec::new(),
        };
        let reload = Reload::new(&server, &[read("/1"), read("/2")], &access, now);
        (files, reload)
    }

    /// The first byte of each key that was read.
    fn first_bytes(fresh: Vec<ReloadedFile>) -> Vec<u8> {
        let keys = |file| match file {
            ReloadedFile::ClusterKeys(keys) => keys,
            other => panic!("not keys: {other:?}"),
        };
        let keys = fresh.into_iter().flat_map(keys);
        keys.map(|key| key.bytes()[0]).collect()
    }

    #[test]
    fn changed_files_are_read_together_after_two_equal_checks() {
        let begun = Instant::now();
        let (files, mut reload) = two_keys(begun);
        let mut check = |seconds| first_bytes(reload.changed(begun + seconds * SECOND));
        assert!(check(2).is_empty(), "nothing has changed");
        files.write("/2", &[2; 32]);
        assert!(check(3).is_empty(), "no check is due");
        assert!(check(4).is_empty(), "the file can still change");
        files.write("/1", &[3; 32]);
        assert!(check(6).is_empty(), "the other file has changed");
        assert!(check(7).is_empty());
        assert_eq!(check(8), [3, 2]);
        assert!(check(10).is_empty() && check(12).is_empty(), "they are read once");
    }

    #[test]
    fn an_invalid_file_is_tried_again_and_a_hangup_reads_at_once() {
        let begun = Instant::now();
        let (files, mut reload) = two_keys(begun);
        files.write("/1", b"too short");
        for seconds in [2, 4, 6] {
            assert!(reload.changed(begun + seconds * SECOND).is_empty());
        }
        assert!(reload.all().is_empty());
        files.write("/1", &[4; 32]);
        assert_eq!(first_bytes(reload.all()), [4, 1]);
        assert!(reload.changed(begun + 8 * SECOND).is_empty(), "it is read already");
        assert!(reload.changed(begun + 10 * SECOND).is_empty());
    }
}

//! Reloads files of certificates and keys while the process runs: on SIGHUP, and after a file has
//! changed.
//!
//! Thread: `ctl`; the files are small and bounded. Invariants: a changed file is read only after
//! two checks in a row have found it the same. It is therefore not read during a write. A file that
//! is unreadable or invalid is logged once and changes nothing; the read is tried again. Not here:
//! the users of the files (`worker::service`, `router`).

use crate::config::ServerConfig;
use crate::config::secret::{Secret, read_bearer_keys, read_cluster_key};
use crate::limits::RELOAD_INTERVAL;
use crate::net::{Authorities, Credentials, Reactor};
use crate::obs::log::event;
use crate::wire::auth::{ClusterKey, Keyring};
use std::io;
use std::os::unix::fs::MetadataExt;
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
    ApiKeys(Vec<Secret>),
    /// Admin keys; an administrative request must present one of them.
    AdminKeys(Vec<Secret>),
    /// Cluster keys; a peer must prove one of them. The worker proves the first one to its peers.
    ClusterKeys(Vec<Secret>),
}

/// Identity of a file's content: inode, length, and modification time.
type Stamp = Option<(u64, u64, i64, i64)>;

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
    files: Vec<PathBuf>,
    /// `read`: stamps at the time of the last read; `last`: stamps at the last check.
    read: Vec<Stamp>,
    last: Vec<Stamp>,
    /// Why the last read failed.
    failed: Option<String>,
}

impl Group {
    fn new(what: FileKind, files: Vec<PathBuf>) -> Option<Group> {
        if files.is_empty() {
            return None;
        }
        let stamps: Vec<Stamp> = files.iter().map(stamp).collect();
        Some(Group { what, files, last: stamps.clone(), read: stamps, failed: None })
    }

    fn stamps(&self) -> Vec<Stamp> {
        self.files.iter().map(stamp).collect()
    }

    fn read(&mut self) -> Option<ReloadedFile> {
        let stamps = self.stamps();
        let mut warnings = Vec::new();
        let mut bearer_keys = |flag| {
            read_bearer_keys(flag, &self.files[0], &mut warnings).map_err(|error| error.to_string())
        };
        let fresh = match self.what {
            FileKind::Credentials => {
                Credentials::read(&self.files[0], &self.files[1]).map(ReloadedFile::Credentials)
            }
            FileKind::Authorities => {
                Authorities::read(&self.files[0]).map(ReloadedFile::Authorities)
            }
            FileKind::ApiKeys => bearer_keys("--api-key-file").map(ReloadedFile::ApiKeys),
            FileKind::AdminKeys => bearer_keys("--admin-key-file").map(ReloadedFile::AdminKeys),
            FileKind::ClusterKeys => {
                let keys = self.files.iter().map(|file| read_cluster_key(file, &mut warnings));
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
    /// Watches the files of these settings.
    pub fn new(server: &ServerConfig, cluster_keys: &[Secret], now: Instant) -> Reload {
        let files =
            |keys: &[Secret]| keys.iter().map(|key| key.source().to_owned()).collect::<Vec<_>>();
        let credentials =
            server.tls.iter().flat_map(|(certificates, key)| [certificates.clone(), key.clone()]);
        // All API keys are in one file, and so are all admin keys.
        let first = |keys: &[Secret]| files(&keys[..keys.len().min(1)]);
        let groups = [
            Group::new(FileKind::Credentials, credentials.collect()),
            Group::new(FileKind::ApiKeys, first(&server.api_keys)),
            Group::new(FileKind::AdminKeys, first(&server.admin_keys)),
            Group::new(FileKind::ClusterKeys, files(cluster_keys)),
        ];
        Reload { groups: groups.into_iter().flatten().collect(), next: now + RELOAD_INTERVAL }
    }

    /// Also watches this file of CAs, if there is one.
    pub fn with_authorities(mut self, file: Option<&PathBuf>) -> Reload {
        self.groups.extend(Group::new(FileKind::Authorities, file.into_iter().cloned().collect()));
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

fn stamp(file: &PathBuf) -> Stamp {
    let data = std::fs::metadata(file).ok()?;
    Some((data.ino(), data.len(), data.mtime(), data.mtime_nsec()))
}

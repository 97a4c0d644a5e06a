//! Files of certificates and keys, read again while the process runs: when SIGHUP says so, and when one has changed.
//!
//! Thread: `ctl`; the files are small and bounded. Invariants: a file that has changed is read once it has been the same at
//! two looks, so that one that is being written is not read in its midst; what cannot be read, or is no certificate or key,
//! is said in the log, once, changes nothing, and is tried again. Not here: who uses what was read (`service`, `router`).

use crate::config::resolved::FrontConfig;
use crate::config::secret::{Secret, read_api_keys, read_cluster_key};
use crate::limits::RELOAD_INTERVAL;
use crate::net::{Authorities, Credentials, Reactor};
use crate::obs::log::event;
use crate::wire::auth::{ClusterKey, Keyring};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Instant;

/// What was read.
#[derive(Debug)]
pub enum Fresh {
    /// What clients are shown over TLS.
    Credentials(Credentials),
    /// Who vouches for workers that are reached over TLS.
    Authorities(Authorities),
    /// What clients must show, one of them.
    ApiKeys(Vec<Secret>),
    /// What peers must prove, one of them; the first is proven to them.
    ClusterKeys(Vec<Secret>),
}

/// What a file was like: inode, length, and time of its last change.
type Stamp = Option<(u64, u64, i64, i64)>;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum What {
    Credentials,
    Authorities,
    ApiKeys,
    ClusterKeys,
}

impl What {
    fn name(self) -> &'static str {
        match self {
            What::Credentials => "certificate and key",
            What::Authorities => "certificates of authorities",
            What::ApiKeys => "API keys",
            What::ClusterKeys => "cluster keys",
        }
    }
}

/// Files that are read together.
#[derive(Debug)]
struct Group {
    what: What,
    files: Vec<PathBuf>,
    /// As they were when they were read, and at the last look.
    read: Vec<Stamp>,
    last: Vec<Stamp>,
    /// Why they could not be read, when that was tried last.
    failed: Option<String>,
}

impl Group {
    fn new(what: What, files: Vec<PathBuf>) -> Option<Group> {
        if files.is_empty() {
            return None;
        }
        let stamps: Vec<Stamp> = files.iter().map(stamp).collect();
        Some(Group { what, files, last: stamps.clone(), read: stamps, failed: None })
    }

    fn stamps(&self) -> Vec<Stamp> {
        self.files.iter().map(stamp).collect()
    }

    fn read(&mut self) -> Option<Fresh> {
        let stamps = self.stamps();
        let mut warnings = Vec::new();
        let fresh = match self.what {
            What::Credentials => {
                Credentials::read(&self.files[0], &self.files[1]).map(Fresh::Credentials)
            }
            What::Authorities => Authorities::read(&self.files[0]).map(Fresh::Authorities),
            What::ApiKeys => read_api_keys(&self.files[0], &mut warnings)
                .map(Fresh::ApiKeys)
                .map_err(|error| error.to_string()),
            What::ClusterKeys => {
                let keys = self.files.iter().map(|file| read_cluster_key(file, &mut warnings));
                keys.collect::<Result<_, _>>()
                    .map(Fresh::ClusterKeys)
                    .map_err(|error| error.to_string())
            }
        };
        let what = self.what.name();
        match fresh {
            Ok(fresh) => {
                for warning in warnings {
                    event!(Warn, "reload", "a file is read by others, too", why = warning);
                }
                event!(Info, "reload", "read again", what = what);
                (self.read, self.failed) = (stamps, None);
                Some(fresh)
            }
            Err(why) => {
                if self.failed.as_ref() != Some(&why) {
                    event!(
                        Error,
                        "reload",
                        "not read: what there was stays",
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

/// All files that are read again.
#[derive(Debug)]
pub struct Reload {
    groups: Vec<Group>,
    next: Instant,
}

impl Reload {
    /// The files that these came from.
    pub fn new(front: &FrontConfig, cluster_keys: &[Secret], now: Instant) -> Reload {
        let files =
            |keys: &[Secret]| keys.iter().map(|key| key.source().to_owned()).collect::<Vec<_>>();
        let credentials =
            front.tls.iter().flat_map(|(certificates, key)| [certificates.clone(), key.clone()]);
        // All keys of clients are in one file.
        let api_keys = files(&front.api_keys[..front.api_keys.len().min(1)]);
        let groups = [
            Group::new(What::Credentials, credentials.collect()),
            Group::new(What::ApiKeys, api_keys),
            Group::new(What::ClusterKeys, files(cluster_keys)),
        ];
        Reload { groups: groups.into_iter().flatten().collect(), next: now + RELOAD_INTERVAL }
    }

    /// This file of authorities, too, where there is one.
    pub fn with_authorities(mut self, file: Option<&PathBuf>) -> Reload {
        self.groups.extend(Group::new(What::Authorities, file.into_iter().cloned().collect()));
        self
    }

    /// No files.
    pub fn nothing(now: Instant) -> Reload {
        Reload { groups: Vec::new(), next: now + RELOAD_INTERVAL }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Hears of SIGHUP from now on, if there are files.
    ///
    /// # Errors
    /// The signal cannot be had.
    pub fn watched(self, reactor: &mut Reactor) -> io::Result<Reload> {
        if !self.is_empty() {
            reactor.watch_hangups()?;
        }
        Ok(self)
    }

    /// Reads all.
    pub fn all(&mut self) -> Vec<Fresh> {
        self.groups.iter_mut().filter_map(Group::read).collect()
    }

    /// Reads what has changed, if it is time to look.
    pub fn changed(&mut self, now: Instant) -> Vec<Fresh> {
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

/// The keys of a cluster, as peers prove them.
///
/// # Errors
/// One is too short.
pub fn keyring(secrets: &[Secret]) -> Result<Keyring, String> {
    let keys = secrets.iter().map(|key| ClusterKey::new(key.bytes()));
    keys.collect::<Result<Vec<_>, _>>().map(Keyring::new).map_err(|error| error.to_string())
}

fn stamp(file: &PathBuf) -> Stamp {
    let data = std::fs::metadata(file).ok()?;
    Some((data.ino(), data.len(), data.mtime(), data.mtime_nsec()))
}

//! Facts of this machine: its files, its memory and its identity as a host.
//!
//! Thread: any. Not here: its NICs (`verbs`), conclusions from the facts (`cmd::doctor`).

use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::{fmt, fs};

/// The files of a machine, below `/` or below a copy of its tree.
#[derive(Debug)]
pub struct HostFiles {
    root: PathBuf,
}

impl HostFiles {
    /// The machine with its files below `root`.
    pub fn at(root: impl Into<PathBuf>) -> HostFiles {
        HostFiles { root: root.into() }
    }

    /// The path of `file`.
    pub fn path(&self, file: impl AsRef<Path>) -> PathBuf {
        self.root.join(file)
    }

    /// The text of `file`; empty if it cannot be read.
    pub fn read(&self, file: impl AsRef<Path>) -> String {
        fs::read_to_string(self.path(file)).unwrap_or_default()
    }

    /// Names in the directory `dir`, sorted.
    pub fn names(&self, dir: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(dir)).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort_unstable();
        names
    }
}

/// A digest of the kernel's boot id and the network namespace. It is equal in all processes that
/// can pass descriptors to each other over an abstract unix socket.
pub fn id() -> [u8; 16] {
    let mut id = fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = fs::read_link("/proc/self/ns/net").unwrap_or_default();
    id.extend_from_slice(namespace.as_os_str().as_encoded_bytes());
    let digest = Sha256::digest(&id);
    let mut host = [0; 16];
    host.copy_from_slice(&digest[..16]);
    host
}

/// Memory in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HostMemory {
    /// Total of the machine.
    pub total: u64,
    /// The part of the total that is free for new use (`MemAvailable`).
    pub available: u64,
    /// The limit of the cgroup, if it is below the total.
    pub allowed: Option<u64>,
}

/// What limits the memory of a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bound {
    /// All memory of the machine.
    Machine,
    /// The limit of a cgroup.
    Cgroup,
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Bound::Machine => "machine",
            Bound::Cgroup => "cgroup",
        })
    }
}

impl HostMemory {
    /// The memory of this machine; `None` if `/proc` does not show it.
    pub fn here() -> Option<HostMemory> {
        HostMemory::of(&HostFiles::at("/"))
    }

    /// The memory of the machine with these files.
    pub fn of(host: &HostFiles) -> Option<HostMemory> {
        let meminfo = host.read("proc/meminfo");
        let bytes = |name: &str| {
            let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok())
                .map(|kb| kb << 10)
        };
        let (total, available) = (bytes("MemTotal")?, bytes("MemAvailable")?);
        Some(HostMemory {
            total,
            available,
            allowed: cgroup_limit(host).filter(|&limit| limit < total),
        })
    }

    /// The most memory that this process can use if it is the only one, and the limit that applies.
    pub fn most(&self) -> (u64, Bound) {
        self.allowed.map_or((self.total, Bound::Machine), |limit| (limit, Bound::Cgroup))
    }
}

/// The memory limit of this process's cgroup, version 2 or 1.
fn cgroup_limit(host: &HostFiles) -> Option<u64> {
    let groups = host.read("proc/self/cgroup");
    let files = groups.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?.trim_start_matches('/'));
        match controllers {
            "" => Some(Path::new("sys/fs/cgroup").join(path).join("memory.max")),
            "memory" => {
                Some(Path::new("sys/fs/cgroup/memory").join(path).join("memory.limit_in_bytes"))
            }
            _ => None,
        }
    });
    files.filter_map(|file| host.read(file).trim().parse().ok()).min()
}

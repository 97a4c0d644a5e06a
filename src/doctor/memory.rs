//! How much memory there is for this process: the machine's, or less where its cgroup allows less.

use super::Host;
use std::fmt;
use std::path::Path;

/// What there is, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Memory {
    /// Of the machine.
    pub total: u64,
    /// Of that, what nobody uses.
    pub available: u64,
    /// What the cgroup allows, where that is less than the machine has.
    pub allowed: Option<u64>,
}

/// Where less than a process asks for comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bound {
    /// All memory of the machine.
    Machine,
    /// A limit.
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

impl Memory {
    /// Of this machine; `None` where `/proc` does not tell.
    pub fn here() -> Option<Memory> {
        Memory::of(&Host::at("/"))
    }

    pub(super) fn of(host: &Host) -> Option<Memory> {
        let meminfo = host.read("proc/meminfo");
        let bytes = |name: &str| {
            let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok())
                .map(|kb| kb << 10)
        };
        let (total, available) = (bytes("MemTotal")?, bytes("MemAvailable")?);
        Some(Memory {
            total,
            available,
            allowed: cgroup_limit(host).filter(|&limit| limit < total),
        })
    }

    /// What this process can have at most if no other has any, and what bounds it.
    pub fn most(&self) -> (u64, Bound) {
        self.allowed.map_or((self.total, Bound::Machine), |limit| (limit, Bound::Cgroup))
    }
}

/// The memory limit of this process's cgroup, version 2 or 1.
fn cgroup_limit(host: &Host) -> Option<u64> {
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

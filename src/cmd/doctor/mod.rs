//! `baton doctor`: features of this machine, features that it lacks, and a remedy for each.
//!
//! Thread: main. Invariants: each finding is measured now, not cached; features that this version
//! does not use are marked. All files are read below a root directory that tests can replace.

mod rdma;
pub mod transfer;

use crate::cli::HostInfo;
use crate::config::{CoreConfig, KernelFamily};
use crate::kv::region::{PeerRegion, Region};
use crate::process::cpu_plan::CpuPlan;
use crate::process::thread_cpus;
use crate::sys::host::{HostFiles, HostMemory};
use crate::sys::verbs::{self, Linkage};
use crate::transfer::transport::rdma::Nic;
use std::fmt;

/// Minimum memory for a small model, its KV and the rest of the system.
const MEMORY_WANTED: u64 = 2 << 30;
/// Memory that RDMA locks by default: the KV pools of two workers, and the other memory that they
/// register.
const LOCKED_WANTED: u64 = (2 << 30) + (64 << 20);
/// Open files for about five thousand clients: each needs its own connection and two to workers.
const OPEN_FILES_WANTED: u64 = 16_384;
/// Directories that the dynamic loader searches, in addition to `LD_LIBRARY_PATH`.
const LIBRARY_DIRS: &[&str] = &[
    "lib",
    "lib64",
    "usr/lib",
    "usr/lib64",
    "usr/local/lib",
    "lib/x86_64-linux-gnu",
    "usr/lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/local/cuda/lib64",
];
/// CPU features by the kernel's names, oldest first, and whether this version has kernels for them.
const FEATURES: &[(&str, bool)] = &[
    ("avx2", true),
    ("fma", true),
    ("f16c", true),
    ("avx_vnni", false),
    ("avx512f", true),
    ("avx512bw", true),
    ("avx512vl", true),
    ("avx512dq", true),
    ("avx512_vnni", true),
    ("avx512_bf16", false),
    ("amx_tile", false),
    ("amx_int8", false),
    ("amx_bf16", false),
];

/// Severity of a finding.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Verdict {
    /// Good, or irrelevant.
    Good,
    /// Usable, but not optimal.
    Poor,
    /// No model can be served, or the named peer cannot be used.
    Bad,
}

/// One finding.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Diagnosis {
    /// The subject.
    pub topic: &'static str,
    /// The severity.
    pub verdict: Verdict,
    /// The observation.
    pub found: String,
    /// The remedy.
    pub advice: Option<String>,
}

impl Diagnosis {
    fn good(topic: &'static str, found: String) -> Diagnosis {
        Diagnosis { topic, verdict: Verdict::Good, found, advice: None }
    }

    fn with(topic: &'static str, verdict: Verdict, found: String, advice: &str) -> Diagnosis {
        Diagnosis { topic, verdict, found, advice: Some(advice.into()) }
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = match self.verdict {
            Verdict::Good => "ok",
            Verdict::Poor => "poor",
            Verdict::Bad => "BAD",
        };
        // Parts of the text come from another host. Their control characters must not reach the
        // terminal.
        let found = self.found.replace(char::is_control, "?");
        write!(f, "{mark:4}  {:13} {found}", self.topic)?;
        match &self.advice {
            Some(advice) => write!(f, "\n{:21}-> {advice}", ""),
            None => Ok(()),
        }
    }
}

/// Examines this machine. `kernels` are the kernel families that can run here, best last.
pub fn examine(
    surroundings: &HostInfo,
    cores: &CoreConfig,
    kernels: &[KernelFamily],
    nics: &Result<String, String>,
) -> Vec<Diagnosis> {
    let files = HostFiles::at("/");
    let host = Examination(&files);
    let mut findings = host.examine(surroundings, cores, kernels);
    findings.insert(0, build());
    findings.splice(3..3, threads(&files, cores));
    let at = findings.iter().position(|finding| finding.topic == "kernels");
    findings.insert(at.unwrap_or_default(), shared_memory());
    findings.extend(rdma::findings(verbs::list(), &host.devices()));
    findings.push(transfer::here(nics));
    findings
}

/// What this build can do.
fn build() -> Diagnosis {
    let (version, machine) = (env!("CARGO_PKG_VERSION"), std::env::consts::ARCH);
    let kind = match verbs::LINKAGE {
        Linkage::Loaded => "dynamic: shm, tcp, and RDMA if libibverbs.so.1 is installed",
        Linkage::Contained => "one static file: shm, tcp and RDMA",
        Linkage::Absent => "one static file: shm and tcp, no RDMA",
    };
    Diagnosis::good("build", format!("{version} for {machine}, {kind}"))
}

/// Repeats the steps of a transfer over shm: creates a sealed memory file and maps it as a peer
/// does.
fn shared_memory() -> Diagnosis {
    const TRIED: usize = 1 << 20;
    let result = Region::new(c"baton-doctor", TRIED)
        .and_then(|region| PeerRegion::map(region.descriptor(), region.len()).map(drop));
    match result {
        Ok(()) => Diagnosis::good(
            "shm",
            "sealed memory files can be created and mapped; /dev/shm is not used".into(),
        ),
        Err(error) => Diagnosis::with(
            "shm",
            Verdict::Bad,
            format!("cannot create a sealed memory file: {error}"),
            "the KV pool needs one: allow memfd_create (seccomp, vm.memfd_noexec), or more memory",
        ),
    }
}

/// The examined machine. Tests have its files below another root directory.
struct Examination<'a>(&'a HostFiles);

impl Examination<'_> {
    fn examine(
        &self,
        surroundings: &HostInfo,
        cores: &CoreConfig,
        kernels: &[KernelFamily],
    ) -> Vec<Diagnosis> {
        vec![
            self.cpu(),
            count(surroundings, cores),
            self.memory(),
            self.kernels(kernels),
            self.huge_pages(),
            self.locked_memory(),
            self.open_files(),
            self.cuda(),
        ]
    }

    fn cpu(&self) -> Diagnosis {
        let cpuinfo = self.0.read("proc/cpuinfo");
        let field = |name: &str| {
            let line = cpuinfo
                .lines()
                .find(|line| line.split(':').next().is_some_and(|key| key.trim() == name));
            line.and_then(|line| line.split_once(':')).map_or("", |(_, value)| value.trim())
        };
        let flags: Vec<&str> = field("flags").split(' ').collect();
        let of = |used: bool| -> Vec<&str> {
            FEATURES
                .iter()
                .filter(|(name, u)| *u == used && flags.contains(name))
                .map(|(name, _)| *name)
                .collect()
        };
        let (used, unused) = (of(true), of(false));
        let name =
            if field("model name").is_empty() { "unknown model" } else { field("model name") };
        let mut found = name.to_owned();
        if !used.is_empty() {
            found += &format!("; {}", used.join(" "));
        }
        if !unused.is_empty() {
            found += &format!("; not used by this version: {}", unused.join(" "));
        }
        Diagnosis::good("cpu", found)
    }

    fn kernels(&self, kernels: &[KernelFamily]) -> Diagnosis {
        let with_class = |family: &KernelFamily| format!("{family} ({})", family.bit_class());
        match kernels.split_last() {
            Some((best, others)) if !others.is_empty() => {
                let others: Vec<String> = others.iter().map(with_class).collect();
                let (class, others) = (best.bit_class(), others.join(", "));
                Diagnosis::good(
                    "kernels",
                    format!("{best} is the default (bit class {class}); {others} can also run"),
                )
            }
            _ => Diagnosis::with(
                "kernels",
                Verdict::Poor,
                "only portable (bit class portable)".into(),
                "fast kernels need AVX2 with FMA and F16C, or AVX-512; a virtual machine may hide \
                 them",
            ),
        }
    }

    fn memory(&self) -> Diagnosis {
        let Some(memory) = HostMemory::of(self.0) else {
            return Diagnosis::good("memory", "unknown: /proc/meminfo cannot be read".into());
        };
        let mut found = format!("{} free of {}", gib(memory.available), gib(memory.total));
        if let Some(limit) = memory.allowed {
            found += &format!(", {} allowed by the cgroup", gib(limit));
        }
        if memory.available.min(memory.most().0) >= MEMORY_WANTED {
            return Diagnosis::good("memory", found);
        }
        let advice =
            "each worker uses --kv-memory (default 1GiB) in addition to the weights; reduce it";
        Diagnosis::with("memory", Verdict::Poor, found, advice)
    }

    fn huge_pages(&self) -> Diagnosis {
        let setting = self.0.read("sys/kernel/mm/transparent_hugepage/shmem_enabled");
        match setting.split(['[', ']']).nth(1) {
            None => Diagnosis::good("huge pages", "not supported for shared memory".into()),
            Some("always" | "within_size" | "force") => {
                Diagnosis::good("huge pages", "used for the KV pool if available".into())
            }
            Some(other) => Diagnosis::with(
                "huge pages",
                Verdict::Poor,
                format!("shmem_enabled is {other}: the KV pool uses small pages"),
                "echo within_size > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
            ),
        }
    }

    /// Names of the kernel's RDMA devices.
    fn devices(&self) -> Vec<String> {
        self.0.names("sys/class/infiniband")
    }

    /// Checks the limit of locked memory. A NIC locks the memory registered with it: the KV pool.
    fn locked_memory(&self) -> Diagnosis {
        const TOPIC: &str = "locked memory";
        let (limit, found) = match self.limits("Max locked memory").map(|(soft, _)| soft) {
            Some(u64::MAX) => (u64::MAX, "without limit".to_owned()),
            Some(bytes) => (bytes, format!("{} KiB", bytes >> 10)),
            None => (u64::MAX, "limit unknown".to_owned()),
        };
        if self.devices().is_empty() {
            return Diagnosis::good(
                TOPIC,
                format!("{found}; there is no NIC, and only RDMA locks memory"),
            );
        }
        if limit >= LOCKED_WANTED || self.may_lock() {
            return Diagnosis::good(TOPIC, format!("{found}; a NIC locks the KV pool"));
        }
        let advice = "set ulimit -l unlimited, or LimitMEMLOCK=infinity in the systemd unit";
        Diagnosis::with(
            TOPIC,
            Verdict::Poor,
            format!("{found}, and a NIC locks the KV pool (--kv-memory)"),
            advice,
        )
    }

    /// Whether this process has CAP_IPC_LOCK, so that the limit does not apply.
    fn may_lock(&self) -> bool {
        const CAP_IPC_LOCK: u64 = 1 << 14;
        let status = self.0.read("proc/self/status");
        let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
        set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok())
            .is_some_and(|set| set & CAP_IPC_LOCK != 0)
    }

    fn open_files(&self) -> Diagnosis {
        // Baton's processes raise the soft limit to the hard limit.
        match self.limits("Max open files").map(|(_, hard)| hard) {
            Some(limit) if limit < OPEN_FILES_WANTED => Diagnosis::with(
                "open files",
                Verdict::Poor,
                format!("at most {limit}, and each connection needs one"),
                "set ulimit -Hn 65536, or LimitNOFILE= in the systemd unit",
            ),
            Some(u64::MAX) => Diagnosis::good("open files", "without limit".into()),
            Some(limit) => Diagnosis::good("open files", format!("at most {limit}")),
            None => Diagnosis::good("open files", "limit unknown".into()),
        }
    }

    fn cuda(&self) -> Diagnosis {
        let is_card = |name: &String| {
            name.strip_prefix("nvidia")
                .is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
        };
        let cards = self.0.names("dev").iter().filter(|name| is_card(name)).count();
        let cards = if cards == 0 { "no device".into() } else { format!("{cards} device(s)") };
        let library = self.library("libcuda.so.1");
        Diagnosis::good("cuda", format!("{cards}, {library}; not used by this version"))
    }

    /// The soft and the hard limit of this name; `u64::MAX`: no limit.
    fn limits(&self, name: &str) -> Option<(u64, u64)> {
        let limits = self.0.read("proc/self/limits");
        let mut numbers =
            limits.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace();
        let mut next = || match numbers.next()? {
            "unlimited" => Some(u64::MAX),
            number => number.parse().ok(),
        };
        Some((next()?, next()?))
    }

    fn library(&self, name: &str) -> String {
        let path = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let named = std::env::split_paths(&path).filter(|dir| dir.is_absolute());
        let usual = LIBRARY_DIRS.iter().map(|dir| self.0.path(dir));
        match named.chain(usual).map(|dir| dir.join(name)).find(|file| file.exists()) {
            Some(file) => format!("library {}", file.display()),
            None => format!("no {name} in the usual directories"),
        }
    }
}

fn count(surroundings: &HostInfo, cores: &CoreConfig) -> Diagnosis {
    const TOPIC: &str = "cores";
    let HostInfo { cpus, parallelism, .. } = surroundings;
    let found = format!("this process can use {} logical CPUs, {parallelism} at once", cpus.len());
    if *parallelism < 2 {
        let advice = "HTTP and computation share one core; allow two or more";
        return Diagnosis::with(TOPIC, Verdict::Poor, found, advice);
    }
    let found = format!("{found}; compute threads: {}", cores.threads);
    if cores.threads > cores.cpus.len().min(*parallelism) {
        let advice = "more threads than can run at once are slower: reduce --threads";
        return Diagnosis::with(TOPIC, Verdict::Poor, found, advice);
    }
    Diagnosis::good(TOPIC, found)
}

/// The CPUs of each thread, as a worker with these settings chooses them. A worker that can use a
/// NIC has its own line, if NICs change the plan.
fn threads(host: &HostFiles, cores: &CoreConfig) -> Vec<Diagnosis> {
    let shown = |plan: &CpuPlan| Diagnosis::good("threads", plan.to_string());
    let plain = thread_cpus::plan(host, cores, &[]);
    let nics = Nic::choose(&[], &cores.cpus).unwrap_or_default();
    let near = thread_cpus::plan(host, cores, &nics);
    if near == plain {
        return vec![shown(&plain)];
    }
    let (mut serve, mut others) = (shown(&plain), shown(&near));
    serve.found += " (baton serve)";
    others.found += " (prefill and decode workers)";
    vec![others, serve]
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::hub::HubVariables;
    use crate::sys::file_access::FileAccess;
    use std::fs;
    use std::path::PathBuf;

    fn cores(threads: usize) -> CoreConfig {
        CoreConfig { cpus: vec![0, 1], cpus_are_chosen: true, threads, busy_poll: false }
    }

    /// A fake machine in a directory that is deleted with it.
    struct Machine(PathBuf);

    impl Machine {
        fn new(name: &str, files: &[(&str, &str)]) -> Machine {
            let root =
                std::env::temp_dir().join(format!("baton-doctor-{}-{name}", std::process::id()));
            let _ = fs::remove_dir_all(&root);
            for (file, text) in files {
                let path = root.join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            Machine(root)
        }

        fn finding(&self, topic: &str, kernels: &[KernelFamily]) -> Diagnosis {
            let surroundings = HostInfo {
                cpus: vec![0, 1],
                parallelism: 2,
                log_level: None,
                files: FileAccess::Host,
                hub: HubVariables::default(),
            };
            let files = HostFiles::at(&self.0);
            let findings = Examination(&files).examine(&surroundings, &cores(2), kernels);
            findings.into_iter().find(|finding| finding.topic == topic).unwrap()
        }
    }

    impl Drop for Machine {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_machine_that_has_it_all() {
        let machine = Machine::new(
            "rich",
            &[
                (
                    "proc/cpuinfo",
                    "processor\t: 0\nmodel name\t: Fast One\n\
                     flags\t\t: fpu avx2 avx512f amx_tile\n",
                ),
                ("proc/meminfo", "MemTotal:       33554432 kB\nMemAvailable:   16777216 kB\n"),
                ("proc/self/limits", "Max open files            65536    65536     files     \n"),
                (
                    "sys/kernel/mm/transparent_hugepage/shmem_enabled",
                    "always [within_size] never\n",
                ),
                ("dev/nvidia0", ""),
                ("dev/nvidiactl", ""),
            ],
        );
        let finding = machine.finding("cpu", &[]);
        assert_eq!(finding.found, "Fast One; avx2 avx512f; not used by this version: amx_tile");
        assert_eq!(machine.finding("memory", &[]).found, "16.0 GiB free of 32.0 GiB");
        assert!(machine.finding("cuda", &[]).found.starts_with("1 device(s), "));
        let finding = machine.finding(
            "kernels",
            &[KernelFamily::Portable, KernelFamily::Avx2, KernelFamily::Avx512],
        );
        assert_eq!(
            finding.found,
            "avx512 is the default (bit class x86-fma); portable (portable), avx2 (x86-fma) can \
             also run"
        );
        for topic in ["memory", "open files", "huge pages", "kernels"] {
            let finding = machine.finding(topic, &[KernelFamily::Portable, KernelFamily::Avx2]);
            assert_eq!((finding.verdict, &finding.advice), (Verdict::Good, &None), "{finding}");
        }
    }

    #[test]
    fn a_poor_finding_comes_with_advice() {
        let machine = Machine::new(
            "poor",
            &[
                ("proc/meminfo", "MemTotal:       33554432 kB\nMemAvailable:   16777216 kB\n"),
                ("proc/self/cgroup", "0::/box\n"),
                ("sys/fs/cgroup/box/memory.max", "1073741824\n"),
                ("proc/self/limits", "Max open files            256      1024     files     \n"),
                ("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always advise [never]\n"),
            ],
        );
        for (topic, part) in [
            ("memory", "1.0 GiB allowed by the cgroup"),
            ("open files", "1024"),
            ("huge pages", "never"),
            ("kernels", "portable"),
        ] {
            let finding = machine.finding(topic, &[KernelFamily::Portable]);
            assert!(finding.found.contains(part), "{finding}");
            assert!(finding.verdict == Verdict::Poor && finding.advice.is_some(), "{finding}");
        }
    }

    #[test]
    fn a_nic_wants_memory_that_may_be_locked() {
        let locked = |name, device: bool, limit: &str, capabilities: &str| {
            let limits = format!(
                "Max locked memory         {limit}              {limit}              bytes\n"
            );
            let status = format!("Name:\tbaton\nCapEff:\t{capabilities}\n");
            let mut files =
                vec![("proc/self/limits", &limits[..]), ("proc/self/status", &status[..])];
            if device {
                files.push(("sys/class/infiniband/mlx5_0/node_guid", "1\n"));
            }
            Machine::new(name, &files).finding("locked memory", &[])
        };
        let none = "0000000000000000";
        assert_eq!(locked("no-nic", false, "65536", none).verdict, Verdict::Good);
        let little = locked("little", true, "65536", none);
        assert_eq!((little.verdict, little.advice.is_some()), (Verdict::Poor, true));
        assert!(little.found.starts_with("64 KiB, and a NIC locks"), "{little}");
        assert_eq!(locked("unlimited", true, "unlimited", none).verdict, Verdict::Good);
        // Only CAP_IPC_LOCK, and then all capabilities except that one.
        assert_eq!(locked("may", true, "65536", "0000000000004000").verdict, Verdict::Good);
        assert_eq!(locked("may-not", true, "65536", "000001ffffffbfff").verdict, Verdict::Poor);
    }

    #[test]
    fn the_threads_are_counted_and_their_cpus_are_shown() {
        let host = |parallelism| HostInfo {
            cpus: vec![0, 1],
            parallelism,
            log_level: None,
            files: FileAccess::Host,
            hub: HubVariables::default(),
        };
        let two = count(&host(2), &cores(2));
        assert_eq!(two.verdict, Verdict::Good, "{two}");
        assert!(two.found.ends_with("; compute threads: 2"), "{two}");
        for finding in [count(&host(2), &cores(3)), count(&host(1), &cores(1))] {
            assert!(finding.verdict == Verdict::Poor && finding.advice.is_some(), "{finding}");
        }
        let machine = Machine::new("siblings", &[]);
        let shown = threads(&HostFiles::at(&machine.0), &cores(1));
        assert_eq!(
            shown[0].found,
            "engine 0; move-0 1; ctl 1; tok, tok-long, grammar, masks, names-i 1"
        );
    }

    #[test]
    fn a_machine_that_tells_nothing_is_no_reason_to_fail() {
        let machine = Machine::new("mute", &[]);
        assert!(machine.finding("memory", &[]).found.contains("unknown"));
    }

    #[test]
    fn this_machine_can_hand_over_through_shared_memory() {
        let host = HostInfo::of_this_process();
        let findings = examine(&host, &cores(2), &[KernelFamily::Portable], &Err("none".into()));
        let topics: Vec<&str> = findings.iter().take(6).map(|finding| finding.topic).collect();
        assert_eq!(topics, ["build", "cpu", "cores", "threads", "memory", "shm"]);
        let shm = findings.iter().find(|finding| finding.topic == "shm").unwrap();
        assert_eq!(shm.verdict, Verdict::Good, "{shm}");
    }
}

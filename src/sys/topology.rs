//! Where the CPUs and NICs of a host are: physical cores and NUMA nodes, from sysfs.
//!
//! Thread: any. Invariants: a fact that sysfs lacks is `None`; a CPU without a known core counts as
//! a core. Not here: which CPUs a thread gets (`process::cpu_plan`).

use super::host::HostFiles;

/// A logical CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cpu {
    /// Its number.
    pub id: usize,
    /// Its physical core, named by the lowest CPU of the core.
    pub core: usize,
    /// Its NUMA node.
    pub node: Option<u32>,
}

impl Cpu {
    /// The facts of the CPU with this number.
    pub fn of(host: &HostFiles, id: usize) -> Cpu {
        let folder = format!("sys/devices/system/cpu/cpu{id}");
        // Older kernels have only the second name.
        let siblings = ["core_cpus_list", "thread_siblings_list"]
            .map(|file| host.read(format!("{folder}/topology/{file}")));
        // A list is in ascending order: `3,11` or `6-7`.
        let lowest = siblings.iter().find_map(|list| {
            list.trim().split([',', '-']).next().and_then(|first| first.parse().ok())
        });
        let names = host.names(&folder);
        let node = names.iter().find_map(|name| name.strip_prefix("node")?.parse().ok());
        Cpu { id, core: lowest.unwrap_or(id), node }
    }
}

/// The NUMA node of the NIC with this name; `None` if the host has only one node, or does not
/// report it.
pub fn node_of_nic(host: &HostFiles, name: &str) -> Option<u32> {
    // Hosts with one node report −1.
    host.read(format!("sys/class/infiniband/{name}/device/numa_node")).trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Two sockets with four cores each; CPU `n` and `n + 8` are one core. A NIC is on node 1.
    #[test]
    fn two_sockets_with_siblings_and_a_nic() {
        let root = std::env::temp_dir().join(format!("baton-topology-{}", std::process::id()));
        let cpus = root.join("sys/devices/system/cpu");
        for id in 0..16 {
            let cpu = cpus.join(format!("cpu{id}"));
            fs::create_dir_all(cpu.join("topology")).unwrap();
            fs::create_dir_all(cpu.join(format!("node{}", id % 8 / 4))).unwrap();
            // Half of them as an older kernel has it.
            let file = if id < 8 { "core_cpus_list" } else { "thread_siblings_list" };
            let siblings = format!("{},{}\n", id % 8, id % 8 + 8);
            fs::write(cpu.join("topology").join(file), siblings).unwrap();
        }
        fs::create_dir_all(cpus.join("cpu16/topology")).unwrap();
        fs::write(cpus.join("cpu16/topology/core_cpus_list"), "16-17\n").unwrap();
        for (nic, node) in [("mlx5_0", "1\n"), ("mlx5_1", "-1\n")] {
            let device = root.join(format!("sys/class/infiniband/{nic}/device"));
            fs::create_dir_all(&device).unwrap();
            fs::write(device.join("numa_node"), node).unwrap();
        }
        let host = HostFiles::at(&root);
        let found: Vec<Cpu> = [0, 3, 4, 11, 15].map(|id| Cpu::of(&host, id)).to_vec();
        let cpu = |id, core, node| Cpu { id, core, node };
        let (first, second) = (Some(0), Some(1));
        let expected = [
            cpu(0, 0, first),
            cpu(3, 3, first),
            cpu(4, 4, second),
            cpu(11, 3, first),
            cpu(15, 7, second),
        ];
        assert_eq!(found, expected);
        assert_eq!(Cpu::of(&host, 16), cpu(16, 16, None), "a range of siblings, and no node");
        assert_eq!(Cpu::of(&host, 99), cpu(99, 99, None), "unknown CPUs are cores of their own");
        let nodes = ["mlx5_0", "mlx5_1", "none"].map(|nic| node_of_nic(&host, nic));
        assert_eq!(nodes, [Some(1), None, None]);
        fs::remove_dir_all(root).unwrap();
    }
}

//! The plan of CPUs at work: its facts, its log line, and the start of threads on their CPUs.
//!
//! Thread: the thread that starts the process and becomes `ctl`. Invariants: a thread starts on its
//! CPUs; helpers of a team and threads of a NIC move to their one CPU before they work. Not here:
//! the plan itself (`cpu_plan`).

use super::cpu_plan::{CpuPlan, NicPlace};
use crate::config::CoreConfig;
use crate::config::values::CpuList;
use crate::obs::log::event;
use crate::sys::affinity;
use crate::sys::host::HostFiles;
use crate::sys::topology::Cpu;
use crate::transfer::transport::rdma::Nic;

/// The plan of a process with these settings on the host with these files.
pub fn plan(host: &HostFiles, cores: &CoreConfig, nics: &[Nic]) -> CpuPlan {
    let place = |nic: &Nic| (nic.device.name().to_owned(), nic.node);
    plan_with(host, cores, &nics.iter().map(place).collect::<Vec<_>>())
}

fn plan_with(host: &HostFiles, cores: &CoreConfig, nics: &[NicPlace]) -> CpuPlan {
    let cpus: Vec<Cpu> = cores.cpus.iter().map(|&id| Cpu::of(host, id)).collect();
    CpuPlan::new(&cpus, nics, cores.threads, cores.cpus_are_chosen)
}

/// Makes the plan of this process and logs it. Restricts the calling thread to the CPUs that the
/// user chose.
pub fn begin(cores: &CoreConfig, nics: &[Nic]) -> CpuPlan {
    let plan = plan(&HostFiles::at("/"), cores, nics);
    event!(Info, "ctl", "CPUs of threads", plan = plan);
    if plan.are_chosen {
        tell(&plan.all, affinity::restrict(&plan.all));
    }
    plan
}

/// Runs `start`. The threads that it starts run on `cpus`.
pub fn start_on<T>(plan: &CpuPlan, cpus: &[usize], start: impl FnOnce() -> T) -> T {
    if !plan.restricts() {
        return start();
    }
    let (started, moved) = affinity::start_on(cpus, start);
    tell(cpus, moved);
    started
}

/// Moves the calling thread to the CPUs of `ctl`. All threads that need other CPUs start with
/// [`start_on`].
pub fn become_ctl(plan: &CpuPlan) {
    if plan.restricts() {
        tell(&plan.ctl, affinity::restrict(&plan.ctl));
    }
}

/// Logs a warning if CPUs cannot be used. The threads then run on other CPUs of the process.
fn tell(cpus: &[usize], moved: std::io::Result<()>) {
    if let Err(why) = moved {
        let cpus = CpuList(cpus.to_vec());
        event!(Warn, "ctl", "CPUs of a thread cannot be used", cpus = cpus, why = why);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Two sockets with four cores each; CPU `n` and `n + 8` are one core. A NIC is on node 1.
    #[test]
    fn a_plan_follows_the_sockets_the_siblings_and_the_nic() {
        let root = std::env::temp_dir().join(format!("baton-cpus-{}", std::process::id()));
        for id in 0..16 {
            let cpu = root.join(format!("sys/devices/system/cpu/cpu{id}"));
            fs::create_dir_all(cpu.join("topology")).unwrap();
            fs::create_dir_all(cpu.join(format!("node{}", id % 8 / 4))).unwrap();
            let siblings = format!("{},{}\n", id % 8, id % 8 + 8);
            fs::write(cpu.join("topology/core_cpus_list"), siblings).unwrap();
        }
        let device = root.join("sys/class/infiniband/mlx5_0/device");
        fs::create_dir_all(&device).unwrap();
        fs::write(device.join("numa_node"), "1\n").unwrap();
        let host = HostFiles::at(&root);
        let shown = |cpus: std::ops::Range<usize>, threads, nic: bool| {
            let node = crate::sys::topology::node_of_nic(&host, "mlx5_0");
            let nics: &[NicPlace] = if nic { &[("mlx5_0".into(), node)] } else { &[] };
            let cpus_are_chosen = cpus != (0..16);
            let cores =
                CoreConfig { cpus: cpus.collect(), cpus_are_chosen, threads, busy_poll: false };
            plan_with(&host, &cores, nics).to_string()
        };
        // The team fills the node without the NIC. The others are near the NIC.
        assert_eq!(
            shown(0..16, 5, true),
            "engine 0; team-i 1-4; move-0 5; ctl 6; copy-i 7; post-n 7; poll-n 13 (mlx5_0); \
             tok, tok-long, grammar, masks, names-i 14-15"
        );
        assert_eq!(
            shown(0..16, 5, false),
            "engine 0; team-i 1-4; move-0 5; ctl 6; copy-i 7; tok, tok-long, \
             grammar, masks, names-i 13-15"
        );
        // A small team is near the NIC, too: node 1 has the CPUs 4 to 7 and 12 to 15.
        assert_eq!(
            shown(0..15, 2, true),
            "engine 4; team-i 5; move-0 6; ctl 7; copy-i 14; tok, tok-long, \
             grammar, masks, names-i 0-3,8-11"
        );
        assert_eq!(shown(0..16, 4, true), "all threads share 0-15");
        fs::remove_dir_all(root).unwrap();
    }
}

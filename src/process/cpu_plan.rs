//! The plan of CPUs: on which CPUs each thread of a worker process runs.
//!
//! Owns: the choice of CPUs. Thread: any. Invariants: each set has at least one CPU, and only CPUs
//! of the process; if [`CpuPlan::team`] is set, each compute thread has its own CPU. Not here:
//! facts of the host (`sys::topology`), the start of threads on their CPUs (`thread_cpus`).

use crate::config::values::CpuList;
use crate::sys::topology::Cpu;
use std::cmp::Reverse;
use std::fmt;

/// CPUs that the threads beside the team can use alone: one each for the mover, `ctl` and a copier.
const BESIDE: usize = 3;

/// A NIC, and its NUMA node if that is known.
pub type NicPlace = (String, Option<u32>);

/// The CPUs of each thread.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CpuPlan {
    /// All CPUs of the process.
    pub all: Vec<usize>,
    /// Whether the user chose them.
    pub are_chosen: bool,
    /// Number of compute threads, `engine` included.
    pub threads: usize,
    /// CPUs of `engine`.
    pub engine: Vec<usize>,
    /// The CPU of `team-1`, of `team-2` and so on; `None` if these threads share all CPUs.
    pub team: Option<Vec<usize>>,
    /// CPUs of `move-0`.
    pub mover: Vec<usize>,
    /// CPUs of `ctl`.
    pub ctl: Vec<usize>,
    /// CPUs of each `copy-i`.
    pub copiers: Vec<usize>,
    /// CPUs of `tok`, `tok-long`, `grammar`, `masks` and `names-i`.
    pub text: Vec<usize>,
    /// CPUs of `post-n` and `poll-n`, for each NIC with CPUs near it.
    pub nics: Vec<(String, [usize; 2])>,
    /// CPUs of all other threads.
    pub others: Vec<usize>,
}

impl CpuPlan {
    /// The plan for a process with these CPUs, NICs and number of compute threads. `are_chosen`:
    /// the user chose the CPUs, so no other process uses them.
    pub fn new(cpus: &[Cpu], nics: &[NicPlace], threads: usize, are_chosen: bool) -> CpuPlan {
        let all: Vec<usize> = cpus.iter().map(|cpu| cpu.id).collect();
        let mut plan = CpuPlan::shared(all, threads, are_chosen);
        if !has_cpus_alone(cpus, threads, are_chosen) {
            return plan;
        }
        let (team, rest) = divide(cpus, nics, threads);
        plan.team = Some(team[1..].to_vec());
        // If no CPU is left, other threads also use the CPU that the helpers leave. The engine must
        // be able to leave it then: measured on two CPUs, a step is up to 15 % slower otherwise.
        if !rest.is_empty() {
            plan.engine = vec![team[0]];
            plan.put_beside(&rest);
        }
        if let [mover, ctl, free @ ..] = &rest[..] {
            (plan.mover, plan.ctl) = (vec![mover.id], vec![ctl.id]);
            plan.give_out(free, nics);
        }
        plan
    }

    /// A plan in which all threads share all CPUs.
    pub fn shared(all: Vec<usize>, threads: usize, are_chosen: bool) -> CpuPlan {
        CpuPlan {
            are_chosen,
            threads,
            engine: all.clone(),
            team: None,
            mover: all.clone(),
            ctl: all.clone(),
            copiers: all.clone(),
            text: all.clone(),
            nics: Vec::new(),
            others: all.clone(),
            all,
        }
    }

    /// Whether a thread has fewer CPUs than the process could use without Baton's choice.
    pub fn restricts(&self) -> bool {
        self.are_chosen || self.team.is_some()
    }

    /// CPUs of the threads that post and poll for this NIC.
    pub fn of_nic(&self, name: &str) -> Option<[usize; 2]> {
        self.nics.iter().find(|(nic, _)| nic == name).map(|&(_, cpus)| cpus)
    }

    /// Lets all threads beside the team share these CPUs.
    fn put_beside(&mut self, rest: &[Cpu]) {
        let mut cpus: Vec<usize> = rest.iter().map(|cpu| cpu.id).collect();
        cpus.sort_unstable();
        for set in [&mut self.mover, &mut self.ctl, &mut self.copiers, &mut self.text] {
            set.clone_from(&cpus);
        }
        self.others = cpus;
    }

    /// Gives out the CPUs that team, mover and `ctl` leave, best first.
    fn give_out(&mut self, free: &[Cpu], nics: &[NicPlace]) {
        let mut left = free.to_vec();
        for (name, node) in nics {
            let near = left.iter().filter(|cpu| node.is_none() || cpu.node == *node);
            if let [post, poll] = near.map(|cpu| cpu.id).take(2).collect::<Vec<_>>()[..] {
                left.retain(|cpu| ![post, poll].contains(&cpu.id));
                self.nics.push((name.clone(), [post, poll]));
            }
        }
        // A copier and a poster can have the same CPU: no worker has both.
        if let Some(first) = free.first() {
            self.copiers = vec![first.id];
            left.retain(|cpu| cpu.id != first.id);
        }
        if !left.is_empty() {
            self.text = left.iter().map(|cpu| cpu.id).collect();
            self.text.sort_unstable();
        }
    }
}

impl fmt::Display for CpuPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |cpus: &[usize]| CpuList(cpus.to_vec());
        let Some(team) = &self.team else {
            return write!(f, "all threads share {}", list(&self.all));
        };
        write!(f, "engine {}", list(&self.engine))?;
        if !team.is_empty() {
            write!(f, "; team-i {}", list(team))?;
        }
        write!(f, "; move-0 {}; ctl {}", list(&self.mover), list(&self.ctl))?;
        if self.all.len() >= self.threads + BESIDE {
            write!(f, "; copy-i {}", list(&self.copiers))?;
        }
        for (name, [post, poll]) in &self.nics {
            write!(f, "; post-n {post}; poll-n {poll} ({name})")?;
        }
        write!(f, "; tok, tok-long, grammar, masks, names-i {}", list(&self.text))
    }
}

/// Whether compute threads get CPUs alone.
///
/// If the user did not choose the CPUs, another process can make the same plan. So CPUs must be
/// left for the threads beside the team. The team must also need more than half of the cores: a
/// second process of this size would not fit beside it.
fn has_cpus_alone(cpus: &[Cpu], threads: usize, are_chosen: bool) -> bool {
    if are_chosen {
        return (1..=cpus.len()).contains(&threads);
    }
    cpus.len() >= threads + 2 && 2 * threads > cores(cpus.iter()).len()
}

/// The cores of these CPUs, in ascending order.
fn cores<'a>(cpus: impl Iterator<Item = &'a Cpu>) -> Vec<usize> {
    let mut cores: Vec<usize> = cpus.map(|cpu| cpu.core).collect();
    cores.sort_unstable();
    cores.dedup();
    cores
}

/// The CPUs of the compute threads, and the other CPUs, best first.
fn divide(cpus: &[Cpu], nics: &[NicPlace], threads: usize) -> (Vec<usize>, Vec<Cpu>) {
    let is_near = |node: Option<u32>| node.is_some() && nics.iter().any(|nic| nic.1 == node);
    // Number of CPUs of the same core that come before this one.
    let sibling = |cpu: &Cpu| {
        cpus.iter()
            .take_while(|other| other.id != cpu.id)
            .filter(|other| other.core == cpu.core)
            .count()
    };
    // The team is near the NIC if the threads beside it fit there, too. Otherwise it leaves the
    // node of the NIC to them as long as it can.
    let roomy = roomy_nodes(cpus, threads);
    let rank = |cpu: &Cpu| match (roomy.contains(&cpu.node), is_near(cpu.node)) {
        (true, true) => 0,
        (true, false) => 1,
        (false, false) => 2,
        (false, true) => 3,
    };
    let mut team = cpus.to_vec();
    team.sort_by_cached_key(|cpu| (sibling(cpu), rank(cpu)));
    let mut rest = team.split_off(threads);
    let beside = |cpu: &Cpu| team.iter().position(|other| other.core == cpu.core);
    rest.sort_by_cached_key(|cpu| {
        let place = beside(cpu);
        let is_far = (!is_near(cpu.node), cpu.node != team[0].node);
        // The core of the engine is the last choice: its thread also works between two phases.
        (place.is_some(), place == Some(0), is_far, sibling(cpu), Reverse(place))
    });
    let alone = rest.iter().filter(|cpu| beside(cpu).is_none()).count();
    if alone >= BESIDE {
        rest.truncate(alone);
    }
    (team.iter().map(|cpu| cpu.id).collect(), rest)
}

/// The nodes with a core for each compute thread, and cores for the threads beside them.
fn roomy_nodes(cpus: &[Cpu], threads: usize) -> Vec<Option<u32>> {
    let mut nodes: Vec<Option<u32>> = cpus.iter().map(|cpu| cpu.node).collect();
    nodes.sort_unstable();
    nodes.dedup();
    nodes.retain(|node| {
        let here = || cpus.iter().filter(|cpu| cpu.node == *node);
        let cores = cores(here());
        let left = cores.get(threads..).unwrap_or_default();
        here().filter(|cpu| left.binary_search(&cpu.core).is_ok()).count() >= BESIDE
    });
    nodes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// CPUs of a host with one node. CPU `n` and `n + cores` are siblings.
    fn host(cpus: usize, cores: usize) -> Vec<Cpu> {
        (0..cpus).map(|id| Cpu { id, core: id % cores, node: Some(0) }).collect()
    }

    /// 32 CPUs: two nodes with eight cores each. CPU `n` and `n + 16` are siblings.
    fn two_nodes() -> Vec<Cpu> {
        (0..32).map(|id| Cpu { id, core: id % 16, node: Some(id as u32 % 16 / 8) }).collect()
    }

    fn nic(node: u32) -> Vec<NicPlace> {
        vec![("mlx5_0".into(), Some(node))]
    }

    fn shown(cpus: &[Cpu], threads: usize, are_chosen: bool) -> String {
        CpuPlan::new(cpus, &[], threads, are_chosen).to_string()
    }

    #[test]
    fn on_one_cpu_all_threads_share_it() {
        let one = host(1, 1);
        assert_eq!(shown(&one, 1, false), "all threads share 0");
        assert_eq!(shown(&one, 2, true), "all threads share 0");
        let plan = CpuPlan::new(&one, &[], 1, true);
        assert!([&plan.engine, &plan.mover, &plan.ctl, &plan.text].iter().all(|set| **set == [0]));
        assert!(plan.restricts() && !CpuPlan::new(&one, &[], 1, false).restricts());
    }

    #[test]
    fn on_two_cpus_no_thread_holds_a_cpu_that_the_engine_needs() {
        let two = host(2, 2);
        assert_eq!(
            shown(&two, 2, true),
            "engine 0-1; team-i 1; move-0 0-1; ctl 0-1; tok, tok-long, grammar, masks, names-i 0-1"
        );
        assert_eq!(
            shown(&two, 1, true),
            "engine 0; move-0 1; ctl 1; tok, tok-long, grammar, masks, names-i 1"
        );
        for threads in [1, 2, 3] {
            assert_eq!(shown(&two, threads, false), "all threads share 0-1");
        }
        assert_eq!(shown(&two, 3, true), "all threads share 0-1", "more threads than CPUs");
    }

    #[test]
    fn on_four_cpus_mover_and_ctl_get_what_the_team_leaves() {
        let four = host(4, 4);
        let with_two =
            "engine 0; team-i 1; move-0 2; ctl 3; tok, tok-long, grammar, masks, names-i 2-3";
        assert_eq!(shown(&four, 2, true), with_two);
        let with_one =
            "engine 0; move-0 1; ctl 2; copy-i 3; tok, tok-long, grammar, masks, names-i 1-3";
        assert_eq!(shown(&four, 1, true), with_one);
        assert_eq!(
            shown(&four, 3, true),
            "engine 0; team-i 1-2; move-0 3; ctl 3; tok, tok-long, grammar, masks, names-i 3"
        );
        assert_eq!(
            shown(&four, 4, true),
            "engine 0-3; team-i 1-3; move-0 0-3; ctl 0-3; tok, tok-long, \
             grammar, masks, names-i 0-3"
        );
    }

    /// Without a choice, a second process with as many threads would have the same plan.
    #[test]
    fn only_a_process_that_needs_most_cores_takes_cpus_without_being_told() {
        let shared = "all threads share 0-15";
        let sixteen = host(16, 16);
        for threads in [1, 8, 15, 16] {
            assert_eq!(shown(&sixteen, threads, false), shared, "{threads}");
        }
        for threads in [9, 13, 14] {
            assert_eq!(shown(&sixteen, threads, false), shown(&sixteen, threads, true));
        }
        let eight_cores = host(16, 8);
        assert_eq!(shown(&eight_cores, 4, false), shared);
        assert_eq!(shown(&eight_cores, 5, false), shown(&eight_cores, 5, true));
    }

    #[test]
    fn a_team_has_cores_of_its_own_while_there_are_enough() {
        let smt = host(16, 8);
        assert_eq!(
            shown(&smt, 6, false),
            "engine 0; team-i 1-5; move-0 6; ctl 7; copy-i 14; tok, tok-long, \
             grammar, masks, names-i 15"
        );
        // Cores are used up: the siblings of the team's last threads come first.
        assert_eq!(
            shown(&smt, 8, false),
            "engine 0; team-i 1-7; move-0 15; ctl 14; copy-i 13; tok, tok-long, \
             grammar, masks, names-i 8-12"
        );
        // One core is left. Its two CPUs are for mover and `ctl`.
        let plan = CpuPlan::new(&smt, &[], 7, false);
        assert_eq!(
            (&plan.mover[..], &plan.ctl[..], &plan.copiers[..]),
            (&[7][..], &[15][..], &[14][..])
        );
        // More threads than cores: the second CPU of a core follows the first one of all cores.
        let plan = CpuPlan::new(&smt, &[], 10, false);
        assert_eq!(plan.team, Some((1..10).collect()));
        // Siblings with neighbouring numbers.
        let pairs: Vec<Cpu> =
            (0..8).map(|id| Cpu { id, core: id / 2 * 2, node: Some(0) }).collect();
        assert_eq!(
            shown(&pairs, 2, true),
            "engine 0; team-i 2; move-0 4; ctl 6; copy-i 5; tok, tok-long, \
             grammar, masks, names-i 7"
        );
        // The sibling of the engine comes last, although it is on the node of the engine.
        let nodes: Vec<Cpu> =
            pairs.iter().map(|cpu| Cpu { node: Some(cpu.id as u32 / 4), ..*cpu }).collect();
        assert_eq!(
            shown(&nodes, 4, true),
            "engine 0; team-i 2,4,6; move-0 3; ctl 7; copy-i 5; tok, tok-long, \
             grammar, masks, names-i 1"
        );
    }

    #[test]
    fn a_small_team_is_near_the_nic_and_a_large_one_leaves_its_node() {
        let cpus = two_nodes();
        let plan = |threads| CpuPlan::new(&cpus, &nic(1), threads, true);
        // Node 1 has cores 8 to 15.
        let small = plan(4);
        assert_eq!((&small.engine[..], &small.team), (&[8][..], &Some(vec![9, 10, 11])));
        assert_eq!((&small.mover[..], &small.ctl[..]), (&[12][..], &[13][..]));
        assert_eq!((&small.copiers[..], small.of_nic("mlx5_0")), (&[14][..], Some([14, 15])));
        assert_eq!(small.of_nic("mlx5_1"), None);
        // All cores of node 0, and then as many of node 1 as it needs.
        for threads in [8, 12] {
            let large = plan(threads);
            assert_eq!(large.engine, [0]);
            assert_eq!(large.team, Some((1..threads).collect()));
            assert_eq!(
                (&large.mover[..], &large.ctl[..]),
                (&[threads.max(8)][..], &[threads.max(8) + 1][..])
            );
        }
        // Without a NIC, the team begins on the first node, and the others are beside it.
        let plan = CpuPlan::new(&cpus, &[], 4, true);
        assert_eq!(
            (&plan.engine[..], &plan.mover[..], &plan.ctl[..]),
            (&[0][..], &[4][..], &[5][..])
        );
    }

    #[test]
    fn each_nic_has_its_pair_on_its_own_node() {
        let cpus = two_nodes();
        let nics = [("a".to_string(), Some(0)), ("b".into(), Some(1)), ("c".into(), None)];
        let plan = CpuPlan::new(&cpus, &nics, 4, true);
        assert_eq!(
            (&plan.engine[..], &plan.mover[..], &plan.ctl[..]),
            (&[0][..], &[4][..], &[5][..])
        );
        assert_eq!(
            plan.nics.iter().map(|nic| nic.1).collect::<Vec<_>>(),
            [[6, 7], [8, 9], [20, 21]]
        );
        let taken: Vec<usize> = plan.nics.iter().flat_map(|nic| nic.1).collect();
        assert!(plan.text.iter().all(|cpu| !taken.contains(cpu)), "{plan}");
        // Too few CPUs near a NIC: its threads are beside the others.
        let plan = CpuPlan::new(&host(6, 6), &nic(0), 3, true);
        assert_eq!((plan.nics.len(), &plan.others[..]), (0, &[3, 4, 5][..]));
        assert_eq!(CpuPlan::new(&host(6, 6), &nic(0), 2, true).of_nic("mlx5_0"), Some([4, 5]));
        assert_eq!(CpuPlan::new(&host(6, 6), &nic(1), 2, true).of_nic("mlx5_0"), None, "far away");
    }

    /// For many hosts: the team's CPUs differ, and no other thread has one of them alone.
    #[test]
    fn every_plan_keeps_the_rules() {
        for (cpus, are_chosen) in [host(1, 1), host(2, 2), host(5, 5), host(16, 8), two_nodes()]
            .into_iter()
            .flat_map(|cpus| [(cpus.clone(), false), (cpus, true)])
        {
            for threads in 1..=cpus.len() + 2 {
                for nics in [vec![], nic(0), nic(1)] {
                    let plan = CpuPlan::new(&cpus, &nics, threads, are_chosen);
                    check(&plan);
                }
            }
        }
    }

    fn check(plan: &CpuPlan) {
        let sets = [&plan.engine, &plan.mover, &plan.ctl, &plan.copiers, &plan.text, &plan.others];
        for set in sets {
            assert!(!set.is_empty() && set.iter().all(|cpu| plan.all.contains(cpu)), "{plan:?}");
        }
        let Some(team) = &plan.team else {
            return assert!(sets.iter().all(|set| **set == plan.all));
        };
        let mut taken = team.clone();
        if plan.all.len() == plan.threads {
            assert!(sets.iter().all(|set| **set == plan.all), "{plan:?}");
        } else {
            assert_eq!(plan.engine.len(), 1, "{plan:?}");
            taken.extend(&plan.engine);
            let is_free = |cpu: &usize| !taken.contains(cpu);
            assert!(sets[1..].iter().all(|set| set.iter().all(is_free)), "{plan:?}");
        }
        let count = taken.len();
        taken.sort_unstable();
        taken.dedup();
        assert_eq!((taken.len(), team.len()), (count, plan.threads - 1), "{plan:?}");
        let beside = |cpu: &usize| !taken.contains(cpu);
        assert!(plan.nics.iter().flat_map(|nic| &nic.1).all(beside), "{plan:?}");
    }
}

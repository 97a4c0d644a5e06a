//! Each thread of a worker has the CPUs that the stated plan gives it: the kernel's view, the log
//! and `baton doctor` agree.

use crate::MODEL;
use crate::process::{PATIENCE, Process};
use crate::turns::turn;
use baton::config::values::CpuList;
use baton::sys::affinity;
use serde_json::json;
use std::process::Command;
use std::time::{Duration, Instant};

/// A worker with these flags of `--cpus` and `--threads`.
fn start(command: &str, cores: &[&str]) -> Process {
    let common = ["--port", "0", "--kv-memory", "8MiB", "--max-running-requests", "4"];
    let mut args = vec![command, MODEL];
    args.extend(common);
    args.extend(cores);
    if command == "prefill" {
        args.extend(["--bootstrap-port", "0"]);
    }
    Process::start(&args)
}

/// The plan that `baton doctor` prints for a worker without a NIC.
fn plan_of_doctor(cores: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    let output = command.arg("doctor").args(cores).output().expect("the binary was built");
    let text = String::from_utf8(output.stdout).unwrap();
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("ok    threads"));
    let plan = lines.next_back().unwrap_or_else(|| panic!("no plan: {text}"));
    plan.trim().trim_end_matches(" (baton serve)").to_owned()
}

/// The first CPUs that this process can use, in the kernel's format.
fn first_cpus(count: usize) -> Option<String> {
    let cpus = affinity::allowed().unwrap();
    Some(CpuList(cpus.get(..count)?.to_vec()).to_string())
}

/// The CPUs that a plan states for a thread.
fn stated(plan: &str, thread: &str) -> String {
    if let Some(all) = plan.strip_prefix("all threads share ") {
        return all.to_owned();
    }
    let (kind, number) = match thread.rsplit_once('-') {
        Some((kind @ ("team" | "copy" | "names"), number)) => (format!("{kind}-i"), number),
        _ => (thread.to_owned(), ""),
    };
    let entry = plan.split("; ").find_map(|entry| {
        let (names, cpus) = entry.rsplit_once(' ')?;
        names.split(", ").any(|name| name == kind).then_some(cpus)
    });
    let cpus = entry.unwrap_or_else(|| panic!("{thread} is not in the plan: {plan}"));
    if kind != "team-i" {
        return cpus.to_owned();
    }
    // Helpers have one CPU each, in the order of the list.
    let ranges = cpus.split(',').map(|range| range.split_once('-').unwrap_or((range, range)));
    let mut list = ranges
        .flat_map(|(first, last)| first.parse::<usize>().unwrap()..=last.parse::<usize>().unwrap());
    let index: usize = number.parse().unwrap();
    list.nth(index - 1).expect("a CPU for each helper").to_string()
}

/// Waits until these threads run under their names. Returns all threads with their CPUs.
#[track_caller]
fn await_threads(worker: &Process, wanted: &[&str]) -> Vec<(String, String)> {
    let begun = Instant::now();
    loop {
        let mut threads = worker.threads();
        threads[0].0 = "ctl".into();
        // A new thread has the name of its starter for a moment.
        let is_named = threads.iter().skip(1).all(|(name, _)| name != "baton");
        let are_there = wanted.iter().all(|name| threads.iter().any(|thread| thread.0 == *name));
        if is_named && are_there {
            return threads;
        }
        assert!(begun.elapsed() < PATIENCE, "{wanted:?} are not in {threads:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// All threads have the CPUs of the plan.
#[track_caller]
fn check(worker: &Process, plan: &str, wanted: &[&str]) {
    assert!(worker.has_said(&format!("CPUs of threads plan=\"{plan}\"")), "it logs {plan:?}");
    for (name, cpus) in await_threads(worker, wanted) {
        assert_eq!(cpus, stated(plan, &name), "{name}; {plan}");
    }
}

const ALWAYS: [&str; 7] = ["ctl", "engine", "move-0", "tok", "tok-long", "grammar", "masks"];

/// `baton serve` with these flags keeps to the plan. Returns the plan.
#[track_caller]
fn serve(cores: &[&str], wanted: &[&str]) -> String {
    let plan = plan_of_doctor(cores);
    let mut server = start("serve", cores);
    // Nothing that a request needs leaves the plan.
    let body = json!({"prompt": "where do we run", "max_tokens": 3});
    assert_eq!(server.post("/v1/completions", &body.to_string()).0, 200);
    check(&server, &plan, &[&ALWAYS[..], wanted].concat());
    server.check_alive();
    plan
}

#[test]
fn on_one_chosen_cpu_all_threads_share_it() {
    let one = first_cpus(1).unwrap();
    let others = format!("move-0 {one}; ctl {one}; tok, tok-long, grammar, masks, names-i {one}");
    assert_eq!(serve(&["--cpus", &one], &[]), format!("engine {one}; {others}"));
    assert_eq!(
        serve(&["--cpus", &one, "--threads", "2"], &["team-1"]),
        format!("all threads share {one}")
    );
}

#[test]
fn on_two_chosen_cpus_no_thread_holds_one_that_the_engine_needs() {
    let (Some(both), one) = (first_cpus(2), first_cpus(1).unwrap()) else {
        return eprintln!("skipped: one CPU");
    };
    let two = affinity::allowed().unwrap()[1].to_string();
    let beside = |cpus: &str| {
        format!("move-0 {cpus}; ctl {cpus}; tok, tok-long, grammar, masks, names-i {cpus}")
    };
    assert_eq!(
        serve(&["--cpus", &both, "--threads", "2"], &["team-1"]),
        format!("engine {both}; team-i {two}; {}", beside(&both))
    );
    assert_eq!(
        serve(&["--cpus", &both, "--threads", "1"], &[]),
        format!("engine {one}; {}", beside(&two))
    );
}

#[test]
fn without_a_choice_the_threads_of_a_full_host_share_its_cpus() {
    let cpus = affinity::allowed().unwrap();
    let all = first_cpus(cpus.len()).unwrap();
    let threads = cpus.len().to_string();
    let team: &[&str] = if cpus.len() > 1 { &["team-1"] } else { &[] };
    assert_eq!(serve(&["--threads", &threads], team), format!("all threads share {all}"));
    // Here the plan depends on the host.
    serve(&["--threads", "1"], &[]);
    serve(&[], &[]);
}

/// On a host with enough CPUs, the plan has a CPU for each thread.
#[test]
fn with_enough_cpus_each_thread_has_its_own() {
    let Some(six) = first_cpus(6) else { return eprintln!("skipped: fewer than six CPUs") };
    let plan = serve(&["--cpus", &six, "--threads", "2"], &["team-1", "copy-1"]);
    let sets: Vec<String> =
        ["engine", "team-1", "move-0", "ctl", "copy-1"].map(|name| stated(&plan, name)).to_vec();
    assert!(sets.iter().all(|set| set.parse::<usize>().is_ok()), "{plan}");
    assert!((1..sets.len()).all(|at| !sets[..at].contains(&sets[at])), "{plan}");
    let most = affinity::allowed().unwrap().len() - 2;
    let plan = serve(&["--threads", &most.to_string()], &["team-1"]);
    assert!(plan.starts_with("engine "), "{plan}");
}

/// The threads of a new role start from `ctl`, which has other CPUs.
#[test]
fn a_change_of_role_keeps_the_plan() {
    for (cpus, threads) in [(2, "1"), (6, "2")] {
        let Some(cpus) = first_cpus(cpus) else {
            eprintln!("skipped: fewer than {cpus} CPUs");
            continue;
        };
        let cores = ["--cpus", &cpus, "--threads", threads, "--transfer", "shm"];
        let plan = plan_of_doctor(&cores[..4]);
        assert_ne!(stated(&plan, "engine"), stated(&plan, "ctl"));
        let copier = plan.contains("copy-i").then_some("copy-1");
        let worker = start("prefill", &cores);
        check(&worker, &plan, &ALWAYS);
        for (role, own) in [("decode", Some("names-0")), ("mixed", None), ("prefill", None)] {
            turn(&worker, role);
            let mut wanted = ALWAYS.to_vec();
            wanted.extend(own.into_iter().chain(copier.filter(|_| role == "decode")));
            check(&worker, &plan, &wanted);
        }
    }
}

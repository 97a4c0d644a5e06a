//! The simulated cluster: seeds that must succeed, exact replays, and planted mistakes.

mod library;
mod load;
// Only builds with debug assertions have failpoints.
#[cfg(debug_assertions)]
mod planted;

use baton::cli::flags::{SimFlow, SimTransfer};
use baton::obs::log;
use baton::obs::log::{LogConfig, LogLevel};
use baton::sim::{RunReport, RunScale, run};
use std::process::Command;

const CALM: RunScale = RunScale {
    workers: [None; 2],
    requests: 20,
    faults: false,
    transfer: SimTransfer::Auto,
    flow: SimFlow::Auto,
    is_library: false,
};
const FAULTS: RunScale = RunScale { faults: true, ..CALM };

/// Warnings of processes are part of the simulation, so only errors are logged.
pub fn quiet() {
    log::configure(LogConfig { level: LogLevel::Error, ..LogConfig::default() });
}

/// Runs a seed, or panics with the command that replays it.
fn well(seed: u64, scale: RunScale) -> RunReport {
    run(seed, scale).unwrap_or_else(|why| panic!("{}: {why}", scale.command_of(seed)))
}

#[test]
fn all_requests_are_answered_with_their_tokens() {
    quiet();
    for seed in 1..=20 {
        let report = well(seed, CALM);
        assert_eq!(report.well + report.refused, CALM.requests, "seed {seed}");
    }
}

#[test]
fn all_requests_are_answered_in_each_flow_and_over_each_transport() {
    quiet();
    for flow in [SimFlow::Dual, SimFlow::PrefillFirst, SimFlow::DecodeFirst] {
        for transfer in [SimTransfer::Shm, SimTransfer::Rdma, SimTransfer::Tcp] {
            for seed in 21..=24 {
                let report = well(seed, RunScale { flow, transfer, ..CALM });
                assert_eq!(report.well + report.refused, CALM.requests, "seed {seed}");
            }
        }
    }
}

/// No other worker can take over, so faults excuse errors.
#[test]
fn a_single_pair_recovers_from_its_faults() {
    quiet();
    let scale = RunScale { workers: [Some(1), Some(1)], ..FAULTS };
    let failed: usize = (1..=12).map(|seed| well(seed, scale).failed).sum();
    assert!(failed > 0, "faults meet requests");
}

#[test]
fn clusters_of_any_shape_serve() {
    quiet();
    for (seed, prefill, decode) in [(1, 1, 1), (2, 1, 8), (3, 8, 1), (4, 2, 2), (5, 16, 16)] {
        let report = well(seed, RunScale { workers: [prefill, decode].map(Some), ..CALM });
        assert_eq!(report.well + report.refused, CALM.requests, "seed {seed}");
    }
}

/// Split into two tests, so that two cores are used.
fn end_whatever_breaks(seeds: std::ops::RangeInclusive<u64>) {
    quiet();
    let mut total = RunReport::default();
    for seed in seeds {
        let report = well(seed, FAULTS);
        total.well += report.well;
        total.failed += report.failed;
        total.left += report.left;
        total.aborted += report.aborted;
        total.roles += report.roles;
    }
    let RunReport { well, failed, left, aborted, roles, .. } = total;
    let all_happen = failed > 0 && left > 0 && aborted > 0 && roles > 0;
    assert!(well > failed && all_happen, "{total:?}");
}

#[test]
fn after_any_fault_requests_end_and_the_cluster_serves_again() {
    end_whatever_breaks(1..=30);
}

#[test]
fn after_any_fault_requests_end_in_further_seeds() {
    end_whatever_breaks(31..=60);
}

#[test]
fn a_seed_repeats_its_run_to_the_last_event() {
    quiet();
    let (mut roles, mut hashes) = (0, Vec::new());
    for seed in 1..=10 {
        let report = well(seed, FAULTS);
        assert_eq!(report, well(seed, FAULTS), "seed {seed}");
        roles += report.roles;
        hashes.push(report.hash);
    }
    assert!(roles > 0, "no worker changed its role");
    let count = hashes.len();
    hashes.sort_unstable();
    hashes.dedup();
    assert_eq!(hashes.len(), count, "another seed is another run");
}

/// The exit status of `baton sim` with these arguments, its standard output, and its log.
fn command(args: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_baton")).arg("sim").args(args).output().unwrap();
    let [out, log] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    (output.status.code(), out, log)
}

#[test]
fn a_seed_has_one_hash_in_two_processes() {
    let run = || {
        let (code, out, log) = command(&["--seed", "5"]);
        assert_eq!(code, Some(0), "{out}{log}");
        out.lines().find(|line| line.starts_with("hash ")).expect("a hash").to_owned()
    };
    assert_eq!(run(), run());
}

#[test]
fn an_impossible_simulation_is_refused() {
    for (args, why) in [
        (&["--seed", "18446744073709551615", "--seeds", "2"][..], "the largest seed is"),
        (&["--prefill", "0"], "at least 1 without --load"),
        (&["--requests", "5000"], "1 to 4096 without --load"),
        (&["--rate", "5"], "--load"),
    ] {
        let (code, out, log) = command(args);
        assert!(code == Some(2) && (out + &log).contains(why), "{args:?}: {code:?} {log}");
    }
}

#[test]
fn a_trace_has_the_log_of_each_process_with_simulated_times() {
    let (code, out, log) = command(&["--seed", "3", "--requests", "5", "--calm", "--trace"]);
    assert_eq!(code, Some(0), "{out}{log}");
    for host in 0..3 {
        let start = format!("host {host}: 1970-01-01T00:0");
        assert!(log.lines().any(|line| line.starts_with(&start)), "host {host}: {log}");
    }
}

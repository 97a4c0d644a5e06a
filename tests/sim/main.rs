//! The simulated cluster: seeds that must succeed, and exact replays.

mod load;
// Only builds with debug assertions have failpoints.
#[cfg(debug_assertions)]
mod planted;
mod services;

use baton::cli::flags::{SimFlow, SimTransfer};
use baton::obs::log;
use baton::obs::log::{LogConfig, LogLevel};
use baton::sim::campaign::{Campaign, run};
use baton::sim::cluster::SeedReport;
use baton::sim::plan::{Plan, Scale};
use std::ops::RangeInclusive;
use std::process::Command;

const SCALE: Scale = Scale {
    prefill: 3,
    decode: 5,
    requests: 100,
    faults: false,
    transfer: SimTransfer::Auto,
    flow: SimFlow::Auto,
};

/// Warnings of workers are part of the simulation, so they are not logged.
pub fn quiet() {
    log::configure(LogConfig { level: LogLevel::Error, ..LogConfig::default() });
}

/// Runs a seed, or panics with the command that replays it.
fn well(seed: u64, scale: Scale) -> SeedReport {
    let (result, _) = run(&Plan::new(seed, scale), None);
    let campaign = Campaign { seed, seeds: 1, scale, trace: None };
    result.unwrap_or_else(|failure| panic!("{}", campaign.tell(seed, &failure)))
}

#[test]
fn all_requests_end_well_whatever_the_order_of_steps() {
    quiet();
    for seed in 1..=40 {
        let report = well(seed, SCALE);
        assert_eq!(report.well, SCALE.requests as usize, "seed {seed}");
    }
}

/// A pool that fills up with requests that wait for the other side would show here.
#[test]
fn all_requests_end_well_in_whatever_order_workers_are_asked() {
    quiet();
    for flow in [SimFlow::Dual, SimFlow::PrefillFirst, SimFlow::DecodeFirst] {
        for seed in 41..=80 {
            let report = well(seed, Scale { flow, ..SCALE });
            assert_eq!(report.well, SCALE.requests as usize, "seed {seed}");
        }
    }
}

/// Split into two tests, so that two cores are used.
fn go_wrong(seeds: RangeInclusive<u64>) {
    quiet();
    let mut failures = 0;
    for seed in seeds {
        let report = well(seed, Scale { faults: true, ..SCALE });
        failures += report.failures.values().sum::<usize>();
    }
    assert!(failures > 0, "nothing went wrong");
}

#[test]
fn after_any_fault_requests_end_and_the_cluster_serves_again() {
    go_wrong(1..=150);
}

#[test]
fn after_any_fault_requests_end_in_further_seeds() {
    go_wrong(151..=300);
}

/// Failures that these seeds once found:
/// - a cut connection between two workers that still delivered its data;
/// - a clock that jumped before a lane was proven;
/// - a decode worker that sent Done and changed its role at once;
/// - a prefill worker that changed its role before its leg arrived;
/// - lanes without any data from the start;
/// - more messages than a mover had room for.
#[test]
fn seeds_that_once_failed_go_well() {
    use SimFlow::{DecodeFirst, Dual};
    use SimTransfer::{Auto, Tcp};
    quiet();
    for (flow, transfer, seed) in [
        (DecodeFirst, Auto, 530),
        (DecodeFirst, Auto, 1844),
        (Dual, Auto, 1844),
        (Dual, Auto, 441),
        (Dual, Auto, 586),
        (Dual, Auto, 1517),
        (Dual, Tcp, 628),
        (Dual, Tcp, 801),
        (Dual, Tcp, 1001),
    ] {
        well(seed, Scale { faults: true, flow, transfer, ..SCALE });
    }
}

/// In every flow, and also if nothing else happens.
#[test]
fn workers_change_their_roles_while_they_serve() {
    quiet();
    for flow in [SimFlow::Dual, SimFlow::PrefillFirst, SimFlow::DecodeFirst] {
        let (mut turned, mut stayed) = (0, 0);
        for seed in
            (301..=500).filter(|&seed| Plan::new(seed, Scale { faults: true, ..SCALE }).turns())
        {
            let report = well(seed, Scale { faults: true, flow, ..SCALE });
            (turned, stayed) = (turned + report.turned, stayed + report.stayed);
        }
        assert!(turned > 50 && stayed > 10, "{turned} changes came about, {stayed} did not");
    }
}

#[test]
fn clusters_of_any_shape_serve() {
    quiet();
    for (seed, prefill, decode) in [(1, 1, 1), (2, 1, 8), (3, 8, 1), (4, 2, 2), (5, 16, 16)] {
        well(seed, Scale { prefill, decode, requests: 60, ..SCALE });
    }
}

#[test]
fn a_seed_repeats_itself_to_the_last_happening() {
    quiet();
    const SEEDS: u64 = 60;
    let mut hashes = Vec::new();
    for seed in 1..=SEEDS {
        let scale = Scale { faults: seed > 2, ..SCALE };
        let report = well(seed, scale);
        assert_eq!(well(seed, scale), report, "seed {seed}");
        hashes.push(report.hash);
    }
    hashes.sort_unstable();
    hashes.dedup();
    assert_eq!(hashes.len() as u64, SEEDS, "another seed is another story");
}

/// The command, its exit status and its output.
fn command(args: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_baton")).arg("sim").args(args).output().unwrap();
    let said = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap()).concat();
    (output.status.code(), said)
}

#[test]
fn an_impossible_simulation_or_trace_is_reported() {
    let (code, said) = command(&["--seed", "18446744073709551615", "--seeds", "2"]);
    assert!(
        code == Some(2) && said.contains("the largest seed is 18446744073709551615"),
        "{code:?} {said}"
    );
    let (code, said) = command(&["--seed", "3", "--requests", "5", "--calm", "--trace", "1"]);
    assert!(code == Some(1) && said.contains("no request met in room 1;"), "{code:?} {said}");
    let rooms: Vec<&str> =
        said.lines().filter_map(|line| line.split_once("--trace ")).map(|(_, room)| room).collect();
    assert!(rooms.len() >= 5, "{said}");
    let (code, said) = command(&["--seed", "3", "--requests", "5", "--calm", "--trace", rooms[0]]);
    assert!(
        code == Some(0) && said.contains("request 0: begins") && said.contains("ends well"),
        "{said}"
    );
}

//! Production's services under a seed.

use super::quiet;
use baton::sim::services::{ServiceReport, ServiceScale, run};
use std::process::Command;

const SCALE: ServiceScale = ServiceScale { workers: 3, requests: 20, faults: false };
const FAULTS: ServiceScale = ServiceScale { faults: true, ..SCALE };

fn well(seed: u64, scale: ServiceScale) -> ServiceReport {
    run(seed, scale).unwrap_or_else(|why| panic!("seed {seed}: {why}"))
}

#[test]
fn services_answer_each_request_with_its_tokens() {
    quiet();
    for seed in 1..=20 {
        let report = well(seed, SCALE);
        assert_eq!(report.well + report.refused, SCALE.requests, "seed {seed}");
    }
}

#[test]
fn services_end_each_request_whatever_breaks() {
    quiet();
    let mut total = ServiceReport::default();
    for seed in 1..=20 {
        let report = well(seed, FAULTS);
        total.well += report.well;
        total.failed += report.failed;
        total.left += report.left;
        total.roles += report.roles;
    }
    let ServiceReport { well, failed, left, roles, .. } = total;
    assert!(well > failed && failed > 0 && left > 0 && roles > 0, "{total:?}");
}

#[test]
fn a_seed_of_services_repeats_its_run() {
    quiet();
    let mut roles = 0;
    for seed in 1..=10 {
        let report = well(seed, FAULTS);
        assert_eq!(report, well(seed, FAULTS), "seed {seed}");
        roles += report.roles;
    }
    assert!(roles > 0, "no worker changed its role");
}

#[test]
fn a_seed_of_services_has_one_hash_in_two_processes() {
    let run = || {
        let mut baton = Command::new(env!("CARGO_BIN_EXE_baton"));
        let output = baton.args(["sim", "--services", "--seed", "5"]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().find(|line| line.starts_with("hash ")).expect("a hash").to_owned()
    };
    assert_eq!(run(), run());
}

/// Mistakes in the code that only these runs play: the name of the failpoint, and a part of what a
/// run says.
#[cfg(debug_assertions)]
const MISTAKES: &[(&str, &str)] = &[
    ("lost call keeps its reservation", "sequences"),
    ("choice that waits for prefill keeps its slot", "slots"),
    ("full socket is not written again", "the router does not list its workers"),
    ("body of a client that left stays counted", "of bodies"),
    ("slot is not given back", "slots"),
    ("call outlives its request", "each call of a leg has its request"),
    ("retry is not listed", "a request that waits for a retry is listed"),
    ("idle connection stays listed", "each idle connection is listed once"),
    ("connection outlives its request", "a connection leads to one request"),
    ("abort is not passed on", "is idle and holds requests: true"),
    ("parked reader is not woken", "not ended in time"),
    ("sources are not told of a park", "not ended in time"),
    ("thread parks without a last look", "is idle and holds requests"),
    ("pages change places", "expected"),
    ("salt is not compared", "came from the cache"),
    ("done is not told", "ends that a destination has not confirmed"),
    ("prefill's end is its failure", "peer_lost"),
    ("prefix is sent again", "the destination holds these tokens"),
    ("page is free while leased", "the map of free pages disagree"),
    ("completions wake no mover", "not ended in time"),
    ("one lane speaks for all", "was written and is not leased"),
    ("cancel ends a lease that is written to", "was written and is not leased"),
    ("queue pairs outlive their session", "was written and is not leased"),
    ("first lane ends for all", "expected"),
    ("frame lands unasked", "was written and is not leased"),
    ("revoked frame goes on landing", "was written and is not leased"),
    ("progress outlives its room", "came from the cache"),
    ("silent worker is waited for", "a request waits for"),
    ("resumed tokens count as prompt", "Wrong("),
];

#[cfg(debug_assertions)]
#[test]
fn planted_mistakes_in_services_are_found() {
    use baton::stdx::failpoint::set_failpoint;
    quiet();
    let mut missed = Vec::new();
    for &(name, saying) in MISTAKES {
        let (mut found, mut others) = (None, Vec::new());
        for seed in 1..=60 {
            for scale in [FAULTS, SCALE] {
                set_failpoint(Some(name));
                let run = run(seed, scale);
                set_failpoint(None);
                match run {
                    Err(why) if why.contains(saying) => found = found.or(Some(seed)),
                    Err(why) => others.push((seed, why)),
                    Ok(_) => {}
                }
            }
            if found.is_some() {
                break;
            }
        }
        match found {
            Some(seed) => println!("{name}: seed {seed}"),
            None => missed.push((name, others.into_iter().take(3).collect::<Vec<_>>())),
        }
    }
    assert!(missed.is_empty(), "not found, and what was said instead: {missed:#?}");
}

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

/// Mistakes in production: the name of the failpoint, a part of what a run says, and the first seed
/// to try, which saves time.
#[cfg(debug_assertions)]
const MISTAKES: &[(&str, &str, u64)] = &[
    ("lost call keeps its reservation", "sequences", 1),
    ("choice that waits for prefill keeps its slot", "slots", 3),
    ("full socket is not written again", "the router does not list its workers", 1),
    ("body of a client that left stays counted", "of bodies", 1),
    ("slot is not given back", "slots", 1),
    ("call outlives its request", "each call of a leg has its request", 2),
    ("retry is not listed", "a request that waits for a retry is listed", 4),
    ("idle connection stays listed", "each idle connection is listed once", 1),
    ("connection outlives its request", "a connection leads to one request", 1),
    ("abort is not passed on", "holds requests", 37),
    ("parked reader is not woken", "not ended in time", 2),
    ("sources are not told of a park", "not ended in time", 1),
    ("thread parks without a last look", "is idle and holds requests", 41),
    ("pages change places", "expected", 2),
    ("salt is not compared", "came from the cache", 3),
    ("done is not told", "ends that a destination has not confirmed", 1),
    ("prefill's end is its failure", "peer_lost", 1),
    ("prefix is sent again", "the destination holds these tokens", 1),
    ("page is free while leased", "the map of free pages disagree", 1),
    ("completions wake no mover", "not ended in time", 1),
    ("one lane speaks for all", "was written and is not leased", 3),
    ("cancel ends a lease that is written to", "was written and is not leased", 25),
    ("queue pairs outlive their session", "not ended in time", 42),
    ("first lane ends for all", "expected", 11),
    ("frame lands unasked", "was written and is not leased", 24),
    ("revoked frame goes on landing", "was written and is not leased", 28),
    ("progress outlives its room", "came from the cache", 11),
    ("silent worker is waited for", "a request waits for", 10),
    ("resumed tokens count as prompt", "Wrong(", 9),
    ("cancel keeps the lease", "not ended in time", 6),
    ("early destination is lost", "not ended in time", 4),
    ("ready is not told", "not ended in time", 1),
    ("page is kept before it is full", "Wrong(", 6),
    ("waiting chunk is dropped", "expected", 9),
    ("early bytes are dropped", "came from the cache", 11),
    ("room stays after its request", "rooms", 1),
    ("connection is not counted", "a request waits for", 4),
    ("busy engine looks hung", "is not used at the end", 1),
    ("KV is kept for an hour", "not ended in time", 14),
    ("turns outlive their try", "has a call or waits for a retry", 27),
    ("no worker reads alone", "without a fault", 34),
    ("no room is made", "no page was made free", 9),
    ("the first page of retracted KV is lost", "Wrong(", 15),
    ("KV taken back stays in the tier", "KV of retracted requests", 9),
    ("drain does not wait for requests", "the worker has drained and holds requests", 17),
    ("drain does not wait for Done", "that a destination has not confirmed", 85),
    ("change of role does not wait for requests", "leaves its role and holds", 5),
    ("change of role is never given up", "does not give its role change up", 12),
    ("a worker's role is not compared", "this is no decode worker", 206),
    ("turned worker keeps its number", "does not use a worker in its new role", 4),
    ("turned worker is not followed back", "is not used at the end", 5),
];

/// Each mistake must be found within this many seeds from the first one.
#[cfg(debug_assertions)]
const SEEDS: u64 = 40;

#[cfg(debug_assertions)]
#[test]
fn planted_mistakes_in_services_are_found() {
    use baton::stdx::failpoint::set_failpoint;
    quiet();
    let mut missed = Vec::new();
    for &(name, saying, first) in MISTAKES {
        let (mut found, mut others) = (None, Vec::new());
        for seed in first..first + SEEDS {
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

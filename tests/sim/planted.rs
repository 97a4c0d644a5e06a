//! Mistakes planted in production code, each of which the simulation must find.
//!
//! Not among them is the proof of a copy by the lease word: no seed of the first two hundred has pages of a void
//! lease overwritten just before their copy. `tests/handoff.rs` and the model `pull` of `tools/model` do that.

use super::{SCALE, quiet};
use baton::sim::campaign::run;
use baton::sim::plan::{Plan, Scale};
use baton::stdx::planted::{plant, planted};
use std::panic;

/// Seeds until which each must be found.
const SEEDS: u64 = 200;

/// As the code asks for them.
const MISTAKES: &[&str] = &[
    "cancel keeps the lease",
    "notice of any use of a slot",
    "early destination is lost",
    "page is kept before it is full",
    "page is free while leased",
    "waiting chunk is dropped",
    "prefix is sent again",
    "slot is not given back",
    "room stays after its request",
    "held off for an hour",
    "abort is not passed on",
    "promised pages are given away",
    "done is not told",
    "what was told counts as prompt",
];

/// The first seed that fails, calm or not, and how.
fn find(mistake: &'static str) -> Option<(u64, String)> {
    plant(Some(mistake));
    let found = (1..=SEEDS).find_map(|seed| {
        [true, false].into_iter().find_map(|faults| {
            let scale = Scale { requests: 100, faults, ..SCALE };
            run(&Plan::new(seed, scale), None).0.err().map(|failure| (seed, failure.what))
        })
    });
    plant(None);
    found
}

#[test]
fn every_planted_mistake_is_found() {
    quiet();
    let usual = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if planted().is_none() {
            usual(info);
        }
    }));
    let mut missed = Vec::new();
    for mistake in MISTAKES {
        match find(mistake) {
            Some((seed, what)) => println!("{mistake}: seed {seed}: {}", what.lines().next().unwrap_or("")),
            None => missed.push(mistake),
        }
    }
    assert!(missed.is_empty(), "not found within {SEEDS} seeds: {missed:?}");
}

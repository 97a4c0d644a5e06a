//! Rows that compare two ways to a hand-off: through the C library, and by an agent that the bench
//! drives.
//!
//! Invariants: hand-offs of both ways alternate. Every second one of the direct way is in the other
//! half, so the difference of the halves is the noise of the run. Nothing is counted while it is
//! timed.

use super::count::{BenchCounts, CallCounts};
use super::report::{micros, no_times, rounded};
use super::source::{Leading, RUNS};
use super::talk::BenchRow;
use super::way::Way;
use hdrhistogram::Histogram;
use serde::Serialize;
use std::fmt;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Hand-offs of a count. The messages before and after them are a small part of it.
const COUNTED: u64 = 16;

/// The figures of one row.
#[derive(Clone, Debug)]
pub struct Comparison {
    row: BenchRow,
    /// Times of both halves of the direct hand-offs, in nanoseconds.
    halves: [Histogram<u64>; 2],
    /// Times of both together.
    direct: Histogram<u64>,
    library: Histogram<u64>,
    direct_counts: BenchCounts,
    library_counts: BenchCounts,
    /// Maximum error of each time in nanoseconds, between two hosts.
    pub clock_error: u64,
}

/// A line of `--json`. Its fields never change; new ones can be added.
#[derive(Serialize)]
struct ComparisonLine<'a> {
    case: &'a str,
    layout: &'a str,
    src_tp: u32,
    dst_tp: u32,
    transport: &'a str,
    lanes: u16,
    bytes: u64,
    runs: u64,
    direct_p50_us: f64,
    direct_p99_us: f64,
    direct_spread: f64,
    library_p50_us: f64,
    library_p99_us: f64,
    library_ratio: f64,
    direct_system_calls: Option<f64>,
    library_system_calls: Option<f64>,
    direct_data_calls: Option<f64>,
    library_data_calls: Option<f64>,
    direct_allocations: Option<f64>,
    library_allocations: Option<f64>,
    verified: bool,
}

/// Measures one row with the destination at `peer`, for about `duration`.
///
/// # Errors
/// The destination or a hand-off fails.
pub fn compare(peer: SocketAddr, row: &BenchRow, duration: Duration) -> Result<Comparison, String> {
    let mut leading = Leading::new(peer, row)?;
    leading.hand_over(Way::Direct, true)?;
    // The agents of the library do not run yet, so none of their calls is counted.
    let direct_counts = warm_count(&mut leading, Way::Direct)?;
    leading.open_library()?;
    leading.hand_over(Way::Library, true)?;
    let (mut halves, mut library) = ([no_times(), no_times()], no_times());
    let begun = Instant::now();
    for round in 0..*RUNS.end() {
        if round >= *RUNS.start() && begun.elapsed() >= duration {
            break;
        }
        for half in &mut halves {
            half.saturating_record(leading.hand_over(Way::Direct, false)?.0);
            library.saturating_record(leading.hand_over(Way::Library, false)?.0);
        }
    }
    let library_counts = warm_count(&mut leading, Way::Library)?;
    leading.finish()?;
    let clock_error = leading.clock_error();
    let mut direct = no_times();
    for half in &halves {
        direct.add(half).expect("the bounds are equal");
    }
    let row = row.clone();
    Ok(Comparison { row, halves, direct, library, direct_counts, library_counts, clock_error })
}

/// Counts hand-offs after others, because the first ones allocate tables that stay.
fn warm_count(leading: &mut Leading<'_>, way: Way) -> Result<BenchCounts, String> {
    leading.count(way, COUNTED)?;
    leading.count(way, COUNTED)
}

impl Comparison {
    /// Why a count of system calls is missing, if one is.
    pub fn uncounted(&self) -> Option<&str> {
        let both = [&self.direct_counts, &self.library_counts];
        both.into_iter().find_map(|counts| counts.system_calls.as_ref().err()).map(String::as_str)
    }

    /// The median through the library divided by the direct one.
    fn ratio(&self) -> f64 {
        micros(&self.library, 0.5) / micros(&self.direct, 0.5)
    }

    /// The larger median of the direct halves divided by the smaller one.
    fn spread(&self) -> f64 {
        let [first, second] = [0, 1].map(|half| micros(&self.halves[half], 0.5));
        first.max(second) / first.min(second)
    }

    /// The row as one line of JSON.
    pub fn json(&self) -> String {
        let row = &self.row;
        let (direct, library) = (&self.direct_counts, &self.library_counts);
        let calls = |counts: &BenchCounts, kind| calls(counts, kind).map(rounded);
        let line = ComparisonLine {
            case: &row.case.name,
            layout: row.layouts.name(),
            src_tp: row.source_ranks,
            dst_tp: row.destination_ranks,
            transport: &row.transport,
            lanes: row.lanes,
            bytes: row.moved().bytes(),
            runs: self.library.len(),
            direct_p50_us: rounded(micros(&self.direct, 0.5)),
            direct_p99_us: rounded(micros(&self.direct, 0.99)),
            direct_spread: rounded(self.spread()),
            library_p50_us: rounded(micros(&self.library, 0.5)),
            library_p99_us: rounded(micros(&self.library, 0.99)),
            library_ratio: rounded(self.ratio()),
            direct_system_calls: calls(direct, control),
            library_system_calls: calls(library, control),
            direct_data_calls: calls(direct, data),
            library_data_calls: calls(library, data),
            direct_allocations: allocations(direct).map(rounded),
            library_allocations: allocations(library).map(rounded),
            // A row with wrong bytes has no figures.
            verified: true,
        };
        serde_json::to_string(&line).expect("all keys are strings")
    }
}

fn control(calls: &CallCounts) -> u64 {
    calls.control
}

fn data(calls: &CallCounts) -> u64 {
    calls.data
}

/// System calls of one hand-off by threads of this kind, in both processes.
fn calls(counts: &BenchCounts, kind: fn(&CallCounts) -> u64) -> Option<f64> {
    counts.system_calls.as_ref().ok().map(|calls| kind(calls) as f64 / COUNTED as f64)
}

/// Allocations of one hand-off, in both processes.
fn allocations(counts: &BenchCounts) -> Option<f64> {
    counts.allocations.map(|allocations| allocations as f64 / COUNTED as f64)
}

/// The heading of the table.
pub fn heading() -> String {
    format!(
        "{:<20} {:<13} {:>5} {:<4} {:>5}  {:>10}  {:>10} {:>6} {:>10} {:>6}  {:>7} {:>7}  {:>6} \
         {:>7}",
        "case",
        "layout",
        "tp",
        "via",
        "lanes",
        "bytes",
        "direct us",
        "A/A",
        "library us",
        "ratio",
        "calls",
        "library",
        "allocs",
        "library"
    )
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = &self.row;
        let shown = |count: Option<f64>| count.map_or("-".into(), |count| format!("{count:.1}"));
        write!(
            f,
            "{:<20} {:<13} {:>5} {:<4} {:>5}  {:>10}  {:>10.1} {:>6.3} {:>10.1} {:>6.3}  {:>7} \
             {:>7}  {:>6} {:>7}",
            row.case.name,
            row.layouts.name(),
            row.ranks(),
            row.transport,
            row.lanes,
            row.moved().bytes(),
            micros(&self.direct, 0.5),
            self.spread(),
            micros(&self.library, 0.5),
            self.ratio(),
            shown(calls(&self.direct_counts, control)),
            shown(calls(&self.library_counts, control)),
            shown(allocations(&self.direct_counts)),
            shown(allocations(&self.library_counts)),
        )
    }
}

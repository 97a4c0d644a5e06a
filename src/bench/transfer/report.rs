//! Figures of rows, as a table for people and as JSON for programs.

use super::limit::RING_BYTES_MAX;
use super::talk::Row;
use crate::config::resolved::DataThreads;
use hdrhistogram::Histogram;
use serde::Serialize;
use std::fmt;

/// What the ratio of a row that [`Figures::tells_wake_ups`] means.
pub const OF_WAKE_UPS: &str = "Up to 16 KiB a ratio tells wake-ups, not copies: a hand-off wakes three threads in \
     turn, the limit spins (tcp: waits once). --busy-poll spins too.";

const _: () = assert!(RING_BYTES_MAX == 16 << 10, "as the words say");

/// Times of one row, in nanoseconds.
#[derive(Clone, Debug)]
pub struct Samples {
    /// Of hand-offs.
    pub handed_over: Histogram<u64>,
    /// Of the bare limit.
    pub bare: Histogram<u64>,
    cpu: u64,
}

impl Samples {
    /// None yet.
    pub fn new() -> Samples {
        // Three digits, up to the minute that nothing outlasts.
        let empty =
            Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("bounds that make sense");
        Samples { handed_over: empty.clone(), bare: empty, cpu: 0 }
    }

    /// A hand-off, the bare run beside it, and the CPU time of the hand-off.
    pub fn add(&mut self, handed_over: u64, bare: u64, cpu: u64) {
        self.handed_over.saturating_record(handed_over);
        self.bare.saturating_record(bare);
        self.cpu = self.cpu.saturating_add(cpu);
    }
}

/// What one row has come to.
#[derive(Clone, Debug)]
pub struct Figures {
    /// What was measured.
    pub row: Row,
    /// Times.
    pub samples: Samples,
    /// Of a hand-off.
    pub work_requests: f64,
    /// Of a hand-off.
    pub doorbells: f64,
    /// What the bare limit is.
    pub limit: String,
    /// Nanoseconds by which each time may be wrong, between hosts.
    pub clock_error: u64,
}

/// The line of `--json`, whose fields stay as they are; more may come.
#[derive(Serialize)]
struct Line<'a> {
    case: &'a str,
    layout: &'a str,
    src_tp: u32,
    dst_tp: u32,
    transport: &'a str,
    lanes: u16,
    pieces: u32,
    busy_poll: bool,
    data_threads: DataThreads,
    bytes: u64,
    runs: u64,
    p50_us: f64,
    p99_us: f64,
    gb_per_s: f64,
    cpu_s_per_gb: f64,
    work_requests: f64,
    doorbells: f64,
    limit: &'a str,
    limit_p50_us: f64,
    ratio: f64,
    verified: bool,
}

impl Figures {
    /// Gigabytes a second at the median.
    pub fn gb_per_s(&self) -> f64 {
        self.row.moved().bytes() as f64 / self.p50() / 1e3
    }

    /// Median of the hand-off, in microseconds.
    pub fn p50(&self) -> f64 {
        micros(&self.samples.handed_over, 0.5)
    }

    /// Of the hand-off, in microseconds: one in a hundred takes longer.
    pub fn p99(&self) -> f64 {
        micros(&self.samples.handed_over, 0.99)
    }

    /// Median of the bare limit, in microseconds.
    pub fn limit_p50(&self) -> f64 {
        micros(&self.samples.bare, 0.5)
    }

    /// Of the medians.
    pub fn ratio(&self) -> f64 {
        self.p50() / self.limit_p50()
    }

    /// Whether so few bytes were handed over by threads that park that the ratio says nothing about copies.
    pub fn tells_wake_ups(&self) -> bool {
        !self.row.busy_poll && self.row.moved().bytes() <= RING_BYTES_MAX
    }

    fn runs(&self) -> u64 {
        self.samples.handed_over.len()
    }

    /// One line of JSON.
    pub fn json(&self) -> String {
        let row = &self.row;
        let line = Line {
            case: &row.case.name,
            layout: row.layouts.name(),
            src_tp: row.source_ranks,
            dst_tp: row.destination_ranks,
            transport: &row.transport,
            lanes: row.lanes,
            pieces: row.pieces,
            busy_poll: row.busy_poll,
            data_threads: row.data_threads,
            bytes: row.moved().bytes(),
            runs: self.runs(),
            p50_us: rounded(self.p50()),
            p99_us: rounded(self.p99()),
            gb_per_s: rounded(self.gb_per_s()),
            cpu_s_per_gb: rounded(self.cpu_per_gb()),
            work_requests: rounded(self.work_requests),
            doorbells: rounded(self.doorbells),
            limit: &self.limit,
            limit_p50_us: rounded(self.limit_p50()),
            ratio: rounded(self.ratio()),
            // A row whose bytes are wrong has no figures.
            verified: true,
        };
        serde_json::to_string(&line).expect("only strings are keys")
    }

    fn cpu_per_gb(&self) -> f64 {
        self.samples.cpu as f64 / (self.row.moved().bytes() * self.runs()) as f64
    }
}

/// Heads of the table's columns.
pub fn heading() -> String {
    format!(
        "{:<20} {:<13} {:>5} {:<4} {:>5}  {:>10}  {:>10} {:>10} {:>7} {:>8} {:>7} {:>6}  {:>10} {:>6}",
        "case",
        "layout",
        "tp",
        "via",
        "lanes",
        "bytes",
        "p50 us",
        "p99 us",
        "GB/s",
        "cpu s/GB",
        "WRs",
        "bells",
        "limit us",
        "ratio"
    )
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = &self.row;
        write!(
            f,
            "{:<20} {:<13} {:>5} {:<4} {:>5}  {:>10}  {:>10.1} {:>10.1} {:>7.2} {:>8.2} {:>7.0} {:>6.0}  {:>10.1} {:>6.2}",
            row.case.name,
            row.layouts.name(),
            row.ranks(),
            row.transport,
            row.lanes,
            row.moved().bytes(),
            self.p50(),
            self.p99(),
            self.gb_per_s(),
            self.cpu_per_gb(),
            self.work_requests,
            self.doorbells,
            self.limit_p50(),
            self.ratio(),
        )
    }
}

fn micros(histogram: &Histogram<u64>, quantile: f64) -> f64 {
    histogram.value_at_quantile(quantile) as f64 / 1e3
}

/// Four decimals: enough for any of these figures, and short.
fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

#[cfg(test)]
mod tests {
    use super::super::case::{Case, Layouts};
    use super::*;

    #[test]
    fn a_line_has_the_fields_of_the_contract() {
        let case = Case::known().remove(0);
        let row = Row {
            case,
            layouts: Layouts::ALL[1],
            source_ranks: 1,
            destination_ranks: 1,
            transport: "shm".into(),
            lanes: 1,
            pieces: 16,
            busy_poll: true,
            data_threads: DataThreads::Fused,
        };
        let mut samples = Samples::new();
        for (ours, bare) in [(3000, 2000), (5000, 2500), (4000, 1000)] {
            samples.add(ours, bare, 2048);
        }
        let limit = "a copy".to_string();
        let figures =
            Figures { row, samples, work_requests: 1.0, doorbells: 0.5, limit, clock_error: 0 };
        let line: serde_json::Value = serde_json::from_str(&figures.json()).unwrap();
        let close = |field: &str, value: f64| {
            assert!((line[field].as_f64().unwrap() / value - 1.0).abs() < 2e-3, "{field}: {line}");
        };
        assert_eq!(line["case"], "tiny-2k");
        assert_eq!(line["data_threads"], "fused");
        assert_eq!(line["runs"], 3);
        close("p50_us", 4.0);
        close("p99_us", 5.0);
        close("limit_p50_us", 2.0);
        close("ratio", 2.0);
        close("gb_per_s", 0.512);
        close("cpu_s_per_gb", 1.0);
        assert_eq!(line["verified"], true);
    }
}

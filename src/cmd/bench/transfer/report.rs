//! The figures of rows, as a table and as JSON.

use super::limit::RING_BYTES_MAX;
use super::talk::BenchRow;
use crate::config::DataThreadMode;
use hdrhistogram::Histogram;
use serde::Serialize;
use std::fmt;

/// A note about the ratio, for rows with [`Figures::tells_wake_ups`].
pub const OF_WAKE_UPS: &str = "Up to 16 KiB a ratio shows wake-ups, not copies: a hand-off wakes \
                               three threads in turn, but the limit spins (with tcp it waits \
                               once). With --busy-poll the hand-off spins, too.";

const _: () = assert!(RING_BYTES_MAX == 16 << 10, "the note above names this size");

/// An empty set of times in nanoseconds.
pub fn no_times() -> Histogram<u64> {
    // Three significant digits. No run lasts longer than one minute.
    Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("the bounds are valid")
}

/// Times of one row, in nanoseconds.
#[derive(Clone, Debug)]
pub struct BenchSamples {
    /// Times of hand-offs.
    pub handed_over: Histogram<u64>,
    /// Times of the bare limit.
    pub bare: Histogram<u64>,
    cpu: u64,
}

impl BenchSamples {
    /// An empty set of samples.
    pub fn new() -> BenchSamples {
        BenchSamples { handed_over: no_times(), bare: no_times(), cpu: 0 }
    }

    /// Adds a hand-off, the bare run after it, and the CPU time of the hand-off, in nanoseconds.
    pub fn add(&mut self, handed_over: u64, bare: u64, cpu: u64) {
        self.handed_over.saturating_record(handed_over);
        self.bare.saturating_record(bare);
        self.cpu = self.cpu.saturating_add(cpu);
    }
}

/// The results of one row.
#[derive(Clone, Debug)]
pub struct Figures {
    /// The row.
    pub row: BenchRow,
    /// The times.
    pub samples: BenchSamples,
    /// Mean work requests of a hand-off.
    pub work_requests: f64,
    /// Mean doorbells of a hand-off.
    pub doorbells: f64,
    /// Description of the bare limit.
    pub limit: String,
    /// Maximum error of each time in nanoseconds, between two hosts.
    pub clock_error: u64,
}

/// A line of `--json`. Its fields never change; new ones can be added.
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
    data_threads: DataThreadMode,
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
    /// Gigabytes per second at the median.
    pub fn gb_per_s(&self) -> f64 {
        self.row.moved().bytes() as f64 / self.p50() / 1e3
    }

    /// Median time of a hand-off, in microseconds.
    pub fn p50(&self) -> f64 {
        micros(&self.samples.handed_over, 0.5)
    }

    /// 99th percentile of a hand-off's time, in microseconds.
    pub fn p99(&self) -> f64 {
        micros(&self.samples.handed_over, 0.99)
    }

    /// Median time of the bare limit, in microseconds.
    pub fn limit_p50(&self) -> f64 {
        micros(&self.samples.bare, 0.5)
    }

    /// The hand-off's median divided by the limit's.
    pub fn ratio(&self) -> f64 {
        self.p50() / self.limit_p50()
    }

    /// Whether the ratio shows wake-ups, not copies: few bytes, and threads that park.
    pub fn tells_wake_ups(&self) -> bool {
        !self.row.busy_poll && self.row.moved().bytes() <= RING_BYTES_MAX
    }

    fn runs(&self) -> u64 {
        self.samples.handed_over.len()
    }

    /// The row as one line of JSON.
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
            // A row with wrong bytes has no figures.
            verified: true,
        };
        serde_json::to_string(&line).expect("all keys are strings")
    }

    fn cpu_per_gb(&self) -> f64 {
        self.samples.cpu as f64 / (self.row.moved().bytes() * self.runs()) as f64
    }
}

/// The heading of the table.
pub fn heading() -> String {
    format!(
        "{:<20} {:<13} {:>5} {:<4} {:>5}  {:>10}  {:>10} {:>10} {:>7} {:>8} {:>7} {:>6}  {:>10} \
         {:>6}",
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
            "{:<20} {:<13} {:>5} {:<4} {:>5}  {:>10}  {:>10.1} {:>10.1} {:>7.2} {:>8.2} {:>7.0} \
             {:>6.0}  {:>10.1} {:>6.2}",
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

/// A quantile of these times, in microseconds.
pub fn micros(histogram: &Histogram<u64>, quantile: f64) -> f64 {
    histogram.value_at_quantile(quantile) as f64 / 1e3
}

/// Rounds to four decimals, which keeps lines short.
pub fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

#[cfg(test)]
mod tests {
    use super::super::case::{Case, Layouts};
    use super::*;

    #[test]
    fn a_line_has_the_fields_of_the_contract() {
        let case = Case::known().remove(0);
        let row = BenchRow {
            case,
            layouts: Layouts::ALL[1],
            source_ranks: 1,
            destination_ranks: 1,
            transport: "shm".into(),
            lanes: 1,
            pieces: 16,
            busy_poll: true,
            data_threads: DataThreadMode::Fused,
            through_library: false,
        };
        let mut samples = BenchSamples::new();
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

//! The results of a run: latencies, goodput, use of workers.

use super::host::Host;
use super::plan::Objective;
use crate::ids::Leg;
use crate::stdx::event_queue::{MILLI, Nanos, SECOND};
use hdrhistogram::Histogram;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// Longest measured time between two tokens, in microseconds: an hour.
const ITL_MAX_US: u64 = 3_600_000_000;

/// Factors of the objective for which goodput is also reported, because goodput can change steeply
/// near a limit.
pub const SCALES: [f64; 6] = [0.5, 0.75, 1.0, 1.5, 2.0, 2.5];
/// Index of the factor 1.
const UNSCALED: usize = 2;

/// Samples gathered during a run.
#[derive(Debug)]
pub struct LoadSamples {
    objective: Objective,
    ttft: Vec<Nanos>,
    tpot: Vec<Nanos>,
    e2e: Vec<Nanos>,
    /// In microseconds with three digits. A list with one value per token would take too much
    /// memory.
    itl: Histogram<u64>,
    /// By factor of the objective.
    good: [usize; SCALES.len()],
    input: u64,
    output: u64,
    cached: u64,
    refused: BTreeMap<&'static str, usize>,
}

/// One request that was served.
#[derive(Clone, Copy, Debug)]
pub struct Served {
    /// Time from its arrival to its first token,
    pub ttft: Nanos,
    /// and to its last.
    pub e2e: Nanos,
    /// Tokens of its prompt,
    pub input: u32,
    /// how many of them its prefill worker had cached,
    pub cached: u32,
    /// and tokens of its answer.
    pub output: u32,
}

impl LoadSamples {
    /// Creates the state without samples.
    pub fn new(objective: Objective) -> LoadSamples {
        LoadSamples {
            objective,
            ttft: Vec::new(),
            tpot: Vec::new(),
            e2e: Vec::new(),
            itl: Histogram::new_with_bounds(1, ITL_MAX_US, 3).expect("bounds that make sense"),
            good: [0; SCALES.len()],
            input: 0,
            output: 0,
            cached: 0,
            refused: BTreeMap::new(),
        }
    }

    /// Records the time between two tokens of a request.
    pub fn gap(&mut self, gap: Nanos) {
        self.itl.saturating_record(gap / 1000);
    }

    /// Records a request that was served.
    pub fn served(&mut self, served: Served) {
        let Served { ttft, e2e, input, cached, output } = served;
        self.ttft.push(ttft);
        self.e2e.push(e2e);
        let tpot = (e2e - ttft).checked_div(u64::from(output) - 1);
        self.tpot.extend(tpot);
        for (good, scale) in self.good.iter_mut().zip(SCALES) {
            let keeps = |time: Nanos, limit: Nanos| time as f64 <= limit as f64 * scale;
            let is_good = keeps(ttft, self.objective.ttft)
                && tpot.is_none_or(|tpot| keeps(tpot, self.objective.itl));
            *good += usize::from(is_good);
        }
        self.input += u64::from(input);
        self.cached += u64::from(cached);
        self.output += u64::from(output);
    }

    /// Records a request that no worker accepted.
    pub fn refused(&mut self, cause: &'static str) {
        *self.refused.entry(cause).or_default() += 1;
    }

    /// Upper bound of the share of good requests: all open requests count as good.
    pub fn good_at_most(&self, requests: usize) -> f64 {
        1.0 - (self.ended() - self.good[UNSCALED]) as f64 / requests.max(1) as f64
    }

    /// Number of requests that have ended.
    pub fn ended(&self) -> usize {
        self.ttft.len() + self.refused.values().sum::<usize>()
    }
}

/// Mean and percentiles in milliseconds, by nearest rank.
#[derive(Clone, Copy, Serialize, PartialEq, Debug, Default)]
pub struct Percentiles {
    /// The mean.
    pub mean: f64,
    /// The median.
    pub p50: f64,
    /// The 90th percentile.
    pub p90: f64,
    /// The 99th percentile.
    pub p99: f64,
    /// The maximum.
    pub max: f64,
}

impl Percentiles {
    /// By nearest rank.
    fn of(mut samples: Vec<Nanos>) -> Percentiles {
        if samples.is_empty() {
            return Percentiles::default();
        }
        samples.sort_unstable();
        let ms = |nanos: Nanos| nanos as f64 / MILLI as f64;
        let at =
            |share: f64| ms(samples[((samples.len() as f64 * share).ceil() as usize).max(1) - 1]);
        let mean = samples.iter().map(|&nanos| ms(nanos)).sum::<f64>() / samples.len() as f64;
        Percentiles { mean, p50: at(0.5), p90: at(0.9), p99: at(0.99), max: at(1.0) }
    }

    fn of_micros(histogram: &Histogram<u64>) -> Percentiles {
        let at = |share| histogram.value_at_quantile(share) as f64 / 1000.0;
        let mean = histogram.mean() / 1000.0;
        Percentiles {
            mean,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            max: histogram.max() as f64 / 1000.0,
        }
    }
}

/// The use of the workers of a role.
#[derive(Clone, Copy, Serialize, PartialEq, Debug, Default)]
pub struct RoleUsage {
    /// Number of workers.
    pub workers: usize,
    /// Share of the time in which a worker computes, on average.
    pub busy_mean: f64,
    /// The same for the busiest.
    pub busy_max: f64,
    /// Tokens computed (prefill) or generated (decode): the maximum of a worker over the mean of
    /// all.
    pub tokens_max_to_mean: f64,
}

impl RoleUsage {
    fn of(role: Leg, hosts: &[Host], makespan: Nanos) -> RoleUsage {
        let of_role = || hosts.iter().filter(|host| host.role == role);
        let busy = |host: &Host| host.computed as f64 / makespan.max(1) as f64;
        let tokens = |host: &Host| match role {
            Leg::Prefill => host.tokens_computed() as f64,
            Leg::Decode => host.tokens_generated() as f64,
        };
        let workers = of_role().count();
        if workers == 0 {
            return RoleUsage::default();
        }
        let sum = of_role().map(tokens).sum::<f64>();
        let most = of_role().map(tokens).fold(0.0, f64::max);
        RoleUsage {
            workers,
            busy_mean: of_role().map(busy).sum::<f64>() / workers as f64,
            busy_max: of_role().map(busy).fold(0.0, f64::max),
            tokens_max_to_mean: if sum > 0.0 { most / (sum / workers as f64) } else { 1.0 },
        }
    }
}

/// The results. The seed determines all values except wall time.
#[derive(Clone, Serialize, Debug)]
pub struct Summary {
    /// The seed.
    pub seed: u64,
    /// Requests that arrived.
    pub requests: usize,
    /// Requests that were served.
    pub completed: usize,
    /// Requests that no worker took, by cause.
    pub refused: BTreeMap<&'static str, usize>,
    /// Prompt tokens of served requests.
    pub input_tokens: u64,
    /// Answer tokens of served requests.
    pub output_tokens: u64,
    /// Time from the first arrival to the last token, in simulated seconds.
    pub makespan_s: f64,
    /// Served requests per simulated second.
    pub requests_per_s: f64,
    /// Generated tokens per simulated second.
    pub output_tokens_per_s: f64,
    /// Time from arrival to the first token.
    pub ttft_ms: Percentiles,
    /// Mean time per token of a request, after its first.
    pub tpot_ms: Percentiles,
    /// Time between any two tokens; three digits.
    pub itl_ms: Percentiles,
    /// Time from arrival to the last token.
    pub e2e_ms: Percentiles,
    /// Requests that met both limits.
    pub good: usize,
    /// Their share of all requests.
    pub goodput: f64,
    /// The same with both limits multiplied by a factor.
    pub goodput_at: [(f64, f64); SCALES.len()],
    /// Requests rejected at arrival, because the forecast missed the limits.
    pub early: usize,
    /// Prompt tokens computed in vain: for requests that were not served, or a second time.
    pub wasted_tokens: u64,
    /// Share of prompt tokens that were in the cache of the worker that computed the prompt.
    pub prefix_reuse: f64,
    /// KV moved, in bytes.
    pub kv_bytes: u64,
    /// Sessions that were set up.
    pub sessions: u64,
    /// Idle sessions that ended for another one.
    pub sessions_replaced: u64,
    /// Usage of prefill workers.
    pub prefill: RoleUsage,
    /// Usage of decode workers.
    pub decode: RoleUsage,
    /// Number of events: turns of workers, messages, transfers.
    pub happenings: u64,
    /// Equal for equal runs; 16 hexadecimal digits.
    pub hash: String,
    /// Wall time, in seconds.
    pub wall_s: f64,
    /// Simulated seconds per second of wall time.
    pub simulated_per_wall: f64,
    /// Requests per minute of wall time.
    pub requests_per_wall_minute: f64,
}

/// Totals that the cluster adds at the end.
#[derive(Clone, Copy, Debug)]
pub struct Totals {
    /// The seed.
    pub seed: u64,
    /// Time from the first arrival to the last token.
    pub makespan: Nanos,
    /// Bytes moved.
    pub kv_bytes: u64,
    /// Requests rejected because the forecast missed the limits.
    pub early: usize,
    /// Number of events.
    pub happenings: u64,
    /// Hash over all of them.
    pub hash: u64,
    /// Wall time.
    pub wall: Duration,
}

impl Summary {
    /// The summary of these samples.
    pub fn new(samples: LoadSamples, hosts: &[Host], totals: Totals) -> Summary {
        let requests = samples.ended();
        let completed = samples.ttft.len();
        let Totals { seed, makespan, kv_bytes, early, happenings, hash, wall } = totals;
        let computed = hosts.iter().map(Host::tokens_computed).sum::<u64>();
        let (seconds, wall_s) = (makespan as f64 / SECOND as f64, wall.as_secs_f64());
        let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
        Summary {
            seed,
            requests,
            completed,
            refused: samples.refused,
            input_tokens: samples.input,
            output_tokens: samples.output,
            makespan_s: seconds,
            requests_per_s: share(completed as f64, seconds),
            output_tokens_per_s: share(samples.output as f64, seconds),
            ttft_ms: Percentiles::of(samples.ttft),
            tpot_ms: Percentiles::of(samples.tpot),
            itl_ms: Percentiles::of_micros(&samples.itl),
            e2e_ms: Percentiles::of(samples.e2e),
            good: samples.good[UNSCALED],
            goodput: share(samples.good[UNSCALED] as f64, requests as f64),
            goodput_at: std::array::from_fn(|at| {
                (SCALES[at], share(samples.good[at] as f64, requests as f64))
            }),
            early,
            wasted_tokens: computed.saturating_sub(samples.input - samples.cached),
            prefix_reuse: share(samples.cached as f64, samples.input as f64),
            kv_bytes,
            sessions: hosts.iter().map(|host| host.sessions.set_up).sum(),
            sessions_replaced: hosts.iter().map(|host| host.sessions.replaced).sum(),
            prefill: RoleUsage::of(Leg::Prefill, hosts, makespan),
            decode: RoleUsage::of(Leg::Decode, hosts, makespan),
            happenings,
            hash: format!("{hash:016x}"),
            wall_s,
            simulated_per_wall: share(seconds, wall_s),
            requests_per_wall_minute: share(requests as f64, wall_s) * 60.0,
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} requests, {} served in {:.1} s: {:.2} requests and {:.0} tokens a second",
            self.requests,
            self.completed,
            self.makespan_s,
            self.requests_per_s,
            self.output_tokens_per_s
        )?;
        if !self.refused.is_empty() {
            let refused = self.refused.iter().map(|(cause, count)| format!("{cause} {count}"));
            writeln!(f, "refused: {}", refused.collect::<Vec<_>>().join(", "))?;
        }
        writeln!(
            f,
            "{:>10} {:>10} {:>10} {:>10} {:>10} {:>10}",
            "ms", "mean", "p50", "p90", "p99", "max"
        )?;
        for (name, spread) in [
            ("TTFT", self.ttft_ms),
            ("TPOT", self.tpot_ms),
            ("ITL", self.itl_ms),
            ("E2E", self.e2e_ms),
        ] {
            let Percentiles { mean, p50, p90, p99, max } = spread;
            writeln!(f, "{name:>10} {mean:>10.2} {p50:>10.2} {p90:>10.2} {p99:>10.2} {max:>10.2}")?;
        }
        writeln!(
            f,
            "goodput {:.1} % ({}), prefix reuse {:.1} % of {} prompt tokens, {:.1} GB of KV moved",
            self.goodput * 100.0,
            self.good,
            self.prefix_reuse * 100.0,
            self.input_tokens,
            self.kv_bytes as f64 / 1e9
        )?;
        let scales =
            self.goodput_at.map(|(scale, good)| format!("{:.1} % at {scale}", good * 100.0));
        writeln!(f, "goodput by scale of the limits: {}", scales.join(", "))?;
        writeln!(f, "{} rejected early, {} prompt tokens wasted", self.early, self.wasted_tokens)?;
        writeln!(
            f,
            "{} sessions set up, {} of them in place of an idle one",
            self.sessions, self.sessions_replaced
        )?;
        for (name, balance) in [("prefill", self.prefill), ("decode", self.decode)] {
            writeln!(
                f,
                "{} {name} workers: busy {:.1} %, the busiest {:.1} %; most tokens to mean {:.2}",
                balance.workers,
                balance.busy_mean * 100.0,
                balance.busy_max * 100.0,
                balance.tokens_max_to_mean
            )?;
        }
        write!(
            f,
            "{:.2} s of wall time: {:.0} requests a minute, {:.1} s simulated in one, \
             {} events, hash {}",
            self.wall_s,
            self.requests_per_wall_minute,
            self.simulated_per_wall,
            self.happenings,
            self.hash
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_ranks() {
        let spread = Percentiles::of((1..=200).rev().map(|ms| ms * MILLI).collect());
        assert_eq!((spread.p50, spread.p90, spread.p99, spread.max), (100.0, 180.0, 198.0, 200.0));
        assert_eq!(spread.mean, 100.5);
        assert_eq!(Percentiles::of(vec![MILLI]).p99, 1.0);
        assert_eq!(Percentiles::of(Vec::new()), Percentiles::default());
    }

    #[test]
    fn a_request_that_misses_one_limit_is_not_good() {
        let mut samples = LoadSamples::new(Objective { ttft: 10 * MILLI, itl: 2 * MILLI });
        let served = |ttft, e2e, output| Served {
            ttft: ttft * MILLI,
            e2e: e2e * MILLI,
            input: 8,
            cached: 2,
            output,
        };
        samples.served(served(10, 18, 5));
        samples.served(served(11, 12, 5));
        samples.served(served(10, 19, 5));
        samples.served(served(3, 3, 1));
        samples.refused("overloaded");
        assert_eq!((samples.good[UNSCALED], samples.ended(), samples.tpot.len()), (2, 5, 3));
        assert_eq!(samples.good, [1, 1, 2, 4, 4, 4]);
    }

    #[test]
    fn gaps_are_told_to_three_digits() {
        let mut samples = LoadSamples::new(Objective { ttft: 0, itl: 0 });
        (1..=100).for_each(|ms| samples.gap(ms * MILLI));
        let spread = Percentiles::of_micros(&samples.itl);
        let close = |a: f64, b: f64| (a - b).abs() / b < 2e-3;
        assert!(
            close(spread.p50, 50.0) && close(spread.p99, 99.0) && close(spread.max, 100.0),
            "{spread:?}"
        );
    }
}

//! `baton sim place`: finds the fleet with the highest request rate within the latency limits.
//!
//! A fleet has prefill and decode workers, or only mixed workers. A fleet sustains a rate if a
//! given share of the requests meets both limits (DistServe, OSDI'24: goodput, found by simulation
//! and bisection). First, a closed form of the cost model estimates each role's capacity (as in
//! Splitwise, ISCA'24). Then the search tries a grid of fleets with few requests, and fleets
//! between the best of them. Last, it runs the best fleets with more requests. Owns: the search and
//! its table. Invariant: the seed determines the result, although tries run in parallel.

mod sample;

use super::arrivals::Arrivals;
use super::cluster::{LoadCluster, LoadFailure};
use super::plan::{LoadPlan, Traffic};
use super::report::{Percentiles, Summary};
use crate::cli::flags::PlaceFlags;
use crate::cli::quantities::value;
use crate::config::error::ConfigError;
use crate::say;
use crate::stdx::event_queue::SECOND;
use crate::sys::heap;
use sample::Sample;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{fmt, thread};

/// Requests of the first tries: per worker, minimum and maximum.
const FEW: (usize, usize, usize) = (100, 500, 4000);
/// The same for the last tries of the best fleets.
const MANY: (usize, usize, usize) = (500, 2000, 16_384);
/// Random requests arrive for at least this multiple of the TTFT limit. At a rate that is not
/// sustained, the last requests then wait about that long.
const SPAN: f64 = 10.0;
/// The ratio at which a search stops: the lowest unsustained rate divided by the highest sustained
/// rate. `COARSE` is for first tries, `FINE` for last tries.
const COARSE: f64 = 1.1;
const FINE: f64 = 1.02;
/// Ratio of two successive rates while only sustained or only unsustained rates are known.
const STRIDE: f64 = 1.4;
/// Maximum number of rates that are tried with a fleet. A fleet that fails at all of them sustains
/// none.
const PROBES: usize = 24;
/// Maximum number of splits in the first tries, in addition to the fleet of mixed workers.
const GRID: usize = 8;
/// Number of the best fleets that run with more requests.
const FINALISTS: usize = 3;
/// Factor for percentages.
const PERCENT: f64 = 100.0;

/// Number of workers of each role. Without prefill workers, all are mixed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Debug)]
pub struct Fleet {
    /// Prefill workers.
    pub prefill: usize,
    /// Decode workers, or mixed workers.
    pub decode: usize,
}

impl fmt::Display for Fleet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.prefill {
            0 => write!(f, "{} mixed", self.decode),
            prefill => write!(f, "{prefill} prefill, {} decode", self.decode),
        }
    }
}

/// The result of a fleet.
#[derive(Clone, Serialize, Debug)]
pub struct FleetResult {
    /// The fleet.
    pub fleet: Fleet,
    /// The highest sustained rate, in requests per second; 0: no tried rate was sustained.
    pub requests_per_s: f64,
    /// The same per GPU.
    pub requests_per_s_per_gpu: f64,
    /// The same as a multiple of the load's own rate.
    pub factor: f64,
    /// Whether a higher rate was tried and not sustained. If false, the requests were too few to
    /// show a limit.
    pub is_bounded: bool,
    /// Requests of the last try.
    pub requests: usize,
    /// At that rate: the share of requests that kept both limits.
    pub goodput: f64,
    /// Time from arrival to the first token.
    pub ttft_ms: Percentiles,
    /// Mean time per token after the first.
    pub tpot_ms: Percentiles,
    /// Share of the time in which the workers of each role computed.
    pub busy: [f64; 2],
}

/// A search for the best fleet.
#[derive(Debug)]
pub struct Search {
    plan: LoadPlan,
    workers: usize,
    gpus_per_worker: u32,
    /// Share of requests that must be good.
    share: f64,
    /// Whether decode workers also compute prompts if the fleet has prefill workers.
    local_prefill: bool,
    /// Requests of the last tries.
    most: Option<usize>,
    json: bool,
}

impl Search {
    /// Reads the flags.
    ///
    /// # Errors
    /// The first invalid flag.
    pub fn new(flags: &PlaceFlags) -> Result<Search, ConfigError> {
        let each = flags.gpus_per_worker;
        let workers = flags.workers.or(flags.gpus.map(|gpus| gpus / each)).unwrap_or(0) as usize;
        if let Some(gpus) = flags
            .gpus
            .filter(|gpus| gpus % each != 0 || workers > crate::limits::ROUTER_WORKERS_MAX)
        {
            let most = crate::limits::ROUTER_WORKERS_MAX;
            let limit =
                format!("a multiple of --gpus-per-worker {each}, for at most {most} workers");
            return Err(value("--gpus", gpus, limit));
        }
        if !(1.0..=PERCENT).contains(&flags.goodput) {
            return Err(value("--goodput", flags.goodput, "1 to 100 per cent".into()));
        }
        let plan = LoadPlan::of(&flags.workload, flags.seed, (0, workers), flags.requests)?;
        let share = flags.goodput / PERCENT;
        Ok(Search {
            plan,
            workers,
            gpus_per_worker: each,
            share,
            local_prefill: flags.workload.local_prefill,
            most: flags.requests.map(|most| most as usize),
            json: flags.json,
        })
    }

    /// Finds the best fleets, best first.
    ///
    /// # Errors
    /// The trace cannot be used, or a run did not finish.
    pub fn run(&self) -> Result<Result<Vec<FleetResult>, LoadFailure>, ConfigError> {
        self.run_telling(&|_| {})
    }

    /// The same, with progress reports: one line per fleet.
    ///
    /// # Errors
    /// As [`Search::run`].
    pub fn run_telling(
        &self,
        tell: &(dyn Fn(&str) + Sync),
    ) -> Result<Result<Vec<FleetResult>, LoadFailure>, ConfigError> {
        let all = self.plan.arrivals()?;
        if all.span() == 0 {
            let limit = "a rate needs two requests with different arrival times".into();
            return Err(value("--requests", all.list().len(), limit));
        }
        if let Traffic::Drawn(drawn) = &self.plan.traffic {
            // A higher rate draws more requests than the list has now.
            let longest = 2 * (drawn.input + drawn.output) - 2;
            if longest > self.plan.kv_tokens {
                let limit = format!(
                    "a request can have {longest} tokens, and each worker must be able to hold it"
                );
                return Err(value("--kv-tokens", self.plan.kv_tokens, limit));
            }
        }
        Ok(self.search(&all, tell))
    }

    fn search(
        &self,
        all: &Arrivals,
        tell: &(dyn Fn(&str) + Sync),
    ) -> Result<Vec<FleetResult>, LoadFailure> {
        let few = self.sample(all, self.count(FEW).min(self.most.unwrap_or(usize::MAX)));
        let many = self.sample(all, self.most.unwrap_or(self.count(MANY)));
        let mut coarse: BTreeMap<Fleet, FleetResult> = BTreeMap::new();
        let mut step = self.workers.div_ceil(GRID).max(1);
        let mut next: Vec<Fleet> = (1..self.workers)
            .step_by(step)
            .map(|prefill| self.fleet(prefill))
            .chain([self.fleet(0)])
            .collect();
        loop {
            let near = |fleet| self.capacity(fleet, all) / few.rate();
            let asked = next.iter().map(|&fleet| (fleet, near(fleet))).collect();
            coarse.extend(
                self.stand(asked, &few, COARSE, tell)?.into_iter().map(|one| (one.fleet, one)),
            );
            if step == 1 {
                break;
            }
            // The next tries are the fleets on both sides of the best one, at half the distance of
            // the last step.
            step /= 2;
            let split = coarse.values().filter(|one| one.fleet.prefill > 0);
            let best = sorted(split.cloned().collect()).first().map_or(1, |one| one.fleet.prefill);
            let beside = [best.saturating_sub(step), best + step].into_iter();
            next = beside
                .filter(|prefill| (1..self.workers).contains(prefill))
                .map(|prefill| self.fleet(prefill))
                .collect();
            next.retain(|fleet| !coarse.contains_key(fleet));
        }
        let ranked = sorted(coarse.into_values().collect());
        // The first requests of a trace find empty caches. A fleet that sustains no rate with few
        // requests can sustain one with more. Mixed workers suffer most from this, and can still be
        // the best.
        let is_finalist = |(at, one): &(usize, &FleetResult)| {
            *at < FINALISTS || one.fleet.prefill == 0 || one.factor == 0.0
        };
        let near = |one: &FleetResult| match one.factor {
            0.0 => self.capacity(one.fleet, all) / many.rate(),
            factor => factor,
        };
        let asked =
            ranked.iter().enumerate().filter(is_finalist).map(|(_, one)| (one.fleet, near(one)));
        let mut best = sorted(self.stand(asked.collect(), &many, FINE, tell)?);
        let is_left = |one: &FleetResult| best.iter().all(|other| other.fleet != one.fleet);
        let left: Vec<_> = ranked.into_iter().filter(is_left).collect();
        best.extend(left);
        Ok(best)
    }

    /// The first `count` requests of a trace. Random requests arrive for a fixed time: by estimate,
    /// the best fleet serves `count` of them in that time.
    fn sample(&self, all: &Arrivals, count: usize) -> Sample {
        match &self.plan.traffic {
            Traffic::File(_) => Sample::Same(all.first(count)),
            Traffic::Drawn(drawn) => {
                let most = (0..self.workers).map(|prefill| self.capacity(self.fleet(prefill), all));
                let served = count as f64 / most.fold(f64::MIN_POSITIVE, f64::max);
                let least = SPAN * self.plan.objective.ttft as f64 / SECOND as f64;
                Sample::Span {
                    drawn: drawn.clone(),
                    seconds: served.max(least),
                    seed: self.plan.seed,
                }
            }
        }
    }

    fn fleet(&self, prefill: usize) -> Fleet {
        Fleet { prefill, decode: self.workers - prefill }
    }

    fn count(&self, (each, least, most): (usize, usize, usize)) -> usize {
        (each * self.workers).clamp(least, most)
    }

    /// The rate that each of these fleets sustains. The second value of an entry is the first rate
    /// to try, as a factor.
    fn stand(
        &self,
        asked: Vec<(Fleet, f64)>,
        sample: &Sample,
        within: f64,
        tell: &(dyn Fn(&str) + Sync),
    ) -> Result<Vec<FleetResult>, LoadFailure> {
        let (next, done) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
        let work = || {
            while let Some(&(fleet, near)) = asked.get(next.fetch_add(1, Ordering::Relaxed)) {
                let found = self.sustained(fleet, sample, near, within);
                let mut done = done.lock().expect("no panic while locked");
                if let Ok(found) = &found {
                    let (count, rate, requests) =
                        (done.len() + 1, found.requests_per_s, found.requests);
                    tell(&format!(
                        "{count} of {}: {fleet}: {rate:.2} requests/s, by {requests} requests",
                        asked.len()
                    ));
                }
                done.insert(fleet, found);
            }
        };
        thread::scope(|scope| {
            for _ in 0..thread::available_parallelism().map_or(1, usize::from).min(asked.len()) {
                scope.spawn(work);
            }
        });
        done.into_inner().expect("no panic while locked").into_values().collect()
    }

    /// The highest rate that a fleet sustains.
    fn sustained(
        &self,
        fleet: Fleet,
        sample: &Sample,
        near: f64,
        within: f64,
    ) -> Result<FleetResult, LoadFailure> {
        let (mut best, mut above, mut factor) = (None::<(f64, Summary)>, None::<f64>, near);
        let mut requests = 0;
        for _ in 0..PROBES {
            let arrivals = sample.at(factor);
            let summary = self.probe(fleet, &arrivals)?;
            match summary.goodput >= self.share {
                true => (best, requests) = (Some((factor, summary)), arrivals.list().len()),
                false => above = Some(factor),
            }
            if best.is_none() {
                requests = arrivals.list().len();
            }
            factor = match (&best, above) {
                (Some((good, _)), Some(bad)) if bad / good <= within => break,
                (Some((good, _)), Some(bad)) => (good * bad).sqrt(),
                (Some((good, _)), None) => good * STRIDE,
                (None, Some(bad)) => bad / STRIDE,
                (None, None) => unreachable!("each rate is sustained or not"),
            };
        }
        let is_bounded = above.is_some();
        let (factor, summary) =
            best.map_or((0.0, None), |(factor, summary)| (factor, Some(summary)));
        let rate = factor * sample.rate();
        let gpus = self.workers as f64 * f64::from(self.gpus_per_worker);
        Ok(FleetResult {
            fleet,
            requests_per_s: rate,
            requests_per_s_per_gpu: rate / gpus,
            factor,
            is_bounded,
            requests,
            goodput: summary.as_ref().map_or(0.0, |summary| summary.goodput),
            ttft_ms: summary.as_ref().map(|summary| summary.ttft_ms).unwrap_or_default(),
            tpot_ms: summary.as_ref().map(|summary| summary.tpot_ms).unwrap_or_default(),
            busy: summary
                .map_or([0.0; 2], |summary| [summary.prefill.busy_mean, summary.decode.busy_mean]),
        })
    }

    fn probe(&self, fleet: Fleet, arrivals: &Arrivals) -> Result<Summary, LoadFailure> {
        let Fleet { prefill, decode } = fleet;
        let plan = LoadPlan {
            prefill,
            decode,
            local_prefill: self.local_prefill || prefill == 0,
            least_good: Some(self.share),
            ..self.plan.clone()
        };
        LoadCluster::new(&plan, arrivals).run()
    }

    /// The capacity by the cost model only, in requests per second: the busier role is always busy.
    /// Decode runs as many sequences as the ITL limit allows; no request waits, and no prefix is
    /// cached.
    fn capacity(&self, fleet: Fleet, arrivals: &Arrivals) -> f64 {
        let (forecast, limit) = (self.plan.forecast(), self.plan.objective.itl as f64 / 1e6);
        let list = arrivals.list();
        let mean = |of: &dyn Fn(&super::arrivals::RequestArrival) -> f64| {
            list.iter().map(of).sum::<f64>() / list.len() as f64
        };
        let reading = mean(&|one| forecast.reading_ms(one.input, 0)) / 1e3;
        let (input, output) =
            (mean(&|one| f64::from(one.input)), mean(&|one| f64::from(one.output)));
        let context = input + output / 2.0;
        let step = |batch: usize| self.plan.cost.decode_ms((context * batch as f64) as u64, batch);
        let batch =
            (1..=self.plan.config.max_running).take_while(|&batch| step(batch) <= limit).last();
        let batch = batch.unwrap_or(1);
        let generating = output * step(batch) / 1e3 / batch as f64;
        let (prefill, decode) = (fleet.prefill as f64, fleet.decode as f64);
        match fleet.prefill {
            0 => decode / (reading + generating),
            _ => (prefill / reading).min(decode / generating),
        }
    }
}

/// Sorts by rate, the highest first; among equal rates, the fleet with fewer prefill workers.
fn sorted(mut standings: Vec<FleetResult>) -> Vec<FleetResult> {
    standings.sort_by(|one, other| {
        other.requests_per_s.total_cmp(&one.requests_per_s).then(one.fleet.cmp(&other.fleet))
    });
    standings
}

/// Finds the best fleet and prints the results. Returns whether all runs have finished.
///
/// # Errors
/// The trace cannot be used.
pub fn run(search: &Search) -> Result<bool, ConfigError> {
    heap::map_large_blocks();
    let shown = Shown { is_terminal: io::stderr().is_terminal() };
    let found = search.run_telling(&|words| shown.show(words));
    shown.end();
    let standings = match found? {
        Ok(standings) => standings,
        Err(failure) => {
            say!("{failure}");
            return Ok(false);
        }
    };
    if search.json {
        for standing in &standings {
            say!("{}", serde_json::to_string(standing).expect("a standing has only string keys"));
        }
        return Ok(true);
    }
    say!("{}", heads());
    standings.iter().for_each(|standing| say!("{}", line(standing)));
    say!("{}", search.verdict(&standings[0]));
    Ok(true)
}

/// The progress line, on a terminal.
struct Shown {
    is_terminal: bool,
}

impl Shown {
    fn show(&self, words: &str) {
        if self.is_terminal {
            eprint!("\r{words}\x1b[K");
            // The result does not depend on the progress line.
            let _ = io::stderr().flush();
        }
    }

    fn end(&self) {
        self.show("");
    }
}

fn heads() -> String {
    format!(
        "{:<24} {:>10} {:>8} {:>8} {:>8} {:>7} {:>9} {:>8} {:>8} {:>8}  {}",
        "fleet",
        "requests/s",
        "x load",
        "per GPU",
        "requests",
        "good %",
        "TTFT p50",
        "p99 ms",
        "TPOT p50",
        "p99 ms",
        "busy: prefill, decode"
    )
}

fn line(of: &FleetResult) -> String {
    let (fleet, requests) = (of.fleet.to_string(), of.requests);
    if of.factor == 0.0 {
        // Without a sustained rate the other columns have no meaning.
        return format!("{fleet:<24} {:>10} {:>8} {:>8} {requests:>8}", "none", "-", "-");
    }
    let busy = of.busy.map(|busy| format!("{:.0} %", busy * PERCENT));
    format!(
        "{fleet:<24} {:>10.2} {:>8.2} {:>8.3} {requests:>8} {:>7.1} {:>9.0} {:>8.0} {:>8.1} \
         {:>8.1}  {}",
        of.requests_per_s,
        of.factor,
        of.requests_per_s_per_gpu,
        of.goodput * PERCENT,
        of.ttft_ms.p50,
        of.ttft_ms.p99,
        of.tpot_ms.p50,
        of.tpot_ms.p99,
        busy.join(", ")
    )
}

impl Search {
    fn verdict(&self, best: &FleetResult) -> String {
        let limits = format!(
            "{:.0} ms to the first token and {:.1} ms a token",
            self.plan.objective.ttft as f64 / 1e6,
            self.plan.objective.itl as f64 / 1e6
        );
        if best.factor == 0.0 {
            return format!(
                "no fleet of {} workers serves {:.1} % of requests within {limits}, \
                 even at the lowest rate",
                self.workers,
                self.share * PERCENT
            );
        }
        if !best.is_bounded {
            return format!(
                "best: {}, but {} requests are within {limits} at any rate: try more (--requests)",
                best.fleet, best.requests
            );
        }
        format!(
            "best: {}: {:.2} requests a second, {:.2} times the load, with {:.1} % within {limits}",
            best.fleet,
            best.requests_per_s,
            best.factor,
            best.goodput * PERCENT
        )
    }
}

//! Which fleet sustains the highest rate of a load within its limits: `baton sim place`.
//!
//! A fleet is so many prefill and decode workers, or as many that do both. A rate is sustained where a share of all requests
//! keeps both limits (DistServe, OSDI'24: goodput, found by simulation and bisection). First a closed form of the cost
//! model says what each role could take (as Splitwise, ISCA'24, provisions); from there each fleet is tried with few requests, those between
//! the best ones next, the best with more requests in the end, and those whom few may not do justice. Owns: the search, its table. Everything follows from the
//! seed: fleets are tried side by side on all CPUs, and what is tried next does not depend on who is done first.

mod sample;

use super::super::agenda::SECOND;
use super::arrivals::Arrivals;
use super::cluster::{Cluster, Failure};
use super::plan::{Plan, Traffic};
use super::report::{Spread, Summary};
use crate::config::error::ConfigError;
use crate::config::flags::PlaceFlags;
use crate::config::quantities::value;
use crate::say;
use crate::sys::heap;
use sample::Sample;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Requests for each worker that a fleet is tried with first, and bounds of all of them.
const FEW: (usize, usize, usize) = (100, 500, 4000);
/// The same, of the best ones in the end.
const MANY: (usize, usize, usize) = (500, 2000, 16_384);
/// Drawn requests come for so many times the limit to the first token, at least: at a rate that is not sustained the last ones
/// have waited for as long by then, less what is served meanwhile.
const SPAN: f64 = 10.0;
/// How far apart, as a ratio, are the highest rate that is sustained and the lowest that is not: first and in the end.
const COARSE: f64 = 1.1;
const FINE: f64 = 1.02;
/// Ratio of two rates that are tried before it is known what lies between.
const STRIDE: f64 = 1.4;
/// Rates that are tried of a fleet at most: beyond, nothing that it is asked for is sustained.
const PROBES: usize = 24;
/// Fleets of two roles that are tried first, at most, beside the one of workers that do both.
const GRID: usize = 8;
/// Fleets that are tried with more requests, the best ones.
const FINALISTS: usize = 3;
/// Of percentages.
const PERCENT: f64 = 100.0;

/// How many workers of each role; without prefill workers each of them does both.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Debug)]
pub struct Fleet {
    /// Prefill workers.
    pub prefill: usize,
    /// Decode workers, or workers that do both.
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

/// What a fleet came to.
#[derive(Clone, Serialize, Debug)]
pub struct Standing {
    /// Which.
    pub fleet: Fleet,
    /// The highest rate that it sustained, in requests a second; 0: none that was tried.
    pub requests_per_s: f64,
    /// The same for each GPU.
    pub requests_per_s_per_gpu: f64,
    /// As a multiple of the rate at which the load comes.
    pub factor: f64,
    /// Whether a higher rate was not sustained: so few requests may keep the limits at any.
    pub is_bounded: bool,
    /// Requests that it was tried with.
    pub requests: usize,
    /// At that rate: the share that kept both limits,
    pub goodput: f64,
    /// arrival to the first token,
    pub ttft_ms: Spread,
    /// time by token of the rest,
    pub tpot_ms: Spread,
    /// and how long workers of each role computed of the time.
    pub busy: [f64; 2],
}

/// What is asked.
#[derive(Debug)]
pub struct Search {
    plan: Plan,
    workers: usize,
    gpus_per_worker: u32,
    /// Share of requests that must be good.
    share: f64,
    /// Whether decode workers beside prefill workers read prompts, too.
    reads_alone: bool,
    /// Requests of the last tries.
    most: Option<usize>,
    json: bool,
}

impl Search {
    /// What these flags mean.
    ///
    /// # Errors
    /// The first that means nothing.
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
        let plan = Plan::of(&flags.workload, flags.seed, (0, workers), flags.requests)?;
        let share = flags.goodput / PERCENT;
        Ok(Search {
            plan,
            workers,
            gpus_per_worker: each,
            share,
            reads_alone: flags.workload.local_prefill,
            most: flags.requests.map(|most| most as usize),
            json: flags.json,
        })
    }

    /// Finds the best fleets, best first.
    ///
    /// # Errors
    /// The trace cannot be used, or a run came to no end as it must.
    pub fn run(&self) -> Result<Result<Vec<Standing>, Failure>, ConfigError> {
        self.run_telling(&|_| {})
    }

    /// The same, telling what is under way: a word for each fleet.
    ///
    /// # Errors
    /// As [`Search::run`].
    pub fn run_telling(
        &self,
        tell: &(dyn Fn(&str) + Sync),
    ) -> Result<Result<Vec<Standing>, Failure>, ConfigError> {
        let all = self.plan.arrivals()?;
        if all.span() == 0 {
            let limit = "a rate needs two requests that come one after the other".into();
            return Err(value("--requests", all.list().len(), limit));
        }
        if let Traffic::Drawn(drawn) = &self.plan.traffic {
            // More of them may come than were drawn just now.
            let longest = 2 * (drawn.input + drawn.output) - 2;
            if longest > self.plan.kv_tokens {
                let limit = format!(
                    "a request may have {longest} tokens, and each worker must be able to hold it"
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
    ) -> Result<Vec<Standing>, Failure> {
        let few = self.sample(all, self.count(FEW).min(self.most.unwrap_or(usize::MAX)));
        let many = self.sample(all, self.most.unwrap_or(self.count(MANY)));
        let mut coarse: BTreeMap<Fleet, Standing> = BTreeMap::new();
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
            // What lies on both sides of the best one, half as far away as was looked so far.
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
        // The first requests of a trace find nothing cached. So whom they show to sustain nothing may yet sustain something,
        // and workers that do both, which suffer most from it, may be the best.
        let is_finalist = |(at, one): &(usize, &Standing)| {
            *at < FINALISTS || one.fleet.prefill == 0 || one.factor == 0.0
        };
        let near = |one: &Standing| match one.factor {
            0.0 => self.capacity(one.fleet, all) / many.rate(),
            factor => factor,
        };
        let asked =
            ranked.iter().enumerate().filter(is_finalist).map(|(_, one)| (one.fleet, near(one)));
        let mut best = sorted(self.stand(asked.collect(), &many, FINE, tell)?);
        let is_left = |one: &Standing| best.iter().all(|other| other.fleet != one.fleet);
        let left: Vec<_> = ranked.into_iter().filter(is_left).collect();
        best.extend(left);
        Ok(best)
    }

    /// So many requests of a trace; of drawn ones those that come while the best fleet is thought to serve so many.
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

    /// What each of these sustains, beginning with a rate that is thought to be near.
    fn stand(
        &self,
        asked: Vec<(Fleet, f64)>,
        sample: &Sample,
        within: f64,
        tell: &(dyn Fn(&str) + Sync),
    ) -> Result<Vec<Standing>, Failure> {
        let (next, done) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
        let work = || {
            while let Some(&(fleet, near)) = asked.get(next.fetch_add(1, Ordering::Relaxed)) {
                let found = self.sustained(fleet, sample, near, within);
                let mut done = done.lock().expect("nobody panics with it");
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
        done.into_inner().expect("nobody panics with it").into_values().collect()
    }

    /// The highest rate that a fleet sustains.
    fn sustained(
        &self,
        fleet: Fleet,
        sample: &Sample,
        near: f64,
        within: f64,
    ) -> Result<Standing, Failure> {
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
        Ok(Standing {
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

    fn probe(&self, fleet: Fleet, arrivals: &Arrivals) -> Result<Summary, Failure> {
        let Fleet { prefill, decode } = fleet;
        let plan = Plan {
            prefill,
            decode,
            local_prefill: self.reads_alone || prefill == 0,
            least_good: Some(self.share),
            ..self.plan.clone()
        };
        Cluster::new(&plan, arrivals).run()
    }

    /// What the cost model alone says, in requests a second: the rate at which the busier role is busy all the time, decode with as many
    /// sequences as keep the limit; nothing waits, and no prefix is known.
    fn capacity(&self, fleet: Fleet, arrivals: &Arrivals) -> f64 {
        let (forecast, limit) = (self.plan.forecast(), self.plan.objective.itl as f64 / 1e6);
        let list = arrivals.list();
        let mean = |of: &dyn Fn(&super::arrivals::Arrival) -> f64| {
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

/// The highest rate first; of equals the one with fewer prefill workers.
fn sorted(mut standings: Vec<Standing>) -> Vec<Standing> {
    standings.sort_by(|one, other| {
        other.requests_per_s.total_cmp(&one.requests_per_s).then(one.fleet.cmp(&other.fleet))
    });
    standings
}

/// Finds the best fleet and prints what was found. True when all runs came to their end.
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

/// What is under way, on a terminal.
struct Shown {
    is_terminal: bool,
}

impl Shown {
    fn show(&self, words: &str) {
        if self.is_terminal {
            eprint!("\r{words}\x1b[K");
            // Shown or not, it changes nothing.
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

fn line(of: &Standing) -> String {
    let (fleet, requests) = (of.fleet.to_string(), of.requests);
    if of.factor == 0.0 {
        // There is no rate that the others would be of.
        return format!("{fleet:<24} {:>10} {:>8} {:>8} {requests:>8}", "none", "-", "-");
    }
    let busy = of.busy.map(|busy| format!("{:.0} %", busy * PERCENT));
    format!(
        "{fleet:<24} {:>10.2} {:>8.2} {:>8.3} {requests:>8} {:>7.1} {:>9.0} {:>8.0} {:>8.1} {:>8.1}  {}",
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
    fn verdict(&self, best: &Standing) -> String {
        let limits = format!(
            "{:.0} ms to the first token and {:.1} ms a token",
            self.plan.objective.ttft as f64 / 1e6,
            self.plan.objective.itl as f64 / 1e6
        );
        if best.factor == 0.0 {
            return format!(
                "no fleet of {} workers serves {:.1} % of requests within {limits}, however slowly they come",
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

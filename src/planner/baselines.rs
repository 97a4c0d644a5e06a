//! Comparison with recorded runs of another simulator (`benches/data/baselines`), for the same
//! fleets.
//!
//! Owns: the meaning of a record. The recorded engine has 16,384 blocks of 64 tokens per worker,
//! and passes of at most 8192 tokens. It sends all KV after the last pass, 131,072 bytes per token
//! at 25 GB/s, and takes a decode step before the first token. Ours sends chunks early over shared
//! NICs, and uses the token that prefill sampled; `--engine recorded` follows the record. Remaining
//! differences: decode takes pages before prefill starts, chunks end on pages, decode is chosen at
//! arrival, and a fit replaces the estimator. Runs share all CPUs; large runs take turns.

use super::arrivals::Arrivals;
use super::cluster::LoadCluster;
use super::cost::{self, Cost};
use super::plan::{Baselines, LoadPlan, Traffic};
use super::report::Summary;
use super::trace::{self, File};
use crate::config::error::ConfigError;
use crate::config::{Policies, Policy};
use crate::say;
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};
use std::thread;

/// The polynomials of the replay. Variables: all new tokens of a pass, and the used share of a
/// worker's KV.
const POLYNOMIAL: Cost = Cost {
    prefill: [16.501_42, 1.518_344e-2, 0.0, 4.209_989e-7],
    decode: [5.74, 54.01 / KV_TOKENS as f64, 0.0, -25.74 / (KV_TOKENS as f64 * KV_TOKENS as f64)],
};
/// KV tokens of each worker.
const KV_TOKENS: u32 = 16_384 * 64;
/// Factor for the columns of percentages.
const PERCENT: f64 = 100.0;
/// Maximum number of workers of all concurrent runs, unless one run has more. A worker takes 3 to 5
/// MB.
const WORKERS_AT_ONCE: usize = 1024;

/// One line of the file.
#[derive(Clone, Deserialize, Debug)]
struct Record {
    config: Config,
    summary: RecordedSummary,
}

#[derive(Clone, Deserialize, Debug)]
struct Config {
    name: String,
    trace: String,
    speed: f64,
    cost_model: String,
    router: String,
    agg: usize,
    prefill: usize,
    decode: usize,
}

/// The recorded results that the report prints.
#[derive(Clone, Deserialize, Debug)]
struct RecordedSummary {
    num_requests: usize,
    goodput_completed_requests: usize,
    mean_ttft_ms: f64,
    median_ttft_ms: f64,
    p99_ttft_ms: f64,
    mean_tpot_ms: f64,
    p99_tpot_ms: f64,
    prefix_cache_reused_ratio: f64,
}

/// A fleet under a trace, with all its recorded runs.
#[derive(Debug)]
struct Row {
    records: Vec<Record>,
    plan: LoadPlan,
}

/// Runs the selected fleets and prints the results. Returns whether all runs have finished.
///
/// # Errors
/// The file cannot be read, or is not a file of such records.
pub fn run(plan: &LoadPlan, against: &Baselines) -> Result<bool, ConfigError> {
    let rows = rows(plan, against)?;
    let mut traffics: Vec<(&Traffic, Arrivals)> = Vec::new();
    for row in &rows {
        if traffics.iter().all(|(traffic, _)| **traffic != row.plan.traffic) {
            traffics.push((&row.plan.traffic, row.plan.arrivals()?));
        }
    }
    let arrivals = |row: &Row| {
        let of = traffics.iter().find(|(traffic, _)| **traffic == row.plan.traffic);
        &of.expect("each was read").1
    };
    let jobs: Vec<(usize, Policy)> = (0..rows.len())
        .flat_map(|row| against.policies.iter().map(move |&policy| (row, policy)))
        .collect();
    let (next, done, hall) =
        (AtomicUsize::new(0), Mutex::new(BTreeMap::new()), RunSemaphore::default());
    let work = || {
        while let Some(&(row, policy)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let row = &rows[row];
            let plan = LoadPlan { policies: Policies::from(policy), ..row.plan.clone() };
            let _seats = hall.enter(plan.prefill + plan.decode);
            let ended = LoadCluster::new(&plan, arrivals(row)).run();
            done.lock()
                .expect("no panic while locked")
                .insert((row.name().to_owned(), policy as u8), ended);
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from).min(jobs.len()) {
            scope.spawn(work);
        }
    });
    let done = done.into_inner().expect("no panic while locked");
    let mut is_well = true;
    if !plan.json {
        say!("{}", heads());
    }
    for row in &rows {
        let readers = if row.plan.prefill > 0 { row.plan.prefill } else { row.plan.decode };
        let bound = pooled_reuse(arrivals(row), readers * row.plan.blocks());
        if !plan.json {
            row.records.iter().for_each(|record| say!("{}", record.line(bound)));
        }
        for &policy in &against.policies {
            match &done[&(row.name().to_owned(), policy as u8)] {
                Ok(summary) if plan.json => {
                    let row = serde_json::json!({
                        "name": row.name(), "policy": policy, "summary": summary,
                    });
                    say!("{row}");
                }
                Ok(summary) => say!("{}", line(row, policy, summary)),
                Err(failure) => {
                    is_well = false;
                    say!("{} {policy:?}: {failure}", row.name());
                }
            }
        }
    }
    Ok(is_well)
}

/// Limits the concurrent runs, which share the machine's memory.
#[derive(Default)]
struct RunSemaphore {
    workers: Mutex<usize>,
    left: Condvar,
}

/// A run's share of the limit.
struct RunPermit<'a> {
    hall: &'a RunSemaphore,
    workers: usize,
}

impl RunSemaphore {
    /// Waits until a run of this many workers fits, or no other run is in progress.
    fn enter(&self, workers: usize) -> RunPermit<'_> {
        let here = self.workers.lock().expect("no panic while locked");
        let is_full = |here: &mut usize| *here > 0 && *here + workers > WORKERS_AT_ONCE;
        *self.left.wait_while(here, is_full).expect("no panic while locked") += workers;
        RunPermit { hall: self, workers }
    }
}

impl Drop for RunPermit<'_> {
    fn drop(&mut self) {
        *self.hall.workers.lock().expect("no panic while locked") -= self.workers;
        self.hall.left.notify_all();
    }
}

fn rows(plan: &LoadPlan, against: &Baselines) -> Result<Vec<Row>, ConfigError> {
    let bad = |reason| ConfigError::File { flag: "--against", path: against.path.clone(), reason };
    let lines = trace::lines(&against.path).map_err(|error| bad(error.to_string()))?;
    let mut rows: Vec<Row> = Vec::new();
    for (line, text) in (1..).zip(lines) {
        let here = |reason: String| bad(format!("line {line}: {reason}"));
        let text = text.map_err(|error| here(error.to_string()))?;
        let record: Record =
            serde_json::from_str(&text).map_err(|error| here(error.to_string()))?;
        if !against.rows.is_empty() && !against.rows.contains(&record.config.name) {
            continue;
        }
        match rows.iter_mut().find(|row| row.name() == record.config.name) {
            Some(row) => row.records.push(record),
            None => {
                let plan = record.config.plan(plan, against).map_err(here)?;
                rows.push(Row { records: vec![record], plan });
            }
        }
    }
    match rows.is_empty() {
        true => Err(bad("none of its runs has such a name".into())),
        false => Ok(rows),
    }
}

impl Row {
    fn name(&self) -> &str {
        &self.records[0].config.name
    }
}

impl Config {
    /// The plan for the recorded fleet. Values that the record does not have come from `plan`.
    fn plan(&self, plan: &LoadPlan, against: &Baselines) -> Result<LoadPlan, String> {
        let file = match &self.trace[..] {
            "conv" => "conversation_trace.jsonl.zst",
            "syn" => "synthetic_trace.jsonl.zst",
            other => return Err(format!("trace {other}: conv or syn")),
        };
        let cost = match &self.cost_model[..] {
            "polynomial" => POLYNOMIAL,
            "ais Qwen3-32B-FP8 h200_sxm vllm TP2" => cost::DEFAULT,
            other => return Err(format!("cost_model {other} is not known")),
        };
        if (self.agg == 0) == (self.prefill + self.decode == 0)
            || (self.prefill == 0) != (self.decode == 0)
        {
            return Err("a fleet is aggregated, or of prefill and decode workers".into());
        }
        let beside = against.path.parent().unwrap_or(Path::new("")).join("../mooncake").join(file);
        Ok(LoadPlan {
            prefill: self.prefill,
            decode: self.agg + self.decode,
            local_prefill: plan.local_prefill || self.agg > 0,
            traffic: Traffic::File(File {
                path: beside,
                most: against.most,
                speed: self.speed,
                jitter: 0,
            }),
            cost,
            kv_tokens: KV_TOKENS,
            ..plan.clone()
        }
        .with_page_size(64))
    }
}

/// Share of all prompt tokens found in one shared LRU cache of `blocks` blocks, with requests in
/// order of arrival.
fn pooled_reuse(arrivals: &Arrivals, blocks: usize) -> f64 {
    let mut used: HashMap<u64, u64> = HashMap::new();
    let mut order: BTreeMap<u64, u64> = BTreeMap::new();
    let (mut clock, mut had, mut all) = (0_u64, 0_u64, 0_u64);
    for index in 0..arrivals.list().len() {
        let work = arrivals.work(index);
        let known = work.blocks.iter().take_while(|block| used.contains_key(block)).count() as u32;
        all += u64::from(work.tokens);
        had += u64::from(work.tokens - work.missing(known));
        for &block in work.blocks.iter().rev() {
            clock += 1;
            if let Some(before) = used.insert(block, clock) {
                order.remove(&before);
            }
            order.insert(clock, block);
        }
        while used.len() > blocks
            && let Some((_, block)) = order.pop_first()
        {
            used.remove(&block);
        }
    }
    had as f64 / all.max(1) as f64
}

fn heads() -> String {
    format!(
        "{:<14} {:<14} {:>7} {:>8} {:>8} {:>8} {:>7} {:>7} {:>6} {:>6} {:>6} {:>8}  {}",
        "run",
        "router",
        "good %",
        "TTFT",
        "p50",
        "p99 ms",
        "TPOT",
        "p99 ms",
        "reuse",
        "LRU",
        "429",
        "wasted",
        "good % at 0.5, 0.75, 1.5, 2, 2.5 times the limits"
    )
}

impl Record {
    fn line(&self, bound: f64) -> String {
        let Config { name, router, .. } = &self.config;
        let theirs = &self.summary;
        let good = theirs.goodput_completed_requests as f64 / theirs.num_requests as f64 * PERCENT;
        format!(
            "{name:<14} {:<14} {good:>7.1} {:>8.1} {:>8.1} {:>8.1} {:>7.2} {:>7.2} {:>6.3} \
             {bound:>6.3}",
            format!("({router})"),
            theirs.mean_ttft_ms,
            theirs.median_ttft_ms,
            theirs.p99_ttft_ms,
            theirs.mean_tpot_ms,
            theirs.p99_tpot_ms,
            theirs.prefix_cache_reused_ratio,
        )
    }
}

fn line(row: &Row, policy: Policy, ours: &Summary) -> String {
    let scaled = ours.goodput_at.iter().filter(|(scale, _)| *scale != 1.0);
    let scaled: Vec<String> = scaled.map(|(_, good)| format!("{:.1}", good * PERCENT)).collect();
    format!(
        "{:<14} {:<14} {:>7.1} {:>8.1} {:>8.1} {:>8.1} {:>7.2} {:>7.2} {:>6.3} {:>6} {:>6} \
         {:>8}  {}",
        row.name(),
        serde_json::to_value(policy)
            .ok()
            .and_then(|name| name.as_str().map(str::to_owned))
            .unwrap_or_default(),
        ours.goodput * PERCENT,
        ours.ttft_ms.mean,
        ours.ttft_ms.p50,
        ours.ttft_ms.p99,
        ours.tpot_ms.mean,
        ours.tpot_ms.p99,
        ours.prefix_reuse,
        "",
        ours.requests - ours.completed,
        ours.wasted_tokens,
        scaled.join(", "),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::arrivals::RequestArrival;
    use crate::stdx::rng::Rng;
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn large_runs_come_one_at_a_time() {
        let hall = RunSemaphore::default();
        drop(hall.enter(2 * WORKERS_AT_ONCE));
        // Small runs fit together.
        let small = [(); 2].map(|()| hall.enter(WORKERS_AT_ONCE / 2));
        let (comes, about_to) = mpsc::channel();
        let is_alone = AtomicBool::new(false);
        thread::scope(|scope| {
            let (hall, is_alone) = (&hall, &is_alone);
            let large = scope.spawn(move || {
                comes.send(()).unwrap();
                let _seats = hall.enter(WORKERS_AT_ONCE);
                is_alone.load(Ordering::SeqCst)
            });
            about_to.recv().unwrap();
            let [one, other] = small;
            drop(one);
            thread::sleep(Duration::from_millis(20));
            is_alone.store(true, Ordering::SeqCst);
            drop(other);
            assert!(large.join().unwrap(), "it came in beside another");
        });
        assert_eq!(*hall.workers.lock().unwrap(), 0);
    }

    #[test]
    fn one_cache_keeps_the_blocks_that_were_used_last() {
        let prompt = |blocks: &[u64]| RequestArrival {
            at: 0,
            input: 512 * blocks.len() as u32,
            output: 1,
            priority: 0,
            blocks: blocks.into(),
        };
        let reuse = |prompts: &[&[u64]], blocks| {
            let list = prompts.iter().map(|blocks| prompt(blocks)).collect();
            pooled_reuse(&Arrivals::new(list, &mut Rng::new(1)), blocks)
        };
        assert_eq!(reuse(&[&[1, 2], &[1, 3], &[1, 2, 4, 5]], 9), 3.0 / 8.0);
        assert_eq!(reuse(&[&[1, 2], &[1, 3], &[1, 2, 4, 5]], 2), 2.0 / 8.0, "2 was out, 1 was not");
    }
}

//! What `/metrics` and `/v1/loads` say: counters kept by `ctl`, figures published by engines.
//!
//! Thread: `ctl`. Figures of an engine are looked at when somebody asks, never waited for.

use crate::front::openai::info::Load;
use crate::front::shortage::Shortage;
use crate::obs::metrics::{Depths, EngineType, PageCounts, WorkerMetrics};
use crate::obs::registry::Registry;
use crate::sched::stats::WorkerStats;
use crate::transfer::tally::Tally;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

/// One worker's figures.
#[derive(Debug)]
pub struct Watched {
    /// Its role.
    pub role: EngineType,
    /// Counters of `ctl`.
    pub metrics: Arc<WorkerMetrics>,
    /// Figures of its engine.
    pub stats: Arc<WorkerStats>,
    /// What its transfers took.
    pub tally: Arc<Tally>,
    /// Tokens of one page.
    pub page_size: u32,
}

/// All figures of the process.
#[derive(Debug)]
pub struct Telemetry {
    registry: Registry,
    workers: Vec<Watched>,
    /// Of each of them.
    shortages: Vec<Shortage>,
}

impl Telemetry {
    /// Over these workers.
    pub fn new(registry: Registry, workers: Vec<Watched>) -> Telemetry {
        let shortages = workers.iter().map(|_| Shortage::default()).collect();
        Telemetry { registry, workers, shortages }
    }

    /// Says in the log what operators should not have to look for.
    pub fn tell(&mut self, now: Instant) {
        for (index, (shortage, worker)) in self.shortages.iter_mut().zip(&self.workers).enumerate()
        {
            shortage.look(index, &worker.stats, now);
        }
    }

    /// Prometheus text.
    pub fn exposition(&self) -> String {
        for worker in &self.workers {
            worker.refresh();
        }
        let mut out = String::new();
        self.registry.expose(&mut out);
        out
    }

    /// The sum over workers, as one data-parallel rank.
    pub fn load(&self, max_running: usize) -> Load<'_> {
        let sum = |figure: fn(&WorkerStats) -> &AtomicU32| -> u32 {
            self.workers.iter().map(|worker| get(figure(&worker.stats))).sum()
        };
        let (mut used, mut total) = (0, 0);
        for worker in &self.workers {
            let pages = worker.stats.pages();
            let tokens = |pages: u32| u64::from(pages) * u64::from(worker.page_size);
            used += tokens(pages.in_use + pages.leased);
            total += tokens(pages.total());
        }
        let running = sum(|stats| &stats.running);
        let waiting = sum(|stats| &stats.waiting) + sum(|stats| &stats.bootstrapping);
        let waiting = waiting + sum(|stats| &stats.retracted);
        let moving = sum(|stats| &stats.transferring) + sum(|stats| &stats.arrived);
        let uncached = self
            .workers
            .iter()
            .map(|worker| worker.stats.waiting_tokens.load(Ordering::Relaxed))
            .sum();
        let (mut asked, mut found) = (0, 0);
        // Of those that compute prompts.
        for worker in self.workers.iter().filter(|worker| worker.role != EngineType::Decode) {
            asked += worker.stats.prefix_asked_total.load(Ordering::Relaxed);
            found += worker.stats.prefix_found_total.load(Ordering::Relaxed);
        }
        Load {
            num_running_reqs: running,
            num_waiting_reqs: waiting + moving,
            num_waiting_uncached_tokens: uncached,
            num_total_reqs: running + waiting + moving,
            num_used_tokens: used,
            max_total_num_tokens: total,
            cache_hit_rate: found as f64 / asked.max(1) as f64,
            token_usage: used as f64 / total.max(1) as f64,
            utilization: f64::from(running) / max_running.max(1) as f64,
            max_running_requests: max_running as u32,
            prefill_queue_reqs: self.queued(EngineType::Prefill),
            decode_queue_reqs: self.queued(EngineType::Decode),
            ..Load::default()
        }
    }

    fn queued(&self, role: EngineType) -> u32 {
        let of_role = self.workers.iter().filter(|worker| worker.role == role);
        of_role.map(|worker| get(&worker.stats.bootstrapping) + get(&worker.stats.waiting)).sum()
    }
}

impl Watched {
    fn refresh(&self) {
        let stats = &*self.stats;
        let count = |figure: &AtomicU32| get(figure) as usize;
        let (running, retracted) = (count(&stats.running), count(&stats.retracted));
        let mut depths = Depths { running, retracted, ..Depths::default() };
        match self.role {
            EngineType::Prefill => {
                depths.bootstrap = count(&stats.bootstrapping);
                depths.queued = count(&stats.waiting);
                depths.inflight = count(&stats.transferring);
            }
            EngineType::Decode => {
                depths.prealloc = count(&stats.bootstrapping) + count(&stats.waiting);
                depths.transfer = count(&stats.transferring);
                depths.queued = count(&stats.arrived);
            }
            EngineType::Unified => depths.queued = count(&stats.waiting),
        }
        self.metrics.set_depths(depths);
        let pages = stats.pages();
        self.metrics.set_pages(PageCounts {
            free: pages.free as usize,
            cached: pages.cached as usize,
            in_use: pages.in_use as usize,
            leased: pages.leased as usize,
        });
        self.metrics.set_tally(&self.tally);
        let total = |figure: &AtomicU64| figure.load(Ordering::Relaxed);
        let (computed, found) =
            (total(&stats.prompt_tokens_total), total(&stats.prefix_found_total));
        // What decode found of a prompt that prefill has read, prefill has counted.
        let had =
            if self.role == EngineType::Decode { total(&stats.prompt_cached_total) } else { found };
        self.metrics.prompt_tokens.raise_to(computed + had);
        self.metrics.prefix_asked.raise_to(total(&stats.prefix_asked_total));
        self.metrics.prefix_found.raise_to(found);
        self.metrics.generation_tokens.raise_to(total(&stats.generated_tokens_total));
        self.metrics.swapped.set(get(&stats.swapped).into());
        self.metrics.retractions.raise_to(total(&stats.retracted_total));
        self.metrics.recomputed.raise_to(total(&stats.recomputed_tokens_total));
    }
}

fn get(figure: &AtomicU32) -> u32 {
    figure.load(Ordering::Relaxed)
}

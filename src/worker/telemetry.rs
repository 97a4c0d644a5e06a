//! Data for `/metrics` and `/v1/loads`: counters of `ctl`, and figures that engines publish.
//!
//! Thread: `ctl`. It reads the figures of an engine on demand, without waiting.

use crate::api::info::Load;
use crate::ids::Role;
use crate::kv::groups::GroupCounts;
use crate::obs::instruments::{Counter, Labels};
use crate::obs::registry::Registry;
use crate::sched::stats::WorkerStats;
use crate::server::key_limits::KeyRefusals;
use crate::transfer::counters::Counters;
use crate::worker::metrics::{Depths, WorkerMetrics};
use crate::worker::shortage::ShortageLog;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

/// The figures of one worker.
#[derive(Debug)]
pub struct WorkerTelemetry {
    /// Its role.
    pub role: Role,
    /// Counters of `ctl`.
    pub metrics: Arc<WorkerMetrics>,
    /// Figures of its engine.
    pub stats: Arc<WorkerStats>,
    /// Counters of its transfers.
    pub tally: Arc<Counters>,
    /// Tokens of one page.
    pub page_size: u32,
    /// Groups of layers. A token takes place on a page of each.
    pub groups: GroupCounts,
    /// Most tokens of a sequence.
    pub context: u32,
}

/// All figures of the process.
#[derive(Debug)]
pub struct Telemetry {
    registry: Registry,
    ignored_fields: Arc<Counter>,
    key_refusals: KeyRefusals,
    workers: Vec<WorkerTelemetry>,
    /// One for each worker.
    shortages: Vec<ShortageLog>,
}

impl Telemetry {
    /// Figures of these workers.
    pub fn new(mut registry: Registry, workers: Vec<WorkerTelemetry>) -> Telemetry {
        let shortages = workers.iter().map(|_| ShortageLog::default()).collect();
        let ignored_fields = registry.counter(
            &["baton_ignored_fields_total"],
            "Fields of requests that no interface has, such as misspelt names.",
            &Labels::none(),
        );
        let key_refusals = KeyRefusals::register(&mut registry);
        Telemetry { registry, ignored_fields, key_refusals, workers, shortages }
    }

    /// Counters of requests that limits of API keys have refused.
    pub fn key_refusals(&self) -> &KeyRefusals {
        &self.key_refusals
    }

    /// Counts fields of a request that were ignored.
    pub fn count_ignored_fields(&self, count: usize) {
        self.ignored_fields.add(count as u64);
    }

    /// Whether no worker holds anything of a request.
    ///
    /// # Errors
    /// The first worker that does, and what it holds.
    pub fn check_idle(&self) -> Result<(), String> {
        let is_empty = |(index, worker): (usize, &WorkerTelemetry)| {
            worker.stats.check_idle().map_err(|held| format!("worker {index}: {held}"))
        };
        self.workers.iter().enumerate().try_for_each(is_empty)
    }

    /// Logs events that the counters show.
    pub fn log_shortages(&mut self, now: Instant) {
        for (index, (shortage, worker)) in self.shortages.iter_mut().zip(&self.workers).enumerate()
        {
            shortage.log_new(index, &worker.stats, now);
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
            let (page_size, context) = (worker.page_size, worker.context);
            let tokens = |pages: u32| worker.groups.pool_tokens(pages, page_size, context);
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
        // Only workers that compute prompts.
        for worker in self.workers.iter().filter(|worker| worker.role != Role::Decode) {
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
            prefill_queue_reqs: self.queued(Role::Prefill),
            decode_queue_reqs: self.queued(Role::Decode),
            ..Load::default()
        }
    }

    fn queued(&self, role: Role) -> u32 {
        let of_role = self.workers.iter().filter(|worker| worker.role == role);
        of_role.map(|worker| get(&worker.stats.bootstrapping) + get(&worker.stats.waiting)).sum()
    }
}

impl WorkerTelemetry {
    fn refresh(&self) {
        let stats = &*self.stats;
        let count = |figure: &AtomicU32| get(figure) as usize;
        let (running, retracted) = (count(&stats.running), count(&stats.retracted));
        let mut depths = Depths { running, retracted, ..Depths::default() };
        match self.role {
            Role::Prefill => {
                depths.bootstrap = count(&stats.bootstrapping);
                depths.queued = count(&stats.waiting);
                depths.inflight = count(&stats.transferring);
            }
            Role::Decode => {
                depths.prealloc = count(&stats.bootstrapping) + count(&stats.waiting);
                depths.transfer = count(&stats.transferring);
                depths.queued = count(&stats.arrived);
            }
            Role::Mixed => depths.queued = count(&stats.waiting),
        }
        self.metrics.set_depths(depths);
        self.metrics.set_pages(stats.pages());
        self.metrics.set_tally(&self.tally);
        let total = |figure: &AtomicU64| figure.load(Ordering::Relaxed);
        let (computed, found) =
            (total(&stats.prompt_tokens_total), total(&stats.prefix_found_total));
        // Prefill counts the cache hits of prompts that it computed, so decode must not.
        let had = if self.role == Role::Decode { total(&stats.prompt_cached_total) } else { found };
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

//! The metrics of a worker and of the router. Names are the field's where the meaning is the same, so
//! that its dashboards work; what is only ours begins with `baton_`.
//!
//! Thread: made at start by `role`; recorded by any thread, [`WorkerMetrics::set_pages`] by the worker's
//! engine alone.

use super::registry::{Counter, Gauge, GaugeGroup, Histogram, Labels, Registry};
use crate::cause::Cause;
use crate::transfer::manager::choice::Choice;
use crate::transfer::tally::Tally;
use std::sync::Arc;
use std::time::Duration;

/// 1 ms to 300 s.
const TTFT_SECONDS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0, 160.0, 300.0,
];
/// 5 ms to 2.5 s.
const ITL_SECONDS: &[f64] =
    &[0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5];
/// 100 ms to an hour.
const E2E_SECONDS: &[f64] = &[
    0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 900.0,
    3600.0,
];
/// 100 µs, a hand-over through shared memory, to the longest time to a first token.
const STAGE_SECONDS: &[f64] = &[
    0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
    40.0, 300.0,
];
/// SGLang's, and shorter ones for shared memory.
const TRANSFER_MS: &[f64] =
    &[0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0];
/// SGLang's.
const TRANSFER_GB_S: &[f64] = &[0.1, 0.5, 1.0, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0, 400.0];
const TRANSFER_MB: &[f64] =
    &[0.1, 0.5, 1.0, 5.0, 10.0, 50.0, 100.0, 500.0, 1000.0, 5000.0, 10000.0];

/// Role of a worker, under the names of SGLang's label `engine_type`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EngineType {
    /// Prefill and decode.
    Unified,
    /// Prefill.
    Prefill,
    /// Decode.
    Decode,
}

impl EngineType {
    const fn label(self) -> &'static str {
        match self {
            EngineType::Unified => "unified",
            EngineType::Prefill => "prefill",
            EngineType::Decode => "decode",
        }
    }
}

/// How many requests of a worker are where. Each is in one place.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Depths {
    /// In the batch that is stepped.
    pub running: usize,
    /// Waiting to be stepped, with nothing else to wait for.
    pub queued: usize,
    /// Prefill: waiting for their Destination.
    pub bootstrap: usize,
    /// Prefill: computed, KV under way.
    pub inflight: usize,
    /// Decode: waiting for pages.
    pub prealloc: usize,
    /// Decode: waiting for KV.
    pub transfer: usize,
    /// Waiting for pages again that they gave up.
    pub retracted: usize,
}

/// How many pages of a worker's pool are in which state. The sum is the pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PageCounts {
    /// Nobody's.
    pub free: usize,
    /// Nobody's, but still of use.
    pub cached: usize,
    /// A request's.
    pub in_use: usize,
    /// A transfer's.
    pub leased: usize,
}

/// Where the time to a first token went. Stages follow each other without gap.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stages {
    /// Waiting for a turn, on whichever worker.
    pub queue: Duration,
    /// Waiting for the other worker: session, pages, Destination.
    pub bootstrap: Duration,
    /// Computing the prompt.
    pub prefill: Duration,
    /// From the last layer of the prompt to all KV at the destination.
    pub handover: Duration,
    /// From there to a place in the running batch.
    pub join: Duration,
    /// From there to the first token on its way to the client.
    pub first_step: Duration,
}

impl Stages {
    const NAMES: [&str; 6] = ["queue", "bootstrap", "prefill", "handover", "join", "first_step"];

    fn durations(&self) -> [Duration; 6] {
        [self.queue, self.bootstrap, self.prefill, self.handover, self.join, self.first_step]
    }

    /// Time to the first token.
    pub fn total(&self) -> Duration {
        self.durations().iter().sum()
    }
}

/// What one worker counts.
#[derive(Debug)]
pub struct WorkerMetrics {
    running: Arc<Gauge>,
    queued: Arc<Gauge>,
    waiting: Arc<Gauge>,
    bootstrap: Arc<Gauge>,
    inflight: Arc<Gauge>,
    prealloc: Arc<Gauge>,
    transfer: Arc<Gauge>,
    retracted: Arc<Gauge>,
    /// Pages of the host tier that hold KV.
    pub swapped: Arc<Gauge>,
    /// Times that a running request gave its pages up.
    pub retractions: Arc<Counter>,
    /// Tokens whose KV was dropped for that and computed again.
    pub recomputed: Arc<Counter>,
    pages: Arc<GaugeGroup<4>>,
    token_usage: Arc<Gauge>,
    /// Prompt tokens, computed or found in the prefix cache.
    pub prompt_tokens: Arc<Counter>,
    /// Prompt tokens that the prefix cache was asked for.
    pub prefix_asked: Arc<Counter>,
    /// Those that it had.
    pub prefix_found: Arc<Counter>,
    /// Tokens generated.
    pub generation_tokens: Arc<Counter>,
    /// Requests that ended at a stop token or stop string.
    pub finished_stop: Arc<Counter>,
    /// Requests that ended at their length; on prefill those handed over.
    pub finished_length: Arc<Counter>,
    failures: [Arc<Counter>; Cause::ALL.len()],
    sessions: [Arc<Counter>; Choice::ALL.len()],
    work_requests: Arc<Counter>,
    doorbells: Arc<Counter>,
    /// Requests that failed before their KV began to move.
    pub bootstrap_failures: Arc<Counter>,
    /// Requests that failed while their KV moved.
    pub transfer_failures: Arc<Counter>,
    kv_bytes: Arc<Counter>,
    kv_latency_ms: Arc<Histogram>,
    kv_speed_gb_s: Arc<Histogram>,
    kv_total_mb: Arc<Histogram>,
    stages: [Arc<Histogram>; 6],
    ttft: Arc<Histogram>,
    itl: Arc<Histogram>,
    e2e: Arc<Histogram>,
}

impl WorkerMetrics {
    /// Registers the metrics of a worker: its model, role, and number in this process.
    pub fn register(
        registry: &mut Registry,
        model: &str,
        engine: EngineType,
        worker: usize,
    ) -> WorkerMetrics {
        let labels = Labels::none()
            .and("model_name", model)
            .and("engine_type", engine.label())
            .and("worker", &worker.to_string());
        let success = (["vllm:request_success_total"], "Requests that succeeded.");
        let (r, l) = (registry, &labels);
        WorkerMetrics {
            running: r.gauge(
                &["sglang:num_running_reqs", "vllm:num_requests_running"],
                "Requests stepped.",
                l,
            ),
            queued: r.gauge(&["sglang:num_queue_reqs"], "Requests waiting for a turn.", l),
            waiting: r.gauge(&["vllm:num_requests_waiting"], "Requests not stepped, for whatever reason.", l),
            bootstrap: r.gauge(
                &["sglang:num_prefill_bootstrap_queue_reqs"],
                "Prefill: requests waiting for a destination.",
                l,
            ),
            inflight: r.gauge(
                &["sglang:num_prefill_inflight_queue_reqs"],
                "Prefill: requests whose KV is under way.",
                l,
            ),
            prealloc: r.gauge(
                &["sglang:num_decode_prealloc_queue_reqs"],
                "Decode: requests waiting for pages.",
                l,
            ),
            transfer: r.gauge(
                &["sglang:num_decode_transfer_queue_reqs"],
                "Decode: requests waiting for KV.",
                l,
            ),
            retracted: r.gauge(
                &["sglang:num_retracted_reqs"],
                "Requests that ran, gave up their pages to others, and wait for new ones.",
                l,
            ),
            swapped: r.gauge(&["baton_swapped_pages"], "Pages of KV kept for those in --swap-memory.", l),
            retractions: r.counter(
                &["vllm:num_preemptions_total"],
                "Times that a running request gave its pages up.",
                l,
            ),
            recomputed: r.counter(
                &["baton_recomputed_tokens_total"],
                "Tokens whose KV was dropped when pages were given up, and computed again.",
                l,
            ),
            pages: r.states(
                &["baton_pages"],
                "Pages of the KV pool by state.",
                l,
                &["free", "cached", "in_use", "leased"],
            ),
            token_usage: r.gauge(
                &["sglang:token_usage", "vllm:kv_cache_usage_perc"],
                "Part of the KV pool that is in use or leased, 0 to 1.",
                l,
            ),
            prompt_tokens: r.counter(
                &["sglang:prompt_tokens_total", "vllm:prompt_tokens_total"],
                "Prompt tokens.",
                l,
            ),
            prefix_asked: r.counter(
                &["vllm:prefix_cache_queries_total"],
                "Prompt tokens that the prefix cache was asked for.",
                l,
            ),
            prefix_found: r.counter(
                &["vllm:prefix_cache_hits_total", "sglang:cached_tokens_total"],
                "Prompt tokens that the prefix cache had: not computed, and not sent where decode had them.",
                l,
            ),
            generation_tokens: r.counter(
                &["sglang:generation_tokens_total", "vllm:generation_tokens_total"],
                "Tokens generated.",
                l,
            ),
            finished_stop: r.counter(&success.0, success.1, &l.and("finished_reason", "stop")),
            finished_length: r.counter(&success.0, success.1, &l.and("finished_reason", "length")),
            failures: std::array::from_fn(|index| {
                let labels = l.and("cause", Cause::ALL[index].name());
                r.counter(&["baton_request_failures_total"], "Requests that failed, by cause.", &labels)
            }),
            bootstrap_failures: r.counter(
                &["sglang:num_bootstrap_failed_reqs_total"],
                "Requests that failed before their KV began to move.",
                l,
            ),
            transfer_failures: r.counter(
                &["sglang:num_transfer_failed_reqs_total"],
                "Requests that failed while their KV moved.",
                l,
            ),
            sessions: std::array::from_fn(|index| {
                let Choice { transport, why } = Choice::ALL[index];
                let labels = l.and("transport", transport.name()).and("why", why.name());
                r.counter(
                    &["baton_sessions_total"],
                    "Sessions begun with other workers, by transport and why no better one.",
                    &labels,
                )
            }),
            work_requests: r.counter(
                &["baton_transfer_work_requests_total"],
                "Pieces that KV moved in: copies of shm, frames of tcp, work requests of rdma.",
                l,
            ),
            doorbells: r.counter(
                &["baton_transfer_doorbells_total"],
                "Wake-ups of shm, system calls of tcp, doorbells of rdma.",
                l,
            ),
            kv_bytes: r.counter(&["baton_kv_transfer_bytes_total"], "KV bytes handed over.", l),
            kv_latency_ms: r.histogram(
                &["sglang:kv_transfer_latency_ms"],
                "Time of a request's KV transfer in ms.",
                l,
                TRANSFER_MS,
            ),
            kv_speed_gb_s: r.histogram(
                &["sglang:kv_transfer_speed_gb_s"],
                "Speed of a request's KV transfer in GB/s.",
                l,
                TRANSFER_GB_S,
            ),
            kv_total_mb: r.histogram(
                &["sglang:kv_transfer_total_mb"],
                "Size of a request's KV transfer in MiB.",
                l,
                TRANSFER_MB,
            ),
            stages: Stages::NAMES.map(|stage| {
                let help = "Stages of the time to the first token; their sum is it.";
                r.histogram(&["baton_stage_seconds"], help, &l.and("stage", stage), STAGE_SECONDS)
            }),
            ttft: r.histogram(
                &["sglang:time_to_first_token_seconds", "vllm:time_to_first_token_seconds"],
                "From the request's arrival to its first token.",
                l,
                TTFT_SECONDS,
            ),
            itl: r.histogram(
                &["sglang:inter_token_latency_seconds", "vllm:inter_token_latency_seconds"],
                "Between two tokens of a request.",
                l,
                ITL_SECONDS,
            ),
            e2e: r.histogram(
                &["sglang:e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds"],
                "From the request's arrival to its end.",
                l,
                E2E_SECONDS,
            ),
        }
    }

    /// Sets where requests are.
    pub fn set_depths(&self, depths: Depths) {
        let Depths { running, queued, bootstrap, inflight, prealloc, transfer, retracted } = depths;
        let waiting = queued + bootstrap + inflight + prealloc + transfer + retracted;
        for (gauge, count) in [
            (&self.running, running),
            (&self.queued, queued),
            (&self.waiting, waiting),
            (&self.bootstrap, bootstrap),
            (&self.inflight, inflight),
            (&self.prealloc, prealloc),
            (&self.transfer, transfer),
            (&self.retracted, retracted),
        ] {
            gauge.set(count as f64);
        }
    }

    /// Sets how many pages are in which state. A reader never sees parts of two such sets.
    pub fn set_pages(&self, counts: PageCounts) {
        let PageCounts { free, cached, in_use, leased } = counts;
        self.pages.set([free, cached, in_use, leased].map(|count| count as u64));
        let (taken, total) = (in_use + leased, free + cached + in_use + leased);
        self.token_usage.set(taken as f64 / total.max(1) as f64);
    }

    /// Takes over what transfers took so far.
    pub fn set_tally(&self, tally: &Tally) {
        for (counter, count) in self.sessions.iter().zip(tally.sessions()) {
            counter.raise_to(count);
        }
        let counts = tally.counts();
        self.work_requests.raise_to(counts.work_requests);
        self.doorbells.raise_to(counts.doorbells);
    }

    /// A request failed.
    pub fn failed(&self, cause: Cause) {
        self.failures[place(cause)].inc();
    }

    /// The KV of a request has been handed over.
    pub fn transferred(&self, bytes: u64, time: Duration) {
        self.kv_bytes.add(bytes);
        self.kv_total_mb.observe(bytes as f64 / (1 << 20) as f64);
        self.kv_latency_ms.observe(time.as_secs_f64() * 1e3);
        if !time.is_zero() {
            self.kv_speed_gb_s.observe(bytes as f64 / 1e9 / time.as_secs_f64());
        }
    }

    /// The first token of a request is on its way to the client. Its time to first token is the sum of
    /// the stages, so the histograms agree by construction.
    pub fn first_token(&self, stages: &Stages) {
        for (histogram, time) in self.stages.iter().zip(stages.durations()) {
            histogram.observe(time.as_secs_f64());
        }
        self.ttft.observe(stages.total().as_secs_f64());
    }

    /// A further token, so long after the one before.
    pub fn next_token(&self, since_last: Duration) {
        self.itl.observe(since_last.as_secs_f64());
    }

    /// A request has ended well, so long after its arrival.
    pub fn ended(&self, since_arrival: Duration) {
        self.e2e.observe(since_arrival.as_secs_f64());
    }
}

/// What the router counts, under the names of SGLang's gateway.
#[derive(Debug)]
pub struct RouterMetrics {
    /// Requests taken.
    pub requests: Arc<Counter>,
    failures: [Arc<Counter>; Cause::ALL.len()],
    retries: [Arc<Counter>; Cause::ALL.len()],
    /// Streams that went on at other workers.
    pub resumed: Arc<Counter>,
    ttft: Arc<Histogram>,
    duration: Arc<Histogram>,
}

impl RouterMetrics {
    /// Registers the metrics of a router; those of its workers follow them ([`RoutedMetrics`]).
    pub fn register(registry: &mut Registry) -> RouterMetrics {
        let (r, l) = (registry, &Labels::none());
        RouterMetrics {
            requests: r.counter(&["smg_router_requests_total"], "Requests taken.", l),
            failures: std::array::from_fn(|index| {
                let labels = l.and("error_type", Cause::ALL[index].name());
                r.counter(
                    &["smg_router_request_errors_total"],
                    "Requests that failed, by cause.",
                    &labels,
                )
            }),
            retries: std::array::from_fn(|index| {
                let labels = l.and("error_type", Cause::ALL[index].name());
                let help =
                    "Requests sent to another pair of workers, by what the last one failed of.";
                r.counter(&["baton_router_retries_total"], help, &labels)
            }),
            resumed: r.counter(
                &["baton_router_resumed_total"],
                "Streams that went on at other workers when theirs failed.",
                l,
            ),
            ttft: r.histogram(
                &["smg_router_ttft_seconds", "smg_pd_ttft_seconds"],
                "Streams: from a request's arrival to the first byte of its answer.",
                l,
                TTFT_SECONDS,
            ),
            duration: r.histogram(
                &["smg_router_request_duration_seconds"],
                "From a request's arrival to the end of its answer.",
                l,
                E2E_SECONDS,
            ),
        }
    }

    /// A request failed.
    pub fn failed(&self, cause: Cause) {
        self.failures[place(cause)].inc();
    }

    /// A request is sent again.
    pub fn retried(&self, cause: Cause) {
        self.retries[place(cause)].inc();
    }

    /// The first byte of a stream has left, so long after the request's arrival.
    pub fn first_byte(&self, since_arrival: Duration) {
        self.ttft.observe(since_arrival.as_secs_f64());
    }

    /// An answer has ended.
    pub fn ended(&self, since_arrival: Duration) {
        self.duration.observe(since_arrival.as_secs_f64());
    }
}

/// What a router tells of one of its workers, while it is there.
#[derive(Debug)]
pub struct RoutedMetrics {
    labels: Labels,
    health: Arc<Gauge>,
    active: Arc<Gauge>,
}

impl RoutedMetrics {
    /// Registers the metrics of the worker at `url`, of which there is one in this role.
    pub fn register(registry: &mut Registry, role: EngineType, url: &str) -> RoutedMetrics {
        let labels = Labels::none().and("worker_type", role.label()).and("worker", url);
        let health = "Whether the worker answers: 1, else 0.";
        let active = "Requests at the worker.";
        RoutedMetrics {
            health: registry.gauge(&["smg_worker_health"], health, &labels),
            active: registry.gauge(&["smg_worker_requests_active"], active, &labels),
            labels,
        }
    }

    /// Takes them off the list.
    pub fn unlist(self, registry: &mut Registry) {
        registry.unlist(&self.labels);
    }

    /// What is known of the worker.
    pub fn set(&self, is_healthy: bool, active: usize) {
        self.health.set(f64::from(u8::from(is_healthy)));
        self.active.set(active as f64);
    }
}

fn place(cause: Cause) -> usize {
    Cause::ALL.iter().position(|&known| known == cause).expect("ALL holds all causes")
}

#[cfg(test)]
mod tests {
    use super::super::exposition::tests::{Samples, read};
    use super::*;

    fn exposed(registry: &Registry) -> Samples {
        let mut text = String::new();
        registry.expose(&mut text);
        read(&text)
    }

    /// The sum of all samples of a name that carry these labels.
    fn sum(samples: &Samples, name: &str, labels: &[(&str, &str)]) -> f64 {
        let carries = |found: &std::collections::BTreeMap<String, String>| {
            labels.iter().all(|(key, value)| found.get(*key).is_some_and(|found| found == value))
        };
        let hits: Vec<f64> = samples
            .iter()
            .filter(|((n, l), _)| n == name && carries(l))
            .map(|(_, &value)| value)
            .collect();
        assert!(!hits.is_empty(), "no {name} {labels:?}");
        hits.iter().sum()
    }

    #[test]
    fn two_workers_of_one_process_stay_apart() {
        let mut registry = Registry::default();
        let prefill = WorkerMetrics::register(&mut registry, "smol", EngineType::Prefill, 0);
        let decode = WorkerMetrics::register(&mut registry, "smol", EngineType::Decode, 1);
        prefill.set_depths(Depths {
            running: 1,
            queued: 2,
            bootstrap: 3,
            inflight: 4,
            ..Depths::default()
        });
        decode.set_depths(Depths { running: 5, prealloc: 6, transfer: 7, ..Depths::default() });
        prefill.prompt_tokens.add(38);
        decode.finished_stop.inc();
        decode.failed(Cause::PeerLost);
        let samples = exposed(&registry);
        assert_eq!(sum(&samples, "sglang:num_running_reqs", &[("engine_type", "prefill")]), 1.0);
        assert_eq!(sum(&samples, "vllm:num_requests_waiting", &[("engine_type", "prefill")]), 9.0);
        assert_eq!(sum(&samples, "vllm:num_requests_waiting", &[("worker", "1")]), 13.0);
        assert_eq!(sum(&samples, "sglang:prompt_tokens_total", &[("model_name", "smol")]), 38.0);
        assert_eq!(
            sum(&samples, "vllm:request_success_total", &[("finished_reason", "stop")]),
            1.0
        );
        let lost = [("cause", "peer_lost"), ("engine_type", "decode")];
        assert_eq!(sum(&samples, "baton_request_failures_total", &lost), 1.0);
        assert_eq!(sum(&samples, "baton_request_failures_total", &[]), 1.0);
    }

    #[test]
    fn pages_add_up_to_the_pool() {
        let mut registry = Registry::default();
        let worker = WorkerMetrics::register(&mut registry, "smol", EngineType::Unified, 0);
        worker.set_pages(PageCounts { free: 50, cached: 10, in_use: 30, leased: 10 });
        let samples = exposed(&registry);
        assert_eq!(sum(&samples, "baton_pages", &[]), 100.0);
        assert_eq!(sum(&samples, "baton_pages", &[("state", "in_use")]), 30.0);
        assert_eq!(sum(&samples, "sglang:token_usage", &[]), 0.4);
        assert_eq!(sum(&samples, "vllm:kv_cache_usage_perc", &[]), 0.4);
    }

    #[test]
    fn stages_add_up_to_the_time_to_the_first_token() {
        let mut registry = Registry::default();
        let worker = WorkerMetrics::register(&mut registry, "smol", EngineType::Decode, 0);
        let ms = Duration::from_millis;
        for n in 1..=10 {
            worker.first_token(&Stages {
                queue: ms(n),
                bootstrap: ms(2 * n),
                prefill: ms(30 * n),
                handover: Duration::from_micros(400),
                join: Duration::ZERO,
                first_step: ms(7),
            });
        }
        let samples = exposed(&registry);
        let ttft = sum(&samples, "sglang:time_to_first_token_seconds_sum", &[]);
        let stages = sum(&samples, "baton_stage_seconds_sum", &[]);
        assert!((ttft - 1.889).abs() < 1e-9 && (ttft - stages).abs() < 1e-9, "{ttft} {stages}");
        assert_eq!(sum(&samples, "baton_stage_seconds_count", &[("stage", "join")]), 10.0);
    }

    #[test]
    fn transfers_have_size_time_and_speed() {
        let mut registry = Registry::default();
        let worker = WorkerMetrics::register(&mut registry, "smol", EngineType::Decode, 0);
        worker.transferred(2_000_000, Duration::from_millis(1));
        worker.transferred(0, Duration::ZERO);
        let samples = exposed(&registry);
        assert_eq!(sum(&samples, "baton_kv_transfer_bytes_total", &[]), 2e6);
        assert_eq!(sum(&samples, "sglang:kv_transfer_latency_ms_count", &[]), 2.0);
        assert_eq!(
            sum(&samples, "sglang:kv_transfer_speed_gb_s_sum", &[]),
            2.0,
            "no speed of nothing"
        );
    }

    #[test]
    fn the_router_tells_of_its_workers() {
        let mut registry = Registry::default();
        let workers = [(EngineType::Prefill, "http://a:1"), (EngineType::Decode, "http://b:2")];
        let [first, second] =
            workers.map(|(role, url)| RoutedMetrics::register(&mut registry, role, url));
        let router = RouterMetrics::register(&mut registry);
        router.requests.inc();
        router.failed(Cause::Overloaded);
        second.set(true, 3);
        let samples = exposed(&registry);
        assert_eq!(sum(&samples, "smg_worker_health", &[("worker", "http://a:1")]), 0.0);
        assert_eq!(sum(&samples, "smg_worker_requests_active", &[("worker_type", "decode")]), 3.0);
        assert_eq!(
            sum(&samples, "smg_router_request_errors_total", &[("error_type", "overloaded")]),
            1.0
        );
        first.unlist(&mut registry);
        let mut text = String::new();
        registry.expose(&mut text);
        assert!(!text.contains("http://a:1") && text.contains("http://b:2"), "{text}");
    }
}

//! Metrics of a worker, under the names of SGLang and vLLM.
//!
//! Thread: `ctl`. Not here: their text format (`obs::exposition`), figures of engines
//! (`sched::stats`).

use crate::cause::Cause;
use crate::ids::Role;
use crate::kv::pool::PageCounts;
use crate::obs::buckets::*;
use crate::obs::instruments::{Counter, Gauge, GaugeGroup, Histogram, Labels};
use crate::obs::registry::Registry;
use crate::transfer::counters::Counters;
use crate::transfer::manager::choice::TransportChoice;
use std::sync::Arc;
use std::time::Duration;

/// The role as SGLang's metrics name it.
const fn engine_type(role: Role) -> &'static str {
    match role {
        Role::Mixed => "unified",
        Role::Prefill => "prefill",
        Role::Decode => "decode",
    }
}

/// Number of requests in each state. Each request is in one state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Depths {
    /// In the running batch.
    pub running: usize,
    /// Waiting for a turn, and for nothing else.
    pub queued: usize,
    /// Prefill: waiting for their Destination.
    pub bootstrap: usize,
    /// Prefill: computed, with a KV transfer in progress.
    pub inflight: usize,
    /// Decode: waiting for pages.
    pub prealloc: usize,
    /// Decode: waiting for KV.
    pub transfer: usize,
    /// Retracted: waiting for new pages.
    pub retracted: usize,
}

/// The time to the first token, in stages. Each stage begins at the end of the previous one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stages {
    /// Waiting for a turn, on either worker.
    pub queue: Duration,
    /// Waiting for the other worker: session, pages, Destination.
    pub bootstrap: Duration,
    /// Computing the prompt.
    pub prefill: Duration,
    /// From the last layer of the prompt until all KV is at the destination.
    pub handover: Duration,
    /// From then until the request is in the running batch.
    pub join: Duration,
    /// From then until the first token is sent to the client.
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

/// Requests in each state, as gauges.
#[derive(Debug)]
struct DepthGauges {
    running: Arc<Gauge>,
    queued: Arc<Gauge>,
    waiting: Arc<Gauge>,
    bootstrap: Arc<Gauge>,
    inflight: Arc<Gauge>,
    prealloc: Arc<Gauge>,
    transfer: Arc<Gauge>,
    retracted: Arc<Gauge>,
}

impl DepthGauges {
    fn register(r: &mut Registry, l: &Labels) -> DepthGauges {
        DepthGauges {
            running: r.gauge(
                &["sglang:num_running_reqs", "vllm:num_requests_running"],
                "Requests in the running batch.",
                l,
            ),
            queued: r.gauge(&["sglang:num_queue_reqs"], "Requests waiting for a turn.", l),
            waiting: r.gauge(
                &["vllm:num_requests_waiting"],
                "Requests that wait, for any reason.",
                l,
            ),
            bootstrap: r.gauge(
                &["sglang:num_prefill_bootstrap_queue_reqs"],
                "Prefill: requests waiting for a destination.",
                l,
            ),
            inflight: r.gauge(
                &["sglang:num_prefill_inflight_queue_reqs"],
                "Prefill: requests with a KV transfer in progress.",
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
        }
    }
}

/// KV transfers of a worker.
#[derive(Debug)]
struct TransferMetrics {
    sessions: [Arc<Counter>; TransportChoice::ALL.len()],
    work_requests: Arc<Counter>,
    doorbells: Arc<Counter>,
    kv_bytes: Arc<Counter>,
    kv_latency_ms: Arc<Histogram>,
    kv_speed_gb_s: Arc<Histogram>,
    kv_total_mb: Arc<Histogram>,
}

impl TransferMetrics {
    fn register(r: &mut Registry, l: &Labels) -> TransferMetrics {
        TransferMetrics {
            sessions: std::array::from_fn(|index| {
                let TransportChoice { transport, why } = TransportChoice::ALL[index];
                let labels = l.and("transport", transport.name()).and("why", why.name());
                r.counter(
                    &["baton_sessions_total"],
                    "Sessions with other workers, by transport and the reason for it.",
                    &labels,
                )
            }),
            work_requests: r.counter(
                &["baton_transfer_work_requests_total"],
                "Pieces of KV transfers: copies (shm), frames (tcp), work requests (rdma).",
                l,
            ),
            doorbells: r.counter(
                &["baton_transfer_doorbells_total"],
                "KV transfers: wake-ups (shm), system calls (tcp), doorbells (rdma).",
                l,
            ),
            kv_bytes: r.counter(&["baton_kv_transfer_bytes_total"], "Bytes of KV transferred.", l),
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
        }
    }
}

/// Times of requests and tokens.
#[derive(Debug)]
struct LatencyMetrics {
    stages: [Arc<Histogram>; 6],
    ttft: Arc<Histogram>,
    itl: Arc<Histogram>,
    e2e: Arc<Histogram>,
}

impl LatencyMetrics {
    fn register(r: &mut Registry, l: &Labels) -> LatencyMetrics {
        LatencyMetrics {
            stages: Stages::NAMES.map(|stage| {
                let help = "Stages of the time to the first token, which is their sum.";
                r.histogram(&["baton_stage_seconds"], help, &l.and("stage", stage), STAGE_SECONDS)
            }),
            ttft: r.histogram(
                &["sglang:time_to_first_token_seconds", "vllm:time_to_first_token_seconds"],
                "Time from a request's arrival to its first token.",
                l,
                TTFT_SECONDS,
            ),
            itl: r.histogram(
                &["sglang:inter_token_latency_seconds", "vllm:inter_token_latency_seconds"],
                "Time between two tokens of a request.",
                l,
                ITL_SECONDS,
            ),
            e2e: r.histogram(
                &["sglang:e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds"],
                "Time from a request's arrival to its end.",
                l,
                E2E_SECONDS,
            ),
        }
    }
}

fn register_pages(r: &mut Registry, l: &Labels) -> Arc<GaugeGroup<4>> {
    let states = &["free", "cached", "in_use", "leased"];
    r.states(&["baton_pages"], "Pages of the KV pool by state.", l, states)
}

fn register_failures(r: &mut Registry, l: &Labels) -> [Arc<Counter>; Cause::ALL.len()] {
    std::array::from_fn(|index| {
        let labels = l.and("cause", Cause::ALL[index].name());
        r.counter(&["baton_request_failures_total"], "Requests that failed, by cause.", &labels)
    })
}

/// Metrics of one worker.
#[derive(Debug)]
pub struct WorkerMetrics {
    depths: DepthGauges,
    /// Pages of the host tier that hold KV.
    pub swapped: Arc<Gauge>,
    /// How often a running request gave up its pages.
    pub retractions: Arc<Counter>,
    /// Tokens with KV that was dropped by a retraction and computed again.
    pub recomputed: Arc<Counter>,
    pages: Arc<GaugeGroup<4>>,
    token_usage: Arc<Gauge>,
    /// Prompt tokens, computed or found in the prefix cache.
    pub prompt_tokens: Arc<Counter>,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_asked: Arc<Counter>,
    /// Prompt tokens found in the prefix cache.
    pub prefix_found: Arc<Counter>,
    /// Generated tokens.
    pub generation_tokens: Arc<Counter>,
    /// Requests that ended at a stop token or stop string.
    pub finished_stop: Arc<Counter>,
    /// Requests that ended at their length. On prefill: requests that were handed over.
    pub finished_length: Arc<Counter>,
    failures: [Arc<Counter>; Cause::ALL.len()],
    /// Requests that failed before their KV began to move.
    pub bootstrap_failures: Arc<Counter>,
    /// Requests that failed while their KV moved.
    pub transfer_failures: Arc<Counter>,
    transfers: TransferMetrics,
    latencies: LatencyMetrics,
}

impl WorkerMetrics {
    /// Registers the metrics of a worker: its model, role, and number in this process.
    pub fn register(
        registry: &mut Registry,
        model: &str,
        role: Role,
        worker: usize,
    ) -> WorkerMetrics {
        let labels = Labels::none()
            .and("model_name", model)
            .and("engine_type", engine_type(role))
            .and("worker", &worker.to_string());
        let success = (["vllm:request_success_total"], "Requests that succeeded.");
        let (r, l) = (registry, &labels);
        WorkerMetrics {
            depths: DepthGauges::register(r, l),
            swapped: r.gauge(&["baton_swapped_pages"], "Pages of --swap-memory that hold KV.", l),
            retractions: r.counter(
                &["vllm:num_preemptions_total"],
                "Retractions: a running request gave up its pages.",
                l,
            ),
            recomputed: r.counter(
                &["baton_recomputed_tokens_total"],
                "Tokens computed again because a retraction dropped their KV.",
                l,
            ),
            pages: register_pages(r, l),
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
                "Prompt tokens looked up in the prefix cache.",
                l,
            ),
            prefix_found: r.counter(
                &["vllm:prefix_cache_hits_total", "sglang:cached_tokens_total"],
                "Prompt tokens found in the prefix cache, which were not computed again.",
                l,
            ),
            generation_tokens: r.counter(
                &["sglang:generation_tokens_total", "vllm:generation_tokens_total"],
                "Tokens generated.",
                l,
            ),
            finished_stop: r.counter(&success.0, success.1, &l.and("finished_reason", "stop")),
            finished_length: r.counter(&success.0, success.1, &l.and("finished_reason", "length")),
            failures: register_failures(r, l),
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
            transfers: TransferMetrics::register(r, l),
            latencies: LatencyMetrics::register(r, l),
        }
    }

    /// Sets the number of requests in each state.
    pub fn set_depths(&self, depths: Depths) {
        let Depths { running, queued, bootstrap, inflight, prealloc, transfer, retracted } = depths;
        let waiting = queued + bootstrap + inflight + prealloc + transfer + retracted;
        for (gauge, count) in [
            (&self.depths.running, running),
            (&self.depths.queued, queued),
            (&self.depths.waiting, waiting),
            (&self.depths.bootstrap, bootstrap),
            (&self.depths.inflight, inflight),
            (&self.depths.prealloc, prealloc),
            (&self.depths.transfer, transfer),
            (&self.depths.retracted, retracted),
        ] {
            gauge.set(count as f64);
        }
    }

    /// Sets the number of pages in each state. A reader never sees a mix of two sets.
    pub fn set_pages(&self, counts: PageCounts) {
        let PageCounts { free, cached, in_use, leased } = counts;
        self.pages.set([free, cached, in_use, leased].map(u64::from));
        let (taken, total) = (in_use + leased, counts.total());
        self.token_usage.set(f64::from(taken) / f64::from(total.max(1)));
    }

    /// Takes over the counters of transfers.
    pub fn set_tally(&self, tally: &Counters) {
        for (counter, count) in self.transfers.sessions.iter().zip(tally.sessions()) {
            counter.raise_to(count);
        }
        let counts = tally.counts();
        self.transfers.work_requests.raise_to(counts.work_requests);
        self.transfers.doorbells.raise_to(counts.doorbells);
    }

    /// Counts a failed request.
    pub fn failed(&self, cause: Cause) {
        self.failures[cause.index()].inc();
    }

    /// Counts a completed hand-off of one request.
    pub fn transferred(&self, bytes: u64, time: Duration) {
        self.transfers.kv_bytes.add(bytes);
        self.transfers.kv_total_mb.observe(bytes as f64 / (1 << 20) as f64);
        self.transfers.kv_latency_ms.observe(time.as_secs_f64() * 1e3);
        if !time.is_zero() {
            self.transfers.kv_speed_gb_s.observe(bytes as f64 / 1e9 / time.as_secs_f64());
        }
    }

    /// Records the first token of a request. Its time to first token is the sum of the stages, so
    /// the histograms agree by construction.
    pub fn first_token(&self, stages: &Stages) {
        for (histogram, time) in self.latencies.stages.iter().zip(stages.durations()) {
            histogram.observe(time.as_secs_f64());
        }
        self.latencies.ttft.observe(stages.total().as_secs_f64());
    }

    /// Records a further token and the time since the previous one.
    pub fn next_token(&self, since_last: Duration) {
        self.latencies.itl.observe(since_last.as_secs_f64());
    }

    /// Records a request that succeeded and its time since arrival.
    pub fn ended(&self, since_arrival: Duration) {
        self.latencies.e2e.observe(since_arrival.as_secs_f64());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::obs::exposition::tests::{exposed, sum};

    #[test]
    fn two_workers_of_one_process_stay_apart() {
        let mut registry = Registry::default();
        let prefill = WorkerMetrics::register(&mut registry, "smol", Role::Prefill, 0);
        let decode = WorkerMetrics::register(&mut registry, "smol", Role::Decode, 1);
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
        let worker = WorkerMetrics::register(&mut registry, "smol", Role::Mixed, 0);
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
        let worker = WorkerMetrics::register(&mut registry, "smol", Role::Decode, 0);
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
        let worker = WorkerMetrics::register(&mut registry, "smol", Role::Decode, 0);
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
}

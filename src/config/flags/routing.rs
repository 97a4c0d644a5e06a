//! Flags of `baton router` alone. Their names are those of sglang-router, so that a start script for it needs only another
//! program; where a name means something else here, its help says what.

use super::super::registry::RegistryAddress;
use super::super::resolved::{FirstToken, Flow, Policy};
use super::super::values::{WorkerUrl, parse_header_name, parse_health_path, parse_host};
use crate::limits::{
    BREAKER_FAILURES_MAX, BREAKER_SECONDS_MAX, HEALTH_PROBES_MAX, HEALTH_SECONDS_MAX,
    HTTP_CONNECTIONS_MAX, REQUEST_TIME_MAX, RETRIES_DEFAULT, RETRY_BACKOFF_MS_MAX,
};
use clap::{Args, value_parser};
use std::net::IpAddr;
use std::path::PathBuf;

#[derive(Args, Debug)]
#[command(next_help_heading = "HTTP")]
pub(in crate::config) struct ScrapeFlags {
    /// Serve /metrics on a port of its own, too, where nobody is asked for a key; 0 takes a free one [default: only at
    /// --port]
    #[arg(long, value_name = "PORT")]
    pub(in crate::config) prometheus_port: Option<u16>,
    /// Address of that port [default: --host]
    #[arg(long, value_name = "ADDRESS", requires = "prometheus_port", value_parser = parse_host)]
    pub(in crate::config) prometheus_host: Option<IpAddr>,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Workers")]
pub(in crate::config) struct RoutingFlags {
    /// What this router does in any case: prefill and decode on workers apart
    #[arg(long)]
    pub(in crate::config) pd_disaggregation: bool,
    /// A prefill worker, by http:// or with --tls-ca-file https://, and the port of its registry, or none [default: the port that the worker tells, else 8998, which a
    /// decode worker takes where it is told none]; may be repeated
    #[arg(long, value_names = ["URL", "BOOTSTRAP_PORT"], num_args = 1..=2)]
    pub(in crate::config) prefill: Vec<String>,
    /// A decode worker, or one that does both; may be repeated
    #[arg(long, value_name = "URL")]
    pub(in crate::config) decode: Vec<WorkerUrl>,
    /// Certificates of those who vouch for workers, in PEM; workers may be https://HOST:PORT then, and must show that they are
    /// that host
    #[arg(long, value_name = "FILE")]
    pub(in crate::config) tls_ca_file: Option<PathBuf>,
    /// How the workers of a request are chosen [default: least_loaded; cache_aware where one of its thresholds is given]
    #[arg(long, value_enum)]
    pub(in crate::config) policy: Option<Policy>,
    /// How its prefill worker is chosen [default: --policy]
    #[arg(long, value_enum)]
    pub(in crate::config) prefill_policy: Option<Policy>,
    /// How its decode worker is chosen [default: --policy]
    #[arg(long, value_enum)]
    pub(in crate::config) decode_policy: Option<Policy>,
    /// Share of a prompt, 0 to 1: cache_aware goes to the worker that has more of it than that [default: 0.3]
    #[arg(long, value_name = "SHARE")]
    pub(in crate::config) cache_threshold: Option<f64>,
    /// Sequences by which the busiest worker may be ahead of the idlest while cache_aware asks for caches [default: 64]
    #[arg(long, value_name = "N")]
    pub(in crate::config) balance_abs_threshold: Option<u32>,
    /// Times as many sequences as the idlest that the busiest may have; beyond both who has fewest is chosen [default: 1.5]
    #[arg(long, value_name = "FACTOR")]
    pub(in crate::config) balance_rel_threshold: Option<f64>,
    /// Take workers from this etcd, too, as etcd://HOST:PORT,HOST:PORT: all routers over it see the same ones
    #[arg(long, value_name = "REGISTRY")]
    pub(in crate::config) registry: Option<RegistryAddress>,
    /// File of at least 32 random bytes that all workers of the cluster share: who enters a worker, or takes one off, must
    /// prove to know it; given again while keys are changed, any of them will do
    #[arg(long, value_name = "FILE")]
    pub(in crate::config) cluster_key_file: Vec<PathBuf>,
    /// Take workers from beyond loopback without a cluster key: whoever enters one receives prompts
    #[arg(long)]
    pub(in crate::config) insecure: bool,
    /// Nothing is done with it but a warning: the workers tokenise
    #[arg(long, value_name = "PATH")]
    pub(in crate::config) model_path: Option<PathBuf>,
    /// Likewise
    #[arg(long, value_name = "PATH")]
    pub(in crate::config) tokenizer_path: Option<PathBuf>,
}

#[derive(Args, Debug)]
#[command(
    next_help_heading = "Forecast (of the policies slo and conditional; --prefill-ms of --rebalance, too)"
)]
pub(in crate::config) struct ForecastFlags {
    /// Turn a request away with 429 whose first token is foretold to take longer [default: any time is well]
    #[arg(long, value_name = "MS")]
    pub(in crate::config) slo_ttft_ms: Option<f64>,
    /// and one whose other tokens are foretold to take longer each [default: likewise]
    #[arg(long, value_name = "MS", visible_alias = "slo-itl-ms")]
    pub(in crate::config) slo_tpot_ms: Option<f64>,
    /// A step over prompts takes A + sum of (B*new + C*new*(prefix + new/2)) + D*(sum of new)^2 ms; D may be left away
    /// [default: 8.322,0.033051,1.7068e-6,0: Qwen3-32B-FP8 on two H200]
    #[arg(long, value_name = "A,B,C[,D]", value_delimiter = ',', allow_hyphen_values = true)]
    pub(in crate::config) prefill_ms: Vec<f64>,
    /// A step that generates takes A + B*context + C*sequences + D*context^2 ms, context being the sum over all; D may be
    /// left away [default: 9.7902,2.0797e-5,0.028017,0: likewise]
    #[arg(long, value_name = "A,B,C[,D]", value_delimiter = ',', allow_hyphen_values = true)]
    pub(in crate::config) decode_ms: Vec<f64>,
    /// Bytes of KV that one NIC of a worker carries for a token [default: 131072]
    #[arg(long, value_name = "BYTES", value_parser = value_parser!(u64).range(1..=1 << 30))]
    pub(in crate::config) kv_bytes_per_token: Option<u64>,
    /// Gigabytes that a NIC carries in a second [default: 25]
    #[arg(long, value_name = "GB")]
    pub(in crate::config) nic_gigabytes: Option<f64>,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Requests")]
pub(in crate::config) struct RequestFlags {
    /// Seconds after which a request is given up, tries and waits included; a client may ask for less
    #[arg(long, value_name = "SECONDS", default_value_t = REQUEST_TIME_MAX.as_secs() as u32, value_parser = value_parser!(u32).range(1..=REQUEST_TIME_MAX.as_secs() as i64))]
    pub(in crate::config) request_timeout_secs: u32,
    /// Most requests for text at workers at once; -1: as many as there are connections
    #[arg(long, value_name = "N", default_value_t = -1, allow_negative_numbers = true, value_parser = value_parser!(i32).range(-1..=HTTP_CONNECTIONS_MAX as i64))]
    pub(in crate::config) max_concurrent_requests: i32,
    /// Most requests that wait for that; beyond it the answer is 429
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = value_parser!(u32).range(..=HTTP_CONNECTIONS_MAX as i64))]
    pub(in crate::config) queue_size: u32,
    /// Seconds that one may wait there; then the answer is 408
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = value_parser!(u32).range(1..=REQUEST_TIME_MAX.as_secs() as i64))]
    pub(in crate::config) queue_timeout_secs: u32,
    /// In which order the workers of a request are asked; other than dual for workers of this software alone, whose prefill
    /// worker keeps the KV until decode claims it
    #[arg(long, value_enum, default_value_t)]
    pub(in crate::config) flow: Flow,
    /// Whose token a stream begins with: prefill's comes as soon as it is sampled, before its KV has reached decode, which
    /// goes on with the second
    #[arg(long, value_enum, default_value_t)]
    pub(in crate::config) first_token: FirstToken,
    /// Header fields in which a client may name its request, the first that is there; answers and workers have the name in
    /// x-request-id [default: x-request-id]
    #[arg(long, value_name = "NAME", num_args = 1.., value_parser = parse_header_name)]
    pub(in crate::config) request_id_headers: Vec<String>,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Retries")]
pub(in crate::config) struct RetryFlags {
    /// Times a request is sent in all, each to another pair of workers when one fails, since its client last got something;
    /// one that failed by a worker's internal error at most twice
    #[arg(long, value_name = "N", default_value_t = 1 + RETRIES_DEFAULT, allow_negative_numbers = true, value_parser = value_parser!(u32).range(1..=100))]
    pub(in crate::config) retry_max_retries: u32,
    /// Send no request to a second pair of workers
    #[arg(long, conflicts_with = "retry_max_retries")]
    pub(in crate::config) disable_retries: bool,
    /// Longest wait before the first of these
    #[arg(long, value_name = "MS", default_value_t = 10, value_parser = value_parser!(u32).range(1..=i64::from(RETRY_BACKOFF_MS_MAX)))]
    pub(in crate::config) retry_initial_backoff_ms: u32,
    /// What it grows to; tries end 15 s after the first failure
    #[arg(long, value_name = "MS", default_value_t = 1000, value_parser = value_parser!(u32).range(1..=i64::from(RETRY_BACKOFF_MS_MAX)))]
    pub(in crate::config) retry_max_backoff_ms: u32,
    /// How many times as long it is each time, 1 to 100
    #[arg(long, value_name = "FACTOR", default_value_t = 10.0)]
    pub(in crate::config) retry_backoff_multiplier: f64,
    /// Share of a wait that is drawn, 0 to 1: requests that failed together do not return together
    #[arg(long, value_name = "SHARE", default_value_t = 0.5)]
    pub(in crate::config) retry_jitter_factor: f64,
}

#[derive(Args, Debug)]
#[command(
    next_help_heading = "Circuit breaker (a worker whose circuit is open is asked last, not never)"
)]
pub(in crate::config) struct BreakerFlags {
    /// Failed requests that open a worker's circuit
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u32).range(1..=i64::from(BREAKER_FAILURES_MAX)))]
    pub(in crate::config) cb_failure_threshold: u32,
    /// Seconds within which they come
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = value_parser!(u32).range(1..=i64::from(BREAKER_SECONDS_MAX)))]
    pub(in crate::config) cb_window_duration_secs: u32,
    /// Seconds that it stays open; from then on one more failure opens it again
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = value_parser!(u32).range(1..=i64::from(BREAKER_SECONDS_MAX)))]
    pub(in crate::config) cb_timeout_duration_secs: u32,
    /// Answers that begin or end well there that close it
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u32).range(1..=i64::from(BREAKER_FAILURES_MAX)))]
    pub(in crate::config) cb_success_threshold: u32,
    /// Ask a worker like any other whatever failed there, but for the request that did
    #[arg(long, conflicts_with_all = ["cb_failure_threshold", "cb_window_duration_secs", "cb_timeout_duration_secs", "cb_success_threshold"])]
    pub(in crate::config) disable_circuit_breaker: bool,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Health of workers")]
pub(in crate::config) struct HealthFlags {
    /// Seconds between two looks at a worker's health
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = value_parser!(u32).range(1..=i64::from(HEALTH_SECONDS_MAX)))]
    pub(in crate::config) health_check_interval_secs: u32,
    /// Seconds that one may take [default: 1.5]
    #[arg(long, value_name = "SECONDS", value_parser = value_parser!(u32).range(1..=i64::from(HEALTH_SECONDS_MAX)))]
    pub(in crate::config) health_check_timeout_secs: Option<u32>,
    /// Looks in a row that fail before a worker is down; after the first the next comes at once. One that takes no
    /// connection is down at once
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = value_parser!(u32).range(1..=i64::from(HEALTH_PROBES_MAX)))]
    pub(in crate::config) health_failure_threshold: u32,
    /// Looks in a row that succeed before a worker is up
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u32).range(1..=i64::from(HEALTH_PROBES_MAX)))]
    pub(in crate::config) health_success_threshold: u32,
    /// Where a worker is asked
    #[arg(long, value_name = "PATH", default_value = "/health", value_parser = parse_health_path)]
    pub(in crate::config) health_check_endpoint: String,
    /// Seconds between two looks at a worker that has not been up yet [default: --health-check-interval-secs]
    #[arg(long, value_name = "SECONDS", value_parser = value_parser!(u32).range(1..=i64::from(HEALTH_SECONDS_MAX)))]
    pub(in crate::config) worker_startup_check_interval: Option<u32>,
    /// Seconds after which a worker that has not been up is no longer looked for [default: never]
    #[arg(long, value_name = "SECONDS", value_parser = value_parser!(u32).range(1..=i64::from(HEALTH_SECONDS_MAX)))]
    pub(in crate::config) worker_startup_timeout_secs: Option<u32>,
}

//! Flags of `baton router` only. They have the names of sglang-router's flags, so its start scripts
//! work with another program name. The help names each flag that differs in meaning.

use crate::config::registry::RegistryAddress;
use crate::config::values::{WorkerUrl, parse_header_name, parse_health_path, parse_host};
use crate::config::{FirstToken, Flow, Policy, SchedulingPolicy};
use crate::limits::{
    BREAKER_FAILURES_MAX, BREAKER_SECONDS_MAX, HEALTH_PROBES_MAX, HEALTH_SECONDS_MAX,
    HTTP_CONNECTIONS_MAX, REQUEST_TIME_MAX, RETRIES_DEFAULT, RETRY_BACKOFF_MS_MAX,
};
use clap::{Args, value_parser};
use std::net::IpAddr;
use std::path::PathBuf;

#[derive(Args, Debug)]
#[command(next_help_heading = "HTTP")]
pub(in crate::cli) struct ScrapeFlags {
    /// Also serve /metrics at this port, without API keys; 0 takes a free port [default: only at
    /// --port]
    #[arg(long, value_name = "PORT")]
    pub(in crate::cli) prometheus_port: Option<u16>,
    /// IP address for --prometheus-port [default: --host]
    #[arg(long, value_name = "ADDRESS", requires = "prometheus_port", value_parser = parse_host)]
    pub(in crate::cli) prometheus_host: Option<IpAddr>,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Workers")]
pub(in crate::cli) struct RoutingFlags {
    /// No effect: the flag exists for start scripts of sglang-router
    #[arg(long)]
    pub(in crate::cli) pd_disaggregation: bool,
    /// A prefill worker: its URL (http://, or https:// with --tls-ca-file), then the port of its
    /// bootstrap registry. The port can be omitted or `none`. May be repeated [default port: the
    /// port that the worker reports; if it reports none, decode workers use 8998]
    #[arg(long, value_names = ["URL", "BOOTSTRAP_PORT"], num_args = 1..=2)]
    pub(in crate::cli) prefill: Vec<String>,
    /// A decode worker or a mixed worker. May be repeated
    #[arg(long, value_name = "URL")]
    pub(in crate::cli) decode: Vec<WorkerUrl>,
    /// File with CA certificates in PEM. They verify the certificates of workers. Required for
    /// workers at https://HOST:PORT; the certificate must name that host
    #[arg(long, value_name = "FILE")]
    pub(in crate::cli) tls_ca_file: Option<PathBuf>,
    /// How the router selects the workers of a request [default: least_loaded, or cache_aware if
    /// one of its thresholds is given]
    #[arg(long, value_enum)]
    pub(in crate::cli) policy: Option<Policy>,
    /// How the router selects the prefill worker [default: --policy]
    #[arg(long, value_enum)]
    pub(in crate::cli) prefill_policy: Option<Policy>,
    /// How the router selects the decode worker [default: --policy]
    #[arg(long, value_enum)]
    pub(in crate::cli) decode_policy: Option<Policy>,
    /// Share of a prompt, 0 to 1. If the longest cached prefix is a larger share, cache_aware
    /// selects the worker that has it [default: 0.3]
    #[arg(long, value_name = "SHARE")]
    pub(in crate::cli) cache_threshold: Option<f64>,
    /// Maximum difference in sequences between the busiest and the least busy worker, for
    /// cache_aware. If this and --balance-rel-threshold are both exceeded, the router selects the
    /// least loaded worker [default: 64]
    #[arg(long, value_name = "N")]
    pub(in crate::cli) balance_abs_threshold: Option<u32>,
    /// Maximum ratio of the sequences of the busiest worker to those of the least busy one, for
    /// cache_aware. If this and --balance-abs-threshold are both exceeded, the router selects the
    /// least loaded worker [default: 1.5]
    #[arg(long, value_name = "FACTOR")]
    pub(in crate::cli) balance_rel_threshold: Option<f64>,
    /// Also take workers from this etcd, as etcd://HOST:PORT,HOST:PORT. All routers that use it see
    /// the same workers
    #[arg(long, value_name = "REGISTRY")]
    pub(in crate::cli) registry: Option<RegistryAddress>,
    /// File of at least 32 random bytes, shared by all workers of the cluster. A client that adds
    /// or removes a worker must prove that it knows the key. May be repeated to change keys while
    /// the router runs: the router accepts each of them
    #[arg(long, value_name = "FILE")]
    pub(in crate::cli) cluster_key_file: Vec<PathBuf>,
    /// Accept workers from beyond loopback without a cluster key. Every host that adds a worker
    /// then receives prompts
    #[arg(long)]
    pub(in crate::cli) insecure: bool,
    /// No effect except a warning: the workers tokenise
    #[arg(long, value_name = "PATH")]
    pub(in crate::cli) model_path: Option<PathBuf>,
    /// No effect except a warning: the workers tokenise
    #[arg(long, value_name = "PATH")]
    pub(in crate::cli) tokenizer_path: Option<PathBuf>,
}

#[derive(Args, Debug)]
#[command(
    next_help_heading = "Forecast (policies slo and conditional; --prefill-ms also for --rebalance)"
)]
pub(in crate::cli) struct ForecastFlags {
    /// Refuse a request with status 429 if its predicted time to first token is above this limit,
    /// in ms. Needs policy slo or conditional [default: no limit]
    #[arg(long, value_name = "MS")]
    pub(in crate::cli) slo_ttft_ms: Option<f64>,
    /// Refuse a request with status 429 if its predicted time per output token is above this limit,
    /// in ms. Needs policy slo or conditional [default: no limit]
    #[arg(long, value_name = "MS", visible_alias = "slo-itl-ms")]
    pub(in crate::cli) slo_tpot_ms: Option<f64>,
    /// Coefficients of the predicted time of a prefill step, in ms: A + sum of (B*new +
    /// C*new*(prefix + new/2)) + D*(sum of new)^2. D can be omitted [default:
    /// 8.322,0.033051,1.7068e-6,0: Qwen3-32B-FP8 on two H200]
    #[arg(long, value_name = "A,B,C[,D]", value_delimiter = ',', allow_hyphen_values = true)]
    pub(in crate::cli) prefill_ms: Vec<f64>,
    /// Coefficients of the predicted time of a decode step, in ms: A + B*context + C*sequences +
    /// D*context^2, with the sum of all contexts. D can be omitted [default:
    /// 9.7902,2.0797e-5,0.028017,0: Qwen3-32B-FP8 on two H200]
    #[arg(long, value_name = "A,B,C[,D]", value_delimiter = ',', allow_hyphen_values = true)]
    pub(in crate::cli) decode_ms: Vec<f64>,
    /// Bytes of KV that one NIC of a worker transfers for each token [default: 131072]
    #[arg(long, value_name = "BYTES", value_parser = value_parser!(u64).range(1..=1 << 30))]
    pub(in crate::cli) kv_bytes_per_token: Option<u64>,
    /// Bandwidth of a NIC in gigabytes per second [default: 25]
    #[arg(long, value_name = "GB")]
    pub(in crate::cli) nic_gigabytes: Option<f64>,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Requests")]
pub(in crate::cli) struct RequestFlags {
    /// Seconds until a request fails, including all attempts and waits. A client can ask for less
    #[arg(
        long, value_name = "SECONDS", default_value_t = REQUEST_TIME_MAX.as_secs() as u32,
        value_parser = value_parser!(u32).range(1..=REQUEST_TIME_MAX.as_secs() as i64),
    )]
    pub(in crate::cli) request_timeout_secs: u32,
    /// Maximum number of generation requests sent to workers at once; -1: limited only by the
    /// number of connections
    #[arg(
        long, value_name = "N", default_value_t = -1, allow_negative_numbers = true,
        value_parser = value_parser!(i32).range(-1..=HTTP_CONNECTIONS_MAX as i64),
    )]
    pub(in crate::cli) max_concurrent_requests: i32,
    /// Maximum number of requests that wait because --max-concurrent-requests is reached. Further
    /// requests get status 429
    #[arg(
        long, value_name = "N", default_value_t = 100,
        value_parser = value_parser!(u32).range(..=HTTP_CONNECTIONS_MAX as i64),
    )]
    pub(in crate::cli) queue_size: u32,
    /// Maximum seconds that a request waits because --max-concurrent-requests is reached; then it
    /// gets status 408
    #[arg(
        long, value_name = "SECONDS", default_value_t = 60,
        value_parser = value_parser!(u32).range(1..=REQUEST_TIME_MAX.as_secs() as i64),
    )]
    pub(in crate::cli) queue_timeout_secs: u32,
    /// Order of requests that wait because --max-concurrent-requests is reached. fcfs: first come,
    /// first served. priority: by the field priority of requests, and those of one priority in
    /// order of arrival. Workers need the same flag for this field
    #[arg(long, value_enum, default_value_t)]
    pub(in crate::cli) scheduling_policy: SchedulingPolicy,
    /// Order in which the router calls the workers of a request. In flows other than dual, the
    /// prefill worker keeps the KV until the decode worker claims it, for up to 30 s.
    /// prefill-first also works with vLLM, decode-first needs Baton's own workers
    #[arg(long, value_enum, default_value_t)]
    pub(in crate::cli) flow: Flow,
    /// Worker that sends the first token of a stream. prefill sends it as soon as it is sampled,
    /// before the KV transfer ends. Decode continues with the second token
    #[arg(long, value_enum, default_value_t)]
    pub(in crate::cli) first_token: FirstToken,
    /// Headers in which a client can send its request ID; the first one present is used. Answers
    /// and workers get the ID as x-request-id [default: x-request-id]
    #[arg(long, value_name = "NAME", num_args = 1.., value_parser = parse_header_name)]
    pub(in crate::cli) request_id_headers: Vec<String>,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Retries")]
pub(in crate::cli) struct RetryFlags {
    /// Maximum number of attempts, the first one included, each at another pair of workers. Data
    /// sent to the client resets the count. After a worker's internal error there is only one more
    /// attempt
    #[arg(
        long, value_name = "N", default_value_t = 1 + RETRIES_DEFAULT,
        allow_negative_numbers = true, value_parser = value_parser!(u32).range(1..=100),
    )]
    pub(in crate::cli) retry_max_retries: u32,
    /// Do not send a failed request to another pair of workers
    #[arg(long, conflicts_with = "retry_max_retries")]
    pub(in crate::cli) disable_retries: bool,
    /// Maximum milliseconds before the first retry
    #[arg(
        long, value_name = "MS", default_value_t = 10,
        value_parser = value_parser!(u32).range(1..=i64::from(RETRY_BACKOFF_MS_MAX)),
    )]
    pub(in crate::cli) retry_initial_backoff_ms: u32,
    /// Maximum milliseconds before any retry. Retries end 15 s after the first failure
    #[arg(
        long, value_name = "MS", default_value_t = 1000,
        value_parser = value_parser!(u32).range(1..=i64::from(RETRY_BACKOFF_MS_MAX)),
    )]
    pub(in crate::cli) retry_max_backoff_ms: u32,
    /// Factor by which the wait grows with each retry, 1 to 100
    #[arg(long, value_name = "FACTOR", default_value_t = 10.0)]
    pub(in crate::cli) retry_backoff_multiplier: f64,
    /// Random share of each wait, 0 to 1. It spreads the retries of requests that failed together
    #[arg(long, value_name = "SHARE", default_value_t = 0.5)]
    pub(in crate::cli) retry_jitter_factor: f64,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Circuit breaker (a worker with an open circuit is selected last)")]
pub(in crate::cli) struct BreakerFlags {
    /// Number of failed requests in a row that opens a worker's circuit
    #[arg(
        long, value_name = "N", default_value_t = 1,
        value_parser = value_parser!(u32).range(1..=i64::from(BREAKER_FAILURES_MAX)),
    )]
    pub(in crate::cli) cb_failure_threshold: u32,
    /// Seconds within which these failures must occur
    #[arg(
        long, value_name = "SECONDS", default_value_t = 120,
        value_parser = value_parser!(u32).range(1..=i64::from(BREAKER_SECONDS_MAX)),
    )]
    pub(in crate::cli) cb_window_duration_secs: u32,
    /// Seconds that a circuit stays open. After that, one more failure opens it again
    #[arg(
        long, value_name = "SECONDS", default_value_t = 1,
        value_parser = value_parser!(u32).range(1..=i64::from(BREAKER_SECONDS_MAX)),
    )]
    pub(in crate::cli) cb_timeout_duration_secs: u32,
    /// Number of successful answers that closes the circuit; the start and the end of an answer
    /// each count
    #[arg(
        long, value_name = "N", default_value_t = 1,
        value_parser = value_parser!(u32).range(1..=i64::from(BREAKER_FAILURES_MAX)),
    )]
    pub(in crate::cli) cb_success_threshold: u32,
    /// Select a worker normally after failures. Only the request that failed there avoids it
    #[arg(
        long,
        conflicts_with_all = [
            "cb_failure_threshold", "cb_window_duration_secs", "cb_timeout_duration_secs",
            "cb_success_threshold",
        ],
    )]
    pub(in crate::cli) disable_circuit_breaker: bool,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Health of workers")]
pub(in crate::cli) struct HealthFlags {
    /// Seconds between two health probes of a worker
    #[arg(
        long, value_name = "SECONDS", default_value_t = 1,
        value_parser = value_parser!(u32).range(1..=i64::from(HEALTH_SECONDS_MAX)),
    )]
    pub(in crate::cli) health_check_interval_secs: u32,
    /// Seconds until a health probe fails [default: 1.5]
    #[arg(
        long, value_name = "SECONDS",
        value_parser = value_parser!(u32).range(1..=i64::from(HEALTH_SECONDS_MAX)),
    )]
    pub(in crate::cli) health_check_timeout_secs: Option<u32>,
    /// Number of failed probes in a row after which a worker is down. The router repeats a probe at
    /// once after the first failure. A worker that accepts no connection is down at once
    #[arg(
        long, value_name = "N", default_value_t = 2,
        value_parser = value_parser!(u32).range(1..=i64::from(HEALTH_PROBES_MAX)),
    )]
    pub(in crate::cli) health_failure_threshold: u32,
    /// Number of successful probes in a row after which a worker is up
    #[arg(
        long, value_name = "N", default_value_t = 1,
        value_parser = value_parser!(u32).range(1..=i64::from(HEALTH_PROBES_MAX)),
    )]
    pub(in crate::cli) health_success_threshold: u32,
    /// Path of the health probe
    #[arg(long, value_name = "PATH", default_value = "/health", value_parser = parse_health_path)]
    pub(in crate::cli) health_check_endpoint: String,
    /// Seconds between two probes of a worker that was never up [default:
    /// --health-check-interval-secs]
    #[arg(
        long, value_name = "SECONDS",
        value_parser = value_parser!(u32).range(1..=i64::from(HEALTH_SECONDS_MAX)),
    )]
    pub(in crate::cli) worker_startup_check_interval: Option<u32>,
    /// Seconds after which a worker that was never up is no longer probed [default: never]
    #[arg(
        long, value_name = "SECONDS",
        value_parser = value_parser!(u32).range(1..=i64::from(HEALTH_SECONDS_MAX)),
    )]
    pub(in crate::cli) worker_startup_timeout_secs: Option<u32>,
}

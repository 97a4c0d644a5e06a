//! Flags of `baton sim` and `baton sim place`. `baton sim` has a fault mode and a load mode;
//! `place` runs the load mode for each fleet that it tries.

use crate::config::Policy;
use crate::config::error::ConfigError;
use crate::ids::DecodeAllocation;
use crate::limits::{
    CHUNK_MS_MAX, CONTEXT_MAX, LOAD_REQUESTS_MAX, PAGE_SIZE_MAX, QUEUED_REQUESTS_MAX,
    ROUTER_WORKERS_MAX, RUNNING_REQUESTS_MAX, SESSIONS_MAX,
};
use clap::{Args, Subcommand, ValueEnum, value_parser};
use std::fmt;
use std::path::PathBuf;

/// Transport of KV in a simulated cluster.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub enum SimTransfer {
    /// Chosen by each seed.
    #[default]
    Auto,
    /// All workers are on one host.
    Shm,
    /// Each worker has a simulated NIC.
    Rdma,
    /// TCP streams.
    Tcp,
}

impl fmt::Display for SimTransfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SimTransfer::Auto => "auto",
            SimTransfer::Shm => "shm",
            SimTransfer::Rdma => "rdma",
            SimTransfer::Tcp => "tcp",
        })
    }
}

/// Order in which a simulated cluster calls the workers of a pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub enum SimFlow {
    /// Chosen by each seed.
    #[default]
    Auto,
    /// Both at once, with one room.
    Dual,
    /// Prefill first: it keeps the KV and reports where the KV is. Then decode gets that report.
    PrefillFirst,
    /// Only decode: it calls prefill itself.
    DecodeFirst,
}

impl fmt::Display for SimFlow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SimFlow::Auto => "auto",
            SimFlow::Dual => "dual",
            SimFlow::PrefillFirst => "prefill-first",
            SimFlow::DecodeFirst => "decode-first",
        })
    }
}

/// Timing of the engine in load mode.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub enum SimEngine {
    /// As in the recorded runs: each transfer has its own NIC, and KV moves in one piece when
    /// prefill has finished. The first decode step generates the first token.
    #[default]
    Recorded,
    /// As in Baton: chunks move while others are computed. Prefill samples the first token.
    Own,
}

impl fmt::Display for SimEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == SimEngine::Own { "own" } else { "recorded" })
    }
}

/// `baton sim`.
#[derive(Args, Clone, PartialEq, Debug)]
pub struct SimFlags {
    /// First seed. The seed and the sizes below determine the whole run
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Number of seeds to run in turn. The run ends at the first seed that fails, and prints the
    /// command that repeats it
    #[arg(
        long, value_name = "K", default_value_t = 1, conflicts_with = "load",
        value_parser = value_parser!(u64).range(1..),
    )]
    pub seeds: u64,
    /// Number of prefill workers [default: each seed draws up to 3; 3 with --load]. With --load, it
    /// can be 0; then decode workers also do prefill
    #[arg(
        long, value_name = "P",
        value_parser = value_parser!(u32).range(0..=ROUTER_WORKERS_MAX as i64),
    )]
    pub prefill: Option<u32>,
    /// Number of decode workers [default: each seed draws up to 3; 5 with --load]
    #[arg(
        long, value_name = "D",
        value_parser = value_parser!(u32).range(1..=ROUTER_WORKERS_MAX as i64),
    )]
    pub decode: Option<u32>,
    /// Number of requests of each seed, 1 to 4096 [default: 20]. With --load up to 4194304
    /// [default: 10000, or the whole trace]. A smaller number takes the first requests of the trace
    #[arg(
        long, value_name = "R",
        value_parser = value_parser!(u32).range(1..=LOAD_REQUESTS_MAX as i64),
    )]
    pub requests: Option<u32>,
    /// Inject no faults; only the order of events varies
    #[arg(long, conflicts_with = "load")]
    pub calm: bool,
    /// Transport of KV
    #[arg(long, value_enum, default_value_t, conflicts_with = "load")]
    pub transfer: SimTransfer,
    /// Order in which the workers of a pair are called
    #[arg(long, value_enum, default_value_t)]
    pub flow: SimFlow,
    /// Simulate agents of the library in place of a cluster. --prefill and --decode are the numbers
    /// of sources and destinations
    #[arg(long = "library", conflicts_with_all = ["load", "flow"])]
    pub is_library: bool,
    /// Print the log of each simulated process, with its host and simulated times
    #[arg(long, conflicts_with = "load")]
    pub trace: bool,
    /// Another task.
    #[command(subcommand)]
    pub command: Option<SimCommand>,
    // Last, because the heading would also apply to the flags that follow.
    /// Load mode.
    #[command(flatten)]
    pub load: LoadFlags,
}

impl SimFlags {
    /// The last seed.
    ///
    /// # Errors
    /// It is larger than the largest seed.
    pub fn last_seed(&self) -> Result<u64, ConfigError> {
        let Self { seed, seeds, .. } = self;
        seed.checked_add(seeds - 1).ok_or_else(|| ConfigError::Value {
            flag: "--seeds",
            value: seeds.to_string(),
            limit: format!("the largest seed is {}, and the first seed is {seed}", u64::MAX),
        })
    }
}

/// `baton sim --load`.
#[derive(Args, Clone, PartialEq, Debug)]
#[command(next_help_heading = "Load: many workers, a cost model as engine, no KV bytes, no faults")]
pub struct LoadFlags {
    /// Simulate a cluster under load and report latencies, goodput and balance. The flags below
    /// need this flag
    #[arg(long = "load", id = "load")]
    pub is_load_mode: bool,
    /// The requests and the cluster.
    #[command(flatten)]
    pub workload: WorkloadFlags,
    /// Repeat the runs that another simulator recorded in this file, with each of --policies. Print
    /// both results. Fleets, traces (next to the file, in ../mooncake) and cost models are as
    /// recorded
    #[arg(long, value_name = "FILE", conflicts_with_all = ["trace_file", "policy", "speed"])]
    pub against: Option<PathBuf>,
    /// Timing of the simulated engine: as in the recorded runs, or as in Baton
    #[arg(long, value_enum, requires = "against", default_value_t)]
    pub engine: SimEngine,
    /// Name of a recorded run to repeat. May be repeated [default: all]
    #[arg(long, value_name = "NAME", requires = "against")]
    pub rows: Vec<String>,
    /// Policies to run with --against [default: round_robin,slo]
    #[arg(long, value_enum, value_delimiter = ',', requires = "against")]
    pub policies: Vec<Policy>,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

/// The requests, the workers, the network between workers, and the latency limits.
#[derive(Args, Clone, PartialEq, Debug)]
#[command(
    next_help_heading = "Load: requests, workers, the network between workers, and latency limits"
)]
pub struct WorkloadFlags {
    /// Trace of requests in Mooncake's format, one JSON object on each line: timestamp (ms),
    /// input_length, output_length, hash_ids (of blocks of 512 tokens; can be omitted) [default:
    /// random requests]
    #[arg(long, value_name = "FILE.jsonl")]
    pub trace_file: Option<PathBuf>,
    /// Speed of the replay. 2 replays the trace twice as fast as its timestamps [default: 1]
    #[arg(long, value_name = "FACTOR")]
    pub speed: Option<f64>,
    /// Maximum random delay of each request of the trace, in ms of trace time, before --speed
    /// applies [default: 0]
    #[arg(long, value_name = "MS")]
    pub jitter_ms: Option<f64>,
    /// Random requests per second, with exponential gaps [default: 100]
    #[arg(long, value_name = "R")]
    pub rate: Option<f64>,
    /// Mean prompt length of random requests, in tokens, uniform from 1 to nearly twice the mean
    /// [default: 64]
    #[arg(
        long, value_name = "TOKENS",
        value_parser = value_parser!(u32).range(1..=i64::from(CONTEXT_MAX) / 4),
    )]
    pub input_len: Option<u32>,
    /// Mean answer length of random requests, in tokens, uniform from 1 to nearly twice the mean
    /// [default: 16]
    #[arg(
        long, value_name = "TOKENS",
        value_parser = value_parser!(u32).range(1..=i64::from(CONTEXT_MAX) / 4),
    )]
    pub output_len: Option<u32>,
    /// How the router selects the workers of a request [default: least_loaded]
    #[arg(long, value_enum)]
    pub policy: Option<Policy>,
    /// How the router selects the prefill worker [default: --policy]
    #[arg(long, value_enum)]
    pub prefill_policy: Option<Policy>,
    /// How the router selects the decode worker [default: --policy]
    #[arg(long, value_enum)]
    pub decode_policy: Option<Policy>,
    /// Also let decode workers do prefill, if the policy selects that or there is no prefill worker
    #[arg(long)]
    pub local_prefill: bool,
    /// Also admit requests that slo and conditional predict to miss --slo-ttft-ms or --slo-itl-ms
    #[arg(long)]
    pub admit_late: bool,
    /// Time at which a decode worker allocates pages for a prompt [default: early]
    #[arg(long, value_enum)]
    pub decode_allocation: Option<DecodeAllocation>,
    /// Tokens in each KV page, a power of two, 8 to 256 [default: 16]
    #[arg(
        long, value_name = "TOKENS",
        value_parser = value_parser!(u32).range(8..=i64::from(PAGE_SIZE_MAX)),
    )]
    pub page_size: Option<u32>,
    /// Tokens of KV that each worker can hold [default: 819200]
    #[arg(
        long, value_name = "TOKENS",
        value_parser = value_parser!(u32).range(8..=i64::from(u32::MAX / 2)),
    )]
    pub kv_tokens: Option<u32>,
    /// Recurrent state of a request, in tokens of KV with the same size [default: 0]
    #[arg(
        long, value_name = "TOKENS",
        value_parser = value_parser!(u32).range(0..=i64::from(CONTEXT_MAX)),
    )]
    pub state_tokens: Option<u32>,
    /// Most checkpoints of recurrent state that each worker keeps. Only with --state-tokens
    /// [default: as many as fit a quarter of --kv-tokens]
    #[arg(
        long, value_name = "N",
        value_parser = value_parser!(u32).range(0..=i64::from(u32::MAX / 2)),
    )]
    pub checkpoints: Option<u32>,
    /// Free the KV pages of a request when it ends
    #[arg(long, visible_alias = "no-enable-prefix-caching")]
    pub disable_radix_cache: bool,
    /// Maximum number of running requests in each worker (its batch) [default: 256]
    #[arg(
        long, value_name = "N",
        value_parser = value_parser!(u32).range(1..=i64::from(RUNNING_REQUESTS_MAX)),
    )]
    pub max_running_requests: Option<u32>,
    /// Maximum number of requests that wait in a worker. A request that can start at once does not
    /// count. Further requests go to another worker; the last worker refuses them [default: 256]
    #[arg(
        long, value_name = "N",
        value_parser = value_parser!(u32).range(1..=i64::from(QUEUED_REQUESTS_MAX)),
    )]
    pub max_queued_requests: Option<u32>,
    /// Maximum prompt tokens computed in one step [default: 8192]
    #[arg(
        long, value_name = "TOKENS",
        value_parser = value_parser!(u32).range(1..=i64::from(CONTEXT_MAX)),
    )]
    pub chunked_prefill_size: Option<u32>,
    /// Maximum milliseconds of one step over prompt tokens; 0: no limit [default: 0]
    #[arg(
        long, value_name = "MS",
        value_parser = value_parser!(u32).range(0..=i64::from(CHUNK_MS_MAX)),
    )]
    pub chunk_ms: Option<u32>,
    /// Coefficients of the time of a prefill step, in ms: A + sum of (B*new + C*new*(prefix +
    /// new/2)) + D*(sum of new)^2. D can be omitted [default: 8.322,0.033051,1.7068e-6,0:
    /// Qwen3-32B-FP8 on two H200, vLLM 0.24, fitted to an estimator's table]
    #[arg(long, value_name = "A,B,C[,D]", value_delimiter = ',', allow_hyphen_values = true)]
    pub prefill_ms: Vec<f64>,
    /// Coefficients of the time of a decode step, in ms: A + B*context + C*sequences + D*context^2,
    /// with the sum of all contexts. D can be omitted [default: 9.7902,2.0797e-5,0.028017,0: as
    /// above]
    #[arg(long, value_name = "A,B,C[,D]", value_delimiter = ',', allow_hyphen_values = true)]
    pub decode_ms: Vec<f64>,
    /// Bytes of KV that one NIC of a worker transfers for each token [default: 131072, half of a
    /// token of Qwen3-32B]
    #[arg(long, value_name = "BYTES", value_parser = value_parser!(u64).range(1..=1 << 30))]
    pub kv_bytes_per_token: Option<u64>,
    /// Bandwidth of a NIC in gigabytes per second, in each direction [default: 25]
    #[arg(long, value_name = "GB")]
    pub nic_gigabytes: Option<f64>,
    /// One-way latency of a message between two hosts, in microseconds [default: 20]
    #[arg(long, value_name = "US")]
    pub latency_us: Option<f64>,
    /// Maximum number of sessions of a decode worker with prefill workers [default: 1024]
    #[arg(
        long, value_name = "N",
        value_parser = value_parser!(u32).range(1..=SESSIONS_MAX as i64),
    )]
    pub sessions: Option<u32>,
    /// Time to set up a session between two workers, in ms [default: 3]
    #[arg(long, value_name = "MS")]
    pub session_ms: Option<f64>,
    /// Maximum time to first token of a good request, in ms [default: 2000]
    #[arg(long, value_name = "MS")]
    pub slo_ttft_ms: Option<f64>,
    /// Maximum mean time between tokens of a good request, in ms [default: 25]
    #[arg(long, value_name = "MS", visible_alias = "slo-tpot-ms")]
    pub slo_itl_ms: Option<f64>,
}

/// Other tasks of `baton sim`.
#[derive(Subcommand, Clone, PartialEq, Debug)]
pub enum SimCommand {
    /// Find the fleet that sustains the highest request rate: prefill and decode workers, or mixed
    /// workers
    Place(Box<PlaceFlags>),
}

/// `baton sim place`.
#[derive(Args, Clone, PartialEq, Debug)]
#[command(group = clap::ArgGroup::new("size").required(true).args(["workers", "gpus"]))]
pub struct PlaceFlags {
    /// Number of workers in the fleet, 1 to 1024
    #[arg(
        long, value_name = "N",
        value_parser = value_parser!(u32).range(1..=ROUTER_WORKERS_MAX as i64),
    )]
    pub workers: Option<u32>,
    /// Number of GPUs in the fleet, instead of --workers
    #[arg(
        long, value_name = "N",
        value_parser = value_parser!(u32).range(1..=64 * ROUTER_WORKERS_MAX as i64),
    )]
    pub gpus: Option<u32>,
    /// Number of GPUs for each worker
    #[arg(
        long, value_name = "N", default_value_t = 1,
        value_parser = value_parser!(u32).range(1..=64),
    )]
    pub gpus_per_worker: u32,
    /// A fleet sustains a rate if at least this percentage of requests meets both latency limits
    #[arg(long, value_name = "PERCENT", default_value_t = 90.0)]
    pub goodput: f64,
    /// Number of requests in the final run at each rate. For a trace: the first N. Random requests
    /// arrive until the best fleet could have served about N, and for at least ten times
    /// --slo-ttft-ms [default: 500 for each worker, 2000 to 16384]
    #[arg(
        long, value_name = "R",
        value_parser = value_parser!(u32).range(1..=LOAD_REQUESTS_MAX as i64),
    )]
    pub requests: Option<u32>,
    /// Seed of all random choices
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Print one JSON object for each fleet instead of a table
    #[arg(long)]
    pub json: bool,
    /// The requests and the cluster.
    #[command(flatten)]
    pub workload: WorkloadFlags,
}

impl LoadFlags {
    /// A flag of load mode that was typed, other than `--load`.
    pub fn first_typed(&self) -> Option<&'static str> {
        let typed = [
            ("--against", self.against.is_some()),
            ("--rows", !self.rows.is_empty()),
            ("--policies", !self.policies.is_empty()),
            ("--json", self.json),
        ];
        let own = || typed.into_iter().find(|(_, is_typed)| *is_typed).map(|(flag, _)| flag);
        self.workload.first_typed().or_else(own)
    }
}

impl WorkloadFlags {
    /// A flag of this group that was typed.
    pub fn first_typed(&self) -> Option<&'static str> {
        let typed = [
            ("--trace-file", self.trace_file.is_some()),
            ("--speed", self.speed.is_some()),
            ("--jitter-ms", self.jitter_ms.is_some()),
            ("--rate", self.rate.is_some()),
            ("--input-len", self.input_len.is_some()),
            ("--output-len", self.output_len.is_some()),
            ("--policy", self.policy.is_some()),
            ("--prefill-policy", self.prefill_policy.is_some()),
            ("--decode-policy", self.decode_policy.is_some()),
            ("--local-prefill", self.local_prefill),
            ("--admit-late", self.admit_late),
            ("--decode-allocation", self.decode_allocation.is_some()),
            ("--page-size", self.page_size.is_some()),
            ("--kv-tokens", self.kv_tokens.is_some()),
            ("--state-tokens", self.state_tokens.is_some()),
            ("--checkpoints", self.checkpoints.is_some()),
            ("--disable-radix-cache", self.disable_radix_cache),
            ("--max-running-requests", self.max_running_requests.is_some()),
            ("--max-queued-requests", self.max_queued_requests.is_some()),
            ("--chunked-prefill-size", self.chunked_prefill_size.is_some()),
            ("--chunk-ms", self.chunk_ms.is_some()),
            ("--prefill-ms", !self.prefill_ms.is_empty()),
            ("--decode-ms", !self.decode_ms.is_empty()),
            ("--kv-bytes-per-token", self.kv_bytes_per_token.is_some()),
            ("--nic-gigabytes", self.nic_gigabytes.is_some()),
            ("--latency-us", self.latency_us.is_some()),
            ("--sessions", self.sessions.is_some()),
            ("--session-ms", self.session_ms.is_some()),
            ("--slo-ttft-ms", self.slo_ttft_ms.is_some()),
            ("--slo-itl-ms (--slo-tpot-ms)", self.slo_itl_ms.is_some()),
        ];
        typed.into_iter().find(|(_, is_typed)| *is_typed).map(|(flag, _)| flag)
    }
}

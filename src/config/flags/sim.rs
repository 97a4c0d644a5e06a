//! Flags of `baton sim`, of both its modes, and of what is found by the second.

use crate::config::resolved::{DecodeAllocation, Flow, Policy};
use crate::limits::{
    CHUNK_MS_MAX, CONTEXT_MAX, LOAD_REQUESTS_MAX, PAGE_SIZE_MAX, QUEUED_REQUESTS_MAX,
    ROUTER_WORKERS_MAX, RUNNING_REQUESTS_MAX,
};
use clap::{Args, Subcommand, ValueEnum, value_parser};
use std::fmt;
use std::path::PathBuf;

/// How KV moves in a simulated cluster.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub enum SimTransfer {
    /// As each seed has it, also both in one cluster.
    #[default]
    Auto,
    /// All workers are on one machine.
    Shm,
    /// Each is on its own, with a NIC in this process.
    Rdma,
    /// Each is on its own, with streams in this process.
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

/// In which order the workers of a pair are asked in a simulated cluster.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub enum SimFlow {
    /// As each seed has it.
    #[default]
    Auto,
    /// Both at once, under one room.
    Dual,
    /// Prefill, which keeps the KV and says where; then decode, which is told that.
    PrefillFirst,
    /// Decode alone, which asks prefill itself.
    DecodeFirst,
}

impl SimFlow {
    /// The one that is asked for, if one is.
    pub fn pinned(self) -> Option<Flow> {
        match self {
            SimFlow::Auto => None,
            SimFlow::Dual => Some(Flow::Dual),
            SimFlow::PrefillFirst => Some(Flow::PrefillFirst),
            SimFlow::DecodeFirst => Some(Flow::DecodeFirst),
        }
    }
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

/// Whose engine the load mode is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub enum Engine {
    /// That of the recorded runs: KV leaves when all is computed, in one piece that shares no NIC; the first token is what
    /// the first step of decode generates.
    #[default]
    Recorded,
    /// Ours: chunks leave while others are computed, and the first token is the one that prefill samples.
    Own,
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Engine::Own { "own" } else { "recorded" })
    }
}

/// `baton sim`.
#[derive(Args, Clone, PartialEq, Debug)]
pub struct SimFlags {
    /// The first seed: everything that happens follows from it and from the sizes below
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Seeds to run, one after the other; the first that fails ends it, with the command that repeats it
    #[arg(long, value_name = "K", default_value_t = 1, conflicts_with = "load", value_parser = value_parser!(u64).range(1..))]
    pub seeds: u64,
    /// Prefill workers, 1 to 16; with --load 0 to 1024, with 0 decode workers read all prompts
    #[arg(long, value_name = "P", default_value_t = 3, value_parser = value_parser!(u32).range(0..=ROUTER_WORKERS_MAX as i64))]
    pub prefill: u32,
    /// Decode workers, 1 to 16; with --load to 1024
    #[arg(long, value_name = "D", default_value_t = 5, value_parser = value_parser!(u32).range(1..=ROUTER_WORKERS_MAX as i64))]
    pub decode: u32,
    /// Requests of each seed, 1 to 4096 [default: 100]; with --load to 4194304 [default: 10000], of a trace the first
    /// [default: all]
    #[arg(long, value_name = "R", value_parser = value_parser!(u32).range(1..=LOAD_REQUESTS_MAX as i64))]
    pub requests: Option<u32>,
    /// Have nothing go wrong but the order in which things happen
    #[arg(long, conflicts_with = "load")]
    pub calm: bool,
    /// How KV moves
    #[arg(long, value_enum, default_value_t, conflicts_with = "load")]
    pub transfer: SimTransfer,
    /// In which order the workers of a pair are asked
    #[arg(long, value_enum, default_value_t)]
    pub flow: SimFlow,
    /// Tell the story of one room as well, as a failure names it
    #[arg(long, value_name = "ROOM", conflicts_with = "load")]
    pub trace: Option<u64>,
    /// Another thing to do.
    #[command(subcommand)]
    pub command: Option<SimCommand>,
    // Last, as what follows would stand under its heading.
    /// The other mode.
    #[command(flatten)]
    pub load: LoadFlags,
}

/// `baton sim --load`.
#[derive(Args, Clone, PartialEq, Debug)]
#[command(
    next_help_heading = "Load: many workers, a cost model in place of a forward pass, no KV bytes, nothing fails"
)]
pub struct LoadFlags {
    /// Simulate a cluster under load and tell latencies, goodput and balance; the flags below are for this alone
    #[arg(long = "load", id = "load")]
    pub is_asked_for: bool,
    /// What comes, and to what.
    #[command(flatten)]
    pub workload: WorkloadFlags,
    /// Run what is recorded of another simulator in this file, and print both: fleets, traces (beside it, in ../mooncake)
    /// and cost models are as recorded, each run with each of --policies
    #[arg(long, value_name = "FILE", conflicts_with_all = ["trace_file", "policy", "speed"])]
    pub against: Option<PathBuf>,
    /// Whether workers take their time as those of the recorded runs do
    #[arg(long, value_enum, requires = "against", default_value_t)]
    pub engine: Engine,
    /// Of these runs those of this name; may be repeated [default: all]
    #[arg(long, value_name = "NAME", requires = "against")]
    pub rows: Vec<String>,
    /// Policies to run [default: round_robin,slo]
    #[arg(long, value_enum, value_delimiter = ',', requires = "against")]
    pub policies: Vec<Policy>,
    /// One JSON object instead of words
    #[arg(long)]
    pub json: bool,
}

/// What comes, what a worker and the way between two of them are, and what is good enough.
#[derive(Args, Clone, PartialEq, Debug)]
#[command(
    next_help_heading = "Load: what comes, what workers and the way between them are, what is good enough"
)]
pub struct WorkloadFlags {
    /// Requests of a trace as Mooncake writes them, a JSON object a line: timestamp (ms), input_length, output_length,
    /// hash_ids (of blocks of 512 tokens; may be left out) [default: requests are drawn]
    #[arg(long, value_name = "FILE.jsonl")]
    pub trace_file: Option<PathBuf>,
    /// How many times as fast as it says the trace comes [default: 1]
    #[arg(long, value_name = "FACTOR")]
    pub speed: Option<f64>,
    /// Delay each request of the trace by up to so much, drawn, before it is sped up [default: 0]
    #[arg(long, value_name = "MS")]
    pub jitter_ms: Option<f64>,
    /// Drawn requests in a second, with exponential gaps [default: 100]
    #[arg(long, value_name = "R")]
    pub rate: Option<f64>,
    /// Mean tokens of a drawn prompt, all lengths from 1 to nearly twice that alike [default: 64]
    #[arg(long, value_name = "TOKENS", value_parser = value_parser!(u32).range(1..=i64::from(CONTEXT_MAX) / 4))]
    pub input_len: Option<u32>,
    /// Mean tokens of a drawn request's answer, likewise [default: 16]
    #[arg(long, value_name = "TOKENS", value_parser = value_parser!(u32).range(1..=i64::from(CONTEXT_MAX) / 4))]
    pub output_len: Option<u32>,
    /// How the workers of a request are chosen [default: least_loaded]
    #[arg(long, value_enum)]
    pub policy: Option<Policy>,
    /// How its prefill worker is [default: --policy]
    #[arg(long, value_enum)]
    pub prefill_policy: Option<Policy>,
    /// How its decode worker is [default: --policy]
    #[arg(long, value_enum)]
    pub decode_policy: Option<Policy>,
    /// Have decode workers read prompts, too, where the policy says so or there is no prefill worker
    #[arg(long)]
    pub local_prefill: bool,
    /// Let those in as well that slo and conditional foretell to miss --slo-ttft-ms or --slo-itl-ms
    #[arg(long)]
    pub admit_late: bool,
    /// When a decode worker takes pages for a prompt [default: early]
    #[arg(long, value_enum)]
    pub decode_allocation: Option<DecodeAllocation>,
    /// Tokens of a page, a power of two, 8 to 256 [default: 16]
    #[arg(long, value_name = "TOKENS", value_parser = value_parser!(u32).range(8..=i64::from(PAGE_SIZE_MAX)))]
    pub page_size: Option<u32>,
    /// Tokens of KV that a worker holds [default: 819200]
    #[arg(long, value_name = "TOKENS", value_parser = value_parser!(u32).range(8..=i64::from(u32::MAX / 2)))]
    pub kv_tokens: Option<u32>,
    /// Forget a request's KV when it is over
    #[arg(long, visible_alias = "no-enable-prefix-caching")]
    pub disable_radix_cache: bool,
    /// Most requests that a worker steps at once [default: 256]
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=i64::from(RUNNING_REQUESTS_MAX)))]
    pub max_running_requests: Option<u32>,
    /// Most requests that wait in a worker beyond those that can begin at once; who comes then is sent to others, and
    /// refused by the last [default: 256]
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=i64::from(QUEUED_REQUESTS_MAX)))]
    pub max_queued_requests: Option<u32>,
    /// Most prompt tokens computed in one turn [default: 8192]
    #[arg(long, value_name = "TOKENS", value_parser = value_parser!(u32).range(1..=i64::from(CONTEXT_MAX)))]
    pub chunked_prefill_size: Option<u32>,
    /// Longest time of one turn's prompt tokens; 0: any [default: 0]
    #[arg(long, value_name = "MS", value_parser = value_parser!(u32).range(0..=i64::from(CHUNK_MS_MAX)))]
    pub chunk_ms: Option<u32>,
    /// A step over prompts takes A + sum of (B*new + C*new*(prefix + new/2)) + D*(sum of new)^2 ms; D may be left away
    /// [default: 8.322,0.033051,1.7068e-6,0: Qwen3-32B-FP8 on two H200, vLLM 0.24, fitted to an estimator's table]
    #[arg(long, value_name = "A,B,C[,D]", value_delimiter = ',', allow_hyphen_values = true)]
    pub prefill_ms: Vec<f64>,
    /// A step that generates takes A + B*context + C*sequences + D*context^2 ms, context being the sum over all; D may be
    /// left away [default: 9.7902,2.0797e-5,0.028017,0: as above]
    #[arg(long, value_name = "A,B,C[,D]", value_delimiter = ',', allow_hyphen_values = true)]
    pub decode_ms: Vec<f64>,
    /// Bytes of KV that one NIC of a worker carries for a token [default: 131072, half of what a token of Qwen3-32B takes]
    #[arg(long, value_name = "BYTES", value_parser = value_parser!(u64).range(1..=1 << 30))]
    pub kv_bytes_per_token: Option<u64>,
    /// Gigabytes that a NIC carries in a second, each way [default: 25]
    #[arg(long, value_name = "GB")]
    pub nic_gigabytes: Option<f64>,
    /// One way of a message between two hosts [default: 20]
    #[arg(long, value_name = "US")]
    pub latency_us: Option<f64>,
    /// A request is good if its first token comes within this [default: 2000]
    #[arg(long, value_name = "MS")]
    pub slo_ttft_ms: Option<f64>,
    /// and its others so soon one after the other, on average [default: 25]
    #[arg(long, value_name = "MS", visible_alias = "slo-tpot-ms")]
    pub slo_itl_ms: Option<f64>,
}

/// What `baton sim` does besides.
#[derive(Subcommand, Clone, PartialEq, Debug)]
pub enum SimCommand {
    /// Find the fleet that sustains the highest rate of a trace: prefill and decode workers, or workers that do both
    Place(Box<PlaceFlags>),
}

/// `baton sim place`.
#[derive(Args, Clone, PartialEq, Debug)]
#[command(group = clap::ArgGroup::new("size").required(true).args(["workers", "gpus"]))]
pub struct PlaceFlags {
    /// Workers of the fleet, 1 to 1024
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=ROUTER_WORKERS_MAX as i64))]
    pub workers: Option<u32>,
    /// GPUs of the fleet, in place of --workers
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=64 * ROUTER_WORKERS_MAX as i64))]
    pub gpus: Option<u32>,
    /// GPUs that a worker takes
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u32).range(1..=64))]
    pub gpus_per_worker: u32,
    /// Percentage of requests that must keep both limits at a rate that counts as sustained
    #[arg(long, value_name = "PERCENT", default_value_t = 90.0)]
    pub goodput: f64,
    /// Requests of the trace that a rate is tried with in the end, the first; of drawn ones all that come, whatever the rate,
    /// in the time in which the best fleet is thought to serve so many, ten times --slo-ttft-ms at least [default: 500 for
    /// each worker, 2000 to 16384]
    #[arg(long, value_name = "R", value_parser = value_parser!(u32).range(1..=LOAD_REQUESTS_MAX as i64))]
    pub requests: Option<u32>,
    /// Everything follows from it
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// One JSON object for each fleet instead of a table
    #[arg(long)]
    pub json: bool,
    /// What comes, and to what.
    #[command(flatten)]
    pub workload: WorkloadFlags,
}

impl LoadFlags {
    /// One that was typed, besides `--load`.
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
    /// One that was typed.
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
            ("--slo-ttft-ms", self.slo_ttft_ms.is_some()),
            ("--slo-itl-ms (--slo-tpot-ms)", self.slo_itl_ms.is_some()),
        ];
        typed.into_iter().find(|(_, is_typed)| *is_typed).map(|(flag, _)| flag)
    }
}

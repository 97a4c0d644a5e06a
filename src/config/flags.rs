//! Flags as typed: one struct per command, its flags in groups that several commands share.
//!
//! Ranges of single values are checked here, by clap; what depends on several is `resolve`'s.
//! Names follow the field (vLLM, SGLang), so that habits and scripts carry over.

mod balance;
mod bench;
mod routing;
mod sim;

pub(super) use balance::BalanceFlags;
pub use bench::{BenchFlags, ShapeFlags, TransferBenchFlags};
pub(super) use routing::{
    BreakerFlags, ForecastFlags, HealthFlags, RequestFlags, RetryFlags, RoutingFlags, ScrapeFlags,
};
pub use sim::{
    Engine, LoadFlags, PlaceFlags, SimCommand, SimFlags, SimFlow, SimTransfer, WorkloadFlags,
};

use super::registry::RegistryAddress;
use super::resolved::{
    DataThreads, DecodeAllocation, FirstToken, KvDtype, LoadFormat, LogFormat, LogLevel, Transfer,
};
use super::values::{
    ByteSize, Cidr, CpuList, WorkerUrl, parse_advertised, parse_host, parse_peer,
    parse_peer_timeout,
};
use crate::limits::{
    BOOTSTRAP_TIMEOUT, CHUNK_MS_MAX, CONTEXT_MAX, HTTP_BODY_DEFAULT, PAGE_SIZE_MAX,
    QUEUED_REQUESTS_MAX, REQUEST_TIME_MAX, RESERVED_TOKENS, RUNNING_REQUESTS_MAX, THREADS_MAX,
    WORKERS_MAX,
};
use clap::{Args, Parser, Subcommand, value_parser};
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Serves large language models with prefill and decode on different workers.
#[derive(Parser, Debug)]
#[command(name = "baton", version, arg_required_else_help = true)]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: CliCommand,
}

/// The commands.
#[derive(Subcommand, Debug)]
pub enum CliCommand {
    /// Serve a model from this one process
    Serve(ServeFlags),
    /// Run a prefill worker: reads prompts, hands their KV cache over
    Prefill(PrefillFlags),
    /// Run a decode worker: takes KV caches over, generates
    Decode(DecodeFlags),
    /// Run the router in front of prefill and decode workers
    Router(RouterFlags),
    /// Measure on this machine
    #[command(subcommand)]
    Bench(BenchFlags),
    /// Have a worker, or a router, take nothing new, finish what it has and end
    Drain(DrainFlags),
    /// Tell what this machine offers, and what would be chosen on it
    Doctor(DoctorFlags),
    /// Try the hand-off out: a cluster in one thread, with the code of workers and a model that is a hash
    #[command(args_conflicts_with_subcommands = true)]
    Sim(SimFlags),
}

/// `baton drain`.
#[derive(Args, Debug)]
pub struct DrainFlags {
    /// The HTTP interface of what is to drain, http://HOST:PORT or https://HOST:PORT
    #[arg(value_name = "URL")]
    pub(super) url: WorkerUrl,
    /// Keys that it asks its clients for, one a line; the first is shown
    #[arg(long, value_name = "FILE")]
    pub(super) api_key_file: Option<PathBuf>,
    /// Certificates of those who vouch for it, in PEM, where it speaks HTTPS
    #[arg(long, value_name = "FILE")]
    pub(super) tls_ca_file: Option<PathBuf>,
    /// Return once it has ended, not once it drains
    #[arg(long)]
    pub(super) wait: bool,
}

/// `baton doctor`.
#[derive(Args, Clone, PartialEq, Eq, Debug)]
pub struct DoctorFlags {
    /// Tell, too, what `--transfer auto` would choose between this host and that, where `baton bench transfer --listen`
    /// must be running; the exit status is 1 where it does not answer
    #[arg(long, value_name = "HOST:PORT", value_parser = parse_peer)]
    pub peer: Option<String>,
}

/// `baton serve`.
#[derive(Args, Debug)]
pub struct ServeFlags {
    #[command(flatten)]
    pub(super) worker: WorkerFlags,
    #[command(flatten)]
    pub(super) layout: LayoutFlags,
    #[command(flatten)]
    pub(super) prefill: ChunkFlags,
    #[command(flatten)]
    pub(super) retraction: RetractionFlags,
    #[command(flatten)]
    pub(super) process: ProcessFlags,
}

/// `baton prefill`.
#[derive(Args, Debug)]
pub struct PrefillFlags {
    #[command(flatten)]
    pub(super) worker: WorkerFlags,
    #[command(flatten)]
    pub(super) prefill: ChunkFlags,
    #[command(flatten)]
    pub(super) retraction: RetractionFlags,
    #[command(flatten)]
    pub(super) handoff: HandoffFlags,
    #[command(flatten)]
    pub(super) source: SourceFlags,
    #[command(flatten)]
    pub(super) destination: DestinationFlags,
    #[command(flatten)]
    pub(super) process: ProcessFlags,
}

/// `baton decode`.
#[derive(Args, Debug)]
pub struct DecodeFlags {
    #[command(flatten)]
    pub(super) worker: WorkerFlags,
    #[command(flatten)]
    pub(super) recompute: ChunkFlags,
    #[command(flatten)]
    pub(super) retraction: RetractionFlags,
    #[command(flatten)]
    pub(super) handoff: HandoffFlags,
    #[command(flatten)]
    pub(super) source: SourceFlags,
    #[command(flatten)]
    pub(super) destination: DestinationFlags,
    #[command(flatten)]
    pub(super) process: ProcessFlags,
}

/// `baton router`.
#[derive(Args, Debug)]
pub struct RouterFlags {
    #[command(flatten)]
    pub(super) front: FrontFlags,
    #[command(flatten)]
    pub(super) scrape: ScrapeFlags,
    #[command(flatten)]
    pub(super) workers: RoutingFlags,
    #[command(flatten)]
    pub(super) forecast: ForecastFlags,
    #[command(flatten)]
    pub(super) balance: BalanceFlags,
    #[command(flatten)]
    pub(super) requests: RequestFlags,
    #[command(flatten)]
    pub(super) retries: RetryFlags,
    #[command(flatten)]
    pub(super) breaker: BreakerFlags,
    #[command(flatten)]
    pub(super) health: HealthFlags,
    #[command(flatten)]
    pub(super) process: ProcessFlags,
}

/// What every process that holds a model takes.
#[derive(Args, Debug)]
pub(super) struct WorkerFlags {
    #[command(flatten)]
    pub(super) model: ModelFlags,
    #[command(flatten)]
    pub(super) front: FrontFlags,
    #[command(flatten)]
    pub(super) kv: KvFlags,
    #[command(flatten)]
    pub(super) admission: AdmissionFlags,
    #[command(flatten)]
    pub(super) cores: CoreFlags,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Model")]
pub(super) struct ModelFlags {
    /// A Hugging Face directory or a .gguf file
    #[arg(value_name = "MODEL", help_heading = "Arguments")]
    pub(super) model: PathBuf,
    /// Name of the model in requests and answers; may be repeated, the first is shown [default: the
    /// name of the file or directory, and MODEL as typed]
    #[arg(long, value_name = "NAME")]
    pub(super) served_model_name: Vec<String>,
    /// Longest prompt and answer together, in tokens [default: what the model allows]
    #[arg(long, value_name = "TOKENS", value_parser = value_parser!(u32).range(2..=i64::from(CONTEXT_MAX)))]
    pub(super) max_model_len: Option<u32>,
    /// dummy: seeded random weights from config.json alone, to try the machinery with any model size
    #[arg(long, value_enum, default_value_t)]
    pub(super) load_format: LoadFormat,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "HTTP")]
pub(super) struct FrontFlags {
    /// Address to listen on
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", value_parser = parse_host)]
    pub(super) host: IpAddr,
    /// Port of the HTTP interface; 0 takes a free one
    #[arg(long)]
    pub(super) port: Option<u16>,
    /// Keys that clients must show as `Authorization: Bearer KEY`, one a line
    #[arg(long, value_name = "FILE")]
    pub(super) api_key_file: Option<PathBuf>,
    /// Speak HTTPS with this certificate, and those that lead from it to one that clients know, in PEM
    #[arg(long, value_name = "FILE", aliases = ["ssl-certfile", "ssl-cert-file", "tls-cert-path"], requires = "tls_key_file")]
    pub(super) tls_cert_file: Option<PathBuf>,
    /// Its private key, in PEM
    #[arg(long, value_name = "FILE", aliases = ["ssl-keyfile", "ssl-key-file", "tls-key-path"], requires = "tls_cert_file")]
    pub(super) tls_key_file: Option<PathBuf>,
    /// Longest body of a request, in bytes or as 8MiB, at most 256MiB; the bodies of all requests that run are 1GiB at most
    #[arg(long, value_name = "SIZE", alias = "max-body-bytes", default_value_t = ByteSize(HTTP_BODY_DEFAULT as u64))]
    pub(super) max_payload_size: ByteSize,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "KV cache")]
pub(super) struct KvFlags {
    /// Tokens of a page, a power of two
    #[arg(long, value_name = "TOKENS", default_value_t = 16, value_parser = value_parser!(u32).range(1..=i64::from(PAGE_SIZE_MAX)))]
    pub(super) page_size: u32,
    /// Memory for the KV cache of each worker, such as 512MiB; taken when first used, all of it sooner or later
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    pub(super) kv_memory: ByteSize,
    /// Element type; auto: f32 for f32 checkpoints, else f16
    #[arg(long, value_enum, default_value_t)]
    pub(super) kv_dtype: KvDtype,
    /// Forget a request's KV when it is over; by default it is kept for prompts that begin the same, as long as nobody
    /// else needs its pages
    #[arg(long, visible_alias = "no-enable-prefix-caching")]
    pub(super) disable_radix_cache: bool,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Scheduling")]
pub(super) struct AdmissionFlags {
    /// Most requests that a worker steps at once
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = value_parser!(u32).range(1..=i64::from(RUNNING_REQUESTS_MAX)))]
    pub(super) max_running_requests: u32,
    /// Most requests that wait in a worker for KV pages or their turn, beyond those that can begin at once; then the answer
    /// is 429. In a decode worker twice as many as run may have KV on its way besides
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = value_parser!(u32).range(1..=i64::from(QUEUED_REQUESTS_MAX)))]
    pub(super) max_queued_requests: u32,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Scheduling")]
pub(super) struct ChunkFlags {
    /// What --chunked-prefill-size may not exceed, also by default; has no further effect [default: 16384,
    /// or the chunk size where that is more]
    #[arg(long, value_name = "TOKENS", value_parser = value_parser!(u32).range(1..=i64::from(CONTEXT_MAX)))]
    pub(super) max_prefill_tokens: Option<u32>,
    /// Most prompt tokens computed in one turn [default: 2048, or --max-prefill-tokens where that is less]
    #[arg(long, value_name = "TOKENS", value_parser = value_parser!(u32).range(1..=i64::from(CONTEXT_MAX)))]
    pub(super) chunked_prefill_size: Option<u32>,
    /// Longest time of one turn's prompt tokens: what a long prompt may add between two tokens of a stream
    #[arg(long, value_name = "MS", default_value_t = 100, value_parser = value_parser!(u32).range(1..=i64::from(CHUNK_MS_MAX)))]
    pub(super) chunk_ms: u32,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "KV cache")]
pub(super) struct RetractionFlags {
    /// Tokens that a request may still generate of which KV pages are kept free for it. More are found as it goes on; where
    /// there are none, the request that has generated least gives its pages up and continues later, with the same output
    #[arg(long, visible_alias = "disaggregation-num-reserved-decode-tokens", value_name = "TOKENS", default_value_t = RESERVED_TOKENS, value_parser = value_parser!(u32).range(..=i64::from(CONTEXT_MAX)))]
    pub(super) num_reserved_decode_tokens: u32,
    /// Memory of each decode worker for the KV of such requests; what it does not take is computed again [default: as
    /// much as --kv-memory; taken when first used]
    #[arg(long, value_name = "SIZE")]
    pub(super) swap_memory: Option<ByteSize>,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Cores")]
pub(super) struct CoreFlags {
    /// Logical CPUs to run and pin threads on, such as 0-3,8 [default: all that are allowed, pinned
    /// where there are enough]
    #[arg(long, value_name = "LIST")]
    pub(super) cpus: Option<CpuList>,
    /// Compute threads [default: one per CPU]
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=i64::from(THREADS_MAX)))]
    pub(super) threads: Option<u32>,
    /// Spin for a moment before sleeping when idle, also where threads outnumber cores
    #[arg(long)]
    pub(super) busy_poll: bool,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Hand-off")]
pub(super) struct LayoutFlags {
    /// One worker that does both, without hand-off
    #[arg(long)]
    pub(super) mixed: bool,
    /// Prefill workers in this process [default: 1]
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=i64::from(WORKERS_MAX)))]
    pub(super) prefill_workers: Option<u32>,
    /// Decode workers in this process [default: 1]
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=i64::from(WORKERS_MAX)))]
    pub(super) decode_workers: Option<u32>,
    /// How KV moves between them [default: auto, which is shm here]
    #[arg(long, value_enum)]
    pub(super) transfer: Option<Transfer>,
    /// When a decode worker takes pages for a prompt: before prefill begins (early), or when it is done (late)
    /// [default: early]
    #[arg(long, alias = "disaggregation-decode-allocation-policy", value_enum)]
    pub(super) decode_allocation: Option<DecodeAllocation>,
    /// Whose token a stream begins with: prefill's comes as soon as it is sampled, before the KV has moved [default: decode]
    #[arg(long, value_enum, hide_default_value = true)]
    pub(super) first_token: Option<FirstToken>,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Hand-off")]
pub(super) struct HandoffFlags {
    /// How KV moves; auto: shm on the same host, else rdma where both have it, else tcp. fake: it does not
    #[arg(long, value_enum, default_value_t)]
    pub(super) transfer: Transfer,
    /// RDMA devices to use, as ibv_devices calls them [default: those with an active port on the NUMA node of this
    /// worker's CPUs, or all where none is; up to 4]
    #[arg(
        long,
        alias = "disaggregation-ib-device",
        value_name = "NAME[,NAME]",
        value_delimiter = ','
    )]
    pub(super) rdma_devices: Vec<String>,
    /// Address that peers are told to dial; a prefill worker may have a name, which stands for the address
    /// that its registry is reached by [default: --host; where that is every address, the one they already
    /// reach this worker by]
    #[arg(long, value_name = "HOST", value_parser = parse_advertised)]
    pub(super) advertise_host: Option<String>,
    /// File of at least 32 random bytes that all workers of the cluster share. May be repeated, up to 4 times, so
    /// that keys can be exchanged while workers run: the first key is proven to peers, each is accepted of them
    #[arg(long, value_name = "FILE")]
    pub(super) cluster_key_file: Vec<PathBuf>,
    /// Listen for peers beyond loopback without a cluster key: whoever reaches the port is believed
    #[arg(long)]
    pub(super) insecure: bool,
    /// Where this worker enters itself and is found: routers that keep a registry, as http://HOST:PORT,http://HOST:PORT (or
    /// https://, with --tls-ca-file), or etcd, as etcd://HOST:PORT,HOST:PORT
    #[arg(long, value_name = "REGISTRY")]
    pub(super) registry: Option<RegistryAddress>,
    /// Certificates of those who vouch for routers at https:// of --registry, and for prefill workers that speak HTTPS and are
    /// asked in the flow decode-first, in PEM
    #[arg(long, value_name = "FILE")]
    pub(super) tls_ca_file: Option<PathBuf>,
    /// Seconds of silence after which a peer counts as dead, 0.5 to 60
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = parse_peer_timeout)]
    pub(super) peer_timeout: Duration,
    /// Honour the bootstrap host 2.2.2.2, which asks for a transfer of nothing
    #[arg(long)]
    pub(super) fake_bootstrap: bool,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "While it is a prefill worker (POST /role changes that)")]
pub(super) struct SourceFlags {
    /// Port of the registry where decode workers look this worker up; 0 takes a free one [default: of baton prefill 8998,
    /// of baton decode a free one]
    #[arg(long, value_name = "PORT")]
    pub(super) bootstrap_port: Option<u16>,
    /// Port that decode workers dial; 0 takes a free one, which the registry tells
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    pub(super) control_port: u16,
    /// Seconds after which a request fails that no decode worker has asked for, as when that one is dead and the router,
    /// like SGLang's, waits for both: then another pair is tried
    #[arg(long, value_name = "SECONDS", default_value_t = BOOTSTRAP_TIMEOUT, value_parser = value_parser!(u32).range(1..=REQUEST_TIME_MAX.as_secs() as i64))]
    pub(super) bootstrap_timeout: u32,
    /// Who posts and reaps what is written over rdma; fused: the thread that moves all KV; split: two threads for
    /// each NIC [default: fused]
    #[arg(long, value_enum)]
    pub(super) data_threads: Option<DataThreads>,
    /// When decode workers take pages for a prompt; early: before it is read here, and each chunk is handed over as soon
    /// as it is computed; late: when all is computed, which is kept here until then
    #[arg(long, alias = "disaggregation-decode-allocation-policy", value_enum, default_value_t)]
    pub(super) decode_allocation: DecodeAllocation,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "While it is a decode worker (POST /role changes that)")]
pub(super) struct DestinationFlags {
    /// Port where KV arrives over tcp; 0 takes a free one, which peers are told
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    pub(super) data_port: u16,
    /// Networks in which a bootstrap_host named by a request may lie [default: loopback]
    #[arg(long, value_name = "CIDR[,CIDR]", value_delimiter = ',')]
    pub(super) bootstrap_allow: Vec<Cidr>,
    /// Read the prompts of requests that name no prefill worker, too: a router sends such where none is left
    #[arg(long)]
    pub(super) local_prefill: bool,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Process")]
pub(super) struct ProcessFlags {
    /// Least level of events logged [default: BATON_LOG, else info]
    #[arg(long, value_enum, value_name = "LEVEL")]
    pub(super) log_level: Option<LogLevel>,
    /// Form of the log on standard error
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t)]
    pub(super) log_format: LogFormat,
    /// Print what all flags come to, as JSON, and exit
    #[arg(long)]
    pub(super) print_config: bool,
}

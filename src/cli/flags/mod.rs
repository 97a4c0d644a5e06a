//! Flags as typed: one struct for each command, and one for each group of flags that several
//! commands share.
//!
//! Invariants: clap checks the range of each single value here; names follow vLLM and SGLang, so
//! that existing scripts work. Not here: rules between several flags (`resolve`).

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
    LoadFlags, PlaceFlags, SimCommand, SimEngine, SimFlags, SimFlow, SimTransfer, WorkloadFlags,
};

use crate::config::SchedulingPolicy;
use crate::config::parsers::{ReasoningParser, ToolCallParser};
use crate::config::registry::RegistryAddress;
use crate::config::values::{
    ByteSize, CpuList, WorkerUrl, parse_advertised, parse_host, parse_origin, parse_peer,
    parse_peer_timeout,
};
use crate::config::{DataThreadMode, FirstToken, KernelFamily, KvCacheDtype, LoadFormat, Transfer};
use crate::ids::DecodeAllocation;
use crate::limits::{
    BOOTSTRAP_TIMEOUT, CHUNK_MS_MAX, CONTEXT_MAX, HTTP_BODY_DEFAULT, KEY_PER_MINUTE_MAX,
    PAGE_SIZE_MAX, QUEUED_REQUESTS_MAX, REQUEST_TIME_MAX, RESERVED_TOKENS, RUNNING_REQUESTS_MAX,
    THREADS_MAX, WORKERS_MAX,
};
use crate::obs::log::{LogFormat, LogLevel};
use crate::stdx::cidr::Cidr;
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
    /// Run a prefill worker: computes the KV cache of prompts and transfers it to decode workers
    Prefill(PrefillFlags),
    /// Run a decode worker: receives the KV cache of prompts and generates the answers
    Decode(DecodeFlags),
    /// Run the router in front of prefill and decode workers
    Router(RouterFlags),
    /// Run a benchmark on this host
    #[command(subcommand)]
    Bench(BenchFlags),
    /// Drain a worker or a router: it accepts no new requests, finishes the running ones and exits
    Drain(DrainFlags),
    /// Show the features of this host and the choices that Baton makes on it
    Doctor(DoctorFlags),
    /// Test the protocol in a simulated cluster. One thread runs the router and all workers; a hash
    /// replaces the model
    #[command(args_conflicts_with_subcommands = true)]
    Sim(SimFlags),
}

/// `baton drain`.
#[derive(Args, Debug)]
pub struct DrainFlags {
    /// URL of the worker or router to drain: http://HOST:PORT or https://HOST:PORT
    #[arg(value_name = "URL")]
    pub(super) url: WorkerUrl,
    /// File of the API keys of the process, one on each line; the first key is sent
    #[arg(long, value_name = "FILE")]
    pub(super) api_key_file: Option<PathBuf>,
    /// File of the admin keys of the process, if it has --admin-key-file; the first key is sent
    #[arg(long, value_name = "FILE", conflicts_with = "api_key_file")]
    pub(super) admin_key_file: Option<PathBuf>,
    /// File with CA certificates in PEM. They verify the server's certificate if the URL is
    /// https://
    #[arg(long, value_name = "FILE")]
    pub(super) tls_ca_file: Option<PathBuf>,
    /// Wait until the process has ended. Without this flag, the command returns when the drain has
    /// begun
    #[arg(long)]
    pub(super) wait: bool,
}

/// `baton doctor`.
#[derive(Args, Clone, PartialEq, Eq, Debug)]
pub struct DoctorFlags {
    /// Also show the transport that `--transfer auto` would choose between this host and the peer,
    /// which must run `baton bench transfer --listen`. If the peer does not answer, the exit status
    /// is 1
    #[arg(long, value_name = "HOST:PORT", value_parser = parse_peer)]
    pub peer: Option<String>,
    /// Show the CPUs of each thread for a worker with this --cpus [default: all allowed CPUs]
    #[arg(long, value_name = "LIST")]
    pub(super) cpus: Option<CpuList>,
    /// Show the CPUs of each thread for a worker with this --threads [default: one per CPU]
    #[arg(
        long, value_name = "N",
        value_parser = value_parser!(u32).range(1..=i64::from(THREADS_MAX)),
    )]
    pub(super) threads: Option<u32>,
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
    pub(super) server: ServerFlags,
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

/// Limit of requests and tokens per minute, in the type of clap's ranges.
const PER_MINUTE_MAX: i64 = KEY_PER_MINUTE_MAX as i64;

/// Flags of every process that holds a model.
#[derive(Args, Debug)]
pub(super) struct WorkerFlags {
    #[command(flatten)]
    pub(super) model: ModelFlags,
    #[command(flatten)]
    pub(super) server: ServerFlags,
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
    /// Hugging Face model directory, .gguf file, or model on a hub: OWNER/REPOSITORY, with
    /// :FILE.gguf or :QUANT for a GGUF file of it. An existing path comes first
    #[arg(value_name = "MODEL", help_heading = "Arguments")]
    pub(super) model: PathBuf,
    /// Branch, tag or commit of a model on a hub [default: main]
    #[arg(long, value_name = "NAME")]
    pub(super) revision: Option<String>,
    /// Model name in requests and answers. May be repeated; answers show the first name [default:
    /// the name of the file or directory, and MODEL as typed; for a model on a hub, MODEL as typed]
    #[arg(long, value_name = "NAME")]
    pub(super) served_model_name: Vec<String>,
    /// Maximum tokens of prompt and answer together [default: the model's limit]
    #[arg(
        long, value_name = "TOKENS",
        value_parser = value_parser!(u32).range(2..=i64::from(CONTEXT_MAX)),
    )]
    pub(super) max_model_len: Option<u32>,
    /// Source of the weights. dummy needs only config.json and uses seeded random weights, for
    /// tests with any model size
    #[arg(long, value_enum, default_value_t)]
    pub(super) load_format: LoadFormat,
    /// How the model writes tool calls. auto takes what its chat template shows; none refuses tools
    #[arg(long, value_enum, default_value_t, value_name = "NAME")]
    pub(super) tool_call_parser: ToolCallParser,
    /// How the model writes reasoning. auto takes what its chat template shows; none leaves
    /// reasoning in the content
    #[arg(long, value_enum, default_value_t, value_name = "NAME")]
    pub(super) reasoning_parser: ReasoningParser,
    /// Accept chat_template in requests. A template is a program that can use much memory, so all
    /// clients must be trusted
    #[arg(long)]
    pub(super) trust_request_chat_template: bool,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "HTTP")]
pub(super) struct ServerFlags {
    /// IP address to listen on, or localhost
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", value_parser = parse_host)]
    pub(super) host: IpAddr,
    /// Port of the HTTP interface; 0 takes a free port
    #[arg(long)]
    pub(super) port: Option<u16>,
    /// File of API keys, one on each line. Clients must send one of them as `Authorization: Bearer
    /// KEY`
    #[arg(long, value_name = "FILE")]
    pub(super) api_key_file: Option<PathBuf>,
    /// Maximum requests for text per minute of each API key. Further requests get status 429. The
    /// line of a key can have another value: `KEY requests-per-minute=N` [default: no limit]
    #[arg(
        long, value_name = "N", value_parser = value_parser!(u32).range(1..=PER_MINUTE_MAX),
    )]
    pub(super) key_requests_per_minute: Option<u32>,
    /// Maximum tokens per minute of each API key, of prompts and answers together. Further requests
    /// get status 429. The line of a key can have another value: `KEY tokens-per-minute=N`
    /// [default: no limit]
    #[arg(
        long, value_name = "N", value_parser = value_parser!(u32).range(1..=PER_MINUTE_MAX),
    )]
    pub(super) key_tokens_per_minute: Option<u32>,
    /// File of admin keys, one on each line. Only with an admin key, a client can drain, abort all
    /// requests, flush caches, and change roles and workers [default: every API key permits this]
    #[arg(long, value_name = "FILE")]
    pub(super) admin_key_file: Option<PathBuf>,
    /// Serve HTTPS with this certificate, in PEM. Intermediate certificates follow it in the file
    #[arg(
        long, value_name = "FILE", aliases = ["ssl-certfile", "ssl-cert-file", "tls-cert-path"],
        requires = "tls_key_file",
    )]
    pub(super) tls_cert_file: Option<PathBuf>,
    /// Private key of --tls-cert-file, in PEM
    #[arg(
        long, value_name = "FILE", aliases = ["ssl-keyfile", "ssl-key-file", "tls-key-path"],
        requires = "tls_cert_file",
    )]
    pub(super) tls_key_file: Option<PathBuf>,
    /// Maximum size of a request body, in bytes or with a unit such as 8MiB, up to 256MiB. The
    /// bodies of all running requests together are limited to 1GiB
    #[arg(
        long, value_name = "SIZE", alias = "max-body-bytes",
        default_value_t = ByteSize(HTTP_BODY_DEFAULT as u64),
    )]
    pub(super) max_payload_size: ByteSize,
    /// Origins of web pages that can send requests and read the answers, such as
    /// `https://chat.example.com`; * is every origin. No page can change workers or roles
    #[arg(
        long, value_name = "ORIGIN", num_args = 1.., alias = "cors-allowed-origins",
        value_parser = parse_origin,
    )]
    pub(super) allowed_origins: Vec<String>,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "KV cache")]
pub(super) struct KvFlags {
    /// Tokens in each KV page, a power of two, 1 to 256. Attention beside recurrent layers can need
    /// large pages. Without attention, checkpoints of the state are so many tokens apart
    #[arg(
        long, value_name = "TOKENS", default_value_t = 16,
        value_parser = value_parser!(u32).range(1..=i64::from(PAGE_SIZE_MAX)),
    )]
    pub(super) page_size: u32,
    /// KV cache memory of each worker, such as 512MiB; 1 MiB to 64 TiB. The memory is allocated on
    /// first use; under load, a worker uses all of it
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    pub(super) kv_memory: ByteSize,
    /// Element type of the KV cache. auto: f32 for f32 weights and for models of recurrent layers
    /// alone, f16 for all others
    #[arg(long, value_enum, default_value_t)]
    pub(super) kv_dtype: KvCacheDtype,
    /// Free the KV pages of a request when it ends. Without this flag, the pages stay cached for
    /// prompts with the same prefix until other requests need the memory
    #[arg(long, visible_alias = "no-enable-prefix-caching")]
    pub(super) disable_radix_cache: bool,
    /// Part of --kv-memory that checkpoints of recurrent state can take. A prompt that begins as an
    /// earlier one continues from a checkpoint. 0: it is computed from its beginning. Without this
    /// flag, checkpoints take up to a quarter of --kv-memory. Only for models with recurrent state:
    /// Mamba-2, Falcon-H1 and Qwen3-Next
    #[arg(long, value_name = "SIZE")]
    pub(super) state_memory: Option<ByteSize>,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Scheduling")]
pub(super) struct AdmissionFlags {
    /// Maximum number of running requests in each worker (its batch)
    #[arg(
        long, value_name = "N", default_value_t = 64,
        value_parser = value_parser!(u32).range(1..=i64::from(RUNNING_REQUESTS_MAX)),
    )]
    pub(super) max_running_requests: u32,
    /// Maximum number of requests that wait in a worker. A request that can start at once does not
    /// count. Further requests get status 429. In a decode worker, requests in KV transfer do not
    /// count: their limit is twice --max-running-requests
    #[arg(
        long, value_name = "N", default_value_t = 1024,
        value_parser = value_parser!(u32).range(1..=i64::from(QUEUED_REQUESTS_MAX)),
    )]
    pub(super) max_queued_requests: u32,
    /// Order of waiting requests. fcfs: first come, first served. priority: by the field priority
    /// of requests, and those of one priority in order of arrival
    #[arg(long, value_enum, default_value_t)]
    pub(super) scheduling_policy: SchedulingPolicy,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Scheduling")]
pub(super) struct ChunkFlags {
    /// Upper limit of --chunked-prefill-size and of its default. The flag has no other effect
    /// [default: 16384, or --chunked-prefill-size if that is larger]
    #[arg(
        long, value_name = "TOKENS",
        value_parser = value_parser!(u32).range(1..=i64::from(CONTEXT_MAX)),
    )]
    pub(super) max_prefill_tokens: Option<u32>,
    /// Maximum prompt tokens computed in one step [default: 2048, or --max-prefill-tokens if that
    /// is smaller]
    #[arg(
        long, value_name = "TOKENS",
        value_parser = value_parser!(u32).range(1..=i64::from(CONTEXT_MAX)),
    )]
    pub(super) chunked_prefill_size: Option<u32>,
    /// Maximum milliseconds of a step that computes prompt tokens. It limits the delay that a long
    /// prompt adds between two tokens of a stream
    #[arg(
        long, value_name = "MS", default_value_t = 100,
        value_parser = value_parser!(u32).range(1..=i64::from(CHUNK_MS_MAX)),
    )]
    pub(super) chunk_ms: u32,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "KV cache")]
pub(super) struct RetractionFlags {
    /// Number of future output tokens for which each running request reserves KV pages. If pages
    /// run out, the worker retracts the request with the fewest generated tokens. That request
    /// frees its pages and continues later with the same output
    #[arg(
        long, visible_alias = "disaggregation-num-reserved-decode-tokens", value_name = "TOKENS",
        default_value_t = RESERVED_TOKENS,
        value_parser = value_parser!(u32).range(..=i64::from(CONTEXT_MAX)),
    )]
    pub(super) num_reserved_decode_tokens: u32,
    /// Memory of each decode worker for the KV of retracted requests; 0: none. If KV does not fit,
    /// the worker computes it again [default: same as --kv-memory; allocated on first use]
    #[arg(long, value_name = "SIZE")]
    pub(super) swap_memory: Option<ByteSize>,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Cores")]
pub(super) struct CoreFlags {
    /// Logical CPUs for all threads, such as 0-3,8. Compute threads get CPUs for themselves if the
    /// list has one for each. `baton doctor` shows the CPUs of each thread [default: all allowed
    /// CPUs]
    #[arg(long, value_name = "LIST")]
    pub(super) cpus: Option<CpuList>,
    /// Number of compute threads [default: one per CPU]
    #[arg(
        long, value_name = "N",
        value_parser = value_parser!(u32).range(1..=i64::from(THREADS_MAX)),
    )]
    pub(super) threads: Option<u32>,
    /// Kernel family of the forward pass. `baton doctor` lists the families of this CPU. Workers
    /// form pairs if their families give equal bits: avx2 and avx512 do [default: the fastest one
    /// of this CPU]
    #[arg(long, value_enum, value_name = "NAME")]
    pub(super) kernels: Option<KernelFamily>,
    /// Let an idle thread spin for a moment before it sleeps, even if there are more threads than
    /// cores
    #[arg(long)]
    pub(super) busy_poll: bool,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Hand-off")]
pub(super) struct LayoutFlags {
    /// Run one mixed worker: it does prefill and decode, without a hand-off
    #[arg(long)]
    pub(super) mixed: bool,
    /// Number of prefill workers in this process [default: 1]
    #[arg(
        long, value_name = "N",
        value_parser = value_parser!(u32).range(1..=i64::from(WORKERS_MAX)),
    )]
    pub(super) prefill_workers: Option<u32>,
    /// Number of decode workers in this process [default: 1]
    #[arg(
        long, value_name = "N",
        value_parser = value_parser!(u32).range(1..=i64::from(WORKERS_MAX)),
    )]
    pub(super) decode_workers: Option<u32>,
    /// Transport of KV between the workers of this process: auto or shm (shared memory), or fake.
    /// rdma and tcp need two processes [default: auto]
    #[arg(long, value_enum)]
    pub(super) transfer: Option<Transfer>,
    /// Time at which a decode worker allocates pages for a prompt: before prefill starts (early),
    /// or when prefill has finished (late) [default: early]
    #[arg(long, alias = "disaggregation-decode-allocation-policy", value_enum)]
    pub(super) decode_allocation: Option<DecodeAllocation>,
    /// Worker that sends the first token of a stream. prefill sends it as soon as it is sampled,
    /// before the KV transfer ends [default: decode]
    #[arg(long, value_enum, hide_default_value = true)]
    pub(super) first_token: Option<FirstToken>,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Hand-off")]
pub(super) struct HandoffFlags {
    /// Transport of KV. auto: shm on the same host, else rdma if both workers have it, else tcp.
    /// fake: no KV is transferred
    #[arg(long, value_enum, default_value_t)]
    pub(super) transfer: Transfer,
    /// RDMA devices to use, as ibv_devices shows them; at most 4 [default: those with an active
    /// port on the NUMA node of this worker's CPUs, or all if there are none]
    #[arg(
        long,
        alias = "disaggregation-ib-device",
        value_name = "NAME[,NAME]",
        value_delimiter = ','
    )]
    pub(super) rdma_devices: Vec<String>,
    /// Address that peers connect to. A prefill worker can also have a host name [default: --host,
    /// or the address at which peers already reach this worker]
    #[arg(long, value_name = "HOST", value_parser = parse_advertised)]
    pub(super) advertise_host: Option<String>,
    /// File of at least 32 random bytes, shared by all workers of the cluster. May be repeated, up
    /// to 4 times, to change keys while workers run. The worker proves the first key to its peers
    /// and accepts all keys from them
    #[arg(long, value_name = "FILE")]
    pub(super) cluster_key_file: Vec<PathBuf>,
    /// Listen for peers beyond loopback without a cluster key. The worker trusts every host that
    /// reaches the port
    #[arg(long)]
    pub(super) insecure: bool,
    /// Registry to which this worker announces itself: routers, as
    /// http://HOST:PORT,http://HOST:PORT (or https:// with --tls-ca-file), or etcd, as
    /// etcd://HOST:PORT,HOST:PORT
    #[arg(long, value_name = "REGISTRY")]
    pub(super) registry: Option<RegistryAddress>,
    /// File with CA certificates in PEM. They verify the certificates of servers at https://:
    /// routers of --registry, and prefill workers in the flow decode-first
    #[arg(long, value_name = "FILE")]
    pub(super) tls_ca_file: Option<PathBuf>,
    /// Seconds of silence after which a peer is considered dead, 0.5 to 60
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = parse_peer_timeout)]
    pub(super) peer_timeout: Duration,
    /// Accept SGLang's bootstrap host 2.2.2.2, which requests a transfer without data
    #[arg(long)]
    pub(super) fake_bootstrap: bool,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Flags of the role prefill (POST /role changes the role)")]
pub(super) struct SourceFlags {
    /// Port of the bootstrap registry, which decode workers query about this worker; 0 takes a free
    /// port [default: baton prefill 8998, baton decode a free port]
    #[arg(long, value_name = "PORT")]
    pub(super) bootstrap_port: Option<u16>,
    /// Port of the control link that decode workers connect to. 0 takes a free port, which the
    /// registry reports
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    pub(super) control_port: u16,
    /// Seconds until a request fails if no decode worker asks for its KV, for example because that
    /// worker is dead. The router then tries another pair
    #[arg(
        long, value_name = "SECONDS", default_value_t = BOOTSTRAP_TIMEOUT,
        value_parser = value_parser!(u32).range(1..=REQUEST_TIME_MAX.as_secs() as i64),
    )]
    pub(super) bootstrap_timeout: u32,
    /// Threads that post and poll RDMA writes. fused: the thread that moves all KV does both;
    /// split: each NIC has two threads [default: fused]
    #[arg(long, value_enum)]
    pub(super) data_threads: Option<DataThreadMode>,
    /// Time at which decode workers allocate pages for a prompt. early: before prefill starts, so
    /// each chunk is transferred when it is computed. late: when prefill has finished; this worker
    /// keeps the KV until then
    #[arg(long, alias = "disaggregation-decode-allocation-policy", value_enum, default_value_t)]
    pub(super) decode_allocation: DecodeAllocation,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Flags of the role decode (POST /role changes the role)")]
pub(super) struct DestinationFlags {
    /// Port that receives KV over tcp. 0 takes a free port; the worker reports it to its peers
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    pub(super) data_port: u16,
    /// Networks of the prefill workers. The worker connects to no address outside them [default:
    /// loopback]
    #[arg(long, value_name = "CIDR[,CIDR]", value_delimiter = ',')]
    pub(super) bootstrap_allow: Vec<Cidr>,
    /// Also compute the prompt here if a request names no prefill worker. A router sends such
    /// requests when no prefill worker is left
    #[arg(long)]
    pub(super) local_prefill: bool,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Process")]
pub(super) struct ProcessFlags {
    /// Minimum level of logged events [default: BATON_LOG, else info]
    #[arg(long, value_enum, value_name = "LEVEL")]
    pub(super) log_level: Option<LogLevel>,
    /// Format of the log on standard error
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t)]
    pub(super) log_format: LogFormat,
    /// Print the resolved configuration as JSON and exit
    #[arg(long)]
    pub(super) print_config: bool,
}

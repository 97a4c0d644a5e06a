//! The configuration of a process: complete, checked, immutable. `--print-config` shows it as JSON.
//!
//! The comment of an `Option` says what `None` means: the model file or the peer decides, or the
//! feature is off.

pub mod api_key;
pub mod error;
mod forecast;
pub mod hub;
mod kernels;
pub mod parsers;
pub mod registry;
mod routing;
pub mod secret;
pub mod values;
mod worker;

pub use forecast::{COST_DEFAULT, Cost, Forecast};
pub use kernels::KernelFamily;
pub use routing::{
    BalanceConfig, BreakerConfig, CacheAwareConfig, Flow, HealthConfig, Policies, RequestConfig,
    RetryConfig,
};
pub use worker::ClusterWorkerConfig;
pub(crate) use worker::NO_NAMES;

use crate::config::api_key::{ApiKey, RateLimits};
use crate::config::hub::HubConfig;
use crate::config::parsers::{ReasoningParser, ToolCallParser};
use crate::config::registry::RegistryAddress;
use crate::config::secret::Secret;
use crate::config::values::{ByteSize, WorkerUrl};
use crate::ids::DecodeAllocation;
use crate::obs::log::LogConfig;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

/// Default port of the bootstrap registry, as in SGLang.
pub const BOOTSTRAP_PORT: u16 = 8998;

/// The role to run, with its complete configuration.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "command", rename_all = "lowercase")]
#[expect(clippy::large_enum_variant, reason = "there is one in a process, in a box")]
pub enum RoleConfig {
    /// `baton serve`.
    Serve(ServeConfig),
    /// `baton prefill`.
    Prefill(ClusterWorkerConfig),
    /// `baton decode`.
    Decode(ClusterWorkerConfig),
    /// `baton router`.
    Router(RouterConfig),
}

impl RoleConfig {
    /// The log settings of this process.
    pub fn log(&self) -> LogConfig {
        match self {
            RoleConfig::Serve(ServeConfig { log, .. })
            | RoleConfig::Prefill(ClusterWorkerConfig { log, .. })
            | RoleConfig::Decode(ClusterWorkerConfig { log, .. })
            | RoleConfig::Router(RouterConfig { log, .. }) => *log,
        }
    }
}

/// A process that serves a model alone.
#[derive(Clone, Debug, Serialize)]
pub struct ServeConfig {
    /// Settings of each worker; each worker has its own KV memory of this size.
    pub worker: WorkerConfig,
    /// The workers of this process.
    pub layout: WorkerLayout,
    /// Limits on the prompt tokens of a step.
    pub chunks: ChunkConfig,
    /// Rules for retraction, which starts when the pool runs empty.
    pub retraction: RetractionConfig,
    /// Log settings.
    pub log: LogConfig,
}

/// The router.
#[derive(Clone, Debug, Serialize)]
pub struct RouterConfig {
    /// Its HTTP port. `--print-config` calls it `front`.
    #[serde(rename = "front")]
    pub server: ServerConfig,
    /// Additional address for metrics; `None`: only the HTTP port.
    pub metrics: Option<SocketAddr>,
    /// Prefill workers known from the start. Their addresses are distinct.
    pub prefill: Vec<PrefillEndpoint>,
    /// Decode and mixed workers known from the start. Their addresses are distinct.
    pub decode: Vec<WorkerUrl>,
    /// File of CA certificates for workers over TLS; `None`: no worker is reached over TLS.
    pub tls_ca: Option<PathBuf>,
    /// How a pair is selected.
    pub policies: Policies,
    /// Thresholds of the policy `cache_aware`.
    pub cache: CacheAwareConfig,
    /// The values that the router uses to predict latencies.
    pub forecast: Forecast,
    /// When workers change their roles automatically; `None`: never.
    pub balance: Option<BalanceConfig>,
    /// Rules for clients' requests.
    pub requests: RequestConfig,
    /// When a request is tried again.
    pub retries: RetryConfig,
    /// When a worker is selected last because requests failed there.
    pub breaker: BreakerConfig,
    /// How workers' health is probed.
    pub health: HealthConfig,
    /// Path of the health probes.
    pub health_path: String,
    /// Hosts and ports of an etcd that lists more workers; empty: none.
    pub etcd: Vec<WorkerUrl>,
    /// A client that changes the set of workers must prove one of these keys; empty: see
    /// `takes_anybody`.
    pub cluster_keys: Vec<Secret>,
    /// If there is no key: whether any client can change the set of workers. True on loopback, or
    /// with `--insecure`.
    pub takes_anybody: bool,
    /// If there is no key: whether workers can register themselves without an API key.
    pub takes_strangers: bool,
    /// Log settings.
    pub log: LogConfig,
}

/// The server that `baton drain` drains.
#[derive(Clone, Debug)]
pub struct DrainConfig {
    /// Its HTTP address.
    pub url: WorkerUrl,
    /// File of CA certificates for an HTTPS server.
    pub tls_ca: Option<PathBuf>,
    /// Admin key or API key for a server that requires one.
    pub key: Option<Secret>,
    /// Whether to wait until the process has ended.
    pub wait: bool,
}

/// Settings of every worker.
#[derive(Clone, Debug, Serialize)]
pub struct WorkerConfig {
    /// Its model.
    pub model: ServedModelConfig,
    /// Its HTTP port. `--print-config` calls it `front`.
    #[serde(rename = "front")]
    pub server: ServerConfig,
    /// Its KV pool.
    pub kv: KvConfig,
    /// Maximum number of running requests.
    pub max_running_requests: u32,
    /// Maximum number of waiting requests.
    pub max_queued_requests: u32,
    /// Order of waiting requests.
    pub scheduling: SchedulingPolicy,
    /// Its threads.
    pub cores: CoreConfig,
    /// The kernel family of its model; `None`: the fastest one that the CPU can run.
    pub kernels: Option<KernelFamily>,
}

/// Order of the requests that wait in a worker or a router, with the names of vLLM.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum SchedulingPolicy {
    /// First come, first served. A worker refuses a request with a priority.
    #[default]
    Fcfs,
    /// By priority, then by arrival.
    Priority,
}

/// The model to serve, and its names.
#[derive(Clone, Debug, Serialize)]
pub struct ServedModelConfig {
    /// MODEL as typed: a Hugging Face directory or a GGUF file, not opened yet, or the name of a
    /// model on a hub.
    pub path: PathBuf,
    /// The model on a hub; `None`: `path` is a path.
    pub hub: Option<Box<HubConfig>>,
    /// Names that a request can use, at least one. Answers contain the first.
    pub served_names: Vec<String>,
    /// Maximum tokens of prompt and answer together; `None`: the model's own limit.
    pub max_model_len: Option<u32>,
    /// Source of the weights.
    pub load_format: LoadFormat,
    /// Parser of tool calls in its answers.
    pub tool_call_parser: ToolCallParser,
    /// Parser of reasoning in its answers.
    pub reasoning_parser: ReasoningParser,
    /// Whether a request can have its own chat template.
    pub trusts_templates: bool,
}

/// An HTTP port for clients.
#[derive(Clone, Debug, Serialize)]
pub struct ServerConfig {
    /// Address to listen on.
    pub host: IpAddr,
    /// Port; 0: a free port.
    pub port: u16,
    /// Accepted API keys; empty: no key is required.
    pub api_keys: Vec<ApiKey>,
    /// Limits of each API key that has no own ones. Without a flag, a limit is off for all keys.
    pub key_limits: RateLimits,
    /// Keys for administrative requests; empty: each API key permits them.
    pub admin_keys: Vec<Secret>,
    /// Files of the certificate and its private key, for HTTPS.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// Maximum bytes of a request body.
    pub body_max: usize,
    /// Origins of web pages that can read answers: `*`, or such as `https://chat.example.com`.
    pub allowed_origins: Vec<String>,
}

impl ServerConfig {
    /// Address and port to listen on.
    pub fn address(&self) -> SocketAddr {
        SocketAddr::new(self.host, self.port)
    }

    /// Whether some requests need an API key or an admin key.
    pub fn has_keys(&self) -> bool {
        !(self.api_keys.is_empty() && self.admin_keys.is_empty())
    }
}

/// The KV pool of a worker.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct KvConfig {
    /// Tokens in each page, a power of two.
    pub page_size: u32,
    /// Bytes of the pool.
    pub memory: ByteSize,
    /// Element type.
    pub dtype: KvCacheDtype,
    /// Whether KV stays cached for prompts with the same prefix.
    pub prefix_cache: bool,
    /// Most bytes of the pool that checkpoints of recurrent state take; `None`: a share of it, if
    /// the model has such state.
    pub state_memory: Option<ByteSize>,
}

/// Pages reserved for running requests, and memory for retracted requests.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RetractionConfig {
    /// Tokens ahead for which each running request has pages reserved.
    pub reserved_tokens: u32,
    /// Bytes for the KV of retracted requests, outside the pool.
    pub memory: ByteSize,
}

/// Limits on the prompt tokens of one step.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ChunkConfig {
    /// Upper limit of `chunked_prefill_size`.
    pub max_prefill_tokens: u32,
    /// Maximum prompt tokens of a step.
    pub chunked_prefill_size: u32,
    /// Maximum time of a step over prompt tokens, in ms.
    pub chunk_ms: u32,
}

/// CPUs and threads.
#[derive(Clone, Debug, Serialize)]
pub struct CoreConfig {
    /// Logical CPUs to run on, in ascending order, at least one.
    pub cpus: Vec<usize>,
    /// Whether the user named the CPUs. If so, no thread leaves them, and threads get CPUs alone.
    pub cpus_are_chosen: bool,
    /// Number of compute threads, at least one.
    pub threads: usize,
    /// Whether idle loops spin before they sleep, even if there are more threads than cores.
    pub busy_poll: bool,
}

/// The workers of `baton serve`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum WorkerLayout {
    /// One worker that does prefill and decode.
    Mixed,
    /// Prefill and decode workers, with hand-offs between them.
    Split {
        /// Number of prefill workers, at least one.
        prefill: u32,
        /// Number of decode workers, at least one.
        decode: u32,
        /// Transport of KV.
        transfer: Transfer,
        /// When decode workers allocate pages.
        decode_allocation: DecodeAllocation,
        /// Worker that sends the first token.
        first_token: FirstToken,
    },
}

/// Settings for a worker's peers.
#[derive(Clone, Debug, Serialize)]
pub struct HandoffConfig {
    /// Transport of KV.
    pub transfer: Transfer,
    /// Names of the RDMA devices to use; empty: selected automatically.
    pub rdma_devices: Vec<String>,
    /// Host that peers connect to; `None`: the address over which they already reach this worker.
    pub advertise_host: Option<String>,
    /// Cluster keys. The worker proves the first one to peers and accepts all from them. Empty: no
    /// proof, which is allowed on loopback or with `--insecure`.
    pub cluster_keys: Vec<Secret>,
    /// Whether the worker opens its ports for peers beyond loopback although it has no key.
    pub insecure: bool,
    /// The registry at which this worker announces itself.
    pub registry: Option<RegistryAddress>,
    /// File of CA certificates for registries and prefill workers over TLS.
    pub tls_ca: Option<PathBuf>,
    /// Silence after which a peer is considered dead.
    pub peer_timeout: Duration,
    /// Whether the bootstrap host 2.2.2.2 requests a transfer without data. If false, it is an
    /// ordinary address.
    pub fake_bootstrap: bool,
}

/// A prefill worker on the router's command line.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct PrefillEndpoint {
    /// Its HTTP address.
    pub url: WorkerUrl,
    /// Port of its bootstrap registry; `None`: the port that the worker reports, if it reports one.
    pub bootstrap_port: Option<u16>,
}

/// Source of the weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LoadFormat {
    /// The model's files.
    #[default]
    Auto,
    /// Seeded random numbers, without weight files.
    Dummy,
}

/// Element type of the KV cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum KvCacheDtype {
    /// The type that fits the checkpoint.
    #[default]
    Auto,
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
}

/// Threads that post and poll a source's RDMA writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum DataThreadMode {
    /// The mover.
    #[default]
    Fused,
    /// Two threads for each NIC.
    Split,
}

impl fmt::Display for DataThreadMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DataThreadMode::Fused => "fused",
            DataThreadMode::Split => "split",
        })
    }
}

/// Worker that sends the first token of a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum FirstToken {
    /// The decode worker, after the KV transfer; a stream that has started rarely needs a retry.
    #[default]
    Decode,
    /// The prefill worker, as soon as the token is sampled; decode continues with the second token.
    Prefill,
}

/// Transport of KV from a prefill worker to a decode worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Transfer {
    /// Selected for each session.
    #[default]
    Auto,
    /// Shared memory, on one host.
    Shm,
    /// RDMA writes by a NIC.
    Rdma,
    /// TCP streams.
    Tcp,
    /// No transfer.
    Fake,
}

impl Transfer {
    /// Whether KV can arrive over tcp.
    pub fn takes_tcp(self) -> bool {
        matches!(self, Transfer::Auto | Transfer::Tcp)
    }

    /// Whether KV can arrive over rdma.
    pub fn takes_rdma(self) -> bool {
        matches!(self, Transfer::Auto | Transfer::Rdma)
    }
}

/// How the router selects workers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Policy {
    /// The worker with the fewest sequences.
    #[default]
    LeastLoaded,
    /// The workers in turn.
    RoundRobin,
    /// A random worker.
    Random,
    /// The less loaded of two random workers.
    PowerOfTwo,
    /// The worker with the longest cached prefix, unless the loads are out of balance.
    CacheAware,
    /// The worker with the smallest product of prompt tokens to compute and sequences.
    Lmetric,
    /// The worker with the best predicted latency. A request that would miss its limits is refused.
    Slo,
    /// As slo, but a decode worker can compute a prompt itself if at most 70 % and fewer than 2048
    /// tokens are missing.
    Conditional,
}

//! The configuration of a process: complete, checked, immutable. `--print-config` shows it as JSON.
//!
//! An `Option` here means that the answer lies in the model file or with the peer, and says so.

mod forecast;
mod part;
mod routing;

pub use forecast::{COST_DEFAULT, Cost, Forecast};
pub(super) use part::NO_NAMES;
pub use part::PartConfig;
pub use routing::{
    BalanceTerms, BreakerTerms, CacheTerms, Flow, HealthTerms, Policies, RequestTerms, RetryTerms,
};

use super::registry::RegistryAddress;
use super::secret::Secret;
use super::values::{ByteSize, WorkerUrl};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Port of the registry, as in SGLang.
pub const BOOTSTRAP_PORT: u16 = 8998;

/// A role to run, and all that was decided about it.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "command", rename_all = "lowercase")]
#[expect(clippy::large_enum_variant, reason = "there is one in a process, in a box")]
pub enum Command {
    /// `baton serve`.
    Serve(ServeConfig),
    /// `baton prefill`.
    Prefill(PartConfig),
    /// `baton decode`.
    Decode(PartConfig),
    /// `baton router`.
    Router(RouterConfig),
}

impl Command {
    /// How this process logs.
    pub fn log(&self) -> LogConfig {
        match self {
            Command::Serve(ServeConfig { log, .. })
            | Command::Prefill(PartConfig { log, .. })
            | Command::Decode(PartConfig { log, .. })
            | Command::Router(RouterConfig { log, .. }) => *log,
        }
    }
}

/// One process that serves a model by itself.
#[derive(Clone, Debug, Serialize)]
pub struct ServeConfig {
    /// What each of its workers has; KV memory is each worker's own.
    pub worker: WorkerConfig,
    /// Which workers there are.
    pub layout: WorkerLayout,
    /// Bounds on prompt tokens of a turn.
    pub chunks: ChunkConfig,
    /// When pages run out.
    pub retraction: RetractionConfig,
    /// The log.
    pub log: LogConfig,
}

/// The router.
#[derive(Clone, Debug, Serialize)]
pub struct RouterConfig {
    /// Its HTTP front.
    pub front: FrontConfig,
    /// Where it tells its metrics beside that.
    pub metrics: Option<SocketAddr>,
    /// Prefill workers that are there from the start, no two with one address.
    pub prefill: Vec<PrefillEndpoint>,
    /// Decode workers, likewise.
    pub decode: Vec<WorkerUrl>,
    /// File of those who vouch for workers that are reached over TLS; none are where there is none.
    pub tls_ca: Option<PathBuf>,
    /// How a pair is chosen,
    pub policies: Policies,
    /// when a prompt's place in caches counts,
    pub cache: CacheTerms,
    /// and by what it is foretold how long workers take.
    pub forecast: Forecast,
    /// When workers are told to change their roles; `None`: never.
    pub balance: Option<BalanceTerms>,
    /// What is taken from clients.
    pub requests: RequestTerms,
    /// When a request is tried again.
    pub retries: RetryTerms,
    /// When a worker is asked last.
    pub breaker: BreakerTerms,
    /// How workers are looked at,
    pub health: HealthTerms,
    /// and where.
    pub health_path: String,
    /// An etcd whose entries are workers here; by host and port.
    pub etcd: Vec<WorkerUrl>,
    /// Of one of them who changes the set of workers must prove to know it; none: see below.
    pub cluster_keys: Vec<Secret>,
    /// Whether anybody may change it where there is no key: on loopback, or by `--insecure`.
    pub takes_anybody: bool,
    /// Whether workers may enter themselves then, who show no client's key.
    pub takes_strangers: bool,
    /// The log.
    pub log: LogConfig,
}

/// Whom `baton drain` tells to drain.
#[derive(Clone, Debug)]
pub struct DrainConfig {
    /// Its HTTP interface.
    pub url: WorkerUrl,
    /// File of those who vouch for it, where it speaks HTTPS.
    pub tls_ca: Option<PathBuf>,
    /// What it is shown, where that asks for a key.
    pub api_key: Option<Secret>,
    /// Whether its end is waited for.
    pub wait: bool,
}

/// What every worker has.
#[derive(Clone, Debug, Serialize)]
pub struct WorkerConfig {
    /// Its model.
    pub model: ModelConfig,
    /// Its HTTP front.
    pub front: FrontConfig,
    /// Its KV pool.
    pub kv: KvConfig,
    /// Most requests stepped at once.
    pub max_running_requests: u32,
    /// Most requests waiting.
    pub max_queued_requests: u32,
    /// Its threads.
    pub cores: CoreConfig,
}

/// Which model, and under which name.
#[derive(Clone, Debug, Serialize)]
pub struct ModelConfig {
    /// A Hugging Face directory or a GGUF file; not looked at yet.
    pub path: PathBuf,
    /// Names that a request may use, at least one; answers carry the first.
    pub served_names: Vec<String>,
    /// Longest prompt and answer together; `None`: what the model's configuration says.
    pub max_model_len: Option<u32>,
    /// Where weights come from.
    pub load_format: LoadFormat,
}

/// An HTTP front.
#[derive(Clone, Debug, Serialize)]
pub struct FrontConfig {
    /// Address to listen on.
    pub host: IpAddr,
    /// Port; 0: a free one.
    pub port: u16,
    /// Keys of which a client must show one; empty: none is asked for.
    pub api_keys: Vec<Secret>,
    /// Files of the certificate and its key, where it speaks HTTPS.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// Bytes of a request's body.
    pub body_max: usize,
}

impl FrontConfig {
    /// Where to listen.
    pub fn address(&self) -> SocketAddr {
        SocketAddr::new(self.host, self.port)
    }
}

/// The KV pool of a worker.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct KvConfig {
    /// Tokens of a page, a power of two.
    pub page_size: u32,
    /// Bytes of the pool.
    pub memory: ByteSize,
    /// Element type.
    pub dtype: KvDtype,
    /// Kept for prompts that begin the same.
    pub prefix_cache: bool,
}

/// What running requests are promised, and what becomes of those that gave up their pages.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RetractionConfig {
    /// Tokens ahead of what a request has for which pages are kept free.
    pub reserved_tokens: u32,
    /// Bytes for KV beside the pool.
    pub memory: ByteSize,
}

/// Bounds on the prompt tokens of one turn.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ChunkConfig {
    /// Bounds the next; never less than it.
    pub max_prefill_tokens: u32,
    /// Most that are computed in one.
    pub chunked_prefill_size: u32,
    /// Longest they may take, in ms.
    pub chunk_ms: u32,
}

/// Where threads run.
#[derive(Clone, Debug, Serialize)]
pub struct CoreConfig {
    /// Logical CPUs to run on, ascending, at least one.
    pub cpus: Vec<usize>,
    /// Whether the CPUs were named by the user: then threads are pinned even where they must share.
    pub cpus_are_chosen: bool,
    /// Compute threads, at least one.
    pub threads: usize,
    /// Whether idle loops spin for a moment before they sleep, also where threads outnumber cores.
    pub busy_poll: bool,
}

/// The workers of `baton serve`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum WorkerLayout {
    /// One worker that does both.
    Mixed,
    /// Workers of either role with a hand-off between them.
    Split {
        /// Prefill workers, at least one.
        prefill: u32,
        /// Decode workers, at least one.
        decode: u32,
        /// How KV moves.
        transfer: Transfer,
        /// When decode workers take pages.
        decode_allocation: DecodeAllocation,
        /// Whose token a stream begins with.
        first_token: FirstToken,
    },
}

/// How a worker deals with its peers.
#[derive(Clone, Debug, Serialize)]
pub struct HandoffConfig {
    /// How KV moves.
    pub transfer: Transfer,
    /// RDMA devices to use, by name; none: those that suit.
    pub rdma_devices: Vec<String>,
    /// What peers are told to dial; `None`: the address by which they already reach this worker.
    pub advertise_host: Option<String>,
    /// What is proven to peers (the first) and accepted of them; none: nothing, on loopback or by `--insecure`.
    pub cluster_keys: Vec<Secret>,
    /// Whether ports for peers are opened beyond loopback without a key.
    pub insecure: bool,
    /// Where it enters itself.
    pub registry: Option<RegistryAddress>,
    /// File of those who vouch for registries and prefill workers that are reached over TLS.
    pub tls_ca: Option<PathBuf>,
    /// Silence after which a peer counts as dead.
    pub peer_timeout: Duration,
    /// Whether the bootstrap host 2.2.2.2 asks for a transfer of nothing, or is an address like any other.
    pub fake_bootstrap: bool,
}

/// A prefill worker as the router knows it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct PrefillEndpoint {
    /// Its HTTP address.
    pub url: WorkerUrl,
    /// Its registry's port; `None`: what it tells itself, or nothing.
    pub bootstrap_port: Option<u16>,
}

/// How a process logs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct LogConfig {
    /// Least level logged.
    pub level: LogLevel,
    /// Form of a line.
    pub format: LogFormat,
}

/// Where weights come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LoadFormat {
    /// From the model's files.
    #[default]
    Auto,
    /// From a seed.
    Dummy,
}

/// Element type of the KV cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum KvDtype {
    /// By the checkpoint's type.
    #[default]
    Auto,
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
}

/// Who posts and reaps what a source writes over rdma.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum DataThreads {
    /// The mover.
    #[default]
    Fused,
    /// Two threads for each NIC.
    Split,
}

impl fmt::Display for DataThreads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DataThreads::Fused => "fused",
            DataThreads::Split => "split",
        })
    }
}

/// When a decode worker takes pages for a prompt.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum DecodeAllocation {
    /// Before its prefill worker begins, so that each chunk is handed over as soon as it is computed.
    #[default]
    Early,
    /// When its prefill worker has computed it, which keeps the KV until then.
    #[value(alias = "prefill_complete")]
    Late,
}

impl DecodeAllocation {
    /// As registries of the field call it.
    pub fn registered(self) -> &'static str {
        match self {
            DecodeAllocation::Early => "early",
            DecodeAllocation::Late => "prefill_complete",
        }
    }
}

/// Whose token a stream begins with.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum FirstToken {
    /// Decode's, which has the KV of the prompt by then: what has begun is rarely tried again.
    #[default]
    Decode,
    /// Prefill's, as soon as it is sampled; decode goes on with the second.
    Prefill,
}

/// How KV moves from a prefill worker to a decode worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Transfer {
    /// Chosen per session.
    #[default]
    Auto,
    /// Copied from shared memory, on one host.
    Shm,
    /// Written by an RDMA NIC.
    Rdma,
    /// Streamed.
    Tcp,
    /// Not at all.
    Fake,
}

impl Transfer {
    /// Whether KV may arrive over tcp.
    pub fn takes_tcp(self) -> bool {
        matches!(self, Transfer::Auto | Transfer::Tcp)
    }

    /// Whether KV may be written over rdma.
    pub fn takes_rdma(self) -> bool {
        matches!(self, Transfer::Auto | Transfer::Rdma)
    }
}

/// How the router chooses workers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Policy {
    /// The one with the least work that the router knows of.
    #[default]
    LeastLoaded,
    /// One after the other.
    RoundRobin,
    /// Anyone.
    Random,
    /// The better of two that are drawn.
    PowerOfTwo,
    /// The one with most of the prompt in its cache, as long as loads are in balance.
    CacheAware,
    /// The one with the least product of tokens to read and sequences.
    Lmetric,
    /// The one that is foretold to be soonest; nobody, where the targets are foretold to be missed.
    Slo,
    /// As slo; a decode worker that may read prompts does, where little is missing there.
    Conditional,
}

impl Policy {
    /// Whether it asks who has which beginning.
    pub fn reads_prompts(self) -> bool {
        matches!(self, Policy::CacheAware | Policy::Lmetric | Policy::Slo | Policy::Conditional)
    }

    /// Whether it asks how much work workers have.
    pub fn compares_loads(self) -> bool {
        !matches!(self, Policy::Random | Policy::RoundRobin)
    }

    /// Whether it lets nobody in whom the forecast gives no chance.
    pub fn forecasts(self) -> bool {
        matches!(self, Policy::Slo | Policy::Conditional)
    }
}

/// Weight of an event, heaviest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum LogLevel {
    /// Something failed that should not.
    Error,
    /// Something is wrong that can be lived with.
    Warn,
    /// What an operator wants to see of normal life.
    #[default]
    Info,
    /// What the router does with each request, and what becomes of it.
    Debug,
    /// As debug; nothing more is logged yet.
    Trace,
}

impl FromStr for LogLevel {
    type Err = String;

    fn from_str(name: &str) -> Result<LogLevel, String> {
        <LogLevel as ValueEnum>::from_str(name, true)
    }
}

/// Form of a log line.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum LogFormat {
    /// For people: `TIME LEVEL component message key=value`.
    #[default]
    Text,
    /// For machines: one object a line.
    Json,
}

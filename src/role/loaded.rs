//! A model opened and laid out: weights, KV geometry, bounds, and how peers recognise it.
//!
//! Thread: the one that starts the process. Nothing here changes afterwards.

use super::RoleError;
use crate::cluster::kinds::KindDigest;
use crate::config::resolved::{
    self, ChunkConfig, CoreConfig, DecodeAllocation, KvConfig, RetractionConfig, WorkerConfig,
};
use crate::doctor::Memory as HostMemory;
use crate::kv::layout::{KvDtype, KvLayout};
use crate::model::config::ModelConfig;
use crate::model::forward::Forward;
use crate::model::forward::cpu::{CpuModel, CpuOptions};
use crate::model::open::{LoadFormat, ModelFiles};
use crate::model::tensor::TensorType;
use crate::obs::log::event;
use crate::sched::config::SchedConfig;
use crate::transfer::aux::{AUX_VERSION, AuxRecord};
use crate::transfer::manager::identity::Identity;
use crate::transfer::transport::Memory;
use crate::transfer::transport::rdma::Nic;
use crate::wire::message::{Fingerprint, HostId, Transport};
use sha2::{Digest, Sha256};
use std::net::SocketAddr;

/// What follows from a model in memory.
#[derive(Clone)]
pub struct Loaded {
    /// Bounds of the scheduler.
    pub sched: SchedConfig,
    /// Geometry of KV.
    pub layout: KvLayout,
    /// Pages of each worker.
    pub pages: u32,
    /// Pages of the host tier of each decode or mixed worker.
    pub tier_pages: u32,
    /// Requests that a worker holds at most, queued ones included.
    pub slots: usize,
    /// By which peers know the same model.
    pub fingerprint: Fingerprint,
    /// What hand-offs may use, best first.
    pub transports: Vec<Transport>,
    /// Where lanes of tcp are accepted.
    pub data: Option<SocketAddr>,
    /// For RDMA.
    pub nics: Vec<Nic>,
    /// Whether threads have cores of their own, on which to spin.
    pub spin: bool,
    /// Threads that copy what comes to decode workers over shm, the mover among them.
    pub copy_lanes: usize,
    /// Whether NICs have threads of their own that post and reap.
    pub split: bool,
    /// When decode workers take pages for what prefill workers of this process read.
    pub decode_allocation: DecodeAllocation,
    /// CPUs that threads of NICs may be pinned to: those that no compute thread is, but for the mover's and `ctl`'s.
    pub data_cpus: Vec<usize>,
}

impl Loaded {
    /// Opens the files, checks and repacks the weights: configuration, tokenizer and template, the model as the kernels
    /// want it, and what follows.
    pub fn open(
        worker: &WorkerConfig,
        chunks: ChunkConfig,
        retraction: RetractionConfig,
        transports: Vec<Transport>,
    ) -> Result<(ModelFiles, Box<dyn Forward>, Loaded), RoleError> {
        let format = match worker.model.load_format {
            resolved::LoadFormat::Auto => LoadFormat::Auto,
            resolved::LoadFormat::Dummy => LoadFormat::Dummy,
        };
        event!(Info, "model", "opening", path = worker.model.path.display());
        let files = ModelFiles::open(&worker.model.path, format)?;
        let model = &files.config;
        let context = context(model, worker.model.max_model_len)?;
        let dtype = kv_dtype(worker.kv.dtype, files.checkpoint);
        let (kv_heads, head_dim) = (model.kv_heads as u32, model.head_dim as u32);
        let layout = KvLayout::page_major(
            worker.kv.page_size,
            model.layers as u32,
            kv_heads,
            head_dim,
            dtype,
        );
        let pages = pages(&layout, worker.kv.memory.0)?;
        let sched = SchedConfig {
            max_running: worker.max_running_requests as usize,
            max_queued: worker.max_queued_requests as usize,
            max_prefill_tokens: chunks.max_prefill_tokens,
            chunked_prefill_size: chunks.chunked_prefill_size,
            chunk_ms: chunks.chunk_ms,
            page_size: worker.kv.page_size,
            context: context as u32,
            prefix_cache: worker.kv.prefix_cache,
            vocab: model.vocab as u32,
            reserve: retraction.reserved_tokens,
        };
        tell_shortage(&layout, pages, context);
        let tier_pages = tier_pages(&layout, retraction.memory.0)?;
        let pinned =
            worker.cores.cpus_are_chosen || worker.cores.cpus.len() >= worker.cores.threads + 2;
        let options = CpuOptions {
            threads: worker.cores.threads,
            limits: sched.batch_limits(),
            kernel: None,
            pin: pinned.then(|| worker.cores.cpus.clone()),
        };
        let mut shown = 0;
        let forward =
            CpuModel::load(model, files.weights.as_ref(), &options, &mut |done, total| {
                let percent = done * 100 / total.max(1);
                if percent >= shown + 25 {
                    shown = percent;
                    event!(Info, "model", "loading", percent = percent);
                }
            })?;
        let memory = forward.memory_bytes();
        event!(
            Info,
            "model",
            "loaded",
            kernels = forward.kernel_family().name(),
            weights_mib = memory.weights >> 20,
            scratch_mib = memory.scratch >> 20,
            kv_mib = (u64::from(pages) * layout.page_bytes()) >> 20,
            kv_dtype = dtype.name(),
            context = context,
        );
        let fingerprint = fingerprint(&files, forward.kernel_family().name());
        let free = worker.cores.cpus.get(worker.cores.threads + 2..).filter(|_| pinned);
        let loaded = Loaded {
            sched,
            layout,
            pages,
            tier_pages,
            slots: sched.slots(),
            fingerprint,
            transports,
            data: None,
            nics: Vec::new(),
            spin: worker.cores.busy_poll || worker.cores.cpus.len() > worker.cores.threads + 1,
            copy_lanes: copy_lanes(&worker.cores),
            split: false,
            decode_allocation: DecodeAllocation::default(),
            data_cpus: free.unwrap_or_default().to_vec(),
        };
        Ok((files, Box::new(forward), loaded))
    }

    /// What a worker over this memory says of itself.
    pub fn identity(&self, memory: &Memory) -> Identity {
        Identity {
            fingerprint: self.fingerprint,
            layout: self.layout,
            pages: self.pages,
            pool_bytes: memory.region.len() as u64,
            slots: self.slots as u32,
            host: host_id(),
        }
    }
}

/// What a worker must have equal with those that it hands KV over to, or takes it from; see [`KindDigest`].
pub fn kind(fingerprint: &Fingerprint, layout: &KvLayout) -> KindDigest {
    let mut digest = Sha256::new();
    digest.update(b"baton kind");
    for number in [
        AUX_VERSION,
        size_of::<AuxRecord>() as u32,
        layout.layers,
        layout.head_dim,
        layout.model_kv_heads,
    ] {
        digest.update(number.to_le_bytes());
    }
    digest.update((layout.dtype as u32).to_le_bytes());
    digest.update(bytemuck::bytes_of(fingerprint));
    KindDigest(digest.finalize().into())
}

/// Two draw what one core cannot from memory, for the moment of a copy. Who has joined one is waited for, so only where the
/// threads that compute leave a CPU for it, beside those of `ctl` and the mover.
fn copy_lanes(cores: &CoreConfig) -> usize {
    let parallelism = std::thread::available_parallelism().map_or(1, usize::from);
    let usable = cores.cpus.len().min(parallelism);
    if usable >= cores.threads + 3 { 2 } else { 1 }
}

/// Warns of workers that are to have more KV memory than this process can. It is taken page by page when first used, so that
/// they may never do; kept prefixes fill it sooner or later, and then the kernel ends the process.
pub fn tell_excess(kv: &KvConfig, workers: u32) {
    let asked = kv.memory.0.saturating_mul(workers.into());
    let Some((there, bound)) =
        HostMemory::here().map(|memory| memory.most()).filter(|&(there, _)| asked > there)
    else {
        return;
    };
    event!(
        Warn,
        "model",
        "KV memory may grow beyond what there is, and the kernel then ends the process: see --kv-memory",
        asked_mib = asked >> 20,
        workers = workers,
        there_mib = there >> 20,
        of = bound,
    );
}

/// Pages of KV memory.
fn pages(layout: &KvLayout, bytes: u64) -> Result<u32, RoleError> {
    match u32::try_from(bytes / layout.page_bytes()).unwrap_or(u32::MAX) {
        0 => {
            let reason = format!("holds no page: one takes {} bytes", layout.page_bytes());
            Err(RoleError::Config("--kv-memory", reason))
        }
        pages => Ok(pages),
    }
}

/// Pages of the host tier, which there need not be.
fn tier_pages(layout: &KvLayout, bytes: u64) -> Result<u32, RoleError> {
    // A page's number is below the one that ends a chain.
    match u32::try_from(bytes / layout.page_bytes()).unwrap_or(u32::MAX - 1) {
        0 if bytes > 0 => {
            let reason =
                format!("holds no page: one takes {} bytes; 0 does without", layout.page_bytes());
            Err(RoleError::Config("--swap-memory", reason))
        }
        pages => Ok(pages),
    }
}

/// Warns of KV memory that no sequence of the model's length fits into.
fn tell_shortage(layout: &KvLayout, pages: u32, context: usize) {
    let tokens = u64::from(pages) * u64::from(layout.page_size);
    if tokens < context as u64 {
        event!(
            Warn,
            "model",
            "KV memory holds less than one context: longer requests are refused, see --kv-memory",
            kv_tokens = tokens,
            context = context,
            context_mib =
                (layout.pages_for(context as u32) as u64 * layout.page_bytes()).div_ceil(1 << 20),
        );
    }
}

fn context(model: &ModelConfig, asked: Option<u32>) -> Result<usize, RoleError> {
    match asked {
        Some(asked) if asked as usize > model.context => {
            let reason = format!("is {asked}; the model's context has {} tokens", model.context);
            Err(RoleError::Config("--max-model-len", reason))
        }
        Some(asked) => Ok(asked as usize),
        None => Ok(model.context),
    }
}

/// `auto`: float32 checkpoints keep float32 KV, all others f16. So do bfloat16 ones: keys and values stay far
/// inside f16's range (and are held there), and bf16 would round eight times more coarsely.
fn kv_dtype(asked: resolved::KvDtype, checkpoint: TensorType) -> KvDtype {
    match (asked, checkpoint) {
        (resolved::KvDtype::F32, _) | (resolved::KvDtype::Auto, TensorType::F32) => KvDtype::F32,
        (resolved::KvDtype::Bf16, _) => KvDtype::Bf16,
        (resolved::KvDtype::F16 | resolved::KvDtype::Auto, _) => KvDtype::F16,
    }
}

fn fingerprint(files: &ModelFiles, kernels: &str) -> Fingerprint {
    let own = &files.fingerprint;
    Fingerprint {
        config: own.config,
        weights: own.weights,
        kernels: Sha256::digest(kernels.as_bytes()).into(),
        tokenizer: own.tokenizer,
        template: own.template,
    }
}

/// The kernel's boot id and the network namespace: the same in all processes that can pass each other
/// descriptors over an abstract unix socket.
pub fn host_id() -> HostId {
    let mut id = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    id.extend_from_slice(namespace.as_os_str().as_encoded_bytes());
    let digest = Sha256::digest(&id);
    let mut host = [0; 16];
    host.copy_from_slice(&digest[..16]);
    HostId(host)
}

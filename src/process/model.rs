//! The values that a process derives from its model: KV layout, limits, fingerprint.
//!
//! Thread: the thread that starts the process. Invariants: model, layout and fingerprint do not
//! change after the load. A role sets its own fields in its copy (`process::worker`).

use super::ProcessError;
use super::cpu_plan::CpuPlan;
use crate::config::{
    self, ChunkConfig, CoreConfig, KernelFamily, KvConfig, RetractionConfig, ServedModelConfig,
    WorkerConfig,
};
use crate::hub::{self, ModelContents};
use crate::ids::DecodeAllocation;
use crate::kv::groups::{GroupCounts, KvGroups};
use crate::kv::layout::{KvDtype, KvLayout};
use crate::limits::{CHECKPOINT_TOKENS, PAGE_SIZE_MAX, RECURRENT_CONTEXT, STATE_MEMORY_SHARE};
use crate::model::config::ModelConfig;
use crate::model::files::{ModelFiles, WeightFormat};
use crate::model::forward::Forward;
use crate::model::forward::cpu::{CpuModel, CpuOptions, available_kernels, fastest_kernels};
use crate::model::tensor::TensorType;
use crate::model::weights::LoadError;
use crate::obs::log::event;
use crate::routing::compatibility::CompatDigest;
use crate::sched::config::SchedConfig;
use crate::sys::host::HostMemory;
use crate::transfer::aux::{AUX_VERSION, AuxRecord};
use crate::transfer::manager::identity::{WorkerIdentity, host_id};
use crate::transfer::transport::Memory;
use crate::transfer::transport::rdma::{Nic, Settings};
use crate::wire::message::{BitClass, Fingerprint, HostId, Transport};
use sha2::{Digest, Sha256};
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::PathBuf;

/// Lanes of a tcp session. One core copies about as fast as one stream transfers. More lanes could
/// help larger machines.
const TCP_LANES: u16 = 1;

/// Values derived from the loaded model and the configuration.
#[derive(Clone)]
pub struct LoadedModel {
    /// Limits of the scheduler.
    pub sched: SchedConfig,
    /// KV layout. A page has the layers of one group.
    pub layout: KvLayout,
    /// The groups of the model's layers.
    pub groups: KvGroups,
    /// KV pages of each worker.
    pub pages: u32,
    /// Pages for retracted requests of each decode or mixed worker.
    pub tier_pages: u32,
    /// Maximum number of requests in a worker, including queued requests.
    pub slots: usize,
    /// Identifies the model to peers.
    pub fingerprint: Fingerprint,
    /// The class of its kernels.
    pub bit_class: BitClass,
    /// Transports for hand-offs, best first.
    pub transports: Vec<Transport>,
    /// The host, as peers see it. Workers of one host can share memory.
    pub host: HostId,
    /// Address that accepts lanes of tcp sessions.
    pub data: Option<SocketAddr>,
    /// NICs for RDMA.
    pub nics: Vec<Nic>,
    /// Queue pairs of an RDMA session.
    pub rdma: Settings,
    /// Lanes of a tcp session.
    pub tcp_lanes: u16,
    /// Whether threads spin before they park, because they have their own cores or `--busy-poll` is
    /// set.
    pub spin: bool,
    /// Threads that copy KV into decode workers over shm, including the mover.
    pub copy_lanes: usize,
    /// Whether each NIC has its own poster and poller threads.
    pub split: bool,
    /// When decode workers allocate pages for prompts of this process's prefill workers.
    pub decode_allocation: DecodeAllocation,
    /// The CPUs of each thread.
    pub plan: CpuPlan,
}

impl LoadedModel {
    /// Tokens that the pool of a worker can hold.
    pub fn pool_tokens(&self) -> usize {
        let (page_size, context) = (self.layout.page_size, self.sched.context);
        self.groups.counts().pool_tokens(self.pages, page_size, context) as usize
    }

    /// Pages of the longest sequence.
    pub fn pages_of_context(&self) -> usize {
        let pages = self.layout.pages_for(self.sched.context);
        self.groups.counts().pages(pages, pages) as usize
    }

    /// Opens the model's files and loads the weights in the kernels' format.
    ///
    /// # Errors
    /// The files cannot be used, or a flag does not fit the model.
    pub fn open(
        worker: &WorkerConfig,
        chunks: ChunkConfig,
        retraction: RetractionConfig,
        transports: Vec<Transport>,
        plan: CpuPlan,
    ) -> Result<(ModelFiles, Box<dyn Forward>, LoadedModel), ProcessError> {
        let format = match worker.model.load_format {
            config::LoadFormat::Auto => WeightFormat::Auto,
            config::LoadFormat::Dummy => WeightFormat::Dummy,
        };
        let family = kernel_family(worker.kernels, available_kernels())?;
        let path = locate(&worker.model)?;
        event!(Info, "model", "opening", path = path.display());
        let files = ModelFiles::open(&path, format)?;
        let place = (host_id(), plan);
        let mut loaded =
            LoadedModel::derive(&files, worker, chunks, retraction, transports, place)?;
        let context = loaded.sched.context as usize;
        tell_shortage(&loaded, context);
        let options = CpuOptions {
            threads: worker.cores.threads,
            limits: loaded.sched.batch_limits(),
            kernel: family,
            pin: loaded.plan.team.clone(),
        };
        let forward = load_weights(&files, &options)?;
        tell_loaded(&forward, &loaded);
        loaded.fingerprint.kernels = kernels_hash(family.name());
        loaded.bit_class = BitClass::named(family.bit_class());
        Ok((files, Box::new(forward), loaded))
    }

    /// The values that follow from a model's files and the configuration, without the weights.
    /// They do not depend on this CPU: kernels and bit class are those of `portable`.
    ///
    /// # Errors
    /// A flag does not fit the model.
    pub fn derive(
        files: &ModelFiles,
        worker: &WorkerConfig,
        chunks: ChunkConfig,
        retraction: RetractionConfig,
        transports: Vec<Transport>,
        (host, plan): (HostId, CpuPlan),
    ) -> Result<LoadedModel, ProcessError> {
        let model = &files.config;
        let context = context(model, worker.model.max_model_len)?;
        let (kv, page_size) = (&worker.kv, worker.kv.page_size);
        let dtype = kv_dtype(kv.dtype, files.checkpoint);
        let (groups, layout) = kv_memory(model, page_size, dtype)?;
        if kv.dtype != config::KvCacheDtype::Auto && layout.dtype != dtype {
            let reason = format!("is {}; the state of this model is f32", dtype.name());
            return Err(ProcessError::Config("--kv-dtype", reason));
        }
        let counts = groups.counts();
        let pages = pages(&layout, counts, kv.memory.0)?;
        let sched = SchedConfig {
            max_running: worker.max_running_requests as usize,
            max_queued: worker.max_queued_requests as usize,
            max_prefill_tokens: chunks.max_prefill_tokens,
            chunked_prefill_size: chunks.chunked_prefill_size,
            chunk_ms: chunks.chunk_ms,
            page_size: layout.page_size,
            // Workers with several groups have pages of one size.
            largest_page: if counts.is_single() { PAGE_SIZE_MAX } else { layout.page_size },
            context: context as u32,
            groups: counts,
            prefix_cache: kv.prefix_cache,
            checkpoint_gap: page_size,
            checkpoint_pages: match kv.prefix_cache {
                true => checkpoint_pages(&layout, counts, kv)?,
                false => 0,
            },
            checkpoint_tokens: CHECKPOINT_TOKENS,
            vocab: model.vocab as u32,
            reserve: retraction.reserved_tokens,
        };
        let own = &files.fingerprint;
        Ok(LoadedModel {
            sched,
            layout,
            groups,
            pages,
            tier_pages: tier_pages(&layout, retraction.memory.0)?,
            slots: sched.slots(),
            fingerprint: Fingerprint {
                config: own.config,
                weights: own.weights,
                kernels: kernels_hash(KernelFamily::Portable.name()),
                tokenizer: own.tokenizer,
                template: own.template,
            },
            bit_class: BitClass::named(KernelFamily::Portable.bit_class()),
            transports,
            host,
            data: None,
            nics: Vec::new(),
            rdma: Settings::default(),
            tcp_lanes: TCP_LANES,
            spin: worker.cores.busy_poll || worker.cores.cpus.len() > worker.cores.threads + 1,
            copy_lanes: copy_lanes(&worker.cores),
            split: false,
            decode_allocation: DecodeAllocation::default(),
            plan,
        })
    }

    /// The identity that a worker with this memory shows to peers.
    pub fn identity(&self, memory: &Memory) -> WorkerIdentity {
        WorkerIdentity {
            groups: self.groups.counts(),
            fingerprint: self.fingerprint,
            bit_class: self.bit_class,
            layout: self.layout,
            pages: self.pages,
            pool_bytes: memory.region.len() as u64,
            slots: self.slots as u32,
            host: self.host,
        }
    }
}

/// The path of the model. Fetches its files first, if it is a model on a hub.
fn locate(model: &ServedModelConfig) -> Result<PathBuf, ProcessError> {
    let Some(hub) = &model.hub else { return Ok(model.path.clone()) };
    let contents = match model.load_format {
        config::LoadFormat::Auto => ModelContents::All,
        config::LoadFormat::Dummy => ModelContents::WithoutWeights,
    };
    hub::locate(hub, contents)
        .map_err(|error| ProcessError::Hub { name: hub.name.to_string(), error: error.into() })
}

/// A digest of all properties that must be equal in two workers for a hand-off; see
/// [`CompatDigest`].
pub fn compat_digest(loaded: &LoadedModel) -> CompatDigest {
    let mut kind = shape_digest(loaded);
    kind.update(bytemuck::bytes_of(&loaded.fingerprint));
    let fingerprint = Fingerprint { kernels: [0; 32], ..loaded.fingerprint };
    let mut class = shape_digest(loaded);
    class.update(bytemuck::bytes_of(&fingerprint));
    class.update(bytemuck::bytes_of(&loaded.bit_class));
    CompatDigest { by_family: kind.finalize().into(), by_class: Some(class.finalize().into()) }
}

/// A digest with the shape of the KV.
fn shape_digest(loaded: &LoadedModel) -> Sha256 {
    let layout = &loaded.layout;
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
    // The pages of several groups are in one list, so both sides must count them alike.
    if !loaded.groups.counts().is_single() {
        digest.update(layout.page_size.to_le_bytes());
        for place in loaded.groups.places() {
            digest.update((place.group as u32).to_le_bytes());
            digest.update(place.layer.to_le_bytes());
        }
    }
    digest
}

/// Number of threads for shm copies. Two threads get more memory bandwidth than one. A copy ends
/// only when all its threads have finished, so a second thread needs its own CPU. Compute threads,
/// `ctl` and the mover have other CPUs.
fn copy_lanes(cores: &CoreConfig) -> usize {
    let parallelism = std::thread::available_parallelism().map_or(1, usize::from);
    let usable = cores.cpus.len().min(parallelism);
    if usable >= cores.threads + 3 { 2 } else { 1 }
}

/// Logs a warning if the workers' KV memory exceeds the memory of this process. KV memory is
/// allocated on first use, and cached prefixes fill all of it after a while. Then the kernel kills
/// the process.
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
        "KV memory can exceed the available memory, and the kernel then kills the process: see \
         --kv-memory",
        asked_mib = asked >> 20,
        workers = workers,
        there_mib = there >> 20,
        of = bound,
    );
}

/// The groups of a model's layers, and the layout of their pages.
///
/// # Errors
/// A page is too small for a piece of recurrent state.
fn kv_memory(
    model: &ModelConfig,
    page_size: u32,
    dtype: KvDtype,
) -> Result<(KvGroups, KvLayout), ProcessError> {
    model.kv_memory(page_size, dtype).map_err(|least| {
        let mut sizes = (0..).map(|power| 1 << power).take_while(|&size| size <= PAGE_SIZE_MAX);
        let way_out = match sizes.find(|&size| model.kv_memory(size, dtype).is_ok()) {
            Some(size) => format!("use at least {size}"),
            None => "no page size is large enough".into(),
        };
        let reason = format!(
            "is {page_size}; a page must hold a piece of the recurrent state, which has {least} \
             bytes: {way_out}"
        );
        ProcessError::Config("--page-size", reason)
    })
}

/// Number of pages in the KV memory.
///
/// # Errors
/// The memory is smaller than what one sequence needs: its state, and a page of each group.
fn pages(layout: &KvLayout, groups: GroupCounts, bytes: u64) -> Result<u32, ProcessError> {
    let pages = u32::try_from(bytes / layout.page_bytes()).unwrap_or(u32::MAX);
    let least = groups.pages(1, 1);
    if pages < least {
        let least = (u64::from(least) * layout.page_bytes()).div_ceil(1 << 10);
        let given = bytes >> 10;
        let what = match groups.state_pages {
            0 => "one page of all layers",
            _ => "the recurrent state of one sequence, with a page of the other layers",
        };
        let reason = format!("is {given} KiB; {what} takes {least} KiB");
        return Err(ProcessError::Config("--kv-memory", reason));
    }
    Ok(pages)
}

/// Number of pages for checkpoints of recurrent state, which can be 0.
///
/// # Errors
/// The model has no state, or the size is neither 0 nor at least one checkpoint.
fn checkpoint_pages(
    layout: &KvLayout,
    groups: GroupCounts,
    kv: &KvConfig,
) -> Result<u32, ProcessError> {
    let refuse = |reason| Err(ProcessError::Config("--state-memory", reason));
    let Some(pages) = NonZeroU32::new(groups.state_pages) else {
        return match kv.state_memory {
            None => Ok(0),
            Some(memory) if memory.0 == 0 => Ok(0),
            Some(_) => refuse("is given, but the model has no recurrent state".into()),
        };
    };
    let bytes = kv.state_memory.map_or(kv.memory.0 / STATE_MEMORY_SHARE, |memory| memory.0);
    let one = u64::from(pages.get()) * layout.page_bytes();
    match u32::try_from(bytes / layout.page_bytes()).unwrap_or(u32::MAX) / pages {
        0 if kv.state_memory.is_some_and(|memory| memory.0 > 0) => {
            refuse(format!("is less than one checkpoint, which takes {one} bytes; 0 for none"))
        }
        checkpoints => Ok(checkpoints * pages.get()),
    }
}

/// Number of pages for retracted requests, which can be 0.
///
/// # Errors
/// The size is neither 0 nor at least one page.
fn tier_pages(layout: &KvLayout, bytes: u64) -> Result<u32, ProcessError> {
    // u32::MAX marks the end of a page chain.
    match u32::try_from(bytes / layout.page_bytes()).unwrap_or(u32::MAX - 1) {
        0 if bytes > 0 => {
            let reason = format!(
                "is less than one page, which takes {} bytes; 0 for none",
                layout.page_bytes()
            );
            Err(ProcessError::Config("--swap-memory", reason))
        }
        pages => Ok(pages),
    }
}

/// Loads the weights in the kernels' format, and logs the progress.
fn load_weights(files: &ModelFiles, options: &CpuOptions) -> Result<CpuModel, LoadError> {
    let mut shown = 0;
    CpuModel::load(&files.config, files.weights.as_ref(), options, &mut |done, total| {
        let percent = done * 100 / total.max(1);
        if percent >= shown + 25 {
            shown = percent;
            event!(Info, "model", "loading", percent = percent);
        }
    })
}

/// Logs the loaded model: kernels, memory and context.
fn tell_loaded(forward: &CpuModel, loaded: &LoadedModel) {
    let (sched, layout) = (&loaded.sched, &loaded.layout);
    let memory = forward.memory_bytes();
    event!(
        Info,
        "model",
        "loaded",
        kernels = forward.kernel_family().name(),
        weights_mib = memory.weights >> 20,
        scratch_mib = memory.scratch >> 20,
        kv_mib = (u64::from(loaded.pages) * layout.page_bytes()) >> 20,
        kv_dtype = layout.dtype.name(),
        context = sched.context,
        state_kib = (u64::from(sched.groups.state_pages) * layout.page_bytes()) >> 10,
        checkpoints = sched.checkpoint_pages.checked_div(sched.groups.state_pages).unwrap_or(0),
    );
}

/// Logs a warning if the KV memory is too small for a request of maximum length.
fn tell_shortage(loaded: &LoadedModel, context: usize) {
    let layout = &loaded.layout;
    let tokens = loaded.groups.counts().sequence_tokens(loaded.pages, layout.page_size);
    if tokens < context as u64 {
        event!(
            Warn,
            "model",
            "KV memory is smaller than one context: longer requests are refused, see --kv-memory",
            kv_tokens = tokens,
            context = context,
            context_mib =
                (loaded.pages_of_context() as u64 * layout.page_bytes()).div_ceil(1 << 20),
        );
    }
}

fn context(model: &ModelConfig, asked: Option<u32>) -> Result<usize, ProcessError> {
    match asked {
        Some(asked) if asked as usize > model.context => {
            let reason = format!("is {asked}; the model's context has {} tokens", model.context);
            Err(ProcessError::Config("--max-model-len", reason))
        }
        Some(asked) => Ok(asked as usize),
        None if model.heads == 0 => Ok(model.context.min(RECURRENT_CONTEXT)),
        None => Ok(model.context),
    }
}

/// Resolves `auto`: f32 for float32 checkpoints, else f16. That includes bfloat16 checkpoints: keys
/// and values are clamped to the range of f16, and bf16 has eight times the rounding error.
fn kv_dtype(asked: config::KvCacheDtype, checkpoint: TensorType) -> KvDtype {
    match (asked, checkpoint) {
        (config::KvCacheDtype::F32, _) | (config::KvCacheDtype::Auto, TensorType::F32) => {
            KvDtype::F32
        }
        (config::KvCacheDtype::Bf16, _) => KvDtype::Bf16,
        (config::KvCacheDtype::F16 | config::KvCacheDtype::Auto, _) => KvDtype::F16,
    }
}

/// The kernel family that `--kernels` names, else the fastest one of this CPU.
///
/// # Errors
/// This CPU cannot run the family.
fn kernel_family(
    asked: Option<KernelFamily>,
    available: &[KernelFamily],
) -> Result<KernelFamily, ProcessError> {
    let family = asked.unwrap_or_else(fastest_kernels);
    if available.contains(&family) {
        return Ok(family);
    }
    let names: Vec<&str> = available.iter().map(|family| family.name()).collect();
    let reason = format!("{family}: this CPU can run {}", names.join(", "));
    Err(ProcessError::Config("--kernels", reason))
}

fn kernels_hash(family: &str) -> [u8; 32] {
    Sha256::digest(family.as_bytes()).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::values::ByteSize;

    #[test]
    fn kv_has_the_type_that_fits_the_checkpoint_or_the_one_of_the_flag() {
        use config::KvCacheDtype::{Auto, Bf16, F16, F32};
        for (asked, checkpoint, dtype) in [
            (Auto, TensorType::F32, KvDtype::F32),
            (Auto, TensorType::F16, KvDtype::F16),
            (Auto, TensorType::Bf16, KvDtype::F16),
            (Auto, TensorType::Q4_1, KvDtype::F16),
            (F32, TensorType::F16, KvDtype::F32),
            (F16, TensorType::F32, KvDtype::F16),
            (Bf16, TensorType::F32, KvDtype::Bf16),
        ] {
            assert_eq!(kv_dtype(asked, checkpoint), dtype, "{asked:?} {checkpoint:?}");
        }
    }

    #[test]
    fn kernels_that_this_cpu_cannot_run_are_refused_with_those_that_it_can() {
        let available = [KernelFamily::Portable, KernelFamily::Avx2];
        let asked = kernel_family(Some(KernelFamily::Avx2), &available).unwrap();
        assert_eq!(asked, KernelFamily::Avx2);
        let refused = kernel_family(Some(KernelFamily::Avx512), &available).unwrap_err();
        assert_eq!(refused.to_string(), "--kernels: avx512: this CPU can run portable, avx2");
    }

    #[test]
    fn checkpoints_take_their_part_of_the_memory_or_the_one_of_the_flag() {
        let layout = KvLayout::page_major(16, 1, 1, 8, KvDtype::F32);
        assert_eq!(layout.page_bytes(), 1024);
        let hybrid = GroupCounts { state_pages: 3, ..GroupCounts::FULL };
        let of = |groups, state_memory: Option<u64>| {
            let kv = KvConfig {
                page_size: 16,
                memory: ByteSize(40 << 10),
                dtype: config::KvCacheDtype::F32,
                prefix_cache: true,
                state_memory: state_memory.map(ByteSize),
            };
            checkpoint_pages(&layout, groups, &kv).map_err(|error| error.to_string())
        };
        assert_eq!(of(hybrid, None), Ok(9), "three of three pages in ten");
        assert_eq!(of(hybrid, Some(7 << 10)), Ok(6));
        assert_eq!(of(hybrid, Some(0)), Ok(0));
        let refused = of(hybrid, Some(2 << 10)).unwrap_err();
        assert!(refused.contains("--state-memory: is less than one checkpoint"), "{refused}");
        assert_eq!(of(GroupCounts::FULL, None), Ok(0));
        assert_eq!(of(GroupCounts::FULL, Some(0)), Ok(0));
        let refused = of(GroupCounts::FULL, Some(7 << 10)).unwrap_err();
        assert!(refused.contains("the model has no recurrent state"), "{refused}");
    }
}

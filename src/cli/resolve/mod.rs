//! Turns typed flags into a configuration: default values, and rules between flags.

mod kv;
mod routing;

use super::flags::{
    BenchFlags, ChunkFlags, Cli, CliCommand, DecodeFlags, DestinationFlags, DrainFlags,
    HandoffFlags, LayoutFlags, ModelFlags, PrefillFlags, ProcessFlags, RetractionFlags, ServeFlags,
    ServerFlags, SimFlow, SourceFlags, WorkerFlags,
};
use super::{HostInfo, Invocation};
use crate::config::api_key::{ApiKey, RateLimits, read_api_keys};
use crate::config::error::ConfigError;
use crate::config::hub::{HubConfig, HubName, REVISION};
use crate::config::registry::RegistryAddress;
use crate::config::secret::{Secret, read_bearer_keys, read_cluster_key};
use crate::config::values::{ByteSize, CpuList, WorkerUrl, parse_host};
use crate::config::{
    BOOTSTRAP_PORT, ChunkConfig, ClusterWorkerConfig, CoreConfig, DataThreadMode, DrainConfig,
    HandoffConfig, KvConfig, NO_NAMES, RetractionConfig, RoleConfig, ServeConfig,
    ServedModelConfig, ServerConfig, Transfer, WorkerConfig, WorkerLayout,
};
use crate::ids::Role;
use crate::limits::{CLUSTER_KEYS_MAX, HTTP_BODY_MAX, KV_MEMORY_MAX, KV_MEMORY_MIN};
use crate::obs::log::LogConfig;
use crate::stdx::cidr::Cidr;
use crate::wire::message::RdmaGrant;
use kv::read_kv;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The HTTP port of servers that clients connect to; vLLM's default.
pub(super) const CLIENT_PORT: u16 = 8000;
/// The HTTP port of prefill workers; SGLang's default. Decode workers use the next port, so a
/// pair on one host needs no flag.
pub(super) const PREFILL_PORT: u16 = 30000;
pub(super) const DECODE_PORT: u16 = 30001;
/// SGLang's default.
const MAX_PREFILL_TOKENS: u32 = 16384;
/// vLLM's default. On most CPUs `--chunk-ms` ends a chunk earlier.
const CHUNKED_PREFILL_SIZE: u32 = 2048;

const ONLY_RDMA: &str = "only with --transfer auto or rdma";

/// Resolves a typed command line.
pub fn resolve(cli: Cli, surroundings: &HostInfo) -> Result<Invocation, ConfigError> {
    let mut resolver = Resolver { surroundings, warnings: Vec::new() };
    let (command, print) = match cli.command {
        CliCommand::Serve(flags) => {
            let print = flags.process.print_config;
            (RoleConfig::Serve(resolver.serve(flags)?), print)
        }
        CliCommand::Prefill(flags) => {
            let print = flags.process.print_config;
            (RoleConfig::Prefill(resolver.prefill(flags)?), print)
        }
        CliCommand::Decode(flags) => {
            let print = flags.process.print_config;
            (RoleConfig::Decode(resolver.decode(flags)?), print)
        }
        CliCommand::Router(flags) => {
            let print = flags.process.print_config;
            (RoleConfig::Router(resolver.router(flags)?), print)
        }
        CliCommand::Drain(flags) => {
            let config = resolver.drain(flags)?;
            return Ok(Invocation::Drain { config, warnings: resolver.warnings });
        }
        CliCommand::Doctor(flags) => {
            let cores = resolver.cores(flags.cpus.clone(), flags.threads, false)?;
            return Ok(Invocation::Doctor(flags, cores));
        }
        CliCommand::Sim(flags) => {
            if flags.load.is_load_mode && flags.flow != SimFlow::Auto {
                return Err(ConfigError::Conflict {
                    flag: "--flow",
                    other: "--load",
                    why: "load mode calls both workers at once, as in the flow dual",
                });
            }
            return Ok(Invocation::Sim(Box::new(flags)));
        }
        CliCommand::Bench(BenchFlags::Transfer(flags)) => {
            return Ok(Invocation::BenchTransfer(Box::new(flags)));
        }
    };
    if print {
        let json = serde_json::to_string_pretty(&command)
            .expect("all keys of a configuration are strings");
        return Ok(Invocation::Print(json));
    }
    Ok(Invocation::Run { command: Box::new(command), warnings: resolver.warnings })
}

struct Resolver<'a> {
    surroundings: &'a HostInfo,
    warnings: Vec<String>,
}

impl Resolver<'_> {
    fn serve(&mut self, flags: ServeFlags) -> Result<ServeConfig, ConfigError> {
        let (mut worker, layout) =
            (self.worker(flags.worker, CLIENT_PORT)?, layout(&flags.layout)?);
        let fake = matches!(layout, WorkerLayout::Split { transfer: Transfer::Fake, .. });
        worker.kv.prefix_cache &= !fake;
        let (chunks, retraction) =
            (chunks(&flags.prefill)?, retraction(&flags.retraction, &worker.kv)?);
        Ok(ServeConfig { worker, layout, chunks, retraction, log: self.log(&flags.process)? })
    }

    fn prefill(&mut self, flags: PrefillFlags) -> Result<ClusterWorkerConfig, ConfigError> {
        let PrefillFlags { worker, prefill, retraction, handoff, source, destination, process } =
            flags;
        self.part(
            Role::Prefill,
            worker,
            (prefill, retraction),
            handoff,
            (source, destination),
            &process,
        )
    }

    fn decode(&mut self, flags: DecodeFlags) -> Result<ClusterWorkerConfig, ConfigError> {
        let DecodeFlags { worker, recompute, retraction, handoff, source, destination, process } =
            flags;
        self.part(
            Role::Decode,
            worker,
            (recompute, retraction),
            handoff,
            (source, destination),
            &process,
        )
    }

    /// Configuration of a worker that starts in this role.
    fn part(
        &mut self,
        role: Role,
        worker: WorkerFlags,
        (chunking, retracting): (ChunkFlags, RetractionFlags),
        handoff: HandoffFlags,
        (source, destination): (SourceFlags, DestinationFlags),
        process: &ProcessFlags,
    ) -> Result<ClusterWorkerConfig, ConfigError> {
        let (host, transfer) = (worker.server.host, handoff.transfer);
        let is_decode = role == Role::Decode;
        let listens_for_peers = !is_decode || transfer.takes_tcp();
        let name =
            handoff.advertise_host.as_ref().filter(|name| is_decode && parse_host(name).is_err());
        if let Some(name) = name {
            return Err(value(
                "--advertise-host",
                name,
                format!("must be an IP address: {NO_NAMES}"),
            ));
        }
        let mut bootstrap_allow = destination.bootstrap_allow;
        if bootstrap_allow.is_empty() {
            bootstrap_allow = Cidr::LOOPBACK.to_vec();
        }
        if destination.local_prefill && transfer == Transfer::Fake {
            return Err(ConfigError::Conflict {
                flag: "--local-prefill",
                other: "--transfer fake",
                why: "with fake, a request that names no prefill worker skips prefill",
            });
        }
        let (port, bootstrap_port) =
            if is_decode { (DECODE_PORT, 0) } else { (PREFILL_PORT, BOOTSTRAP_PORT) };
        let mut worker = self.worker(worker, port)?;
        // With `fake` no KV arrives, so a second prompt has no prefix to reuse.
        worker.kv.prefix_cache &= !(is_decode && transfer == Transfer::Fake);
        let config = ClusterWorkerConfig {
            chunks: chunks(&chunking)?,
            retraction: retraction(&retracting, &worker.kv)?,
            worker,
            handoff: self.handoff(handoff, host, listens_for_peers)?,
            bootstrap_port: source.bootstrap_port.unwrap_or(bootstrap_port),
            control_port: source.control_port,
            bootstrap_timeout: Duration::from_secs(source.bootstrap_timeout.into()),
            data_threads: data_threads(source.data_threads, transfer)?,
            decode_allocation: source.decode_allocation,
            data_port: destination.data_port,
            bootstrap_allow,
            local_prefill: destination.local_prefill,
            log: self.log(process)?,
        };
        distinct_ports(&[
            ("--port", config.worker.server.port),
            ("--bootstrap-port", config.bootstrap_port),
            ("--control-port", config.control_port),
            ("--data-port", config.data_port),
        ])?;
        Ok(config)
    }

    fn drain(&mut self, flags: DrainFlags) -> Result<DrainConfig, ConfigError> {
        let api_keys = self.api_keys(flags.api_key_file.as_deref())?;
        let admin_keys = self.admin_keys(flags.admin_key_file.as_deref())?;
        // At most one of the two files is given.
        let key = admin_keys.into_iter().chain(api_keys.into_iter().map(|key| key.secret)).next();
        vouched("URL", [&flags.url], flags.tls_ca_file.as_deref())?;
        Ok(DrainConfig { url: flags.url, tls_ca: flags.tls_ca_file, key, wait: flags.wait })
    }

    fn worker(&mut self, flags: WorkerFlags, port: u16) -> Result<WorkerConfig, ConfigError> {
        let hub = self.hub(&flags.model.model, flags.model.revision.clone())?;
        Ok(WorkerConfig {
            model: model(flags.model, hub)?,
            server: self.server(flags.server, port)?,
            kv: read_kv(&flags.kv)?,
            max_running_requests: flags.admission.max_running_requests,
            max_queued_requests: flags.admission.max_queued_requests,
            scheduling: flags.admission.scheduling_policy,
            cores: self.cores(flags.cores.cpus, flags.cores.threads, flags.cores.busy_poll)?,
            kernels: flags.cores.kernels,
        })
    }

    /// The model on a hub that MODEL names, if it is no path of this host.
    fn hub(
        &mut self,
        path: &Path,
        revision: Option<String>,
    ) -> Result<Option<HubConfig>, ConfigError> {
        let HostInfo { files, hub: variables, .. } = self.surroundings;
        let is_path = files.stamp(path).is_some();
        // So is a misspelt path below a directory that exists.
        let is_below = path.parent().is_some_and(|folder| files.stamp(folder).is_some());
        let name = path.to_str().filter(|_| !is_path && !is_below).and_then(HubName::parse);
        match (name, revision) {
            (Some(name), revision) => {
                let revision = revision.unwrap_or_else(|| REVISION.to_owned());
                HubConfig::new(name, revision, variables, files, &mut self.warnings).map(Some)
            }
            (None, None) => Ok(None),
            (None, Some(revision)) => {
                let found = if is_path { "is a path that exists" } else { "is no such name" };
                let limit = format!(
                    "only a model on a hub, OWNER/REPOSITORY, has a revision; MODEL {} {found}",
                    path.display()
                );
                Err(value("--revision", revision, limit))
            }
        }
    }

    fn server(&mut self, flags: ServerFlags, port: u16) -> Result<ServerConfig, ConfigError> {
        let api_keys = self.api_keys(flags.api_key_file.as_deref())?;
        let admin_keys = self.admin_keys(flags.admin_key_file.as_deref())?;
        let (requests, tokens) = (flags.key_requests_per_minute, flags.key_tokens_per_minute);
        let key_limits = RateLimits { requests, tokens };
        if let (Some(flag), true) = (key_limits.flag(), api_keys.is_empty()) {
            let why = format!("{flag} limits each API key");
            return Err(ConfigError::Missing { flag: "--api-key-file", why });
        }
        self.warn_of_rights(&api_keys, &admin_keys);
        if !flags.host.is_loopback() && api_keys.is_empty() {
            self.warnings.push(format!(
                "--host {}: without --api-key-file, every client that reaches the port is served",
                flags.host
            ));
        }
        let size = flags.max_payload_size;
        let body_max =
            usize::try_from(size.0).ok().filter(|bytes| (1..=HTTP_BODY_MAX).contains(bytes));
        let body_max = body_max.ok_or_else(|| {
            value(
                "--max-payload-size",
                size,
                format!("must be 1 byte to {}", ByteSize(HTTP_BODY_MAX as u64)),
            )
        })?;
        let tls = flags.tls_cert_file.zip(flags.tls_key_file);
        Ok(ServerConfig {
            host: flags.host,
            port: flags.port.unwrap_or(port),
            api_keys,
            key_limits,
            admin_keys,
            tls,
            body_max,
            allowed_origins: flags.allowed_origins,
        })
    }

    /// The API keys of this file; none without a file.
    fn api_keys(&mut self, path: Option<&Path>) -> Result<Vec<ApiKey>, ConfigError> {
        let files = &self.surroundings.files;
        path.map_or(Ok(Vec::new()), |path| read_api_keys(files, path, &mut self.warnings))
    }

    /// The admin keys of this file; none without a file.
    fn admin_keys(&mut self, path: Option<&Path>) -> Result<Vec<Secret>, ConfigError> {
        const FLAG: &str = "--admin-key-file";
        let files = &self.surroundings.files;
        path.map_or(Ok(Vec::new()), |path| read_bearer_keys(files, FLAG, path, &mut self.warnings))
    }

    /// Warns if clients with an API key can administer the server.
    fn warn_of_rights(&mut self, api_keys: &[ApiKey], admin_keys: &[Secret]) {
        let is_admin =
            |key: &ApiKey| admin_keys.iter().any(|admin| admin.bytes() == key.secret.bytes());
        if !api_keys.is_empty() && admin_keys.is_empty() {
            self.warnings.push(
                "--api-key-file: without --admin-key-file, every client with an API key can \
                 drain, abort all requests, flush caches, and change roles and workers"
                    .into(),
            );
        } else if api_keys.iter().any(is_admin) {
            self.warnings.push(
                "--admin-key-file: it has a key of --api-key-file, and every client with this \
                 key can administer the server"
                    .into(),
            );
        }
    }

    fn cores(
        &mut self,
        chosen: Option<CpuList>,
        threads: Option<u32>,
        busy_poll: bool,
    ) -> Result<CoreConfig, ConfigError> {
        let allowed = &self.surroundings.cpus;
        let cpus_are_chosen = chosen.is_some();
        let cpus = chosen.map_or_else(|| allowed.clone(), |list| list.0);
        if let Some(cpu) = cpus.iter().find(|cpu| !allowed.contains(cpu)) {
            let limit = format!("this process can only run on {}", CpuList(allowed.clone()));
            return Err(value("--cpus", cpu, limit));
        }
        let usable = cpus.len().min(self.surroundings.parallelism).max(1);
        let threads = threads.map_or(usable, |threads| threads as usize);
        if threads > usable {
            self.warnings.push(format!(
                "--threads {threads}: only {usable} can run at once; more threads are slower"
            ));
        }
        Ok(CoreConfig { cpus, cpus_are_chosen, threads, busy_poll })
    }

    /// Reads the cluster keys from these files.
    ///
    /// # Errors
    /// There are too many files, a file cannot be used, or `--insecure` is also given.
    fn cluster_keys(
        &mut self,
        files: &[PathBuf],
        insecure: bool,
    ) -> Result<Vec<Secret>, ConfigError> {
        if files.len() > CLUSTER_KEYS_MAX {
            let limit = format!("at most {CLUSTER_KEYS_MAX}");
            return Err(value("--cluster-key-file", format!("given {} times", files.len()), limit));
        }
        if !files.is_empty() && insecure {
            return Err(ConfigError::Conflict {
                flag: "--cluster-key-file",
                other: "--insecure",
                why: "--insecure means that peers prove no key",
            });
        }
        let access = &self.surroundings.files;
        files.iter().map(|path| read_cluster_key(access, path, &mut self.warnings)).collect()
    }

    fn handoff(
        &mut self,
        flags: HandoffFlags,
        host: IpAddr,
        listens_for_peers: bool,
    ) -> Result<HandoffConfig, ConfigError> {
        let cluster_keys = self.cluster_keys(&flags.cluster_key_file, flags.insecure)?;
        if listens_for_peers && !host.is_loopback() && cluster_keys.is_empty() && !flags.insecure {
            return Err(ConfigError::Missing {
                flag: "--cluster-key-file or --insecure",
                why: format!("--host {host} lets other hosts reach the ports for peers"),
            });
        }
        let named = (!host.is_unspecified()).then(|| host.to_string());
        if flags.registry.is_some() && flags.advertise_host.is_none() && named.is_none() {
            return Err(ConfigError::Missing {
                flag: "--advertise-host",
                why: format!(
                    "--registry announces an address of this worker, and --host {host} gives none"
                ),
            });
        }
        if let Some(RegistryAddress::Routers(urls)) = &flags.registry {
            vouched("--registry", urls, flags.tls_ca_file.as_deref())?;
        }
        Ok(HandoffConfig {
            registry: flags.registry,
            tls_ca: flags.tls_ca_file,
            peer_timeout: flags.peer_timeout,
            transfer: flags.transfer,
            rdma_devices: self.rdma_devices(flags.rdma_devices, flags.transfer)?,
            advertise_host: flags.advertise_host.or(named),
            cluster_keys,
            insecure: flags.insecure,
            fake_bootstrap: flags.fake_bootstrap || flags.transfer == Transfer::Fake,
        })
    }

    fn rdma_devices(
        &self,
        names: Vec<String>,
        transfer: Transfer,
    ) -> Result<Vec<String>, ConfigError> {
        let given = || names.join(",");
        if !names.is_empty() && !transfer.takes_rdma() {
            return Err(value("--rdma-devices", given(), ONLY_RDMA));
        }
        if names.len() > RdmaGrant::RAILS_MAX {
            let limit = format!("at most {}", RdmaGrant::RAILS_MAX);
            return Err(value("--rdma-devices", given(), limit));
        }
        Ok(names)
    }

    fn log(&self, flags: &ProcessFlags) -> Result<LogConfig, ConfigError> {
        let level = match (flags.log_level, &self.surroundings.log_level) {
            (Some(level), _) => level,
            (None, Some(name)) if !name.is_empty() => name.parse().map_err(|_| {
                value("BATON_LOG", name, "must be error, warn, info, debug or trace")
            })?,
            (None, _) => Default::default(),
        };
        Ok(LogConfig { level, format: flags.log_format })
    }
}

/// Checks that CA certificates are given if the URL of a server is `https://`.
fn vouched<'a>(
    flag: &'static str,
    urls: impl IntoIterator<Item = &'a WorkerUrl>,
    authorities: Option<&Path>,
) -> Result<(), ConfigError> {
    match urls.into_iter().find(|url| url.tls && authorities.is_none()) {
        None => Ok(()),
        Some(url) => Err(ConfigError::Missing {
            flag: "--tls-ca-file",
            why: format!("{flag} {url} uses TLS, and its certificate must be checked"),
        }),
    }
}

fn value(flag: &'static str, value: impl ToString, limit: impl Into<String>) -> ConfigError {
    ConfigError::Value { flag, value: value.to_string(), limit: limit.into() }
}

fn model(flags: ModelFlags, hub: Option<HubConfig>) -> Result<ServedModelConfig, ConfigError> {
    let ModelFlags {
        model: path,
        revision: _,
        mut served_model_name,
        max_model_len,
        load_format,
        tool_call_parser,
        reasoning_parser,
        trust_request_chat_template: trusts_templates,
    } = flags;
    if served_model_name.iter().any(|name| name.trim().is_empty()) {
        return Err(value("--served-model-name", "\"\"", "must not be empty"));
    }
    if served_model_name.is_empty() {
        let typed = hub.as_ref().map(|hub| vec![hub.name.to_string()]);
        served_model_name = typed.unwrap_or_else(|| default_names(&path));
    }
    Ok(ServedModelConfig {
        path,
        hub: hub.map(Box::new),
        served_names: served_model_name,
        max_model_len,
        load_format,
        tool_call_parser,
        reasoning_parser,
        trusts_templates,
    })
}

/// The name of the file or directory, then MODEL as typed (vLLM's default name).
fn default_names(path: &Path) -> Vec<String> {
    let is_gguf = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    let name = if is_gguf { path.file_stem() } else { path.file_name() };
    let typed = path.to_string_lossy().into_owned();
    let mut names: Vec<String> =
        name.iter().map(|name| name.to_string_lossy().into_owned()).collect();
    if !names.contains(&typed) {
        names.push(typed);
    }
    names
}

fn data_threads(
    typed: Option<DataThreadMode>,
    transfer: Transfer,
) -> Result<DataThreadMode, ConfigError> {
    match typed {
        Some(typed) if !transfer.takes_rdma() => Err(value("--data-threads", typed, ONLY_RDMA)),
        typed => Ok(typed.unwrap_or_default()),
    }
}

fn layout(flags: &LayoutFlags) -> Result<WorkerLayout, ConfigError> {
    if !flags.mixed {
        if let Some(transfer @ (Transfer::Tcp | Transfer::Rdma)) = flags.transfer {
            let name = if transfer == Transfer::Tcp { "tcp" } else { "rdma" };
            let limit = "workers of one process use shm; for other transports start each worker \
                         by its own command";
            return Err(value("--transfer", name, limit));
        }
        return Ok(WorkerLayout::Split {
            prefill: flags.prefill_workers.unwrap_or(1),
            decode: flags.decode_workers.unwrap_or(1),
            transfer: flags.transfer.unwrap_or_default(),
            decode_allocation: flags.decode_allocation.unwrap_or_default(),
            first_token: flags.first_token.unwrap_or_default(),
        });
    }
    let splitting = [
        ("--prefill-workers", flags.prefill_workers.is_some()),
        ("--decode-workers", flags.decode_workers.is_some()),
        ("--transfer", flags.transfer.is_some()),
        ("--decode-allocation", flags.decode_allocation.is_some()),
        ("--first-token", flags.first_token.is_some()),
    ];
    match splitting.iter().find(|(_, given)| *given) {
        None => Ok(WorkerLayout::Mixed),
        Some((other, _)) => Err(ConfigError::Conflict {
            flag: "--mixed",
            other,
            why: "a mixed worker runs alone and transfers no KV",
        }),
    }
}

fn chunks(flags: &ChunkFlags) -> Result<ChunkConfig, ConfigError> {
    let (max, chunk) = match (flags.max_prefill_tokens, flags.chunked_prefill_size) {
        (Some(max), Some(chunk)) => (max, chunk),
        (Some(max), None) => (max, CHUNKED_PREFILL_SIZE.min(max)),
        (None, Some(chunk)) => (MAX_PREFILL_TOKENS.max(chunk), chunk),
        (None, None) => (MAX_PREFILL_TOKENS, CHUNKED_PREFILL_SIZE),
    };
    if chunk > max {
        let limit = format!("must not exceed --max-prefill-tokens {max}");
        return Err(value("--chunked-prefill-size", chunk, limit));
    }
    Ok(ChunkConfig {
        max_prefill_tokens: max,
        chunked_prefill_size: chunk,
        chunk_ms: flags.chunk_ms,
    })
}

fn retraction(flags: &RetractionFlags, kv: &KvConfig) -> Result<RetractionConfig, ConfigError> {
    let memory = flags.swap_memory.unwrap_or(kv.memory);
    if memory.0 != 0 && !(KV_MEMORY_MIN..=KV_MEMORY_MAX).contains(&memory.0) {
        let (least, most) = (ByteSize(KV_MEMORY_MIN), ByteSize(KV_MEMORY_MAX));
        let limit = format!("must be 0, or {least} to {most}; a number without a unit is bytes");
        return Err(value("--swap-memory", memory, limit));
    }
    Ok(RetractionConfig { reserved_tokens: flags.num_reserved_decode_tokens, memory })
}

fn distinct_ports(ports: &[(&'static str, u16)]) -> Result<(), ConfigError> {
    for (index, (flag, port)) in ports.iter().enumerate() {
        if let Some((other, _)) =
            ports[..index].iter().find(|(_, taken)| taken == port && *port != 0)
        {
            return Err(value(flag, port, format!("is also {other}")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;

//! The threads and rings of this process: start, drain, stop.
//!
//! `serve` runs `ctl` (this thread), one `engine` with a team of compute threads for all workers,
//! one `move-0`, and threads that tokenise. Not here: the logic of roles.

mod announcement;
pub mod cpu_plan;
pub mod helpers;
mod listeners;
pub mod model;
mod ports;
mod registration;
pub mod router;
mod startup;
pub mod stepped_threads;
pub mod thread_cpus;
pub mod threads;
pub mod worker;

use self::helpers::HelperThreads;
use crate::config::secret::Secret;
use crate::config::{ServeConfig, ServerConfig, Transfer, WorkerConfig, WorkerLayout};
use crate::hub::HubError;
use crate::ids::Role;
use crate::model::weights::LoadError;
use crate::net::{Authorities, Credentials, Reactor};
use crate::server::drain::DrainOutcome;
use crate::server::reload::Reload;
use crate::stdx::event_count::EventCount;
use crate::sys::file_access::FileAccess;
use crate::wire::message::Transport;
use crate::worker::requests::Placement;
use crate::worker::routes::ServerDescription;
use crate::worker::service::{RunOutcome, WorkerService};
use model::LoadedModel;
use ports::Port;
use startup::StartupSignals;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;
use std::{fmt, io};
use threads::{ProcessBuilder, RoleThreads, Threads};

/// Why a process could not start, or failed.
#[derive(Debug)]
pub enum ProcessError {
    /// The model's files cannot be used.
    Model(LoadError),
    /// A model on a hub cannot be used.
    Hub {
        /// Its name.
        name: String,
        /// The reason.
        error: Box<HubError>,
    },
    /// A system call failed: the action, and the error.
    Io(&'static str, io::Error),
    /// A port cannot be opened.
    Listen {
        /// The flag that sets it.
        flag: &'static str,
        /// The address.
        address: SocketAddr,
        /// The error.
        error: io::Error,
    },
    /// A flag does not fit the model, or names an unusable file: flag and reason.
    Config(&'static str, String),
    /// A flag names a file, host or device that does not exist now: flag and reason.
    Absent(&'static str, String),
}

impl ProcessError {
    /// Whether another try would fail in the same way, because the command line or a file that it
    /// names cannot be used.
    pub fn is_usage_error(&self) -> bool {
        match self {
            ProcessError::Hub { error, .. } => error.is_usage_error(),
            _ => matches!(self, ProcessError::Model(_) | ProcessError::Config(..)),
        }
    }
}

impl fmt::Display for ProcessError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ProcessError::Model(error) => error.fmt(f),
            ProcessError::Hub { name, error } => {
                write!(f, "MODEL {name}: there is no such path, and the hub's model: {error}")
            }
            ProcessError::Io(doing, error) => write!(f, "{doing}: {error}"),
            ProcessError::Listen { flag, address, error } => {
                let is_elsewhere = error.kind() == io::ErrorKind::AddrNotAvailable;
                let flag = if is_elsewhere { "--host" } else { flag };
                write!(f, "{flag}: cannot listen on {address}: {error}")
            }
            ProcessError::Config(flag, reason) | ProcessError::Absent(flag, reason) => {
                write!(f, "{flag}: {reason}")
            }
        }
    }
}

impl std::error::Error for ProcessError {}

impl From<LoadError> for ProcessError {
    fn from(error: LoadError) -> ProcessError {
        ProcessError::Model(error)
    }
}

/// Runs `baton serve` until a signal or a drain ends it.
///
/// # Errors
/// The process could not start, or failed.
pub fn serve(config: &ServeConfig) -> Result<DrainOutcome, ProcessError> {
    let begun = Instant::now();
    let (credentials, reload) = read_secrets(&config.worker.server, &[], &FileAccess::Host, begun)?;
    let starting = StartupSignals::install(!reload.is_empty())?;
    let transports = match config.layout {
        WorkerLayout::Mixed => Vec::new(),
        WorkerLayout::Split { transfer: Transfer::Fake, .. } => vec![Transport::Fake],
        // The configuration allows no other transport here.
        WorkerLayout::Split { .. } => vec![Transport::Shm],
    };
    ports::check(config.worker.server.host, &[http_port(&config.worker)], &mut reactor()?.0)?;
    let workers = match config.layout {
        WorkerLayout::Mixed => 1,
        WorkerLayout::Split { prefill, decode, .. } => prefill.saturating_add(decode),
    };
    model::tell_excess(&config.worker.kv, workers);
    let plan = thread_cpus::begin(&config.worker.cores, &[]);
    let (files, forward, mut loaded) =
        LoadedModel::open(&config.worker, config.chunks, config.retraction, transports, plan)?;
    if let WorkerLayout::Split { decode_allocation, .. } = config.layout {
        loaded.decode_allocation = decode_allocation;
    }
    let (mut reactor, ctl) = reactor()?;
    let mut process = ProcessBuilder::new(&loaded, &config.worker, ctl.clone(), reactor.clock())?;
    let placement = match config.layout {
        WorkerLayout::Mixed => Placement::Mixed(vec![process.add_mixed(&loaded)?]),
        WorkerLayout::Split { prefill, decode, first_token, .. } => Placement::Split {
            first_token,
            prefill: (0..prefill)
                .map(|_| process.add_prefill(&loaded))
                .collect::<Result<_, _>>()?,
            decode: (0..decode).map(|_| process.add_decode(&loaded)).collect::<Result<_, _>>()?,
        },
    };
    let entropy = reactor.entropy().fork("handoff");
    let (workers, cores) =
        process.assemble(&loaded, forward, ctl.clone(), entropy, Box::new(Instant::now));
    let threads = Threads::start(cores, &loaded)?;
    let mode = ServerDescription::mode_of(Role::Mixed);
    let service = threads::build_service(
        reactor,
        &config.worker,
        files,
        &loaded,
        workers,
        (placement, mode),
        (ctl, &HelperThreads(loaded.plan.clone())),
    );
    let mut service = service?;
    install_secrets(&mut service, credentials, reload)?;
    starting.finish();
    thread_cpus::become_ctl(&loaded.plan);
    threads::announce_ready(&service, &config.worker, begun);
    let end = match service.run().map_err(|error| ProcessError::Io("the event loop failed", error))
    {
        Ok(RunOutcome::Ended(end)) => Ok(end),
        Ok(RunOutcome::ChangeRole(_) | RunOutcome::KeepRole) => {
            unreachable!("workers of `baton serve` have one role")
        }
        Err(error) => Err(error),
    };
    shut_down(service, threads, end)
}

/// Stops the service, then the threads.
fn shut_down(
    service: WorkerService,
    threads: Threads,
    end: Result<DrainOutcome, ProcessError>,
) -> Result<DrainOutcome, ProcessError> {
    // The service ends first, so that it sends its last answers.
    drop(service);
    let stopped = threads.stop();
    end.and_then(|outcome| stopped.map(|_| outcome))
}

/// The reactor, and the event count that wakes its thread.
fn reactor() -> Result<(Reactor, Arc<EventCount>), ProcessError> {
    let reactor =
        Reactor::new().map_err(|error| ProcessError::Io("cannot create a reactor", error))?;
    let waker = reactor.waker();
    Ok((reactor, Arc::new(EventCount::new(move || waker.wake()))))
}

/// Reads the certificate for HTTPS, and lists the files to read again when they change. Runs before
/// the load of the model, so that errors appear early and a change during the load is noticed.
///
/// # Errors
/// The certificate or its key cannot be used.
pub fn read_secrets(
    server: &ServerConfig,
    cluster_keys: &[Secret],
    files: &FileAccess,
    now: Instant,
) -> Result<(Option<Credentials>, Reload), ProcessError> {
    let reload = Reload::new(server, cluster_keys, files, now);
    let read = |(certificates, key): &(PathBuf, PathBuf)| Credentials::read(certificates, key);
    let credentials = server.tls.as_ref().map(read).transpose();
    let credentials =
        credentials.map_err(|why| ProcessError::Config("--tls-cert-file, --tls-key-file", why))?;
    Ok((credentials, reload))
}

/// Reads the CA certificates, if a file was given.
fn authorities(file: Option<&Path>) -> Result<Option<Authorities>, ProcessError> {
    file.map(Authorities::read)
        .transpose()
        .map_err(|why| ProcessError::Config("--tls-ca-file", why))
}

/// Gives certificates and reload rules to a service.
///
/// # Errors
/// The handler of SIGHUP cannot be installed.
pub fn install_secrets(
    service: &mut WorkerService,
    credentials: Option<Credentials>,
    reload: Reload,
) -> Result<(), ProcessError> {
    if let Some(credentials) = credentials {
        service.secure(credentials);
    }
    service.renew_from(reload).map_err(|error| ProcessError::Io("cannot handle signals", error))
}

fn http_port(config: &WorkerConfig) -> Port {
    Port::new("--port", config.server.port)
}

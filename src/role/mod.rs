//! Which threads and rings exist in this process; start, drain, stop.
//!
//! `serve`: `ctl` (this thread), one `engine` that steps all workers with a team of compute threads, one
//! `move`, one `tok`. No logic here: a role is what exists and who is connected to whom.

pub mod part;
pub mod router;

mod doors;
mod enrolling;
mod loaded;
mod ports;
mod process;
mod starting;
mod telling;

use crate::config::resolved::{FrontConfig, ServeConfig, Transfer, WorkerConfig, WorkerLayout};
use crate::config::secret::Secret;
use crate::front::drain::End;
use crate::front::generations::Placement;
use crate::front::reload::Reload;
use crate::front::routes::About;
use crate::front::service::{Outcome, Service};
use crate::model::weights::LoadError;
use crate::net::{Authorities, Credentials, Reactor};
use crate::obs::metrics::EngineType;
use crate::stdx::bell::Bell;
use crate::wire::message::Transport;
use loaded::Loaded;
pub use loaded::host_id;
use ports::Port;
use process::{Crew, Process};
use starting::Starting;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;
use std::{fmt, io};

/// Why a process could not start, or ended badly.
#[derive(Debug)]
pub enum RoleError {
    /// The model's files.
    Model(LoadError),
    /// The system refused something; what was being done.
    Io(&'static str, io::Error),
    /// A port that cannot be had.
    Listen {
        /// What sets it.
        flag: &'static str,
        /// Which.
        address: SocketAddr,
        /// Why.
        error: io::Error,
    },
    /// What was typed is wrong, as the model, or the file that it names, shows: flag and reason.
    Config(&'static str, String),
    /// What a flag asks for is not there now: flag and reason.
    Absent(&'static str, String),
}

impl RoleError {
    /// Whether it would be the same whenever it is tried: what was typed, or a file that it names, cannot be used.
    pub fn is_of_usage(&self) -> bool {
        matches!(self, RoleError::Model(_) | RoleError::Config(..))
    }
}

impl fmt::Display for RoleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RoleError::Model(error) => error.fmt(f),
            RoleError::Io(doing, error) => write!(f, "{doing}: {error}"),
            RoleError::Listen { flag, address, error } => {
                write!(f, "{flag}: cannot listen on {address}: {error}")
            }
            RoleError::Config(flag, reason) | RoleError::Absent(flag, reason) => {
                write!(f, "{flag}: {reason}")
            }
        }
    }
}

impl std::error::Error for RoleError {}

impl From<LoadError> for RoleError {
    fn from(error: LoadError) -> RoleError {
        RoleError::Model(error)
    }
}

/// Serves a model in this process until it is told to stop.
pub fn serve(config: &ServeConfig) -> Result<End, RoleError> {
    let begun = Instant::now();
    let (credentials, reload) = secrets(&config.worker.front, &[])?;
    let starting = Starting::begin(!reload.is_empty())?;
    let transports = match config.layout {
        WorkerLayout::Mixed => Vec::new(),
        WorkerLayout::Split { transfer: Transfer::Fake, .. } => vec![Transport::Fake],
        // The configuration takes nothing else here.
        WorkerLayout::Split { .. } => vec![Transport::Shm],
    };
    ports::check(config.worker.front.host, &[http_port(&config.worker)])?;
    let workers = match config.layout {
        WorkerLayout::Mixed => 1,
        WorkerLayout::Split { prefill, decode, .. } => prefill.saturating_add(decode),
    };
    loaded::tell_excess(&config.worker.kv, workers);
    let (files, forward, mut loaded) =
        Loaded::open(&config.worker, config.chunks, config.retraction, transports)?;
    if let WorkerLayout::Split { decode_allocation, .. } = config.layout {
        loaded.decode_allocation = decode_allocation;
    }
    let (reactor, ctl) = reactor()?;
    let mut process = Process::new(&loaded, &config.worker, ctl.clone())?;
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
    let (workers, crew) = process.start(&loaded, forward, ctl.clone())?;
    let mode = About::mode_of(EngineType::Unified);
    let front =
        process::front(reactor, &config.worker, files, &loaded, workers, (placement, mode), ctl);
    let mut service = front?;
    keep(&mut service, credentials, reload)?;
    starting.over();
    process::announce_ready(&service, &config.worker, begun);
    let end = match service.run().map_err(|error| RoleError::Io("the reactor failed", error)) {
        Ok(Outcome::Ended(end)) => Ok(end),
        Ok(Outcome::Turns(_) | Outcome::Stays) => {
            unreachable!("workers that serve by themselves have one role")
        }
        Err(error) => Err(error),
    };
    ended(service, crew, end)
}

/// What is left to do when all is over.
fn ended(service: Service, crew: Crew, end: Result<End, RoleError>) -> Result<End, RoleError> {
    // Its last words leave first.
    drop(service);
    crew.stop();
    end
}

/// Sockets, and what wakes the thread that waits for them.
fn reactor() -> Result<(Reactor, Arc<Bell>), RoleError> {
    let reactor = Reactor::new().map_err(|error| RoleError::Io("cannot make a reactor", error))?;
    let waker = reactor.waker();
    Ok((reactor, Arc::new(Bell::new(move || waker.wake()))))
}

/// What the HTTP front shows, where it speaks HTTPS, and the files that are read again as they change. At the beginning of a
/// start: what is wrong with them is said before a model is read, and a change meanwhile is one.
fn secrets(
    front: &FrontConfig,
    cluster_keys: &[Secret],
) -> Result<(Option<Credentials>, Reload), RoleError> {
    let reload = Reload::new(front, cluster_keys, Instant::now());
    let read = |(certificates, key): &(PathBuf, PathBuf)| Credentials::read(certificates, key);
    let credentials = front.tls.as_ref().map(read).transpose();
    let credentials =
        credentials.map_err(|why| RoleError::Config("--tls-cert-file, --tls-key-file", why))?;
    Ok((credentials, reload))
}

/// Those who vouch for servers that are reached over TLS, where a file of them was given.
fn authorities(file: Option<&Path>) -> Result<Option<Authorities>, RoleError> {
    file.map(Authorities::read).transpose().map_err(|why| RoleError::Config("--tls-ca-file", why))
}

/// Has a service use them.
fn keep(
    service: &mut Service,
    credentials: Option<Credentials>,
    reload: Reload,
) -> Result<(), RoleError> {
    if let Some(credentials) = credentials {
        service.secure(credentials);
    }
    service.renew_from(reload).map_err(|error| RoleError::Io("cannot take signals", error))
}

fn http_port(config: &WorkerConfig) -> Port {
    Port::new("--port", config.front.port)
}

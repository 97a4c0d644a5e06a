//! `baton router`: one thread, `ctl`, and the threads that resolve names. It needs no model.

use super::{ProcessError, registration};
use crate::config::RouterConfig;
use crate::config::values::WorkerUrl;
use crate::ids::Leg;
use crate::net::resolver::{self, Resolver};
use crate::net::{Authorities, Entropy, Reactor};
use crate::obs::log::event;
use crate::obs::registry::Registry;
use crate::registry::client::RegistryClient;
use crate::registry::entry::WorkerAddress;
use crate::registry::etcd::view::EtcdView;
use crate::router::RouterService;
use crate::router::metrics::RouterMetrics;
use crate::router::pool::WorkerPool;
use crate::router::requests::ProxiedRequests;
use crate::router::routes::RouterRoutes;
use crate::router::workers::{RegistryTrust, WorkerAdmin};
use crate::routing::balancer::LoadBalancer;
use crate::routing::retries::RetryBudget;
use crate::server::authorization::AccessKeys;
use crate::server::drain::DrainOutcome;
use crate::server::reload::Reload;
use crate::sys::file_access::FileAccess;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

/// Runs the router until a signal or a drain ends it.
///
/// # Errors
/// A worker's name cannot be resolved, a port cannot be opened, or a file cannot be used.
pub fn router(config: &RouterConfig) -> Result<DrainOutcome, ProcessError> {
    let (credentials, reload) = super::read_secrets(
        &config.server,
        &config.cluster_keys,
        &FileAccess::Host,
        Instant::now(),
    )?;
    let reload = reload.with_authorities(config.tls_ca.as_ref());
    let authorities = super::authorities(config.tls_ca.as_deref())?;
    let targets = targets(config, resolver::look_up)?;
    let reactor =
        Reactor::new().map_err(|error| ProcessError::Io("cannot create a reactor", error))?;
    let waker = reactor.waker();
    let start_names = || {
        let waker = waker.clone();
        Resolver::start(move || waker.wake())
    };
    let from_files = (authorities, reload);
    let mut service = build_service(config, reactor, start_names, from_files, targets)?;
    if let Some(credentials) = credentials {
        service.secure(credentials);
    }
    event!(
        Info,
        "router",
        "listening",
        address = service.address().map_or("?".into(), |address| address.to_string()),
        prefill = config.prefill.len(),
        decode = config.decode.len(),
    );
    service.run().map_err(|error| ProcessError::Io("cannot wait for sockets", error))
}

/// A worker named on the command line: its URL, its bootstrap port, and its address.
pub type NamedWorker = (WorkerAddress, Option<u16>, SocketAddr);

/// The service of a router, without the parts that come from files and threads. `start_names`
/// starts a resolver that wakes the reactor.
///
/// # Errors
/// A port cannot be opened, too many workers are named, or the handler of SIGHUP cannot be
/// installed.
pub fn build_service(
    config: &RouterConfig,
    mut reactor: Reactor,
    start_names: impl Fn() -> io::Result<Resolver>,
    (authorities, reload): (Option<Authorities>, Reload),
    targets: Vec<NamedWorker>,
) -> Result<RouterService, ProcessError> {
    let now = reactor.now();
    let names = start_names();
    let names = names.map_err(|error| ProcessError::Io("cannot start a thread", error))?;
    let mut registry = Registry::default();
    let metrics = RouterMetrics::register(&mut registry);
    let mut pool = WorkerPool::new(balancer(config, reactor.entropy()), names)
        .with_health(config.health_path.clone(), config.health.time)
        .with_keys(
            config.server.api_keys.first().map(|key| key.secret.clone()),
            config.server.admin_keys.first().cloned(),
        )
        .with_authorities(authorities);
    let mut workers = WorkerAdmin::new(trust(config), reactor.entropy().bytes(), now);
    for (worker, port, socket) in targets {
        let named = workers.name(worker, port, socket, &mut pool, &mut reactor, now);
        named.map_err(|full| ProcessError::Config("--prefill, --decode", full.to_string()))?;
    }
    let keys = AccessKeys::of(&config.server);
    let routes = RouterRoutes::new(keys, registry, workers, reactor.entropy())
        .with_timeout(config.requests.timeout);
    let retries = RetryBudget::new(config.retries, now);
    let requests = ProxiedRequests::new(retries, metrics).within(&config.requests);
    let address = config.server.address();
    let service = RouterService::new(reactor, address, pool, requests, routes, now);
    let service =
        service.map_err(|error| ProcessError::Listen { flag: "--port", address, error })?;
    let mut service = service.within(&config.server, &config.requests);
    let renewed = service.renew_from(reload);
    renewed.map_err(|error| ProcessError::Io("cannot handle signals", error))?;
    if !config.etcd.is_empty() {
        let names = registration::names(&config.etcd, start_names)?;
        let view = EtcdView::new(config.cluster_keys.clone(), now);
        service.watch(RegistryClient::new(view, config.etcd.clone()), names);
    }
    if let Some(terms) = config.balance {
        service.balance(terms, now);
    }
    if let Some(address) = config.metrics {
        open_metrics_port(&mut service, address)?;
    }
    Ok(service)
}

fn trust(config: &RouterConfig) -> RegistryTrust {
    RegistryTrust {
        keys: config.cluster_keys.clone(),
        anybody: config.takes_anybody,
        strangers: config.takes_strangers,
    }
}

fn balancer(config: &RouterConfig, entropy: &mut Entropy) -> LoadBalancer {
    LoadBalancer::new(config.policies)
        .on(config.health, config.breaker)
        .with_forecast(config.forecast)
        .weighing(config.cache)
        .seeded(entropy.next_u64())
}

fn open_metrics_port(service: &mut RouterService, address: SocketAddr) -> Result<(), ProcessError> {
    service.open_metrics_port(address).map_err(|error| ProcessError::Listen {
        flag: "--prometheus-port",
        address,
        error,
    })?;
    let address = service.metrics_address().map_or("?".into(), |address| address.to_string());
    event!(Info, "router", "serving metrics on a separate port", metrics_address = address);
    Ok(())
}

/// Resolves the workers' names. At the start, an unknown name is an error. Later, the router
/// resolves each name again.
///
/// # Errors
/// A name cannot be resolved.
pub fn targets(
    config: &RouterConfig,
    look_up: impl Fn(&str) -> io::Result<Vec<IpAddr>>,
) -> Result<Vec<NamedWorker>, ProcessError> {
    let prefill =
        config.prefill.iter().map(|end| ("--prefill", Leg::Prefill, &end.url, end.bootstrap_port));
    let decode = config.decode.iter().map(|url| ("--decode", Leg::Decode, url, None));
    let found = prefill.chain(decode).map(|(flag, role, url, port)| {
        let address = find_address(flag, url, &look_up)?;
        Ok((WorkerAddress { role, url: url.clone() }, port, address))
    });
    found.collect()
}

fn find_address(
    flag: &'static str,
    url: &WorkerUrl,
    look_up: impl Fn(&str) -> io::Result<Vec<IpAddr>>,
) -> Result<SocketAddr, ProcessError> {
    let nowhere = |why: String| ProcessError::Absent(flag, format!("cannot resolve {url}: {why}"));
    let found = look_up(&url.host).map_err(|error| nowhere(error.to_string()))?;
    let first = found.first().ok_or_else(|| nowhere("no address".into()))?;
    Ok(SocketAddr::new(*first, url.port))
}

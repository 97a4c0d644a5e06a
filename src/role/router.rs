//! `baton router`: one thread, `ctl`, beside it those that resolve names, and nothing that needs a model.

use super::{RoleError, enrolling};
use crate::cluster::entry::Seat;
use crate::cluster::etcd::view::View;
use crate::cluster::retries::Retries;
use crate::cluster::router::{Role, Router};
use crate::config::resolved::RouterConfig;
use crate::config::values::WorkerUrl;
use crate::front::drain::End;
use crate::front::errands::Errands;
use crate::front::resolver::Resolver;
use crate::front::router::RouterService;
use crate::front::router::fleet::Fleet;
use crate::front::router::flights::Flights;
use crate::front::router::paths::Paths;
use crate::front::router::workers::{Trust, Workers};
use crate::net::Reactor;
use crate::obs::log::event;
use crate::obs::metrics::RouterMetrics;
use crate::obs::registry::Registry;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Instant;

/// Routes requests to workers until it is told to stop.
///
/// # Errors
/// A worker's name that points nowhere; a port that cannot be had.
pub fn router(config: &RouterConfig) -> Result<End, RoleError> {
    let now = Instant::now();
    let (credentials, reload) = super::secrets(&config.front, &config.cluster_keys)?;
    let reload = reload.with_authorities(config.tls_ca.as_ref());
    let authorities = super::authorities(config.tls_ca.as_deref())?;
    let targets = targets(config)?;
    let mut registry = Registry::default();
    let metrics = RouterMetrics::register(&mut registry);
    let mut reactor =
        Reactor::new().map_err(|error| RoleError::Io("cannot make a reactor", error))?;
    let waker = reactor.waker();
    let names = Resolver::start(move || waker.wake());
    let names = names.map_err(|error| RoleError::Io("cannot start a thread", error))?;
    let seed = random();
    let decisions = Router::new(config.policies)
        .on(config.health, config.breaker)
        .foretelling(config.forecast)
        .weighing(config.cache)
        .seeded(u64::from_le_bytes(std::array::from_fn(|at| seed[at])));
    let mut fleet = Fleet::new(decisions, names)
        .with_health(config.health_path.clone(), config.health.time)
        .with_key(config.front.api_keys.first().cloned())
        .with_authorities(authorities);
    let trust = Trust {
        keys: config.cluster_keys.clone(),
        anybody: config.takes_anybody,
        strangers: config.takes_strangers,
    };
    let mut workers = Workers::new(trust, random(), now);
    for (seat, port, address) in targets {
        let named = workers.name(seat, port, address, &mut fleet, &mut reactor, now);
        named.map_err(|full| RoleError::Config("--prefill, --decode", full.to_string()))?;
    }
    let waker = reactor.waker();
    let mut service = RouterService::new(
        reactor,
        config.front.address(),
        fleet,
        Flights::new(Retries::new(config.retries, now), metrics).within(&config.requests),
        Paths::new(config.front.api_keys.clone(), registry, workers)
            .with_timeout(config.requests.timeout),
        now,
    )
    .map_err(|error| RoleError::Listen { flag: "--port", address: config.front.address(), error })?
    .within(config.front.body_max, &config.requests);
    if let Some(credentials) = credentials {
        service.secure(credentials);
    }
    let renewed = service.renew_from(reload);
    renewed.map_err(|error| RoleError::Io("cannot take signals", error))?;
    if let Some(terms) = config.balance {
        service.balance(terms, now);
    }
    if let Some(address) = config.metrics {
        let listened = service.tell_metrics(address);
        listened.map_err(|error| RoleError::Listen {
            flag: "--prometheus-port",
            address,
            error,
        })?;
        let address = service.metrics_address().map_or("?".into(), |address| address.to_string());
        event!(
            Info,
            "router",
            "metrics are told on a port of their own",
            metrics_address = address
        );
    }
    if !config.etcd.is_empty() {
        let names = enrolling::names(&config.etcd, move || waker.wake())?;
        service.watch(
            Errands::new(View::new(config.cluster_keys.clone(), now), config.etcd.clone()),
            names,
        );
    }
    event!(
        Info,
        "router",
        "listening",
        address = service.address().map_or("?".into(), |address| address.to_string()),
        prefill = config.prefill.len(),
        decode = config.decode.len(),
    );
    service.run().map_err(|error| RoleError::Io("cannot wait for sockets", error))
}

/// A name that points nowhere at the start is a mistake; later it is looked up again where it leads nowhere.
fn targets(config: &RouterConfig) -> Result<Vec<(Seat, Option<u16>, SocketAddr)>, RoleError> {
    let prefill =
        config.prefill.iter().map(|end| ("--prefill", Role::Prefill, &end.url, end.bootstrap_port));
    let decode = config.decode.iter().map(|url| ("--decode", Role::Decode, url, None));
    let found = prefill.chain(decode).map(|(flag, role, url, port)| {
        Ok((Seat { role, url: url.clone() }, port, address(flag, url)?))
    });
    found.collect()
}

fn address(flag: &'static str, url: &WorkerUrl) -> Result<SocketAddr, RoleError> {
    let nowhere = |why: String| RoleError::Absent(flag, format!("{url} points nowhere: {why}"));
    let mut addresses = (url.host.as_str(), url.port)
        .to_socket_addrs()
        .map_err(|error| nowhere(error.to_string()))?;
    addresses.next().ok_or_else(|| nowhere("no address".into()))
}

/// A secret of this process.
fn random() -> [u8; 32] {
    let mut bytes = [0; 32];
    // The kernel's generator does not fail once it is seeded.
    let _ = getrandom::fill(&mut bytes);
    bytes
}

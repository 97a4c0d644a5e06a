//! `baton router`: one thread, `ctl`, beside it those that resolve names, and nothing that needs a model.

use super::RoleError;
use crate::cluster::retries::Retries;
use crate::cluster::router::Router;
use crate::config::resolved::RouterConfig;
use crate::config::values::WorkerUrl;
use crate::front::drain::End;
use crate::front::resolver::Resolver;
use crate::front::router::RouterService;
use crate::front::router::fleet::{Fleet, Target};
use crate::front::router::flights::Flights;
use crate::front::router::paths::Paths;
use crate::net::Reactor;
use crate::obs::log::event;
use crate::obs::metrics::{EngineType, RouterMetrics};
use crate::obs::registry::Registry;
use std::net::ToSocketAddrs;
use std::time::Instant;

/// Routes requests to workers until it is told to stop.
///
/// # Errors
/// A worker's name that points nowhere; a port that cannot be had.
pub fn router(config: &RouterConfig) -> Result<End, RoleError> {
    let now = Instant::now();
    let targets = targets(config)?;
    let mut registry = Registry::default();
    let urls: Vec<String> = targets.iter().map(|target| target.url.to_string()).collect();
    let roles = targets.iter().map(|target| match target.bootstrap_port {
        Some(_) => EngineType::Prefill,
        None => EngineType::Decode,
    });
    let metrics = RouterMetrics::register(&mut registry, roles.zip(urls.iter().map(String::as_str)));
    let core = Router::new(config.policy, config.prefill.len(), config.decode.len(), now);
    let reactor = Reactor::new().map_err(|error| RoleError::Io("cannot make a reactor", error))?;
    let waker = reactor.waker();
    let names = Resolver::start(move || waker.wake());
    let names = names.map_err(|error| RoleError::Io("cannot start a thread", error))?;
    let service = RouterService::new(
        reactor,
        config.front.address(),
        Fleet::new(core, targets, names).with_key(config.front.api_keys.first().cloned()),
        Flights::new(Retries::new(config.retries, now), metrics),
        Paths::new(config.front.api_keys.clone(), registry),
        now,
    )
    .map_err(|error| RoleError::Listen { flag: "--port", address: config.front.address(), error })?;
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

/// Workers in the order of their numbers. A name that points nowhere at the start is a mistake; later it is
/// looked up again where it leads nowhere.
fn targets(config: &RouterConfig) -> Result<Vec<Target>, RoleError> {
    let prefill = config.prefill.iter().map(|end| ("--prefill", &end.url, Some(end.bootstrap_port)));
    let decode = config.decode.iter().map(|url| ("--decode", url, None));
    prefill.chain(decode).map(|(flag, url, port)| target(flag, url, port)).collect()
}

fn target(flag: &'static str, url: &WorkerUrl, bootstrap_port: Option<u16>) -> Result<Target, RoleError> {
    let nowhere = |why: String| RoleError::Config(flag, format!("{url} points nowhere: {why}"));
    let mut addresses =
        (url.host.as_str(), url.port).to_socket_addrs().map_err(|error| nowhere(error.to_string()))?;
    let address = addresses.next().ok_or_else(|| nowhere("no address".into()))?;
    Ok(Target::new(url.clone(), address, bootstrap_port))
}

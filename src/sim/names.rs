//! Names of hosts, and the name server of a simulated cluster.
//!
//! Invariants: a name is `host-N`, and its address never changes. A process looks its names up in
//! its turns. Not here: names of the command line of a router, which it looks up as it starts.

use super::network::address_of;
use crate::net::MemoryKernel;
use crate::net::resolver::{NameWorker, Resolver};
use crate::stdx::event_queue::Nanos;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

type LookUp = Box<dyn Fn(&str) -> io::Result<Vec<IpAddr>>>;
type Wake = Box<dyn Fn()>;

/// The name server of all hosts.
#[derive(Clone, Debug)]
pub struct NameServer(Arc<Outage>);

#[derive(Debug)]
struct Outage {
    base: Instant,
    fails_until: AtomicU64,
    silent_until: AtomicU64,
}

impl NameServer {
    /// A server that is well.
    pub fn new(base: Instant) -> NameServer {
        let (fails_until, silent_until) = (AtomicU64::new(0), AtomicU64::new(0));
        NameServer(Arc::new(Outage { base, fails_until, silent_until }))
    }

    /// It fails all look-ups until this time, or does not answer.
    pub fn fail(&self, is_silent: bool, until: Nanos) {
        let outage = if is_silent { &self.0.silent_until } else { &self.0.fails_until };
        outage.fetch_max(until, Ordering::Relaxed);
    }

    fn is_out(&self, until: &AtomicU64, now: Instant) -> bool {
        now < self.0.base + Duration::from_nanos(until.load(Ordering::Relaxed))
    }
}

/// The look-ups of a process.
#[derive(Clone)]
pub struct SimNames {
    server: NameServer,
    kernel: MemoryKernel,
    workers: Arc<Mutex<Vec<NameWorker<LookUp, Wake>>>>,
}

impl SimNames {
    /// No look-ups yet.
    pub fn new(server: NameServer, kernel: MemoryKernel) -> SimNames {
        SimNames { server, kernel, workers: Arc::default() }
    }

    /// A resolver of this process.
    pub fn start(&self, wake: impl Fn() + 'static) -> Resolver {
        let (server, kernel) = (self.server.clone(), self.kernel.clone());
        let look_up: LookUp =
            Box::new(move |name| match server.is_out(&server.0.fails_until, kernel.now()) {
                true => Err(io::Error::other("temporary failure in name resolution")),
                false => find(name),
            });
        let wake: Wake = Box::new(wake);
        let (names, worker) = Resolver::stepped(look_up, wake);
        self.workers.lock().expect("no panic while locked").push(worker);
        names
    }

    /// Answers look-ups, unless the server is silent. Returns whether there were some.
    pub fn step(&self) -> bool {
        let is_silent = self.server.is_out(&self.server.0.silent_until, self.kernel.now());
        let workers = self.workers.lock().expect("no panic while locked");
        !is_silent && workers.iter().filter(|worker| worker.step()).count() > 0
    }
}

/// The address of a name.
///
/// # Errors
/// There is no such name.
pub fn find(name: &str) -> io::Result<Vec<IpAddr>> {
    if let Ok(address) = name.parse() {
        return Ok(vec![address]);
    }
    let host = name.strip_prefix("host-").and_then(|host| host.parse().ok());
    let host = host.ok_or_else(|| io::Error::other("there is no such name"))?;
    Ok(vec![address_of(host)])
}

/// The name of a host.
pub fn name_of(host: usize) -> String {
    format!("host-{host}")
}

/// Whether this is the URL of a worker, by its address or its name.
pub fn is_url_of(url: &str, worker: SocketAddr) -> bool {
    let Some((host, port)) = url.strip_prefix("http://").and_then(|rest| rest.rsplit_once(':'))
    else {
        return false;
    };
    port.parse() == Ok(worker.port()) && find(host).is_ok_and(|found| found == [worker.ip()])
}

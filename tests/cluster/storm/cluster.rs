//! Two prefill workers, two decode workers and two routers, each on its own host. They find each
//! other through the registries of both routers, or through an etcd with three members on three
//! more hosts.

use crate::dummy::Dummy;
use crate::etcd_server::EtcdServer;
use crate::network::{self, Network};
use crate::process::{PATIENCE, Process};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

/// Hosts of the workers, prefill workers first.
pub const WORKERS: [&str; 4] = ["prefill", "third", "decode", "second"];
const DECODE: usize = 2;
pub const ROUTERS: [&str; 2] = ["router", "other"];
pub const KEEPERS: [&str; 3] = ["keeper1", "keeper2", "keeper3"];

/// Where the entries of workers are kept.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Registry {
    Routers,
    Etcd,
}

/// The model of the workers.
pub enum Model {
    Made(Dummy),
    File(PathBuf),
}

impl Model {
    /// The model that `BATON_STORM_MODEL` names, or this one.
    pub fn get_or(made: impl FnOnce() -> Dummy) -> Model {
        match std::env::var_os("BATON_STORM_MODEL") {
            Some(path) => Model::File(path.into()),
            None => Model::Made(made()),
        }
    }

    pub fn start(&self, port: u16, command: &str, more: &[&str]) -> Process {
        match self {
            Model::Made(dummy) => dummy.start_at(port, command, more),
            Model::File(path) => {
                let (path, port) = (path.to_str().expect("a path in UTF-8"), port.to_string());
                let mut args = vec![command, path, "--port", &port, "--threads", "1"];
                if !more.contains(&"--kv-memory") {
                    args.extend(["--kv-memory", "64MiB"]);
                }
                args.extend(more);
                Process::start(&args)
            }
        }
    }
}

/// The complete cluster. This thread is on the client's host whenever none of its functions runs.
pub struct Cluster {
    pub network: Network,
    model: Model,
    /// In the order of [`WORKERS`].
    pub workers: Vec<Process>,
    /// In the order of [`ROUTERS`].
    pub routers: Vec<Process>,
    /// In the order of [`KEEPERS`]. Empty if routers keep the entries.
    pub etcd: Vec<EtcdServer>,
    /// Value of `--registry` for workers.
    registry: String,
    /// More flags for workers.
    flags: Vec<String>,
    pub routers_killed: usize,
    /// The counts of routers that were killed, as in [`Cluster::tries`].
    before: (u64, u64),
}

impl Cluster {
    /// Starts it, and waits until both routers have all workers. `None` if etcd is not available.
    pub fn start(
        network: Network,
        model: Model,
        registry: Registry,
        flags: &[&str],
    ) -> Option<Cluster> {
        let etcd = match registry {
            Registry::Routers => Vec::new(),
            Registry::Etcd => EtcdServer::several(&network, &KEEPERS)?,
        };
        let registry = match registry {
            Registry::Routers => {
                ROUTERS.map(|host| format!("http://{}", router_address(host))).join(",")
            }
            Registry::Etcd => etcd
                .iter()
                .map(|server| format!("etcd://{}", server.address))
                .collect::<Vec<_>>()
                .join(","),
        };
        // The scheme `etcd` is given once, for all its members.
        let registry = registry.replace(",etcd://", ",");
        let flags = flags.iter().map(|flag| String::from(*flag)).collect();
        let (workers, routers) = (Vec::new(), Vec::new());
        let (routers_killed, before) = (0, (0, 0));
        let mut cluster = Cluster {
            network,
            model,
            workers,
            routers,
            etcd,
            registry,
            flags,
            routers_killed,
            before,
        };
        cluster.routers = (0..ROUTERS.len()).map(|which| cluster.start_router(which)).collect();
        cluster.workers = (0..WORKERS.len()).map(|which| cluster.start_worker(which)).collect();
        cluster.await_whole();
        Some(cluster)
    }

    pub fn start_worker(&self, which: usize) -> Process {
        let host = WORKERS[which];
        let address = network::address(host).to_string();
        let mut flags = vec!["--host", &address, "--insecure", "--transfer", "tcp"];
        flags.extend(["--registry", &self.registry]);
        flags.extend(self.flags.iter().map(String::as_str));
        let (command, own) = match which < DECODE {
            true => ("prefill", ["--bootstrap-port", "8998"]),
            false => ("decode", ["--bootstrap-allow", "10.77.0.0/24"]),
        };
        flags.extend(own);
        self.network.enter(host);
        let worker = self.model.start(8000, command, &flags);
        self.network.enter("client");
        worker
    }

    pub fn start_router(&self, which: usize) -> Process {
        let host = ROUTERS[which];
        let address = network::address(host).to_string();
        let mut args = vec!["router", "--host", &address, "--port", "8000", "--insecure"];
        args.extend(["--policy", "least_loaded"]);
        if !self.etcd.is_empty() {
            args.extend(["--registry", &self.registry]);
        }
        self.network.enter(host);
        let router = Process::start(&args);
        self.network.enter("client");
        router
    }

    /// The addresses for clients.
    pub fn addresses(&self) -> [SocketAddr; ROUTERS.len()] {
        ROUTERS.map(router_address)
    }

    /// Waits until both routers reach all workers, and etcd answers.
    #[track_caller]
    pub fn await_whole(&self) {
        let begun = Instant::now();
        self.etcd.iter().for_each(EtcdServer::await_answer);
        for router in &self.routers {
            loop {
                let (_, metrics) = router.get("/metrics");
                let lines = metrics.lines().filter(|line| line.starts_with("smg_worker_health{"));
                if lines.filter(|line| line.ends_with(" 1")).count() == WORKERS.len() {
                    break;
                }
                assert!(
                    begun.elapsed() < PATIENCE,
                    "{} never sees all workers again",
                    router.address
                );
                thread::sleep(Duration::from_millis(50));
            }
        }
    }

    /// Waits until nothing is left of any request, and checks that no thread has panicked.
    #[track_caller]
    pub fn check_idle(&mut self) {
        for worker in &mut self.workers {
            worker.await_idle();
            worker.check_alive();
        }
        for router in &mut self.routers {
            // The last message of a worker is possibly still on its way.
            let begun = Instant::now();
            loop {
                let charged = router.metric("smg_worker_requests_active{", "");
                let loads = router.get("/v1/loads").1;
                if charged == 0.0 && loads.contains("\"num_running_reqs\":0") {
                    break;
                }
                assert!(begun.elapsed() < PATIENCE, "{charged} charged to workers; {loads}");
                thread::sleep(Duration::from_millis(50));
            }
            router.check_alive();
        }
    }

    /// Resident memory of each process, in MiB.
    pub fn memory(&self) -> String {
        let of = |process: &Process| mib(process.resident());
        let [routers, workers] = [&self.routers, &self.workers]
            .map(|all| all.iter().map(of).collect::<Vec<_>>().join(", "));
        format!("routers {routers} MiB; workers {workers} MiB")
    }

    /// Resident memory of the largest router, in bytes.
    pub fn largest_router(&self) -> u64 {
        self.routers.iter().map(Process::resident).max().unwrap_or_default()
    }

    /// Retries, and streams that continued on other workers, counted by all routers so far.
    pub fn tries(&self) -> (u64, u64) {
        self.routers.iter().map(counted).fold(self.before, sum)
    }

    /// Kills a router without a clean shutdown.
    pub fn kill_router(&mut self, which: usize) {
        self.before = sum(self.before, counted(&self.routers[which]));
        self.routers_killed += 1;
        self.routers[which].kill();
    }

    pub fn restart_keeper(&mut self, which: usize) {
        self.network.enter(KEEPERS[which]);
        self.etcd[which].restart();
        self.network.enter("client");
    }
}

/// A number of bytes in MiB.
pub fn mib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 20))
}

fn counted(router: &Process) -> (u64, u64) {
    let metric = |name: &str| router.metric(name, "") as u64;
    (metric("baton_router_retries_total{"), metric("baton_router_resumed_total"))
}

fn sum(one: (u64, u64), other: (u64, u64)) -> (u64, u64) {
    (one.0 + other.0, one.1 + other.1)
}

fn router_address(host: &str) -> SocketAddr {
    SocketAddr::new(network::address(host), 8000)
}

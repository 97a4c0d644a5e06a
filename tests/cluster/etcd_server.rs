//! A real etcd for a test: a single one, or one member of several. Drop ends the process and
//! deletes its data.

use crate::members::free_port;
use crate::network::{self, Network};
use crate::process::{PATIENCE, post, try_get};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

pub struct EtcdServer {
    program: PathBuf,
    child: Child,
    name: String,
    pub address: SocketAddr,
    peer_port: u16,
    /// All members, in etcd's form.
    members: String,
    data: PathBuf,
}

impl EtcdServer {
    /// A single etcd on this host. `None` if etcd is not installed.
    pub fn alone() -> Option<EtcdServer> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()));
        let peer_port = free_port();
        let members = format!("alone={}", url(address.ip(), peer_port));
        let server = EtcdServer::new(find()?, "alone", address, peer_port, members);
        server.await_answer();
        Some(server)
    }

    /// One member on each of these hosts, seen from `client`. `None` if etcd is not installed.
    pub fn several(network: &Network, hosts: &[&str]) -> Option<Vec<EtcdServer>> {
        let program = find()?;
        let member = |host: &&str| format!("{host}={}", url(network::address(host), 2380));
        let members: Vec<_> = hosts.iter().map(member).collect();
        let start = |host: &&str| {
            network.enter(host);
            let address = SocketAddr::new(network::address(host), 2379);
            EtcdServer::new(program.clone(), host, address, 2380, members.join(","))
        };
        let servers: Vec<_> = hosts.iter().map(start).collect();
        network.enter("client");
        servers.iter().for_each(EtcdServer::await_answer);
        Some(servers)
    }

    fn new(
        program: PathBuf,
        name: &str,
        address: SocketAddr,
        peer_port: u16,
        members: String,
    ) -> EtcdServer {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let data = std::env::temp_dir().join(format!("baton-etcd-{}-{number}", std::process::id()));
        let child = run(&program, name, address, peer_port, &members, &data);
        EtcdServer { program, child, name: name.into(), address, peer_port, members, data }
    }

    /// Waits until it answers, which needs a majority of the members.
    #[track_caller]
    pub fn await_answer(&self) {
        let begun = Instant::now();
        while !try_get(self.address, "/health").is_ok_and(|(_, text)| text.contains("true")) {
            assert!(begun.elapsed() < PATIENCE, "etcd does not answer");
            thread::sleep(Duration::from_millis(50));
        }
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Restarts it on this thread's host.
    pub fn restart(&mut self) {
        self.child =
            run(&self.program, &self.name, self.address, self.peer_port, &self.members, &self.data);
    }

    /// Stops or continues the process.
    pub fn signal(&self, name: &str) {
        let (name, id) = (format!("-{name}"), self.child.id().to_string());
        assert!(Command::new("kill").args([name, id]).status().expect("kill is there").success());
    }

    /// Deletes its data. It must not run.
    pub fn forget_everything(&self) {
        std::fs::remove_dir_all(&self.data).unwrap();
    }

    pub fn url(&self) -> String {
        format!("etcd://{}", self.address)
    }

    /// How many entries it has.
    pub fn entries(&self) -> usize {
        // `/baton/workers/` to `/baton/workers0`.
        let range = r#"{"key":"L2JhdG9uL3dvcmtlcnMv","range_end":"L2JhdG9uL3dvcmtlcnMw"}"#;
        let (status, text) = post(self.address, "/v3/kv/range", range);
        assert_eq!(status, 200, "{text}");
        text.matches("\"key\"").count()
    }
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.data);
    }
}

#[allow(clippy::zombie_processes)] // `drop` waits.
fn run(
    program: &PathBuf,
    name: &str,
    address: SocketAddr,
    peer_port: u16,
    members: &str,
    data: &PathBuf,
) -> Child {
    let (client, peer) = (url(address.ip(), address.port()), url(address.ip(), peer_port));
    let mut command = Command::new(program);
    command.args([
        "--name",
        name,
        "--listen-client-urls",
        &client,
        "--advertise-client-urls",
        &client,
    ]);
    command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
    command.args(["--initial-cluster", members, "--data-dir"]).arg(data);
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("etcd starts")
}

fn url(address: IpAddr, port: u16) -> String {
    format!("http://{}", SocketAddr::new(address, port))
}

/// On the path, or in the folder of `tools/etcd-packages`.
fn find() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let cache = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")));
    let places =
        std::env::split_paths(&path).chain(cache.map(|cache| cache.join("baton/etcd/usr/bin")));
    let found = places.map(|place| place.join("etcd")).find(|program| program.is_file());
    if found.is_none() {
        assert!(std::env::var_os("BATON_REQUIRE_ETCD").is_none(), "etcd is missing");
        eprintln!("SKIPPED: there is no etcd here; tools/etcd-packages fetches it");
    }
    found
}

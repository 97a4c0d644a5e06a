//! Routers and workers over a real etcd, which dies, comes back, comes back empty and is cut off. Without etcd (see
//! `tools/etcd-packages`) these tests are skipped aloud, or fail where `BATON_REQUIRE_ETCD` is set.

use crate::keys::KeyFile;
use crate::members::{await_workers, free_port, listed, router, serves};
use crate::process::{PATIENCE, Process, post};
use crate::{prefill, start};
use baton::limits::{REGISTRY_ENTRY_LIFE, REGISTRY_RENEWAL, REGISTRY_RETRY};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

struct Etcd {
    program: PathBuf,
    child: Child,
    port: u16,
    peer_port: u16,
    data: PathBuf,
}

impl Etcd {
    /// `None` where there is no etcd here.
    fn start() -> Option<Etcd> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let cache = std::env::var_os("XDG_CACHE_HOME")
            .map(PathBuf::from)
            .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")));
        let places = std::env::split_paths(&path).chain(cache.map(|cache| cache.join("baton/etcd/usr/bin")));
        let Some(program) = places.map(|place| place.join("etcd")).find(|program| program.is_file()) else {
            assert!(std::env::var_os("BATON_REQUIRE_ETCD").is_none(), "etcd is missing");
            eprintln!("skipped: there is no etcd here; tools/etcd-packages fetches it");
            return None;
        };
        let (port, peer_port) = (free_port(), free_port());
        let data = std::env::temp_dir().join(format!("baton-etcd-{}-{port}", std::process::id()));
        let child = Etcd::run(&program, port, peer_port, &data);
        Some(Etcd { program, child, port, peer_port, data })
    }

    #[allow(clippy::zombie_processes)] // `drop` waits.
    fn run(program: &PathBuf, port: u16, peer_port: u16, data: &PathBuf) -> Child {
        let (client, peer) = (format!("http://127.0.0.1:{port}"), format!("http://127.0.0.1:{peer_port}"));
        let mut command = Command::new(program);
        command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        command.args(["--initial-cluster", &format!("default={peer}"), "--data-dir"]).arg(data);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("etcd starts");
        let begun = Instant::now();
        while !answers(port) {
            assert!(begun.elapsed() < PATIENCE, "etcd does not answer");
            thread::sleep(Duration::from_millis(50));
        }
        child
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn restart(&mut self) {
        self.child = Etcd::run(&self.program, self.port, self.peer_port, &self.data);
    }

    fn forget_everything(&self) {
        std::fs::remove_dir_all(&self.data).unwrap();
    }

    fn address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.port))
    }

    fn url(&self) -> String {
        format!("etcd://{}", self.address())
    }

    /// How many entries it has.
    fn entries(&self) -> usize {
        // `/baton/workers/` to `/baton/workers0`.
        let range = r#"{"key":"L2JhdG9uL3dvcmtlcnMv","range_end":"L2JhdG9uL3dvcmtlcnMw"}"#;
        let (status, text) = post(self.address(), "/v3/kv/range", range);
        assert_eq!(status, 200, "{text}");
        text.matches("\"key\"").count()
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.data);
    }
}

fn answers(port: u16) -> bool {
    let mut text = String::new();
    let asked = TcpStream::connect(("127.0.0.1", port)).and_then(|mut stream| {
        stream.set_read_timeout(Some(Duration::from_secs(2)))?;
        stream.write_all(b"GET /health HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n")?;
        stream.read_to_string(&mut text)
    });
    asked.is_ok() && text.contains("true")
}

/// A way to etcd that can be cut: then it takes connections and bytes, and nothing comes through.
struct Way {
    port: u16,
    cut: Arc<AtomicBool>,
}

impl Way {
    fn to(etcd: SocketAddr) -> Way {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (port, cut) = (listener.local_addr().unwrap().port(), Arc::new(AtomicBool::new(false)));
        let is_cut = cut.clone();
        thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let Ok(far) = TcpStream::connect(etcd) else { continue };
                for (from, to) in [(&near, &far), (&far, &near)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let is_cut = is_cut.clone();
                    thread::spawn(move || carry(from, to, &is_cut));
                }
            }
        });
        Way { port, cut }
    }

    fn url(&self) -> String {
        format!("etcd://127.0.0.1:{}", self.port)
    }

    fn cut(&self, cut: bool) {
        self.cut.store(cut, Ordering::SeqCst);
    }
}

fn carry(mut from: TcpStream, mut to: TcpStream, is_cut: &AtomicBool) {
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        // What came while it was cut is lost, and so is the connection's order: it never heals.
        if is_cut.load(Ordering::SeqCst) {
            while from.read(&mut bytes).is_ok_and(|count| count > 0) {}
            return;
        }
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    if !is_cut.load(Ordering::SeqCst) {
        let _ = to.shutdown(Shutdown::Both);
        let _ = from.shutdown(Shutdown::Both);
    }
}

#[track_caller]
fn await_count(router: &Process, count: usize) {
    let begun = Instant::now();
    while listed(router).len() != count {
        assert!(begun.elapsed() < PATIENCE, "{count} workers: {:?}", listed(router));
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn routers_over_one_etcd_see_the_same_and_any_of_them_may_die() {
    let Some(etcd) = Etcd::start() else { return };
    let registry = etcd.url();
    let flags = ["--registry", registry.as_str()];
    let (mut first, second) = (router(0, &flags), router(0, &flags));
    let _reader = prefill(&flags);
    let writer = start("decode", &flags);
    for router in [&first, &second] {
        await_workers(router, 2);
        serves(router, 1);
    }
    first.kill();
    serves(&second, 2);
    let another = start("decode", &flags);
    await_workers(&second, 3);
    writer.terminate();
    assert_eq!(writer.exit_code(), Some(0));
    assert_eq!(etcd.entries(), 2, "it has taken its entry back");
    await_count(&second, 2);
    serves(&second, 3);
    drop(another);
    await_count(&second, 1);
    second.await_said("etcd has dropped its entry");
    let third = router(0, &flags);
    await_workers(&third, 1);
}

#[test]
fn an_etcd_that_dies_comes_back_or_comes_back_empty_costs_no_request_and_no_worker() {
    let Some(mut etcd) = Etcd::start() else { return };
    let registry = etcd.url();
    let flags = ["--registry", registry.as_str()];
    let old = router(0, &flags);
    let (reader, writer) = (prefill(&flags), start("decode", &flags));
    await_workers(&old, 2);
    let serves_for = |time: Duration, salt: u32| {
        let begun = Instant::now();
        while begun.elapsed() < time {
            serves(&old, salt);
            assert_eq!(listed(&old).len(), 2);
            thread::sleep(Duration::from_millis(100));
        }
    };
    etcd.kill();
    serves_for(REGISTRY_ENTRY_LIFE + REGISTRY_RENEWAL, 1);
    etcd.restart();
    serves_for(REGISTRY_ENTRY_LIFE + REGISTRY_RENEWAL, 2);
    assert_eq!(etcd.entries(), 2);

    etcd.kill();
    etcd.forget_everything();
    serves_for(REGISTRY_RENEWAL, 3);
    // The router reads the empty etcd while one worker has not entered itself again.
    writer.pause();
    etcd.restart();
    thread::sleep(REGISTRY_RENEWAL + REGISTRY_RETRY);
    writer.go_on();
    let begun = Instant::now();
    while etcd.entries() < 2 {
        assert!(begun.elapsed() < PATIENCE, "the entries never come back");
        thread::sleep(Duration::from_millis(20));
    }
    let took = begun.elapsed();
    await_workers(&old, 2);
    serves_for(REGISTRY_ENTRY_LIFE + REGISTRY_RENEWAL, 4);
    assert_eq!(old.times_said("worker leaves"), 0, "nobody was dropped meanwhile");
    let new = router(0, &flags);
    await_workers(&new, 2);
    serves(&new, 5);
    eprintln!("whole again after {took:?}");
    for worker in [&reader, &writer] {
        worker.await_said("registry is away");
    }
}

#[test]
fn who_is_cut_off_from_etcd_goes_on_and_catches_up() {
    let Some(etcd) = Etcd::start() else { return };
    let way = Way::to(etcd.address());
    let direct = etcd.url();
    let router = router(0, &["--registry", &way.url()]);
    let _reader = prefill(&["--registry", &direct]);
    let first = start("decode", &["--registry", &direct]);
    await_workers(&router, 2);
    way.cut(true);
    let _second = start("decode", &["--registry", &direct]);
    first.terminate();
    assert_eq!(first.exit_code(), Some(0));
    // It knows neither; what it has sent to the one that is gone fails or is refused, and is no hang.
    thread::sleep(REGISTRY_ENTRY_LIFE + REGISTRY_RENEWAL);
    assert_eq!(listed(&router).iter().filter(|(role, ..)| role == "decode").count(), 1);
    way.cut(false);
    let begun = Instant::now();
    loop {
        let listed = listed(&router);
        if listed.len() == 2 && listed.iter().all(|(.., is_well)| *is_well) {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "it never catches up: {listed:?}");
        thread::sleep(Duration::from_millis(100));
    }
    serves(&router, 1);
}

#[test]
fn what_a_stranger_writes_to_etcd_is_no_worker_where_there_is_a_key() {
    let Some(etcd) = Etcd::start() else { return };
    let key = KeyFile::new(3);
    let registry = etcd.url();
    let flags = ["--registry", registry.as_str(), "--cluster-key-file", key.path()];
    let router = router(0, &flags);
    let (_reader, _writer) = (prefill(&flags), start("decode", &flags));
    await_workers(&router, 2);
    let stranger = start("decode", &["--registry", &registry]);
    router.await_said("it does not prove the cluster key");
    assert_eq!((etcd.entries(), listed(&router).len()), (3, 2));
    assert!(!listed(&router).iter().any(|(_, url, ..)| *url == format!("http://{}", stranger.address)));
    serves(&router, 1);
}

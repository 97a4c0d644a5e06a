//! Routers and workers with a real etcd that dies, returns, returns empty or is cut off. Without
//! etcd (see `tools/etcd-packages`) these tests are skipped with a message. They fail if
//! `BATON_REQUIRE_ETCD` is set.

use crate::etcd_server::EtcdServer;
use crate::keys::KeyFile;
use crate::members::{await_workers, free_port, listed, router, serves};
use crate::process::{PATIENCE, Process};
use crate::secured::shows;
use crate::{MODEL, prefill, start};
use baton::limits::{REGISTRY_ENTRY_LIFE, REGISTRY_RENEWAL, REGISTRY_RETRY};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// A relay to etcd that can be cut: it then accepts connections and bytes and forwards nothing.
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
        // The bytes that arrive while it is cut are lost, so this connection never recovers.
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
    let Some(etcd) = EtcdServer::alone() else { return };
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
    assert_eq!(etcd.entries(), 2, "it withdrew its entry");
    await_count(&second, 2);
    serves(&second, 3);
    drop(another);
    await_count(&second, 1);
    second.await_said("etcd has dropped its entry");
    let third = router(0, &flags);
    await_workers(&third, 1);
}

/// The router lacks TLS, so it loses that worker: it must not use the earlier plain address.
#[test]
fn a_worker_that_enters_itself_anew_over_tls_is_not_asked_as_before() {
    let Some(etcd) = EtcdServer::alone() else { return };
    let registry = etcd.url();
    let router = router(0, &["--registry", &registry]);
    let port = free_port().to_string();
    let flags = [
        "decode",
        MODEL,
        "--registry",
        &registry,
        "--port",
        &port,
        "--kv-memory",
        "8MiB",
        "--threads",
        "1",
    ];
    let plain = Process::start(&flags);
    await_workers(&router, 1);
    drop(plain);
    let shows = shows("one");
    let flags: Vec<&str> = flags.into_iter().chain(shows.iter().map(String::as_str)).collect();
    let secured = Process::start(&flags);
    await_count(&router, 0);
    let url = format!("worker=https://{}", secured.address);
    router.await_said("a worker is refused");
    assert!(router.has_said(&url) && router.has_said("--tls-ca-file"));
}

#[test]
fn an_etcd_that_dies_comes_back_or_comes_back_empty_costs_no_request_and_no_worker() {
    let Some(mut etcd) = EtcdServer::alone() else { return };
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
    etcd.await_answer();
    serves_for(REGISTRY_ENTRY_LIFE + REGISTRY_RENEWAL, 2);
    assert_eq!(etcd.entries(), 2);

    etcd.kill();
    etcd.forget_everything();
    serves_for(REGISTRY_RENEWAL, 3);
    // The router reads the empty etcd before one worker has entered itself again.
    writer.pause();
    etcd.restart();
    etcd.await_answer();
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
    assert_eq!(old.times_said("worker leaves"), 0, "no worker was dropped meanwhile");
    let new = router(0, &flags);
    await_workers(&new, 2);
    serves(&new, 5);
    eprintln!("whole again after {took:?}");
    for worker in [&reader, &writer] {
        worker.await_said("registry is unreachable");
    }
}

#[test]
fn a_router_that_is_cut_off_from_etcd_continues_and_catches_up() {
    let Some(etcd) = EtcdServer::alone() else { return };
    let way = Way::to(etcd.address);
    let direct = etcd.url();
    let router = router(0, &["--registry", &way.url()]);
    let _reader = prefill(&["--registry", &direct]);
    let first = start("decode", &["--registry", &direct]);
    await_workers(&router, 2);
    way.cut(true);
    let _second = start("decode", &["--registry", &direct]);
    first.terminate();
    assert_eq!(first.exit_code(), Some(0));
    // It knows of neither change. Requests to the worker that is gone fail or are refused, and do
    // not hang.
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
fn an_etcd_entry_without_the_cluster_key_is_not_taken_as_a_worker() {
    let Some(etcd) = EtcdServer::alone() else { return };
    let key = KeyFile::new(3);
    let registry = etcd.url();
    let flags = ["--registry", registry.as_str(), "--cluster-key-file", key.path()];
    let router = router(0, &flags);
    let (_reader, _writer) = (prefill(&flags), start("decode", &flags));
    await_workers(&router, 2);
    let stranger = start("decode", &["--registry", &registry]);
    router.await_said("it does not prove the cluster key");
    assert_eq!((etcd.entries(), listed(&router).len()), (3, 2));
    assert!(
        !listed(&router).iter().any(|(_, url, ..)| *url == format!("http://{}", stranger.address))
    );
    serves(&router, 1);
}

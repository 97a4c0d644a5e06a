//! Workers that register themselves at a router, each in its own process. The router finds them
//! without flags, keeps them while they live, and drops or replaces them after a death. An
//! unreachable router harms no worker.

use crate::keys::KeyFile;
use crate::process::{PATIENCE, Process};
use crate::{body, choices, dual, prefill, start, with_room};
use baton::limits::{REGISTRY_ENTRY_LIFE, REGISTRY_RENEWAL};
use serde_json::Value;
use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// A port that is free. It lies below the ports that kernels choose, so that no connection of
/// another test takes it before a process listens on it. Each test process has its own ports first.
pub fn free_port() -> u16 {
    const FIRST: u32 = 12_000;
    const COUNT: u32 = 16_000;
    static TAKEN: AtomicU32 = AtomicU32::new(0);
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    let first = std::process::id().wrapping_mul(61);
    let mut ports = (0..COUNT).map(|_| {
        let at = first.wrapping_add(TAKEN.fetch_add(1, Ordering::Relaxed));
        (FIRST + at % COUNT) as u16
    });
    ports.find(is_free).expect("a port is free")
}

/// A router without named workers.
pub fn router(port: u16, flags: &[&str]) -> Process {
    let port = port.to_string();
    let mut args = vec!["router", "--port", &port];
    args.extend(flags);
    Process::start(&args)
}

/// The workers in `/workers`, as (role, URL, ID, up).
pub fn listed(router: &Process) -> Vec<(String, String, String, bool)> {
    let (status, text) = router.get("/workers");
    assert_eq!(status, 200, "{text}");
    let told: Value = serde_json::from_str(&text).unwrap();
    let text = |worker: &Value, field: &str| worker[field].as_str().unwrap().to_owned();
    let worker = |worker: &Value| {
        let is_well = worker["is_healthy"].as_bool().unwrap();
        (text(worker, "worker_type"), text(worker, "url"), text(worker, "id"), is_well)
    };
    told["workers"].as_array().unwrap().iter().map(worker).collect()
}

/// Waits until this many workers are listed and up. Returns how long that took.
#[track_caller]
pub fn await_workers(router: &Process, count: usize) -> Duration {
    let begun = Instant::now();
    loop {
        let listed = listed(router);
        if listed.len() == count && listed.iter().all(|(.., is_well)| *is_well) {
            return begun.elapsed();
        }
        assert!(begun.elapsed() < PATIENCE, "{count} workers are not reached: {listed:?}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// A request through this router is answered.
#[track_caller]
pub fn serves(router: &Process, salt: u32) {
    choices(&router.post("/v1/completions", &body(salt, 40, 4).to_string()));
}

#[test]
fn workers_are_found_without_being_named_and_take_their_entries_back() {
    let router = router(0, &[]);
    let registry = format!("http://{}", router.address);
    let reader = prefill(&["--registry", &registry]);
    let writers: Vec<Process> =
        (0..2).map(|_| start("decode", &["--registry", &registry])).collect();
    await_workers(&router, 3);
    serves(&router, 1);
    let [first, second] = <[Process; 2]>::try_from(writers).ok().unwrap();
    let begun = Instant::now();
    first.terminate();
    assert_eq!(first.exit_code(), Some(0));
    assert_eq!(listed(&router).len(), 2, "it withdrew its entry before it ended");
    assert!(begun.elapsed() < PATIENCE);
    router.await_said("it withdrew its entry");
    serves(&router, 2);
    drop(second);
    let begun = Instant::now();
    while listed(&router).len() == 2 {
        assert!(begun.elapsed() < PATIENCE, "the entry of a dead worker is never dropped");
        thread::sleep(Duration::from_millis(50));
    }
    router.await_said("its entry was not renewed");
    reader.await_idle();
}

/// One registry has a name with addresses at which no server listens.
#[test]
fn a_worker_is_found_by_each_router_that_it_is_told_of() {
    let routers = [router(0, &[]), router(0, &[])];
    let [first, second] = [&routers[0], &routers[1]].map(|router| router.address.port());
    let registry = format!("http://127.0.0.1:{first},http://localhost:{second}");
    let reader = prefill(&["--registry", &registry]);
    let writer = start("decode", &["--registry", &registry]);
    for router in &routers {
        await_workers(router, 2);
        serves(router, 1);
    }
    writer.terminate();
    assert_eq!(writer.exit_code(), Some(0));
    for router in &routers {
        assert_eq!(listed(router).len(), 1, "it has taken both entries back");
    }
    reader.await_idle();
}

#[test]
fn a_router_that_restarts_empty_is_whole_again_and_hand_offs_go_on_without_it() {
    let port = free_port();
    let mut first = router(port, &[]);
    let registry = format!("http://127.0.0.1:{port}");
    let (reader, writer) =
        (prefill(&["--registry", &registry]), start("decode", &["--registry", &registry]));
    await_workers(&first, 2);
    serves(&first, 1);
    first.kill();
    // Longer than an entry lasts.
    let begun = Instant::now();
    let mut room = 100;
    while begun.elapsed() < REGISTRY_ENTRY_LIFE + REGISTRY_RENEWAL {
        choices(&dual(reader.address, writer.address, with_room(body(2, 40, 4), &reader, room)).1);
        room += 1;
        thread::sleep(Duration::from_millis(200));
    }
    let again = router(port, &[]);
    let took = await_workers(&again, 2);
    serves(&again, 3);
    // The entries were there within their lifetime. On a slow machine, probes can take longer.
    assert!(took < 4 * REGISTRY_ENTRY_LIFE, "{took:?}");
    for worker in [&reader, &writer] {
        worker.await_times("registry is unreachable", 1);
        worker.await_times("registry is reachable", 2);
    }
}

/// A worker logs once that its entry is registered. Before, it logs that the registry is away.
#[test]
fn a_worker_is_entered_once_a_registry_has_taken_it() {
    let port = free_port();
    let registry = format!("http://127.0.0.1:{port}");
    let writer = start("decode", &["--registry", &registry]);
    writer.await_said(&format!(
        "announcing to registry registry={registry} role=decode worker=http://{}",
        writer.address
    ));
    writer.await_said("registry is unreachable");
    assert!(!writer.has_said("registry entry added"));
    let mut first = router(port, &[]);
    writer.await_said(&format!("registry entry added registry={registry}"));
    await_workers(&first, 1);
    first.kill();
    writer.await_times("registry is unreachable", 2);
    let again = router(port, &[]);
    await_workers(&again, 1);
    assert_eq!(writer.times_said("registry entry added"), 1, "that it answers again was said");
}

#[test]
fn a_worker_that_restarts_under_its_address_is_a_new_one() {
    let router = router(0, &[]);
    let [port, control, bootstrap] = std::array::from_fn(|_| free_port().to_string());
    let registry = format!("http://{}", router.address);
    let flags = [
        ["--registry", &registry],
        ["--port", &port],
        ["--control-port", &control],
        ["--bootstrap-port", &bootstrap],
    ];
    let start_reader = || {
        let mut args = vec!["prefill", crate::MODEL, "--kv-memory", "8MiB", "--threads", "1"];
        args.extend(flags.as_flattened());
        Process::start(&args)
    };
    let mut reader = start_reader();
    let writer = start("decode", &["--registry", &registry]);
    await_workers(&router, 2);
    serves(&router, 1);
    let id = |router: &Process| {
        listed(router).into_iter().find(|(role, ..)| role == "prefill").map(|(.., id, _)| id)
    };
    let old = id(&router).unwrap();
    // The prefill leg never comes, and the decode leg is open when its source dies. Its room
    // belongs to the predecessor.
    let (to, sent) = (writer.address, with_room(body(2, 40, 4), &reader, 7));
    let waiting = thread::spawn(move || crate::post(to, "/v1/completions", &sent));
    thread::sleep(Duration::from_millis(300));
    reader.kill();
    let reader = start_reader();
    assert_eq!(waiting.join().unwrap().0, 502);
    let begun = Instant::now();
    while id(&router) == Some(old.clone()) || id(&router).is_none() {
        assert!(begun.elapsed() < PATIENCE, "it is taken for its predecessor");
        thread::sleep(Duration::from_millis(50));
    }
    router.await_said("another incarnation has its address");
    await_workers(&router, 2);
    // The predecessor's room is free again on both sides, and a new session serves it.
    choices(&dual(reader.address, writer.address, with_room(body(2, 40, 4), &reader, 7)).1);
    serves(&router, 3);
    reader.await_idle();
    writer.await_idle();
}

#[test]
fn with_a_cluster_key_only_its_holders_are_found() {
    let (key, other) = (KeyFile::new(1), KeyFile::new(2));
    let router = router(0, &["--cluster-key-file", key.path()]);
    let registry = format!("http://{}", router.address);
    let flags = |key| ["--registry", registry.as_str(), "--cluster-key-file", key];
    let _reader = prefill(&flags(key.path()));
    let _writer = start("decode", &flags(key.path()));
    let without = start("decode", &["--registry", &registry]);
    let stranger = start("decode", &flags(other.path()));
    await_workers(&router, 2);
    serves(&router, 1);
    for worker in [&without, &stranger] {
        worker.await_said("it answers with status 401");
    }
    thread::sleep(REGISTRY_RENEWAL);
    for worker in [&without, &stranger] {
        assert_eq!(worker.times_said("registry refuses the request"), 1);
        assert!(!worker.has_said("registry is unreachable"));
    }
    assert_eq!(listed(&router).len(), 2);
    // A worker without an entry does not wait to remove it.
    stranger.terminate();
    assert_eq!(stranger.exit_code(), Some(0));
}

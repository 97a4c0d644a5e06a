//! The service over real sockets, with a clock of the test and without an engine.

use super::*;
use crate::api::Sampling;
use crate::limits::ENGINE_STILL_MAX;
use crate::link::handoff::TransportCapabilities;
use crate::net::Entropy;
use crate::obs::registry::Registry;
use crate::server::authorization::AccessKeys;
use crate::wire::message::HostId;
use crate::worker::routes::ServerDescription;
use crate::worker::telemetry::Telemetry;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::thread;

/// The service of a mixed worker, and the counter of its engine's progress.
fn service(now: Instant) -> (WorkerService, Arc<AtomicU64>) {
    let offer =
        TransportCapabilities { transports: vec![], host: HostId([7; 16]), data: None, lanes: 1 };
    let handoff = Handoff::new(Vec::new(), offer, Entropy::System);
    let about = ServerDescription {
        model_path: String::new(),
        model_type: "llama",
        architectures: Vec::new(),
        mode: "null",
        bootstrap_port: None,
        handoff: None,
        pool_tokens: 0,
        page_size: 1,
        max_running: 1,
        sampling: Sampling::default(),
        started: 0,
    };
    let telemetry = Telemetry::new(Registry::default(), Vec::new());
    let routes = WorkerRoutes::new(about, AccessKeys::default(), telemetry);
    let progress = Arc::<AtomicU64>::default();
    let service = WorkerService::new(
        Reactor::new().unwrap(),
        "127.0.0.1:0".parse().unwrap(),
        (RequestTable::without_workers(), handoff),
        routes,
        (crossbeam_channel::bounded(1).1, progress.clone()),
        Arc::new(EventCount::new(|| ())),
        now,
    );
    (service.unwrap(), progress)
}

/// The answer of `GET path` at this time of the service.
fn get(service: &mut WorkerService, path: &'static str, now: Instant) -> String {
    let address = service.address().unwrap();
    let client = thread::spawn(move || {
        let mut stream = TcpStream::connect(address).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).map(|_| answer).unwrap()
    });
    let deadline = Instant::now() + Duration::from_secs(20);
    while !client.is_finished() {
        assert!(Instant::now() < deadline, "an answer comes");
        service.reactor.poll(Some(Instant::now() + Duration::from_millis(5))).unwrap();
        assert!(service.turn(now).is_none(), "it serves");
    }
    client.join().unwrap()
}

#[test]
fn a_worker_with_a_hanging_engine_says_so() {
    let mut now = Instant::now();
    let (mut service, progress) = service(now);
    let last = now + ENGINE_STILL_MAX;
    while now < last {
        now += TICK;
        service.turn(now);
    }
    assert!(get(&mut service, "/health", now).ends_with("\r\n\r\nOK"), "only for 10 s");
    now += TICK;
    service.turn(now);
    for path in ["/health", "/readiness", "/ping"] {
        let answer = get(&mut service, path, now);
        let is_told = answer.contains(r#""code":"hanging""#);
        assert!(answer.starts_with("HTTP/1.1 503 ") && is_told, "{path}: {answer}");
    }
    progress.fetch_add(1, Ordering::Relaxed);
    now += TICK;
    service.turn(now);
    assert!(get(&mut service, "/health", now).ends_with("\r\n\r\nOK"), "it moves again");
}

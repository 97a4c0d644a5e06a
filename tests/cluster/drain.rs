//! Workers and routers that drain under load cut off no request and get no new one.

use crate::fleet::Fleet;
use crate::process::{PATIENCE, Process, get, post, try_post};
use crate::{COMMON, MODEL, body, prefill, start, with_room};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

const CLIENTS: u32 = 4;

/// Clients that send one request after another.
struct Load {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicUsize>,
    clients: Vec<JoinHandle<()>>,
}

impl Load {
    fn on(router: SocketAddr) -> Load {
        let (stop, answered) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let client = |seed: u32| {
            let (stop, answered) = (stop.clone(), answered.clone());
            thread::spawn(move || {
                for turn in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    ask(router, &body(seed * 1000 + turn, 20 + turn % 60, 24));
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            })
        };
        Load { clients: (0..CLIENTS).map(client).collect(), stop, answered }
    }

    /// Waits until this many more requests are answered.
    fn go_on(&self, more: usize) {
        let (begun, enough) = (Instant::now(), self.answered.load(Ordering::Relaxed) + more);
        while self.answered.load(Ordering::Relaxed) < enough {
            assert!(begun.elapsed() < PATIENCE, "no request is answered any more");
            assert!(
                self.clients.iter().all(|client| !client.is_finished()),
                "a request has failed"
            );
            thread::sleep(Duration::from_millis(10));
        }
    }

    #[track_caller]
    fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        for client in self.clients {
            client.join().expect("no request has failed");
        }
    }
}

/// A worker that has begun to drain can get a request before the router knows. It refuses, and the
/// router must handle that.
#[track_caller]
fn ask(router: SocketAddr, body: &Value) {
    let tokens = body["max_tokens"].as_u64().unwrap() as usize;
    let (status, text) = post(router, "/v1/completions", &body.to_string());
    assert_eq!(status, 200, "{text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(answer["choices"][0]["token_ids"].as_array().unwrap().len(), tokens);
}

pub fn baton_drain(address: SocketAddr, more: &[&str]) -> Output {
    let url = format!("http://{address}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(["drain", &url]).args(more).output().unwrap()
}

#[track_caller]
fn check_drains(worker: Process) {
    let output = baton_drain(worker.address, &["--wait"]);
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains(" drains; ") && said.contains(" has ended"), "{said}");
    assert_eq!(worker.exit_code(), Some(0));
}

#[track_caller]
fn await_status(address: SocketAddr, path: &str, status: u16) {
    let begun = Instant::now();
    while get(address, path).0 != status {
        assert!(begun.elapsed() < PATIENCE, "{path} never answers {status}");
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn workers_of_both_roles_drain_under_load_and_no_request_fails() {
    let more = ["--max-running-requests", "16"];
    let common = |role: &str| {
        let mut args = vec![role, MODEL];
        args.extend(&COMMON[..6]);
        args.extend(more);
        if role == "prefill" {
            args.extend(["--bootstrap-port", "0"]);
        }
        Process::start(&args)
    };
    let workers = |role| vec![common(role), common(role)];
    let mut fleet = Fleet::new(workers("prefill"), workers("decode"));
    let load = Load::on(fleet.router.address);
    load.go_on(40);
    check_drains(fleet.decode.remove(0));
    load.go_on(40);
    check_drains(fleet.prefill.remove(0));
    load.go_on(40);
    load.end();
    assert_eq!(get(fleet.router.address, "/readiness").0, 200);
    fleet.check_idle();
}

#[test]
fn the_only_worker_of_a_role_drains_and_its_router_is_not_ready() {
    let mut fleet = Fleet::new(vec![prefill(&[])], vec![start("decode", &[])]);
    let decode = fleet.decode.remove(0);
    let (router, address) = (fleet.router.address, decode.address);
    assert_eq!(get(router, "/readiness").0, 200);
    let mut long = body(1, 20, 400);
    long["max_tokens"] = json!(400);
    let running = thread::spawn(move || post(router, "/v1/completions", &long.to_string()));
    let begun = Instant::now();
    while decode.metric("sglang:num_running_reqs{", "") == 0.0 {
        assert!(begun.elapsed() < PATIENCE, "it never runs");
        thread::sleep(Duration::from_millis(5));
    }
    let (status, said) = decode.post("/drain", "");
    let said: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((status, &said["status"], &said["running"]), (200, &json!("draining"), &json!(1)));
    assert_eq!(get(address, "/health"), (200, "draining".into()));
    assert_eq!(get(address, "/readiness").0, 503);
    await_status(router, "/readiness", 503);
    await_status(router, "/health", 503);
    let (status, text) = running.join().unwrap();
    assert_eq!(status, 200, "{text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(answer["usage"]["completion_tokens"], 400);
    assert_eq!(decode.exit_code(), Some(0));
    fleet.prefill[0].await_idle();
}

#[test]
fn a_router_or_a_worker_drains_only_for_a_client_with_its_key() {
    let key = std::env::temp_dir().join(format!("baton-drain-key-{}", std::process::id()));
    std::fs::write(&key, "secret-of-clients\n").unwrap();
    let file = key.to_str().unwrap();
    let worker = start("decode", &["--api-key-file", file]);
    let url = format!("http://{}", worker.address);
    let args = ["router", "--port", "0", "--api-key-file", file, "--decode", &url];
    for process in [Process::start(&args), worker] {
        let refused = baton_drain(process.address, &[]);
        assert_eq!(refused.status.code(), Some(1));
        let said = String::from_utf8(refused.stderr).unwrap();
        assert!(said.contains("status 401") && !said.contains("secret-of-clients"), "{said}");
        assert_ne!(get(process.address, "/readiness").1, "draining");
        let told = baton_drain(process.address, &["--wait", "--api-key-file", file]);
        assert!(told.status.success(), "{told:?}");
        assert_eq!(process.exit_code(), Some(0));
    }
    let nobody = baton_drain("127.0.0.1:1".parse().unwrap(), &[]);
    assert_eq!(nobody.status.code(), Some(1));
    std::fs::remove_file(key).unwrap();
}

/// The role change has lost its purpose. That is no error.
#[test]
fn a_drain_ends_a_change_of_role_and_is_no_error() {
    let reader = prefill(&[]);
    // A leg without its other leg.
    let (address, lone) = (reader.address, with_room(body(2, 40, 4), &reader, 2));
    let _waits = thread::spawn(move || try_post(address, "/v1/completions", "", &lone));
    let begun = Instant::now();
    while reader.metric("sglang:num_prefill_bootstrap_queue_reqs{", "") == 0.0 {
        assert!(begun.elapsed() < PATIENCE, "it never waits");
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(reader.post("/role", r#"{"role": "decode"}"#).0, 202);
    assert_eq!(reader.post("/drain", "").0, 200);
    reader.await_said("a drain has begun");
    assert!(!reader.has_said("ERROR"));
}

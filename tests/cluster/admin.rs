//! With admin keys, API keys do not administer workers and routers.

use crate::drain::baton_drain;
use crate::keys::KeyFile;
use crate::process::{PATIENCE, Process, ask};
use crate::{body, prefill, start};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

/// The keys in the files of [`KeyFile`].
const CLIENT: &str = "KKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKK";
const ADMIN: &str = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";
const LATER: &str = "BBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBB";

struct Keys {
    clients: KeyFile,
    admins: KeyFile,
}

impl Keys {
    fn new() -> Keys {
        Keys { clients: KeyFile::new(b'K'), admins: KeyFile::new(b'A') }
    }

    fn flags(&self) -> [&str; 4] {
        ["--api-key-file", self.clients.path(), "--admin-key-file", self.admins.path()]
    }
}

const ALL: &str = r#"{"abort_all": true}"#;
const OWN: &str = r#"{"rid": "mine"}"#;

/// Without a key and with the key of a client, these requests are refused.
#[track_caller]
fn check_guarded(at: SocketAddr, requests: &[(&str, &str, &str)]) {
    for &(method, path, body) in requests {
        for (key, refusal) in [
            (None, (401, "invalid_api_key")),
            (Some("KAKA"), (401, "invalid_api_key")),
            (Some(CLIENT), (403, "admin_key_required")),
        ] {
            let (status, text) = ask(at, method, path, key, body);
            let told: Value = serde_json::from_str(&text).unwrap();
            let code = told["error"]["code"].as_str().unwrap();
            assert_eq!((status, code), refusal, "{method} {path} {body} {key:?}");
        }
    }
}

/// A client ends its own request. If the request was done before, it is sent again.
#[track_caller]
fn abort_own(at: SocketAddr) {
    let mut long = body(1, 20, 400);
    long["rid"] = json!("mine");
    let begun = Instant::now();
    loop {
        let sent = long.to_string();
        let running =
            thread::spawn(move || ask(at, "POST", "/v1/completions", Some(CLIENT), &sent));
        while !running.is_finished() {
            let (status, text) = ask(at, "POST", "/abort_request", Some(CLIENT), OWN);
            assert_eq!(status, 200, "{text}");
        }
        match running.join().unwrap().0 {
            499 => return,
            status => assert_eq!(status, 200),
        }
        assert!(begun.elapsed() < PATIENCE, "it is never aborted");
    }
}

#[test]
fn a_clients_key_administers_no_worker() {
    let keys = Keys::new();
    let worker = start("serve", &keys.flags());
    let at = worker.address;
    check_guarded(
        at,
        &[
            ("POST", "/drain", ""),
            ("POST", "/flush_cache", ""),
            ("POST", "/abort_request", ALL),
            ("POST", "/abort_request", "{}"),
            ("POST", "/role", r#"{"role": "decode"}"#),
        ],
    );
    abort_own(at);
    for path in ["/metrics", "/role", "/v1/loads", "/server_info"] {
        for key in [CLIENT, ADMIN] {
            assert_eq!(ask(at, "GET", path, Some(key), "").0, 200, "{path}");
        }
    }
    for (path, body, status) in [
        ("/v1/completions", r#"{"prompt": [5], "max_tokens": 1}"#, 200),
        ("/flush_cache", "", 200),
        ("/abort_request", ALL, 200),
        ("/abort_request", "{}", 400),
        ("/abort_request", OWN, 200),
        ("/role", r#"{"role": "decode"}"#, 409),
    ] {
        let (told, text) = ask(at, "POST", path, Some(ADMIN), body);
        assert_eq!(told, status, "{path} {body}: {text}");
    }
    assert!(!worker.has_said("without --admin-key-file"));
    let refused = baton_drain(at, &["--api-key-file", keys.clients.path()]);
    let said = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(said.contains("403") && said.contains("admin_key_required"), "{said}");
    assert_eq!(ask(at, "GET", "/readiness", None, "").0, 200);
    let drained = baton_drain(at, &["--wait", "--admin-key-file", keys.admins.path()]);
    assert!(drained.status.success(), "{drained:?}");
    assert_eq!(worker.exit_code(), Some(0));
}

#[test]
fn without_admin_keys_a_clients_key_administers_with_one_warning() {
    let keys = Keys::new();
    let flags = &keys.flags()[..2];
    let router = Process::start(&[&["router", "--port", "0"][..], flags].concat());
    for process in [start("serve", flags), router] {
        assert_eq!(process.times_said("without --admin-key-file"), 1);
        let (status, text) = ask(process.address, "POST", "/drain", Some(CLIENT), "");
        assert_eq!(status, 200, "{text}");
        assert_eq!(process.exit_code(), Some(0));
    }
}

/// After SIGHUP at once, and otherwise when the file has changed.
#[test]
fn admin_keys_are_exchanged() {
    let keys = Keys::new();
    let worker = start("serve", &keys.flags());
    let router = Process::start(&[&["router", "--port", "0"][..], &keys.flags()].concat());
    // Nothing is aborted: the body says nothing.
    let status = |process: &Process, key: &str| {
        ask(process.address, "POST", "/abort_request", Some(key), "{}").0
    };
    for process in [&worker, &router] {
        assert_eq!([ADMIN, LATER, CLIENT].map(|key| status(process, key)), [400, 401, 403]);
    }
    std::fs::write(keys.admins.path(), LATER).unwrap();
    for process in [&worker, &router] {
        process.signal("HUP");
        process.await_said("file reloaded what=\"admin keys\"");
        assert_eq!([ADMIN, LATER, CLIENT].map(|key| status(process, key)), [401, 400, 403]);
    }
    std::fs::write(keys.admins.path(), ADMIN).unwrap();
    for process in [&worker, &router] {
        process.await_times("file reloaded what=\"admin keys\"", 2);
        assert_eq!([ADMIN, LATER, CLIENT].map(|key| status(process, key)), [400, 401, 403]);
    }
}

/// The workers that a router lists, once there are this many and all are up.
#[track_caller]
fn await_listed(router: &Process, count: usize) -> Vec<Value> {
    let begun = Instant::now();
    loop {
        let (status, text) = ask(router.address, "GET", "/workers", Some(CLIENT), "");
        assert_eq!(status, 200, "{text}");
        let told: Value = serde_json::from_str(&text).unwrap();
        let listed = told["workers"].as_array().unwrap();
        if listed.len() == count && listed.iter().all(|worker| worker["status"] == "ready") {
            return listed.clone();
        }
        assert!(begun.elapsed() < PATIENCE, "{count} workers are not ready: {text}");
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_router_administers_its_workers_with_its_admin_key() {
    let keys = Keys::new();
    let reader = prefill(&keys.flags());
    let more = [&["--bootstrap-port", "0"][..], &keys.flags()].concat();
    let writers = [(); 2].map(|()| start("decode", &more));
    let url = |worker: &Process| format!("http://{}", worker.address);
    let urls = [url(&reader), url(&writers[0]), url(&writers[1])];
    let port = reader.bootstrap_port.to_string();
    let mut args = vec!["router", "--port", "0", "--prefill", &urls[0], &port];
    args.extend(["--decode", &urls[1], "--decode", &urls[2]]);
    args.extend(keys.flags());
    let router = Process::start(&args);
    let (front, listed) = (router.address, await_listed(&router, 3));
    let path_of = |url: &str| {
        let worker = listed.iter().find(|worker| worker["url"] == url).expect("it is listed");
        format!("/workers/{}", worker["id"].as_str().unwrap())
    };
    let (leaving, turning) = (path_of(&urls[0]), path_of(&urls[2]));
    let role = format!("{turning}/role");
    let wanted = r#"{"role": "prefill"}"#;
    let seat = json!({"url": urls[0], "worker_type": "prefill"}).to_string();
    check_guarded(
        front,
        &[
            ("POST", "/drain", ""),
            ("POST", "/flush_cache", ""),
            ("POST", "/abort_request", ALL),
            ("POST", "/workers", &seat),
            ("DELETE", &leaving, ""),
            ("POST", &role, wanted),
        ],
    );
    for worker in [&reader, &writers[0], &writers[1]] {
        check_guarded(worker.address, &[("POST", "/role", wanted), ("POST", "/drain", "")]);
    }
    for path in ["/metrics", "/workers", &leaving, &role, "/v1/loads"] {
        assert_eq!(ask(front, "GET", path, Some(CLIENT), "").0, 200, "{path}");
    }
    abort_own(front);
    for (path, body) in [("/flush_cache", ""), ("/abort_request", ALL)] {
        let (status, text) = ask(front, "POST", path, Some(ADMIN), body);
        let told: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((status, &told["workers"]), (200, &json!(3)), "{path}: {text}");
    }
    let (status, text) = ask(front, "POST", &role, Some(ADMIN), wanted);
    assert_eq!(status, 202, "{text}");
    let begun = Instant::now();
    while !ask(writers[1].address, "GET", "/role", Some(CLIENT), "").1.contains("\"changes\":1") {
        assert!(begun.elapsed() < PATIENCE, "it does not change its role");
        thread::sleep(Duration::from_millis(20));
    }
    let roles = await_listed(&router, 3).iter().filter(|it| it["worker_type"] == "prefill").count();
    assert_eq!(roles, 2);
    assert_eq!(ask(front, "POST", "/workers", Some(ADMIN), &seat).0, 202);
    assert_eq!(ask(front, "DELETE", &leaving, Some(ADMIN), "").0, 202);
    await_listed(&router, 2);
    assert_eq!(ask(front, "POST", "/drain", Some(ADMIN), "").0, 200);
    assert_eq!(router.exit_code(), Some(0));
}

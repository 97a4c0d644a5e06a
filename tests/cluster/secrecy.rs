//! Keys, prompts and answers stay out of the logs of workers and routers, at each level.

use crate::keys::KeyFile;
use crate::members::free_port;
use crate::process::{Process, get};
use crate::{COMMON, MODEL};
use serde_json::json;
use std::net::{SocketAddr, TcpStream};

/// A word for prompts and other client texts. No log contains these letters by accident.
const CANARY: &str = "xqzvkanarie";
const API_KEY: &str = "sk-xqzvschluessel";
const ADMIN_KEY: &str = "ak-xqzvhauptschluessel";

/// Sends a request with this key. Returns the status.
fn ask(address: SocketAddr, path: &str, key: &str, body: &str) -> u16 {
    crate::process::ask(address, "POST", path, Some(key), body).0
}

#[test]
fn no_log_holds_a_key_or_a_prompt_at_any_level() {
    for level in ["error", "warn", "info", "debug", "trace"] {
        check(level);
    }
}

fn check(level: &str) {
    let cluster = KeyFile::new(b'Q');
    let [keys, admin_keys] = [("api", API_KEY), ("admin", ADMIN_KEY)].map(|(kind, key)| {
        let name = format!("baton-{kind}-keys-{}-{level}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, key).unwrap();
        path.to_str().unwrap().to_owned()
    });
    let common = ["--api-key-file", &keys, "--admin-key-file", &admin_keys, "--log-level", level];
    let worker = |role: &'static str, more: &[&str]| {
        let mut args = vec![role, MODEL];
        args.extend(&COMMON[2..]);
        args.extend(common);
        args.extend(["--cluster-key-file", cluster.path()]);
        args.extend(more);
        Process::unheard(&args)
    };
    let [registry, reader_port, writer_port, router_port] =
        [(); 4].map(|()| free_port().to_string());
    let reader = worker("prefill", &["--bootstrap-port", &registry, "--port", &reader_port]);
    let writer = worker("decode", &["--port", &writer_port]);
    let at = |port: &str| format!("http://127.0.0.1:{port}");
    let mut args = vec!["router", "--port", &router_port];
    args.extend(common);
    let (reader_url, writer_url) = (at(&reader_port), at(&writer_port));
    args.extend(["--prefill", &reader_url, &registry, "--decode", &writer_url]);
    let router = Process::unheard(&args);
    let address = |port: &str| SocketAddr::from(([127, 0, 0, 1], port.parse().unwrap()));
    let front = address(&router_port);
    await_ready(front);
    let say = |path: &str, body: serde_json::Value| ask(front, path, API_KEY, &body.to_string());
    let prompt = format!("{CANARY} {CANARY}");
    assert_eq!(
        say(
            "/v1/completions",
            json!({"prompt": prompt, "max_tokens": 4, "echo": true, "stop": [CANARY]})
        ),
        200
    );
    let messages = json!([{"role": "user", "content": prompt}]);
    assert_eq!(
        say("/v1/chat/completions", json!({"messages": messages, "max_tokens": 4, "user": CANARY})),
        200
    );
    assert_eq!(
        say("/generate", json!({"text": prompt, "sampling_params": {"max_new_tokens": 4}})),
        200
    );
    assert_eq!(say("/tokenize", json!({"prompt": prompt})), 200);
    // Failed requests are logged with their causes, not with their text.
    assert_eq!(
        say("/v1/completions", json!({"prompt": prompt.repeat(3000), "max_tokens": 4})),
        400
    );
    assert_eq!(say("/v1/completions", json!({"prompt": prompt, "temperature": CANARY})), 400);
    assert_eq!(ask(front, "/v1/completions", API_KEY, &format!("{{\"prompt\": \"{CANARY}")), 400);
    assert_eq!(ask(front, "/v1/completions", CANARY, "{}"), 401);
    assert_eq!(ask(address(&writer_port), "/v1/completions", CANARY, "{}"), 401);
    let alone =
        json!({"prompt": prompt, "bootstrap_host": "192.0.2.1", "bootstrap_room": 1}).to_string();
    assert_eq!(ask(address(&writer_port), "/v1/completions", API_KEY, &alone), 502);
    assert_eq!(ask(front, "/flush_cache", API_KEY, ""), 403);
    assert_eq!(ask(front, "/flush_cache", ADMIN_KEY, ""), 200);
    for process in [&reader, &writer, &router] {
        process.terminate();
    }
    for process in [reader, writer, router] {
        let log = process.log_to_end();
        for secret in [CANARY, API_KEY, ADMIN_KEY, "QQQQ", &"51".repeat(4)] {
            assert!(!log.contains(secret), "at level {level} the log holds {secret}:\n{log}");
        }
        assert_eq!(log.contains("draining"), !matches!(level, "error" | "warn"), "it logs");
    }
    for file in [keys, admin_keys] {
        std::fs::remove_file(file).unwrap();
    }
}

fn await_ready(router: SocketAddr) {
    let begun = std::time::Instant::now();
    loop {
        if TcpStream::connect(router).is_ok() && get(router, "/readiness").0 == 200 {
            return;
        }
        assert!(begun.elapsed() < crate::process::PATIENCE, "the router is never ready");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

//! Start, drain and exit of the process.

use crate::server::{Server, baton, endless, fixture};
use baton::http::Method;
use baton::limits::NET_QUEUED_MAX;
use serde_json::json;
use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

/// Waits until `/readiness` shows that the signal has arrived.
fn wait_until_draining(server: &Server) {
    while server.get("/readiness").status() == 200 {
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn output(arguments: &[&str]) -> (Option<i32>, String) {
    let output = baton(arguments).output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn a_drain_finishes_running_requests_and_accepts_no_new_ones() {
    for layout in [&["--mixed"][..], &[]] {
        let mut server = Server::start_long(layout);
        let (mut running, mut idle) = (server.connect(), server.connect());
        let mut body = endless();
        body["max_tokens"] = json!(3000);
        body["stream_options"] = json!({"include_usage": true});
        running.post("/v1/completions", &body);
        running.wait_for("data: ");
        // A connection that is already open.
        idle.send(Method::Get, "/health", &[], None);
        assert_eq!(idle.reply(Method::Get).status(), 200);
        server.signal("TERM");
        wait_until_draining(&server);
        for client in [&mut idle, &mut server.connect()] {
            client.post("/v1/completions", &json!({"prompt": "a", "max_tokens": 1}));
            let reply = client.reply(Method::Post);
            assert_eq!((reply.error().0, reply.error().1.as_str()), (503, "draining"));
            assert_eq!(reply.head.headers.get("retry-after"), Some("1"));
        }
        let health = server.get("/health");
        assert_eq!((health.status(), health.text()), (200, "draining"));
        let events = running.reply(Method::Post).events();
        assert_eq!(events.last().unwrap()["usage"]["completion_tokens"], 3000);
        assert_eq!(server.wait().code(), Some(0));
    }
}

/// Output from before the drain still arrives, although it is far more than sockets hold.
#[test]
fn a_drain_waits_for_a_client_that_reads_late() {
    const CHOICES: usize = 4;
    let mut server = Server::start_long(&[]);
    let body = |tokens: usize| {
        let mut body = endless();
        body["max_tokens"] = json!(tokens);
        body["n"] = json!(CHOICES);
        body["logprobs"] = json!(20);
        body["stream_options"] = json!({"include_usage": true});
        body
    };
    let per_token = server.post("/v1/completions", &body(100)).body.len() / 100;
    // A third of the amount at which a client counts as too slow.
    let tokens = NET_QUEUED_MAX / 3 / per_token;
    let mut client = server.connect();
    client.post("/v1/completions", &body(tokens));
    client.wait_for("data: ");
    server.wait_until_idle();
    server.signal("TERM");
    wait_until_draining(&server);
    let events = client.reply(Method::Post).events();
    assert_eq!(events.last().unwrap()["usage"]["completion_tokens"], CHOICES * tokens);
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
fn an_idle_server_ends_at_once_when_told() {
    for signal in ["TERM", "INT"] {
        let mut server = Server::start(&[]);
        server.check_works();
        server.signal(signal);
        assert_eq!(server.wait().code(), Some(0), "{signal}");
    }
}

#[test]
fn a_second_signal_cuts_off() {
    for signals in [["INT", "INT"], ["TERM", "INT"], ["INT", "TERM"]] {
        let mut server = Server::start_long(&[]);
        let mut client = server.connect();
        client.post("/v1/completions", &endless());
        client.wait_for("data: ");
        server.signal(signals[0]);
        wait_until_draining(&server);
        client.wait_for("data: ");
        server.signal(signals[1]);
        // Not the status of a drain: the stream was far from its end.
        assert_eq!(server.wait().code(), Some(1), "{signals:?}");
        assert!(!String::from_utf8_lossy(&client.until_closed()).contains("[DONE]"));
    }
}

/// The architecture page uses the thread names that the system shows.
#[test]
fn threads_have_the_names_that_the_page_has() {
    let page = std::fs::read_to_string(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/docs/internals/architecture.md"
    ))
    .unwrap();
    let server = Server::start(&["--threads", "2"]);
    let names = server.threads();
    assert!(names.len() > 4, "{names:?}");
    for name in names {
        // On the page, numbered threads have a letter in place of the number.
        let kind = name.rsplit_once('-').map_or(name.clone(), |(kind, _)| format!("{kind}-i"));
        assert!([&name, &kind].iter().any(|name| page.contains(&format!("`{name}`"))), "{name}");
    }
}

/// Memory is taken page by page, so a larger limit than the host's memory only gives a warning.
#[test]
fn more_kv_memory_than_there_is_is_told_at_the_start() {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap();
    let kib: u64 = total.trim().trim_end_matches(" kB").parse().unwrap();
    let half = format!("{}KiB", kib / 2 + (1 << 20));
    // Each of the two workers has this limit.
    let flags = ["--page-size", "256", "--swap-memory", "0", "--kv-memory", &half];
    let told = "KV memory can exceed the available memory";
    let server = Server::start(&flags);
    server.check_works();
    let lines = server.said(told);
    let asked = format!("asked_mib={} workers=2 there_mib=", 2 * (kib / 2 + (1 << 20)) / 1024);
    assert!(lines.len() == 1 && lines[0].contains(&asked), "{asked} {lines:?}");
    assert_eq!(Server::start(&[]).said(told), [""; 0]);
}

#[test]
fn kv_memory_that_is_smaller_than_one_context_is_told_at_the_start() {
    let told = "KV memory is smaller than one context";
    let server = Server::start(&["--mixed", "--kv-memory", "1MiB", "--max-model-len", "512"]);
    let tokens = server.get("/server_info").ok()["max_total_tokens"].as_u64().unwrap();
    assert_eq!(server.said(told).len(), usize::from(tokens < 512), "{tokens} tokens");
    let server = Server::start_long(&["--mixed", "--kv-memory", "1MiB"]);
    assert_eq!(server.said(told).len(), 1);
}

/// Without key or certificate files there is nothing to read again.
#[test]
fn sighup_ends_a_process_without_files_to_reload() {
    let mut server = Server::start(&["--mixed"]);
    server.signal("HUP");
    assert_eq!(server.wait().signal(), Some(1));
}

/// The drain waits for a client that keeps its connection. Ending that wait cuts off no request.
#[test]
fn a_second_signal_while_nothing_runs_is_a_drain() {
    let mut server = Server::start(&[]);
    server.check_works();
    let mut idle = server.connect();
    idle.send(Method::Get, "/health", &[], None);
    assert_eq!(idle.reply(Method::Get).status(), 200);
    server.signal("TERM");
    wait_until_draining(&server);
    server.signal("TERM");
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
fn wrong_usage_is_told_with_status_2() {
    let model = fixture("llama-f32");
    let model = model.to_str().unwrap();
    for (arguments, named) in [
        (&["serve"][..], "MODEL"),
        (&["serve", model, "--no-such-flag"], "--no-such-flag"),
        (&["serve", model, "--page-size", "3"], "page-size"),
        (&["serve", model, "--mixed", "--decode-workers", "2"], "mixed"),
        (&["serve", model, "--transfer", "rdma"], "rdma"),
        (&["serve", model, "--port", "65536"], "65536"),
        (&["nonsense"], "nonsense"),
    ] {
        let (code, text) = output(arguments);
        assert_eq!(code, Some(2), "{arguments:?}: {text}");
        assert!(text.contains(named), "{arguments:?}: {text}");
    }
}

#[test]
fn a_failed_start_gives_its_reason_in_one_line() {
    let occupied = Server::start(&[]);
    let port = occupied.address.port().to_string();
    let model = fixture("llama-f32");
    let model = model.to_str().unwrap();
    let empty = std::env::temp_dir().join(format!("baton-empty-{}", std::process::id()));
    std::fs::create_dir(&empty).unwrap();
    let garbage = empty.join("garbage.gguf");
    std::fs::write(&garbage, [7; 100]).unwrap();
    let cut = empty.join("cut.gguf");
    let whole = std::fs::read(fixture("llama.Q8_0.gguf")).unwrap();
    std::fs::write(&cut, &whole[..whole.len() / 2]).unwrap();
    for (path, flags, named) in [
        ("/no/such/model.gguf", &["--port", "0"][..], "/no/such/model.gguf"),
        (empty.to_str().unwrap(), &["--port", "0"], "config.json"),
        (garbage.to_str().unwrap(), &["--port", "0"], "garbage.gguf"),
        (cut.to_str().unwrap(), &["--port", "0"], "cut.gguf"),
        (model, &["--port", &port], "listen"),
        (model, &["--max-model-len", "4096", "--port", "0"], "--max-model-len"),
    ] {
        let arguments = [&["serve", path][..], flags].concat();
        let (code, text) = output(&arguments);
        // A taken port can be free at the next try.
        let status = if named == "listen" { 1 } else { 2 };
        assert_eq!(code, Some(status), "{arguments:?}: {text}");
        let errors: Vec<&str> = text.lines().filter(|line| line.starts_with("error: ")).collect();
        assert!(errors.len() == 1 && errors[0].contains(named), "{arguments:?}: {text}");
        assert!(!text.contains("panicked"), "{text}");
    }
    std::fs::remove_dir_all(&empty).unwrap();
}

/// Status 2 means: an argument, or a file that it names, cannot be used, whenever that is found.
#[test]
fn a_file_that_is_not_there_has_the_status_of_wrong_usage() {
    const NOWHERE: &str = "/nowhere/at.all";
    let model = fixture("llama-f32");
    let model = model.to_str().unwrap();
    let common = ["--port", "0", "--kv-memory", "8MiB", "--threads", "1"];
    let worker = |more: &[&'static str]| [&["serve", model][..], &common, more].concat();
    for line in [
        vec!["serve", NOWHERE, "--port", "0"],
        worker(&["--api-key-file", NOWHERE]),
        worker(&["--admin-key-file", NOWHERE]),
        worker(&["--tls-cert-file", NOWHERE, "--tls-key-file", NOWHERE]),
        vec!["router", "--port", "0", "--tls-ca-file", NOWHERE],
        vec!["router", "--port", "0", "--cluster-key-file", NOWHERE],
        vec!["drain", "https://127.0.0.1:1", "--tls-ca-file", NOWHERE],
        vec!["drain", "http://127.0.0.1:1", "--api-key-file", NOWHERE],
        vec!["drain", "http://127.0.0.1:1", "--admin-key-file", NOWHERE],
        vec!["sim", "--load", "--trace-file", NOWHERE],
    ] {
        let (status, said) = output(&line);
        assert!(status == Some(2) && said.contains(NOWHERE), "{line:?}: {status:?} {said}");
    }
}
